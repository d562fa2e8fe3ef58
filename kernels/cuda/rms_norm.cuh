// The parts that the kernels for the residual sum and its norm share.
#pragma once

#include "device.cuh"

struct RmsNormParams {
    const Vec16* x;        // [rows, width]; null: nothing is added
    const Vec16* residual; // [rows, width]
    Vec16* sum;            // [rows, width]; it may be the residual if one block reads and writes a row
    const Vec16* weight;   // [width]
    Vec16* out;            // [rows, width]
    uint32_t width;
    float epsilon;
};

// Maximum number of chunks of eight values that each thread adds up.
constexpr int CHUNKS = 4;

// Returns the sums of two chunks, rounded to their format.
template <typename T>
SKEP_DEVICE Vec16 added(Vec16 sum, const Vec16& x) {
    SKEP_UNROLL
    for (int word = 0; word < 4; ++word) {
        float a, b, c, d;
        unpack<T>(sum.words[word], a, b);
        unpack<T>(x.words[word], c, d);
        sum.words[word] = pack<T>(a + c, b + d);
    }
    return sum;
}

// Returns the sum of a chunk of the residual and of what is added to it.
template <typename T>
SKEP_DEVICE Vec16 residual_sum(const RmsNormParams& p, uint64_t chunk) {
    const Vec16 residual = p.residual[chunk];
    return p.x != nullptr ? added<T>(residual, p.x[chunk]) : residual;
}

// Adds the squares of a chunk.
template <typename T>
SKEP_DEVICE void add_squares(const Vec16& chunk, float& squares) {
    SKEP_UNROLL
    for (int word = 0; word < 4; ++word) {
        float a, b;
        unpack<T>(chunk.words[word], a, b);
        squares = add_rounded(squares, multiply_add(a, a, b * b));
    }
}

// Returns the factor of a row with this sum of squares.
SKEP_DEVICE float norm_scale(const RmsNormParams& p, float squares) {
    return rsqrtf(add_rounded(squares / static_cast<float>(p.width), p.epsilon));
}

// Returns the norm of a chunk.
template <typename T>
SKEP_DEVICE Vec16 normed(const Vec16& chunk, float scale, const Vec16& weight) {
    Vec16 out;
    SKEP_UNROLL
    for (int word = 0; word < 4; ++word) {
        float a, b, x, y;
        unpack<T>(chunk.words[word], x, y);
        unpack<T>(weight.words[word], a, b);
        out.words[word] = pack<T>(x * scale * a, y * scale * b);
    }
    return out;
}
