// Chooses tokens from logits: penalties, bias, mask, truncation and a draw, in up to three kernels. Each divides a row among
// blocks, and the block of a row that arrives last joins their results.
//
//   `sample_best`  Logits are cleaned of NaN and infinity, penalized and biased; tokens that are not allowed get -infinity.
//                  The highest logit is found, which is the result of a greedy row. Other rows are written to `adjusted`.
//   `sample_cut`   For rows with top-k or top-p. It finds the lowest logit that each of them keeps, and of the tokens with
//                  this logit, the last one. First it adds up counts and weights by the distance from the highest logit;
//                  the last block then searches the tokens of one distance.
//   `sample_draw`  The weights of the kept tokens are added up in token order until the sum exceeds
//                  uniform(seed, step) · total.
//
// A token's weight is exp((logit - highest) / temperature), as an integer multiple of 2^-40. Sums are therefore exact, and a
// draw depends neither on the order in which threads add nor on the number of blocks.
//
// A greedy row without penalties is read once. Other rows are read once by each kernel, and `sample_best` writes them once;
// rows with penalties are written and read once more. In `sample_cut`, the last block also reads the chunks of the row that
// have a logit of at least the lowest one that is kept, once for top-k and once for top-p.
#include "sample.cuh"
#include "sample_candidates.cuh"

SKEP_DEVICE float penalised(const SampleRow& row, float logit, bool seen, uint32_t occurrences) {
    if (seen && row.repetition_penalty != 1.0f) {
        logit = logit > 0.0f ? logit / row.repetition_penalty : logit * row.repetition_penalty;
    }
    if (occurrences > 0) {
        logit -= static_cast<float>(occurrences) * row.frequency_penalty + row.presence_penalty;
    }
    return logit;
}

// The logits of a row as they are before the adjustments.
template <typename T>
struct Clean {
    const T* logits;
    const uint32_t* mask;
    uint32_t mask_words;

    SKEP_DEVICE Clean(const SampleParams& p, const SampleRow& row)
        : logits(static_cast<const T*>(p.logits) + static_cast<uint64_t>(row.logits) * p.logits_stride),
          mask(row.mask == NO_MASK ? nullptr : p.masks + static_cast<uint64_t>(row.mask) * p.mask_words),
          mask_words(p.mask_words) {}

    SKEP_DEVICE float at(uint32_t token) const {
        const float logit = to_float(logits[token]);
        const bool allowed = mask == nullptr || (token / 32 < mask_words && (mask[token / 32] >> token % 32 & 1) != 0);
        return !allowed || logit != logit ? -INFINITY : fminf(logit, MOST);
    }
};

// Writes the block's part of a row to `adjusted`, with its adjustments.
template <typename T>
SKEP_DEVICE void adjust(const SampleParams& p, const SampleRow& row, const Clean<T>& clean, Part part, float* adjusted,
                        SampleShared& shared) {
    const uint32_t first = part.first_chunk * CHUNK;
    const uint32_t last = part.last_chunk * CHUNK < p.vocabulary ? part.last_chunk * CHUNK : p.vocabulary;
    const uint32_t pending = row.pending == NO_TOKEN ? NO_TOKEN : p.drawn[row.pending];
    if (threadIdx.x == 0) {
        shared.pending_is_listed = 0;
    }
    for (uint32_t token = first + threadIdx.x; token < last; token += blockDim.x) {
        adjusted[token] = clean.at(token);
    }
    __syncthreads();
    for (uint32_t i = row.first_adjustment + threadIdx.x; i < row.last_adjustment; i += blockDim.x) {
        const Adjustment of = p.adjustments[i];
        if (of.token < first || of.token >= last) {
            continue;
        }
        const bool is_pending = of.token == pending;
        if (is_pending) {
            shared.pending_is_listed = 1;
        }
        const bool seen = (of.kind & SEEN) != 0 || is_pending;
        float logit = penalised(row, adjusted[of.token], seen, of.occurrences + (is_pending ? 1 : 0));
        logit = fminf(logit + of.bias, MOST);
        adjusted[of.token] = (of.kind & BANNED) != 0 ? -INFINITY : logit;
    }
    __syncthreads();
    if (threadIdx.x == 0 && pending >= first && pending < last && shared.pending_is_listed == 0) {
        adjusted[pending] = fminf(penalised(row, adjusted[pending], true, 1), MOST);
    }
    __syncthreads();
}

