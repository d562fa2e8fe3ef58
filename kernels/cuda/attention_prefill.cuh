// Causal attention of prompt rows over paged keys and values, with tensor cores.
//
// A block handles 64 rows of a tile, which are consecutive query rows of one sequence, and one head: 16 rows per warp. Keys and values pass through shared
// memory in tiles of 64 or 32 positions; the next tile is loaded while the current one is used. The softmax state (m, d) and
// the sums of each row stay in registers, and scores become the left operand of the second product without leaving registers.
//
// Each key and value is read once for 64 rows. The lower bound is 4 · rows · context · head_size operations per head.
//
// Tiles of keys start at multiples of their length, and a tile in which a row sees no key leaves the row's state unchanged. The
// result of a row therefore depends only on its position, keys and values, and not on the other rows of its block.
//
// If a row has to get the same bits however many blocks work on it, `attention_ordered` does the same with splits of fixed
// length. Each split has a separate state, and the states are joined from first to last: either by one block that processes all
// splits, or by `attention_join` if each split of a row has its own block. In the first case, the total is kept in `states`
// while a split is computed.
#pragma once

#include "attention_tiles.cuh"
#include "device.cuh"
#include "kv_pages.cuh"
#include "ptx/mma.cuh"

constexpr uint32_t TILE_ROWS = 64;
constexpr int MAX_TILE_KEYS = 64;
constexpr int PREFILL_WARPS = TILE_ROWS / 16;

// Number of positions per tile. Wide heads have fewer, so that two tiles of keys and two of values fit into the 99 KiB that
// every architecture has.
template <int HEAD_SIZE>
constexpr int KEYS = HEAD_SIZE > WIDE_HEAD ? MAX_TILE_KEYS / 2 : MAX_TILE_KEYS;

// The splits of one row, in the order of their keys.
struct Join {
    uint32_t row;         // index in the batch
    uint32_t first_state; // index of the state of the first split; the others follow
    uint32_t parts;       // number of splits; 0: there is nothing to do
};

struct AttentionJoinParams {
    const float* states;
    const Join* joins;
    void* out;                   // [rows, heads, head_size]
    uint32_t heads;
    uint32_t head_size;
};

// The factors with which the sums (o) of two states enter their join.
struct Shares {
    float of_total;
    float of_split;
};

// Joins the weights (m, d) of a split to those of a total. A state that has seen no key changes nothing.
SKEP_DEVICE Shares join_weights(float& most, float& weight, float split_most, float split_weight) {
    const float larger = fmaxf(most, split_most);
    const Shares shares = {most == -INFINITY ? 0.0f : __expf(add_rounded(most, -larger)),
                           split_most == -INFINITY ? 0.0f : __expf(add_rounded(split_most, -larger))};
    most = larger;
    weight = add_rounded(weight * shares.of_total, split_weight * shares.of_split);
    return shares;
}

SKEP_DEVICE float joined(Shares shares, float total, float split) {
    return add_rounded(total * shares.of_total, split * shares.of_split);
}

// Padding of the rows of a tile in shared memory, so that the rows of an 8×8 tile are in different banks.
constexpr int PAD = 8;

// The scales of a tile of FP8 keys and values, in floats.
template <typename KV, int HEAD_SIZE>
constexpr int TILE_SCALES = IS_FP8<KV> ? KEYS<HEAD_SIZE> / PAGE_POSITIONS * PAGE_SCALES : 0;

// Starts the copies of a tile of keys and of the values at the same positions, and of their scales.
template <typename KV, int HEAD_SIZE>
SKEP_DEVICE void load_keys_and_values(const AttentionPrefillParams& p, const uint32_t* table, uint32_t kv_head,
                                      uint32_t first, uint32_t end, KV* keys, KV* values, float* scales) {
    constexpr int TILE_KEYS = KEYS<HEAD_SIZE>;
    constexpr int CHUNKS = HEAD_SIZE / CHUNK_VALUES<KV>;
    for (uint32_t i = threadIdx.x; i < TILE_KEYS * CHUNKS; i += blockDim.x) {
        const uint32_t position = first + i / CHUNKS;
        const uint32_t chunk = i % CHUNKS;
        const bool there = position < end;
        const uint32_t read = there ? position : first;
        const uint64_t slot = static_cast<uint64_t>(table[read / PAGE_POSITIONS]) * PAGE_POSITIONS + read % PAGE_POSITIONS;
        const uint64_t from = (slot * p.kv_heads + kv_head) * HEAD_SIZE + chunk * CHUNK_VALUES<KV>;
        const uint32_t to = (i / CHUNKS) * (HEAD_SIZE + CHUNK_VALUES<KV>) + chunk * CHUNK_VALUES<KV>;
        copy_async(keys + to, static_cast<const KV*>(p.keys) + from, there);
        copy_async(values + to, static_cast<const KV*>(p.values) + from, there);
    }
    if constexpr (IS_FP8<KV>) {
        for (uint32_t i = threadIdx.x; i < TILE_KEYS / PAGE_POSITIONS * SCALE_CHUNKS; i += blockDim.x) {
            const uint32_t position = first + i / SCALE_CHUNKS * PAGE_POSITIONS;
            const bool there = position < end;
            const uint32_t page = table[(there ? position : first) / PAGE_POSITIONS];
            const float* const from = p.scales + scales_at(page, p.kv_heads, kv_head);
            copy_async(scales + i * 4, from + i % SCALE_CHUNKS * 4, there);
        }
    }
}

