// Barriers in shared memory that count arrivals and bytes, the copies to shared memory that report to them and others, and the
// distribution of registers among warpgroups, on Hopper.
#pragma once

#include "device.cuh"
#include "ptx/mma.cuh"

#if defined(__CUDACC_RTC__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)

SKEP_DEVICE void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialized barriers visible to bulk copies.
SKEP_DEVICE void barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

SKEP_DEVICE void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and adds to the bytes that have to be copied before the phase ends.
SKEP_DEVICE void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase with this parity has ended.
SKEP_DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t passed;
    do {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(passed)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (passed == 0);
}

// Orders the thread's earlier writes to shared memory before later reads by the tensor cores and bulk copies.
SKEP_DEVICE void fence_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Waits until `threads` threads have come to barrier `id`, of 1 to 15.
SKEP_DEVICE void threads_sync(uint32_t id, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Changes the number of registers of each thread of the warpgroup.
template <int COUNT>
SKEP_DEVICE void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
SKEP_DEVICE void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Starts an asynchronous copy of 16 bytes to shared memory. If `there` is false, the destination becomes zeros and `from` is
// not read.
SKEP_DEVICE void copy_chunk(uint32_t to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// Writes 16 bytes of zeros to shared memory.
SKEP_DEVICE void clear_chunk(uint32_t to) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
}

// Starts a copy of a box of a four-dimensional tensor to shared memory. The bytes count towards the barrier's phase.
SKEP_DEVICE void copy_box(uint32_t to, const void* map, uint32_t barrier, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
            to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

#endif
