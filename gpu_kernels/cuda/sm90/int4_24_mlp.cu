// SPDX-License-Identifier: Apache-2.0
// Sorted rows through int4_24 experts on sm_90a, both products in one launch, up to 64 rows a tile:
// act[row] = silu(x Wg_e^T) * (x Wu_e^T), x = hidden[row_tokens[row]]; out[row] = act[row] Wd_e^T.
//
// | argument   | shape             | dtype |                                                        |
// |------------|-------------------|-------|--------------------------------------------------------|
// | w13        | [E, H/64, 2I, 2]  | int64 | words                                                  |
// | w2         | [E, I/64, H, 2]   | int64 | words                                                  |
// | hidden     | [T, H]            | bf16  | of int4_24_order; row-major, 16 bytes                  |
// | row_tokens | [P]               | int32 |                                                        |
// | tiles      | [bound]           | Tile  | of routing_sort, tile_rows = MAX_N; their done: 0      |
// | num_tiles  | [2]               | int32 | tiles in use; 0, counts the items that blocks took     |
// | act        | [P, I]            | bf16  | scratch, in the order of hidden                        |
// | out        | [P, H]            | bf16  | row-major, 16 bytes; only rows of tiles written        |
//
// As sm80/int4_24_mlp: weights are the M side of mma.sp.m16n8k32, integers are multiplied, and each 32
// channels' sums are scaled in fp32. Here two warps fill the ring, so that the others only decode and
// multiply; and a chunk of the format is a chunk of A (int4_24_chunks.cuh).
//
// Threads: 32 * (2 + CONSUMERS). A consumer warp makes 16 * M_TILES weight rows times the rows of a tile.
// Blocks and items: as in mxfp4_mlp.
#ifndef MAX_N
#define MAX_N 8
#endif
#ifndef WARPS
#define WARPS 4  // consumers
#endif
#ifndef M_TILES
#define M_TILES 4
#endif
#ifndef BLOCKS
#define BLOCKS 2  // resident, a multiprocessor
#endif
#define PRODUCERS 2
#define ZEROS STAGE_ROWS
#define SWIZZLE(row) (row % 2 * 6)  // lanes that load together touch banks of their own
#define SLAB_GAP 64                 // of lanes that load words of two slabs, each touches banks of its own
constexpr int CONSUMERS = WARPS;
#define WEIGHT_ROWS (16 * M_TILES * WARPS)
#include "sm90/int4_24_chunks.cuh"
#include "sm90/int4_24_load.cuh"
#include "sm90/int4_24_quad.cuh"

constexpr int GROUPS = MAX_N / 8;
constexpr int SLABS_AT_ONCE = M_TILES * GROUPS <= 4 ? 2 : 1;  // unrolled
static_assert(SLABS % 2 == 0 && M_TILES % 2 == 0,
              "a lane's words are of two slabs; two products are made at once");
static_assert(MAX_N % 8 == 0 && GROUPS <= 8, "whole groups of 8 rows, whose sums fit registers");

template <int G>
using Sums = float[M_TILES][G][4];

// Where a lane's words lie in a slab: bytes.
template <bool IS_DOWN>
struct Place {
    static constexpr int PITCH = !IS_DOWN && INTERLEAVED ? 32 : 16;
    static constexpr int HIGH = IS_DOWN       ? 8 * 16
                                : INTERLEAVED ? 16
                                              : WEIGHT_ROWS * 8;  // from the low to the high row
    static constexpr int TILE = (IS_DOWN ? 16 : 8) * PITCH;       // to the next product

    // The low row of its first product.
    static __device__ __forceinline__ int first() {
        return (threadIdx.x / 32 - PRODUCERS) * M_TILES * TILE + threadIdx.x % 32 / 4 * PITCH;
    }
};

