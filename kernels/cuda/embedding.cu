// Rows of the embedding table for the tokens of a step.
//
// Reads and writes `rows × width` values. One block a row; widths are multiples of eight.
#include "device.cuh"

struct EmbeddingParams {
    const uint32_t* tokens; // [rows]
    const Vec16* table;     // [vocabulary, width] of 16-bit values
    Vec16* out;             // [rows, width]
    uint32_t width;
    uint32_t vocabulary;
};

// The format of the values does not matter to a copy.
SKEP_KERNEL(embedding, EmbeddingParams) {
    const uint32_t row = blockIdx.x;
    const uint32_t token = p.tokens[row];
    const uint32_t chunks = p.width / 8;
    const Vec16 zero = {{0, 0, 0, 0}};
    for (uint32_t chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
        const bool known = token < p.vocabulary;
        p.out[static_cast<uint64_t>(row) * chunks + chunk] =
            known ? p.table[static_cast<uint64_t>(token) * chunks + chunk] : zero;
    }
}
