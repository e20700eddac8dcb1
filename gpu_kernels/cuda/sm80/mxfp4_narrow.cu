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
// H and I are multiples of 32. Threads: 32 * WARPS. An item is a tile times 16 * WARPS weight rows. A warp
// makes 16 of them, from all channels: eight gate rows and the up rows of the same channels, or 16 down rows.
// It copies its weights itself, into a ring of its own; all copy x and scales. So warps meet once an item.
// Blocks and items: as in grouped_mlp. Copies run on into the next item.
//
// Shared memory: WARPS rings of DEPTH stages, each 16 rows of CHUNKS * 64 bytes; x of two items, of each row
// whole chunks of 256 bytes; scales of two items; SLOTS items, and what they share.
#include "common/activation.cuh"
#include "common/copies.cuh"
#include "sm80/items.cuh"
#include "sm80/mxfp4.cuh"

#ifndef WARPS
#define WARPS 16
#endif
#ifndef MAX_N
#define MAX_N 4
#endif
#ifndef CHUNKS
#define CHUNKS 2  // of 128 channels, in a stage: 2 or 4
#endif
#ifndef DEPTH
#define DEPTH 3
#endif
#ifndef BLOCKS
#define BLOCKS 1  // of a multiprocessor, at least
#endif

constexpr int THREADS = 32 * WARPS, ROWS = 16 * WARPS;  // of weights, of an item
constexpr int GROUPS = (MAX_N + 7) / 8, UNITS = 4 * CHUNKS, PASS = 32 / UNITS, PASSES = 16 / PASS;
constexpr int STAGE_BYTES = CHUNKS * 1024, RING_BYTES = DEPTH * STAGE_BYTES, SLOTS = 4;
static_assert(CHUNKS == 2 || CHUNKS == 4, "rows of 128 or 256 bytes");
static_assert(MAX_N == 4 || MAX_N % 8 == 0, "whole groups of 8 rows, or four rows twice");

struct Mlp {
    const unsigned char *gate_up_blocks, *gate_up_scales;
    Biases gate_up_biases;
    const unsigned char *down_blocks, *down_scales;
    Biases down_biases;
    const u16* hidden;
    const int* row_tokens;
    u16 *act, *out;
    int H, I, row_step, up_rows;
};

// Of 16 bytes, unit = 0 .. 4 * CHUNKS - 1, of a row of weights in a stage, and of word i of lane t of a chunk
// of x: two rows of four lanes touch every bank once.
__device__ __forceinline__ u32 place(int row, int unit) {
    return row * (UNITS * 16) + (unit ^ (CHUNKS == 4 ? row % 2 * 4 : 0)) * 16;
}
__device__ __forceinline__ int place_of_x(int row, int i, int t) { return (4 * i + t) ^ row % 2 * 4; }

// A block's shared memory: offsets.
struct Memory {
    int row_bytes, x, x_bytes, scales, scale_bytes, items;

    __device__ __forceinline__ Memory(int H, int I) {
        row_bytes = (max(H, I) + CHUNK - 1) / CHUNK * 256;
        x = WARPS * RING_BYTES;
        x_bytes = MAX_N * row_bytes;
        scales = x + 2 * x_bytes;
        scale_bytes = ROWS * max(H, I) / 32;
        items = scales + 2 * scale_bytes;
    }
};

// This thread's copies: 16 bytes of some rows of its warp's weights; of the block's x and scales.
struct Ring {
    const Work& work;
    const Mlp& given;
    const Memory& memory;
    Item* items;
    u32 ring;  // of this warp

    u64 low, high;           // addresses of weights, of the next stage
    u32 two;                 // bytes from one of this lane's low rows to the next
    int group;               // of this lane's next 16 bytes of weights
    int groups;              // of the item
    int even_units = 0, odd_units = 0;  // of scales of an even and an odd item, 16 bytes each
    int left = 0;            // stages of this item that this warp has not requested
    int item = 0;            // that is prepared next
    int at = 0;              // bytes from the ring to the stage that is filled next
    int missing = 0;         // requests that have to wait until the next item is known
    int claimed;             // thread 0: the item after the next
    Item::OfTile looked_up;  // thread 0: to be written to its slot
    bool own, pending = false, down = false, ended = false;

    __device__ __forceinline__ Ring(const Work& work, const Mlp& given, const Memory& memory, Item* items)
        : work(work), given(given), memory(memory), items(items) {
        ring = shared_address(dynamic_memory()) + threadIdx.x / 32 * RING_BYTES;
        if (threadIdx.x == 0) {
            work.place(items[0], work.claim());
            items[0].of = work.look_up(items[0]);
            items[0].ready = 0;
            claimed = work.claim();
        }
        __syncthreads();
    }

