// SPDX-License-Identifier: Apache-2.0
// Each token goes once to each rank of one node that has one of its experts, straight to its row: dispatch.
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
// | heap, the kernel's part | shape            | written by                                                |
// |-------------------------|------------------|-----------------------------------------------------------|
// | tokens                  | [R] u64          | each rank: its T, and the call                            |
// | masks                   | [R, T_max] u64   | each rank: the ranks that a token goes to, and the call   |
// | rows                    | [R * T_max, H]   | every rank; out: the first A, by rank, then token         |
// | row_ids, row_weights    | [R * T_max, K]   | every rank; out: local experts, -1: not here              |
// | origins                 | [R * T_max]      | every rank; out: the row's rank * T_max + its token       |
//
// Each part is 128 bytes aligned. The upper half of an announced word is the number of the call, from 1, so a
// word needs no flag. It also says that the rank has used the rows of the call before.
//
// H is a multiple of 8. A warp moves a token. BULK: see bulk.cuh; else vectors.cuh. Blocks:
// (SMs of a rank, ranks), all resident; threads: CHANNELS * 32. Dynamic shared memory: rows (BULK), then R *
// ceil(T_max / 32) * 8 bytes.
#define STAGES 1
#include "common/element.cuh"

struct Local {  // one rank of this launch
    const u16* x;
    const int* ids;
    const float* weights;
    const int *T, *owner, *index;
    int *where, *firsts;
    u64 rank;
};

#include "combine/node.cuh"

struct Found {  // in shared memory
    u32 dead;
    u32 from[R];    // rows here, of each rank
    u32 before[R];  // rows of lower ranks, at each rank
};

struct Pair {  // of a token and one of its experts
    int owner, index;
    float weight;
};

struct Warp {
    const Node node;
    const Local& own;
    NodeShared& shared;
    const u32 call;
    const int warp, lane, H, K, T, T_max, segments;
    u32 *bits, *base;  // of this rank's tokens, [R, segments]: who gets them; rows before them
    Carrier carrier;

    __device__ static u64 up(u64 bytes) { return (bytes + 127) / 128 * 128; }
    __device__ u64* tokens(int r, int by) const { return reinterpret_cast<u64*>(node.rest(r)) + by; }
    __device__ u64* mask(int r, int by, int t) const {
        return tokens(r, R) + static_cast<u64>(by) * T_max + t;
    }
    __device__ u64 word(u32 said) const { return static_cast<u64>(number_of(call)) << 32 | said; }
    __device__ bool said(u64 word) const { return static_cast<u32>(word >> 32) == number_of(call); }
    __device__ unsigned char* rows(int r) const {
        return node.rest(r) + up((R + static_cast<u64>(R) * T_max) * 8);
    }
    __device__ int* row_ids(int r) const {
        return reinterpret_cast<int*>(rows(r) + up(static_cast<u64>(R) * T_max * H * 2));
    }
    __device__ float* row_weights(int r) const {
        return reinterpret_cast<float*>(reinterpret_cast<unsigned char*>(row_ids(r)) +
                                        up(static_cast<u64>(R) * T_max * K * 4));
    }
    __device__ int* origins(int r) const {
        return reinterpret_cast<int*>(reinterpret_cast<unsigned char*>(row_weights(r)) +
                                      up(static_cast<u64>(R) * T_max * K * 4));
    }
    __device__ bool known(int e) const { return static_cast<u32>(e) < static_cast<u32>(node.g.call.E); }

    __device__ int first() const { return node.first(warp); }
    __device__ void fetch(int t) { carrier.fetch(own.x + static_cast<u64>(t) * H); }

    __device__ Pair pair_of(int t, int k) const {
        if (t >= T || k >= K) return {-1, -1, 0.0f};
        const u64 at = static_cast<u64>(t) * K + k;
        const int e = own.ids[at];
        return {known(e) ? own.owner[e] : -1, known(e) ? own.index[e] : -1, own.weights[at]};
    }

    __device__ void announce() const;
    __device__ bool number(Found& found) const;
    __device__ void send(Pair next);
};

// This rank's masks to every rank.
__device__ void Warp::announce() const {
    if (node.stalls(1, ANNOUNCER)) return;
    if (blockIdx.x == 0 && warp == 0 && lane < R) store_relaxed_sys(tokens(lane, node.g.rank), word(T));
    for (int t = (blockIdx.x * CHANNELS + warp) * 32 + lane; t < T; t += gridDim.x * CHANNELS * 32) {
        u32 to = 0;
        for (int k = 0; k < K; ++k) {
            const int e = own.ids[static_cast<u64>(t) * K + k];
            if (known(e)) to |= 1u << own.owner[e];
        }
#pragma unroll
        for (int r = 0; r < R; ++r) store_relaxed_sys(mask(r, node.g.rank, t), word(to));
    }
}

