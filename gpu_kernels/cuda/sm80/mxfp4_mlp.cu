// SPDX-License-Identifier: Apache-2.0
// Sorted rows through MXFP4 experts, both products in one launch: act[row] = activation(x Wg_e^T, x Wu_e^T),
// x = hidden[row_tokens[row]]; out[row] = act[row] Wd_e^T + bd_e.
//
// Arguments: as of mxfp4_narrow. H and I are multiples of 32. Weights are the M side, decoded in registers,
// the rows of a tile the N side of mma.m16n8k16.
//
// Threads: 32 * WARPS_M * WARPS_N. A warp makes 64 weight rows times its share of the tile's rows, in groups
// of 8. Blocks and items: as in grouped_mlp.
//
// Shared memory: STAGES stages of 128 channels: WEIGHT_ROWS rows of 64 bytes, MAX_N rows of x of 256 bytes,
// filled by cp.async; then the rows of x that each thread copies, SLOTS items, and what they share. Each lane
// reads its rows' scales from memory, a stage ahead. A thread takes at most 255 registers; nothing spills.
#include "sm80/claims.cuh"
#include "sm80/mxfp4_rows.cuh"
#include "sm80/rows_out.cuh"

#ifndef WARPS_M
#define WARPS_M 4
#endif
#ifndef WARPS_N
#define WARPS_N 1
#endif
#ifndef MAX_N
#define MAX_N 32
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

constexpr int THREADS = 32 * WARPS_M * WARPS_N, WEIGHT_ROWS = 64 * WARPS_M;
constexpr int GROUPS = MAX_N / (8 * WARPS_N);  // of 8 rows, a warp, at most
constexpr int WEIGHT_BYTES = WEIGHT_ROWS * 64, STAGE_BYTES = WEIGHT_BYTES + MAX_N * 256;
constexpr int PASS = THREADS / 4, WEIGHT_PASSES = WEIGHT_ROWS / PASS;  // rows that the threads copy at a time
constexpr int ROW_PASS = THREADS / 16, ROW_PASSES = (MAX_N + ROW_PASS - 1) / ROW_PASS;
constexpr int SLOTS = 16, NEVER = 1 << 30;

static_assert(MAX_N % (8 * WARPS_N) == 0 && GROUPS <= 8, "whole groups of 8 rows, whose sums fit registers");
static_assert(PASS % 16 == 0 && WEIGHT_ROWS % PASS == 0 && (PASS <= 64 || PASS % 64 == 0), "whole products");
static_assert(STAGES >= 2 && STAGES < SLOTS - 1, "an item stays in its slot until its products are made");

// This thread's copies: 16 bytes of some rows of weights, and of x.
struct Loader : Claims<SLOTS> {
    const Mlp& given;
    int* index;  // rows of x that this thread copies, THREADS apart
    u32 shared;

    u64 weights, x;      // addresses, of the next stage
    u32 tile, next_64;   // bytes to the rows of the next product, and to the next 64
    int x_bytes;         // of a row in memory
    int valid, rows;     // rows of weights, and of x, to copy, from this thread's on
    int group, channel;  // of the next stage: this thread's group of weights, and first channel of x
    int groups;          // of the item
    int chunks = 0;      // of this item that are not filled yet; NEVER: there is no item to fill

    __device__ __forceinline__ Loader(const Work& work, const Mlp& given, Item* items, int* index, u32 shared)
        : Claims(work, items), given(given), index(index), shared(shared) {}

    // Between items: the addresses of the next one. The one after it is looked up meanwhile.
    __device__ __forceinline__ void prepare() {
        const Item next = items[item % SLOTS];
        if (!take(next)) {
            chunks = NEVER;
            valid = rows = groups = 0;
            return;
        }
        const bool is_down = next.kind == DOWN;
        const Rows of(given, is_down, next.of.expert, next.block * WEIGHT_ROWS);
        // rows of a stage: of each 64, low and high rows of each product
        const int row = threadIdx.x / 4, m = row % 64 / 16, high = row / 8 % 2, unit = threadIdx.x % 4;
        const u32 row_bytes = of.depth / 2;
        groups = of.depth / 32;
        chunks = (of.depth + CHUNK - 1) / CHUNK;
        tile = 2 * of.step * row_bytes;
        next_64 = (is_down ? 64 : 32 * of.step) * row_bytes;
        group = unit;
        weights = of.weights(given, is_down, row % 8, unit) + static_cast<u64>(m * 2 * of.step) * row_bytes +
                  static_cast<u64>(high * of.to_high) * row_bytes + static_cast<u64>(row / 64) * next_64;
        valid = of.valid - row / 64 * 64 - high * 32;

        rows = next.of.rows - threadIdx.x / 16;
        channel = threadIdx.x % 16 * 8;
        x_bytes = of.depth * 2;
        x = reinterpret_cast<u64>((is_down ? given.act : given.hidden) + channel);
#pragma unroll
        for (int i = 0; i < ROW_PASSES; ++i) {
            const int at = next.of.first + threadIdx.x / 16 + ROW_PASS * i;
            if (ROW_PASS * i < rows) index[THREADS * i] = is_down ? at : given.row_tokens[at];
        }
        work.wait_for_activations(next);
    }

