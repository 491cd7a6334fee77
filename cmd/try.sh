#!/bin/sh
# From a clone to an answer: installs what is missing, builds, converts the bundled model and asks it a question. Safe to run again.
#
#   sh cmd/try.sh [QUESTION]
set -eu
top=$(cd "$(dirname "$0")/.." && pwd)
question=${1:-What is a river?}
build=$top/build

sh "$top/cmd/install.sh" build
[ -f "$build/build.ninja" ] || meson setup "$build" "$top" --buildtype=release >&2
meson compile -C "$build" calypte calypte-supervisor calypte-iod calypte-worker calypte-front >&2
"$build/cmd/calypte" convert "$top/tests/model" "$build/try-model" >&2
echo "> $question" >&2
exec "$build/cmd/calypte" run "$build/try-model" "$question"
