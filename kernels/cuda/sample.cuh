// The parts that the kernels of sampling share: rows, the state of a row, and sums over the threads of a block.
#pragma once

#include "device.cuh"

constexpr uint32_t NO_TOKEN = 0xffffffffu;
constexpr uint32_t NO_MASK = 0xffffffffu;

// The effect of a row's history, bias and bans on one token. A token occurs at most once in a row's list.
struct Adjustment {
    uint32_t token;
    uint32_t occurrences; // count in the output
    float bias;
    uint32_t kind;        // bits of AdjustmentKind
};

enum AdjustmentKind : uint32_t { SEEN = 1, BANNED = 2 };

struct SampleRow {
    uint64_t seed;
    uint64_t step;
    uint32_t logits;           // row index in the logits
    uint32_t mask;             // row index in the masks, or NO_MASK
    uint32_t first_adjustment;
    uint32_t last_adjustment;  // exclusive
    uint32_t pending;          // index into `drawn` of an output token that the list does not include yet, or NO_TOKEN
    uint32_t top_k;            // 0: off
    float top_p;               // 1: off
    float min_p;               // 0: off
    float temperature;         // 0: greedy
    float frequency_penalty;
    float presence_penalty;
    float repetition_penalty;  // 1: off
};

// Number of tokens that a warp reads at once.
constexpr uint32_t CHUNK = 128;
// Number of bins in which a block adds up, and maximum number of chunks of a row.
constexpr uint32_t BINS = 2048;
constexpr int BIN_BITS = 11;
// Maximum number of blocks per row.
constexpr uint32_t MAX_ROW_BLOCKS = 128;

struct Best {
    float logit;
    uint32_t token;
};

// The tokens to keep: those with a rank below `rank`, and of those that have it, the tokens up to and including `last`.
struct Cut {
    uint32_t rank;
    uint32_t last;
};

// The values that the blocks of a row leave for each other and for the next kernel.
struct SampleState {
    uint64_t counts[BINS];       // number of tokens by distance from the highest logit; zeros between launches
    uint64_t weights[BINS];      // sum of weights by distance; zeros between launches
    uint64_t sums[BINS];         // sum of the kept weights of each chunk
    float maxima[BINS];          // the highest logit of each chunk
    Best bests[MAX_ROW_BLOCKS];  // the best token of each block
    Best best;
    Cut cut;
    uint32_t arrivals;           // zero between launches
};

constexpr uint32_t SAMPLE_STATE_BYTES = 58392;
static_assert(sizeof(SampleState) == SAMPLE_STATE_BYTES, "the host allocates as many bytes");

struct SampleParams {
    const void* logits;            // [.., logits_stride]; each row starts with the vocabulary
    const SampleRow* rows;         // [rows]
    const Adjustment* adjustments;
    const uint32_t* masks;         // [.., mask_words]: bit t % 32 of word t / 32 allows token t
    const uint32_t* drawn;         // tokens drawn in the previous step
    float* adjusted;               // [rows, vocabulary]; greedy rows without adjustments are not written
    SampleState* states;           // [rows]
    uint32_t* tokens;              // [rows]; NO_TOKEN: no token is allowed
    uint32_t vocabulary;
    uint32_t logits_stride;
    uint32_t mask_words;
};

constexpr int SAMPLE_WARPS = 16;
constexpr int SAMPLE_THREADS = SAMPLE_WARPS * WARP;
constexpr int BINS_OF_THREAD = BINS / SAMPLE_THREADS;
constexpr int LANE_TOKENS = CHUNK / WARP;
// Number of bins per unit of distance from the highest logit. The last bin holds everything beyond 32 units.
constexpr float BINS_PER_UNIT = 64.0f;
constexpr float MOST = 3.402823466e38f;
constexpr float UNIT = 1099511627776.0f; // 2^40

// Maps floats that are not NaN to integers, the highest float to the lowest integer.
SKEP_DEVICE uint32_t rank_of(float value) {
    const uint32_t bits = float_bits(value);
    return bits >> 31 ? bits : ~bits & 0x7fffffffu;
}

// The inverse of `rank_of`.
SKEP_DEVICE float from_rank(uint32_t rank) {
    return bits_float(rank >> 31 ? rank : ~rank & 0x7fffffffu);
}

SKEP_DEVICE bool keeps(Cut cut, float logit, uint32_t token) {
    const uint32_t rank = rank_of(logit);
    return rank < cut.rank || (rank == cut.rank && token <= cut.last);
}

// Returns the bin of a logit by its distance from the highest one. A lower logit never has a lower bin.
SKEP_DEVICE uint32_t distance_bin(float highest, float logit) {
    return static_cast<uint32_t>(fminf((highest - logit) * BINS_PER_UNIT, static_cast<float>(BINS - 1)));
}

// The finalizer of SplitMix64. A draw applies it twice and uses 53 bits of the result.
SKEP_DEVICE uint64_t mixed(uint64_t z) {
    z += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// Returns the higher logit; of equal logits, the first token.
SKEP_DEVICE Best better(Best a, Best b) {
    return b.logit > a.logit || (b.logit == a.logit && b.token < a.token) ? b : a;
}

SKEP_DEVICE uint64_t lanes_total(uint64_t value) {
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(ALL_LANES, value, distance);
    }
    return value;
}

// Returns the sum over the lanes up to and including this one.
SKEP_DEVICE uint64_t lanes_so_far(uint64_t value) {
    for (int distance = 1; distance < WARP; distance *= 2) {
        const uint64_t other = __shfl_up_sync(ALL_LANES, value, distance);
        value += static_cast<int>(threadIdx.x % WARP) >= distance ? other : 0;
    }
    return value;
}

