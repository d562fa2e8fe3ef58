// A block of threads on the CPU. Every thread is a fiber of one operating-system thread.
//
// A fiber runs until it reaches a barrier or an exchange among the lanes of a warp, or until it finishes; then the next one
// runs. The caller chooses the order, so that a missing barrier shows as a result that depends on the order. Threads that
// wait for each other forever are an error, and so is a barrier that only some threads of the block reach, a shuffle or a warp
// barrier that names a lane which has ended, and an access to an address that is not a multiple of the type's alignment.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define SKEP_DEVICE inline
#define __device__
#define __forceinline__ inline
#define __restrict__ __restrict
// All fibers of a block share an operating-system thread, and blocks run one after the other.
#define __shared__ static thread_local
#define SKEP_DYNAMIC_SHARED(Type, name) Type* const name = reinterpret_cast<Type*>(skep_host::dynamic_shared())
#define SKEP_KERNEL(name, Params)                                                   \
    static void name(const Params& p);                                              \
    static const skep_host::Registered name##_registered{                           \
        #name, sizeof(Params), [](const void* p) { name(*static_cast<const Params*>(p)); }}; \
    static void name(const Params& p)
#define SKEP_KERNEL_BOUNDED(name, Params, ...) SKEP_KERNEL(name, Params)
#define SKEP_KERNEL_AHEAD(name, Params) SKEP_KERNEL(name, Params)
#define SKEP_KERNEL_AHEAD_BOUNDED(name, Params, ...) SKEP_KERNEL(name, Params)
#define SKEP_KERNEL_MEETING(name, Params) SKEP_KERNEL(name, Params)
#define SKEP_UNROLL
#define SKEP_ROLL

namespace skep_host {

struct Dim3 {
    uint32_t x, y, z;
};

// The launch configuration, with the layout of `Launch` in `lib.rs`.
struct Launch {
    Dim3 grid;
    Dim3 block;
    uint32_t shared_bytes;
    // The order in which fibers run: 0 by index, 1 in reverse, otherwise shuffled with this seed. With 0, copies to shared memory
    // are made when they are started, otherwise when they are waited for.
    uint32_t order;
};

using Thread = void (*)(const void* params);

// Registers a kernel under its name.
struct Registered {
    Registered(const char* name, size_t params_bytes, Thread thread);
};

struct Where {
    Dim3 thread, block, block_size, grid_size;
};

// Returns the indices of the current thread.
const Where& here();
unsigned char* dynamic_shared();
void block_barrier();
void warp_barrier(uint32_t lanes);
// Ends the launch with an error if an address is not a multiple of `alignment`, for accesses that have no type.
void require_aligned(const void* at, size_t alignment);
// Yields to other fibers and operating-system threads, one of which will write the awaited value.
void give_way();
// An asynchronous copy of sixteen bytes to shared memory. If `there` is false, the destination becomes zeros.
struct Copy {
    void* to;
    const void* from;
    bool there;
};

// A device may perform a copy at any time before it is waited for. Both extremes are tried: a thread that waits too late reads
// the previous contents, and one that starts a copy too early overwrites what another thread still reads.
void begin_copy(Copy copy);
void commit_copies();
// Waits until all groups except the last `pending` have arrived.
void wait_for_copies(uint32_t pending);
// Passes `bits` to the other lanes, and returns the values of all lanes, which are valid until the lane's next exchange.
const uint64_t* exchange(uint32_t lanes, uint64_t bits);

template <typename T>
T from_lane(uint32_t lanes, T value, uint32_t lane) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    bits = exchange(lanes, bits)[lane];
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}

inline uint32_t lane() {
    const Where& at = here();
    return (at.thread.x + at.block_size.x * (at.thread.y + at.block_size.y * at.thread.z)) % 32;
}

} // namespace skep_host

#define threadIdx (skep_host::here().thread)
#define blockIdx (skep_host::here().block)
#define blockDim (skep_host::here().block_size)
#define gridDim (skep_host::here().grid_size)

inline void __syncthreads() {
    skep_host::block_barrier();
}

inline void __syncwarp(uint32_t lanes = 0xffffffffu) {
    skep_host::warp_barrier(lanes);
}

template <typename T>
T __shfl_sync(uint32_t lanes, T value, int lane) {
    return skep_host::from_lane(lanes, value, static_cast<uint32_t>(lane) % 32);
}

template <typename T>
T __shfl_xor_sync(uint32_t lanes, T value, int distance) {
    return skep_host::from_lane(lanes, value, skep_host::lane() ^ static_cast<uint32_t>(distance));
}

template <typename T>
T __shfl_down_sync(uint32_t lanes, T value, int distance) {
    const uint32_t from = skep_host::lane() + static_cast<uint32_t>(distance);
    return skep_host::from_lane(lanes, value, from < 32 ? from : skep_host::lane());
}

template <typename T>
T __shfl_up_sync(uint32_t lanes, T value, int distance) {
    const uint32_t lane = skep_host::lane();
    const uint32_t back = static_cast<uint32_t>(distance);
    return skep_host::from_lane(lanes, value, lane >= back ? lane - back : lane);
}

inline uint32_t __ballot_sync(uint32_t lanes, bool vote) {
    const uint64_t* votes = skep_host::exchange(lanes, vote);
    uint32_t ballot = 0;
    for (uint32_t lane = 0; lane < 32; ++lane) {
        ballot |= ((lanes >> lane & 1) != 0 && votes[lane] != 0 ? 1u : 0u) << lane;
    }
    return ballot;
}

// These are atomic because fibers are never preempted.
template <typename T>
T atomicAdd(T* at, T value) {
    const T before = *at;
    *at = before + value;
    return before;
}

template <typename T>
T atomicMax(T* at, T value) {
    const T before = *at;
    *at = before < value ? value : before;
    return before;
}

template <typename T>
T atomicCAS(T* at, T expected, T value) {
    const T before = *at;
    if (before == expected) {
        *at = value;
    }
    return before;
}

inline void __threadfence() {}

inline int __dp4a(int a, int b, int sum) {
    for (int byte = 0; byte < 4; ++byte) {
        sum += static_cast<int8_t>(a >> 8 * byte) * static_cast<int8_t>(b >> 8 * byte);
    }
    return sum;
}

inline float __expf(float x) {
    return std::exp(x);
}

inline float rsqrtf(float x) {
    return 1.0f / std::sqrt(x);
}

// Returns the upper half of the product.
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
    return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}

// Returns the number of the lowest bit that is set, counted from one, or 0.
inline int __ffs(int bits) {
    return __builtin_ffs(bits);
}

inline uint32_t __popc(uint32_t bits) {
    return static_cast<uint32_t>(__builtin_popcount(bits));
}

using std::fmaxf;
using std::fminf;
