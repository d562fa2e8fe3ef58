// Attention of one query row per sequence over its paged keys and values, split along the context.
//
// A plan divides each sequence's context into splits (`Split`) of about equal work. `attention_decode` computes the softmax
// state (m, d, o) of one split for all query heads of one key-value head, so that keys and values are read once per group.
// `attention_merge` joins the splits of a row. The lower bound on the time is that of reading 2 · context · head_size · bytes
// per key-value head.
//
// A warp takes every n-th position, where n is the number of warps, and its lanes share a head.
#include "device.cuh"

constexpr int DECODE_WARPS = 4;
constexpr uint32_t MAX_GROUP_HEADS = 8;
// The state of a spare split, which only makes a recorded launch as large as any.
constexpr uint32_t NO_STATE = 0xffffffffu;

// Number of query heads per block, as many as registers hold. A larger group has several blocks, which read the same keys
// and values through the cache.
template <int HEAD_SIZE>
constexpr uint32_t GROUP = HEAD_SIZE > WIDE_HEAD ? MAX_GROUP_HEADS / 2 : MAX_GROUP_HEADS;

// A split of one sequence's context.
struct Split {
    uint32_t row;
    uint32_t first;
    uint32_t last; // exclusive
    uint32_t state; // index of its state, or NO_STATE
};

struct AttentionDecodeParams {
    const void* q;               // [rows, q_stride]; each row starts with the queries
    const void* keys;            // [pages, PAGE_POSITIONS, kv_heads, head_size]
    const void* values;
    const uint32_t* page_tables; // [rows, table_stride]
    const Split* splits;
    float* states;               // [states, heads, head_size + 2]: o, m, d
    uint32_t q_stride;
    uint32_t table_stride;
    uint32_t heads;
    uint32_t kv_heads;           // heads is a multiple of it
    float scale;
};

struct AttentionMergeParams {
    const float* states;
    const uint32_t* first_state; // [rows + 1]: index of each row's first state, then the number of states
    void* out;                   // [rows, heads, head_size]
    uint32_t heads;
    uint32_t head_size;
};

