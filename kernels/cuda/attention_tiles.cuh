// The parameters of attention of prompt rows, shared by the kernels that compute it.
#pragma once

#include "device.cuh"

// Maximum number of rows of a tile.
constexpr uint32_t QUERY_TILE_ROWS = 128;

// Consecutive rows of one sequence.
struct QueryTile {
    uint32_t first_row;      // index in the batch
    uint32_t rows;           // 0: there is nothing to do
    uint32_t first_position; // position of the first row
    uint32_t sequence;       // index of the page table
    uint32_t first_key;      // the start of a split
    uint32_t last_key;       // exclusive; keys that a row does not see are skipped
    uint32_t first_state;    // index of the state of the first row; the others follow
    uint32_t is_part;        // nonzero: its states are joined with those of other keys
};

struct AttentionPrefillParams {
    const void* q;               // [rows, q_stride]; each row starts with the queries
    const void* keys;            // [pages, PAGE_POSITIONS, kv_heads, head_size]
    const void* values;
    const float* scales;         // [pages, kv_heads, PAGE_SCALES], of FP8 pages
    void* out;                   // [rows, heads, head_size]
    const uint32_t* page_tables; // [sequences, table_stride]
    const QueryTile* tiles;
    float* states;               // [states, heads, head_size + 2]: o, m, d; null without splits
    uint32_t q_stride;
    uint32_t table_stride;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t window;             // number of positions that a row sees, including its own; 0: all positions up to its own
    uint32_t split_keys;         // keys per split, a multiple of a tile; only `attention_ordered` has splits
    float scale;
};
