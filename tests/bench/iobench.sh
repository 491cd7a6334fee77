#!/bin/sh
# calypte iobench held against fio: io_uring, O_DIRECT, the same files, size of reads and bytes in flight, both into huge pages and both
# into pages of 4 KiB; a run of the one after a run of the other.
#
#   iobench.sh CALYPTE DIR|MODEL [ROUNDS] [SECONDS]       BLOCKS="1M 2M" DEPTHS="32M" MEMORY="huge small": what is compared
#
# DIR: a container of 5 GB is made in it first and removed. Needs fio and jq. Says both figures of each round and the ratio of the best
# ones, which shall be at least 0.97.
set -eu
calypte=$1 model=$2 rounds=${3:-5} seconds=${4:-2}
scratch=$(mktemp -d "${TMPDIR:-/tmp}/calypte-iobench.XXXXXX")
made=
trap 'rm -rf "$scratch" $made' EXIT
trap 'exit 130' INT TERM # so that the other trap runs

if [ ! -f "$model/calypte.json" ]; then
    made=$(mktemp -d "$model/calypte-iobench.XXXXXX")
    "$calypte" synth "$made/model" --like glm-5.2 --layers 5 --dense 1 --experts 64
    model=$made/model
fi
files=$(ls "$model"/experts-*.safetensors | tr '\n' ':')

for memory in ${MEMORY:-huge small}; do
    huge=0
    [ "$memory" = small ] || huge=1
    for block in ${BLOCKS:-512K 1M 2M 4M}; do
        for depth in ${DEPTHS:-16M 32M 64M}; do
            : >"$scratch/ours"
            : >"$scratch/fio"
            for round in $(seq "$rounds"); do
                "$calypte" iobench "$model" --block $block --depth $depth --memory $memory --runs 1 --seconds "$seconds" --json >"$scratch/json"
                read_bytes=$(jq .read_bytes "$scratch/json")
                in_flight=$(jq '(.depth / .read_bytes) | floor' "$scratch/json")
                jq .gbps "$scratch/json" >>"$scratch/ours"
                # glibc then asks for huge pages for fio's buffers
                GLIBC_TUNABLES=glibc.malloc.hugetlb=$huge fio --name=reads --readonly --filename="${files%:}" --rw=randread \
                    --bs="$read_bytes" --iodepth="$in_flight" --ioengine=io_uring --direct=1 --time_based --ramp_time=200ms \
                    --runtime="$seconds" --output-format=json >"$scratch/json"
                jq '.jobs[0].read.bw_bytes / 1e9' "$scratch/json" >>"$scratch/fio"
            done
            paste "$scratch/ours" "$scratch/fio" | awk -v setting="$memory $block $depth" '
                { ours = $1 > ours ? $1 : ours; fio = $2 > fio ? $2 : fio; line = line sprintf("  %.3f/%.3f", $1, $2) }
                END { printf "%-14s iobench %.3f GB/s, fio %.3f GB/s: %.3f  (rounds:%s)\n", setting, ours, fio, ours / fio, line }'
        done
    done
done
