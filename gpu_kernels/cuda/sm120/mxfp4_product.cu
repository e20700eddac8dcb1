// SPDX-License-Identifier: Apache-2.0
// Sorted rows times MXFP4 weights of their experts: block-scaled products of compute capability 12.x.
// One launch makes act = silu(x Wg_e^T) * (x Wu_e^T) of gathered tokens, another out = act Wd_e^T.
//
// | argument     | shape         | dtype            |                                                              |
// |--------------|---------------|------------------|--------------------------------------------------------------|
// | x            | [X, C]        | e4m3             | of mx_quantise or of the first launch; 16 bytes              |
// | x_scales     | [X, S]        | ue8m0            | S: C / 32 rounded up to 4; zeros after the last; 4 bytes     |
// | row_tokens   | [P]           | int32 or null    | row of x of each sorted row; null: the same                  |
// | weights      | [E, R, C / 2] | e2m1             | channel 2i in the low bits of byte i; 16 bytes               |
// | w_scales     | [E, R, C / 32] | ue8m0           | 4 bytes                                                      |
// | bias16       | [E, R]        | bf16 or null     |                                                              |
// | bias32       | [E, R]        | fp32 or null     | at most one of both                                          |
// | tiles        | [bound]       | Tile             | of routing_sort, tile_rows = TILE_M                          |
// | num_tiles    | [1]           | int32            |                                                              |
// | out          | [P, outputs]  | bf16, e4m3, fp32 | down; act; act where TILE_N < 64, for mx_quantise            |
// | out_scales   | [P, S]        | ue8m0            | of act; null where TILE_N < 64 and for down                  |
//
// C (channels) and outputs are multiples of 32. gate_up: R = 2 * outputs, the gate row of output n is n *
// row_step, its up row up_step further. down: R = outputs, row_step 1, up_step 0. PACKED: x and act are e2m1.
// CLAMPED: act is the clamped SwiGLU.
//
// Work: items of a tile of tokens times TILE_N weight rows. Block b makes items b, b + gridDim.x, ... A tile
// of 64 or 128 tokens is the A side of the products. Of any other size, the weights are the A side and the
// tokens the B side: `SWAPPED`. A warp makes 16 or 32 rows by up to 64 columns.
//
// Shared memory: STAGES stages of 128 channels, filled by cp.async, also across items. A stage holds rows of
// tokens, rows of weights, words of their scales. A row is 128 bytes, swizzled in units of 16: 16 numbers of
// FP4 fill 8 bytes, 8 are padding (`ldmatrix ... b4x16_p64`). PACKED: 64 bytes, without padding. Scales of
// weights may begin between words: two words each, shifted after the load. After the stages: MAXIMA words.
// Producers: mx_quantise, routing_sort. Consumers: mx_quantise, combine. At most 255 registers.
#include "common/routing.cuh"
#include "sm120/atoms.cuh"
#include "sm120/copies.cuh"
#include "sm120/mx.cuh"

#ifndef TILE_M
#define TILE_M 128
#endif
#ifndef TILE_N
#define TILE_N 128
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifndef CLAMPED
#define CLAMPED 0
#endif

constexpr bool SWAPPED = TILE_M != 64 && TILE_M != 128, FUSED = TILE_N >= 64;
constexpr int ROWS = SWAPPED ? TILE_N : TILE_M, COLUMNS = SWAPPED ? TILE_M : TILE_N;
constexpr int WARP_ROWS = ROWS * COLUMNS > 8192 ? 32 : 16, WARP_COLUMNS = COLUMNS < 64 ? COLUMNS : 64;
constexpr int WARPS_M = ROWS / WARP_ROWS, WARPS_N = COLUMNS / WARP_COLUMNS, THREADS = 32 * WARPS_M * WARPS_N;
constexpr int MS = WARP_ROWS / 16, NS = WARP_COLUMNS / 8;  // fragments of a warp
constexpr int K_BLOCK = 128, ROW_BYTES = PACKED ? 64 : 128, CHUNKS = ROW_BYTES / 16, STEPS = PACKED ? 2 : 4;
constexpr int WEIGHT_UNIT = PACKED ? 16 : 8;  // bytes of a chunk that are weights
constexpr int WEIGHTS = TILE_M * ROW_BYTES, X_SCALES = WEIGHTS + TILE_N * ROW_BYTES;
constexpr int W_SCALES = X_SCALES + 4 * TILE_M, STAGE_BYTES = W_SCALES + 8 * TILE_N;
constexpr int PASS = THREADS / CHUNKS;  // rows that the threads copy at a time
constexpr int X_PASSES = (TILE_M + PASS - 1) / PASS, W_PASSES = (TILE_N + PASS - 1) / PASS;
constexpr int GROUP_WARPS = 64 / WARP_ROWS;  // SWAPPED: warps that share the scales of their outputs

