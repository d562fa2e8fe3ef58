// Chooses tokens from logits: penalties, bias, mask, truncation and a draw, with one block per row.
//
//   1. Logits are cleaned of NaN and infinity, penalized and biased, and written to `adjusted`; tokens that are not allowed
//      get -infinity.
//   2. The highest logit is found. It is the result of a greedy row.
//   3. A token's weight is exp((logit - highest) / temperature), as an integer multiple of 2^-40. Sums are therefore exact,
//      and a draw does not depend on the order in which threads add.
//   4. Top-k and top-p each find the lowest logit that they keep, eight bits at a time. Of equal logits, the first tokens are
//      kept.
//   5. The weights of the kept tokens are added up in token order until the sum exceeds uniform(seed, step) · total.
//
// It reads the logits once and `adjusted` 3 times, plus 4 times each for top-k and top-p; `adjusted` fits in the L2 cache.
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

struct SampleParams {
    const void* logits;            // [.., logits_stride]; each row starts with the vocabulary
    const SampleRow* rows;         // [rows]
    const Adjustment* adjustments;
    const uint32_t* masks;         // [.., mask_words]: bit t % 32 of word t / 32 allows token t
    const uint32_t* drawn;         // tokens drawn in the previous step
    float* adjusted;               // [rows, vocabulary]
    uint32_t* tokens;              // [rows]; NO_TOKEN: no token is allowed
    uint32_t vocabulary;
    uint32_t logits_stride;
    uint32_t mask_words;
};

constexpr int SAMPLE_WARPS = 32;
constexpr int SAMPLE_THREADS = SAMPLE_WARPS * WARP;
constexpr float MOST = 3.402823466e38f;
constexpr float UNIT = 1099511627776.0f; // 2^40

