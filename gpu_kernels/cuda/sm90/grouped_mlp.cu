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
#include "common/routing.cuh"
#include "sm90/ptx.cuh"
#include "sm90/ring.cuh"
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
constexpr int PIECE_BYTES = 16 * WEIGHT_ROWS;
constexpr int SLOTS = 4;  // items claimed ahead of the one in progress
constexpr int ITEM_BYTES = 32;
constexpr int GATHER_WARPS = 3;
constexpr int READERS = GATHER_WARPS + 8;  // warps that read an item

struct Shared {
    u32 stages, pieces, full, empty, items, items_full, items_empty;

    __device__ __forceinline__ explicit Shared(const void* memory) {
        stages = (shared_address(memory) + 1023) / 1024 * 1024;
        pieces = stages + STAGES * STAGE_BYTES;
        full = pieces + 4 * PIECE_BYTES;
        empty = full + 8 * STAGES;
        items_full = empty + 8 * STAGES;
        items_empty = items_full + 8 * SLOTS;
        items = items_empty + 8 * SLOTS;
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
        for (int i = 0; i < SLOTS; ++i) {
            barrier_init(items_full + 8 * i, 1);
            barrier_init(items_empty + 8 * i, READERS);
        }
        barrier_init_fence();
    }
};

enum Kind { GATE_UP, DOWN, NONE };

// As the producer passes it to the other warps, in ITEM_BYTES.
struct Item {
    int expert, first, rows;  // of the tile
    int tile;                 // index of the tile
    int kind, block;          // of WEIGHT_ROWS rows of weights
};

struct Work {
    Tile* tiles;
    int count, gate_up_items, gate_up_blocks, down_blocks, H, I;

    __device__ __forceinline__ Work(Tile* tiles, int num_tiles, int H, int I) : tiles(tiles), H(H), I(I) {
        gate_up_blocks = (2 * I + WEIGHT_ROWS - 1) / WEIGHT_ROWS;
        down_blocks = (H + WEIGHT_ROWS - 1) / WEIGHT_ROWS;
        gate_up_items = num_tiles * gate_up_blocks;
        count = gate_up_items + num_tiles * down_blocks;
    }
    __device__ __forceinline__ Item item(int i) const {
        Item item{};
        item.kind = i < gate_up_items ? GATE_UP : i < count ? DOWN : NONE;
        if (item.kind == NONE) return item;
        const int at = item.kind == DOWN ? i - gate_up_items : i;
        const int blocks = item.kind == DOWN ? down_blocks : gate_up_blocks;
        item.tile = at / blocks;
        item.block = at % blocks;
        const int4 words = *reinterpret_cast<const int4*>(tiles + item.tile);
        item.expert = words.x;
        item.first = words.y;
        item.rows = words.z;
        return item;
    }
    __device__ __forceinline__ int depth(const Item& item) const { return item.kind == DOWN ? I : H; }
};

// ---- items: one thread claims them, READERS warps read them

__device__ __forceinline__ void tell(const Shared& shared, Turn<SLOTS>& slot, const Item& item) {
    const u32 to = shared.items + ITEM_BYTES * slot.at;
    barrier_wait(shared.items_empty + 8 * slot.at, slot.parity ^ 1);
    store_16(to, make_uint4(item.expert, item.first, item.rows, item.tile));
    store_16(to + 16, make_uint4(item.kind, item.block, 0, 0));
    barrier_arrive(shared.items_full + 8 * slot.at);
    slot.next();
}

__device__ __forceinline__ Item hear(const Shared& shared, Turn<SLOTS>& slot) {
    const u32 from = shared.items + ITEM_BYTES * slot.at;
    barrier_wait(shared.items_full + 8 * slot.at, slot.parity);
    const uint4 tile = load_16(from), what = load_16(from + 16);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared.items_empty + 8 * slot.at);
    slot.next();
    return Item{int(tile.x), int(tile.y), int(tile.z), int(tile.w), int(what.x), int(what.y)};
}

// ---- the producer warpgroup: one warp loads weights, three load rows

constexpr int GATHER_ROWS = 4;  // of a warp's copy: eight lanes a row of 128 bytes

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
        tell(shared, slot, item);
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
    tell(shared, slot, item);
}

