// Tensor-core products of a warp, and the loads that feed them, in inline PTX. On the CPU, the same functions exchange the
// values of the lanes.
#pragma once

#include "device.cuh"

// Computes d += a · b for a 16×16 and a 16×8 tile. With row = lane / 4 and pair = 2 · (lane % 4), a lane holds:
//   a: (row, pair), (row + 8, pair), (row, pair + 8), (row + 8, pair + 8), two columns per word
//   b: (pair, row), (pair + 8, row), two rows per word: its column is lane / 4
//   d: (row, pair), (row, pair + 1), (row + 8, pair), (row + 8, pair + 1)
template <typename T>
SKEP_DEVICE void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

#if defined(__CUDACC_RTC__)

template <>
SKEP_DEVICE void mma_16x8x16<bf16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
SKEP_DEVICE void mma_16x8x16<f16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

SKEP_DEVICE uint32_t shared_address(const void* at) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// Loads four 8×8 tiles of 16-bit values from shared memory. Lane 8 · t + r passes the address of row r of tile t (16 bytes,
// aligned). Word t of every lane receives its part of tile t: row lane / 4, columns 2 · (lane % 4) and the next.
SKEP_DEVICE void load_tiles(uint32_t (&words)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(row)));
}

// Does the same as `load_tiles`, with each tile transposed.
SKEP_DEVICE void load_tiles_transposed(uint32_t (&words)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(row)));
}

// Starts an asynchronous copy of 16 bytes to shared memory. If `there` is false, the destination becomes zeros and `from` is
// not read.
SKEP_DEVICE void copy_async(void* to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(there ? 16 : 0));
}

// Closes a group: all copies that were started since the last call.
SKEP_DEVICE void copy_commit() {
    asm volatile("cp.async.commit_group;");
}

// Waits until this thread's copies in all groups except the last `PENDING` have arrived.
template <int PENDING>
SKEP_DEVICE void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING));
}

#else

namespace skep_host {

template <typename T>
float half_of(uint64_t word, bool upper) {
    return to_float(T{static_cast<uint16_t>(upper ? word >> 16 : word)});
}

} // namespace skep_host

template <typename T>
inline void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    // Collects the rows of a and the columns of b from all lanes.
    const uint64_t low = a[0] | static_cast<uint64_t>(a[1]) << 32;
    const uint64_t high = a[2] | static_cast<uint64_t>(a[3]) << 32;
    const uint64_t both = b[0] | static_cast<uint64_t>(b[1]) << 32;
    uint64_t lows[32], highs[32], boths[32];
    std::memcpy(lows, skep_host::exchange(ALL_LANES, low), sizeof(lows));
    std::memcpy(highs, skep_host::exchange(ALL_LANES, high), sizeof(highs));
    std::memcpy(boths, skep_host::exchange(ALL_LANES, both), sizeof(boths));
    const uint32_t lane = skep_host::lane();
    for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t row = lane / 4;
        const uint32_t column = 2 * (lane % 4) + i % 2;
        float sum = d[i];
        for (uint32_t k = 0; k < 16; ++k) {
            // The lanes that hold (row, k) of a and (k, column) of b.
            const uint64_t pair = (k < 8 ? lows : highs)[4 * row + k % 8 / 2] >> (i < 2 ? 0 : 32);
            const uint64_t other = boths[4 * column + k % 8 / 2] >> (k < 8 ? 0 : 32);
            sum += skep_host::half_of<T>(pair, k % 2 == 1) * skep_host::half_of<T>(other, k % 2 == 1);
        }
        d[i] = sum;
    }
}

inline void load_tiles(uint32_t (&words)[4], const void* row) {
    skep_host::require_aligned(row, 16);
    uint64_t rows[32];
    std::memcpy(rows, skep_host::exchange(ALL_LANES, reinterpret_cast<uint64_t>(row)), sizeof(rows));
    const uint32_t lane = skep_host::lane();
    for (uint32_t tile = 0; tile < 4; ++tile) {
        const char* from = reinterpret_cast<const char*>(rows[8 * tile + lane / 4]);
        std::memcpy(&words[tile], from + 4 * (lane % 4), 4);
    }
}

inline void load_tiles_transposed(uint32_t (&words)[4], const void* row) {
    skep_host::require_aligned(row, 16);
    uint64_t rows[32];
    std::memcpy(rows, skep_host::exchange(ALL_LANES, reinterpret_cast<uint64_t>(row)), sizeof(rows));
    const uint32_t lane = skep_host::lane();
    for (uint32_t tile = 0; tile < 4; ++tile) {
        uint16_t values[2];
        for (uint32_t i = 0; i < 2; ++i) {
            const char* from = reinterpret_cast<const char*>(rows[8 * tile + 2 * (lane % 4) + i]);
            std::memcpy(&values[i], from + 2 * (lane / 4), 2);
        }
        words[tile] = values[0] | static_cast<uint32_t>(values[1]) << 16;
    }
}

// Copies either at once or only when the copy is waited for, as the launch specifies.
inline void copy_async(void* to, const void* from, bool there) {
    skep_host::begin_copy({to, from, there});
}

inline void copy_commit() {
    skep_host::commit_copies();
}

template <int PENDING>
inline void copy_wait() {
    skep_host::wait_for_copies(PENDING);
}

#endif
