// Products of few rows with weights of any format: y[row, output] = Σ x[row, i] · w[output, i] + bias.
//
// One warp handles one output. Each lane takes every 32nd run of eight weights, converts them to floats once and multiplies
// them with all rows. Loads of several runs are in flight at once. Reading the weights is the lower bound on the time. With
// more than MAX_ROWS rows, tensor cores are faster (`gemm.cu`).
//
// `gemv_gated` is for a matrix that holds the outputs of a gate and then as many others. A warp handles an output of both, and
// stores silu(gate) · up. It rounds both sums before, as if they had been stored, so that the result is that of `swiglu.cu`.
#include "device.cuh"
#include "formats/weights.cuh"

constexpr uint32_t MAX_ROWS = 8;

// Number of runs of weights that a lane loads before it uses the first, of all its outputs. Fewer would not hide the memory
// latency.
constexpr int DEPTH = 4;

// Adds the products of eight weights with all rows.
template <typename T>
SKEP_DEVICE void add_products(const MatmulParams& p, uint32_t first, const float (&weights)[8], float (&sums)[MAX_ROWS]) {
    SKEP_UNROLL
    for (uint32_t row = 0; row < MAX_ROWS; ++row) {
        if (row >= p.rows) {
            break;
        }
        const Vec16 x = static_cast<const Vec16*>(p.x)[(static_cast<uint64_t>(row) * p.inputs + first) / 8];
        SKEP_UNROLL
        for (int word = 0; word < 4; ++word) {
            float low, high;
            unpack<T>(x.words[word], low, high);
            sums[row] += low * weights[2 * word] + high * weights[2 * word + 1];
        }
    }
}

// Adds the products of `RUNS` runs of weights of each output with all rows.
template <typename Weights, typename T, int OUTPUTS, int RUNS>
SKEP_DEVICE void add_runs(const MatmulParams& p, uint32_t output, uint32_t first, float (&sums)[OUTPUTS][MAX_ROWS]) {
    const uint32_t width = p.outputs / OUTPUTS;
    float weights[OUTPUTS][RUNS][8];
    SKEP_UNROLL
    for (int run = 0; run < RUNS; ++run) {
        SKEP_UNROLL
        for (int i = 0; i < OUTPUTS; ++i) {
            Weights::eight(p, output + i * width, first + run * (8 * WARP), weights[i][run]);
        }
    }
    SKEP_UNROLL
    for (int run = 0; run < RUNS; ++run) {
        SKEP_UNROLL
        for (int i = 0; i < OUTPUTS; ++i) {
            add_products<T>(p, first + run * (8 * WARP), weights[i][run], sums[i]);
        }
    }
}

// Grid: enough warps for all outputs, of which a warp handles `OUTPUTS` that are equally far apart.
template <typename Weights, typename T, int OUTPUTS>
SKEP_DEVICE void gemv(const MatmulParams& p) {
    constexpr uint32_t RUN = 8 * WARP;
    constexpr int RUNS = DEPTH / OUTPUTS;
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t width = p.outputs / OUTPUTS;
    const uint32_t output = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    // Weights are read while the kernel before still runs.
    if (output < width) {
        SKEP_UNROLL
        for (int i = 0; i < OUTPUTS; ++i) {
            Weights::prefetch(p, output + i * width, lane);
        }
    }
    await_previous();
    if (output >= width) {
        return;
    }
    float sums[OUTPUTS][MAX_ROWS] = {};
    uint32_t first = 8 * lane;
    for (; first + (RUNS - 1) * RUN < p.inputs; first += RUNS * RUN) {
        add_runs<Weights, T, OUTPUTS, RUNS>(p, output, first, sums);
    }
    for (; first < p.inputs; first += RUN) {
        add_runs<Weights, T, OUTPUTS, 1>(p, output, first, sums);
    }
    SKEP_UNROLL
    for (uint32_t row = 0; row < MAX_ROWS; ++row) {
        if (row >= p.rows) {
            break;
        }
        const float sum = warp_sum(sums[0][row]);
        if (OUTPUTS == 1) {
            if (lane == 0) {
                store_sum<T>(p, row, output, sum);
            }
            continue;
        }
        const float up = warp_sum(sums[OUTPUTS - 1][row]);
        if (lane == 0) {
            const auto rounded = [](float value) { return to_float(from_float<T>(value)); };
            const float product = gated(rounded(with_bias<T>(p, output, sum)),
                                        rounded(with_bias<T>(p, output + width, up)));
            static_cast<T*>(p.y)[static_cast<uint64_t>(row) * p.y_stride + output] = from_float<T>(product);
        }
    }
}

#define GEMV_OF(name, Weights, T)                              \
    SKEP_KERNEL_AHEAD(gemv_##name##_##T, MatmulParams) {       \
        gemv<Weights, T, 1>(p);                                \
    }                                                          \
    SKEP_KERNEL_AHEAD(gemv_gated_##name##_##T, MatmulParams) { \
        gemv<Weights, T, 2>(p);                                \
    }
#define GEMV(name, Weights)      \
    GEMV_OF(name, Weights, bf16) \
    GEMV_OF(name, Weights, f16)

GEMV_OF(plain, Plain<bf16>, bf16)
GEMV_OF(plain, Plain<f16>, f16)
GEMV(q4_0, Blocks<Q4_0>)
GEMV(q4_1, Blocks<Q4_1>)
GEMV(q8_0, Blocks<Q8_0>)
GEMV(q4_k, Blocks<Q4_K>)
GEMV(q6_k, Blocks<Q6_K>)
GEMV(int4, PackedInt4)
GEMV(fp8, Fp8)
