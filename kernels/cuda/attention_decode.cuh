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
//
// Sequences that begin with the same pages have splits in common, which one block reads for many rows at once: its warps copy the
// pages together, and each multiplies all of them with the queries of a tile of its own. Keys and values of a shared split are then
// read once for up to PACKED_ROWS · SHARED_TILES pairs of a row and a query head. The state of a row over a shared split does not
// depend on the other rows of the block, because a row of a tensor-core product depends on no other row. Its bits differ from those
// of a split of its own with the same keys, in which every warp adds up a part of the pages.
//
// FP8 pages take half of the shared memory, so that a warp has one more on the way.
#pragma once

#include "attention_splits.cuh"
#include "device.cuh"
#include "kv_pages.cuh"
#include "ptx/mma.cuh"

// Number of pages per warp that are in shared memory: one in use, the others on the way.
constexpr int DECODE_STAGES = 2;
constexpr int FP8_DECODE_STAGES = 3;
// Padding of the rows in shared memory, so that the rows of an 8×8 tile are in different banks.
constexpr int DECODE_PAD = 8;
// Blocks that a multiprocessor has to run at once, so that registers admit no fewer than the shared memory of large architectures.
template <int HEAD_SIZE>
constexpr int DECODE_BLOCKS = HEAD_SIZE > 64 ? 3 : HEAD_SIZE > 32 ? 5 : 6;

static_assert(PAGE_POSITIONS == 16, "a tile of keys is a page");

