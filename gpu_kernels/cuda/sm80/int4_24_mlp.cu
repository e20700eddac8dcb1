// SPDX-License-Identifier: Apache-2.0
// Sorted rows through int4_24 experts, both products in one launch:
// act[row] = silu(x Wg_e^T) * (x Wu_e^T), x = hidden[row_tokens[row]]; out[row] = act[row] Wd_e^T.
//
// | argument   | shape             | dtype |                                                                |
// |------------|-------------------|-------|----------------------------------------------------------------|
// | w13        | [E, H/64, 2I, 2]  | int64 | words; gate row c is row c * row_step, its up row up_rows later |
// | w2         | [E, I/64, H, 2]   | int64 | words                                                          |
// | hidden     | [T, H]            | bf16  | of int4_24_order; row-major, 16 bytes                          |
// | row_tokens | [P]               | int32 |                                                                |
// | tiles      | [bound]           | Tile  | of routing_sort, tile_rows = MAX_N; their done: 0              |
// | num_tiles  | [2]               | int32 | tiles in use; 0, counts the items that blocks took             |
// | act        | [P, I]            | bf16  | scratch, in the order of hidden                                |
// | out        | [P, H]            | bf16  | row-major, 16 bytes; only rows of tiles written                |
//
// H and I are multiples of 64. Weights are the M side, the rows of a tile the N side of mma.sp.m16n8k32.
// Integers are multiplied; each 32 channels' sums are then scaled, in fp32.
//
// Threads: 32 * WARPS_M * WARPS_N * WARPS_K. A warp makes 64 weight rows times its share of the tile's rows,
// in groups of 8, over its share of the channels. Its last WARPS_K warps add up. Blocks and items: as in
// grouped_mlp.
//
// Shared memory: STAGES stages of SLABS slabs of 64 channels: WEIGHT_ROWS * 16 bytes of words, then MAX_N *
// 128 bytes of rows. A lane's decoding reads 16 bytes of a word's row, which its quad shares. Then sums of
// the warps that share channels; then SLOTS items, and what all items have in common. Up to 64 rows a warp
// take at most 255 registers; nothing spills.
#include "common/copies.cuh"
#include "sm80/claims.cuh"
#include "sm80/int4_24_tile.cuh"

#ifndef WARPS_M
#define WARPS_M 2
#endif
#ifndef WARPS_N
#define WARPS_N 1
#endif
#ifndef WARPS_K
#define WARPS_K 2
#endif
#ifndef MAX_N
#define MAX_N 8
#endif
#ifndef SLABS
#define SLABS 4
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef BLOCKS
#define BLOCKS 1  // of a multiprocessor, at least
#endif
#ifndef READ_ONCE
#define READ_ONCE 0
#endif

constexpr int WARPS = WARPS_M * WARPS_N * WARPS_K, THREADS = 32 * WARPS;
constexpr int WEIGHT_ROWS = 64 * WARPS_M;
constexpr int GROUPS = MAX_N / (8 * WARPS_N);  // of 8 rows, a warp, at most
constexpr int WEIGHT_SLAB = WEIGHT_ROWS * 16, ROW_SLAB = MAX_N * 128;
constexpr int STAGE_BYTES = SLABS * (WEIGHT_SLAB + ROW_SLAB);
constexpr int SLABS_AT_ONCE = THREADS / WEIGHT_ROWS;  // of words that the threads copy at a time
constexpr int WEIGHT_PASSES = SLABS / SLABS_AT_ONCE;
constexpr int ROWS_AT_ONCE = THREADS / 8;
constexpr int ROW_PASSES = MAX_N > ROWS_AT_ONCE ? MAX_N / ROWS_AT_ONCE : 1;  // of a slab
constexpr int ROW_SLABS_AT_ONCE = MAX_N > ROWS_AT_ONCE ? 1 : ROWS_AT_ONCE / MAX_N;
constexpr int SUMS_BYTES = (WARPS_K - 1) * WARPS_M * WARPS_N * GROUPS * 2048;
constexpr int SLOTS = 16, NEVER = 1 << 30;

static_assert(MAX_N % (8 * WARPS_N) == 0 && GROUPS <= 8, "whole groups of 8 rows, whose sums fit registers");
static_assert(THREADS % WEIGHT_ROWS == 0 && SLABS % SLABS_AT_ONCE == 0, "a thread copies one row of words");
static_assert(MAX_N % ROWS_AT_ONCE == 0 || ROWS_AT_ONCE % MAX_N == 0, "whole passes of rows");
static_assert(SLABS % WARPS_K == 0, "warps have as many slabs as one another");
static_assert(STAGES >= 2 && STAGES < SLOTS - 1, "an item stays in its slot until its products are made");

// This thread's copies: of one row of words, and of a chunk of rows of x.
struct Loader : Claims<SLOTS> {
    const Weights& given;
    const u16* hidden;
    const u16* act;
    const int* row_tokens;
    u32 shared;

