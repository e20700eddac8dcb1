// SPDX-License-Identifier: Apache-2.0
// Sorted rows through MXFP4 experts, both products in one launch, for experts of many rows. What it makes is
// what mxfp4_mlp makes.
//
// Arguments: as of mxfp4_narrow. H and I are multiples of 32. Weights are the M side, decoded in registers,
// the rows of a tile the N side of mma.m16n8k16.
//
// Threads: 32 * WARPS. A warp makes 32 weight rows times all rows of the tile, in groups of 8: each weight is
// decoded once a tile. Blocks and items: as in grouped_mlp.
//
// Shared memory: STAGES stages of 128 channels: WEIGHT_ROWS rows of 64 bytes, their scales, MAX_N rows of x
// of 256 bytes, filled by cp.async; then the rows of x that each thread copies, SLOTS items, and what they
// share. A thread takes at most 255 registers.
#define PRODUCTS 2
#include "sm80/claims.cuh"
#include "sm80/mxfp4_rows.cuh"

#ifndef WARPS
#define WARPS 8
#endif
#ifndef MAX_N
#define MAX_N 128
#endif
#ifndef STAGES
#define STAGES 2
#endif

constexpr int WARP_ROWS = 32, THREADS = 32 * WARPS, WEIGHT_ROWS = WARP_ROWS * WARPS;
constexpr int GROUPS = MAX_N / 8;  // of 8 rows, at most
constexpr int WEIGHT_BYTES = WEIGHT_ROWS * 64, SCALE_BYTES = WEIGHT_ROWS * 8;
constexpr int STAGE_BYTES = WEIGHT_BYTES + SCALE_BYTES + MAX_N * 256;
// rows that the threads copy at a time
constexpr int PASS = THREADS / 4, ROW_PASS = THREADS / 16, ROW_PASSES = (MAX_N + ROW_PASS - 1) / ROW_PASS;
constexpr int SLOTS = 16, NEVER = 1 << 30;

static_assert(MAX_N % 32 == 0 && GROUPS <= 20, "whole groups of 8 rows, whose sums fit registers");
static_assert(PASS % WARP_ROWS == 0, "a pass of copies has the rows of whole warps");
static_assert(STAGES >= 2 && STAGES < SLOTS - 1, "an item stays in its slot until its products are made");

// The scales of a stage: of each row the four bytes of its groups, from byte `row address % 4` of eight on,
// since rows in memory begin anywhere. Groups past the last are not copied.

// This thread's copies: 16 bytes of some rows of weights, and of x; the scales of row `thread`.
struct Loader : Claims<SLOTS> {
    const Mlp& given;
    int* index;  // rows of x that this thread copies, THREADS apart
    u32 shared;

    u64 weights, x, scales;     // addresses, of the next stage
    u32 next_rows;              // bytes to the weights of the next warp
    int valid, rows;            // rows of weights, and of x, to copy, from this thread's on
    bool scaled;                // this thread copies scales
    int group = 0, groups = 0;  // the first of the next stage, and all of the item; NEVER: there is no item

    __device__ __forceinline__ Loader(const Work& work, const Mlp& given, Item* items, int* index, u32 shared)
        : Claims(work, items), given(given), index(index), shared(shared) {}