    // A stage's copies, to offset `stage`.
    __device__ __forceinline__ void fill(u32 stage) {
        if (chunks == 0) prepare();
        const u32 to = shared + stage + threadIdx.x * 16;
#pragma unroll
        for (int i = 0; i < WEIGHT_PASSES; ++i) {
            const u64 from = weights + static_cast<u64>(PASS * i % 64 / 16) * tile +
                             static_cast<u64>(PASS * i / 64) * next_64;
            // past the last channel: products of what is there, not stored
            if (PASS * i / 64 * 64 < valid)
#if READ_ONCE
                copy_16_or_zeros(to + i * PASS * 64, reinterpret_cast<const void*>(from), group < groups,
                                 evict_first());
#else
                copy_16_or_zeros(to + i * PASS * 64, reinterpret_cast<const void*>(from), group < groups);
#endif
        }
        const u32 to_row = shared + stage + WEIGHT_BYTES + place_of_row(threadIdx.x / 16, threadIdx.x % 16);
#pragma unroll
        for (int i = 0; i < ROW_PASSES; ++i)
            if (ROW_PASS * i < rows)
                copy_16_or_zeros(to_row + i * ROW_PASS * 256,
                                 reinterpret_cast<const void*>(row_at(x, index[THREADS * i], x_bytes)),
                                 channel < groups * 32);
        copies_commit();
        weights += 64;
        x += 256;
        group += 4;
        channel += CHUNK;
        if (chunks != NEVER) --chunks;
    }

    // The first STAGES - 1 stages.
    __device__ __forceinline__ void start() {
        chunks = 0;
        for (int s = 0; s < STAGES - 1; ++s) {
            fill(s * STAGE_BYTES);
            publish();
            __syncthreads();
        }
    }
};

// The scales of this lane's eight rows, in memory.
struct Scales {
    const unsigned char* first;  // of row lane / 4 of product 0
    u32 tile, high;              // bytes to the next product, and to the high rows
    int groups;

    __device__ __forceinline__ Scales(const Mlp& given, const Item& item) {
        const bool is_down = item.kind == DOWN;
        const Rows of(given, is_down, item.of.expert, item.block * WEIGHT_ROWS);
        const int warp_m = threadIdx.x / 32 % WARPS_M;
        groups = of.depth / 32;
        first = of.scales(given, is_down, threadIdx.x % 32 / 4);
        // rows that are not there: some that are
        if (warp_m * 64 < of.valid)
            first += static_cast<u64>(warp_m * (is_down ? 64 : 32 * of.step)) * groups;
        tile = 2 * of.step * groups;
        high = warp_m * 64 + 32 < of.valid ? of.to_high * groups : 0;
    }
    __device__ __forceinline__ void load(u32 (&scales)[4][2], int c) const {
        const int group = min(4 * c + static_cast<int>(threadIdx.x % 4), groups - 1);
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) scales[m][h] = first[group + m * tile + h * high];
    }
};

// sums += 128 channels. weights: of this lane's row of product 0; rows: of the warp's first row of x.
template <int G, bool LARGE>
__device__ __forceinline__ void multiply_chunk(Sums<G>& sums, const unsigned char* weights,
                                               const unsigned char* rows, const u32 (&scales)[4][2]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    Factor by[4][2];
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) by[m][h] = Factor::of<LARGE>(scales[m][h]);
#pragma unroll 1  // more at once would spill
    for (int pair = 0; pair < 2; ++pair) {
        uint2 words[4][2];
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                words[m][h] = *reinterpret_cast<const uint2*>(weights + m * 1024 + h * 512 + pair * 8);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned char* from = rows + place_of_row(g, 4 * t + 2 * pair + i);
            uint4 b[G];
#pragma unroll
            for (int j = 0; j < G; ++j) b[j] = pairs_of(*reinterpret_cast<const uint4*>(from + j * 2048));
#pragma unroll
            for (int m = 0; m < 4; ++m)
                multiply_word<LARGE, G>(sums[m], i ? words[m][0].y : words[m][0].x,
                                        i ? words[m][1].y : words[m][1].x, by[m][0], by[m][1], b);
        }
    }
}

