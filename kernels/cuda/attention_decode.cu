// Attention of up to sixteen rows per sequence over its paged keys and values, with tensor cores, split along the context.
//
// A plan divides what rows of a sequence see into splits (`Split`) of about equal work. The rows of a split and the query heads
// that share a key-value head are the sixteen rows of a tensor-core tile, so that keys and values are read once for all of them.
// The lower bound on the time is that of reading 2 · context · head_size · bytes per key-value head.
//
// Each warp takes every n-th page of the split, where n is the number of warps, and has its own softmax state (m, d, o). It copies
// the keys and values of its next page while it computes with those of the current one, and waits for no other warp until the
// split ends. The states of the warps are then joined in order. If a tile of rows has several splits, each leaves its state in
// `states`, and the block that arrives last joins them from first to last.
#include "device.cuh"
#include "ptx/mma.cuh"

// Rows of a tile: rows of a sequence, each with the query heads of the block.
constexpr uint32_t PACKED_ROWS = 16;
constexpr int MAX_DECODE_WARPS = 4;
// Number of pages per warp that are in shared memory: one in use, the others on the way.
constexpr int DECODE_STAGES = 2;
// Padding of the rows in shared memory, so that the rows of an 8×8 tile are in different banks.
constexpr int DECODE_PAD = 8;
// Number of splits whose states are loaded at once to join them.
constexpr uint32_t JOINED_AT_ONCE = 8;

// Wide heads have fewer warps, so that the pages fit into the 99 KiB that every architecture has.
template <int HEAD_SIZE>
constexpr int DECODE_WARPS = HEAD_SIZE > WIDE_HEAD ? MAX_DECODE_WARPS / 2 : MAX_DECODE_WARPS;

static_assert(PAGE_POSITIONS == 16, "a tile of keys is a page");

// A split of what some rows of a sequence see. A block has at most PACKED_ROWS pairs of a row and a query head.
struct Split {
    uint32_t sequence;       // index of the page table
    uint32_t first_row;      // index in the batch
    uint32_t rows;
    uint32_t first_position; // position of the first row
    uint32_t first_key;
    uint32_t last_key;       // exclusive; keys that a row does not see are skipped
    uint32_t first_state;    // index of the state of the first row and the first split
    uint32_t part;           // index of the split among those of its rows
    uint32_t parts;          // number of these splits; 0: there is nothing to do
    uint32_t arrival;        // index of their arrivals
};

struct AttentionDecodeParams {
    const void* q;               // [rows, q_stride]; each row starts with the queries
    const void* keys;            // [pages, PAGE_POSITIONS, kv_heads, head_size]
    const void* values;
    void* out;                   // [rows, heads, head_size]
    const uint32_t* page_tables; // [sequences, table_stride]
    const Split* splits;
    float* sums;                 // [states, heads, head_size]: o; the states of a row follow each other
    float* weights;              // [states, heads, 2]: m, d
    uint32_t* arrivals;          // [arrivals, gridDim.y]: zeros, also afterwards
    uint32_t q_stride;
    uint32_t table_stride;
    uint32_t heads;
    uint32_t kv_heads;           // heads is a multiple of it
    uint32_t window;             // number of positions that a row sees, including its own; 0: all positions up to its own
    float scale;
};

// Four neighboring values of a head.
struct alignas(16) Floats {
    float values[4];
};

// The largest score and the sum of weights of a state.
struct alignas(8) Weight {
    float most;
    float sum;
};

// Returns the factor of a state in a join of states of which `larger` is the largest score. A state without keys has none.
SKEP_DEVICE float share_of(float most, float larger) {
    return most == -INFINITY ? 0.0f : __expf(most - larger);
}

// The rows of a block and where they are.
struct PackedRows {
    uint32_t first_row;
    uint32_t first_head;
    uint32_t group; // query heads
    uint32_t count;

    SKEP_DEVICE uint32_t row(uint32_t packed) const {
        return packed / group;
    }

    SKEP_DEVICE uint32_t head(uint32_t packed) const {
        return first_head + packed % group;
    }
};

