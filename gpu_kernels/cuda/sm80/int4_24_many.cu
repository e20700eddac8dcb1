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
// Threads: 32 * WARPS. A warp makes 32 weight rows times all rows of the tile, in groups of 8: each word is
// decoded once a tile.
//
// Shared memory: STAGES stages of SLABS slabs of 64 channels: WEIGHT_ROWS * 16 bytes of words, then MAX_N *
// 128 bytes of rows, filled by cp.async; powers of the rows of STAGES + 1 items; SLOTS items, and what all
// items have in common. A thread takes at most 255 registers.
#include "common/copies.cuh"
#include "sm80/claims.cuh"
#include "sm80/int4_24_fp16.cuh"
#include "sm80/int4_24_tile.cuh"
#include "sm80/row_groups.cuh"
#include "sm80/rows_to_fp16.cuh"

#ifndef WARPS
#define WARPS 8
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
#ifndef BLOCKS
#define BLOCKS 1
#endif

constexpr int THREADS = 32 * WARPS, WEIGHT_ROWS = 32 * WARPS;
constexpr int PRODUCTS = 2;        // of 16 weight rows, a warp
constexpr int GROUPS = MAX_N / 8;  // of 8 rows, at most
using Loops = RowGroups<GROUPS>;
constexpr int WEIGHT_SLAB = WEIGHT_ROWS * 16, ROW_SLAB = MAX_N * 128;
constexpr int STAGE_BYTES = SLABS * (WEIGHT_SLAB + ROW_SLAB);
constexpr int ROWS_AT_ONCE = THREADS / 8, ROW_PASSES = (MAX_N + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
constexpr int SLOTS = 16, NEVER = 1 << 30;

static_assert(MAX_N % 16 == 0 && GROUPS <= 20, "whole groups of 8 rows, whose sums fit registers");
static_assert(WARPS % 2 == 0, "two warps share 32 channels of act");
static_assert(MAX_N <= THREADS, "a thread copies the power of one row");
static_assert(STAGES >= 2 && STAGES < SLOTS - 1, "an item stays in its slot until its products are made");

struct Rows {
    const u16* hidden;
    const float* hidden_powers;
    u16* act;
    float* act_powers;
    const int* row_tokens;
};

// Of 64 weight rows, two warps': row c of 32 low, or of 32 high, ones is row g of that half of product m of
// the first or second warp. Two transposed products give a lane four channels in a row of memory: of out in
// their order, of act in the order of B. Swizzled: copies of eight rows in a row touch every bank once.
__device__ __forceinline__ u32 place_of_words(int c, int high, bool is_down) {
    const int word = is_down ? c / 2 : word_of(c), m = word % 2, g = word / 2 % 4 * 2 + c % 2;
    return word / 8 * 512 + ((2 * m + high) * 8 + (g ^ 4 * (m ^ high))) * 16;
}

// This thread's copies: of one row of words, and of a chunk of rows of x.
struct Loader : Claims<SLOTS> {
    const Weights& given;
    const Rows& all;
    int* last;  // whether this block made the last activations of a tile
    u32 shared;

    u64 weights, x;          // addresses, of the next step
    u32 slab_bytes;          // from a slab of words to the next
    u32 to, to_x;            // of the words, and of the chunk, in a stage
    u32 of_row[ROW_PASSES];  // from the first row of x to this thread's, 16 bytes each
    int rows;                // of x, to copy, from this thread's on
    int slabs = 0;           // of this item that are not filled yet; NEVER: there is no item to fill
    bool valid = false;

    __device__ __forceinline__ Loader(const Work& work, const Weights& given, const Rows& all, Item* items,
                                      int* last, u32 shared)
        : Claims(work, items), given(given), all(all), last(last), shared(shared) {
        to_x = SLABS * WEIGHT_SLAB + place_of_row(threadIdx.x / 8, threadIdx.x % 8);
    }

    // Between items: the addresses of the next one, and copies of its rows' powers. The item after it is
    // looked up meanwhile.
    __device__ __forceinline__ void prepare() {
        const Item next = items[item % SLOTS];
        const u32 to_powers = shared + STAGES * STAGE_BYTES + item % (STAGES + 1) * (MAX_N * 4);
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
            const int r = threadIdx.x % 64, of_64 = threadIdx.x / 64;
            const bool pairs = !is_down && given.row_step == 2;  // gate and up rows take turns
            const int c = pairs ? r / 2 : r % 32, high = pairs ? r % 2 : r / 32;
            const int channel =
                (next.block * (WARPS / 2) + of_64) * (is_down ? 64 : 32) + c + (is_down ? 32 * high : 0);
            const int row = is_down ? channel : channel * given.row_step + high * given.up_rows;
            valid = channel < (is_down ? given.H : given.I);
            const uint4* first = is_down ? given.w2 : given.w13;
            weights = reinterpret_cast<u64>(first + static_cast<u64>(next.of.expert) * slabs * R + row);
            to = of_64 * 1024 + place_of_words(c, high, is_down);
        }
        work.wait_for_activations(next);
        const float* powers = is_down ? all.act_powers : all.hidden_powers;
        const int row = threadIdx.x / 8;
        rows = next.of.rows - row;
        x = reinterpret_cast<u64>((is_down ? all.act : all.hidden) + threadIdx.x % 8 * 8);
        const auto row_of = [&](int r) {
            return is_down ? next.of.first + r : all.row_tokens[next.of.first + r];
        };
#pragma unroll
        for (int i = 0; i < ROW_PASSES; ++i)
            of_row[i] =
                ROWS_AT_ONCE * i < rows ? static_cast<u32>(row_of(row + ROWS_AT_ONCE * i)) * (depth / 8) : 0;
        if (static_cast<int>(threadIdx.x) < next.of.rows)
            copy_4(to_powers + threadIdx.x * 4, powers + row_of(threadIdx.x));
    }

    // A step's copies, to the stage at `stage`. Slabs past the item's last are zeros: products of nothing.
    __device__ __forceinline__ void fill(u32 stage) {
        // past the last channel: products of what is there, not stored
        if (valid) {
            copy_16(stage + to, reinterpret_cast<const void*>(weights));
#pragma unroll
            for (int s = 1; s < SLABS; ++s)
                copy_16_or_zeros(stage + to + s * WEIGHT_SLAB,
                                 reinterpret_cast<const void*>(weights + static_cast<u64>(s) * slab_bytes),
                                 s < slabs);
        }
#pragma unroll
        for (int i = 0; i < ROW_PASSES; ++i)
            if (ROWS_AT_ONCE * i < rows) {
                const u64 from = row_at(x, of_row[i], 16);
                const u32 at = stage + to_x + i * ROWS_AT_ONCE * 128;
                copy_16(at, reinterpret_cast<const void*>(from));
#pragma unroll
                for (int s = 1; s < SLABS; ++s)
                    copy_16_or_zeros(at + s * ROW_SLAB, reinterpret_cast<const void*>(from + s * 128),
                                     s < slabs);
            }
        copies_commit();
        weights += static_cast<u64>(SLABS) * slab_bytes;
        x += SLABS * 128;
        slabs -= SLABS;
    }
    // The first STAGES - 1 steps; waits for the first of them.
    __device__ __forceinline__ void start() {
        slabs = 0;
        for (int s = 0; s < STAGES - 1; ++s) {
            if (slabs <= 0) prepare();
            fill(shared + s * STAGE_BYTES);
            publish();
            __syncthreads();
        }
        copies_wait<STAGES - 2>();
        __syncthreads();
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

// Where a lane reads a stage: rows of the first 32 channels and words of the low row of product 0; others are
// 64 bytes off, by xor.
struct Places {
    u32 rows, other_rows, words, other_words;

    __device__ __forceinline__ static Places of_lane() {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const u32 rows = SLABS * WEIGHT_SLAB + place_of_row(lane / 4, lane % 4);
        const u32 words = warp * 512 + lane / 4 * 16;
        return {rows, rows ^ 64, words, words ^ 64};
    }
    __device__ __forceinline__ Places of_stage(u32 stage) const {
        return {stage + rows, stage + other_rows, stage + words, stage + other_words};
    }
    // B of a group; half: which 32 channels of the stage.
    __device__ __forceinline__ void load_rows(u32 (&b)[4], int half, int group) const {
        const uint4 four = load_16((half % 2 ? other_rows : rows) + half / 2 * ROW_SLAB + group * 1024);
        b[0] = four.x;
        b[1] = four.y;
        b[2] = four.z;
        b[3] = four.w;
    }
    __device__ __forceinline__ uint2 word(int half, int m, int high) const {
        return load_8((m ^ high ? other_words : words) + half / 2 * WEIGHT_SLAB + (2 * m + high) * 128 +
                      half % 2 * 8);
    }
};

// sums += a stage's channels. Between products: the decoding of the next ones' words.
template <int G>
__device__ __forceinline__ void multiply_stage(Sums<G, PRODUCTS>& sums, const Places& places,
                                               const ScaledDecoder& decoder) {
    constexpr int HALVES = 2 * SLABS, AHEAD = 2, ALL = HALVES * G;  // halves of slabs: 32 channels
    u32 b[AHEAD][4];
    ScaledDecoder::Fragment fragments[2][PRODUCTS];
#pragma unroll
    for (int m = 0; m < PRODUCTS; ++m)
        fragments[0][m] = decoder.decode(places.word(0, m, 0), places.word(0, m, 1));
#pragma unroll
    for (int n = 0; n < AHEAD; ++n) places.load_rows(b[n], n / G, n % G);
#pragma unroll
    for (int n = 0; n < ALL; ++n) {
        const int half = n / G, j = n % G, first = PRODUCTS * j / G, last = PRODUCTS * (j + 1) / G;
        uint2 low[PRODUCTS], high[PRODUCTS];
#pragma unroll
        for (int m = 0; m < PRODUCTS; ++m)
            if (half + 1 < HALVES && m >= first && m < last) {
                low[m] = places.word(half + 1, m, 0);
                high[m] = places.word(half + 1, m, 1);
            }
#pragma unroll
        for (int m = 0; m < PRODUCTS; ++m) {
            const auto& of = fragments[half % 2][m];
            multiply_sparse_fp16<0>(sums[m][j], of.a, b[n % AHEAD], of.metadata);
        }
        if (n + AHEAD < ALL) places.load_rows(b[n % AHEAD], (n + AHEAD) / G, (n + AHEAD) % G);
#pragma unroll
        for (int m = 0; m < PRODUCTS; ++m)
            if (half + 1 < HALVES && m >= first && m < last)
                fragments[(half + 1) % 2][m] = decoder.decode(low[m], high[m]);
    }
}

// Products of an item: G groups of 8 rows. here: the stage of its first step. Each step's copies are for a
// step STAGES - 1 later, whose stage is the one before.
template <int G>
__device__ __forceinline__ void multiply(Loader& loader, u32& here, Sums<G, PRODUCTS>& sums, int slabs) {
    const u32 first = loader.shared, end = first + STAGES * STAGE_BYTES;
    const Places places = Places::of_lane();
    const ScaledDecoder decoder(loader.given.H & 63);
    // half of the warps copy behind their products: of two warps of a scheduler one multiplies while the
    // other copies and decodes
    const bool early = STAGES == 2 || threadIdx.x < THREADS / 2;
    clear(sums);
    u32 free = (here == first ? end : here) - STAGE_BYTES;
    int steps = (slabs + SLABS - 1) / SLABS;
    while (steps) {
        if (loader.slabs <= 0) {
            loader.prepare();
            __syncwarp();  // mma needs all lanes
        }
        int count = min(steps, (loader.slabs + SLABS - 1) / SLABS);  // none of them begins another item
        steps -= count;
#pragma unroll 1
        do {
            if (early) loader.fill(free);
            multiply_stage<G>(sums, places.of_stage(here), decoder);
            if (!early) loader.fill(free);
            loader.publish();
            copies_wait<STAGES - 2>();
            __syncthreads();  // the next stage has landed, and no warp reads this one any more
            free = here;
            here = here + STAGE_BYTES == end ? first : here + STAGE_BYTES;
        } while (--count);
    }
}

// powers: of the rows of the tile.
template <int G>
__device__ __forceinline__ void multiply_by_powers(Sums<G, PRODUCTS>& sums, const float* powers) {
#pragma unroll
    for (int j = 0; j < G; ++j) {
        const float2 two = *reinterpret_cast<const float2*>(powers + j * 8 + threadIdx.x % 4 * 2);
#pragma unroll
        for (int m = 0; m < PRODUCTS; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][j][i] *= (1.0f / WEIGHTS) * (i % 2 ? two.y : two.x);
    }
}

template <int G>
__device__ __forceinline__ void write(const Sums<G, PRODUCTS>& sums, const Item& item, u16* act, u16* out,
                                      int H, int I) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool is_down = item.kind == DOWN;
    const int width = is_down ? H : I;
    const int channel = (item.block * (WARPS / 2) + warp / 2) * (is_down ? 64 : 32);
    const int row = lane / 4, left = item.of.rows - row;
    if (channel >= width) return;
    u16* to = (is_down ? out : act) + static_cast<u64>(item.of.first + row) * width + channel +
              warp % 2 * 16 + lane % 4 * 4;
#pragma unroll
    for (int j = 0; j < G; ++j) {
        const bool valid = 8 * j < left;
        if (is_down) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                store(to + 32 * half, valid, pack(sums[0][j][2 * half], sums[0][j][2 * half + 1]),
                      pack(sums[1][j][2 * half], sums[1][j][2 * half + 1]));
        } else {
            u32 words[PRODUCTS];
#pragma unroll
            for (int m = 0; m < PRODUCTS; ++m) {
                const float* d = sums[m][j];
                words[m] = pack(silu_mul(d[0], d[2]), silu_mul(d[1], d[3]));
            }
            store(to, valid, words[0], words[1]);
        }
        to += 8 * static_cast<u64>(width);
    }
}

