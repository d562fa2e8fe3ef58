// The parts that the kernels for the result of the QKV projection share.
#pragma once

#include "device.cuh"

enum Pairing : uint32_t { HALVES = 0, INTERLEAVED = 1 };

struct QkvParams {
    void* qkv;                  // [rows, (heads + 2 · kv_heads) · head_size]
    const void* bias;           // one value per value of a row; null: none
    const void* q_norm;         // [head_size]; null: none
    const void* k_norm;         // [head_size]; null: none
    const uint32_t* positions;  // [rows]
    const uint64_t* slots;      // [rows]: page · PAGE_POSITIONS + offset in the page
    const float* frequencies;   // [head_size / 2]: radians per position
    void* keys;                 // [pages · PAGE_POSITIONS, kv_heads, head_size]
    void* values;               // the same layout as keys
    float* scales;              // [pages, kv_heads, PAGE_SCALES], of FP8 pages
    uint32_t rows;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t head_size;         // even, at most 256
    uint32_t pairing;
    float epsilon;
};

// Returns the index of a pair's values in its head.
SKEP_DEVICE uint32_t first_of_pair(const QkvParams& p, uint32_t pair) {
    return p.pairing == HALVES ? pair : 2 * pair;
}

SKEP_DEVICE uint32_t second_of_pair(const QkvParams& p, uint32_t pair) {
    return p.pairing == HALVES ? pair + p.head_size / 2 : 2 * pair + 1;
}

// Returns whether the positions of a head's rows rotate it, as those of queries and keys do.
SKEP_DEVICE bool is_rotated(const QkvParams& p, uint32_t head) {
    return head < p.heads + p.kv_heads;
}

// Rotates a pair of values.
SKEP_DEVICE void rotate(uint32_t position, float frequency, float& x, float& y) {
    const float angle = static_cast<float>(position) * frequency;
    float sine, cosine;
    sincosf(angle, &sine, &cosine);
    const float rotated = multiply_add(x, cosine, -(y * sine));
    y = multiply_add(x, sine, y * cosine);
    x = rotated;
}

// Returns the destination of a row's head: its own place for a query, and the page of the row's slot for a key or a value.
template <typename T>
SKEP_DEVICE T* head_of_row(const QkvParams& p, uint64_t row, uint64_t slot, uint32_t head) {
    if (head < p.heads) {
        return static_cast<T*>(p.qkv) + (row * (p.heads + 2 * p.kv_heads) + head) * p.head_size;
    }
    const bool is_key = head < p.heads + p.kv_heads;
    const uint32_t kv_head = head - p.heads - (is_key ? 0 : p.kv_heads);
    return static_cast<T*>(is_key ? p.keys : p.values) + (slot * p.kv_heads + kv_head) * p.head_size;
}
