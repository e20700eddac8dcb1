// Sorted rows through their experts' weights, on the tensor cores of sm_90a: out[row] = f(x[row] W_e^T).
//
// GATE_UP 1: W_e holds gate and up rows [2I, H], x[row] = hidden[row_tokens[row]], f = silu(gate) * up.
// GATE_UP 0: W_e = down [H, I], x[row] = activations[row], f = identity.
//
// | argument   | shape                  | dtype      |                                                  |
// |------------|------------------------|------------|--------------------------------------------------|
// | weights    | (k, 8, 2, I/8, E), or (k, rows, E) for GATE_UP 0 | bf16, fp16 | tensor map           |
// | x          | [T, H], or [P, I]      | as weights | row-major, 16 bytes                              |
// | row_tokens | [P]                    | int32      | GATE_UP only                                     |
// | tiles, num_tiles | [bound], [1]     | Tile, int32 | of routing_sort, tile_rows = CLUSTER * MAX_N    |
// | out        | [P, I], or [P, H]      | as weights | row-major, 16 bytes; only rows of tiles written  |
//
// depth (H, or I) and width (I, or H) are multiples of 64. A box of the tensor map is 64 elements of k by 128
// rows (for GATE_UP eight gate rows, eight up rows, and so on), swizzled by 128 bytes.
//
// Threads: 384; a warpgroup that loads, two that multiply. Blocks: one a multiprocessor, in clusters of
// CLUSTER; each cluster takes every n-th of tiles * ceil(weight rows / 256), and its blocks share the weights
// of a tile, half of which each loads for all. Weights are the M side (256 rows), a tile's rows the N side:
// as many as it has, up to MAX_N a block, in steps of 8.
//
// Shared memory: STAGES * (weights 256 x 64, rows MAX_N x 64), two buffers of 4 KiB a multiplying warpgroup,
// barriers. Weights come by the copy engine, rows by cp.async, since each may lie anywhere. GATE_UP 0:
// weights are asked for before the predecessor has ended. Before: routing_sort. After: combine.
#include "common/routing.cuh"
#include "sm90/ptx.cuh"
#include "sm90/wgmma.cuh"

#ifndef GATE_UP
#define GATE_UP 1
#endif
#ifndef CLUSTER
#define CLUSTER 1
#endif
#ifndef MAX_N
#define MAX_N 160
#endif
#ifndef STAGES
#define STAGES 4
#endif
static_assert(MAX_N % 16 == 0 && MAX_N <= 192, "rows of a tile");

constexpr int K_BLOCK = 64;
constexpr int WEIGHT_ROWS = 256;
constexpr int BOX_BYTES = 128 * K_BLOCK * 2;
constexpr int WEIGHT_BYTES = WEIGHT_ROWS * K_BLOCK * 2;
constexpr int ROW_BYTES = MAX_N * K_BLOCK * 2;
constexpr int STAGE_BYTES = WEIGHT_BYTES + ROW_BYTES;
constexpr int PIECE_BYTES = 4096;
constexpr int CHANNELS = GATE_UP ? 64 : 128;  // of out that a multiplying warpgroup makes
constexpr int PIECE_ROWS = PIECE_BYTES / 2 / CHANNELS;

struct Shared {
    u32 stages, pieces, full, empty;

    __device__ __forceinline__ u32 weights(int stage) const { return stages + stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 rows(int stage) const {
        return stages + stage * STAGE_BYTES + WEIGHT_BYTES;
    }
};

// Place in the ring of stages.
struct Turn {
    int stage = 0;
    u32 parity = 0;

    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// This block's share of a tile: rows first .. first + rows - 1.
struct Share {
    int expert, first, rows;

