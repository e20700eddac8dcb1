// Sorted rows through their MXFP4 experts, on the tensor cores of sm_90a, both products in one launch:
// act[row] = activation(x Wg_e^T + bg_e, x Wu_e^T + bu_e), x = hidden[row_tokens[row]];
// out[row] = act[row] Wd_e^T + bd_e. Weights become bf16 in registers; sums are fp32.
//
// | argument        | shape                        | dtype |                                                  |
// |-----------------|------------------------------|-------|--------------------------------------------------|
// | gate_up         | (H/2, 32, I/32, 2, E)        | uint8 | tensor map, innermost dimension first            |
// | down            | (I/2, 4, 2, H/8, E)          | uint8 | tensor map: channels, rows 2 r + s of eight      |
// | gate_up_scales  | [E, 2I, H/32]                | uint8 | row-major, 16 bytes                              |
// | down_scales     | [E, H, I/32]                 | uint8 | row-major, 16 bytes                              |
// | gate_up_bf16, gate_up_fp32 | [E, 2I]           |       | BIASED: the bias in its dtype; the other: null   |
// | down_bf16, down_fp32       | [E, H]            |       | as above                                         |
// | hidden          | [T, H in units]              | bf16  | of mxfp4_order                                   |
// | row_tokens      | [P]                          | int32 |                                                  |
// | tiles           | [bound]                      | Tile  | of routing_sort, tile_rows = MAX_N; their done: 0 |
// | num_tiles       | [2]                          | int32 | tiles in use; 0, counts the items that blocks took |
// | act             | [P, I in units]              | bf16  | scratch, in mxfp4_order's order; row-major, 16 bytes |
// | out             | [P, H]                       | bf16  | row-major, 16 bytes; only rows of tiles written  |
//
// H and I are multiples of 32; a unit is 128. A box of a tensor map is 256 channels by 128 rows, swizzled by
// 128 bytes; of gate_up by 16 gate rows of each 32 of 128, and the up rows of the same channels.
//
// Threads: 128 * (1 + GROUPS): a producer warpgroup, GROUPS consumer warpgroups. Blocks: BLOCKS per
// multiprocessor. A work item is a tile times WEIGHT_ROWS rows of its expert's weights; items.cuh says how
// blocks claim them. A down item starts when the activations of its tile are complete. The items that make
// them were claimed earlier and wait for nothing, so no deadlock is possible. Weights are the M side: a warp
// reads their bytes from shared memory and makes fragments of them. The rows of a tile are the N side: N is
// their number rounded up, at most MAX_N. READ_ONCE: weights are evicted from L2 first.
//
// Shared memory: WEIGHT_STAGES * (WEIGHT_ROWS x 256 channels), ROW_STAGES * (MAX_N rows x ROW_UNITS x 128
// channels), the scales of two items, two output buffers per consumer warpgroup, items, barriers. Weights and
// scales come through the copy engine; rows come through cp.async, since they are scattered. Producer:
// routing_sort, mxfp4_order. Consumer: combine.
#include "common/activation.cuh"
#include "sm80/mma.cuh"
#include "sm90/items.cuh"
#include "sm90/mxfp4.cuh"
#include "sm90/rows_out.cuh"
#include "sm90/wgmma.cuh"

#ifndef WEIGHT_ROWS
#define WEIGHT_ROWS 256
#endif
#ifndef MAX_N
#define MAX_N 128
#endif
#ifndef GROUPS
#define GROUPS 2
#endif
#ifndef BLOCKS
#define BLOCKS 1  // resident, a multiprocessor
#endif
#ifndef WEIGHT_STAGES
#define WEIGHT_STAGES 2
#endif
#ifndef ROW_STAGES
#define ROW_STAGES 2
#endif
#ifndef ROW_UNITS
#define ROW_UNITS 1
#endif
#ifndef SCALE_BYTES
#define SCALE_BYTES 11520  // of the scales of an item
#endif
#ifndef READ_ONCE
#define READ_ONCE 0
#endif
#ifndef INTERLEAVED
#define INTERLEAVED 0
#endif
#ifndef WARP_PRODUCTS
#define WARP_PRODUCTS 0
#endif
static_assert(MAX_N % (WARP_PRODUCTS ? 8 : 16) == 0 && MAX_N <= 192, "rows of a tile");
static_assert(WEIGHT_ROWS == 128 || WEIGHT_ROWS == 256, "rows of weights of an item");
static_assert(ROW_UNITS == 1 || ROW_UNITS == 2, "units of a stage of rows");
static_assert(WEIGHT_ROWS % (64 * GROUPS) == 0, "64 rows each");

