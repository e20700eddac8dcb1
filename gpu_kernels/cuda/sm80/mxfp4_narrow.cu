// SPDX-License-Identifier: Apache-2.0
// Sorted rows through MXFP4 experts in tiles of few rows, both products in one launch: act[row] =
// activation(x Wg_e^T, x Wu_e^T), x = hidden[row_tokens[row]]; out[row] = act[row] Wd_e^T + bd_e.
//
// | argument   | shape         | dtype | |
// |------------|---------------|-------|------------------------------------------------------------------|
// | gate_up_*  |               |       | blocks, scales, biases: as in mxfp4_few_gate_up                  |
// | down_*     |               |       | blocks, scales, biases: as in mxfp4_few_down                     |
// | hidden     | [T, H]        | bf16  | row-major, 16 bytes                                              |
// | row_tokens | [P]           | int32 |                                                                  |
// | tiles      | [bound]       | Tile  | of routing_sort, tile_rows = MAX_N; their done: 0                |
// | num_tiles  | [2]           | int32 | tiles in use; 0, counts the items that blocks took               |
// | act        | [P, I]        | bf16  | scratch; row-major, 16 bytes                                     |
// | out        | [P, H]        | bf16  | row-major, 16 bytes; only rows of tiles written                  |
//
// H and I are multiples of 32. Threads: 32 * WARPS. A block makes 64 weight rows of a tile at a time; its
// warps share the channels: each takes every WARPS-th chunk of 128. A warp copies what it multiplies itself,
// so warps meet twice an item: to see all its scales, and to add their sums. Blocks and items: as in
// grouped_mlp. Copies run on into the next item.
//
// Shared memory: WARPS rings of DEPTH stages: 64 rows of 64 bytes of weights, then MAX_N rows of 256 bytes of
// x. Then sums of all warps; scales of two items, SCALE_BYTES each; SLOTS items, and what they share.
#include "sm80/claims.cuh"
#include "sm80/mxfp4_tile.cuh"

#ifndef WARPS
#define WARPS 4
#endif
#ifndef MAX_N
#define MAX_N 8
#endif
#ifndef DEPTH
#define DEPTH 2
#endif
#ifndef BLOCKS
#define BLOCKS 3  // of a multiprocessor, at least
#endif

constexpr int GROUPS = (MAX_N + 7) / 8, STAGE_BYTES = 4096 + MAX_N * 256, RING_BYTES = DEPTH * STAGE_BYTES;
constexpr int SUMS_BYTES = WARPS * MAX_N * SUMS_STRIDE * 4, SLOTS = 4;
static_assert(MAX_N == 4 || MAX_N == 8 || MAX_N == 16, "sums of more rows would leave too few blocks");

// A warp's copies: 16 bytes of eight rows of weights a lane, and of some rows of x.
struct Ring {
    const Work& work;
    const Mlp& given;
    Item* items;
    u32 ring, scales;  // scales: of an even item
    int scale_bytes;   // to those of an odd item

    u64 weights, x;          // addresses, of the next chunk
    u32 tile, high;          // bytes to the rows of the next product, and to its high rows
    bool both;               // high rows exist
    int x_bytes;             // of a row in memory
    int rows;                // of x, to copy, from this lane's on
    int group, channel;      // of the next chunk: this lane's group of weights, and its first channel of x
    int groups;              // of the item
    int index[MAX_N / 2];    // rows of x
    int left = 0;            // chunks of this item that this warp has not requested
    int item = 0;            // that is prepared next
    int at = 0;              // bytes from the ring to the stage that is filled next
    int missing = 0;         // requests that have to wait until the next item is known
    int claimed;             // thread 0: the item after the next
    Item::OfTile looked_up;  // thread 0: to be written to its slot
    bool pending = false, down = false, ended = false;

    __device__ __forceinline__ Ring(const Work& work, const Mlp& given, Item* items, u32 ring, u32 scales,
                                    int scale_bytes)
        : work(work), given(given), items(items), ring(ring), scales(scales), scale_bytes(scale_bytes) {
        work.claim_first(items, claimed);
    }

    // Whose turn the first chunk is changes from item to item: else some warps would always have more.
    __device__ __forceinline__ static int turn(int item) { return (threadIdx.x / 32 + item) % WARPS; }
    // This warp's chunks of an item; at least one, which may be zeros.
    __device__ __forceinline__ int chunks_of(int kind, int item) const {
        const int chunks = ((kind == DOWN ? given.I : given.H) + CHUNK - 1) / CHUNK;
        return max((chunks - turn(item) + WARPS - 1) / WARPS, 1);
    }