    __device__ __forceinline__ Share(const Tile& tile, int rank) {
        const int most = CLUSTER == 1 ? tile.rows : ((tile.rows + CLUSTER - 1) / CLUSTER + 7) / 8 * 8;
        expert = tile.expert;
        first = tile.first + rank * most;
        rows = max(0, min(most, tile.rows - rank * most));
    }
};

__device__ __forceinline__ Tile load_tile(const Tile* tiles, int i) {
    const int4 words = *reinterpret_cast<const int4*>(tiles + i);
    return Tile{words.x, words.y, words.z, words.w};
}

// ---- the warpgroup that loads: one warp weights, three the rows

constexpr int GATHER_WARPS = 3;
constexpr int GATHER_ROWS = 4;  // of a warp's copy: eight lanes a row of 128 bytes

struct Work {
    const Tile* tiles;
    int count, step, first, blocks, depth, rank;
};

__device__ __forceinline__ void load_box(const TensorMap* map, u32 to, u32 full, const Work& work, int k,
                                         int block, int expert) {
    constexpr u16 ALL = (1 << CLUSTER) - 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (CLUSTER > 1 && half != work.rank) continue;
        const u32 at = to + half * BOX_BYTES;
#if GATE_UP
        const int group = block * (WEIGHT_ROWS / 16) + half * 8;  // of 8 channels: 8 gate and 8 up rows
        if (CLUSTER > 1)
            tensor_load_5d_to(at, map, full, ALL, k, 0, 0, group, expert);
        else
            tensor_load_5d(at, map, full, k, 0, 0, group, expert);
#else
        const int row = block * WEIGHT_ROWS + half * 128;
        if (CLUSTER > 1)
            tensor_load_3d_to(at, map, full, ALL, k, row, expert);
        else
            tensor_load_3d(at, map, full, k, row, expert);
#endif
    }
}

__device__ __forceinline__ void load_weights(const Shared& shared, const TensorMap* map, const Work& work) {
    Turn turn;
    for (int i = work.first; i < work.count; i += work.step) {
        const int expert = work.tiles[i / work.blocks].expert;
        for (int k = 0; k < work.depth; k += K_BLOCK) {
            const u32 full = shared.full + 8 * turn.stage;
            barrier_wait(shared.empty + 8 * turn.stage, turn.parity ^ 1);
            barrier_arrive_expect(full, WEIGHT_BYTES);
            load_box(map, shared.weights(turn.stage), full, work, k, i % work.blocks, expert);
            turn.next();
        }
    }
}

__device__ __forceinline__ void load_rows(const Shared& shared, const u16* x, const int* row_tokens,
                                          const Work& work) {
    constexpr int COPIES = (MAX_N / GATHER_ROWS + GATHER_WARPS - 1) / GATHER_WARPS;
    constexpr int STRIDE = GATHER_WARPS * GATHER_ROWS;
    const int warp = threadIdx.x / 32 - 1, lane = threadIdx.x % 32, chunk = lane % 8;
    // copy j is of rows (warp + 3 j) * 4 + lane / 8: the swizzle knows odd and even j
    const int row_of_lane = warp * GATHER_ROWS + lane / 8;
    const u32 even = (chunk ^ (row_of_lane % 8)) * 16, odd = (chunk ^ ((row_of_lane + 4) % 8)) * 16;
    Turn turn;
    for (int i = work.first; i < work.count; i += work.step) {
        const Share share(load_tile(work.tiles, i / work.blocks), work.rank);
        // copies of this warp; the last one's rows past the tile read some row again, and what they make is
        // not written
        const int copies = (share.rows - warp * GATHER_ROWS + STRIDE - 1) / STRIDE;
        u32 sources[COPIES];  // in units of 16 bytes
#pragma unroll
        for (int j = 0; j < COPIES; ++j) {
            const int row = share.first + min(row_of_lane + j * STRIDE, share.rows - 1);
            sources[j] = 0;
            // -1: a row that no token has
            if (j < copies) sources[j] = GATE_UP ? max(row_tokens[row], 0) : row;
            sources[j] *= static_cast<u32>(work.depth / 8);
        }
        const uint4* from = reinterpret_cast<const uint4*>(x) + chunk;
        for (int k = 0; k < work.depth; k += K_BLOCK, from += K_BLOCK / 8) {
            barrier_wait(shared.empty + 8 * turn.stage, turn.parity ^ 1);
            const u32 to = shared.rows(turn.stage) + row_of_lane * 128;
#pragma unroll
            for (int j = 0; j < COPIES; ++j)
                if (j < copies) copy_16(to + j * STRIDE * 128 + (j % 2 ? odd : even), from + sources[j]);
            copies_arrive(shared.full + 8 * turn.stage);
            turn.next();
        }
    }
}

// ---- the warpgroups that multiply

__device__ __forceinline__ void release(const Shared& shared, int stage) {
    // one lane a block of the cluster
    if (threadIdx.x % 128 < CLUSTER) {
        if (CLUSTER > 1)
            barrier_arrive_at(shared.empty + 8 * stage, threadIdx.x % 128);
        else
            barrier_arrive(shared.empty + 8 * stage);
    }
}

// sums [2][MAX_N / 2]: of 2 x 64 weight rows and N rows of the tile.
template <int N>
__device__ __forceinline__ void multiply(const Shared& shared, Turn& turn, float (&sums)[2][MAX_N / 2],
                                         int depth) {
    const u32 weights = (threadIdx.x / 128 - 1) * (WEIGHT_BYTES / 2);
    int before = -1;
    for (int k = 0; k < depth; k += K_BLOCK) {
        barrier_wait(shared.full + 8 * turn.stage, turn.parity);
        fence_async_proxy();  // rows were written by ordinary copies
        const u64 a = operand(shared.weights(turn.stage) + weights), b = operand(shared.rows(turn.stage));
        products_begin();
#pragma unroll
        for (int step = 0; step < K_BLOCK / 16; ++step) {
            const bool add = k > 0 || step > 0;
            product<N>(sums[0], a + step * OPERAND_STEP, b + step * OPERAND_STEP, add);
            product<N>(sums[1], a + 512 + step * OPERAND_STEP, b + step * OPERAND_STEP, add);
        }
        products_commit();
        if (before >= 0) {
            products_wait<1>();
            release(shared, before);
        }
        before = turn.stage;
        turn.next();
    }
    products_wait<0>();
    release(shared, before);
}

// The least N that holds the rows; the other sums keep what they had.
template <int N>
__device__ __forceinline__ void multiply_rows(const Shared& shared, Turn& turn, float (&sums)[2][MAX_N / 2],
                                              int depth, int rows) {
    if constexpr (N >= MAX_N) {
        multiply<MAX_N>(shared, turn, sums, depth);
    } else {
        if (rows <= N)
            multiply<N>(shared, turn, sums, depth);
        else
            multiply_rows<N + 8>(shared, turn, sums, depth, rows);
    }
}

// 16 matrices of 8 channels x 8 rows of the tile, one word of each a thread: the piece
// [PIECE_ROWS][CHANNELS].
__device__ __forceinline__ void to_piece(u32 piece, const float (&sums)[2][MAX_N / 2], int first_column) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#if GATE_UP
        u32 words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            words[j] = 0;
            if (first_column + 8 * j >= MAX_N) continue;  // the last piece may hold less
            const float* d = sums[m] + (first_column / 8 + j) * 4;
            words[j] = pack(silu_mul(d[0], d[2]), silu_mul(d[1], d[3]));
        }
        const int row = lane, chunk = m * 4 + warp;
        store_transposed(piece + row * 128 + ((chunk ^ (row % 8)) * 16), words[0], words[1], words[2],
                         words[3]);
