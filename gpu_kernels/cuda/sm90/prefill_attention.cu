// SPDX-License-Identifier: Apache-2.0
// Causal attention of packed prompts, whole or in chunks, to their cached keys; heads of 128 elements.
//
// | argument     | shape                                | dtype      |                                          |
// |--------------|--------------------------------------|------------|------------------------------------------|
// | keys, values | (128, capacity, KV, rows), or PAGE   | bf16, fp16 | tensor maps, innermost dimension first;  |
// |              | > 0: (128, PAGE, KV, pages)          |            | 64 by BOX a box                          |
// | pages        | [rows, capacity / PAGE]              | int32      | PAGE > 0: pages of each row, in order    |
// | tiles        | [num_tiles, 4]                       | int32      | up to 128 queries of a row: first token, |
// |              |                                      |            | queries, position of the first, row      |
// | q            | [T, KV * GROUP, 128]                 | as keys    | packed; row-major, 16 bytes              |
// | out          | as q                                 | as keys    | out                                      |
//
// scale: softmax scale times log2(e). Query i of a tile whose first position is p attends to keys 0 .. p + i
// of its row, which are in the cache. Tiles without queries are skipped.
//
// Threads: 384: one producer warpgroup, two consumer warpgroups of 64 queries each. Blocks: as many as are
// resident. A work item is a tile times a head. Tiles come sorted by descending number of keys. Blocks take
// items in a snake order (forwards, then backwards), which balances the load. A consumer issues the scores of
// the next 128 keys before the softmax of the last ones, across items too. The two consumers alternate, so
// that the tensor cores always have work. Keys run from last to first, since only the last block needs a
// causal mask.
//
// Shared memory: two tiles [128, 128] each of queries, keys and values, in halves of 64 columns with 128-byte
// swizzle; barriers. Online softmax in fp32 (https://arxiv.org/abs/2205.14135,
// https://arxiv.org/abs/2407.08608).
#include "sm90/ptx.cuh"
#include "sm90/ring.cuh"
#include "sm90/softmax.cuh"
#include "sm90/wgmma.cuh"

#ifndef PAGE
#define PAGE 0
#endif
#ifndef GROUP
#define GROUP 8
#endif

constexpr int D = 128, TILE = 128;        // queries, and keys
constexpr int ROOM = PAGE ? PAGE : TILE;  // keys that lie together
constexpr int BOX = ROOM < TILE ? ROOM : TILE;
constexpr int HALF_BYTES = TILE * 128, TILE_BYTES = 2 * HALF_BYTES;
constexpr int QUERY_LOADERS = 96, MULTIPLIERS = 256;
static_assert(ROOM % BOX == 0 && TILE % BOX == 0 && BOX % 8 == 0, "pages of whole swizzle atoms");

enum Barrier { QUERIES, KEYS = 2, VALUES = 4, BARRIERS = 6 };

struct Shared {
    u32 queries, keys, values, barriers;

    __device__ __forceinline__ explicit Shared(const void* memory) {
        queries = (shared_address(memory) + 1023) / 1024 * 1024;
        keys = queries + 2 * TILE_BYTES;
        values = keys + 2 * TILE_BYTES;
        barriers = values + 2 * TILE_BYTES;
    }
    __device__ __forceinline__ u32 full(int barrier) const { return barriers + 8 * barrier; }
    __device__ __forceinline__ u32 empty(int barrier) const { return barriers + 8 * (BARRIERS + barrier); }
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < BARRIERS; ++i) {
            barrier_init(full(i), i < KEYS ? QUERY_LOADERS : 1);
            barrier_init(empty(i), i < KEYS ? MULTIPLIERS : 2);
        }
        barrier_init_fence();
    }
};

// 16 bytes of a row of a tile in shared memory.
__device__ __forceinline__ u32 chunk_at(u32 tile, int row, int chunk) {
    return tile + chunk / 8 * HALF_BYTES + row * 128 + (chunk % 8 ^ row % 8) * 16;
}

struct Item {
    int first, queries, past, row;  // of the tile
    int head;

    __device__ __forceinline__ int keys() const { return past + queries; }
    __device__ __forceinline__ int last_block() const { return (keys() - 1) / TILE; }
};

// The work items of this block, in order.
struct Items {
    const int4* tiles;
    int count, heads, round = 0;

    __device__ __forceinline__ Items(const int4* tiles, int num_tiles, int heads)
        : tiles(tiles), count(num_tiles * heads), heads(heads) {}

    __device__ __forceinline__ bool next(Item& item) {
        const int blocks = gridDim.x, block = blockIdx.x;
        while (round * blocks < count) {
            const int i = round * blocks + (round % 2 ? blocks - 1 - block : block);
            ++round;
            if (i >= count) continue;
            const int4 tile = tiles[i / heads];
            if (tile.y == 0) continue;
            item = Item{tile.x, tile.y, tile.z, tile.w, i % heads};
            return true;
        }
        return false;
    }
};