template <typename T, int HEAD_SIZE>
SKEP_DEVICE void store_out(const AttentionDecodeParams& p, const PackedRows& rows, uint32_t packed, uint32_t column,
                           const Floats& sum, float weight) {
    const float share = weight > 0.0f ? 1.0f / weight : 0.0f;
    const uint64_t row = static_cast<uint64_t>(rows.first_row + rows.row(packed)) * p.heads + rows.head(packed);
    uint32_t* out = static_cast<uint32_t*>(p.out) + (row * HEAD_SIZE + column) / 2;
    out[0] = pack<T>(sum.values[0] * share, sum.values[1] * share);
    out[1] = pack<T>(sum.values[2] * share, sum.values[3] * share);
}

// Joins the states of all splits, after all of them have been written.
template <typename T, int HEAD_SIZE>
SKEP_DEVICE void join_splits(const AttentionDecodeParams& p, const Split& split, const PackedRows& rows) {
    __shared__ Weight totals[PACKED_ROWS];
    const uint32_t lane = threadIdx.x % WARP;
    const auto state_of = [&](uint32_t packed) {
        return (static_cast<uint64_t>(split.first_state) + rows.row(packed) * split.parts) * p.heads + rows.head(packed);
    };
    for (uint32_t packed = threadIdx.x / WARP; packed < rows.count; packed += DECODE_WARPS<HEAD_SIZE>) {
        const Weight* weights = reinterpret_cast<const Weight*>(p.weights) + state_of(packed);
        float larger = -INFINITY;
        for (uint32_t part = lane; part < split.parts; part += WARP) {
            larger = fmaxf(larger, weights[part * p.heads].most);
        }
        larger = warp_max(larger);
        float sum = 0.0f;
        for (uint32_t part = lane; part < split.parts; part += WARP) {
            const Weight weight = weights[part * p.heads];
            sum += share_of(weight.most, larger) * weight.sum;
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            totals[packed] = {larger, sum};
        }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < rows.count * (HEAD_SIZE / 4); i += blockDim.x) {
        const uint32_t packed = i / (HEAD_SIZE / 4);
        const uint32_t column = i % (HEAD_SIZE / 4) * 4;
        const uint64_t state = state_of(packed);
        const Weight* weights = reinterpret_cast<const Weight*>(p.weights) + state;
        const float* sums = p.sums + state * HEAD_SIZE + column;
        const uint64_t stride = static_cast<uint64_t>(p.heads) * HEAD_SIZE;
        const Weight total = totals[packed];
        Floats sum = {};
        for (uint32_t first = 0; first < split.parts; first += JOINED_AT_ONCE) {
            // All loads are issued before the first sum.
            Floats of_parts[JOINED_AT_ONCE];
            float shares[JOINED_AT_ONCE];
            SKEP_UNROLL
            for (uint32_t i = 0; i < JOINED_AT_ONCE; ++i) {
                const bool there = first + i < split.parts;
                const uint32_t part = there ? first + i : first;
                of_parts[i] = *reinterpret_cast<const Floats*>(sums + part * stride);
                shares[i] = there ? weights[part * p.heads].most : -INFINITY;
            }
            SKEP_UNROLL
            for (uint32_t i = 0; i < JOINED_AT_ONCE; ++i) {
                const float share = share_of(shares[i], total.most);
                for (int j = 0; j < 4; ++j) {
                    sum.values[j] += share * of_parts[i].values[j];
                }
            }
        }
        store_out<T, HEAD_SIZE>(p, rows, packed, column, sum, total.sum);
    }
}

