// SPDX-License-Identifier: Apache-2.0
// Sorted rows through int4_24 experts on sm_90a, both products in one launch, by sparse warpgroup products:
// act[row] = silu(x Wg_e^T) * (x Wu_e^T), x = hidden[row_tokens[row]]; out[row] = act[row] Wd_e^T.
//
// | argument   | shape             | dtype |                                                        |
// |------------|-------------------|-------|--------------------------------------------------------|
// | w13        | [E, H/64, 2I, 2]  | int64 | words                                                  |
// | w2         | [E, I/64, H, 2]   | int64 | words                                                  |
// | hidden     | [T, H]            | bf16  | of int4_24_order with K_ORDER; row-major, 16 bytes     |
// | row_tokens | [P]               | int32 |                                                        |
// | tiles      | [bound]           | Tile  | of routing_sort, tile_rows = MAX_N; their done: 0      |
// | num_tiles  | [2]               | int32 | tiles in use; 0, counts the items that blocks took     |
// | act        | [P, I]            | bf16  | scratch, in the order of hidden                        |
// | out        | [P, H]            | bf16  | row-major, 16 bytes; only rows of tiles written        |
//
// Blocks and items: as in mxfp4_mlp.
//
// Weights are A, decoded into registers; rows are B, in shared memory. A product of 32 channels is a sum of
// integers; it is scaled while the next product runs.
//
// Threads: 128 * (1 + GROUPS): a producer warpgroup, consumer warpgroups of M_TILES * 64 weight rows each.
// Blocks: one a multiprocessor, or BLOCKS.
#ifndef MAX_N
#define MAX_N 128
#endif
#ifndef M_TILES
#define M_TILES 2
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
#ifndef WARPS
#define WARPS 8  // consumers
#endif
#ifndef COLUMNS
#define COLUMNS 64  // of a product, at most
#endif
#define GROUPS (WARPS / 4)  // consumer warpgroups
#define PRODUCERS 4
#define SWIZZLE(row) (row % 8)  // as products read rows of 128 bytes
#define SLAB_GAP 0
#define WEIGHT_ROWS (64 * M_TILES * GROUPS)
constexpr int PARTS = M_TILES;  // of a warpgroup's weight rows, 64 each
constexpr int CONSUMERS = WARPS;
#include "sm80/mma.cuh"
#include "sm90/int4_24_chunks.cuh"
#include "sm90/int4_24_load.cuh"

constexpr int PRODUCER_REGISTERS = GROUPS == 4 ? 64 : BLOCKS == 2 ? 40 : 56;
constexpr int CONSUMER_REGISTERS = GROUPS == 4 ? 104 : GROUPS == 3 ? 152 : BLOCKS == 2 ? 96 : 224;

// Products that N columns take: whole groups of 8 each.
__device__ __forceinline__ constexpr int units_of(int N) {
    int units = 1;
    while (N / units > COLUMNS || N % (8 * units)) ++units;
    return units;
}

// Where a lane's words lie in a slab: bytes. Low rows are gate rows, or the first half of an item's rows;
// high ones the up rows, or the other half. Of gate_up, eight low rows of a warp are the channels of 16 bytes
// of act: 8 p + 4 h + 2 i + j for k 16 h + 4 p + 2 i + j.
struct Place {
    u32 low;
    bool turns;  // gate and up rows take turns

    __device__ __forceinline__ explicit Place(bool is_down) : turns(INTERLEAVED && !is_down) {
        const int first = (threadIdx.x / 128 - 1) * PARTS, warp = threadIdx.x % 128 / 32,
                  g = threadIdx.x % 32 / 4;
        const int channel = is_down ? warp * 8 + g : warp % 2 * 16 + g / 4 * 8 + warp / 2 * 4 + g % 4;
        low = (first * 32 + channel) * (turns ? 32 : 16);
    }
    __device__ __forceinline__ u32 high() const { return INTERLEAVED && turns ? 16 : WEIGHT_ROWS * 8; }
    __device__ __forceinline__ u32 part() const { return INTERLEAVED && turns ? 32 * 32 : 32 * 16; }
};

// Products of an item, of N rows; UNITS products make the sums of 32 channels of a part.
template <int N>
struct Products {
    static constexpr int UNITS = units_of(N), WIDTH = N / UNITS, COUNT = WIDTH / 2;
    static constexpr int STEPS = SLABS * PARTS;  // of a stage: 64 channels of a part