static_assert(ROWS == 64 || ROWS == 128, "a warp makes 16 or 32 rows");
static_assert(TILE_M <= THREADS && TILE_N <= THREADS, "a thread copies the scales of one row");
static_assert(FUSED || !SWAPPED, "swapped tiles make whole groups of outputs");
static_assert(STAGES >= 2, "one is filled while another is multiplied");

// Swizzled byte offset of a 16-byte chunk of a row: eight rows of one chunk touch every bank once.
__device__ __forceinline__ int place(int row, int chunk) {
    return row * ROW_BYTES + (chunk ^ (CHUNKS == 8 ? row % 8 : row / 2 % 4)) * 16;
}

struct Matrices {
    const u8 *x, *x_scales, *weights, *w_scales;
    const int* row_tokens;
    const Tile* tiles;
    int items, blocks, channels, outputs, row_step, up_step;

    // Weight row of an expert that is row r of a block; -1: none. Where the weights are the columns, a lane
    // has columns 2n and 2n + 1: two outputs, or gate and up of one. Where they are the rows, a lane has rows
    // n and n + 8.
    __device__ __forceinline__ int weight_row(int block, int r) const {
        const int pair = block * (TILE_N / 2) + (SWAPPED ? r / 16 * 8 + r % 8 : r / 2);
        const int second = SWAPPED ? r / 8 % 2 : r % 2;
        if (up_step) return pair < outputs ? pair * row_step + second * up_step : -1;
        return 2 * pair < outputs ? 2 * pair + second : -1;
    }
    __device__ __forceinline__ int weight_rows() const { return up_step ? 2 * outputs : outputs; }
    __device__ __forceinline__ int steps() const { return (channels + K_BLOCK - 1) / K_BLOCK; }
};

// This thread's copies, of one item after the other.
struct Loader {
    const Matrices& given;
    int item, step = 0, steps;
    const u8 *weights, *w_scale, *x_scale;  // the last two: null where this thread copies none
    int x_rows[X_PASSES], w_rows[W_PASSES];

    __device__ __forceinline__ Loader(const Matrices& given) : given(given), item(blockIdx.x) {
        steps = given.steps();
        if (item < given.items) prepare();
    }

    __device__ __forceinline__ void prepare() {
        const Tile tile = given.tiles[item / given.blocks];
        const int block = item % given.blocks, row = threadIdx.x / CHUNKS;
        const u64 first = static_cast<u64>(tile.expert) * given.weight_rows();
        weights = given.weights + first * (given.channels / 2);
#pragma unroll
        for (int i = 0; i < W_PASSES; ++i)
            w_rows[i] = row + PASS * i < TILE_N ? given.weight_row(block, row + PASS * i) : -1;
#pragma unroll
        for (int i = 0; i < X_PASSES; ++i) x_rows[i] = x_row(tile, row + PASS * i);
        const int scaled = threadIdx.x < TILE_N ? given.weight_row(block, threadIdx.x) : -1;
        w_scale = scaled < 0 ? nullptr : given.w_scales + (first + scaled) * (given.channels / GROUP);
        const int token = x_row(tile, threadIdx.x);
        x_scale =
            token < 0 ? nullptr : given.x_scales + static_cast<u64>(token) * scale_stride(given.channels);
    }

    // Row of x that is row r of a tile; -1: none.
    __device__ __forceinline__ int x_row(const Tile& tile, int r) const {
        if (r >= tile.rows) return -1;
        return given.row_tokens ? given.row_tokens[tile.first + r] : tile.first + r;
    }

