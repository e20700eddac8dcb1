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

constexpr int SENDERS = R > 1, FORWARDERS = R_INTER > 1;
constexpr int ROLES = 1 + FORWARDERS + SENDERS;
constexpr int PREPARERS = (1 + FORWARDERS) * CHANNELS;  // warps that announce, and number rows
constexpr u32 NODE = (1u << R_INTRA) - 1;
static_assert(R_INTRA <= 8 && R <= 32, "bits of a node");

struct Found {  // in shared memory
    u32 dead, A;
    int tokens[R];
};

struct Numbers {  // of rows, in shared memory: of each rank and 32 tokens
    u32 *bits, *base;
    int segments;

    __device__ bool has(int c, int t) const { return bits[c * segments + t / 32] >> (t % 32) & 1; }
    __device__ u32 row(int c, int t) const {
        const int at = c * segments + t / 32;
        return base[at] + __popc(bits[at] & ((1u << (t % 32)) - 1));
    }
};

__device__ __forceinline__ void preparers_sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(PREPARERS * 32) : "memory");
}

// A warp of one role and one channel; a lane stands for a rank where the roles look at all of them.
struct Warp {
    const Group& g;
    const Local& own;
    const Numbers numbers;
    const int ch, lane, H, K, T_max;
    const u32 call;               // of this rank, modulo 2^32
    volatile u32 *counts, *puts;  // [RINGS] of the channel, in Shared
    Carrier carrier;

    __device__ unsigned char* announcements(int r) const {
        return g.data(r, RINGS * g.C, 0) +
               (128 - reinterpret_cast<u64>(g.data(r, RINGS * g.C, 0)) % 128) % 128;
    }
    __device__ u32* announced(int r, int by) const {
        return reinterpret_cast<u32*>(announcements(r)) + by * 8;
    }
    __device__ u32* calls() const { return announced(g.rank, R) + blockIdx.x; }
    __device__ u32* tokens(int r, int by) const { return announced(r, R) + gridDim.x + (call & 1) * R + by; }
    __device__ u32* mask(int r, int by, int t) const {
        return announced(r, R) + gridDim.x + 2 * R + (static_cast<u64>(call & 1) * R + by) * T_max + t;
    }

    __device__ int own_T() const { return min(max(own.T[0], 0), T_max); }
    __device__ u32 bit_of(int e) const {
        return static_cast<u32>(e) < static_cast<u32>(g.call.E) ? 1u << own.owner[e] : 0;
    }
    __device__ u32 mask_at(int c, int t) const {
        return t < T_max ? load_relaxed_sys(mask(g.rank, c, t)) : 0;
    }
    __device__ const unsigned char* x_row(int t) const {
        return reinterpret_cast<const unsigned char*>(own.x + static_cast<u64>(t) * H);
    }
    __device__ unsigned char* row(u32 a) const {
        return reinterpret_cast<unsigned char*>(own.rows + static_cast<u64>(a) * H);
    }
    __device__ const int* ids_of(const unsigned char* slot) const {
        return reinterpret_cast<const int*>(slot + static_cast<u64>(H) * 2);
    }

    __device__ bool stalls(int items, int role) const {
        if (STALLS != g.rank || STALL_ROLE != role || items < 1) return false;
        while (!g.aborted()) __nanosleep(1000);
        return true;
    }

    // Ids and weights of a token into a slot, or to a row of this rank.
    __device__ void put_pairs(unsigned char* slot, const int* ids, const float* weights) const {
        int* to = reinterpret_cast<int*>(slot + static_cast<u64>(H) * 2);
        for (int k = lane; k < K; k += 32) {
            to[k] = ids[k];
            reinterpret_cast<float*>(to)[K + k] = weights[k];
        }
    }
    __device__ void deliver_pairs(u32 a, const int* ids, const float* weights) const {
        for (int k = lane; k < K; k += 32) {
            const int e = ids[k];
            const u64 at = static_cast<u64>(a) * K + k;
            own.row_ids[at] = static_cast<u32>(e) < static_cast<u32>(g.call.E) ? own.local_of[e] : -1;
            own.row_weights[at] = weights[k];
        }
    }

