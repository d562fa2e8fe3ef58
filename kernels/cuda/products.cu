// Products with quantized weights: y[row, output] = Σ x[row, i] · w[output, i] + bias.
//
// A block handles a few tiles of 16 outputs and `8 · COLUMNS` rows. Its warps take every PRODUCT_WARPS-th tile along the inputs,
// whose bytes they copy to shared memory several tiles ahead, each for itself. Weights are the left operand of tensor-core products,
// so that eight rows cost no more than one, and the bytes of a tile are in the order of that operand (`formats/tiles.cuh`). Quants
// are multiplied without their scales, which are applied to the float32 sums; no weight is rounded. Reading the weights is the
// lower bound on the time.
//
// The warps' sums are added from the first warp to the last. Every size of tiles adds in the same order, so the result of a row
// does not depend on the number of rows or on its index among them.
//
// `products_gated` is for a matrix that holds the outputs of a gate and then as many others. A block handles tiles of both, and
// stores silu(gate) · up.
#include "device.cuh"
#include "formats/tiles.cuh"
#include "matmul.cuh"
#include "ptx/mma.cuh"

constexpr int PRODUCT_WARPS = 8;
// For up to 8, 16 and 32 rows: sets of tiles of outputs of a block, each with its own warps; tiles of a set; and tiles along the
// inputs that a warp has in shared memory, of each tile of outputs. Registers have to suffice for as many blocks.
constexpr int SETS_OF_8 = 1;
constexpr int TILES_OF_8 = 1;
constexpr int STAGES_OF_8 = 3;
constexpr int BLOCKS_OF_8 = 1;
constexpr int SETS_OF_16 = 2;
constexpr int TILES_OF_16 = 1;
constexpr int STAGES_OF_16 = 3;
constexpr int BLOCKS_OF_16 = 1;
constexpr int SETS_OF_32 = 2;
constexpr int TILES_OF_32 = 1;
constexpr int STAGES_OF_32 = 3;
constexpr int BLOCKS_OF_32 = 1;
constexpr int STAGES_OF_GATED = 3;

// The sums of a lane.
struct alignas(16) Sums {
    float values[4];
};

// Adds the sums of all warps, `DISTANCE` apart, from the first to the last.
template <uint32_t DISTANCE>
SKEP_DEVICE Sums total_of(const Sums* first) {
    Sums total = first[0];
    SKEP_UNROLL
    for (int warp = 1; warp < PRODUCT_WARPS; ++warp) {
        const Sums more = first[warp * DISTANCE];
        SKEP_UNROLL
        for (int i = 0; i < 4; ++i) {
            total.values[i] += more.values[i];
        }
    }
    return total;
}

// A one in each half of a word of the left operand, for the sums of the rows.
template <typename T>
SKEP_DEVICE void add_inputs(float (&sums)[4], const uint32_t (&b)[2]) {
    const uint32_t ones[4] = {Halves<T>::ONE, Halves<T>::ONE, Halves<T>::ONE, Halves<T>::ONE};
    mma_16x8x16<T>(sums, ones, b);
}

// Copies the tiles of `TILES` tiles of outputs at one place along the inputs. A lane copies every 32nd vector, and its addresses
// are those of its first one. Tiles behind the last output become zeros.
template <typename Format, int TILES>
SKEP_DEVICE void begin_tiles(uint8_t* to, const uint8_t* from, uint64_t distance, uint32_t tiles) {
    const uint32_t lane = threadIdx.x % WARP;
    SKEP_UNROLL
    for (uint32_t tile = 0; tile < TILES; ++tile) {
        const bool there = tile == 0 || tile < tiles;
        SKEP_UNROLL
        for (uint32_t byte = 0; byte < Format::BYTES; byte += 16 * WARP) {
            if (byte + 16 * lane < Format::BYTES) {
                copy_async(to + tile * Format::BYTES + byte, there ? from + tile * distance + byte : from, there);
            }
        }
    }
}

// Adds the products of 32 inputs: two steps.
template <typename Format, typename T, int TILES, int COLUMNS>
SKEP_DEVICE void multiply(const typename Format::Held (&held)[TILES], const typename Format::Scales (&scales)[TILES], int group,
                          const Vec16 (&x)[COLUMNS], float (&sums)[TILES][COLUMNS][4]) {
    constexpr int RUNS = 2 / Format::STEPS;
    uint32_t a[TILES][2][4];
    Scale of[TILES][RUNS][2];
    SKEP_UNROLL
    for (int tile = 0; tile < TILES; ++tile) {
        Format::template fragments<T>(held[tile], group, a[tile]);
        SKEP_UNROLL
        for (int i = 0; i < 2 * RUNS; ++i) {
            of[tile][i / 2][i % 2] = Format::scale(scales[tile], RUNS * group + i / 2, i % 2);
        }
    }
    SKEP_UNROLL
    for (int column = 0; column < COLUMNS; ++column) {
        const uint32_t(&words)[4] = x[column].words;
        SKEP_UNROLL
        for (int run = 0; run < RUNS; ++run) {
            // The sums of the inputs that share a scale. All sixteen lines of the product are the same.
            float inputs[4] = {};
            SKEP_UNROLL
            for (int step = run * Format::STEPS; Format::OFFSETS && step < (run + 1) * Format::STEPS; ++step) {
                add_inputs<T>(inputs, {words[2 * step], words[2 * step + 1]});
            }
            SKEP_UNROLL
            for (int tile = 0; tile < TILES; ++tile) {
                float part[4] = {};
                SKEP_UNROLL
                for (int step = run * Format::STEPS; step < (run + 1) * Format::STEPS; ++step) {
                    mma_16x8x16<T>(part, a[tile][step], {words[2 * step], words[2 * step + 1]});
                }
                SKEP_UNROLL
                for (int i = 0; i < 4; ++i) {
                    float& sum = sums[tile][column][i];
                    sum = multiply_add(part[i], of[tile][run][i / 2].scale, sum);
                    if (Format::OFFSETS) {
                        sum = multiply_add(inputs[i % 2], of[tile][run][i / 2].offset, sum);
                    }
                }
            }
        }
    }
}

