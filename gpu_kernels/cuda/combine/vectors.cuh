// SPDX-License-Identifier: Apache-2.0
// Rows by 16-byte vector copies (sm_80 and newer): a warp copies a row, or sums rows.
#pragma once

#include "combine/publish.cuh"

#ifndef COLUMNS
#define COLUMNS (R <= 2 && !WIRE32 ? 4 : R <= 8 ? 2 : 1)  // vectors of 8 columns a lane, at a time
#endif

struct Words {
    uint4 a;
#if WIRE32
    uint4 b;
#endif
};

__device__ __forceinline__ uint4 load_once(const void* from) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

// Columns of a row of x (own), or of a slot.
__device__ __forceinline__ Words load_columns(const unsigned char* from, int vector, bool own) {
    Words words;
#if WIRE32
    words.a = load_once(from + static_cast<u64>(vector) * (own ? 16 : 32));
    if (!own) words.b = load_once(from + static_cast<u64>(vector) * 32 + 16);
#else
    words.a = load_once(from + static_cast<u64>(vector) * 16);
#endif
    return words;
}

__device__ __forceinline__ void add_elements(float* sum, uint4 v) {
    const u32 a[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[2 * i] += first_of(a[i]);
        sum[2 * i + 1] += second_of(a[i]);
    }
}

__device__ __forceinline__ void add_columns(float* sum, const Words& words, bool own) {
#if WIRE32
    if (!own) {
        const u32 a[8] = {words.a.x, words.a.y, words.a.z, words.a.w,
                          words.b.x, words.b.y, words.b.z, words.b.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += __uint_as_float(a[i]);
        return;
    }
#endif
    add_elements(sum, words.a);
}

__device__ __forceinline__ uint4 packed(const float* sum) {
    return make_uint4(pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7]));
}

__device__ __forceinline__ void store_slot(unsigned char* to, int vector, const float* sum) {
#if WIRE32
    float4* at = reinterpret_cast<float4*>(to + static_cast<u64>(vector) * 32);
    at[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    at[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
#else
    *reinterpret_cast<uint4*>(to + static_cast<u64>(vector) * 16) = packed(sum);
#endif
}

// A row of x into a slot.
__device__ __forceinline__ void copy_row(unsigned char* to, const unsigned char* from, int vectors) {
    constexpr int N = WIRE32 ? 2 : 2 * COLUMNS;
    for (int v = threadIdx.x % 32; v < vectors; v += 32 * N) {
        uint4 words[N];
#pragma unroll
        for (int u = 0; u < N; ++u)
            if (v + 32 * u < vectors) words[u] = load_once(from + static_cast<u64>(v + 32 * u) * 16);
#pragma unroll
        for (int u = 0; u < N; ++u) {
            if (v + 32 * u >= vectors) continue;
#if WIRE32
            float sum[8] = {};
            add_elements(sum, words[u]);
            store_slot(to, v + 32 * u, sum);
#else
            *reinterpret_cast<uint4*>(to + static_cast<u64>(v + 32 * u) * 16) = words[u];
#endif
        }
    }
}

#if !BULK
// A warp's row on its way to one target or several: here it is there at once.
struct Carrier {
    const unsigned char* from;
    int vectors;

    __device__ void fetch(const void* row) { from = static_cast<const unsigned char*>(row); }
    __device__ void arrive() {}
    __device__ void put(unsigned char* to) { copy_row(to, from, vectors); }
    __device__ void commit() { __syncwarp(); }
    template <int MOST>
    __device__ void settle() {}
    template <int MOST>
    __device__ void reuse() {}
};
#endif

// Add a node's rows of a token, in ascending local index. row_of_lane: an address in the lane of each rank.
__device__ __forceinline__ void sum_node(float (*sum)[8], const Group& g, u32 here, u64 row_of_lane, int v,
                                         int vectors) {
    constexpr int GROUP = WIRE32 ? 2 : R_INTRA < 4 ? R_INTRA : 4;  // rows in flight
#pragma unroll
    for (int first = 0; first < R_INTRA; first += GROUP) {
        Words words[GROUP][COLUMNS];
#pragma unroll
        for (int la = first; la < first + GROUP && la < R_INTRA; ++la) {
            if (!(here >> la & 1)) continue;
            const u64 from = __shfl_sync(ALL, row_of_lane, g.node * R_INTRA + la);
#pragma unroll
            for (int u = 0; u < COLUMNS; ++u)
                if (v + 32 * u < vectors)
                    words[la - first][u] =
                        load_columns(reinterpret_cast<const unsigned char*>(from), v + 32 * u, la == g.local);
        }
#pragma unroll
        for (int la = first; la < first + GROUP && la < R_INTRA; ++la) {
            if (!(here >> la & 1)) continue;
#pragma unroll
            for (int u = 0; u < COLUMNS; ++u)
                if (v + 32 * u < vectors) add_columns(sum[u], words[la - first][u], la == g.local);
        }
    }
}

// Sum over ranks of this node, and with NODES over the partials of others: ascending. present: a bit for each
// rank whose lane holds an address. emit(vector, sum) ends each vector of 8 columns.
template <bool NODES, class Emit>
__device__ __forceinline__ void sum_rows(const Group& g, u32 present, u64 row_of_lane, int vectors,
                                         Emit emit) {
    const u32 here = present >> (g.node * R_INTRA) & ((1u << R_INTRA) - 1);
    for (int v = threadIdx.x % 32; v - static_cast<int>(threadIdx.x % 32) < vectors; v += 32 * COLUMNS) {
        float total[COLUMNS][8] = {};
        if (!NODES || R_INTER == 1) {
            sum_node(total, g, here, row_of_lane, v, vectors);
        } else {
#pragma unroll
            for (int n = 0; n < R_INTER; ++n) {
                if (!(present >> (n * R_INTRA) & ((1u << R_INTRA) - 1))) continue;
                if (n == g.node && R_INTRA == 1) {
                    sum_node(total, g, here, row_of_lane, v, vectors);
                } else if (n == g.node) {
                    float part[COLUMNS][8] = {};
                    sum_node(part, g, here, row_of_lane, v, vectors);
#pragma unroll
                    for (int u = 0; u < COLUMNS; ++u)
#pragma unroll
                        for (int i = 0; i < 8; ++i) total[u][i] += part[u][i];
                } else {
                    const u64 slot = __shfl_sync(ALL, row_of_lane, n * R_INTRA + g.local);
#pragma unroll
                    for (int u = 0; u < COLUMNS; ++u)
                        if (v + 32 * u < vectors) {
                            const auto from = reinterpret_cast<const unsigned char*>(slot);
                            add_columns(total[u], load_columns(from, v + 32 * u, false), false);
                        }
                }
            }
        }
#pragma unroll
        for (int u = 0; u < COLUMNS; ++u)
            if (v + 32 * u < vectors) emit(v + 32 * u, total[u]);
    }
}