    __device__ __forceinline__ static int stages_of(int depth) {
        return (depth + CHUNK * CHUNKS - 1) / (CHUNK * CHUNKS);
    }

    // The addresses of the next item, and copies of its x and scales. Thread 0 looks up the item after it.
    __device__ __forceinline__ void prepare() {
        const Item next = items[item % SLOTS];
        if (next.kind == NONE || (next.kind == DOWN && !down)) {
            ended = true;
            return;
        }
        const int slot = item % 2;
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
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int depth = is_down ? given.I : given.H, R = is_down ? given.H : given.I;
        const int channels = is_down ? ROWS : ROWS / 2, channel = next.block * channels;
        const int step = is_down ? 1 : given.row_step;
        const u64 row = static_cast<u64>(next.of.expert) * (is_down ? R : 2 * R) + channel * step;
        const u32 row_bytes = depth / 2;
        groups = depth / 32;
        left = stages_of(depth);
        own = channel + warp * (channels / WARPS) < R;
        group = lane % UNITS;
        two = PASS * step * row_bytes;
        low = reinterpret_cast<u64>((is_down ? given.down_blocks : given.gate_up_blocks) +
                                    (row + (warp * (channels / WARPS) + lane / UNITS) * step) * row_bytes) +
              16 * group;
        high = low + static_cast<u64>(is_down ? 8 : given.up_rows) * row_bytes;

        // scales: halves are two runs of rows in memory
        const int runs = !is_down && step == 1 ? 2 : 1;
        const int run_rows = min(R - channel, channels) * step, units = run_rows * groups / 16;
        const unsigned char* scales = (is_down ? given.down_scales : given.gate_up_scales) + row * groups;
        const u32 to_scales = shared_address(dynamic_memory()) + memory.scales + slot * memory.scale_bytes;
        (slot ? odd_units : even_units) = runs * units;
        for (int i = threadIdx.x; i < runs * units; i += THREADS) {
            const int run = i >= units;
            copy_16(to_scales + i * 16,
                    scales + static_cast<u64>(run * given.up_rows) * groups + (i - run * units) * 16);
        }

        if (is_down && !next.ready) {
            if (lane == 0)
                while (!work.complete(next.tile)) {
                }
            __syncwarp();
        }
        // x: a warp takes every WARPS-th 32 units of a row
        const u16* x = is_down ? given.act : given.hidden;
        const u32 to_x = shared_address(dynamic_memory()) + memory.x + slot * memory.x_bytes;
        for (int n = 0; n < next.of.rows; ++n) {
            const int at = next.of.first + n;
            const u16* from = x + static_cast<u64>(is_down ? at : given.row_tokens[at]) * depth;
            for (int unit = threadIdx.x; unit < units_of_x(depth); unit += THREADS)
                copy_16_or_zeros(to_x + n * memory.row_bytes + unit_of_x(n, unit) * 16,
                                 from + min(unit * 8, depth - 8), unit * 8 < depth);
        }
    }
    __device__ __forceinline__ static int units_of_x(int depth) { return (depth + CHUNK - 1) / CHUNK * 16; }
    // Where eight channels of a row lie.
    __device__ __forceinline__ static int unit_of_x(int row, int unit) {
        return unit / 16 * 16 + place_of_x(row, unit % 4, unit / 4 % 4);
    }

    // When this thread's copies for an item have landed: its x, in the order of products. Whether one of its
    // scales is large.
    __device__ __forceinline__ bool permute(const Item& item, int slot) const {
        unsigned char* x = dynamic_memory() + memory.x + slot * memory.x_bytes;
        const int units = units_of_x(item.kind == DOWN ? given.I : given.H);
        for (int n = 0; n < item.of.rows; ++n)
            for (int unit = threadIdx.x; unit < units; unit += THREADS) {
                uint4* words = reinterpret_cast<uint4*>(x + n * memory.row_bytes) + unit_of_x(n, unit);
                *words = pairs_of(*words);
            }
        const uint4* scales =
            reinterpret_cast<const uint4*>(dynamic_memory() + memory.scales + slot * memory.scale_bytes);
        u32 all = 0;
        for (int i = threadIdx.x; i < (slot ? odd_units : even_units); i += THREADS)
            all |= scales[i].x | scales[i].y | scales[i].z | scales[i].w;
        return is_large(all);
    }

