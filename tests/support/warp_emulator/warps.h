// CUDA C++ on the host, for some blocks at a time: each thread is a fiber, collectives of a warp, of a block
// and of a cluster make fibers wait for one another. What a GPU may do early or late is chosen: `late` copies
// land, and products are made, when they are waited for, others at once.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static  // one block at a time has such a variable
#define __grid_constant__
#define __launch_bounds__(...)

using std::fmaf;
using std::max;
using std::min;

struct Index {
    unsigned x = 0, y = 0, z = 0;
};
inline Index threadIdx, blockIdx, gridDim, blockDim;

struct int4 {
    int x, y, z, w;
};
struct uint2 {
    uint32_t x, y;
};
struct uint4 {
    uint32_t x, y, z, w;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {

constexpr int MOST_SHARED = 227 << 10, STACK = 1 << 16;

struct Copy {
    unsigned to;
    const void* from;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK]};
    bool done = false;
    uint64_t words[6] = {};  // what it brings to a collective
    uint64_t votes[2] = {};  // to shuffles and ballots, by turns: nobody is two ahead of another
    int turn = 0;
    std::vector<Copy> open;
    std::deque<std::vector<Copy>> groups;
    unsigned of_cluster = 0;  // the meeting that it said it would come to
    using Products = std::vector<std::function<void()>>;
    Products open_products;
    std::deque<Products> products;
};

// Of some fibers, those that are not done yet.
struct Meeting {
    int first = 0, count = 0, arrived = 0;
    unsigned generation = 0;
};

// Of as many threads of a block as come.
struct Named {
    unsigned arrived = 0, generation = 0;
};

struct alignas(1024) Memory {
    unsigned char bytes[MOST_SHARED];
};

// Copies that land when somebody waits at a barrier in the shared memory of a block.
struct Flight {
    int block;
    unsigned barrier;
    std::function<void()> land;
};

inline std::vector<Fiber> fibers;
inline std::vector<Memory> memories;  // of the blocks that run
inline std::vector<Meeting> of_warp, of_warpgroup, of_block, of_cluster;
inline std::vector<std::array<Named, 16>> of_names;
inline std::vector<Flight> flights;
inline ucontext_t scheduler;
inline int current, threads, cluster, together, shared_bytes;
inline bool late, failed;
inline uint64_t events;  // where it does not grow, all wait
inline std::function<void()> kernel;
inline std::string trace;  // what thread 0 of the blocks did, one after the other, a letter each

inline void note(char what) {
    if (current == 0) trace += what;
}

[[noreturn]] inline void fail(const char* what) { throw std::runtime_error(what); }

// Which of the blocks that run, and which of its cluster.
inline int block() { return current / threads; }
inline int rank() { return block() % cluster; }
inline unsigned char* memory_of(int rank) { return memories[block() / cluster * cluster + rank].bytes; }

inline void become(int fiber) {
    current = fiber;
    threadIdx.x = fiber % threads;
    blockIdx.x = blockIdx.x / together * together + block();
}

inline void pause() {
    const int me = current;
    swapcontext(&fibers[me].context, &scheduler);
    become(me);
}

inline bool over(Meeting& meeting, unsigned generation) {
    if (meeting.generation != generation) return true;
    int members = 0;
    for (int i = 0; i < meeting.count; ++i) members += !fibers[meeting.first + i].done;
    if (meeting.arrived < members) return false;
    meeting.arrived = 0;
    ++meeting.generation;
    ++events;
    return true;
}

inline void await(Meeting& meeting, unsigned generation) {
    while (!over(meeting, generation)) pause();
}

inline unsigned arrive(Meeting& meeting) {
    ++events;
    ++meeting.arrived;
    return meeting.generation;
}

inline void wait(Meeting& meeting) { await(meeting, arrive(meeting)); }
inline void meet_warp() { wait(of_warp[current / 32]); }
inline Meeting& own_cluster() { return of_cluster[block() / cluster]; }
inline void meet_warpgroup() { wait(of_warpgroup[current / 128]); }

inline unsigned char* shared(unsigned address) {
    if (address % 16 || static_cast<int>(address) + 16 > shared_bytes) fail("16 bytes outside shared memory");
    return memories[block()].bytes + address;
}

inline void land(const Copy& copy) { std::memcpy(shared(copy.to), copy.from, 16); }

inline void enter(int fiber) {
    become(fiber);
    try {
        kernel();
        for (const auto& group : fibers[current].groups)
            if (!group.empty()) fail("it ends before its copies");
        if (!fibers[current].products.empty()) fail("it ends before its products");
    } catch (const std::runtime_error& error) {
        std::fprintf(stderr, "thread %u of block %u: %s\n", threadIdx.x, blockIdx.x, error.what());
        failed = true;
    }
    fibers[current].done = true;
    ++events;
}

