// Keys and values in pages, in the format of the activations or in FP8, and the operands that tensor cores take from FP8.
//
// The FP8 values of a position's head have one scale for its key and one for its value. The kernel that writes them computes a scale
// from that head alone, so what is stored depends neither on the other rows of a step nor on how a prompt was divided into steps. A
// scale for a whole page would change when the page gets its next position, and with it values that other sequences share.
//
// The scale of a key multiplies its scores, and that of a value the weights of that value, so FP8 values are only converted to 16
// bits, which is exact. The weights then have the range of the values, so the second product is in BF16 whatever the activations are.
//
// An 8×8 tile of 16-bit elements is one of 8×16 FP8 values, of which a lane holds four dimensions of a key, or two dimensions of
// two neighboring values. Converted, the even ones and the odd ones become a word each. For keys, the queries have the same order:
// the even dimensions of each sixteen come first. For values, the columns of the result have it.
#pragma once

#include "device.cuh"
#include "ptx/mma.cuh"
#include "ptx/pairs.cuh"

template <typename KV>
constexpr bool IS_FP8 = sizeof(KV) == 1;

// Values of a key or a value in sixteen bytes, which a lane copies at once. Rows in shared memory have as many of padding, so that
// the rows of a tile are in different banks.
template <typename KV>
constexpr int CHUNK_VALUES = 16 / sizeof(KV);

// Scales of a head in a page: of its keys, then of its values. Pages have them as f32 [pages, kv_heads, PAGE_SCALES].
constexpr uint32_t SCALES_OF_POSITION = 2;
constexpr uint32_t PAGE_SCALES = SCALES_OF_POSITION * PAGE_POSITIONS;
constexpr uint32_t SCALE_CHUNKS = PAGE_SCALES * 4 / 16;
// The largest FP8 value.
constexpr float MOST_E4M3 = 448.0f;
// A head whose values are all smaller is stored as zeros.
constexpr float LEAST_STORED = 1e-30f;

// The format of the operands of the product of weights and values.
template <typename T, typename KV>
struct ValueOperand {
    using Type = T;
};

template <typename T>
struct ValueOperand<T, e4m3> {
    using Type = bf16;
};

// Two neighboring scales.
struct alignas(8) ScalePair {
    float values[2];
};

// Returns the index of the first scale of a head in a page.
SKEP_DEVICE uint64_t scales_at(uint64_t page, uint32_t kv_heads, uint32_t kv_head) {
    return (page * kv_heads + kv_head) * PAGE_SCALES;
}

// The scale of a head's key or value, and the factor that values are multiplied by before they are rounded.
struct HeadScale {
    float scale;
    float inverse;
};

// Returns the scale of a head from the bits of its largest magnitude. NaN and infinities have larger bits than numbers, and make the
// scale NaN, because the format has no infinity.
SKEP_DEVICE HeadScale scale_of_head(uint32_t most_bits) {
    if (most_bits >= 0x7f800000u) {
        return {bits_float(0x7fc00000u), 0.0f};
    }
    const float most = bits_float(most_bits);
    if (most < LEAST_STORED) {
        return {0.0f, 0.0f};
    }
    return {most * (1.0f / MOST_E4M3), MOST_E4M3 / most};
}

// Converts four FP8 values exactly: the first and the third, and the second and the fourth.
template <typename T>
SKEP_DEVICE void convert_e4m3(uint32_t word, uint32_t& even, uint32_t& odd);

// The bits of an FP8 value, moved to the exponent and the mantissa of BF16, are a value 2^120 times as small.
template <>
SKEP_DEVICE void convert_e4m3<bf16>(uint32_t word, uint32_t& even, uint32_t& odd) {
    constexpr uint32_t SIGNS = 0x80008000u;
    constexpr uint32_t MAGNITUDES = 0x07f007f0u;
    constexpr uint32_t FACTOR = 0x7b807b80u; // 2^120
    even = fused_pairs<bf16>((word << 8 & SIGNS) | (word << 4 & MAGNITUDES), FACTOR, 0);
    odd = fused_pairs<bf16>((word & SIGNS) | (word >> 4 & MAGNITUDES), FACTOR, 0);
}

template <>
SKEP_DEVICE void convert_e4m3<f16>(uint32_t word, uint32_t& even, uint32_t& odd) {
#if defined(__CUDACC_RTC__) && __CUDA_ARCH__ >= 890
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}"
        : "=r"(even), "=r"(odd)
        : "r"(__byte_perm(word, 0, 0x3120)));
