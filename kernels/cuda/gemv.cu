// Products of few rows with weights in the format of the activations: y[row, output] = Σ x[row, i] · w[output, i] + bias.
//
// One warp handles one output. Each lane takes every 32nd run of eight weights, converts them to floats once and multiplies
// them with all rows. Loads of several runs are in flight at once. Reading the weights is the lower bound on the time. With
// more than MAX_ROWS rows, tensor cores are faster (`gemm.cu`).
//
// `gemv_gated` is for a matrix that holds the outputs of a gate and then as many others. A warp handles an output of both, and
// stores silu(gate) · up.
#include "device.cuh"
#include "matmul.cuh"

constexpr uint32_t MAX_ROWS = 8;

// Number of runs of weights that a lane loads before it uses the first, of all its outputs. Fewer would not hide the memory
// latency.
constexpr int DEPTH = 4;

// Loads eight weights of one output.
template <typename T>
SKEP_DEVICE void load_weights(const MatmulParams& p, uint32_t output, uint32_t first, float (&out)[8]) {
    const Vec16 weights = static_cast<const Vec16*>(p.weights)[(static_cast<uint64_t>(output) * p.inputs + first) / 8];
    SKEP_UNROLL
    for (int word = 0; word < 4; ++word) {
        unpack<T>(weights.words[word], out[2 * word], out[2 * word + 1]);
    }
}

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
template <typename T, int OUTPUTS, int RUNS>
SKEP_DEVICE void add_runs(const MatmulParams& p, uint32_t output, uint32_t first, float (&sums)[OUTPUTS][MAX_ROWS]) {
    const uint32_t width = p.outputs / OUTPUTS;
    float weights[OUTPUTS][RUNS][8];
    SKEP_UNROLL
    for (int run = 0; run < RUNS; ++run) {
        SKEP_UNROLL
        for (int i = 0; i < OUTPUTS; ++i) {
            load_weights<T>(p, output + i * width, first + run * (8 * WARP), weights[i][run]);
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

// Starts to bring the first bytes of a row of weights into the L2 cache, of which each lane takes every 32nd line.
template <typename T>
SKEP_DEVICE void prefetch_row(const MatmulParams& p, uint32_t output, uint32_t lane) {
    constexpr uint32_t LINE = 128;
    constexpr uint64_t MOST = 2 * WARP * LINE;
    const uint64_t bytes = static_cast<uint64_t>(p.inputs) * sizeof(T);
    const uint64_t end = bytes < MOST ? bytes : MOST;
    const uint8_t* row = static_cast<const uint8_t*>(p.weights) + output * bytes;
    for (uint64_t at = lane * LINE; at < end; at += WARP * LINE) {
        prefetch_line(row + at);
    }
}

// Grid: enough warps for all outputs, of which a warp handles `OUTPUTS` that are equally far apart.
template <typename T, int OUTPUTS>
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
            prefetch_row<T>(p, output + i * width, lane);
        }
    }
    await_previous();
    if (output >= width) {
        return;
    }
    float sums[OUTPUTS][MAX_ROWS] = {};
    uint32_t first = 8 * lane;
    for (; first + (RUNS - 1) * RUN < p.inputs; first += RUNS * RUN) {
        add_runs<T, OUTPUTS, RUNS>(p, output, first, sums);
    }
    for (; first < p.inputs; first += RUN) {
        add_runs<T, OUTPUTS, 1>(p, output, first, sums);
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
            store_gated<T>(p, row, output, sum, up);
        }
    }
}

#define GEMV(T)                                       \
    SKEP_KERNEL_AHEAD(gemv_##T, MatmulParams) {       \
        gemv<T, 1>(p);                                \
    }                                                 \
    SKEP_KERNEL_AHEAD(gemv_gated_##T, MatmulParams) { \
        gemv<T, 2>(p);                                \
    }

GEMV(bf16)
GEMV(f16)
