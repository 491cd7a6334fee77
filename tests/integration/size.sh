# The pool's size at run time: it shrinks and grows while an answer runs, with the same bits; its memory comes and goes; what cannot
# be is refused; an `auto` pool follows a real control group.
#
# The last part wants CALYPTE_TEST_CGROUP, the folder of a memory control group (version 1 or 2) that this user may write to and that
# holds nothing else: what the tester prepares is used, no group is made here.
. "$CALYPTE_TESTS/integration/common.sh"

SLOT=65536 # bytes of an expert of the bundled model
ALL=160    # its experts

pool() { calypte pool -n "$NAME" --json "$@" >"$SCRATCH/pool"; }

# standing SLOTS: waits until so many slots have memory, and the pool's objects no more than that.
standing() {
    tries=2000 # an `auto` pool is calm for half a minute before it grows
    until pool && [ "$(json "$SCRATCH/pool" .standing)" = "$1" ] && [ "$(memory)" -le $(($1 * SLOT)) ]; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] || fail "not $1 slots, $(memory) bytes: $(cat "$SCRATCH/pool")"
        sleep 0.02
    done
}

# Bytes of memory that the pool's objects have.
memory() {
    sum=0
    for object in /dev/shm/calypte."$NAME".pool.*; do
        sum=$((sum + $(stat -c '%b * 512' "$object")))
    done
    echo $sum
}

score() { calypte score "$CALYPTE_MODEL" --tokens "$SCRATCH/tokens" --logits "$1" --json >/dev/null; }

bits() {
    note "the same bits, whatever the size does meanwhile"
    tr -s ' \n' '\n' <"$CALYPTE_TESTS/oracles/score.tokens" | head -n 1500 >"$SCRATCH/tokens"
    score "$SCRATCH/still"
    calypte up "$CALYPTE_MODEL" -n "$NAME" --workers 2 >/dev/null
    touch "$SCRATCH/moving"
    while [ -e "$SCRATCH/moving" ]; do
        for size in 256K 3M 512K 100% 1000000 auto; do
            calypte pool -n "$NAME" --size $size >/dev/null && echo $size >>"$SCRATCH/changes"
        done
    done &
    changing=$! rounds=0
    : >"$SCRATCH/changes"
    while [ $rounds -lt 2 ] || [ "$(wc -l <"$SCRATCH/changes")" -lt 18 ]; do
        score "$SCRATCH/logits"
        cmp "$SCRATCH/still" "$SCRATCH/logits" || fail "other bits"
        rounds=$((rounds + 1))
        [ $rounds -lt 50 ] || fail "the size does not change: $(cat "$SCRATCH/changes")"
    done
    rm "$SCRATCH/moving"
    wait $changing
    note "   $rounds times, $(wc -l <"$SCRATCH/changes") changes of size"
    standing $ALL
    calypte run -n "$NAME" "What is a bird?" >/dev/null
    pool
    [ "$(json "$SCRATCH/pool" '.hottest | length')" = 10 ] || fail "no hot experts: $(cat "$SCRATCH/pool")"
    [ "$(json "$SCRATCH/pool" 'all(.hottest[]; .layer >= 1 and .layer <= 4 and .expert < 32 + 0 * .used)')" = true ] ||
        fail "hot experts: $(cat "$SCRATCH/pool")"
}

