#!/bin/sh
# Takes lines of the product's source away, one mutant of `list` after another, and tells which test notices.
#
#   sh tests/mutants/run.sh              all of them (some 20 minutes on two cores)
#   sh tests/mutants/run.sh NUMBER...    these
#   sh tests/mutants/run.sh --check      whether each still applies to the source; nothing is built
#
# A line a mutant: what notices it, or SURVIVED. The exit code is 1 where one survives, does not build or does not apply. Works in a copy of
# the tree and in builds of its own below build/mutants (or $CALYPTE_BUILD/mutants); what the tests have said stays in its logs/.
set -eu
top=$(cd "$(dirname "$0")/../.." && pwd)
here=$top/tests/mutants
list=$here/list
work=${CALYPTE_BUILD:-$top/build}/mutants
seeds=1500
patience=120 # seconds that a test may take: a mutant may wait for ever

numbers() { sed -n 's/^= \([0-9]*\) .*/\1/p' "$list"; }
tests_of() { sed -n "s/^= $1 \(.*\)/\1/p" "$list"; }
what_of() { sed -n "/^= $1 /{n;p;}" "$list"; }
files_of() { awk -v number="$1" '/^= / { mine = $2 == number } mine && /^@ / { print $2 }' "$list"; }
mutate() { awk -v list="$list" -v number="$1" -v path="$2" -f "$here/apply.awk" "$top/$2"; }

check_list() {
    bad=0
    [ "$(numbers)" = "$(seq "$(numbers | wc -l)")" ] || { echo "mutants are not numbered 1, 2, 3, ..."; bad=1; }
    for number in $(numbers); do
        for file in $(files_of "$number"); do
            mutate "$number" "$file" >/dev/null || bad=1
        done
        if [ -z "$(tests_of "$number")" ] || [ -z "$(files_of "$number")" ]; then
            echo "mutant $number: no test, or no file"
            bad=1
        fi
    done
    echo "$(numbers | wc -l) mutants, $([ "$bad" = 0 ] && echo all apply || echo not all apply)"
    return "$bad"
}

# The copy is as the tree is. What differs gets a new time, so that ninja builds it again.
copy_tree() {
    mkdir -p "$work/tree" "$work/logs" "$work/scratch"
    work=$(cd "$work" && pwd)
    (cd "$top" && find meson.build proto shm io_daemon compute cmd tests -type f) | while read -r file; do
        cmp -s "$top/$file" "$work/tree/$file" && continue
        mkdir -p "$(dirname "$work/tree/$file")"
        cp "$top/$file" "$work/tree/$file"
    done
    [ -f "$work/plain/build.ninja" ] || meson setup "$work/plain" "$work/tree" --buildtype=debugoptimized >"$work/logs/setup" 2>&1
    [ -f "$work/thread/build.ninja" ] ||
        meson setup "$work/thread" "$work/tree" --buildtype=debugoptimized -Db_sanitize=thread >>"$work/logs/setup" 2>&1
}

# A test is a program of tests/unit, `simulation` or `model-check`; after `thread:` the same under ThreadSanitizer.
folder_of() { case $1 in thread:*) echo "$work/thread" ;; *) echo "$work/plain" ;; esac; }
program_of() {
    case ${1#thread:} in
        simulation | model-check) echo "tests/${1#thread:}/${1#thread:}" ;;
        *) echo "tests/unit/${1#thread:}" ;;
    esac
}

build_test() {
    case $1 in # programs that the test starts
        test_iod | test_iod_kill | test_size) programs=cmd/calypte-iod ;;
        test_worker) programs=cmd/calypte-worker ;;
        *) programs= ;;
    esac
    # shellcheck disable=SC2046,SC2086 # lists of words
    ninja -C "$(folder_of "$1")" $(program_of "$1") $programs
}

# In a /dev/shm of its own where that is allowed: what a mutant leaves there goes with it. A core tells nothing.
run_test() {
    arguments=
    [ "$1" != simulation ] || arguments="--seeds 0 $seeds"
    in_private='mount -t tmpfs tmpfs /dev/shm 2>/dev/null; exec "$@"'
    # shellcheck disable=SC2086 # a list of words
    (
        # shellcheck disable=SC3045 # where there is no such limit, nothing is lost
        ulimit -c 0 2>/dev/null || true
        export CALYPTE_BIN="$work/plain/cmd" CALYPTE_TESTS="$work/tree/tests" TMPDIR="$work/scratch" TSAN_OPTIONS=halt_on_error=1
        set -- timeout -k 5 "$patience" "$(folder_of "$1")/$(program_of "$1")" $arguments
        if unshare -m true 2>/dev/null; then set -- unshare -m sh -c "$in_private" sh "$@"; fi
        cd "$work/scratch"
        exec "$@" </dev/null
    )
}

# A few words out of a log: why the test failed.
reason() {
    case $2 in 124 | 137) echo "no end"; return ;; esac
    sed -n -e 's/^WARNING: ThreadSanitizer: \(.*\) (pid.*/\1/p' -e 's/^seed [0-9]*, event [0-9]*: //p' -e 's/.*the leader waits and waits: //p' \
        -e 's/.*: error: Failure!.*/an assertion/p' -e 's/^\[  ERROR   \] --- //p' -e 's/.* things never happened/&/p' "$1" | head -n 1 | cut -c 1-90
}

# Prints the line of a mutant. 0: noticed.
try_mutant() {
    log=$work/logs/$1
    : >"$log"
    for file in $(files_of "$1"); do
        mutate "$1" "$file" >"$work/tree/$file"
    done
    noticed=
    for name in $(tests_of "$1"); do
        build_test "$name" >>"$log" 2>&1 || { noticed=none; break; }
        code=0
        run_test "$name" >"$log.$name" 2>&1 || code=$?
        [ "$code" = 0 ] && continue
        noticed="$name: $(reason "$log.$name" "$code")"
        break
    done
    for file in $(files_of "$1"); do
        cp "$top/$file" "$work/tree/$file"
    done
    case $noticed in
        none) result="DOES NOT BUILD, see $log" ;;
        '') result=SURVIVED ;;
        *) result="noticed by $noticed" ;;
    esac
    printf '%3d  %s  -- %s\n' "$1" "$(what_of "$1")" "$result"
    [ -n "$noticed" ] && [ "$noticed" != none ]
}

# What fails without any mutant would notice everything.
try_unchanged() {
    tests=$(for number in "$@"; do tests_of "$number"; done | tr ' ' '\n' | sort -u)
    for name in $tests; do
        build_test "$name" >"$work/logs/unchanged" 2>&1 || { echo "$name does not build, see $work/logs/unchanged"; exit 1; }
        run_test "$name" >"$work/logs/unchanged" 2>&1 || { echo "$name fails without a mutant, see $work/logs/unchanged"; exit 1; }
    done
}

if [ "${1:-}" = --check ]; then
    check_list
    exit
fi
check_list >&2
# shellcheck disable=SC2046 # a list of words
[ $# -gt 0 ] || set -- $(numbers)
copy_tree
trap 'rm -rf "$work/scratch"' EXIT
try_unchanged "$@"
noticed_count=0
survived=0
for number in "$@"; do
    if try_mutant "$number"; then noticed_count=$((noticed_count + 1)); else survived=$((survived + 1)); fi
done
echo "$noticed_count noticed, $survived survived"
[ "$survived" = 0 ]
