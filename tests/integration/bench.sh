# calypte bench: the forms of its JSON, figures that hang together, and what is refused. How fast anything is, is no test.
. "$CALYPTE_TESTS/integration/common.sh"

QUICK="--seconds 0.001 --runs 2 --bytes 64"

# expect_json FILE FILTER: jq finds it true.
expect_json() { jq -e "$2" "$1" >/dev/null || fail "not so: $2 in $(cat "$1")"; }

note "memory"
# shellcheck disable=SC2086
calypte bench memory $QUICK --json >"$SCRATCH/memory.json"
expect_json "$SCRATCH/memory.json" '(.cpu | type) == "string" and .threads >= 1 and .read_gbps > 0 and .one_thread_gbps > 0'
expect_json "$SCRATCH/memory.json" '.spread | .min <= .median and .median <= .max and .runs == 2'
# shellcheck disable=SC2086
calypte bench memory $QUICK --threads 1 --cpu-time | grep -q '1 threads .*GB/s' || fail "no line for people"

note "kernels"
# shellcheck disable=SC2086
calypte bench kernels $QUICK --rows 1 --json >"$SCRATCH/kernels.json"
expect_json "$SCRATCH/kernels.json" '(.cpu | type) == "string" and .threads >= 1 and .read_gbps > 0'
expect_json "$SCRATCH/kernels.json" 'all(.results[]; (.name | type) == "string" and (.isa | type) == "string" and .rows == 1 and .n > 0
    and .k > 0 and .gbps > 0 and .gmacs >= 0 and .us > 0 and .limit > 0 and .share > 0 and .spread.min <= .spread.max)'
expect_json "$SCRATCH/kernels.json" '[.results[].name] | contains(["int4_gemv", "int8_gemv", "indexer", "topk", "router"])'
expect_json "$SCRATCH/kernels.json" '[.results[] | select(.name == "int4_gemv") | "\(.n)x\(.k)"] | contains(["6144x2048", "2048x6144"])'
# A product reads what it multiplies: 4 bits and an f16 scale a group make 0.53125 bytes a weight.
expect_json "$SCRATCH/kernels.json" 'all(.results[] | select(.name == "int4_gemv"); .gbps / .gmacs > 0.531 and .gbps / .gmacs < 0.532)'
expect_json "$SCRATCH/kernels.json" 'all(.results[] | select(.name == "int8_gemv"); .gbps / .gmacs > 1.031 and .gbps / .gmacs < 1.032)'
# shellcheck disable=SC2086
calypte bench kernels $QUICK --kernel int4_gemm --rows 16 --isa scalar --json >"$SCRATCH/gemm.json"
expect_json "$SCRATCH/gemm.json" '(.results | length) == 2 and all(.results[]; .isa == "scalar" and .name == "int4_gemm" and .rows == 16)'

# The parts of the steps are their time within 2 %.
sums_up='([.parts[]] | add) as $parts | $parts > 0.98 * .steps_s and $parts < 1.02 * .steps_s'

note "decode"
# shellcheck disable=SC2086
calypte bench decode "$CALYPTE_MODEL" $QUICK --context 100 --tokens 300 --json >"$SCRATCH/decode.json"
expect_json "$SCRATCH/decode.json" '.tokens_per_s > 0 and .limit_tokens_per_s > 0 and .share > 0 and .tokens == 300 and .steps == 300'
expect_json "$SCRATCH/decode.json" '.pool.slots > 0 and .pool.hits + .pool.misses == 300 * 4 * 4 and (.pool.misses == 0) == (.disk.iobench_gbps == null)'
expect_json "$SCRATCH/decode.json" "$sums_up"
expect_json "$SCRATCH/decode.json" '.parts.attention_s > 0 and .parts.indexer_s > 0 and .parts.experts_s > 0 and .parts.head_s > 0'
# A run's time is in steps, messages and the front.
expect_json "$SCRATCH/decode.json" '(.flight_s + .front_s) * .tokens_per_s > 0.8 * .tokens and (.flight_s + .front_s) * .tokens_per_s < 1.02 * .tokens'
# What a token reads is what `info` says of weights, less padding and unused scales, and the keys.
calypte info "$CALYPTE_MODEL" --json >"$SCRATCH/info.json"
total=$(json "$SCRATCH/info.json" .bytes_per_token.total)
expect_json "$SCRATCH/decode.json" ".bytes_per_token > 0.8 * $total and .bytes_per_token < 1.2 * $total"

