#!/bin/sh
# Decode with a quarter of the experts in the pool, with tokens that the model chooses (evenly, its weights are random) and with skewed and
# drifting ones (Zipf): the drive beside what it gives alone, the steps beside their parts, with prefetch=on too; and in turn with
# prefetch=auto and without.
#
#   decode-disk.sh FOLDER [PAIRS]     FOLDER: on the drive that is measured, with 25 GB free; programs from the PATH
set -eu
[ $# -ge 1 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
folder=$1
pairs=${2:-10}
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
trap 'exit 130' INT TERM # so that the other trap runs
calypte synth "$folder/probe" --like glm-5.2 --layers 5 --dense 1

run() {
    runs=$1 prefetch=$2
    shift 2
    calypte bench decode "$folder/probe" --context 32 --tokens 48 --runs "$runs" --pool 5200M --set prefetch="$prefetch" --set learning=off --json "$@"
}

# beside NAME PREFETCH FLAG...
beside() {
    name=$1
    shift
    run 4 "$@" | jq -r --arg name "$name" '"\($name): \(.pool.hits) hits, \(.pool.misses) misses; \(.disk.gbps / .disk.iobench_gbps * 100 | round) % of iobench (\(.disk.iobench_gbps) GB/s) while a demand was outstanding; steps \(.steps_s / .disk.expected_steps_s) times their parts"'
}

beside "chosen tokens" off
beside "chosen tokens, prefetch=on" on
beside "Zipf tokens" off --zipf 1
beside "Zipf tokens, prefetch=on" on --zipf 1

[ "$pairs" -gt 0 ] || exit 0
i=0
while [ $i -lt "$pairs" ]; do
    for choice in off auto; do
        run 2 $choice | jq .tokens_per_s >>"$results/speed-$choice"
    done
    i=$((i + 1))
done
# The median of the pairs' quotients.
paste "$results/speed-off" "$results/speed-auto" | awk '{ print $2 / $1 }' | sort -n |
    awk '{ r[NR] = $1 } END { print "prefetch=auto: " (r[int((NR + 1) / 2)] + r[int(NR / 2) + 1]) / 2 " times the speed of prefetch=off, median of " NR " pairs" }'
