// SPDX-License-Identifier: Apache-2.0
// out[t] = sum over nodes of (sum over the node's ranks of their rows of t), fp32, ascending: combine of R
// ranks.
//
// The roles of ttnn_moe/parallel/hierarchical/roles.py, a warp each: CHANNELS channels a block, and a
// coordinator. The launch has one or more ranks (blockIdx.y); each may lie on another GPU, or several on one.
// It knows its peers by their heaps alone.
//
// | argument (of a rank)  | shape       | dtype      | |
// |-----------------------|-------------|------------|------------------------------------------------------|
// | x                     | [A, H]      | bf16, fp16 | 16 bytes aligned                                     |
// | out                   | [T, H]      | as x       | tokens without a row: the biases, or zero            |
// | bias_0, bias_1        | [T, H]      | as x, null | added before the one rounding                        |
// | masks                 | [R, T_max]  | u64        | bit r: rank r has a row of token t of rank c         |
// | rows                  | [R, T_max]  | int32      | this rank's row of token t of rank c, below R*T_max  |
// | T                     | [R]         | int32      | tokens of each rank, up to T_max                     |
//
// H is a multiple of 8. Slots hold the wire dtype: bf16 (fp16), or fp32 (WIRE32). BULK: see bulk.cuh; else
// vectors.cuh. A ring's slots are a power of two. Blocks: (SMs of a rank, ranks), all resident; threads:
// (ROLES * CHANNELS + 1) * 32. By launch bounds at most 128 registers.
#ifndef R_INTER
#define R_INTER 1
#endif
#ifndef R_INTRA
#define R_INTRA 2
#endif
#ifndef CHANNELS
#define CHANNELS 7
#endif
#ifndef WIRE32
#define WIRE32 0
#endif
#ifndef STALLS
#define STALLS -1  // of tests: a rank that stops, in this role, at its second item
#define STALL_ROLE 0
#endif
#ifndef BULK
#define BULK 0
#endif
#ifndef NETWORK
#define NETWORK 0
#endif
#ifndef SEND_ROWS
#define SEND_ROWS 1
#endif
#include "common/element.cuh"

struct Local {  // one rank of this launch
    const u16* x;
    u16* out;
    const u16 *bias_0, *bias_1;
    const u64* masks;
    const int* rows;
    const int* T;
    u64 rank;
};

#if BULK
#include "combine/bulk.cuh"
#else
#include "combine/vectors.cuh"
struct Pipe {};
#endif

constexpr int SENDERS = R_INTRA > 1, FORWARDERS = R_INTER > 1;
constexpr int ROLES = SENDERS + FORWARDERS + 1;

// What is no row becomes one: a dispatch that a dead rank ended leaves anything.
__device__ __forceinline__ int bounded(int row, const Call& call) {
    return min(max(row, 0), R * call.T_max - 1);
}

// A warp of one role and one channel; a lane stands for a rank where the roles look at all of them.
struct Warp {
    const Group& g;
    const Local& own;
    const int ch, w, lane, H, vectors;
    volatile u32 *counts, *puts;  // [RINGS] of the channel, in Shared
    Pipe pipe;                    // of a role that sums
    Carrier carrier;              // of a sender
    // this lane's rank c, the mask and the row of its first token, and its T: loaded before the block begins
    const int c;
    u64 mask;
    int row, T_of;

    __device__ u64 address_of_lane(const void* pointer, int from) const {
        return __shfl_sync(ALL, reinterpret_cast<u64>(pointer), from);
    }

    __device__ const unsigned char* x_row(int row) const {
        return reinterpret_cast<const unsigned char*>(own.x + static_cast<u64>(row) * H);
    }

    // This lane's rank c: the mask of its token t, and the row here; past T, anything.
    __device__ u64 mask_of(int c, int t) const {
        return t < g.call.T_max ? own.masks[static_cast<u64>(c) * g.call.T_max + t] : 0;
    }
    __device__ int row_of(int c, int t) const {
        return t < g.call.T_max ? bounded(own.rows[static_cast<u64>(c) * g.call.T_max + t], g.call) : 0;
    }

    __device__ bool stalls(int items, int role) const {
        if (STALLS != g.rank || STALL_ROLE != role || items < 1) return false;
        while (!g.aborted()) __nanosleep(1000);
        return true;
    }

    template <bool NODES, class Emit>
    __device__ void sum(u32 present, u64 row_of_lane, Emit emit) {
#if BULK
        sum_rows<NODES>(pipe, g, present, row_of_lane, vectors, emit);
#else
        sum_rows<NODES>(g, present, row_of_lane, vectors, emit);
#endif
    }

