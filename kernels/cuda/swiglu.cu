// SwiGLU: silu(gate) · up, where a row holds its gate values and then its up values:
//
//   out[row, i] = gate · up / (1 + exp(-gate))
//
// It reads two rows of `width` values and writes one. A thread handles eight values; widths are multiples of eight.
#include "device.cuh"

struct SwigluParams {
    const Vec16* gate_up; // [rows, 2 · width]
    Vec16* out;           // [rows, width]
    uint32_t rows;
    uint32_t width;
};

template <typename T>
SKEP_DEVICE void swiglu(const SwigluParams& p) {
    const uint32_t chunks = p.width / 8;
    const uint64_t index = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (index >= static_cast<uint64_t>(p.rows) * chunks) {
        return;
    }
    const uint64_t row = index / chunks;
    const uint64_t chunk = index % chunks;
    const Vec16 gate = p.gate_up[row * 2 * chunks + chunk];
    const Vec16 up = p.gate_up[row * 2 * chunks + chunks + chunk];
    Vec16 out;
    for (int word = 0; word < 4; ++word) {
        float a, b, c, d;
        unpack<T>(gate.words[word], a, b);
        unpack<T>(up.words[word], c, d);
        out.words[word] = pack<T>(gated(a, c), gated(b, d));
    }
    p.out[index] = out;
}

SKEP_KERNEL(swiglu_bf16, SwigluParams) {
    swiglu<bf16>(p);
}

SKEP_KERNEL(swiglu_f16, SwigluParams) {
    swiglu<f16>(p);
}
