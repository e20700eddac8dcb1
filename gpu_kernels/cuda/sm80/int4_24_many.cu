// SPDX-License-Identifier: Apache-2.0
// Sorted rows through int4_24 experts in fp16, both products in one launch, for experts of many rows:
// act[row] = silu(x Wg_e^T) * (x Wu_e^T), x = hidden[row_tokens[row]]; out[row] = act[row] Wd_e^T.
//
// | argument      | shape             | dtype |                                                           |
// |---------------|-------------------|-------|-----------------------------------------------------------|
// | w13           | [E, H/64, 2I, 2]  | int64 | words; rows as in int4_24_mlp                             |
// | w2            | [E, I/64, H, 2]   | int64 | words                                                     |
// | hidden        | [T, H]            | fp16  | of int4_24_fp16_rows; row-major, 16 bytes                 |
// | hidden_powers | [T]               | fp32  | of int4_24_fp16_rows                                      |
// | row_tokens    | [P]               | int32 |                                                           |
// | tiles         | [bound]           | Tile  | of routing_sort, tile_rows = MAX_N; their done: 0         |
// | num_tiles     | [2]               | int32 | tiles in use; 0, counts the items that blocks took        |
// | act           | [P, I]            |       | scratch: bf16, then as hidden                             |
// | act_powers    | [P]               | fp32  | scratch, as hidden_powers                                 |
// | out           | [P, H]            | bf16  | row-major, 16 bytes; only rows of tiles written           |
//
// H and I are multiples of 64. Weights with their scales are the M side, the rows of a tile the N side of
// mma.sp.m16n8k32. Blocks and items: as in grouped_mlp. The block that makes the last activations of a tile
// takes its rows to fp16.
//
// Threads: 64 * WARPS_M. A warp makes 64 weight rows times half of the tile's rows, in groups of 8.
//
// Shared memory: STAGES stages of SLABS slabs of 64 channels: WEIGHT_ROWS * 16 bytes of words, then MAX_N *
// 128 bytes of rows, filled by cp.async; powers of the rows of STAGES items; SLOTS items, and what all items
// have in common. A thread takes at most 255 registers.
#include "common/copies.cuh"
#include "sm80/claims.cuh"
#include "sm80/int4_24_fp16.cuh"
#include "sm80/int4_24_tile.cuh"
#include "sm80/rows_to_fp16.cuh"

#ifndef WARPS_M
#define WARPS_M 4
#endif
#ifndef MAX_N
#define MAX_N 144
#endif
#ifndef SLABS
#define SLABS 2
#endif
#ifndef STAGES
#define STAGES 3
#endif

