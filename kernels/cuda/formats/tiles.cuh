// The quantized formats of weights on devices. A matrix is divided into tiles of 16 outputs and `INPUTS` inputs, which follow
// each other along the inputs, and then along the outputs. Inputs and outputs that fill up the last tiles have a scale of 0.
//
// The quants of a tile have the order in which tensor cores take them. Lane 4 · r + q of a warp multiplies outputs r and r + 8,
// and its loads of 16 bytes hold nothing else. Of 32 consecutive inputs, which are two steps of `mma_16x8x16`, it takes the
// eight from 8 · q on; in a format whose scales change every 16 inputs, it takes the four from 4 · q on of each step. A step sums
// over its inputs, so their order does not matter as long as the rows have the same one.
//
// Quants become 16-bit floats without rounding. Scales are applied to the float32 sums of the inputs that share them.
#pragma once

#include "device.cuh"
#include "ptx/pairs.cuh"

constexpr uint32_t TILE_OUTPUTS = 16;
// The size of the quants of a tile that lanes load as two vectors, one per output.
constexpr uint32_t TILE_QUANTS = 1024;
// Number of inputs of which a lane holds everything in registers at a time.
constexpr uint32_t PART_INPUTS = 64;

// weight = quant · scale + offset.
struct Scale {
    float scale;
    float offset;
};

// One and minus zero in both halves of a word, and the integer to which a float's lowest bits add small integers.
template <typename T>
struct Halves;

template <>
struct Halves<bf16> {
    static constexpr uint32_t ONE = 0x3f803f80;
    static constexpr uint32_t INTEGER = 0x43004300; // 128
};

template <>
struct Halves<f16> {
    static constexpr uint32_t ONE = 0x3c003c00;
    static constexpr uint32_t INTEGER = 0x64006400; // 1024
};

constexpr uint32_t BOTH_SIGNS = 0x80008000;

// Returns a constant that the compiler keeps in a register, because it does not know that blocks have one line of threads. It would
// otherwise load the constant again for each instruction that has another one.
SKEP_DEVICE uint32_t in_register(uint32_t constant) {
    return constant + (blockDim.y - 1);
}

// Converts two integers below 128, one per half of the word, to floats, less `LESS`.
template <typename T, uint32_t LESS>
SKEP_DEVICE uint32_t integers(uint32_t pair) {
    return fused_pairs<T>(pair | Halves<T>::INTEGER, Halves<T>::ONE, (Halves<T>::INTEGER | BOTH_SIGNS) + LESS * 0x10001);
}

// Converts the signed bytes in the lower half of each half of the word to floats.
template <typename T>
SKEP_DEVICE uint32_t signed_bytes(uint32_t pair);

template <>
SKEP_DEVICE uint32_t signed_bytes<bf16>(uint32_t pair) {
    // (128 + the lower seven bits) - (128 or 256): the sign bit is the lowest bit of the exponent.
    return fused_pairs<bf16>((pair & 0x007f007f) | Halves<bf16>::INTEGER, Halves<bf16>::ONE,
                             (pair & 0x00800080) | Halves<bf16>::INTEGER | BOTH_SIGNS);
}

template <>
SKEP_DEVICE uint32_t signed_bytes<f16>(uint32_t pair) {
    // (1024 + 128 + the integer) - (1024 + 128).
    const uint32_t middle = Halves<f16>::INTEGER | 0x00800080;
    return fused_pairs<f16>((pair & 0x00ff00ff) ^ middle, Halves<f16>::ONE, middle | BOTH_SIGNS);
}

// Converts two FP8 values like `signed_bytes`. NaN becomes 480.
template <typename T>
SKEP_DEVICE uint32_t small_floats(uint32_t pair);

template <>
SKEP_DEVICE uint32_t small_floats<bf16>(uint32_t pair) {
    const uint32_t bits = (pair & 0x007f007f) << 4 | (pair & 0x00800080) << 8;
    return fused_pairs<bf16>(bits, 0x7b807b80, BOTH_SIGNS); // 2^120, the difference of the exponents
}

template <>
SKEP_DEVICE uint32_t small_floats<f16>(uint32_t pair) {
    const uint32_t bits = (pair & 0x007f007f) << 7 | (pair & 0x00800080) << 8;
    return fused_pairs<f16>(bits, 0x5c005c00, BOTH_SIGNS); // 2^8
}

// Returns one of the two 16-bit floats of a word.
SKEP_DEVICE float half_at(uint32_t word, uint32_t index) {
    return to_float(f16{static_cast<uint16_t>(word >> 16 * index)});
}