constexpr int PARTS = WEIGHT_ROWS / 64 / GROUPS;  // products of 64 weight rows a warpgroup
constexpr int BOXES = WEIGHT_ROWS / 128, BOX_BYTES = 128 * 128;
constexpr int WEIGHT_BYTES = BOXES * BOX_BYTES;        // of a stage of weights
constexpr int HALF_BYTES = MAX_N * 128;                // rows of 64 channels
constexpr int ROW_BYTES = 2 * ROW_UNITS * HALF_BYTES;  // of a stage of rows
constexpr int RANGE = WEIGHT_ROWS / 8;                 // gate rows of an item in each 32
constexpr int GATHER_WARPS = 3;
constexpr int CONSUMERS = 4 * GROUPS;  // warps
constexpr int PRODUCER_REGISTERS = BLOCKS == 3   ? 48
                                   : BLOCKS == 2 ? (GROUPS == 1 ? 64 : 48)
                                   : GROUPS == 2 ? 72
                                                 : 80;
constexpr int CONSUMER_REGISTERS = BLOCKS == 3   ? 112
                                   : BLOCKS == 2 ? (GROUPS == 1 ? 184 : 96)
                                   : GROUPS == 2 ? 216
                                                 : 96;

struct Shared {
    u32 weights, rows, scales, pieces, weights_full, weights_empty, rows_full, rows_empty, scales_full,
        scales_empty;
    Items items;

    __device__ __forceinline__ explicit Shared(const void* memory) {
        weights = (shared_address(memory) + 1023) / 1024 * 1024;
        rows = weights + WEIGHT_STAGES * WEIGHT_BYTES;
        pieces = rows + ROW_STAGES * ROW_BYTES;
        scales = pieces + GROUPS * 2 * Piece<PARTS, true>::BYTES;
        weights_full = scales + 2 * SCALE_BYTES;
        weights_empty = weights_full + 8 * WEIGHT_STAGES;
        rows_full = weights_empty + 8 * WEIGHT_STAGES;
#if WARP_PRODUCTS
        rows_full = weights_full;
        rows_empty = weights_empty;
        scales_full = weights_empty + 8 * WEIGHT_STAGES;
#else
        rows_empty = rows_full + 8 * ROW_STAGES;
        scales_full = rows_empty + 8 * ROW_STAGES;
#endif
        scales_empty = scales_full + 16;
        items = Items(scales_empty + 16);
    }
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < WEIGHT_STAGES; ++i) {
            barrier_init(weights_full + 8 * i, WARP_PRODUCTS ? 1 + 32 * GATHER_WARPS : 1);
            barrier_init(weights_empty + 8 * i, CONSUMERS);
        }
        for (int i = 0; i < (WARP_PRODUCTS ? 0 : ROW_STAGES); ++i) {
            barrier_init(rows_full + 8 * i, 32 * GATHER_WARPS);
            barrier_init(rows_empty + 8 * i, CONSUMERS);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(scales_full + 8 * i, 1);
            barrier_init(scales_empty + 8 * i, CONSUMERS);
        }
        items.init(GATHER_WARPS + CONSUMERS);
        barrier_init_fence();
    }
};

__device__ __forceinline__ int units_of(int channels) { return (channels + UNIT - 1) / UNIT; }

// ---- the producer warpgroup: one warp loads weights and scales, three load rows

#if READ_ONCE
#define POLICY , policy
#else
#define POLICY
#endif