    __device__ void send();
    __device__ void forward();
    __device__ void receive();
};

__device__ void Warp::send() {
    // lane c: the stream to rank c, through the rank of this node with c's local index
    const int far = c / R_INTRA, other = c % R_INTRA;
    const bool some = lane < R && other != g.local;
    int number = 0;
    const int T = some ? T_of : 0, ring = g.inside(g.local, far, ch), back = g.inside(other, far, ch);
    Sends<Carrier> sends(carrier, puts + entry_inside(other, far), some);
    u32 freed = some ? load_relaxed_sys(g.head(g.rank, back)) : 0;
    const int most = __reduce_max_sync(ALL, T), forwarder = g.node * R_INTRA + other;
    for (int t = ch; t < most; t += g.C) {
        u32 todo = __ballot_sync(ALL, t < T && mask >> g.rank & 1);
        const unsigned char* from = x_row(row);
        mask = mask_of(c, t + g.C);
        row = row_of(c, t + g.C);
        for (; todo; todo &= todo - 1) {
            const int s = __ffs(todo) - 1;
            if (stalls(number++, SENDER)) return;
            sends.settle<SEND_ROWS - 1>();
            carrier.fetch(reinterpret_cast<const void*>(address_of_lane(from, s)));
            const u32 item = __shfl_sync(ALL, sends.items, s);
            const u32 want = item + 1 - g.call.slots;
            bool may = true;
            if (!reached(__shfl_sync(ALL, freed, s), want)) {
                sends.settle<0>();  // before any wait: a peer may need it to free the slot
                may = g.wait(lane == s, g.head(g.rank, back), want, forwarder, SENDER);
                if (lane == s) freed = load_relaxed_sys(g.head(g.rank, back));
            }
            carrier.arrive();
            if (!may) return;
            carrier.put(g.data(__shfl_sync(ALL, forwarder, s), __shfl_sync(ALL, ring, s), item));
            carrier.commit();
            sends.sent(lane == s);
        }
    }
    sends.settle<0>();
}

__device__ void Warp::forward() {
    // lane n: the stream to rank (n, local). lane r: rank r of this node as a source
    const int far = c / R_INTRA;
    const bool some = lane < R_INTER && far != g.node;
    int number = 0;
    const int T = some ? T_of : 0;
    u32 items = some ? puts[entry_between(far)] : 0;
    const int most = __reduce_max_sync(ALL, T), la = lane - g.node * R_INTRA;
    for (int t = ch; t < most; t += g.C) {
        const u32 bits = ((1u << R_INTRA) - 1) << (g.node * R_INTRA);
        const u32 part = t < T ? static_cast<u32>(mask) & bits : 0;
        const int x_of = row;
        u32 todo = __ballot_sync(ALL, part != 0);
        mask = mask_of(c, t + g.C);
        row = row_of(c, t + g.C);
        for (; todo; todo &= todo - 1) {
            const int n = __ffs(todo) - 1;
            const u32 here = __shfl_sync(ALL, part, n);
            if (stalls(number++, FORWARDER)) return;
            const bool comes = here >> lane & 1 && lane != g.rank;
            const int entry = comes ? entry_inside(la, n) : 0, ring = g.inside(la, n, ch);
            const u32 got = comes ? counts[entry] : 0;
            if (!g.wait(comes, g.tail(g.rank, ring), got + 1, lane, FORWARDER)) return;
            const u32 item = __shfl_sync(ALL, items, n);
            const u32* head = g.head(g.rank, g.between(n, ch));
            if (!g.wait(lane == 0, head, item + 1 - g.call.slots, n * R_INTRA + g.local, FORWARDER)) return;
            const int mine = __shfl_sync(ALL, x_of, n);
            const u64 from = reinterpret_cast<u64>(lane == g.rank ? x_row(mine) : g.data(g.rank, ring, got));
            unsigned char* to = slot_between(g, n * R_INTRA + g.local, g.between(g.node, ch), item);
            sum<false>(here, from, [&](int v, const float* total) { store_slot(to, v, total); });
            __syncwarp();
            __threadfence_block();
            if (comes) counts[entry] = got + 1;
            if (lane == n) puts[entry_between(n)] = ++items;
        }
    }
}