// With the fewest groups that hold the rows of the item.
template <int G>
__device__ __forceinline__ void run(Loader& loader, u32& here, const Item& item, const float* powers,
                                    u16* out) {
    if constexpr (G < GROUPS) {
        if (item.of.rows > 8 * G) {
            run<Loops::after(G)>(loader, here, item, powers, out);
            return;
        }
    }
    const int H = loader.given.H, I = loader.given.I;
    Sums<G, PRODUCTS> sums;
    multiply<G>(loader, here, sums, (item.kind == DOWN ? I : H) / 64);
    multiply_by_powers<G>(sums, powers);
    write<G>(sums, item, loader.all.act, out, H, I);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    int4_24_many(const uint4* w13, const uint4* w2, const u16* hidden, const float* hidden_powers,
                 const int* row_tokens, Tile* tiles, int* num_tiles, u16* act, float* act_powers, u16* out,
                 int H, int I, int row_step, int up_rows) {
    float* powers = reinterpret_cast<float*>(dynamic_memory() + STAGES * STAGE_BYTES);
    Item* items = reinterpret_cast<Item*>(powers + (STAGES + 1) * MAX_N);
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
            here = loader.shared;
            loader.start();
        },
        [&](int n, const Item& item, int done) {
            if (done >= 0) {
                __syncthreads();  // all activations of the previous item are written
                loader.made(done);
            }
            run<Loops::FEWEST>(loader, here, item, powers + n % (STAGES + 1) * MAX_N, out);
        });
}
