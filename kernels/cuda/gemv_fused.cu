// Products of few rows with dense weights, together with the small kernels before and after them. A small model's step is bound
// by the number of its kernels.
//
//   `gemv_qkv`           the QKV projection, and what `qkv.cu` does with it: bias, rotation, and the write of keys and values.
//                        A warp handles two outputs that rotate together. Heads with norms are left to `qkv.cu`.
//   `gemv_normed_qkv`    the same for rows that are normed first, as in `rms_norm.cu`.
//   `gemv_normed_gated`  `gemv_gated` for rows that are normed first.
//
// Every sum is rounded and added up as in the separate kernels, so that the results have the same bits.
//
// With a norm, every block computes the norms of all rows for itself, and block 0 writes the residual sums. Other blocks may still
// read the residual then, so the sums have a buffer of their own. Each block reads 2 · rows · width values, which is worth it as
// long as that is little beside the weights of its outputs. Weights are on their way to the L2 cache meanwhile, and already while
// the kernel before still runs.
#include "gemv.cuh"
#include "qkv.cuh"
#include "rms_norm.cuh"

struct FusedGemvParams {
    MatmulParams product; // with a norm, x is not used; for QKV, y is not used
    RmsNormParams norm;   // its rows are those of the product; out is not used
    QkvParams qkv;
};

// Norms all rows into shared memory, `rows[count, width]`. A warp handles a row and adds up in the order of `rms_norm.cu`, whose
// threads it plays one warp after the other. Called by all threads.
template <typename T>
SKEP_DEVICE void norm_rows(const RmsNormParams& p, uint32_t count, Vec16* rows) {
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t chunks = p.width / 8;
    const uint32_t warps = div_up(div_up(chunks, static_cast<uint32_t>(CHUNKS)), static_cast<uint32_t>(WARP));
    for (uint32_t row = threadIdx.x / WARP; row < count; row += blockDim.x / WARP) {
        Vec16* const held = rows + row * chunks;
        float of_warps = 0.0f;
        for (uint32_t warp = 0; warp < warps; ++warp) {
            float squares = 0.0f;
            SKEP_UNROLL
            for (int turn = 0; turn < CHUNKS; ++turn) {
                const uint32_t chunk = lane + (warp + turn * warps) * WARP;
                if (chunk >= chunks) {
                    break;
                }
                const uint64_t at = static_cast<uint64_t>(row) * chunks + chunk;
                held[chunk] = residual_sum<T>(p, at);
                if (blockIdx.x == 0) {
                    p.sum[at] = held[chunk];
                }
                add_squares<T>(held[chunk], squares);
            }
            squares = warp_sum(squares);
            of_warps = lane == warp ? squares : of_warps;
        }
        const float scale = norm_scale(p, warp_sum(of_warps));
        for (uint32_t chunk = lane; chunk < chunks; chunk += WARP) {
            held[chunk] = normed<T>(held[chunk], scale, p.weight[chunk]);
        }
    }
    __syncthreads();
}

// Waits for the kernel before, computes two outputs of all rows per warp, and calls `store` with each row's sums, all lanes at
// once. Called by all threads.
template <typename T, bool IS_NORMED, typename Store>
SKEP_DEVICE void multiply_pair(const FusedGemvParams& p, bool exists, const uint32_t (&outputs)[2], Store store) {
    const MatmulParams& product = p.product;
    // Weights are read while the kernel before still runs.
    if (IS_NORMED) {
        prefetch_row<T>(p.norm.weight, 0, product.inputs);
    }
    if (exists) {
        prefetch_row<T>(product.weights, outputs[0], product.inputs);
        prefetch_row<T>(product.weights, outputs[1], product.inputs);
    }
    await_previous();
    const Vec16* x = static_cast<const Vec16*>(product.x);
    if (IS_NORMED) {
        SKEP_DYNAMIC_SHARED(Vec16, rows);
        norm_rows<T>(p.norm, product.rows, rows);
        x = rows;
    }
    if (!exists) {
        return;
    }
    float sums[2][MAX_ROWS] = {};
    multiply<T, 2>(product, x, outputs, sums);
    SKEP_UNROLL
    for (uint32_t row = 0; row < MAX_ROWS; ++row) {
        if (row >= product.rows) {
            break;
        }
        store(row, warp_sum(sums[0][row]), warp_sum(sums[1][row]));
    }
}

// Grid: enough warps for half of the outputs. Shared: with a norm, [rows, inputs].
template <typename T, bool IS_NORMED>
SKEP_DEVICE void gemv_qkv(const FusedGemvParams& p) {
    const QkvParams& qkv = p.qkv;
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t half = qkv.head_size / 2;
    const uint32_t index = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    const bool exists = index < p.product.outputs / 2;
    const uint32_t head = index / half;
    const uint32_t pair = index % half;
    const uint32_t first = first_of_pair(qkv, pair);
    const uint32_t second = second_of_pair(qkv, pair);
    const uint32_t outputs[2] = {head * qkv.head_size + first, head * qkv.head_size + second};
    // A lane processes the pair of its row.
    float x = 0.0f;
    float y = 0.0f;
    multiply_pair<T, IS_NORMED>(p, exists, outputs, [&](uint32_t row, float a, float b) {
        x = lane == row ? a : x;
        y = lane == row ? b : y;
    });
    if (!exists || lane >= p.product.rows) {
        return;
    }
    x = stored<T>(p.product, outputs[0], x);
    y = stored<T>(p.product, outputs[1], y);
    if (qkv.bias != nullptr) {
        x += to_float(static_cast<const T*>(qkv.bias)[outputs[0]]);
        y += to_float(static_cast<const T*>(qkv.bias)[outputs[1]]);
    }
    if (is_rotated(qkv, head)) {
        rotate(qkv.positions[lane], qkv.frequencies[pair], x, y);
    }
    T* const out = head_of_row<T>(qkv, lane, qkv.slots[lane], head);
    out[first] = from_float<T>(x);
    out[second] = from_float<T>(y);
}

// Grid: enough warps for half of the outputs. Shared: [rows, inputs].
template <typename T>
SKEP_DEVICE void gemv_normed_gated(const FusedGemvParams& p) {
    const uint32_t width = p.product.outputs / 2;
    const uint32_t output = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    const uint32_t outputs[2] = {output, output + width};
    multiply_pair<T, true>(p, output < width, outputs, [&](uint32_t row, float gate, float up) {
        if (threadIdx.x % WARP == 0) {
            store_gated<T>(p.product, row, output, gate, up);
        }
    });
}

#define GEMV_FUSED(T)                                           \
    SKEP_KERNEL_AHEAD(gemv_qkv_##T, FusedGemvParams) {          \
        gemv_qkv<T, false>(p);                                  \
    }                                                           \
    SKEP_KERNEL_AHEAD(gemv_normed_qkv_##T, FusedGemvParams) {   \
        gemv_qkv<T, true>(p);                                   \
    }                                                           \
    SKEP_KERNEL_AHEAD(gemv_normed_gated_##T, FusedGemvParams) { \
        gemv_normed_gated<T>(p);                                \
    }

GEMV_FUSED(bf16)
GEMV_FUSED(f16)