    // The next 128 channels, to the stage at `to`; what is past the last channel is zero.
    __device__ __forceinline__ void copy(u32 to) {
        if (item < given.items) {
            const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
            const bool here = step * K_BLOCK + chunk * (K_BLOCK / CHUNKS) < given.channels;
            const u32 at = step * (K_BLOCK / 2) + chunk * WEIGHT_UNIT;
#pragma unroll
            for (int i = 0; i < W_PASSES; ++i)
                if (w_rows[i] >= 0)
                    copy_or_zero<WEIGHT_UNIT>(
                        to + WEIGHTS + place(row + PASS * i, chunk),
                        weights + static_cast<u64>(w_rows[i]) * (given.channels / 2) + at,
                        here ? WEIGHT_UNIT : 0);
#pragma unroll
            for (int i = 0; i < X_PASSES; ++i)
                if (x_rows[i] >= 0)
                    copy_or_zero<16>(to + place(row + PASS * i, chunk),
                                     given.x +
                                         static_cast<u64>(x_rows[i]) * (given.channels / (PACKED ? 2 : 1)) +
                                         step * ROW_BYTES + chunk * 16,
                                     here ? 16 : 0);
            if (x_scale) copy_or_zero<4>(to + X_SCALES + 4 * threadIdx.x, x_scale + 4 * step, 4);
            if (w_scale) {
                const u8* from = w_scale + 4 * step;
                const int before = reinterpret_cast<u64>(from) % 4;
                const int bytes = before + min(given.channels / GROUP - 4 * step, 4);
                copy_or_zero<4>(to + W_SCALES + 8 * threadIdx.x, from - before, min(bytes, 4));
                if (before)
                    copy_or_zero<4>(to + W_SCALES + 8 * threadIdx.x + 4, from - before + 4,
                                    max(bytes - 4, 0));
            }
            if (++step == steps) {
                step = 0;
                item += gridDim.x;
                if (item < given.items) prepare();
            }
        }
        copies_commit();
    }
};

using Sums = float[MS][NS][4];

// Operands of a warp, from a stage.
struct Fragments {
    int row, column;        // the first of this warp
    u32 shifts = 0, lanes;  // bits between a word and the scales of this lane's weight rows: 2 of each

    __device__ __forceinline__ Fragments() : lanes(threadIdx.x % 32) {
        const int warp = threadIdx.x / 32;
        row = warp % WARPS_M * WARP_ROWS;
        column = warp / WARPS_M * WARP_COLUMNS;
    }
    // Row of the A side, column of the B side, whose scales this lane brings.
    __device__ __forceinline__ int scaled_row(int m) const {
        return row + m * 16 + lanes / 4 + lanes % 2 * 8;
    }
    __device__ __forceinline__ int scaled_column(int n) const { return column + n * 8 + lanes / 4; }

    __device__ __forceinline__ void start(const Matrices& given, int block) {
        shifts = 0;
#pragma unroll
        for (int i = 0; i < (SWAPPED ? MS : NS); ++i) {
            const int r = given.weight_row(block, SWAPPED ? scaled_row(i) : scaled_column(i));
            shifts |= (r * (given.channels / GROUP) & 3) << 2 * i;
        }
    }
    static __device__ __forceinline__ u32 word(int at) {
        return *reinterpret_cast<const u32*>(dynamic_memory() + at);
    }
    static __device__ __forceinline__ u32 x_scales(int stage, int r) {
        return word(stage + X_SCALES + 4 * r);
    }
    // i: of the warp's fragments on that side.
    __device__ __forceinline__ u32 w_scales(int stage, int r, int i) const {
        const int at = stage + W_SCALES + 8 * r;
        return __funnelshift_r(word(at), word(at + 4), (shifts >> 2 * i & 3) * 8);
    }
    __device__ __forceinline__ u32 row_scales(int stage, int m) const {
        return SWAPPED ? w_scales(stage, scaled_row(m), m) : x_scales(stage, scaled_row(m));
    }
    __device__ __forceinline__ u32 column_scales(int stage, int n) const {
        return SWAPPED ? x_scales(stage, scaled_column(n)) : w_scales(stage, scaled_column(n), n);
    }