// Maps floats that are not NaN to integers with the same order.
SKEP_DEVICE uint32_t ordered(float value) {
    const uint32_t bits = float_bits(value);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The inverse of `ordered`.
SKEP_DEVICE float from_ordered(uint32_t key) {
    return bits_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

// The finalizer of SplitMix64. A draw applies it twice and uses 53 bits of the result.
SKEP_DEVICE uint64_t mixed(uint64_t z) {
    z += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

struct Best {
    float logit;
    uint32_t token;
};

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

// The tokens to keep: those with logits above `least`, and the first `ties` tokens whose logits are equal to it.
struct Cut {
    uint32_t least;
    uint32_t ties;
};

struct SampleShared {
    uint64_t bins[256];
    uint64_t of_warps[SAMPLE_WARPS];
    Best best[SAMPLE_WARPS];
    uint64_t goal;
    uint32_t bin;
    uint32_t pending_is_listed;
};

SKEP_DEVICE float penalised(const SampleRow& row, float logit, bool seen, uint32_t occurrences) {
    if (seen && row.repetition_penalty != 1.0f) {
        logit = logit > 0.0f ? logit / row.repetition_penalty : logit * row.repetition_penalty;
    }
    if (occurrences > 0) {
        logit -= static_cast<float>(occurrences) * row.frequency_penalty + row.presence_penalty;
    }
    return logit;
}

template <typename T>
SKEP_DEVICE void adjust(const SampleParams& p, const SampleRow& row, float* adjusted, SampleShared& shared) {
    const T* logits = static_cast<const T*>(p.logits) + static_cast<uint64_t>(row.logits) * p.logits_stride;
    const uint32_t* mask =
        row.mask == NO_MASK ? nullptr : p.masks + static_cast<uint64_t>(row.mask) * p.mask_words;
    const uint32_t pending = row.pending == NO_TOKEN ? NO_TOKEN : p.drawn[row.pending];
    if (threadIdx.x == 0) {
        shared.pending_is_listed = 0;
    }
    for (uint32_t token = threadIdx.x; token < p.vocabulary; token += blockDim.x) {
        const float logit = to_float(logits[token]);
        const bool allowed =
            mask == nullptr || (token / 32 < p.mask_words && (mask[token / 32] >> token % 32 & 1) != 0);
        adjusted[token] = !allowed || logit != logit ? -INFINITY : fminf(logit, MOST);
    }
    __syncthreads();
    for (uint32_t i = row.first_adjustment + threadIdx.x; i < row.last_adjustment; i += blockDim.x) {
        const Adjustment of = p.adjustments[i];
        if (of.token >= p.vocabulary) {
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
    if (threadIdx.x == 0 && pending < p.vocabulary && shared.pending_is_listed == 0) {
        adjusted[pending] = fminf(penalised(row, adjusted[pending], true, 1), MOST);
    }
    __syncthreads();
}

SKEP_DEVICE Best highest(const SampleParams& p, const float* adjusted, SampleShared& shared) {
    Best best = {-INFINITY, NO_TOKEN};
    for (uint32_t token = threadIdx.x; token < p.vocabulary; token += blockDim.x) {
        const Best other = {adjusted[token], token};
        best = other.logit > -INFINITY ? better(best, other) : best;
    }
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
    return best;
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

constexpr uint32_t NO_BIN = 256;

// Finds the bin in which the sum from the highest bin down reaches the goal, and stores it and the rest of the goal in
// `shared`. Called by one warp.
SKEP_DEVICE void find_bin(SampleShared& shared, uint64_t goal) {
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t top = 255 - 8 * lane;
    uint64_t sum = 0;
    for (uint32_t i = 0; i < 8; ++i) {
        sum += shared.bins[top - i];
    }
    const uint64_t so_far = lanes_so_far(sum);
    const bool reaches = so_far >= goal && so_far - sum < goal;
    if (__ballot_sync(ALL_LANES, reaches) == 0 && lane == 0) {
        shared.bin = NO_BIN;
    }
    if (reaches) {
        uint32_t bin = top;
        goal -= so_far - sum;
        while (shared.bins[bin] < goal) {
            goal -= shared.bins[bin];
            --bin;
        }
        shared.bin = bin;
        shared.goal = goal;
    }
}

// Maximum number of bins for which a warp adds up its lanes before it adds to the block's bins.
constexpr int MAX_SHARED_BINS = 4;

// Adds the measures of the lanes that are `counted` to their bins. Most logits have one of a few exponents, so most lanes of a
// warp have the same bin in the first round: these are added up in the warp, because a block adds to one bin at a time. Called by
// all lanes.
SKEP_DEVICE void add_to_bins(SampleShared& shared, bool counted, uint32_t bin, uint64_t measure) {
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
            atomicAdd(&shared.bins[bin], sum);
        }
        left &= ~same;
    }
    if ((left >> lane & 1) != 0) {
        atomicAdd(&shared.bins[bin], measure);
    }
}

// Reduces the tokens that `before` keeps to those with the highest logits, up to the point where the sum of their measures
// reaches the goal, which is not 0. If the sum never reaches the goal, all of them are kept.
template <typename Measure>
SKEP_DEVICE Cut cut_at(const SampleParams& p, const float* adjusted, Cut before, uint64_t goal, SampleShared& shared,
                       Measure measure) {
    uint32_t prefix = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        // The mask of the higher bits, which are already known.
        const uint32_t known = shift == 24 ? 0 : 0xffffffffu << (shift + 8);
        for (uint32_t bin = threadIdx.x; bin < 256; bin += blockDim.x) {
            const bool divided = (before.least & known) == prefix && (before.least >> shift & 0xff) == bin;
            shared.bins[bin] = divided && before.ties > 0 ? before.ties * measure(from_ordered(before.least)) : 0;
        }
        __syncthreads();
        for (uint32_t begin = threadIdx.x / WARP * WARP; begin < p.vocabulary; begin += blockDim.x) {
            const uint32_t token = begin + threadIdx.x % WARP;
            const float logit = token < p.vocabulary ? adjusted[token] : -INFINITY;
            const uint32_t key = ordered(logit);
            const bool counted = token < p.vocabulary && (key & known) == prefix && key > before.least;
            add_to_bins(shared, counted, key >> shift & 0xff, counted ? measure(logit) : 0);
        }
        __syncthreads();
        if (threadIdx.x < WARP) {
            find_bin(shared, goal);
        }
        __syncthreads();
        if (shared.bin == NO_BIN) {
            return before;
        }
        prefix |= shared.bin << shift;
        goal = shared.goal;
    }
    const uint64_t each = measure(from_ordered(prefix));
    return Cut{prefix, static_cast<uint32_t>(div_up(goal, each))};
}

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

// Draws one of the tokens that the cut keeps and `min_p` allows. Each warp has a range of tokens, and the ranges are in order.
SKEP_DEVICE void draw(const SampleParams& p, const SampleRow& row, const float* adjusted, Cut cut, Weigher weigher,
                      SampleShared& shared) {
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t length = div_up(div_up(p.vocabulary, static_cast<uint32_t>(SAMPLE_WARPS)),
                                   static_cast<uint32_t>(WARP)) * WARP;
    const uint32_t first = threadIdx.x / WARP * length;
    const uint32_t last = first + length < p.vocabulary ? first + length : p.vocabulary;
    uint64_t equals = 0;
    for (uint32_t token = first + lane; token < last; token += WARP) {
        equals += ordered(adjusted[token]) == cut.least ? 1 : 0;
    }
    uint64_t total;
    const uint64_t equals_before = warps_before(shared, equals, total);

    // Returns the weight of this lane's token in the draw. All lanes call it together, in token order.
    uint64_t equals_so_far = equals_before;
    const auto weight = [&](uint32_t token) -> uint64_t {
        const float logit = token < last ? adjusted[token] : -INFINITY;
        const uint32_t key = ordered(logit);
        const uint32_t equal = __ballot_sync(ALL_LANES, token < last && key == cut.least);
        const uint64_t rank = equals_so_far + __popc(equal & ((1u << lane) - 1));
        equals_so_far += __popc(equal);
        const bool kept = key > cut.least || (key == cut.least && rank < cut.ties);
        return kept && weigher.of(logit) >= row.min_p ? weigher.units(logit) : 0;
    };
    uint64_t sum = 0;
    for (uint32_t begin = first; begin < last; begin += WARP) {
        sum += weight(begin + lane);
    }
    uint64_t before = warps_before(shared, sum, total);
    // Computes floor(uniform · total), where uniform has 53 random bits.
    const uint64_t goal = __umul64hi(mixed(mixed(row.seed) ^ row.step) >> 11 << 11, total);
    equals_so_far = equals_before;
    if (goal < before || goal - before >= shared.of_warps[threadIdx.x / WARP]) {
        return;
    }
    for (uint32_t begin = first; begin < last; begin += WARP) {
        const uint64_t mine = weight(begin + lane);
        const uint64_t so_far = before + lanes_so_far(mine);
        if (so_far > goal && so_far - mine <= goal) {
            p.tokens[blockIdx.x] = begin + lane;
        }
        before = __shfl_sync(ALL_LANES, so_far, WARP - 1);
    }
}

// Grid: (rows). Block: SAMPLE_WARPS warps.
template <typename T>
SKEP_DEVICE void sample(const SampleParams& p) {
    __shared__ SampleShared shared;
    const SampleRow row = p.rows[blockIdx.x];
    float* adjusted = p.adjusted + static_cast<uint64_t>(blockIdx.x) * p.vocabulary;
    adjust<T>(p, row, adjusted, shared);
    const Best best = highest(p, adjusted, shared);
    if (best.token == NO_TOKEN || row.temperature == 0.0f || row.top_k == 1) {
        if (threadIdx.x == 0) {
            p.tokens[blockIdx.x] = best.token;
        }
        return;
    }
    const Weigher weigher = {best.logit, row.temperature};
    Cut cut = {ordered(-INFINITY), 0};
    if (row.top_k > 0) {
        cut = cut_at(p, adjusted, cut, row.top_k, shared, [](float) -> uint64_t { return 1; });
    }
    if (row.top_p < 1.0f) {
        uint64_t sum = 0;
        for (uint32_t token = threadIdx.x; token < p.vocabulary; token += blockDim.x) {
            sum += ordered(adjusted[token]) > cut.least ? weigher.units(adjusted[token]) : 0;
        }
        uint64_t total;
        warps_before(shared, sum, total);
        total += cut.ties > 0 ? cut.ties * weigher.units(from_ordered(cut.least)) : 0;
        const uint64_t share = static_cast<uint64_t>(ceil(static_cast<double>(row.top_p) * static_cast<double>(total)));
        const uint64_t goal = share < 1 ? 1 : share < total ? share : total;
        cut = cut_at(p, adjusted, cut, goal, shared, [&](float logit) { return weigher.units(logit); });
    }
    draw(p, row, adjusted, cut, weigher, shared);
}

// A row has one block, and there are rarely more rows than multiprocessors.
#define SAMPLE(T)                                                       \
    SKEP_KERNEL_BOUNDED(sample_##T, SampleParams, SAMPLE_THREADS, 1) { \
        sample<T>(p);                                                   \
    }

using f32 = float;
SAMPLE(f32)
SAMPLE(bf16)
SAMPLE(f16)
