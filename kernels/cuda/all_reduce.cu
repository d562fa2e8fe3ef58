// Sums the inputs of all ranks and gives the result to every rank, through memory that all of them can access.
//
// Sums are computed in float32 in the order of the ranks and rounded once, so their bits are the same on every rank. With one
// shot, every rank reads the whole inputs of all others: one step, ranks · bytes. With two shots, each rank sums its own share
// and reads the summed shares of the others: one barrier more, 2 · bytes.
//
// Blocks with the same index on all ranks wait for each other, so all blocks of a rank have to be resident. If a rank does not
// arrive within `max_polls` polls, `failure` and `report` name it; the sums are then invalid, and the signals have to be created
// again.
#include "device.cuh"
#include "ptx/peer.cuh"

constexpr int MAX_RANKS = 8;
constexpr int MAX_BLOCKS = 64;

// The signals of one rank, which must be zero at first.
struct Signals {
    uint32_t round[MAX_BLOCKS];              // barriers that this rank's blocks have passed
    uint32_t arrived[MAX_BLOCKS][MAX_RANKS]; // the barriers that the blocks of other ranks have reached, written by them
};

struct AllReduceParams {
    const Vec16* in[MAX_RANKS];   // per rank: [chunks] of eight values
    Vec16* shares[MAX_RANKS];     // per rank, with two shots: [chunks / ranks], rounded up
    Signals* signals[MAX_RANKS];  // per rank
    Vec16* out;                   // [chunks], not the `in` of any rank
    uint32_t* failure;            // 1 + the rank that did not arrive; unchanged if all did
    uint32_t* report;             // the same in the host's memory, where reading it costs the host nothing
    uint64_t chunks;
    uint64_t max_polls;
    uint32_t rank;
    uint32_t ranks;
};

// Waits until this block has reached the barrier on all ranks.
SKEP_DEVICE void wait_for_ranks(const AllReduceParams& p, uint32_t round) {
    __syncthreads();
    if (threadIdx.x < p.ranks) {
        const uint32_t other = threadIdx.x;
        store_release(&p.signals[other]->arrived[blockIdx.x][p.rank], round);
        const uint32_t* arrived = &p.signals[p.rank]->arrived[blockIdx.x][other];
        // A rank that is ahead may already be at the next barrier. Rounds wrap around after 2^32.
        for (uint64_t polls = 0; static_cast<int32_t>(load_acquire(arrived) - round) < 0; ++polls) {
            // After one failed wait the step has failed, so there is no point in waiting again.
            if (load_acquire(p.failure) != 0) {
                break;
            }
            if (polls >= p.max_polls) {
                *p.failure = other + 1;
                store_release(p.report, other + 1);
                break;
            }
            give_way();
        }
    }
    __syncthreads();
}

template <typename T>
SKEP_DEVICE Vec16 sum_of_ranks(const AllReduceParams& p, uint64_t chunk) {
    // All loads are issued before the first sum.
    Vec16 of_ranks[MAX_RANKS];
    for (uint32_t rank = 0; rank < MAX_RANKS; ++rank) {
        if (rank < p.ranks) {
            of_ranks[rank] = p.in[rank][chunk];
        }
    }
    float sums[8] = {};
    for (uint32_t rank = 0; rank < MAX_RANKS; ++rank) {
        if (rank < p.ranks) {
            for (int word = 0; word < 4; ++word) {
                float low, high;
                unpack<T>(of_ranks[rank].words[word], low, high);
                sums[2 * word] += low;
                sums[2 * word + 1] += high;
            }
        }
    }
    Vec16 sum;
    for (int word = 0; word < 4; ++word) {
        sum.words[word] = pack<T>(sums[2 * word], sums[2 * word + 1]);
    }
    return sum;
}

// Grid: (at most MAX_BLOCKS), the same on every rank.
template <typename T>
SKEP_DEVICE void all_reduce_one_shot(const AllReduceParams& p) {
    uint32_t* passed = &p.signals[p.rank]->round[blockIdx.x];
    const uint32_t round = *passed;
    wait_for_ranks(p, round + 1);
    for (uint64_t chunk = blockIdx.x * blockDim.x + threadIdx.x; chunk < p.chunks; chunk += gridDim.x * blockDim.x) {
        p.out[chunk] = sum_of_ranks<T>(p, chunk);
    }
    // A rank may change its input only after the others have read it.
    wait_for_ranks(p, round + 2);
    if (threadIdx.x == 0) {
        *passed = round + 2;
    }
}

template <typename T>
SKEP_DEVICE void all_reduce_two_shot(const AllReduceParams& p) {
    uint32_t* passed = &p.signals[p.rank]->round[blockIdx.x];
    const uint32_t round = *passed;
    const uint64_t length = div_up(p.chunks, static_cast<uint64_t>(p.ranks));
    const uint64_t first = blockIdx.x * blockDim.x + threadIdx.x;
    wait_for_ranks(p, round + 1);
    for (uint64_t i = first; i < length && p.rank * length + i < p.chunks; i += gridDim.x * blockDim.x) {
        p.shares[p.rank][i] = sum_of_ranks<T>(p, p.rank * length + i);
    }
    // Each block reads below what the block with the same index on another rank wrote above. No rank changes a share before all
    // ranks have started the next sum and have therefore read it.
    wait_for_ranks(p, round + 2);
    for (uint32_t rank = 0; rank < p.ranks; ++rank) {
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