    u64 weights, x;         // addresses, of the next step
    u64 slab_bytes;         // from a slab of words to the next
    u32 to;                 // of the words in a slab of a stage
    int x_bytes;            // of a row in memory
    int rows;               // of x, to copy, from this thread's on; also for the words: below 0, none
    int index[ROW_PASSES];  // rows of x
    int slabs = 0;          // of this item that are not filled yet; NEVER: there is no item to fill
    bool valid = false;
#if READ_ONCE
    u64 policy = evict_first();
#endif

    __device__ __forceinline__ Loader(const Work& work, const Weights& given, const u16* hidden,
                                      const u16* act, const int* row_tokens, Item* items, u32 shared)
        : Claims(work, items),
          given(given),
          hidden(hidden),
          act(act),
          row_tokens(row_tokens),
          shared(shared) {}

    // Between items: the addresses of the next one. The one after it is looked up meanwhile.
    __device__ __forceinline__ void prepare() {
        const Item next = items[item % SLOTS];
        if (!take(next)) {
            slabs = NEVER;
            valid = false;
            rows = 0;
            return;
        }
        const bool is_down = next.kind == DOWN;
        const int depth = is_down ? given.I : given.H, R = is_down ? given.H : 2 * given.I;
        slabs = depth / 64;
        slab_bytes = static_cast<u64>(R) * 16;
        {
            const int r = threadIdx.x % WEIGHT_ROWS % 64, warp_m = threadIdx.x % WEIGHT_ROWS / 64;
            const int slab = threadIdx.x / WEIGHT_ROWS;
            const bool pairs = !is_down && given.row_step == 2;  // gate and up rows take turns
            const int c = pairs ? r / 2 : r % 32, high = pairs ? r % 2 : r / 32;
            const int channel =
                (next.block * WARPS_M + warp_m) * (is_down ? 64 : 32) + c + (is_down ? 32 * high : 0);
            const int row = is_down ? channel : channel * given.row_step + high * given.up_rows;
            valid = channel < (is_down ? given.H : given.I);
            const uint4* first = is_down ? given.w2 : given.w13;
            weights =
                reinterpret_cast<u64>(first + (static_cast<u64>(next.of.expert) * slabs + slab) * R + row);
            to = shared + slab * WEIGHT_SLAB + warp_m * 1024 + place(c, high, is_down);
        }
        const int row = threadIdx.x / 8 % MAX_N;
        rows = next.of.rows - row;
        x_bytes = depth * 2;
        x = reinterpret_cast<u64>((is_down ? act : hidden) + threadIdx.x / (8 * MAX_N) * 64 +
                                  threadIdx.x % 8 * 8);
#pragma unroll
        for (int i = 0; i < ROW_PASSES; ++i) {
            index[i] = next.of.first + row + ROWS_AT_ONCE * i;
            if (!is_down && ROWS_AT_ONCE * i < rows) index[i] = row_tokens[index[i]];
        }
        work.wait_for_activations(next);
    }

    // A step's copies, to the stage at offset `stage`.
    __device__ __forceinline__ void fill(u32 stage) {
        if (slabs == 0) prepare();
        const int left_words = slabs - threadIdx.x / WEIGHT_ROWS;
#pragma unroll
        for (int i = 0; i < WEIGHT_PASSES; ++i) {
            const void* from = reinterpret_cast<const void*>(weights + i * SLABS_AT_ONCE * slab_bytes);
            // past the last channel: products of what is there, not stored
#if READ_ONCE
            if (valid && i * SLABS_AT_ONCE < left_words)
                copy_16(to + stage + i * SLABS_AT_ONCE * WEIGHT_SLAB, from, policy);
#else
            if (valid && i * SLABS_AT_ONCE < left_words)
                copy_16(to + stage + i * SLABS_AT_ONCE * WEIGHT_SLAB, from);
#endif
        }
        const int own_slab = ROW_SLABS_AT_ONCE > 1 ? threadIdx.x / (8 * MAX_N) : 0;
        const u32 to_row = shared + stage + SLABS * WEIGHT_SLAB + own_slab * ROW_SLAB +
                           place_of_row(threadIdx.x / 8 % MAX_N, threadIdx.x % 8);
#pragma unroll
        for (int i = 0; i < ROW_PASSES; ++i) {
            const u64 from = row_at(x, index[i], x_bytes);
#pragma unroll
            for (int s = 0; s < SLABS; s += ROW_SLABS_AT_ONCE)
                if (ROWS_AT_ONCE * i < rows && s + own_slab < min(slabs, SLABS))
                    copy_16(to_row + s * ROW_SLAB + i * ROWS_AT_ONCE * 128,
                            reinterpret_cast<const void*>(from + s * 128));
        }
        copies_commit();
        weights += SLABS * slab_bytes;
        x += SLABS * 128;
        if (slabs != NEVER) slabs = max(slabs - SLABS, 0);
    }