// Grid: (rows / 8 · COLUMNS, tiles of outputs / SETS · TILES), rounded up. Block: PRODUCT_WARPS warps for each set of tiles. Shared:
// for each warp, STAGES tiles of each of its outputs, and at the end its sums.
template <typename Format, typename T, int SETS, int TILES, int COLUMNS, int STAGES, bool GATED>
SKEP_DEVICE void products(const MatmulParams& p) {
    constexpr uint32_t GROUPS = Format::INPUTS / 32;
    // Number of groups whose rows are loaded before they are used. There are no registers for all of many rows, and fewer beside
    // the sums of rows.
    constexpr uint32_t AHEAD = COLUMNS == 1 ? GROUPS : COLUMNS == 4 && Format::OFFSETS ? 1 : 2;
    constexpr uint32_t SLOT = TILES * Format::BYTES;
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t warp = threadIdx.x / WARP % PRODUCT_WARPS;
    const uint32_t set = SETS == 1 ? 0 : threadIdx.x / WARP / PRODUCT_WARPS;
    const uint32_t first_row = blockIdx.x * 8 * COLUMNS;
    const uint32_t first_tile = GATED ? blockIdx.y : (blockIdx.y * SETS + set) * TILES;
    const uint32_t all_tiles = div_up(p.outputs, TILE_OUTPUTS);
    const uint32_t tiles = GATED ? TILES : first_tile < all_tiles ? all_tiles - first_tile : 0;
    const uint32_t along = div_up(p.inputs, Format::INPUTS);
    const uint64_t line = static_cast<uint64_t>(along) * Format::BYTES;
    const uint64_t distance = GATED ? p.outputs / 2 / TILE_OUTPUTS * line : line;
    const uint32_t count = warp < along && tiles > 0 ? div_up(along - warp, static_cast<uint32_t>(PRODUCT_WARPS)) : 0;

    SKEP_DYNAMIC_SHARED(uint8_t, shared);
    uint8_t* const ring = shared + threadIdx.x / WARP * (STAGES * SLOT);
    const uint8_t* from = static_cast<const uint8_t*>(p.weights) + first_tile * line + warp * Format::BYTES + 16 * lane;
    uint32_t begun = 0, filled = 0, used = 0;
    const auto begin = [&]() {
        if (begun < count) {
            begin_tiles<Format, TILES>(ring + filled + 16 * lane, from, distance, tiles);
        }
        copy_commit();
        ++begun;
        from += PRODUCT_WARPS * Format::BYTES;
        filled = filled == (STAGES - 1) * SLOT ? 0 : filled + SLOT;
    };
    SKEP_UNROLL
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        begin();
    }
    // Weights are on their way while the kernel before still runs.
    await_previous();
    // Rows behind the last one are the last one again; nothing is stored for them.
    uint32_t rows[COLUMNS];
    SKEP_UNROLL
    for (int column = 0; column < COLUMNS; ++column) {
        const uint32_t row = first_row + 8 * column + lane / 4;
        rows[column] = (row < p.rows ? row : p.rows - 1) * p.inputs;
    }
    // The last 32 inputs stand for those behind them, whose weights are zeros.
    const auto load = [&](uint32_t input, Vec16(&x)[COLUMNS]) {
        const uint32_t at = input < p.inputs ? input : p.inputs - 32;
        SKEP_UNROLL
        for (int column = 0; column < COLUMNS; ++column) {
            x[column] = load_inputs<Format>(static_cast<const T*>(p.x) + (rows[column] + at), lane % 4);
        }
    };
    uint32_t input = warp * Format::INPUTS;
    Vec16 x[AHEAD][COLUMNS];
    SKEP_UNROLL
    for (uint32_t group = 0; group < AHEAD; ++group) {
        load(input + 32 * group, x[group]);
    }
    float sums[TILES][COLUMNS][4] = {};
    for (uint32_t number = 0; number < count; ++number) {
        copy_wait<STAGES - 2>();
        // The tiles of all lanes have arrived, and none reads the previous ones any more.
        __syncwarp();
        begin();
        const uint32_t next = input + PRODUCT_WARPS * Format::INPUTS;
        const auto multiply_part = [&](uint32_t part) {
            typename Format::Held held[TILES];
            typename Format::Scales scales[TILES];
            SKEP_UNROLL
            for (int tile = 0; tile < TILES; ++tile) {
                const uint8_t* const at = ring + used + tile * Format::BYTES;
                held[tile] = Format::load(at, part, lane);
                scales[tile] = Format::scales(at, part, lane);
            }
            SKEP_UNROLL
            for (uint32_t group = 0; group < 2; ++group) {
                const uint32_t number = 2 * part + group;
                Vec16(&of)[COLUMNS] = x[AHEAD == GROUPS ? number : group % AHEAD];
                multiply<Format, T, TILES, COLUMNS>(held, scales, group, of, sums);
                const uint32_t after = number + AHEAD;
                load(after < GROUPS ? input + 32 * after : next + 32 * (after - GROUPS), of);
            }
        };
        if (COLUMNS == 1) {
            SKEP_UNROLL
            for (uint32_t part = 0; part < GROUPS / 2; ++part) {
                multiply_part(part);
            }
        } else {
            // Several parts at once would take too many registers.
            SKEP_ROLL
            for (uint32_t part = 0; part < GROUPS / 2; ++part) {
                multiply_part(part);
            }
        }
        used = used == (STAGES - 1) * SLOT ? 0 : used + SLOT;
        input = next;
    }
    // No warp uses its tiles any more, so that sums can take their place.
    __syncthreads();
    Sums* const joined = reinterpret_cast<Sums*>(shared);
    SKEP_UNROLL
    for (int tile = 0; tile < TILES; ++tile) {
        SKEP_UNROLL
        for (int column = 0; column < COLUMNS; ++column) {
            const float(&of)[4] = sums[tile][column];
            joined[(((warp * SETS + set) * TILES + tile) * COLUMNS + column) * WARP + lane] = {{of[0], of[1], of[2], of[3]}};
        }
    }
    __syncthreads();
    // A thread adds the sums of a lane of all warps, for a gate as well as its other output.
    constexpr uint32_t LANES = SETS * TILES * COLUMNS * WARP;
    constexpr uint32_t ITEMS = GATED ? LANES / 2 : LANES;
    for (uint32_t item = threadIdx.x; item < ITEMS; item += SETS * PRODUCT_WARPS * WARP) {
        const Sums total = total_of<LANES>(joined + item);
        const Sums other = GATED ? total_of<LANES>(joined + ITEMS + item) : total;
        const uint32_t tile = (GATED ? blockIdx.y : blockIdx.y * SETS * TILES) + item / (COLUMNS * WARP);
        SKEP_UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t row = first_row + item / WARP % COLUMNS * 8 + item % 4 * 2 + i % 2;
            const uint32_t output = tile * TILE_OUTPUTS + item % WARP / 4 + i / 2 * 8;
            if (row >= p.rows || output >= (GATED ? p.outputs / 2 : p.outputs)) {
                continue;
            }
            if (GATED) {
                store_gated<T>(p, row, output, total.values[i], other.values[i]);
            } else {
                store_sum<T>(p, row, output, total.values[i]);
            }
        }
    }
}

