// The header of every kernel: a device language that works with both compilers.
//
// NVRTC compiles kernels for a device. A C++ compiler compiles the same sources for the CPU, where `host/block.h` runs the
// threads of a block as fibers; there is no other difference between the two.
#pragma once

#if defined(__CUDACC_RTC__)
#define SKEP_DEVICE __device__ __forceinline__
// A kernel takes one plain struct by value. It starts as soon as all blocks of the kernel before it in the queue have started, and
// waits there until that one has ended, so that launches cost little (programmatic dependent launch, on architectures that have
// it). Everything before the wait must leave memory that other kernels write alone.
#define SKEP_KERNEL_ENTRY(name, Params, BOUNDS, START)                              \
    SKEP_DEVICE void name##_body(const Params& p);                                  \
    extern "C" __global__ void BOUNDS name(const __grid_constant__ Params p) {      \
        START;                                                                      \
        name##_body(p);                                                             \
    }                                                                               \
    SKEP_DEVICE void name##_body(const Params& p)
#define SKEP_KERNEL(name, Params) SKEP_KERNEL_ENTRY(name, Params, , release_next(); await_previous())
// Kernels with a fixed block size declare it, and perhaps the number of blocks that a multiprocessor has to run at once, so that
// the compiler allocates registers accordingly.
#define SKEP_KERNEL_BOUNDED(name, Params, ...) \
    SKEP_KERNEL_ENTRY(name, Params, __launch_bounds__(__VA_ARGS__), release_next(); await_previous())
// A kernel that calls `await_previous` itself, in all its threads, after work that needs no other kernel's results.
#define SKEP_KERNEL_AHEAD(name, Params) SKEP_KERNEL_ENTRY(name, Params, , release_next())
#define SKEP_KERNEL_AHEAD_BOUNDED(name, Params, ...) \
    SKEP_KERNEL_ENTRY(name, Params, __launch_bounds__(__VA_ARGS__), release_next())
// A kernel whose blocks wait for blocks of other queues. The next kernel starts only after it, because waiting blocks could take
// the place of those that this one waits for.
#define SKEP_KERNEL_MEETING(name, Params) SKEP_KERNEL_ENTRY(name, Params, , await_previous())
#define SKEP_DYNAMIC_SHARED(Type, name)                          \
    extern __shared__ __align__(16) unsigned char skep_shared[]; \
    Type* const name = reinterpret_cast<Type*>(skep_shared)
// Unrolls the loop that follows. Registers have no index, so an array that a loop indexes is in registers only if the loop is
// unrolled; otherwise it is in local memory.
#define SKEP_UNROLL _Pragma("unroll")
#define SKEP_ROLL _Pragma("unroll 1")
#define INFINITY __int_as_float(0x7f800000)
using uint8_t = unsigned char;
using int8_t = signed char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else
#include "host/block.h"
#endif

#include "numbers.cuh"

constexpr int WARP = 32;
// Number of positions per page of keys and values. A constant, because attention divides by it for each position.
constexpr uint32_t PAGE_POSITIONS = 16;
// Attention processes half as many query heads or keys at a time if heads have more values than this.
constexpr int WIDE_HEAD = 128;
constexpr uint32_t ALL_LANES = 0xffffffffu;

// Waits until the kernel before this one in the queue has ended and its results can be read. A block calls it even if it has
// nothing to do, because the kernel after this one relies on it.
SKEP_DEVICE void await_previous() {
#if defined(__CUDACC_RTC__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the kernel after this one start once all blocks of this one have called it.
SKEP_DEVICE void release_next() {
#if defined(__CUDACC_RTC__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Starts to bring the line of this address into the L2 cache.
SKEP_DEVICE void prefetch_line([[maybe_unused]] const void* at) {
#if defined(__CUDACC_RTC__)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#endif
}

// Divides and rounds up.
template <typename T>
SKEP_DEVICE constexpr T div_up(T value, T by) {
    return (value + by - 1) / by;
}

SKEP_DEVICE float warp_sum(float value) {
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(ALL_LANES, value, distance);
    }
    return value;
}

SKEP_DEVICE float warp_max(float value) {
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, distance));
    }
    return value;
}

// Returns silu(gate) · up.
SKEP_DEVICE float gated(float gate, float up) {
    return gate * up / (1.0f + __expf(-gate));
}

// Returns the sum over all threads of the block in every thread. Blocks must be multiples of a warp. All threads must take
// part, and none may call it again before a barrier.
SKEP_DEVICE float block_sum(float value) {
    __shared__ float of_warps[WARP];
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    value = warp_sum(value);
    if (lane == 0) {
        of_warps[warp] = value;
    }
    __syncthreads();
    const int warps = blockDim.x / WARP;
    return warp_sum(lane < warps ? of_warps[lane] : 0.0f);
}
