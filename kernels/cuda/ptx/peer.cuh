// Loads and stores of words in the memory of another device, with which blocks on different devices wait for each other.
#pragma once

#include "device.cuh"

#if defined(__CUDACC_RTC__)

// A reader that loads this value with `load_acquire` also sees everything that this thread wrote or saw before.
SKEP_DEVICE void store_release(uint32_t* at, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

SKEP_DEVICE uint32_t load_acquire(const uint32_t* at) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

// Called between two polls of a word that another device will write.
SKEP_DEVICE void give_way() {}

#else

inline void store_release(uint32_t* at, uint32_t value) {
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
}

inline uint32_t load_acquire(const uint32_t* at) {
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}

inline void give_way() {
    skep_host::give_way();
}

#endif
