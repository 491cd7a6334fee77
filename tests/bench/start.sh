#!/bin/sh
# A start with more than 8 GB of dense weights, and then the warm-up by what an earlier session used: each beside what `calypte iobench` gets
# of the same drive into the same kind of memory. O_DIRECT: the page cache has no part in it.
#
#   start.sh FOLDER     on the drive that is measured, with 14 GB free; 20 GB of memory that is free; programs from the PATH and jq
#
# A virtual machine whose host takes back what the guest has freed pays for the first touch of every page, here 10 s for these weights: so nearly
# all memory is touched just before each start, and freed at once. The first line is a start without that.
set -eu
[ $# -eq 1 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
folder=$1
name=bench-start
CALYPTE_RUNTIME_DIR=$(mktemp -d)
export CALYPTE_RUNTIME_DIR XDG_STATE_HOME="$CALYPTE_RUNTIME_DIR/state"
trap 'calypte down -n $name >/dev/null 2>&1 || true; rm -rf "$CALYPTE_RUNTIME_DIR"' EXIT
trap 'exit 130' INT TERM # so that the other trap runs
[ -d "$folder/start" ] || calypte synth "$folder/start" --like glm-5.2 --layers 18 --dense 17

up() { calypte up "$folder/start" -n $name --pool "$1" --context 512 >/dev/null; }
drive() { calypte iobench "$folder/start" --memory pool --block 2M --depth 32M --runs 1 --seconds 2 --json | jq .daemon.gbps; }
mean() { awk "BEGIN { print ($1 + $2) / 2 }"; } # of the drive before and after
# beside WHAT GB SECONDS LIMIT
beside() { awk 'BEGIN { printf "%s: %.2f GB in %.2f s, %.2f GB/s; iobench %.2f GB/s: %.0f %%\n", ARGV[1], ARGV[2], ARGV[3], ARGV[2] / ARGV[3], ARGV[4], ARGV[2] / ARGV[3] * 100 / ARGV[4] }' "$@"; }
touch_memory() { calypte bench memory --bytes 20000 --seconds 0.01 --runs 1 >/dev/null; }

start() {
    limit=$(drive)
    $1
    up 400M
    line=$(sed -n 's/.*dense weights: \([0-9.]*\) GB in \([0-9.]*\) s.*/\1 \2/p' "$CALYPTE_RUNTIME_DIR/$name/calypte-iod.log")
    ms=$(sed -n 's/.*calypte-iod is ready after \([0-9]*\) ms/\1/p' "$CALYPTE_RUNTIME_DIR/$name/supervisor.log")
    calypte down -n $name
    beside "dense weights$2, iod ready after $ms ms" "${line% *}" "${line#* }" "$(mean "$limit" "$(drive)")"
}
start : ", memory not touched before"
start touch_memory ""
start touch_memory ""
start touch_memory ""

# Even tokens use nearly all experts of the one MoE layer; the next start loads them: while the rest of the pool gets its memory, and after that.
# Counted are the looks at which some still wait.
up 5200M
calypte bench decode "$folder/start" --context 32 --tokens 100 --runs 1 --pool 5200M --zipf 0.1 >/dev/null
calypte down -n $name
limit=$(drive)
touch_memory
up 5200M
look() { calypte status -n $name --json | jq -r '"\(now) \(.disk.bytes) \(.pool.standing == .pool.slots) \(.disk.queues.warmups)"'; }
while line=$(look) && [ "${line##* }" != 0 ]; do
    echo "$line"
    sleep 0.05
done >"$CALYPTE_RUNTIME_DIR/looks"
calypte down -n $name
limit=$(mean "$limit" "$(drive)")
for part in false true; do
    awk -v part=$part '$3 == part { if (!n++) { t = $1; b = $2 } T = $1; B = $2 } END { if (n > 1) print (B - b) / 1e9, T - t }' "$CALYPTE_RUNTIME_DIR/looks" | while read -r gb seconds; do
        beside "warm-up, the whole pool stands: $part" "$gb" "$seconds" "$limit"
    done
done
