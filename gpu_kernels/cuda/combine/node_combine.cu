// SPDX-License-Identifier: Apache-2.0
// out[t] = sum over the ranks of one node of their rows of t, fp32, ascending: combine that reads rows in
// place.
//
// | argument (of a rank)  | shape       | dtype      | |
// |-----------------------|-------------|------------|------------------------------------------------------|
// | out                   | [T, H]      | as x       | tokens without a row: the biases, or zero            |
// | bias_0, bias_1        | [T, H]      | as x, null | added before the one rounding                        |
// | where                 | [R, T_max]  | int32      | row of token t in rank r's x, or -1                  |
// | T                     | [1]         | int32      | tokens of this rank, up to T_max                     |
// | in the heap: x        | [R*T_max, H]| bf16, fp16 | this rank's rows of all ranks' tokens                |
//
// H is a multiple of 8. A warp a token. BULK: see bulk.cuh; else vectors.cuh. Blocks: (SMs of a rank, ranks),
// all resident; threads: CHANNELS * 32. By launch bounds at most 128 registers.
#include "common/element.cuh"

struct Local {  // one rank of this launch
    u16* out;
    const u16 *bias_0, *bias_1;
    const int *where, *T, *origins, *firsts;  // the last two: of few_combine
    u64 rank;
};

#include "combine/node.cuh"

struct Warp {
    const Node node;
    const Local& own;
    NodeShared& shared;
    const int first, lane, H, vectors, T, T_max;
    int row;  // of this lane's rank, of the first token
    Pipe pipe;

    // -1 also for what is no row: a dispatch that a dead rank ended leaves anything
    __device__ int row_of(int t) const {
        const int found = lane < R && t < T_max ? own.where[static_cast<u64>(lane) * T_max + t] : -1;
        return found < R * T_max ? found : -1;
    }
    __device__ void combine();
};

__device__ void Warp::combine() {
    const unsigned char* x = node.rest(lane < R ? lane : 0);
    for (int t = first, next; t < T; t = next) {
        const int now = row;
        next = node.claimed(node.claim(shared, T));
        row = row_of(next);
        if (node.stalls(t != first, RECEIVER)) return;
        const u32 present = __ballot_sync(ALL, lane < R && now >= 0);
        const u64 from = reinterpret_cast<u64>(x) + static_cast<u64>(max(now, 0)) * H * 2;
        const auto emit = [&](int v, float* total) {
            const u64 at = static_cast<u64>(t) * H + v * 8;
            if (own.bias_0) add_elements(total, load_once(own.bias_0 + at));
            if (own.bias_1) add_elements(total, load_once(own.bias_1 + at));
            *reinterpret_cast<uint4*>(own.out + at) = packed(total);
        };
#if BULK
        sum_rows<true>(pipe, node.g, present, from, vectors, emit);
#else
        sum_rows<true>(node.g, present, from, vectors, emit);
#endif
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(CHANNELS * 32, 1)
    node_combine(const __grid_constant__ Call call) {
    __shared__ NodeShared shared;
    const Local& own = call.local[blockIdx.y];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Group g(call, static_cast<int>(own.rank), 0, call.H * 2);
    const Node node{g};
    Pipe pipe{};
#if BULK
    __shared__ alignas(8) u64 barriers[CHANNELS * BARRIERS];
    pipe.memory = shared_address(dynamic_memory()) + warp * STAGES * SOURCES * CHUNK;
    pipe.barriers = shared_address(barriers + warp * BARRIERS);
    if (lane < BARRIERS) barrier_init(pipe.barriers + 8 * lane, 1);
    barrier_init_fence();
#endif
    wait_for_predecessor();
    if (warp == 0 && blockIdx.x == 0) node.enter();
    const int ch = node.first(warp);
    Warp work{node,       own, shared, ch, lane, call.H, call.H / 8, min(max(own.T[0], 0), call.T_max),
              call.T_max, 0,   pipe};
    work.row = work.row_of(ch);
    if (threadIdx.x == 0) node.begin(shared);
    __syncthreads();
    let_successor_start();
    if (shared.dead) return;
    if (node.entered(shared.call + 1, RECEIVER)) work.combine();
    node.end(shared, warp, RECEIVER);
}
