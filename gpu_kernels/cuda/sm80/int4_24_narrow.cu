// Sorted rows through int4_24 experts in tiles of few rows, both products in one launch:
// act[row] = silu(x Wg_e^T) * (x Wu_e^T), x = hidden[row_tokens[row]]; out[row] = act[row] Wd_e^T.
//
// Arguments: as of int4_24_mlp. H and I are multiples of 64.
//
// Threads: 32 * WARPS. A block makes 64 weight rows of a tile at a time; its warps share the channels: each
// takes every WARPS-th pair of slabs of 64. A warp copies what it multiplies itself, so warps meet once an
// item, to add their sums. Blocks and items: as in grouped_mlp. Copies run on into the next item.
//
// Shared memory: WARPS rings of DEPTH stages of two slabs: 2 * 1,024 bytes of words, then 2 * MAX_N * 128
// bytes of rows. Then sums of all warps but the first; then SLOTS items, and what all items have in common.
#include "common/copies.cuh"
#include "sm80/int4_24_tile.cuh"

#ifndef WARPS
#define WARPS 4
#endif
#ifndef MAX_N
#define MAX_N 8
#endif
#ifndef DEPTH
#define DEPTH 3
#endif
#ifndef BLOCKS
#define BLOCKS 4  // of a multiprocessor, at least
#endif

constexpr int GROUPS = MAX_N / 8, STAGE_BYTES = 2 * (1024 + MAX_N * 128), RING_BYTES = DEPTH * STAGE_BYTES;
constexpr int SUMS_BYTES = (WARPS - 1) * GROUPS * 2048, SLOTS = 4;
static_assert(MAX_N == 8 || MAX_N == 16, "sums of more rows would leave too few blocks");

// A warp's copies: a lane copies two rows of words, and a chunk of some rows of x.
struct Ring {
    const Work& work;
    const Weights& given;
    const u16* hidden;
    const u16* act;
    const int* row_tokens;
    Item* items;
    u32 ring;

    u64 weights, x;        // addresses, of the next pair
    u32 slab, second;      // bytes to the next slab of words, and to the second row of words
    u32 to, to_second;     // in a stage
    int x_bytes;           // of a row in memory
    int rows;              // of x, to copy, from this lane's on
    int index[MAX_N / 4];  // rows of x
    int left = 0;          // slabs of this item from this warp's next pair on; 0 and below: all are requested
    int item = 0;          // that is prepared next
    int at = 0;            // bytes from the ring to the stage that is filled next
    int missing = 0;       // requests that have to wait until the next item is known
    int claimed;           // thread 0: the item after the next
    Item::OfTile looked_up;  // thread 0: to be written to its slot
    bool pending = false, down = false, ended = false;

    __device__ __forceinline__ Ring(const Work& work, const Weights& given, const u16* hidden, const u16* act,
                                    const int* row_tokens, Item* items, u32 ring)
        : work(work),
          given(given),
          hidden(hidden),
          act(act),
          row_tokens(row_tokens),
          items(items),
          ring(ring) {
        if (threadIdx.x == 0) {
            work.place(items[0], work.claim());
            items[0].of = work.look_up(items[0]);
            items[0].ready = 0;
            claimed = work.claim();
        }
        __syncthreads();
    }

    // Slabs from this warp's first pair on.
    __device__ __forceinline__ int slabs_of(int kind) const {
        return (kind == DOWN ? given.I : given.H) / 64 - threadIdx.x / 32 * 2;
    }

    // The addresses of the next item. Thread 0 looks up the one after it.
    __device__ __forceinline__ void prepare() {
        const Item next = items[item % SLOTS];
        if (next.kind == NONE || (next.kind == DOWN && !down)) {
            ended = true;
            return;
        }
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
        const int depth = is_down ? given.I : given.H, R = is_down ? given.H : 2 * given.I;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const bool pairs = !is_down && given.row_step == 2;  // gate and up rows take turns
        const int c = pairs ? lane / 2 : lane, high = pairs ? lane % 2 : 0;
        const int channel = next.block * (is_down ? 64 : 32) + c;
        const int row = is_down ? channel : channel * given.row_step + high * given.up_rows;
        const uint4* first = is_down ? given.w2 : given.w13;
        weights = reinterpret_cast<u64>(
            first + (static_cast<u64>(next.of.expert) * (depth / 64) + 2 * warp) * R + row);
        second = (is_down || pairs ? 32 : given.up_rows) * 16;
        slab = R * 16;
        to = place(c, high, is_down);
        to_second = pairs ? place(c + 16, high, is_down) : place(c, 1, is_down);
        left = slabs_of(next.kind);

        rows = next.of.rows - lane / 8;
        x_bytes = depth * 2;
        x = reinterpret_cast<u64>((is_down ? act : hidden) + warp * 128 + lane % 8 * 8);
#pragma unroll
        for (int i = 0; i < MAX_N / 4; ++i) {
            index[i] = next.of.first + lane / 8 + 4 * i;
            if (!is_down && 4 * i < rows) index[i] = row_tokens[index[i]];
        }
        if (is_down && !next.ready) {
            if (lane == 0)
                while (!work.complete(next.tile)) {
                }
            __syncwarp();
        }
    }