inline void run_together() {
    const int all = threads * together;
    memories.resize(together);
    for (Memory& memory : memories) std::memset(memory.bytes, 0xff, shared_bytes);
    const auto meetings = [all](std::vector<Meeting>& of, int each) {
        of.assign(all / each, {});
        for (int i = 0; i < all / each; ++i) of[i] = {each * i, each};
    };
    meetings(of_warp, 32);
    meetings(of_warpgroup, 128);
    meetings(of_block, threads);
    meetings(of_cluster, threads * cluster);
    of_names.assign(together, {});
    flights.clear();
    fibers.resize(all);
    for (int i = 0; i < all; ++i) {
        Fiber& fiber = fibers[i];
        fiber.done = false;
        fiber.turn = 0;
        fiber.open.clear();
        fiber.groups.clear();
        fiber.open_products.clear();
        fiber.products.clear();
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = &scheduler;
        makecontext(&fiber.context, reinterpret_cast<void (*)()>(enter), 1, i);
    }
    // up and down: no thread is always ahead of another
    uint64_t seen[2] = {events, events};  // after the last two rounds
    for (bool busy = true, up = true; busy && !failed; up = !up) {
        busy = false;
        for (int j = 0; j < all && !failed; ++j) {
            const int i = up ? j : all - 1 - j;
            if (fibers[i].done) continue;
            busy = true;
            become(i);
            swapcontext(&scheduler, &fibers[i].context);
        }
        if (busy && seen[0] == events) {
            std::fprintf(stderr, "all threads of block %u wait for one another\n", blockIdx.x);
            failed = true;
        }
        seen[0] = seen[1];
        seen[1] = events;
    }
}

// A grid of blocks, some clusters at a time; shared memory holds NaN at first. False after a failure.
inline bool run_grid(Index grid, int block, int blocks_of_cluster, int at_a_time, int bytes,
                     bool copies_are_late, std::function<void()> body) {
    kernel = std::move(body);
    late = copies_are_late;
    shared_bytes = bytes;
    threads = block;
    cluster = blocks_of_cluster;
    together = at_a_time;
    gridDim = grid;
    blockDim.x = block;
    failed = false;
    trace.clear();
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x && !failed; x += together) {
                blockIdx = {x, y, z};
                run_together();
            }
    return !failed;
}

// What each fiber of the warp brings.
template <class T>
auto brought(T value) {
    static_assert(sizeof value <= 8);
    Fiber& me = fibers[current];
    const int turn = me.turn ^= 1;
    std::memcpy(&me.votes[turn], &value, sizeof value);
    meet_warp();
    return [turn](int fiber) {
        T out;
        std::memcpy(&out, &fibers[fiber].votes[turn], sizeof out);
        return out;
    };
}

}  // namespace emulator

inline void __syncthreads() {
    emulator::note('|');
    emulator::wait(emulator::of_block[emulator::block()]);
}
inline void __syncwarp() { emulator::meet_warp(); }
inline float __int_as_float(int word) { return std::bit_cast<float>(word); }
inline float __uint_as_float(uint32_t word) { return std::bit_cast<float>(word); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }

// Bytes of low (0 .. 3) and high (4 .. 7), chosen by the four low nibbles of `which`.
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t which) {
    const uint64_t bytes = low | static_cast<uint64_t>(high) << 32;
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i)
        out |= static_cast<uint32_t>(bytes >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
    return out;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline int atomicAdd(int* to, int value) { return std::exchange(*to, *to + value); }
inline int __popc(uint32_t word) { return std::popcount(word); }
inline int __clz(uint32_t word) { return std::countl_zero(word); }

template <class T>
T __shfl_up_sync(uint32_t, T value, int step) {
    const int me = emulator::current;
    return emulator::brought(value)(me % 32 >= step ? me - step : me);
}

template <class T>
T __shfl_xor_sync(uint32_t, T value, int mask) {
    emulator::note('x');
    const int me = emulator::current;
    return emulator::brought(value)(me ^ mask);
}

template <class T>
T __shfl_sync(uint32_t, T value, int lane) {
    emulator::note('s');
    const int me = emulator::current;
    return emulator::brought(value)(me / 32 * 32 + lane);
}

inline uint32_t __ballot_sync(uint32_t, bool vote) {
    const int first = emulator::current / 32 * 32;
    const auto of = emulator::brought(vote);
    uint32_t votes = 0;
    for (int i = 0; i < 32; ++i) votes |= static_cast<uint32_t>(of(first + i)) << i;
    return votes;
}