// Grid: (tiles, heads, QUERY_TILE_ROWS / TILE_ROWS). Block: PREFILL_WARPS warps. Shared: TILE_ROWS + 4 · KEYS rows of HEAD_SIZE + PAD.
// For FP8 pages, TILE_ROWS such rows, 4 · KEYS rows of HEAD_SIZE + 16 bytes, and the scales of two tiles.
template <typename T, typename KV, int HEAD_SIZE, bool HAS_SPLITS>
SKEP_DEVICE void attention_prefill(const AttentionPrefillParams& p) {
    constexpr int TILE_KEYS = KEYS<HEAD_SIZE>;
    constexpr int STRIDE = HEAD_SIZE + PAD;
    constexpr int STEPS = HEAD_SIZE / 16;
    constexpr int KV_STRIDE = HEAD_SIZE + CHUNK_VALUES<KV>;
    using Operand = typename ValueOperand<T, KV>::Type;
    QueryTile tile = p.tiles[blockIdx.x];
    const uint32_t skipped = blockIdx.z * TILE_ROWS;
    if (tile.rows <= skipped) {
        return;
    }
    tile.first_row += skipped;
    tile.rows = tile.rows - skipped < TILE_ROWS ? tile.rows - skipped : TILE_ROWS;
    tile.first_position += skipped;
    tile.first_state += skipped;
    const uint32_t head = blockIdx.y;
    const uint32_t kv_head = head / (p.heads / p.kv_heads);
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t warp = threadIdx.x / WARP;
    const uint32_t* table = p.page_tables + static_cast<uint64_t>(tile.sequence) * p.table_stride;

    // One tile of queries, two of keys and two of values.
    SKEP_DYNAMIC_SHARED(T, queries);
    KV* const keys = reinterpret_cast<KV*>(queries + TILE_ROWS * STRIDE);
    KV* const values = keys + 2 * TILE_KEYS * KV_STRIDE;
    [[maybe_unused]] float* const scales = reinterpret_cast<float*>(values + 2 * TILE_KEYS * KV_STRIDE);

    const uint32_t seen_end = tile.first_position + tile.rows;
    const uint32_t end = HAS_SPLITS && tile.last_key < seen_end ? tile.last_key : seen_end;
    uint32_t begin = HAS_SPLITS ? tile.first_key : 0;
    if (p.window > 0 && tile.first_position + 1 > p.window) {
        const uint32_t seen = (tile.first_position + 1 - p.window) / TILE_KEYS * TILE_KEYS;
        begin = seen > begin ? seen : begin;
    }
    constexpr int CHUNKS = HEAD_SIZE / 8;
    for (uint32_t i = threadIdx.x; i < TILE_ROWS * CHUNKS; i += blockDim.x) {
        const uint32_t row = i / CHUNKS;
        const bool there = row < tile.rows;
        const uint64_t at = static_cast<uint64_t>(tile.first_row + (there ? row : 0)) * p.q_stride;
        const T* from = static_cast<const T*>(p.q) + at + head * HEAD_SIZE + i % CHUNKS * 8;
        copy_async(queries + row * STRIDE + i % CHUNKS * 8, from, there);
    }
    load_keys_and_values<KV, HEAD_SIZE>(p, table, kv_head, begin, end, keys, values, scales);
    copy_commit();
    if constexpr (IS_FP8<KV>) {
        copy_wait<0>();
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < TILE_ROWS * STEPS; i += blockDim.x) {
            put_even_first(queries + i / STEPS * STRIDE + i % STEPS * 16);
        }
    }

    float sums[2 * STEPS][4] = {};
    // For each of the lane's two rows: the largest score, and the lane's part of the sum of weights.
    float most[2] = {-INFINITY, -INFINITY};
    float weight[2] = {0.0f, 0.0f};
    const uint32_t row = warp * 16 + lane / 4;

    // The joined state of the previous splits: o in `states`, m and d here.
    bool has_total = false;
    float total_most[2] = {-INFINITY, -INFINITY};
    float total_weight[2] = {0.0f, 0.0f};
    const auto state_of = [&](int i) {
        const uint64_t state = static_cast<uint64_t>(tile.first_state) + row + i * 8;
        return p.states + (state * p.heads + head) * (HEAD_SIZE + 2);
    };
    // Ends a split. Afterwards the state covers all keys so far.
    const auto end_split = [&] {
        for (int i = 0; i < 2; ++i) {
            for (int distance = 1; distance < 4; distance *= 2) {
                weight[i] = add_rounded(weight[i], __shfl_xor_sync(ALL_LANES, weight[i], distance));
            }
            if (!HAS_SPLITS || !has_total || row + i * 8 >= tile.rows) {
                continue;
            }
            const Shares shares = join_weights(total_most[i], total_weight[i], most[i], weight[i]);
            most[i] = total_most[i];
            weight[i] = total_weight[i];
            const float* total = state_of(i);
            for (int column = 0; column < 2 * STEPS; ++column) {
                for (int j = 0; j < 2; ++j) {
                    float& sum = sums[column][2 * i + j];
                    sum = joined(shares, total[dimension_of<KV>(column, j)], sum);
                }
            }
        }
    };
    const auto store_sums = [&] {
        for (int i = 0; i < 2; ++i) {
            if (row + i * 8 >= tile.rows) {
                continue;
            }
            float* total = state_of(i);
            for (int column = 0; column < 2 * STEPS; ++column) {
                total[dimension_of<KV>(column, 0)] = sums[column][2 * i];
                total[dimension_of<KV>(column, 1)] = sums[column][2 * i + 1];
            }
        }
    };
    int stage = 0;
    for (uint32_t first = begin; first < end; first += TILE_KEYS) {
        if (HAS_SPLITS && first > begin && first % p.split_keys == 0) {
            end_split();
            store_sums();
            has_total = true;
            for (int i = 0; i < 2; ++i) {
                total_most[i] = most[i];
                total_weight[i] = weight[i];
                most[i] = -INFINITY;
                weight[i] = 0.0f;
            }
            for (int column = 0; column < 2 * STEPS; ++column) {
                for (int i = 0; i < 4; ++i) {
                    sums[column][i] = 0.0f;
                }
            }
        }
        const uint32_t next = first + TILE_KEYS;
        if (next < end) {
            const int other = (stage ^ 1) * TILE_KEYS * KV_STRIDE;
            load_keys_and_values<KV, HEAD_SIZE>(p, table, kv_head, next, end, keys + other, values + other,
                                                scales + (stage ^ 1) * TILE_SCALES<KV, HEAD_SIZE>);
        }
        copy_commit();
        copy_wait<1>();
        __syncthreads();
        const KV* tile_keys = keys + stage * TILE_KEYS * KV_STRIDE;
        const KV* tile_values = values + stage * TILE_KEYS * KV_STRIDE;
        [[maybe_unused]] const float* tile_scales = scales + stage * TILE_SCALES<KV, HEAD_SIZE>;

        // Scores of 16 rows by TILE_KEYS keys: those of pairs of columns of eight keys.
        float scores[TILE_KEYS / 16][2][4] = {};
        const auto load_queries = [&](uint32_t (&a)[4], int step) {
            load_tiles(a, queries + (warp * 16 + lane % 16) * STRIDE + step * 16 + lane / 16 * 8);
        };
        if constexpr (IS_FP8<KV>) {
            // Two steps are loaded at once.
            SKEP_UNROLL
            for (int first_step = 0; first_step < STEPS; first_step += 2) {
                uint32_t a[2][4];
                SKEP_UNROLL
                for (int step = first_step; step < first_step + 2 && step < STEPS; ++step) {
                    load_queries(a[step % 2], step);
                }
                SKEP_UNROLL
                for (int pair = 0; pair < TILE_KEYS / 16; ++pair) {
                    uint32_t words[4];
                    load_fp8<HEAD_SIZE, KV_STRIDE, false>(words, tile_keys + pair * 16 * KV_STRIDE, first_step);
                    SKEP_UNROLL
                    for (int step = first_step; step < first_step + 2 && step < STEPS; ++step) {
                        uint32_t left[2], right[2];
                        convert_e4m3<T>(words[step % 2 * 2], left[0], left[1]);
                        convert_e4m3<T>(words[step % 2 * 2 + 1], right[0], right[1]);
                        mma_16x8x16<T>(scores[pair][0], a[step % 2], left);
                        mma_16x8x16<T>(scores[pair][1], a[step % 2], right);
                    }
                }
            }
            SKEP_UNROLL
            for (int pair = 0; pair < TILE_KEYS / 16; ++pair) {
                scale_scores(scores[pair], tile_scales + pair * PAGE_SCALES);
            }
        } else {
            for (int step = 0; step < STEPS; ++step) {
                uint32_t a[4];
                load_queries(a, step);
                for (int pair = 0; pair < TILE_KEYS / 16; ++pair) {
                    uint32_t b[4];
                    const uint32_t key = pair * 16 + lane / 16 * 8 + lane % 8;
                    load_tiles(b, tile_keys + key * KV_STRIDE + step * 16 + lane % 16 / 8 * 8);
                    const uint32_t left[2] = {b[0], b[1]};
                    const uint32_t right[2] = {b[2], b[3]};
                    mma_16x8x16<T>(scores[pair][0], a, left);
                    mma_16x8x16<T>(scores[pair][1], a, right);
                }
            }
        }
        // Only tiles at the edges of what the warp's rows see have keys that a row does not see.
        const uint32_t warp_position = tile.first_position + warp * 16;
        const bool all_seen = first + TILE_KEYS - 1 <= warp_position &&
                              (p.window == 0 || first + p.window > warp_position + 15);
        if (!all_seen) {
            for (int column = 0; column < TILE_KEYS / 8; ++column) {
                for (int i = 0; i < 4; ++i) {
                    const uint32_t key = first + column * 8 + 2 * (lane % 4) + i % 2;
                    const uint32_t position = tile.first_position + row + i / 2 * 8;
                    const bool seen = key <= position && (p.window == 0 || key + p.window > position);
                    float& score = scores[column / 2][column % 2][i];
                    score = seen ? score : -INFINITY;
                }
            }
        }
        float larger[2] = {most[0], most[1]};
        for (int column = 0; column < TILE_KEYS / 8; ++column) {
            for (int i = 0; i < 4; ++i) {
                // The scale is positive, so a key that is not seen keeps its score.
                float& score = scores[column / 2][column % 2][i];
                score *= p.scale;
                larger[i / 2] = fmaxf(larger[i / 2], score);
            }
        }
        float kept[2];
        for (int i = 0; i < 2; ++i) {
            for (int distance = 1; distance < 4; distance *= 2) {
                larger[i] = fmaxf(larger[i], __shfl_xor_sync(ALL_LANES, larger[i], distance));
            }
            // A row that has seen no key yet has nothing to keep.
            kept[i] = most[i] == -INFINITY ? 0.0f : __expf(add_rounded(most[i], -larger[i]));
            most[i] = larger[i];
            weight[i] *= kept[i];
        }
        for (int column = 0; column < TILE_KEYS / 8; ++column) {
            for (int i = 0; i < 4; ++i) {
                float& score = scores[column / 2][column % 2][i];
                score = score == -INFINITY ? 0.0f : __expf(add_rounded(score, -most[i / 2]));
                weight[i / 2] = add_rounded(weight[i / 2], score);
            }
        }
        for (int column = 0; column < 2 * STEPS; ++column) {
            for (int i = 0; i < 4; ++i) {
                sums[column][i] *= kept[i / 2];
            }
        }
        const auto packed_weights = [&](int step, uint32_t (&a)[4]) {
            const float(&left)[4] = scores[step][0];
            const float(&right)[4] = scores[step][1];
            a[0] = pack<Operand>(left[0], left[1]);
            a[1] = pack<Operand>(left[2], left[3]);
            a[2] = pack<Operand>(right[0], right[1]);
            a[3] = pack<Operand>(right[2], right[3]);
        };
        if constexpr (IS_FP8<KV>) {
            SKEP_UNROLL
            for (int step = 0; step < TILE_KEYS / 16; ++step) {
                scale_weights(scores[step], tile_scales + step * PAGE_SCALES + PAGE_POSITIONS);
                uint32_t a[4];
                packed_weights(step, a);
                multiply_fp8_values<HEAD_SIZE, KV_STRIDE>(sums, a, tile_values + step * 16 * KV_STRIDE);
            }
        } else {
            for (int step = 0; step < TILE_KEYS / 16; ++step) {
                uint32_t a[4];
                packed_weights(step, a);
                for (int pair = 0; pair < STEPS; ++pair) {
                    uint32_t b[4];
                    const uint32_t key = step * 16 + lane % 16;
                    load_tiles_transposed(b, tile_values + key * KV_STRIDE + pair * 16 + lane / 16 * 8);
                    const uint32_t first_half[2] = {b[0], b[1]};
                    const uint32_t second_half[2] = {b[2], b[3]};
                    mma_16x8x16<T>(sums[2 * pair], a, first_half);
                    mma_16x8x16<T>(sums[2 * pair + 1], a, second_half);
                }
            }
        }
        // The load of the tile after next overwrites this one, so all warps must have finished reading it.
        __syncthreads();
        stage ^= 1;
    }
    // If there was no key, the copies that were started have not been waited for.
    copy_wait<0>();
    end_split();
    if (HAS_SPLITS && tile.is_part != 0) {
        store_sums();
        for (int i = 0; i < 2; ++i) {
            if (lane % 4 == 0 && row + i * 8 < tile.rows) {
                state_of(i)[HEAD_SIZE] = most[i];
                state_of(i)[HEAD_SIZE + 1] = weight[i];
            }
        }
        return;
    }
    for (int column = 0; column < 2 * STEPS; ++column) {
        for (int i = 0; i < 2; ++i) {
            if (row + i * 8 >= tile.rows) {
                continue;
            }
            const uint64_t out = (static_cast<uint64_t>(tile.first_row + row + i * 8) * p.heads + head) * HEAD_SIZE;
            const float share = weight[i] > 0.0f ? 1.0f / weight[i] : 0.0f;
            uint32_t* const words = static_cast<uint32_t*>(p.out) + out / 2;
            if constexpr (IS_FP8<KV>) {
                // A pair of columns has the even and the odd dimensions of sixteen.
                const float(&even)[4] = sums[column / 2 * 2];
                const float(&odd)[4] = sums[column / 2 * 2 + 1];
                const int from = 2 * i + column % 2;
                words[column / 2 * 8 + 2 * (lane % 4) + column % 2] = pack<T>(even[from] * share, odd[from] * share);
            } else {
                words[column * 4 + lane % 4] = pack<T>(sums[column][2 * i] * share, sums[column][2 * i + 1] * share);
            }
        }
    }
}

