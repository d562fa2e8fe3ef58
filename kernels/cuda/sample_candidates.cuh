// The tokens near the last one that a row keeps, and the search among them.
#pragma once

#include "sample.cuh"

struct Candidate {
    bool exists;
    uint32_t token;
    float logit;
};

// The tokens of one bin of distances that a cut keeps. They are listed in `more_bins` if there are at most BINS of them;
// otherwise the whole row is searched each time.
struct Candidates {
    const SampleParams& p;
    const float* adjusted;
    const SampleShared& shared;
    float highest;
    uint32_t bin;
    Cut cut;

    SKEP_DEVICE bool are_listed() const {
        return shared.count <= BINS;
    }

    SKEP_DEVICE bool has(float logit, uint32_t token) const {
        return logit > -INFINITY && distance_bin(highest, logit) == bin && keeps(cut, logit, token);
    }

    // Calls `use` with candidates, all lanes at once.
    template <typename Use>
    SKEP_DEVICE void each(Use use) const {
        const uint32_t end = are_listed() ? shared.count : p.vocabulary;
        for (uint32_t begin = threadIdx.x / WARP * WARP; begin < end; begin += blockDim.x) {
            const uint32_t index = begin + threadIdx.x % WARP;
            Candidate candidate = {false, 0, 0.0f};
            if (index < end && are_listed()) {
                const uint64_t listed = shared.more_bins[index];
                candidate = {true, static_cast<uint32_t>(listed), bits_float(static_cast<uint32_t>(listed >> 32))};
            } else if (index < end) {
                candidate = {has(adjusted[index], index), index, adjusted[index]};
            }
            use(candidate);
        }
    }
};

// Lists the candidates. Chunks whose highest logit has a higher bin have none. Called by all threads.
SKEP_DEVICE void list_candidates(const Candidates& of, const SampleState& state, SampleShared& shared) {
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t chunks = div_up(of.p.vocabulary, CHUNK);
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.count = 0;
    }
    __syncthreads();
    for (uint32_t begin = threadIdx.x / WARP * WARP; begin < chunks; begin += blockDim.x) {
        const float highest = begin + lane < chunks ? state.maxima[begin + lane] : -INFINITY;
        const bool may_have = highest > -INFINITY && distance_bin(of.highest, highest) <= of.bin;
        for (uint32_t left = __ballot_sync(ALL_LANES, may_have); left != 0; left &= left - 1) {
            const uint32_t first = (begin + __ffs(static_cast<int>(left)) - 1) * CHUNK + lane;
            float logits[LANE_TOKENS];
            SKEP_UNROLL
            for (int i = 0; i < LANE_TOKENS; ++i) {
                const uint32_t token = first + i * WARP;
                logits[i] = token < of.p.vocabulary ? of.adjusted[token] : -INFINITY;
            }
            SKEP_UNROLL
            for (int i = 0; i < LANE_TOKENS; ++i) {
                const uint32_t token = first + i * WARP;
                if (!of.has(logits[i], token)) {
                    continue;
                }
                const uint32_t at = atomicAdd(&shared.count, 1u);
                if (at < BINS) {
                    shared.more_bins[at] = static_cast<uint64_t>(float_bits(logits[i])) << 32 | token;
                }
            }
        }
    }
    __syncthreads();
}