    __device__ void announce(int warp) const;
    __device__ bool number(int warp, Found& found);
    __device__ void tell_combine(const Found& found) const;
    __device__ bool credit(Sends<Carrier>& sends, bool wants, const u32* head, u32& freed, int peer,
                           int role);
    __device__ void send();
    __device__ void forward(const Found& found);
    __device__ void receive(const Found& found);
};

// This rank's masks to every rank.
__device__ void Warp::announce(int warp) const {
    const int T = own_T();
    for (int t = (blockIdx.x * PREPARERS + warp) * 32 + lane; t < T; t += gridDim.x * PREPARERS * 32) {
        u32 to = 0;
        for (int k = 0; k < K; ++k) to |= bit_of(own.ids[static_cast<u64>(t) * K + k]);
#pragma unroll
        for (int r = 0; r < R; ++r) store_relaxed_sys(mask(r, g.rank, t), to);
    }
    if (blockIdx.x == 0 && warp == 0 && lane < R) store_relaxed_sys(tokens(lane, g.rank), T);
    preparers_sync();
    if (stalls(1, ANNOUNCER)) return;
    if (warp == 0) {
        fence_sys();
        if (lane < R)
            asm volatile("red.relaxed.sys.global.add.u32 [%0], 1;" ::"l"(announced(lane, g.rank)) : "memory");
    }
}

// The number of each row here: after all ranks announced. false: the group is dead.
__device__ bool Warp::number(int warp, Found& found) {
    if (warp == 0) {
        const int c = lane < R ? lane : 0;
        const bool met = g.wait(lane < R, announced(g.rank, c), (call + 1) * gridDim.x, c, ANNOUNCER);
        if (lane == 0) found.dead = !met;
    }
    preparers_sync();
    if (found.dead) return false;
    const int T_of = lane < R ? min(static_cast<int>(load_relaxed_sys(tokens(g.rank, lane))), T_max) : 0;
    constexpr int BATCH = 8;
    const int all = R * numbers.segments;
    for (int first = warp * BATCH; first < all; first += PREPARERS * BATCH) {
        u32 to[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int at = min(first + i, all - 1), c = at / numbers.segments;
            const int t = at % numbers.segments * 32 + lane, T = __shfl_sync(ALL, T_of, c);
            to[i] = t < T ? load_relaxed_sys(mask(g.rank, c, t)) : 0;
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const u32 word = __ballot_sync(ALL, to[i] >> g.rank & 1);
            if (lane == 0 && first + i < all) numbers.bits[first + i] = word;
        }
    }
    preparers_sync();
    if (warp == 0) {
        u32 total = 0;
        for (int first = 0; first < all; first += 32) {
            const u32 count = first + lane < all ? __popc(numbers.bits[first + lane]) : 0;
            u32 sum = count;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const u32 before = __shfl_up_sync(ALL, sum, d);
                if (lane >= d) sum += before;
            }
            if (first + lane < all) numbers.base[first + lane] = total + sum - count;
            total += __shfl_sync(ALL, sum, 31);
        }
        if (lane == 0) found.A = total;
        if (lane < R) found.tokens[lane] = T_of;
    }
    preparers_sync();
    return true;
}

// What combine asks for.
__device__ void Warp::tell_combine(const Found& found) const {
    const int all = R * numbers.segments;
    for (int at = ch; at < all; at += g.C) {
        const int c = at / numbers.segments, t = at % numbers.segments * 32 + lane;
        if (t >= T_max) continue;
        const u64 to = static_cast<u64>(c) * T_max + t;
        own.masks[to] = t < found.tokens[c] ? mask_at(c, t) : 0;
        own.row_of[to] = numbers.has(c, t) ? static_cast<int>(numbers.row(c, t)) : -1;
    }
    if (ch != 0) return;
    if (lane < R) own.tokens[lane] = found.tokens[lane];
    if (lane == 0) *own.A = found.A;
}

