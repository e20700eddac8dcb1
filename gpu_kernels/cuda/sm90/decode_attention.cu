// SPDX-License-Identifier: Apache-2.0
// Decode attention: one query token per sequence over its cached keys, in one launch. A cluster shares the
// keys of a token and a key/value head (split KV).
//
// | argument        | shape                        | dtype      |                                              |
// |-----------------|------------------------------|------------|----------------------------------------------|
// | q               | [T, KV * GROUP, HEAD_DIM]    | bf16, fp16 | row-major, 16 bytes                          |
// | keys, values    | [rows, KV, capacity, HEAD_DIM] | as q     | row-major, 16 bytes; only keys 0 .. position |
// |                 |                              |            | are read                                     |
// |                 | PAGE > 0: [pages, KV, PAGE, HEAD_DIM] |   | key n of a row is key n % PAGE of its page   |
// |                 |                              |            | n / PAGE                                     |
// |                 | STRIDE                       |            | elements from a token to the next            |
// | pages           | [rows, pages_a_row]          | int32      | PAGE > 0: pages of each row, in order        |
// | rows            | [T]                          | int64      | cache row of each token; NARROW: int32       |
// | positions       | [T]                          | int64      | of each token, whose own key is in the cache |
// | num_tokens      | []                           | int32      | or null: tokens from it on read nothing;     |
// |                 |                              |            | their result is zero                         |
// | out             | as q                         | as q       | out; row-major, 4 bytes                      |
// | sums            | [T, KV, SECTIONS, PARTS, 2 + HEAD_DIM / PARTS, QUERIES] | fp32 | scratch, of several    |
// |                 |                              |            | sections                                     |
// | turns           | [T, KV, PARTS]               | int32      | of several sections: 0, before and after     |
//
// HEAD_DIM: 64 or 128. GROUP <= 16 query heads share a key/value head. PARTS <= 8. PAGE: a multiple of 16.
// scale: softmax scale times log2(e). Grid: (PARTS * KV, T, SECTIONS) in clusters of PARTS; threads: 32 *
// WARPS. Lengths are read on the device.
//
// SECTIONS: clusters that may share a row. As many take part as hold all of its keys; the others end at once.
// Where several do, each block writes its result to `sums`. Of the blocks with the same channels the last, by
// the count in `turns`, merges these results in the order of sections.
//
// Tile i of 16 keys is of warp i % (PARTS * WARPS * sections that take part), counted through the blocks of a
// cluster first, then through its warps. A warp copies its tiles (cp.async) to STAGES slots of its own, in
// turns where RING, and keeps its own maxima, sums of exponentials and sums. Products: scores^T = keys * q^T
// and sums^T += values^T * weights^T, so that 16 keys or channels are the M side, 8 queries the N side. A
// lane loads the same words of keys and queries, which orders the channels of a product its own way. At the
// end each warp sends its sums to the blocks that finish them: HEAD_DIM / PARTS channels a block, from PARTS
// * WARPS warps in their order. No block reads another's memory, so none waits for others to end: a barrier
// of the receiving block counts the bytes.
//
// Programmatic dependent launch: the kernel reads rows, positions, num_tokens and pages before it waits for
// its predecessor. EARLY: also the keys and values before each token's position. A kernel launched without
// PDL must run between the writers of all these and this kernel. Without EARLY these keys and values go to L2
// meanwhile, where later writes find them.
//
// A thread has at most 200 registers.
//
// Shared memory: slots WARPS * STAGES * [keys [16, HEAD_DIM], values [16, HEAD_DIM]]; then sums [PARTS *
// WARPS, HEAD_DIM / PARTS, QUERIES] fp32, maxima and sums of exponentials [PARTS * WARPS, 2, QUERIES] fp32,
// which take the place of the slots where PARTS is 1; a barrier of 8 bytes.
#ifndef PARTS
#define PARTS 4
#endif
#define CLUSTER PARTS

#include "common/cluster.cuh"
#include "common/flags.cuh"
#include "sm80/mma.cuh"
#include "sm80/sparse.cuh"
#include "sm90/ptx.cuh"

