// Copies the rows of the embedding table for the tokens of a step.
//
// Reads the rows of the tokens and writes `rows × width` values. One block handles a row, and a thread handles eight values at
// a time. Widths are multiples of eight and of the table's block length. A token that is not in the table gets zeros, so that
// ranks that divide the vocabulary can add up their rows.
#include "device.cuh"
#include "formats/blocks.cuh"

struct EmbeddingParams {
    const uint32_t* tokens; // [rows]
    const void* table;      // [vocabulary, width], as 16-bit values or in blocks
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

template <typename Block, typename T>
SKEP_DEVICE void embedding_of_blocks(const EmbeddingParams& p) {
    const uint32_t row = blockIdx.x;
    const uint32_t token = p.tokens[row] - p.first;
    const uint64_t row_bytes = static_cast<uint64_t>(p.width / Block::VALUES) * Block::BYTES;
    const uint8_t* blocks = static_cast<const uint8_t*>(p.table) + token * row_bytes;
    for (uint32_t first = 8 * threadIdx.x; first < p.width; first += 8 * blockDim.x) {
        float eight[8] = {};
        if (token < p.vocabulary) {
            Block::eight(blocks + first / Block::VALUES * Block::BYTES, first % Block::VALUES, eight);
        }
        Vec16 out;
        for (int word = 0; word < 4; ++word) {
            out.words[word] = pack<T>(eight[2 * word], eight[2 * word + 1]);
        }
        p.out[(static_cast<uint64_t>(row) * p.width + first) / 8] = out;
    }
}

#define EMBEDDING(name, Block)                            \
    SKEP_KERNEL(embedding_##name##_bf16, EmbeddingParams) { \
        embedding_of_blocks<Block, bf16>(p);              \
    }                                                     \
    SKEP_KERNEL(embedding_##name##_f16, EmbeddingParams) {  \
        embedding_of_blocks<Block, f16>(p);               \
    }

EMBEDDING(q4_0, Q4_0)
EMBEDDING(q4_1, Q4_1)
EMBEDDING(q8_0, Q8_0)
EMBEDDING(q4_k, Q4_K)
EMBEDDING(q6_k, Q6_K)