    float sums[PARTS][N / 2], products[2][COUNT];
    ChunkDecoder::Fragment fragments[2][2];

    __device__ __forceinline__ void scale(const ChunkDecoder::Fragment& of, float* from, float* to) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            sum_here(from[i]);
            to[i] = fmaf(from[i], i % 4 < 2 ? of.low : of.high, to[i]);
        }
    }

    template <int SELECTOR = 0>
    __device__ __forceinline__ void multiply(const ChunkDecoder::Fragment& of, float* to, u64 rows) {
        sparse_product<WIDTH, SELECTOR>(to, of.a, of.metadata, rows, false);
    }

    // A stage with one unit. The two products of a step run while the next words are decoded.
    __device__ __forceinline__ void step_by_step(const unsigned char* words, u64 rows, const Place& place,
                                                 const ChunkDecoder& decoder) {
        uint4 low, high;
        const auto load = [&](int step) {
            const unsigned char* at = words + step / PARTS * WEIGHT_SLAB + step % PARTS * place.part();
            low = *reinterpret_cast<const uint4*>(at);
            high = *reinterpret_cast<const uint4*>(at + place.high());
        };
        const auto scale_both = [&](int step) {
            products_wait<0>();
#pragma unroll
            for (int half = 0; half < 2; ++half)
                scale(fragments[step % 2][half], products[half], sums[step % PARTS]);
        };
        load(0);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            auto& of = fragments[step % 2];
            decoder.decode(of, low, high);
            if (step + 1 < STEPS) load(step + 1);
            if (step > 0) scale_both(step - 1);
            const u64 here = further(rows, step / PARTS * (ROW_SLAB / 16));
            products_begin();
            multiply(of[0], products[0], here);
            multiply<1>(of[1], products[1], further(here, 2 * OPERAND_STEP));
            products_commit();
        }
        scale_both(STEPS - 1);  // ptxas makes products in turns if one runs across the loop's end
    }

    // A slab with several units. A product runs while the one before is scaled.
    __device__ __forceinline__ void unit_by_unit(const unsigned char* words, u64 rows, const Place& place,
                                                 const ChunkDecoder& decoder) {
        constexpr int COUNT_OF_UNITS = 2 * PARTS * UNITS;
        const auto scale_unit = [&](int unit) {
            const int part = unit / UNITS % PARTS, fragment = unit / UNITS % 2;
            scale(fragments[0][fragment], products[unit % 2], sums[part] + unit % UNITS * COUNT);
        };
#pragma unroll
        for (int unit = 0; unit < COUNT_OF_UNITS; ++unit) {
            const int part = unit / UNITS % PARTS, half = unit / UNITS / PARTS;
            auto& of = fragments[0][unit / UNITS % 2];
            if (unit % UNITS == 0) {
                const unsigned char* at = words + part * place.part() + half * 8;
                const uint2 low = *reinterpret_cast<const uint2*>(at);
                const uint2 high = *reinterpret_cast<const uint2*>(at + place.high());
                decoder.decode(of, low.x, low.y, high.x, high.y);
            }
            products_begin();
            multiply(of, products[unit % 2],
                     advance(rows, half * 2 * OPERAND_STEP + unit % UNITS * WIDTH * 8));
            products_commit();
            if (unit > 0) {
                products_wait<1>();
                scale_unit(unit - 1);
            }
        }
        products_wait<0>();  // as above
        scale_unit(COUNT_OF_UNITS - 1);
    }

    __device__ __forceinline__ void make(const Shared& shared, Turn<STAGES>& turn, int slabs,
                                         const Place& place, const ChunkDecoder& decoder) {
        const u32 base = shared_address(dynamic_memory());
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int i = 0; i < N / 2; ++i) sums[part][i] = 0.0f;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) products[0][i] = products[1][i] = 0.0f;
        for (; slabs > 0; slabs -= SLABS) {
            barrier_wait(shared.full(turn.at), turn.parity);
            fence_async_proxy();  // rows were written through the generic proxy
            const unsigned char* words =
                dynamic_memory() + (shared.words() + turn.at * WORD_BYTES - base) + place.low;
            u64 rows = operand(shared.rows + turn.at * STAGE_ROWS);
            if (MAX_N <= COLUMNS && slabs >= SLABS) {
                step_by_step(words, rows, place, decoder);
            } else {
#pragma unroll 1
                for (int s = min(SLABS, slabs); s > 0; --s) {
                    unit_by_unit(words, rows, place, decoder);
                    words += WEIGHT_SLAB;
                    rows = advance(rows, ROW_SLAB / 16);
                }
            }
            release_read(shared.empty(turn.at));
            turn.next();
        }
    }
};

