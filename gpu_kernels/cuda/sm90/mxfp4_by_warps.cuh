// Products of an item of few rows by warps (mma.sync): no warp waits for another's product.
#pragma once

#include "sm80/mma.cuh"
#include "sm90/mxfp4_place.cuh"

// The scales of an item, as a thread needs them, by the bytes of its rows.
struct LaneScales {
    u32 rows[PARTS][2];
    int last;

    __device__ __forceinline__ LaneScales(const Place& place, u32 from, int pitch) : last(pitch - 1) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                rows[part][i] =
                    from + (place.scales + part * place.part_scale + i * place.second_scale) * pitch;
    }
    // past the last channel there are weights of 0, and no scale
    __device__ __forceinline__ int group(int unit) const {
        return min(4 * unit + static_cast<int>(threadIdx.x % 4), last);
    }
    __device__ __forceinline__ u32 operator()(int part, int i, int group) const {
        return load_byte(rows[part][i] + group);
    }
};

// Sums of one place in turns: products of few sums would wait for each other.
template <int G>
constexpr int CHAINS = PARTS * G <= 2 ? 2 : 1;

// As `multiply`, by products of a warp: the fewest groups of eight rows that hold the item's. rows: the
// matrix row and chunk of this lane.
template <int G, bool LARGE>
__device__ __forceinline__ void multiply_unit(float (&sums)[CHAINS<G>][PARTS][G][4], u32 weights, u32 rows,
                                              const u32 (&scales)[PARTS][2], const Place& place) {
    uint4 words[PARTS][2];
    u32 factors[PARTS][2];
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            words[part][i] = load_16(weights + part * place.part + i * place.second);
            factors[part][i] = LARGE ? factor(scales[part][i]) : small_factor(scales[part][i]);
        }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 a[PARTS][2][4];
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                u32 four[4];
                const uint4& w = words[part][r];
                spread(i == 0 ? w.x : i == 1 ? w.y : i == 2 ? w.z : w.w, four);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    u32 value = multiply_pairs(four[j], factors[part][r]);
                    if (LARGE) value = multiply_pairs(value, rest_of(scales[part][r]));
                    a[part][j / 2][j % 2 * 2 + r] = value;
                }
            }
        // chunks 4 i % 8 .. of a row, swizzled
        const u32 from = (i % 2 ? rows ^ 64 : rows) + i / 2 * HALF_BYTES;
#pragma unroll
        for (int g = 0; g < G; ++g) {
            u32 b[4];
            load_matrices(b, from + g * 1024);
#pragma unroll
            for (int step = 0; step < 2; ++step)
#pragma unroll
                for (int part = 0; part < PARTS; ++part)
                    multiply_add(sums[step % CHAINS<G>][part][g], a[part][step], b[2 * step],
                                 b[2 * step + 1]);
        }
    }
}

template <int G>
__device__ __forceinline__ void multiply_by_warps(const Shared& shared, Turns& turns, Sums& sums,
                                                  const Item& item, int depth, int I) {
    const Place place(item, I);
    const int units = units_of(depth), lane = threadIdx.x % 32;
    // matrices of k 0 .. 7, 8 .. 15 of a step, then of the next step
    const u32 row = lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16;
    const LaneScales of(place, shared.scales + turns.scales.at * SCALE_BYTES, depth / 32);
    float chains[CHAINS<G>][PARTS][G][4] = {};
    barrier_wait(shared.scales_full + 8 * turns.scales.at, turns.scales.parity);
#pragma unroll 1
    for (int first = 0; first < units; first += 2) {
        barrier_wait(shared.weights_full + 8 * turns.weights.at, turns.weights.parity);
        const u32 weights = shared.weights + turns.weights.at * WEIGHT_BYTES + place.weights;
        const u32 rows = shared.rows + turns.weights.at * ROW_BYTES + row;
        u32 scales[2][PARTS][2], any = 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int group = of.group(first + h);
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    scales[h][part][i] = of(part, i, group);
                    any |= scales[h][part][i];
                }
        }
        if (__ballot_sync(~0u, any & 128) != 0) {
            multiply_unit<G, true>(chains, weights, rows, scales[0], place);
            if (first + 1 < units)
                multiply_unit<G, true>(chains, weights ^ 64, rows + 2 * HALF_BYTES, scales[1], place);
        } else {
            multiply_unit<G, false>(chains, weights, rows, scales[0], place);
            if (first + 1 < units)
                multiply_unit<G, false>(chains, weights ^ 64, rows + 2 * HALF_BYTES, scales[1], place);
        }
        __syncwarp();
        release(shared.weights_empty + 8 * turns.weights.at);
        turns.weights.next();
    }
    release(shared.scales_empty + 8 * turns.scales.at);
    turns.scales.next();
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int i = 0; i < 4 * G; ++i) {
            sums[part][i] = chains[0][part][i / 4][i % 4];
            if (CHAINS<G> > 1) sums[part][i] += chains[CHAINS<G> - 1][part][i / 4][i % 4];
        }
}

template <int G>
__device__ __forceinline__ void multiply_rows(const Shared& shared, Turns& turns, Sums& sums,
                                              const Item& item, int depth, int I) {
    if constexpr (8 * G < MAX_N) {
        if (item.rows > 8 * G) {
            multiply_rows<G + 1>(shared, turns, sums, item, depth, I);
            return;
        }
    }
    multiply_by_warps<G>(shared, turns, sums, item, depth, I);
}
