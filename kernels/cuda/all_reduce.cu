// The sum over all ranks of what each has, on every rank, through memory that they all see.
//
// Sums are formed in float32 in the order of the ranks and rounded once: their bits are the same everywhere. In one shot every
// rank reads everything of all others: one step, ranks · bytes. In two shots each sums its own share and reads the shares of the
// others: one barrier more, 2 · bytes.
//
// The same blocks of all ranks wait for each other, so all of a rank's blocks have to be resident. A rank that does not come
// is named in `failure` after `patience` looks; the sums are then worth nothing, and the signals have to be made anew.
#include "device.cuh"
#include "ptx/peer.cuh"

constexpr int MAX_RANKS = 8;
constexpr int MAX_BLOCKS = 64;

// Of each rank, zero at first.
struct Signals {
    uint32_t round[MAX_BLOCKS];              // barriers that this rank's blocks have passed
    uint32_t arrived[MAX_BLOCKS][MAX_RANKS]; // at which barrier the blocks of the others are; those write it
};

struct AllReduceParams {
    const Vec16* in[MAX_RANKS];   // of each rank: [chunks] of eight values
    Vec16* shares[MAX_RANKS];     // of each rank, in two shots: [chunks / ranks], rounded up
    Signals* signals[MAX_RANKS];
    Vec16* out;                   // [chunks], nobody's `in`
    uint32_t* failure;            // 1 + the rank that did not come; left alone if all did
    uint64_t chunks;
    uint64_t patience;
    uint32_t rank;
    uint32_t ranks;
};

// Until this block has arrived at the barrier on all ranks.
SKEP_DEVICE void wait_for_ranks(const AllReduceParams& p, uint32_t round) {
    __syncthreads();
    if (threadIdx.x < p.ranks) {
        const uint32_t other = threadIdx.x;
        store_release(&p.signals[other]->arrived[blockIdx.x][p.rank], round);
        const uint32_t* arrived = &p.signals[p.rank]->arrived[blockIdx.x][other];
        // One that is ahead may be at the next barrier already; rounds start again after 2^32.
        for (uint64_t looks = 0; static_cast<int32_t>(load_acquire(arrived) - round) < 0; ++looks) {
            // Who has waited in vain once waits for nobody any more: the step has failed.
            if (load_acquire(p.failure) != 0) {
                break;
            }
            if (looks >= p.patience) {
                *p.failure = other + 1;
                break;
            }
            give_way();
        }
    }
    __syncthreads();
}

template <typename T>
SKEP_DEVICE Vec16 sum_of_ranks(const AllReduceParams& p, uint64_t chunk) {
    // All loads are under way before the first sum.
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

// Grid: (at most MAX_BLOCKS), as many on every rank.
template <typename T>
SKEP_DEVICE void all_reduce_one_shot(const AllReduceParams& p) {
    uint32_t* passed = &p.signals[p.rank]->round[blockIdx.x];
    const uint32_t round = *passed;
    wait_for_ranks(p, round + 1);
    for (uint64_t chunk = blockIdx.x * blockDim.x + threadIdx.x; chunk < p.chunks; chunk += gridDim.x * blockDim.x) {
        p.out[chunk] = sum_of_ranks<T>(p, chunk);
    }
    // Only then may a rank change what the others read.
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
    // Each block reads below what the same block of another rank wrote above. Nobody changes a share before all ranks have begun
    // the next sum, and so have read it.
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
    SKEP_KERNEL(all_reduce_##shots##_shot_##T, AllReduceParams) { \
        all_reduce_##shots##_shot<T>(p);                         \
    }

ALL_REDUCE(one, bf16)
ALL_REDUCE(one, f16)
ALL_REDUCE(two, bf16)
ALL_REDUCE(two, f16)