// Returns the key of the candidates with which the sum of measures, from the lowest key on, reaches the goal; `goal` becomes the
// rest of the goal before the candidates with this key. The sum of all measures must reach it. Called by all threads.
template <typename Key, typename Measure>
SKEP_DEVICE uint32_t key_at(const Candidates& of, int digits, uint64_t& goal, SampleShared& shared, Key key, Measure measure) {
    uint32_t prefix = 0;
    for (int shift = BIN_BITS * (digits - 1); shift >= 0; shift -= BIN_BITS) {
        // The mask of the higher bits, which are already known.
        const uint32_t known = shift + BIN_BITS >= 32 ? 0 : 0xffffffffu << (shift + BIN_BITS);
        for (uint32_t bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
            shared.bins[bin] = 0;
        }
        __syncthreads();
        of.each([&](Candidate candidate) {
            const uint32_t of_candidate = key(candidate);
            const bool counted = candidate.exists && (of_candidate & known) == prefix;
            add_to_bins(shared.bins, counted, of_candidate >> shift & (BINS - 1), counted ? measure(candidate) : 0);
        });
        __syncthreads();
        const Found found = find_bin(shared, goal);
        prefix |= found.bin << shift;
        goal = found.rest;
    }
    return prefix;
}

// Number of digits of BIN_BITS bits of a rank and of a token.
constexpr int RANK_DIGITS = 3;
constexpr int TOKEN_DIGITS = 2;

// Reduces the candidates' cut to those with the highest logits, up to the point where the sum of their measures reaches the
// goal. Of equal logits, the first tokens are kept. Called by all threads.
template <typename Measure>
SKEP_DEVICE Cut cut_within(const Candidates& of, uint64_t goal, SampleShared& shared, Measure measure) {
    const uint32_t rank = key_at(
        of, RANK_DIGITS, goal, shared, [](Candidate candidate) { return rank_of(candidate.logit); },
        [&](Candidate candidate) { return measure(candidate.logit); });
    uint64_t ties = div_up(goal, measure(from_rank(rank)));
    const uint32_t last = key_at(
        of, TOKEN_DIGITS, ties, shared, [](Candidate candidate) { return candidate.token; },
        [&](Candidate candidate) -> uint64_t { return rank_of(candidate.logit) == rank ? 1 : 0; });
    return Cut{rank, last};
}

// Moves a row's bins to the block's, and clears them for the next launch.
SKEP_DEVICE void take_bins(uint64_t* of_row, SampleShared& shared) {
    for (uint32_t bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
        shared.bins[bin] = of_row[bin];
        of_row[bin] = 0;
    }
    __syncthreads();
}

// Returns what top-k and top-p keep, given a row's counts and weights by distance. Called by all threads.
SKEP_DEVICE Cut cut_of(const SampleParams& p, const SampleRow& row, const float* adjusted, Weigher weigher,
                       SampleState& state, SampleShared& shared) {
    Candidates of = {p, adjusted, shared, weigher.highest, NO_BIN, state.cut};
    const auto units = [&](float logit) { return weigher.units(logit); };
    Found found = {NO_BIN, 0};
    if (row.top_k > 0) {
        take_bins(state.counts, shared);
        found = find_bin(shared, row.top_k);
    }
    of.bin = found.bin;
    uint64_t kept_units = 0;
    if (of.bin != NO_BIN) {
        list_candidates(of, state, shared);
        of.cut = cut_within(of, found.rest, shared, [](float) -> uint64_t { return 1; });
        uint64_t sum = 0;
        of.each([&](Candidate candidate) {
            const bool is_kept = candidate.exists && keeps(of.cut, candidate.logit, candidate.token);
            sum += is_kept ? weigher.units(candidate.logit) : 0;
        });
        warps_before(shared, sum, kept_units);
    }
    if (row.top_p < 1.0f) {
        take_bins(state.weights, shared);
        for (uint32_t bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
            shared.bins[bin] = bin < of.bin ? shared.bins[bin] : bin == of.bin ? kept_units : 0;
        }
        __syncthreads();
        const uint64_t total = bins_total(shared);
        const uint64_t share = static_cast<uint64_t>(ceil(static_cast<double>(row.top_p) * static_cast<double>(total)));
        found = find_bin(shared, share < 1 ? 1 : share < total ? share : total);
        of.bin = found.bin;
        list_candidates(of, state, shared);
        of.cut = cut_within(of, found.rest, shared, units);
    }
    return of.cut;
}
