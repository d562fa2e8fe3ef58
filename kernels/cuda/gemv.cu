// Products of few rows with weights in the format of the activations: y[row, output] = Σ x[row, i] · w[output, i] + bias.
//
// One warp handles one output. Each lane takes every 32nd run of eight weights, converts them to floats once and multiplies
// them with all rows. Loads of several runs are in flight at once. Reading the weights is the lower bound on the time. With
// more than MAX_ROWS rows, tensor cores are faster (`gemm.cu`).
//
// `gemv_gated` is for a matrix that holds the outputs of a gate and then as many others. A warp handles an output of both, and
// stores silu(gate) · up.
#include "gemv.cuh"

// Grid: enough warps for all outputs, of which a warp handles `OUTPUTS` that are equally far apart.
template <typename T, int OUTPUTS>
SKEP_DEVICE void gemv(const MatmulParams& p) {
    const uint32_t width = p.outputs / OUTPUTS;
    const uint32_t output = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    uint32_t outputs[OUTPUTS];
    SKEP_UNROLL
    for (int i = 0; i < OUTPUTS; ++i) {
        outputs[i] = output + i * width;
        // Weights are read while the kernel before still runs.
        if (output < width) {
            prefetch_row<T>(p.weights, outputs[i], p.inputs);
        }
    }
    await_previous();
    if (output >= width) {
        return;
    }
    float sums[OUTPUTS][MAX_ROWS] = {};
    multiply<T, OUTPUTS>(p, static_cast<const Vec16*>(p.x), outputs, sums);
    SKEP_UNROLL
    for (uint32_t row = 0; row < MAX_ROWS; ++row) {
        if (row >= p.rows) {
            break;
        }
        const float sum = warp_sum(sums[0][row]);
        const float up = OUTPUTS == 1 ? 0.0f : warp_sum(sums[OUTPUTS - 1][row]);
        if (threadIdx.x % WARP != 0) {
            continue;
        }
        if (OUTPUTS == 1) {
            store_sum<T>(p, row, output, sum);
        } else {
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
