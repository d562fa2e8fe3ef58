// Causal attention of prompt rows over pages in the format of the activations.
#include "attention_prefill.cuh"

SKEP_KERNEL(attention_join_bf16, AttentionJoinParams) {
    attention_join<bf16>(p);
}

SKEP_KERNEL(attention_join_f16, AttentionJoinParams) {
    attention_join<f16>(p);
}

#define ATTENTION_PREFILL_ALL(T)            \
    ATTENTION_PREFILL(16##_##T, T, T, 16)   \
    ATTENTION_PREFILL(32##_##T, T, T, 32)   \
    ATTENTION_PREFILL(64##_##T, T, T, 64)   \
    ATTENTION_PREFILL(96##_##T, T, T, 96)   \
    ATTENTION_PREFILL(128##_##T, T, T, 128) \
    ATTENTION_PREFILL(256##_##T, T, T, 256)

ATTENTION_PREFILL_ALL(bf16)
ATTENTION_PREFILL_ALL(f16)