// Eight channels of eight rows at a time, transposed: a lane gets two channels of row lane / 4.
template <bool IS_DOWN, int N>
__device__ __forceinline__ void write(const float (&sums)[PARTS][N / 2], int block, Tile* tile, u16* to,
                                      int width) {
    const int thread = later(threadIdx.x), group = thread / 128 - 1, warp = thread % 128 / 32,
              lane = thread % 32;
    const int first = tile->first + lane / 4, left = tile->rows - lane / 4;
    width = later(width);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const int channel =
            block * (IS_DOWN ? WEIGHT_ROWS : WEIGHT_ROWS / 2) + (group * PARTS + part) * 32 + warp * 8;
        const bool low_here = channel < width, high_here = IS_DOWN && channel + WEIGHT_ROWS / 2 < width;
        u16* at = to + static_cast<u64>(first) * width + channel + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < N / 8; ++j, at += 8 * static_cast<u64>(width)) {
            float d[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) d[i] = sums[part][4 * j + i] * INTEGERS;
            const bool valid = 8 * j < left;
            if (IS_DOWN) {
                const u32 low = transposed(pack(d[0], d[1])), high = transposed(pack(d[2], d[3]));
                if (valid && low_here) *reinterpret_cast<u32*>(at) = low;
                if (valid && high_here) *reinterpret_cast<u32*>(at + WEIGHT_ROWS / 2) = high;
            } else {
                const u32 both = transposed(pack(silu_mul(d[0], d[2]), silu_mul(d[1], d[3])));
                if (valid && low_here) *reinterpret_cast<u32*>(at) = both;
            }
        }
    }
    __syncwarp();
    if (!IS_DOWN && lane == 0) add_release(&tile->done, 1);
}

// Numbers of rows that are compiled.
constexpr int LEAST = MAX_N > 48 ? 16 : 8;
__device__ __forceinline__ constexpr int after(int rows) { return rows + (rows < 32 ? 8 : 16); }

template <int N>
__device__ __forceinline__ void run(const Shared& shared, Turn<STAGES>& turn, const Item& item,
                                    const ChunkDecoder& decoder, Tile* tiles, u16* act, u16* out, int H,
                                    int I) {
    if constexpr (N < MAX_N) {
        if (item.rows > N) {
            run<after(N)>(shared, turn, item, decoder, tiles, act, out, H, I);
            return;
        }
    }
    const bool is_down = item.kind == DOWN;
    Products<N> of;
    of.make(shared, turn, (is_down ? I : H) / 64, Place(is_down), decoder);
    if (is_down)
        write<true, N>(of.sums, item.block, tiles + item.tile, out, H);
    else
        write<false, N>(of.sums, item.block, tiles + item.tile, act, I);
}

extern "C" __global__ void __launch_bounds__(128 * (1 + GROUPS), BLOCKS)
    int4_24_wide_mlp(const uint4* w13, const uint4* w2, const u16* hidden, const int* row_tokens, Tile* tiles,
                     int* num_tiles, u16* act, u16* out, int H, int I) {
    const Shared shared(dynamic_memory());
    if (threadIdx.x == 0) shared.init();
    __syncthreads();
    wait_for_predecessor();
    let_successor_start();

    const Work work = work_of(tiles, num_tiles, H, I);
    if (threadIdx.x < 128) {
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x < 32)
            load_words(shared, Weights{w13, w2}, work, num_tiles + 1);
        else
            load_rows(shared, hidden, act, row_tokens, work, CONSUMERS * work.gate_up_blocks);
    } else {
        take_registers<CONSUMER_REGISTERS>();
        const ChunkDecoder decoder(H & 63);
        Turn<STAGES> turn;
        Turn<SLOTS> slot;
        for (Item item = shared.items().hear(slot); item.kind != NONE; item = shared.items().hear(slot))
            run<LEAST>(shared, turn, item, decoder, tiles, act, out, H, I);
    }
}
