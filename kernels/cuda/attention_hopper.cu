// Causal attention of prompt rows over paged keys and values, with the asynchronous tensor cores of Hopper.
//
// A block handles consecutive query rows of one sequence and one head: 64 rows per warpgroup that computes. One more warpgroup
// copies tiles of keys and values to shared memory, in a ring; each tile has a barrier that says it is full and one that says it
// is empty. While the tensor cores multiply the weights of one tile by its values, the same warpgroup computes the weights of the
// next tile, and the other warpgroups compute theirs.
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

#ifndef HOPPER_KEYS
constexpr uint32_t TILE_KEYS = 128;
#else
constexpr uint32_t TILE_KEYS = HOPPER_KEYS;
#endif
#ifndef HOPPER_STAGES
constexpr uint32_t TILE_STAGES = 2;
#else
constexpr uint32_t TILE_STAGES = HOPPER_STAGES;
#endif
#ifndef HOPPER_CONSUMERS
#define HOPPER_CONSUMERS (QUERY_TILE_ROWS / GROUP_ROWS)
#endif
#ifndef HOPPER_TMA
#define HOPPER_TMA 0
#endif
#ifndef HOPPER_OVERLAP
#define HOPPER_OVERLAP 1
#endif
#ifndef HOPPER_PINGPONG
#define HOPPER_PINGPONG 0
#endif
#ifndef HOPPER_LAZY
#define HOPPER_LAZY 0
#endif

constexpr uint32_t WARPGROUP = 4 * WARP;
// Query rows per warpgroup.
constexpr uint32_t GROUP_ROWS = 64;
// Bytes of a row of swizzled shared memory, which holds 64 values.
constexpr uint32_t SWIZZLED_ROW = 128;

// The sizes of the kernel for a head size.
template <int HEAD_SIZE>
struct Sizes {
    static constexpr uint32_t CONSUMERS = HOPPER_CONSUMERS;
    static constexpr uint32_t KEYS = TILE_KEYS;
    static constexpr uint32_t STAGES = TILE_STAGES;
    // Groups of 64 values per row.
    static constexpr uint32_t HALVES = HEAD_SIZE / 64;
    static constexpr uint32_t TILE_BYTES = KEYS * HEAD_SIZE * 2;
    static constexpr uint32_t QUERY_BYTES = GROUP_ROWS * HEAD_SIZE * 2;
    // Three warpgroups of 168 registers per thread or four of 128 share the registers of a multiprocessor.
    static constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;
    static constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : 160;
};

struct HopperParams {
    AttentionPrefillParams of;
#if HOPPER_TMA
    // Tensor maps of the keys and values: [pages, PAGE_POSITIONS, kv_heads, head_size] in boxes of [1, PAGE_POSITIONS, 1, 64].
    struct alignas(64) Map {
        uint64_t words[16];
    } keys, values;
#endif
};