#else
        const float* d = sums[m] + first_column / 8 * 4;
        // low and high eight channels of the warp's 16, for two groups of eight rows
        const int row = lane % 8 + lane / 16 * 8, chunk = m * 8 + warp * 2 + lane / 8 % 2;
        store_transposed(piece + row * 256 + ((chunk ^ (row % 8)) * 16), pack(d[0], d[1]), pack(d[2], d[3]),
                         pack(d[4], d[5]), pack(d[6], d[7]));
#endif
    }
}

__device__ __forceinline__ void write(const Shared& shared, const float (&sums)[2][MAX_N / 2], u16* out,
                                      const Share& share, int block, int width) {
    const int thread = threadIdx.x % 128, group = threadIdx.x / 128 - 1;
    constexpr int CHUNKS = CHANNELS / 8;
    const int channel = (block * 2 + group) * CHANNELS;
    int buffer = 0;
#pragma unroll
    for (int first = 0; first < MAX_N; first += PIECE_ROWS) {
        if (first < share.rows) {
            const u32 piece = shared.pieces + (group * 2 + buffer) * PIECE_BYTES;
            to_piece(piece, sums, first);
            named_sync(1 + group, 128);
#pragma unroll
            for (int i = thread; i < PIECE_ROWS * CHUNKS; i += 128) {
                const int row = i / CHUNKS, chunk = i % CHUNKS;
                if (first + row < share.rows && channel + chunk * 8 < width) {
                    uint4 words;
                    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                                 : "r"(piece + row * CHANNELS * 2 + ((chunk ^ (row % 8)) * 16))
                                 : "memory");
                    u16* to = out + static_cast<u64>(share.first + first + row) * width + channel + chunk * 8;
                    *reinterpret_cast<uint4*>(to) = words;
                }
            }
            buffer ^= 1;
        }
    }
    // a buffer is written again only behind the barrier of the other
    named_sync(1 + group, 128);
}

