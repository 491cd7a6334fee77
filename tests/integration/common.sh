# Sourced by every integration test: . "$CALYPTE_TESTS/integration/common.sh"
#
# From meson: CALYPTE_BIN (folder of the programs), CALYPTE_TESTS (this tree's tests/), CALYPTE_TOOLS (built test tools),
# CALYPTE_MODEL (the bundled model, converted). Gives: SCRATCH (removed at the end), CALYPTE_RUNTIME_DIR of its own, the functions below.
set -eu
PATH="$CALYPTE_BIN:$CALYPTE_TOOLS:$PATH"
SCRATCH=$(mktemp -d "${TMPDIR:-/tmp}/calypte-test.XXXXXX")
export CALYPTE_RUNTIME_DIR="$SCRATCH/run"
export LC_ALL=C.UTF-8
NAME="t$$" # of the instance; every test has its own
unset XDG_CONFIG_HOME XDG_RUNTIME_DIR 2>/dev/null || true
export XDG_STATE_HOME="$SCRATCH/state"

# What a test has to undo beside that, in a function of this name.
cleanup() { :; }

finish() {
    status=$?
    trap - EXIT
    calypte down --all >/dev/null 2>&1 || true
    cleanup
    if [ $status -ne 0 ]; then
        for log in "$CALYPTE_RUNTIME_DIR"/*/*.log; do
            [ -f "$log" ] && { echo "--- $log" >&2; tail -n 20 "$log" >&2; }
        done
    fi
    rm -rf "$SCRATCH"
    exit $status
}
trap finish EXIT
trap 'exit 130' INT TERM

note() { echo "- $*"; }

fail() {
    echo "FAILED: $*" >&2
    exit 1
}

# expect_line STATUS WORDS COMMAND...: the command ends with STATUS, says exactly one line on stderr, and the line holds every
# word of WORDS (an extended regular expression).
expect_line() {
    want=$1 words=$2
    shift 2
    got=0
    "$@" >"$SCRATCH/stdout" 2>"$SCRATCH/stderr" || got=$?
    [ "$got" -eq "$want" ] || fail "$*: exit $got, want $want: $(cat "$SCRATCH/stderr")"
    [ "$(grep -c . "$SCRATCH/stderr")" -eq 1 ] || fail "$*: more or less than one line: $(cat "$SCRATCH/stderr")"
    grep -Eq -- "$words" "$SCRATCH/stderr" || fail "$*: no '$words' in: $(cat "$SCRATCH/stderr")"
}

# json FILE FILTER: what jq says.
json() { jq -r "$2" "$1"; }

# Nothing of ours is left: no segment of this instance name prefix, no process, no socket.
expect_nothing_left() {
    left=$(ls /dev/shm | grep -F "calypte.$1" || true)
    [ -z "$left" ] || fail "left in /dev/shm: $left"
    left=$(find "$CALYPTE_RUNTIME_DIR" -name '*.ipc' -o -name '*.pid' 2>/dev/null || true)
    [ -z "$left" ] || fail "left in the run directory: $left"
}

# No private instance (`calypte run MODEL`) is left whose command has ended. Those of other tests may be there, and may be on their way.
expect_no_private_left() {
    tries=100
    while :; do
        left=
        for segment in /dev/shm/calypte.run-*; do
            owner=${segment#/dev/shm/calypte.run-}
            [ ! -e "$segment" ] || [ -e "/proc/${owner%%.*}" ] || left=$segment
        done
        [ -n "$left" ] || return 0
        tries=$((tries - 1))
        [ $tries -gt 0 ] || fail "left in /dev/shm: $left"
        sleep 0.05
    done
}