SKEP_DEVICE float exp2_fast(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

// The place of a tile in the ring, and the parity of the ring's round.
template <uint32_t STAGES>
struct Turn {
    uint32_t stage = 0;
    uint32_t parity = 0;

    SKEP_DEVICE void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// The shared memory of a block, as addresses.
template <int HEAD_SIZE>
struct Shared {
    using Size = Sizes<HEAD_SIZE>;
    uint32_t base;
    uint32_t barriers;

    SKEP_DEVICE uint32_t queries(uint32_t group) const { return base + group * Size::QUERY_BYTES; }
    SKEP_DEVICE uint32_t keys(uint32_t stage) const {
        return base + Size::CONSUMERS * Size::QUERY_BYTES + stage * Size::TILE_BYTES;
    }
    SKEP_DEVICE uint32_t values(uint32_t stage) const { return keys(Size::STAGES + stage); }
    SKEP_DEVICE uint32_t keys_full(uint32_t stage) const { return barriers + 8 * stage; }
    SKEP_DEVICE uint32_t keys_empty(uint32_t stage) const { return barriers + 8 * (Size::STAGES + stage); }
    SKEP_DEVICE uint32_t values_full(uint32_t stage) const { return barriers + 8 * (2 * Size::STAGES + stage); }
    SKEP_DEVICE uint32_t values_empty(uint32_t stage) const { return barriers + 8 * (3 * Size::STAGES + stage); }
};

// The part of the keys that a block reads.
struct Span {
    const uint32_t* table;
    uint32_t kv_head;
    uint32_t begin; // a multiple of a tile
    uint32_t end;
    uint32_t tiles;
};

#if HOPPER_TMA

template <typename T, int HEAD_SIZE>
struct Producer {
    using Size = Sizes<HEAD_SIZE>;
    static constexpr uint32_t FULL_ARRIVALS = 1;
    const HopperParams& p;
    const Span& span;

    // Copies a tile of keys or values, page by page. The pages behind the last are left out.
    SKEP_DEVICE void load(const HopperParams::Map& map, uint32_t first, uint32_t to, uint32_t full, uint32_t empty,
                          uint32_t parity) {
        constexpr uint32_t PAGES = Size::KEYS / PAGE_POSITIONS;
        const uint32_t lane = threadIdx.x % WARP;
        barrier_wait(empty, parity ^ 1);
        const uint32_t left = div_up(span.end - first, PAGE_POSITIONS);
        const uint32_t pages = left < PAGES ? left : PAGES;
        if (lane == 0) {
            barrier_expect(full, pages * PAGE_POSITIONS * HEAD_SIZE * 2);
        }
        __syncwarp();
        if (lane < pages) {
            const int page = static_cast<int>(span.table[first / PAGE_POSITIONS + lane]);
            SKEP_UNROLL
            for (uint32_t half = 0; half < Size::HALVES; ++half) {
                const uint32_t at = to + half * Size::KEYS * SWIZZLED_ROW + lane * PAGE_POSITIONS * SWIZZLED_ROW;
                copy_box(at, &map, full, static_cast<int>(half * 64), static_cast<int>(span.kv_head), 0, page);
            }
        }
    }

    SKEP_DEVICE void load_keys(uint32_t first, const Shared<HEAD_SIZE>& shared, Turn<Size::STAGES> turn) {
        load(p.keys, first, shared.keys(turn.stage), shared.keys_full(turn.stage), shared.keys_empty(turn.stage), turn.parity);
    }
    SKEP_DEVICE void load_values(uint32_t first, const Shared<HEAD_SIZE>& shared, Turn<Size::STAGES> turn) {
        load(p.values, first, shared.values(turn.stage), shared.values_full(turn.stage), shared.values_empty(turn.stage),
             turn.parity);
    }
    SKEP_DEVICE void finish() {}
};

#else

template <typename T, int HEAD_SIZE>
struct Producer {
    using Size = Sizes<HEAD_SIZE>;
    static constexpr uint32_t FULL_ARRIVALS = WARPGROUP;
    const HopperParams& p;
    const Span& span;
    // The barrier of the tile whose copies have started last and may not have arrived; 0: none.
    uint32_t pending = 0;

    SKEP_DEVICE void finish() {
        if (pending != 0) {
            copy_wait<0>();
            fence_async();
            barrier_arrive(pending);
            pending = 0;
        }
    }

    // Starts the copies of a tile of keys or values. Positions behind the end become zeros.
    SKEP_DEVICE void load(const void* from, uint32_t first, uint32_t to, uint32_t full, uint32_t empty, uint32_t parity) {
        constexpr uint32_t CHUNKS = HEAD_SIZE / 8;
        constexpr uint32_t ROWS = WARPGROUP / CHUNKS; // that all threads copy at once
        const uint32_t chunk = threadIdx.x % CHUNKS;
        const uint32_t row = threadIdx.x / CHUNKS;
        if (!barrier_passed(empty, parity ^ 1)) {
            finish();
            barrier_wait(empty, parity ^ 1);
        }
        const uint32_t row_bytes = p.of.kv_heads * HEAD_SIZE * 2;
        const char* start = static_cast<const char*>(from) + (span.kv_head * HEAD_SIZE + chunk * 8) * 2;
        const uint32_t at = to + chunk / 8 * (Size::KEYS * SWIZZLED_ROW) + row * SWIZZLED_ROW + ((chunk ^ row) % 8) * 16;
        SKEP_UNROLL
        for (uint32_t i = 0; i < Size::KEYS / ROWS; ++i) {
            const uint32_t position = first + i * ROWS + row;
            const bool there = position < span.end;
            const uint32_t read = there ? position : span.begin;
            const uint32_t slot = span.table[read / PAGE_POSITIONS] * PAGE_POSITIONS + read % PAGE_POSITIONS;
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(at + i * ROWS * SWIZZLED_ROW),
                         "l"(start + static_cast<uint64_t>(slot) * row_bytes), "r"(there ? 16 : 0)
                         : "memory");
        }
        copy_commit();
        if (pending != 0) {
            copy_wait<1>();
            fence_async();
            barrier_arrive(pending);
        }
        pending = full;
    }

    SKEP_DEVICE void load_keys(uint32_t first, const Shared<HEAD_SIZE>& shared, Turn<Size::STAGES> turn) {
        load(p.of.keys, first, shared.keys(turn.stage), shared.keys_full(turn.stage), shared.keys_empty(turn.stage), turn.parity);
    }
    SKEP_DEVICE void load_values(uint32_t first, const Shared<HEAD_SIZE>& shared, Turn<Size::STAGES> turn) {
        load(p.of.values, first, shared.values(turn.stage), shared.values_full(turn.stage), shared.values_empty(turn.stage),
             turn.parity);
    }
};

#endif

// Copies all tiles of keys and values, in the order in which they are used.
template <typename T, int HEAD_SIZE>
SKEP_DEVICE void produce(const HopperParams& p, const Span& span, const Shared<HEAD_SIZE>& shared) {
    using Size = Sizes<HEAD_SIZE>;
    Producer<T, HEAD_SIZE> producer{p, span};
    Turn<Size::STAGES> turn;
    uint32_t first = span.begin;
    producer.load_keys(first, shared, turn);
    for (uint32_t tile = 1; tile < span.tiles; ++tile) {
        const Turn<Size::STAGES> before = turn;
        turn.next();
        if (HOPPER_OVERLAP) {
            producer.load_keys(first + Size::KEYS, shared, turn);
            producer.load_values(first, shared, before);
        } else {
            producer.load_values(first, shared, before);
            producer.load_keys(first + Size::KEYS, shared, turn);
        }
        first += Size::KEYS;
    }
    producer.load_values(first, shared, turn);
    producer.finish();
}

// The state of a warpgroup that computes 64 rows.
template <typename T, int HEAD_SIZE>
struct Consumer {
    using Size = Sizes<HEAD_SIZE>;
    static constexpr int SCORES = Size::KEYS / 2;
    float sums[HEAD_SIZE / 2];
    uint32_t weights[SCORES / 2]; // of a tile of keys, packed for the second product
    // For each of the thread's two rows: the largest score, and the thread's part of the sum of weights.
    float most[2];
    float weight[2];
    // The factors of the sums so far, after a tile of keys.
    float kept[2];

    // Starts the scores of 64 rows by a tile of keys.
    static SKEP_DEVICE void multiply_keys(float (&scores)[SCORES], uint64_t queries, uint64_t keys) {
        SKEP_UNROLL
        for (uint32_t step = 0; step < HEAD_SIZE / 16; ++step) {
            const uint64_t query_at = queries + (step / 4 * GROUP_ROWS * SWIZZLED_ROW + step % 4 * 32) / 16;
            const uint64_t key_at = keys + (step / 4 * Size::KEYS * SWIZZLED_ROW + step % 4 * 32) / 16;
            Products<T>::shared(scores, query_at, key_at, step > 0);
        }
        products_commit();
    }

    // Starts the products of the weights and a tile of values.
    SKEP_DEVICE void multiply_values(uint64_t values) {
        SKEP_UNROLL
        for (uint32_t step = 0; step < Size::KEYS / 16; ++step) {
            Products<T>::registers(sums, weights + 4 * step, values + step * 16 * SWIZZLED_ROW / 16);
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
#if HOPPER_LAZY
        // Later tiles rarely have a larger score.
        if (__all_sync(ALL_LANES, kept[0] == 1.0f && kept[1] == 1.0f)) {
            return;
        }
#endif
        SKEP_UNROLL
        for (int i = 0; i < HEAD_SIZE / 2; ++i) {
            sums[i] *= kept[i % 4 / 2];
        }
    }
};

// Copies the queries of 64 rows to swizzled shared memory. Rows that do not exist become zeros.
template <typename T, int HEAD_SIZE>
SKEP_DEVICE void load_queries(const AttentionPrefillParams& p, const QueryTile& tile, uint32_t head, uint32_t first_row,
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
        const uint32_t place = to + chunk / 8 * (GROUP_ROWS * SWIZZLED_ROW) + row * SWIZZLED_ROW + ((chunk ^ row) % 8) * 16;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(there ? 16 : 0) : "memory");
    }
    copy_commit();
    copy_wait<0>();
    fence_async();
}

