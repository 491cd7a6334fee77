# calypte convert and info as a user meets them: killed, interrupted, out of space, read-only, wrongly called.
. "$CALYPTE_TESTS/integration/common.sh"

SOURCE="$CALYPTE_TESTS/model"

# All names and contents of a folder.
sums() { (cd "$1" && find . -type f | LC_ALL=C sort | xargs sha256sum); }
expect_same() {
    sums "$1" >"$SCRATCH/sums-a"
    sums "$2" >"$SCRATCH/sums-b"
    cmp -s "$SCRATCH/sums-a" "$SCRATCH/sums-b" || fail "$2 is not $1: $(diff "$SCRATCH/sums-a" "$SCRATCH/sums-b")"
}

sums "$SOURCE" >"$SCRATCH/source-before"
calypte convert --jobs 1 "$SOURCE" "$SCRATCH/reference" 2>/dev/null

# Kills a run of the conversion after $1 seconds, then checks that nothing looks like a container unless it is one.
kill_after() {
    calypte convert --jobs 2 "$SOURCE" "$SCRATCH/killed" 2>/dev/null &
    pid=$!
    sleep "$1"
    kill -9 $pid 2>/dev/null || true
    wait $pid 2>/dev/null || true
    if [ -e "$SCRATCH/killed/calypte.json" ]; then
        calypte info "$SCRATCH/killed" >/dev/null
    fi
}

test_killed() {
    unfinished=0
    for start in 0.00 0.01 0.02; do
        rm -rf "$SCRATCH/killed"
        for more in 0 0.03 0.05 0.07 0.09 0.12 0.15 0.20; do
            kill_after "$(awk "BEGIN { print $start + $more }")"
            [ -e "$SCRATCH/killed/calypte.json" ] || unfinished=$((unfinished + 1))
        done
        calypte convert "$SOURCE" "$SCRATCH/killed" 2>/dev/null
        expect_same "$SCRATCH/reference" "$SCRATCH/killed"
    done
    [ $unfinished -gt 3 ] || fail "only $unfinished of the runs were killed before their end"
    note "killed $unfinished times before the end, same bytes"
}

test_interrupted() {
    # timeout, because a background command of a shell ignores SIGINT.
    for seconds in 0.03 0.06 0.1 0.15; do
        got=0
        timeout --preserve-status -s INT $seconds calypte convert --jobs 1 "$SOURCE" "$SCRATCH/interrupted" 2>"$SCRATCH/stderr" || got=$?
        [ $got -eq 130 ] || [ $got -eq 0 ] || fail "exit $got after SIGINT: $(cat "$SCRATCH/stderr")"
        # Before anything is written the signal simply ends the program.
        if [ $got -eq 130 ] && [ -e "$SCRATCH/interrupted" ]; then
            grep -q 'interrupted; run the same command again' "$SCRATCH/stderr" || fail "no word of it: $(cat "$SCRATCH/stderr")"
        fi
        [ -z "$(find "$SCRATCH/interrupted" -name '*.part' 2>/dev/null)" ] || fail "a temporary file is left"
    done
    calypte convert "$SOURCE" "$SCRATCH/interrupted" 2>/dev/null
    expect_same "$SCRATCH/reference" "$SCRATCH/interrupted"
    note "interrupted, same bytes"
}

test_twice() {
    calypte convert "$SOURCE" "$SCRATCH/reference" 2>"$SCRATCH/stderr"
    grep -q 'nothing to do' "$SCRATCH/stderr" || fail "a finished container was made again"
    expect_line 1 'holds another container already' calypte convert --experts int8 "$SOURCE" "$SCRATCH/reference"
    mkdir "$SCRATCH/locked"
    expect_line 1 'another conversion is writing there' flock "$SCRATCH/locked" calypte convert "$SOURCE" "$SCRATCH/locked"
    note "a finished and a locked destination"
}