// Grid: (splits, kv_heads · blocks per group). Block: DECODE_WARPS warps. Shared: DECODE_WARPS · (HEAD_SIZE + 2) floats.
template <typename T, int HEAD_SIZE>
SKEP_DEVICE void attention_decode(const AttentionDecodeParams& p) {
    constexpr uint32_t MAX_GROUP = GROUP<HEAD_SIZE>;
    const Split split = p.splits[blockIdx.x];
    if (split.state == NO_STATE) {
        return;
    }
    const uint32_t whole_group = p.heads / p.kv_heads;
    const uint32_t parts = div_up(whole_group, MAX_GROUP);
    const uint32_t kv_head = blockIdx.y / parts;
    const uint32_t skipped = blockIdx.y % parts * MAX_GROUP;
    const uint32_t group = whole_group - skipped < MAX_GROUP ? whole_group - skipped : MAX_GROUP;
    const uint32_t first_head = kv_head * whole_group + skipped;
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t warp = threadIdx.x / WARP;
    // Number of values of a head per lane.
    constexpr int VALUES = (HEAD_SIZE + WARP - 1) / WARP;
    const T* q = static_cast<const T*>(p.q) + static_cast<uint64_t>(split.row) * p.q_stride +
                 first_head * HEAD_SIZE;
    const uint32_t* pages = p.page_tables + static_cast<uint64_t>(split.row) * p.table_stride;

    float query[MAX_GROUP][VALUES];
    float sum[MAX_GROUP][VALUES];
    float most[MAX_GROUP], weight[MAX_GROUP];
    for (uint32_t head = 0; head < MAX_GROUP; ++head) {
        most[head] = -INFINITY;
        weight[head] = 0.0f;
        for (int i = 0; i < VALUES; ++i) {
            const bool there = head < group && lane + i * WARP < HEAD_SIZE;
            query[head][i] = there ? to_float(q[head * HEAD_SIZE + lane + i * WARP]) * p.scale : 0.0f;
            sum[head][i] = 0.0f;
        }
    }
    for (uint32_t position = split.first + warp; position < split.last; position += DECODE_WARPS) {
        const uint64_t slot =
            static_cast<uint64_t>(pages[position / PAGE_POSITIONS]) * PAGE_POSITIONS + position % PAGE_POSITIONS;
        const uint64_t at = (slot * p.kv_heads + kv_head) * HEAD_SIZE + lane;
        float key[VALUES], value[VALUES];
        for (int i = 0; i < VALUES; ++i) {
            key[i] = lane + i * WARP < HEAD_SIZE ? to_float(static_cast<const T*>(p.keys)[at + i * WARP]) : 0.0f;
            value[i] = lane + i * WARP < HEAD_SIZE ? to_float(static_cast<const T*>(p.values)[at + i * WARP]) : 0.0f;
        }
        for (uint32_t head = 0; head < MAX_GROUP; ++head) {
            if (head >= group) {
                break;
            }
            float product = 0.0f;
            for (int i = 0; i < VALUES; ++i) {
                product += query[head][i] * key[i];
            }
            const float score = warp_sum(product);
            const float larger = fmaxf(most[head], score);
            const float kept = __expf(most[head] - larger);
            const float share = __expf(score - larger);
            most[head] = larger;
            weight[head] = weight[head] * kept + share;
            for (int i = 0; i < VALUES; ++i) {
                sum[head][i] = sum[head][i] * kept + share * value[i];
            }
        }
    }

    // [warps, head_size + 2] for one head at a time.
    SKEP_DYNAMIC_SHARED(float, shared);
    constexpr uint32_t width = HEAD_SIZE + 2;
    for (uint32_t head = 0; head < group; ++head) {
        __syncthreads();
        for (int i = 0; i < VALUES; ++i) {
            if (lane + i * WARP < HEAD_SIZE) {
                shared[warp * width + lane + i * WARP] = sum[head][i];
            }
        }
        if (lane == 0) {
            shared[warp * width + HEAD_SIZE] = most[head];
            shared[warp * width + HEAD_SIZE + 1] = weight[head];
        }
        __syncthreads();
        float larger = -INFINITY;
        for (uint32_t other = 0; other < DECODE_WARPS; ++other) {
            larger = fmaxf(larger, shared[other * width + HEAD_SIZE]);
        }
        float* state = p.states + (static_cast<uint64_t>(split.state) * p.heads + first_head + head) * width;
        for (uint32_t i = threadIdx.x; i < HEAD_SIZE; i += blockDim.x) {
            float joined = 0.0f;
            for (uint32_t other = 0; other < DECODE_WARPS; ++other) {
                // A warp without positions contributes nothing.
                const float seen = shared[other * width + HEAD_SIZE];
                const float kept = seen == -INFINITY ? 0.0f : __expf(seen - larger);
                joined += kept * shared[other * width + i];
            }
            state[i] = joined;
        }
        if (threadIdx.x == 0) {
            float joined = 0.0f;
            for (uint32_t other = 0; other < DECODE_WARPS; ++other) {
                const float seen = shared[other * width + HEAD_SIZE];
                joined += seen == -INFINITY ? 0.0f : __expf(seen - larger) * shared[other * width + HEAD_SIZE + 1];
            }
            state[HEAD_SIZE] = larger;
            state[HEAD_SIZE + 1] = joined;
        }
    }
}

// Grid: (rows, heads).
template <typename T>
SKEP_DEVICE void attention_merge(const AttentionMergeParams& p) {
    const uint32_t row = blockIdx.x;
    const uint32_t head = blockIdx.y;
    const uint32_t width = p.head_size + 2;
    const uint32_t first = p.first_state[row];
    const uint32_t last = p.first_state[row + 1];
    const float* states = p.states + static_cast<uint64_t>(head) * width;
    const uint64_t stride = static_cast<uint64_t>(p.heads) * width;
    float larger = -INFINITY;
    for (uint32_t index = first; index < last; ++index) {
        larger = fmaxf(larger, states[index * stride + p.head_size]);
    }
    T* out = static_cast<T*>(p.out) + (static_cast<uint64_t>(row) * p.heads + head) * p.head_size;
    for (uint32_t i = threadIdx.x; i < p.head_size; i += blockDim.x) {
        float sum = 0.0f, weight = 0.0f;
        for (uint32_t index = first; index < last; ++index) {
            const float* state = states + index * stride;
            const float kept = __expf(state[p.head_size] - larger);
            sum += kept * state[i];
            weight += kept * state[p.head_size + 1];
        }
        out[i] = from_float<T>(weight > 0.0f ? sum / weight : 0.0f);
    }
}

#define ATTENTION_DECODE(T, HEAD_SIZE)                                                                    \
    SKEP_KERNEL_BOUNDED(attention_decode_##HEAD_SIZE##_##T, AttentionDecodeParams, DECODE_WARPS * WARP) { \
        attention_decode<T, HEAD_SIZE>(p);                                                                \
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

SKEP_KERNEL(attention_merge_bf16, AttentionMergeParams) {
    attention_merge<bf16>(p);
}

SKEP_KERNEL(attention_merge_f16, AttentionMergeParams) {
    attention_merge<f16>(p);
}
