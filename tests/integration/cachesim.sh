# calypte cachesim: hits that can be counted by hand, the policies against each other, a trace of a running instance, wrong input.
. "$CALYPTE_TESTS/integration/common.sh"

# at FILE PERCENT POLICY: a hit rate of cachesim's JSON, in hundredths of a percent
at() { jq -r --argjson percent "$2" --arg policy "$3" '.sizes[] | select(.percent == $percent) | .hit_rate[$policy] * 100 | round' "$1"; }

note "counted by hand: A B C A B C in 2 of 4 slots"
{
    echo '{"trace":1,"model":"0123456789abcdef","layers":1,"experts":4,"slots":2}'
    step=0
    for expert in 0 1 2 0 1 2; do
        flags=$((step == 3 ? 1 : 0))
        echo "{\"step\":$step,\"layer\":0,\"rows\":[[$expert,0,$flags]]}"
        step=$((step + 1))
    done
} >"$SCRATCH/abc"
calypte cachesim "$SCRATCH/abc" --sizes 67,100 --json >"$SCRATCH/abc.json"
[ "$(json "$SCRATCH/abc.json" '"\(.steps) \(.layers) \(.experts_used) \(.uses)"')" = "6 1 3 6" ] || fail "$(cat "$SCRATCH/abc.json")"
[ "$(json "$SCRATCH/abc.json" '.traced | "\(.slots) \(.misses)"')" = "2 5" ] || fail "$(cat "$SCRATCH/abc.json")"
[ "$(at "$SCRATCH/abc.json" 67 LRU)" = 0 ] && [ "$(at "$SCRATCH/abc.json" 67 LFU)" = 0 ] || fail "LRU, LFU: $(cat "$SCRATCH/abc.json")"
for policy in LRU LFU "LFU a layer" LFRU Belady; do
    [ "$(at "$SCRATCH/abc.json" 100 "$policy")" = 5000 ] || fail "$policy, all slots: $(cat "$SCRATCH/abc.json")"
done
# B goes for C, because it comes later than A; then A hits, and C once more.
[ "$(at "$SCRATCH/abc.json" 67 Belady)" = 3333 ] || fail "Belady: $(cat "$SCRATCH/abc.json")"
calypte cachesim "$SCRATCH/abc" | grep -q '^the traced pool of 2 slots: 5 misses' || fail "no line of the traced pool"
[ "$(gzip -c "$SCRATCH/abc" | zcat | calypte cachesim /dev/stdin --json | jq .uses)" = 6 ] || fail "not from a pipe"

note "a pool that was resized is not compared; bytes beside percent; layers by the model's own numbers"
{
    echo '{"trace":2,"model":"0123456789abcdef","layers":1,"experts":4,"slots":2,"layer_numbers":[3],"expert_bytes":65536}'
    sed -n 2,4p "$SCRATCH/abc"
    echo '{"slots":160}'
    sed -n 5,7p "$SCRATCH/abc"
} >"$SCRATCH/resized"
calypte cachesim "$SCRATCH/resized" --sizes 100,128K >"$SCRATCH/resized.out"
grep -q 'resized while this was traced (2 to 160 slots): not compared' "$SCRATCH/resized.out" || fail "$(cat "$SCRATCH/resized.out")"
grep -Eq '^ *66.67 % +2 +128.0 KiB ' "$SCRATCH/resized.out" || fail "$(cat "$SCRATCH/resized.out")"
calypte cachesim "$SCRATCH/resized" --sizes 128K --json >"$SCRATCH/resized.json"
[ "$(json "$SCRATCH/resized.json" '"\(.sizes[0].slots) \(.sizes[0].pool_bytes) \(.traced.resized) \(.traced.lfru_misses)"')" = "2 131072 true null" ] || fail "$(cat "$SCRATCH/resized.json")"
expect_line 1 'give --sizes in percent' calypte cachesim "$SCRATCH/abc" --sizes 128K
calypte cachesim "$SCRATCH/abc" | grep -q memory && fail "memory of experts of unknown size"
expect_line 1 'a pool of 0 slots is too small, a layer uses 1 at once: from 33.34 %' calypte cachesim "$SCRATCH/abc" --sizes 100,1