__device__ void Warp::receive() {
    // lane r: rank r as a source: of rows in this node, of its node's partial where it has this local index
    const int r = lane < R ? lane : 0, n_of = r / R_INTRA, la_of = r % R_INTRA;
    const int T = T_of;
    const bool inside = lane < R && n_of == g.node, partial = lane < R && n_of != g.node && la_of == g.local;
    const int entry = inside ? entry_inside(la_of, g.node) : entry_between(n_of);
    const int ring = entry * g.C + ch;
    const u32 node_bits = ((1u << R_INTRA) - 1) << (n_of * R_INTRA);
    for (int t = ch; t < T; t += g.C) {
        const u32 now = static_cast<u32>(mask);
        const int x_of = row;
        mask = mask_of(g.rank, t + g.C);
        row = row_of(g.rank, t + g.C);
        if (stalls((t - ch) / g.C, RECEIVER)) return;
        const bool counts_here = (inside && now >> r & 1) || (partial && now & node_bits);
        const u32 present = __ballot_sync(ALL, counts_here);
        const bool comes = counts_here && lane != g.rank;
        const u32 got = comes ? counts[entry] : 0;
        if (!g.wait(comes, g.tail(g.rank, ring), got + 1, r, RECEIVER)) return;
        const u64 from = reinterpret_cast<u64>(lane == g.rank ? x_row(x_of) : g.data(g.rank, ring, got));
        sum<true>(present, from, [&](int v, float* total) {
            const u64 at = static_cast<u64>(t) * H + v * 8;
            if (own.bias_0) add_elements(total, load_once(own.bias_0 + at));
            if (own.bias_1) add_elements(total, load_once(own.bias_1 + at));
            *reinterpret_cast<uint4*>(own.out + at) = packed(total);
        });
        __syncwarp();
        if (comes) counts[entry] = got + 1;
    }
}

extern "C" __global__ void __launch_bounds__((ROLES * CHANNELS + 1) * 32, 1)
    rank_combine(const __grid_constant__ Call call) {
    __shared__ Shared shared;
    __shared__ u32 dead;
    const Local& own = call.local[blockIdx.y];
    const int C = gridDim.x * CHANNELS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int role = warp / CHANNELS, w = warp % CHANNELS, first = blockIdx.x * CHANNELS;
    const Group g(call, static_cast<int>(own.rank), C, call.H * (WIRE32 ? 4 : 2));
    Pipe pipe{};
    Carrier carrier{};
#if BULK
    __shared__ alignas(8) u64 barriers[ROLES * CHANNELS * BARRIERS];
    const u32 row = call.H * 2, receivers = CHANNELS * STAGES * SOURCES * CHUNK;
    const u32 forwarders = FORWARDERS * CHANNELS * STAGES * R_INTRA * CHUNK;
    pipe.memory = shared_address(dynamic_memory()) + (role == 0 ? w * STAGES * SOURCES * CHUNK
                                                      : FORWARDERS && role == 1
                                                          ? receivers + w * STAGES * R_INTRA * CHUNK
                                                          : receivers + forwarders + w * SEND_ROWS * row);
    pipe.barriers = shared_address(barriers + warp * BARRIERS);
    carrier = {pipe.memory, pipe.barriers, row, SEND_ROWS, 0};
    if (warp < ROLES * CHANNELS && lane < BARRIERS) barrier_init(pipe.barriers + 8 * lane, 1);
    barrier_init_fence();
#else
    carrier.vectors = call.H / 8;
#endif
    wait_for_predecessor();
    const int c = role == 0                 ? g.rank
                  : FORWARDERS && role == 1 ? (lane < R_INTER ? lane : 0) * R_INTRA + g.local
                  : lane < R                ? lane
                                            : 0;
    const u64 of = static_cast<u64>(c) * call.T_max + min(first + w, call.T_max - 1);
    const u64 mask = own.masks[of];
    const int row_of = bounded(own.rows[of], call), T_of = min(max(own.T[c], 0), call.T_max);
    if (threadIdx.x == 0) {
        shared.left = ROLES * CHANNELS;
        dead = g.aborted();
        Status* status = g.status(g.rank);
        if (blockIdx.x == 0) store_relaxed_sys(&status->entered, load_relaxed_sys(&status->entered) + 1);
    }
    load_counts(g, shared, first);
    __syncthreads();
    let_successor_start();
    if (dead) return;
    if (warp == ROLES * CHANNELS) {
        coordinate(g, shared);
        return;
    }
    Warp work{g,
              own,
              first + w,
              w,
              lane,
              call.H,
              call.H / 8,
              shared.read + w * RINGS,
              shared.put + w * RINGS,
              pipe,
              carrier,
              c,
              mask,
              row_of,
              T_of};
    if (role == 0) {
        work.receive();
    } else if (FORWARDERS && role == 1) {
        work.forward();
    } else {
        work.send();
    }
    work.carrier.settle<0>();
    __syncwarp();
    __threadfence_block();
    if (lane == 0) atomicSub(&shared.left, 1u);
}