// ---- the producer warpgroup: one thread loads keys and values, three warps load queries

// Where the keys of a block lie: a row of the cache, or a page for each box.
struct Places {
    int row[TILE / BOX];

    // Read before a wait, so that the wait hides the latency of the table.
    __device__ __forceinline__ Places(const int* table, int pages_a_row, int block, const Item& item) {
#pragma unroll
        for (int part = 0; part < TILE / BOX; ++part)  // keys past the last page are masked
            row[part] = PAGE ? table[min((block * TILE + part * BOX) / ROOM, pages_a_row - 1)] : item.row;
    }
};

__device__ __forceinline__ void load_block(u32 to, u32 full, const TensorMap* map, const Places& places,
                                           int block, const Item& item) {
    barrier_arrive_expect(full, TILE_BYTES);
#pragma unroll
    for (int part = 0; part < TILE / BOX; ++part) {
        const int key = block * TILE + part * BOX;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            tensor_load_4d(to + half * HALF_BYTES + part * BOX * 128, map, full, half * 64,
                           PAGE ? key % ROOM : key, item.head / GROUP, places.row[part]);
    }
}

__device__ __forceinline__ void load_keys(const Shared& shared, const TensorMap* keys,
                                          const TensorMap* values, const int* pages, int pages_a_row,
                                          Items items) {
    Turn<2> k, v;
    Item item;
    while (items.next(item)) {
        const int* table = pages + static_cast<u64>(item.row) * pages_a_row;
        // values are consumed one step after their keys
        Places ahead(table, pages_a_row, item.last_block(), item), behind = ahead;
        for (int block = item.last_block(); block >= -1; --block) {
            const Places next(table, pages_a_row, max(block - 1, 0), item);
            if (block >= 0) {
                barrier_wait(shared.empty(KEYS + k.at), k.parity ^ 1);
                load_block(shared.keys + k.at * TILE_BYTES, shared.full(KEYS + k.at), keys, ahead, block,
                           item);
                k.next();
            }
            if (block < item.last_block()) {
                barrier_wait(shared.empty(VALUES + v.at), v.parity ^ 1);
                load_block(shared.values + v.at * TILE_BYTES, shared.full(VALUES + v.at), values, behind,
                           block + 1, item);
                v.next();
            }
            behind = ahead;
            ahead = next;
        }
    }
}

__device__ __forceinline__ void load_queries(const Shared& shared, const uint4* q, Items items) {
    Turn<2> turn;
    Item item;
    while (items.next(item)) {
        barrier_wait(shared.empty(QUERIES + turn.at), turn.parity ^ 1);
        for (int i = threadIdx.x - 32; i < TILE * 16; i += QUERY_LOADERS) {
            // padding queries repeat the last one
            const u64 token = item.first + min(i / 16, item.queries - 1);
            copy_16(chunk_at(shared.queries + turn.at * TILE_BYTES, i / 16, i % 16),
                    q + (token * items.heads + item.head) * 16 + i % 16);
        }
        copies_commit();
        copies_wait<0>();
        fence_async_proxy();
        barrier_arrive(shared.full(QUERIES + turn.at));
        turn.next();
    }
}

// ---- the consumer warpgroups

__device__ __forceinline__ void multiply_keys(Sums& scores, u32 queries, u32 keys) {
    const u64 a = operand(queries), b = operand(keys);
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
        const u64 offset = step / 4 * (HALF_BYTES / 16) + step % 4 * OPERAND_STEP;
        product<TILE>(scores, a + offset, b + offset, step > 0);
    }
    products_commit();
}

__device__ __forceinline__ void multiply_values(Sums& out, const Weights& weights, u32 values, bool add) {
    const u64 b = columns(values, HALF_BYTES);
#pragma unroll
    for (int step = 0; step < TILE / 16; ++step)
        product_of_registers(out, weights + 4 * step, b + step * COLUMNS_STEP, add || step > 0);
    products_commit();
}

// Zero the values past the last key: they may hold NaN, and 0 * NaN is NaN.
__device__ __forceinline__ void clear_values(u32 values, int from, int group) {
    for (int i = from * 16 + threadIdx.x % 128; i < TILE * 16; i += 128)
        store_16(chunk_at(values, i / 16, i % 16), make_uint4(0, 0, 0, 0));
    fence_async_proxy();
    named_sync(1 + group, 128);
}

// The output is staged in the shared memory of the item's queries, after their last use.
__device__ __forceinline__ void write(u32 tile, int group, const Sums& sums, uint4* out, const Item& item,
                                      int heads) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    named_sync(1 + group, 128);
    const int row = group * 64 + warp * 16 + lane % 16;