    template <bool OF_WEIGHTS>
    static __device__ __forceinline__ void load(u32 (&words)[4], u32 side, int r, int chunk) {
        const u32 address = side + (OF_WEIGHTS ? WEIGHTS : 0) + place(r, chunk);
        if constexpr (OF_WEIGHTS && !PACKED) {
            load_fp4_matrices(words, address);
#pragma unroll
            for (u32& word : words) word <<= 2;  // products take bits 5 .. 2 of a byte
        } else {
            load_matrices(words, address);
        }
    }
    // Rows 0 .. 7 and 8 .. 15 of the first half of k, then of the second.
    __device__ __forceinline__ void load_rows(u32 (&a)[4], u32 stage, int m, int k) const {
        load<SWAPPED>(a, stage, row + m * 16 + lanes % 16, 2 * k + lanes / 16);
    }
    // Both halves of k of columns 0 .. 7, then of 8 .. 15; of one fragment: of k, then of k + 1.
    __device__ __forceinline__ void load_columns(u32 (&b)[4], u32 stage, int n, int k) const {
        const int next = NS > 1 ? lanes / 16 * 8 : 0, chunk = NS > 1 ? lanes / 8 % 2 : lanes / 8;
        load<!SWAPPED>(b, stage, column + n * 8 + next + lanes % 8, 2 * k + chunk);
    }
};

template <int K>
__device__ __forceinline__ void product(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1, u32 scale_a,
                                        u32 scale_b) {
    if constexpr (PACKED)
        multiply_scaled_fp4<2 * K>(sums, a, b0, b1, scale_a, scale_b);
    else
        multiply_scaled<SWAPPED, K>(sums, a, b0, b1, scale_a, scale_b);
}

template <int K = 0>
__device__ __forceinline__ void multiply(Sums& sums, const Fragments& of, u32 shared, int stage,
                                         const u32 (&row_scales)[MS], const u32 (&column_scales)[NS],
                                         u32 (&b)[(NS + 1) / 2][4]) {
    if constexpr (K < STEPS) {
        u32 a[MS][4];
#pragma unroll
        for (int m = 0; m < MS; ++m) of.load_rows(a[m], shared + stage, m, K);
#pragma unroll
        for (int n = 0; n < NS; n += 2)
            if (NS > 1 || K % 2 == 0) of.load_columns(b[n / 2], shared + stage, n, K);
#pragma unroll
        for (int n = 0; n < NS; ++n) {
            constexpr int ODD = NS > 1 ? 0 : K % 2;
            const u32(&words)[4] = b[n / 2];
            const int at = 2 * (n % 2 + ODD);
#pragma unroll
            for (int m = 0; m < MS; ++m)
                product<K>(sums[m][n], a[m], words[at], words[at + 1], row_scales[m], column_scales[n]);
        }
        multiply<K + 1>(sums, of, shared, stage, row_scales, column_scales, b);
    }
}

struct Bias {
    const u16* bf16;
    const float* fp32;
    __device__ __forceinline__ float of(u64 row) const {
        return bf16 ? __uint_as_float(static_cast<u32>(bf16[row]) << 16) : fp32 ? fp32[row] : 0.0f;
    }
};

__device__ __forceinline__ float activation(float gate, float up) {
#if CLAMPED
    gate = gate > 7.0f ? 7.0f : gate;  // NaN stays
    up = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
    return silu_mul(1.702f * gate, (up + 1.0f) * (1.0f / 1.702f));
#else
    return silu_mul(gate, up);
#endif
}

// A lane has two numbers of each (m, n) and half: two outputs of a token, or gate and up of one.
struct Places {
    const Fragments& of;
    const Matrices& given;
    Tile tile;
    int block;

    __device__ __forceinline__ int token(int m, int n, int half) const {
        const int lane = of.lanes;
        return SWAPPED ? of.column + n * 8 + lane % 4 * 2 + half : of.row + m * 16 + lane / 4 + half * 8;
    }
    // The first of two outputs; of gate_up twice the output.
    __device__ __forceinline__ int output(int m, int n) const {
        const int lane = of.lanes;
        return block * TILE_N + (SWAPPED ? of.row + m * 16 + lane / 4 * 2 : of.column + n * 8 + lane % 4 * 2);
    }
    static __device__ __forceinline__ float first(const float (&sums)[4], int half) {
        return sums[SWAPPED ? half : 2 * half];
    }
    static __device__ __forceinline__ float second(const float (&sums)[4], int half) {
        return sums[SWAPPED ? half + 2 : 2 * half + 1];
    }
};