constexpr int THREADS = 64 * WARPS_M, WEIGHT_ROWS = 64 * WARPS_M;
constexpr int GROUPS = MAX_N / 16;  // of 8 rows, a warp, at most
constexpr int WEIGHT_SLAB = WEIGHT_ROWS * 16, ROW_SLAB = MAX_N * 128;
constexpr int STAGE_BYTES = SLABS * (WEIGHT_SLAB + ROW_SLAB);
constexpr int ROWS_AT_ONCE = THREADS / 8, ROW_PASSES = (MAX_N + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
constexpr int SLOTS = 16, NEVER = 1 << 30;

static_assert(MAX_N % 16 == 0 && GROUPS <= 9, "whole groups of 8 rows, whose sums fit registers");
static_assert(MAX_N <= THREADS, "a thread copies the power of one row");
static_assert(STAGES >= 2 && STAGES < SLOTS - 1, "an item stays in its slot until its products are made");

struct Rows {
    const u16* hidden;
    const float* hidden_powers;
    u16* act;
    float* act_powers;
    const int* row_tokens;
};

// This thread's copies: of one row of words, and of a chunk of rows of x.
struct Loader : Claims<SLOTS> {
    const Weights& given;
    const Rows& all;
    int* last;  // whether this block made the last activations of a tile
    u32 shared;

    u64 weights, x;         // addresses, of the next step
    u32 slab_bytes;         // from a slab of words to the next
    u32 to;                 // of the words in a slab of a stage
    int x_bytes;            // of a row in memory
    int rows;               // of x, to copy, from this thread's on
    int index[ROW_PASSES];  // rows of x
    int slabs = 0;          // of this item that are not filled yet; NEVER: there is no item to fill
    bool valid = false;

    __device__ __forceinline__ Loader(const Work& work, const Weights& given, const Rows& all, Item* items,
                                      int* last, u32 shared)
        : Claims(work, items), given(given), all(all), last(last), shared(shared) {}

    // Between items: the addresses of the next one, and copies of its rows' powers. The item after it is
    // looked up meanwhile.
    __device__ __forceinline__ void prepare() {
        const Item next = items[item % SLOTS];
        const u32 to_powers = shared + STAGES * STAGE_BYTES + item % STAGES * (MAX_N * 4);
        if (!take(next)) {
            slabs = NEVER;
            valid = false;
            rows = 0;
            return;
        }
        const bool is_down = next.kind == DOWN;
        const int depth = is_down ? given.I : given.H, R = is_down ? given.H : 2 * given.I;
        slabs = depth / 64;
        slab_bytes = R * 16;
        {
            const int r = threadIdx.x % 64, warp_m = threadIdx.x / 64;
            const bool pairs = !is_down && given.row_step == 2;  // gate and up rows take turns
            const int c = pairs ? r / 2 : r % 32, high = pairs ? r % 2 : r / 32;
            const int channel =
                (next.block * WARPS_M + warp_m) * (is_down ? 64 : 32) + c + (is_down ? 32 * high : 0);
            const int row = is_down ? channel : channel * given.row_step + high * given.up_rows;
            valid = channel < (is_down ? given.H : given.I);
            const uint4* first = is_down ? given.w2 : given.w13;
            weights = reinterpret_cast<u64>(first + static_cast<u64>(next.of.expert) * slabs * R + row);
            to = shared + warp_m * 1024 + place(c, high, is_down);
        }
        work.wait_for_activations(next);
        const float* powers = is_down ? all.act_powers : all.hidden_powers;
        const int row = threadIdx.x / 8;
        rows = next.of.rows - row;
        x_bytes = depth * 2;
        x = reinterpret_cast<u64>((is_down ? all.act : all.hidden) + threadIdx.x % 8 * 8);
        const auto row_of = [&](int r) {
            return is_down ? next.of.first + r : all.row_tokens[next.of.first + r];
        };
#pragma unroll
        for (int i = 0; i < ROW_PASSES; ++i)
            index[i] = ROWS_AT_ONCE * i < rows ? row_of(row + ROWS_AT_ONCE * i) : 0;
        if (static_cast<int>(threadIdx.x) < next.of.rows)
            copy_4(to_powers + threadIdx.x * 4, powers + row_of(threadIdx.x));
    }

    // One of `parts` parts of a step's copies, to the stage at offset `stage`; part and parts are constants.
    __device__ __forceinline__ void fill(u32 stage, int part, int parts) {
        constexpr int ALL = SLABS * (1 + ROW_PASSES);
#pragma unroll
        for (int n = 0; n < ALL; ++n) {
            if (n < ALL * part / parts || n >= ALL * (part + 1) / parts) continue;
            const int s = n % SLABS, i = n / SLABS - 1;
            const bool here = s == 0 || s < slabs;  // else zeros: a product of the last step is of nothing
            if (i < 0) {
                // past the last channel: products of what is there, not stored
                if (valid)
                    copy_16_or_zeros(to + stage + s * WEIGHT_SLAB,
                                     reinterpret_cast<const void*>(row_at(weights, here ? s : 0, slab_bytes)),
                                     here);
            } else if (ROWS_AT_ONCE * i < rows) {
                const u32 at = shared + stage + SLABS * WEIGHT_SLAB + s * ROW_SLAB + i * ROWS_AT_ONCE * 128 +
                               place_of_row(threadIdx.x / 8, threadIdx.x % 8);
                copy_16_or_zeros(at, reinterpret_cast<const void*>(row_at(x, index[i], x_bytes) + s * 128),
                                 here);
            }
        }
    }
    // After a step's copies.
    __device__ __forceinline__ void step() {
        copies_commit();
        weights += static_cast<u64>(SLABS) * slab_bytes;
        x += SLABS * 128;
        slabs -= SLABS;
    }
    // The first STAGES - 1 steps.
    __device__ __forceinline__ void start() {
        slabs = 0;
        for (int s = 0; s < STAGES - 1; ++s) {
            if (slabs <= 0) prepare();
            fill(s * STAGE_BYTES, 0, 1);
            step();
            publish();
            __syncthreads();
        }
    }

    // By all threads, behind a barrier: a block's activations of a tile are written. Blocks count below 0;
    // the last one takes the rows to fp16, and says that they are complete.
    __device__ __forceinline__ void made(int tile) const {
        const int parts = work.gate_up_blocks;
        int* done = &work.tiles[tile].done;
        if (threadIdx.x == 0) *last = add_acquire_release(done, -1) == 1 - parts;
        __syncthreads();
        if (!*last) return;
        rows_to_fp16<THREADS>(all.act, all.act_powers, work.tiles[tile].first, work.tiles[tile].rows,
                              given.I);
        __syncthreads();
        if (threadIdx.x == 0) add_release(done, 2 * parts);
    }
};

// sums += a stage's channels. Between products: the decoding of the next ones' words, and the copies to
// offset `free`.
template <int G>
__device__ __forceinline__ void multiply_stage(Sums<G>& sums, u32 stage, const Lane& lane,
                                               const ScaledDecoder& decoder, Loader& loader, u32 free) {
    constexpr int HALVES = 2 * SLABS, AHEAD = 2, ALL = HALVES * G;  // halves of slabs: 32 channels
    const u32 rows = stage + SLABS * WEIGHT_SLAB + lane.row, words = stage + lane.word;
    u32 b[AHEAD][4];
    const auto load = [&](int n) {
        const uint4 four = load_16((rows ^ n / G % 2 * 64) + n / G / 2 * ROW_SLAB + n % G * 1024);
        b[n % AHEAD][0] = four.x;
        b[n % AHEAD][1] = four.y;
        b[n % AHEAD][2] = four.z;
        b[n % AHEAD][3] = four.w;
    };
    const auto word = [&](int half, int m, int high) {
        return load_8((words ^ 2 * (m ^ high) * 16) + half / 2 * WEIGHT_SLAB + (2 * m + high) * 128 +
                      half % 2 * 8);
    };
    ScaledDecoder::Fragment fragments[2][4];
#pragma unroll
    for (int m = 0; m < 4; ++m) fragments[0][m] = decoder.decode(word(0, m, 0), word(0, m, 1));
#pragma unroll
    for (int n = 0; n < AHEAD; ++n) load(n);
#pragma unroll
    for (int n = 0; n < ALL; ++n) {
        const int half = n / G, j = n % G, first = 4 * j / G, last = 4 * (j + 1) / G;
        uint2 low[4], high[4];
#pragma unroll
        for (int m = 0; m < 4; ++m)
            if (half + 1 < HALVES && m >= first && m < last) {
                low[m] = word(half + 1, m, 0);
                high[m] = word(half + 1, m, 1);
            }
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const auto& of = fragments[half % 2][m];
            multiply_sparse_fp16<0>(sums[m][j], of.a, b[n % AHEAD], of.metadata);
        }
        if (n + AHEAD < ALL) load(n + AHEAD);
#pragma unroll
        for (int m = 0; m < 4; ++m)
            if (half + 1 < HALVES && m >= first && m < last)
                fragments[(half + 1) % 2][m] = decoder.decode(low[m], high[m]);
        loader.fill(free, n, ALL);
    }
}

