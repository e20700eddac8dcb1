// SPDX-License-Identifier: Apache-2.0
// As int4_24_mlp.cu, in bf16, for few rows of an expert: A holds integers, whose sums are scaled.
//
// | argument   | shape             | dtype |                                                        |
// |------------|-------------------|-------|--------------------------------------------------------|
// | w13        | [E, H/64, 2I, 2]  | int64 | words                                                  |
// | w2         | [E, I/64, H, 2]   | int64 | words                                                  |
// | hidden     | [T, H]            | bf16  | row-major, 16 bytes                                    |
// | row_tokens | [P]               | int32 |                                                        |
// | tiles      | [bound]           | Tile  | of routing_sort, tile_rows = MAX_N; their done: 0      |
// | num_tiles  | [2]               | int32 | tiles in use; 0, counts the items that blocks took     |
// | act        | [P, I]            | bf16  | scratch, row-major                                     |
// | out        | [P, H]            | bf16  | row-major, 16 bytes; only rows of tiles written        |
//
// A lane decodes whole words (int4_24_quad.cuh), so that a product mixes four groups. B keeps them apart: a
// row of the tile has a column for each group, with zeros in the k of the others. The places of zeros never
// change, so a block writes them once. Rows 2j and 2j + 1 are columns 8j + 2g and 8j + 2g + 1 for group g: a
// lane's sums are those of its own words.
//
// In shared memory a stage holds SLABS slabs of words, then as many of B: slabs 2s and 2s + 1 hold steps 0, 1
// and 2, 3 of the same 128 channels, [4 * MAX_N] columns of 128 bytes.
//
// Threads: 128 * (1 + GROUPS): a producer warpgroup, consumer warpgroups of M_TILES * 64 weight rows each.
// Blocks: BLOCKS a multiprocessor.
#ifndef MAX_N
#define MAX_N 8
#endif
#ifndef M_TILES
#define M_TILES 1
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
#ifndef WARPS
#define WARPS 16  // consumers
#endif
#define GROUPS (WARPS / 4)  // consumer warpgroups
#define PRODUCERS 4
#define COLUMNS_OF_ROW 4
#define WEIGHT_ROWS (64 * M_TILES * GROUPS)
constexpr int PARTS = M_TILES;  // of a warpgroup's weight rows, 64 each
constexpr int CONSUMERS = WARPS;
#include "sm80/mma.cuh"
#include "sm90/int4_24_load.cuh"
#include "sm90/int4_24_quad.cuh"

static_assert(SLABS % 2 == 0 && MAX_N % 2 == 0 && MAX_N <= 8, "whole pairs of slabs; 32 columns");
constexpr int CONSUMER_REGISTERS = BLOCKS == 2 ? 96 : GROUPS == 4 ? 104 : GROUPS == 3 ? 152 : 224;
constexpr int PRODUCER_REGISTERS = BLOCKS == 2 ? 40 : GROUPS == 4 ? 64 : 56;

// Where a lane puts chunk lane % 8 of group lane / 8 of a row of the tile, in a pair of slabs of B.
__device__ __forceinline__ u32 place_in_pair(int row) {
    const int lane = threadIdx.x % 32, group = lane / 8, chunk = lane % 8;
    const int column = row / 2 * 8 + group * 2 + row % 2, k = group + chunk / 2 % 2 * 4;
    return chunk / 4 * ROW_SLAB + column * 128 + ((chunk % 2 * 4 + k / 2) ^ column % 8) * 16 + k % 2 * 8;
}

