// The residual sum and its norm, in one pass over a row:
//
//   residual += x;  out = residual / sqrt(mean(residual²) + epsilon) · weight
//
// It reads two rows and writes two; the sum stays in registers in between. One block handles a row; widths are multiples of
// eight. The residual is rounded to its format before it is squared, so that the next layer squares the same values.
#include "device.cuh"

struct RmsNormParams {
    const Vec16* x;      // [rows, width]; null: nothing is added
    Vec16* residual;     // [rows, width], read and written
    const Vec16* weight; // [width]
    Vec16* out;          // [rows, width]
    uint32_t width;
    float epsilon;
};

// Number of chunks of eight values that each thread holds.
constexpr int CHUNKS = 4;

template <typename T>
SKEP_DEVICE void rms_norm(const RmsNormParams& p) {
    const uint32_t chunks = p.width / 8;
    const uint64_t row = static_cast<uint64_t>(blockIdx.x) * chunks;
    float held[CHUNKS][8];
    float squares = 0.0f;
    for (int turn = 0; turn < CHUNKS; ++turn) {
        const uint32_t chunk = threadIdx.x + turn * blockDim.x;
        if (chunk >= chunks) {
            break;
        }
        Vec16 sum = p.residual[row + chunk];
        if (p.x != nullptr) {
            const Vec16 x = p.x[row + chunk];
            for (int word = 0; word < 4; ++word) {
                float a, b, c, d;
                unpack<T>(sum.words[word], a, b);
                unpack<T>(x.words[word], c, d);
                sum.words[word] = pack<T>(a + c, b + d);
            }
            p.residual[row + chunk] = sum;
        }
        for (int word = 0; word < 4; ++word) {
            float* pair = &held[turn][2 * word];
            unpack<T>(sum.words[word], pair[0], pair[1]);
            squares += pair[0] * pair[0] + pair[1] * pair[1];
        }
    }
    const float scale = rsqrtf(block_sum(squares) / static_cast<float>(p.width) + p.epsilon);
    for (int turn = 0; turn < CHUNKS; ++turn) {
        const uint32_t chunk = threadIdx.x + turn * blockDim.x;
        if (chunk >= chunks) {
            break;
        }
        const Vec16 weight = p.weight[chunk];
        Vec16 out;
        for (int word = 0; word < 4; ++word) {
            float a, b;
            unpack<T>(weight.words[word], a, b);
            const float* pair = &held[turn][2 * word];
            out.words[word] = pack<T>(pair[0] * scale * a, pair[1] * scale * b);
        }
        p.out[row + chunk] = out;
    }
}

SKEP_KERNEL(rms_norm_bf16, RmsNormParams) {
    rms_norm<bf16>(p);
}

SKEP_KERNEL(rms_norm_f16, RmsNormParams) {
    rms_norm<f16>(p);
}