template <int G, bool IS_DOWN>
__device__ __forceinline__ void multiply_slab(Sums<G>& sums, const unsigned char* words,
                                              const unsigned char* rows, const ChunkDecoder& decoder) {
    using Of = Place<IS_DOWN>;
    const int lane = threadIdx.x % 32, row = lane / 4, t = lane % 2 * 2 + lane % 4 / 2;
    u32 b[2][G][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const unsigned char* from = rows + row * 128 + place_of(row, half * 4 + t) * 16;
#pragma unroll
        for (int j = 0; j < G; ++j) {
            const uint4 four = *reinterpret_cast<const uint4*>(from + j * 1024);
            b[half][j][0] = four.x;
            b[half][j][1] = four.y;
            b[half][j][2] = four.z;
            b[half][j][3] = four.w;
        }
    }
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
        const uint4 low = *reinterpret_cast<const uint4*>(words + m * Of::TILE);
        const uint4 high = *reinterpret_cast<const uint4*>(words + m * Of::TILE + Of::HIGH);
        ChunkDecoder::Fragment of[2];
        decoder.decode(of, low, high);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < G; ++j) {
                float products[4] = {};
                if (half == 0)
                    multiply_unordered<0>(products, of[half].a, b[half][j], of[half].metadata);
                else
                    multiply_unordered<1>(products, of[half].a, b[half][j], of[half].metadata);
                scale(sums[m][j], products, of[half].low, of[half].high);
            }
    }
}

template <int G, bool IS_DOWN>
__device__ __forceinline__ void multiply(const Shared& shared, Turn<STAGES>& turn, Sums<G>& sums, int slabs,
                                         const ChunkDecoder& decoder) {
    const u32 base = shared_address(dynamic_memory());
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int j = 0; j < G; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][j][i] = 0.0f;
    for (; slabs > 0; slabs -= SLABS) {
        const unsigned char* words =
            dynamic_memory() + (shared.words() + turn.at * WORD_BYTES - base) + Place<IS_DOWN>::first();
        const unsigned char* rows = dynamic_memory() + (shared.rows + turn.at * STAGE_ROWS - base);
        barrier_wait(shared.full(turn.at), turn.parity);
        if (slabs >= SLABS) {
#pragma unroll SLABS_AT_ONCE
            for (int s = 0; s < SLABS; ++s)
                multiply_slab<G, IS_DOWN>(sums, words + s * WEIGHT_SLAB, rows + s * ROW_SLAB, decoder);
        } else {
#pragma unroll 1
            for (int s = 0; s < slabs; ++s)
                multiply_slab<G, IS_DOWN>(sums, words + s * WEIGHT_SLAB, rows + s * ROW_SLAB, decoder);
        }
        release_read(shared.empty(turn.at));
        turn.next();
    }
}

// Three or four rows: the sums of both groups of a slab lie side by side, so that one scale serves two
// products. Columns 0 .. 3 are the rows for the first group, 4 .. 7 the same for the second.
template <bool IS_DOWN>
__device__ __forceinline__ void multiply_halves(const Shared& shared, Turn<STAGES>& turn, Sums<1>& sums,
                                                int slabs, const ChunkDecoder& decoder) {
    using Of = Place<IS_DOWN>;
    const u32 base = shared_address(dynamic_memory());
    const int lane = threadIdx.x % 32, t = lane % 4, row = lane / 4 % 4, half = lane / 16;
    const int own = row * 128 + place_of(row, half * 4 + t % 2 * 2 + t / 2) * 16;
    const unsigned char* zeros = dynamic_memory() + (shared.zeros() - base);
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][0][i] = 0.0f;
    for (; slabs > 0; slabs -= SLABS) {
        const unsigned char* words =
            dynamic_memory() + (shared.words() + turn.at * WORD_BYTES - base) + Of::first();
        const unsigned char* rows = dynamic_memory() + (shared.rows + turn.at * STAGE_ROWS - base) + own;
        const unsigned char *first = half ? zeros : rows, *second = half ? rows : zeros;
        barrier_wait(shared.full(turn.at), turn.parity);
        const int here = min(slabs, SLABS);
#pragma unroll 1
        for (int s = 0; s < here; ++s) {
            u32 b[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint4 four = *reinterpret_cast<const uint4*>(i ? second : first);
                b[i][0] = four.x;
                b[i][1] = four.y;
                b[i][2] = four.z;
                b[i][3] = four.w;
            }
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                const uint4 low = *reinterpret_cast<const uint4*>(words + m * Of::TILE);
                const uint4 high = *reinterpret_cast<const uint4*>(words + m * Of::TILE + Of::HIGH);
                const u32 low_rest = t < 2 ? low.y : low.w, high_rest = t < 2 ? high.y : high.w;
                const u32 metadata = decoder.metadata(low_rest, high_rest);
                u32 a[2][4];
                decoder.values(a[0], low.x, high.x);
                decoder.values(a[1], low.z, high.z);
                float products[4] = {};
                multiply_unordered<0>(products, a[0], b[0], metadata);
                multiply_unordered<1>(products, a[1], b[1], metadata);
                scale(sums[m][0], products, scale_of(low_rest), scale_of(high_rest));
            }
            words += WEIGHT_SLAB;
            first += ROW_SLAB;
            second += ROW_SLAB;
        }
        release_read(shared.empty(turn.at));
        turn.next();
    }
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][0][i] += __shfl_xor_sync(~0u, sums[m][0][i], 2);
}