// The rows of this rank's tokens: after all ranks announced. false: the group is dead.
__device__ bool Warp::number(Found& found) const {
    const int rank = node.g.rank;
    const auto dead = [&](bool met) {
        if (!met) found.dead = 1;
        return !met;
    };
    u64 count = 0;
    const bool met = node.g.until(
        [&] {
            if (lane < R) count = load_relaxed_sys(tokens(rank, lane));
            return lane >= R || said(count);
        },
        lane, ANNOUNCER);
    const int T_of = dead(met) ? 0 : min(static_cast<int>(static_cast<u32>(count)), T_max);
    constexpr int BATCH = 4;
    const int all = R * segments;
    for (int first = warp * BATCH; first < all; first += CHANNELS * BATCH) {
        u64 to[BATCH];
        const bool came = node.g.until(
            [&] {
                bool all_said = true;
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    const int at = min(first + i, all - 1), c = at / segments, t = at % segments * 32 + lane;
                    const bool some = t < __shfl_sync(ALL, T_of, c);
                    to[i] = some ? load_relaxed_sys(mask(rank, c, t)) : 0;
                    all_said &= !some || said(to[i]);
                    if (!some) to[i] = 0;
                }
                return all_said;
            },
            first / segments, ANNOUNCER);
        if (dead(came)) break;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int at = first + i, c = at / segments;
            if (at >= all) break;
            u32 mine = 0;  // of lane r: tokens to rank r
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const u32 word = __ballot_sync(ALL, to[i] >> r & 1);
                if (lane == r) mine = word;
            }
            if (lane < R && c == rank) bits[lane * segments + at % segments] = mine;
            if (lane < R && c < rank && mine) atomicAdd(&found.before[lane], __popc(mine));
            if (lane == rank && mine) atomicAdd(&found.from[c], __popc(mine));
        }
    }
    fence_sys();
    workers_sync();
    if (found.dead) return false;
    for (int r = warp; r < R; r += CHANNELS) {
        u32 total = found.before[r];
        for (int first = 0; first < segments; first += 32) {
            const u32 count = first + lane < segments ? __popc(bits[r * segments + first + lane]) : 0;
            u32 sum = count;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const u32 less = __shfl_up_sync(ALL, sum, d);
                if (lane >= d) sum += less;
            }
            if (first + lane < segments) base[r * segments + first + lane] = total + sum - count;
            total += __shfl_sync(ALL, sum, 31);
        }
    }
    workers_sync();
    return true;
}

// next: of this lane and the first token.
__device__ void Warp::send(Pair next) {
    const int r = lane < R ? lane : 0;
    int items = 0;
    for (int t = first(), after; t < T; t = after) {
        const u32 claim = node.claim(shared, T);
        const int at = r * segments + t / 32;
        const u32 word = bits[at], below = (1u << (t % 32)) - 1;
        const bool has = lane < R && word >> (t % 32) & 1;
        const u32 row = base[at] + __popc(word & below);
        if (lane < R) own.where[static_cast<u64>(lane) * T_max + t] = has ? static_cast<int>(row) : -1;
        const u32 targets = __ballot_sync(ALL, has);
        if (node.stalls(items++, SENDER)) return;
        if (t != first()) {
            if (!targets) {
                after = node.claimed(claim);
                next = pair_of(after, lane);
                continue;
            }
            carrier.reuse<SEND_ROWS - 1>();
            fetch(t);
        }
        const Pair now = next;
        after = node.claimed(claim);
        next = pair_of(after, lane);
        if (has) origins(lane)[row] = node.g.rank * T_max + t;
        for (int k = lane; k < K; k += 32) {
            const Pair pair = k == lane ? now : pair_of(t, k);
            for (u32 todo = targets; todo; todo &= todo - 1) {
                const int s = __ffs(todo) - 1, to_bits = s * segments + t / 32;
                const u64 to = static_cast<u64>(base[to_bits] + __popc(bits[to_bits] & below)) * K + k;
                row_ids(s)[to] = pair.owner == s ? pair.index : -1;
                row_weights(s)[to] = pair.weight;
            }
        }
        carrier.arrive();
#pragma unroll
        for (int i = 1; i <= R; ++i) {
            const int s = (node.g.rank + i) % R;  // each rank begins with another
            if (!(targets >> s & 1)) continue;
            carrier.put(rows(s) + static_cast<u64>(__shfl_sync(ALL, row, s)) * H * 2);
        }
        carrier.commit();
    }
}

extern "C" __global__ void __launch_bounds__(CHANNELS * 32, 1)
    node_dispatch(const __grid_constant__ Call call) {
    __shared__ NodeShared shared;
    __shared__ Found found;
    const Local& own = call.local[blockIdx.y];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Group g(call, static_cast<int>(own.rank), 0, call.H * 2);
    const Node node{g};
    u32* words = reinterpret_cast<u32*>(dynamic_memory());
    Carrier carrier{};
#if BULK
    __shared__ alignas(8) u64 barriers[CHANNELS * SEND_ROWS];
    const u32 bytes = call.H * 2;
    carrier = {shared_address(words) + warp * SEND_ROWS * bytes, shared_address(barriers + warp * SEND_ROWS),
               bytes, SEND_ROWS, 0};
    if (lane < SEND_ROWS) barrier_init(carrier.barriers + 8 * lane, 1);
    barrier_init_fence();
    words += CHANNELS * SEND_ROWS * bytes / 4;
#else
    carrier.vectors = call.H / 8;
#endif
    wait_for_predecessor();
    const int T = min(max(own.T[0], 0), call.T_max), segments = (call.T_max + 31) / 32;
    if (threadIdx.x == 0) {
        node.begin(shared);
        found.dead = 0;
    }
    if (threadIdx.x < R) found.before[threadIdx.x] = found.from[threadIdx.x] = 0;
    __syncthreads();
    let_successor_start();
    if (shared.dead) return;
    Warp work{node,       own,      shared, shared.call,          warp,   lane, call.H, call.K, T,
              call.T_max, segments, words,  words + R * segments, carrier};
    work.announce();
    // meanwhile
    if (work.first() < T) work.fetch(work.first());
    const Pair pair = work.pair_of(work.first(), lane);
    if (work.number(found)) {
        work.send(pair);
        work.carrier.settle<0>();
        if (blockIdx.x == 0 && threadIdx.x <= R) {
            u32 rows = 0;
            for (int c = 0; c < threadIdx.x; ++c) rows += found.from[c];
            own.firsts[threadIdx.x] = rows;
        }
    } else if (work.first() < T) {
        work.carrier.arrive();
    }
    node.end(shared, warp, RECEIVER);
}
