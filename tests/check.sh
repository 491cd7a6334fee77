#!/bin/sh
# Installs what is missing, builds, runs every test. The last line is `N passed, N failed`; the exit code is 1 if any failed.
#
#   sh tests/check.sh              the plain suite (gcc, warnings are errors)
#   sh tests/check.sh --sanitize   the same suite under AddressSanitizer and UndefinedBehaviorSanitizer
#   sh tests/check.sh --thread     the pool's protocol under ThreadSanitizer
#   sh tests/check.sh --clang      a build with clang, warnings are errors
#   sh tests/check.sh --format     every source file as .clang-format has it
#   sh tests/check.sh --tidy       clang-tidy as .clang-tidy has it (some 4 minutes of CPU)
#   sh tests/check.sh --all        all of these: what CI runs
# What follows the option goes to `meson test`: sh tests/check.sh -- test_slot damage
# Each kind has a build folder of its own below build/ (or $CALYPTE_BUILD). Logs of what failed are printed and stay in its
# meson-logs/.
set -eu
top=$(cd "$(dirname "$0")/.." && pwd)
builds=${CALYPTE_BUILD:-$top/build}
passed=0
failed=0
names= # of what failed, a line each: said again at the end

# fail NAME [COUNT]
fail() {
    echo "== $1: failed"
    names="$names
  $1"
    failed=$((failed + ${2:-1}))
}

# Counts a check without tests of its own: check NAME COMMAND...
check() {
    name=$1
    shift
    echo "== $name"
    if "$@"; then
        passed=$((passed + 1))
    else
        fail "$name"
    fi
}

# build FOLDER TARGETS SETUP-ARGUMENTS...: TARGETS are words, "" for everything; the environment's CC chooses the compiler.
build() {
    folder=$1
    targets=$2
    shift 2
    if [ ! -f "$folder/build.ninja" ]; then
        meson setup "$folder" "$top" -Dwerror=true "$@" || return 1
    fi
    # shellcheck disable=SC2086 # a list of words
    meson compile -C "$folder" $targets
}

# Runs tests of a build folder and adds up the results, which meson writes one JSON object a line.
suite() {
    folder=$1
    shift
    meson test -C "$folder" --no-rebuild --print-errorlogs "$@" || true
    log=$folder/meson-logs/testlog.json
    good=$(grep -c '"result": "\(OK\|EXPECTEDFAIL\)"' "$log" 2>/dev/null || true)
    skipped=$(grep -c '"result": "SKIP"' "$log" 2>/dev/null || true)
    all=$(grep -c '"result": "' "$log" 2>/dev/null || true)
    bad=$((${all:-0} - ${good:-0} - ${skipped:-0}))
    [ "${skipped:-0}" = 0 ] || echo "== $skipped skipped in $folder"
    passed=$((passed + ${good:-0}))
    [ "${all:-0}" -gt 0 ] || fail "any test in $folder"
    [ "$bad" = 0 ] || fail "$(sed -n '/"result": "\(OK\|EXPECTEDFAIL\|SKIP\)"/!s/^{"name": "\([^"]*\)".*/\1/p' "$log" | tr '\n' ',') in $folder" "$bad"
}

# build_suite FOLDER TARGETS SETUP-ARGUMENTS...: a build that fails is a failed check
build_suite() {
    rm -f "$1/meson-logs/testlog.json"
    echo "== build $1"
    build "$@" && return 0
    fail "build $1"
    return 1
}

plain() {
    if build_suite "$builds/check" '' --buildtype=debugoptimized; then
        suite "$builds/check" "$@"
    fi
}

# What a sanitizer finds in a process that a test has started stands in a file: nobody else would notice it.
sanitize() {
    reports=$builds/sanitize/reports
    rm -rf "$reports"
    mkdir -p "$reports"
    export ASAN_OPTIONS="abort_on_error=1:detect_stack_use_after_return=1:log_path=$reports/asan"
    export LSAN_OPTIONS="suppressions=$top/tests/lsan.supp:print_suppressions=0"
    export UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1:log_path=$reports/ubsan"
    if build_suite "$builds/sanitize" '' --buildtype=debugoptimized -Db_sanitize=address,undefined \
        -Dc_args=-fno-sanitize-recover=undefined; then
        suite "$builds/sanitize" --timeout-multiplier 4 "$@"
        check "no sanitizer has reported anything" sh -c '! tail -n 60 "$1"/* 2>/dev/null' sh "$reports"
    fi
}

# Threads of one process are what ThreadSanitizer sees; of the protocols between processes these are the tests by threads.
thread() {
    export TSAN_OPTIONS=halt_on_error=1
    programs="test_pool_stress test_ring test_uses test_exchange test_team test_learning"
    if build_suite "$builds/thread" "$programs" --buildtype=debugoptimized -Db_sanitize=thread; then
        # shellcheck disable=SC2086 # a list of words
        suite "$builds/thread" --timeout-multiplier 4 $programs
    fi
}

with_clang() {
    CC=clang check "build with clang" build "$builds/clang" '' --buildtype=debugoptimized
}

format() {
    check "formatting" sh -c 'find "$1/proto" "$1/shm" "$1/io_daemon" "$1/compute" "$1/cmd" "$1/tests" -name "*.[ch]" -print0 |
        xargs -0 clang-format --dry-run -Werror --style=file' sh "$top"
}

tidy() {
    [ -f "$builds/check/compile_commands.json" ] || build "$builds/check" ''
    check "clang-tidy" sh -c 'cd "$2" && find proto shm io_daemon compute cmd -name "*.c" -print0 |
        xargs -0 -n 4 -P "$(nproc)" clang-tidy -p "$1" --quiet --warnings-as-errors="*"' sh "$builds/check" "$top"
}

mode=plain
case ${1:-} in
    --sanitize | --thread | --clang | --format | --tidy | --all)
        mode=${1#--}
        shift
        ;;
    --help)
        sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    --) ;;
    -*)
        echo "check.sh: unknown option $1: --sanitize, --thread, --clang, --format, --tidy, --all, or -- and names of tests" >&2
        exit 2
        ;;
esac
[ "${1:-}" != -- ] || shift

case $mode in
    plain | sanitize | thread) sh "$top/cmd/install.sh" build test ;;
    *) sh "$top/cmd/install.sh" build test ci ;;
esac
case $mode in
    plain) plain "$@" ;;
    sanitize) sanitize "$@" ;;
    thread) thread ;;
    clang) with_clang ;;
    format) format ;;
    tidy) tidy ;;
    all)
        plain
        with_clang
        format
        tidy
        sanitize
        thread
        ;;
esac

[ -z "$names" ] || echo "failed:$names"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
