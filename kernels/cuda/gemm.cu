// Products of many rows with weights in the format of the activations on tensor cores:
// y[row, output] = Σ x[row, i] · w[output, i] + bias.
//
// A block handles ROWS rows and 64 outputs, a warp half of each, 32 inputs at a time. While a tile is multiplied, the next tile
// of rows and of weights is copied asynchronously. There is one barrier per tile.
//
// Weights are read once for ROWS rows. Small batches use small tiles, so that a decode batch does not multiply zeros.
//
// In tiles of either size, a product is added up sixteen inputs at a time, from first to last, by the same instruction.
// The result of a row therefore does not depend on the number of rows or on its index among them.
#include "device.cuh"
#include "matmul.cuh"
#include "ptx/mma.cuh"

constexpr int GEMM_OUTPUTS = 64;
constexpr int TILE_INPUTS = 32;
constexpr int GEMM_WARPS = 4;
// Values between the rows of a tile in shared memory, so that the rows of an 8×8 tile are in different banks.
constexpr int GEMM_PAD = 8;
// Distance between these rows.
constexpr int GEMM_STRIDE = TILE_INPUTS + GEMM_PAD;
// Number of chunks of eight inputs per row of a tile.
constexpr int TILE_CHUNKS = TILE_INPUTS / 8;

// Starts the copy of a tile of `ROWS` rows of a matrix with `count` rows. What is behind its last row or input becomes zeros.
template <typename T, int ROWS>
SKEP_DEVICE void begin_tile(const void* matrix, uint32_t count, uint32_t inputs, uint32_t first_row, uint32_t first, T* tile) {
    for (uint32_t i = threadIdx.x; i < ROWS * TILE_CHUNKS; i += GEMM_WARPS * WARP) {
        const uint32_t row = first_row + i / TILE_CHUNKS;
        const uint32_t input = first + i % TILE_CHUNKS * 8;
        const bool there = row < count && input < inputs;
        const uint64_t at = there ? static_cast<uint64_t>(row) * inputs + input : 0;
        copy_async(tile + i / TILE_CHUNKS * GEMM_STRIDE + i % TILE_CHUNKS * 8, static_cast<const T*>(matrix) + at, there);
    }
}

// Grid: (outputs / 64, rows / ROWS), rounded up. Block: GEMM_WARPS warps. Shared: 2 · (ROWS + 64) rows of GEMM_STRIDE.
template <typename T, int ROWS>
SKEP_DEVICE void gemm(const MatmulParams& p) {
    // Number of bands of 16 rows per warp. A warp handles 32 outputs.
    constexpr int BANDS = ROWS / 32;
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t warp = threadIdx.x / WARP;
    const uint32_t first_output = blockIdx.x * GEMM_OUTPUTS;
    const uint32_t first_row = blockIdx.y * ROWS;
    const uint32_t warp_row = warp % 2 * (ROWS / 2);
    const uint32_t warp_output = warp / 2 * 32;
    SKEP_DYNAMIC_SHARED(T, rows);
    T* const weights = rows + 2 * ROWS * GEMM_STRIDE;

    const auto begin = [&](uint32_t first, int stage) {
        begin_tile<T, ROWS>(p.x, p.rows, p.inputs, first_row, first, rows + stage * ROWS * GEMM_STRIDE);
        begin_tile<T, GEMM_OUTPUTS>(p.weights, p.outputs, p.inputs, first_output, first,
                                    weights + stage * GEMM_OUTPUTS * GEMM_STRIDE);
        copy_commit();
    };
    begin(0, 0);
    float sums[BANDS][4][4] = {};
    int stage = 0;
    for (uint32_t first = 0; first < p.inputs; first += TILE_INPUTS) {
        const uint32_t next = first + TILE_INPUTS;
        copy_wait<0>();
        // This tile has arrived, and no thread reads the other one any more.
        __syncthreads();
        if (next < p.inputs) {
            begin(next, stage ^ 1);
        }
        const T* tile_rows = rows + stage * ROWS * GEMM_STRIDE;
        const T* tile_weights = weights + stage * GEMM_OUTPUTS * GEMM_STRIDE;
        SKEP_UNROLL
        for (int step = 0; step < TILE_INPUTS / 16; ++step) {
            uint32_t b[2][4];
            SKEP_UNROLL
            for (int pair = 0; pair < 2; ++pair) {
                const uint32_t output = warp_output + pair * 16 + lane / 16 * 8 + lane % 8;
                load_tiles(b[pair], tile_weights + output * GEMM_STRIDE + step * 16 + lane % 16 / 8 * 8);
            }
            SKEP_UNROLL
            for (int band = 0; band < BANDS; ++band) {
                uint32_t a[4];
                const uint32_t row = warp_row + band * 16 + lane % 16;
                load_tiles(a, tile_rows + row * GEMM_STRIDE + step * 16 + lane / 16 * 8);
                SKEP_UNROLL
                for (int column = 0; column < 4; ++column) {
                    const uint32_t(&of_pair)[4] = b[column / 2];
                    const uint32_t half[2] = {of_pair[column % 2 * 2], of_pair[column % 2 * 2 + 1]};
                    mma_16x8x16<T>(sums[band][column], a, half);
                }
            }
        }
        stage ^= 1;
    }
    SKEP_UNROLL
    for (int band = 0; band < BANDS; ++band) {
        SKEP_UNROLL
        for (int column = 0; column < 4; ++column) {
            SKEP_UNROLL
            for (int i = 0; i < 4; ++i) {
                const uint32_t row = first_row + warp_row + band * 16 + lane / 4 + i / 2 * 8;
                const uint32_t output = first_output + warp_output + column * 8 + lane % 4 * 2 + i % 2;
                if (row < p.rows && output < p.outputs) {
                    store_sum<T>(p, row, output, sums[band][column][i]);
                }
            }
        }
    }
}

#define GEMM(T, ROWS)                                                             \
    SKEP_KERNEL_BOUNDED(gemm_##ROWS##_##T, MatmulParams, GEMM_WARPS * WARP) {     \
        gemm<T, ROWS>(p);                                                         \
    }

GEMM(bf16, 32)
GEMM(bf16, 128)
GEMM(f16, 32)
GEMM(f16, 128)