    // Between items: the addresses of the next one. The one after it is looked up meanwhile.
    __device__ __forceinline__ void prepare() {
        const Item next = items[item % SLOTS];
        if (!take(next)) {
            groups = NEVER;
            valid = rows = 0;
            scaled = false;
            return;
        }
        const bool is_down = next.kind == DOWN;
        const Rows of(given, is_down, next.of.expert, next.block * WEIGHT_ROWS);
        // rows of a stage: of each warp, low and high rows of each product
        const int row = threadIdx.x / 4, next_warp = is_down ? WARP_ROWS : WARP_ROWS / 2 * of.step;
        const auto rows_before = [&](int r) {
            return r / WARP_ROWS * next_warp + r % WARP_ROWS / 16 * 2 * of.step + r / 8 % 2 * of.to_high;
        };
        groups = of.depth / 32;
        group = 0;
        next_rows = next_warp * groups * 16;
        weights = of.weights(given, is_down, row % 8, threadIdx.x % 4) +
                  static_cast<u64>(rows_before(row)) * groups * 16;
        valid = of.valid - row / WARP_ROWS * WARP_ROWS;
        const int r = threadIdx.x;
        scales = reinterpret_cast<u64>(of.scales(given, is_down, r % 8)) +
                 static_cast<u64>(rows_before(r)) * groups;
        scaled = r < of.valid;

        rows = next.of.rows - threadIdx.x / 16;
        x = reinterpret_cast<u64>((is_down ? given.act : given.hidden) + threadIdx.x % 16 * 8);
#pragma unroll
        for (int i = 0; i < ROW_PASSES; ++i) {
            const int at = next.of.first + threadIdx.x / 16 + ROW_PASS * i;
            if (ROW_PASS * i < rows) index[THREADS * i] = is_down ? at : given.row_tokens[at];
        }
        work.wait_for_activations(next);
    }

    // One of `parts` parts of one of two halves of a stage's copies, to offset `stage`; all constants, but
    // half.
    __device__ __forceinline__ void fill(u32 stage, int half, int part, int parts) {
        constexpr int WEIGHTS = 2, X = (ROW_PASSES + 1) / 2, ALL = WEIGHTS + 1 + X;
#pragma unroll
        for (int n = 0; n < ALL; ++n) {
            if (n < ALL * part / parts || n >= ALL * (part + 1) / parts) continue;
            if (n < WEIGHTS) {
                copy_weights(shared + stage, half * WEIGHTS + n);
            } else if (n == WEIGHTS) {
                if (half == 0 && scaled)
                    copy_unaligned_4(shared + stage + WEIGHT_BYTES + threadIdx.x * 8, scales,
                                     min(groups - group, 4));
            } else {
                copy_x(shared + stage + WEIGHT_BYTES + SCALE_BYTES, half * X + n - WEIGHTS - 1);
            }
        }
    }
    __device__ __forceinline__ void copy_weights(u32 to, int i) const {
        const u64 from = weights + static_cast<u64>(PASS * i / WARP_ROWS) * next_rows;
        const int unit = threadIdx.x % 4;
        to += (threadIdx.x + i * THREADS) * 16;
        // past the last channel: products of what is there, not stored
        if (PASS * i < valid)
            copy_16_or_zeros(to, reinterpret_cast<const void*>(from), group + unit < groups);
    }
    __device__ __forceinline__ void copy_x(u32 to, int i) const {
        to += place_of_row(threadIdx.x / 16, threadIdx.x % 16) + i * ROW_PASS * 256;
        if (i < ROW_PASSES && ROW_PASS * i < rows)
            copy_16_or_zeros(to, reinterpret_cast<const void*>(row_at(x, index[THREADS * i], groups * 64)),
                             group + static_cast<int>(threadIdx.x % 16 / 4) < groups);
    }
    // After a stage's copies.
    __device__ __forceinline__ void step() {
        copies_commit();
        weights += 64;
        scales += 4;
        x += 256;
        group += 4;
    }

    // The first STAGES - 1 stages.
    __device__ __forceinline__ void start() {
        group = groups = 0;
        for (int s = 0; s < STAGES - 1; ++s) {
            if (group >= groups) prepare();
            for (int half = 0; half < 2; ++half) fill(s * STAGE_BYTES, half, 0, 1);
            step();
            publish();
            __syncthreads();
        }
    }
};

// Where this lane finds the scales of its rows in a stage: of its group, if there is one.
struct Scales {
    u32 firsts;  // their first bytes: two bits for each low row, then for each high row of a product
    int groups;