__device__ __forceinline__ void write_down(const Places& at, const Sums& sums, const Bias& bias, u16* out) {
    const int outputs = at.given.outputs;
#pragma unroll
    for (int m = 0; m < MS; ++m)
#pragma unroll
        for (int n = 0; n < NS; ++n) {
            const int output = at.output(m, n);
            if (output >= outputs) continue;
            const u64 row = static_cast<u64>(at.tile.expert) * outputs + output;
            const float low = bias.of(row), high = bias.of(row + 1);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int token = at.token(m, n, half);
                if (token >= at.tile.rows) continue;
                u16* to = out + static_cast<u64>(at.tile.first + token) * outputs + output;
                *reinterpret_cast<u32*>(to) =
                    pack(at.first(sums[m][n], half) + low, at.second(sums[m][n], half) + high);
            }
        }
}

// Activations in place of the first of each two sums.
__device__ __forceinline__ void activate(const Places& at, Sums& sums, const Bias& bias) {
    const Matrices& given = at.given;
#pragma unroll
    for (int m = 0; m < MS; ++m)
#pragma unroll
        for (int n = 0; n < NS; ++n) {
            const int output = at.output(m, n) / 2;
            const u64 row = static_cast<u64>(at.tile.expert) * given.weight_rows() +
                            min(output, given.outputs - 1) * given.row_step;
            const float gate = bias.of(row), up = bias.of(row + given.up_step);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                sums[m][n][SWAPPED ? half : 2 * half] =
                    activation(at.first(sums[m][n], half) + gate, at.second(sums[m][n], half) + up);
        }
}

__device__ __forceinline__ void write_unrounded(const Places& at, const Sums& sums, float* out) {
#pragma unroll
    for (int m = 0; m < MS; ++m)
#pragma unroll
        for (int n = 0; n < NS; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int output = at.output(m, n) / 2, token = at.token(m, n, half);
                if (output < at.given.outputs && token < at.tile.rows)
                    out[static_cast<u64>(at.tile.first + token) * at.given.outputs + output] =
                        at.first(sums[m][n], half);
            }
}