// Computes the states of a split's rows and leaves them in the block's shared memory: [warps, PACKED_ROWS, HEAD_SIZE + padding], m
// and d behind the values. The warps of a split that is read TOGETHER have different rows and see all of its keys. Otherwise they
// have the same rows, and each sees the keys of its pages.
template <typename T, typename KV, int HEAD_SIZE, bool TOGETHER>
SKEP_DEVICE void attend(const AttentionDecodeParams& p, const Split& split, const PackedRows& rows, uint32_t kv_head, T* queries) {
    constexpr int WARPS = DECODE_WARPS<HEAD_SIZE>;
    constexpr int STAGES = IS_FP8<KV> ? FP8_DECODE_STAGES : DECODE_STAGES;
    constexpr int STRIDE = HEAD_SIZE + DECODE_PAD;
    constexpr int CHUNKS = HEAD_SIZE / 8;
    constexpr int STEPS = HEAD_SIZE / 16;
    constexpr int KV_STRIDE = HEAD_SIZE + CHUNK_VALUES<KV>;
    constexpr int KV_CHUNKS = HEAD_SIZE / CHUNK_VALUES<KV>;
    constexpr int PAGE = PAGE_POSITIONS * KV_STRIDE;
    // Keys, values and, of FP8, their scales.
    constexpr int STAGE = 2 * PAGE + (IS_FP8<KV> ? PAGE_SCALES * sizeof(float) : 0);
    constexpr int PAGES_OF_WARP = STAGES * STAGE;
    using Operand = typename ValueOperand<T, KV>::Type;
    const uint32_t first_key = split.first_key;
    const uint32_t last_key = split.last_key;
    const uint32_t first_position = split.first_position;
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t warp = threadIdx.x / WARP;
    const uint32_t* table = p.page_tables + static_cast<uint64_t>(split.sequence) * p.table_stride;
    const auto synchronize = [] {
        if constexpr (TOGETHER) {
            __syncthreads();
        } else {
            __syncwarp();
        }
    };

    // The queries, then for each warp and stage a page of keys and one of values.
    KV* const all_pages = reinterpret_cast<KV*>(queries + PACKED_ROWS * STRIDE);
    KV* const pages = all_pages + warp * PAGES_OF_WARP;
    const auto copy_page = [&](uint32_t tile, uint32_t page, int stage) {
        constexpr int COPIES = static_cast<int>(PAGE_POSITIONS) * KV_CHUNKS;
        KV* const keys = pages + stage * STAGE;
        SKEP_UNROLL
        for (int i = 0; i < div_up(COPIES, WARP); ++i) {
            if (COPIES % WARP != 0 && i * WARP + lane >= COPIES) {
                break;
            }
            const uint32_t key = (i * WARP + lane) / KV_CHUNKS;
            const uint32_t chunk = (i * WARP + lane) % KV_CHUNKS;
            const uint32_t position = tile * PAGE_POSITIONS + key;
            const bool there = position >= first_key && position < last_key;
            const uint64_t slot = static_cast<uint64_t>(page) * PAGE_POSITIONS + key;
            const uint64_t from = (slot * p.kv_heads + kv_head) * HEAD_SIZE + chunk * CHUNK_VALUES<KV>;
            const uint32_t to = key * KV_STRIDE + chunk * CHUNK_VALUES<KV>;
            copy_async(keys + to, static_cast<const KV*>(p.keys) + from, there);
            copy_async(keys + PAGE + to, static_cast<const KV*>(p.values) + from, there);
        }
        if (IS_FP8<KV> && lane < SCALE_CHUNKS) {
            const float* const from = p.scales + scales_at(page, p.kv_heads, kv_head);
            copy_async(keys + 2 * PAGE + lane * 16, from + lane * 4, true);
        }
    };
    const uint32_t end_tile = div_up(last_key, PAGE_POSITIONS);
    const uint32_t first_tile = first_key / PAGE_POSITIONS;
    // Warps with queries of their own take them through the memory of their last stage, which is free until then.
    T* const tile_queries = TOGETHER ? reinterpret_cast<T*>(pages + (STAGES - 1) * STAGE) : queries;
    const uint32_t first_packed = TOGETHER ? warp * PACKED_ROWS : 0;
    for (uint32_t i = TOGETHER ? lane : threadIdx.x; i < PACKED_ROWS * CHUNKS; i += TOGETHER ? WARP : blockDim.x) {
        const uint32_t packed = first_packed + i / CHUNKS;
        const bool there = packed < rows.count;
        const uint32_t read = there ? packed : 0;
        const uint64_t at = static_cast<uint64_t>(rows.row_of_batch(read)) * p.q_stride;
        const T* from = static_cast<const T*>(p.q) + at + rows.head(read) * HEAD_SIZE + i % CHUNKS * 8;
        copy_async(tile_queries + i / CHUNKS * STRIDE + i % CHUNKS * 8, from, there);
    }
    // The page number of a tile is read before its copies are started, so that they do not wait for it.
    const auto page_of = [&](uint32_t of) { return of < end_tile ? table[of] : 0; };
    uint32_t next_page = page_of(first_tile + warp);
    const auto copy_next = [&](uint32_t of, int stage) {
        const uint32_t page = next_page;
        next_page = page_of(of + WARPS);
        if (of < end_tile) {
            copy_page(of, page, stage);
        }
        copy_commit();
    };
    constexpr int EARLY_STAGES = TOGETHER ? STAGES - 1 : STAGES;
    SKEP_UNROLL
    for (int stage = 0; stage < EARLY_STAGES; ++stage) {
        copy_next(first_tile + warp + stage * WARPS, stage);
    }
    // The queries are copied with the first stage.
    copy_wait<EARLY_STAGES - 1>();
    __syncthreads();
    if constexpr (IS_FP8<KV>) {
        for (uint32_t i = TOGETHER ? lane : threadIdx.x; i < PACKED_ROWS * STEPS; i += TOGETHER ? WARP : blockDim.x) {
            put_even_first(tile_queries + i / STEPS * STRIDE + i % STEPS * 16);
        }
        __syncthreads();
    }

    // Wide heads leave no registers for the queries, which are then loaded for each tile.
    constexpr int KEPT = HEAD_SIZE > WIDE_HEAD ? 1 : STEPS;
    uint32_t query[KEPT][4];
    const auto load_query = [&](int step) {
        load_tiles(query[step % KEPT], tile_queries + lane % 16 * STRIDE + step * 16 + lane / 16 * 8);
    };
    if (KEPT == STEPS) {
        SKEP_UNROLL
        for (int step = 0; step < STEPS; ++step) {
            load_query(step);
        }
    }
    if constexpr (TOGETHER) {
        static_assert(KEPT == STEPS, "pages overwrite the queries");
        __syncwarp();
        copy_next(first_tile + warp + (STAGES - 1) * WARPS, STAGES - 1);
    }
    float sums[2 * STEPS][4] = {};
    // For each of the lane's two rows: its position, the largest score, and the lane's part of the sum of weights. Rows without
    // a query have the first position.
    uint32_t positions[2];
    float most[2] = {-INFINITY, -INFINITY};
    float weight[2] = {0.0f, 0.0f};
    for (int i = 0; i < 2; ++i) {
        const uint32_t packed = lane / 4 + i * 8;
        positions[i] = first_position + (packed < rows.count ? rows.row(packed) : 0);
    }
    const uint32_t last_position = first_position + split.rows - 1;
    const auto attend_page = [&](uint32_t tile, const KV* keys) {
        const KV* const values = keys + PAGE;
        [[maybe_unused]] const float* const scales = reinterpret_cast<const float*>(values + PAGE);

        float scores[2][4] = {};
        [[maybe_unused]] uint32_t loaded[4];
        SKEP_UNROLL
        for (int step = 0; step < STEPS; ++step) {
            if (KEPT != STEPS) {
                load_query(step);
            }
            uint32_t left[2], right[2];
            if constexpr (IS_FP8<KV>) {
                // Two steps are loaded at once.
                if (step % 2 == 0) {
                    load_fp8<HEAD_SIZE, KV_STRIDE, false>(loaded, keys, step);
                }
                convert_e4m3<T>(loaded[step % 2 * 2], left[0], left[1]);
                convert_e4m3<T>(loaded[step % 2 * 2 + 1], right[0], right[1]);
            } else {
                uint32_t b[4];
                load_tiles(b, keys + (lane / 16 * 8 + lane % 8) * KV_STRIDE + step * 16 + lane % 16 / 8 * 8);
                left[0] = b[0], left[1] = b[1];
                right[0] = b[2], right[1] = b[3];
            }
            mma_16x8x16<T>(scores[0], query[step % KEPT], left);
            mma_16x8x16<T>(scores[1], query[step % KEPT], right);
        }
        if constexpr (IS_FP8<KV>) {
            scale_scores(scores, scales);
        }
        // Only tiles at the edges of what the rows see have keys that a row does not see.
        const uint32_t first = tile * PAGE_POSITIONS;
        const uint32_t last = first + PAGE_POSITIONS - 1;
        const bool all_seen = TOGETHER || (first >= first_key && last < last_key && last <= first_position &&
                              (p.window == 0 || first + p.window > last_position));
        if (!all_seen) {
            for (int column = 0; column < 2; ++column) {
                for (int i = 0; i < 4; ++i) {
                    const uint32_t key = first + column * 8 + 2 * (lane % 4) + i % 2;
                    const uint32_t position = positions[i / 2];
                    const bool seen = key >= first_key && key < last_key && key <= position &&
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
        if constexpr (IS_FP8<KV>) {
            scale_weights(scores, scales + PAGE_POSITIONS);
        }
        const uint32_t a[4] = {pack<Operand>(scores[0][0], scores[0][1]), pack<Operand>(scores[0][2], scores[0][3]),
                               pack<Operand>(scores[1][0], scores[1][1]), pack<Operand>(scores[1][2], scores[1][3])};
        if constexpr (IS_FP8<KV>) {
            multiply_fp8_values<HEAD_SIZE, KV_STRIDE>(sums, a, values);
        } else {
            SKEP_UNROLL
            for (int pair = 0; pair < STEPS; ++pair) {
                uint32_t b[4];
                load_tiles_transposed(b, values + lane % 16 * KV_STRIDE + pair * 16 + lane / 16 * 8);
                const uint32_t first_half[2] = {b[0], b[1]};
                const uint32_t second_half[2] = {b[2], b[3]};
                mma_16x8x16<T>(sums[2 * pair], a, first_half);
                mma_16x8x16<T>(sums[2 * pair + 1], a, second_half);
            }
        }
    };
    int stage = 0;
    for (uint32_t tile = first_tile; tile + (TOGETHER ? 0 : warp) < end_tile; tile += WARPS) {
        copy_wait<STAGES - 1>();
        synchronize();
        if constexpr (TOGETHER) {
            SKEP_ROLL
            for (uint32_t slot = 0; slot < WARPS && tile + slot < end_tile; ++slot) {
                attend_page(tile + slot, all_pages + slot * PAGES_OF_WARP + stage * STAGE);
            }
        } else {
            attend_page(tile + warp, pages + stage * STAGE);
        }
        // The next copy overwrites this stage, so all that read it must have finished.
        synchronize();
        copy_next(tile + warp + STAGES * WARPS, stage);
        stage = (stage + 1) % STAGES;
    }
    copy_wait<0>();
    __syncthreads();

    // The states take the memory of the pages.
    float* const states = reinterpret_cast<float*>(queries);
    for (int i = 0; i < 2; ++i) {
        for (int distance = 1; distance < 4; distance *= 2) {
            weight[i] += __shfl_xor_sync(ALL_LANES, weight[i], distance);
        }
        float* const state = states + (warp * PACKED_ROWS + lane / 4 + i * 8) * STRIDE;
        SKEP_UNROLL
        for (int column = 0; column < 2 * STEPS; ++column) {
            state[dimension_of<KV>(column, 0)] = sums[column][2 * i];
            state[dimension_of<KV>(column, 1)] = sums[column][2 * i + 1];
        }
        if (lane % 4 == 0) {
            state[HEAD_SIZE] = most[i];
            state[HEAD_SIZE + 1] = weight[i];
        }
    }
    __syncthreads();
}

// Joins the states of the warps, in order, and writes them to `states`, or the results if the rows have no other split.
template <typename T, int HEAD_SIZE>
SKEP_DEVICE void join_warps(const AttentionDecodeParams& p, const Split& split, const PackedRows& rows, const float* states) {
    constexpr int STRIDE = HEAD_SIZE + DECODE_PAD;
    constexpr uint32_t OF_WARP = PACKED_ROWS * STRIDE;
    const bool is_shared = rows.shared != nullptr;
    const bool has_own_rows = SHARED_TILES<HEAD_SIZE> > 1 && is_shared;
    for (uint32_t i = threadIdx.x; i < rows.count * (HEAD_SIZE / 4); i += blockDim.x) {
        const uint32_t packed = i / (HEAD_SIZE / 4);
        const uint32_t column = i % (HEAD_SIZE / 4) * 4;
        // Each warp has the rows of one tile, or all warps have the same rows.
        const uint32_t first_warp = has_own_rows ? packed / PACKED_ROWS : 0;
        const uint32_t end_warp = has_own_rows ? first_warp + 1 : DECODE_WARPS<HEAD_SIZE>;
        const float* const of_row = states + packed % PACKED_ROWS * STRIDE;
        float larger = -INFINITY;
        for (uint32_t warp = first_warp; warp < end_warp; ++warp) {
            larger = fmaxf(larger, of_row[warp * OF_WARP + HEAD_SIZE]);
        }
        Floats sum = {};
        float joined = 0.0f;
        for (uint32_t warp = first_warp; warp < end_warp; ++warp) {
            const float* const state = of_row + warp * OF_WARP;
            const float share = share_of(state[HEAD_SIZE], larger);
            const Floats values = *reinterpret_cast<const Floats*>(state + column);
            joined += share * state[HEAD_SIZE + 1];
            for (int j = 0; j < 4; ++j) {
                sum.values[j] += share * values.values[j];
            }
        }
        if (!is_shared && split.parts == 1) {
            store_out<T, HEAD_SIZE>(p, rows, packed, column, sum, joined);
            continue;
        }
        const uint32_t row = rows.row(packed);
        const uint32_t first_state = is_shared ? rows.shared[row].first_state : split.first_state + row * split.parts;
        const uint64_t at = (static_cast<uint64_t>(first_state) + split.part) * p.heads + rows.head(packed);
        *reinterpret_cast<Floats*>(p.sums + at * HEAD_SIZE + column) = sum;
        if (column == 0) {
            reinterpret_cast<Weight*>(p.weights)[at] = {larger, joined};
        }
    }
}

// Grid: (splits, kv_heads · blocks per group). Block: DECODE_WARPS warps.
// Shared: PACKED_ROWS · (1 + 2 · DECODE_STAGES · DECODE_WARPS) rows of HEAD_SIZE + DECODE_PAD. For FP8 pages, those of the queries,
// and for each warp and each of FP8_DECODE_STAGES, 2 · PAGE_POSITIONS rows of HEAD_SIZE + 16 bytes and the scales.
template <typename T, typename KV, int HEAD_SIZE>
SKEP_DEVICE void attention_decode(const AttentionDecodeParams& p) {
    // The split is read again where it is needed, so that it takes no registers in between.
    const Split& split = p.splits[blockIdx.x];
    if (split.parts == 0) {
        return;
    }
    const uint32_t whole_group = p.heads / p.kv_heads;
    const uint32_t blocks_of_group = div_up(whole_group, PACKED_ROWS);
    const uint32_t kv_head = blockIdx.y / blocks_of_group;
    const uint32_t skipped = blockIdx.y % blocks_of_group * PACKED_ROWS;
    const uint32_t group = whole_group - skipped < PACKED_ROWS ? whole_group - skipped : PACKED_ROWS;
    const uint32_t first_head = kv_head * whole_group + skipped;
    const SharedRow* const shared = split.is_shared ? p.shared_rows + split.first_row : nullptr;
    const PackedRows rows = {shared, split.first_row, first_head, group, split.rows * group};

    // The queries, then for each warp and stage a page of keys and one of values.
    SKEP_DYNAMIC_SHARED(T, queries);
    if constexpr (SHARED_TILES<HEAD_SIZE> > 1) {
        if (split.is_shared) {
            attend<T, KV, HEAD_SIZE, true>(p, split, rows, kv_head, queries);
        } else {
            attend<T, KV, HEAD_SIZE, false>(p, split, rows, kv_head, queries);
        }
    } else {
        attend<T, KV, HEAD_SIZE, false>(p, split, rows, kv_head, queries);
    }
    join_warps<T, HEAD_SIZE>(p, split, rows, reinterpret_cast<const float*>(queries));
    if (shared == nullptr && split.parts == 1) {
        return;
    }

    // Each block makes its states visible before it arrives at the tiles of its rows, so the last one at a tile sees those of all.
    __shared__ uint32_t is_last[PACKED_ROWS * MAX_DECODE_WARPS];
    __threadfence();
    __syncthreads();
    const uint32_t count = shared == nullptr ? 1 : split.rows;
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
        // The first of the rows of a tile arrives for all of them.
        const bool arrives = shared == nullptr || i == 0 || shared[i].tile != shared[i - 1].tile;
        is_last[i] = 0;
        if (arrives) {
            const Split& tile = p.splits[shared == nullptr ? blockIdx.x : shared[i].tile];
            uint32_t* const arrivals = p.arrivals + static_cast<uint64_t>(tile.arrival) * gridDim.y + blockIdx.y;
            if (atomicAdd(arrivals, 1u) + 1 == tile.parts) {
                *arrivals = 0;
                is_last[i] = 1;
            }
        }
    }
    __syncthreads();
    for (uint32_t i = 0; i < count; ++i) {
        if (is_last[i] == 0) {
            continue;
        }
        __threadfence();
        const Split tile = p.splits[shared == nullptr ? blockIdx.x : shared[i].tile];
        join_splits<T, HEAD_SIZE>(p, tile, {nullptr, tile.first_row, first_head, group, tile.rows * group});
        // The next join overwrites the totals of this one.
        __syncthreads();
    }
}

#define ATTENTION_DECODE(NAME, T, KV, HEAD_SIZE)                                                                          \
    SKEP_KERNEL_BOUNDED(attention_decode_##NAME, AttentionDecodeParams, DECODE_WARPS<HEAD_SIZE> * WARP,                   \
                        DECODE_BLOCKS<HEAD_SIZE>) {                                                                       \
        attention_decode<T, KV, HEAD_SIZE>(p);                                                                            \
    }
