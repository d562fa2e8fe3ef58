// Kernels that are wrong on purpose. Tests check that the machine reports what a device leaves undefined.
#include "device.cuh"

struct FaultParams {
    unsigned char* memory;
    uint32_t* out;
    uint32_t offset;
};

// Every second lane ends, and the others still name it.
SKEP_KERNEL(fault_ended_lane, FaultParams) {
    if (threadIdx.x % 2 == 1) {
        return;
    }
    p.out[threadIdx.x] = __shfl_xor_sync(ALL_LANES, threadIdx.x, 1);
}

// The first warp ends before a barrier of the block.
SKEP_KERNEL(fault_ended_warp, FaultParams) {
    if (threadIdx.x < WARP) {
        return;
    }
    __syncthreads();
    p.out[threadIdx.x] = threadIdx.x;
}

// All lanes are named, but only those that exist can be.
SKEP_KERNEL(fault_partial_warp, FaultParams) {
    p.out[threadIdx.x] = __shfl_xor_sync(ALL_LANES, threadIdx.x, 1);
}

// Loads sixteen bytes from an address that may be misaligned.
SKEP_KERNEL(fault_misaligned_load, FaultParams) {
    const Vec16 loaded = *reinterpret_cast<const Vec16*>(p.memory + p.offset);
    p.out[threadIdx.x] = loaded.words[0];
}

// Stores a word at an address that may be misaligned.
SKEP_KERNEL(fault_misaligned_store, FaultParams) {
    *reinterpret_cast<uint32_t*>(p.memory + p.offset) = threadIdx.x;
}
