// Processes the result of the QKV projection before attention: bias, the norm of each head, rotation, and the write of keys
// and values into their pages.
//
// One warp handles one head of a row. It reads each value once and writes it once: queries in place, keys and values to the
// page of their position. FP8 pages get the values and the scale of the head.
#include "kv_pages.cuh"
#include "qkv.cuh"

// Maximum number of pairs of values per lane.
constexpr int MAX_PAIRS = 4;

// Stores a key or a value in FP8. The pairs of the lanes are those of the whole head.
SKEP_DEVICE void store_fp8(const QkvParams& p, uint64_t slot, uint32_t head, const float (&a)[MAX_PAIRS], const float (&b)[MAX_PAIRS]) {
    const uint32_t lane = threadIdx.x % WARP;
    uint32_t most = 0;
    SKEP_UNROLL
    for (int turn = 0; turn < MAX_PAIRS; ++turn) {
        const uint32_t of_a = float_bits(a[turn]) & 0x7fffffffu;
        const uint32_t of_b = float_bits(b[turn]) & 0x7fffffffu;
        most = of_a > most ? of_a : most;
        most = of_b > most ? of_b : most;
    }
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        const uint32_t other = __shfl_xor_sync(ALL_LANES, most, distance);
        most = other > most ? other : most;
    }
    const HeadScale scale = scale_of_head(most);
    const uint32_t kv_head = (head - p.heads) % p.kv_heads;
    const uint32_t which = (head - p.heads) / p.kv_heads;
    e4m3* const out = head_of_row<e4m3>(p, 0, slot, head);
    if (lane == 0) {
        const uint64_t first = scales_at(slot / PAGE_POSITIONS, p.kv_heads, kv_head);
        p.scales[first + which * PAGE_POSITIONS + slot % PAGE_POSITIONS] = scale.scale;
    }
    SKEP_UNROLL
    for (int turn = 0; turn < MAX_PAIRS; ++turn) {
        const uint32_t pair = lane + turn * WARP;
        if (pair < p.head_size / 2) {
            out[first_of_pair(p, pair)] = from_float<e4m3>(a[turn] * scale.inverse);
            out[second_of_pair(p, pair)] = from_float<e4m3>(b[turn] * scale.inverse);
        }
    }
}

template <typename T, typename KV>
SKEP_DEVICE void qkv(const QkvParams& p) {
    const uint32_t heads = p.heads + 2 * p.kv_heads;
    const uint32_t lane = threadIdx.x % WARP;
    const uint64_t index = static_cast<uint64_t>(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (index >= static_cast<uint64_t>(p.rows) * heads) {
        return;
    }
    const uint64_t row = index / heads;
    const uint32_t head = static_cast<uint32_t>(index % heads);
    const bool is_query = head < p.heads;
    const bool is_key = !is_query && head < p.heads + p.kv_heads;
    const uint32_t half = p.head_size / 2;
    const T* in = static_cast<const T*>(p.qkv) + index * p.head_size;
    const T* bias = p.bias == nullptr ? nullptr : static_cast<const T*>(p.bias) + head * p.head_size;

    float a[MAX_PAIRS], b[MAX_PAIRS];
    float squares = 0.0f;
    SKEP_UNROLL
    for (int turn = 0; turn < MAX_PAIRS; ++turn) {
        const uint32_t pair = lane + turn * WARP;
        a[turn] = b[turn] = 0.0f;
        if (pair >= half) {
            continue;
        }
        const uint32_t first = first_of_pair(p, pair);
        const uint32_t second = second_of_pair(p, pair);
        a[turn] = to_float(in[first]) + (bias == nullptr ? 0.0f : to_float(bias[first]));
        b[turn] = to_float(in[second]) + (bias == nullptr ? 0.0f : to_float(bias[second]));
        squares += a[turn] * a[turn] + b[turn] * b[turn];
    }
    const T* norm = static_cast<const T*>(is_query ? p.q_norm : is_key ? p.k_norm : nullptr);
    const float mean = warp_sum(squares) / static_cast<float>(p.head_size);
    const float scale = norm == nullptr ? 1.0f : rsqrtf(mean + p.epsilon);

    T* const out = head_of_row<T>(p, row, is_query ? 0 : p.slots[row], head);
    SKEP_UNROLL
    for (int turn = 0; turn < MAX_PAIRS; ++turn) {
        const uint32_t pair = lane + turn * WARP;
        if (pair >= half) {
            continue;
        }
        const uint32_t first = first_of_pair(p, pair);
        const uint32_t second = second_of_pair(p, pair);
        float x = a[turn] * scale;
        float y = b[turn] * scale;
        if (norm != nullptr) {
            x *= to_float(norm[first]);
            y *= to_float(norm[second]);
        }
        if (is_rotated(p, head)) {
            rotate(p.positions[row], p.frequencies[pair], x, y);
        }
        if (IS_FP8<KV> && !is_query) {
            a[turn] = x;
            b[turn] = y;
            continue;
        }
        out[first] = from_float<T>(x);
        out[second] = from_float<T>(y);
    }
    if constexpr (IS_FP8<KV>) {
        if (!is_query) {
            store_fp8(p, p.slots[row], head, a, b);
        }
    }
}

#define QKV(T)                          \
    SKEP_KERNEL(qkv_##T, QkvParams) {    \
        qkv<T, T>(p);                   \
    }                                   \
    SKEP_KERNEL(qkv_f8_##T, QkvParams) { \
        qkv<T, e4m3>(p);                \
    }

QKV(bf16)
QKV(f16)