// Scales of an item's rows, as they lie: of gate_up RANGE gate rows of each of four times 32, and the up rows
// of the same channels, between them where the order is INTERLEAVED.
__device__ __forceinline__ void load_scales(u32 to, u32 full, const unsigned char* gate_up,
                                            const unsigned char* down, const Work& work, const Item& item) {
    const int pitch = work.depth(item) / 32;
    if (item.kind == DOWN) {
        const int row = item.block * WEIGHT_ROWS, rows = min(WEIGHT_ROWS, work.H - row);
        barrier_arrive_expect(full, rows * pitch);
        bytes_load(to, down + (static_cast<u64>(item.expert) * work.H + row) * pitch, rows * pitch, full);
        return;
    }
    const int first = item.block / (2 / BOXES) * UNIT, ranges = min(4, (work.I - first) / 32);
    const int within = BOXES == 1 ? item.block % 2 * 16 : 0;
    barrier_arrive_expect(full, ranges * 2 * RANGE * pitch);
    const unsigned char* expert = gate_up + static_cast<u64>(item.expert) * 2 * work.I * pitch;
    for (int i = 0; i < ranges; ++i) {
        const int row = first + 32 * i + within;
#if INTERLEAVED
        bytes_load(to + i * 2 * RANGE * pitch, expert + 2 * row * pitch, 2 * RANGE * pitch, full);
#else
        bytes_load(to + i * RANGE * pitch, expert + row * pitch, RANGE * pitch, full);
        bytes_load(to + (4 + i) * RANGE * pitch, expert + (work.I + row) * pitch, RANGE * pitch, full);
#endif
    }
}

