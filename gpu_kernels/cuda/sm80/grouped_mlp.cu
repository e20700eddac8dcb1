// SPDX-License-Identifier: Apache-2.0
// Sorted rows through their experts, on the tensor cores of sm_80 and newer, both products in one launch:
// act[row] = silu(x Wg_e^T) * (x Wu_e^T), x = hidden[row_tokens[row]]; out[row] = act[row] Wd_e^T.
//
// | argument   | shape     | dtype      |                                                                   |
// |------------|-----------|------------|-------------------------------------------------------------------|
// | gate, up   | [E, I, H] | bf16, fp16 | row n of e at (e * rows_of_expert + n) * row_stride, 16 bytes     |
// | down       | [E, H, I] | as gate    | row-major, 16 bytes                                               |
// | hidden     | [T, H]    | as gate    | row-major, 16 bytes                                               |
// | row_tokens | [P]       | int32      |                                                                   |
// | tiles      | [bound]   | Tile       | of routing_sort, tile_rows = MAX_N; their done: 0                 |
// | num_tiles  | [2]       | int32      | tiles in use; 0, counts the items that blocks took                |
// | act        | [P, I]    | as gate    | scratch; row-major, 16 bytes                                      |
// | out        | [P, H]    | as gate    | row-major, 16 bytes; only rows of tiles written                   |
//
// H and I are multiples of 64. Weights are the M side, the rows of a tile the N side of mma.m16n8k16.
//
// Threads: 32 * WARPS_M * WARPS_N. A warp makes 64 weight rows times its share of the tile's rows, in groups
// of 8. Blocks: as many as are resident. A work item is a tile times WEIGHT_ROWS rows of its expert's
// weights. All gate_up items come first, then all down items. Blocks claim items dynamically; only resident
// blocks claim. A down item starts when the activations of its tile are complete. A block finishes its last
// gate_up item before it waits for activations, so no deadlock is possible.
//
// Shared memory: STAGES * (WEIGHT_ROWS + MAX_N) rows of K_BLOCK elements, filled by cp.async, swizzled in
// units of 16 bytes; then SLOTS items. Copies run STAGES - 1 steps ahead of the products, across items.
// READ_ONCE: L2 evicts weights first. Use it for few tokens, where few experts have a second tile.
// Producer: routing_sort. Consumer: combine.
#include "common/copies.cuh"
#include "sm80/claims.cuh"
#include "sm80/rows_out.cuh"

#ifndef WARPS_M
#define WARPS_M 4
#endif
#ifndef WARPS_N
#define WARPS_N 2
#endif
#ifndef MAX_N
#define MAX_N 160
#endif
#ifndef K_BLOCK
#define K_BLOCK 64
#endif
#ifndef STAGES
#define STAGES 3
#endif
#ifndef BLOCKS
#define BLOCKS 1  // of a multiprocessor, at least
#endif
#ifndef READ_ONCE
#define READ_ONCE 0
#endif

constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int WEIGHT_ROWS = 64 * WARPS_M;
constexpr int GROUPS = MAX_N / (8 * WARPS_N);  // of 8 rows, a warp, at most
constexpr int ROW_BYTES = K_BLOCK * 2, CHUNKS = K_BLOCK / 8, K_STEPS = K_BLOCK / 16;
constexpr int STAGE_BYTES = (WEIGHT_ROWS + MAX_N) * ROW_BYTES;
constexpr int PASS = THREADS / CHUNKS;  // rows that the threads copy at a time
constexpr int ROW_PASSES = (MAX_N + PASS - 1) / PASS;
constexpr int SLOTS = 16, NEVER = 1 << 30;

static_assert(K_BLOCK == 32 || K_BLOCK == 64, "rows of 64 or 128 bytes");
static_assert(MAX_N % (16 * WARPS_N) == 0, "a warp loads 16 rows at a time");
static_assert(PASS >= 8 && PASS <= 64 && WEIGHT_ROWS % PASS == 0, "whole passes of weights");
static_assert(STAGES >= 2 && STAGES < SLOTS - 1, "an item stays in its slot until its products are made");

