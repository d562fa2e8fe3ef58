// Arithmetic with pairs of 16-bit floats in a word. Every result is rounded to nearest.
#pragma once

#include "device.cuh"

// Returns a · b + c of both values.
template <typename T>
SKEP_DEVICE uint32_t fused_pairs(uint32_t a, uint32_t b, uint32_t c);

#if defined(__CUDACC_RTC__)

template <>
SKEP_DEVICE uint32_t fused_pairs<bf16>(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t word;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(word) : "r"(a), "r"(b), "r"(c));
    return word;
}

template <>
SKEP_DEVICE uint32_t fused_pairs<f16>(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t word;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(word) : "r"(a), "r"(b), "r"(c));
    return word;
}

#else

template <typename T>
SKEP_DEVICE uint32_t fused_pairs(uint32_t a, uint32_t b, uint32_t c) {
    float low[3], high[3];
    unpack<T>(a, low[0], high[0]);
    unpack<T>(b, low[1], high[1]);
    unpack<T>(c, low[2], high[2]);
    return pack<T>(low[0] * low[1] + low[2], high[0] * high[1] + high[2]);
}

#endif
