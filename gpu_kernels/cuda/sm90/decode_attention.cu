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
// | units           | [n]                          | Unit       | UNITS, of decode_units; else null            |
// | out             | as q                         | as q       | out; row-major, 4 bytes                      |
// | sums            | [T, KV, SECTIONS, PARTS, 2 + HEAD_DIM / PARTS, QUERIES] | fp32 | scratch, of several    |
// |                 |                              |            | sections; UNITS: [slots, KV, 2 + HEAD_DIM,   |
// |                 |                              |            | QUERIES]                                     |
// | turns           | [T, KV, PARTS]               | int32      | of several sections or UNITS: 0, before and  |
// |                 |                              |            | after                                        |
//
// HEAD_DIM: 64 or 128. GROUP <= 16 query heads share a key/value head. PARTS <= 8. PAGE: a multiple of 16.
// scale: softmax scale times log2(e). Grid: (PARTS * KV, T, SECTIONS) in clusters of PARTS; threads: 32 *
// WARPS. Lengths are read on the device.
//
// SECTIONS: clusters that may share a row. As many take part as hold all of its keys; the others end at once.
// Where several do, each block writes its result to `sums`. Of the blocks with the same channels the last, by
// the count in `turns`, merges these results in the order of sections.
//
// UNITS: block y takes unit y, of the keys of a token: a part of a long row. Blocks of one row merge by turns
// as sections do. Grid: (KV, units); PARTS and SECTIONS are 1.
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
// Programmatic dependent launch: the kernel reads rows, positions, num_tokens, units and pages before it
// waits for its predecessor. EARLY: also the keys and values before each token's position. A kernel launched
// without PDL must run between the writers of all these and this kernel. Without EARLY these keys and values
// go to L2 meanwhile, where later writes find them.
//
// A thread has at most 200 registers.
//
// Shared memory: slots WARPS * STAGES * [keys [16, HEAD_DIM], values [16, HEAD_DIM]]; then sums [PARTS *
// WARPS, HEAD_DIM / PARTS, QUERIES] fp32, maxima and sums of exponentials [PARTS * WARPS, 2, QUERIES] fp32,
// which take the place of the slots where PARTS is 1; a barrier of 8 bytes.
#include "common/units.cuh"
#include "sm90/decode_state.cuh"

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

extern "C" __global__ void __launch_bounds__(THREADS)
    decode_attention(const u16* q, const u16* keys, const u16* values, const int* pages, const Row* rows,
                     const long long* positions, const int* num_tokens, const Unit* units, u16* out,
                     float* sums, int* turns, float scale, int capacity, int pages_a_row) {
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
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = rank_in_cluster();
#if UNITS
    const Unit unit = units[blockIdx.y];
    if (unit.token_sections < 0) return;
    const int t = unit.token_sections & 0xffff;
#else
    const int t = blockIdx.y;
#endif
    const int head = blockIdx.x / PARTS, kv_heads = gridDim.x / PARTS, own = warp * PARTS + rank;
    const u64 queries = (static_cast<u64>(t) * kv_heads + head) * (GROUP * D);
    const u32 slots = memory + warp * (STAGES * SLOT);

    const long long row = rows[t], position = positions[t];
    const bool valid = !num_tokens || t < *num_tokens;
    const int length = valid ? static_cast<int>(position < capacity ? position + 1 : capacity) : 0;
    const int tiles = (length + TILE - 1) / TILE;
#if UNITS
    const int section = unit.slot_section >> 16, sections = unit.token_sections >> 16;
    const int first_tile = unit.first, end_tile = unit.end, warps = ALL_WARPS;
#else
    const int section = SECTIONS > 1 ? blockIdx.z : 0;
    const int sections = SECTIONS > 1 ? min(SECTIONS, max(1, (tiles + HELD - 1) / HELD)) : 1;
    const int first_tile = section * ALL_WARPS, end_tile = tiles, warps = sections * ALL_WARPS;
#endif
    if (SECTIONS > 1 && section >= sections) {
        if (PARTS > 1) wait_for_cluster();
        return;
    }
    const int me = first_tile + own;
    const int count = me < end_tile ? (end_tile - me - 1) / warps + 1 : 0;  // tiles of this warp
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
#if SHARED_ROWS
    if (sections > 1) {
        constexpr int PART = (2 + COLUMNS) * QUERIES;
#if UNITS
        const u64 part = static_cast<u64>(unit.slot_section & 0xffff) * kv_heads + head;
        const int pitch = kv_heads * PART;
#else
        const u64 part = (static_cast<u64>(t) * kv_heads + head) * SECTIONS * PARTS + rank;
        constexpr int pitch = PARTS * PART;
#endif
        float* first = sums + part * PART;
        if (has) result.store(first + section * pitch);
        __syncthreads();  // also: the states were read
        int* last = reinterpret_cast<int*>(dynamic_memory() + STATES);
        if (threadIdx.x == 0) {
            int* turn = turns + (t * kv_heads + head) * PARTS + rank;
            *last = add_acquire_release(turn, 1) == sections - 1;
            if (*last) *turn = 0;
        }
        __syncthreads();
        if (!*last) return;
        if (has) result.merge(first, first + 2 * QUERIES, sections, pitch, pitch);
    }
#endif
    if (has) result.write(out + queries, rank);
}
