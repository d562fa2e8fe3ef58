// Causal attention of prompt rows over paged keys and values, with the asynchronous tensor cores and copies of Hopper.
//
// A block handles consecutive query rows of one sequence and one head: 64 rows per warpgroup that computes. A warp of one more
// warpgroup starts the copies of tiles of keys and values to shared memory, in a ring; each tile has a barrier that says that it is
// full and one that says that it is empty. While the tensor cores multiply the weights of one tile by its values, the same
// warpgroup computes the weights of the next tile, and the other warpgroups compute theirs.
//
// Tiles of keys start at multiples of their length, and a tile in which a row sees no key leaves the row's state unchanged. The
// result of a row therefore depends only on its position, keys and values, and not on the other rows of its block.
//
// The method is that of FlashAttention-3 (Shah et al., 2024).
#include "attention_tiles.cuh"
#include "device.cuh"
#include "ptx/barrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/wgmma.cuh"

#if defined(__CUDACC_RTC__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Keys per tile, and tiles of keys and of values in the ring.
constexpr uint32_t TILE_KEYS = 128;
constexpr uint32_t TILE_STAGES = 2;
constexpr uint32_t TILE_PAGES = TILE_KEYS / PAGE_POSITIONS;
static_assert(TILE_PAGES <= WARP, "each lane copies one page");

constexpr uint32_t WARPGROUP = 4 * WARP;
// Query rows per warpgroup that computes, and the number of these warpgroups.
constexpr uint32_t GROUP_ROWS = 64;
constexpr uint32_t GROUPS = QUERY_TILE_ROWS / GROUP_ROWS;
// Registers per thread, of 168 on average. Copies need few.
constexpr int COPY_REGISTERS = 40;
constexpr int COMPUTE_REGISTERS = 232;
static_assert(COPY_REGISTERS + GROUPS * COMPUTE_REGISTERS <= (1 + GROUPS) * 168);

// Shared memory holds matrices in columns of 64 values, one after the other. A row of a column has 128 bytes, and its 16-byte
// chunks are swizzled as the tensor cores expect: chunk c of row r is at chunk c ^ (r % 8).
constexpr uint32_t COLUMN_VALUES = 64;
constexpr uint32_t COLUMN_ROW = 128;

// The tensor map of keys or values, [pages, PAGE_POSITIONS, kv_heads, head_size], which are copied in boxes of
// [1, PAGE_POSITIONS, 1, COLUMN_VALUES].
struct alignas(64) TensorMap {
    uint64_t words[16];
};

struct AttentionHopperParams {
    AttentionPrefillParams of; // its keys and values are not used
    TensorMap keys;
    TensorMap values;
};

// The part of the keys that a block reads.
struct Span {
    const uint32_t* table;
    uint32_t kv_head;
    uint32_t begin; // a multiple of a tile
    uint32_t end;
    uint32_t tiles;
};

// The place of a tile in the ring, and the parity of the ring's round.
struct Turn {
    uint32_t stage = 0;
    uint32_t parity = 0;

