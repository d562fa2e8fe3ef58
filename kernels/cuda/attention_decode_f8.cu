// Attention of up to sixteen rows per sequence over pages in FP8.
#include "attention_decode.cuh"

#define ATTENTION_DECODE_ALL(T)                  \
    ATTENTION_DECODE(f8_16##_##T, T, e4m3, 16)   \
    ATTENTION_DECODE(f8_32##_##T, T, e4m3, 32)   \
    ATTENTION_DECODE(f8_64##_##T, T, e4m3, 64)   \
    ATTENTION_DECODE(f8_96##_##T, T, e4m3, 96)   \
    ATTENTION_DECODE(f8_128##_##T, T, e4m3, 128) \
    ATTENTION_DECODE(f8_256##_##T, T, e4m3, 256)

ATTENTION_DECODE_ALL(bf16)
ATTENTION_DECODE_ALL(f16)
