// The splits of what rows see, the rows of a split, and the join of the states that the splits of a row leave.
#pragma once

#include "device.cuh"

// Rows of a tile: rows of a sequence, each with the query heads of the block.
constexpr uint32_t PACKED_ROWS = 16;
constexpr int MAX_DECODE_WARPS = 4;
// Number of splits whose states are loaded at once to join them.
constexpr uint32_t JOINED_AT_ONCE = 8;

// Wide heads have fewer warps, so that the pages fit into the 99 KiB that every architecture has.
template <int HEAD_SIZE>
constexpr int DECODE_WARPS = HEAD_SIZE > WIDE_HEAD ? MAX_DECODE_WARPS / 2 : MAX_DECODE_WARPS;
// Tiles of rows that read a shared split together. Queries of wide heads stay in shared memory, which has room for one tile.
template <int HEAD_SIZE>
constexpr int SHARED_TILES = HEAD_SIZE > WIDE_HEAD ? 1 : MAX_DECODE_WARPS;

// A split of what some rows of a sequence see, or rows of several sequences. A block has at most PACKED_ROWS pairs of a row and a
// query head, or PACKED_ROWS · SHARED_TILES of a shared split.
struct Split {
    uint32_t sequence;       // index of the page table
    uint32_t first_row;      // index in the batch, or in the shared rows
    uint32_t rows;
    uint32_t first_position; // position of the first row
    uint32_t first_key;
    uint32_t last_key;       // exclusive; keys that a row does not see are skipped
    uint32_t first_state;    // index of the state of the first row and the first split
    uint32_t part;           // index of the split among those of its rows
    uint32_t parts;          // number of these splits; 0: there is nothing to do
    uint32_t arrival;        // index of their arrivals
    uint32_t is_shared;      // 1: the rows, their states and their arrivals are those of the shared rows; all rows see all keys
};

// A row that reads a shared split. The rows of a tile follow each other.
struct SharedRow {
    uint32_t row;         // index in the batch
    uint32_t first_state; // index of the state of the first split that the row sees
    uint32_t tile;        // index of a split that only the rows of its tile see
};

struct AttentionDecodeParams {
    const void* q;               // [rows, q_stride]; each row starts with the queries
    const void* keys;            // [pages, PAGE_POSITIONS, kv_heads, head_size]
    const void* values;
    const float* scales;         // [pages, kv_heads, PAGE_SCALES], of FP8 pages
    void* out;                   // [rows, heads, head_size]
    const uint32_t* page_tables; // [sequences, table_stride]
    const Split* splits;
    const SharedRow* shared_rows;
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
    const SharedRow* shared; // the rows of a shared split; null: rows follow each other in the batch
    uint32_t first_row;
    uint32_t first_head;
    uint32_t group; // query heads
    uint32_t count;

    // Returns the index of the row among those of the block.
    SKEP_DEVICE uint32_t row(uint32_t packed) const {
        return packed / group;
    }

    // Returns the index of the row in the batch.
    SKEP_DEVICE uint32_t row_of_batch(uint32_t packed) const {
        return shared == nullptr ? first_row + row(packed) : shared[row(packed)].row;
    }

    SKEP_DEVICE uint32_t head(uint32_t packed) const {
        return first_head + packed % group;
    }
};

template <typename T, int HEAD_SIZE>
SKEP_DEVICE void store_out(const AttentionDecodeParams& p, const PackedRows& rows, uint32_t packed, uint32_t column,
                           const Floats& sum, float weight) {
    const float share = weight > 0.0f ? 1.0f / weight : 0.0f;
    const uint64_t row = static_cast<uint64_t>(rows.row_of_batch(packed)) * p.heads + rows.head(packed);
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
