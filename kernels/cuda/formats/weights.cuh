// Weight matrices of any format, and the parameters of products with them.
#pragma once

#include "device.cuh"
#include "formats/blocks.cuh"

struct MatmulParams {
    const void* x;        // [rows, inputs]
    const void* weights;  // [outputs, inputs], plain or in blocks; for FP8 and 4-bit integers without their scales
    const void* scales;   // int4: bf16 [outputs, inputs / 32]; FP8: f32 [outputs / scale_rows, inputs / scale_columns]
    const void* bias;     // [outputs], in the format of the activations; may be null
    void* y;              // [rows, y_stride]; each row starts with the outputs
    uint32_t rows;
    uint32_t inputs;      // a multiple of the block length and of eight
    uint32_t outputs;
    uint32_t y_stride;
    uint32_t output_format; // nonzero: y is float32 instead of activations
    uint32_t scale_rows;    // FP8: number of rows that share a scale
    uint32_t scale_columns; // FP8: number of columns that share a scale
};

// Adds the bias to the sum of an output.
template <typename T>
SKEP_DEVICE float with_bias(const MatmulParams& p, uint32_t output, float sum) {
    return p.bias != nullptr ? sum + to_float(static_cast<const T*>(p.bias)[output]) : sum;
}

// Adds the bias to a sum and stores it.
template <typename T>
SKEP_DEVICE void store_sum(const MatmulParams& p, uint32_t row, uint32_t output, float sum) {
    sum = with_bias<T>(p, output, sum);
    const uint64_t at = static_cast<uint64_t>(row) * p.y_stride + output;
    if (p.output_format != 0) {
        static_cast<float*>(p.y)[at] = sum;
    } else {
        static_cast<T*>(p.y)[at] = from_float<T>(sum);
    }
}

// Starts to bring the first bytes of a row of weights into the L2 cache, of which each lane takes every 32nd line.
SKEP_DEVICE void prefetch_row(const void* row, uint64_t bytes, uint32_t lane) {
    constexpr uint32_t LINE = 128;
    constexpr uint64_t MOST = 2 * WARP * LINE;
    const uint64_t end = bytes < MOST ? bytes : MOST;
    for (uint64_t at = lane * LINE; at < end; at += WARP * LINE) {
        prefetch_line(static_cast<const uint8_t*>(row) + at);
    }
}

// Returns eight weights of one output as floats.
template <typename Block>
struct Blocks {
    SKEP_DEVICE static void eight(const MatmulParams& p, uint32_t output, uint32_t first, float (&out)[8]) {
        const uint64_t row = static_cast<uint64_t>(p.inputs / Block::VALUES) * Block::BYTES;
        const uint8_t* block =
            static_cast<const uint8_t*>(p.weights) + output * row + first / Block::VALUES * Block::BYTES;
        Block::eight(block, first % Block::VALUES, out);
    }

    SKEP_DEVICE static void prefetch(const MatmulParams& p, uint32_t output, uint32_t lane) {
        const uint64_t row = static_cast<uint64_t>(p.inputs / Block::VALUES) * Block::BYTES;
        prefetch_row(static_cast<const uint8_t*>(p.weights) + output * row, row, lane);
    }
};

// Weights in the format of the activations.
template <typename T>
struct Plain {
    SKEP_DEVICE static void eight(const MatmulParams& p, uint32_t output, uint32_t first, float (&out)[8]) {
        const Vec16 weights = static_cast<const Vec16*>(p.weights)[(static_cast<uint64_t>(output) * p.inputs + first) / 8];
        SKEP_UNROLL
        for (int word = 0; word < 4; ++word) {
            unpack<T>(weights.words[word], out[2 * word], out[2 * word + 1]);
        }
    }

    SKEP_DEVICE static void prefetch(const MatmulParams& p, uint32_t output, uint32_t lane) {
        const uint64_t row = static_cast<uint64_t>(p.inputs) * sizeof(T);
        prefetch_row(static_cast<const uint8_t*>(p.weights) + output * row, row, lane);
    }
};

struct PackedInt4 {
    SKEP_DEVICE static void eight(const MatmulParams& p, uint32_t output, uint32_t first, float (&out)[8]) {
        const uint64_t at = static_cast<uint64_t>(output) * p.inputs + first;
        const bf16 scale = static_cast<const bf16*>(p.scales)[at / Int4::GROUP];
        Int4::eight(static_cast<const uint32_t*>(p.weights)[at / 8], to_float(scale), out);
    }

    SKEP_DEVICE static void prefetch(const MatmulParams& p, uint32_t output, uint32_t lane) {
        const uint64_t row = p.inputs / 2;
        prefetch_row(static_cast<const uint8_t*>(p.weights) + output * row, row, lane);
    }
};

struct Fp8 {
    SKEP_DEVICE static void eight(const MatmulParams& p, uint32_t output, uint32_t first, float (&out)[8]) {
        const e4m3* weights = static_cast<const e4m3*>(p.weights) + static_cast<uint64_t>(output) * p.inputs + first;
        const uint64_t columns = div_up(p.inputs, p.scale_columns);
        const float scale =
            static_cast<const float*>(p.scales)[output / p.scale_rows * columns + first / p.scale_columns];
        SKEP_UNROLL
        for (int i = 0; i < 8; ++i) {
            out[i] = to_float(weights[i]) * scale;
        }
    }

    SKEP_DEVICE static void prefetch(const MatmulParams& p, uint32_t output, uint32_t lane) {
        prefetch_row(static_cast<const uint8_t*>(p.weights) + static_cast<uint64_t>(output) * p.inputs, p.inputs, lane);
    }
};