// Quantised, with the scales of each 32 outputs. maxima: [WARPS_M, COLUMNS] words of shared memory.
__device__ __forceinline__ void write_quantised(const Places& at, const Sums& sums, u8* out, u8* out_scales,
                                                u32* maxima) {
    constexpr int LINES = SWAPPED ? NS : MS;  // fragments of other tokens
    const int lane = at.of.lanes, outputs = at.given.outputs, stride = scale_stride(outputs);
    u32 most[LINES][2] = {};
#pragma unroll
    for (int m = 0; m < MS; ++m)
#pragma unroll
        for (int n = 0; n < NS; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32& line = most[SWAPPED ? n : m][half];
                line = max(line, magnitude(at.first(sums[m][n], half)));
            }
#pragma unroll
    for (int i = 0; i < LINES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32& line = most[i][half];
            if constexpr (SWAPPED) {
                for (int step = 4; step < 32; step *= 2) line = max(line, __shfl_xor_sync(~0u, line, step));
            } else {
                for (int step = 1; step < 4; step *= 2) line = max(line, __shfl_xor_sync(~0u, line, step));
            }
        }
    if constexpr (SWAPPED) {  // a group of outputs is that of several warps
        const int warp = at.of.row / WARP_ROWS, group = warp / GROUP_WARPS * GROUP_WARPS;
        __syncthreads();  // all have read those of the item before
#pragma unroll
        for (int n = 0; n < NS; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if (lane < 4) maxima[warp * COLUMNS + at.token(0, n, half)] = most[n][half];
        __syncthreads();
#pragma unroll
        for (int n = 0; n < NS; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                for (int i = 0; i < GROUP_WARPS; ++i)
                    most[n][half] = max(most[n][half], maxima[(group + i) * COLUMNS + at.token(0, n, half)]);
    }
    // whoever has the first output of a group writes its scale
    const int group = at.output(0, 0) / (2 * GROUP);
    const bool writes = SWAPPED ? lane < 4 && at.of.row % 64 == 0 : lane % 4 == 0;
#pragma unroll
    for (int i = 0; i < LINES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = at.token(i, i, half);
            if (group * GROUP >= outputs) continue;
            const bool here = token < at.tile.rows;
            const u64 row = at.tile.first + token;
            const u32 scale = scale_of(most[i][half]);
            const float inverse = inverse_of(scale);
            if (here && writes) {
                u8* to = out_scales + row * stride;
                to[group] = scale;
                if (group == outputs / GROUP - 1)
                    for (int n = group + 1; n < stride; ++n) to[n] = 0;
            }
#pragma unroll
            for (int j = 0; j < (SWAPPED ? MS : NS); ++j) {
                const int m = SWAPPED ? j : i, n = SWAPPED ? i : j;
                const float value = scale == NAN_SCALE ? 0.0f : at.first(sums[m][n], half) * inverse;
                const int output = at.output(m, n) / 2;
#if PACKED
                // of the next output: of the next lane, or of the next row of lanes
                const u32 code = to_e2m1(value), next = __shfl_xor_sync(~0u, code, SWAPPED ? 4 : 1);
                if (here && output % 2 == 0) out[(row * outputs + output) / 2] = code | next << 4;
#else
                if (here) out[row * outputs + output] = pack_e4m3(value, 0.0f);
#endif
            }
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mxfp4_product(const u8* x, const u8* x_scales, const int* row_tokens, const u8* weights,
                  const u8* w_scales, const u16* bias16, const float* bias32, const Tile* tiles,
                  const int* num_tiles, void* out, u8* out_scales, int channels, int outputs, int row_step,
                  int up_step) {
    const u32 shared = shared_address(dynamic_memory());
    wait_for_predecessor();
    let_successor_start();

    const int blocks = ((up_step ? 2 * outputs : outputs) + TILE_N - 1) / TILE_N;
    const Matrices given{x,      x_scales, weights, w_scales, row_tokens, tiles, *num_tiles * blocks,
                         blocks, channels, outputs, row_step, up_step};
    const Bias bias{bias16, bias32};
    Loader loader(given);
    Fragments fragments;
    int here = 0, free = (STAGES - 1) * STAGE_BYTES;  // stages to multiply, and to fill
    for (int s = 0; s < STAGES - 1; ++s) loader.copy(shared + s * STAGE_BYTES);
    for (int item = blockIdx.x; item < given.items; item += gridDim.x) {
        const int block = item % blocks, steps = given.steps();
        const Tile tile = tiles[item / blocks];
        Sums sums = {};
        fragments.start(given, block);
        for (int step = 0; step < steps; ++step) {
            copies_wait<STAGES - 2>();
            __syncthreads();  // this stage has landed, and no warp reads the one before any more
            loader.copy(shared + free);
            u32 row_scales[MS], column_scales[NS], b[(NS + 1) / 2][4];
#pragma unroll
            for (int m = 0; m < MS; ++m) row_scales[m] = fragments.row_scales(here, m);
#pragma unroll
            for (int n = 0; n < NS; ++n) column_scales[n] = fragments.column_scales(here, n);
            multiply(sums, fragments, shared, here, row_scales, column_scales, b);
            free = here;
            here = here + STAGE_BYTES == STAGES * STAGE_BYTES ? 0 : here + STAGE_BYTES;
        }
        const Places at{fragments, given, tile, block};
        if (up_step == 0) {
            write_down(at, sums, bias, static_cast<u16*>(out));
            continue;
        }
        activate(at, sums, bias);
        if constexpr (FUSED)
            write_quantised(at, sums, static_cast<u8*>(out), out_scales,
                            reinterpret_cast<u32*>(dynamic_memory() + STAGES * STAGE_BYTES));
        else
            write_unrounded(at, sums, static_cast<float*>(out));
    }
    copies_wait<0>();
}
