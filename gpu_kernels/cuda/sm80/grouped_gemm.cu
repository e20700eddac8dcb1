// Sorted rows through their experts' weights, on the tensor cores of sm_80 and newer: out[row] = f(x[row]
// W_e^T).
//
// GATE_UP 1: W_e holds gate and up rows [2I, H], x[row] = hidden[row_tokens[row]], f = silu(gate) * up.
// GATE_UP 0: W_e = down [H, I], x[row] = activations[row], f = identity.
//
// | argument   | shape             | dtype       |                                                      |
// |------------|-------------------|-------------|------------------------------------------------------|
// | first, second | [E, width, depth] | bf16, fp16 | row n of e at (e * rows_of_expert + n) * row_stride |
// | x          | [T, H], or [P, I] | as first    | row-major, 16 bytes                                  |
// | row_tokens | [P]               | int32       | GATE_UP only                                         |
// | tiles, num_tiles | [bound], [1] | Tile, int32 | of routing_sort, tile_rows = MAX_N                  |
// | out        | [P, I], or [P, H] | as first    | row-major, 16 bytes; only rows of tiles written      |
//
// first is gate, or down; second is up, or not used. depth (H, or I) is a multiple of 64, width (I, or H)
// of 8.
//
// Threads: 256, eight warps: four along 128 weight rows (the M side), two along the rows of a tile (the N
// side), which take its groups of 8 rows alternately. GATE_UP: the M side interleaves eight gate rows with
// the eight up rows of the same channels, so that one thread holds both. Blocks: as many as are resident; a
// block takes every n-th of the tiles * ceil(weight rows / 128) work items.
//
// Shared memory: STAGES * (128 + MAX_N) rows of 128 bytes, filled by cp.async, swizzled in units of 16 bytes;
// no mbarriers. Producer: routing_sort. Consumer: combine.
#include "common/copies.cuh"
#include "common/routing.cuh"
#include "sm80/mma.cuh"

#ifndef GATE_UP
#define GATE_UP 1
#endif
#ifndef MAX_N
#define MAX_N 64
#endif
#ifndef STAGES
#define STAGES 3
#endif

constexpr int THREADS = 256;
constexpr int K_BLOCK = 64;
constexpr int WEIGHT_ROWS = 128;
constexpr int STAGE_BYTES = (WEIGHT_ROWS + MAX_N) * K_BLOCK * 2;
constexpr int GROUPS = MAX_N / 16;  // of 8 rows, a warp

static_assert(MAX_N % 32 == 0, "each thread copies whole rows of a pass");

// Swizzled byte offset of a 16-byte chunk in a row of 128: neighbouring rows use different banks.
__device__ __forceinline__ u32 place(int row, int chunk) { return row * 128 + ((chunk ^ (row % 8)) * 16); }

// Source addresses of this thread's copies for one tile: rows thread / 8 + 32 i of weights and of x, 16 bytes
// each.
struct Sources {
    const u16* weights[WEIGHT_ROWS / 32];
    const u16* rows[MAX_N / 32];
};

__device__ __forceinline__ void fill(u32 stage, const Sources& from, int k, int row_passes) {
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < WEIGHT_ROWS / 32; ++i)
        copy_16(stage + place(row + 32 * i, chunk), from.weights[i] + k + chunk * 8);