    // Copies of one more slab, while the block computes item `computing`.
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
            const u32 to_row = stage + 2048 + place_of_row(lane / 8, lane % 8);
            copy_words(stage, weights);
            if (left > 1) copy_words(stage + 1024, weights + slab);
#pragma unroll
            for (int i = 0; i < MAX_N / 4; ++i)
                if (4 * i < rows) {
                    const u64 from = row_at(x, index[i], x_bytes);
                    copy_16(to_row + i * 512, reinterpret_cast<const void*>(from));
                    if (left > 1)
                        copy_16(to_row + MAX_N * 128 + i * 512, reinterpret_cast<const void*>(from + 128));
                }
            weights += static_cast<u64>(slab) * (2 * WARPS);
            x += 256 * WARPS;
            left -= 2 * WARPS;
            at = at + STAGE_BYTES == RING_BYTES ? 0 : at + STAGE_BYTES;
        }
        copies_commit();
    }
    __device__ __forceinline__ void copy_words(u32 slab_to, u64 from) const {
        const u64 policy = evict_first();
        copy_16(slab_to + to, reinterpret_cast<const void*>(from), policy);
        copy_16(slab_to + to_second, reinterpret_cast<const void*>(from + second), policy);
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
};

// All warps' sums, to the first warp.
template <int G>
__device__ __forceinline__ void add_up(Sums<G>& sums, float4* memory) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr int EACH = G * 4;  // of four sums
    if (warp > 0)
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const float* four = sums[i / G][i % G];
            memory[((warp - 1) * EACH + i) * 32 + lane] = float4{four[0], four[1], four[2], four[3]};
        }
    __syncthreads();
    if (warp == 0)
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            float* own = sums[i / G][i % G];
#pragma unroll
            for (int w = 0; w < WARPS - 1; ++w) {
                const float4 four = memory[(w * EACH + i) * 32 + lane];
                own[0] += four.x;
                own[1] += four.y;
                own[2] += four.z;
                own[3] += four.w;
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) own[j] *= INTEGERS;
        }
    __syncthreads();
}

// The products of an item, from stage `here` of the ring on. FEW: the tile has up to 4 rows, in every second
// column.
template <int G, bool FEW>
__device__ __forceinline__ void run(Ring& ring, int& here, int computing, const Item& item, u16* act,
                                    u16* out, const Decoder& decoder, float4* memory) {
    Sums<G> sums;
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int j = 0; j < G; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][j][i] = 0.0f;
    const Lane lane(0, 0, FEW);
    for (int waiting = ring.missing; waiting > 0; --waiting) {
        --ring.missing;
        ring.request(computing);
    }
    const unsigned char* stages = dynamic_memory() + threadIdx.x / 32 * RING_BYTES;
    for (int left = ring.slabs_of(item.kind); left > 0; left -= 2 * WARPS) {
        if (ring.missing > 0)
            copies_wait<0>();
        else
            copies_wait<DEPTH - 1>();
        __syncwarp();
        const unsigned char* stage = stages + here;
#pragma unroll
        for (int s = 0; s < 2; ++s)
            if (s < left)
                multiply_slab<G, FEW>(sums, stage + 1024 * s, stage + 2048 + MAX_N * 128 * s, lane, decoder);
        __syncwarp();
        ring.request(computing);
        here = here + STAGE_BYTES == RING_BYTES ? 0 : here + STAGE_BYTES;
    }
    ring.publish();
    add_up<G>(sums, memory);
    if (threadIdx.x < 32) {
        write<G, FEW>(sums, item, item.block, 0, act, out, ring.given.H, ring.given.I);
        __syncwarp();
        if (threadIdx.x == 0 && item.kind == GATE_UP) add_release(&ring.work.tiles[item.tile].done, 1);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    int4_24_narrow(const uint4* w13, const uint4* w2, const u16* hidden, const int* row_tokens, Tile* tiles,
                   int* num_tiles, u16* act, u16* out, int H, int I, int row_step, int up_rows) {
    float4* memory = reinterpret_cast<float4*>(dynamic_memory() + WARPS * RING_BYTES);
    Item* items = reinterpret_cast<Item*>(dynamic_memory() + WARPS * RING_BYTES + SUMS_BYTES);
    wait_for_predecessor();
    let_successor_start();

    Work& work = *reinterpret_cast<Work*>(items + SLOTS);
    if (threadIdx.x == 0) work = Work(tiles, num_tiles, H, I, 64);
    __syncthreads();
    const Weights weights{w13, w2, row_step, up_rows, H, I};
    Ring ring(work, weights, hidden, act, row_tokens, items,
              shared_address(dynamic_memory()) + threadIdx.x / 32 * RING_BYTES);
    const Decoder decoder(H & 63);
    int computing = 0;
    for (;; ring.down = true) {
        int here = 0;
        ring.start(computing);
        for (;; ++computing) {
            const Item& item = items[computing % SLOTS];
            if (item.kind == NONE || (item.kind == DOWN && !ring.down)) break;
            if (GROUPS == 2 && item.of.rows > 8)
                run<GROUPS, false>(ring, here, computing, item, act, out, decoder, memory);
            else if (item.of.rows > 4)
                run<1, false>(ring, here, computing, item, act, out, decoder, memory);
            else
                run<1, true>(ring, here, computing, item, act, out, decoder, memory);
        }
        copies_wait<0>();
        __syncthreads();
        if (items[computing % SLOTS].kind == NONE) return;
    }
}