test_full_disk() {
    mkdir "$SCRATCH/disk"
    if ! mount -t tmpfs -o size=4m,nr_inodes=100 none "$SCRATCH/disk" 2>/dev/null; then
        note "skipped: a small file system needs the right to mount"
        return 0
    fi
    trap 'umount "$SCRATCH/disk"; finish' EXIT
    expect_line 1 'needs .* MiB more, its file system has .* MiB free' calypte convert "$SOURCE" "$SCRATCH/disk/model"
    [ ! -e "$SCRATCH/disk/model" ] || fail "something is left of a conversion that did not begin"
    # Enough bytes, but no room for another name after the first files: it fails in the middle.
    mount -o remount,size=64m,nr_inodes=6 "$SCRATCH/disk"
    expect_line 1 'No space left on device; free some space' calypte convert "$SOURCE" "$SCRATCH/disk/model"
    [ ! -e "$SCRATCH/disk/model/calypte.json" ] || fail "half a container looks whole"
    ls "$SCRATCH/disk/model" | grep -q '^dense-00001.safetensors$' || fail "what was finished is gone"
    [ -z "$(find "$SCRATCH/disk" -name '*.part')" ] || fail "a temporary file is left"
    expect_line 1 'not a Calypte container' calypte info "$SCRATCH/disk/model"
    mount -o remount,size=64m,nr_inodes=100 "$SCRATCH/disk"
    calypte convert "$SOURCE" "$SCRATCH/disk/model" 2>"$SCRATCH/stderr"
    grep -q 'dense-00001.safetensors: finished by an earlier run, kept' "$SCRATCH/stderr" || fail "it began anew"
    expect_same "$SCRATCH/reference" "$SCRATCH/disk/model"
    rm -r "$SCRATCH/disk/model"
    mkdir "$SCRATCH/disk/empty"
    mount -o remount,ro "$SCRATCH/disk"
    expect_line 1 'disk/model: .*Read-only file system; choose a folder' calypte convert "$SOURCE" "$SCRATCH/disk/model"
    expect_line 1 'disk/empty.*Read-only file system; choose a folder' calypte convert "$SOURCE" "$SCRATCH/disk/empty"
    umount "$SCRATCH/disk"
    trap finish EXIT
    note "a full and a read-only disk"
}