#ifndef WARPS
#define WARPS 4
#endif
#ifndef STAGES
#define STAGES 1
#endif
#ifndef GROUP
#define GROUP 8
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef STRIDE
#define STRIDE HEAD_DIM
#endif
#ifndef PAGE
#define PAGE 64
#endif
#ifndef RING
#define RING 1
#endif
#ifndef NARROW
#define NARROW 0
#endif
#ifndef EARLY
#define EARLY 1
#endif
#ifndef SECTIONS
#define SECTIONS 1
#endif

static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "eight or sixteen chunks of a key");
static_assert(GROUP >= 1 && GROUP <= 16 && PAGE % 16 == 0 && PARTS <= 8, "see the table");

constexpr int D = HEAD_DIM, TILE = 16, THREADS = 32 * WARPS, ALL_WARPS = PARTS * WARPS;
constexpr int CHUNKS = D / 8, FOURS = CHUNKS / 4;              // of 16 bytes in a key; of four chunks
constexpr int GROUPS = (GROUP + 7) / 8, QUERIES = 8 * GROUPS;  // of eight queries; with padding
constexpr int COLUMNS = D / PARTS;                             // channels that a block finishes
constexpr u32 MATRIX = TILE * D * 2, SLOT = 2 * MATRIX;        // bytes
constexpr u32 SUMS = PARTS > 1 ? WARPS * STAGES * SLOT : 0;
constexpr u32 STATES = SUMS + ALL_WARPS * COLUMNS * QUERIES * 4;
constexpr u32 BARRIER = STATES + ALL_WARPS * 2 * QUERIES * 4;  // counts the bytes from SUMS to here
constexpr float LOWEST = -1e30f;                               // finite: a warp without keys has weight 0
constexpr int PAIRS = QUERIES * COLUMNS / 2;                   // of channels that a block finishes
constexpr int EACH = (PAIRS + THREADS - 1) / THREADS;          // of them a thread's
constexpr int HELD = ALL_WARPS * STAGES;                       // tiles of a cluster

#if NARROW
using Row = int;
#else
using Row = long long;
#endif

// Of a row: where the keys of a tile begin.
struct Keys {
    const u16 *keys, *values;
    const int* pages;  // of the row
    u64 base;          // elements before the row
    int head, kv_heads;

    __device__ __forceinline__ int page_of(int tile) const {
        return PAGE ? pages[tile * TILE / (PAGE ? PAGE : 1)] : 0;
    }
    // Elements before the first key of a tile.
    __device__ __forceinline__ u64 begin(int tile, int page) const {
        if (PAGE)
            return ((static_cast<u64>(page) * kv_heads + head) * PAGE + tile * TILE % (PAGE ? PAGE : 1)) *
                   STRIDE;
        return base + static_cast<u64>(tile) * (TILE * STRIDE);
    }
};

// Bytes of a slot before a chunk. A lane reads the keys that its own lane number copies, 16 bytes each;
// ldmatrix reads a chunk of eight values, in different banks.
__device__ __forceinline__ u32 key_at(int row, int chunk) {
    return ((row / 8 * FOURS + chunk / 4) * 32 + row % 8 * 4 + chunk % 4) * 16;
}
__device__ __forceinline__ u32 value_at(int row, int chunk) {
    return MATRIX + row * (2 * D) + (chunk ^ row % 8) * 16;
}

// Copy the keys and values before `end` of a tile, and write zeros for values from `length` on. first: number
// of its first key. begin: elements before it.
__device__ __forceinline__ void copy_tile(const Keys& from, u32 slot, u64 begin, int first, int end,
                                          int length) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2 * FOURS; ++i) {
        const int row = i / FOURS * 8 + lane / 4, chunk = i % FOURS * 4 + lane % 4;
        copy_16_if(first + row < end, slot + key_at(row, chunk),
                   from.keys + begin + row * STRIDE + chunk * 8);
    }
#pragma unroll
    for (int i = 0; i < TILE * CHUNKS / 32; ++i) {
        const int row = (32 * i + lane) / CHUNKS, chunk = lane % CHUNKS;
        copy_16_if(first + row < end, slot + value_at(row, chunk),
                   from.values + begin + row * STRIDE + chunk * 8);
        if (first + row >= length) store_16(slot + value_at(row, chunk), make_uint4(0, 0, 0, 0));
    }
}

// What a lane knows of queries 8 n + 2 * (lane % 4) and the next.
struct State {
    float highest[GROUPS][2], total[GROUPS][2];  // of scores; of this lane's exponentials
    float sums[D / 16][GROUPS][4];               // channels 16 m + lane / 4 and 8 more, of both queries each

