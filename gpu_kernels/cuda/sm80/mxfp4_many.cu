// SPDX-License-Identifier: Apache-2.0
// Sorted rows through MXFP4 experts, both products in one launch: act[row] = activation(x Wg_e^T, x Wu_e^T),
// x = hidden[row_tokens[row]]; out[row] = act[row] Wd_e^T + bd_e.
//
// Arguments: as of mxfp4_narrow. H and I are multiples of 32. Weights are the M side, decoded in registers,
// the rows of a tile the N side of mma.m16n8k16.
//
// Threads: 32 * WARPS. A warp makes 32 weight rows times all rows of the tile, in groups of 8: each weight is
// decoded once a tile. Blocks and items: as in grouped_mlp.
//
// Shared memory: STAGES stages of 128 channels: WEIGHT_ROWS rows of 64 bytes, their scales, MAX_N rows of x
// of 256 bytes, filled by cp.async; then where the rows of x lie that each thread copies, SLOTS items, and
// what they share. A thread takes at most 255 registers.
#define PRODUCTS 2
#include "sm80/claims.cuh"
#include "sm80/mxfp4_rows.cuh"
#include "sm80/row_groups.cuh"
#include "sm80/rows_out.cuh"

#ifndef WARPS
#define WARPS 8
#endif
#ifndef MAX_N
#define MAX_N 128
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif

constexpr int WARP_ROWS = 32, THREADS = 32 * WARPS, WEIGHT_ROWS = WARP_ROWS * WARPS;
constexpr int GROUPS = MAX_N / 8;  // of 8 rows, at most
using Loops = RowGroups<GROUPS>;
constexpr int WEIGHT_BYTES = WEIGHT_ROWS * 64, SCALE_BYTES = WEIGHT_ROWS * 8;
constexpr int STAGE_BYTES = WEIGHT_BYTES + SCALE_BYTES + MAX_N * 256;
// rows that the threads copy at a time
constexpr int PASS = THREADS / 4, ROW_PASS = THREADS / 16, ROW_PASSES = (MAX_N + ROW_PASS - 1) / ROW_PASS;
constexpr int SLOTS = 16, NEVER = 1 << 30;

static_assert(MAX_N % 16 == 0 && GROUPS <= 20, "whole groups of 8 rows, whose sums fit registers");
static_assert(PASS % WARP_ROWS == 0, "a pass of copies has the rows of whole warps");
static_assert(STAGES >= 2 && STAGES < SLOTS - 1, "an item stays in its slot until its products are made");

// This thread's copies: 16 bytes of some rows of weights, and of x; the scales of row `thread`.
struct Loader : Claims<SLOTS> {
    const Mlp& given;
    int* of_row;  // from the first row of x to those that this thread copies, 64 bytes each, THREADS apart
    u32 shared;

    u64 weights, x, scales;     // addresses, of the next stage
    u32 next_rows;              // bytes to the weights of the next warp
    int valid, rows;            // rows of weights, and of x, to copy, from this thread's on
    bool scaled;                // this thread copies scales
    int group = 0, groups = 0;  // the first of the next stage, and all of the item; NEVER: there is no item

    __device__ __forceinline__ Loader(const Work& work, const Mlp& given, Item* items, int* of_row,
                                      u32 shared)
        : Claims(work, items), given(given), of_row(of_row), shared(shared) {}

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
            if (ROW_PASS * i < rows) of_row[THREADS * i] = (is_down ? at : given.row_tokens[at]) * groups;
        }
        work.wait_for_activations(next);
    }

    // A stage's copies, to `stage`.
    __device__ __forceinline__ void fill(u32 stage) {
        int units[ROW_PASSES];  // loaded first: loads do not pass the copies
#pragma unroll
        for (int i = 0; i < ROW_PASSES; ++i) units[i] = of_row[THREADS * i];
        const int unit = threadIdx.x % 4, unit_of_x = threadIdx.x % 16;
#pragma unroll
        for (int i = 0; i < WEIGHT_ROWS / PASS; ++i) {
            const u64 from = weights + static_cast<u64>(PASS * i / WARP_ROWS) * next_rows;
            // past the last channel: products of what is there, not stored
            if (PASS * i < valid)
                copy_16_or_zeros(stage + (threadIdx.x + i * THREADS) * 16,
                                 reinterpret_cast<const void*>(from), group + unit < groups);
        }
        if (scaled) copy_unaligned_4(stage + WEIGHT_BYTES + threadIdx.x * 8, scales, min(groups - group, 4));
        const u32 to = stage + WEIGHT_BYTES + SCALE_BYTES + place_of_row(threadIdx.x / 16, unit_of_x);
#pragma unroll
        for (int i = 0; i < ROW_PASSES; ++i)
            if (ROW_PASS * i < rows)
                copy_16_or_zeros(to + i * ROW_PASS * 256,
                                 reinterpret_cast<const void*>(row_at(x, units[i], 64)),
                                 group + unit_of_x / 4 < groups);
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
            fill(shared + s * STAGE_BYTES);
            publish();
            __syncthreads();
        }
        copies_wait<STAGES - 2>();
        __syncthreads();
    }
};

