// The parameters of products with weights of any format.
#pragma once

#include "device.cuh"

struct MatmulParams {
    const void* x;          // [rows, inputs]
    const void* weights;    // [outputs, inputs], in the format of the activations or in tiles
    const void* bias;       // [outputs], in the format of the activations; may be null
    void* y;                // [rows, y_stride]; each row starts with the outputs
    uint32_t rows;
    uint32_t inputs;        // a multiple of eight, and of 32 for tiles
    uint32_t outputs;
    uint32_t y_stride;
    uint32_t output_format; // nonzero: y is float32 instead of activations
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

// Returns an output's sum with its bias as it is once it has been stored.
template <typename T>
SKEP_DEVICE float stored(const MatmulParams& p, uint32_t output, float sum) {
    return to_float(from_float<T>(with_bias<T>(p, output, sum)));
}

// Stores silu(gate) · up of the sums of an output of the gate and of the one as far behind as there are outputs of the gate. Both
// sums are rounded before, as if they had been stored, so that the result is that of `swiglu.cu`.
template <typename T>
SKEP_DEVICE void store_gated(const MatmulParams& p, uint32_t row, uint32_t output, float gate, float up) {
    const float product = gated(stored<T>(p, output, gate), stored<T>(p, output + p.outputs / 2, up));
    static_cast<T*>(p.y)[static_cast<uint64_t>(row) * p.y_stride + output] = from_float<T>(product);
}