#pragma unroll
    for (int i = 0; i < MAX_N / 32; ++i)
        if (i < row_passes)
            copy_16(stage + WEIGHT_ROWS * 128 + place(row + 32 * i, chunk), from.rows[i] + k + chunk * 8);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    grouped_gemm(const u16* first, const u16* second, const u16* x, const int* row_tokens, const Tile* tiles,
                 const int* num_tiles, u16* out, int depth, int width, int rows_of_expert, int row_stride) {
    const u32 shared = shared_address(dynamic_memory());
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_m = warp % 4, warp_n = warp / 4;
    wait_for_predecessor();
    let_successor_start();

    const int channels = GATE_UP ? WEIGHT_ROWS / 2 : WEIGHT_ROWS;  // of out, a block of weights
    const int blocks = (width + channels - 1) / channels, work = *num_tiles * blocks, steps = depth / K_BLOCK;
    for (int item = blockIdx.x; item < work; item += gridDim.x) {
        const Tile tile = tiles[item / blocks];
        const int channel = item % blocks * channels, row_passes = (tile.rows + 31) / 32;
        Sources from;
#pragma unroll
        for (int i = 0; i < WEIGHT_ROWS / 32; ++i) {
            const int row = threadIdx.x / 8 + 32 * i;
            const bool up = GATE_UP && row % 16 >= 8;
            // past the last channel: a valid row again; its products are not stored
            const int n = min(channel + (GATE_UP ? row / 16 * 8 + row % 8 : row), width - 1);
            const u64 at = (static_cast<u64>(tile.expert) * rows_of_expert + n) * row_stride;
            from.weights[i] = (up ? second : first) + at;
        }
#pragma unroll
        for (int i = 0; i < MAX_N / 32; ++i) {
            const int row = tile.first + min(static_cast<int>(threadIdx.x) / 8 + 32 * i, tile.rows - 1);
            from.rows[i] = x + static_cast<u64>(GATE_UP ? max(row_tokens[row], 0) : row) * depth;
        }

        float sums[2][GROUPS][4] = {};
#pragma unroll
        for (int s = 0; s < STAGES - 1; ++s) {
            if (s < steps) fill(shared + s * STAGE_BYTES, from, s * K_BLOCK, row_passes);
            copies_commit();
        }
        for (int step = 0; step < steps; ++step) {
            copies_wait<STAGES - 2>();
            __syncthreads();  // this stage has landed, and no warp reads the one that is filled next
            const int next = step + STAGES - 1;
            if (next < steps) fill(shared + next % STAGES * STAGE_BYTES, from, next * K_BLOCK, row_passes);
            copies_commit();
            const u32 weights = shared + step % STAGES * STAGE_BYTES, rows = weights + WEIGHT_ROWS * 128;
#pragma unroll
            for (int half = 0; half < K_BLOCK / 32; ++half) {
                u32 a[2][2][4];  // [k16][m16]
#pragma unroll
                for (int m = 0; m < 2; ++m)
#pragma unroll
                    for (int k = 0; k < 2; ++k)
                        load_matrices(a[k][m], weights + place(warp_m * 32 + m * 16 + lane % 16,
                                                               half * 4 + k * 2 + lane / 16));
#pragma unroll
                for (int j = 0; j < GROUPS; ++j) {
                    const int group = warp_n + 2 * j;
                    if (group * 8 >= tile.rows) break;
                    u32 b[4];  // k 0 .. 7, 8 .. 15, 16 .. 23, 24 .. 31 of 8 rows
                    load_matrices(b, rows + place(group * 8 + lane % 8, half * 4 + lane / 8));
#pragma unroll
                    for (int m = 0; m < 2; ++m) {
                        multiply_add(sums[m][j], a[0][m], b[0], b[1]);
                        multiply_add(sums[m][j], a[1][m], b[2], b[3]);
                    }
                }
            }
        }
        copies_wait<0>();
        __syncthreads();  // other warps may still read the stages that the next tile fills

        // a lane has one channel (GATE_UP), or two eight apart, of two rows: transposed, two channels of one
        // row
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) {
            const int group = warp_n + 2 * j;
            if (group * 8 >= tile.rows) break;
            const int row = group * 8 + lane / 4;
            u16* to = out + static_cast<u64>(tile.first + row) * width + channel;
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const float* d = sums[m][j];
#if GATE_UP
                const u32 word = transposed(pack(silu_mul(d[0], d[2]), silu_mul(d[1], d[3])));
                const int c = (warp_m * 2 + m) * 8 + lane % 4 * 2;
                if (row < tile.rows && channel + c < width) *reinterpret_cast<u32*>(to + c) = word;
#else
#pragma unroll
                for (int high = 0; high < 2; ++high) {
                    const u32 word = transposed(pack(d[2 * high], d[2 * high + 1]));
                    const int c = warp_m * 32 + m * 16 + high * 8 + lane % 4 * 2;
                    if (row < tile.rows && channel + c < width) *reinterpret_cast<u32*>(to + c) = word;
                }
#endif
            }
        }
    }
}
