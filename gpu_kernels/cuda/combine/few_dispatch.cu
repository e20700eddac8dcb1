// SPDX-License-Identifier: Apache-2.0
// As node_dispatch.cu, of few tokens: each rank puts its tokens where the other rank waits for them. That
// rank numbers their rows.
//
// | argument (of a rank)    | shape            | dtype      | |
// |-------------------------|------------------|------------|--------------------------------------------------|
// | x                       | [T, H]           | bf16, fp16 | 16 bytes aligned                                 |
// | ids, weights            | [T, K]           | int32, fp32| ids outside 0 .. E-1 go nowhere                  |
// | T                       | [1]              | int32      | tokens of this rank, up to T_max                 |
// | owner, index            | [E]              | int32      | rank of an expert; its number on this rank       |
// | where                   | [R, T_max]       | int32      | out: row of token t in rank r's rows, or -1      |
// | firsts                  | [R + 1]          | int32      | out: where rows of each rank begin; all rows     |
//
// | heap, the kernel's part | shape                   | written by                                         |
// |-------------------------|-------------------------|----------------------------------------------------|
// | rows                    | [R * T_max, H]          | this rank; out: the first A, by rank, then token   |
// | row_ids, row_weights    | [R * T_max, K]          | this rank; out: local experts, -1: not here        |
// | origins                 | [R * T_max]             | this rank; out: the row's rank * T_max + its token |
// | tokens                  | [2, R] u64              | each rank: its T, and the call                     |
// | masks                   | [2, R, T_max] u64       | each rank: the ranks of a token, and the call      |
// | pairs                   | [2, R, T_max, K, 2] u64 | the other ranks: expert, weight                    |
// | words                   | [2, R, T_max, H / 8, 4] u64 | the other ranks: tokens; see few.cuh           |
//
// Each part is 128 bytes aligned. H is a multiple of 8. A warp moves 32 vectors of 8 columns at a time.
// Dynamic shared memory: 2 * R * ceil(T_max / 32) * 4 bytes.
#include "common/element.cuh"

struct Local {  // one rank of this launch
    const u16* x;
    const int* ids;
    const float* weights;
    const int *T, *owner, *index;
    int *where, *firsts;
    u64 rank;
};

#include "combine/few.cuh"

struct Places {  // the heap's parts of any rank
    u64 rows, ids, weights, origins, tokens, masks, pairs, words;

    __device__ static u64 up(u64 bytes) { return (bytes + 127) / 128 * 128; }
    __device__ Places(u64 head, u64 most, int vectors, int K) {
        rows = head;
        ids = rows + up(most * vectors * 16);
        weights = ids + up(most * K * 4);
        origins = weights + up(most * K * 4);
        tokens = origins + up(most * 4);
        masks = tokens + up(2 * R * 8);
        pairs = masks + up(2 * most * 8);
        words = pairs + up(2 * most * K * 16);
    }
};

struct Warp {
    const Node node;
    const Local& own;
    NodeShared& shared;
    const Places& places;
    const int warp, lane, vectors, chunks, K, T, T_max, segments;
    u32 *here,
        *own_bits;  // [R, segments]: tokens of each rank that come here; own tokens that go to each rank
    u32& dead;

    __device__ int rank() const { return node.g.rank; }
    __device__ int step() const { return gridDim.x * CHANNELS; }
    __device__ u32 number() const { return number_of(shared.call); }
    __device__ u64 word(u32 said) const { return static_cast<u64>(number()) << 32 | said; }
    __device__ bool said(u64 word) const { return static_cast<u32>(word >> 32) == number(); }
    __device__ u64 half(int by) const { return (shared.call & 1) * R + by; }
    template <class Word>
    __device__ Word* part(int r, u64 place) const {
        return reinterpret_cast<Word*>(node.g.heap(r) + place);
    }
    __device__ u64* tokens(int r, int by) const { return part<u64>(r, places.tokens) + half(by); }
    __device__ u64* mask(int r, int by, int t) const {
        return part<u64>(r, places.masks) + half(by) * T_max + t;
    }
    __device__ u64* pair(int r, int by, int t, int k) const {
        return part<u64>(r, places.pairs) + ((half(by) * T_max + t) * K + k) * 2;
    }
    __device__ u64* words(int r, int by, int t, int v) const {
        return part<u64>(r, places.words) + ((half(by) * T_max + t) * vectors + v) * 4;
    }
    __device__ bool known(int e) const { return static_cast<u32>(e) < static_cast<u32>(node.g.call.E); }
    __device__ int owner(int e) const { return known(e) ? own.owner[e] : -1; }