// Swizzled byte offset of a 16-byte chunk of a row: eight rows of one chunk touch every bank once.
__device__ __forceinline__ u32 place(int row, int chunk) {
    return row * ROW_BYTES + (chunk ^ (CHUNKS == 8 ? row % 8 : row / 2 % 4)) * 16;
}

// The order of weight rows in a stage. Row r of 64 is row r % 8 of the low (r < 32) or high half of
// product r / 8 % 4 of a warp. Halves: gate and up rows of the same 32 channels, or 32 channels of down each.
// Within 32: four transposed products give a lane eight channels in a row.
__device__ __forceinline__ constexpr int channel_of(int r) { return r % 2 + r / 2 % 4 * 8 + r / 8 % 4 * 2; }

struct Weights {
    const u16 *gate, *up, *down;
    int rows_of_expert, row_stride, H, I;
};

// This thread's copies: of rows thread / CHUNKS + PASS * i of the weights and of x, 16 bytes each.
struct Loader {
    const Work& work;
    const Weights& given;
    const u16* hidden;
    const u16* act;
    const int* row_tokens;
    Item* items;
    u32 shared;

    u64 weights, x;          // addresses, of the next step
    u64 high;                // bytes from a low row to the high one
    u32 of_64[WARPS_M];      // bytes from the first 64 rows to each 64
    u32 row_bytes;           // of weights
    u32 of_row[ROW_PASSES];  // from the first row of x to this thread's, 16 bytes each
    int rows;                // of x, to copy
    int steps = 0;           // of this item that are not filled yet; NEVER: there is no item to fill
    int item = 0;            // that is prepared next
    int claimed;             // thread 0: the item after the next
    bool live = false;       // there is an item to fill
    bool down = false;
#if READ_ONCE
    u64 policy = evict_first();
#endif

    __device__ __forceinline__ Loader(const Work& work, const Weights& given, const u16* hidden,
                                      const u16* act, const int* row_tokens, Item* items, u32 shared)
        : work(work),
          given(given),
          hidden(hidden),
          act(act),
          row_tokens(row_tokens),
          items(items),
          shared(shared) {
        if (threadIdx.x == 0) {
            work.fill(items[0], work.claim());
            claimed = work.claim();
        }
        __syncthreads();
    }

    // Between items: the addresses of the next one.
    __device__ __forceinline__ void prepare() {
        const Item next = items[item % SLOTS];
        if (next.kind == NONE || (next.kind == DOWN && !down)) {
            steps = NEVER;
            live = false;
            rows = 0;
            return;
        }
        live = true;
        ++item;
        if (threadIdx.x == 0) {
            work.fill(items[item % SLOTS], claimed);
            claimed = work.claim();
        }
        const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
        const bool is_down = next.kind == DOWN;
        const int depth = is_down ? given.I : given.H;
        const int stride = is_down ? given.I : given.row_stride;
        const int channel = next.block * (is_down ? WEIGHT_ROWS : WEIGHT_ROWS / 2);
        const u64 first = static_cast<u64>(next.of.expert) * (is_down ? given.H : given.rows_of_expert) +
                          channel + channel_of(row);
        steps = depth / K_BLOCK;
        row_bytes = stride * 2;
        weights = reinterpret_cast<u64>((is_down ? given.down : given.gate) + first * stride + chunk * 8);
        high = is_down ? 32 * row_bytes : reinterpret_cast<u64>(given.up) - reinterpret_cast<u64>(given.gate);
        if (PASS == 64 && row >= 32) weights += high;
        // past the last channel: the last 64 rows again, products that are not stored
        const int valid = (is_down ? given.H - channel : 2 * (given.I - channel)) / 64;
#pragma unroll
        for (int m = 0; m < WARPS_M; ++m) of_64[m] = min(m, valid - 1) * (is_down ? 64 : 32) * row_bytes;

        rows = next.of.rows - row;
        x = reinterpret_cast<u64>((is_down ? act : hidden) + chunk * 8);
#pragma unroll
        for (int i = 0; i < ROW_PASSES; ++i) {
            int index = next.of.first + row + PASS * i;
            if (!is_down && PASS * i < rows) index = row_tokens[index];
            of_row[i] = static_cast<u32>(index) * (depth / 8);  // below 2^32: see the limits of a problem
        }
        work.wait_for_activations(next);
    }