    // The first STAGES - 1 steps.
    __device__ __forceinline__ void start() {
        slabs = 0;
        for (int s = 0; s < STAGES - 1; ++s) {
            fill(s * STAGE_BYTES);
            publish();
            __syncthreads();
        }
    }
};

// Products of an item: G groups of 8 rows a warp. here: offset of the stage of its first step. Each step's
// copies are for a step STAGES - 1 later, whose stage is the one before.
template <int G>
__device__ __forceinline__ void multiply(Loader& loader, u32& here, int done, Sums<G>& sums, int slabs) {
    const int warp = threadIdx.x / 32;
    const Lane lane(warp % WARPS_M, warp / WARPS_M % WARPS_N * G * 8);
    const Decoder decoder(loader.given.H & 63);
    const int warp_k = warp / (WARPS_M * WARPS_N);
    clear<G>(sums);
    for (; slabs > 0; slabs -= SLABS) {
        copies_wait<STAGES - 2>();
        __syncthreads();  // this stage has landed, and no warp reads the one before any more
        if (done >= 0) {
            // at the barrier all activations of the previous item were written
            loader.made(done);
            done = -1;
        }
        loader.fill((here == 0 ? STAGES * STAGE_BYTES : here) - STAGE_BYTES);
        __syncwarp();  // mma needs all lanes
        const unsigned char* stage = dynamic_memory() + here;
#pragma unroll 1
        for (int s = warp_k; s < SLABS; s += WARPS_K)
            if (s < slabs)
                multiply_slab<G>(sums, stage + s * WEIGHT_SLAB, stage + SLABS * WEIGHT_SLAB + s * ROW_SLAB,
                                 lane, decoder);
        loader.publish();
        here = here + STAGE_BYTES == STAGES * STAGE_BYTES ? 0 : here + STAGE_BYTES;
    }
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int j = 0; j < G; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][j][i] *= INTEGERS;
}

// The sums of the warps that share channels, to the first of them. Whether this warp is one.
template <int G>
__device__ __forceinline__ bool add_up(Sums<G>& sums) {
    if constexpr (WARPS_K > 1) {
        constexpr int EACH = G * 4;  // of four sums
        float4* memory = reinterpret_cast<float4*>(dynamic_memory() + STAGES * STAGE_BYTES);
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, same = WARPS_M * WARPS_N;
        if (warp >= same)
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const float* four = sums[i / G][i % G];
                memory[((warp - same) * EACH + i) * 32 + lane] = float4{four[0], four[1], four[2], four[3]};
            }
        __syncthreads();
        if (warp >= same) return false;
#pragma unroll
        for (int k = 0; k < WARPS_K - 1; ++k)
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const float4 four = memory[((warp + k * same) * EACH + i) * 32 + lane];
                float* own = sums[i / G][i % G];
                own[0] += four.x;
                own[1] += four.y;
                own[2] += four.z;
                own[3] += four.w;
            }
    }
    return true;
}

// Numbers of groups a warp that are compiled: all up to 2, then every second.
__device__ __forceinline__ constexpr int after(int groups) { return groups + (groups < 2 ? 1 : 2); }

// With the fewest groups a warp that hold the rows of the item. done: a tile of whose activations the item
// before made a part, or -1.
template <int G>
__device__ __forceinline__ void run(Loader& loader, u32& here, int done, const Item& item, int rows, u16* act,
                                    u16* out, int H, int I) {
    if constexpr (G < GROUPS) {
        if (rows > 8 * WARPS_N * G) {
            run<after(G)>(loader, here, done, item, rows, act, out, H, I);
            return;
        }
    }
    Sums<G> sums;
    multiply<G>(loader, here, done, sums, (item.kind == DOWN ? I : H) / 64);
    const int warp = threadIdx.x / 32, of_64 = item.block * WARPS_M + warp % WARPS_M;
    if (add_up<G>(sums)) write<G>(sums, item, of_64, warp / WARPS_M * G * 8, act, out, H, I);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    int4_24_mlp(const uint4* w13, const uint4* w2, const u16* hidden, const int* row_tokens, Tile* tiles,
                int* num_tiles, u16* act, u16* out, int H, int I, int row_step, int up_rows) {
    const u32 shared = shared_address(dynamic_memory());
    Item* items = reinterpret_cast<Item*>(dynamic_memory() + STAGES * STAGE_BYTES + SUMS_BYTES);
    wait_for_predecessor();
    let_successor_start();

    Work& work = *reinterpret_cast<Work*>(items + SLOTS);
    if (threadIdx.x == 0) work = Work(tiles, num_tiles, H, I, WEIGHT_ROWS);
    __syncthreads();
    const Weights weights{w13, w2, row_step, up_rows, H, I};
    Loader loader(work, weights, hidden, act, row_tokens, items, shared);
    u32 here;  // offset of the stage of an item's first step
    each_item<SLOTS>(
        loader, items,
        [&](int) {
            here = 0;
            loader.start();
        },
        [&](int, const Item& item, int done) {
            run<1>(loader, here, done, item, item.of.rows, act, out, H, I);
        });
}
