// The scheduler for the fibers of one block.
#include "block.h"

#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <ucontext.h>
#include <utility>
#include <vector>

namespace skep_host {
namespace {

constexpr size_t STACK_BYTES = 64 << 10;
constexpr uint32_t MAX_THREADS = 1024;
constexpr uint32_t MAX_SHARED_BYTES = 227 << 10;
// Kernels whose names begin like this are wrong on purpose, for tests of this machine.
constexpr const char* FAULTS = "fault_";

enum class State { Ready, AtBlockBarrier, AtWarpBarrier, Ended };

// Where a fiber or the scheduler goes on. The compiler's own jumps save three words; those of the C library also encrypt them
// and look for handlers of cancelled threads, which took as long as the kernels.
using Place = void* [5];

// A fiber is started on its own stack with `ucontext`, and switched with jumps, which need no system call. It lives as long
// as its operating-system thread and runs threads of blocks one after the other.
struct Fiber {
    Place at;
    std::unique_ptr<unsigned char[]> stack{new unsigned char[STACK_BYTES]};
    bool begun = false;
    State state = State::Ended;
    // The lanes it waits for at a warp barrier.
    uint32_t lanes = 0;
    Where where;
    uint32_t index = 0;
    // Copies that were started, each with the number of its group, and the number of closed groups.
    std::vector<std::pair<uint32_t, Copy>> copies;
    uint32_t groups = 0;
    // Selects the exchange buffer. Two buffers alternate, so that a lane that is ahead does not overwrite what another lane has
    // not read yet.
    uint32_t parity = 0;
};

struct Warp {
    uint64_t exchanged[2][32];
};

struct Runner {
    Place scheduler;
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Warp> warps;
    std::vector<unsigned char> shared;
    Fiber* running = nullptr;
    bool copies_at_once = true;
    Thread thread = nullptr;
    const void* params = nullptr;
    std::string problem;
};

// A pointer, because each access to an object with a constructor would first ask whether it has run.
constinit thread_local Runner* runner = nullptr;

struct Kernel {
    size_t params_bytes;
    Thread thread;
};

std::map<std::string, Kernel>& kernels() {
    static std::map<std::string, Kernel> known;
    return known;
}

// A function may not both save a place and jump.
[[noreturn, gnu::noinline]] void jump(Place& place) {
    __builtin_longjmp(place, 1);
}

[[gnu::noinline]] void back_to_scheduler() {
    if (__builtin_setjmp(runner->running->at) == 0) {
        jump(runner->scheduler);
    }
}

void fiber_main() {
    for (;;) {
        runner->thread(runner->params);
        runner->running->state = State::Ended;
        back_to_scheduler();
    }
}

void wait(State state, uint32_t lanes) {
    runner->running->state = state;
    runner->running->lanes = lanes;
    back_to_scheduler();
}

// Ends the launch with an error. The fiber is never continued.
[[noreturn]] void fail(const std::string& problem) {
    if (runner == nullptr || runner->running == nullptr) {
        // The access is the machine's own, outside a launch.
        std::abort();
    }
    if (runner->problem.empty()) {
        runner->problem = "thread " + std::to_string(runner->running->index) + " of a block " + problem;
    }
    jump(runner->scheduler);
}

// Runs the fiber until it waits or its thread has finished.
[[gnu::noinline]] void go_on(Fiber& fiber) {
    runner->running = &fiber;
    if (__builtin_setjmp(runner->scheduler) != 0) {
        return;
    }
    if (fiber.begun) {
        jump(fiber.at);
    }
    fiber.begun = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack.get();
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = nullptr;
    makecontext(&context, fiber_main, 0);
    setcontext(&context);
}

void arrive(const Copy& copy) {
    if (copy.there) {
        std::memcpy(copy.to, copy.from, 16);
    } else {
        std::memset(copy.to, 0, 16);
    }
}

void shuffle(std::vector<uint32_t>& order, uint64_t& seed) {
    for (size_t left = order.size(); left > 1; --left) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        std::swap(order[left - 1], order[(seed >> 33) % left]);
    }
}

// Releases fibers that waited for each other, and returns whether there were any.
bool release(uint32_t count) {
    uint32_t at_barrier = 0;
    uint32_t alive = 0;
    for (uint32_t i = 0; i < count; ++i) {
        alive += runner->fibers[i]->state != State::Ended;
        at_barrier += runner->fibers[i]->state == State::AtBlockBarrier;
    }
    if (at_barrier > 0 && alive < count) {
        runner->problem = "a thread of a block waits at a barrier that a thread which has ended did not reach";
        return false;
    }
    if (alive > 0 && at_barrier == alive) {
        for (uint32_t i = 0; i < count; ++i) {
            if (runner->fibers[i]->state == State::AtBlockBarrier) {
                runner->fibers[i]->state = State::Ready;
            }
        }
        return true;
    }
    bool released = false;
    for (uint32_t first = 0; first < count; first += 32) {
        uint32_t examined = 0;
        for (uint32_t i = first; i < first + 32 && i < count; ++i) {
            const uint32_t lanes = runner->fibers[i]->lanes;
            if (runner->fibers[i]->state != State::AtWarpBarrier || lanes == examined) {
                continue;
            }
            examined = lanes;
            bool all = true;
            for (uint32_t j = first; j < first + 32; ++j) {
                const bool named = (lanes >> (j - first) & 1) != 0;
                if (named && (j >= count || runner->fibers[j]->state == State::Ended)) {
                    // A device returns anything for such a lane.
                    runner->problem = "thread " + std::to_string(i) + " of a block names lane " + std::to_string(j - first) +
                                     " of its warp, which " + (j < count ? "has ended" : "does not exist");
                    return false;
                }
                const bool there = j < count && runner->fibers[j]->state == State::AtWarpBarrier &&
                                   runner->fibers[j]->lanes == lanes;
                all = all && (!named || there);
            }
            if (!all) {
                continue;
            }
            for (uint32_t j = first; j < first + 32 && j < count; ++j) {
                if (runner->fibers[j]->state == State::AtWarpBarrier && runner->fibers[j]->lanes == lanes) {
                    runner->fibers[j]->state = State::Ready;
                }
            }
            released = true;
        }
    }
    return released;
}

void run_block(const Launch& launch, Dim3 block, uint64_t& seed) {
    const Dim3 size = launch.block;
    const uint32_t count = size.x * size.y * size.z;
    // A kernel may not rely on shared memory that no thread has written.
    std::memset(runner->shared.data(), 0xff, runner->shared.size());
    for (uint32_t i = 0; i < count; ++i) {
        Fiber& fiber = *runner->fibers[i];
        fiber.state = State::Ready;
        fiber.index = i;
        fiber.parity = 0;
        fiber.copies.clear();
        fiber.groups = 0;
        fiber.where.thread = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
        fiber.where.block = block;
        fiber.where.block_size = size;
        fiber.where.grid_size = launch.grid;
    }
    std::vector<uint32_t> order(count);
    for (uint32_t i = 0; i < count; ++i) {
        order[i] = launch.order == 1 ? count - 1 - i : i;
    }
    for (;;) {
        if (launch.order > 1) {
            shuffle(order, seed);
        }
        bool ran = false;
        for (uint32_t i : order) {
            if (runner->fibers[i]->state == State::Ready) {
                go_on(*runner->fibers[i]);
                runner->running = nullptr;
                ran = true;
            }
            if (!runner->problem.empty()) {
                break;
            }
        }
        const bool released = runner->problem.empty() && release(count);
        if (!runner->problem.empty()) {
            // As below, the fibers are stuck.
            runner->fibers.clear();
            return;
        }
        if (released) {
            continue;
        }
        if (ran) {
            continue;
        }
        for (uint32_t i = 0; i < count; ++i) {
            if (runner->fibers[i]->state != State::Ended) {
                // These fibers are stuck inside a thread and cannot be reused.
                runner->fibers.clear();
                runner->problem = "thread " + std::to_string(i) + " of a block waits for threads that never arrive";
                return;
            }
        }
        return;
    }
}

} // namespace

