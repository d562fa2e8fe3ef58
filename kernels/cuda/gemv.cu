// Products of few rows with quantised weights: y[row, output] = Σ x[row, i] · w[output, i].
//
// One warp an output; each lane takes every 32nd run of eight weights, turns them into floats once and multiplies them with
// all rows. What is read is the weights: the floor. For more rows than MAX_ROWS tensor cores are faster.
#include "device.cuh"
#include "formats/blocks.cuh"

struct GemvParams {
    const void* x;        // [rows, inputs]
    const void* weights;  // [outputs, inputs] in blocks; FP8 and 4-bit integers: without their scales
    const void* scales;   // 4-bit integers: [outputs, inputs / 32] of bf16; FP8: [outputs / scale_rows, inputs / scale_columns]
    void* y;              // [rows, outputs]
    uint32_t rows;        // at most MAX_ROWS
    uint32_t inputs;      // a multiple of a block, and of eight
    uint32_t outputs;
    uint32_t scale_rows;    // FP8: of a scale's block
    uint32_t scale_columns;
};

constexpr uint32_t MAX_ROWS = 8;

// Eight weights of one output, as floats.
template <typename Block>
struct Blocks {
    SKEP_DEVICE static void eight(const GemvParams& p, uint32_t output, uint32_t first, float (&out)[8]) {
        const uint64_t row = static_cast<uint64_t>(p.inputs / Block::VALUES) * Block::BYTES;
        const uint8_t* block =
            static_cast<const uint8_t*>(p.weights) + output * row + first / Block::VALUES * Block::BYTES;
        Block::eight(block, first % Block::VALUES, out);
    }
};

struct PackedInt4 {
    SKEP_DEVICE static void eight(const GemvParams& p, uint32_t output, uint32_t first, float (&out)[8]) {
        const uint64_t at = static_cast<uint64_t>(output) * p.inputs + first;
        const bf16 scale = static_cast<const bf16*>(p.scales)[at / Int4::GROUP];
        Int4::eight(static_cast<const uint32_t*>(p.weights)[at / 8], to_float(scale), out);
    }
};

struct Fp8 {
    SKEP_DEVICE static void eight(const GemvParams& p, uint32_t output, uint32_t first, float (&out)[8]) {
        const e4m3* weights = static_cast<const e4m3*>(p.weights) + static_cast<uint64_t>(output) * p.inputs + first;
        const uint64_t columns = div_up(p.inputs, p.scale_columns);
        const float scale =
            static_cast<const float*>(p.scales)[output / p.scale_rows * columns + first / p.scale_columns];
        for (int i = 0; i < 8; ++i) {
            out[i] = to_float(weights[i]) * scale;
        }
    }
};

// Grid: enough warps for all outputs.
template <typename Weights, typename T>
SKEP_DEVICE void gemv(const GemvParams& p) {
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t output = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (output >= p.outputs) {
        return;
    }
    float sums[MAX_ROWS] = {};
    for (uint32_t first = 8 * lane; first < p.inputs; first += 8 * WARP) {
        float weights[8];
        Weights::eight(p, output, first, weights);
        for (uint32_t row = 0; row < MAX_ROWS; ++row) {
            if (row >= p.rows) {
                break;
            }
            const Vec16 x = static_cast<const Vec16*>(p.x)[(static_cast<uint64_t>(row) * p.inputs + first) / 8];
            for (int word = 0; word < 4; ++word) {
                float low, high;
                unpack<T>(x.words[word], low, high);
                sums[row] += low * weights[2 * word] + high * weights[2 * word + 1];
            }
        }
    }
    for (uint32_t row = 0; row < MAX_ROWS; ++row) {
        if (row >= p.rows) {
            break;
        }
        const float sum = warp_sum(sums[row]);
        if (lane == 0) {
            static_cast<T*>(p.y)[static_cast<uint64_t>(row) * p.outputs + output] = from_float<T>(sum);
        }
    }
}

#define GEMV(name, Weights)                      \
    SKEP_KERNEL(gemv_##name##_bf16, GemvParams) { \
        gemv<Weights, bf16>(p);                  \
    }                                            \
    SKEP_KERNEL(gemv_##name##_f16, GemvParams) {  \
        gemv<Weights, f16>(p);                   \
    }

GEMV(q4_0, Blocks<Q4_0>)
GEMV(q4_1, Blocks<Q4_1>)
GEMV(q8_0, Blocks<Q8_0>)
GEMV(q4_k, Blocks<Q4_K>)
GEMV(q6_k, Blocks<Q6_K>)
GEMV(int4, PackedInt4)
GEMV(fp8, Fp8)
