// Converts weights in tiles to the format of the activations, for products of so many rows that a conversion per product costs
// little: `gemm.cu`, or the library for dense weights.
//
// Reads tiles and writes `outputs × inputs` values. A warp handles a tile, and a lane writes 16 bytes at a time.
#include "device.cuh"
#include "formats/tiles.cuh"

struct ExpandParams {
    const uint8_t* weights; // the tiles of the first output
    void* out;              // [outputs, inputs]
    uint32_t inputs;        // a multiple of 32
    uint32_t outputs;
};

constexpr uint32_t EXPAND_WARPS = 8;

// Grid: (tiles along the inputs / EXPAND_WARPS, tiles of outputs), rounded up. Block: EXPAND_WARPS warps.
template <typename Format, typename T>
SKEP_DEVICE void expand(const ExpandParams& p) {
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t along = div_up(p.inputs, Format::INPUTS);
    const uint32_t index = blockIdx.x * EXPAND_WARPS + threadIdx.x / WARP;
    if (index >= along) {
        return;
    }
    const uint64_t tile = static_cast<uint64_t>(blockIdx.y) * along + index;
    const uint8_t* const at = p.weights + tile * Format::BYTES;
    SKEP_UNROLL
    for (uint32_t first = 0; first < Format::INPUTS; first += 32) {
        const uint32_t input = index * Format::INPUTS + first;
        if (input >= p.inputs) {
            return;
        }
        const typename Format::Held held = Format::load(at, first / PART_INPUTS, lane);
        const typename Format::Scales scales = Format::scales(at, first / PART_INPUTS, lane);
        SKEP_UNROLL
        for (uint32_t half = 0; half < 2; ++half) {
            const uint32_t output = blockIdx.y * TILE_OUTPUTS + 8 * half + lane / 4;
            if (output < p.outputs) {
                T* out = static_cast<T*>(p.out) + static_cast<uint64_t>(output) * p.inputs + input;
                store_inputs<Format>(out, lane % 4, weights_of<Format, T>(held, scales, first % PART_INPUTS / 32, half == 1));
            }
        }
    }
}

#define EXPAND(name, Format)                                               \
    SKEP_KERNEL_BOUNDED(expand_##name##_bf16, ExpandParams, EXPAND_WARPS * WARP) { \
        expand<Format, bf16>(p);                                           \
    }                                                                      \
    SKEP_KERNEL_BOUNDED(expand_##name##_f16, ExpandParams, EXPAND_WARPS * WARP) {  \
        expand<Format, f16>(p);                                            \
    }

EXPAND(q4_0, Q4_0)
EXPAND(q4_1, Q4_1)
EXPAND(int4, Int4)
EXPAND(q4_k, Q4_K)
EXPAND(q6_k, Q6_K)
EXPAND(q8_0, Q8_0)
EXPAND(f8, F8)