    // The addresses of the next item, and copies of its scales. Thread 0 looks up the item after it.
    __device__ __forceinline__ void prepare() {
        const Item next = items[item % SLOTS];
        if (next.kind == NONE || (next.kind == DOWN && !down)) {
            ended = true;
            return;
        }
        const int first = turn(item), lane = threadIdx.x % 32;
        left = chunks_of(next.kind, item);
        const u32 to = scales + item % 2 * scale_bytes;
        ++item;
        if (threadIdx.x == 0) {
            Item& after = items[item % SLOTS];
            work.place(after, claimed);
            looked_up = work.look_up(after);
            pending = true;
            after.ready = after.kind == DOWN && work.complete(after.tile);
            claimed = work.claim();
        }
        const bool is_down = next.kind == DOWN;
        const Rows of(given, is_down, next.of.expert, next.block * 64);
        groups = of.depth / 32;
        tile = 2 * of.step * (of.depth / 2);
        high = of.to_high * (of.depth / 2);
        both = of.valid >= 64;
        group = 4 * first + lane % 4;
        channel = CHUNK * first + lane % 16 * 8;
        weights = of.weights(given, is_down, lane / 4, group);
        of.copy_scales(given, is_down, to, 32 * WARPS);

        rows = next.of.rows - lane / 16;
        x_bytes = of.depth * 2;
        x = reinterpret_cast<u64>((is_down ? given.act : given.hidden) + channel);
#pragma unroll
        for (int i = 0; i < MAX_N / 2; ++i) {
            index[i] = next.of.first + lane / 16 + 2 * i;
            if (!is_down && 2 * i < rows) index[i] = given.row_tokens[index[i]];
        }
        work.wait_for_activations(next);
    }

    // Copies of one more chunk, while the block computes item `computing`.
    __device__ __forceinline__ void request(int computing) {
        while (left <= 0 && !ended) {
            if (item > computing + 1) {
                ++missing;
                return;
            }
            prepare();
        }
        if (left > 0) {
            const u32 stage = ring + at;
            const int lane = threadIdx.x % 32;
            const u64 policy = evict_first();
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (i % 2 == 0 || both)
                    copy_16_or_zeros(
                        stage + i * 512 + lane * 16,
                        reinterpret_cast<const void*>(weights + (i / 2) * static_cast<u64>(tile) +
                                                      i % 2 * static_cast<u64>(high)),
                        group < groups, policy);
            const u32 to_row = stage + 4096 + place_of_row(lane / 16, lane % 16);
#pragma unroll
            for (int i = 0; i < MAX_N / 2; ++i)
                if (2 * i < rows)
                    copy_16_or_zeros(to_row + i * 512,
                                     reinterpret_cast<const void*>(row_at(x, index[i], x_bytes)),
                                     channel < groups * 32);
            weights += 64 * WARPS;
            x += 256 * WARPS;
            group += 4 * WARPS;
            channel += CHUNK * WARPS;
            --left;
            at = at + STAGE_BYTES == RING_BYTES ? 0 : at + STAGE_BYTES;
        }
        copies_commit();
    }

    // Whether one of the scales that this thread copied for an item is large.
    __device__ __forceinline__ bool copied_large(const Item& of, const unsigned char* scales) const {
        const int depth = of.kind == DOWN ? given.I : given.H;
        const int valid = (of.kind == DOWN ? given.H : 2 * given.I) - of.block * 64;
        const uint4* words = reinterpret_cast<const uint4*>(scales);
        u32 all = 0;
        for (int i = threadIdx.x; i < min(valid, 64) * (depth / 32) / 16; i += 32 * WARPS)
            all |= words[i].x | words[i].y | words[i].z | words[i].w;
        return is_large(all);
    }

    // A phase's first requests. computing: its first item.
    __device__ __forceinline__ void start(int computing) {
        ended = false;
        missing = left = at = 0;
        prepare();
        publish();
        __syncthreads();
        for (int i = 0; i < DEPTH; ++i) request(computing);
    }

