#!/bin/sh
# Installs the Debian packages of packages.txt that are missing. Touches no network where all are installed.
#
#   sh cmd/install.sh [build|test|ci]...      (default: build)
set -eu
cd "$(dirname "$0")"
[ $# -gt 0 ] || set -- build

missing=
for purpose in "$@"; do
    packages=$(sed -n "s/^$purpose //p" packages.txt)
    [ -n "$packages" ] || { echo "install.sh: no packages are for \"$purpose\": build, test or ci" >&2; exit 2; }
    for package in $packages; do
        case $(dpkg-query -W -f='${Status}' "$package" 2>/dev/null || true) in
            *' installed') ;;
            *) missing="$missing $package" ;;
        esac
    done
done
[ -n "$missing" ] || exit 0

as_root=
if [ "$(id -u)" != 0 ]; then
    if ! command -v sudo >/dev/null 2>&1; then
        echo "install.sh: missing:$missing. Install them as root: apt-get install$missing" >&2
        exit 1
    fi
    as_root=sudo
fi
echo "install.sh: installing$missing" >&2
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# quiet COMMAND...: what it says matters only if it fails
quiet() {
    "$@" >"$log" 2>&1 && return 0
    cat "$log" >&2
    echo "install.sh: failed: $*" >&2
    exit 1
}
quiet $as_root apt-get update -qq -o Dpkg::Use-Pty=0
# shellcheck disable=SC2086 # a list of words
quiet $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq -o Dpkg::Use-Pty=0 --no-install-recommends $missing
