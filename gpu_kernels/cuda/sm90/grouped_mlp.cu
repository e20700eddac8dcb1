// SPDX-License-Identifier: Apache-2.0
// Sorted rows through their experts, on the tensor cores of sm_90a, both products in one launch:
// act[row] = silu(x Wg_e^T) * (x Wu_e^T), x = hidden[row_tokens[row]]; out[row] = act[row] Wd_e^T.
//
// | argument   | shape                  | dtype      |                                                  |
// |------------|------------------------|------------|--------------------------------------------------|
// | gate_up    | (H, 8, 2, I/8, E)      | bf16, fp16 | tensor map, innermost dimension first             |
// | down       | (I, H, E)              | as gate_up | tensor map                                        |
// | hidden     | [T, H]                 | as gate_up | row-major, 16 bytes                              |
// | row_tokens | [P]                    | int32      |                                                   |
// | tiles      | [bound]                | Tile       | of routing_sort, tile_rows = MAX_N; their done: 0 |
// | num_tiles  | [2]                    | int32      | tiles in use; 0, counts the items that blocks took |
// | act        | [P, I]                 | as gate_up | scratch; row-major, 16 bytes                     |
// | out        | [P, H]                 | as gate_up | row-major, 16 bytes; only rows of tiles written  |
//
// H and I are multiples of 64. A box of a tensor map is 64 elements of the innermost dimension by 128 rows
// (of gate_up eight gate rows, eight up rows, and so on), swizzled by 128 bytes.
//
// Threads: 384: one producer warpgroup, two consumer warpgroups. Blocks: one per multiprocessor. A work item
// is a tile times WEIGHT_ROWS rows of its expert's weights. All gate_up items come first, then all down
// items, so that memory stays busy between the two products. Blocks claim items dynamically, since memory
// does not serve all multiprocessors at the same rate. A down item starts when the activations of its tile
// are complete. The items that make them were claimed earlier and wait for nothing, so no deadlock is
// possible. Weights are the M side, the rows of a tile the N side: N is their number rounded up to 8, at most
// MAX_N. READ_ONCE: weights are evicted from L2 first. Use it for few tokens, where few experts have a second
// tile.
//
// Shared memory: STAGES * (weights WEIGHT_ROWS x 64, rows MAX_N x 64), two output buffers per consumer
// warpgroup, items, barriers. Weights come through TMA; rows come through cp.async, since they are scattered.
// Producer: routing_sort. Consumer: combine.
#include "sm90/items.cuh"
#include "sm90/rows_out.cuh"
#include "sm90/wgmma.cuh"

#ifndef WEIGHT_ROWS
#define WEIGHT_ROWS 256
#endif
#ifndef MAX_N
#define MAX_N 160
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef READ_ONCE
#define READ_ONCE 0
#endif
static_assert(MAX_N % 16 == 0 && MAX_N <= 192, "rows of a tile");
static_assert(WEIGHT_ROWS == 128 || WEIGHT_ROWS == 256, "rows of weights of an item");

constexpr int K_BLOCK = 64;
constexpr int PARTS = WEIGHT_ROWS / 128;  // boxes of a stage; products of 64 rows a warpgroup
constexpr int BOX_BYTES = 128 * K_BLOCK * 2;
constexpr int WEIGHT_BYTES = PARTS * BOX_BYTES;
constexpr int STAGE_BYTES = WEIGHT_BYTES + MAX_N * K_BLOCK * 2;
constexpr int GATHER_WARPS = 3;
constexpr int READERS = GATHER_WARPS + 8;  // warps that read an item

struct Shared {
    u32 stages, pieces, full, empty;
    Items items;

    __device__ __forceinline__ explicit Shared(const void* memory) {
        stages = (shared_address(memory) + 1023) / 1024 * 1024;
        pieces = stages + STAGES * STAGE_BYTES;
        full = pieces + 4 * Piece<PARTS, true>::BYTES;
        empty = full + 8 * STAGES;
        items = Items(empty + 8 * STAGES);
    }
    __device__ __forceinline__ u32 weights(int stage) const { return stages + stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 rows(int stage) const {
        return stages + stage * STAGE_BYTES + WEIGHT_BYTES;
    }
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + 8 * i, 1 + 32 * GATHER_WARPS);
            barrier_init(empty + 8 * i, 2);
        }
        items.init(READERS);
        barrier_init_fence();
    }
};