// Returns the best token of all threads of the block, in all of them.
SKEP_DEVICE Best best_of_block(Best best, SampleShared& shared) {
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        const Best other = {__shfl_xor_sync(ALL_LANES, best.logit, distance),
                            __shfl_xor_sync(ALL_LANES, best.token, distance)};
        best = better(best, other);
    }
    if (threadIdx.x % WARP == 0) {
        shared.best[threadIdx.x / WARP] = best;
    }
    __syncthreads();
    best = shared.best[0];
    for (int warp = 1; warp < SAMPLE_WARPS; ++warp) {
        best = better(best, shared.best[warp]);
    }
    __syncthreads();
    return best;
}

// Grid: (blocks per row, rows). Block: SAMPLE_WARPS warps.
template <typename T>
SKEP_DEVICE void sample_best(const SampleParams& p) {
    __shared__ SampleShared shared;
    const SampleRow row = p.rows[blockIdx.y];
    SampleState& state = p.states[blockIdx.y];
    float* const adjusted = p.adjusted + static_cast<uint64_t>(blockIdx.y) * p.vocabulary;
    const Clean<T> clean(p, row);
    const Part part(p);
    const uint32_t lane = threadIdx.x % WARP;
    const bool is_adjusted = row.first_adjustment < row.last_adjustment || row.pending != NO_TOKEN;
    const bool is_drawn = row.temperature != 0.0f && row.top_k != 1;
    if (is_adjusted) {
        adjust(p, row, clean, part, adjusted, shared);
    }
    Best best = {-INFINITY, NO_TOKEN};
    for (uint32_t chunk = part.first_chunk + threadIdx.x / WARP; chunk < part.last_chunk; chunk += SAMPLE_WARPS) {
        float logits[LANE_TOKENS];
        SKEP_UNROLL
        for (int i = 0; i < LANE_TOKENS; ++i) {
            const uint32_t token = chunk * CHUNK + i * WARP + lane;
            logits[i] = token >= p.vocabulary ? -INFINITY : is_adjusted ? adjusted[token] : clean.at(token);
        }
        float highest = -INFINITY;
        SKEP_UNROLL
        for (int i = 0; i < LANE_TOKENS; ++i) {
            const uint32_t token = chunk * CHUNK + i * WARP + lane;
            if (is_drawn && !is_adjusted && token < p.vocabulary) {
                adjusted[token] = logits[i];
            }
            // A thread reads its tokens in order, so of equal logits the first one stays.
            best = logits[i] > best.logit ? Best{logits[i], token} : best;
            highest = fmaxf(highest, logits[i]);
        }
        if (is_drawn) {
            highest = warp_max(highest);
            if (lane == 0) {
                state.maxima[chunk] = highest;
            }
        }
    }
    best = best_of_block(best, shared);
    if (threadIdx.x == 0) {
        state.bests[blockIdx.x] = best;
    }
    if (!arrives_last(state, shared)) {
        return;
    }
    best = {-INFINITY, NO_TOKEN};
    for (uint32_t block = threadIdx.x; block < gridDim.x; block += blockDim.x) {
        best = better(best, state.bests[block]);
    }
    best = best_of_block(best, shared);
    if (threadIdx.x == 0) {
        state.best = best;
        state.cut = {rank_of(-INFINITY), 0};
        if (is_settled(row, best)) {
            p.tokens[blockIdx.y] = best.token;
        }
    }
}