    // The item that thread 0 looked up is visible to all after the next barrier.
    __device__ __forceinline__ void publish() {
        if (!pending) return;
        items[item % SLOTS].of = looked_up;
        pending = false;
    }
    // As Claims have it.
    __device__ __forceinline__ void made(int tile) const { work.made(tile); }
};

// The products of an item, from stage `here` of the ring on. done: a tile of whose activations the item
// before made a part, or -1.
template <int G>
__device__ __forceinline__ void run(Ring& ring, int& here, int computing, int done, const Item& item,
                                    const unsigned char* scales, float* sums_of_all) {
    Sums<G> sums;
    clear<G>(sums);
    for (int waiting = ring.missing; waiting > 0; --waiting) {
        --ring.missing;
        ring.request(computing);
    }
    const bool is_down = item.kind == DOWN;
    const ScalesHere of_scales(ring.given, is_down);
    const unsigned char* stages = dynamic_memory() + threadIdx.x / 32 * RING_BYTES;
    const int chunks = ring.chunks_of(item.kind, computing);
    bool large = false;
    for (int i = 0; i < chunks; ++i) {
        if (ring.missing > 0)
            copies_wait<0>();
        else
            copies_wait<DEPTH - 1>();
        if (i == 0) {
            // all warps' copies of scales have landed
            large = __syncthreads_or(ring.copied_large(item, scales));
            // at the barrier all activations of the item before were written
            if (done >= 0) ring.made(done);
        } else {
            __syncwarp();
        }
        const unsigned char* stage = stages + here;
        const int c = Ring::turn(computing) + WARPS * i;
        if (large)
            multiply_chunk<G, MAX_N, true>(sums, stage, stage + 4096, scales, of_scales, c);
        else
            multiply_chunk<G, MAX_N, false>(sums, stage, stage + 4096, scales, of_scales, c);
        __syncwarp();
        ring.request(computing);
        here = here + STAGE_BYTES == RING_BYTES ? 0 : here + STAGE_BYTES;
    }
    ring.publish();
    // by chunks, not by warps: so the order of sums is the same whatever items the block had before
    keep<G, MAX_N>(sums, sums_of_all + Ring::turn(computing) * (MAX_N * SUMS_STRIDE), item.of.rows);
    __syncthreads();
    write_kept<WARPS, MAX_N>(sums_of_all, item, ring.given);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    mxfp4_narrow(const unsigned char* gate_up_blocks, const unsigned char* gate_up_scales,
                 const u16* gate_up_biases, const float* gate_up_biases32, const unsigned char* down_blocks,
                 const unsigned char* down_scales, const u16* down_biases, const float* down_biases32,
                 const u16* hidden, const int* row_tokens, Tile* tiles, int* num_tiles, u16* act, u16* out,
                 int H, int I, int row_step, int up_rows) {
    unsigned char* memory = dynamic_memory() + WARPS * RING_BYTES;
    float* sums_of_all = reinterpret_cast<float*>(memory);
    memory += SUMS_BYTES;
    unsigned char* scales = memory;
    const int scale_bytes = 2 * max(H, I);  // 64 rows of a byte for 32 channels
    memory += 2 * scale_bytes;
    Item* items = reinterpret_cast<Item*>(memory);
    Work& work = *reinterpret_cast<Work*>(items + SLOTS);
    wait_for_predecessor();
    let_successor_start();

    if (threadIdx.x == 0) work = Work(tiles, num_tiles, H, I, 64);
    __syncthreads();
    const Mlp given{gate_up_blocks,
                    gate_up_scales,
                    {gate_up_biases, gate_up_biases32},
                    down_blocks,
                    down_scales,
                    {down_biases, down_biases32},
                    hidden,
                    row_tokens,
                    act,
                    out,
                    H,
                    I,
                    row_step,
                    up_rows};
    Ring ring(work, given, items, shared_address(dynamic_memory()) + threadIdx.x / 32 * RING_BYTES,
              shared_address(scales), scale_bytes);
    int here;  // offset of the next stage
    each_item<SLOTS>(
        ring, items,
        [&](int n) {
            here = 0;
            ring.start(n);
        },
        [&](int n, const Item& item, int done) {
            const unsigned char* own_scales = scales + n % 2 * scale_bytes;
            if (GROUPS == 2 && item.of.rows > 8)
                run<GROUPS>(ring, here, n, done, item, own_scales, sums_of_all);
            else
                run<1>(ring, here, n, done, item, own_scales, sums_of_all);
        });
}
