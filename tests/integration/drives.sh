# Several drives: striped and mirrored containers give the same logits, and so they do when one drive fails.
. "$CALYPTE_TESTS/integration/common.sh"

# /dev/shm stands for a second drive.
OTHER=$(mktemp -d /dev/shm/calypte-test.XXXXXX)
cleanup() {
    if [ -n "${LOOP:-}" ]; then
        umount -l "$SCRATCH/loop" 2>/dev/null || true
        losetup -d "$LOOP" 2>/dev/null || true
    fi
    rm -rf "$OTHER"
}

head -n 300 "$CALYPTE_TESTS/oracles/score.tokens" | tr -s ' \n' '\n' | head -n 150 >"$SCRATCH/tokens"
POOL="--pool=256K" # top_k slots of the bundled model: nearly everything is read again and again

# sum WORDS...: of the logits; the words say which model or instance
sum() {
    calypte score "$@" --tokens "$SCRATCH/tokens" --logits "$SCRATCH/logits" >/dev/null
    sha256sum <"$SCRATCH/logits"
}

same() {
    note "$1"
    shift
    logits=$(sum "$@")
    [ "$logits" = "$reference" ] || fail "other logits"
}

# up MODEL FLAGS...: nothing is said, but that there is one drive where /tmp and /dev/shm are one
up() {
    calypte up "$@" -n "$NAME" "$POOL" >/dev/null 2>"$SCRATCH/said"
    ! grep -v 'has files of both copies' "$SCRATCH/said" >/dev/null || fail "up says: $(cat "$SCRATCH/said")"
}

disk() { calypte status -n "$NAME" --json | jq -r ".disk.$1"; }
states() { disk 'copies | map(.state) | join(" ")'; }
said() { grep -c -- "$1" "$CALYPTE_RUNTIME_DIR/$NAME/calypte-iod.log" || true; }

# dropped COPY OTHER WORDS: one line and the status say that, and nothing has failed
dropped() {
    [ "$(states)" = "$1" ] || fail "copies: $(states)"
    [ "$(said 'this copy is read no more')" = 1 ] || fail "not one line about the copy"
    [ "$(said "$2.*this copy is read no more")" = 1 ] || fail "the line does not say: $2"
    [ "$(disk failures)" = 0 ] || fail "$(disk failures) experts failed"
    [ "$(disk 'copies[] | select(.state == "dropped") | .read_failures')" -gt 0 ] || fail "no read of it has failed"
}

reference=$(sum "$CALYPTE_MODEL" "$POOL")
calypte convert --stripe "$OTHER/stripe" "$CALYPTE_TESTS/model" "$SCRATCH/striped" 2>/dev/null
cp -rL "$SCRATCH/striped" "$OTHER/mirror"
cp -r "$CALYPTE_MODEL" "$SCRATCH/plain"
cp -r "$CALYPTE_MODEL" "$OTHER/plain"
chmod -R u+w "$SCRATCH/plain" "$OTHER"

note "info names the folders of the stripes"
calypte info "$SCRATCH/striped" | grep -q "^stripe 2 of 2 .*$OTHER/stripe" || fail "info does not name the stripe: $(calypte info "$SCRATCH/striped")"

same "striped over two drives" "$SCRATCH/striped" "$POOL"
same "mirrored on two drives" "$SCRATCH/plain" --mirror "$OTHER/plain" "$POOL"
same "mirrored, read with pread" "$SCRATCH/plain" --mirror "$OTHER/plain" --set io=pread "$POOL"
same "striped, and its mirror not" "$SCRATCH/striped" --mirror "$OTHER/mirror" "$POOL"

# The copy that shall fail stands in /dev/shm, which answers first.
note "both copies are read, and every byte is some drive's"
up "$OTHER/plain" --mirror "$SCRATCH/plain"
[ "$(states)" = "used used" ] || fail "copies: $(states)"
same "an instance of its own" -n "$NAME"
calypte status -n "$NAME" --json >"$SCRATCH/status"
if [ "$(stat -c %d "$OTHER")" != "$(stat -c %d "$SCRATCH")" ]; then
    [ "$(json "$SCRATCH/status" '.disk.drives | map(select(.bytes > 0 and .rate > 0)) | length')" = 2 ] ||
        fail "not two drives: $(json "$SCRATCH/status" .disk.drives)"
fi
[ "$(json "$SCRATCH/status" '.disk.bytes - ([.disk.drives[].bytes] | add)')" = 0 ] ||
    fail "bytes: $(json "$SCRATCH/status" .disk)"
calypte status -n "$NAME" | grep -q "^copy 2 .*$SCRATCH/plain: used, read failures 0, wrong checksums 0" || fail "status does not tell of the mirror"

note "the first copy is cut short while the instance runs"
for file in "$OTHER"/plain/experts-*; do truncate -s 8192 "$file"; done
same "mirror alone" -n "$NAME"
dropped "dropped used" "$OTHER/plain/experts-.*truncated"