// ---- the producer warpgroup: one warp loads weights, three load rows

__device__ __forceinline__ void load_weights(const Shared& shared, const TensorMap* gate_up,
                                             const TensorMap* down, const Work& work, int* taken) {
    Turn<STAGES> turn;
    Turn<SLOTS> slot;
#if READ_ONCE
#define POLICY , policy
    const u64 policy = evict_first();
#else
#define POLICY
#endif
    // also the first: only resident blocks claim items, so a part of a GPU suffices
    Item item = work.item(atomicAdd(taken, 1)), next{};
    for (; item.kind != NONE; item = next) {
        shared.items.tell(slot, item);
        const int i = atomicAdd(taken, 1), depth = work.depth(item), row = item.block * WEIGHT_ROWS;
        for (int k = 0; k < depth; k += K_BLOCK) {
            if (k == depth / 2 / K_BLOCK * K_BLOCK) next = work.item(i);  // early: hides the latency
            const u32 full = shared.full + 8 * turn.at;
            barrier_wait(shared.empty + 8 * turn.at, turn.parity ^ 1);
            barrier_arrive_expect(full, WEIGHT_BYTES);
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const u32 to = shared.weights(turn.at) + part * BOX_BYTES;
                if (item.kind == DOWN)
                    tensor_load_3d(to, down, full, k, row + part * 128, item.expert POLICY);
                else  // in groups of 8 channels: 8 gate and 8 up rows
                    tensor_load_5d(to, gate_up, full, k, 0, 0, row / 16 + part * 8, item.expert POLICY);
            }
            turn.next();
        }
    }
    shared.items.tell(slot, item);
}

constexpr int GATHER_ROWS = 4;  // of a warp's copy: eight lanes a row of 128 bytes

__device__ __forceinline__ void load_rows(const Shared& shared, const u16* hidden, const u16* act,
                                          const int* row_tokens, const Work& work) {
    constexpr int COPIES = (MAX_N / GATHER_ROWS + GATHER_WARPS - 1) / GATHER_WARPS;
    constexpr int STRIDE = GATHER_WARPS * GATHER_ROWS;
    const int warp = threadIdx.x / 32 - 1, lane = threadIdx.x % 32, chunk = lane % 8;
    // copy j is of rows (warp + 3 j) * 4 + lane / 8: the swizzle knows odd and even j
    const int row_of_lane = warp * GATHER_ROWS + lane / 8;
    const u32 even = (chunk ^ (row_of_lane % 8)) * 16, odd = (chunk ^ ((row_of_lane + 4) % 8)) * 16;
    Turn<STAGES> turn;
    Turn<SLOTS> slot;
    for (Item item = shared.items.hear(slot); item.kind != NONE; item = shared.items.hear(slot)) {
        const int depth = work.depth(item);
        // copies of this warp; padding rows of the last copy repeat a valid row, and their sums are not
        // stored
        const int copies = (item.rows - warp * GATHER_ROWS + STRIDE - 1) / STRIDE;
        u32 sources[COPIES];  // in units of 16 bytes
#pragma unroll
        for (int j = 0; j < COPIES; ++j) {
            const int row = item.first + min(row_of_lane + j * STRIDE, item.rows - 1);
            sources[j] = 0;
            // max is a guard: the sort writes no token below 0
            if (j < copies) sources[j] = item.kind == DOWN ? row : max(row_tokens[row], 0);
            sources[j] *= static_cast<u32>(depth / 8);
        }
        if (item.kind == DOWN) wait_for_tile(work.tiles + item.tile, 2 * work.gate_up_blocks);
        const uint4* from = reinterpret_cast<const uint4*>(item.kind == DOWN ? act : hidden) + chunk;
        for (int k = 0; k < depth; k += K_BLOCK, from += K_BLOCK / 8) {
            barrier_wait(shared.empty + 8 * turn.at, turn.parity ^ 1);
            const u32 to = shared.rows(turn.at) + row_of_lane * 128;
#pragma unroll
            for (int j = 0; j < COPIES; ++j)
                if (j < copies) copy_16(to + j * STRIDE * 128 + (j % 2 ? odd : even), from + sources[j]);
            copies_arrive(shared.full + 8 * turn.at);
            turn.next();
        }
    }
}