note "what a layer found is in use while its first misses begin to be read"
{
    echo '{"trace":1,"model":"0123456789abcdef","layers":1,"experts":4,"slots":2}'
    # In two slots B goes for C, however warm it is: A is in use. In one, each goes for the next as soon as it has been used.
    echo '{"step":0,"layer":0,"rows":[[0,0,0],[1,1,0]]}'
    echo '{"step":1,"layer":0,"rows":[[1,0,0]]}'
    echo '{"step":2,"layer":0,"rows":[[1,0,0]]}'
    echo '{"step":3,"layer":0,"rows":[[0,0,1],[2,1,0]]}'
    echo '{"step":4,"layer":0,"rows":[[0,0,1]]}'
} >"$SCRATCH/held"
calypte cachesim "$SCRATCH/held" --sizes 34,67 --json >"$SCRATCH/held.json"
for policy in LRU LFU "LFU a layer" LFRU; do
    [ "$(at "$SCRATCH/held.json" 67 "$policy")" = 5714 ] || fail "$policy, 2 slots: $(cat "$SCRATCH/held.json")"
    [ "$(at "$SCRATCH/held.json" 34 "$policy")" = 2857 ] || fail "$policy, 1 slot: $(cat "$SCRATCH/held.json")"
done

note "made-up traces: a seed is a trace; LFRU is above LRU, LFU and LFU a layer at every size, below Belady"
for kind in zipf scan; do
    calypte cachesim --generate $kind --seed 3 --steps 1000 -o "$SCRATCH/$kind"
    calypte cachesim --generate $kind --seed 3 --steps 1000 -o "$SCRATCH/$kind.again"
    calypte cachesim --generate $kind --seed 4 --steps 1000 -o "$SCRATCH/$kind.other"
    cmp -s "$SCRATCH/$kind" "$SCRATCH/$kind.again" || fail "$kind: another trace from the same seed"
    cmp -s "$SCRATCH/$kind" "$SCRATCH/$kind.other" && fail "$kind: the same trace from another seed"
    calypte cachesim "$SCRATCH/$kind" --json >"$SCRATCH/$kind.json"
    [ "$(json "$SCRATCH/$kind.json" '.sizes | length')" = 9 ] || fail "$kind: $(cat "$SCRATCH/$kind.json")"
    jq -e '[.sizes[].hit_rate | .LFRU > .LRU and .LFRU > .LFU and .LFRU > .["LFU a layer"] and .LFRU <= .Belady] | all' \
        "$SCRATCH/$kind.json" >/dev/null || fail "$kind: $(calypte cachesim "$SCRATCH/$kind")"
done

note "fewer slots than layers: a share of the slots is never more than there is, and no policy has more hits than Belady"
calypte cachesim "$SCRATCH/zipf" --sizes 0.5,0.7,1 --json >"$SCRATCH/few.json"
jq -e '[.sizes[] | .hit_rate.Belady as $most | .slots >= 8 and all(.hit_rate[]; . <= $most)] | all' "$SCRATCH/few.json" >/dev/null ||
    fail "$(cat "$SCRATCH/few.json")"

# compare_run POOL PREFETCH: traces a run from its first step. Its misses are those that `status` counts, and no more than the policy's own
# count on this trace: LFRU from an empty pool of as many slots, as many reads at a time as iod has of such small blobs. Half a percent is
# chance: which experts of a layer are through when a read begins differs from run to run, and with that the victims after it.
compare_run() {
    rm -f "$SCRATCH/real"
    calypte up "$CALYPTE_MODEL" -n "$NAME" --pool "$1" --set prefetch="$2" --set learning=off >/dev/null
    calypte trace -n "$NAME" -o "$SCRATCH/real" >"$SCRATCH/trace.out" 2>&1 &
    tracer=$!
    tries=200
    until [ -e "$SCRATCH/real" ]; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] || fail "no trace begins: $(cat "$SCRATCH/trace.out")"
        sleep 0.05
    done
    for word in bird river happy house water music king stone; do
        calypte run -n "$NAME" "What is $word?" >/dev/null
    done
    calypte status -n "$NAME" --json >"$SCRATCH/status.json"
    kill -INT $tracer
    wait $tracer || true
    calypte down -n "$NAME"
    calypte cachesim "$SCRATCH/real" --in-flight 64 --json >"$SCRATCH/real.json"
    jq -e --slurpfile status "$SCRATCH/status.json" '.lost == 0 and .traced.misses == $status[0].pool.misses and .traced.misses > 500' \
        "$SCRATCH/real.json" >/dev/null || fail "status: $(json "$SCRATCH/status.json" .pool), trace: $(cat "$SCRATCH/real.json")"
    jq -e '.traced | .misses * 200 <= .lfru_misses * 201' "$SCRATCH/real.json" >/dev/null ||
        fail "pool of $1, prefetch $2: more misses than its policy has: $(json "$SCRATCH/real.json" .traced)"
}

