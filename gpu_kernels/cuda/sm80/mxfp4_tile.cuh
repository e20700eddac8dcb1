// A warp's products of 64 rows of MXFP4 weights and the rows of a tile: where both lie in memory and in shared
// memory, and where sums go.
//
// Product m of four has 16 rows. Of gate and up: low rows are gate rows of channels 8m .. 8m + 7, high rows
// the up rows of the same channels. Of down: rows 16m .. 16m + 15.
#pragma once

#include "common/activation.cuh"
#include "common/copies.cuh"
#include "sm80/items.cuh"
#include "sm80/mxfp4.cuh"

constexpr int SUMS_STRIDE = 68;  // of 64 sums of a row of a tile: lanes that write them touch every bank once

struct Mlp {
    const unsigned char *gate_up_blocks, *gate_up_scales;
    Biases gate_up_biases;
    const unsigned char *down_blocks, *down_scales;
    Biases down_biases;
    const u16* hidden;
    const int* row_tokens;
    u16 *act, *out;
    int H, I, row_step, up_rows;
};

// 64 rows of weights in memory. first: of the rows, counted over gate and up as products take them.
struct Rows {
    const unsigned char *blocks, *scales;  // of the first row
    int depth;                             // channels of a row
    int step;                              // rows from one low row to the next
    int run, runs, to_run;                 // rows in a row of memory; how often; rows from one run to the next
    u32 tile, high;                        // bytes to the next product, and to the high rows
    int valid;                             // of 64

    __device__ __forceinline__ Rows(const Mlp& given, bool is_down, int expert, int first) {
        const int R = is_down ? given.H : 2 * given.I;
        depth = is_down ? given.I : given.H;
        step = is_down ? 1 : given.row_step;
        const bool halves = !is_down && given.row_step == 1;
        const u64 row = static_cast<u64>(expert) * R + (halves ? first / 2 : first);
        blocks = (is_down ? given.down_blocks : given.gate_up_blocks) + row * (depth / 2);
        scales = (is_down ? given.down_scales : given.gate_up_scales) + row * (depth / 32);
        tile = (is_down ? 16 : 8 * step) * (depth / 2);
        high = (is_down ? 8 : given.up_rows) * (depth / 2);
        valid = min(R - first, 64);
        runs = halves ? 2 : 1;
        run = valid / runs;
        to_run = given.up_rows;
    }
    // Address of low row g of the first product.
    __device__ __forceinline__ u64 weights(int g) const {
        return reinterpret_cast<u64>(blocks + static_cast<u64>(g * step) * (depth / 2));
    }
    // All rows' scales, one run after the other.
    __device__ __forceinline__ void copy_scales(u32 to, int thread, int threads) const {
        const int bytes = depth / 32, units = run * bytes / 16;
        for (int r = 0; r < runs; ++r)
            for (int i = thread; i < units; i += threads)
                copy_16(to + (r * units + i) * 16, scales + static_cast<u64>(r * to_run) * bytes + i * 16);
    }
};

// Where those scales lie: bytes to this lane's low row of product 0, to the next product, to the high rows.
struct ScaleRows {
    int first, tile, high, groups;

    __device__ __forceinline__ ScaleRows(const Mlp& given, bool is_down) {
        groups = (is_down ? given.I : given.H) / 32;
        const int step = is_down ? 1 : given.row_step;
        first = threadIdx.x % 32 / 4 * step * groups;
        tile = (is_down ? 16 : 8 * step) * groups;
        high = (is_down ? 8 : step == 2 ? 1 : 32) * groups;
    }
};

// Of 16 bytes, unit = 0 .. 15, of 128 channels of a row of a tile: word i of lane t is unit 4t + i. Two rows
// of four lanes touch every bank once.
__device__ __forceinline__ u32 place_of_row(int row, int unit) {
    return row * 256 + ((unit % 4 * 4 + unit / 4) ^ row % 2 * 4) * 16;
}

template <int G>
using Sums = float[4][G][4];

template <int G>
__device__ __forceinline__ void clear(Sums<G>& sums) {
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int j = 0; j < G; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][j][i] = 0.0f;
}

template <int G, bool LARGE>
__device__ __forceinline__ void multiply_rows(Sums<G>& sums, const uint4* weights, const u32 (&scales)[4][2],
                                              const uint4 (&b)[4][G]) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        const uint4 low = weights[m * 64], high = weights[m * 64 + 32];
        const Factor by_low = Factor::of<LARGE>(scales[m][0]), by_high = Factor::of<LARGE>(scales[m][1]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            multiply_word<LARGE, G>(sums[m], word_of(low, i), word_of(high, i), by_low, by_high, b[i]);
    }
}

