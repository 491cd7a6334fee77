# An instance comes, answers, goes, and leaves nothing: lifecycle.sh cycle | private | refusals | supervisor | idle | command-line
. "$CALYPTE_TESTS/integration/common.sh"

QUESTION="What is a bird?"
ANSWER="A bird is warm-blooded egg-laying vertebrates characterized by feathers and forelimbs modified as wings."
LONG="And it came to pass in those days"
SMALL=262144 # a pool of top_k experts: every token reads from disk, so that an answer takes its time

# pids FOLDER: of the processes of an instance
pids() { cat "$1"/*.pid; }

# wait_gone SECONDS PID...: until none of the processes is there any more (a zombie counts as gone)
wait_gone() {
    tries=$(($1 * 50 + 1))
    shift
    for pid in "$@"; do
        while [ -e "/proc/$pid" ] && ! grep -q '^State:.*Z' "/proc/$pid/status" 2>/dev/null; do
            tries=$((tries - 1))
            [ $tries -gt 0 ] || fail "process $pid is still there"
            sleep 0.02
        done
    done
}

# wait_for COMMAND...: until it succeeds, at most 20 s
wait_for() {
    tries=1000
    until "$@"; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] || fail "in vain: $*"
        sleep 0.02
    done
}

ask() { # [ARGUMENTS...]: the right answer comes
    got=$(calypte run "$@" "$QUESTION")
    [ "$got" = "$ANSWER" ] || fail "answered: $got"
}

up() { calypte up "$CALYPTE_MODEL" -n "$NAME" "$@" >"$SCRATCH/up"; }

nothing_left() {
    expect_nothing_left "$NAME"
    [ -z "$(ls -A "$CALYPTE_RUNTIME_DIR" 2>/dev/null)" ] || fail "left: $(find "$CALYPTE_RUNTIME_DIR")"
}

cycle() {
    note "up, status, answers, down"
    up --workers 2 --threads 1
    grep -q "instance $NAME is up" "$SCRATCH/up" || fail "up said: $(cat "$SCRATCH/up")"
    folder=$CALYPTE_RUNTIME_DIR/$NAME
    [ "$(stat -c %a "$folder")" = 700 ] || fail "folder mode $(stat -c %a "$folder")"
    [ -z "$(find /dev/shm -name "calypte.$NAME.*" ! -perm 600)" ] || fail "shared memory that others may read"
    calypte status -n "$NAME" >"$SCRATCH/text"
    grep -q serving "$SCRATCH/text" || fail "$(cat "$SCRATCH/text")"
    calypte status -n "$NAME" --json >"$SCRATCH/status"
    [ "$(json "$SCRATCH/status" '[.processes[].name] | join(" ")')" = \
        "calypte-supervisor calypte-iod calypte-worker calypte-worker calypte-front" ] || fail "$(cat "$SCRATCH/status")"
    json "$SCRATCH/status" '.processes[] | "\(.pid) \(.name)"' >"$SCRATCH/processes"
    while read -r pid name; do
        [ "$(basename "$(readlink "/proc/$pid/exe")")" = "$name" ] || fail "process $pid is not $name"
    done <"$SCRATCH/processes"
    json "$SCRATCH/status" '.processes[] | select(.node == null or (.cores | length) == 0 | not) | .restarts' >"$SCRATCH/restarts"
    [ "$(sort -u "$SCRATCH/restarts")" = 0 ] || fail "restarts: $(cat "$SCRATCH/restarts")"

    note "two requests at once"
    calypte run -n "$NAME" "$QUESTION" >"$SCRATCH/one" &
    one=$!
    calypte run -n "$NAME" "$QUESTION" >"$SCRATCH/two"
    wait $one
    [ "$(cat "$SCRATCH/one" "$SCRATCH/two" | sort -u)" = "$ANSWER" ] || fail "$(cat "$SCRATCH/one" "$SCRATCH/two")"

    note "run and score with a MODEL use the instance that runs it"
    ask "$CALYPTE_MODEL"
    [ "$(ls "$CALYPTE_RUNTIME_DIR")" = "$NAME" ] || fail "another instance: $(ls "$CALYPTE_RUNTIME_DIR")"
    calypte status -n "$NAME" --json >"$SCRATCH/status"
    [ "$(json "$SCRATCH/status" .requests.answered)" = 3 ] || fail "$(json "$SCRATCH/status" .requests)"

    note "any nng client"
    nngcat --req --dial "ipc://$folder/api.ipc" --ascii \
        --data "{\"op\":\"generate\",\"prompt\":\"$QUESTION\",\"temperature\":0}" >"$SCRATCH/nngcat"
    grep -Fq "$ANSWER" "$SCRATCH/nngcat" || fail "nngcat got $(cat "$SCRATCH/nngcat")"
    nngcat --req --dial "ipc://$folder/supervisor.ipc" --ascii --data '{"op":"nonsense"}' >"$SCRATCH/nngcat"
    grep -q '"ok":false' "$SCRATCH/nngcat" || fail "supervisor said $(cat "$SCRATCH/nngcat")"
    nngcat --req --dial "ipc://$folder/supervisor.ipc" --ascii --data '[[[' >"$SCRATCH/nngcat"
    grep -q '"ok":false' "$SCRATCH/nngcat" || fail "supervisor said $(cat "$SCRATCH/nngcat")"

    all=$(pids "$folder")
    calypte down -n "$NAME"
    wait_gone 0 $all
    nothing_left

    note "--foreground, and a signal"
    for signal in TERM INT; do
        : >"$SCRATCH/log"
        calypte up "$CALYPTE_MODEL" -n "$NAME" --foreground 2>"$SCRATCH/log" &
        supervisor=$!
        wait_for grep -q serving "$SCRATCH/log"
        all=$(pids "$folder")
        ask -n "$NAME"
        kill -$signal $supervisor
        wait $supervisor || fail "the supervisor ended with $? after SIG$signal: $(cat "$SCRATCH/log")"
        wait_gone 5 $all
        nothing_left
    done

    note "more workers than cores"
    up --workers 8 --threads 2
    ask -n "$NAME"
    calypte down -n "$NAME"
    nothing_left
}

private() {
    note "an instance for the occasion"
    ask "$CALYPTE_MODEL"
    calypte run "$CALYPTE_MODEL" --json "$QUESTION" >"$SCRATCH/json"
    [ "$(json "$SCRATCH/json" .text)" = "$ANSWER" ] || fail "$(cat "$SCRATCH/json")"
    [ "$(json "$SCRATCH/json" .finish)" = stop ] || fail "$(cat "$SCRATCH/json")"
    printf '%s\n' "$QUESTION" | calypte run "$CALYPTE_MODEL" - >"$SCRATCH/stdin"
    [ "$(cat "$SCRATCH/stdin")" = "$ANSWER" ] || fail "$(cat "$SCRATCH/stdin")"
    nothing_left
    expect_no_private_left

    for signal in INT TERM HUP KILL; do
        note "SIG$signal during the answer"
        : >"$SCRATCH/out"
        # SIGHUP would stay ignored if this script was started by nohup
        env --default-signal=HUP calypte run "$CALYPTE_MODEL" --pool $SMALL --raw "$LONG" --max-tokens 3000 \
            >"$SCRATCH/out" 2>"$SCRATCH/err" &
        client=$!
        wait_for test -s "$SCRATCH/out"
        all=$(pids "$CALYPTE_RUNTIME_DIR"/run-*)
        kill -$signal $client
        got=0
        wait $client || got=$?
        [ $signal = KILL ] || [ $got = 130 ] || fail "exit $got: $(cat "$SCRATCH/err")"
        [ $signal = KILL ] || nothing_left
        wait_gone 10 $all
        nothing_left
        expect_nothing_left "run-$client."
    done

    note "SIGTERM while it starts"
    for delay in 0.005 0.02 0.04 0.06 0.08; do
        calypte run "$CALYPTE_MODEL" --pool $SMALL --raw "$LONG" --max-tokens 3000 >"$SCRATCH/out" 2>"$SCRATCH/err" &
        client=$!
        sleep $delay
        kill -TERM $client
        got=0
        wait $client || got=$?
        [ $got = 130 ] || [ $got = 143 ] || fail "exit $got: $(cat "$SCRATCH/err")" # 143: before it listens for signals
        expect_nothing_left "run-$client."
        nothing_left
    done

    note "nobody reads the answer"
    calypte run "$CALYPTE_MODEL" --pool $SMALL --raw "$LONG" --max-tokens 3000 2>"$SCRATCH/err" | head -c 1 >/dev/null
    expect_no_private_left
    nothing_left
}

refusals() {
    note "a live name is refused, and the live one is not touched"
    up
    expect_line 1 "instance $NAME is running already.*-n" calypte up "$CALYPTE_MODEL" -n "$NAME"
    ask -n "$NAME"
    note "the same name in another run directory: its shared memory is the same"
    expect_line 1 "instance $NAME runs with the folder $CALYPTE_RUNTIME_DIR" \
        env CALYPTE_RUNTIME_DIR="$SCRATCH/other" calypte up "$CALYPTE_MODEL" -n "$NAME"
    ask -n "$NAME"
    note "its folder was removed beneath it: its processes are not taken for orphans"
    supervisor=$(cat "$CALYPTE_RUNTIME_DIR/$NAME/supervisor.pid")
    rm -r "${CALYPTE_RUNTIME_DIR:?}/$NAME"
    expect_line 1 "instance $NAME still runs, though its folder .* was removed: .*kill $supervisor" calypte up "$CALYPTE_MODEL" -n "$NAME"
    kill "$supervisor"
    wait_gone 20 "$supervisor"
    up
    ask -n "$NAME"
    calypte down -n "$NAME"
    nothing_left
    expect_line 1 "no instance $NAME is running" calypte down -n "$NAME"
    expect_line 1 "no instance $NAME is running" calypte status -n "$NAME"
    expect_line 1 "no instance $NAME is running: .*calypte up" calypte run -n "$NAME" hello

    note "where others run they are named; a running instance has its settings"
    up
    expect_line 1 "no instance other is running .running: $NAME" calypte status -n other
    expect_line 1 "no instance default is running .running: $NAME" calypte down
    expect_line 1 "no instance default is running .running: $NAME.*calypte up" calypte run hello
    expect_line 2 "pool=1M: settings are those of the running instance" calypte run -n "$NAME" --pool 1M hello
    expect_line 2 "threads=1: settings are those of the running instance" calypte score -n "$NAME" --threads 1 --text /dev/null

    note "down during an answer: the client reads that"
    calypte down -n "$NAME"
    up --pool $SMALL
    calypte run -n "$NAME" --raw "$LONG" --max-tokens 3000 >"$SCRATCH/out" 2>"$SCRATCH/err" &
    client=$!
    wait_for test -s "$SCRATCH/out"
    calypte down -n "$NAME"
    ! wait $client || fail "the answer went on"
    grep -q "the instance is stopping" "$SCRATCH/err" || fail "the client: $(cat "$SCRATCH/err")"
    nothing_left

    note "what does not fit, or is wrong, is one line and leaves nothing"
    expect_line 1 "pool=5000 holds 0 experts.*--pool 262144" calypte up "$CALYPTE_MODEL" -n "$NAME" --pool 5000
    expect_line 2 "pool cannot be .1000.; allowed: auto, bytes like 64G.*80%" calypte up "$CALYPTE_MODEL" -n "$NAME" --pool 1000
    expect_line 1 "context=5000.*4096" calypte up "$CALYPTE_MODEL" -n "$NAME" --context 5000
    expect_line 1 "nowhere.*calypte convert" calypte up "$SCRATCH/nowhere" -n "$NAME"
    expect_line 1 "calypte.json" calypte up "$SCRATCH" -n "$NAME"
    expect_line 2 "instance name" calypte up "$CALYPTE_MODEL" -n 'a/b'
    nothing_left

    note "a folder that is open to others"
    mkdir -m 777 -p "$CALYPTE_RUNTIME_DIR/$NAME"
    chmod 777 "$CALYPTE_RUNTIME_DIR/$NAME"
    expect_line 1 "$CALYPTE_RUNTIME_DIR/$NAME is open to other users" calypte up "$CALYPTE_MODEL" -n "$NAME"
    rm -rf "$CALYPTE_RUNTIME_DIR"

    note "a small /dev/shm"
    # Where this user may mount in a namespace of its own (with one of users, if he is not root)
    for unshare in "unshare -m" "unshare -Urm" none; do
        [ "$unshare" = none ] || ! $unshare mount -t tmpfs tmpfs /dev/shm 2>/dev/null || break
    done
    if [ "$unshare" != none ]; then
        # in_tmpfs SIZE COMMAND...: with a /dev/shm of its own of that size
        in_tmpfs='mount -t tmpfs -o size=$0 tmpfs /dev/shm && "$@"; code=$?; ls /dev/shm >&2; exit $code'
        expect_line 1 '/dev/shm has .* free and the instance needs .*KV .*--context.*remount' \
            $unshare sh -c "$in_tmpfs" 64m calypte run "$CALYPTE_MODEL" --slots 64 "$QUESTION"
        expect_line 1 '/dev/shm has .* free and the instance needs' $unshare sh -c "$in_tmpfs" 16m calypte run "$CALYPTE_MODEL" "$QUESTION"
        got=$($unshare sh -c "$in_tmpfs" 28m calypte run "$CALYPTE_MODEL" "$QUESTION") # all but the pool fits: fewer experts
        [ "$got" = "$ANSWER" ] || fail "with 28 MB: $got"
    else
        # The most that the bundled model can ask for is some 575 MB of KV memory.
        free=$(df --output=avail -B 1 /dev/shm | tail -n 1)
        if [ "$free" -lt 500000000 ]; then
            expect_line 1 'free and the instance needs' \
                calypte run "$CALYPTE_MODEL" --context 4096 --slots 64 --set prefill_chunk=4096 "$QUESTION"
        else
            note "   left out: this user may not mount, and $free bytes are too many to run out of"
        fi
    fi
    nothing_left
}

supervisor() {
    note "kill -9 of the supervisor: its children end by themselves"
    for round in 1 2 3; do
        up --workers 2 --pool $SMALL
        folder=$CALYPTE_RUNTIME_DIR/$NAME
        : >"$SCRATCH/out"
        calypte run -n "$NAME" --raw "$LONG" --max-tokens 3000 >"$SCRATCH/out" 2>"$SCRATCH/err" &
        client=$!
        wait_for test -s "$SCRATCH/out"
        all=$(pids "$folder")
        kill -9 "$(cat "$folder/supervisor.pid")"
        got=0
        wait $client || got=$?
        [ $got = 1 ] && [ "$(grep -c . "$SCRATCH/err")" = 1 ] || fail "the client: $got, $(cat "$SCRATCH/err")"
        wait_gone 5 $all
        ended="instance $NAME has ended without .calypte down.: $folder/supervisor.log says why.*calypte down -n $NAME"
        expect_line 1 "$ended" calypte status -n "$NAME"
        expect_line 1 "$ended" calypte run -n "$NAME" Hello
        case $round in
            1) note "the next up cleans"; up; ask -n "$NAME"; calypte down -n "$NAME" ;;
            2) note "or down"; calypte down -n "$NAME" ;;
            3) note "or down --all"; calypte down --all ;;
        esac
        nothing_left
    done

    note "one that cannot be restarted: the instance gives up, with a reason"
    mkdir "$SCRATCH/bin"
    for program in calypte calypte-supervisor calypte-iod calypte-worker calypte-front; do
        cp "$CALYPTE_BIN/$program" "$SCRATCH/bin/"
    done
    "$SCRATCH/bin/calypte" up "$CALYPTE_MODEL" -n "$NAME" >/dev/null
    printf '#!/bin/sh\necho out of order >&2\nexit 3\n' >"$SCRATCH/bin/new"
    chmod +x "$SCRATCH/bin/new"
    mv "$SCRATCH/bin/new" "$SCRATCH/bin/calypte-front"
    leader=$(cat "$CALYPTE_RUNTIME_DIR/$NAME/supervisor.pid")
    kill -9 "$(cat "$CALYPTE_RUNTIME_DIR/$NAME/calypte-front.pid")"
    wait_gone 30 "$leader"
    grep -q "gives up: calypte-front ended with code 3; the last line of its log: out of order" \
        "$CALYPTE_RUNTIME_DIR/$NAME/supervisor.log" || fail "$(cat "$CALYPTE_RUNTIME_DIR/$NAME/supervisor.log")"
    expect_nothing_left "$NAME" # the logs are kept
    expect_line 1 "calypte-front ended with code 3; .*out of order" "$SCRATCH/bin/calypte" up "$CALYPTE_MODEL" -n "$NAME"
    nothing_left
}

# `down` when the supervisor stands still, when it is starting, when it is ending.
stubborn() {
    note "a stopped supervisor is named"
    up
    supervisor=$(cat "$CALYPTE_RUNTIME_DIR/$NAME/supervisor.pid")
    kill -STOP "$supervisor"
    expect_line 1 "kill -9 $supervisor" calypte down -n "$NAME"
    kill -CONT "$supervisor"
    calypte status -n "$NAME" --json >"$SCRATCH/status"
    iod=$(json "$SCRATCH/status" '.processes[] | select(.name == "calypte-iod") | .pid')
    kill -STOP "$iod"
    [ "$(calypte status -n "$NAME" --json | jq -r '.processes[] | select(.state == "stopped") | .name')" = calypte-iod ] || fail "iod is not seen to be stopped"
    kill -CONT "$iod"
    calypte down -n "$NAME"
    nothing_left

    note "up and down at once"
    for delay in 00 01 02 03 05 08 12 20; do
        calypte up "$CALYPTE_MODEL" -n "$NAME" >/dev/null 2>"$SCRATCH/up-error" &
        started=$!
        sleep "0.$delay"
        calypte down -n "$NAME" 2>"$SCRATCH/down-error" || grep -q "no instance" "$SCRATCH/down-error" || fail "down: $(cat "$SCRATCH/down-error")"
        if ! wait $started; then
            grep -q "stopped by" "$SCRATCH/up-error" || fail "up: $(cat "$SCRATCH/up-error")"
        fi
        calypte down -n "$NAME" 2>/dev/null || true
        nothing_left
    done
}

# ticks PID...: CPU time of the processes, in clock ticks
ticks() {
    for pid in "$@"; do sed 's/.*) //' "/proc/$pid/stat"; done | awk '{ sum += $12 + $13 } END { print sum }'
}

idle() {
    note "an idle instance uses no CPU, before and after an answer and after a death"
    up --workers 2
    folder=$CALYPTE_RUNTIME_DIR/$NAME
    for round in new used mended; do
        sleep 1
        all=$(pids "$folder")
        before=$(ticks $all)
        sleep 2
        after=$(ticks $all)
        [ "$before" = "$after" ] || fail "$round: $((after - before)) ticks in 2 s"
        if [ $round = used ]; then
            kill -9 "$(cat "$folder/calypte-worker-1.pid")"
            wait_for grep -q 'serving, epoch 2' "$folder/supervisor.log"
        fi
        ask -n "$NAME"
    done
    calypte down -n "$NAME"
    nothing_left
}

command_line() {
    note "help and usage"
    calypte --help | grep -q 'calypte COMMAND --help' || fail "--help"
    calypte --version | grep -q '^calypte [0-9]' || fail "--version"
    for command in convert info up down status run score tokenize detokenize config; do
        calypte $command --help >"$SCRATCH/help" || fail "$command --help ends with $?"
        grep -q -- "calypte $command" "$SCRATCH/help" || fail "$command --help: $(cat "$SCRATCH/help")"
    done
    expect_line 2 'unknown command statsu.*status' calypte statsu
    expect_line 2 'unknown flag --jsno.*--json' calypte status --jsno
    expect_line 2 'unknown flag --pol.*--pool' calypte up "$CALYPTE_MODEL" --pol 3
    expect_line 2 'unknown flag --keep-pool' calypte down --keep-pool
    expect_line 2 '--max-tokens.*"many"' calypte run --max-tokens many hello
    expect_line 2 '--temperature.*"-1"' calypte run --temperature -1 hello
    expect_line 2 'threads.*abc' calypte run --threads abc hello
    expect_line 2 'activations.*int4.*int8' calypte run --set activations=int4 hello
    expect_line 2 'polo.*pool' calypte config --set polo=3
    expect_line 2 '--stop needs a value' calypte run hello --stop
    expect_line 2 'a prompt is missing' calypte run
    expect_line 2 'a prompt is missing' calypte run "$CALYPTE_MODEL"
    expect_line 2 'quotes' calypte run a b c
    expect_line 2 '--temperature.*"0x10"' calypte run --temperature 0x10 hello
    expect_line 2 '--think.*"hig".*off, on, high, max' calypte run --think hig hello
    expect_line 2 '--isa.*"foo".*scalar' calypte bench kernels --isa foo
    expect_line 2 'unknown command a.b' calypte "a
b"
    for flag in --help --version; do
        expect_line 1 'No space left' sh -c 'calypte "$0" >/dev/full' $flag
        expect_line 1 'cannot write' sh -c 'calypte "$0" >&-' $flag
    done
    expect_line 1 "Hugging Face folder.*calypte convert" calypte up "$CALYPTE_TESTS/model" -n "$NAME"
    expect_line 1 'nope: No such file' calypte info "$SCRATCH/nope"
    expect_line 2 'an argument is missing' calypte up
    expect_line 2 'exactly one of --text' calypte score "$CALYPTE_MODEL"
    printf '1 2 x3\n' >"$SCRATCH/ids"
    expect_line 1 '"x3" at byte 4' calypte run "$CALYPTE_MODEL" --tokens "$SCRATCH/ids"
    printf 'a\377b' >"$SCRATCH/latin"
    expect_line 1 'not UTF-8' calypte score "$CALYPTE_MODEL" --text "$SCRATCH/latin"
    expect_line 1 'no-such-file' calypte score "$CALYPTE_MODEL" --tokens "$SCRATCH/no-such-file"

    note "settings: flag over environment over file"
    printf 'slots = 2\ncontext = 128\nthreads = 1\n' >"$SCRATCH/calypte.conf"
    CALYPTE_CONTEXT=256 CALYPTE_SLOTS=3 calypte config --config "$SCRATCH/calypte.conf" --slots 4 --json >"$SCRATCH/config"
    [ "$(json "$SCRATCH/config" '[.slots.value, .context.value, .threads.value, .pool.value] | join(" ")')" = "4 256 1 auto" ] ||
        fail "$(cat "$SCRATCH/config")"
    [ "$(json "$SCRATCH/config" '[.slots.origin, .context.origin, .pool.origin] | join(" ")')" = "--slots CALYPTE_CONTEXT default" ] ||
        fail "$(cat "$SCRATCH/config")"
    CALYPTE_CONTEXT=128 calypte up "$CALYPTE_MODEL" -n "$NAME" --slots 2 --json >"$SCRATCH/status"
    [ "$(json "$SCRATCH/status" '[.context, .slots] | join(" ")')" = "128 2" ] || fail "$(cat "$SCRATCH/status")"

    note "the flags of run"
    [ "$(calypte run -n "$NAME" "$QUESTION" --max-tokens 2)" = "A bird" ] || fail "--max-tokens"
    [ "$(calypte run -n "$NAME" "$QUESTION" --stop ' egg')" = "A bird is warm-blooded" ] || fail "--stop"
    calypte run -n "$NAME" "$QUESTION" --temperature 1 --seed 7 >"$SCRATCH/one"
    calypte run -n "$NAME" "$QUESTION" --temperature 1 --seed 7 >"$SCRATCH/two"
    cmp "$SCRATCH/one" "$SCRATCH/two" || fail "the same seed, another text"
    calypte run -n "$NAME" "$QUESTION" --stats 2>&1 >/dev/null | grep -Eq 'prompt 11 tokens.*answer 33 tokens.*hit rate.*bytes' || fail "--stats"
    calypte tokenize "$CALYPTE_MODEL" "In the beginning" >"$SCRATCH/ids"
    raw=$(calypte run -n "$NAME" --raw --max-tokens 8 "In the beginning")
    [ "$(calypte run -n "$NAME" --max-tokens 8 --tokens "$SCRATCH/ids")" = "$raw" ] || fail "--tokens is not --raw"
    for output in '>/dev/full' '>&-'; do
        for json in '' --json; do
            expect_line 1 'cannot write the answer' sh -c "calypte run -n $NAME $json hello $output"
        done
        expect_line 1 'cannot write' sh -c "calypte status -n $NAME $output"
    done
    calypte run -n "$NAME" --think on "$QUESTION" >"$SCRATCH/answer" 2>"$SCRATCH/reasoning"
    ! grep -q 'think>' "$SCRATCH/answer" "$SCRATCH/reasoning" || fail "--think: $(cat "$SCRATCH/answer")"
    grep -q bird "$SCRATCH/answer" || fail "--think: $(cat "$SCRATCH/answer")"
    calypte status -n "$NAME" | grep -q '^steps .*waiting for experts [0-9.]* %' || fail "status says nothing of steps"
    calypte status -n "$NAME" --json >"$SCRATCH/status"
    json "$SCRATCH/status" '.steps | .count > 0 and ((.parts | add) / .seconds | . > 0.98 and . < 1.02)' | grep -q true ||
        fail "$(cat "$SCRATCH/status")"
    expect_line 1 'too_long' calypte run -n "$NAME" --raw "$(seq 1 500)"
    expect_line 2 'temperature.*nan' calypte run -n "$NAME" --temperature nan "$QUESTION"
    calypte down -n "$NAME"
    nothing_left
}

case $1 in
    command-line) command_line ;;
    *) "$1" ;;
esac
