#!/bin/sh
# For servers (systemd, runit, a container's entry point): prepares the machine, then becomes `calypte up --foreground`. The supervisor
# restarts what dies; whoever runs this script restarts the supervisor.
#
#   supervise.sh [--shm SIZE] [--shm-huge] MODEL [ARGUMENTS OF calypte up]
#
#   --shm SIZE       (root) make /dev/shm this large: 400G, or 90%
#   --shm-huge       (root, before Linux 6.1) let /dev/shm, where the pool and the dense weights live, give huge pages (huge=within_size)
set -eu

die() {
    echo "supervise.sh: $*" >&2
    exit "${code:-1}"
}

need_root() {
    [ "$(id -u)" = 0 ] || die "$1 needs root: run as root, or leave it out"
}

options=
while [ $# -gt 0 ]; do
    case $1 in
        --shm)
            [ $# -gt 1 ] || code=2 die "--shm needs a size, like 400G or 90%"
            need_root --shm
            options="$options,size=$2"
            shift 2
            ;;
        --shm-huge)
            need_root --shm-huge
            options="$options,huge=within_size"
            shift
            ;;
        --help)
            sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
            exit 0
            ;;
        *) break ;;
    esac
done
[ $# -gt 0 ] || code=2 die "a MODEL is missing: supervise.sh [--shm SIZE] [--shm-huge] MODEL ..."

[ -z "$options" ] || mount -o "remount$options" /dev/shm || die "cannot remount /dev/shm with ${options#,}"
# Kernels before 5.12 count io_uring's rings against this limit; where it cannot be raised iod may have to read without io_uring.
# shellcheck disable=SC3045 # dash and bash have -l
ulimit -l unlimited 2>/dev/null || ulimit -l "$(ulimit -H -l)" 2>/dev/null || true

here=$(cd "$(dirname "$0")" && pwd)
for calypte in "$here/calypte" "$here/../build/cmd/calypte" "$(command -v calypte || true)"; do
    [ -x "$calypte" ] && exec "$calypte" up --foreground "$@"
done
die "calypte is not built: sh cmd/try.sh builds it"