    // 16 keys; the row has `left` from the first of them on. q: chunks 4 i + lane % 4 of query 8 n + lane
    // / 4.
    __device__ __forceinline__ void attend(u32 slot, const uint4 (&q)[GROUPS][FOURS], int left, float scale) {
        const int lane = threadIdx.x % 32;
        float even[GROUPS][4] = {}, odd[GROUPS][4] = {};
#pragma unroll
        for (int i = 0; i < FOURS; ++i) {
            const uint4 low = load_16(slot + (i * 32 + lane) * 16);
            const uint4 high = load_16(slot + ((FOURS + i) * 32 + lane) * 16);
            const u32 a[4] = {low.x, high.x, low.y, high.y}, b[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
            for (int n = 0; n < GROUPS; ++n) {
                multiply_add(even[n], a, q[n][i].x, q[n][i].y);
                multiply_add(odd[n], b, q[n][i].z, q[n][i].w);
            }
        }
        u32 weights[GROUPS][2];  // of keys 0 .. 7 and 8 .. 15: queries by keys
        float shrink[GROUPS][2];
#pragma unroll
        for (int n = 0; n < GROUPS; ++n) {
            float p[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                p[i] = lane / 4 + i / 2 * 8 < left ? (even[n][i] + odd[n][i]) * scale
                                                   : __int_as_float(0xff800000);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float most = fmaxf(p[i], p[i + 2]);
#pragma unroll
                for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
                most = fmaxf(most, highest[n][i]);
                shrink[n][i] = exp2_of(highest[n][i] - most);
                highest[n][i] = most;
                p[i] = exp2_of(p[i] - most);
                p[i + 2] = exp2_of(p[i + 2] - most);
                total[n][i] = total[n][i] * shrink[n][i] + (p[i] + p[i + 2]);
            }
            weights[n][0] = transposed(pack(p[0], p[1]));
            weights[n][1] = transposed(pack(p[2], p[3]));
        }
        const u32 row = lane / 16 * 8 + lane % 8, next = lane / 8 % 2;
#pragma unroll
        for (int m = 0; m < D / 16; ++m) {
            u32 channels[4];
            load_transposed(channels, slot + value_at(row, 2 * m + next));
#pragma unroll
            for (int n = 0; n < GROUPS; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[m][n][i] *= shrink[n][i % 2];
                multiply_add(sums[m][n], channels, weights[n][0], weights[n][1]);
            }
        }
    }
};

// Two floats to a block of the cluster, whose barrier counts them.
__device__ __forceinline__ void send(u32 memory, u32 at, u32 rank, float first, float second) {
    if (PARTS == 1)
        store_two(memory + at, first, second);
    else
        send_two(memory + at, rank, memory + BARRIER, first, second);
}

// The state of warp `me` of the cluster, to the blocks that merge it.
__device__ __forceinline__ void send_state(u32 memory, const State& state, int me) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
        const u32 query = 8 * n + lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < D / 8; ++m) {
            const u32 column = m * 8 % COLUMNS + lane / 4;
            send(memory, SUMS + ((me * COLUMNS + column) * QUERIES + query) * 4, m * 8 / COLUMNS,
                 state.sums[m / 2][n][m % 2 * 2], state.sums[m / 2][n][m % 2 * 2 + 1]);
        }
        float total[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            total[i] = state.total[n][i];
#pragma unroll
            for (int step = 4; step < 32; step *= 2) total[i] += __shfl_xor_sync(~0u, total[i], step);
        }
        if (lane / 4 < PARTS) {
            const u32 at = STATES + (2 * me * QUERIES + query) * 4;
            send(memory, at, lane / 4, state.highest[n][0], state.highest[n][1]);
            send(memory, at + QUERIES * 4, lane / 4, total[0], total[1]);
        }
    }
}

// Scores' maximum, sum of exponentials and sums of values, of one query and pairs of this block's channels.
struct Result {
    float highest, total, sums[EACH][2];

