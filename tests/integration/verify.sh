# calypte verify: a clean container, every kind of damage by name, and runs that are interrupted, killed and gone on with.
. "$CALYPTE_TESTS/integration/common.sh"
export XDG_STATE_HOME="$SCRATCH/state"

# flip FILE OFFSET: changes one byte
flip() {
    old=$(od -An -tu1 -j "$2" -N 1 "$1" | tr -d ' ')
    printf "\\$(printf %03o $((old ^ 1)))" | dd of="$1" bs=1 seek="$2" conv=notrunc 2>/dev/null
}

# tensor FILE NAME: offset of its data in the file
tensor() {
    header=$(od -An -tu8 -N 8 "$1" | tr -d ' ')
    within=$(dd if="$1" bs=4096 iflag=skip_bytes,count_bytes skip=8 count="$header" 2>/dev/null | jq ".\"$2\".data_offsets[0]")
    echo $((8 + header + within))
}

# expect_json FILTER COMMAND...: jq finds it true of what the command prints, whatever its exit code; that is in $code.
expect_json() {
    filter=$1
    shift
    code=0
    "$@" >"$SCRATCH/json" 2>"$SCRATCH/stderr" || code=$?
    jq -e "$filter" "$SCRATCH/json" >/dev/null || fail "not so: $filter in $(cat "$SCRATCH/json" "$SCRATCH/stderr")"
}

no_state() { [ -z "$(find "$XDG_STATE_HOME" -type f 2>/dev/null)" ] || fail "left: $(find "$XDG_STATE_HOME" -type f)"; }

