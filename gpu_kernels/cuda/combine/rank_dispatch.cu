// SPDX-License-Identifier: Apache-2.0
// rows[a] = x of the token, in the order of its rank, then of the token: dispatch of R ranks.
//
// The roles of ttnn_moe/parallel/hierarchical/roles.py, a warp each: CHANNELS channels a block, and a
// coordinator. The launch has one or more ranks (blockIdx.y); each may lie on another GPU, or several on one.
// It knows its peers by their heaps alone. A token goes once to each rank with one of its experts, and once
// to each other node.
//
// | argument (of a rank)    | shape            | dtype      | |
// |-------------------------|------------------|------------|--------------------------------------------------|
// | x                       | [T, H]           | bf16, fp16 | 16 bytes aligned                                 |
// | ids, weights            | [T, K]           | int32, fp32| ids outside 0 .. E-1 go nowhere                  |
// | T                       | [1]              | int32      | tokens of this rank, up to T_max                 |
// | owner, local_of         | [E]              | int32      | rank of an expert; its number here, or -1        |
// | rows                    | [R * T_max, H]   | as x       | out: the first A                                 |
// | row_ids, row_weights    | [R * T_max, K]   | int32, fp32| out: local experts, -1: not here                 |
// | masks, row_of, tokens   | [R, T_max], [R]  | u64, int32 | out: masks, rows and T of combine                |
// | A                       | [1]              | int32      | out: rows                                        |
//
// | heap, after the slots   | bytes            | written by                                                |
// |-------------------------|------------------|-----------------------------------------------------------|
// | announced               | R * 32           | each rank: its blocks that announced, over all calls      |
// | calls                   | gridDim.x * 4    | this rank: calls of each block                            |
// | tokens                  | 2 * R * 4        | each rank: its T, of even and of odd calls                |
// | masks                   | 2 * R * T_max * 4| each rank: the ranks that a token goes to                 |
//
// A rank announces call n + 1 only after call n, for which it waited for all ranks to enter it. So all ranks
// have ended call n - 1, and two copies of the masks are enough.
//
// H is a multiple of 8. A slot is H elements, K ids, K weights, padded to 16 bytes. BULK: see bulk.cuh; else
// vectors.cuh. Blocks: (SMs of a rank, ranks), all resident; threads: (ROLES * CHANNELS + 1) * 32. Dynamic
// shared memory: rows of the carriers (BULK), then R * ceil(T_max / 32) * 8 bytes. By launch bounds at most
// 128 registers.
#ifndef R_INTER
#define R_INTER 1
#endif
#ifndef R_INTRA
#define R_INTRA 2
#endif
#ifndef CHANNELS
#define CHANNELS 7
#endif
#ifndef STALLS
#define STALLS -1  // of tests: a rank that stops, in this role, at its second item
#define STALL_ROLE 0
#endif
#ifndef BULK
#define BULK 0
#endif
#ifndef SEND_ROWS
#define SEND_ROWS 1
#endif
#ifndef TAKE_ROWS
#define TAKE_ROWS 1
#endif
#define WIRE32 0
#define NETWORK 0
#define STAGES 1
#include "common/element.cuh"

struct Local {  // one rank of this launch
    const u16* x;
    const int* ids;
    const float* weights;
    const int* T;
    const int *owner, *local_of;
    u16* rows;
    int* row_ids;
    float* row_weights;
    u64* masks;
    int *row_of, *tokens, *A;
    u64 rank;
};

#if BULK
#include "combine/bulk.cuh"
#else
#include "combine/vectors.cuh"
#endif

#include "combine/dispatch_announcer.cuh"
#include "combine/dispatch_forwarder.cuh"
#include "combine/dispatch_receiver.cuh"

extern "C" __global__ void __launch_bounds__((ROLES * CHANNELS + 1) * 32, 1)
    rank_dispatch(const __grid_constant__ Call call) {
    __shared__ Shared shared;
    __shared__ u32 dead, calls;
    __shared__ Found found;
    const Local& own = call.local[blockIdx.y];
    const int C = gridDim.x * CHANNELS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int role = warp / CHANNELS, w = warp % CHANNELS, first = blockIdx.x * CHANNELS;
    const Group g(call, static_cast<int>(own.rank), C, (call.H * 2 + call.K * 8 + 15) / 16 * 16);
    Carrier carrier{};
    const int segments = (call.T_max + 31) / 32;
    u32* words = reinterpret_cast<u32*>(dynamic_memory());
#if BULK
    constexpr int HELD = SEND_ROWS > TAKE_ROWS ? SEND_ROWS : TAKE_ROWS;
    __shared__ alignas(8) u64 barriers[ROLES * CHANNELS * HELD];
    const u32 bytes = call.H * 2, takes = CHANNELS * TAKE_ROWS * bytes;
    const u32 at =
        role == 0 ? w * TAKE_ROWS * bytes : takes + ((role - 1) * CHANNELS + w) * SEND_ROWS * bytes;
    carrier = {shared_address(words) + at, shared_address(barriers + warp * HELD), bytes,
               role == 0 ? TAKE_ROWS : SEND_ROWS, 0};
    if (warp < ROLES * CHANNELS && lane < HELD) barrier_init(carrier.barriers + 8 * lane, 1);
    barrier_init_fence();
    words += (takes + (ROLES - 1) * CHANNELS * SEND_ROWS * bytes) / 4;
#else
    carrier.vectors = call.H / 8;
#endif
    const Numbers numbers{words, words + R * segments, segments};
    Warp asks{g, own, numbers, first + w, lane, call.H, call.K, call.T_max, 0, nullptr, nullptr, carrier};
    wait_for_predecessor();
    if (threadIdx.x == 0) {
        shared.left = ROLES * CHANNELS;
        dead = g.aborted();
        calls = *asks.calls();
        Status* status = g.status(g.rank);
        if (blockIdx.x == 0) store_relaxed_sys(&status->entered, load_relaxed_sys(&status->entered) + 1);
    }
    load_counts(g, shared, first);
    __syncthreads();
    let_successor_start();
    if (dead) return;
    if (warp == ROLES * CHANNELS) {
        coordinate(g, shared);
        if (lane == 0) *asks.calls() = calls + 1;
        return;
    }
    Warp work{g,
              own,
              numbers,
              first + w,
              lane,
              call.H,
              call.K,
              call.T_max,
              calls,
              shared.read + w * RINGS,
              shared.put + w * RINGS,
              carrier};
    if (warp < PREPARERS) {
        work.announce(warp);
        if (work.number(warp, found)) {
            if (role == 0) {
                work.receive(found);
                work.tell_combine(found);
            } else {
                work.forward(found);
            }
        }
    } else {
        work.send();
    }
    work.carrier.settle<0>();
    __syncwarp();
    __threadfence_block();
    if (lane == 0) atomicSub(&shared.left, 1u);
}