// Until each lane that wants it may put its next row. false: the group is dead.
__device__ __forceinline__ bool Warp::credit(Sends<Carrier>& sends, bool wants, const u32* head, u32& freed,
                                             int peer, int role) {
    const u32 want = sends.items + 1 - g.call.slots;
    const bool lacks = wants && !reached(freed, want);
    if (!__any_sync(ALL, lacks)) return true;
    sends.settle<0>();  // before any wait: a peer may need it to free the slot
    if (!g.wait(lacks, head, want, peer, role)) return false;
    if (lacks) freed = load_relaxed_sys(head);
    return true;
}

__device__ void Warp::send() {
    // lane r: the ring to rank r of this node, or to the forwarder of r's node
    const int r = lane < R ? lane : 0, n_of = r / R_INTRA, la_of = r % R_INTRA;
    const bool inside = lane < R && n_of == g.node && la_of != g.local;
    const bool far = lane < R && n_of != g.node && la_of == g.local;
    const int entry = n_of == g.node ? entry_inside(la_of, g.node) : entry_between(n_of);
    const int ring = n_of == g.node ? g.inside(g.local, g.node, ch) : g.between(g.node, ch);
    const u32* head = g.head(g.rank, entry * g.C + ch);
    Sends<Carrier> sends(carrier, puts + entry, inside || far);
    u32 freed = inside || far ? load_relaxed_sys(head) : 0;
    const u32 bits = inside ? 1u << r : far ? NODE << (n_of * R_INTRA) : 0;
    const int T = own_T();
    const auto part_of = [&](int t) {
        u32 part = 0;
        for (int k = lane; t < T && k < K; k += 32) part |= bit_of(own.ids[static_cast<u64>(t) * K + k]);
        return part;
    };
    u32 part = part_of(ch);
    int number = 0;
    for (int t = ch; t < T; t += g.C) {
        const bool wants = __reduce_or_sync(ALL, part) & bits;
        const u32 targets = __ballot_sync(ALL, wants);
        if (targets) {
            if (stalls(number++, SENDER)) return;
            sends.settle<SEND_ROWS - 1>();
            carrier.fetch(x_row(t));
        }
        part = part_of(t + g.C);
        if (!targets) continue;
        const bool may = credit(sends, wants, head, freed, r, SENDER);
        carrier.arrive();
        if (!may) return;
        for (u32 todo = targets; todo; todo &= todo - 1) {
            const int s = __ffs(todo) - 1;
            unsigned char* to = g.data(s, __shfl_sync(ALL, ring, s), __shfl_sync(ALL, sends.items, s));
            carrier.put(to);
            put_pairs(to, own.ids + static_cast<u64>(t) * K, own.weights + static_cast<u64>(t) * K);
        }
        carrier.commit();
        sends.sent(wants);
    }
    sends.settle<0>();
}

