#!/bin/sh
# A start with more than 8 GB of dense weights, and then the warm-up by what an earlier session used: each beside what `calypte iobench` gets
# of the same drive into the same kind of memory. O_DIRECT: the page cache has no part in it.
#
#   start.sh FOLDER     on the drive that is measured, with 31 GB free; 20 GB of /dev/shm; programs from the PATH
set -eu
[ $# -eq 1 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
folder=$1
name=bench-start
CALYPTE_RUNTIME_DIR=$(mktemp -d)
export CALYPTE_RUNTIME_DIR XDG_STATE_HOME="$CALYPTE_RUNTIME_DIR/state"
trap 'calypte down -n $name >/dev/null 2>&1 || true; rm -rf "$CALYPTE_RUNTIME_DIR"' EXIT
[ -d "$folder/start" ] || calypte synth "$folder/start" --like glm-5.2 --layers 18 --dense 17

status() { calypte status -n $name --json | jq "$1"; }
up() { calypte up "$folder/start" -n $name --pool "$1" --context 512 >/dev/null; }
drive() { calypte iobench "$folder/start" --block 2M --depth 32M --runs 3 --json | jq '.daemon.gbps'; }
beside() { awk -v what="$1" -v bytes="$2" -v s="$3" -v drive="$4" 'BEGIN { printf "%s: %.2f GB in %.2f s, %.2f GB/s; iobench %.2f GB/s: %.0f %%\n", what, bytes / 1e9, s, bytes / s / 1e9, drive, bytes / s / 1e7 / drive }'; }

for run in 1 2 3; do
    limit=$(drive)
    up 400M
    ms=$(sed -n 's/.*calypte-iod is ready after \([0-9]*\) ms/\1/p' "$CALYPTE_RUNTIME_DIR/$name/supervisor.log")
    beside "dense weights, run $run" "$(status .disk.dense_bytes)" "$(awk "BEGIN { print $ms / 1000 }")" "$limit"
    calypte down -n $name
done

# An answer of many tokens uses most experts of the one MoE layer; the next start loads them.
up 5G
calypte bench decode "$folder/start" --context 32 --tokens 200 --runs 1 --pool 5G >/dev/null
calypte down -n $name
limit=$(drive)
up 5G
begun=$(date +%s%N)
first=$(status .disk.bytes)
last=$first
while sleep 0.1 && now=$(status .disk.bytes) && [ "$now" != "$last" ]; do
    last=$now
    ended=$(date +%s%N)
done
beside warm-up "$((last - first))" "$(awk "BEGIN { print ($ended - $begun) / 1e9 }")" "$limit"
