# A damaged container: each fault is one line that names the file (and the expert) and what to do; nothing else stops.
. "$CALYPTE_TESTS/integration/common.sh"

QUESTION="What is a bird?"
answer=$(calypte run "$CALYPTE_MODEL" "$QUESTION")

# flip FILE OFFSET: changes one byte
flip() {
    old=$(od -An -tu1 -j "$2" -N 1 "$1" | tr -d ' ')
    printf "\\$(printf %03o $((old ^ 1)))" | dd of="$1" bs=1 seek="$2" conv=notrunc 2>/dev/null
}

fresh() {
    rm -rf "$SCRATCH/model"
    cp -r "$CALYPTE_MODEL" "$SCRATCH/model"
    chmod -R u+w "$SCRATCH/model"
}

# refused WORDS: the damaged model is refused in one line, in run and in up
refused() {
    expect_line 1 "$1" calypte run "$SCRATCH/model" "$QUESTION"
    expect_line 1 "$1" calypte up "$SCRATCH/model" -n "$NAME"
    expect_nothing_left "$NAME"
    expect_no_private_left
}

fresh
dense=$(basename "$(ls "$SCRATCH/model"/dense-*.safetensors | head -n 1)")
experts=$(basename "$(ls "$SCRATCH/model"/experts-*.safetensors | head -n 1)")

for file in "$dense" "$experts"; do
    note "$file: header"
    flip "$SCRATCH/model/$file" 20
    refused "$file"
    fresh
    note "$file: cut short"
    truncate -s -4096 "$SCRATCH/model/$file"
    refused "$file"
    fresh
    note "$file: missing"
    rm "$SCRATCH/model/$file"
    refused "$file"
    fresh
done
note "calypte.json"
flip "$SCRATCH/model/calypte.json" 200
refused 'calypte\.json'
fresh
rm "$SCRATCH/model/calypte.json"
refused 'calypte\.json'
fresh

note "$dense: a byte of a weight"
flip "$SCRATCH/model/$dense" $(($(stat -c %s "$SCRATCH/model/$dense") / 2))
refused "$dense"
fresh

note "$experts: a byte of every expert; the request gets an error, the instance lives on"
size=$(stat -c %s "$SCRATCH/model/$experts")
header=$(od -An -tu8 -N 8 "$SCRATCH/model/$experts" | tr -d ' ')
blobs=$((header + 8))
[ $((blobs % 4096)) = 0 ] || fail "data begin at $blobs"
offset=$((blobs + 100))
while [ $offset -lt $((size - 65536)) ]; do
    flip "$SCRATCH/model/$experts" $offset
    offset=$((offset + 65536))
done
calypte up "$SCRATCH/model" -n "$NAME" >/dev/null
expect_line 1 "model_error: expert [0-9]+ of layer [0-9]+.* in $experts of $SCRATCH/model: .*checksum.*convert.*same flags" calypte run -n "$NAME" "$QUESTION"
expect_line 1 'model_error: expert [0-9]+ of layer [0-9]+.*checksum' calypte run -n "$NAME" "$QUESTION"
calypte status -n "$NAME" --json >"$SCRATCH/status"
[ "$(json "$SCRATCH/status" '[.processes[].restarts] | add')" = 0 ] || fail "something died: $(cat "$SCRATCH/status")"
[ "$(json "$SCRATCH/status" .state)" = serving ] || fail "$(json "$SCRATCH/status" .state)"
[ "$(json "$SCRATCH/status" .pool.pinned)" = 0 ] || fail "pins are left: $(json "$SCRATCH/status" .pool)"

note "mended beneath it, it answers"
cp "$CALYPTE_MODEL/$experts" "$SCRATCH/mended"
dd if="$SCRATCH/mended" of="$SCRATCH/model/$experts" conv=notrunc bs=1M 2>/dev/null
got=$(calypte run -n "$NAME" "$QUESTION")
[ "$got" = "$answer" ] || fail "answered: $got"
calypte down -n "$NAME"
expect_nothing_left "$NAME"

note "cut while it runs: truncated, says the answer, and names the remedy"
fresh
calypte up "$SCRATCH/model" -n "$NAME" --pool 256K --set learning=off >/dev/null
for file in "$SCRATCH/model"/experts-*; do truncate -s $((blobs + 8192)) "$file"; done
expect_line 1 "model_error: expert [0-9]+ of layer [0-9]+.*: the file is truncated: .*convert" calypte run -n "$NAME" "$QUESTION"
calypte down -n "$NAME"

note "damage that is not verified: scales that are no numbers are an error, not an answer"
fresh
calypte up "$SCRATCH/model" -n "$NAME" --pool 256K --set learning=off --set verify=off >/dev/null
got=$(calypte run -n "$NAME" "$QUESTION")
[ "$got" = "$answer" ] || fail "answered: $got"
for file in "$SCRATCH/model"/experts-*; do # every byte is 127: as f16 that is none
    head -c $(($(stat -c %s "$file") - blobs)) /dev/zero | tr '\0' '\177' | dd of="$file" bs=4096 seek=$((blobs / 4096)) conv=notrunc 2>/dev/null
done
expect_line 1 "model_error: the logits .* are not numbers" calypte run -n "$NAME" "$QUESTION"
calypte down -n "$NAME"
expect_nothing_left "$NAME"
