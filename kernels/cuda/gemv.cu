// Products of few rows with weights of any format: y[row, output] = Σ x[row, i] · w[output, i] + bias.
//
// One warp handles one output. Each lane takes every 32nd run of eight weights, converts them to floats once and multiplies
// them with all rows. Loads of several runs are in flight at once. Reading the weights is the lower bound on the time. With
// more than MAX_ROWS rows, tensor cores are faster (`gemm.cu`).
#include "device.cuh"
#include "formats/weights.cuh"

constexpr uint32_t MAX_ROWS = 8;

// Number of runs of weights that a lane loads before it uses the first. Fewer would not hide the memory latency.
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

// Grid: enough warps for all outputs.
template <typename Weights, typename T>
SKEP_DEVICE void gemv(const MatmulParams& p) {
    constexpr uint32_t RUN = 8 * WARP;
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t output = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (output >= p.outputs) {
        return;
    }
    float sums[MAX_ROWS] = {};
    uint32_t first = 8 * lane;
    for (; first + (DEPTH - 1) * RUN < p.inputs; first += DEPTH * RUN) {
        float weights[DEPTH][8];
        SKEP_UNROLL
        for (int run = 0; run < DEPTH; ++run) {
            Weights::eight(p, output, first + run * RUN, weights[run]);
        }
        SKEP_UNROLL
        for (int run = 0; run < DEPTH; ++run) {
            add_products<T>(p, first + run * RUN, weights[run], sums);
        }
    }
    for (; first < p.inputs; first += RUN) {
        float weights[8];
        Weights::eight(p, output, first, weights);
        add_products<T>(p, first, weights, sums);
    }
    SKEP_UNROLL
    for (uint32_t row = 0; row < MAX_ROWS; ++row) {
        if (row >= p.rows) {
            break;
        }
        const float sum = warp_sum(sums[row]);
        if (lane == 0) {
            store_sum<T>(p, row, output, sum);
        }
    }
}

#define GEMV_OF(name, Weights, T)                 \
    SKEP_KERNEL(gemv_##name##_##T, MatmulParams) { \
        gemv<Weights, T>(p);                      \
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