// Grid: (blocks per row, rows). Block: SAMPLE_WARPS warps.
SKEP_KERNEL_BOUNDED(sample_cut, SampleParams, SAMPLE_THREADS) {
    __shared__ SampleShared shared;
    const SampleRow row = p.rows[blockIdx.y];
    SampleState& state = p.states[blockIdx.y];
    const bool counts = row.top_k > 0;
    const bool weighs = row.top_p < 1.0f;
    const Best best = state.best;
    if (is_settled(row, best) || !(counts || weighs)) {
        return;
    }
    const float* const adjusted = p.adjusted + static_cast<uint64_t>(blockIdx.y) * p.vocabulary;
    const Weigher weigher = {best.logit, row.temperature};
    const Part part(p);
    for (uint32_t bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
        shared.bins[bin] = shared.more_bins[bin] = 0;
    }
    __syncthreads();
    for (uint32_t chunk = part.first_chunk + threadIdx.x / WARP; chunk < part.last_chunk; chunk += SAMPLE_WARPS) {
        const uint32_t first = chunk * CHUNK + threadIdx.x % WARP;
        float logits[LANE_TOKENS];
        SKEP_UNROLL
        for (int i = 0; i < LANE_TOKENS; ++i) {
            logits[i] = first + i * WARP < p.vocabulary ? adjusted[first + i * WARP] : -INFINITY;
        }
        SKEP_UNROLL
        for (int i = 0; i < LANE_TOKENS; ++i) {
            const bool counted = logits[i] > -INFINITY;
            const uint32_t bin = distance_bin(best.logit, logits[i]);
            if (counts) {
                add_to_bins(shared.bins, counted, bin, 1);
            }
            if (weighs) {
                add_to_bins(shared.more_bins, counted, bin, weigher.units(logits[i]));
            }
        }
    }
    __syncthreads();
    for (uint32_t bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
        if (shared.bins[bin] != 0) {
            atomicAdd(&state.counts[bin], shared.bins[bin]);
        }
        if (shared.more_bins[bin] != 0) {
            atomicAdd(&state.weights[bin], shared.more_bins[bin]);
        }
    }
    if (!arrives_last(state, shared)) {
        return;
    }
    const Cut cut = cut_of(p, row, adjusted, weigher, state, shared);
    if (threadIdx.x == 0) {
        state.cut = cut;
    }
}

// Grid: (blocks per row, rows). Block: SAMPLE_WARPS warps.
SKEP_KERNEL_BOUNDED(sample_draw, SampleParams, SAMPLE_THREADS) {
    __shared__ SampleShared shared;
    const SampleRow row = p.rows[blockIdx.y];
    SampleState& state = p.states[blockIdx.y];
    const Best best = state.best;
    if (is_settled(row, best)) {
        return;
    }
    const float* const adjusted = p.adjusted + static_cast<uint64_t>(blockIdx.y) * p.vocabulary;
    const Weigher weigher = {best.logit, row.temperature};
    const Cut cut = state.cut;
    const Part part(p);
    const uint32_t lane = threadIdx.x % WARP;
    const auto weight = [&](float logit, uint32_t token) -> uint64_t {
        return keeps(cut, logit, token) && weigher.of(logit) >= row.min_p ? weigher.units(logit) : 0;
    };
    for (uint32_t chunk = part.first_chunk + threadIdx.x / WARP; chunk < part.last_chunk; chunk += SAMPLE_WARPS) {
        const uint32_t first = chunk * CHUNK + lane;
        float logits[LANE_TOKENS];
        SKEP_UNROLL
        for (int i = 0; i < LANE_TOKENS; ++i) {
            logits[i] = first + i * WARP < p.vocabulary ? adjusted[first + i * WARP] : -INFINITY;
        }
        uint64_t sum = 0;
        SKEP_UNROLL
        for (int i = 0; i < LANE_TOKENS; ++i) {
            sum += weight(logits[i], first + i * WARP);
        }
        sum = lanes_total(sum);
        if (lane == 0) {
            state.sums[chunk] = sum;
        }
    }
    if (!arrives_last(state, shared)) {
        return;
    }
    const uint32_t chunks = div_up(p.vocabulary, CHUNK);
    for (uint32_t chunk = threadIdx.x; chunk < BINS; chunk += blockDim.x) {
        shared.bins[chunk] = chunk < chunks ? state.sums[chunk] : 0;
    }
    __syncthreads();
    // Computes floor(uniform · total), where uniform has 53 random bits.
    const uint64_t goal = __umul64hi(mixed(mixed(row.seed) ^ row.step) >> 11 << 11, bins_total(shared));
    const Found found = find_bin(shared, goal + 1);
    if (threadIdx.x >= WARP) {
        return;
    }
    uint64_t before = 0;
    for (int i = 0; i < LANE_TOKENS; ++i) {
        const uint32_t token = found.bin * CHUNK + i * WARP + lane;
        const uint64_t mine = token < p.vocabulary ? weight(adjusted[token], token) : 0;
        const uint64_t so_far = before + lanes_so_far(mine);
        if (so_far >= found.rest && so_far - mine < found.rest) {
            p.tokens[blockIdx.y] = token;
        }
        before = __shfl_sync(ALL_LANES, so_far, WARP - 1);
    }
}

#define SAMPLE_BEST(T)                                                   \
    SKEP_KERNEL_BOUNDED(sample_best_##T, SampleParams, SAMPLE_THREADS) { \
        sample_best<T>(p);                                               \
    }

using f32 = float;
SAMPLE_BEST(f32)
SAMPLE_BEST(bf16)
SAMPLE_BEST(f16)