    // Copies of one more stage, while the block computes item `computing`.
    __device__ __forceinline__ void request(int computing) {
        while (left <= 0 && !ended) {
            if (item > computing + 1) {
                ++missing;
                return;
            }
            prepare();
        }
        if (left > 0) {
            const u32 to = ring + at;
            const int lane = threadIdx.x % 32;
            const u64 policy = evict_first();
            if (own)
#pragma unroll
                for (int i = 0; i < PASSES; ++i) {
                    const u64 first = i < PASSES / 2 ? low : high;
                    const u64 from = i % (PASSES / 2) ? row_at(first, i % (PASSES / 2), two) : first;
                    copy_16_or_zeros(to + place(i * PASS + lane / UNITS, lane % UNITS),
                                     reinterpret_cast<const void*>(from), group < groups, policy);
                }
            low += 64 * CHUNKS;
            high += 64 * CHUNKS;
            group += UNITS;
            --left;
            at = at + STAGE_BYTES == RING_BYTES ? 0 : at + STAGE_BYTES;
        }
        copies_commit();
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

// 16 rows by 128 channels. x: chunk of the first row.
template <int G, bool LARGE>
__device__ __forceinline__ void multiply_chunk(float (&sums)[2][G][4], const uint4& low, const uint4& high,
                                               u32 low_scale, u32 high_scale, const unsigned char* x,
                                               int row_bytes) {
    const int row = threadIdx.x % 32 / 4 % MAX_N, t = threadIdx.x % 4;
    uint4 b[4][G];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < G; ++j)
            b[i][j] = reinterpret_cast<const uint4*>(x + j * 8 * row_bytes)[place_of_x(row, i, t)];
    const Factor by_low = Factor::of<LARGE>(low_scale), by_high = Factor::of<LARGE>(high_scale);
#pragma unroll
    for (int i = 0; i < 4; ++i)
        multiply_word<LARGE, G>(sums[i % 2], word_of(low, i), word_of(high, i), by_low, by_high, b[i]);
}

// 16 rows by the chunks of stage s. scales: of the low row; x: of the first row.
template <int G, bool LARGE>
__device__ __forceinline__ void multiply_stage(float (&sums)[2][G][4], const unsigned char* stage,
                                               const unsigned char* scales, int high_scales, int groups, int s,
                                               const unsigned char* x, int row_bytes) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    uint4 words[CHUNKS][2];
    u32 of[CHUNKS][2];
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            words[j][h] = *reinterpret_cast<const uint4*>(stage + place(lane / 4 + 8 * h, 4 * j + t));
            of[j][h] = scales[min(4 * (s * CHUNKS + j) + t, groups - 1) + h * high_scales];
        }
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) {
        const int c = s * CHUNKS + j;
        if (4 * c >= groups) break;
        multiply_chunk<G, LARGE>(sums, words[j][0], words[j][1], of[j][0], of[j][1], x + c * 256, row_bytes);
    }
}

// A lane's sums: of row lane / 4, columns 2 * (lane % 4) and the next; then of row lane / 4 + 8.
template <int G>
__device__ __forceinline__ void write(const float (&sums)[2][G][4], const Item& item, const Mlp& given) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool is_down = item.kind == DOWN;
    const int width = is_down ? given.H : given.I;
    const int channel = item.block * (is_down ? ROWS : ROWS / 2) + warp * (is_down ? 16 : 8) + lane / 4;
    const int step = is_down ? 1 : given.row_step, to_high = is_down ? 8 : given.up_rows;
    const Biases biases{is_down ? given.down_biases.bf16 : given.gate_up_biases.bf16,
                        is_down ? given.down_biases.fp32 : given.gate_up_biases.fp32};
    const u64 row = static_cast<u64>(item.of.expert) * (is_down ? width : 2 * width) + channel * step;
    const float low_bias = biases[row], high_bias = biases[row + to_high];
    u16* to = (is_down ? given.out : given.act) + static_cast<u64>(item.of.first) * width + channel;
#pragma unroll
    for (int j = 0; j < G; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int n = 8 * j + lane % 4 * 2 + i;
            if (n >= item.of.rows) continue;
            const float low = sums[0][j][i] + sums[1][j][i] + low_bias;
            const float high = sums[0][j][2 + i] + sums[1][j][2 + i] + high_bias;
            u16* here = to + static_cast<u64>(n) * width;
            here[0] = static_cast<u16>(pack(is_down ? low : activated(low, high), 0.0f));
            if (is_down) here[8] = static_cast<u16>(pack(high, 0.0f));
        }
}

