// SPDX-License-Identifier: Apache-2.0
// Sorted rows times MXFP4 weights of their experts: block-scaled products of compute capability 12.x.
// One launch makes act = silu(x Wg_e^T) * (x Wu_e^T) of gathered tokens, another out = act Wd_e^T.
//
// | argument     | shape         | dtype            |                                                              |
// |--------------|---------------|------------------|--------------------------------------------------------------|
// | x            | [X, C]        | e4m3             | of mx_quantise or of the first launch; 16 bytes              |
// | x_scales     | [X, S]        | ue8m0            | S: C / 32 rounded up to 4; zeros after the last; 4 bytes     |
// | row_tokens   | [P]           | int32 or null    | row of x of each sorted row; null: the same                  |
// | weights      | [E, R, C / 2] | e2m1             | channel 2i in the low bits of byte i; 16 bytes               |
// | w_scales     | [E, R, C / 32] | ue8m0           | 4 bytes                                                      |
// | bias16       | [E, R]        | bf16 or null     |                                                              |
// | bias32       | [E, R]        | fp32 or null     | at most one of both                                          |
// | tiles        | [bound]       | Tile             | of routing_sort, tile_rows = TILE_M                          |
// | num_tiles    | [1]           | int32            |                                                              |
// | out          | [P, outputs]  | bf16, e4m3, fp32 | down; act; act where TILE_N < 64, for mx_quantise            |
// | out_scales   | [P, S]        | ue8m0            | of act; null where TILE_N < 64 and for down                  |
//
// C (channels) and outputs are multiples of 32. gate_up: R = 2 * outputs, the gate row of output n is n *
// row_step, its up row up_step further. down: R = outputs, row_step 1, up_step 0. PACKED: x and act are e2m1.
// CLAMPED: act is the clamped SwiGLU.
//
// Work: items of a tile of tokens times TILE_N weight rows. Block b makes items b, b + gridDim.x, ... A tile
// of 64 or 128 tokens is the A side of the products. Of any other size, the weights are the A side and the
// tokens the B side: `SWAPPED`. A warp makes 16 or 32 rows by up to 64 columns.
//
// Shared memory: STAGES stages of 128 channels, filled by cp.async, also across items. A stage holds rows of
// tokens, rows of weights, words of their scales. A row is 128 bytes, swizzled in units of 16: 16 numbers of
// FP4 fill 8 bytes, 8 are padding (`ldmatrix ... b4x16_p64`). PACKED: 64 bytes, without padding. Scales of
// weights may begin between words: two words each, shifted after the load. After the stages: MAXIMA words.
// Producers: mx_quantise, routing_sort. Consumers: mx_quantise, combine. At most 255 registers.
#include "sm120/product_outputs.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mxfp4_product(const u8* x, const u8* x_scales, const int* row_tokens, const u8* weights,
                  const u8* w_scales, const u16* bias16, const float* bias32, const Tile* tiles,
                  const int* num_tiles, void* out, u8* out_scales, int channels, int outputs, int row_step,
                  int up_step) {
    const u32 shared = shared_address(dynamic_memory());
    wait_for_predecessor();
    let_successor_start();

    const int blocks = ((up_step ? 2 * outputs : outputs) + TILE_N - 1) / TILE_N;
    const Matrices given{x,      x_scales, weights, w_scales, row_tokens, tiles, *num_tiles * blocks,
                         blocks, channels, outputs, row_step, up_step};
    const Bias bias{bias16, bias32};
    Loader loader(given);
    Fragments fragments;
    int here = 0, free = (STAGES - 1) * STAGE_BYTES;  // stages to multiply, and to fill
    for (int s = 0; s < STAGES - 1; ++s) loader.copy(shared + s * STAGE_BYTES);
    for (int item = blockIdx.x; item < given.items; item += gridDim.x) {
        const int block = item % blocks, steps = given.steps();
        const Tile tile = tiles[item / blocks];
        Sums sums = {};
        fragments.start(given, block);
        for (int step = 0; step < steps; ++step) {
            copies_wait<STAGES - 2>();
            __syncthreads();  // this stage has landed, and no warp reads the one before any more
            loader.copy(shared + free);
            u32 row_scales[MS], column_scales[NS], b[(NS + 1) / 2][4];
#pragma unroll
            for (int m = 0; m < MS; ++m) row_scales[m] = fragments.row_scales(here, m);
#pragma unroll
            for (int n = 0; n < NS; ++n) column_scales[n] = fragments.column_scales(here, n);
            multiply(sums, fragments, shared, here, row_scales, column_scales, b);
            free = here;
            here = here + STAGE_BYTES == STAGES * STAGE_BYTES ? 0 : here + STAGE_BYTES;
        }
        const Places at{fragments, given, tile, block};
        if (up_step == 0) {
            write_down(at, sums, bias, static_cast<u16*>(out));
            continue;
        }
        activate(at, sums, bias);
        if constexpr (FUSED)
            write_quantised(at, sums, static_cast<u8*>(out), out_scales,
                            reinterpret_cast<u32*>(dynamic_memory() + STAGES * STAGE_BYTES));
        else
            write_unrounded(at, sums, static_cast<float*>(out));
    }
    copies_wait<0>();
}