    __device__ __forceinline__ Scales(const Mlp& given, const Item& item) : firsts(0) {
        const bool is_down = item.kind == DOWN;
        const Rows of(given, is_down, item.of.expert, item.block * WEIGHT_ROWS);
        groups = of.depth / 32;
        const u32 first =
            static_cast<u32>(reinterpret_cast<u64>(of.scales(given, is_down, threadIdx.x % 32 / 4))) +
            threadIdx.x / 32 * (is_down ? WARP_ROWS : WARP_ROWS / 2 * of.step) * groups;
#pragma unroll
        for (int m = 0; m < PRODUCTS; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                firsts |= (first + (m * 2 * of.step + h * of.to_high) * groups) % 4 << 2 * (2 * m + h);
    }
    __device__ __forceinline__ void load(u32 (&scales)[PRODUCTS][2], const unsigned char* stage,
                                         int c) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        stage += WEIGHT_BYTES + (warp * WARP_ROWS + lane / 4) * 8 + lane % 4;
        const u32 mask = 4 * c + lane % 4 < groups ? 255 : 0;
#pragma unroll
        for (int m = 0; m < PRODUCTS; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                scales[m][h] = stage[m * 128 + h * 64 + (firsts >> 2 * (2 * m + h) & 3)] & mask;
    }
};

// The products of word i of each lane's chunk: of the warp's weight rows, and G groups of 8 rows of x.
// copy(part, parts): between them.
template <int G, typename Copy>
__device__ __forceinline__ void multiply_fragments(Sums<G>& sums, const u32 (&a)[2][PRODUCTS][4],
                                                   const unsigned char* from, const Copy& copy) {
    // groups: so many products lie between two that add to the same sums
    constexpr int TOGETHER = G % 4 == 0 ? 4 : 2;
#pragma unroll
    for (int j = 0; j < G; j += TOGETHER) {
        uint4 b[TOGETHER];
#pragma unroll
        for (int n = 0; n < TOGETHER; ++n) b[n] = *reinterpret_cast<const uint4*>(from + (j + n) * 2048);
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n)
#pragma unroll
                for (int m = 0; m < PRODUCTS; ++m)
                    multiply_add(sums[m][j + n], a[step][m], step ? b[n].z : b[n].x, step ? b[n].w : b[n].y);
        copy(j / TOGETHER, G / TOGETHER);
    }
}

// sums += 128 channels. weights: of this lane's row of product 0; rows: of the warp's first row of x. large:
// a scale of the warp is. Between products: the copies to offset `free`.
template <int G>
__device__ __forceinline__ void multiply_chunk(Sums<G>& sums, const unsigned char* weights,
                                               const unsigned char* rows, const u32 (&scales)[PRODUCTS][2],
                                               bool large, Loader& loader, u32 free) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll 1  // more at once would take long to compile
    for (int pair = 0; pair < 2; ++pair) {
        uint2 words[PRODUCTS][2];
#pragma unroll
        for (int m = 0; m < PRODUCTS; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                words[m][h] = *reinterpret_cast<const uint2*>(weights + m * 1024 + h * 512 + pair * 8);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 a[2][PRODUCTS][4];
#pragma unroll
            for (int m = 0; m < PRODUCTS; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    u32 pairs[4];
                    place_neighbours(pairs, i ? words[m][h].y : words[m][h].x);
                    const Factor by = Factor::of<true>(scales[m][h]);
                    scale_pairs<false>(pairs, by);
                    if (large) enlarge_pairs(pairs, by);
#pragma unroll
                    for (int j = 0; j < 4; ++j) a[j / 2][m][j % 2 * 2 + h] = pairs[j];
                }
            multiply_fragments<G>(
                sums, a, rows + place_of_row(g, 4 * t + 2 * pair + i),
                [&](int part, int parts) { loader.fill(free, pair, part + i * parts, 2 * parts); });
        }
    }
}

// Products of an item of G groups of 8 rows. here: offset of its first stage. done: a tile of whose
// activations the item before made a part, or -1. Each stage's copies are for one STAGES - 1 later, whose
// place is the one before.
template <int G>
__device__ __forceinline__ void multiply(Loader& loader, u32& here, int done, Sums<G>& sums,
                                         const Item& item) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Scales of(loader.given, item);
    const int chunks = (32 * of.groups + CHUNK - 1) / CHUNK;
    clear<G>(sums);
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
        copies_wait<STAGES - 2>();
        __syncthreads();  // this stage has landed, and no warp reads the one before any more
        if (done >= 0) {
            // at the barrier all activations of the previous item were written
            loader.made(done);
            done = -1;
        }
        if (loader.group >= loader.groups) loader.prepare();
        const u32 free = (here == 0 ? STAGES * STAGE_BYTES : here) - STAGE_BYTES;
        __syncwarp();  // mma needs all lanes
        const unsigned char* stage = dynamic_memory() + here;
        const unsigned char* weights = stage + warp * (WARP_ROWS * 64) + lane * 16;
        const unsigned char* rows = stage + WEIGHT_BYTES + SCALE_BYTES;
        u32 scales[PRODUCTS][2], any = 0;
        of.load(scales, stage, c);
