// SPDX-License-Identifier: Apache-2.0
// Products of an item by warpgroups (wgmma): weights become fragments in registers, rows lie in shared
// memory.
#pragma once

#include "sm90/mxfp4_place.cuh"
#include "sm90/wgmma.cuh"

// The bytes and factors of one unit of weights. Words of the next unit come once those of this one are used.
struct Bytes : UnitScales {
    u32 words[PARTS][2][4], factors[PARTS][2];

    // Words 2 `half` and the next.
    __device__ __forceinline__ void load(u32 weights, const Place& place, int half) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint2 two = load_8(weights + part * place.part + i * place.second + 8 * half);
                words[part][i][2 * half] = two.x;
                words[part][i][2 * half + 1] = two.y;
            }
    }
#if BOXED
    // Words 2 `half` and the next of a stage that may have fewer rows or groups: zeros where there are none.
    __device__ __forceinline__ void load_cut(u32 stage, const Place& place, int groups, int unit, int half,
                                             bool with_scales) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const Chunk chunk = place.chunk(part, groups, unit);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 at = i ? chunk.second : chunk.first;
                const uint2 two = load_8(stage + place.box() * BOX_BYTES + 16 * at + 8 * half);
                words[part][i][2 * half] = chunk.here ? two.x : 0;
                words[part][i][2 * half + 1] = chunk.here ? two.y : 0;
                if (!with_scales) continue;
                const u32 scale = load_byte(stage + BOXES * BOX_BYTES + place.box() * BOX_SCALES + at);
                scales[part][i] = chunk.here ? scale : 0;
            }
        }
    }
#endif
    // Make factors of the scales that were loaded. True, for the whole warp, if some scale is 128 or more.
    __device__ __forceinline__ bool large() {
        u32 any = 0;
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                any |= scales[part][i];
                factors[part][i] = factor(scales[part][i]);
            }
        return __ballot_sync(~0u, any & 128) != 0;
    }
};

// Fragments of two steps of 16 channels: words 0 and 2 are of the first row.
struct Fragments {
    u32 words[PARTS][2][4];

    __device__ __forceinline__ void make(const Bytes& bytes, int i) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                u32 four[4];
                spread_word(bytes.words[part][row], i, four);
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    words[part][j / 2][j % 2 * 2 + row] = multiply_pairs(four[j], bytes.factors[part][row]);
            }
    }
    // What large scales are beyond their factors.
    template <typename Scales>
    __device__ __forceinline__ void enlarge(const Scales& scale_of) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const u32 rest = rest_of(scale_of(part, row));
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    u32& word = words[part][j / 2][j % 2 * 2 + row];
                    word = multiply_pairs(word, rest);
                }
            }
    }
};

// Two steps of the smallest N of LEAST .. MOST, a multiple of 16, that holds the rows; sums past it are
// unchanged. Each N in a loop of its own would take registers of its own for fragments.
template <int LEAST, int MOST>
__device__ __forceinline__ void products(Sums& sums, const Fragments& fragments, u64 b, bool add, int rows) {
    if constexpr (LEAST < MOST) {
        constexpr int MIDDLE = (LEAST + MOST) / 32 * 16;
        if (rows <= MIDDLE)
            products<LEAST, MIDDLE>(sums, fragments, b, add, rows);
        else
            products<MIDDLE + 16, MOST>(sums, fragments, b, add, rows);
    } else {
        products_begin();
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                product_of_registers<MOST>(sums[part], fragments.words[part][step],
                                           advance(b, step * OPERAND_STEP), add || step > 0);
        products_commit();
    }
}

