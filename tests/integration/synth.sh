# calypte synth as a user meets it: the same seed gives the same bytes, the model runs, its router spreads, nonsense is refused.
. "$CALYPTE_TESTS/integration/common.sh"

LIKE="$CALYPTE_TESTS/model/config.json"

sums() { (cd "$1" && find . -type f | LC_ALL=C sort | xargs sha256sum); }
make() {
    folder=$1
    shift
    calypte synth "$SCRATCH/$folder" --like "$LIKE" --mtp "$@" 2>"$SCRATCH/stderr" || fail "synth: $(cat "$SCRATCH/stderr")"
    sums "$SCRATCH/$folder" >"$SCRATCH/$folder.sums"
}

note "a seed is a container"
make first --seed 7 --jobs 1
make again --seed 7 --jobs 2
make other --seed 8
cmp -s "$SCRATCH/first.sums" "$SCRATCH/again.sums" || fail "other bytes from the same seed: $(diff "$SCRATCH/first.sums" "$SCRATCH/again.sums")"
same=$(cut -d ' ' -f 1 "$SCRATCH/first.sums" "$SCRATCH/other.sums" | sort | uniq -d | wc -l)
[ "$same" -eq 0 ] || fail "$same files are the same with another seed"
calypte synth "$SCRATCH/first" --like "$LIKE" --mtp --seed 7 2>&1 | grep -q 'holds this container already' || fail "made again"

note "killed, then finished: the same bytes"
for seconds in 0.02 0.04 0.06 0.08; do
    calypte synth "$SCRATCH/killed" --like "$LIKE" --mtp --seed 7 2>/dev/null &
    pid=$!
    sleep $seconds
    kill -9 $pid 2>/dev/null || true
    wait $pid 2>/dev/null || true
done
make killed --seed 7
cmp -s "$SCRATCH/first.sums" "$SCRATCH/killed.sums" || fail "other bytes: $(diff "$SCRATCH/first.sums" "$SCRATCH/killed.sums")"

note "shapes as asked"
calypte synth "$SCRATCH/shaped" --like "$LIKE" --layers 9 --dense 2 --experts 8 2>/dev/null
calypte info "$SCRATCH/shaped" --json >"$SCRATCH/info.json"
[ "$(json "$SCRATCH/info.json" '.shapes | "\(.layers) \(.moe_layers) \(.mtp_layers) \(.experts)"')" = "9 7 0 8" ] ||
    fail "other shapes: $(cat "$SCRATCH/info.json")"

note "it runs: finite logits, and the router uses the experts"
awk 'BEGIN { for (i = 0; i < 300; i++) print (i * 37 + 11) % 4000 }' >"$SCRATCH/tokens"
expect_line 0 "no tokenizer in the container: requests must give tokens" calypte up "$SCRATCH/first" -n "$NAME"
calypte score -n "$NAME" --tokens "$SCRATCH/tokens" --json >"$SCRATCH/score.json"
# Chance is ln 4096 = 8.3; random logits of unit variance cost half a nat more.
awk -v nll="$(json "$SCRATCH/score.json" .nll)" 'BEGIN { exit !(nll > 8 && nll < 10) }' || fail "nll $(json "$SCRATCH/score.json" .nll)"
calypte status -n "$NAME" --json >"$SCRATCH/status.json"
filled=$(json "$SCRATCH/status.json" .pool.filled)
[ "$filled" -ge 100 ] || fail "300 tokens used $filled of 4 x 32 experts"
calypte score -n "$NAME" --tokens "$SCRATCH/tokens" --logits "$SCRATCH/logits" >/dev/null
[ "$(stat -c %s "$SCRATCH/logits")" -ge $((300 * 4096 * 4)) ] || fail "too few logits"
calypte down -n "$NAME"
calypte score "$SCRATCH/shaped" --tokens "$SCRATCH/tokens" --json >"$SCRATCH/score.json"
awk -v nll="$(json "$SCRATCH/score.json" .nll)" 'BEGIN { exit !(nll > 8 && nll < 10) }' || fail "nll $(json "$SCRATCH/score.json" .nll)"

note "the built-in shapes, also one without shared experts"
calypte synth "$SCRATCH/olmoe" --like olmoe --layers 2 --experts 8 2>/dev/null
calypte info "$SCRATCH/olmoe" --json >"$SCRATCH/info.json"
[ "$(json "$SCRATCH/info.json" '.shapes | "\(.layers) \(.moe_layers) \(.experts)"')" = "2 2 8" ] || fail "other shapes: $(cat "$SCRATCH/info.json")"
calypte score "$SCRATCH/olmoe" --tokens "$SCRATCH/tokens" --json >"$SCRATCH/score.json"
awk -v nll="$(json "$SCRATCH/score.json" .nll)" 'BEGIN { exit !(nll > 10 && nll < 12.5) }' || fail "nll $(json "$SCRATCH/score.json" .nll)" # ln 50304 = 10.8

note "it says what it is, and that it has no tokenizer, before anything is started"
calypte info "$SCRATCH/olmoe" | grep -q '^made of  *random weights like olmoe: synthetic' || fail "info does not say that it is synthetic"
[ "$(json "$SCRATCH/info.json" '"\(.synthetic) \(.stripes | length)"')" = "true 1" ] || fail "not synthetic: $(cat "$SCRATCH/info.json")"
echo text >"$SCRATCH/text"
expect_line 1 'olmoe: the model has no tokenizer: .*--tokens' calypte run "$SCRATCH/olmoe" "What is a river?"
expect_line 1 'olmoe: the model has no tokenizer: .*--tokens' calypte score "$SCRATCH/olmoe" --text "$SCRATCH/text"

note "a tokenizer that cannot be read is there all the same"
ln -s nowhere "$SCRATCH/olmoe/tokenizer.json"
expect_line 1 'olmoe/tokenizer.json: No such file or directory; it is a link to nowhere' calypte run "$SCRATCH/olmoe" "What is a river?"
rm "$SCRATCH/olmoe/tokenizer.json"

note "nonsense is refused, and nothing is left of it"
expect_line 2 '--like.*glm-9.*glm-5.2.*config.json' calypte synth "$SCRATCH/none" --like glm-9
expect_line 1 'num_experts_per_tok is 8 of 4' calypte synth "$SCRATCH/none" --like glm-5.2 --experts 4
expect_line 1 '9 dense layers of 3' calypte synth "$SCRATCH/none" --like glm-5.2 --layers 3 --dense 9
expect_line 1 'none is left with experts' calypte synth "$SCRATCH/none" --like glm-5.2 --layers 2 --dense 2
expect_line 1 'holds another container' calypte synth "$SCRATCH/first" --like "$LIKE" --seed 9
expect_line 2 '\-\-layers.*1 to' calypte synth "$SCRATCH/none" --like glm-5.2 --layers 0
expect_line 2 '\-\-like' calypte synth "$SCRATCH/none"
expect_line 2 'did you mean --seed' calypte synth "$SCRATCH/none" --like glm-5.2 --sed 1
[ ! -e "$SCRATCH/none" ] || fail "a refused command left a folder"