note "iod is killed, and finds the first copy gone"
kill -9 "$(cat "$CALYPTE_RUNTIME_DIR/$NAME/calypte-iod.pid")"
tries=200
until [ "$(states)" = "refused used" ]; do
    tries=$((tries - 1))
    [ $tries -gt 0 ] || fail "copies: $(states)"
    sleep 0.05
done
[ "$(calypte run -n "$NAME" --max-tokens 2 "What is a bird?")" = "A bird" ] || fail "another answer"

note "the mirror is cut short as well: the request gets an error, the instance lives on"
for file in "$SCRATCH"/plain/experts-*; do truncate -s 8192 "$file"; done
expect_line 1 "model_error: expert [0-9]+ of layer [0-9]+.* of $OTHER/plain and $SCRATCH/plain: the file is truncated" calypte run -n "$NAME" "What is a bee?"
[ "$(calypte status -n "$NAME" --json | jq -r .state)" = serving ] || fail "it does not serve"
calypte down -n "$NAME"
rm -r "$SCRATCH/plain" "$OTHER/plain"

note "a stripe of the mirror is cut short"
up "$SCRATCH/striped" --mirror "$OTHER/mirror"
for file in "$OTHER"/mirror/experts-0-*; do truncate -s 8192 "$file"; done
same "first copy alone" -n "$NAME"
dropped "used dropped" "$OTHER/mirror/experts-0-.*truncated"
calypte down -n "$NAME"

note "a mirror that is none: refused where the command line names it, else one line"
for mirror in "$CALYPTE_MODEL" "$OTHER/nothing" "$CALYPTE_TESTS/model" "$SCRATCH/striped"; do
    expect_line 1 "$mirror.*leave --mirror out" calypte up "$SCRATCH/striped" -n "$NAME" --mirror "$mirror" "$POOL"
    expect_line 1 "$mirror.*leave --mirror out" calypte run "$SCRATCH/striped" --mirror "$mirror" "$POOL" hello
    expect_nothing_left "$NAME"
done
expect_line 2 'mirror is given twice' calypte up "$SCRATCH/striped" -n "$NAME" --mirror /a --mirror /b
for mirror in "$CALYPTE_MODEL" "$OTHER/nothing"; do
    expect_line 0 'is not used; why: ' env CALYPTE_MIRROR="$mirror" calypte up "$SCRATCH/striped" -n "$NAME" "$POOL"
    [ "$(said "mirror not used, $SCRATCH/striped is read alone: $mirror: ")" = 1 ] || fail "no line tells why"
    [ "$(states)" = "used refused" ] || fail "copies: $(states)"
    same "without it" -n "$NAME"
    calypte down -n "$NAME"
done

note "a first copy that does not open: its mirror is named"
cp -r "$CALYPTE_MODEL" "$SCRATCH/good"
cp -r "$CALYPTE_MODEL" "$SCRATCH/bad"
chmod -R u+w "$SCRATCH/good" "$SCRATCH/bad"
rm "$SCRATCH/bad"/dense-00001*
expect_line 1 "give $SCRATCH/good as the MODEL" calypte up "$SCRATCH/bad" -n "$NAME" --mirror "$SCRATCH/good" "$POOL"

note "one drive for both copies"
expect_line 0 'has files of both copies' calypte up "$CALYPTE_MODEL" -n "$NAME" --mirror "$SCRATCH/good" "$POOL"
calypte down -n "$NAME"

# A drive that dies: a loop device whose file ends.
loop() {
    [ "$(id -u)" = 0 ] || return 1
    truncate -s 64M "$SCRATCH/image" && mkfs.ext4 -q -m 0 "$SCRATCH/image" 2>/dev/null || return 1
    LOOP=$(losetup -f --direct-io=on --show "$SCRATCH/image" 2>/dev/null) || return 1
    mkdir "$SCRATCH/loop"
    mount -t ext4 "$LOOP" "$SCRATCH/loop" 2>/dev/null
}
if loop; then
    note "a loop device loses what is behind it"
    cp -r "$CALYPTE_MODEL" "$SCRATCH/loop/model"
    sync -f "$SCRATCH/loop"
    cp -r "$CALYPTE_MODEL" "$SCRATCH/plain"
    up "$SCRATCH/loop/model" --mirror "$SCRATCH/plain"
    truncate -s 4096 "$SCRATCH/image"
    tries=20 # until the loop device was asked
    until [ "$(states)" = "dropped used" ]; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] || fail "copies: $(states)"
        same "the other drive alone" -n "$NAME"
    done
    dropped "dropped used" "$SCRATCH/loop/model/experts-.*Input/output error"
    calypte down -n "$NAME"
else
    note "skipped: no loop devices, or not root"
fi