#if HOPPER_TMA
// Clears the values behind the end, which may be no numbers and have weights of zero. Every warpgroup does so for itself.
template <int HEAD_SIZE>
SKEP_DEVICE void clear_values(uint32_t values, uint32_t rows, uint32_t group) {
    using Size = Sizes<HEAD_SIZE>;
    constexpr uint32_t CHUNKS = HEAD_SIZE / 8;
    for (uint32_t i = rows * CHUNKS + threadIdx.x % WARPGROUP; i < Size::KEYS * CHUNKS; i += WARPGROUP) {
        const uint32_t at = values + i % CHUNKS / 8 * (Size::KEYS * SWIZZLED_ROW) + i / CHUNKS * SWIZZLED_ROW + i % 8 * 16;
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
    }
    fence_async();
    threads_sync(1 + group, WARPGROUP);
}
#endif

// Computes 64 rows.
template <typename T, int HEAD_SIZE>
SKEP_DEVICE void consume(const HopperParams& params, const QueryTile& tile, const Span& span, const Shared<HEAD_SIZE>& shared,
                         uint32_t head, uint32_t group) {
    using Size = Sizes<HEAD_SIZE>;
    using State = Consumer<T, HEAD_SIZE>;
    constexpr uint32_t KEYS = Size::KEYS;
    const AttentionPrefillParams& p = params.of;
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t first_row = group * GROUP_ROWS;
    if (first_row >= tile.rows) {
        return;
    }
    load_queries<T, HEAD_SIZE>(p, tile, head, first_row, shared.queries(group));
    threads_sync(1 + group, WARPGROUP);

    // The rows of the warp: `row` and `row + 8` are those of the thread.
    const uint32_t warp_row = first_row + threadIdx.x % WARPGROUP / WARP * 16;
    const uint32_t row = warp_row + lane / 4;
    const uint32_t warp_position = tile.first_position + warp_row;
    const float scale = p.scale * 1.44269504088896341f; // 1 / ln 2
    // The tiles that the warpgroup's rows see. The last ones of the block are not waited for.
    uint32_t tiles = span.tiles;
    const bool takes_turns = HOPPER_PINGPONG && Size::CONSUMERS == 2 && tile.rows > GROUP_ROWS;
    if (!takes_turns) {
        const uint32_t seen = tile.first_position + first_row + GROUP_ROWS;
        tiles = seen < span.end ? div_up(seen - span.begin, KEYS) : tiles;
    }

    State state;
    SKEP_UNROLL
    for (int i = 0; i < HEAD_SIZE / 2; ++i) {
        state.sums[i] = 0.0f;
    }
    SKEP_UNROLL
    for (int i = 0; i < 2; ++i) {
        state.most[i] = -INFINITY;
        state.weight[i] = 0.0f;
    }
    const uint64_t queries = swizzled_matrix(shared.queries(group), 0);
    const auto keys = [&](uint32_t stage) { return swizzled_matrix(shared.keys(stage), 0); };
    const auto values = [&](uint32_t stage) { return swizzled_matrix(shared.values(stage), KEYS * SWIZZLED_ROW); };
    const auto release = [&](uint32_t empty) {
        if (lane == 0) {
            barrier_arrive(empty);
        }
    };
    const auto weigh = [&](float (&scores)[State::SCORES], uint32_t first) {
        // Only tiles at the edges of what the warp's rows see have keys that a row does not see.
        const bool all_seen = first + KEYS - 1 <= warp_position && (p.window == 0 || first + p.window > warp_position + 15);
        const int offset = static_cast<int>(tile.first_position + row - first) - static_cast<int>(2 * (lane % 4));
        state.weigh(scores, scale, offset, static_cast<int>(p.window), all_seen);
    };
    const auto wait_for_keys = [&](Turn<Size::STAGES> turn) { barrier_wait(shared.keys_full(turn.stage), turn.parity); };
    const auto wait_for_values = [&](uint32_t first, Turn<Size::STAGES> turn) {
        barrier_wait(shared.values_full(turn.stage), turn.parity);
#if HOPPER_TMA
        if (first + KEYS > span.end) {
            clear_values<HEAD_SIZE>(shared.values(turn.stage), span.end - first, group);
        }
#endif
    };
    const auto await_turn = [&] {
        if (takes_turns) {
            threads_sync(8 + group, 2 * WARPGROUP);
        }
    };
    const auto end_turn = [&](bool is_last) {
        if (takes_turns && !(is_last && group == 1)) {
            threads_arrive(8 + (group ^ 1), 2 * WARPGROUP);
        }
    };
    if (takes_turns && group == 1) {
        threads_arrive(8, 2 * WARPGROUP);
    }

    Turn<Size::STAGES> turn;
    uint32_t first = span.begin;
    {
        float scores[State::SCORES];
        wait_for_keys(turn);
        await_turn();
        products_begin();
        State::multiply_keys(scores, queries, keys(turn.stage));
        end_turn(tiles == 1);
        products_wait<0>();
        keep_in_place(scores);
        release(shared.keys_empty(turn.stage));
        weigh(scores, first);
        state.pack_weights(scores);
    }
    Turn<Size::STAGES> next = turn;
    next.next();
    if (tiles > 1) {
        wait_for_keys(next);
    }
    for (uint32_t index = 1; index < tiles; ++index) {
        const Turn<Size::STAGES> before = turn;
        turn = next;
        next.next();
        float scores[State::SCORES];
        await_turn();
#if HOPPER_OVERLAP
        products_begin();
        State::multiply_keys(scores, queries, keys(turn.stage));
        wait_for_values(first, before);
        keep_in_place(state.sums);
        keep_in_place(state.weights);
        products_begin();
        state.multiply_values(values(before.stage));
        end_turn(index + 1 == tiles);
        products_wait<1>();
        keep_in_place(scores);
        release(shared.keys_empty(turn.stage));
        first += KEYS;
        weigh(scores, first);
        // The weights are computed while the tensor cores work, not afterwards: a branch keeps the assembler from waiting earlier.
        keep_in_place(scores);
        if (index + 1 < tiles) {
            wait_for_keys(next);
        }
        products_wait<0>();
        keep_in_place(state.sums);
        keep_in_place(state.weights);
        release(shared.values_empty(before.stage));
#else
        wait_for_values(first, before);
        keep_in_place(state.sums);
        keep_in_place(state.weights);
        products_begin();
        state.multiply_values(values(before.stage));
        State::multiply_keys(scores, queries, keys(turn.stage));
        end_turn(index + 1 == tiles);
        products_wait<0>();
        keep_in_place(scores);
        keep_in_place(state.sums);
        keep_in_place(state.weights);
        release(shared.values_empty(before.stage));
        release(shared.keys_empty(turn.stage));
        first += KEYS;
        weigh(scores, first);
        if (index + 1 < tiles) {
            wait_for_keys(next);
        }
#endif
        state.scale_sums();
        state.pack_weights(scores);
    }
    wait_for_values(first, turn);
    keep_in_place(state.sums);
    keep_in_place(state.weights);
    products_begin();
    state.multiply_values(values(turn.stage));
    products_wait<0>();
    keep_in_place(state.sums);
    // Warpgroups with later rows may go on to use the ring.
    release(shared.values_empty(turn.stage));

    SKEP_UNROLL
    for (int i = 0; i < 2; ++i) {
        float weight = state.weight[i];
        weight += __shfl_xor_sync(ALL_LANES, weight, 1);
        weight += __shfl_xor_sync(ALL_LANES, weight, 2);
        const float share = weight > 0.0f ? 1.0f / weight : 0.0f;
        if (row + i * 8 >= tile.rows) {
            continue;
        }
        const uint64_t out = (static_cast<uint64_t>(tile.first_row + row + i * 8) * p.heads + head) * HEAD_SIZE;
        uint32_t* to = static_cast<uint32_t*>(p.out) + out / 2 + lane % 4;
        SKEP_UNROLL
        for (int column = 0; column < HEAD_SIZE / 8; ++column) {
            to[column * 4] =
                pack<T>(state.sums[4 * column + 2 * i] * share, state.sums[4 * column + 2 * i + 1] * share);
        }
    }
}