    // A step's copies, to the stage at `to`.
    __device__ __forceinline__ void fill(u32 to) {
        to += place(threadIdx.x / CHUNKS, threadIdx.x % CHUNKS);
#pragma unroll
        for (int r = 0; r < WEIGHT_ROWS; r += PASS) {
            u64 from = weights;
            if (r / 64) from += of_64[r / 64];
            if (r / 32 % 2) from += high;
            if (r / 8 % 4) from += r / 8 % 4 * 2 * row_bytes;
#if READ_ONCE
            if (live) copy_16(to + r * ROW_BYTES, reinterpret_cast<const void*>(from), policy);
#else
            if (live) copy_16(to + r * ROW_BYTES, reinterpret_cast<const void*>(from));
#endif
        }
#pragma unroll
        for (int i = 0; i < ROW_PASSES; ++i) {
            const void* from = reinterpret_cast<const void*>(row_at(x, of_row[i], 16));
            if (PASS * i < rows) copy_16(to + (WEIGHT_ROWS + PASS * i) * ROW_BYTES, from);
        }
        copies_commit();
        weights += ROW_BYTES;
        x += ROW_BYTES;
    }

    // As Claims have it.
    __device__ __forceinline__ void made(int tile) const { work.made(tile); }

    // The first STAGES - 1 steps; waits for the first of them.
    __device__ __forceinline__ void start() {
        steps = 0;
        for (int s = 0; s < STAGES - 1; ++s) {
            if (steps == 0) prepare();
            fill(shared + s * STAGE_BYTES);
            --steps;
            __syncthreads();  // for the item that thread 0 looked up
        }
        copies_wait<STAGES - 2>();
        __syncthreads();
    }
};

using Sums = float[4][GROUPS][4];

// Fragments of a warp, from the stage at `shared`.
struct Fragments {
    u32 weights, rows;  // offsets in a stage of this lane's row, at k 0

    __device__ __forceinline__ explicit Fragments(int groups) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        // weights: low rows, high rows of k 0 .. 7, then of k 8 .. 15
        weights = place(warp % WARPS_M * 64 + lane / 8 % 2 * 32 + lane % 8, lane / 16);
        // rows 0 .. 7: k 0 .. 7, k 8 .. 15; rows 8 .. 15
        rows = place(WEIGHT_ROWS + warp / WARPS_M * groups * 8 + lane / 16 * 8 + lane % 8, lane / 8 % 2);
    }
    __device__ __forceinline__ void load_weights(u32 (&a)[4], u32 stage, int m, int k) const {
        load_matrices(a, ((stage + weights) ^ (k * 32)) + m * 8 * ROW_BYTES);
    }
    __device__ __forceinline__ void load_rows(u32 (&b)[4], u32 stage, int pair, int k) const {
        load_matrices(b, ((stage + rows) ^ (k * 32)) + pair * 16 * ROW_BYTES);
    }
};

