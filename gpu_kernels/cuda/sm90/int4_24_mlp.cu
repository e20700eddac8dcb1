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
// As sm80/int4_24_mlp: weights are the M side of mma.sp.m16n8k32, integers are multiplied, and each 32 channels'
// sums are scaled in fp32. Here two warps fill the ring, so that the others only decode and multiply.
//
// Threads: 32 * (2 + CONSUMERS). A consumer warp makes 16 * M_TILES weight rows times the rows of a tile. Blocks
// and items: as in mxfp4_mlp.
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
#define PIECES 0
#define SPREAD 4  // a product's load of two rows of four chunks touches every bank once
constexpr int CONSUMERS = WARPS;
#define WEIGHT_ROWS (16 * M_TILES * WARPS)
#include "sm90/int4_24_load.cuh"

constexpr int GROUPS = MAX_N / 8;
constexpr int SLABS_AT_ONCE = GROUPS <= 2 ? 2 : 1;  // unrolled
static_assert(MAX_N % 8 == 0 && GROUPS <= 8, "whole groups of 8 rows, whose sums fit registers");

template <int G>
using Sums = float[M_TILES][G][4];

// Where a lane's words lie in a slab: bytes.
struct Place {
    u32 low, high, tile;  // the low row of its first product; to the high row; to the next product

    __device__ __forceinline__ explicit Place(bool is_down) {
        const int tile_of_warp = (threadIdx.x / 32 - PRODUCERS) * M_TILES, g = threadIdx.x % 32 / 4;
        if (is_down) {
            low = (tile_of_warp * 16 + g) * 16;
            high = 8 * 16;
            tile = 16 * 16;
        } else {
            low = (tile_of_warp * 8 + g) * (INTERLEAVED ? 32 : 16);
            high = INTERLEAVED ? 16 : WEIGHT_SLAB / 2;
            tile = 8 * (INTERLEAVED ? 32 : 16);
        }
    }
};

template <int G>
__device__ __forceinline__ void multiply_slab(Sums<G>& sums, const unsigned char* words, const unsigned char* rows,
                                              const Place& place, const Decoder& decoder) {
    const int lane = threadIdx.x % 32, row = lane / 4, t = lane % 4;
    const unsigned char* first = rows + row * 128 + place_of(row, t) * 16;
    const unsigned char* then = rows + row * 128 + place_of(row, 4 + t) * 16;
    u32 b[2][G][4];
#pragma unroll
    for (int j = 0; j < G; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 four = *reinterpret_cast<const uint4*>((half ? then : first) + j * 1024);
            b[half][j][0] = four.x;
            b[half][j][1] = four.y;
            b[half][j][2] = four.z;
            b[half][j][3] = four.w;
        }
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
        const uint4 low = *reinterpret_cast<const uint4*>(words + place.low + m * place.tile);
        const uint4 high = *reinterpret_cast<const uint4*>(words + place.low + place.high + m * place.tile);
        const auto even = decoder.decode(low.x, low.y, high.x, high.y);
#pragma unroll
        for (int j = 0; j < G; ++j) multiply_scaled(sums[m][j], even, b[0][j]);
        const auto odd = decoder.decode(low.z, low.w, high.z, high.w);
#pragma unroll
        for (int j = 0; j < G; ++j) multiply_scaled(sums[m][j], odd, b[1][j]);
    }
}

template <int G>
__device__ __forceinline__ void multiply(const Shared& shared, Turn<STAGES>& turn, Sums<G>& sums, int slabs,
                                         const Place& place, const Decoder& decoder) {
    const u32 base = shared_address(dynamic_memory());
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int j = 0; j < G; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][j][i] = 0.0f;
    for (; slabs > 0; slabs -= SLABS) {
        const unsigned char* words = dynamic_memory() + (shared.words + turn.at * WORD_BYTES - base);
        const unsigned char* rows = dynamic_memory() + (shared.rows + turn.at * STAGE_ROWS - base);
        barrier_wait(shared.full + 8 * turn.at, turn.parity);
        if (slabs >= SLABS) {
#pragma unroll SLABS_AT_ONCE
            for (int s = 0; s < SLABS; ++s)
                multiply_slab<G>(sums, words + s * WEIGHT_SLAB, rows + s * ROW_SLAB, place, decoder);
        } else {
#pragma unroll 1
            for (int s = 0; s < slabs; ++s)
                multiply_slab<G>(sums, words + s * WEIGHT_SLAB, rows + s * ROW_SLAB, place, decoder);
        }
        __syncwarp();
        release(shared.empty + 8 * turn.at);
        turn.next();
    }
}