// ---- the consumer warpgroups

using Sums = float[PARTS][MAX_N / 2];  // of PARTS x 64 weight rows and N rows of the tile

__device__ __forceinline__ void release(const Shared& shared, int stage) {
    if (threadIdx.x % 128 == 0) barrier_arrive(shared.empty + 8 * stage);
}

template <int N>
__device__ __forceinline__ void multiply(const Shared& shared, Turn<STAGES>& turn, Sums& sums, int depth) {
    const u32 weights = (threadIdx.x / 128 - 1) * (WEIGHT_BYTES / 2);
    int before = -1;
    for (int k = 0; k < depth; k += K_BLOCK) {
        barrier_wait(shared.full + 8 * turn.at, turn.parity);
        fence_async_proxy();  // rows were written through the generic proxy
        const u64 a = operand(shared.weights(turn.at) + weights), b = operand(shared.rows(turn.at));
        products_begin();
        if constexpr (PARTS == 2) {
#pragma unroll
            for (int part = 0; part < PARTS; ++part) products<N>(sums[part], a + part * 512, b, k > 0);
        } else {
#pragma unroll
            for (int step = 0; step < K_BLOCK / 16; ++step)
                product<N>(sums[0], a + step * OPERAND_STEP, b + step * OPERAND_STEP, k > 0 || step > 0);
        }
        products_commit();
        if (before >= 0) {
            products_wait<1>();
            release(shared, before);
        }
        before = turn.at;
        turn.next();
    }
    products_wait<0>();
    release(shared, before);
}

// Numbers of rows that are compiled. The widest tile compiles longest, and few of its items have few rows.
__device__ __forceinline__ constexpr int rows_after(int n) { return n + (MAX_N > 160 && n < 80 ? 16 : 8); }

// The smallest N that holds the rows. Sums past it are unchanged.
template <int N>
__device__ __forceinline__ void multiply_rows(const Shared& shared, Turn<STAGES>& turn, Sums& sums, int depth,
                                              int rows) {
    if constexpr (N >= MAX_N) {
        multiply<MAX_N>(shared, turn, sums, depth);
    } else {
        if (rows <= N)
            multiply<N>(shared, turn, sums, depth);
        else
            multiply_rows<rows_after(N)>(shared, turn, sums, depth, rows);
    }
}

struct Plain {
    __device__ __forceinline__ float low(int, float sum) const { return sum; }
    __device__ __forceinline__ float high(int, float sum) const { return sum; }
    __device__ __forceinline__ float both(int, float gate, float up) const { return silu_mul(gate, up); }
};

extern "C" __global__ void __launch_bounds__(384, 1)
    grouped_mlp(const __grid_constant__ TensorMap gate_up, const __grid_constant__ TensorMap down,
                const u16* hidden, const int* row_tokens, Tile* tiles, int* num_tiles, u16* act, u16* out,
                int H, int I) {
    const Shared shared(dynamic_memory());
    if (threadIdx.x == 0) {
        prefetch_map(&gate_up);
        prefetch_map(&down);
        shared.init();
    }
    __syncthreads();
    wait_for_predecessor();
    let_successor_start();

    const int gate_up_blocks = (2 * I + WEIGHT_ROWS - 1) / WEIGHT_ROWS,
              down_blocks = (H + WEIGHT_ROWS - 1) / WEIGHT_ROWS;
    const Work work(tiles, *num_tiles, gate_up_blocks, down_blocks, H, I);
    if (threadIdx.x < 128) {
        give_registers<88>();
        if (threadIdx.x == 0) load_weights(shared, &gate_up, &down, work, num_tiles + 1);
        if (threadIdx.x >= 32) load_rows(shared, hidden, act, row_tokens, work);
    } else {
        take_registers<208>();
        Turn<STAGES> turn;
        Turn<SLOTS> slot;
        Sums sums;
        for (Item item = shared.items.hear(slot); item.kind != NONE; item = shared.items.hear(slot)) {
            multiply_rows<8>(shared, turn, sums, work.depth(item), item.rows);
            if (item.kind == DOWN)
                write<true, 2>(shared.pieces, sums, Plain{}, out, item, H, nullptr);
            else
                write<false, 2>(shared.pieces, sums, Plain{}, act, item, I, &tiles[item.tile].done);
        }
    }
}
