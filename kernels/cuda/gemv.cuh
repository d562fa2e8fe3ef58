// The parts that the products of few rows share: how weights are fetched, and the order in which a warp adds up.
#pragma once

#include "device.cuh"
#include "matmul.cuh"

constexpr uint32_t MAX_ROWS = 8;

// Number of runs of weights that a lane loads before it uses the first, of all its outputs. Fewer would not hide the memory
// latency.
constexpr int DEPTH = 4;

// Starts to bring the first bytes of a row of weights, of `rows[.., width]`, into the L2 cache. Each lane takes every 32nd line.
template <typename T>
SKEP_DEVICE void prefetch_row(const void* rows, uint64_t row, uint32_t width) {
    constexpr uint32_t LINE = 128;
    constexpr uint64_t MOST = 2 * WARP * LINE;
    const uint64_t bytes = static_cast<uint64_t>(width) * sizeof(T);
    const uint64_t end = bytes < MOST ? bytes : MOST;
    const uint8_t* first = static_cast<const uint8_t*>(rows) + row * bytes;
    for (uint64_t at = threadIdx.x % WARP * LINE; at < end; at += WARP * LINE) {
        prefetch_line(first + at);
    }
}

// Loads eight weights of one output.
template <typename T>
SKEP_DEVICE void load_weights(const MatmulParams& p, uint32_t output, uint32_t first, float (&out)[8]) {
    const Vec16 weights = static_cast<const Vec16*>(p.weights)[(static_cast<uint64_t>(output) * p.inputs + first) / 8];
    SKEP_UNROLL
    for (int word = 0; word < 4; ++word) {
        unpack<T>(weights.words[word], out[2 * word], out[2 * word + 1]);
    }
}

// Adds the products of eight weights with all rows, `x[p.rows, p.inputs]`.
template <typename T>
SKEP_DEVICE void add_products(const MatmulParams& p, const Vec16* x, uint32_t first, const float (&weights)[8],
                              float (&sums)[MAX_ROWS]) {
    SKEP_UNROLL
    for (uint32_t row = 0; row < MAX_ROWS; ++row) {
        if (row >= p.rows) {
            break;
        }
        const Vec16 values = x[(static_cast<uint64_t>(row) * p.inputs + first) / 8];
        SKEP_UNROLL
        for (int word = 0; word < 4; ++word) {
            float low, high;
            unpack<T>(values.words[word], low, high);
            const float pair = multiply_add(low, weights[2 * word], high * weights[2 * word + 1]);
            sums[row] = add_rounded(sums[row], pair);
        }
    }
}

// Adds the products of `RUNS` runs of weights of each output with all rows.
template <typename T, int OUTPUTS, int RUNS>
SKEP_DEVICE void add_runs(const MatmulParams& p, const Vec16* x, const uint32_t (&outputs)[OUTPUTS], uint32_t first,
                          float (&sums)[OUTPUTS][MAX_ROWS]) {
    float weights[OUTPUTS][RUNS][8];
    SKEP_UNROLL
    for (int run = 0; run < RUNS; ++run) {
        SKEP_UNROLL
        for (int i = 0; i < OUTPUTS; ++i) {
            load_weights<T>(p, outputs[i], first + run * (8 * WARP), weights[i][run]);
        }
    }
    SKEP_UNROLL
    for (int run = 0; run < RUNS; ++run) {
        SKEP_UNROLL
        for (int i = 0; i < OUTPUTS; ++i) {
            add_products<T>(p, x, first + run * (8 * WARP), weights[i][run], sums[i]);
        }
    }
}

// Adds up the products of all rows, `x[p.rows, p.inputs]`, with the weights of a warp's outputs. Each lane gets its part of the
// sums.
template <typename T, int OUTPUTS>
SKEP_DEVICE void multiply(const MatmulParams& p, const Vec16* x, const uint32_t (&outputs)[OUTPUTS],
                          float (&sums)[OUTPUTS][MAX_ROWS]) {
    constexpr uint32_t RUN = 8 * WARP;
    constexpr int RUNS = DEPTH / OUTPUTS;
    uint32_t first = 8 * (threadIdx.x % WARP);
    for (; first + (RUNS - 1) * RUN < p.inputs; first += RUNS * RUN) {
        add_runs<T, OUTPUTS, RUNS>(p, x, outputs, first, sums);
    }
    for (; first < p.inputs; first += RUN) {
        add_runs<T, OUTPUTS, 1>(p, x, outputs, first, sums);
    }
}
