// SPDX-License-Identifier: Apache-2.0
// Rows of bf16 that other blocks wrote, in fp16 in their place, with their powers.
#pragma once

#include "common/copies.cuh"
#include "sm80/row_powers.cuh"

// Rows first .. first + count - 1 of `width` channels, a multiple of 8, by THREADS threads behind an acquire.
template <int THREADS>
__device__ __forceinline__ void rows_to_fp16(u16* rows, float* powers, int first, int count, int width) {
    constexpr int LANES = 8, UNITS_AT_ONCE = 16;  // of a row: threads, and 16 bytes of each in registers
    const int units = width / 8, lane = threadIdx.x % LANES;
#pragma unroll 1
    for (int row = threadIdx.x / LANES; row < (count + 3) / 4 * 4; row += THREADS / LANES) {
        const bool here = row < count;  // a warp shuffles as one
        uint4* at =
            reinterpret_cast<uint4*>(rows) + static_cast<u64>(first + (here ? row : 0)) * units + lane;
        // zeros: what is undefined on some way stays in registers through a kernel's loops
        uint4 some[UNITS_AT_ONCE] = {};
        const auto load = [&](int from) {
#pragma unroll
            for (int i = 0; i < UNITS_AT_ONCE; ++i) {
                some[i] = make_uint4(0, 0, 0, 0);
                if (from + LANES * i + lane < units) some[i] = load_there(at + from + LANES * i);
            }
        };
        u32 most = 0;
#pragma unroll 1
        for (int from = 0; from < units; from += LANES * UNITS_AT_ONCE) {
            load(from);
#pragma unroll
            for (int i = 0; i < UNITS_AT_ONCE; ++i) most = most_of(most, some[i]);
        }
        const RowPower power(most_of_lanes<LANES>(most));
        if (!here) continue;
        if (lane == 0) powers[first + row] = power.down;
#pragma unroll 1
        for (int from = 0; from < units; from += LANES * UNITS_AT_ONCE) {
            if (units > LANES * UNITS_AT_ONCE) load(from);
#pragma unroll
            for (int i = 0; i < UNITS_AT_ONCE; ++i)
                if (from + LANES * i + lane < units) at[from + LANES * i] = power.unit(some[i]);
        }
    }
}