SKEP_DEVICE uint32_t byte_at(uint32_t word, uint32_t index) {
    return word >> 8 * index & 0xff;
}

SKEP_DEVICE Vec16 vector_at(const uint8_t* at) {
    return *reinterpret_cast<const Vec16*>(at);
}

SKEP_DEVICE Vec8 half_vector_at(const uint8_t* at) {
    return *reinterpret_cast<const Vec8*>(at);
}

SKEP_DEVICE uint32_t word_at(const uint8_t* at) {
    return *reinterpret_cast<const uint32_t*>(at);
}

SKEP_DEVICE uint32_t half_word_at(const uint8_t* at) {
    return *reinterpret_cast<const uint16_t*>(at);
}

// The quants of a lane's two outputs, for 64 inputs.
template <typename Vector>
struct Quants {
    Vector outputs[2];
};
using Bytes = Quants<Vec16>;
using Nibbles = Quants<Vec8>;

// Two words of a lane's two outputs.
struct Words {
    uint32_t outputs[2];
};

SKEP_DEVICE Bytes load_bytes(const uint8_t* tile, uint32_t lane) {
    return {{vector_at(tile + 16 * lane), vector_at(tile + TILE_QUANTS / 2 + 16 * lane)}};
}

SKEP_DEVICE Nibbles load_nibbles(const uint8_t* tile, uint32_t part, uint32_t lane) {
    const uint8_t* at = tile + 16 * lane + 8 * part;
    return {{half_vector_at(at), half_vector_at(at + TILE_QUANTS / 2)}};
}

// Loads the word of a part from both halves of a lane's vector, of which there is one for each pair of outputs.
SKEP_DEVICE Words load_words(const uint8_t* vectors, uint32_t part, uint32_t lane) {
    const uint8_t* at = vectors + lane / 4 * 16 + 4 * part;
    return {{word_at(at), word_at(at + 8)}};
}

// Makes the left operands of two steps. A word holds eight nibbles for 32 inputs: bits 4 · p of both of its halves are inputs 2 · p
// and 2 · p + 1.
template <typename T, uint32_t LESS>
SKEP_DEVICE void fragments_of(const Nibbles& held, int group, uint32_t (&a)[2][4]) {
    const uint32_t mask = in_register(0x000f000f);
    SKEP_UNROLL
    for (int pair = 0; pair < 4; ++pair) {
        SKEP_UNROLL
        for (int half = 0; half < 2; ++half) {
            const uint32_t word = held.outputs[half].words[group];
            a[pair / 2][pair % 2 * 2 + half] = integers<T, LESS>(word >> 4 * pair & mask);
        }
    }
}

// A format loads what a lane needs of a part of a tile, which is 64 inputs: the quants, from which `fragments` makes the left
// operands of the two steps of 32 inputs, and the scales, of which `scale` is that of the output `half` · 8 further, for the
// `run`-th inputs of the part that share one.

// Quants of four bits, of which `LESS` stands for a zero. A scale is shared by 32 inputs.
template <uint32_t LESS>
struct NibbleTiles {
    // Number of steps that share a scale.
    static constexpr int STEPS = 2;
    using Held = Nibbles;

    SKEP_DEVICE static Held load(const uint8_t* tile, uint32_t part, uint32_t lane) {
        return load_nibbles(tile, part, lane);
    }

    template <typename T>
    SKEP_DEVICE static void fragments(const Held& held, int group, uint32_t (&a)[2][4]) {
        fragments_of<T, LESS>(held, group, a);
    }
};

// weight = (nibble - 8) · scale.
struct Q4_0 : NibbleTiles<8> {
    static constexpr uint32_t INPUTS = 128;
    static constexpr uint32_t BYTES = 1152;
    static constexpr bool OFFSETS = false;
    using Scales = Words;

    SKEP_DEVICE static Scales scales(const uint8_t* tile, uint32_t part, uint32_t lane) {
        return load_words(tile + TILE_QUANTS, part, lane);
    }

    SKEP_DEVICE static Scale scale(const Scales& of, int run, int half) {
        return {half_at(of.outputs[half], run), 0.0f};
    }
};

// weight = nibble · scale + least.
struct Q4_1 : NibbleTiles<0> {
    static constexpr uint32_t INPUTS = 128;
    static constexpr uint32_t BYTES = 1280;
    static constexpr bool OFFSETS = true;
    struct Scales {
        Words scales;
        Words offsets;
    };

    SKEP_DEVICE static Scales scales(const uint8_t* tile, uint32_t part, uint32_t lane) {
        return {load_words(tile + TILE_QUANTS, part, lane), load_words(tile + TILE_QUANTS + 128, part, lane)};
    }

