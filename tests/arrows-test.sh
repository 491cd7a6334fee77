#!/bin/sh
# The arrows hold in this tree, and each kind of broken arrow is noticed in a made-up one.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
tree=$(mktemp -d "${TMPDIR:-/tmp}/calypte-arrows.XXXXXX")
trap 'rm -rf "$tree"' EXIT

sh "$here/arrows.sh" "$here/.."

made_up() {
    rm -rf "$tree"
    mkdir -p "$tree/cmd/front"
    for folder in proto shm io_daemon compute cmd; do
        mkdir -p "$tree/$folder"
        echo '#include "proto/error.h"' >"$tree/$folder/right.c"
    done
    printf '#include <liburing.h>\n' >"$tree/io_daemon/ring.c"
    printf '#include "compute/math.h"\n' >"$tree/cmd/front/server.c"
}

made_up
sh "$here/arrows.sh" "$tree" || { echo "a tree without fault is refused"; exit 1; }
while read -r file include; do
    made_up
    echo "#include $include" >"$tree/$file"
    if sh "$here/arrows.sh" "$tree" >/dev/null; then
        echo "$file may include $include"
        exit 1
    fi
done <<'FAULTS'
proto/wrong.c "shm/pool.h"
proto/wrong.h <nng/nng.h>
cmd/front/wrong.c <nng/nng.h>
proto/wrong.c <liburing.h>
shm/wrong.c "compute/kernel.h"
shm/wrong.c <nng/nng.h>
io_daemon/wrong.c "compute/kernel.h"
io_daemon/wrong.c <nng/nng.h>
compute/wrong.c "io_daemon/loader.h"
compute/wrong.h "cmd/front/front.h"
compute/wrong.c <liburing.h>
cmd/front/wrong.c <liburing.h>
cmd/front/wrong.c "server.h"
FAULTS
