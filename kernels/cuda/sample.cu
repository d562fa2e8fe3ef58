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

// What the blocks of a row leave for each other and for the next kernel.
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
