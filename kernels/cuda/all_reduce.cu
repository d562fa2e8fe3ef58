// Sums the inputs of all ranks and gives the result to every rank, through memory that all of them can access.
//
// Sums are computed in float32 in the order of the ranks and rounded once, so their bits are the same on every rank. With one
// shot, every rank reads the whole inputs of all others: one step, ranks · bytes. With two shots, each rank sums its own share
// and reads the summed shares of the others: one barrier more, 2 · bytes.
#include "all_reduce.cuh"

struct AllReduceParams {
    MeetingParams meeting;    // its inputs: [chunks] of eight values
    Vec16* shares[MAX_RANKS]; // per rank, with two shots: [chunks / ranks], rounded up
    Vec16* out;               // [chunks], not the input of any rank
    uint64_t chunks;
};

// Grid: (at most MAX_BLOCKS), the same on every rank.
template <typename T>
SKEP_DEVICE void all_reduce_one_shot(const AllReduceParams& p) {
    uint32_t* passed = &p.meeting.signals[p.meeting.rank]->round[blockIdx.x];
    const uint32_t round = *passed;
    wait_for_ranks(p.meeting, round + 1);
    for (uint64_t chunk = blockIdx.x * blockDim.x + threadIdx.x; chunk < p.chunks; chunk += gridDim.x * blockDim.x) {
        p.out[chunk] = sum_of_ranks<T>(p.meeting, chunk);
    }
    // A rank may change its input only after the others have read it.
    wait_for_ranks(p.meeting, round + 2);
    if (threadIdx.x == 0) {
        *passed = round + 2;
    }
}

template <typename T>
SKEP_DEVICE void all_reduce_two_shot(const AllReduceParams& p) {
    uint32_t* passed = &p.meeting.signals[p.meeting.rank]->round[blockIdx.x];
    const uint32_t round = *passed;
    const uint64_t length = div_up(p.chunks, static_cast<uint64_t>(p.meeting.ranks));
    const uint64_t first = blockIdx.x * blockDim.x + threadIdx.x;
    wait_for_ranks(p.meeting, round + 1);
    for (uint64_t i = first; i < length && p.meeting.rank * length + i < p.chunks; i += gridDim.x * blockDim.x) {
        p.shares[p.meeting.rank][i] = sum_of_ranks<T>(p.meeting, p.meeting.rank * length + i);
    }
    // Each block reads below what the block with the same index on another rank wrote above. No rank changes a share before all
    // ranks have started the next sum and have therefore read it.
    wait_for_ranks(p.meeting, round + 2);
    for (uint32_t rank = 0; rank < p.meeting.ranks; ++rank) {
        for (uint64_t i = first; i < length && rank * length + i < p.chunks; i += gridDim.x * blockDim.x) {
            p.out[rank * length + i] = p.shares[rank][i];
        }
    }
    if (threadIdx.x == 0) {
        *passed = round + 2;
    }
}

#define ALL_REDUCE(shots, T)                                     \
    SKEP_KERNEL_MEETING(all_reduce_##shots##_shot_##T, AllReduceParams) { \
        all_reduce_##shots##_shot<T>(p);                         \
    }

ALL_REDUCE(one, bf16)
ALL_REDUCE(one, f16)
ALL_REDUCE(two, bf16)
ALL_REDUCE(two, f16)