// weights: 64 rows of 64 bytes, low and high rows of each product; rows: of x, N of them; c: the chunk.
template <int G, int N>
__device__ __forceinline__ void multiply_chunk(Sums<G>& sums, const unsigned char* weights,
                                               const unsigned char* rows, const unsigned char* scales,
                                               const ScaleRows& of_scales, int c) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    uint4 b[4][G];
#pragma unroll
    for (int j = 0; j < G; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            b[i][j] = pairs_of(*reinterpret_cast<const uint4*>(
                rows + j * 2048 + place_of_row(lane / 4 % N, 4 * t + i)));
    const unsigned char* own = scales + of_scales.first + min(4 * c + t, of_scales.groups - 1);
    u32 s[4][2], any = 0;
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            s[m][h] = own[m * of_scales.tile + h * of_scales.high];
            any |= s[m][h];
        }
    const uint4* of_lane = reinterpret_cast<const uint4*>(weights) + lane;
    if (__ballot_sync(~0u, is_large(any)))
        multiply_rows<G, true>(sums, of_lane, s, b);
    else
        multiply_rows<G, false>(sums, of_lane, s, b);
}

// A warp's sums of the first `rows` rows of a tile, 64 each, into shared memory.
template <int G, int N>
__device__ __forceinline__ void keep(const Sums<G>& sums, float* memory, int rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < G; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int n = 8 * j + lane % 4 * 2 + i % 2;
            if (n < rows)
#pragma unroll
                for (int m = 0; m < 4; ++m)
                    memory[n * SUMS_STRIDE + 16 * m + i / 2 * 8 + lane / 4] = sums[m][j][i];
        }
}

// Four neighbours of W warps' sums.
template <int W, int N>
__device__ __forceinline__ float4 add_up(const float* memory, int at) {
    float4 sum = *reinterpret_cast<const float4*>(memory + at);
#pragma unroll
    for (int w = 1; w < W; ++w) {
        const float4 more = *reinterpret_cast<const float4*>(memory + w * (N * SUMS_STRIDE) + at);
        sum.x += more.x;
        sum.y += more.y;
        sum.z += more.z;
        sum.w += more.w;
    }
    return sum;
}

// All threads: what `keep` of all warps kept, to act or out.
template <int W, int N>
__device__ __forceinline__ void write_kept(const float* memory, const Item& item, const Mlp& given) {
    const bool is_down = item.kind == DOWN;
    const int quads = is_down ? 16 : 8, q = threadIdx.x % quads;
    const int width = is_down ? given.H : given.I, channel = item.block * quads * 4 + 4 * q;
    if (channel >= width) return;
    float bias[2][4];
    if (BIASED)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u64 row =
                static_cast<u64>(item.of.expert) * (is_down ? given.H : 2 * given.I) +
                (channel + i) * (is_down ? 1 : given.row_step);
            bias[0][i] = is_down ? given.down_biases[row] : given.gate_up_biases[row];
            bias[1][i] = is_down ? 0.0f : given.gate_up_biases[row + given.up_rows];
        }
    for (int n = threadIdx.x / quads; n < item.of.rows; n += 32 * W / quads) {
        const int at = n * SUMS_STRIDE + (is_down ? 4 * q : q / 2 * 16 + q % 2 * 4);
        float4 low = add_up<W, N>(memory, at);
        if (BIASED) {
            low.x += bias[0][0];
            low.y += bias[0][1];
            low.z += bias[0][2];
            low.w += bias[0][3];
        }
        if (!is_down) {
            float4 high = add_up<W, N>(memory, at + 8);
            if (BIASED) {
                high.x += bias[1][0];
                high.y += bias[1][1];
                high.z += bias[1][2];
                high.w += bias[1][3];
            }
            low.x = activated(low.x, high.x);
            low.y = activated(low.y, high.y);
            low.z = activated(low.z, high.z);
            low.w = activated(low.w, high.w);
        }
        u16* to = (is_down ? given.out : given.act) + static_cast<u64>(item.of.first + n) * width + channel;
        *reinterpret_cast<uint2*>(to) = make_uint2(pack(low.x, low.y), pack(low.z, low.w));
    }
}