sizes() {
    note "memory comes and goes; a size is kept"
    standing $ALL
    pool --size 512K
    standing 8
    calypte run -n "$NAME" "What is a bird?" >/dev/null
    standing 8
    [ "$(json "$SCRATCH/pool" '[.slots, .auto, .filled] | join(" ")')" = "8 false 8" ] || fail "$(cat "$SCRATCH/pool")"
    [ "$(json "$SCRATCH/pool" '.last_change | "\(.from) \(.to) \(.why)"')" = "160 8 asked to" ] || fail "$(cat "$SCRATCH/pool")"
    calypte pool -n "$NAME" | grep -q '^size  *8 slots of 64.0 KiB stand (512.0 KiB), 8 are wanted' || fail "$(calypte pool -n "$NAME")"
    calypte status -n "$NAME" | grep -q '^changed  *[0-9]* s ago to 8 slots, from 160: asked to' || fail "$(calypte status -n "$NAME")"
    calypte status -n "$NAME" | grep -q '^size  *8 of 8 slots stand, cap 160 by experts, reserve ' || fail "$(calypte status -n "$NAME")"
    pool --size auto
    standing $ALL
    [ "$(json "$SCRATCH/pool" .auto)" = true ] || fail "$(cat "$SCRATCH/pool")"

    note "held experts stay"
    pool --size 1M --hold 2:5 --hold 3:7
    [ "$(json "$SCRATCH/pool" '.held | join(" ")')" = "2:5 3:7" ] || fail "$(cat "$SCRATCH/pool")"
    calypte run -n "$NAME" --raw "And it came to pass" --max-tokens 40 >/dev/null
    pool --release 2:5
    [ "$(json "$SCRATCH/pool" '.held | join(" ")')" = "3:7" ] || fail "$(cat "$SCRATCH/pool")"
    pool --size auto --release all
    [ "$(json "$SCRATCH/pool" '.held | length')" = 0 ] || fail "$(cat "$SCRATCH/pool")"
    expect_line 1 "hold: 4:77: a layer has the experts 0 to" calypte pool -n "$NAME" --hold 4:77
    expect_line 1 "hold: 0:1: layer 0 has no experts" calypte pool -n "$NAME" --hold 0:1
    expect_line 1 "release: 3: LAYER:EXPERT" calypte pool -n "$NAME" --release 3
    set --
    for expert in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19; do
        set -- "$@" --hold 1:$expert --hold 2:$expert --hold 3:$expert --hold 4:$expert
    done
    pool "$@" # half of the pool
    [ "$(json "$SCRATCH/pool" '.held | length')" = $((ALL / 2)) ] || fail "$(cat "$SCRATCH/pool")"
    expect_line 1 "hold: 81 experts .* 160 slots at most half" calypte pool -n "$NAME" --hold 1:20
    pool --size 512K
    standing 8
    calypte pool -n "$NAME" >"$SCRATCH/lines"
    grep -q '^held  *80 asked for, 4 held now' "$SCRATCH/lines" || fail "$(cat "$SCRATCH/lines")"
    pool
    [ "$(json "$SCRATCH/pool" '"\(.held | length) \(.held_now)"')" = "80 4" ] || fail "$(cat "$SCRATCH/pool")"
    pool --release all
    pool --size 512K
    expect_line 1 "hold: 5 experts .* 8 slots at most half" calypte pool -n "$NAME" --hold 1:1 --hold 1:2 --hold 1:3 --hold 1:4 --hold 1:5
    pool --size auto

    note "what cannot be is refused, and changes nothing"
    expect_line 2 "--size foo.*64G.*auto" calypte pool -n "$NAME" --size foo
    expect_line 2 "--size 0" calypte pool -n "$NAME" --size 0
    expect_line 2 "too large.*below 8192P" calypte pool -n "$NAME" --size 18446744073709551615
    expect_line 1 "size=100 holds 0 experts of 64.0 KiB.*at least 256.0 KiB \(--size 262144\)" calypte pool -n "$NAME" --size 100
    expect_line 1 "size=100K holds 1 expert of" calypte pool -n "$NAME" --size 100K
    calypte pool -n "$NAME" --size 100 2>&1 | grep -q bad_request && fail "the code of the refusal is shown"
    expect_line 1 "no instance none" calypte pool -n none
    standing $ALL
    calypte down -n "$NAME"
    expect_nothing_left "$NAME"
}

# In a /dev/shm of 48 MB. The dense weights, the KV pages and the rest take some 26.
small() {
    mount -t tmpfs -o size=48m tmpfs /dev/shm
    calypte up "$CALYPTE_MODEL" -n "$NAME" --pool 256K >/dev/null
    standing 4
    free=$(df --output=avail -B 1 /dev/shm | tail -n 1)
    head -c $((free - 1048576)) /dev/zero >/dev/shm/filler
    expect_line 1 '/dev/shm has .* free: choose a smaller --size' calypte pool -n "$NAME" --size 2M
    standing 4
    pool --size 512K
    standing 8
    pool --size auto
    [ "$(json "$SCRATCH/pool" '.cap_by')" = /dev/shm ] || fail "$(cat "$SCRATCH/pool")"
    rm /dev/shm/filler # there is room: it grows by itself
    standing $ALL
    calypte down -n "$NAME"
}

