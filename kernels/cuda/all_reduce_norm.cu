// The sum over all ranks, the residual sum and its norm in one kernel, for few rows:
//
//   sum = residual + Σ in[rank];  out = sum / sqrt(mean(sum²) + epsilon) · weight
//
// Every rank computes all rows. A block handles whole rows, and rounds and adds up in the order of `all_reduce.cu` and `rms_norm.cu`,
// so that the results have the bits of the separate kernels.
//
// There is one barrier, before the inputs are read. A rank may therefore change its input only after the next sum over the ranks:
// a rank that has passed the barrier of that sum knows that all others have finished this one. Sums that follow each other need
// inputs in different buffers.
#include "all_reduce.cuh"
#include "rms_norm.cuh"

struct AllReduceNormParams {
    MeetingParams meeting; // its inputs: [rows, width]
    RmsNormParams norm;    // x is not used; the residual, the sum and out are not the input of any rank
    uint32_t rows;
};

// Grid: (at most MAX_BLOCKS), the same on every rank. Shared: [width].
template <typename T>
SKEP_DEVICE void all_reduce_norm(const AllReduceNormParams& p) {
    SKEP_DYNAMIC_SHARED(Vec16, held);
    const RmsNormParams& norm = p.norm;
    const uint32_t chunks = norm.width / 8;
    // The threads of `rms_norm.cu`, each of which adds up the squares of several chunks. Here a thread reads one chunk at a time,
    // so that the reads of a row from other devices are under way at once.
    const uint32_t adders = div_up(div_up(chunks, static_cast<uint32_t>(CHUNKS)), static_cast<uint32_t>(WARP)) * WARP;
    for (uint32_t chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
        prefetch_line(norm.weight + chunk);
        prefetch_line(norm.residual + static_cast<uint64_t>(blockIdx.x) * chunks + chunk);
    }
    uint32_t* passed = &p.meeting.signals[p.meeting.rank]->round[blockIdx.x];
    const uint32_t round = *passed;
    wait_for_ranks(p.meeting, round + 1);
    // No block waits for another rank any more, and the blocks of all ranks that others wait for are running.
    release_next();
    for (uint32_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const uint64_t first = static_cast<uint64_t>(row) * chunks;
        for (uint32_t chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
            const Vec16 residual = norm.residual[first + chunk];
            held[chunk] = added<T>(residual, sum_of_ranks<T>(p.meeting, first + chunk));
        }
        __syncthreads();
        float squares = 0.0f;
        if (threadIdx.x < adders) {
            SKEP_UNROLL
            for (int turn = 0; turn < CHUNKS; ++turn) {
                const uint32_t chunk = threadIdx.x + turn * adders;
                if (chunk >= chunks) {
                    break;
                }
                add_squares<T>(held[chunk], squares);
            }
        }
        // Its barrier also separates the reads above from the next row.
        const float scale = norm_scale(norm, block_sum(squares));
        for (uint32_t chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
            norm.sum[first + chunk] = held[chunk];
            norm.out[first + chunk] = normed<T>(held[chunk], scale, norm.weight[chunk]);
        }
    }
    if (threadIdx.x == 0) {
        *passed = round + 1;
    }
}

SKEP_KERNEL_MEETING(all_reduce_norm_bf16, AllReduceNormParams) {
    all_reduce_norm<bf16>(p);
}

SKEP_KERNEL_MEETING(all_reduce_norm_f16, AllReduceNormParams) {
    all_reduce_norm<f16>(p);
}
