// SPDX-License-Identifier: Apache-2.0
// Sorted rows through int4_24 experts on sm_90a, both products in one launch, by sparse warpgroup products of
// fp16: act[row] = silu(x Wg_e^T) * (x Wu_e^T), x = hidden[row_tokens[row]]; out[row] = act[row] Wd_e^T.
//
// | argument      | shape             | dtype |                                                           |
// |---------------|-------------------|-------|-----------------------------------------------------------|
// | w13           | [E, H/64, 2I, 2]  | int64 | words                                                     |
// | w2            | [E, I/64, H, 2]   | int64 | words                                                     |
// | hidden        | [T, padded(H)]    | fp16  | of int4_24_rows; 16 bytes                                 |
// | hidden_powers | [T]               | fp32  | of int4_24_rows                                           |
// | row_tokens    | [P]               | int32 |                                                           |
// | tiles         | [bound]           | Tile  | of routing_sort, tile_rows = MAX_N; their done: 0         |
// | num_tiles     | [2]               | int32 | tiles in use; 0, counts the items that blocks took        |
// | act           | [P, padded(I)]    |       | scratch: bf16, then as hidden                             |
// | act_powers    | [P]               | fp32  | scratch, as hidden_powers                                 |
// | out           | [P, H]            | bf16  | row-major, 16 bytes; only rows of tiles written           |
//
// Blocks and items: as in mxfp4_mlp.
//
// Weights are A, decoded into registers; rows are B, in shared memory. The block that makes the last
// activations of a tile takes its rows to fp16.
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
#define GROUPS (WARPS / 4)  // consumer warpgroups
#define PRODUCERS 4
#define WEIGHT_ROWS (64 * M_TILES * GROUPS)
constexpr int PARTS = M_TILES;  // of a warpgroup's weight rows, 64 each
constexpr int CONSUMERS = WARPS;
#include "sm80/mma.cuh"
#include "sm90/int4_24_load_rows.cuh"

static_assert(SLABS % 2 == 0 && MAX_N % 8 == 0, "whole pairs of slabs, whole columns");
static_assert(PARTS <= 2 && WEIGHT_ROWS / 2 % HALF_CHANNELS == 0, "whole halves of act");
constexpr int AT_ONCE =
    MAX_N > 16 ? 2 : 4;  // steps decoded and multiplied together: fewer take fewer registers

constexpr int PRODUCER_REGISTERS = GROUPS == 4 ? 64 : BLOCKS == 2 ? 40 : 56;
constexpr int CONSUMER_REGISTERS = GROUPS == 4 ? 104 : GROUPS == 3 ? 152 : BLOCKS == 2 ? 96 : 224;
constexpr u32 CONSUMERS_MEET = 1;  // a named barrier

// A warp and part make eight channels of act, one unit: of which half of BLOCK_CHANNELS, counted in an item,
// and which of its eight units.
__device__ __forceinline__ int half_of(int warp, int part) { return (warp / 4 * PARTS + part) / 2; }
__device__ __forceinline__ int unit_of(int warp, int part) {
    return (warp / 4 * PARTS + part) % 2 * 4 + warp % 4;
}

// Where a lane's words lie in a pair of slabs: bytes. Low rows are gate rows, or the first half of an item's
// rows; high ones the up rows, or the other half. Eight gate rows of a warp are a unit of act.
struct Place {
    u32 low, part;
    bool turns;  // gate and up rows take turns

    __device__ __forceinline__ explicit Place(bool is_down) : turns(INTERLEAVED && !is_down) {
        const int warp = threadIdx.x / 32 - PRODUCERS, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const int channel =
            half_of(warp, 0) * HALF_CHANNELS + first_of(unit_of(warp, 0)) + g / 4 * 32 + g % 4;
        const int row = is_down ? warp / 4 * PARTS * 32 + warp % 4 * 8 + g : channel;
        low = row * (turns ? 32 : 16) + t / 2 * WEIGHT_SLAB + t % 2 * 8;
        part = (is_down ? 32 : 16) * (turns ? 32 : 16);
    }
    __device__ __forceinline__ u32 high() const { return INTERLEAVED && turns ? 16 : WEIGHT_ROWS * 8; }
};

// Products of an item, of N rows.
template <int N>
struct Products {
    static constexpr int STEPS = SLABS / 2 * PARTS;  // of a stage: 128 channels of a part

    float sums[PARTS][N / 2];
    ScaledDecoder::Fragment<AT_ONCE> fragments[2];

