# calypte trace: its counts are those of `status`, its lines are what the format says, and it ends with the instance, the time or Ctrl-C.
. "$CALYPTE_TESTS/integration/common.sh"

# wait_begun FILE: until the tracer has written the head of its file (it is buffered: the file is there before its first line)
wait_begun() {
    tries=1000
    until [ -e "$1" ]; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] || fail "no trace $1"
        sleep 0.02
    done
}

# expect_trace FILE: every line is a layer, ascending; the counts of the last line of `trace` are those of the lines.
expect_trace() {
    jq -es '.[0] as $head | .[1:] | all(.[]; .layer < $head.layers and (.rows | length) > 0
        and all(.rows[]; .[0] < $head.experts and .[2] < 4)
        and ([.rows[] | .[0:2]] | . == (sort | unique)))' "$1" >/dev/null || fail "lines of $1"
    jq -rs '[.[1:][] | .rows | group_by(.[0])[] | .[0][2] % 2] | "hits \(add), misses \(length - add)"' "$1" >"$SCRATCH/counts"
    grep -qF "($(cat "$SCRATCH/counts"))" "$2" || fail "the lines have $(cat "$SCRATCH/counts"), trace said $(cat "$2")"
}

note "a run from its first step to the instance's end"
calypte up "$CALYPTE_MODEL" -n "$NAME" --pool 3M --set prefetch=on >/dev/null
calypte trace -n "$NAME" -o "$SCRATCH/trace" >"$SCRATCH/said" &
tracer=$!
wait_begun "$SCRATCH/trace"
calypte run -n "$NAME" --stats "What is a bird?" >"$SCRATCH/answer" 2>"$SCRATCH/stats"
calypte run -n "$NAME" --raw --max-tokens 30 "And it came to pass in those days, that there went out a decree" >/dev/null
calypte status -n "$NAME" --json >"$SCRATCH/status"
calypte status -n "$NAME" >"$SCRATCH/text"
calypte down -n "$NAME"
wait "$tracer"
expect_trace "$SCRATCH/trace" "$SCRATCH/said"
grep -q ", uses lost 0$" "$SCRATCH/said" || fail "lost some: $(cat "$SCRATCH/said")"
[ "$(cat "$SCRATCH/counts")" = "$(json "$SCRATCH/status" '.pool | "hits \(.hits), misses \(.misses)"')" ] ||
    fail "trace has $(cat "$SCRATCH/counts"), status $(json "$SCRATCH/status" '.pool | "\(.hits) \(.misses)"')"
json "$SCRATCH/status" '.pool | .hits == ([.layers[].hits] | add) and .misses == ([.layers[].misses] | add)' | grep -qx true ||
    fail "the layers do not add up: $(json "$SCRATCH/status" .pool)"
# Prompts have flag 2, answers have not.
jq -es '[.[1:][] | .rows[][2] >= 2] | any and (all | not)' "$SCRATCH/trace" >/dev/null || fail "prompts and answers look alike"

note "looking ahead is told of"
json "$SCRATCH/status" '.pool.lookahead | .on and .asked > 0 and .used > 0 and .used <= .asked and .ready <= .used' | grep -qx true ||
    fail "$(json "$SCRATCH/status" .pool.lookahead)"
grep -Eq '^lookahead on, asked [1-9]' "$SCRATCH/text" || fail "status said: $(cat "$SCRATCH/text")"
grep -Eq '^layers    hit rate from [0-9.]+ %' "$SCRATCH/text" || fail "status said: $(cat "$SCRATCH/text")"
grep -Eq '^lookahead asked for [1-9]' "$SCRATCH/stats" || fail "run --stats said: $(cat "$SCRATCH/stats")"
grep -q "^A bird is warm-blooded" "$SCRATCH/answer" || fail "answered: $(cat "$SCRATCH/answer")"

note "until the time is over, or a signal comes; a trace of nothing is one"
calypte up "$CALYPTE_MODEL" -n "$NAME" --set prefetch=off >/dev/null
calypte trace -n "$NAME" -o "$SCRATCH/short" --seconds 0.1 >"$SCRATCH/said"
grep -q "^$SCRATCH/short: 0 layers of steps, 0 experts wanted (hits 0, misses 0), 0 uses by their rows, uses lost 0$" "$SCRATCH/said" || fail "$(cat "$SCRATCH/said")"
[ "$(jq -r '"\(.layers) \(.experts)"' "$SCRATCH/short")" = "5 32" ] || fail "$(cat "$SCRATCH/short")"
calypte trace -n "$NAME" -o "$SCRATCH/cut" >"$SCRATCH/said" &
tracer=$!
wait_begun "$SCRATCH/cut"
calypte run -n "$NAME" "What is a bird?" >/dev/null
kill -INT "$tracer"
wait "$tracer"
expect_trace "$SCRATCH/cut" "$SCRATCH/said"
calypte status -n "$NAME" | grep -q "^lookahead" && fail "it looks ahead with prefetch=off"

note "refusals"
expect_line 2 "-o FILE" calypte trace -n "$NAME"
expect_line 2 "--seconds" calypte trace -n "$NAME" -o "$SCRATCH/x" --seconds 0
expect_line 1 "cut.*exists" calypte trace -n "$NAME" -o "$SCRATCH/cut"
calypte down -n "$NAME"
expect_line 1 "$NAME" calypte trace -n "$NAME" -o "$SCRATCH/x"
[ ! -e "$SCRATCH/x" ] || fail "a trace of nobody"
expect_nothing_left "$NAME"