// A stage has the four bytes of a row's groups from byte `row address % 4` of eight on, since rows in memory
// begin anywhere. Groups past the last are not copied.
//
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

// A word of each of a lane's rows, decoded: pairs of the first product, and of the second.
using Fragments = u32[2][PRODUCTS][4];

template <bool LARGE>
__device__ __forceinline__ void decode_to(Fragments& a, u32 word, int m, int h, const Factor& by) {
    u32 pairs[4];
    place_neighbours(pairs, word);
    scale_pairs<LARGE>(pairs, by);
#pragma unroll
    for (int j = 0; j < 4; ++j) a[j / 2][m][j % 2 * 2 + h] = pairs[j];
}

// sums += 128 channels. weights: of this lane's row of product 0; rows: of this lane's row of x. A warp
// decodes 32 channels, then multiplies. copy: in the middle.
template <int G, typename Copy>
__device__ __forceinline__ void multiply_stage(Sums<G>& sums, u32 weights, u32 rows,
                                               const Factor (&factors)[PRODUCTS][2], const Copy& copy) {
    // groups: so many products lie between two that add to the same sums
    constexpr int PARTS = (G + 3) / 4, TOGETHER = (G + PARTS - 1) / PARTS;
#pragma unroll 1  // more at once would take long to compile
    for (int pair = 0; pair < 2; ++pair) {
        uint2 words[PRODUCTS][2];
#pragma unroll
        for (int m = 0; m < PRODUCTS; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) words[m][h] = load_8(weights + m * 1024 + h * 512 + pair * 8);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            Fragments a;
#pragma unroll
            for (int m = 0; m < PRODUCTS; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    decode_to<false>(a, i ? words[m][h].y : words[m][h].x, m, h, factors[m][h]);
            const u32 from = rows ^ (pair * 128 + i * 64);
#pragma unroll
            for (int j = 0; j < G; j += TOGETHER) {
                uint4 b[TOGETHER];
#pragma unroll
                for (int n = 0; n < TOGETHER; ++n)
                    if (j + n < G) b[n] = load_16(from + (j + n) * 2048);
#pragma unroll
                for (int step = 0; step < 2; ++step)
#pragma unroll
                    for (int n = 0; n < TOGETHER; ++n)
#pragma unroll
                        for (int m = 0; m < PRODUCTS; ++m)
                            if (j + n < G)
                                multiply_add(sums[m][j + n], a[step][m], step ? b[n].z : b[n].x,
                                             step ? b[n].w : b[n].y);
            }
        }
        if (pair == 0) copy();
    }
}

// The same where a scale of the warp is large; shorter code.
template <int G>
__device__ __forceinline__ void multiply_large(Sums<G>& sums, u32 weights, u32 rows,
                                               const u32 (&scales)[PRODUCTS][2]) {
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
        Fragments a;
#pragma unroll
        for (int m = 0; m < PRODUCTS; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint2 words = load_8(weights + m * 1024 + h * 512 + i / 2 * 8);
                decode_to<true>(a, i % 2 ? words.y : words.x, m, h, Factor::of<true>(scales[m][h]));
            }
#pragma unroll
        for (int j = 0; j < G; ++j) {
            const uint4 b = load_16((rows ^ i * 64) + j * 2048);
#pragma unroll
            for (int m = 0; m < PRODUCTS; ++m) multiply_add(sums[m][j], a[0][m], b.x, b.y);
#pragma unroll
            for (int m = 0; m < PRODUCTS; ++m) multiply_add(sums[m][j], a[1][m], b.z, b.w);
        }
    }
}