// Wait until the activations of a tile are complete: both consumer warpgroups of every gate_up item count.
__device__ __forceinline__ void wait_for_tile(const Tile* tile, int blocks) {
    if (threadIdx.x % 32 == 0)
        while (load_acquire(&tile->done) < 2 * blocks) {
        }
    __syncwarp();
}

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
    for (Item item = hear(shared, slot); item.kind != NONE; item = hear(shared, slot)) {
        const int depth = work.depth(item);
        // copies of this warp; padding rows of the last copy repeat a valid row, and their sums are not
        // stored
        const int copies = (item.rows - warp * GATHER_ROWS + STRIDE - 1) / STRIDE;
        u32 sources[COPIES];  // in units of 16 bytes
#pragma unroll
        for (int j = 0; j < COPIES; ++j) {
            const int row = item.first + min(row_of_lane + j * STRIDE, item.rows - 1);
            sources[j] = 0;
            // -1: a row that no token has
            if (j < copies) sources[j] = item.kind == DOWN ? row : max(row_tokens[row], 0);
            sources[j] *= static_cast<u32>(depth / 8);
        }
        if (item.kind == DOWN) wait_for_tile(work.tiles + item.tile, work.gate_up_blocks);
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
#pragma unroll
        for (int step = 0; step < K_BLOCK / 16; ++step) {
            const bool add = k > 0 || step > 0;
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                product<N>(sums[part], a + part * 512 + step * OPERAND_STEP, b + step * OPERAND_STEP, add);
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
            multiply_rows<N + 8>(shared, turn, sums, depth, rows);
    }
}

// A piece of a warpgroup's output, staged in shared memory: [ROWS][CHANNELS].
template <bool DOWN>
struct Piece {
    static constexpr int CHANNELS = WEIGHT_ROWS / (DOWN ? 2 : 4), CHUNKS = CHANNELS / 8,
                         ROWS = DOWN ? 16 : 32;
    static_assert(ROWS * CHANNELS * 2 == PIECE_BYTES, "all of a buffer");

    // Swizzled offset of 16 bytes: eight rows of one chunk touch every bank once.
    static __device__ __forceinline__ u32 at(int row, int chunk) {
        return row * CHANNELS * 2 + (chunk ^ (CHUNKS == 4 ? row / 2 % 4 : row % 8)) * 16;
    }
};

// Matrices of 8 channels x 8 rows of the tile, one word of each a thread.
template <bool DOWN>
__device__ __forceinline__ void to_piece(u32 piece, const Sums& sums, int first_column) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        if constexpr (DOWN) {
            const float* d = sums[part] + first_column / 8 * 4;
            // low and high eight channels of the warp's 16, for two groups of eight rows
            const int row = lane % 8 + lane / 16 * 8, chunk = part * 8 + warp * 2 + lane / 8 % 2;
            store_transposed(piece + Piece<DOWN>::at(row, chunk), pack(d[0], d[1]), pack(d[2], d[3]),
                             pack(d[4], d[5]), pack(d[6], d[7]));
        } else {
            u32 words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                words[j] = 0;
                if (first_column + 8 * j >= MAX_N) continue;  // the last piece may hold less
                const float* d = sums[part] + (first_column / 8 + j) * 4;
                words[j] = pack(silu_mul(d[0], d[2]), silu_mul(d[1], d[3]));
            }
            store_transposed(piece + Piece<DOWN>::at(lane, part * 4 + warp), words[0], words[1], words[2],
                             words[3]);
        }
    }
}

template <bool DOWN>
__device__ __forceinline__ void write(const Shared& shared, const Sums& sums, u16* out, const Item& item,
                                      int width, int* done) {
    using Part = Piece<DOWN>;
    const int thread = threadIdx.x % 128, group = threadIdx.x / 128 - 1;
    const int channel = (item.block * 2 + group) * Part::CHANNELS;
    int buffer = 0;
#pragma unroll
    for (int first = 0; first < MAX_N; first += Part::ROWS) {
        if (first < item.rows) {
            const u32 piece = shared.pieces + (group * 2 + buffer) * PIECE_BYTES;
            to_piece<DOWN>(piece, sums, first);
            named_sync(1 + group, 128);
#pragma unroll
            for (int i = thread; i < Part::ROWS * Part::CHUNKS; i += 128) {
                const int row = i / Part::CHUNKS, chunk = i % Part::CHUNKS;
                if (first + row < item.rows && channel + chunk * 8 < width) {
                    u16* to = out + static_cast<u64>(item.first + first + row) * width + channel + chunk * 8;
                    *reinterpret_cast<uint4*>(to) = load_16(piece + Part::at(row, chunk));
                }
            }
            buffer ^= 1;
        }
    }
    // the barrier of one buffer orders reuse of the other; after the last, all of act is written
    named_sync(1 + group, 128);
    if (!DOWN && thread == 0) add_release(done, 1);
}

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

    const Work work(tiles, *num_tiles, H, I);
    if (threadIdx.x < 128) {
        give_registers<88>();
        if (threadIdx.x == 0) load_weights(shared, &gate_up, &down, work, num_tiles + 1);
        if (threadIdx.x >= 32) load_rows(shared, hidden, act, row_tokens, work);
    } else {
        take_registers<208>();
        Turn<STAGES> turn;
        Turn<SLOTS> slot;
        Sums sums;
        for (Item item = hear(shared, slot); item.kind != NONE; item = hear(shared, slot)) {
            multiply_rows<8>(shared, turn, sums, work.depth(item), item.rows);
            if (item.kind == DOWN)
                write<true>(shared, sums, out, item, H, nullptr);
            else
                write<false>(shared, sums, act, item, I, &tiles[item.tile].done);
        }
    }
}
