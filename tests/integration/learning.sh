# What is remembered of the use of experts: read at the next start, written aside of the model, harmless when damaged.
. "$CALYPTE_TESTS/integration/common.sh"

# A pool of 64 slots for 160 experts.
start() { calypte up "$CALYPTE_MODEL" -n "$NAME" --pool 4M "$@" >/dev/null; }
stop() { calypte down -n "$NAME"; }
ask() { calypte run -n "$NAME" --temperature 0 --stats "What is a river?" 2>"$SCRATCH/stats"; }
status() { calypte status -n "$NAME" --json | jq -r "$1"; }
# What iod has to complain about: the line about its dense weights is in every log.
iod_log() { grep -v "dense weights: " "$CALYPTE_RUNTIME_DIR/$NAME/calypte-iod.log" || true; }

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
# Bytes that all processes of the instance have dirtied on drives, by the kernel's count, which goes by pages.
written() {
    for pid in $(cat "$CALYPTE_RUNTIME_DIR/$NAME"/*.pid); do
        awk '/^write_bytes/ { print $2 }' "/proc/$pid/io"
    done | awk '{ sum += $1 } END { print sum + 0 }'
}

# Bytes of each log and of the usage file.
sizes() { for f in "$CALYPTE_RUNTIME_DIR/$NAME"/*.log "${file:-/none}"; do stat -c '%s' "$f" 2>/dev/null || echo; done; }

# What appending from the sizes in $1 to those in $2 may dirty: of each file that has grown the pages that it has grown by, and
# the two at the ends.
appended() {
    paste "$1" "$2" | awk -F '\t' '$2 > $1 { sum += (int(($2 - $1) / 4096) + 2) * 4096 } END { print sum + 0 }'
}

# Answers that miss write nothing but what is appended to logs and, with learning on, to the usage file.
writes_nothing() {
    if ! cat /proc/$(cat "$CALYPTE_RUNTIME_DIR/$NAME/calypte-iod.pid")/io >/dev/null 2>&1; then
        note "left out: /proc/PID/io cannot be read"
        return
    fi
    [ "$(ls "$CALYPTE_RUNTIME_DIR/$NAME"/*.pid | wc -l)" -ge 4 ] || fail "not every process has a pid file"
    # Files whose next access would be noted, which is a write.
    find "$CALYPTE_MODEL" -name "*.safetensors" -exec touch -a -d 2020-01-01 {} +
    sync -f "$CALYPTE_MODEL"
    sizes >"$SCRATCH/sizes"
    before=$(written) loads=$(status .disk.loads)
    for i in 1 2 3 4 5; do ask >/dev/null; done
    grown=$(($(written) - before)) loads=$(($(status .disk.loads) - loads))
    sizes >"$SCRATCH/sizes.after"
    [ "$loads" -gt 100 ] || fail "only $loads experts were read while answering"
    [ "$grown" -le "$(appended "$SCRATCH/sizes" "$SCRATCH/sizes.after")" ] ||
        fail "$grown bytes were written while answering, $(appended "$SCRATCH/sizes" "$SCRATCH/sizes.after") appended to logs and usage file"
    note "  $loads experts read, $grown bytes written"
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

[ "$(status '.pool.learning.state')" = on ] || fail "$(status .pool.learning)"

note "an answer writes nothing to disk but logs and that file"
writes_nothing
stop
after_two=$(content)

note "a private instance, learning=read and learning=off leave the file as it is"
calypte run "$CALYPTE_MODEL" "What is a bird?" >/dev/null
start --set learning=read
warm 40
[ "$(status '.pool.learning | "\(.state) \(.why)"')" = "read null" ] || fail "$(status .pool.learning)"
ask >/dev/null
stop
start --set learning=off
[ "$(status '.pool.learning | "\(.state) \(.why)"')" = "off null" ] || fail "$(status .pool.learning)"
writes_nothing
stop
[ "$(content)" = "$after_two" ] || fail "the file has changed"

note "a second instance of the model reads only, and says so; what the first one writes is not forgotten behind its back"
start
calypte up "$CALYPTE_MODEL" -n "$NAME-b" --pool 4M >/dev/null
grep -q "another instance of this model" "$CALYPTE_RUNTIME_DIR/$NAME-b/calypte-iod.log" || fail "no line: $(cat "$CALYPTE_RUNTIME_DIR/$NAME-b/calypte-iod.log")"
calypte status -n "$NAME-b" | grep -q '^learning  read only: another instance of this model' || fail "$(calypte status -n "$NAME-b")"
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

note "where a folder has the new file's name, a damaged one stays as it is, and the line names the folder"
dd if=/dev/zero of="$file" bs=1 seek=40 count=8 conv=notrunc status=none
rm "$file.damaged"
mkdir "$file.new"
damaged=$(content)
start
[ "$(iod_log | grep -c "but not written: $file.new is not a regular file")" = 1 ] || fail "not one line: $(iod_log)"
stop
[ "$(content)" = "$damaged" ] || fail "the file has changed"
[ ! -e "$file.damaged" ] || fail "set aside, without another in its place"
rmdir "$file.new"

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