    SKEP_DEVICE static Scale scale(const Scales& of, int run, int half) {
        return {half_at(of.scales.outputs[half], run), half_at(of.offsets.outputs[half], run)};
    }
};

// weight = (nibble - 8 - middle) · scale, where the middle is the zero point less 8.
struct Int4 : NibbleTiles<8> {
    static constexpr uint32_t INPUTS = 128;
    static constexpr uint32_t BYTES = 1280;
    static constexpr bool OFFSETS = true;
    using Scales = Q4_1::Scales;

    SKEP_DEVICE static Scales scales(const uint8_t* tile, uint32_t part, uint32_t lane) {
        return Q4_1::scales(tile, part, lane);
    }

    SKEP_DEVICE static Scale scale(const Scales& of, int run, int half) {
        const Scale both = Q4_1::scale(of, run, half);
        return {both.scale, -both.offset * both.scale};
    }
};

// Half of a block of GGUF's Q4_K: four groups of 32 inputs, each with a scale and a minimum of six bits.
// weight = nibble · (step · scale) - drop · minimum.
struct Q4_K : NibbleTiles<0> {
    static constexpr uint32_t INPUTS = 128;
    static constexpr uint32_t BYTES = 1216;
    static constexpr bool OFFSETS = true;
    // Each of the two outputs has two scales, two minima, and the step and the drop.
    struct Scales {
        uint32_t scales[2];
        uint32_t minima[2];
        Vec8 steps;
    };

    SKEP_DEVICE static Scales scales(const uint8_t* tile, uint32_t part, uint32_t lane) {
        const uint8_t* packed = tile + TILE_QUANTS + lane / 4 * 16 + 2 * part;
        return {{half_word_at(packed), half_word_at(packed + 8)},
                {half_word_at(packed + 4), half_word_at(packed + 12)},
                half_vector_at(tile + TILE_QUANTS + 128 + lane / 4 * 8)};
    }

    SKEP_DEVICE static Scale scale(const Scales& of, int run, int half) {
        const auto times = [&](int index, uint32_t packed) {
            return half_at(of.steps.words[half], index) * static_cast<float>(byte_at(packed, run));
        };
        return {times(0, of.scales[half]), -times(1, of.minima[half])};
    }
};

// Half of a block of GGUF's Q6_K: eight groups of 16 inputs, each with a scale of eight bits. The upper two bits of the quants are
// behind their lower four: bits 2 · p of both halves of a word are the p-th pair of 64 inputs.
// weight = (quant - 32) · (step · scale).
struct Q6_K {
    static constexpr uint32_t INPUTS = 128;
    static constexpr uint32_t BYTES = 1696;
    static constexpr int STEPS = 1;
    static constexpr bool OFFSETS = false;
    static constexpr uint32_t UPPER = TILE_QUANTS;
    static constexpr uint32_t SCALES = UPPER + 512;
    struct Held {
        Nibbles lower;
        Words upper;
    };
    struct Scales {
        Words scales;
        // The steps of the two outputs.
        uint32_t steps;
    };

    SKEP_DEVICE static Held load(const uint8_t* tile, uint32_t part, uint32_t lane) {
        return {load_nibbles(tile, part, lane), load_words(tile + UPPER, part, 4 * lane)};
    }

    SKEP_DEVICE static Scales scales(const uint8_t* tile, uint32_t part, uint32_t lane) {
        return {load_words(tile + SCALES, part, lane), word_at(tile + SCALES + 128 + lane / 4 * 4)};
    }

    template <typename T>
    SKEP_DEVICE static void fragments(const Held& held, int group, uint32_t (&a)[2][4]) {
        SKEP_UNROLL
        for (int pair = 0; pair < 4; ++pair) {
            SKEP_UNROLL
            for (int half = 0; half < 2; ++half) {
                const uint32_t lower = held.lower.outputs[half].words[group] >> 4 * pair & 0x000f000f;
                const uint32_t word = held.upper.outputs[half];
                const int at = 2 * (group * 4 + pair);
                const uint32_t upper = (at < 4 ? word << (4 - at) : word >> (at - 4)) & 0x00300030;
                a[pair / 2][pair % 2 * 2 + half] = integers<T, 32>(lower | upper);
            }
        }
    }

    SKEP_DEVICE static Scale scale(const Scales& of, int run, int half) {
        const int8_t scale = static_cast<int8_t>(byte_at(of.scales.outputs[half], run));
        return {half_at(of.steps, half) * static_cast<float>(scale), 0.0f};
    }
};

