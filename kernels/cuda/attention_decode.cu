// Attention of up to sixteen rows per sequence over pages in the format of the activations.
#include "attention_decode.cuh"

#define ATTENTION_DECODE_ALL(T)            \
    ATTENTION_DECODE(16##_##T, T, T, 16)   \
    ATTENTION_DECODE(32##_##T, T, T, 32)   \
    ATTENTION_DECODE(64##_##T, T, T, 64)   \
    ATTENTION_DECODE(96##_##T, T, T, 96)   \
    ATTENTION_DECODE(128##_##T, T, T, 128) \
    ATTENTION_DECODE(256##_##T, T, T, 256)

ATTENTION_DECODE_ALL(bf16)
ATTENTION_DECODE_ALL(f16)