    // Of the fragment of steps first, first + 2, and where there are four of first + 1 and first + 3.
    __device__ __forceinline__ void multiply(const ScaledDecoder::Fragment<AT_ONCE>& of, float* to, int first,
                                             const u32 (&metadata)[2], u64 rows) {
        products_begin();
#pragma unroll
        for (int i = 0; i < AT_ONCE / 2; ++i)
            sparse_product_fp16<N, 0>(to, of.a[i], metadata[first + i],
                                      further(rows, (first + i) * 2 * OPERAND_STEP), true);
#pragma unroll
        for (int i = 0; i < AT_ONCE / 2; ++i)
            sparse_product_fp16<N, 1>(to, of.a[AT_ONCE / 2 + i], metadata[first + i],
                                      further(rows, ROW_SLAB / 16 + (first + i) * 2 * OPERAND_STEP), true);
        products_commit();
    }

    // A stage, or unless WHOLE a pair of slabs; has: whether this lane's slab of the pair is there. Products
    // run while the next words are decoded.
    template <bool WHOLE>
    __device__ __forceinline__ void stage(const unsigned char* words, u64 rows, const Place& place,
                                          const ScaledDecoder& decoder, bool has) {
        constexpr int TURNS = 4 / AT_ONCE, COUNT = (WHOLE ? STEPS : PARTS) * TURNS;
        uint2 low, high;
        const auto load = [&](int step) {
            const unsigned char* at = words + step / PARTS * (2 * WEIGHT_SLAB) + step % PARTS * place.part;
            low = *reinterpret_cast<const uint2*>(at);
            high = *reinterpret_cast<const uint2*>(at + place.high());
            if (!WHOLE && !has) low = high = make_uint2(0, 0);
        };
        load(0);
        ScaledDecoder::Both both;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int step = i / TURNS, first = i % TURNS;
            if (first == 0) {
                both = decoder.begin(low, high);
                if (i + TURNS < COUNT) load(step + 1);
            }
            decoder.decode(fragments[i % 2], both, first);
            multiply(fragments[i % 2], sums[step % PARTS], first, both.metadata,
                     further(rows, step / PARTS * (2 * ROW_SLAB / 16)));
            if (i + 1 < COUNT) products_wait<1>();  // the other fragment is free
        }
        products_wait<0>();  // ptxas makes products in turns if one runs across the loop's end
    }

    __device__ __forceinline__ void make(const Shared& shared, Turn<STAGES>& turn, int slabs,
                                         const Place& place, const ScaledDecoder& decoder) {
        const u32 base = shared_address(dynamic_memory());
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int i = 0; i < N / 2; ++i) sums[part][i] = 0.0f;
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
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int i = 0; i < N / 2; ++i) sum_here(sums[part][i]);
    }
};