note "a run misses no more than its policy, within half a percent"
compare_run 3M off
compare_run 2M off
compare_run 2M on

note "a picture"
if command -v gnuplot >/dev/null; then
    calypte cachesim "$SCRATCH/zipf" --plot "$SCRATCH/it's.png" >/dev/null
    [ "$(head -c 4 "$SCRATCH/it's.png" | tail -c 3)" = PNG ] || fail "no PNG"
    ln -s /dev/full "$SCRATCH/full.png"
    expect_line 1 'full.png: cannot write: No space left' calypte cachesim "$SCRATCH/abc" --plot "$SCRATCH/full.png"
    expect_line 1 'none/x.png: cannot write' calypte cachesim "$SCRATCH/abc" --plot "$SCRATCH/none/x.png"
fi
expect_line 2 'must end in .png' calypte cachesim "$SCRATCH/abc" --plot "$SCRATCH/p.pdf"
[ ! -e "$SCRATCH/p.pdf" ] || fail "a picture under a wrong name"
mkdir "$SCRATCH/empty"
expect_line 1 'gnuplot-nox' env PATH="$SCRATCH/empty" "$CALYPTE_BIN/calypte" cachesim "$SCRATCH/abc" --plot "$SCRATCH/x.png"

note "wrong input: one line each"
{
    head -n 1 "$SCRATCH/abc"
    echo '{"step":0,"layer":0,"lost":9223372036854775807,"rows":[[0,0,0]]}'
} >"$SCRATCH/lost"
calypte cachesim "$SCRATCH/lost" --json | grep -q '"lost": 9223372036854775807,' || fail "lost: $(calypte cachesim "$SCRATCH/lost" --json)"
echo '{"step":1,"layer":0,"lost":1,"rows":[[0,0,0]]}' >>"$SCRATCH/lost"
expect_line 1 'lost: more uses are lost' calypte cachesim "$SCRATCH/lost"
# A file that cannot grow (SIGXFSZ ignored: writing fails as on a full disk) is removed, so that the name can be used again.
expect_line 1 'cannot write' sh -c 'trap "" XFSZ; ulimit -f 8; exec calypte cachesim --generate zipf -o "$0"' "$SCRATCH/full"
[ ! -e "$SCRATCH/full" ] || fail "a partial trace is left"
head -n 3 "$SCRATCH/abc" | head -c -5 >"$SCRATCH/cut"
head -n 1 "$SCRATCH/abc" >"$SCRATCH/no-uses"
expect_line 1 'cut: line 3 is cut off' calypte cachesim "$SCRATCH/cut"
expect_line 1 'no uses' calypte cachesim "$SCRATCH/no-uses"
expect_line 1 'not a trace' calypte cachesim "$CALYPTE_MODEL/calypte.json"
expect_line 1 'a folder' calypte cachesim "$SCRATCH"
expect_line 1 'nothere' calypte cachesim "$SCRATCH/nothere"
expect_line 1 'exists' calypte cachesim --generate zipf -o "$SCRATCH/zipf"
expect_line 2 '"101"' calypte cachesim "$SCRATCH/abc" --sizes 10,101
expect_line 2 'zipf or scan' calypte cachesim --generate foo -o "$SCRATCH/foo"
expect_line 2 '-o TRACE' calypte cachesim --generate zipf
expect_line 2 'argument is missing' calypte cachesim
