// The quantized formats of weights. A row is a sequence of blocks, from which eight consecutive values at a time are
// converted to floats. Layouts are those of GGUF and of packed 4-bit integers in groups of 32. A weight is converted to the
// same float in every kernel and on the CPU.
#pragma once

#include "device.cuh"

// Reads byte by byte, because blocks may start at any even address.
SKEP_DEVICE uint32_t u16_at(const uint8_t* at) {
    return static_cast<uint32_t>(at[0]) | static_cast<uint32_t>(at[1]) << 8;
}

SKEP_DEVICE float f16_at(const uint8_t* at) {
    return to_float(f16{static_cast<uint16_t>(u16_at(at))});
}

// value = (nibble - 8) · scale. The low nibbles are the first half of the block.
struct Q4_0 {
    static constexpr uint32_t VALUES = 32;
    static constexpr uint32_t BYTES = 18;

    SKEP_DEVICE static void eight(const uint8_t* block, uint32_t first, float (&out)[8]) {
        const float scale = f16_at(block);
        const uint8_t* quants = block + 2 + first % 16;
        SKEP_UNROLL
        for (int i = 0; i < 8; ++i) {
            const int quant = first < 16 ? quants[i] & 0xf : quants[i] >> 4;
            out[i] = static_cast<float>(quant - 8) * scale;
        }
    }
};

// value = nibble · scale + least.
struct Q4_1 {
    static constexpr uint32_t VALUES = 32;
    static constexpr uint32_t BYTES = 20;

    SKEP_DEVICE static void eight(const uint8_t* block, uint32_t first, float (&out)[8]) {
        const float scale = f16_at(block);
        const float least = f16_at(block + 2);
        const uint8_t* quants = block + 4 + first % 16;
        SKEP_UNROLL
        for (int i = 0; i < 8; ++i) {
            const int quant = first < 16 ? quants[i] & 0xf : quants[i] >> 4;
            out[i] = add_rounded(static_cast<float>(quant) * scale, least);
        }
    }
};

struct Q8_0 {
    static constexpr uint32_t VALUES = 32;
    static constexpr uint32_t BYTES = 34;

    SKEP_DEVICE static void eight(const uint8_t* block, uint32_t first, float (&out)[8]) {
        const float scale = f16_at(block);
        SKEP_UNROLL
        for (int i = 0; i < 8; ++i) {
            out[i] = static_cast<float>(static_cast<int8_t>(block[2 + first + i])) * scale;
        }
    }
};

// Eight groups of 32 values, each with a scale and a minimum of six bits.
struct Q4_K {
    static constexpr uint32_t VALUES = 256;
    static constexpr uint32_t BYTES = 144;

    SKEP_DEVICE static void eight(const uint8_t* block, uint32_t first, float (&out)[8]) {
        const uint32_t group = first / 32;
        const uint8_t* packed = block + 4;
        uint32_t scale, least;
        if (group < 4) {
            scale = packed[group] & 63;
            least = packed[group + 4] & 63;
        } else {
            scale = (packed[group + 4] & 0xf) | (packed[group - 4] >> 6) << 4;
            least = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4;
        }
        const float step = f16_at(block) * static_cast<float>(scale);
        const float offset = f16_at(block + 2) * static_cast<float>(least);
        // Two groups share 32 bytes: the first group has the low nibbles.
        const uint8_t* quants = block + 16 + group / 2 * 32 + first % 32;
        SKEP_UNROLL
        for (int i = 0; i < 8; ++i) {
            const int quant = group % 2 == 0 ? quants[i] & 0xf : quants[i] >> 4;
            out[i] = add_rounded(static_cast<float>(quant) * step, -offset);
        }
    }
};

// Sixteen groups of 16 values, each with a scale of eight bits. Quants have six bits, and the upper two are stored separately.
struct Q6_K {
    static constexpr uint32_t VALUES = 256;
    static constexpr uint32_t BYTES = 210;

    SKEP_DEVICE static void eight(const uint8_t* block, uint32_t first, float (&out)[8]) {
        const uint32_t half = first / 128;
        const uint32_t quarter = first % 128 / 32;
        const uint32_t at = first % 32;
        const uint8_t* low = block + half * 64 + (quarter % 2) * 32 + at;
        const uint8_t* high = block + 128 + half * 32 + at;
        const int8_t scale = static_cast<int8_t>(block[192 + first / 16]);
        const float step = f16_at(block + 208) * static_cast<float>(scale);
        SKEP_UNROLL
        for (int i = 0; i < 8; ++i) {
            const int nibble = quarter < 2 ? low[i] & 0xf : low[i] >> 4;
            const int quant = nibble | ((high[i] >> 2 * quarter) & 3) << 4;
            out[i] = static_cast<float>(quant - 32) * step;
        }
    }
};

// A word of eight nibbles, lowest first. The scales of a row's groups are stored separately.
struct Int4 {
    static constexpr uint32_t GROUP = 32;

    SKEP_DEVICE static void eight(uint32_t word, float scale, float (&out)[8]) {
        SKEP_UNROLL
        for (int i = 0; i < 8; ++i) {
            out[i] = static_cast<float>(static_cast<int>(word >> 4 * i & 0xf) - 8) * scale;
        }
    }
};