// Products of an item: G groups of 8 rows a warp. here: offset of the stage of its first step. Each step's
// copies are for a step STAGES - 1 later, whose stage is the one before.
template <int G>
__device__ __forceinline__ void multiply(Loader& loader, u32& here, Sums<G>& sums, int slabs) {
    const int warp = threadIdx.x / 32;
    const Lane lane(warp % WARPS_M, warp / WARPS_M * G * 8);
    const ScaledDecoder decoder(loader.given.H & 63);
    clear<G>(sums);
#pragma unroll 1
    for (; slabs > 0; slabs -= SLABS) {
        copies_wait<STAGES - 2>();
        __syncthreads();  // this stage has landed, and no warp reads the one before any more
        if (loader.slabs <= 0) loader.prepare();
        __syncwarp();  // mma needs all lanes
        multiply_stage<G>(sums, loader.shared + here, lane, decoder, loader,
                          (here == 0 ? STAGES * STAGE_BYTES : here) - STAGE_BYTES);
        loader.step();
        loader.publish();
        here = here + STAGE_BYTES == STAGES * STAGE_BYTES ? 0 : here + STAGE_BYTES;
    }
}

// powers: of the rows of the tile.
template <int G>
__device__ __forceinline__ void multiply_by_powers(Sums<G>& sums, const float* powers) {
    const int warp_n = threadIdx.x / 32 / WARPS_M;
#pragma unroll
    for (int j = 0; j < G; ++j) {
        const float2 two =
            *reinterpret_cast<const float2*>(powers + (warp_n * G + j) * 8 + threadIdx.x % 4 * 2);
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][j][i] *= (1.0f / WEIGHTS) * (i % 2 ? two.y : two.x);
    }
}

