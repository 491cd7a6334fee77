# The promises about numbers: numbers.sh oracle NAME | perplexity | answers | bits
. "$CALYPTE_TESTS/integration/common.sh"

# score CONTAINER OUT [settings...]: logits of the oracle's tokens into OUT.logits and OUT.draft
score() {
    container=$1 out=$2
    shift 2
    calypte score "$container" --tokens "$SCRATCH/tokens" --logits "$out.logits" --draft-logits "$out.draft" "$@" >/dev/null
}

oracle_test() {
    folder="$CALYPTE_TESTS/oracles/$1" want="$CALYPTE_TESTS/oracles/$1/oracle.safetensors" c="$SCRATCH/container" out="$SCRATCH/out"
    calypte convert "$folder/checkpoint" "$c"
    oracle tokens "$want" >"$SCRATCH/tokens"
    oracle prompt "$folder/oracle.json" >"$SCRATCH/prompt"

    note "reference activations: as Hugging Face, but for rounding"
    score "$c" "$out" --set activations=f32 --set kv=f32
    oracle logits "$out.logits" logits "$want" logits top1=1 cosine=0.99999 exceptions=2
    oracle logits "$out.draft" draft_logits "$want" draft_logits top1=1 cosine=0.99999 exceptions=2
    score "$c" "$out" --set activations=f32 --set kv=f32 --set index_topk=4096
    oracle logits "$out.logits" logits "$want" logits_dense top1=1 cosine=0.99999 exceptions=2
    calypte run "$c" --tokens "$SCRATCH/prompt" --temperature 0 --max-tokens 24 --json \
        --set activations=f32 --set kv=f32 >"$SCRATCH/answer.json"
    oracle greedy "$folder/oracle.json" "$SCRATCH/answer.json"

    note "default activations: as close as int8 allows"
    score "$c" "$out"
    oracle logits "$out.logits" logits "$want" logits top1=0.75 median=0.997
    oracle logits "$out.draft" draft_logits "$want" draft_logits top1=0.62 median=0.985
    score "$c" "$out" --set index_topk=4096
    oracle logits "$out.logits" logits "$want" logits_dense top1=0.85 median=0.9993
}

# perplexity_of NAME TOLERANCE ARGUMENTS...
perplexity_of() {
    name=$1 tolerance=$2
    shift 2
    calypte score "$CALYPTE_MODEL" --context "$(json "$facts" .context)" --json "$@" >"$SCRATCH/score.json"
    got=$(json "$SCRATCH/score.json" .perplexity) want=$(json "$facts" .perplexity)
    note "$name: perplexity $got, Hugging Face $want, allowed $tolerance more"
    awk -v got="$got" -v want="$want" -v tolerance="$tolerance" \
        'BEGIN { exit !(got > 0 && got <= want * (1 + tolerance) && got >= want * (1 - tolerance)) }' || fail "$name: out of tolerance"
}

perplexity_test() {
    facts="$CALYPTE_TESTS/oracles/score.json" oracles="$CALYPTE_TESTS/oracles"
    perplexity_of tokens "$(json "$facts" .tolerance)" --tokens "$oracles/score.tokens"
    perplexity_of text "$(json "$facts" .tolerance)" --text "$oracles/score.txt"
    perplexity_of "tokens, f32" "$(json "$facts" .tolerance_f32_activations)" --tokens "$oracles/score.tokens" \
        --set activations=f32
}

answers_test() {
    answers="$CALYPTE_TESTS/oracles/answers.json" right=0 i=0
    count=$(json "$answers" length)
    calypte up "$CALYPTE_MODEL" -n "$NAME"
    while [ $i -lt "$count" ]; do
        want=$(json "$answers" ".[$i].answer")
        got=$(calypte run -n "$NAME" --temperature 0 "$(json "$answers" ".[$i].question")")
        if [ "$got" = "$want" ]; then right=$((right + 1)); else note "want: $want"; note "got:  $got"; fi
        i=$((i + 1))
    done
    note "$right of $count answers word for word"
    [ $right -ge 13 ] || fail "at least 13 were wanted"
}

# same_bits SETTING...: these settings give the bits of the first call.
same_bits() {
    settings=$*
    flags=
    for setting in "$@"; do flags="$flags --set $setting"; done
    # shellcheck disable=SC2086
    score "$CALYPTE_MODEL" "$SCRATCH/out" $flags
    sum=$(cat "$SCRATCH/out.logits" "$SCRATCH/out.draft" | sha256sum)
    note "${settings:-as it comes}: $sum"
    [ "${first:=$sum}" = "$sum" ] || fail "$settings: other bits"
}

# runs_here ISA: this machine has what the kernel set needs; where it has not, the refusal says in one line what is missing.
runs_here() {
    if calypte run "$CALYPTE_MODEL" --tokens "$SCRATCH/tokens" --max-tokens 1 --set isa="$1" >/dev/null 2>"$SCRATCH/stderr"; then
        return 0
    fi
    expect_line 1 "isa=$1: this machine lacks .*; use isa=auto" calypte run "$CALYPTE_MODEL" --tokens "$SCRATCH/tokens" \
        --max-tokens 1 --set isa="$1"
    note "skipped: $(cat "$SCRATCH/stderr")"
    return 1
}

# The same logits, byte for byte, whatever the arrangement of the machine. 256K: four slots, the top_k of the bundled model.
bits_test() {
    head -n 300 "$CALYPTE_TESTS/oracles/score.tokens" | tr -s ' \n' '\n' | head -n 300 >"$SCRATCH/tokens"
    first=
    same_bits
    for settings in \
        "workers=1" "workers=2" "workers=3" "workers=8" "threads=1" "threads=2" "prefill_chunk=1" "prefill_chunk=7" \
        "prefill_chunk=256" "pool=256K" "pool=256K prefill_chunk=7 workers=3" "io=pread" "io=uring" "kv=f16"; do
        # shellcheck disable=SC2086
        same_bits $settings
    done
    for isa in scalar avx2 avx512 amx; do
        runs_here $isa || continue
        same_bits isa=$isa
        same_bits isa=$isa workers=2 threads=2 prefill_chunk=7
        same_bits isa=$isa workers=3 threads=1 prefill_chunk=64 pool=256K
        same_bits isa=$isa threads=2 prefill_chunk=1
    done

    note "a decode loop against the prefill of the same tokens"
    head -n 40 "$SCRATCH/tokens" >"$SCRATCH/prompt"
    calypte run "$CALYPTE_MODEL" --tokens "$SCRATCH/prompt" --temperature 0 --max-tokens 64 --json >"$SCRATCH/answer"
    json "$SCRATCH/answer" '.tokens[]' >"$SCRATCH/answer.tokens"
    cat "$SCRATCH/prompt" "$SCRATCH/answer.tokens" >"$SCRATCH/both"
    calypte score "$CALYPTE_MODEL" --tokens "$SCRATCH/both" --logits "$SCRATCH/both.logits" >/dev/null
    oracle follows "$SCRATCH/answer" "$SCRATCH/both.logits" 40

    note "a warm pool: the same instance, twice"
    calypte up "$CALYPTE_MODEL" -n "$NAME"
    for round in cold warm; do
        score "$CALYPTE_MODEL" "$SCRATCH/out"
        sum=$(cat "$SCRATCH/out.logits" "$SCRATCH/out.draft" | sha256sum)
        [ "$first" = "$sum" ] || fail "$round pool: other bits"
    done
}

case $1 in
oracle) oracle_test "$2" ;;
*) "$1_test" ;;
esac