const Where& here() {
    return runner->running->where;
}

unsigned char* dynamic_shared() {
    const uintptr_t at = reinterpret_cast<uintptr_t>(runner->shared.data());
    return reinterpret_cast<unsigned char*>((at + 15) & ~uintptr_t{15});
}

void block_barrier() {
    wait(State::AtBlockBarrier, 0);
}

void warp_barrier(uint32_t lanes) {
    wait(State::AtWarpBarrier, lanes);
}

void require_aligned(const void* at, size_t alignment) {
    if (reinterpret_cast<uintptr_t>(at) % alignment != 0) {
        fail("copies " + std::to_string(alignment) + " bytes from or to an address that is not a multiple of it");
    }
}

void give_way() {
    std::this_thread::yield();
    wait(State::Ready, 0);
}

void begin_copy(Copy copy) {
    require_aligned(copy.to, 16);
    require_aligned(copy.from, 16);
    if (runner->copies_at_once) {
        arrive(copy);
    } else {
        runner->running->copies.push_back({runner->running->groups, copy});
    }
}

void commit_copies() {
    ++runner->running->groups;
}

void wait_for_copies(uint32_t pending) {
    Fiber& fiber = *runner->running;
    // Groups are in order.
    size_t arrived = 0;
    while (arrived < fiber.copies.size() && fiber.copies[arrived].first + pending < fiber.groups) {
        arrive(fiber.copies[arrived].second);
        ++arrived;
    }
    fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + static_cast<ptrdiff_t>(arrived));
}