// Numbers of groups a warp that are compiled: 2, 4 and all from there on.
__device__ __forceinline__ constexpr int after(int groups) {
    return groups + (groups < 4 && groups + 2 <= GROUPS ? 2 : 1);
}

// With the fewest groups a warp that hold the rows of the item.
template <int G>
__device__ __forceinline__ void run(Loader& loader, u32& here, const Item& item, const float* powers,
                                    u16* out) {
    if constexpr (G < GROUPS) {
        if (item.of.rows > 16 * G) {
            run<after(G)>(loader, here, item, powers, out);
            return;
        }
    }
    const int H = loader.given.H, I = loader.given.I;
    Sums<G> sums;
    multiply<G>(loader, here, sums, (item.kind == DOWN ? I : H) / 64);
    multiply_by_powers<G>(sums, powers);
    const int warp = threadIdx.x / 32, of_64 = item.block * WARPS_M + warp % WARPS_M;
    write<G>(sums, item, of_64, warp / WARPS_M * G * 8, loader.all.act, out, H, I);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    int4_24_many(const uint4* w13, const uint4* w2, const u16* hidden, const float* hidden_powers,
                 const int* row_tokens, Tile* tiles, int* num_tiles, u16* act, float* act_powers, u16* out,
                 int H, int I, int row_step, int up_rows) {
    float* powers = reinterpret_cast<float*>(dynamic_memory() + STAGES * STAGE_BYTES);
    Item* items = reinterpret_cast<Item*>(powers + STAGES * MAX_N);
    wait_for_predecessor();
    let_successor_start();

    Work& work = *reinterpret_cast<Work*>(items + SLOTS);
    if (threadIdx.x == 0) work = Work(tiles, num_tiles, H, I, WEIGHT_ROWS);
    __syncthreads();
    const Weights given{w13, w2, row_step, up_rows, H, I};
    const Rows all{hidden, hidden_powers, act, act_powers, row_tokens};
    Loader loader(work, given, all, items, reinterpret_cast<int*>(&work + 1),
                  shared_address(dynamic_memory()));
    u32 here;  // offset of the stage of an item's first step
    each_item<SLOTS>(
        loader, items,
        [&](int) {
            here = 0;
            loader.start();
        },
        [&](int n, const Item& item, int done) {
            if (done >= 0) {
                __syncthreads();  // all activations of the previous item are written
                loader.made(done);
            }
            run<2>(loader, here, item, powers + n % STAGES * MAX_N, out);
        });
}