// Rows of a tile, a pair of slabs of one at a time. parts: of a tile's activations.
__device__ __forceinline__ void load_columns(const Shared& shared, const u16* hidden, const u16* act,
                                             const int* row_tokens, const Work& work, int parts) {
    constexpr int MOST = (MAX_N + GATHER_WARPS - 1) / GATHER_WARPS;  // of a warp
    const int warp = threadIdx.x / 32 - 1, lane = threadIdx.x % 32;
    u32 places[MOST];
#pragma unroll
    for (int j = 0; j < MOST; ++j) places[j] = place_in_pair(min(warp + j * GATHER_WARPS, MAX_N - 1));
    Turn<STAGES> turn;
    Turn<SLOTS> slot;
    for (Item item = shared.items().hear(slot); item.kind != NONE; item = shared.items().hear(slot)) {
        const int depth = work.depth(item);
        const int count = (item.rows - warp + GATHER_WARPS - 1) / GATHER_WARPS;
        u32 sources[MOST];  // in units of 64 channels
#pragma unroll
        for (int j = 0; j < MOST; ++j) {
            const int row = item.first + min(warp + j * GATHER_WARPS, item.rows - 1);
            sources[j] = 0;
            // max is a guard: the sort writes no token below 0
            if (j < count) sources[j] = item.kind == DOWN ? row : max(row_tokens[row], 0);
            sources[j] *= static_cast<u32>(depth / 64);
        }
        if (item.kind == DOWN) wait_for_tile(work.tiles + item.tile, parts);
        const uint2* from = reinterpret_cast<const uint2*>(item.kind == DOWN ? act : hidden) + lane;
        for (int slabs = depth / 64; slabs > 0; slabs -= SLABS) {
            barrier_wait(shared.empty(turn.at), turn.parity ^ 1);
            u32 to = shared.rows + turn.at * STAGE_ROWS;
#pragma unroll
            for (int s = 0; s < SLABS; s += 2, from += 32, to += 2 * ROW_SLAB) {
                if (s > 0 && s >= slabs) break;
                if (s + 1 == slabs && lane >= 16) break;  // a slab alone
#pragma unroll
                for (int j = 0; j < MOST; ++j)
                    if (j < count) copy_8(to + places[j], from + static_cast<u64>(sources[j]) * 16);
            }
            copies_arrive(shared.full(turn.at));
            turn.next();
        }
    }
}

// Where a lane's words lie in a pair of slabs: bytes. Low rows are gate rows, or the first half of an item's
// rows; high ones the up rows, or the other half.
struct Place {
    u32 low;
    bool turns;  // gate and up rows take turns

    __device__ __forceinline__ explicit Place(bool is_down) : turns(INTERLEAVED && !is_down) {
        const int warp = threadIdx.x / 32 - PRODUCERS, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const int row = warp / 4 * PARTS * 32 + warp % 4 * 8 + g;
        low = row * (turns ? 32 : 16) + t / 2 * WEIGHT_SLAB + t % 2 * 8;
    }
    __device__ __forceinline__ u32 high() const { return INTERLEAVED && turns ? 16 : WEIGHT_ROWS * 8; }
    __device__ __forceinline__ u32 part() const { return INTERLEAVED && turns ? 32 * 32 : 32 * 16; }
};

// Products of an item of up to N / 4 rows.
template <int N>
struct Products {
    static constexpr int COUNT = N / 2, STEPS = SLABS / 2 * PARTS;  // of a stage: 128 channels of a part

    float sums[PARTS][COUNT], products[COUNT];
    QuadDecoder::Fragment fragments[2];

    __device__ __forceinline__ void scale(int step, bool has) {
        const auto& of = fragments[step % 2];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            float& to = sums[step % PARTS][i];
            sum_here(products[i]);
            if (has) to = fmaf(products[i], i % 4 < 2 ? of.low : of.high, to);
        }
    }

    __device__ __forceinline__ void multiply(int step, u64 rows) {
        const auto& of = fragments[step % 2];
        const u64 here = further(rows, step / PARTS * (2 * ROW_SLAB / 16));
        products_begin();
        sparse_product<N, 0>(products, of.a[0], of.metadata[0], here, false);
        sparse_product<N, 0>(products, of.a[1], of.metadata[1], further(here, 2 * OPERAND_STEP), true);
        sparse_product<N, 1>(products, of.a[2], of.metadata[0], further(here, ROW_SLAB / 16), true);
        sparse_product<N, 1>(products, of.a[3], of.metadata[1],
                             further(here, ROW_SLAB / 16 + 2 * OPERAND_STEP), true);
        products_commit();
    }

    // A stage, or unless WHOLE a pair of slabs; has: whether this lane's slab of the pair is there. The
    // products of a step run while the next words are decoded.
    template <bool WHOLE>
    __device__ __forceinline__ void stage(const unsigned char* words, u64 rows, const Place& place,
                                          const QuadDecoder& decoder, bool has) {
        constexpr int COUNT_OF_STEPS = WHOLE ? STEPS : PARTS;
        uint2 low, high;
        const auto load = [&](int step) {
            const unsigned char* at = words + step / PARTS * (2 * WEIGHT_SLAB) + step % PARTS * place.part();
            low = *reinterpret_cast<const uint2*>(at);
            high = *reinterpret_cast<const uint2*>(at + place.high());
        };
        load(0);
#pragma unroll
        for (int step = 0; step < COUNT_OF_STEPS; ++step) {
            fragments[step % 2] = decoder.decode(low, high);
            if (step + 1 < COUNT_OF_STEPS) load(step + 1);
            if (step > 0) {
                products_wait<0>();
                scale(step - 1, WHOLE || has);
            }
            multiply(step, rows);
        }
        products_wait<0>();  // ptxas makes products in turns if one runs across the loop's end
        scale(COUNT_OF_STEPS - 1, WHOLE || has);
    }

    __device__ __forceinline__ void make(const Shared& shared, Turn<STAGES>& turn, int slabs,
                                         const Place& place, const QuadDecoder& decoder) {
        const u32 base = shared_address(dynamic_memory());
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int i = 0; i < COUNT; ++i) sums[part][i] = 0.0f;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) products[i] = 0.0f;
        for (; slabs > 0; slabs -= SLABS) {
            barrier_wait(shared.full(turn.at), turn.parity);
            fence_async_proxy();  // rows were written through the generic proxy
            const unsigned char* words =
                dynamic_memory() + (shared.words() + turn.at * WORD_BYTES - base) + place.low;
            u64 rows = operand(shared.rows + turn.at * STAGE_ROWS);
            if (slabs >= SLABS) {
                stage<true>(words, rows, place, decoder, true);
            } else {
#pragma unroll 1
                for (int s = slabs; s > 0; s -= 2) {
                    stage<false>(words, rows, place, decoder, s > 1 || threadIdx.x % 4 < 2);
                    words += 2 * WEIGHT_SLAB;
                    rows = advance(rows, 2 * ROW_SLAB / 16);
                }
            }
            release_read(shared.empty(turn.at));
            turn.next();
        }
    }
};