__device__ void Warp::forward(const Found& found) {
    // lane n: the stream from rank (n, local). lane of entry_inside(la, n): its ring to rank la of this node
    const int far = lane < R_INTER ? lane : 0, c = far * R_INTRA + g.local;
    const bool some = lane < R_INTER && far != g.node;
    const int e = lane < R ? lane : 0, la = e / R_INTER, n_of = e % R_INTER;
    const bool out = lane < R && la != g.local && n_of != g.node;
    const int peer = g.node * R_INTRA + la, ring = g.inside(g.local, n_of, ch);
    const u32* head = g.head(g.rank, e * g.C + ch);
    Sends<Carrier> sends(carrier, puts + e, out);
    u32 freed = out ? load_relaxed_sys(head) : 0;
    const int T = some ? found.tokens[c] : 0;
    const int most = __reduce_max_sync(ALL, T);
    u32 got = some ? counts[entry_between(far)] : 0;
    u32 to_ranks = some ? mask_at(c, ch) : 0;
    int number = 0;
    for (int t = ch; t < most; t += g.C) {
        const u32 part = t < T ? to_ranks >> (g.node * R_INTRA) & NODE : 0;
        u32 todo = __ballot_sync(ALL, part != 0);
        to_ranks = some ? mask_at(c, t + g.C) : 0;
        for (; todo; todo &= todo - 1) {
            const int n = __ffs(todo) - 1, from_rank = n * R_INTRA + g.local;
            const u32 here = __shfl_sync(ALL, part, n);
            if (stalls(number++, FORWARDER)) return;
            const int into = g.between(n, ch);
            const u32 item = __shfl_sync(ALL, got, n);
            const bool there = reached(load_relaxed_sys(g.tail(g.rank, into)), item + 1);
            if (!__all_sync(ALL, there)) sends.settle<0>();
            if (!g.wait(lane == 0, g.tail(g.rank, into), item + 1, from_rank, FORWARDER)) return;
            const unsigned char* slot = g.data(g.rank, into, item);
            sends.settle<SEND_ROWS - 1>();
            carrier.fetch(slot);
            const bool wants = out && n_of == n && here >> la & 1;
            const bool may = credit(sends, wants, head, freed, peer, FORWARDER);
            carrier.arrive();
            if (!may) return;
            const int* ids = ids_of(slot);
            const float* weights = reinterpret_cast<const float*>(ids + K);
            for (u32 targets = __ballot_sync(ALL, wants); targets; targets &= targets - 1) {
                const int s = __ffs(targets) - 1;
                unsigned char* to = g.data(__shfl_sync(ALL, peer, s), __shfl_sync(ALL, ring, s),
                                           __shfl_sync(ALL, sends.items, s));
                carrier.put(to);
                put_pairs(to, ids, weights);
            }
            if (here >> g.local & 1) {
                const u32 a = numbers.row(from_rank, t);
                carrier.put(row(a));
                deliver_pairs(a, ids, weights);
            }
            carrier.commit();
            sends.sent(wants);
            __syncwarp();
            __threadfence_block();
            if (lane == n) counts[entry_between(n)] = ++got;
        }
    }
    sends.settle<0>();
}

__device__ void Warp::receive(const Found& found) {
    // lane c: tokens of rank c: own ones, or those that rank (node, c's local index) puts into a ring
    const int c = lane < R ? lane : 0, n_of = c / R_INTRA, la_of = c % R_INTRA;
    const bool comes = lane < R && la_of != g.local, some = comes || lane == g.rank;
    const int entry = entry_inside(la_of, n_of), ring = entry * g.C + ch;
    u32 got = comes ? counts[entry] : 0;
    const int most = __reduce_max_sync(ALL, lane < R ? found.tokens[lane] : 0);
    for (int t = ch; t < most; t += g.C) {
        u32 todo = __ballot_sync(ALL, some && numbers.has(c, t));
        const u32 row_of_lane = numbers.row(c, t);
        if (stalls((t - ch) / g.C, RECEIVER)) return;
        for (; todo; todo &= todo - 1) {
            const int s = __ffs(todo) - 1;
            const u32 a = __shfl_sync(ALL, row_of_lane, s);
            const unsigned char* from = x_row(t);
            const int* ids = own.ids + static_cast<u64>(t) * K;
            const float* weights = own.weights + static_cast<u64>(t) * K;
            if (s != g.rank) {
                const int into = __shfl_sync(ALL, ring, s);
                const u32 item = __shfl_sync(ALL, got, s);
                const int peer = g.node * R_INTRA + s % R_INTRA;
                if (!g.wait(lane == 0, g.tail(g.rank, into), item + 1, peer, RECEIVER)) return;
                from = g.data(g.rank, into, item);
                ids = ids_of(from);
                weights = reinterpret_cast<const float*>(ids + K);
            }
            carrier.reuse<TAKE_ROWS - 1>();
            carrier.fetch(from);
            deliver_pairs(a, ids, weights);
            carrier.arrive();
            carrier.put(row(a));
            carrier.commit();
            __syncwarp();
            __threadfence_block();
            if (lane == s && s != g.rank) counts[entry] = ++got;
        }
    }
}

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