// Grid: (splits, kv_heads · blocks per group). Block: DECODE_WARPS warps.
// Shared: PACKED_ROWS · (1 + 2 · DECODE_STAGES · DECODE_WARPS) rows of HEAD_SIZE + DECODE_PAD.
template <typename T, int HEAD_SIZE>
SKEP_DEVICE void attention_decode(const AttentionDecodeParams& p) {
    constexpr int WARPS = DECODE_WARPS<HEAD_SIZE>;
    constexpr int STRIDE = HEAD_SIZE + DECODE_PAD;
    constexpr int CHUNKS = HEAD_SIZE / 8;
    constexpr int STEPS = HEAD_SIZE / 16;
    constexpr int PAGE = PAGE_POSITIONS * STRIDE;
    const Split split = p.splits[blockIdx.x];
    if (split.parts == 0) {
        return;
    }
    const uint32_t whole_group = p.heads / p.kv_heads;
    const uint32_t blocks_of_group = div_up(whole_group, PACKED_ROWS);
    const uint32_t kv_head = blockIdx.y / blocks_of_group;
    const uint32_t skipped = blockIdx.y % blocks_of_group * PACKED_ROWS;
    const uint32_t group = whole_group - skipped < PACKED_ROWS ? whole_group - skipped : PACKED_ROWS;
    const PackedRows rows = {split.first_row, kv_head * whole_group + skipped, group, split.rows * group};
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t warp = threadIdx.x / WARP;
    const uint32_t* table = p.page_tables + static_cast<uint64_t>(split.sequence) * p.table_stride;

    // The queries, then for each warp and stage a page of keys and one of values.
    SKEP_DYNAMIC_SHARED(T, queries);
    T* const pages = queries + PAGE + warp * (2 * DECODE_STAGES * PAGE);
    const auto copy_page = [&](uint32_t tile, uint32_t page, int stage) {
        T* const keys = pages + stage * (2 * PAGE);
        SKEP_UNROLL
        for (int i = 0; i < static_cast<int>(PAGE_POSITIONS) * CHUNKS / WARP; ++i) {
            const uint32_t key = (i * WARP + lane) / CHUNKS;
            const uint32_t chunk = (i * WARP + lane) % CHUNKS;
            const uint32_t position = tile * PAGE_POSITIONS + key;
            const bool there = position >= split.first_key && position < split.last_key;
            const uint64_t slot = static_cast<uint64_t>(page) * PAGE_POSITIONS + key;
            const uint64_t from = (slot * p.kv_heads + kv_head) * HEAD_SIZE + chunk * 8;
            const uint32_t to = key * STRIDE + chunk * 8;
            copy_async(keys + to, static_cast<const T*>(p.keys) + from, there);
            copy_async(keys + PAGE + to, static_cast<const T*>(p.values) + from, there);
        }
    };
    const uint32_t end_tile = div_up(split.last_key, PAGE_POSITIONS);
    uint32_t tile = split.first_key / PAGE_POSITIONS + warp;
    for (uint32_t i = threadIdx.x; i < PACKED_ROWS * CHUNKS; i += blockDim.x) {
        const uint32_t packed = i / CHUNKS;
        const bool there = packed < rows.count;
        const uint32_t read = there ? packed : 0;
        const uint64_t at = static_cast<uint64_t>(rows.first_row + rows.row(read)) * p.q_stride;
        const T* from = static_cast<const T*>(p.q) + at + rows.head(read) * HEAD_SIZE + i % CHUNKS * 8;
        copy_async(queries + packed * STRIDE + i % CHUNKS * 8, from, there);
    }
    // The page number of a tile is read before its copies are started, so that they do not wait for it.
    const auto page_of = [&](uint32_t of) { return of < end_tile ? table[of] : 0; };
    uint32_t next_page = page_of(tile);
    SKEP_UNROLL
    for (int stage = 0; stage < DECODE_STAGES; ++stage) {
        const uint32_t of = tile + stage * WARPS;
        const uint32_t page = next_page;
        next_page = page_of(of + WARPS);
        if (of < end_tile) {
            copy_page(of, page, stage);
        }
        copy_commit();
    }
    copy_wait<DECODE_STAGES - 1>();
    __syncthreads();

    // Wide heads leave no registers for the queries, which are then loaded for each tile.
    constexpr int KEPT = HEAD_SIZE > WIDE_HEAD ? 1 : STEPS;
    uint32_t query[KEPT][4];
    const auto load_query = [&](int step) {
        load_tiles(query[step % KEPT], queries + lane % 16 * STRIDE + step * 16 + lane / 16 * 8);
    };
    if (KEPT == STEPS) {
        SKEP_UNROLL
        for (int step = 0; step < STEPS; ++step) {
            load_query(step);
        }
    }
    float sums[2 * STEPS][4] = {};
    // For each of the lane's two rows: its position, the largest score, and the lane's part of the sum of weights. Rows without
    // a query have the first position.
    uint32_t positions[2];
    float most[2] = {-INFINITY, -INFINITY};
    float weight[2] = {0.0f, 0.0f};
    for (int i = 0; i < 2; ++i) {
        const uint32_t packed = lane / 4 + i * 8;
        positions[i] = split.first_position + (packed < rows.count ? rows.row(packed) : 0);
    }
    const uint32_t last_position = split.first_position + split.rows - 1;
    for (int stage = 0; tile < end_tile; tile += WARPS, stage = (stage + 1) % DECODE_STAGES) {
        copy_wait<DECODE_STAGES - 1>();
        __syncwarp();
        const T* const keys = pages + stage * (2 * PAGE);
        const T* const values = keys + PAGE;

        float scores[2][4] = {};
        SKEP_UNROLL
        for (int step = 0; step < STEPS; ++step) {
            if (KEPT != STEPS) {
                load_query(step);
            }
            uint32_t b[4];
            load_tiles(b, keys + (lane / 16 * 8 + lane % 8) * STRIDE + step * 16 + lane % 16 / 8 * 8);
            const uint32_t left[2] = {b[0], b[1]};
            const uint32_t right[2] = {b[2], b[3]};
            mma_16x8x16<T>(scores[0], query[step % KEPT], left);
            mma_16x8x16<T>(scores[1], query[step % KEPT], right);
        }
        // Only tiles at the edges of what the rows see have keys that a row does not see.
        const uint32_t first = tile * PAGE_POSITIONS;
        const uint32_t last = first + PAGE_POSITIONS - 1;
        const bool all_seen = first >= split.first_key && last < split.last_key && last <= split.first_position &&
                              (p.window == 0 || first + p.window > last_position);
        if (!all_seen) {
            for (int column = 0; column < 2; ++column) {
                for (int i = 0; i < 4; ++i) {
                    const uint32_t key = first + column * 8 + 2 * (lane % 4) + i % 2;
                    const uint32_t position = positions[i / 2];
                    const bool seen = key >= split.first_key && key < split.last_key && key <= position &&
                                      (p.window == 0 || key + p.window > position);
                    scores[column][i] = seen ? scores[column][i] : -INFINITY;
                }
            }
        }
        float larger[2] = {most[0], most[1]};
        for (int column = 0; column < 2; ++column) {
            for (int i = 0; i < 4; ++i) {
                // The scale is positive, so a key that is not seen keeps its score.
                scores[column][i] *= p.scale;
                larger[i / 2] = fmaxf(larger[i / 2], scores[column][i]);
            }
        }
        float kept[2];
        for (int i = 0; i < 2; ++i) {
            for (int distance = 1; distance < 4; distance *= 2) {
                larger[i] = fmaxf(larger[i], __shfl_xor_sync(ALL_LANES, larger[i], distance));
            }
            kept[i] = share_of(most[i], larger[i]);
            most[i] = larger[i];
            weight[i] *= kept[i];
        }
        for (int column = 0; column < 2; ++column) {
            for (int i = 0; i < 4; ++i) {
                float& score = scores[column][i];
                score = share_of(score, most[i / 2]);
                weight[i / 2] += score;
            }
        }
        SKEP_UNROLL
        for (int column = 0; column < 2 * STEPS; ++column) {
            for (int i = 0; i < 4; ++i) {
                sums[column][i] *= kept[i / 2];
            }
        }
        const uint32_t a[4] = {pack<T>(scores[0][0], scores[0][1]), pack<T>(scores[0][2], scores[0][3]),
                               pack<T>(scores[1][0], scores[1][1]), pack<T>(scores[1][2], scores[1][3])};
        SKEP_UNROLL
        for (int pair = 0; pair < STEPS; ++pair) {
            uint32_t b[4];
            load_tiles_transposed(b, values + lane % 16 * STRIDE + pair * 16 + lane / 16 * 8);
            const uint32_t first_half[2] = {b[0], b[1]};
            const uint32_t second_half[2] = {b[2], b[3]};
            mma_16x8x16<T>(sums[2 * pair], a, first_half);
            mma_16x8x16<T>(sums[2 * pair + 1], a, second_half);
        }
        // The next copy overwrites this stage, so all lanes must have finished reading it.
        __syncwarp();
        const uint32_t next = tile + DECODE_STAGES * WARPS;
        const uint32_t page = next_page;
        next_page = page_of(next + WARPS);
        if (next < end_tile) {
            copy_page(next, page, stage);
        }
        copy_commit();
    }
    copy_wait<0>();
    __syncthreads();

    // The states of the warps take the memory of the pages: [warps, packed rows, head_size + padding], m and d behind the values.
    float* const states = reinterpret_cast<float*>(queries);
    for (int i = 0; i < 2; ++i) {
        for (int distance = 1; distance < 4; distance *= 2) {
            weight[i] += __shfl_xor_sync(ALL_LANES, weight[i], distance);
        }
        float* const state = states + (warp * PACKED_ROWS + lane / 4 + i * 8) * STRIDE;
        SKEP_UNROLL
        for (int column = 0; column < 2 * STEPS; ++column) {
            state[column * 8 + 2 * (lane % 4)] = sums[column][2 * i];
            state[column * 8 + 2 * (lane % 4) + 1] = sums[column][2 * i + 1];
        }
        if (lane % 4 == 0) {
            state[HEAD_SIZE] = most[i];
            state[HEAD_SIZE + 1] = weight[i];
        }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < rows.count * (HEAD_SIZE / 4); i += blockDim.x) {
        const uint32_t packed = i / (HEAD_SIZE / 4);
        const uint32_t column = i % (HEAD_SIZE / 4) * 4;
        const float* const of_warps = states + packed * STRIDE;
        float larger = -INFINITY;
        for (int other = 0; other < WARPS; ++other) {
            larger = fmaxf(larger, of_warps[other * (PACKED_ROWS * STRIDE) + HEAD_SIZE]);
        }
        Floats sum = {};
        float joined = 0.0f;
        for (int other = 0; other < WARPS; ++other) {
            const float* const state = of_warps + other * (PACKED_ROWS * STRIDE);
            const float share = share_of(state[HEAD_SIZE], larger);
            const Floats values = *reinterpret_cast<const Floats*>(state + column);
            joined += share * state[HEAD_SIZE + 1];
            for (int j = 0; j < 4; ++j) {
                sum.values[j] += share * values.values[j];
            }
        }
        if (split.parts == 1) {
            store_out<T, HEAD_SIZE>(p, rows, packed, column, sum, joined);
            continue;
        }
        const uint64_t state = static_cast<uint64_t>(split.first_state) + rows.row(packed) * split.parts + split.part;
        const uint64_t at = state * p.heads + rows.head(packed);
        *reinterpret_cast<Floats*>(p.sums + at * HEAD_SIZE + column) = sum;
        if (column == 0) {
            reinterpret_cast<Weight*>(p.weights)[at] = {larger, joined};
        }
    }
    if (split.parts == 1) {
        return;
    }
    // Each block makes its states visible before it arrives, so the last one sees those of all.
    __shared__ uint32_t arrived;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t* const arrivals = p.arrivals + static_cast<uint64_t>(split.arrival) * gridDim.y + blockIdx.y;
        arrived = atomicAdd(arrivals, 1u) + 1;
        if (arrived == split.parts) {
            *arrivals = 0;
        }
    }
    __syncthreads();
    if (arrived == split.parts) {
        __threadfence();
        join_splits<T, HEAD_SIZE>(p, split, rows);
    }
}

#define ATTENTION_DECODE(T, HEAD_SIZE)                                                                                \
    SKEP_KERNEL_BOUNDED(attention_decode_##HEAD_SIZE##_##T, AttentionDecodeParams, DECODE_WARPS<HEAD_SIZE> * WARP) {  \
        attention_decode<T, HEAD_SIZE>(p);                                                                            \
    }
#define ATTENTION_DECODE_ALL(T) \
    ATTENTION_DECODE(T, 16)     \
    ATTENTION_DECODE(T, 32)     \
    ATTENTION_DECODE(T, 64)     \
    ATTENTION_DECODE(T, 96)     \
    ATTENTION_DECODE(T, 128)    \
    ATTENTION_DECODE(T, 256)

ATTENTION_DECODE_ALL(bf16)
ATTENTION_DECODE_ALL(f16)