__device__ __forceinline__ void multiply(const Shared& shared, Turns& turns, Sums& sums, const Item& item,
                                         int depth, int I) {
    const Place place(item, I);
    const int units = units_of(depth);
    Fragments fragments[2];
    Bytes bytes;
    bool large = false;
    u64 rows = 0;
    int before = -1;  // the stage of rows to release
#if BOXED
    // the half of a unit, of the stage at hand
    const auto load = [&](int unit, int half, bool with_scales) {
        const u32 stage = shared.weights + turns.weights.at * WEIGHT_BYTES;
        const int groups = min(STAGE_GROUPS, depth / 32 - unit / 2 * STAGE_GROUPS);
        if (place.whole() && groups == STAGE_GROUPS) {
            bytes.load(stage + place.weights + unit % 2 * 1024, place, half);
            if (with_scales) bytes.load_scales(stage + place.scales + unit % 2 * 64);
        } else {
            bytes.load_cut(stage, place, groups, unit % 2, half, with_scales);
        }
    };
    const auto scale_of = [&](int part, int i) { return bytes.scales[part][i]; };
    barrier_wait(shared.weights_full + 8 * turns.weights.at, turns.weights.parity);
    load(0, 0, true);
    load(0, 1, false);
#else
    const ScalesOf scales{place, shared.scales + turns.scales.at * SCALE_BYTES, depth / 32};
    barrier_wait(shared.scales_full + 8 * turns.scales.at, turns.scales.parity);
    barrier_wait(shared.weights_full + 8 * turns.weights.at, turns.weights.parity);
    u32 weights = shared.weights + turns.weights.at * WEIGHT_BYTES + place.weights;
    bytes.load_scales(scales, 0);
    bytes.load(weights, place, 0);
    bytes.load(weights, place, 1);
#endif
    for (int first = 0; first < units; first += ROW_UNITS) {
#pragma unroll
        for (int i = 0; i < 4 * ROW_UNITS; ++i) {
            const int unit = first + i / 4;
            const bool second = ROW_UNITS == 2 ? i >= 4 : unit % 2;  // of a stage of weights
            if (i == 4 && unit >= units) break;
            if (i % 4 == 0) large = bytes.large();
            products_wait<1>();  // those that read the same fragments
            if (i == 1) {
                if (before >= 0) release(shared.rows_empty + 8 * before);
                before = turns.rows.at;
                turns.rows.next();
            }
            fragments[i % 2].make(bytes, i % 4);
#if !BOXED
            const auto scale_of = [&](int part, int row) { return scales(part, row, unit); };
#endif
            if (large) fragments[i % 2].enlarge(scale_of);
            if (i == 0) {
                barrier_wait(shared.rows_full + 8 * turns.rows.at, turns.rows.parity);
                fence_async_proxy();  // rows were written through the generic proxy
                rows = operand(shared.rows + turns.rows.at * ROW_BYTES);
            }
            const u32 at = i / 2 * (HALF_BYTES / 16) + i % 2 * 2 * OPERAND_STEP;
            products<16, MAX_N>(sums, fragments[i % 2], advance(rows, at), first + i > 0, item.rows);
            // words i - 1 and i were used: those of the next unit take their place
            if (i % 2 && unit + 1 < units) {
                if (i % 4 == 1 && second)
                    barrier_wait(shared.weights_full + 8 * turns.weights.at, turns.weights.parity);
#if BOXED
                load(unit + 1, i % 4 / 2, i % 4 == 3);  // the rest of large scales was needed until now
#else
                if (i % 4 == 1 && second)
                    weights = shared.weights + turns.weights.at * WEIGHT_BYTES + place.weights;
                bytes.load(second ? weights : weights ^ 64, place, i % 4 / 2);
                if (i % 4 == 1) bytes.load_scales(scales, unit + 1);
#endif
            }
            if (i % 4 == 3 && !second) {  // all of a stage of weights was asked for
                release_read(shared.weights_empty + 8 * turns.weights.at);
                turns.weights.next();
            }
        }
    }
    products_wait<0>();
    __syncwarp();
    release(shared.rows_empty + 8 * before);
#if !BOXED
    release(shared.scales_empty + 8 * turns.scales.at);
    turns.scales.next();
#endif
}
