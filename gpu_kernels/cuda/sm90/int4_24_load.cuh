// SPDX-License-Identifier: Apache-2.0
// What fills a ring of int4_24 words and rows, and its place in shared memory: the producer warps of both
// kernels of int4_24 for sm_90a.
//
// A stage holds SLABS slabs of 64 channels: WEIGHT_ROWS words of 16 bytes each, and MAX_N * COLUMNS_OF_ROW
// columns of 128 bytes each. One warp loads words through the copy engine; GATHER_WARPS load rows through
// cp.async, since rows are scattered.
//
// Words of gate_up lie in a slab as in memory: where gate and up rows take turns, in turns; else gate rows,
// then the up rows of the same channels.
#pragma once

#include "sm90/items.cuh"
#include "sm90/sparse.cuh"

#ifndef SLABS
#define SLABS 2
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef WEIGHT_ROWS
#define WEIGHT_ROWS 256
#endif
#ifndef READ_ONCE
#define READ_ONCE 0
#endif
#ifndef COLUMNS_OF_ROW
#define COLUMNS_OF_ROW 1  // of B in shared memory
#endif
#ifndef INTERLEAVED
#define INTERLEAVED 0
#endif

constexpr int SLAB_GAP = 64;  // of lanes that load words of two slabs, each touches banks of its own
constexpr int WEIGHT_SLAB = WEIGHT_ROWS * 16 + SLAB_GAP, ROW_SLAB = MAX_N * COLUMNS_OF_ROW * 128;
constexpr int WORD_BYTES = SLABS * WEIGHT_SLAB, STAGE_ROWS = SLABS * ROW_SLAB;
constexpr int GATHER_WARPS = PRODUCERS - 1;
static_assert(2 * SLABS <= 32, "a lane makes one copy of words");

struct Weights {
    const uint4 *w13, *w2;
};

// Rows come first: eight of them begin at a multiple of 1024 bytes. The rest lies at constants from there.
struct Shared {
    u32 rows;

    __device__ __forceinline__ explicit Shared(const void* memory)
        : rows((shared_address(memory) + 1023) / 1024 * 1024) {}
    __device__ __forceinline__ u32 words() const { return rows + STAGES * STAGE_ROWS; }
    __device__ __forceinline__ u32 full(int stage) const { return words() + STAGES * WORD_BYTES + 8 * stage; }
    __device__ __forceinline__ u32 empty(int stage) const { return full(STAGES) + 8 * stage; }
    __device__ __forceinline__ Items items() const { return Items(empty(STAGES)); }
    __device__ __forceinline__ u32 end() const {
        return (empty(STAGES) + 16 * SLOTS + 15) / 16 * 16 + SLOTS * ITEM_BYTES;
    }

    __device__ __forceinline__ void init() const {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full(i), 1 + 32 * GATHER_WARPS);
            barrier_init(empty(i), CONSUMERS);
        }
        items().init(GATHER_WARPS + CONSUMERS);
        barrier_init_fence();
    }
};

__device__ __forceinline__ Work work_of(Tile* tiles, const int* num_tiles, int H, int I) {
    return Work(tiles, *num_tiles, (2 * I + WEIGHT_ROWS - 1) / WEIGHT_ROWS,
                (H + WEIGHT_ROWS - 1) / WEIGHT_ROWS, H, I);
}

// By one warp. The copy of lane i: of slab i, or where gate and up rows lie apart of half i % 2 of slab i
// / 2.
__device__ __forceinline__ void load_words(const Shared& shared, const Weights& given, const Work& work,
                                           int* taken) {
    const int lane = threadIdx.x % 32;
    Turn<STAGES> turn;
    Turn<SLOTS> slot;
#if READ_ONCE
    const u64 policy = evict_first();
#endif
    const auto claim = [&] {  // only resident blocks claim items, so a part of a GPU suffices
        int i = 0;
        if (lane == 0) i = atomicAdd(taken, 1);
        return __shfl_sync(~0u, i, 0);
    };
    Item item = work.item(claim()), next{};
    for (; item.kind != NONE; item = next) {
        if (lane == 0)
            shared.items().tell(slot, item);
        else
            slot.next();
        const int i = claim(), slabs = work.depth(item) / 64;
        const bool is_down = item.kind == DOWN, apart = !is_down && !INTERLEAVED;
        const int width = is_down ? work.H : 2 * work.I;
        const int of_one = apart ? WEIGHT_ROWS / 2 : WEIGHT_ROWS;  // rows of a copy
        const int first = item.block * of_one, count = min(of_one, (apart ? work.I : width) - first);
        const int slab = apart ? lane / 2 : lane, second = apart ? lane % 2 : 0;
        const uint4* from = (is_down ? given.w2 : given.w13) +
                            (static_cast<u64>(item.expert) * slabs + slab) * width + first + second * work.I;
        const u32 to = shared.words() + slab * WEIGHT_SLAB + second * (WEIGHT_ROWS * 8);
        for (int at = 0; at < slabs; at += SLABS) {
            if (at == slabs / 2 / SLABS * SLABS) next = work.item(i);  // early: hides the latency
            const u32 full = shared.full(turn.at);
            const int now = min(SLABS, slabs - at);
            barrier_wait(shared.empty(turn.at), turn.parity ^ 1);
            if (lane == 0) barrier_arrive_expect(full, now * count * (apart ? 32 : 16));
            __syncwarp();
            if (slab < now) {
#if READ_ONCE
                bytes_load(to + turn.at * WORD_BYTES, from, count * 16, full, policy);
#else
                bytes_load(to + turn.at * WORD_BYTES, from, count * 16, full);
#endif
            }
            from += static_cast<u64>(SLABS) * width;
            turn.next();
        }
    }
    if (lane == 0) shared.items().tell(slot, item);
}

// By each thread of a consumer warp, once it has loaded all that it needs. Without the fence an arrival
// overtakes loads before it, and so may the copy that refills the stage.
__device__ __forceinline__ void release_read(u32 barrier) {
    fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}