// Products of an item: G groups of 8 rows a warp. here: offset of its first stage. done: a tile of whose
// activations the item before made a part, or -1. Each stage's copies are for one STAGES - 1 later, whose
// place is the one before.
template <int G>
__device__ __forceinline__ void multiply(Loader& loader, u32& here, int done, Sums<G>& sums,
                                         const Item& item) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Scales of(loader.given, item);
    const int chunks = (32 * of.groups + CHUNK - 1) / CHUNK;
    constexpr bool AHEAD = G <= 4;  // more would spill
    u32 scales[4][2];
    if (AHEAD) of.load(scales, 0);
    clear<G>(sums);
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
        if (!AHEAD) of.load(scales, c);
        u32 now[4][2], any = 0;
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                now[m][h] = scales[m][h];
                any |= now[m][h];
            }
        if (AHEAD) of.load(scales, c + 1);
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
        const unsigned char* weights = stage + warp % WARPS_M * 4096 + lane * 16;
        const unsigned char* rows = stage + WEIGHT_BYTES + warp / WARPS_M * G * 2048;
        if (__ballot_sync(~0u, is_large(any)))
            multiply_chunk<G, true>(sums, weights, rows, now);
        else
            multiply_chunk<G, false>(sums, weights, rows, now);
        loader.publish();
        here = here + STAGE_BYTES == STAGES * STAGE_BYTES ? 0 : here + STAGE_BYTES;
    }
}

template <int G>
__device__ __forceinline__ void write(const Sums<G>& sums, const Item& item, const Mlp& given) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool is_down = item.kind == DOWN;
    const int width = is_down ? given.H : given.I;
    const int channel = (item.block * WARPS_M + warp % WARPS_M) * (is_down ? 64 : 32);
    const int row = warp / WARPS_M * G * 8 + lane / 4, left = item.of.rows - row;
    if (channel >= width) return;
    const bool high_too = channel + 32 < width;
    u16* to = (is_down ? given.out : given.act) + static_cast<u64>(item.of.first + row) * width + channel +
              lane % 4 * 8;
    float low[4] = {}, high[4] = {};  // biases
    if (BIASED)
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const int c = channel + channel_of(lane / 4) + 2 * m;
            const u64 of = static_cast<u64>(item.of.expert) * (is_down ? given.H : 2 * given.I) +
                           c * (is_down ? 1 : given.row_step);
            low[m] = is_down ? given.down_biases[of] : given.gate_up_biases[of];
            high[m] = !is_down   ? given.gate_up_biases[of + given.up_rows]
                      : high_too ? given.down_biases[of + 32]
                                 : 0.0f;
        }
#pragma unroll
    for (int j = 0; j < G; ++j) {
        const bool valid = 8 * j < left;
        u32 words[2][4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const float* d = sums[m][j];
            const float a = d[0] + low[m], b = d[1] + low[m], c = d[2] + high[m], e = d[3] + high[m];
            words[0][m] = is_down ? pack(a, b) : pack(activated(a, c), activated(b, e));
            words[1][m] = pack(c, e);
        }
        store(to, valid, words[0][0], words[0][1], words[0][2], words[0][3]);
        if (is_down) store(to + 32, valid && high_too, words[1][0], words[1][1], words[1][2], words[1][3]);
        to += 8 * static_cast<u64>(width);
    }
}

// Numbers of groups a warp that are compiled: all up to 2, then every second.
__device__ __forceinline__ constexpr int after(int groups) { return groups + (groups < 2 ? 1 : 2); }

// With the fewest groups a warp that hold the rows of the item.
template <int G>
__device__ __forceinline__ void run(Loader& loader, u32& here, int done, const Item& item) {
    if constexpr (G < GROUPS) {
        if (item.of.rows > 8 * WARPS_N * G) {
            run<after(G)>(loader, here, done, item);
            return;
        }
    }
    Sums<G> sums;
    multiply<G>(loader, here, done, sums, item);
    write<G>(sums, item, loader.given);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    mxfp4_mlp(const unsigned char* gate_up_blocks, const unsigned char* gate_up_scales,
              const u16* gate_up_biases, const float* gate_up_biases32, const unsigned char* down_blocks,
              const unsigned char* down_scales, const u16* down_biases, const float* down_biases32,
              const u16* hidden, const int* row_tokens, Tile* tiles, int* num_tiles, u16* act, u16* out,
              int H, int I, int row_step, int up_rows) {
    int* index = reinterpret_cast<int*>(dynamic_memory() + STAGES * STAGE_BYTES);
    Item* items = reinterpret_cast<Item*>(index + ROW_PASSES * THREADS);
    wait_for_predecessor();
    let_successor_start();

    Work& work = *reinterpret_cast<Work*>(items + SLOTS);
    if (threadIdx.x == 0) work = Work(tiles, num_tiles, H, I, WEIGHT_ROWS);
    __syncthreads();
    const Mlp given{gate_up_blocks,
                    gate_up_scales,
                    {gate_up_biases, gate_up_biases32},
                    down_blocks,
                    down_scales,
                    {down_biases, down_biases32},
                    hidden,
                    row_tokens,
                    act,
                    out,
                    H,
                    I,
                    row_step,
                    up_rows};
    Loader loader(work, given, items, index + threadIdx.x, shared_address(dynamic_memory()));
    u32 here;  // offset of the stage of an item's first step
    each_item<SLOTS>(
        loader, items,
        [&](int) {
            here = 0;
            loader.start();
        },
        [&](int, const Item& item, int done) { run<(GROUPS > 4 ? 2 : 1)>(loader, here, done, item); });
}