    __device__ uint4 columns_of(int item) const {
        const int t = item / chunks, v = item % chunks * 32 + lane;
        return v < vectors ? load_once(own.x + (static_cast<u64>(t) * vectors + v) * 8) : uint4{};
    }
    // The ranks of a token.
    __device__ u32 targets(int t) const {
        u32 to = 0;
        for (int k = lane; k < K; k += 32) {
            const int r = owner(own.ids[static_cast<u64>(t) * K + k]);
            if (r >= 0) to |= 1u << r;
        }
#pragma unroll
        for (int d = 16; d; d /= 2) to |= __shfl_xor_sync(ALL, to, d);
        return to;
    }
    __device__ void send(u32 first_to, uint4 first_columns) const;
    __device__ void number_rows() const;
    __device__ void say_where() const;
    __device__ void receive() const;
};

// This rank's tokens and masks to the other ranks. first: of this warp's first item.
__device__ void Warp::send(u32 first_to, uint4 first_columns) const {
    if (blockIdx.x == 0 && warp == 0 && lane < R) store_relaxed_sys(tokens(lane, rank()), word(T));
    int items = 0;
    for (int item = node.first(warp); item < T * chunks; item += step()) {
        const int t = item / chunks, chunk = item % chunks, v = chunk * 32 + lane;
        const bool first = items == 0;
        const uint4 columns = first ? first_columns : columns_of(item);
        const u32 to = first ? first_to : targets(t);
        if (node.stalls(items++, SENDER)) return;
        if (chunk == 0 && lane < R) store_relaxed_sys(mask(lane, rank(), t), word(to));
        for (u32 todo = to & ~(1u << rank()); todo; todo &= todo - 1) {
            const int s = __ffs(todo) - 1;
            if (v < vectors) put_vector(words(s, rank(), t, v), columns, number());
            if (chunk != 0) continue;
            for (int k = lane; k < K; k += 32) {
                const u64 at = static_cast<u64>(t) * K + k;
                const int e = own.ids[at];
                put(pair(s, rank(), t, k), owner(e) == s ? own.index[e] : -1,
                    __float_as_uint(own.weights[at]), number());
            }
        }
    }
}

// Which tokens come here, and which of this rank's go where: after all ranks said it.
__device__ void Warp::number_rows() const {
    for (int item = warp; item < R * segments; item += CHANNELS) {
        const int c = item / segments, t = item % segments * 32 + lane;
        u64 count = 0, to = 0;
        const bool came = node.g.until(
            [&] {
                count = load_relaxed_sys(tokens(rank(), c));
                if (t < T_max) to = load_relaxed_sys(mask(rank(), c, t));
                return said(count) &&
                       (said(to) || t >= min(static_cast<int>(static_cast<u32>(count)), T_max));
            },
            c, ANNOUNCER);
        if (!came) dead = 1;
        if (!came || !said(to)) to = 0;
        const u32 mine = __ballot_sync(ALL, to >> rank() & 1);
        if (lane == 0) here[item] = mine;
        if (c != rank()) continue;
#pragma unroll
        for (int r = 0; r < R; ++r) {
            const u32 some = __ballot_sync(ALL, to >> r & 1);
            if (lane == r) own_bits[r * segments + item % segments] = some;
        }
    }
}

// Rows of this rank's tokens at each rank. Lower ranks' rows lie before them.
__device__ void Warp::say_where() const {
    // not the warps that receive first
    for (int item = node.first(CHANNELS - 1 - warp); item < R * segments; item += step()) {
        const int s = item / segments, segment = item % segments, t = segment * 32 + lane;
        u32 before = 0;
        for (int c = 0; c < rank(); ++c)
            for (int i = lane; i < T_max; i += 32) {
                const u64 to = load_relaxed_sys(mask(rank(), c, i));
                if (said(to) && to >> s & 1) ++before;
            }
        for (int i = lane; i < segment; i += 32) before += __popc(own_bits[s * segments + i]);
#pragma unroll
        for (int d = 16; d; d /= 2) before += __shfl_xor_sync(ALL, before, d);
        const u32 bits = own_bits[item];
        if (t < T) {
            const int row =
                bits >> lane & 1 ? static_cast<int>(before + __popc(bits & ((1u << lane) - 1))) : -1;
            own.where[static_cast<u64>(s) * T_max + t] = row;
        }
    }
}