struct Found {
    uint32_t bin;
    uint64_t rest;
};

struct SampleShared {
    uint64_t bins[BINS];
    uint64_t more_bins[BINS];
    uint64_t of_warps[SAMPLE_WARPS];
    Best best[SAMPLE_WARPS];
    Found found;
    uint32_t count;
    uint32_t arrived;
    uint32_t pending_is_listed;
};

// The part of a row that a block reads.
struct Part {
    uint32_t first_chunk;
    uint32_t last_chunk; // exclusive

    SKEP_DEVICE explicit Part(const SampleParams& p) {
        const uint32_t chunks = div_up(p.vocabulary, CHUNK);
        const uint32_t length = div_up(chunks, gridDim.x);
        first_chunk = blockIdx.x * length < chunks ? blockIdx.x * length : chunks;
        last_chunk = first_chunk + length < chunks ? first_chunk + length : chunks;
    }
};

// Returns whether this block is the last of its row to arrive, and thus sees what the others have written. Called by all threads.
SKEP_DEVICE bool arrives_last(SampleState& state, SampleShared& shared) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.arrived = atomicAdd(&state.arrivals, 1u) + 1;
        if (shared.arrived == gridDim.x) {
            state.arrivals = 0;
        }
    }
    __syncthreads();
    __threadfence();
    return shared.arrived == gridDim.x;
}

// Returns whether `sample_best` has chosen the row's token.
SKEP_DEVICE bool is_settled(const SampleRow& row, Best best) {
    return best.token == NO_TOKEN || row.temperature == 0.0f || row.top_k == 1;
}

struct Weigher {
    float highest;
    float temperature;

    SKEP_DEVICE float of(float logit) const {
        return expf((logit - highest) / temperature);
    }

    // Returns the weight in units of 2^-40.
    SKEP_DEVICE uint64_t units(float logit) const {
        return static_cast<uint64_t>(of(logit) * UNIT);
    }
};

// Returns the sum over all warps before this one; `total` gets the sum over all warps. Called by all threads.
SKEP_DEVICE uint64_t warps_before(SampleShared& shared, uint64_t of_lane, uint64_t& total) {
    const uint64_t of_warp = lanes_total(of_lane);
    __syncthreads();
    if (threadIdx.x % WARP == 0) {
        shared.of_warps[threadIdx.x / WARP] = of_warp;
    }
    __syncthreads();
    uint64_t before = 0;
    total = 0;
    for (uint32_t warp = 0; warp < SAMPLE_WARPS; ++warp) {
        before += warp < threadIdx.x / WARP ? shared.of_warps[warp] : 0;
        total += shared.of_warps[warp];
    }
    return before;
}

// Returns the sum of all bins. Called by all threads.
SKEP_DEVICE uint64_t bins_total(SampleShared& shared) {
    uint64_t sum = 0;
    for (uint32_t bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
        sum += shared.bins[bin];
    }
    uint64_t total;
    warps_before(shared, sum, total);
    return total;
}

constexpr uint32_t NO_BIN = BINS;

// Returns the bin in which the sum from the first bin on reaches the goal, which is not 0, and the rest of the goal before it.
// Called by all threads, after a barrier.
SKEP_DEVICE Found find_bin(SampleShared& shared, uint64_t goal) {
    if (threadIdx.x == 0) {
        shared.found = {NO_BIN, 0};
    }
    uint32_t bin = threadIdx.x * BINS_OF_THREAD;
    uint64_t sum = 0;
    for (int i = 0; i < BINS_OF_THREAD; ++i) {
        sum += shared.bins[bin + i];
    }
    uint64_t total;
    const uint64_t before = warps_before(shared, sum, total) + lanes_so_far(sum) - sum;
    if (before < goal && goal - before <= sum) {
        goal -= before;
        while (shared.bins[bin] < goal) {
            goal -= shared.bins[bin];
            ++bin;
        }
        shared.found = {bin, goal};
    }
    __syncthreads();
    const Found found = shared.found;
    __syncthreads();
    return found;
}

// Maximum number of bins for which a warp adds up its lanes before it adds to the block's bins.
constexpr int MAX_SHARED_BINS = 4;

// Adds the measures of the lanes that are `counted` to their bins. Lanes of a warp that have the same bin as its first lane are
// added up in the warp, because a block adds to one bin at a time. Called by all lanes.
SKEP_DEVICE void add_to_bins(uint64_t* bins, bool counted, uint32_t bin, uint64_t measure) {
    const uint32_t lane = threadIdx.x % WARP;
    uint32_t left = __ballot_sync(ALL_LANES, counted);
    for (int i = 0; i < MAX_SHARED_BINS && left != 0; ++i) {
        const uint32_t first = __ffs(static_cast<int>(left)) - 1;
        const uint32_t of_first = __shfl_sync(ALL_LANES, bin, first);
        const bool is_same = (left >> lane & 1) != 0 && bin == of_first;
        const uint32_t same = __ballot_sync(ALL_LANES, is_same);
        if ((same & (same - 1)) == 0) {
            break;
        }
        const uint64_t sum = lanes_total(is_same ? measure : 0);
        if (lane == first) {
            atomicAdd(&bins[bin], sum);
        }
        left &= ~same;
    }
    if ((left >> lane & 1) != 0) {
        atomicAdd(&bins[bin], measure);
    }
}