# Experts that come from the disk: the drive is measured, and what the steps should take is known.
# shellcheck disable=SC2086
calypte bench decode "$CALYPTE_MODEL" $QUICK --context 20 --tokens 60 --pool 4M --json >"$SCRATCH/disk.json"
expect_json "$SCRATCH/disk.json" '.pool.misses > 0 and .disk.bytes > 0 and .disk.demand_s > 0 and .disk.gbps > 0 and .disk.iobench_gbps > 0'
expect_json "$SCRATCH/disk.json" '.disk.expected_steps_s > .steps_s - .parts.wait_s - .parts.experts_s'

# The other tokens of a run are drawn, not chosen: each is a step too, and the often drawn ones find their experts.
# shellcheck disable=SC2086
calypte bench decode "$CALYPTE_MODEL" $QUICK --context 20 --tokens 60 --pool 4M --zipf 2 --json >"$SCRATCH/zipf.json"
expect_json "$SCRATCH/zipf.json" '.zipf == 2 and .steps == 60 and .pool.hits + .pool.misses == 60 * 4 * 4'
[ "$(json "$SCRATCH/zipf.json" .pool.misses)" -lt "$(json "$SCRATCH/disk.json" .pool.misses)" ] || fail "drawn tokens miss more"

note "prefill"
# shellcheck disable=SC2086
calypte bench prefill "$CALYPTE_MODEL" $QUICK --rows 300 --json >"$SCRATCH/prefill.json"
expect_json "$SCRATCH/prefill.json" '.tokens_per_s > 0 and .limit_tokens_per_s > 0 and .rows == 300 and .steps == 1 and .matmul.s > 0'
expect_json "$SCRATCH/prefill.json" "$sums_up"
# shellcheck disable=SC2086
calypte bench prefill "$CALYPTE_MODEL" $QUICK --rows 300 --chunk 100 >"$SCRATCH/prefill.txt"
grep -q '^speed .*tokens/s' "$SCRATCH/prefill.txt" || fail "no line for people: $(cat "$SCRATCH/prefill.txt")"

note "Ctrl-C: while the limits are measured, and while the instance answers"
# interrupt DELAY COMMAND...: a signal after so many seconds ends it within three with 130
interrupt() {
    delay=$1
    shift
    "$@" >"$SCRATCH/interrupted" 2>&1 &
    benching=$!
    sleep "$delay"
    kill -INT $benching || fail "$*: has ended: $(cat "$SCRATCH/interrupted")"
    tries=150
    while kill -0 $benching 2>/dev/null && ! grep -q '^State:.*Z' /proc/$benching/status 2>/dev/null; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] || { kill -KILL $benching; fail "$*: goes on"; }
        sleep 0.02
    done
    got=0
    wait $benching || got=$?
    [ $got -eq 130 ] || fail "$*: exit $got: $(cat "$SCRATCH/interrupted")"
    [ ! -s "$SCRATCH/interrupted" ] || fail "$*: said $(cat "$SCRATCH/interrupted")"
}
# One run of each limit alone takes a minute.
interrupt 0.5 calypte bench decode "$CALYPTE_MODEL" --seconds 60 --bytes 64
interrupt 0.5 calypte bench prefill "$CALYPTE_MODEL" --seconds 60 --bytes 64
# shellcheck disable=SC2086
interrupt 3 calypte bench decode "$CALYPTE_MODEL" $QUICK --context 20 --tokens 400 --runs 60 --pool 1M
expect_no_private_left

note "an answer's timing"
calypte run "$CALYPTE_MODEL" --json --max-tokens 30 "What is a river?" >"$SCRATCH/answer.json"
expect_json "$SCRATCH/answer.json" '.timing | ([.parts[]] | add) as $parts | .steps > 0 and $parts > 0.98 * .steps_s and $parts < 1.02 * .steps_s
    and .steps_s <= .total_s and .matmul_s <= .steps_s and .front_s >= 0'
calypte run "$CALYPTE_MODEL" --stats --max-tokens 30 "What is a river?" 2>&1 >/dev/null | grep -q 'steps of .* attention .* matmul' ||
    fail "--stats does not say where the time went"

note "refused"
expect_line 2 'did you mean kernels' calypte bench kernel
expect_line 2 'unknown' calypte bench kernels --kernel int3_gemv
expect_line 2 'sse9.*one of scalar, ' calypte bench kernels --seconds 0.001 --runs 1 --bytes 64 --isa sse9
expect_line 2 '\-\-runs' calypte bench memory --runs 0
expect_line 1 "$SCRATCH/none: " calypte bench decode "$SCRATCH/none"
expect_line 2 'argument is missing' calypte bench prefill