__device__ __forceinline__ void load_weights(const Shared& shared, const TensorMap* gate_up,
                                             const TensorMap* down, const unsigned char* gate_up_scales,
                                             const unsigned char* down_scales, const Work& work, int* taken) {
    Turn<WEIGHT_STAGES> turn;
    Turn<2> scales;
    Turn<SLOTS> slot;
#if READ_ONCE
    const u64 policy = evict_first();
#endif
    // also the first: only resident blocks claim items, so a part of a GPU suffices
    Item item = work.item(atomicAdd(taken, 1)), next{};
    for (; item.kind != NONE; item = next) {
        shared.items.tell(slot, item);
        const int i = atomicAdd(taken, 1), depth = work.depth(item);
        barrier_wait(shared.scales_empty + 8 * scales.at, scales.parity ^ 1);
        load_scales(shared.scales + scales.at * SCALE_BYTES, shared.scales_full + 8 * scales.at,
                    gate_up_scales, down_scales, work, item);
        scales.next();
        for (int k = 0; k < depth; k += 2 * UNIT) {
            if (k == depth / 2 / (2 * UNIT) * (2 * UNIT)) next = work.item(i);  // early: hides the latency
            const u32 full = shared.weights_full + 8 * turn.at;
            barrier_wait(shared.weights_empty + 8 * turn.at, turn.parity ^ 1);
            barrier_arrive_expect(full, WEIGHT_BYTES);
#pragma unroll
            for (int box = 0; box < BOXES; ++box) {
                const u32 to = shared.weights + turn.at * WEIGHT_BYTES + box * BOX_BYTES;
                const int at = item.block * BOXES + box;  // of 128 rows
                if (item.kind == DOWN)
                    tensor_load_5d(to, down, full, k / 2, 0, 0, at * 16, item.expert POLICY);
                else
                    tensor_load_5d(to, gate_up, full, k / 2, at % 2 * 16, at / 2 * 4, 0, item.expert POLICY);
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
    Turn<ROW_STAGES> turn;
    Turn<SLOTS> slot;
    for (Item item = shared.items.hear(slot); item.kind != NONE; item = shared.items.hear(slot)) {
        const int units = units_of(work.depth(item));
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
            sources[j] *= static_cast<u32>(units * (UNIT / 8));
        }
        if (item.kind == DOWN) wait_for_tile(work.tiles + item.tile, GROUPS * work.gate_up_blocks);
        const uint4* from = reinterpret_cast<const uint4*>(item.kind == DOWN ? act : hidden) + chunk;
        for (int unit = 0; unit < units; unit += ROW_UNITS) {
            barrier_wait(shared.rows_empty + 8 * turn.at, turn.parity ^ 1);
            u32 to = shared.rows + turn.at * ROW_BYTES + row_of_lane * 128;
#pragma unroll
            for (int half = 0; half < 2 * ROW_UNITS; ++half, from += 8, to += HALF_BYTES) {
                if (half == 2 && unit + 1 == units) break;
#pragma unroll
                for (int j = 0; j < COPIES; ++j)
                    if (j < copies) copy_16(to + j * STRIDE * 128 + (j % 2 ? odd : even), from + sources[j]);
            }
            copies_arrive(shared.rows_full + 8 * turn.at);
            turn.next();
        }
    }
}

// ---- the consumer warpgroups

using Sums = float[PARTS][MAX_N / 2];  // of PARTS x 64 weight rows and N rows of the tile

// Where the two rows of this thread's fragments lie in a stage of weights and in the scales.
struct Place {
    u32 weights, second, part;             // bytes
    int scales, second_scale, part_scale;  // rows

    // Fragment rows g and g + 8 of a warp: of down those rows, swapped so that lanes that load together use
    // different banks; of gate_up a gate row and its up row. Eight g are the channels of one 16-byte chunk of
    // act: 32 (g / 2) + 4 (g % 2) + what the warp, the part and the item add.
    __device__ __forceinline__ Place(const Item& item, int I) {
        const int group = threadIdx.x / 128 - 1, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
        const int g = lane / 4, at = group * PARTS, box = at / 2, sub = at % 2;  // of 64 weight rows
        int row;
        if (item.kind == DOWN) {
            row = sub * 64 + warp * 16 + g % 2 * 4 + g / 2;
            second = 8 * 128;
            part = 64 * 128;
            scales = at * 64 + warp * 16 + g;
            second_scale = 8;
            part_scale = 64;
        } else {
            const int within = sub * 8 + g % 2 * 4 + warp;
            row = g / 2 * 16 + within;
            second = 64 * 128;
            part = 8 * 128;
            // rows past the last are 0 and have no scales: those of others serve, none of which is chance
            const bool here = item.block / (2 / BOXES) * UNIT + g / 2 * 32 < I;
            scales = (here ? g / 2 * RANGE : 0) + box * 16 + within;
            second_scale = 4 * RANGE;
            part_scale = 8;
#if INTERLEAVED
            scales *= 2;
            second_scale = 1;
            part_scale *= 2;
#endif
        }
        weights = box * BOX_BYTES + row * 128 + (lane % 4 ^ row % 8) * 16;
    }
};

// By each warp.
__device__ __forceinline__ void release(u32 barrier) {
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

struct Turns {
    Turn<WEIGHT_STAGES> weights;
    Turn<ROW_STAGES> rows;
    Turn<2> scales;
};

// The scales of an item, as this thread needs them.
struct ScalesOf {
    const Place& place;
    u32 from;
    int pitch;

    __device__ __forceinline__ u32 operator()(int part, int i, int unit) const {
        // past the last channel there are weights of 0, and no scale
        const int group = min(4 * unit + static_cast<int>(threadIdx.x % 4), pitch - 1);
        return load_byte(from + (place.scales + part * place.part_scale + i * place.second_scale) * pitch +
                         group);
    }
};

// The bytes and factors of one unit of weights. Words of the next unit come once those of this one are used.
struct Bytes {
    u32 words[PARTS][2][4], factors[PARTS][2], scales[PARTS][2];

    // Words 2 `half` and the next.
    __device__ __forceinline__ void load(u32 weights, const Place& place, int half) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint2 two = load_8(weights + part * place.part + i * place.second + 8 * half);
                words[part][i][2 * half] = two.x;
                words[part][i][2 * half + 1] = two.y;
            }
    }
    __device__ __forceinline__ void load_scales(const ScalesOf& of, int unit) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int i = 0; i < 2; ++i) scales[part][i] = of(part, i, unit);
    }
    // Make factors of the scales that were loaded. True, for the whole warp, if some scale is 128 or more.
    __device__ __forceinline__ bool large() {
        u32 any = 0;
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                any |= scales[part][i];
                factors[part][i] = factor(scales[part][i]);
            }
        return __ballot_sync(~0u, any & 128) != 0;
    }
};