// Grid: (joins, heads).
template <typename T>
SKEP_DEVICE void attention_join(const AttentionJoinParams& p) {
    const Join join = p.joins[blockIdx.x];
    if (join.parts == 0) {
        return;
    }
    const uint32_t head = blockIdx.y;
    const uint32_t width = p.head_size + 2;
    const uint64_t stride = static_cast<uint64_t>(p.heads) * width;
    const float* states = p.states + (static_cast<uint64_t>(join.first_state) * p.heads + head) * width;
    T* out = static_cast<T*>(p.out) + (static_cast<uint64_t>(join.row) * p.heads + head) * p.head_size;
    for (uint32_t i = threadIdx.x; i < p.head_size; i += blockDim.x) {
        float sum = states[i];
        float most = states[p.head_size];
        float weight = states[p.head_size + 1];
        for (uint32_t part = 1; part < join.parts; ++part) {
            const float* split = states + part * stride;
            const Shares shares = join_weights(most, weight, split[p.head_size], split[p.head_size + 1]);
            sum = joined(shares, sum, split[i]);
        }
        out[i] = from_float<T>(sum * (weight > 0.0f ? 1.0f / weight : 0.0f));
    }
}

#define ATTENTION_PREFILL(NAME, T, KV, HEAD_SIZE)                                                 \
    SKEP_KERNEL_BOUNDED(attention_prefill_##NAME, AttentionPrefillParams, PREFILL_WARPS * WARP) { \
        attention_prefill<T, KV, HEAD_SIZE, false>(p);                                            \
    }                                                                                             \
    SKEP_KERNEL_BOUNDED(attention_ordered_##NAME, AttentionPrefillParams, PREFILL_WARPS * WARP) { \
        attention_prefill<T, KV, HEAD_SIZE, true>(p);                                             \
    }