// Grid: (heads, tiles). Block: one warpgroup that copies, and CONSUMERS that compute. Shared: 1024 bytes, the queries, and STAGES
// tiles of keys and of values.
template <typename T, int HEAD_SIZE>
SKEP_DEVICE void attention_hopper(const HopperParams& p) {
    using Size = Sizes<HEAD_SIZE>;
    extern __shared__ __align__(1024) unsigned char skep_swizzled[];
    __shared__ uint64_t barriers[4 * Size::STAGES];
    const QueryTile tile = p.of.tiles[blockIdx.y];
    if (tile.rows == 0) {
        return;
    }
    const uint32_t head = blockIdx.x;
    Shared<HEAD_SIZE> shared;
    shared.base = div_up(shared_address(skep_swizzled), 1024u) * 1024;
    shared.barriers = shared_address(barriers);
    Span span;
    span.table = p.of.page_tables + static_cast<uint64_t>(tile.sequence) * p.of.table_stride;
    span.kv_head = head / (p.of.heads / p.of.kv_heads);
    span.end = tile.first_position + tile.rows;
    span.begin = 0;
    if (p.of.window > 0 && tile.first_position + 1 > p.of.window) {
        span.begin = (tile.first_position + 1 - p.of.window) / Size::KEYS * Size::KEYS;
    }
    span.tiles = div_up(span.end - span.begin, Size::KEYS);

    if (threadIdx.x == 0) {
        const uint32_t groups = div_up(tile.rows, GROUP_ROWS);
        for (uint32_t stage = 0; stage < Size::STAGES; ++stage) {
            barrier_init(shared.keys_full(stage), Producer<T, HEAD_SIZE>::FULL_ARRIVALS);
            barrier_init(shared.values_full(stage), Producer<T, HEAD_SIZE>::FULL_ARRIVALS);
            barrier_init(shared.keys_empty(stage), 4 * groups);
            barrier_init(shared.values_empty(stage), 4 * groups);
        }
        barriers_ready();
    }
    __syncthreads();
    // The same in all lanes, which the compiler knows of a shuffle's result.
    const uint32_t warpgroup = __shfl_sync(ALL_LANES, threadIdx.x / WARPGROUP, 0);
    if (warpgroup == 0) {
        fewer_registers<Size::PRODUCER_REGISTERS>();
#if HOPPER_TMA
        if (threadIdx.x < WARP) {
            produce<T, HEAD_SIZE>(p, span, shared);
        }
#else
        produce<T, HEAD_SIZE>(p, span, shared);
#endif
    } else {
        more_registers<Size::CONSUMER_REGISTERS>();
        consume<T, HEAD_SIZE>(p, tile, span, shared, head, warpgroup - 1);
    }
}

#define ATTENTION_HOPPER(T, HEAD_SIZE)                                                                              \
    SKEP_KERNEL_BOUNDED(attention_hopper_##HEAD_SIZE##_##T, HopperParams, WARPGROUP*(1 + Sizes<HEAD_SIZE>::CONSUMERS), \
                        1) {                                                                                        \
        attention_hopper<T, HEAD_SIZE>(p);                                                                          \
    }

ATTENTION_HOPPER(bf16, 64)
ATTENTION_HOPPER(bf16, 128)
ATTENTION_HOPPER(f16, 64)
ATTENTION_HOPPER(f16, 128)

#endif