# available MIB: so much memory is free, says /proc/meminfo, which is a file of ours.
available() { echo "MemAvailable: $(($1 * 1024)) kB" >"$SCRATCH/meminfo"; }

# An `auto` pool follows the free memory. 256 MiB of it are the reserve, some 26 the rest of the instance.
follow_memory() {
    available 286
    mount --bind "$SCRATCH/meminfo" /proc/meminfo
    calypte up "$CALYPTE_MODEL" -n "$NAME" >"$SCRATCH/up"
    available 257 # the instance has taken the rest
    grep -q "auto, 256.0 MiB of memory stay in reserve" "$SCRATCH/up" || fail "$(cat "$SCRATCH/up")"
    pool
    begun=$(json "$SCRATCH/pool" .slots)
    [ "$begun" -gt 8 ] && [ "$begun" -lt $ALL ] || fail "$(cat "$SCRATCH/pool")"
    standing "$begun"
    available 200 # less than the reserve, more than half of it: nothing happens
    calypte run -n "$NAME" --raw "And it came to pass" --max-tokens 400 >"$SCRATCH/answer" &
    answering=$!
    sleep 6
    standing "$begun"
    available 100
    standing 8
    [ "$(json "$SCRATCH/pool" '[.auto, .cap, .cap_by] | join(" ")')" = "true 8 memory" ] || fail "$(cat "$SCRATCH/pool")"
    wait $answering || fail "the answer ended with $?"
    available 2000
    sleep 6
    standing 8 # not at once: memory that comes and goes does not make it swing
    standing $ALL
    grep -q "shall have 8 slots, not $begun: 100.0 MiB of memory are free, 256.0 MiB are to stay so" \
        "$CALYPTE_RUNTIME_DIR/$NAME/supervisor.log" || fail "$(cat "$CALYPTE_RUNTIME_DIR/$NAME/supervisor.log")"
    calypte down -n "$NAME"
}

follow_group() {
    group=$1
    limit=$group/memory.max
    [ -e "$limit" ] || limit=$group/memory.limit_in_bytes
    current=$group/memory.current
    [ -e "$current" ] || current=$group/memory.usage_in_bytes
    before=$(cat "$limit")
    echo 800M >"$limit"
    sh -c 'echo $$ >"$0/cgroup.procs"; exec "$@"' "$group" calypte up "$CALYPTE_MODEL" -n "$NAME" >/dev/null
    standing $ALL
    [ "$(json "$SCRATCH/pool" .free)" -le $((800 << 20)) ] || fail "the limit was not seen: $(cat "$SCRATCH/pool")"
    note "   the limit falls: the pool shrinks to what a step needs and some, answers go on"
    echo $(($(cat "$current") + (64 << 20))) >"$limit"
    standing 8
    [ "$(json "$SCRATCH/pool" .cap_by)" = "$limit" ] || fail "bounded by $(json "$SCRATCH/pool" .cap_by)"
    calypte run -n "$NAME" "What is a bird?" >/dev/null
    note "   the limit rises: after a while it grows again"
    echo 800M >"$limit"
    tries=120
    until pool && [ "$(json "$SCRATCH/pool" .standing)" = $ALL ]; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] || fail "it does not grow again: $(cat "$SCRATCH/pool")"
        sleep 1
    done
    calypte down -n "$NAME"
    echo "$before" >"$limit" 2>/dev/null || echo -1 >"$limit"
}

case ${1:-all} in
small | follow_memory) $1 ;; # in a mount namespace, see below
all)
    bits
    sizes
    note "a small /dev/shm; free memory that falls and rises"
    if unshare -m mount -t tmpfs tmpfs /dev/shm 2>/dev/null; then
        unshare -m sh "$0" small
        unshare -m sh "$0" follow_memory
    else
        note "   left out: this user may not mount"
    fi
    note "a real control group"
    if [ -w "${CALYPTE_TEST_CGROUP:-/nowhere}/cgroup.procs" ]; then
        follow_group "$CALYPTE_TEST_CGROUP"
    else
        note "   left out: CALYPTE_TEST_CGROUP names no group that this user may write to"
    fi
    ;;
esac
