# What is remembered of the use of experts: read at the next start, written aside of the model, harmless when damaged.
. "$CALYPTE_TESTS/integration/common.sh"

# A pool of 64 slots for 160 experts.
start() { calypte up "$CALYPTE_MODEL" -n "$NAME" --pool 4M "$@" >/dev/null; }
stop() { calypte down -n "$NAME"; }
ask() { calypte run -n "$NAME" --temperature 0 --stats "What is a river?" 2>"$SCRATCH/stats"; }
status() { calypte status -n "$NAME" --json | jq -r "$1"; }
iod_log() { cat "$CALYPTE_RUNTIME_DIR/$NAME/calypte-iod.log"; }

# warm LEAST: without a question, at least so many experts are loaded.
warm() {
    tries=200
    while [ "$(status .disk.loads)" -lt "$1" ]; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] || fail "$(status .disk.loads) experts are loaded before the first question, want $1"
        sleep 0.05
    done
    [ "$(status '.pool.hits + .pool.misses')" = 0 ] || fail "somebody has asked"
}

# The file changes only by what is appended, so its content tells whether anything was.
content() { sha256sum "$file"; }
written() {
    for pid in $(cat "$CALYPTE_RUNTIME_DIR/$NAME"/*.pid); do
        awk '/^write_bytes/ { print $2 }' "/proc/$pid/io"
    done | awk '{ sum += $1 } END { print sum }'
}

note "a first session leaves a file, not in the model"
find "$CALYPTE_MODEL" -type f -exec sha256sum {} + | sort >"$SCRATCH/before"
start
[ "$(status .disk.loads)" = 0 ] || fail "experts are loaded before anybody has asked"
first=$(ask)
file=$(echo "$XDG_STATE_HOME"/calypte/*.usage)
[ -f "$file" ] || fail "no usage file: $(find "$SCRATCH/state")"
stop
find "$CALYPTE_MODEL" -type f -exec sha256sum {} + | sort | cmp - "$SCRATCH/before" || fail "the model's files have changed"
expect_nothing_left "$NAME"

note "the next one begins with what the first has used, and gives the same answer with fewer misses"
start
warm 40
[ "$(ask)" = "$first" ] || fail "another answer: $(ask), not $first"
hits=$(status .pool.hits) misses=$(status .pool.misses)
[ "$hits" -gt "$misses" ] || fail "$hits hits, $misses misses after a warm start"

note "an answer writes nothing to disk but logs and that file"
before=$(written)
for i in 1 2 3 4 5; do ask >/dev/null; done
after=$(written)
[ $((after - before)) -le 65536 ] || fail "$((after - before)) bytes were written while answering"
stop
after_two=$(content)

note "a private instance, learning=read and learning=off leave the file as it is"
calypte run "$CALYPTE_MODEL" "What is a bird?" >/dev/null
start --set learning=read
warm 40
ask >/dev/null
stop
start --set learning=off
ask >/dev/null
stop
[ "$(content)" = "$after_two" ] || fail "the file has changed"

note "a second instance of the model reads only, and says so; what the first one writes is not forgotten behind its back"
start
calypte up "$CALYPTE_MODEL" -n "$NAME-b" --pool 4M >/dev/null
grep -q "another instance of this model" "$CALYPTE_RUNTIME_DIR/$NAME-b/calypte-iod.log" || fail "no line: $(cat "$CALYPTE_RUNTIME_DIR/$NAME-b/calypte-iod.log")"
[ "$(calypte run -n "$NAME-b" --temperature 0 "What is a river?")" = "$first" ] || fail "another answer"
calypte down -n "$NAME-b"
[ "$(content)" = "$after_two" ] || fail "the second instance has written"
expect_line 1 "running instance of this model.*calypte down" calypte up "$CALYPTE_MODEL" -n "$NAME-b" --forget

note "--forget of an instance that runs already forgets nothing, also where it does not hold the file"
expect_line 1 "is running already" calypte up "$CALYPTE_MODEL" -n "$NAME" --forget
stop
[ "$(content)" = "$after_two" ] || fail "the file has changed"
start --set learning=off
expect_line 1 "is running already" calypte up "$CALYPTE_MODEL" -n "$NAME" --forget
[ "$(content)" = "$after_two" ] || fail "forgotten, though the instance was not started"
stop
start

note "iod killed in between: the next one takes over"
kill -9 "$(cat "$CALYPTE_RUNTIME_DIR/$NAME/calypte-iod.pid")"
tries=100
until [ "$(calypte run -n "$NAME" --temperature 0 "What is a river?" 2>/dev/null)" = "$first" ]; do
    tries=$((tries - 1))
    [ $tries -gt 0 ] || fail "no answer after iod was killed"
    sleep 0.1
done
stop
[ "$(content)" != "$after_two" ] || fail "the new iod has written nothing"

note "a damaged file is set aside, with one line; what is cut off at its end is not even worth that"
dd if=/dev/zero of="$file" bs=1 seek=40 count=8 conv=notrunc status=none
start
[ "$(iod_log | grep -c "$file.damaged")" = 1 ] || fail "not one line: $(iod_log)"
[ -f "$file.damaged" ] || fail "nothing was set aside"
ask >/dev/null
stop
printf 'half a record' >>"$file"
start
warm 1
[ -z "$(iod_log)" ] || fail "said: $(iod_log)"
stop

note "where it cannot be written, one line, and the instance runs"
: >"$SCRATCH/no-folder"
XDG_STATE_HOME="$SCRATCH/no-folder" calypte up "$CALYPTE_MODEL" -n "$NAME" >/dev/null
[ "$(iod_log | grep -c "is not remembered")" = 1 ] || fail "not one line: $(iod_log)"
[ "$(ask)" = "$first" ] || fail "another answer"
stop

note "--forget"
start --forget
sleep 0.3
[ "$(status .disk.loads)" = 0 ] || fail "experts are loaded from a memory that was forgotten"
stop