#define PRODUCTS_OF(name, Format, T, ROWS)                                                                            \
    SKEP_KERNEL_AHEAD_BOUNDED(products_##name##_##ROWS##_##T, MatmulParams, SETS_OF_##ROWS * PRODUCT_WARPS * WARP,          \
                        BLOCKS_OF_##ROWS) {                                                                           \
        products<Format, T, SETS_OF_##ROWS, TILES_OF_##ROWS, ROWS / 8, STAGES_OF_##ROWS, false>(p);                   \
    }
#define PRODUCTS_GATED_OF(name, Format, T, ROWS)                                                                      \
    SKEP_KERNEL_AHEAD_BOUNDED(products_gated_##name##_##ROWS##_##T, MatmulParams, PRODUCT_WARPS * WARP, 1) {                \
        products<Format, T, 1, 2, ROWS / 8, STAGES_OF_GATED, true>(p);                                                \
    }
#define PRODUCTS_FOR(name, Format, T)        \
    PRODUCTS_OF(name, Format, T, 8)          \
    PRODUCTS_OF(name, Format, T, 16)         \
    PRODUCTS_OF(name, Format, T, 32)         \
    PRODUCTS_GATED_OF(name, Format, T, 8)    \
    PRODUCTS_GATED_OF(name, Format, T, 32)
#define PRODUCTS(name, Format)         \
    PRODUCTS_FOR(name, Format, bf16)   \
    PRODUCTS_FOR(name, Format, f16)

PRODUCTS(q4_0, Q4_0)
PRODUCTS(q4_1, Q4_1)
PRODUCTS(int4, Int4)
PRODUCTS(q4_k, Q4_K)
PRODUCTS(q6_k, Q6_K)
PRODUCTS(q8_0, Q8_0)
PRODUCTS(f8, F8)