    __device__ __forceinline__ static int query() { return threadIdx.x % QUERIES; }
    __device__ __forceinline__ static int column(int e) {
        return 2 * (threadIdx.x / QUERIES + e * (THREADS / QUERIES));
    }
    // Merge `count` parts in their order. states: [2][QUERIES], maximum and sum, each; values: [COLUMNS]
    // [QUERIES] each. The next part is `state_pitch` and `pitch` floats away.
    __device__ __forceinline__ void merge(const float* states, const float* values, int count,
                                          int state_pitch, int pitch) {
        highest = LOWEST;
#pragma unroll
        for (int w = 0; w < count; ++w) highest = fmaxf(highest, states[w * state_pitch + query()]);
        total = 0.0f;
#pragma unroll
        for (int e = 0; e < EACH; ++e) sums[e][0] = sums[e][1] = 0.0f;
#pragma unroll
        for (int w = 0; w < count; ++w) {
            const float weight = exp2_of(states[w * state_pitch + query()] - highest);
            total = fmaf(states[w * state_pitch + QUERIES + query()], weight, total);
#pragma unroll
            for (int e = 0; e < EACH; ++e)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    sums[e][i] =
                        fmaf(values[w * pitch + (column(e) + i) * QUERIES + query()], weight, sums[e][i]);
        }
    }
    // To [2 + COLUMNS][QUERIES].
    __device__ __forceinline__ void store(float* to) const {
        to[query()] = highest;  // the same from all threads of a query
        to[QUERIES + query()] = total;
#pragma unroll
        for (int e = 0; e < EACH; ++e)
#pragma unroll
            for (int i = 0; i < 2; ++i) to[(2 + column(e) + i) * QUERIES + query()] = sums[e][i];
    }
    __device__ __forceinline__ void write(u16* out, int rank) const {
        if (query() >= GROUP) return;
        const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
        for (int e = 0; e < EACH; ++e)
            *reinterpret_cast<u32*>(out + query() * D + rank * COLUMNS + column(e)) =
                pack(sums[e][0] * inverse, sums[e][1] * inverse);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    decode_attention(const u16* q, const u16* keys, const u16* values, const int* pages, const Row* rows,
                     const long long* positions, const int* num_tokens, u16* out, float* sums, int* turns,
                     float scale, int capacity, int pages_a_row) {
    const u32 memory = shared_address(dynamic_memory());
    if (PARTS > 1) {
        if (threadIdx.x == 0) {
            barrier_init(memory + BARRIER, 1);
            barrier_init_fence();
            barrier_arrive_expect(memory + BARRIER, BARRIER - SUMS);
        }
        __syncwarp();
        arrive_in_cluster();
    }
    let_successor_start();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = rank_in_cluster(), t = blockIdx.y;
    const int head = blockIdx.x / PARTS, kv_heads = gridDim.x / PARTS, own = warp * PARTS + rank;
    const u64 queries = (static_cast<u64>(t) * kv_heads + head) * (GROUP * D);
    const u32 slots = memory + warp * (STAGES * SLOT);

    const long long row = rows[t], position = positions[t];
    const bool valid = !num_tokens || t < *num_tokens;
    const int length = valid ? static_cast<int>(position < capacity ? position + 1 : capacity) : 0;
    const int tiles = (length + TILE - 1) / TILE;
    const int section = SECTIONS > 1 ? blockIdx.z : 0;
    const int sections = SECTIONS > 1 ? min(SECTIONS, max(1, (tiles + HELD - 1) / HELD)) : 1;
    if (SECTIONS > 1 && section >= sections) {
        if (PARTS > 1) wait_for_cluster();
        return;
    }
    const int me = section * ALL_WARPS + own, warps = sections * ALL_WARPS;
    const int count = me < tiles ? (tiles - me - 1) / warps + 1 : 0;  // tiles of this warp
    const Keys from{keys,
                    values,
                    pages + row * pages_a_row,
                    (static_cast<u64>(row) * kv_heads + head) * static_cast<u64>(capacity) * STRIDE,
                    head,
                    kv_heads};
    u64 begins[STAGES];
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
        const int tile = me + s * warps;
        begins[s] = from.begin(tile, s < count ? from.page_of(tile) : 0);
    }
    // the newest key: of the last tile of the row, which one warp holds
    const bool newest =
        EARLY && count > 0 && (!RING || count <= STAGES) && me + (count - 1) * warps == tiles - 1;
    u64 newest_from = 0;
#pragma unroll
    for (int s = 0; s < STAGES; ++s)
        if (s + 1 == count) newest_from = begins[s];
    // a lane copies a chunk of the key or of the value
    const int newest_row = (length - 1) % TILE, newest_chunk = lane % CHUNKS;
    const bool of_key = lane < CHUNKS;
    newest_from += newest_row * STRIDE + newest_chunk * 8;
    const u16* newest_at = (of_key ? keys : values) + newest_from;
    const u32 newest_to = slots + (count - 1) * SLOT +
                          (of_key ? key_at(newest_row, newest_chunk) : value_at(newest_row, newest_chunk));
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
        const int tile = me + s * warps;
        if (EARLY) {
            if (s < count) copy_tile(from, slots + s * SLOT, begins[s], tile * TILE, length - 1, length);
            copies_commit();
        } else if (s < count && lane < 2) {
            bytes_prefetch((lane ? values : keys) + begins[s],
                           (min(TILE, length - tile * TILE) - 1) * (2 * STRIDE) + 2 * D);
        }
    }
    wait_for_predecessor();
    // queries before keys: behind keys they would wait for all of the copies
    uint4 words[GROUPS][FOURS];
#pragma unroll
    for (int n = 0; n < GROUPS; ++n)
#pragma unroll
        for (int i = 0; i < FOURS; ++i) {
            const int query = 8 * n + lane / 4;
            words[n][i] = make_uint4(0, 0, 0, 0);
            if (query < GROUP)
                words[n][i] =
                    load_there(reinterpret_cast<const uint4*>(q + queries + query * D) + 4 * i + lane % 4);
        }
    if (EARLY) {
        copy_16_if(newest && lane < 2 * CHUNKS, newest_to, newest_at);
        copies_commit();
    } else {
#pragma unroll
        for (int s = 0; s < STAGES; ++s) {
            const int tile = me + s * warps;
            if (s < count) copy_tile(from, slots + s * SLOT, begins[s], tile * TILE, length, length);
            copies_commit();
        }
    }
    State state{};
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) state.highest[n][0] = state.highest[n][1] = LOWEST;
    int page = RING && STAGES < count ? from.page_of(me + STAGES * warps) : 0;  // of the next tile to copy
    for (int i = 0; i < count; ++i) {
        const u32 slot = slots + i % STAGES * SLOT;
        const int tile = me + i * warps, ahead = tile + STAGES * warps;
        if (i + 1 == count)
            copies_wait<0>();
        else
            copies_wait<STAGES - 1>();  // EARLY: one group more than needed, which left as early
        __syncwarp();                   // copies of all lanes have landed
        state.attend(slot, words, length - tile * TILE, scale);
        __syncwarp();  // the slot was read
        if (RING && i + STAGES < count) {
            copy_tile(from, slot, from.begin(ahead, page), ahead * TILE, length, length);
            if (i + STAGES + 1 < count) page = from.page_of(ahead + warps);
        }
        copies_commit();
    }
    copies_wait<0>();

    if (PARTS > 1)
        wait_for_cluster();  // the barriers of all blocks count
    else
        __syncthreads();  // all slots were read
    send_state(memory, state, own);
    if (PARTS > 1)
        barrier_wait(memory + BARRIER, 0);
    else
        __syncthreads();
    Result result;
    const bool has = static_cast<int>(threadIdx.x) < PAIRS;
    const float* states = reinterpret_cast<const float*>(dynamic_memory() + STATES);
    if (has)
        result.merge(states, reinterpret_cast<const float*>(dynamic_memory() + SUMS), ALL_WARPS, 2 * QUERIES,
                     COLUMNS * QUERIES);
#if SECTIONS > 1
    if (sections > 1) {
        constexpr int PART = (2 + COLUMNS) * QUERIES;
        float* first = sums + ((static_cast<u64>(t) * kv_heads + head) * SECTIONS * PARTS + rank) * PART;
        if (has) result.store(first + section * (PARTS * PART));
        __syncthreads();  // also: the states were read
        int* last = reinterpret_cast<int*>(dynamic_memory() + STATES);
        if (threadIdx.x == 0) {
            int* turn = turns + (t * kv_heads + head) * PARTS + rank;
            *last = add_acquire_release(turn, 1) == sections - 1;
            if (*last) *turn = 0;
        }
        __syncthreads();
        if (!*last) return;
        if (has) result.merge(first, first + 2 * QUERIES, sections, PARTS * PART, PARTS * PART);
    }
#endif
    if (has) result.write(out + queries, rank);
}
