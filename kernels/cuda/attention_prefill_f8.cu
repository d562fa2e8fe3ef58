// Causal attention of prompt rows over pages in FP8.
#include "attention_prefill.cuh"

#define ATTENTION_PREFILL_ALL(T)                  \
    ATTENTION_PREFILL(f8_16##_##T, T, e4m3, 16)   \
    ATTENTION_PREFILL(f8_32##_##T, T, e4m3, 32)   \
    ATTENTION_PREFILL(f8_64##_##T, T, e4m3, 64)   \
    ATTENTION_PREFILL(f8_96##_##T, T, e4m3, 96)   \
    ATTENTION_PREFILL(f8_128##_##T, T, e4m3, 128) \
    ATTENTION_PREFILL(f8_256##_##T, T, e4m3, 256)

ATTENTION_PREFILL_ALL(bf16)
ATTENTION_PREFILL_ALL(f16)
