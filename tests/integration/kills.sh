# kill -9 of each process in turn, during an answer: that request ends with one line or completes, the next one is right, nothing
# leaks. kills.sh [TIMES]: of each process (default 20).
. "$CALYPTE_TESTS/integration/common.sh"

times=${CALYPTE_KILLS:-20}
QUESTION="What is a bird?"
LONG="And it came to pass in those days"
folder=$CALYPTE_RUNTIME_DIR/$NAME

# A pool of top_k experts: iod has reads in flight at any moment.
calypte up "$CALYPTE_MODEL" -n "$NAME" --workers 2 --pool 262144 >/dev/null
answer=$(calypte run -n "$NAME" "$QUESTION")
[ -n "$answer" ] || fail "no answer"
leader=$(cat "$folder/supervisor.pid")

# What must be the same after each death.
inventory() {
    ls /dev/shm | grep -F "calypte.$NAME." || true
    ls "$folder"
    pgrep -f -- "--instance $NAME --rundir" | wc -l
    ls "/proc/$leader/fd" | wc -l
}
inventory >"$SCRATCH/inventory"

completed=0
for process in calypte-iod calypte-worker-0 calypte-worker-1 calypte-front; do
    note "$process, $times times"
    i=0
    while [ $i -lt "$times" ]; do
        i=$((i + 1))
        : >"$SCRATCH/out"
        calypte run -n "$NAME" --raw "$LONG" --max-tokens 400 >"$SCRATCH/out" 2>"$SCRATCH/err" &
        client=$!
        tries=1000
        until [ -s "$SCRATCH/out" ]; do
            tries=$((tries - 1))
            [ $tries -gt 0 ] || fail "no answer begins: $(cat "$SCRATCH/err")"
            sleep 0.01
        done
        # Somewhere in the answer, not always at its beginning.
        sleep "0.0$((i % 10))"
        kill -9 "$(cat "$folder/$process.pid")"
        got=0
        wait $client || got=$?
        case $got in
            0) completed=$((completed + 1)) ;;
            1) [ "$(grep -c . "$SCRATCH/err")" = 1 ] || fail "$process: the client said $(cat "$SCRATCH/err")" ;;
            *) fail "$process: the client ended with $got" ;;
        esac
        next=$(calypte run -n "$NAME" "$QUESTION") || fail "$process: the next request failed"
        [ "$next" = "$answer" ] || fail "$process: the next answer: $next"
        inventory >"$SCRATCH/now"
        cmp -s "$SCRATCH/inventory" "$SCRATCH/now" || fail "$process: leaks: $(diff "$SCRATCH/inventory" "$SCRATCH/now")"
    done
done
note "$completed of $((4 * times)) answers were complete all the same"

calypte status -n "$NAME" --json >"$SCRATCH/status"
[ "$(json "$SCRATCH/status" .pool.pinned)" = 0 ] || fail "pins are left: $(json "$SCRATCH/status" .pool)"
[ "$(json "$SCRATCH/status" '[.processes[].restarts] | join(" ")')" = "0 $times $times $times $times" ] ||
    fail "restarts: $(json "$SCRATCH/status" '[.processes[].restarts]')"
calypte down -n "$NAME"
expect_nothing_left "$NAME"
