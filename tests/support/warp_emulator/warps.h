// SPDX-License-Identifier: Apache-2.0
// CUDA C++ on the host, for some blocks at a time: each thread is a fiber, collectives of a warp, of a block
// and of a cluster make fibers wait for one another. What a GPU may do early or late is chosen: `late` copies
// land, and products are made, when they are waited for, others at once. Fibers take turns, with `late` the
// last first; where one releases something to other blocks, these run first. warps.cpp has what no kernel
// needs compiled with it.
#pragma once

#include <setjmp.h>
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
#define __noinline__
#define __shared__ static  // one block at a time has such a variable
#define __grid_constant__
#define __launch_bounds__(...)

using std::fmaf;
using std::max;
using std::min;

struct Index {
    unsigned x = 0, y = 0, z = 0;
};
extern Index threadIdx, blockIdx, gridDim, blockDim;

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
    int bytes = 16, zeros = 0;  // after the bytes
};

struct Fiber {
    ucontext_t context;  // where it begins
    jmp_buf place;       // where it paused: unlike swapcontext, a jump makes no system call
    bool begun = false;
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
    int asked = -1, ended = -1;  // what `over` said no to: so many had arrived, and so many fibers had ended
};

// Of as many threads of a block as come.
struct Named {
    unsigned arrived = 0, generation = 0;
};

struct alignas(1024) Memory {
    unsigned char bytes[MOST_SHARED + 1024];  // the last kilobyte belongs to no block
};

// Copies that land when somebody waits at a barrier in the shared memory of a block.
struct Flight {
    int block;
    unsigned barrier;
    std::function<void()> land;
};

extern std::vector<Fiber> fibers;
extern std::vector<Memory> memories;  // of the blocks that run
extern std::vector<Meeting> of_warp, of_warpgroup, of_block, of_cluster;
extern std::vector<std::array<Named, 16>> of_names;
extern std::vector<Flight> flights;
extern int current, threads, cluster, together, shared_bytes;
extern unsigned first_block;  // of those that run, among those of its z
extern bool late, failed;
extern uint64_t events;  // where it does not grow, all wait
extern std::function<void()> kernel;
extern std::string trace;  // what thread 0 of the blocks did, one after the other, a letter each

[[noreturn]] void fail(const char* what);

inline void note(char what) {
    if (current == 0) trace += what;
}

// Which of the blocks that run, and which of its cluster.
inline int block() { return current / threads; }
inline int rank() { return block() % cluster; }
inline unsigned char* memory_of(int rank) { return memories[block() / cluster * cluster + rank].bytes; }

inline void become(int fiber) {
    current = fiber;
    threadIdx.x = fiber % threads;
    const unsigned at = first_block + block();
    blockIdx.x = at % gridDim.x;
    blockIdx.y = at / gridDim.x;
}

// Lets the other fibers run.
void pause();

// The same, behind a release: the other blocks run first.
void tell();

bool over(Meeting& meeting, unsigned generation);

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
inline void meet_warpgroup() { wait(of_warpgroup[block() * (threads / 128) + current % threads / 128]); }

inline unsigned char* shared(unsigned address, int bytes = 16) {
    if (address % bytes || static_cast<int>(address) + bytes > shared_bytes) fail("outside shared memory");
    return memories[block()].bytes + address;
}

inline void land(const Copy& copy) {
    unsigned char* to = shared(copy.to, copy.bytes + copy.zeros);
    if (copy.bytes) std::memcpy(to, copy.from, copy.bytes);
    std::memset(to + copy.bytes, 0, copy.zeros);
}

// A grid of blocks, some clusters of a z at a time; shared memory holds NaN at first. False after a failure.
bool run_grid(Index grid, int block, int blocks_of_cluster, int at_a_time, int bytes, bool copies_are_late,
              std::function<void()> body);

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
inline int __syncthreads_or(int vote) {
    emulator::fibers[emulator::current].words[0] = vote != 0;
    __syncthreads();
    bool any = false;
    for (int i = 0; i < emulator::threads; ++i)
        any |= emulator::fibers[emulator::block() * emulator::threads + i].words[0] != 0;
    __syncthreads();
    return any;
}
inline void __syncwarp() { emulator::meet_warp(); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline float __int_as_float(int word) { return std::bit_cast<float>(word); }
inline float __uint_as_float(uint32_t word) { return std::bit_cast<float>(word); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t bits) {
    return (static_cast<uint64_t>(high) << 32 | low) >> bits % 32;
}

// Bytes of low (0 .. 3) and high (4 .. 7), chosen by the four low nibbles of `which`.
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t which) {
    const uint64_t bytes = low | static_cast<uint64_t>(high) << 32;
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i)
        out |= static_cast<uint32_t>(bytes >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
    return out;
}
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline int atomicAdd(int* to, int value) { return std::exchange(*to, *to + value); }
inline uint32_t atomicAdd(uint32_t* to, uint32_t value) { return std::exchange(*to, *to + value); }
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
inline int __reduce_max_sync(uint32_t, int value) {
    for (int step = 1; step < 32; step *= 2) value = std::max(value, __shfl_xor_sync(0, value, step));
    return value;
}
inline int __ffs(uint32_t word) { return word ? std::countr_zero(word) + 1 : 0; }
inline bool __any_sync(uint32_t all, bool vote) { return __ballot_sync(all, vote) != 0; }
inline bool __all_sync(uint32_t all, bool vote) { return __ballot_sync(all, !vote) == 0; }
