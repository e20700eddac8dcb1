// SPDX-License-Identifier: Apache-2.0
// Rows by bulk copies (TMA) through shared memory, with mbarriers: sm_90 and newer, a wire of x's dtype.
//
// | shared memory of a channel | bytes                       |
// |----------------------------|-----------------------------|
// | sender                     | SEND_ROWS rows              |
// | receiver                   | STAGES * SOURCES * CHUNK    |
// | forwarder                  | STAGES * R_INTRA * CHUNK    |
#pragma once

#include "combine/vectors.cuh"
#include "sm90/ptx.cuh"

#ifndef STAGES
#define STAGES 7
#endif
#ifndef SEND_ROWS
#define SEND_ROWS 2
#endif
#ifndef CHUNK
#define CHUNK 2048
#endif
constexpr int SOURCES = R_INTRA + R_INTER - 1;
constexpr int EACH = CHUNK / 16 / 32;                              // vectors of a lane in a chunk
constexpr int BARRIERS = STAGES < SEND_ROWS ? SEND_ROWS : STAGES;  // of a warp
static_assert(CHUNK % 512 == 0, "whole vectors for each lane");

__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void bulk_store(void* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// All but the last N stores of this thread have read their shared memory.
template <int N>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// All but the last N stores of this thread are complete: their data may be released.
template <int N>
__device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// Between ordinary accesses to global memory and bulk copies of the same bytes.
__device__ __forceinline__ void fence_bulk() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// A warp's rows on their way, each in shared memory: as that of vectors.cuh, of rows of the same bytes.
struct Carrier {
    u32 memory, barriers, bytes;
    int held;  // rows of shared memory
    u32 rows;  // ever carried

    __device__ u32 at() const { return rows % held; }
    // After settle<held - 1> or reuse<held - 1>.
    __device__ void fetch(const void* row) {
        if (threadIdx.x % 32 != 0) return;
        fence_bulk();  // the row's producer may have stored it by ordinary accesses
        barrier_arrive_expect(barriers + 8 * at(), bytes);
        bulk_load(memory + at() * bytes, row, bytes, barriers + 8 * at());
    }
    __device__ void arrive() { barrier_wait(barriers + 8 * at(), rows / held & 1); }
    __device__ void put(unsigned char* to) {
        if (threadIdx.x % 32 == 0) bulk_store(to, memory + at() * bytes, bytes);
    }
    __device__ void commit() {
        if (threadIdx.x % 32 == 0) bulk_commit();
        ++rows;
    }
    // All stores but the last `MOST` rows' are at their targets; or have only left shared memory.
    template <int MOST>
    __device__ void settle() {
        if (threadIdx.x % 32 == 0) bulk_wait<MOST>();
        fence_bulk();
    }
    template <int MOST>
    __device__ void reuse() {
        if (threadIdx.x % 32 == 0) bulk_wait_read<MOST>();
        __syncwarp();
    }
};

// A warp's stages for summing.
struct Pipe {
    u32 memory, barriers;
    u32 chunks;  // ever loaded
};

template <bool NODES, class Emit>
__device__ __forceinline__ void sum_rows(Pipe& pipe, const Group& g, u32 present, u64 row_of_lane,
                                         int vectors, Emit emit) {
    const u32 lane = threadIdx.x % 32, row = vectors * 16, rows = __popc(present);
    const u32 nth = __popc(present & ((1u << lane) - 1)), chunks = (row + CHUNK - 1) / CHUNK;
    const u32 stage = (NODES ? SOURCES : R_INTRA) * CHUNK;
    const u32 here = present >> (g.node * R_INTRA) & ((1u << R_INTRA) - 1);
    const auto load = [&](u32 c) {
        const u32 n = (pipe.chunks + c) % STAGES, bytes = c + 1 < chunks ? CHUNK : row - c * CHUNK;
        if (lane == 0) barrier_arrive_expect(pipe.barriers + 8 * n, rows * bytes);
        __syncwarp();
        if (present >> lane & 1)
            bulk_load(pipe.memory + n * stage + nth * CHUNK,
                      reinterpret_cast<const char*>(row_of_lane) + c * CHUNK, bytes, pipe.barriers + 8 * n);
    };
    fence_bulk();
    for (u32 c = 0; c < chunks && c < STAGES; ++c) load(c);
    for (u32 c = 0; c < chunks; ++c) {
        const u32 n = (pipe.chunks + c) % STAGES;
        barrier_wait(pipe.barriers + 8 * n, (pipe.chunks + c) / STAGES & 1);
        float total[EACH][8] = {};
        const u32 from = pipe.memory + n * stage + lane * 16;
        const auto add = [&](float (*sum)[8], u32 i) {
#pragma unroll
            for (int u = 0; u < EACH; ++u) add_elements(sum[u], load_16(from + i * CHUNK + u * 512));
        };
        if (!NODES || R_INTER == 1 || R_INTRA == 1) {
            for (u32 i = 0; i < rows; ++i) add(total, i);
        } else {
            const u32 before = __popc(present & ((1u << (g.node * R_INTRA)) - 1)),
                      after = before + __popc(here);
            for (u32 i = 0; i < before; ++i) add(total, i);
            if (here) {
                float part[EACH][8] = {};
                for (u32 i = before; i < after; ++i) add(part, i);
#pragma unroll
                for (int u = 0; u < EACH; ++u)
#pragma unroll
                    for (int i = 0; i < 8; ++i) total[u][i] += part[u][i];
            }
            for (u32 i = after; i < rows; ++i) add(total, i);
        }
#pragma unroll
        for (int u = 0; u < EACH; ++u) {
            const int v = c * (CHUNK / 16) + u * 32 + lane;
            if (v < vectors) emit(v, total[u]);
        }
        __syncwarp();
        if (c + STAGES < chunks) load(c + STAGES);
    }
    pipe.chunks += chunks;
}