# An expert's slices on three drives (here folders): the same bytes, the same answers; killed, resumed, linked.
test_stripes() {
    stripe="--stripe $SCRATCH/drive-1 --stripe $SCRATCH/drive-2"
    for seconds in 0.02 0.05 0.1 0.2; do
        calypte convert --jobs 2 $stripe "$SOURCE" "$SCRATCH/striped" 2>/dev/null &
        pid=$!
        sleep $seconds
        kill -9 $pid 2>/dev/null || true
        wait $pid 2>/dev/null || true
    done
    calypte convert $stripe "$SOURCE" "$SCRATCH/striped" 2>/dev/null
    [ -z "$(find "$SCRATCH/striped" "$SCRATCH"/drive-? -name '*.part')" ] || fail "a temporary file is left"
    [ "$(ls "$SCRATCH/drive-2")" = "$(cd "$SCRATCH/striped" && ls experts-2-*)" ] || fail "links and files differ"
    for file in "$SCRATCH"/reference/experts-0-*; do
        layer=${file##*/experts-0-}
        [ "$(stat -Lc %s "$SCRATCH/striped/experts-0-$layer")" -lt "$(stat -c %s "$file")" ] || fail "$layer is not spread"
    done
    calypte convert $stripe "$SOURCE" "$SCRATCH/striped" 2>&1 | grep -q 'nothing to do' || fail "made again"
    expect_line 1 'holds another container already' calypte convert "$SOURCE" "$SCRATCH/striped"
    expect_line 1 'writing there, or this one twice' calypte convert --stripe "$SCRATCH/out" "$SOURCE" "$SCRATCH/out"
    [ ! -e "$SCRATCH/out" ] || fail "a refused conversion left a folder"
    head -c 600 "$CALYPTE_TESTS/oracles/score.tokens" >"$SCRATCH/tokens"
    for model in reference striped; do
        calypte score "$SCRATCH/$model" --tokens "$SCRATCH/tokens" --logits "$SCRATCH/$model.logits" >/dev/null 2>&1 || fail "score $model"
    done
    cmp "$SCRATCH/reference.logits" "$SCRATCH/striped.logits" || fail "other logits from a striped container"
    mv "$SCRATCH/drive-1" "$SCRATCH/drive-away"
    expect_line 1 'striped/experts-1-.*a link to .*drive-1/experts-1-.*No such file.*mount its drive' calypte info "$SCRATCH/striped"
    mv "$SCRATCH/drive-away" "$SCRATCH/drive-1"
    note "three stripes: the same logits"
}

# A folder that is not the run's own is left alone, whatever the names in it; one that a run made and left empty goes.
test_foreign_folders() {
    rm -rf "$SCRATCH/foreign" && mkdir "$SCRATCH/foreign"
    for name in experts-1-00001.safetensors experts-1-00002.safetensors.part convert.state; do
        echo "of somebody else" >"$SCRATCH/foreign/$name"
    done
    sums "$SCRATCH/foreign" >"$SCRATCH/foreign-before"
    tries=20
    until [ -s "$SCRATCH/half/convert.state" ] && [ ! -e "$SCRATCH/half/calypte.json" ]; do
        [ $tries -gt 0 ] || fail "no run was killed before its end"
        tries=$((tries - 1))
        rm -rf "$SCRATCH/half" "$SCRATCH/half-1"
        calypte convert --jobs 1 --stripe "$SCRATCH/half-1" "$SOURCE" "$SCRATCH/half" 2>/dev/null &
        pid=$!
        until [ -s "$SCRATCH/half/convert.state" ] || [ -e "$SCRATCH/half/calypte.json" ]; do sleep 0.002; done
        kill -9 $pid 2>/dev/null || true
        wait $pid 2>/dev/null || true
    done
    for folder in "$SCRATCH/foreign" "$SCRATCH/new"; do
        expect_line 1 "half: .* stripe 1 is $SCRATCH/half-1, not $folder: give the same" \
            calypte convert --stripe "$folder" "$SOURCE" "$SCRATCH/half"
    done
    expect_line 1 "unfinished conversion .* with other options" calypte convert "$SOURCE" "$SCRATCH/half"
    [ ! -e "$SCRATCH/new" ] || fail "a refused conversion left a folder"
    # A journal without its first line says nothing of the folders.
    mkdir "$SCRATCH/begun" && printf '{"fingerprint": "0' >"$SCRATCH/begun/convert.state"
    expect_line 1 "foreign: holds .*, but neither a container" calypte convert --stripe "$SCRATCH/foreign" "$SOURCE" "$SCRATCH/begun"
    [ "$(cat "$SCRATCH/begun/convert.state")" = '{"fingerprint": "0' ] || fail "a refused conversion wrote into its folder"
    calypte convert "$SOURCE" "$SCRATCH/begun" 2>/dev/null
    expect_same "$SCRATCH/reference" "$SCRATCH/begun"
    calypte convert --stripe "$SCRATCH/half-1" "$SOURCE" "$SCRATCH/half" 2>/dev/null
    for folder in "$SCRATCH/foreign" "$SCRATCH/new"; do
        calypte convert --stripe "$folder" "$SOURCE" "$SCRATCH/half" 2>&1 | grep -q 'nothing to do' || fail "made again"
    done
    [ ! -e "$SCRATCH/new" ] || fail "a folder that nothing was written to is left"
    sums "$SCRATCH/foreign" | cmp - "$SCRATCH/foreign-before" || fail "a foreign folder was written to"
    calypte verify "$SCRATCH/half" >/dev/null || fail "the container is not whole"
    note "foreign and empty folders"
}

# files FOLDER: each file of it as name, inode and time of change of contents.
files() { (cd "$1" && stat -c '%n %i %y' *); }

# expect_remade FOLDER NAMES...: since $SCRATCH/files-before these files of it have become others, and no more.
expect_remade() {
    folder=$1
    shift
    files "$folder" | diff "$SCRATCH/files-before" - | sed -n 's/^> \([^ ]*\) .*/\1/p' >"$SCRATCH/remade"
    [ "$(echo $(cat "$SCRATCH/remade"))" = "$*" ] || fail "remade in $folder: $(echo $(cat "$SCRATCH/remade")), and not: $*"
}

# Files of a container that are missing, cut short or damaged: convert makes them anew, and only them.
test_mend() {
    cp -a "$SCRATCH/reference" "$SCRATCH/mend"
    files "$SCRATCH/mend" >"$SCRATCH/files-before"
    hurt=$SCRATCH/mend/experts-0-00002.safetensors
    head -c 16 "$SCRATCH/mend/tokenizer.json" | dd of="$hurt" bs=1 seek=100000 conv=notrunc 2>/dev/null
    calypte convert "$SOURCE" "$SCRATCH/mend" 2>&1 | grep -q 'nothing to do' || fail "convert read the contents"
    calypte verify "$SCRATCH/mend" >"$SCRATCH/lines" 2>/dev/null && fail "not damaged"
    grep -q "^$hurt: .*remove it and run its .calypte convert. again (same flags; only this file is made anew)" "$SCRATCH/lines" || fail "$(cat "$SCRATCH/lines")"
    rm "$hurt"
    calypte convert "$SOURCE" "$SCRATCH/mend" 2>"$SCRATCH/stderr" || fail "$(cat "$SCRATCH/stderr")"
    grep -q 'experts-0-00002.safetensors: missing or damaged, made anew' "$SCRATCH/stderr" || fail "$(cat "$SCRATCH/stderr")"
    expect_remade "$SCRATCH/mend" experts-0-00002.safetensors
    expect_same "$SCRATCH/reference" "$SCRATCH/mend"
    calypte verify "$SCRATCH/mend" >/dev/null || fail "not good"

    # What opening finds needs no removing; killed, it goes on.
    files "$SCRATCH/mend" >"$SCRATCH/files-before"
    tries=0
    for seconds in 0.01 0.03 0.05 0.08 10; do
        rm -f "$SCRATCH/mend/dense-00001.safetensors" "$SCRATCH/mend/tokenizer.json"
        truncate -s -4096 "$SCRATCH/mend/experts-0-00001.safetensors"
        printf X | dd of="$hurt" bs=1 seek=20 conv=notrunc 2>/dev/null
        timeout -s KILL $seconds calypte convert --jobs 1 "$SOURCE" "$SCRATCH/mend" 2>/dev/null || tries=$((tries + 1))
    done
    [ $tries -gt 0 ] || fail "never killed"
    calypte convert "$SOURCE" "$SCRATCH/mend" 2>/dev/null || fail "does not go on"
    expect_remade "$SCRATCH/mend" dense-00001.safetensors experts-0-00001.safetensors experts-0-00002.safetensors tokenizer.json
    expect_same "$SCRATCH/reference" "$SCRATCH/mend"

    # Bytes that the fingerprint does not sample: another checkpoint must not get into the container.
    cp -a "$SOURCE" "$SCRATCH/other"
    shard=$SCRATCH/other/model-00002-of-00003.safetensors
    dd if=/dev/zero of="$shard" bs=1 seek=$(($(stat -c %s "$shard") / 2 + 150000)) count=65536 conv=notrunc 2>/dev/null
    rm "$SCRATCH"/mend/*.safetensors
    calypte convert "$SCRATCH/other" "$SCRATCH/mend" 2>"$SCRATCH/stderr" && fail "took another checkpoint's weights"
    tail -n 1 "$SCRATCH/stderr" | grep -q 'would not become what calypte.json .* is no longer what that container was made of' || fail "$(cat "$SCRATCH/stderr")"
    [ -z "$(find "$SCRATCH/mend" -name '*.part')" ] || fail "a temporary file is left"
    calypte convert "$SOURCE" "$SCRATCH/mend" 2>/dev/null || fail "does not go on"
    expect_same "$SCRATCH/reference" "$SCRATCH/mend"

    rm "$SCRATCH/mend/calypte.json"
    expect_line 1 "mend: holds a container's files, but no calypte.json .*fetch this file again, or remove the folder and convert" calypte convert "$SOURCE" "$SCRATCH/mend"
    expect_line 1 'holds no calypte.json, .*: fetch this file again, or remove the folder and convert' calypte verify "$SCRATCH/mend"
    rm -rf "$SCRATCH/mend" "$SCRATCH/other"
    note "mended: only what was missing or damaged, the same bytes"
}

# The same of one stripe: the files of the others stay; a link that leads nowhere is a drive that is away.
test_mend_stripe() {
    stripe="--stripe $SCRATCH/mend-1"
    calypte convert $stripe "$SOURCE" "$SCRATCH/mend" 2>"$SCRATCH/stderr"
    [ "$(grep -c "mend and .*mend-1 are on the same drive: striping gains nothing" "$SCRATCH/stderr")" -eq 1 ] || fail "$(cat "$SCRATCH/stderr")"
    sums "$SCRATCH/mend-1" >"$SCRATCH/sums-stripe"
    file=experts-1-00002.safetensors
    files "$SCRATCH/mend" >"$SCRATCH/files-before"
    mv "$SCRATCH/mend-1/$file" "$SCRATCH/away"
    expect_line 1 "$file: a link to .*mount its drive, or mend the link, or remove the link and run" calypte convert $stripe "$SOURCE" "$SCRATCH/mend"
    rm "$SCRATCH/mend/$file"
    mkdir "$SCRATCH/foreign-1"
    echo "of somebody else" >"$SCRATCH/foreign-1/$file"
    expect_line 1 'foreign-1: holds something, and no link experts-1-' calypte convert --stripe "$SCRATCH/foreign-1" "$SOURCE" "$SCRATCH/mend"
    [ "$(cat "$SCRATCH/foreign-1/$file")" = "of somebody else" ] || fail "written over"
    for damage in missing short; do
        [ $damage = missing ] || truncate -s 100 "$SCRATCH/mend-1/$file"
        calypte convert $stripe "$SOURCE" "$SCRATCH/mend" 2>/dev/null || fail "$damage: not mended"
        sums "$SCRATCH/mend-1" | cmp - "$SCRATCH/sums-stripe" || fail "$damage: other bytes"
        expect_remade "$SCRATCH/mend" $file
        calypte verify "$SCRATCH/mend" >/dev/null || fail "$damage: not good"
    done
    rm -rf "$SCRATCH/mend" "$SCRATCH/mend-1" "$SCRATCH/foreign-1" "$SCRATCH/away"
    note "mended in one stripe"
}

# A file that this user may not read is not a damaged one.
test_permissions() {
    cp -r "$SCRATCH/reference" "$SCRATCH/closed"
    other=
    if [ "$(id -u)" -eq 0 ]; then
        other="setpriv --reuid=65534 --regid=65534 --clear-groups"
        chmod 755 "$SCRATCH"
        chmod -R a+rX "$SCRATCH/closed"
        if ! $other test -x "$CALYPTE_BIN/calypte"; then
            note "skipped: another user cannot run the programs"
            return 0
        fi
    fi
    for file in dense-00001.safetensors experts-0-00001.safetensors calypte.json; do
        chmod 000 "$SCRATCH/closed/$file"
        expect_line 1 "$file: Permission denied; let this user read it" $other env HOME=/nowhere calypte info "$SCRATCH/closed"
        grep -Eq 'convert|fetch' "$SCRATCH/stderr" && fail "the wrong remedy: $(cat "$SCRATCH/stderr")"
        chmod 644 "$SCRATCH/closed/$file"
    done
    chmod 000 "$SCRATCH/closed/tokenizer.json"
    expect_line 1 "tokenizer.json: Permission denied; let this user read it" $other calypte tokenize "$SCRATCH/closed" Bird
    rm -rf "$SCRATCH/closed"
    note "permissions"
}

test_damaged_source() {
    mkdir "$SCRATCH/source"
    cp -r "$SOURCE/." "$SCRATCH/source"
    truncate -s -1 "$SCRATCH/source/model-00002-of-00003.safetensors"
    expect_line 1 'model-00002-of-00003.safetensors: tensor .* truncated, fetch it again' calypte convert "$SCRATCH/source" "$SCRATCH/out"
    rm "$SCRATCH/source/model-00002-of-00003.safetensors"
    expect_line 1 'model-00002-of-00003.safetensors: No such file' calypte convert "$SCRATCH/source" "$SCRATCH/out"
    expect_line 1 'holds no config.json: not a Hugging Face checkpoint' calypte convert "$SCRATCH" "$SCRATCH/out"
    expect_line 1 'nowhere: No such file or directory; give the folder of a Hugging Face checkpoint' calypte convert "$SCRATCH/nowhere" "$SCRATCH/out"
    expect_line 1 'reference: is a Calypte container already; give' calypte convert "$SCRATCH/reference" "$SCRATCH/out"
    [ ! -e "$SCRATCH/out" ] || fail "something was written for a checkpoint that cannot be read"
    note "damaged sources"
}

test_usage() {
    expect_line 2 'unknown flag --expert, did you mean --experts' calypte convert --expert int4 "$SOURCE" "$SCRATCH/out"
    expect_line 2 '--experts int5' calypte convert --experts int5 "$SOURCE" "$SCRATCH/out"
    expect_line 2 '--jobs' calypte convert --jobs 0 "$SOURCE" "$SCRATCH/out"
    expect_line 2 '--qk-norm-eps' calypte convert --qk-norm-eps=-1 "$SOURCE" "$SCRATCH/out"
    expect_line 2 'DST' calypte convert "$SOURCE"
    calypte convert --plan --json "$SOURCE" "$SCRATCH/out" >"$SCRATCH/plan.json" 2>/dev/null
    [ ! -e "$SCRATCH/out" ] || fail "--plan wrote something"
    for file in "$SCRATCH"/reference/*.safetensors; do
        planned=$(json "$SCRATCH/plan.json" ".files[\"${file##*/}\"]")
        [ "$planned" -eq "$(stat -c %s "$file")" ] || fail "--plan says $planned bytes for $file"
    done
    calypte info --json "$SCRATCH/reference" >"$SCRATCH/info.json"
    [ "$(json "$SCRATCH/info.json" .expert_bytes)" = 65536 ] || fail "an expert of the bundled model has 65536 bytes"
    calypte info --json "$SOURCE" >"$SCRATCH/would.json"
    [ "$(json "$SCRATCH/would.json" .kind)" = checkpoint ] || fail "info does not know a checkpoint"
    [ "$(json "$SCRATCH/would.json" .total_bytes)" = "$(json "$SCRATCH/info.json" .total_bytes)" ] || fail "plan and container differ"
    expect_line 1 'nowhere' calypte info "$SCRATCH/nowhere"
    note "usage, plan, info"
}

test_killed
test_interrupted
test_twice
test_full_disk
test_stripes
test_foreign_folders
test_mend
test_mend_stripe
test_permissions
test_damaged_source
test_usage
sums "$SOURCE" >"$SCRATCH/source-after"
cmp "$SCRATCH/source-before" "$SCRATCH/source-after" || fail "the source was written to"