const uint64_t* exchange(uint32_t lanes, uint64_t bits) {
    Fiber& fiber = *runner->running;
    uint64_t* slots = runner->warps[fiber.index / 32].exchanged[fiber.parity];
    fiber.parity ^= 1;
    slots[fiber.index % 32] = bits;
    warp_barrier(lanes);
    return slots;
}

Registered::Registered(const char* name, size_t params_bytes, Thread thread) {
    kernels()[name] = {params_bytes, thread};
}

} // namespace skep_host

using namespace skep_host;

// The data that the compiler passes about an access with a misaligned address.
struct MisalignedAccess {
    const char* file;
    uint32_t line;
    uint32_t column;
    const void* type;
    uint8_t log_alignment;
    uint8_t kind;
};

// The compiler calls this before each access whose address is not a multiple of the alignment of its type (`build.rs`).
extern "C" __attribute__((no_sanitize("alignment"))) void __ubsan_handle_type_mismatch_v1(void* data, void*) {
    const MisalignedAccess* access = static_cast<const MisalignedAccess*>(data);
    const char* file = access->file == nullptr ? "a kernel" : access->file;
    fail("accesses memory at an address that is not a multiple of " + std::to_string(1u << access->log_alignment) +
         " bytes, in " + file + ":" + std::to_string(access->line));
}

// Runs a kernel. Returns null, or an error message that is valid until this thread's next call.
extern "C" const char* skep_host_launch(const char* name, const Launch* launch, const void* params,
                                        size_t params_bytes) {
    const auto kernel = kernels().find(name);
    if (kernel == kernels().end()) {
        return "there is no kernel of this name";
    }
    if (kernel->second.params_bytes != params_bytes) {
        return "the size of its parameters differs from the kernel's struct";
    }
    const uint64_t count = uint64_t{launch->block.x} * launch->block.y * launch->block.z;
    if (count == 0 || count > MAX_THREADS || launch->shared_bytes > MAX_SHARED_BYTES) {
        return "no device can run a block of this size";
    }
    thread_local Runner own;
    runner = &own;
    while (runner->fibers.size() < count) {
        runner->fibers.push_back(std::make_unique<Fiber>());
    }
    runner->warps.resize((count + 31) / 32);
    runner->shared.resize(launch->shared_bytes + 16);
    runner->thread = kernel->second.thread;
    runner->params = params;
    runner->copies_at_once = launch->order == 0;
    runner->problem.clear();
    uint64_t seed = launch->order;
    for (uint32_t z = 0; z < launch->grid.z && runner->problem.empty(); ++z) {
        for (uint32_t y = 0; y < launch->grid.y && runner->problem.empty(); ++y) {
            for (uint32_t x = 0; x < launch->grid.x && runner->problem.empty(); ++x) {
                run_block(*launch, {x, y, z}, seed);
            }
        }
    }
    return runner->problem.empty() ? nullptr : runner->problem.c_str();
}

// Returns the names of all kernels that devices run, each followed by a line feed.
extern "C" const char* skep_host_kernels() {
    static const std::string names = [] {
        std::string all;
        for (const auto& known : kernels()) {
            if (known.first.rfind(FAULTS, 0) != 0) {
                all += known.first + "\n";
            }
        }
        return all;
    }();
    return names.c_str();
}