// A lane's sums are of rows lane / 4 and lane / 4 + 8 of each product, and of two rows of the tile.
template <int G>
__device__ __forceinline__ void write(const Sums<G>& sums, const Item& item, u16* act, u16* out, int H, int I,
                                      int* done) {
    const int lane = threadIdx.x % 32, g = lane / 4;
    const int of_16 = (item.block * CONSUMERS + threadIdx.x / 32 - PRODUCERS) * M_TILES;
    const bool is_down = item.kind == DOWN;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
        const int channel = (of_16 + m) * (is_down ? 16 : 8) + g;
        const int at = channel / 32 * 32 + word_of(channel % 32) * 2 + channel % 2;
        if (channel >= (is_down ? H : I)) continue;
#pragma unroll
        for (int j = 0; j < G; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = 8 * j + lane % 4 * 2 + i;
                if (row >= item.rows) continue;
                const float low = sums[m][j][i] * INTEGERS, high = sums[m][j][2 + i] * INTEGERS;
                const u64 of_row = item.first + row;
                if (is_down) {
                    const u32 both = pack(low, high);
                    out[of_row * H + channel] = static_cast<u16>(both);
                    out[of_row * H + channel + 8] = static_cast<u16>(both >> 16);
                } else {
                    act[of_row * I + at] = static_cast<u16>(pack(silu_mul(low, high), 0.0f));
                }
            }
    }
    __syncwarp();
    if (!is_down && lane == 0) add_release(done, 1);
}

// Numbers of groups that are compiled: all up to 2, then every second.
__device__ __forceinline__ constexpr int after(int groups) { return groups + (groups < 2 ? 1 : 2); }

template <int G>
__device__ __forceinline__ void run(const Shared& shared, Turn<STAGES>& turn, const Item& item, const Decoder& decoder,
                                    Tile* tiles, u16* act, u16* out, int H, int I) {
    if constexpr (G < GROUPS) {
        if (item.rows > 8 * G) {
            run<after(G)>(shared, turn, item, decoder, tiles, act, out, H, I);
            return;
        }
    }
    Sums<G> sums;
    multiply<G>(shared, turn, sums, (item.kind == DOWN ? I : H) / 64, Place(item.kind == DOWN), decoder);
    write<G>(sums, item, act, out, H, I, &tiles[item.tile].done);
}

extern "C" __global__ void __launch_bounds__(32 * (PRODUCERS + CONSUMERS), BLOCKS)
    int4_24_mlp(const uint4* w13, const uint4* w2, const u16* hidden, const int* row_tokens, Tile* tiles,
                int* num_tiles, u16* act, u16* out, int H, int I) {
    const Shared shared(dynamic_memory());
    if (threadIdx.x == 0) shared.init();
    __syncthreads();
    wait_for_predecessor();
    let_successor_start();

    const Work work = work_of(tiles, num_tiles, H, I);
    if (threadIdx.x < 32) {
        load_words(shared, Weights{w13, w2}, work, num_tiles + 1);
    } else if (threadIdx.x < 32 * PRODUCERS) {
        load_rows(shared, hidden, act, row_tokens, work, CONSUMERS * work.gate_up_blocks);
    } else {
        const Decoder decoder(H & 63);
        Turn<STAGES> turn;
        Turn<SLOTS> slot;
        for (Item item = shared.items.hear(slot); item.kind != NONE; item = shared.items.hear(slot))
            run<1>(shared, turn, item, decoder, tiles, act, out, H, I);
    }
}
