// The residual sum and its norm, in one pass over a row:
//
//   sum = residual + x;  out = sum / sqrt(mean(sum²) + epsilon) · weight
//
// It reads two rows and writes two; the sum stays in registers in between. One block handles a row; widths are multiples of
// eight. The sum is rounded to its format before it is squared, so that the next layer squares the same values.
#include "rms_norm.cuh"

template <typename T>
SKEP_DEVICE void rms_norm(const RmsNormParams& p) {
    const uint32_t chunks = p.width / 8;
    const uint64_t row = static_cast<uint64_t>(blockIdx.x) * chunks;
    const bool writes = p.x != nullptr || p.sum != p.residual;
    Vec16 held[CHUNKS];
    float squares = 0.0f;
    SKEP_UNROLL
    for (int turn = 0; turn < CHUNKS; ++turn) {
        const uint32_t chunk = threadIdx.x + turn * blockDim.x;
        if (chunk >= chunks) {
            break;
        }
        held[turn] = residual_sum<T>(p, row + chunk);
        if (writes) {
            p.sum[row + chunk] = held[turn];
        }
        add_squares<T>(held[turn], squares);
    }
    const float scale = norm_scale(p, block_sum(squares));
    SKEP_UNROLL
    for (int turn = 0; turn < CHUNKS; ++turn) {
        const uint32_t chunk = threadIdx.x + turn * blockDim.x;
        if (chunk >= chunks) {
            break;
        }
        p.out[row + chunk] = normed<T>(held[turn], scale, p.weight[chunk]);
    }
}

SKEP_KERNEL(rms_norm_bf16, RmsNormParams) {
    rms_norm<bf16>(p);
}

SKEP_KERNEL(rms_norm_f16, RmsNormParams) {
    rms_norm<f16>(p);
}
