// SPDX-License-Identifier: Apache-2.0
// As node_combine.cu, of few tokens: each rank puts its rows of a token where the token's rank waits for
// them.
//
// | argument (of a rank)  | shape       | dtype      |                                                      |
// |-----------------------|-------------|------------|------------------------------------------------------|
// | out                   | [T, H]      | bf16, fp16 | row-major, 16 bytes aligned; may be bias_0           |
// | bias_0, bias_1        | [T, H]      | as out     | or null                                              |
// | where                 | [R, T_max]  | int32      | row of token t in rank r's rows, or -1               |
// | T                     | [1]         | int32      | tokens of this rank, up to T_max                     |
// | origins               | [R * T_max] | int32      | of this rank's row: its rank * T_max + its token     |
// | firsts                | [R + 1]     | int32      | where the rows of each rank's tokens begin; all rows |
// | in the heap: x        | [R*T_max, H]| bf16, fp16 | this rank's rows of all ranks' tokens                |
// | behind: words         | [2, R, T_max, H / 8, 4] u64 | the other ranks' rows: see few.cuh              |
//
// H is a multiple of 8. Each part is 128 bytes aligned. A warp moves 32 vectors of 8 columns at a time.
#include "common/element.cuh"

struct Local {  // one rank of this launch
    u16* out;
    const u16 *bias_0, *bias_1;
    const int *where, *T, *origins, *firsts;
    u64 rank;
};

#include "combine/few.cuh"

struct Warp {
    const Node node;
    const Local& own;
    const int first, lane, vectors, chunks, T_max;
    const u32 call;

    __device__ int step() const { return gridDim.x * CHANNELS; }
    __device__ const unsigned char* row(int row, int v) const {
        return node.rest(node.g.rank) + (static_cast<u64>(row) * vectors + v) * 16;
    }
    __device__ u64* words(int r, int by, int t, int v) const {
        const u64 rows = (static_cast<u64>(R) * T_max * vectors * 16 + 127) / 128 * 128;
        const u64 at = ((call & 1) * R + by) * static_cast<u64>(T_max) + t;
        return reinterpret_cast<u64*>(node.rest(r) + rows) + (at * vectors + v) * 4;
    }
    __device__ void send(int A) const;
    __device__ void receive(int T) const;
};

// This rank's rows to the ranks of their tokens.
__device__ void Warp::send(int A) const {
    int items = 0;
    for (int item = first; item < A * chunks; item += step()) {
        const int n = item / chunks, v = item % chunks * 32 + lane;
        const u32 origin = own.origins[n];
        const int to = origin / T_max;
        if (node.stalls(items++, SENDER)) return;
        // what is no row: a dispatch that a dead rank ended leaves anything
        if (to == node.g.rank || to >= R || v >= vectors) continue;
        put_vector(words(to, node.g.rank, origin % T_max, v), load_once(row(n, v)), number_of(call));
    }
}

__device__ void Warp::receive(int T) const {
    const int rank = node.g.rank;
    for (int item = first; item < T * chunks; item += step()) {
        const int t = item / chunks, v = item % chunks * 32 + lane;
        const int found = lane < R ? own.where[static_cast<u64>(lane) * T_max + t] : -1;
        const u32 present = __ballot_sync(ALL, found >= 0 && found < R * T_max);
        const int here = __shfl_sync(ALL, found, rank);
        uint4 parts[R], mine{};
        u32 missing = v < vectors ? present & ~(1u << rank) : 0;
        if (v < vectors && present >> rank & 1) mine = load_once(row(here, v));
        int peer = rank;
        const bool came = node.g.until(
            [&] {
#pragma unroll
                for (int r = R - 1; r >= 0; --r) {
                    if (!(missing >> r & 1)) continue;
                    if (take_vector(words(rank, r, t, v), number_of(call), parts[r]))
                        missing &= ~(1u << r);
                    else
                        peer = r;
                }
                return !missing;
            },
            peer, RECEIVER);
        if (!came) return;
        if (v >= vectors) continue;
        float total[8] = {};
#pragma unroll
        for (int r = 0; r < R; ++r)
            if (present >> r & 1) add_elements(total, r == rank ? mine : parts[r]);
        const u64 at = static_cast<u64>(item / chunks) * vectors * 8 + v * 8;
        if (own.bias_0) add_elements(total, load_once(own.bias_0 + at));
        if (own.bias_1) add_elements(total, load_once(own.bias_1 + at));
        *reinterpret_cast<uint4*>(own.out + at) = packed(total);
    }
}

extern "C" __global__ void __launch_bounds__(CHANNELS * 32, 1)
    few_combine(const __grid_constant__ Call call) {
    __shared__ NodeShared shared;
    const Local& own = call.local[blockIdx.y];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, vectors = call.H / 8;
    const Group g(call, static_cast<int>(own.rank), 0, call.H * 2);
    const Node node{g};
    wait_for_predecessor();
    const int T = min(max(own.T[0], 0), call.T_max), A = min(max(own.firsts[R], 0), R * call.T_max);
    if (threadIdx.x == 0) node.begin(shared);
    __syncthreads();
    let_successor_start();
    if (shared.dead) return;
    if (blockIdx.x == 0 && warp == 0 && lane < R)
        store_relaxed_sys(node.ready(lane, g.rank), shared.call + 1);
    const Warp work{node, own, node.first(warp), lane, vectors, (vectors + 31) / 32, call.T_max, shared.call};
    work.send(A);
    work.receive(T);
    if (blockIdx.x == 0 && warp == CHANNELS - 1) wait_for_entries(node, shared);
    finish(node, shared);
}