#else
    // The same as above, with a factor of 2^8.
    constexpr uint32_t SIGNS = 0x80008000u;
    constexpr uint32_t MAGNITUDES = 0x3f803f80u;
    constexpr uint32_t FACTOR = 0x5c005c00u;
    even = fused_pairs<f16>((word << 8 & SIGNS) | (word << 7 & MAGNITUDES), FACTOR, 0);
    odd = fused_pairs<f16>((word & SIGNS) | (word >> 1 & MAGNITUDES), FACTOR, 0);
#endif
}

// Moves the even values of sixteen in shared memory before the odd ones. They are aligned to 16 bytes.
template <typename T>
SKEP_DEVICE void put_even_first(T* sixteen) {
    Vec16* const halves = reinterpret_cast<Vec16*>(sixteen);
    const Vec16 from[2] = {halves[0], halves[1]};
    Vec16 even, odd;
    SKEP_UNROLL
    for (int i = 0; i < 4; ++i) {
        const uint32_t low = from[i / 2].words[i % 2 * 2];
        const uint32_t high = from[i / 2].words[i % 2 * 2 + 1];
        even.words[i] = (low & 0xffffu) | high << 16;
        odd.words[i] = low >> 16 | (high & 0xffff0000u);
    }
    halves[0] = even;
    halves[1] = odd;
}

// Loads two runs of sixteen dimensions of sixteen positions from shared memory. Words 2 · n and 2 · n + 1 belong to run `run + n`, and
// to the first and the last eight positions.
template <int HEAD_SIZE, int STRIDE, bool IS_TRANSPOSED>
SKEP_DEVICE void load_fp8(uint32_t (&words)[4], const e4m3* rows, uint32_t run) {
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t tile = lane / 8;
    // A head of one run has no second one, so the first is loaded twice.
    const uint32_t column = HEAD_SIZE == 16 ? 0 : (run + tile / 2) * 16;
    const e4m3* const row = rows + (tile % 2 * 8 + lane % 8) * STRIDE + column;
    if constexpr (IS_TRANSPOSED) {
        load_tiles_transposed(words, row);
    } else {
        load_tiles(words, row);
    }
}

// Multiplies the weights of sixteen positions by their values in shared memory.
template <int HEAD_SIZE, int STRIDE>
SKEP_DEVICE void multiply_fp8_values(float (&sums)[HEAD_SIZE / 8][4], const uint32_t (&weights)[4], const e4m3* values) {
    constexpr int RUNS = HEAD_SIZE / 16;
    SKEP_UNROLL
    for (int first = 0; first < RUNS; first += 2) {
        uint32_t words[4];
        load_fp8<HEAD_SIZE, STRIDE, true>(words, values, first);
        SKEP_UNROLL
        for (int run = first; run < first + 2 && run < RUNS; ++run) {
            uint32_t even[2], odd[2];
            convert_e4m3<bf16>(words[(run - first) * 2], even[0], odd[0]);
            convert_e4m3<bf16>(words[(run - first) * 2 + 1], even[1], odd[1]);
            mma_16x8x16<bf16>(sums[2 * run], weights, even);
            mma_16x8x16<bf16>(sums[2 * run + 1], weights, odd);
        }
    }
}

// Returns the dimension of a lane's sum of a column, of which it has two in a row.
template <typename KV>
SKEP_DEVICE uint32_t dimension_of(uint32_t column, uint32_t index) {
    const uint32_t lane = threadIdx.x % 4;
    return IS_FP8<KV> ? column / 2 * 16 + 4 * lane + 2 * index + column % 2 : column * 8 + 2 * lane + index;
}

// Multiplies the scores of a lane's keys, of sixteen positions, by the scales of these keys.
SKEP_DEVICE void scale_scores(float (&scores)[2][4], const float* scales) {
    SKEP_UNROLL
    for (int column = 0; column < 2; ++column) {
        const ScalePair pair = *reinterpret_cast<const ScalePair*>(scales + column * 8 + 2 * (threadIdx.x % 4));
        SKEP_UNROLL
        for (int i = 0; i < 4; ++i) {
            scores[column][i] *= pair.values[i % 2];
        }
    }
}

// Multiplies the weights of a lane's values, of sixteen positions, by the scales of these values. A position that a row does not see has
// the weight zero, and perhaps no scale.
SKEP_DEVICE void scale_weights(float (&weights)[2][4], const float* scales) {
    SKEP_UNROLL
    for (int column = 0; column < 2; ++column) {
        const ScalePair pair = *reinterpret_cast<const ScalePair*>(scales + column * 8 + 2 * (threadIdx.x % 4));
        SKEP_UNROLL
        for (int i = 0; i < 4; ++i) {
            float& weight = weights[column][i];
            weight = weight == 0.0f ? 0.0f : weight * pair.values[i % 2];
        }
    }
}