// Fragments of two steps of 16 channels: words 0 and 2 are of the first row.
struct Fragments {
    u32 words[PARTS][2][4];

    __device__ __forceinline__ void make(const Bytes& bytes, int i) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                u32 four[4];
                spread(bytes.words[part][row][i], four);
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    words[part][j / 2][j % 2 * 2 + row] = multiply_pairs(four[j], bytes.factors[part][row]);
            }
    }
    // What large scales are beyond their factors.
    __device__ __forceinline__ void enlarge(const ScalesOf& of, int unit) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const u32 rest = rest_of(of(part, row, unit));
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    u32& word = words[part][j / 2][j % 2 * 2 + row];
                    word = multiply_pairs(word, rest);
                }
            }
    }
};

// Two steps of the smallest N of LEAST .. MOST, a multiple of 16, that holds the rows; sums past it are
// unchanged. Each N in a loop of its own would take registers of its own for fragments.
template <int LEAST, int MOST>
__device__ __forceinline__ void products(Sums& sums, const Fragments& fragments, u64 b, bool add, int rows) {
    if constexpr (LEAST < MOST) {
        constexpr int MIDDLE = (LEAST + MOST) / 32 * 16;
        if (rows <= MIDDLE)
            products<LEAST, MIDDLE>(sums, fragments, b, add, rows);
        else
            products<MIDDLE + 16, MOST>(sums, fragments, b, add, rows);
    } else {
        products_begin();
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                product_of_registers<MOST>(sums[part], fragments.words[part][step],
                                           advance(b, step * OPERAND_STEP), add || step > 0);
        products_commit();
    }
}

#if !WARP_PRODUCTS
__device__ __forceinline__ void multiply(const Shared& shared, Turns& turns, Sums& sums, const Item& item,
                                         int depth, int I) {
    const Place place(item, I);
    const int units = units_of(depth);
    const ScalesOf scales{place, shared.scales + turns.scales.at * SCALE_BYTES, depth / 32};
    Fragments fragments[2];
    Bytes bytes;
    bool large = false;
    u64 rows = 0;
    int before = -1;
    barrier_wait(shared.scales_full + 8 * turns.scales.at, turns.scales.parity);
    barrier_wait(shared.weights_full + 8 * turns.weights.at, turns.weights.parity);
    u32 weights = shared.weights + turns.weights.at * WEIGHT_BYTES + place.weights;
    bytes.load_scales(scales, 0);
    bytes.load(weights, place, 0);
    bytes.load(weights, place, 1);
    for (int first = 0; first < units; first += ROW_UNITS) {
#pragma unroll
        for (int i = 0; i < 4 * ROW_UNITS; ++i) {
            const int unit = first + i / 4;
            const bool second = ROW_UNITS == 2 ? i >= 4 : unit % 2;  // of a stage of weights
            if (i == 4 && unit >= units) break;
            if (i % 4 == 0) large = bytes.large();
            products_wait<1>();  // those that read the same fragments
            if (i == 1) {
                if (before >= 0) release(shared.rows_empty + 8 * before);
                before = turns.rows.at;
                turns.rows.next();
            }
            fragments[i % 2].make(bytes, i % 4);
            if (large) fragments[i % 2].enlarge(scales, unit);
            if (i == 0) {
                barrier_wait(shared.rows_full + 8 * turns.rows.at, turns.rows.parity);
                fence_async_proxy();  // rows were written through the generic proxy
                rows = operand(shared.rows + turns.rows.at * ROW_BYTES);
            }
            const u32 at = i / 2 * (HALF_BYTES / 16) + i % 2 * 2 * OPERAND_STEP;
            products<16, MAX_N>(sums, fragments[i % 2], advance(rows, at), first + i > 0, item.rows);
            // words i - 1 and i were used: those of the next unit take their place
            if (i % 2 && unit + 1 < units) {
                if (i % 4 == 1 && second) {
                    barrier_wait(shared.weights_full + 8 * turns.weights.at, turns.weights.parity);
                    weights = shared.weights + turns.weights.at * WEIGHT_BYTES + place.weights;
                }
                bytes.load(second ? weights : weights ^ 64, place, i % 4 / 2);
                if (i % 4 == 1) bytes.load_scales(scales, unit + 1);
            }
            if (i % 4 == 3 && !second) {  // all of a stage of weights was read
                __syncwarp();
                release(shared.weights_empty + 8 * turns.weights.at);
                turns.weights.next();
            }
        }
    }
    products_wait<0>();
    __syncwarp();
    release(shared.rows_empty + 8 * before);
    release(shared.scales_empty + 8 * turns.scales.at);
    turns.scales.next();
}
#else