// Lane t of a quad writes rows 2t and 2t + 1 of the tile.
template <bool IS_DOWN, int N>
__device__ __forceinline__ void write(const float (&sums)[PARTS][N / 2], int block, Tile* tile, u16* to,
                                      int width) {
    const int thread = later(threadIdx.x), warp = thread / 32 - PRODUCERS, lane = thread % 32;
    const int first = tile->first, rows = tile->rows;
    width = later(width);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const int channel = block * (IS_DOWN ? WEIGHT_ROWS : WEIGHT_ROWS / 2) +
                            (warp / 4 * PARTS + part) * 32 + warp % 4 * 8 + lane / 4;
        float own[4] = {};
#pragma unroll
        for (int j = 0; j < N / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float sum = sums[part][4 * j + i] * INTEGERS;
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                if (lane % 4 == j) own[i] = sum;
            }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = lane % 4 * 2 + i;
            if (row >= rows) continue;
            u16* at = to + static_cast<u64>(first + row) * width + channel;
            if (IS_DOWN) {
                const u32 both = pack(own[i], own[2 + i]);
                if (channel < width) *at = static_cast<u16>(both);
                if (channel + WEIGHT_ROWS / 2 < width) at[WEIGHT_ROWS / 2] = static_cast<u16>(both >> 16);
            } else if (channel < width) {
                *at = static_cast<u16>(pack(silu_mul(own[i], own[2 + i]), 0.0f));
            }
        }
    }
    __syncwarp();
    if (!IS_DOWN && lane == 0) add_release(&tile->done, 1);
}

template <int N>
__device__ __forceinline__ void run(const Shared& shared, Turn<STAGES>& turn, const Item& item,
                                    const QuadDecoder& decoder, Tile* tiles, u16* act, u16* out, int H,
                                    int I) {
    if constexpr (N < 4 * MAX_N) {
        if (item.rows > N / 4) {
            run<N + 8>(shared, turn, item, decoder, tiles, act, out, H, I);
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
    int4_24_quads_mlp(const uint4* w13, const uint4* w2, const u16* hidden, const int* row_tokens,
                      Tile* tiles, int* num_tiles, u16* act, u16* out, int H, int I) {
    const Shared shared(dynamic_memory());
    if (threadIdx.x == 0) shared.init();
    for (int i = threadIdx.x * 16; i < STAGES * STAGE_ROWS; i += 16 * 128 * (1 + GROUPS))
        store_16(shared.rows + i, make_uint4(0, 0, 0, 0));
    __syncthreads();
    wait_for_predecessor();
    let_successor_start();

    const Work work = work_of(tiles, num_tiles, H, I);
    if (threadIdx.x < 128) {
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x < 32)
            load_words(shared, Weights{w13, w2}, work, num_tiles + 1);
        else
            load_columns(shared, hidden, act, row_tokens, work, CONSUMERS * work.gate_up_blocks);
    } else {
        take_registers<CONSUMER_REGISTERS>();
        const QuadDecoder decoder(H & 63);
        Turn<STAGES> turn;
        Turn<SLOTS> slot;
        for (Item item = shared.items().hear(slot); item.kind != NONE; item = shared.items().hear(slot))
            run<8>(shared, turn, item, decoder, tiles, act, out, H, I);
    }
}
