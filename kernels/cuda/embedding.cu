// Copies the rows of the embedding table for the tokens of a step.
//
// Reads the rows of the tokens and writes `rows × width` values. One block handles a row, and a thread handles eight values at
// a time. Widths are multiples of eight, and of 32 for tiles. A token that is not in the table gets zeros, so that
// ranks that divide the vocabulary can add up their rows.
#include "device.cuh"
#include "formats/tiles.cuh"

struct EmbeddingParams {
    const uint32_t* tokens; // [rows]
    const void* table;      // [vocabulary, width], as 16-bit values or in tiles
    Vec16* out;             // [rows, width]
    uint32_t width;
    uint32_t vocabulary;
    uint32_t first;         // the token of the table's first row
};

// A copy works for any format of 16-bit values.
SKEP_KERNEL(embedding, EmbeddingParams) {
    const uint32_t row = blockIdx.x;
    const uint32_t token = p.tokens[row] - p.first;
    const uint32_t chunks = p.width / 8;
    const Vec16* table = static_cast<const Vec16*>(p.table);
    const Vec16 zero = {{0, 0, 0, 0}};
    for (uint32_t chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
        const bool known = token < p.vocabulary;
        p.out[static_cast<uint64_t>(row) * chunks + chunk] =
            known ? table[static_cast<uint64_t>(token) * chunks + chunk] : zero;
    }
}

// A thread handles the inputs of a lane in a tile: eight of each 32.
template <typename Format, typename T>
SKEP_DEVICE void embedding_of_tiles(const EmbeddingParams& p) {
    const uint32_t row = blockIdx.x;
    const uint32_t token = p.tokens[row] - p.first;
    const bool known = token < p.vocabulary;
    const uint32_t along = div_up(p.width, Format::INPUTS);
    const uint8_t* line = static_cast<const uint8_t*>(p.table) +
                          static_cast<uint64_t>(known ? token / TILE_OUTPUTS : 0) * along * Format::BYTES;
    T* out = reinterpret_cast<T*>(p.out) + static_cast<uint64_t>(row) * p.width;
    for (uint32_t i = threadIdx.x; i < 4 * along; i += blockDim.x) {
        const uint32_t quad = i % 4;
        const uint8_t* const tile = line + i / 4 * Format::BYTES;
        SKEP_UNROLL
        for (uint32_t group = 0; group < Format::INPUTS / 32; ++group) {
            const uint32_t first = i / 4 * Format::INPUTS + 32 * group;
            if (first < p.width) {
                const uint32_t lane = token % 8 * 4 + quad;
                const Vec16 zero = {{0, 0, 0, 0}};
                const typename Format::Held held = Format::load(tile, group / 2, lane);
                const typename Format::Scales scales = Format::scales(tile, group / 2, lane);
                const Vec16 weights = weights_of<Format, T>(held, scales, group % 2, token % TILE_OUTPUTS >= 8);
                store_inputs<Format>(out + first, quad, known ? weights : zero);
            }
        }
    }
}

#define EMBEDDING(name, Format)                             \
    SKEP_KERNEL(embedding_##name##_bf16, EmbeddingParams) { \
        embedding_of_tiles<Format, bf16>(p);                \
    }                                                       \
    SKEP_KERNEL(embedding_##name##_f16, EmbeddingParams) {  \
        embedding_of_tiles<Format, f16>(p);                 \
    }

EMBEDDING(q4_0, Q4_0)
EMBEDDING(q4_1, Q4_1)
EMBEDDING(int4, Int4)
EMBEDDING(q4_k, Q4_K)
EMBEDDING(q6_k, Q6_K)
EMBEDDING(q8_0, Q8_0)
EMBEDDING(f8, F8)