// One or two rows: see int4_24_quad.cuh.
template <bool IS_DOWN>
struct Quads {
    using Of = Place<IS_DOWN>;
    float sums[M_TILES][4];

    // Words and rows of two slabs; of one unless WHOLE. x: where this lane's channels lie.
    template <bool WHOLE>
    __device__ __forceinline__ void multiply_slabs(const unsigned char* words, const unsigned char* x,
                                                   const OwnColumns& own, const QuadDecoder& decoder) {
        u32 b[4][4];
        own.take(b, x);
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int m = 0; m < M_TILES; m += 2) {
            QuadDecoder::Fragment of[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const unsigned char* at = words + (m + i) * Of::TILE;
                of[i] = decoder.decode(*reinterpret_cast<const uint2*>(at),
                                       *reinterpret_cast<const uint2*>(at + Of::HIGH));
            }
            float products[2][4];
            multiply_quads(products, of, b);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (WHOLE || t < 2) scale(sums[m + i], products[i], of[i].low, of[i].high);
        }
    }

    __device__ __forceinline__ void multiply(const Shared& shared, Turn<STAGES>& turn, int slabs, u32 zero) {
        const QuadDecoder decoder(zero);
        const u32 base = shared_address(dynamic_memory());
        const int lane = threadIdx.x % 32, t = lane % 4, group = lane / 8, row = lane / 4 % 2;
        const int of_row = row * 128 + place_of(row, group % 2 * 4 + t % 2 * 2) * 16;
        const OwnColumns own(zero, true), of_one(zero, true, false);
        const int of_word = Of::first() + t / 2 * WEIGHT_SLAB + t % 2 * 8;
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][i] = 0.0f;
        for (; slabs > 0; slabs -= SLABS) {
            const unsigned char* words =
                dynamic_memory() + (shared.words() + turn.at * WORD_BYTES - base) + of_word;
            const unsigned char* rows =
                dynamic_memory() + (shared.rows + turn.at * STAGE_ROWS - base) + of_row;
            barrier_wait(shared.full(turn.at), turn.parity);
            const int here = min(slabs, SLABS);
#pragma unroll 1
            for (int s = 0; s + 1 < here; s += 2)
                multiply_slabs<true>(words + s * WEIGHT_SLAB, rows + (s + group / 2) * ROW_SLAB, own,
                                     decoder);
            if (here % 2)
                multiply_slabs<false>(words + (here - 1) * WEIGHT_SLAB, rows + (here - 1) * ROW_SLAB, of_one,
                                      decoder);
            release_read(shared.empty(turn.at));
            turn.next();
        }
    }

    // The sums of a quad's lanes, in a form that `write` takes: columns of lane t are rows 2t and 2t + 1 of
    // the tile.
    __device__ __forceinline__ void add_up(Sums<1>& all) {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float sum = sums[m][i];
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                all[m][0][i] = t == 0 ? sum : 0.0f;
            }
    }
};

