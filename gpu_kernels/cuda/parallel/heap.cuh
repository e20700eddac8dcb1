// SPDX-License-Identifier: Apache-2.0
// The heap of a rank, which every other rank of the host writes by address: see
// ttnn_moe/cuda/parallel/heap.py.
//
// | offset | what    | shape, dtype        | who writes                                                    |
// |--------|---------|---------------------|---------------------------------------------------------------|
// | 0      | peers   | [8] u64             | the host: address of each rank's heap, of this GPU             |
// | 64     | report  | u64                 | the rank that waited in vain: call << 32, its rank << 8, 1 + whom for |
// | 72     | said    | u64                 | the host: where it reads the report                            |
// | 80     | timeout | u64, ns             | the host                                                       |
// | 128    | calls   | [BLOCKS] u32        | each block: calls that are over, the same number for all       |
// | 8192   | words   | [2, R, capacity] 16 bytes | the other ranks: by parity of the call, by rank          |
// | behind | flags   | [2, 2, R, TILES] u32 | the other ranks, by parity and hop: the call whose tile is whole |
// | behind | rows    | [2, R, room] 16 bytes | the other ranks                                              |
//
// A put is 16 bytes: two words of 32 bits of data below the number of the call. A word of 64 bits arrives
// whole, so a receiver that finds the number has the data, without a fence. Call n writes where call n - 2
// was read: a rank starts call n after it has every rank's words of call n - 1, and those come after call n -
// 2 ended there.
#pragma once

#include "parallel/words.cuh"

#ifndef RANKS
#define RANKS 2
#endif

constexpr int MOST_RANKS = 8, BLOCKS = 1024, TILES = 1024, WORDS_AT = 8192;
static_assert(RANKS >= 2 && RANKS <= MOST_RANKS, "the heap has 8 addresses");

struct Heap {
    u64 peers[MOST_RANKS];
    u64 report;
    u64 said;
    u64 timeout;
    u64 unused[5];
    u32 calls[BLOCKS];
};

struct Ranks {
    Heap* own;
    int rank, capacity;
    u64 peers[RANKS];
    u32 call;

    // Before the predecessor ends: what never changes.
    __device__ __forceinline__ Ranks(Heap* heap, int rank, int capacity)
        : own(heap), rank(rank), capacity(capacity) {
#pragma unroll
        for (int r = 0; r < RANKS; ++r) peers[r] = heap->peers[r];
    }

    // After it: the number of this call, never 0, since the heap starts as zeros.
    __device__ __forceinline__ void begin() {
        call = own->calls[blockIdx.x] + 1;
        if (call == 0) call = 2;
    }

    // By all threads of the block, at its end. A grid is smaller than another, and all numbers stay equal.
    __device__ __forceinline__ void end() {
        __syncthreads();
        for (int b = blockIdx.x + threadIdx.x * gridDim.x; b < BLOCKS; b += gridDim.x * blockDim.x)
            own->calls[b] = call;
    }

    // Within a heap.
    __device__ __forceinline__ u64 place(int source, int chunk) const {
        return WORDS_AT + (static_cast<u64>((call & 1) * RANKS + source) * capacity + chunk) * 16;
    }

    // Four elements to every other rank.
    __device__ __forceinline__ void put(int chunk, uint2 data) const {
#pragma unroll
        for (int r = 0; r < RANKS; ++r)
            if (r != rank)
                store_words(peers[r] + place(rank, chunk), flagged(data.x, call), flagged(data.y, call));
    }

    // Where `source` says that it has put a tile of a hop, and where it puts its rows.
    __device__ __forceinline__ u64 flag(int source, int tile, int hop = 0) const {
        return words_end() + (static_cast<u64>(((call & 1) * 2 + hop) * RANKS + source) * TILES + tile) * 4;
    }
    __device__ __forceinline__ u64 rows(int source, u64 room) const {
        return words_end() + 16 * RANKS * TILES + ((call & 1) * RANKS + source) * room * 16;
    }

    // One thread: whether a tile of a rank is whole. False: this rank, or another, gave up. Who waits for the
    // second hop may wait for a rank that waits itself: it waits twice as long, so that the other one says
    // for whom.
    __device__ __forceinline__ bool await(int source, int tile, int hop = 0) const {
        const u64 from = reinterpret_cast<u64>(own) + flag(source, tile, hop);
        u64 since = 0;
        for (u32 tries = 1; load_flag(from) != call; ++tries)
            if (tries % PATIENCE == 0 && (since = over(own, rank, source, call, since, hop)) == 0)
                return false;
        return true;
    }

    // Four elements of a rank. False: this rank, or another, gave up.
    __device__ __forceinline__ bool take(int source, int chunk, uint2& data) const {
        const u64 from = reinterpret_cast<u64>(own) + place(source, chunk);
        u64 words[2], since = 0;
        for (u32 tries = 1;; ++tries) {
            load_words(from, words);
            if (words[0] >> 32 == call && words[1] >> 32 == call) break;
            if (tries % PATIENCE == 0 && (since = over(own, rank, source, call, since, 0)) == 0) return false;
        }
        data = make_uint2(static_cast<u32>(words[0]), static_cast<u32>(words[1]));
        return true;
    }

  private:
    __device__ __forceinline__ u64 words_end() const {
        return WORDS_AT + static_cast<u64>(capacity) * 32 * RANKS;
    }
    static __device__ __forceinline__ u64 flagged(u32 data, u32 call) {
        return static_cast<u64>(call) << 32 | data;
    }

    // When the wait began; 0: a rank reported, or this one does, after the timeout. The first report to a
    // rank stays.
    static __device__ __noinline__ u64 over(Heap* own, int rank, int source, u32 call, u64 since, int hop) {
        u64 report = load_word(&own->report);
        if (report == 0) {
            const u64 now = nanoseconds();
            if (since == 0) return now;
            if (now - since < own->timeout << hop) return since;
            report = static_cast<u64>(call) << 32 | rank << 8 | (source + 1);
            const u64 was = store_first(&own->report, report);
            if (was) report = was;
            for (int r = 0; r < RANKS; ++r)
                store_first(&reinterpret_cast<Heap*>(own->peers[r])->report, report);
        }
        store_word(reinterpret_cast<u64*>(own->said), report);
        return 0;
    }
};