#pragma unroll
    for (int chunk = 0; chunk < 16; chunk += 2) {
        const float* d = sums + chunk * 4;
        store_matrices(chunk_at(tile, row, chunk + lane / 16), pack(d[0], d[1]), pack(d[2], d[3]),
                       pack(d[4], d[5]), pack(d[6], d[7]));
    }
    named_sync(1 + group, 128);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int row = group * 64 + i * 8 + thread / 16, chunk = thread % 16;
        if (row < item.queries)
            out[(static_cast<u64>(item.first + row) * heads + item.head) * 16 + chunk] =
                load_16(chunk_at(tile, row, chunk));
    }
}

__device__ __forceinline__ void release(u32 empty) {
    if (threadIdx.x % 128 == 0) barrier_arrive(empty);
}

// The two consumer warpgroups alternate; the first begins.
struct Turns {
    int group;

    __device__ __forceinline__ explicit Turns(int group) : group(group) {
        if (group == 1) named_arrive(3, MULTIPLIERS);
    }
    __device__ __forceinline__ void begin() const { named_sync(3 + group, MULTIPLIERS); }
    __device__ __forceinline__ void end() const { named_arrive(4 - group, MULTIPLIERS); }
    // waits and arrivals must balance before exit
    __device__ __forceinline__ void over() const {
        if (group == 0) begin();
    }
};

__device__ __forceinline__ void attend(const Shared& shared, uint4* out, float scale, Items items) {
    const int group = threadIdx.x / 128 - 1, half = group * 64 * 128;
    const int own =
        group * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;  // query of a thread's first row
    const Turns turns(group);
    Turn<2> q, k, v;
    Item item{};
    Sums scores, sums;
    Weights weights;
    Softmax softmax;
    bool more = items.next(item), first = true;
    int block = item.last_block();
    if (more) {
        barrier_wait(shared.full(QUERIES), 0);
        barrier_wait(shared.full(KEYS), 0);
        turns.begin();
        products_begin();
        multiply_keys(scores, shared.queries + half, shared.keys);
        turns.end();
        products_wait<0>();
        here(scores);
        release(shared.empty(KEYS));
        k.next();
        hide(scores, block * TILE, item.past + own);
        softmax.add(scores, scale);
        round_weights(weights, scores);
    }
    while (more) {
        // the values of this block, and the keys of the next
        const bool ends = block == 0;
        Item next = item;
        Turn<2> next_q = q;
        int next_block = block - 1;
        if (ends) {
            more = items.next(next);
            next_block = next.last_block();
            next_q.next();
            if (more) barrier_wait(shared.full(QUERIES + next_q.at), next_q.parity);
        }
        if (more) barrier_wait(shared.full(KEYS + k.at), k.parity);
        turns.begin();
        products_begin();
        // after the last block: any keys, the scores are not used
        multiply_keys(scores, shared.queries + next_q.at * TILE_BYTES + half,
                      shared.keys + k.at * TILE_BYTES);
        const u32 values = shared.values + v.at * TILE_BYTES;
        barrier_wait(shared.full(VALUES + v.at), v.parity);
        if (first && item.keys() % TILE) clear_values(values, item.keys() % TILE, group);
        multiply_values(sums, weights, values, !first);
        turns.end();

        products_wait<1>();
        here(scores);
        float factors[2];
        if (ends) {
            softmax.finish(factors);
            softmax = Softmax();
        }
        if (more) {
            release(shared.empty(KEYS + k.at));
            k.next();
            if ((next_block + 1) * TILE > next.past + group * 64 + 1)
                hide(scores, next_block * TILE, next.past + own);
        }
        softmax.add(scores, scale);
        softmax.is_here(scores, values);

        products_wait<0>();
        here(sums);
        here(scores);
        release(shared.empty(VALUES + v.at));
        v.next();
        if (ends) {
            scale_rows(sums, factors);
            write(shared.queries + q.at * TILE_BYTES, group, sums, out, item, items.heads);
            barrier_arrive(shared.empty(QUERIES + q.at));
        } else {
            scale_rows(sums, softmax.shrink);
        }
        round_weights(weights, scores);
        first = ends;
        item = next;
        block = next_block;
        q = next_q;
    }
    turns.over();
}

extern "C" __global__ void __launch_bounds__(384, 1)
    prefill_attention(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values,
                      const int* pages, const int4* tiles, const uint4* q, uint4* out, int num_tiles,
                      int heads, int pages_a_row, float scale) {
    const Shared shared(dynamic_memory());
    if (threadIdx.x == 0) {
        prefetch_map(&keys);
        prefetch_map(&values);
        shared.init();
    }
    __syncthreads();
    wait_for_predecessor();
    let_successor_start();

    const Items items(tiles, num_tiles, heads);
    if (threadIdx.x < 128) {
        give_registers<56>();
        if (threadIdx.x == 0) load_keys(shared, &keys, &values, pages, pages_a_row, items);
        if (threadIdx.x >= 32) load_queries(shared, q, items);
    } else {
        take_registers<216>();
        attend(shared, out, scale, items);
    }
}