extern "C" __global__ void __launch_bounds__(384, 1)
    grouped_gemm(const __grid_constant__ TensorMap weights, const u16* x, const int* row_tokens,
                 const Tile* tiles, const int* num_tiles, u16* out, int depth, int width) {
    extern __shared__ unsigned char memory[];
    Shared shared;
    shared.stages = (shared_address(memory) + 1023) / 1024 * 1024;
    shared.pieces = shared.stages + STAGES * STAGE_BYTES;
    shared.full = shared.pieces + 4 * PIECE_BYTES;
    shared.empty = shared.full + 8 * STAGES;
    const int group = threadIdx.x / 128;
    const int rank = CLUSTER > 1 ? cluster_rank() : 0;
    if (threadIdx.x == 0) {
        prefetch_map(&weights);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared.full + 8 * i, 1 + 32 * GATHER_WARPS);
            barrier_init(shared.empty + 8 * i, 2 * CLUSTER);
        }
        barrier_init_fence();
    }
    if (CLUSTER > 1)
        cluster_sync();
    else
        __syncthreads();
#if GATE_UP
    wait_for_predecessor();
    let_successor_start();
#endif

    Work work;
    work.tiles = tiles;
    work.blocks = ((GATE_UP ? 2 * width : width) + WEIGHT_ROWS - 1) / WEIGHT_ROWS;
    work.count = *num_tiles * work.blocks;
    work.step = gridDim.x / CLUSTER;
    work.first = blockIdx.x / CLUSTER;
    work.depth = depth;
    work.rank = rank;
    if (group == 0) {
        give_registers<88>();
        if (threadIdx.x == 0) load_weights(shared, &weights, work);
        if (threadIdx.x >= 32) {
#if !GATE_UP
            // tiles and weights are older than the predecessor, which waited for them
            wait_for_predecessor();
            let_successor_start();
#endif
            load_rows(shared, x, row_tokens, work);
        }
    } else {
        take_registers<208>();
        Turn turn;
        float sums[2][MAX_N / 2];
        for (int i = work.first; i < work.count; i += work.step) {
            const Share share(load_tile(tiles, i / work.blocks), rank);
            multiply_rows<8>(shared, turn, sums, depth, share.rows);
            write(shared, sums, out, share, i % work.blocks, width);
        }
    }
    if (CLUSTER > 1) cluster_sync();  // the other block may still send here
}