// As `multiply`, by products of a warp: the fewest groups of eight rows that hold the item's.
template <int G, bool LARGE>
__device__ __forceinline__ void multiply_unit(Sums& sums, u32 weights, u32 rows, const u32 (&scales)[PARTS][2],
                                              const Place& place) {
    const int lane = threadIdx.x % 32;
    uint4 words[PARTS][2];
    u32 factors[PARTS][2];
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            words[part][i] = load_16(weights + part * place.part + i * place.second);
            factors[part][i] = factor(scales[part][i]);
        }
    // matrices of k 0 .. 7, 8 .. 15 of a step, then of the next step: chunks 4 i % 8 .. of a row
    const u32 row = rows + lane % 8 * 128;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 a[PARTS][2][4];
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                u32 four[4];
                const uint4& w = words[part][r];
                spread(i == 0 ? w.x : i == 1 ? w.y : i == 2 ? w.z : w.w, four);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    u32 value = multiply_pairs(four[j], factors[part][r]);
                    if (LARGE) value = multiply_pairs(value, rest_of(scales[part][r]));
                    a[part][j / 2][j % 2 * 2 + r] = value;
                }
            }
        const u32 chunk = (i % 2 * 4 + lane / 8) ^ (lane % 8);
#pragma unroll
        for (int g = 0; g < G; ++g) {
            u32 b[4];
            load_matrices(b, row + i / 2 * HALF_BYTES + g * 1024 + chunk * 16);
#pragma unroll
            for (int step = 0; step < 2; ++step)
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    float (&sum)[4] = reinterpret_cast<float (&)[4]>(sums[part][4 * g]);
                    multiply_add(sum, a[part][step], b[2 * step], b[2 * step + 1]);
                }
        }
    }
}

template <int G>
__device__ __forceinline__ void multiply_by_warps(const Shared& shared, Turns& turns, Sums& sums, const Item& item,
                                                  int depth, int I) {
    const Place place(item, I);
    const int units = units_of(depth);
    const ScalesOf of{place, shared.scales + turns.scales.at * SCALE_BYTES, depth / 32};
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int i = 0; i < 4 * G; ++i) sums[part][i] = 0.0f;
    barrier_wait(shared.scales_full + 8 * turns.scales.at, turns.scales.parity);
#pragma unroll 1
    for (int first = 0; first < units; first += 2) {
        u32 scales[2][PARTS][2], any = 0;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    scales[h][part][i] = of(part, i, first + h);
                    any |= scales[h][part][i];
                }
        const bool large = __ballot_sync(~0u, any & 128) != 0;
        barrier_wait(shared.weights_full + 8 * turns.weights.at, turns.weights.parity);
        const u32 weights = shared.weights + turns.weights.at * WEIGHT_BYTES + place.weights;
        const u32 rows = shared.rows + turns.weights.at * ROW_BYTES;
        if (large) {
            multiply_unit<G, true>(sums, weights, rows, scales[0], place);
            if (first + 1 < units)
                multiply_unit<G, true>(sums, weights ^ 64, rows + 2 * HALF_BYTES, scales[1], place);
        } else {
            multiply_unit<G, false>(sums, weights, rows, scales[0], place);
            if (first + 1 < units)
                multiply_unit<G, false>(sums, weights ^ 64, rows + 2 * HALF_BYTES, scales[1], place);
        }
        __syncwarp();
        release(shared.weights_empty + 8 * turns.weights.at);
        turns.weights.next();
    }
    release(shared.scales_empty + 8 * turns.scales.at);
    turns.scales.next();
}

