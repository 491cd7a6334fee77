# calypte iobench: on a container and in a folder, the forms of its JSON, and what is refused. How fast a drive is, is no test.
. "$CALYPTE_TESTS/integration/common.sh"

QUICK="--seconds 0.02 --runs 2"
mkdir "$SCRATCH/drive"

# expect_json FILTER: jq finds it true of $SCRATCH/json.
expect_json() { jq -e "$1" "$SCRATCH/json" >/dev/null || fail "not so: $1 in $(cat "$SCRATCH/json")"; }

form='(.gbps > 0) and .block >= 4096 and .depth >= 4096 and .read_bytes > 0 and .read_bytes % 4096 == 0 and .read_bytes <= .block
    and .spread.runs == 2 and .spread.min <= .spread.max and .spread.max == .gbps and .latency.reads > 0
    and .latency.p50_ms > 0 and .latency.p50_ms <= .latency.p99_ms and .latency.p99_ms <= .latency.max_ms'

note "a file in a folder, which is gone afterwards"
# shellcheck disable=SC2086
calypte iobench "$SCRATCH/drive" --size 100M $QUICK --json >"$SCRATCH/json" 2>"$SCRATCH/stderr"
expect_json "($form) and (.direct | type) == \"boolean\" and (.daemon | $form) and all(.all[]; $form)"
expect_json '.blob_bytes == 20054016 and .bytes == 5 * 20054016 and .gbps == ([.all[].gbps] | max)'
expect_json '[.all[] | select(.memory != "pool") | [.block, .depth, .memory]] | length == 32 and length == (unique | length)'
expect_json '.daemon.block == 2097152 and .daemon.depth == 33554432 and .daemon.memory == "pool"'
# What flies at once, and for how long, is what comes a second (Little): no read can be as fast as the drive is without it.
expect_json 'all(.all[] | select(.depth == 67108864 and .latency.reads > 64); .latency.p50_ms > 1)'
grep -q 'only 100 MB are read' "$SCRATCH/stderr" || fail "does not warn: $(cat "$SCRATCH/stderr")"
[ -z "$(ls -A "$SCRATCH/drive")" ] || fail "left: $(ls -A "$SCRATCH/drive")"

note "a container, by both methods"
for method in uring pread; do
    # shellcheck disable=SC2086
    calypte iobench "$CALYPTE_MODEL" --set io=$method $QUICK --json >"$SCRATCH/json" 2>/dev/null
    expect_json "($form) and .method == \"$method\" and .blob_bytes == 8 * $(jq .slice_bytes "$CALYPTE_MODEL/calypte.json")"
    expect_json '.bytes == 160 * .blob_bytes'
done
# shellcheck disable=SC2086
calypte iobench "$CALYPTE_MODEL" $QUICK --block 64K --depth 1M --memory small >"$SCRATCH/table" 2>/dev/null
grep -Eq '^best +0\.06 +1\.0 +small' "$SCRATCH/table" || fail "$(cat "$SCRATCH/table")"

note "--buffered says what it measures"
# shellcheck disable=SC2086
calypte iobench "$CALYPTE_MODEL" $QUICK --buffered --depth 8M --json >"$SCRATCH/json" 2>"$SCRATCH/stderr"
expect_json '.direct == false and .gbps > 0'
grep -q 'page cache' "$SCRATCH/stderr" || fail "does not warn: $(cat "$SCRATCH/stderr")"

note "what is refused"
expect_line 1 'does not fit, .* GB are free; choose fewer with --size' calypte iobench "$SCRATCH/drive" --size 900T
expect_line 1 '/no/such.*No such file' calypte iobench /no/such
ln -s /no/such "$SCRATCH/drive/calypte.json"
expect_line 1 'holds no calypte.json' calypte iobench "$SCRATCH/drive"
rm "$SCRATCH/drive/calypte.json"
expect_line 2 'block cannot be "1"' calypte iobench "$SCRATCH/drive" --block 1
expect_line 2 'depth cannot be "deep"' calypte iobench "$SCRATCH/drive" --depth deep
expect_line 2 'memory cannot be "large": it is huge, small or pool' calypte iobench "$SCRATCH/drive" --memory large
expect_line 2 '--sise, did you mean --size' calypte iobench "$SCRATCH/drive" --sise 3
[ -z "$(ls -A "$SCRATCH/drive")" ] || fail "left: $(ls -A "$SCRATCH/drive")"
! ls /dev/shm | grep -F "calypte.iobench-" || fail "left in /dev/shm"