// Products of an item: G groups of 8 rows a warp. here: the stage of its first step. Each step's copies are
// for a step STAGES - 1 later, whose stage is the one before.
template <int G>
__device__ __forceinline__ void multiply(Loader& loader, u32& here, Sums& sums, int steps) {
    constexpr int PAIRS = (G + 1) / 2, LAST = K_STEPS - 1;
    const u32 first = loader.shared, end = first + STAGES * STAGE_BYTES;
    const Fragments fragments(G);
    u32 a[2][4][4], b[2][PAIRS][4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        fragments.load_weights(a[0][m], here, m, 0);
#pragma unroll
        for (int j = 0; j < G; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][j][i] = 0.0f;
    }
    fragments.load_rows(b[0][0], here, 0, 0);
    u32 free = (here == first ? end : here) - STAGE_BYTES;
    while (steps) {
        if (loader.steps == 0) {
            loader.prepare();
            __syncwarp();  // ldmatrix and mma need all lanes
        }
        int count = min(steps, loader.steps);  // none of them begins another item
        steps -= count;
        loader.steps -= count;
#pragma unroll 1
        do {
            // of three stages, the third
            const u32 next = STAGES == 3                 ? 3 * first + 3 * STAGE_BYTES - here - free
                             : here + STAGE_BYTES == end ? first
                                                         : here + STAGE_BYTES;
#pragma unroll
            for (int k = 0; k < K_STEPS; ++k) {
                if (k == 0) loader.fill(free);
#pragma unroll
                for (int pair = 0; pair < PAIRS; ++pair) {
                    // rows of the next products. Those of the last k come before the barrier: all reads of a
                    // stage do
                    if (k == LAST && pair == 0) {
#pragma unroll
                        for (int p = 1; p < PAIRS; ++p) fragments.load_rows(b[k % 2][p], here, p, k);
                    } else if (k < LAST) {
                        if (pair + 1 < PAIRS)
                            fragments.load_rows(b[k % 2][pair + 1], here, pair + 1, k);
                        else
                            fragments.load_rows(b[(k + 1) % 2][0], here, 0, k + 1);
                    }
                    const auto next_weights = [&](u32 from, int of, int parts) {
#pragma unroll
                        for (int m = 4 * of / parts; m < 4 * (of + 1) / parts; ++m)
                            fragments.load_weights(a[(k + 1) % 2][m], from, m, (k + 1) % K_STEPS);
                    };
                    if (k < LAST) next_weights(here, pair, PAIRS);
                    if (k == LAST && pair > 0) next_weights(next, pair - 1, PAIRS - 1);
                    if (k == LAST && pair > 0 && pair + 1 == PAIRS) fragments.load_rows(b[0][0], next, 0, 0);
#pragma unroll
                    for (int half = 0; half < 2; ++half)
#pragma unroll
                        for (int m = 0; m < 4; ++m)
                            if (2 * pair + half < G)
                                multiply_add(sums[m][2 * pair + half], a[k % 2][m], b[k % 2][pair][2 * half],
                                             b[k % 2][pair][2 * half + 1]);
                    if (k == LAST && pair == 0) {
                        copies_wait<STAGES - 2>();
                        __syncthreads();  // the next stage has landed, and no warp reads this one any more
                        if (PAIRS == 1) {
                            next_weights(next, 0, 1);
                            fragments.load_rows(b[0][0], next, 0, 0);
                        }
                    }
                }
            }
            free = here;
            here = next;
        } while (--count);
    }
}

// Numbers of groups a warp that are compiled: all of the upper half.
__device__ __forceinline__ constexpr int after(int groups) { return groups + (2 * groups < GROUPS ? 2 : 1); }
constexpr int FEWEST = GROUPS > 4 ? 2 : 1;

// With the fewest groups a warp that hold the rows of the item.
template <int G>
__device__ __forceinline__ void run(Loader& loader, u32& here, const Item& item, int rows, u16* act, u16* out,
                                    int H, int I) {
    if constexpr (G < GROUPS) {
        if (rows > 8 * WARPS_N * G) {
            run<after(G)>(loader, here, item, rows, act, out, H, I);
            return;
        }
    }
    Sums sums;
    multiply<G>(loader, here, sums, (item.kind == DOWN ? I : H) / K_BLOCK);
    const int warp = threadIdx.x / 32, of_64 = item.block * WARPS_M + warp % WARPS_M;
    write<G>(sums, item, of_64, warp / WARPS_M * G * 8, act, out, H, I);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    grouped_mlp(const u16* gate, const u16* up, const u16* down, const u16* hidden, const int* row_tokens,
                Tile* tiles, int* num_tiles, u16* act, u16* out, int H, int I, int rows_of_expert,
                int row_stride) {
    const u32 shared = shared_address(dynamic_memory());
    Item* items = reinterpret_cast<Item*>(dynamic_memory() + STAGES * STAGE_BYTES);
    wait_for_predecessor();
    let_successor_start();

    const Work work(tiles, num_tiles, H, I, WEIGHT_ROWS);
    const Weights weights{gate, up, down, rows_of_expert, row_stride, H, I};
    Loader loader(work, weights, hidden, act, row_tokens, items, shared);
    u32 here;  // offset of the stage of an item's first step
    each_item<SLOTS>(
        loader, items,
        [&](int) {
            here = shared;
            loader.start();
        },
        [&](int, const Item& item, int done) {
            if (done >= 0) {
                __syncthreads();  // all activations of the item before are written
                loader.made(done);
            }
            run<FEWEST>(loader, here, item, item.of.rows, act, out, H, I);
        });
}