// Products of an item of G groups of 8 rows. here: its first stage. Each stage's copies are for one STAGES -
// 1 later, whose place is the one before.
template <int G>
__device__ __forceinline__ void multiply(Loader& loader, u32& here, Sums<G>& sums, const Item& item) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 first = loader.shared, end = first + STAGES * STAGE_BYTES;
    const u32 of_weights = warp * (WARP_ROWS * 64) + lane * 16;
    const u32 of_rows = WEIGHT_BYTES + SCALE_BYTES + place_of_row(lane / 4, 4 * (lane % 4));
    const Scales of(loader.given, item);
    // half of the warps copy later: of two warps of a scheduler one multiplies while the other copies or
    // decodes
    const bool early = warp < WARPS / 2;
    const auto fill = [&](bool now) {
        if (now) loader.fill((here == first ? end : here) - STAGE_BYTES);
    };
    clear<G>(sums);
    const int steps = (of.groups + 3) / 4;
    int c = 0;
    while (c < steps) {
        if (loader.group >= loader.groups) {
            loader.prepare();
            __syncwarp();  // mma needs all lanes
        }
        // none of them begins another item
        const int last = min(steps, c + (loader.groups - loader.group + 3) / 4);
#pragma unroll 1
        do {
            fill(early);
            u32 scales[PRODUCTS][2], any = 0;
            Factor factors[PRODUCTS][2];
            of.load(scales, dynamic_memory() + (here - first), c);
#pragma unroll
            for (int m = 0; m < PRODUCTS; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    any |= scales[m][h];
                    factors[m][h] = Factor::of<false>(scales[m][h]);
                }
            if (!__any_sync(~0u, is_large(any))) {
                multiply_stage<G>(sums, here + of_weights, here + of_rows, factors,
                                  [&] { fill(STAGES == 2 && !early); });
            } else {
                fill(STAGES == 2 && !early);
                multiply_large<G>(sums, here + of_weights, here + of_rows, scales);
            }
            fill(STAGES > 2 && !early);
            loader.publish();
            copies_wait<STAGES - 2>();
            __syncthreads();  // the next stage has landed, and no warp reads this one any more
            here = here + STAGE_BYTES == end ? first : here + STAGE_BYTES;
        } while (++c < last);
    }
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

// With the fewest groups that hold the rows of the item.
template <int G>
__device__ __forceinline__ void run(Loader& loader, u32& here, const Item& item) {
    if constexpr (G < GROUPS) {
        if (item.of.rows > 8 * G) {
            run<Loops::after(G)>(loader, here, item);
            return;
        }
    }
    Sums<G> sums;
    multiply<G>(loader, here, sums, item);
    write<G>(sums, item, loader.given);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    mxfp4_many(const unsigned char* gate_up_blocks, const unsigned char* gate_up_scales,
               const u16* gate_up_biases, const float* gate_up_biases32, const unsigned char* down_blocks,
               const unsigned char* down_scales, const u16* down_biases, const float* down_biases32,
               const u16* hidden, const int* row_tokens, Tile* tiles, int* num_tiles, u16* act, u16* out,
               int H, int I, int row_step, int up_rows) {
    int* of_rows = reinterpret_cast<int*>(dynamic_memory() + STAGES * STAGE_BYTES);
    Item* items = reinterpret_cast<Item*>(of_rows + ROW_PASSES * THREADS);
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
    Loader loader(work, given, items, of_rows + threadIdx.x, shared_address(dynamic_memory()));
    u32 here;  // offset of the stage of an item's first step
    each_item<SLOTS>(
        loader, items,
        [&](int) {
            here = loader.shared;
            loader.start();
        },
        [&](int, const Item& item, int done) {
            if (done >= 0) {
                __syncthreads();  // all activations of the previous item are written
                loader.made(done);
            }
            run<Loops::FEWEST>(loader, here, item);
        });
}