// Tokens to their rows.
__device__ void Warp::receive() const {
    for (int item = node.first(warp); item < R * T_max * chunks; item += step()) {
        const int origin = item / chunks, c = origin / T_max, t = origin % T_max, chunk = item % chunks;
        const int at = c * segments + t / 32, v = chunk * 32 + lane;
        if (!(here[at] >> (t % 32) & 1)) continue;
        u32 before = 0;
        for (int i = lane; i < at; i += 32) before += __popc(here[i]);
#pragma unroll
        for (int d = 16; d; d /= 2) before += __shfl_xor_sync(ALL, before, d);
        const u64 row = before + __popc(here[at] & ((1u << (t % 32)) - 1));
        uint4 columns{};
        if (c == rank()) {
            if (v < vectors) columns = load_once(own.x + (static_cast<u64>(t) * vectors + v) * 8);
        } else {
            const bool came = node.g.until(
                [&] { return v >= vectors || take_vector(words(rank(), c, t, v), number(), columns); }, c,
                RECEIVER);
            if (!came) return;
        }
        if (v < vectors) part<uint4>(rank(), places.rows)[row * vectors + v] = columns;
        if (chunk != 0) continue;
        if (lane == 0) part<u32>(rank(), places.origins)[row] = origin;
        for (int first = 0; first < K; first += 32) {
            const int k = first + lane;
            u32 expert = 0, weight = 0;
            if (c == rank()) {
                if (k < K) {
                    const u64 pair_at = static_cast<u64>(t) * K + k;
                    const int e = own.ids[pair_at];
                    expert = owner(e) == rank() ? own.index[e] : -1;
                    weight = __float_as_uint(own.weights[pair_at]);
                }
            } else {
                const bool came = node.g.until(
                    [&] { return k >= K || take(pair(rank(), c, t, k), number(), expert, weight); }, c,
                    RECEIVER);
                if (!came) return;
            }
            if (k >= K) continue;
            part<u32>(rank(), places.ids)[row * K + k] = expert;
            part<u32>(rank(), places.weights)[row * K + k] = weight;
        }
    }
}

extern "C" __global__ void __launch_bounds__(CHANNELS * 32, 1)
    few_dispatch(const __grid_constant__ Call call) {
    __shared__ NodeShared shared;
    __shared__ u32 dead;
    u32* bits = reinterpret_cast<u32*>(dynamic_memory());
    const Local& own = call.local[blockIdx.y];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, vectors = call.H / 8, T_max = call.T_max;
    const int segments = (T_max + 31) / 32;
    const Group g(call, static_cast<int>(own.rank), 0, call.H * 2);
    const Node node{g};
    const Places places(node.rest(0) - g.heap(0), static_cast<u64>(R) * T_max, vectors, call.K);
    wait_for_predecessor();
    const int T = min(max(own.T[0], 0), T_max);
    if (threadIdx.x == 0) {
        node.begin(shared);
        dead = 0;
    }
    const Warp work{node,    own,
                    shared,  places,
                    warp,    lane,
                    vectors, (vectors + 31) / 32,
                    call.K,  T,
                    T_max,   segments,
                    bits,    bits + R * segments,
                    dead};
    // meanwhile
    const int first = node.first(warp);
    const bool some = first < T * work.chunks;
    const uint4 columns = some ? work.columns_of(first) : uint4{};
    const u32 to = some ? work.targets(first / work.chunks) : 0;
    __syncthreads();
    let_successor_start();
    if (shared.dead) return;
    work.send(to, columns);
    work.number_rows();
    workers_sync();
    if (!dead) {
        work.say_where();
        work.receive();
        if (blockIdx.x == 0 && threadIdx.x <= R) {
            u32 rows = 0;
            for (int i = 0; i < threadIdx.x * segments; ++i) rows += __popc(bits[i]);
            own.firsts[threadIdx.x] = rows;
        }
    }
    finish(node, shared);
}
