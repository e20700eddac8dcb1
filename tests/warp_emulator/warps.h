// CUDA C++ on the host, for one block at a time: each thread is a fiber, collectives of a warp and of the
// block make fibers wait for one another. What a GPU may do early or late is chosen: `late` copies land when
// they are waited for, others at once.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <stdexcept>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__
#define __align__(bytes)
#define __launch_bounds__(...)

using std::max;
using std::min;

struct Index {
    unsigned x = 0, y = 0, z = 0;
};
inline Index threadIdx, blockIdx, gridDim;

constexpr int MOST_SHARED = 227 << 10;
alignas(128) unsigned char memory[MOST_SHARED];

namespace emulator {

struct Copy {
    unsigned to;
    const void* from;
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 16);
    bool done = false;
    std::vector<Copy> open;
    std::deque<std::vector<Copy>> groups;
};

struct Meeting {
    int arrived = 0, generation = 0;
};

inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline int current, shared_bytes;
inline bool late;
inline Meeting of_block, of_warp[32];
inline uint32_t words[1024][6];  // what each thread brings to a collective

inline std::function<void()> kernel;
inline bool failed;

[[noreturn]] inline void fail(const char* what) { throw std::runtime_error(what); }

inline void become(int thread) { current = threadIdx.x = thread; }

inline void wait(Meeting& meeting, int members) {
    const int generation = meeting.generation;
    if (++meeting.arrived == members) {
        meeting.arrived = 0;
        ++meeting.generation;
    }
    while (meeting.generation == generation) {
        const int me = current;
        swapcontext(&fibers[me].context, &scheduler);
        become(me);
    }
}

inline void meet_warp() { wait(of_warp[current / 32], 32); }

inline unsigned char* shared(unsigned address) {
    if (address % 16 || static_cast<int>(address) + 16 > shared_bytes) fail("16 bytes outside shared memory");
    return memory + address;
}

inline void land(const Copy& copy) { std::memcpy(shared(copy.to), copy.from, 16); }

inline void enter(int thread) {
    become(thread);
    try {
        kernel();
        for (const auto& group : fibers[thread].groups)
            if (!group.empty()) fail("it ends before its copies");
    } catch (const std::runtime_error& error) {
        std::fprintf(stderr, "thread %d of block %u: %s\n", thread, blockIdx.x, error.what());
        failed = true;
    }
    fibers[thread].done = true;
}

// A grid of one-dimensional blocks, one after the other; shared memory holds NaN at first. False after a
// failure.
inline bool run_grid(int blocks, int threads, int bytes, bool copies_are_late, std::function<void()> body) {
    kernel = std::move(body);
    late = copies_are_late;
    shared_bytes = bytes;
    gridDim.x = blocks;
    failed = false;
    for (int block = 0; block < blocks && !failed; ++block) {
        blockIdx.x = block;
        std::memset(memory, 0xff, sizeof memory);
        of_block = {};
        for (Meeting& meeting : of_warp) meeting = {};
        fibers = std::vector<Fiber>(threads);
        for (int i = 0; i < threads; ++i) {
            Fiber& fiber = fibers[i];
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            fiber.context.uc_link = &scheduler;
            makecontext(&fiber.context, reinterpret_cast<void (*)()>(enter), 1, i);
        }
        // up and down: no thread is always ahead of another
        for (bool busy = true, up = true; busy && !failed; up = !up) {
            busy = false;
            for (int j = 0; j < threads && !failed; ++j) {
                const int i = up ? j : threads - 1 - j;
                if (fibers[i].done) continue;
                busy = true;
                become(i);
                swapcontext(&scheduler, &fibers[i].context);
            }
        }
    }
    return !failed;
}

}  // namespace emulator

inline void __syncthreads() { emulator::wait(emulator::of_block, static_cast<int>(emulator::fibers.size())); }
