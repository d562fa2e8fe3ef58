// The 16-bit and 8-bit floats of weights and activations. They are storage formats only; arithmetic is done in float32.
#pragma once

// The upper half of a float32.
struct bf16 {
    uint16_t bits;
};

// IEEE 754 binary16.
struct f16 {
    uint16_t bits;
};

// FP8 with four exponent bits. It has no infinity; NaN is 0x7f.
struct e4m3 {
    uint8_t bits;
};

SKEP_DEVICE uint32_t float_bits(float value) {
#if defined(__CUDACC_RTC__)
    return __float_as_uint(value);
#else
    return __builtin_bit_cast(uint32_t, value);
#endif
}

SKEP_DEVICE float bits_float(uint32_t bits) {
#if defined(__CUDACC_RTC__)
    return __uint_as_float(bits);
#else
    return __builtin_bit_cast(float, bits);
#endif
}

// Adds without letting the compiler fuse the sum with a product, so that different kernels, and different rows within a thread,
// get the same bits.
SKEP_DEVICE float add_rounded(float a, float b) {
#if defined(__CUDACC_RTC__)
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}

// Returns a · b + c, rounded once on a device. The compiler does not choose how to round, so that different kernels get the same
// bits.
SKEP_DEVICE float multiply_add(float a, float b, float c) {
#if defined(__CUDACC_RTC__)
    return __fmaf_rn(a, b, c);
#else
    return a * b + c;
#endif
}

SKEP_DEVICE float to_float(float value) {
    return value;
}

SKEP_DEVICE float to_float(bf16 value) {
    return bits_float(static_cast<uint32_t>(value.bits) << 16);
}

SKEP_DEVICE float to_float(f16 value) {
#if defined(__CUDACC_RTC__)
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
#else
    return static_cast<float>(__builtin_bit_cast(_Float16, value.bits));
#endif
}

SKEP_DEVICE float to_float(e4m3 value) {
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x80) << 24;
    const uint32_t exponent = (value.bits >> 3) & 0xf;
    const uint32_t mantissa = value.bits & 0x7;
    if (exponent == 0) {
        const float magnitude = static_cast<float>(mantissa) * 0.001953125f; // 2^-9
        return sign ? -magnitude : magnitude;
    }
    if (exponent == 15 && mantissa == 7) {
        return bits_float(0x7fc00000u);
    }
    return bits_float(sign | ((exponent + 120) << 23) | (mantissa << 20));
}

// Rounds to nearest, ties to even.
template <typename T>
SKEP_DEVICE T from_float(float value);

template <>
SKEP_DEVICE float from_float<float>(float value) {
    return value;
}

template <>
SKEP_DEVICE bf16 from_float<bf16>(float value) {
#if defined(__CUDACC_RTC__)
    uint16_t half;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return bf16{half};
#else
    const uint32_t bits = float_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return bf16{static_cast<uint16_t>((bits >> 16) | 0x40)};
    }
    return bf16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};
#endif
}

template <>
SKEP_DEVICE f16 from_float<f16>(float value) {
#if defined(__CUDACC_RTC__)
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return f16{bits};
#else
    return f16{__builtin_bit_cast(uint16_t, static_cast<_Float16>(value))};
#endif
}

// Larger magnitudes become the largest one, 448, and so does NaN.
template <>
SKEP_DEVICE e4m3 from_float<e4m3>(float value) {
    const uint32_t bits = float_bits(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t code;
    if (magnitude < 0x3c800000u) { // 2^-6, the smallest value with an exponent
        // The sum has a step of 2^-9, which is that of the values without an exponent.
        code = float_bits(add_rounded(bits_float(magnitude), 16384.0f)) - 0x46800000u;
    } else {
        code = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20) - (120u << 3);
        code = code < 0x7e ? code : 0x7e;
    }
    return e4m3{static_cast<uint8_t>(code | (bits >> 24 & 0x80))};
}

// Eight 16-bit values or four floats: the unit that a thread loads or stores at once.
struct alignas(16) Vec16 {
    uint32_t words[4];
};

// Half of that.
struct alignas(8) Vec8 {
    uint32_t words[2];
};

// Splits a word into its two 16-bit values, the lower one first.
template <typename T>
SKEP_DEVICE void unpack(uint32_t word, float& low, float& high) {
    low = to_float(T{static_cast<uint16_t>(word & 0xffff)});
    high = to_float(T{static_cast<uint16_t>(word >> 16)});
}

template <typename T>
SKEP_DEVICE uint32_t pack(float low, float high) {
    return static_cast<uint32_t>(from_float<T>(low).bits) |
           static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}

#if defined(__CUDACC_RTC__)

// One instruction rounds both values. It gives every NaN the same bits.
template <>
SKEP_DEVICE uint32_t pack<bf16>(float low, float high) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

template <>
SKEP_DEVICE uint32_t pack<f16>(float low, float high) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

#endif