calypte synth "$SCRATCH/model" --like olmoe --layers 2 --experts 32 2>/dev/null
model=$SCRATCH/model
experts=$model/experts-0-00001.safetensors
slice=$(jq .slice_bytes "$model/calypte.json")
(cd "$model" && sha256sum ./* && stat -c '%n %s %Y' ./*) >"$SCRATCH/before"

note "a clean container: every byte that has a checksum is counted"
# All tensors of the dense files, and all slices.
bytes=$((2 * 32 * 8 * slice))
tensors=0
for file in "$model"/dense-*.safetensors; do
    header=$(od -An -tu8 -N 8 "$file" | tr -d ' ')
    sums=$(dd if="$file" bs=4096 iflag=skip_bytes,count_bytes skip=8 count="$header" 2>/dev/null |
        jq -r '[del(.__metadata__)[] | .data_offsets[1] - .data_offsets[0]] | "\(add) \(length)"')
    bytes=$((bytes + ${sums% *}))
    tensors=$((tensors + ${sums#* }))
done
for method in uring pread; do
    for jobs in 1 3; do
        expect_json ".bytes == $bytes and .tensors == $tensors and .experts == 64 and .slices == 512 and .damaged == []
            and .resumed_bytes == 0 and .gbps > 0 and .method == \"$method\"" calypte verify "$model" --jobs $jobs --json --set io=$method
        [ $code -eq 0 ] || fail "exit $code"
    done
done
calypte verify "$CALYPTE_MODEL" | grep -q ': good: 160 experts' || fail "the bundled model: $(calypte verify "$CALYPTE_MODEL")"
no_state

note "flipped bytes: file, layer, expert, slice; the others are still looked at"
cp -r "$model" "$SCRATCH/hurt"
hurt=$SCRATCH/hurt/experts-0-00001.safetensors
blob=$(tensor "$hurt" model.layers.1.mlp.experts.7)
flip "$hurt" $((blob + 3 * slice + 5))     # inside a slice
flip "$hurt" $((blob + 8 * slice - 1))     # the last byte of the blob, in its padding
flip "$hurt" "$(tensor "$hurt" model.layers.1.mlp.experts.31)"
dense=$(ls "$SCRATCH/hurt"/dense-*.safetensors | head -n 1)
name=model.layers.1.self_attn.o_proj.weight
flip "$dense" $(($(tensor "$dense" $name) + 1000))
for jobs in 1 2; do
    expect_line 1 '2 experts and 1 dense tensor are damaged: fetch' calypte verify "$SCRATCH/hurt" --jobs $jobs
    [ "$(wc -l <"$SCRATCH/stdout")" -eq 4 ] || fail "not four lines: $(cat "$SCRATCH/stdout")"
    for words in 'experts-0-00001.safetensors: expert 7 of layer 1, slice 3: its checksum differs.*fetch this file again' \
        'expert 7 of layer 1, slice 7: ' 'expert 31 of layer 1, slice 0: ' "dense-.*: tensor $name: its checksum differs"; do
        grep -q "$words" "$SCRATCH/stdout" || fail "no '$words' in $(cat "$SCRATCH/stdout")"
    done
done
expect_json "([.damaged[] | \"\(.layer) \(.expert) \(.slice) \(.tensor)\"] | sort) ==
    ([\"1 7 3 null\", \"1 7 7 null\", \"1 31 0 null\", \"null null null $name\"] | sort)" calypte verify "$SCRATCH/hurt" --json
[ $code -eq 1 ] || fail "exit $code"
no_state

note "files that are not even there: all of them by name, then the end"
truncate -s -4096 "$hurt"
rm "$dense"
expect_line 1 'hurt: 2 of its files cannot be used, .*: mend them' calypte verify "$SCRATCH/hurt"
[ "$(wc -l <"$SCRATCH/stdout")" -eq 2 ] || fail "not two lines: $(cat "$SCRATCH/stdout")"
grep -Eq "experts-0-00001.safetensors: has [0-9]+ bytes, the manifest says [0-9]+: fetch" "$SCRATCH/stdout" || fail "$(cat "$SCRATCH/stdout")"
grep -q "^$dense: No such file or directory; fetch this file again, or run its .calypte convert" "$SCRATCH/stdout" || fail "$(cat "$SCRATCH/stdout")"
expect_json "[.damaged[] | .file] == [\"$dense\", \"$hurt\"] and (.damaged[0].reason | startswith(\"No such file\"))" calypte verify "$SCRATCH/hurt" --json
[ $code -eq 1 ] || fail "exit $code"
no_state

note "a damaged manifest, and a file cut short while it is read"
flip "$SCRATCH/hurt/calypte.json" 300
expect_line 1 'calypte.json' calypte verify "$SCRATCH/hurt"
rm -rf "$SCRATCH/hurt"
cp -r "$model" "$SCRATCH/hurt"
calypte verify "$SCRATCH/hurt" --rate 100M >"$SCRATCH/lines" 2>"$SCRATCH/stderr" &
pid=$!
until [ -n "$(find "$XDG_STATE_HOME" -name '*.verify')" ]; do sleep 0.02; done
truncate -s $((blob + 8 * slice)) "$hurt"
code=0
wait $pid || code=$?
[ $code -eq 1 ] || fail "exit $code: $(cat "$SCRATCH/stderr")"
[ "$(grep -c 'of layer 1, .*: the file is truncated' "$SCRATCH/lines")" -gt 1 ] || fail "$(cat "$SCRATCH/lines")"
grep -q 'expert [0-7] of layer 1' "$SCRATCH/lines" && fail "what is there counts as missing: $(cat "$SCRATCH/lines")"
rm -rf "$SCRATCH/hurt"
no_state

note "changed after it was read: not good, though all that was read was"
cp -r "$model" "$SCRATCH/hurt"
for json in "" --json; do
    calypte verify "$SCRATCH/hurt" --rate 150M $json >"$SCRATCH/lines" 2>"$SCRATCH/stderr" &
    pid=$!
    # the dense files are read first
    until done=$(cat "$XDG_STATE_HOME"/calypte/*.verify 2>/dev/null | jq '.files["experts-0-00000.safetensors"].done') && [ "${done:-0}" -gt 0 ]; do
        kill -0 $pid || fail "ended: $(cat "$SCRATCH/stderr")"
        sleep 0.02
    done
    dense=$(ls "$SCRATCH/hurt"/dense-*.safetensors | head -n 1)
    flip "$dense" "$(tensor "$dense" model.embed_tokens.weight)"
    code=0
    wait $pid || code=$?
    [ $code -eq 1 ] || fail "exit $code: $(cat "$SCRATCH/lines" "$SCRATCH/stderr")"
    grep -q ': 1 file changed during the run: run it again' "$SCRATCH/stderr" || fail "$(cat "$SCRATCH/stderr")"
    if [ "$json" ]; then
        [ "$(json "$SCRATCH/lines" '.changed | join(" ")')" = "$dense" ] || fail "$(cat "$SCRATCH/lines")"
    else
        [ "$(cat "$SCRATCH/lines")" = "$dense: changed during the run: what was read is not what is there now" ] || fail "$(cat "$SCRATCH/lines")"
    fi
    flip "$dense" "$(tensor "$dense" model.embed_tokens.weight)"
done
rm -rf "$SCRATCH/hurt"
no_state

# begin [FLAGS]: a slow run in the background, until it has kept a place that is some way in; its process is $pid.
begin() {
    calypte verify "$model" --rate 150M "$@" >"$SCRATCH/lines" 2>"$SCRATCH/stderr" &
    pid=$!
    until done=$(cat "$XDG_STATE_HOME"/calypte/*.verify 2>/dev/null | jq '[.files[].done] | add' 2>/dev/null) && [ "${done:-0}" -gt 10 ]; do
        kill -0 $pid || fail "ended: $(cat "$SCRATCH/stderr")"
        sleep 0.02
    done
}

for signal in KILL TERM INT; do
    note "SIG$signal, then the rest"
    # A shell without job control lets its children ignore SIGINT.
    code=0
    case $signal in
        KILL) begin; kill -KILL $pid; wait $pid || code=$?; want=137 ;;
        TERM) begin; kill -TERM $pid; wait $pid || code=$?; want=143 ;;
        INT) timeout --preserve-status -s INT 1.5 calypte verify "$model" --rate 150M 2>"$SCRATCH/stderr" >/dev/null || code=$?; want=130 ;;
    esac
    [ $code -eq $want ] || fail "exit $code: $(cat "$SCRATCH/stderr")"
    [ $signal = KILL ] || grep -q 'interrupted at [0-9.]* %; run the same command again' "$SCRATCH/stderr" || fail "$(cat "$SCRATCH/stderr")"
    expect_json ".bytes == $bytes and .resumed_bytes > 80000000 and .resumed_bytes < $bytes and .damaged == []" calypte verify "$model" --json
    [ $code -eq 0 ] || fail "exit $code"
    grep -q 'goes on at' "$SCRATCH/stderr" || fail "does not say that it goes on: $(cat "$SCRATCH/stderr")"
    no_state
done

note "a place does not outlive a change of the file, damage is looked at again, and --restart forgets it"
begin
kill -KILL $pid
wait $pid || true
cp -r "$XDG_STATE_HOME" "$SCRATCH/kept"
expect_json ".resumed_bytes == 0 and .bytes == $bytes" calypte verify "$model" --json --restart
keep() { rm -rf "$XDG_STATE_HOME"; cp -r "$SCRATCH/kept" "$XDG_STATE_HOME"; }
keep
dense=$(ls "$model"/dense-*.safetensors | head -n 1)
flip "$dense" "$(tensor "$dense" model.embed_tokens.weight)"
expect_json '[.damaged[].tensor] == ["model.embed_tokens.weight"]' calypte verify "$model" --json
begin
kill -KILL $pid
wait $pid || true
grep -q 'embed_tokens' "$SCRATCH/lines" || fail "not told at once: $(cat "$SCRATCH/lines")"
expect_json '.resumed_bytes > 20000000 and [.damaged[].tensor] == ["model.embed_tokens.weight"]' calypte verify "$model" --json
flip "$dense" "$(tensor "$dense" model.embed_tokens.weight)"
touch -d "@$(awk -v n="./$(basename "$dense")" '$1 == n { print $3 }' "$SCRATCH/before")" "$dense"
keep
state=$(ls "$XDG_STATE_HOME"/calypte/*.verify)
for wrong in '{' '[]' '{"identity": "0000000000000000"}' '{"identity": 5, "files": 7}'; do
    echo "$wrong" >"$state"
    expect_json ".resumed_bytes == 0 and .bytes == $bytes and .damaged == []" calypte verify "$model" --json
    keep
done
jq '.files[].done = 4000000000 | .files[].bad = [-1, 1e30, "x"]' "$SCRATCH/kept"/calypte/*.verify >"$state"
expect_json ".resumed_bytes == 0 and .bytes == $bytes and .damaged == []" calypte verify "$model" --json

note "nowhere to keep a place: one line, and it goes on"
XDG_STATE_HOME=/proc/nowhere expect_line 0 'cannot be written.*begin anew' calypte verify "$model"
unset XDG_STATE_HOME
HOME='' expect_line 0 'neither XDG_STATE_HOME nor HOME' calypte verify "$model"

note "nothing was written into the container"
(cd "$model" && sha256sum ./* && stat -c '%n %s %Y' ./*) >"$SCRATCH/after"
cmp -s "$SCRATCH/before" "$SCRATCH/after" || fail "$(diff "$SCRATCH/before" "$SCRATCH/after")"

note "wrong usage"
expect_line 2 'rate cannot be "200": .*200M' calypte verify "$model" --rate 200
expect_line 2 'rate cannot be "fast"' calypte verify "$model" --rate fast
expect_line 2 'jobs cannot be "0"' calypte verify "$model" --jobs 0
expect_line 1 'no/such' calypte verify /no/such
