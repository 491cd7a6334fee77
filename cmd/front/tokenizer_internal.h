/* What tokenizer.c and tokenizer_load.c share. */
#pragma once

#include "cmd/front/added_tokens.h"
#include "cmd/front/bpe.h"
#include "cmd/front/pretokenizer.h"
#include "cmd/front/tokenizer.h"
#include "cmd/front/vocabulary.h"

struct tokenizer {
    struct vocabulary vocabulary;
    struct bpe bpe;
    struct added_tokens added;
    struct pretokenizer pretokenizer;
    bool ignore_merges; /* a word that is in the vocabulary as a whole is that token, whatever the merges say */
    bool nfc;           /* text is brought into NFC, after added tokens that are not `normalized` have been found */
};