// Quants of eight bits. A lane's vector holds, for each of four steps, a word with its four inputs: first the pair in bytes 0 and
// 2, then that in bytes 1 and 3. `convert` makes two floats of the bytes in the lower half of each half of a word.
struct ByteTiles {
    static constexpr int STEPS = 2;
    static constexpr bool OFFSETS = false;
    using Held = Bytes;

    SKEP_DEVICE static Held load(const uint8_t* tile, uint32_t, uint32_t lane) {
        return load_bytes(tile, lane);
    }

    template <typename Convert>
    SKEP_DEVICE static void fragments_of(const Held& held, int group, uint32_t (&a)[2][4], Convert convert) {
        SKEP_UNROLL
        for (int i = 0; i < 8; ++i) {
            a[i / 4][i % 4] = convert(held.outputs[i % 2].words[2 * group + i / 4] >> i % 4 / 2 * 8);
        }
    }
};

// weight = byte · scale.
struct Q8_0 : ByteTiles {
    static constexpr uint32_t INPUTS = 64;
    static constexpr uint32_t BYTES = 1088;
    // The two scales of each of the two outputs.
    using Scales = Vec8;

    SKEP_DEVICE static Scales scales(const uint8_t* tile, uint32_t, uint32_t lane) {
        return half_vector_at(tile + TILE_QUANTS + lane / 4 * 8);
    }

    template <typename T>
    SKEP_DEVICE static void fragments(const Held& held, int group, uint32_t (&a)[2][4]) {
        fragments_of(held, group, a, signed_bytes<T>);
    }

    SKEP_DEVICE static Scale scale(const Scales& of, int run, int half) {
        return {half_at(of.words[half], run), 0.0f};
    }
};

// FP8 in the order of `Q8_0`, with float32 scales. Scales of inputs among which there is a NaN are NaN.
struct F8 : ByteTiles {
    static constexpr uint32_t INPUTS = 64;
    static constexpr uint32_t BYTES = 1152;
    using Scales = Vec16;

    SKEP_DEVICE static Scales scales(const uint8_t* tile, uint32_t, uint32_t lane) {
        return vector_at(tile + TILE_QUANTS + lane / 4 * 16);
    }

    template <typename T>
    SKEP_DEVICE static void fragments(const Held& held, int group, uint32_t (&a)[2][4]) {
        fragments_of(held, group, a, small_floats<T>);
    }

    SKEP_DEVICE static Scale scale(const Scales& of, int run, int half) {
        return {bits_float(of.words[2 * half + run]), 0.0f};
    }
};

// Makes a lane's eight weights of an output for 32 inputs, in the format of the activations: those of two steps, four each.
template <typename Format, typename T>
SKEP_DEVICE Vec16 weights_of(const typename Format::Held& held, const typename Format::Scales& scales, int group, bool second) {
    uint32_t a[2][4];
    Format::template fragments<T>(held, group, a);
    Vec16 made;
    SKEP_UNROLL
    for (int step = 0; step < 2; ++step) {
        const int run = Format::STEPS == 2 ? group : 2 * group + step;
        const Scale both[2] = {Format::scale(scales, run, 0), Format::scale(scales, run, 1)};
        const Scale of = second ? both[1] : both[0];
        SKEP_UNROLL
        for (int pair = 0; pair < 2; ++pair) {
            float low, high;
            unpack<T>(second ? a[step][2 * pair + 1] : a[step][2 * pair], low, high);
            made.words[2 * step + pair] =
                pack<T>(add_rounded(low * of.scale, of.offset), add_rounded(high * of.scale, of.offset));
        }
    }
    return made;
}

// Eight 16-bit values of 32 consecutive inputs that a lane takes, in its order. `at` is the first of the 32.
template <typename Format>
SKEP_DEVICE Vec16 load_inputs(const void* at, uint32_t quad) {
    if (Format::STEPS == 2) {
        return static_cast<const Vec16*>(at)[quad];
    }
    const Vec8* halves = static_cast<const Vec8*>(at);
    const Vec8 first = halves[quad], second = halves[quad + 4];
    return {{first.words[0], first.words[1], second.words[0], second.words[1]}};
}

template <typename Format>
SKEP_DEVICE void store_inputs(void* at, uint32_t quad, const Vec16& values) {
    if (Format::STEPS == 2) {
        static_cast<Vec16*>(at)[quad] = values;
        return;
    }
    Vec8* halves = static_cast<Vec8*>(at);
    halves[quad] = {{values.words[0], values.words[1]}};
    halves[quad + 4] = {{values.words[2], values.words[3]}};
}
