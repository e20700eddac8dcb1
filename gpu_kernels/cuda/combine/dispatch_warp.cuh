// SPDX-License-Identifier: Apache-2.0
// A warp of dispatch: what its roles share. The kernel defines Local and Carrier before.
#pragma once

#include "combine/publish.cuh"

constexpr int SENDERS = R > 1, FORWARDERS = R_INTER > 1;
constexpr int ROLES = 1 + FORWARDERS + SENDERS;
constexpr int PREPARERS = (1 + FORWARDERS) * CHANNELS;  // warps that announce, and number rows
constexpr u32 NODE = (1u << R_INTRA) - 1;
static_assert(R_INTRA <= 8 && R <= 32, "bits of a node");

struct Found {  // in shared memory
    u32 dead, A;
    int tokens[R];
};

struct Numbers {  // of rows, in shared memory: of each rank and 32 tokens
    u32 *bits, *base;
    int segments;

    __device__ bool has(int c, int t) const { return bits[c * segments + t / 32] >> (t % 32) & 1; }
    __device__ u32 row(int c, int t) const {
        const int at = c * segments + t / 32;
        return base[at] + __popc(bits[at] & ((1u << (t % 32)) - 1));
    }
};

__device__ __forceinline__ void preparers_sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(PREPARERS * 32) : "memory");
}

// A warp of one role and one channel; a lane stands for a rank where the roles look at all of them.
struct Warp {
    const Group& g;
    const Local& own;
    const Numbers numbers;
    const int ch, lane, H, K, T_max;
    const u32 call;               // of this rank, modulo 2^32
    volatile u32 *counts, *puts;  // [RINGS] of the channel, in Shared
    Carrier carrier;

    __device__ unsigned char* announcements(int r) const {
        return g.data(r, RINGS * g.C, 0) +
               (128 - reinterpret_cast<u64>(g.data(r, RINGS * g.C, 0)) % 128) % 128;
    }
    __device__ u32* announced(int r, int by) const {
        return reinterpret_cast<u32*>(announcements(r)) + by * 8;
    }
    __device__ u32* calls() const { return announced(g.rank, R) + blockIdx.x; }
    __device__ u32* tokens(int r, int by) const { return announced(r, R) + gridDim.x + (call & 1) * R + by; }
    __device__ u32* mask(int r, int by, int t) const {
        return announced(r, R) + gridDim.x + 2 * R + (static_cast<u64>(call & 1) * R + by) * T_max + t;
    }

    __device__ int own_T() const { return min(max(own.T[0], 0), T_max); }
    __device__ u32 bit_of(int e) const {
        return static_cast<u32>(e) < static_cast<u32>(g.call.E) ? 1u << own.owner[e] : 0;
    }
    __device__ u32 mask_at(int c, int t) const {
        return t < T_max ? load_relaxed_sys(mask(g.rank, c, t)) : 0;
    }
    __device__ const unsigned char* x_row(int t) const {
        return reinterpret_cast<const unsigned char*>(own.x + static_cast<u64>(t) * H);
    }
    __device__ unsigned char* row(u32 a) const {
        return reinterpret_cast<unsigned char*>(own.rows + static_cast<u64>(a) * H);
    }
    __device__ const int* ids_of(const unsigned char* slot) const {
        return reinterpret_cast<const int*>(slot + static_cast<u64>(H) * 2);
    }

    __device__ bool stalls(int items, int role) const {
        if (STALLS != g.rank || STALL_ROLE != role || items < 1) return false;
        while (!g.aborted()) __nanosleep(1000);
        return true;
    }

    // Ids and weights of a token into a slot, or to a row of this rank.
    __device__ void put_pairs(unsigned char* slot, const int* ids, const float* weights) const {
        int* to = reinterpret_cast<int*>(slot + static_cast<u64>(H) * 2);
        for (int k = lane; k < K; k += 32) {
            to[k] = ids[k];
            reinterpret_cast<float*>(to)[K + k] = weights[k];
        }
    }
    __device__ void deliver_pairs(u32 a, const int* ids, const float* weights) const {
        for (int k = lane; k < K; k += 32) {
            const int e = ids[k];
            const u64 at = static_cast<u64>(a) * K + k;
            own.row_ids[at] = static_cast<u32>(e) < static_cast<u32>(g.call.E) ? own.local_of[e] : -1;
            own.row_weights[at] = weights[k];
        }
    }

    __device__ void announce(int warp) const;
    __device__ bool number(int warp, Found& found);
    __device__ void tell_combine(const Found& found) const;
    __device__ bool credit(Sends<Carrier>& sends, bool wants, const u32* head, u32& freed, int peer,
                           int role);
    __device__ void send();
    __device__ void forward(const Found& found);
    __device__ void receive(const Found& found);
};