// Eight channels of eight rows at a time, transposed: a lane gets two channels of row lane / 4.
template <bool IS_DOWN, int N>
__device__ __forceinline__ void write(const float (&sums)[PARTS][N / 2], u32 powers, int block,
                                      const Tile* tile, u16* to, int width) {
    const int thread = later(threadIdx.x), warp = thread / 32 - PRODUCERS, lane = thread % 32;
    const int first = tile->first + lane / 4, left = tile->rows - lane / 4;
    const int stride = IS_DOWN ? width : padded(width);
    width = later(width);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        int channel = block * WEIGHT_ROWS + (warp / 4 * PARTS + part) * 32 + warp % 4 * 8;
        bool low_here = channel < width, high_here = channel + WEIGHT_ROWS / 2 < width;
        if (!IS_DOWN) {  // where the unit lies
            const int half = block * (WEIGHT_ROWS / 2 / HALF_CHANNELS) + half_of(warp, part);
            channel = half / 2 * BLOCK_CHANNELS + (unit_of(warp, part) * 2 + half % 2) * UNIT_CHANNELS;
            low_here = half * HALF_CHANNELS < width;
        }
        u16* at = to + static_cast<u64>(first) * stride + channel + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < N / 8; ++j, at += 8 * static_cast<u64>(stride)) {
            const uint2 power = load_8(powers + (8 * j + lane % 4 * 2) * 4);
            float d[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                d[i] = sums[part][4 * j + i] * __uint_as_float(i % 2 ? power.y : power.x) * (1.0f / WEIGHTS);
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
}

// By all consumer warps, after each item of gate and up: the last of a tile's `parts` blocks takes its rows
// to fp16, and counts once more.
__device__ __forceinline__ void finish(const Shared& shared, Tile* tile, int parts, u16* act, float* powers,
                                       int width) {
    constexpr int UNITS_AT_ONCE = 8;
    named_sync(CONSUMERS_MEET, 32 * CONSUMERS);
    const int thread = later(threadIdx.x) - 32 * PRODUCERS, warp = thread / 32, lane = thread % 32;
    if (thread == 0) store_float(word_of(shared), __int_as_float(add_acquire_release(&tile->done, 1)));
    named_sync(CONSUMERS_MEET, 32 * CONSUMERS);
    if (static_cast<int>(load_word(word_of(shared))) != parts - 1) return;
    const int units = padded(width) / UNIT_CHANNELS, rows = tile->rows, first = tile->first;
    // of a last block of 64 channels, odd units have none
    const int units_of_row = width / BLOCK_CHANNELS * UNITS;
#pragma unroll 1
    for (int row = warp; row < rows; row += CONSUMERS) {
        uint4* at = reinterpret_cast<uint4*>(act) + static_cast<u64>(first + row) * units + lane;
        uint4 eight[UNITS_AT_ONCE];
        u32 most = 0;
        const auto load = [&](int from) {
#pragma unroll
            for (int i = 0; i < UNITS_AT_ONCE; ++i)
                if (from + 32 * i + lane < units)
                    eight[i] = from + 32 * i + lane < units_of_row || lane % 2 == 0
                                   ? load_there(at + from + 32 * i)
                                   : make_uint4(0, 0, 0, 0);
        };
#pragma unroll 1
        for (int from = 0; from < units; from += 32 * UNITS_AT_ONCE) {
            load(from);
#pragma unroll
            for (int i = 0; i < UNITS_AT_ONCE; ++i)
                if (from + 32 * i + lane < units) most = most_of(most, eight[i]);
        }
        const RowPower power(most_of_lanes(most));
        if (lane == 0) powers[first + row] = power.down;
#pragma unroll 1
        for (int from = 0; from < units; from += 32 * UNITS_AT_ONCE) {
            if (units > 32 * UNITS_AT_ONCE) load(from);
#pragma unroll
            for (int i = 0; i < UNITS_AT_ONCE; ++i)
                if (from + 32 * i + lane < units) at[from + 32 * i] = power.unit(eight[i]);
        }
    }
    named_sync(CONSUMERS_MEET, 32 * CONSUMERS);
    if (thread == 0) add_release(&tile->done, 1);
}

// Numbers of rows that are compiled.
__device__ __forceinline__ constexpr int after(int rows) { return rows + (rows < 32 ? 8 : 16); }

struct Outputs {
    u16* act;
    float* act_powers;
    u16* out;
};

template <int N>
__device__ __forceinline__ void run(const Shared& shared, Turn<STAGES>& turn, const Item& item, u32 powers,
                                    const ScaledDecoder& decoder, Tile* tiles, const Outputs& to, int H,
                                    int I) {
    if constexpr (N < MAX_N) {
        if (item.rows > N) {
            run<after(N)>(shared, turn, item, powers, decoder, tiles, to, H, I);
            return;
        }
    }
    const bool is_down = item.kind == DOWN;
    Products<N> of;
    of.make(shared, turn, (is_down ? I : H) / 64, Place(is_down), decoder);
    if (is_down)
        write<true, N>(of.sums, powers, item.block, tiles + item.tile, to.out, H);
    else
        write<false, N>(of.sums, powers, item.block, tiles + item.tile, to.act, I);
}

extern "C" __global__ void __launch_bounds__(128 * (1 + GROUPS), BLOCKS)
    int4_24_mlp(const uint4* w13, const uint4* w2, const u16* hidden, const float* hidden_powers,
                const int* row_tokens, Tile* tiles, int* num_tiles, u16* act, float* act_powers, u16* out,
                int H, int I) {
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
            load_rows(shared, Rows{hidden, hidden_powers}, Rows{act, act_powers}, row_tokens, work,
                      work.gate_up_blocks + 1);
    } else {
        take_registers<CONSUMER_REGISTERS>();
        const ScaledDecoder decoder(H & 63);
        const Outputs to{act, act_powers, out};
        Turn<STAGES> turn;
        Turn<POWERS> item_turn;
        Turn<SLOTS> slot;
        for (Item item = shared.items().hear(slot); item.kind != NONE; item = shared.items().hear(slot)) {
            run<8>(shared, turn, item, powers_of(shared, item_turn.at), decoder, tiles, to, H, I);
            if (item.kind == GATE_UP)
                finish(shared, tiles + item.tile, work.gate_up_blocks, act, act_powers, I);
            item_turn.next();
        }
    }
}