template <int G>
__device__ __forceinline__ void multiply_rows(const Shared& shared, Turns& turns, Sums& sums, const Item& item,
                                              int depth, int I) {
    if constexpr (8 * G < MAX_N) {
        if (item.rows > 8 * G) {
            multiply_rows<G + 1>(shared, turns, sums, item, depth, I);
            return;
        }
    }
    multiply_by_warps<G>(shared, turns, sums, item, depth, I);
}
#endif

// Biases of this thread's two rows of each part; zero past the last row.
struct RowBiases {
    float rows[PARTS][2] = {};

    __device__ __forceinline__ RowBiases(const Biases& biases, const Work& work, const Item& item) {
#if BIASED
        const int group = threadIdx.x / 128 - 1, warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4;
        const int width = item.kind == DOWN ? work.H : 2 * work.I;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const int at = item.block * (WEIGHT_ROWS / 64) + group * PARTS + part;  // of 64 weight rows
            int first = at * 64 + warp * 16 + g, second = first + 8;
            if (item.kind != DOWN) {
                const int channel = at / 4 * UNIT + at % 4 * 8 + g / 2 * 32 + g % 2 * 4 + warp;
                first = channel >= work.I ? width : INTERLEAVED ? 2 * channel : channel;
                second = channel >= work.I ? width : INTERLEAVED ? first + 1 : first + work.I;
            }
            const u64 expert = static_cast<u64>(item.expert) * width;
            if (first < width) rows[part][0] = biases[expert + first];
            if (second < width) rows[part][1] = biases[expert + second];
        }
#endif
    }
    __device__ __forceinline__ float low(int part, float sum) const { return sum + rows[part][0]; }
    __device__ __forceinline__ float high(int part, float sum) const { return sum + rows[part][1]; }
    __device__ __forceinline__ float both(int part, float gate, float up) const {
        return activated(low(part, gate), high(part, up));
    }
};

extern "C" __global__ void __launch_bounds__(128 * (1 + GROUPS), BLOCKS)
    mxfp4_mlp(const __grid_constant__ TensorMap gate_up, const __grid_constant__ TensorMap down,
              const unsigned char* gate_up_scales, const unsigned char* down_scales, const u16* gate_up_bf16,
              const float* gate_up_fp32, const u16* down_bf16, const float* down_fp32, const u16* hidden,
              const int* row_tokens, Tile* tiles, int* num_tiles, u16* act, u16* out, int H, int I) {
    const Shared shared(dynamic_memory());
    if (threadIdx.x == 0) {
        prefetch_map(&gate_up);
        prefetch_map(&down);
        shared.init();
    }
    __syncthreads();
    wait_for_predecessor();
    let_successor_start();

    const Work work(tiles, *num_tiles, units_of(I) * 2 / BOXES, (H + WEIGHT_ROWS - 1) / WEIGHT_ROWS, H, I);
    if (threadIdx.x < 128) {
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0)
            load_weights(shared, &gate_up, &down, gate_up_scales, down_scales, work, num_tiles + 1);
        if (threadIdx.x >= 32) load_rows(shared, hidden, act, row_tokens, work);
    } else {
        take_registers<CONSUMER_REGISTERS>();
        Turns turns;
        Turn<SLOTS> slot;
        Sums sums;
        for (Item item = shared.items.hear(slot); item.kind != NONE; item = shared.items.hear(slot)) {
#if WARP_PRODUCTS
            multiply_rows<1>(shared, turns, sums, item, work.depth(item), I);
#else
            multiply(shared, turns, sums, item, work.depth(item), I);
#endif
            const bool is_down = item.kind == DOWN;
            const Biases biases{is_down ? down_bf16 : gate_up_bf16, is_down ? down_fp32 : gate_up_fp32};
            const RowBiases bias(biases, work, item);
            if (is_down)
                write<true, GROUPS>(shared.pieces, sums, bias, out, item, H, nullptr);
            else
                write<false, GROUPS>(shared.pieces, sums, bias, act, item, units_of(I) * UNIT,
                                     &tiles[item.tile].done);
        }
    }
}