#pragma unroll
        for (int m = 0; m < PRODUCTS; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) any |= scales[m][h];
        multiply_chunk<G>(sums, weights, rows, scales, __any_sync(~0u, is_large(any)), loader, free);
        loader.step();
        loader.publish();
        here = here + STAGE_BYTES == STAGES * STAGE_BYTES ? 0 : here + STAGE_BYTES;
    }
}

// Two words of two products, transposed: four channels in a row of one row of the tile.
__device__ __forceinline__ void store(u16* to, bool valid, u32 a, u32 b) {
    const uint2 words = make_uint2(transposed(a), transposed(b));
    if (valid) *reinterpret_cast<uint2*>(to) = words;
}

template <int G>
__device__ __forceinline__ void write(const Sums<G>& sums, const Item& item, const Mlp& given) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool is_down = item.kind == DOWN;
    const int width = is_down ? given.H : given.I;
    const int channel = (item.block * WARPS + warp) * (is_down ? 2 * CHANNELS : CHANNELS);
    const int row = lane / 4, left = item.of.rows - row;
    if (channel >= width) return;
    u16* to = (is_down ? given.out : given.act) + static_cast<u64>(item.of.first + row) * width + channel +
              lane % 4 * 4;
    float low[PRODUCTS] = {}, high[PRODUCTS] = {};  // biases
    if (BIASED)
#pragma unroll
        for (int m = 0; m < PRODUCTS; ++m) {
            const int c = channel + channel_of(lane / 4) + 2 * m;
            const u64 of = static_cast<u64>(item.of.expert) * (is_down ? given.H : 2 * given.I) +
                           c * (is_down ? 1 : given.row_step);
            low[m] = is_down ? given.down_biases[of] : given.gate_up_biases[of];
            high[m] = is_down ? given.down_biases[of + CHANNELS] : given.gate_up_biases[of + given.up_rows];
        }
#pragma unroll
    for (int j = 0; j < G; ++j) {
        const bool valid = 8 * j < left;
        u32 words[2][PRODUCTS];
#pragma unroll
        for (int m = 0; m < PRODUCTS; ++m) {
            const float* d = sums[m][j];
            const float a = d[0] + low[m], b = d[1] + low[m], c = d[2] + high[m], e = d[3] + high[m];
            words[0][m] = is_down ? pack(a, b) : pack(activated(a, c), activated(b, e));
            words[1][m] = pack(c, e);
        }
        store(to, valid, words[0][0], words[0][1]);
        if (is_down) store(to + CHANNELS, valid, words[1][0], words[1][1]);
        to += 8 * static_cast<u64>(width);
    }
}

// Numbers of groups that are compiled: more of the upper half.
constexpr int FEWEST = 4;
__device__ __forceinline__ constexpr int after(int groups) { return groups + (2 * groups < GROUPS ? 4 : 2); }

// With the fewest groups that hold the rows of the item.
template <int G>
__device__ __forceinline__ void run(Loader& loader, u32& here, int done, const Item& item) {
    if constexpr (G < GROUPS) {
        if (item.of.rows > 8 * G) {
            run<after(G)>(loader, here, done, item);
            return;
        }
    }
    Sums<G> sums;
    multiply<G>(loader, here, done, sums, item);
    write<G>(sums, item, loader.given);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mxfp4_many(const unsigned char* gate_up_blocks, const unsigned char* gate_up_scales,
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
        [&](int, const Item& item, int done) { run<FEWEST>(loader, here, done, item); });
}