    SKEP_DEVICE void next() {
        if (++stage == TILE_STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// The shared memory of a block, as addresses.
template <int HEAD_SIZE>
struct Shared {
    static constexpr uint32_t TILE_BYTES = TILE_KEYS * HEAD_SIZE * 2;
    static constexpr uint32_t QUERY_BYTES = GROUP_ROWS * HEAD_SIZE * 2;
    uint32_t base;
    uint32_t barriers;

    SKEP_DEVICE uint32_t queries(uint32_t group) const { return base + group * QUERY_BYTES; }
    SKEP_DEVICE uint32_t keys(uint32_t stage) const { return base + GROUPS * QUERY_BYTES + stage * TILE_BYTES; }
    SKEP_DEVICE uint32_t values(uint32_t stage) const { return keys(TILE_STAGES + stage); }
    SKEP_DEVICE uint32_t keys_full(uint32_t stage) const { return barriers + 8 * stage; }
    SKEP_DEVICE uint32_t keys_empty(uint32_t stage) const { return barriers + 8 * (TILE_STAGES + stage); }
    SKEP_DEVICE uint32_t values_full(uint32_t stage) const { return barriers + 8 * (2 * TILE_STAGES + stage); }
    SKEP_DEVICE uint32_t values_empty(uint32_t stage) const { return barriers + 8 * (3 * TILE_STAGES + stage); }
};

// Starts the copies of a tile of keys or values, of which `first` is the first position, once its place is empty. Pages behind the
// span are left out. All lanes of a warp call it.
template <int HEAD_SIZE>
SKEP_DEVICE void copy_tile(const TensorMap& map, const Span& span, uint32_t first, uint32_t to, uint32_t full, uint32_t empty,
                           uint32_t parity) {
    const uint32_t lane = threadIdx.x % WARP;
    barrier_wait(empty, parity ^ 1);
    const uint32_t left = div_up(span.end - first, PAGE_POSITIONS);
    const uint32_t pages = left < TILE_PAGES ? left : TILE_PAGES;
    if (lane == 0) {
        barrier_expect(full, pages * PAGE_POSITIONS * HEAD_SIZE * 2);
    }
    __syncwarp();
    if (lane < pages) {
        const int page = static_cast<int>(span.table[first / PAGE_POSITIONS + lane]);
        SKEP_UNROLL
        for (uint32_t column = 0; column < HEAD_SIZE / COLUMN_VALUES; ++column) {
            const uint32_t at = to + column * TILE_KEYS * COLUMN_ROW + lane * PAGE_POSITIONS * COLUMN_ROW;
            copy_box(at, &map, full, static_cast<int>(column * COLUMN_VALUES), static_cast<int>(span.kv_head), 0, page);
        }
    }
}

// Copies all tiles of keys and values, in the order in which they are used.
template <int HEAD_SIZE>
SKEP_DEVICE void copy_tiles(const AttentionHopperParams& p, const Span& span, const Shared<HEAD_SIZE>& shared) {
    const auto copy_keys = [&](uint32_t first, Turn turn) {
        copy_tile<HEAD_SIZE>(p.keys, span, first, shared.keys(turn.stage), shared.keys_full(turn.stage),
                             shared.keys_empty(turn.stage), turn.parity);
    };
    const auto copy_values = [&](uint32_t first, Turn turn) {
        copy_tile<HEAD_SIZE>(p.values, span, first, shared.values(turn.stage), shared.values_full(turn.stage),
                             shared.values_empty(turn.stage), turn.parity);
    };
    Turn turn;
    uint32_t first = span.begin;
    copy_keys(first, turn);
    for (uint32_t tile = 1; tile < span.tiles; ++tile) {
        const Turn before = turn;
        turn.next();
        copy_keys(first + TILE_KEYS, turn);
        copy_values(first, before);
        first += TILE_KEYS;
    }
    copy_values(first, turn);
}

// Copies the queries of a warpgroup's rows to shared memory. Rows that do not exist become zeros.
template <typename T, int HEAD_SIZE>
SKEP_DEVICE void copy_queries(const AttentionPrefillParams& p, const QueryTile& tile, uint32_t head, uint32_t first_row,
                              uint32_t to) {
    constexpr uint32_t CHUNKS = HEAD_SIZE / 8;
    SKEP_UNROLL
    for (uint32_t i = 0; i < GROUP_ROWS * CHUNKS / WARPGROUP; ++i) {
        const uint32_t at = i * WARPGROUP + threadIdx.x % WARPGROUP;
        const uint32_t row = at / CHUNKS;
        const uint32_t chunk = at % CHUNKS;
        const bool there = first_row + row < tile.rows;
        const uint64_t from_row = tile.first_row + (there ? first_row + row : 0);
        const T* from = static_cast<const T*>(p.q) + from_row * p.q_stride + head * HEAD_SIZE + chunk * 8;
        const uint32_t place = chunk / 8 * (GROUP_ROWS * COLUMN_ROW) + row * COLUMN_ROW + ((chunk ^ row) % 8) * 16;
        copy_chunk(to + place, from, there);
    }
    copy_commit();
    copy_wait<0>();
    fence_async();
}

// Clears the values of a tile from `row` on, which belong to no position: they may be NaN, and so is zero times NaN. Every warpgroup
// does so for itself. It clears whole rows, so it can ignore their swizzling.
template <int HEAD_SIZE>
SKEP_DEVICE void clear_values(uint32_t values, uint32_t row, uint32_t group) {
    constexpr uint32_t CHUNKS = HEAD_SIZE / 8;
    for (uint32_t i = row * CHUNKS + threadIdx.x % WARPGROUP; i < TILE_KEYS * CHUNKS; i += WARPGROUP) {
        clear_chunk(values + i % CHUNKS / 8 * (TILE_KEYS * COLUMN_ROW) + i / CHUNKS * COLUMN_ROW + i % 8 * 16);
    }
    fence_async();
    threads_sync(1 + group, WARPGROUP);
}

SKEP_DEVICE float exp2_fast(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

// The registers of a warpgroup that computes its rows. A thread has two rows of each result, as `wgmma.cuh` describes.
template <typename T, int HEAD_SIZE>
struct Rows {
    static constexpr int SCORES = TILE_KEYS / 2; // per thread
    float sums[HEAD_SIZE / 2];
    uint32_t weights[SCORES / 2]; // of a tile of keys, packed for the second product
    // For each of the thread's two rows: the largest score, and the thread's part of the sum of weights.
    float most[2];
    float weight[2];
    // The factors of the sums so far, after a tile of keys.
    float kept[2];

    SKEP_DEVICE void clear() {
        SKEP_UNROLL
        for (int i = 0; i < HEAD_SIZE / 2; ++i) {
            sums[i] = 0.0f;
        }
        SKEP_UNROLL
        for (int row = 0; row < 2; ++row) {
            most[row] = -INFINITY;
            weight[row] = 0.0f;
        }
    }

    // Starts the products of the queries and a tile of keys, which are swizzled matrices.
    static SKEP_DEVICE void multiply_keys(float (&scores)[SCORES], uint64_t queries, uint64_t keys) {
        SKEP_UNROLL
        for (uint32_t step = 0; step < HEAD_SIZE / 16; ++step) {
            const uint64_t query_at = queries + (step / 4 * GROUP_ROWS * COLUMN_ROW + step % 4 * 32) / 16;
            const uint64_t key_at = keys + (step / 4 * TILE_KEYS * COLUMN_ROW + step % 4 * 32) / 16;
            Products<T>::shared(scores, query_at, key_at, step > 0);
        }
        products_commit();
    }

    // Starts the products of the weights and a tile of values.
    SKEP_DEVICE void multiply_values(uint64_t values) {
        SKEP_UNROLL
        for (uint32_t step = 0; step < TILE_KEYS / 16; ++step) {
            Products<T>::registers(sums, weights + 4 * step, values + step * 16 * COLUMN_ROW / 16);
        }
        products_commit();
    }

    // Turns scores into weights. `offset` is the position of the thread's first row less that of the tile's first key and the
    // thread's first column.
    SKEP_DEVICE void weigh(float (&scores)[SCORES], float scale, int offset, int window, bool all_seen) {
        if (!all_seen) {
            SKEP_UNROLL
            for (int i = 0; i < SCORES; ++i) {
                const int column = i / 4 * 8 + i % 2;
                const int most_column = offset + i % 4 / 2 * 8;
                const bool seen = column <= most_column && (window == 0 || column > most_column - window);
                scores[i] = seen ? scores[i] : -INFINITY;
            }
        }
        SKEP_UNROLL
        for (int row = 0; row < 2; ++row) {
            float larger[2] = {most[row], scores[2 * row]};
            SKEP_UNROLL
            for (int i = 0; i < SCORES; i += 4) {
                larger[0] = fmaxf(larger[0], scores[i + 2 * row]);
                larger[1] = fmaxf(larger[1], scores[i + 2 * row + 1]);
            }
            larger[0] = fmaxf(larger[0], larger[1]);
            larger[0] = fmaxf(larger[0], __shfl_xor_sync(ALL_LANES, larger[0], 1));
            larger[0] = fmaxf(larger[0], __shfl_xor_sync(ALL_LANES, larger[0], 2));
            // If the row has seen no key yet, all its scores and its largest score are -INFINITY, and all weights become zero.
            const float base = larger[0] == -INFINITY ? 0.0f : larger[0] * scale;
            kept[row] = exp2_fast(most[row] * scale - base);
            most[row] = larger[0];
            float added[2] = {0.0f, 0.0f};
            SKEP_UNROLL
            for (int i = 0; i < SCORES; i += 4) {
                SKEP_UNROLL
                for (int j = 0; j < 2; ++j) {
                    float& score = scores[i + 2 * row + j];
                    score = exp2_fast(__fmaf_rn(score, scale, -base));
                    added[j] += score;
                }
            }
            weight[row] = weight[row] * kept[row] + (added[0] + added[1]);
        }
    }

    SKEP_DEVICE void pack_weights(const float (&scores)[SCORES]) {
        SKEP_UNROLL
        for (int i = 0; i < SCORES / 2; ++i) {
            weights[i] = pack<T>(scores[2 * i], scores[2 * i + 1]);
        }
    }

    SKEP_DEVICE void scale_sums() {
        SKEP_UNROLL
        for (int i = 0; i < HEAD_SIZE / 2; ++i) {
            sums[i] *= kept[i % 4 / 2];
        }
    }

    // Divides the sums by the weights and writes those of the rows that exist. `row` is the thread's first row in the tile.
    SKEP_DEVICE void write(const AttentionPrefillParams& p, const QueryTile& tile, uint32_t head, uint32_t row) const {
        SKEP_UNROLL
        for (int i = 0; i < 2; ++i) {
            float total = weight[i];
            total += __shfl_xor_sync(ALL_LANES, total, 1);
            total += __shfl_xor_sync(ALL_LANES, total, 2);
            const float share = total > 0.0f ? 1.0f / total : 0.0f;
            if (row + i * 8 >= tile.rows) {
                continue;
            }
            const uint64_t out = (static_cast<uint64_t>(tile.first_row + row + i * 8) * p.heads + head) * HEAD_SIZE;
            uint32_t* to = static_cast<uint32_t*>(p.out) + out / 2 + threadIdx.x % 4;
            SKEP_UNROLL
            for (int column = 0; column < HEAD_SIZE / 8; ++column) {
                to[column * 4] = pack<T>(sums[4 * column + 2 * i] * share, sums[4 * column + 2 * i + 1] * share);
            }
        }
    }
};

// Computes the rows of a warpgroup.
template <typename T, int HEAD_SIZE>
SKEP_DEVICE void compute(const AttentionPrefillParams& p, const QueryTile& tile, const Span& span,
                         const Shared<HEAD_SIZE>& shared, uint32_t head, uint32_t group) {
    constexpr int SCORES = Rows<T, HEAD_SIZE>::SCORES;
    const uint32_t first_row = group * GROUP_ROWS;
    if (first_row >= tile.rows) {
        return;
    }
    copy_queries<T, HEAD_SIZE>(p, tile, head, first_row, shared.queries(group));
    threads_sync(1 + group, WARPGROUP);

    // The rows of the warp: `row` and `row + 8` are those of the thread.
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t warp_row = first_row + threadIdx.x % WARPGROUP / WARP * 16;
    const uint32_t row = warp_row + lane / 4;
    const uint32_t warp_position = tile.first_position + warp_row;
    const float scale = p.scale * 1.44269504088896341f; // 1 / ln 2
    // The tiles that the warpgroup's rows see. It does not wait for later ones.
    const uint32_t seen = tile.first_position + first_row + GROUP_ROWS;
    const uint32_t tiles = seen < span.end ? div_up(seen - span.begin, TILE_KEYS) : span.tiles;

    const uint64_t queries = swizzled_matrix(shared.queries(group), 0);
    const auto keys = [&](uint32_t stage) { return swizzled_matrix(shared.keys(stage), 0); };
    const auto values = [&](uint32_t stage) { return swizzled_matrix(shared.values(stage), TILE_KEYS * COLUMN_ROW); };
    const auto wait_for_keys = [&](Turn turn) { barrier_wait(shared.keys_full(turn.stage), turn.parity); };
    const auto wait_for_values = [&](uint32_t first, Turn turn) {
        barrier_wait(shared.values_full(turn.stage), turn.parity);
        if (first + TILE_KEYS > span.end) {
            clear_values<HEAD_SIZE>(shared.values(turn.stage), span.end - first, group);
        }
    };
    const auto release = [&](uint32_t empty) {
        if (lane == 0) {
            barrier_arrive(empty);
        }
    };
    Rows<T, HEAD_SIZE> rows;
    rows.clear();
    const auto weigh = [&](float (&scores)[SCORES], uint32_t first) {
        // Only tiles at the edges of what the warp's rows see have keys that a row does not see.
        const bool all_seen =
            first + TILE_KEYS - 1 <= warp_position && (p.window == 0 || first + p.window > warp_position + 15);
        const int offset = static_cast<int>(tile.first_position + row - first) - static_cast<int>(2 * (lane % 4));
        rows.weigh(scores, scale, offset, static_cast<int>(p.window), all_seen);
    };

    Turn turn;
    uint32_t first = span.begin;
    {
        float scores[SCORES];
        wait_for_keys(turn);
        products_begin();
        rows.multiply_keys(scores, queries, keys(turn.stage));
        products_wait<0>();
        keep_in_place(scores);
        release(shared.keys_empty(turn.stage));
        weigh(scores, first);
        rows.pack_weights(scores);
    }
    Turn next = turn;
    next.next();
    if (tiles > 1) {
        wait_for_keys(next);
    }
    for (uint32_t index = 1; index < tiles; ++index) {
        const Turn before = turn;
        turn = next;
        next.next();
        float scores[SCORES];
        products_begin();
        rows.multiply_keys(scores, queries, keys(turn.stage));
        wait_for_values(first, before);
        keep_in_place(rows.sums);
        keep_in_place(rows.weights);
        products_begin();
        rows.multiply_values(values(before.stage));
        products_wait<1>();
        keep_in_place(scores);
        release(shared.keys_empty(turn.stage));
        first += TILE_KEYS;
        weigh(scores, first);
        // The weights are computed while the tensor cores work, not afterwards: a branch keeps the assembler from waiting earlier.
        keep_in_place(scores);
        if (index + 1 < tiles) {
            wait_for_keys(next);
        }
        products_wait<0>();
        keep_in_place(rows.sums);
        keep_in_place(rows.weights);
        release(shared.values_empty(before.stage));
        rows.scale_sums();
        rows.pack_weights(scores);
    }
    wait_for_values(first, turn);
    keep_in_place(rows.sums);
    keep_in_place(rows.weights);
    products_begin();
    rows.multiply_values(values(turn.stage));
    products_wait<0>();
    keep_in_place(rows.sums);
    // Warpgroups with later rows may still use the ring.
    release(shared.values_empty(turn.stage));
    rows.write(p, tile, head, row);
}

// Grid: (heads, tiles). Block: one warpgroup that copies, and GROUPS that compute. Shared: 1024 bytes, the queries, and
// TILE_STAGES tiles of keys and of values.
template <typename T, int HEAD_SIZE>
SKEP_DEVICE void attention_hopper(const AttentionHopperParams& params) {
    extern __shared__ __align__(1024) unsigned char skep_swizzled[];
    __shared__ uint64_t barriers[4 * TILE_STAGES];
    const AttentionPrefillParams& p = params.of;
    const QueryTile tile = p.tiles[blockIdx.y];
    if (tile.rows == 0) {
        return;
    }
    const uint32_t head = blockIdx.x;
    Shared<HEAD_SIZE> shared;
    shared.base = div_up(shared_address(skep_swizzled), 1024u) * 1024;
    shared.barriers = shared_address(barriers);
    Span span;
    span.table = p.page_tables + static_cast<uint64_t>(tile.sequence) * p.table_stride;
    span.kv_head = head / (p.heads / p.kv_heads);
    span.end = tile.first_position + tile.rows;
    span.begin = 0;
    if (p.window > 0 && tile.first_position + 1 > p.window) {
        span.begin = (tile.first_position + 1 - p.window) / TILE_KEYS * TILE_KEYS;
    }
    span.tiles = div_up(span.end - span.begin, TILE_KEYS);

    if (threadIdx.x == 0) {
        const uint32_t groups = div_up(tile.rows, GROUP_ROWS);
        for (uint32_t stage = 0; stage < TILE_STAGES; ++stage) {
            // The lane that expects a tile's bytes arrives at its full barrier, and each warp that computes at its empty one.
            barrier_init(shared.keys_full(stage), 1);
            barrier_init(shared.values_full(stage), 1);
            barrier_init(shared.keys_empty(stage), 4 * groups);
            barrier_init(shared.values_empty(stage), 4 * groups);
        }
        barriers_ready();
    }
    __syncthreads();
    // The same in all lanes, which the compiler knows of a shuffle's result.
    const uint32_t warpgroup = __shfl_sync(ALL_LANES, threadIdx.x / WARPGROUP, 0);
    if (warpgroup == 0) {
        fewer_registers<COPY_REGISTERS>();
        if (threadIdx.x < WARP) {
            copy_tiles<HEAD_SIZE>(params, span, shared);
        }
    } else {
        more_registers<COMPUTE_REGISTERS>();
        compute<T, HEAD_SIZE>(p, tile, span, shared, head, warpgroup - 1);
    }
}

#define ATTENTION_HOPPER(T, HEAD_SIZE)                                                                                    \
    SKEP_KERNEL_BOUNDED(attention_hopper_##HEAD_SIZE##_##T, AttentionHopperParams, WARPGROUP*(1 + GROUPS), 1) {           \
        attention_hopper<T, HEAD_SIZE>(p);                                                                                \
    }

ATTENTION_HOPPER(bf16, 64)
ATTENTION_HOPPER(bf16, 128)
ATTENTION_HOPPER(f16, 64)
ATTENTION_HOPPER(f16, 128)

#endif
