// Products of a warpgroup (four warps) on the tensor cores of Hopper, in inline PTX. They run asynchronously: between
// `products_begin` and `products_wait`, the registers of the operands must not be touched.
//
// Let row = 16 · (warp % 4) + lane / 4 and pair = 2 · (lane % 4). For a result of 64 rows, a thread holds
//   d[4j], d[4j + 1]:     (row, 8j + pair), (row, 8j + pair + 1)
//   d[4j + 2], d[4j + 3]: (row + 8, 8j + pair), (row + 8, 8j + pair + 1)
// and the left operand of 64 × 16 values is in registers as for `mma_16x8x16`.
#pragma once

#include "device.cuh"

#if defined(__CUDACC_RTC__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Describes a matrix in shared memory whose rows are 128 bytes (64 values), with the 16-byte chunks of each row swizzled: chunk c
// of row r is at chunk c ^ (r % 8). The matrix starts at a multiple of 1024 bytes. `address` is that of the first value;
// `group_bytes` is the distance to the next 64 values of a row, which matters only if rows run along the result's columns.
SKEP_DEVICE uint64_t swizzled_matrix(uint32_t address, uint32_t group_bytes) {
    constexpr uint64_t SWIZZLE_128 = 1ull << 62;
    constexpr uint64_t EIGHT_ROWS = static_cast<uint64_t>(1024 >> 4) << 32;
    return SWIZZLE_128 | EIGHT_ROWS | static_cast<uint64_t>(group_bytes >> 4) << 16 | (address & 0x3ffff) >> 4;
}

// Orders the thread's earlier accesses to registers and shared memory before the products that follow.
SKEP_DEVICE void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

SKEP_DEVICE void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until all groups of products except the last `PENDING` are done.
template <int PENDING>
SKEP_DEVICE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving accesses to the registers of an operand across this point.
template <int COUNT>
SKEP_DEVICE void keep_in_place(float (&values)[COUNT]) {
    SKEP_UNROLL
    for (int i = 0; i < COUNT; ++i) {
        asm volatile("" : "+f"(values[i])::"memory");
    }
}

template <int COUNT>
SKEP_DEVICE void keep_in_place(uint32_t (&values)[COUNT]) {
    SKEP_UNROLL
    for (int i = 0; i < COUNT; ++i) {
        asm volatile("" : "+r"(values[i])::"memory");
    }
}

// The operands of results in registers, and their names.
#define SKEP_FLOATS_8(d, i)                                                                                      \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define SKEP_FLOATS_32(d, i) \
    SKEP_FLOATS_8(d, i), SKEP_FLOATS_8(d, i + 8), SKEP_FLOATS_8(d, i + 16), SKEP_FLOATS_8(d, i + 24)
#define SKEP_FLOATS_32_NAMES                                  \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SKEP_FLOATS_64_NAMES                                           \
    SKEP_FLOATS_32_NAMES                                               \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// The products of 64 rows and 16 values each, for a type.
template <typename T>
struct Products;

#define SKEP_PRODUCTS(T, TYPE)                                                                                   \
    template <>                                                                                                  \
    struct Products<T> {                                                                                         \
        /* d = a · b (+ d if `adds`): both operands are in shared memory, and their rows run along the sum. */   \
        static SKEP_DEVICE void shared(float (&d)[64], uint64_t a, uint64_t b, int adds) {                       \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; "                                               \
                         "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" SKEP_FLOATS_64_NAMES  \
                         "}, %64, %65, p, 1, 1, 0, 0; }"                                                         \
                         : SKEP_FLOATS_32(d, 0), SKEP_FLOATS_32(d, 32)                                           \
                         : "l"(a), "l"(b), "r"(adds));                                                           \
        }                                                                                                        \
        /* d = a · b + d: a is in registers, and the rows of b in shared memory run along the result's columns. */ \
        static SKEP_DEVICE void registers(float (&d)[64], const uint32_t* a, uint64_t b) {                       \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0; "                                               \
                         "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" SKEP_FLOATS_64_NAMES  \
                         "}, {%64,%65,%66,%67}, %68, p, 1, 1, 1; }"                                              \
                         : SKEP_FLOATS_32(d, 0), SKEP_FLOATS_32(d, 32)                                           \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));                          \
        }                                                                                                        \
        static SKEP_DEVICE void registers(float (&d)[32], const uint32_t* a, uint64_t b) {                       \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; "                                               \
                         "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" SKEP_FLOATS_32_NAMES   \
                         "}, {%32,%33,%34,%35}, %36, p, 1, 1, 1; }"                                              \
                         : SKEP_FLOATS_32(d, 0)                                                                  \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));                          \
        }                                                                                                        \
    };

SKEP_PRODUCTS(bf16, "bf16")
SKEP_PRODUCTS(f16, "f16")

#endif
