#!/bin/sh
# Installs what is missing, builds, runs every test. The last line is `N passed, N failed`; the exit code is 1 if any failed.
#
#   sh tests/check.sh              the plain suite (gcc, warnings are errors)
#   sh tests/check.sh --sanitize   the same suite under AddressSanitizer and UndefinedBehaviorSanitizer
#   sh tests/check.sh --thread     the pool's protocol under ThreadSanitizer
#   sh tests/check.sh --clang      a build with clang, warnings are errors
#   sh tests/check.sh --format     every source file as .clang-format has it
#   sh tests/check.sh --all        all of these
# What follows the option goes to `meson test`: sh tests/check.sh -- slot ring
# Each kind has a build folder of its own below build/ (or $CALYPTE_BUILD). Logs of what failed are printed and stay in its
# meson-logs/.
set -eu
top=$(cd "$(dirname "$0")/.." && pwd)
builds=${CALYPTE_BUILD:-$top/build}
passed=0
failed=0

# Counts a check without tests of its own: check NAME COMMAND...
check() {
    name=$1
    shift
    echo "== $name"
    if "$@"; then
        passed=$((passed + 1))
    else
        echo "== $name: failed"
        failed=$((failed + 1))
    fi
}

# build FOLDER SETUP-ARGUMENTS...; the environment's CC chooses the compiler.
build() {
    folder=$1
    shift
    if [ ! -f "$folder/build.ninja" ]; then
        meson setup "$folder" "$top" -Dwerror=true "$@" || return 1
    fi
    meson compile -C "$folder"
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
    [ "${all:-0}" -gt 0 ] || { echo "== no test ran in $folder"; bad=1; }
    [ "${skipped:-0}" = 0 ] || echo "== $skipped skipped in $folder"
    passed=$((passed + ${good:-0}))
    failed=$((failed + bad))
}

# suite_of FOLDER SETUP-ARGUMENTS... -- TEST-ARGUMENTS...
suite_of() {
    folder=$1
    shift
    setup=
    while [ "$1" != -- ]; do
        setup="$setup $1"
        shift
    done
    shift
    rm -f "$folder/meson-logs/testlog.json"
    echo "== build $folder"
    # shellcheck disable=SC2086 # a list of words
    if build "$folder" $setup; then
        suite "$folder" "$@"
    else
        echo "== build $folder: failed"
        failed=$((failed + 1))
    fi
}

plain() {
    suite_of "$builds/check" --buildtype=debugoptimized -- --timeout-multiplier 1 "$@"
}

sanitize() {
    export ASAN_OPTIONS=abort_on_error=1:detect_stack_use_after_return=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
    suite_of "$builds/sanitize" --buildtype=debugoptimized -Db_sanitize=address,undefined -Dc_args=-fno-sanitize-recover=undefined \
        -- --timeout-multiplier 4 "$@"
}

thread() {
    export TSAN_OPTIONS=halt_on_error=1
    suite_of "$builds/thread" --buildtype=debugoptimized -Db_sanitize=thread -- --timeout-multiplier 4 --suite thread "$@"
}

with_clang() {
    CC=clang check "build with clang" build "$builds/clang" --buildtype=debugoptimized
}

format() {
    check "formatting" sh -c 'find "$1/proto" "$1/shm" "$1/io_daemon" "$1/compute" "$1/cmd" "$1/tests" -name "*.[ch]" -print0 |
        xargs -0 clang-format --dry-run -Werror --style=file' sh "$top"
}

mode=plain
case ${1:-} in
    --sanitize | --thread | --clang | --format | --all)
        mode=${1#--}
        shift
        ;;
    --help)
        sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
        exit 0
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
    thread) thread "$@" ;;
    clang) with_clang ;;
    format) format ;;
    all)
        plain
        with_clang
        format
        sanitize
        thread
        ;;
esac

echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
