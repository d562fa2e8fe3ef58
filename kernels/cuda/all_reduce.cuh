// The parts that the kernels which add up values of all ranks share: how ranks wait for each other, and the sum itself.
//
// Blocks with the same index on all ranks wait for each other, so all blocks of a rank have to be resident. If a rank does not
// arrive within `max_polls` polls, `failure` and `report` name it; the sums are then invalid, and the signals have to be created
// again.
#pragma once

#include "device.cuh"
#include "ptx/peer.cuh"

constexpr int MAX_RANKS = 8;
constexpr int MAX_BLOCKS = 64;

// The signals of one rank, which must be zero at first.
struct Signals {
    uint32_t round[MAX_BLOCKS];              // barriers that this rank's blocks have passed
    uint32_t arrived[MAX_BLOCKS][MAX_RANKS]; // the barriers that the blocks of other ranks have reached, written by them
};

// The values of all ranks, and the words through which the ranks wait for each other.
struct MeetingParams {
    const Vec16* in[MAX_RANKS];  // per rank
    Signals* signals[MAX_RANKS]; // per rank
    uint32_t* failure;           // 1 + the rank that did not arrive; unchanged if all did
    uint32_t* report;            // the same in the host's memory, where reading it costs the host nothing
    uint64_t max_polls;
    uint32_t rank;
    uint32_t ranks;
};

// Waits until this block has reached the barrier on all ranks.
SKEP_DEVICE void wait_for_ranks(const MeetingParams& p, uint32_t round) {
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
SKEP_DEVICE Vec16 sum_of_ranks(const MeetingParams& p, uint64_t chunk) {
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
