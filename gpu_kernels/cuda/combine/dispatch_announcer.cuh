// SPDX-License-Identifier: Apache-2.0
// Dispatch: a rank's masks to all ranks; then the number of each row, for the roles and for combine.
#pragma once

#include "combine/dispatch_warp.cuh"

// This rank's masks to every rank.
__device__ void Warp::announce(int warp) const {
    const int T = own_T();
    for (int t = (blockIdx.x * PREPARERS + warp) * 32 + lane; t < T; t += gridDim.x * PREPARERS * 32) {
        u32 to = 0;
        for (int k = 0; k < K; ++k) to |= bit_of(own.ids[static_cast<u64>(t) * K + k]);
#pragma unroll
        for (int r = 0; r < R; ++r) store_relaxed_sys(mask(r, g.rank, t), to);
    }
    if (blockIdx.x == 0 && warp == 0 && lane < R) store_relaxed_sys(tokens(lane, g.rank), T);
    preparers_sync();
    if (stalls(1, ANNOUNCER)) return;
    if (warp == 0) {
        fence_sys();
        if (lane < R)
            asm volatile("red.relaxed.sys.global.add.u32 [%0], 1;" ::"l"(announced(lane, g.rank)) : "memory");
    }
}

// The number of each row here: after all ranks announced. false: the group is dead.
__device__ bool Warp::number(int warp, Found& found) {
    if (warp == 0) {
        const int c = lane < R ? lane : 0;
        const bool met = g.wait(lane < R, announced(g.rank, c), (call + 1) * gridDim.x, c, ANNOUNCER);
        if (lane == 0) found.dead = !met;
    }
    preparers_sync();
    if (found.dead) return false;
    const int T_of = lane < R ? min(static_cast<int>(load_relaxed_sys(tokens(g.rank, lane))), T_max) : 0;
    constexpr int BATCH = 8;
    const int all = R * numbers.segments;
    for (int first = warp * BATCH; first < all; first += PREPARERS * BATCH) {
        u32 to[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int at = min(first + i, all - 1), c = at / numbers.segments;
            const int t = at % numbers.segments * 32 + lane, T = __shfl_sync(ALL, T_of, c);
            to[i] = t < T ? load_relaxed_sys(mask(g.rank, c, t)) : 0;
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const u32 word = __ballot_sync(ALL, to[i] >> g.rank & 1);
            if (lane == 0 && first + i < all) numbers.bits[first + i] = word;
        }
    }
    preparers_sync();
    if (warp == 0) {
        u32 total = 0;
        for (int first = 0; first < all; first += 32) {
            const u32 count = first + lane < all ? __popc(numbers.bits[first + lane]) : 0;
            u32 sum = count;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const u32 before = __shfl_up_sync(ALL, sum, d);
                if (lane >= d) sum += before;
            }
            if (first + lane < all) numbers.base[first + lane] = total + sum - count;
            total += __shfl_sync(ALL, sum, 31);
        }
        if (lane == 0) found.A = total;
        if (lane < R) found.tokens[lane] = T_of;
    }
    preparers_sync();
    return true;
}

// What combine asks for.
__device__ void Warp::tell_combine(const Found& found) const {
    const int all = R * numbers.segments;
    for (int at = ch; at < all; at += g.C) {
        const int c = at / numbers.segments, t = at % numbers.segments * 32 + lane;
        if (t >= T_max) continue;
        const u64 to = static_cast<u64>(c) * T_max + t;
        own.masks[to] = t < found.tokens[c] ? mask_at(c, t) : 0;
        own.row_of[to] = numbers.has(c, t) ? static_cast<int>(numbers.row(c, t)) : -1;
    }
    if (ch != 0) return;
    if (lane < R) own.tokens[lane] = found.tokens[lane];
    if (lane == 0) *own.A = found.A;
}