// A lane's sums are of rows lane / 4 and lane / 4 + 8 of each product, and of two rows of the tile.
template <int G, bool IS_DOWN>
__device__ __forceinline__ void write(const Sums<G>& sums, int block, Tile* tile, u16* act, u16* out, int H,
                                      int I) {
    const int thread = later(threadIdx.x), lane = thread % 32, g = lane / 4;
    const int first = tile->first, rows = tile->rows,
              of_16 = (block * CONSUMERS + thread / 32 - PRODUCERS) * M_TILES;
    H = later(H);
    I = later(I);
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
        const int channel = (of_16 + m) * (IS_DOWN ? 16 : 8) + g;
        const int at = channel / 32 * 32 + word_of_chunk(channel % 32) * 2 + channel % 2;
        if (channel >= (IS_DOWN ? H : I)) continue;
#pragma unroll
        for (int j = 0; j < G; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = 8 * j + lane % 4 * 2 + i;
                if (row >= rows) continue;
                const float low = sums[m][j][i] * INTEGERS, high = sums[m][j][2 + i] * INTEGERS;
                const u64 of_row = first + row;
                if (IS_DOWN) {
                    const u32 both = pack(low, high);
                    out[of_row * H + channel] = static_cast<u16>(both);
                    out[of_row * H + channel + 8] = static_cast<u16>(both >> 16);
                } else {
                    act[of_row * I + at] = static_cast<u16>(pack(silu_mul(low, high), 0.0f));
                }
            }
    }
    __syncwarp();
    if (!IS_DOWN && lane == 0) add_release(&tile->done, 1);
}

// Numbers of groups that are compiled: all up to 4, then every second.
__device__ __forceinline__ constexpr int after(int groups) { return groups + (groups < 4 ? 1 : 2); }

template <bool IS_DOWN>
__device__ __forceinline__ void run_quads(const Shared& shared, Turn<STAGES>& turn, const Item& item,
                                          Tile* tiles, u16* act, u16* out, int H, int I) {
    Sums<1> sums;
    {
        Quads<IS_DOWN> quads;
        quads.multiply(shared, turn, (IS_DOWN ? I : H) / 64, H & 63);
        quads.add_up(sums);
    }
    write<1, IS_DOWN>(sums, item.block, tiles + item.tile, act, out, H, I);
}

template <int G, bool IS_DOWN>
__device__ __forceinline__ void run(const Shared& shared, Turn<STAGES>& turn, const Item& item, Tile* tiles,
                                    u16* act, u16* out, int H, int I) {
    if constexpr (G == 1) {
        if (item.rows <= 2) return run_quads<IS_DOWN>(shared, turn, item, tiles, act, out, H, I);
    }
    if constexpr (G < GROUPS) {
        if (item.rows > 8 * G) return run<after(G), IS_DOWN>(shared, turn, item, tiles, act, out, H, I);
    }
    Sums<G> sums;
    if (G == 1 && item.rows <= 4) {
        if constexpr (G == 1)
            multiply_halves<IS_DOWN>(shared, turn, sums, (IS_DOWN ? I : H) / 64, ChunkDecoder(H & 63));
    } else {
        multiply<G, IS_DOWN>(shared, turn, sums, (IS_DOWN ? I : H) / 64, ChunkDecoder(H & 63));
    }
    write<G, IS_DOWN>(sums, item.block, tiles + item.tile, act, out, H, I);
}

extern "C" __global__ void __launch_bounds__(32 * (PRODUCERS + CONSUMERS), BLOCKS)
    int4_24_mlp(const uint4* w13, const uint4* w2, const u16* hidden, const int* row_tokens, Tile* tiles,
                int* num_tiles, u16* act, u16* out, int H, int I) {
    const Shared shared(dynamic_memory());
    if (threadIdx.x == 0) shared.init();
    for (int i = threadIdx.x * 16; i < ZEROS; i += 16 * 32 * (PRODUCERS + CONSUMERS))
        store_16(shared.zeros() + i, make_uint4(0, 0, 0, 0));
    __syncthreads();
    wait_for_predecessor();
    let_successor_start();

    const Work work = work_of(tiles, num_tiles, H, I);
    if (threadIdx.x < 32) {
        load_words(shared, Weights{w13, w2}, work, num_tiles + 1);
    } else if (threadIdx.x < 32 * PRODUCERS) {
        load_rows(shared, hidden, act, row_tokens, work, CONSUMERS * work.gate_up_blocks);
    } else {
        Turn<STAGES> turn;
        Turn<SLOTS> slot;
        for (Item item = shared.items().hear(slot); item.kind != NONE; item = shared.items().hear(slot))
            if (item.kind == DOWN)
                run<1, true>(shared, turn, item, tiles, act, out, H, I);
            else
                run<1, false>(shared, turn, item, tiles, act, out, H, I);
    }
}