// The products of an item, from stage `here` of the ring on. done: a tile of whose activations the item
// before made a part, or -1.
template <int G>
__device__ __forceinline__ void run(Ring& ring, int& here, int computing, int done, const Item& item) {
    const bool is_down = item.kind == DOWN;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int depth = is_down ? ring.given.I : ring.given.H, groups = depth / 32;
    const int step = is_down ? 1 : ring.given.row_step;
    const int channels = is_down ? 16 : 8, row = warp * channels + lane / 4;
    const int width = is_down ? ring.given.H : ring.given.I;
    const bool own = item.block * (channels * WARPS) + warp * channels < width;
    // in memory order: interleaved rows, or the item's gate rows before its up rows
    const int gate_rows = min(width - item.block * (channels * WARPS), channels * WARPS);
    const unsigned char* scales =
        dynamic_memory() + ring.memory.scales + computing % 2 * ring.memory.scale_bytes + row * step * groups;
    const int high_scales = (is_down ? 8 : step == 2 ? 1 : gate_rows) * groups;
    const unsigned char* x = dynamic_memory() + ring.memory.x + computing % 2 * ring.memory.x_bytes +
                             lane / 4 % MAX_N * ring.memory.row_bytes;
    const unsigned char* stages = dynamic_memory() + warp * RING_BYTES;
    float sums[2][G][4] = {};
    bool large = false;
    const int count = Ring::stages_of(depth);
#pragma unroll 1
    for (int s = 0; s < count; ++s) {
        if (ring.missing > 0)
            copies_wait<0>();
        else
            copies_wait<DEPTH - 1>();
        if (s == 0) {
            // all copies and activations of this item are there
            large = __syncthreads_or(ring.permute(item, computing % 2));
            if (done >= 0 && threadIdx.x == 0) add_release(&ring.work.tiles[done].done, 1);
            for (int waiting = ring.missing; waiting > 0; --waiting) {
                --ring.missing;
                ring.request(computing);
            }
        }
        __syncwarp();
        if (own && large)
            multiply_stage<G, true>(sums, stages + here, scales, high_scales, groups, s, x, ring.memory.row_bytes);
        else if (own)
            multiply_stage<G, false>(sums, stages + here, scales, high_scales, groups, s, x, ring.memory.row_bytes);
        __syncwarp();
        ring.request(computing);
        here = here + STAGE_BYTES == RING_BYTES ? 0 : here + STAGE_BYTES;
    }
    ring.publish();
    if (own) write<G>(sums, item, ring.given);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    mxfp4_narrow(const unsigned char* gate_up_blocks, const unsigned char* gate_up_scales,
                 const u16* gate_up_biases, const float* gate_up_biases32, const unsigned char* down_blocks,
                 const unsigned char* down_scales, const u16* down_biases, const float* down_biases32,
                 const u16* hidden, const int* row_tokens, Tile* tiles, int* num_tiles, u16* act, u16* out,
                 int H, int I, int row_step, int up_rows) {
    const Memory memory(H, I);
    Item* items = reinterpret_cast<Item*>(dynamic_memory() + memory.items);
    Work& work = *reinterpret_cast<Work*>(items + SLOTS);
    wait_for_predecessor();
    let_successor_start();

    if (threadIdx.x == 0) work = Work(tiles, num_tiles, H, I, ROWS);
    __syncthreads();
    const Mlp given{gate_up_blocks, gate_up_scales, {gate_up_biases, gate_up_biases32},
                    down_blocks,    down_scales,    {down_biases, down_biases32},
                    hidden,         row_tokens,     act,            out,         H,           I,
                    row_step,       up_rows};
    Ring ring(work, given, memory, items);
    int computing = 0, done = -1;
    for (;; ring.down = true) {
        int here = 0;
        ring.start(computing);
        for (;; ++computing) {
            const Item& item = items[computing % SLOTS];
            if (item.kind == NONE || (item.kind == DOWN && !ring.down)) break;
            if (GROUPS > 1 && item.of.rows > 8)
                run<GROUPS>(ring, here, computing, done, item);
            else
                run<1>(ring, here, computing, done, item);
            done = item.kind == GATE_UP ? item.tile : -1;
        }
        copies_wait<0>();
        __syncthreads();
        if (done >= 0 && threadIdx.x == 0) add_release(&tiles[done].done, 1);
        done = -1;
        if (items[computing % SLOTS].kind == NONE) return;
    }
}
