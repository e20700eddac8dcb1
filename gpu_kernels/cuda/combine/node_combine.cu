// Each token's rows of the ranks of one node are summed, with biases, rounded once: combine.
//
// | argument (of a rank)  | shape       | dtype      |                                                      |
// |-----------------------|-------------|------------|------------------------------------------------------|
// | out                   | [T, H]      | bf16, fp16 | row-major, 16 bytes aligned; may be bias_0           |
// | bias_0, bias_1        | [T, H]      | as out     | or null                                              |
// | where                 | [R, T_max]  | int32      | row of token t in rank r's rows, or -1               |
// | T                     | [1]         | int32      | tokens of this rank, up to T_max                     |
// | origins               | [R * T_max] | int32      | of this rank's row: its rank * T_max + its token     |
// | firsts                | [R + 1]     | int32      | where the rows of each rank's tokens begin; all rows |
//
// | heap, the kernel's part | shape           | written by                                                    |
// |-------------------------|-----------------|---------------------------------------------------------------|
// | x                       | [R * T_max, H]  | this rank, before the call: its rows of all ranks' tokens     |
// | inbox                   | [R, T_max, H]   | the other ranks: their rows of this rank's tokens             |
// | flags                   | [R, T_max] u32  | the other ranks: the call whose row is there                  |
//
// Each part is 128 bytes aligned. SENDERS warps of a block put this rank's rows into the inboxes of the tokens'
// ranks, and the others sum this rank's tokens as rows come. Two GPUs write to each other faster than they read.
// A rank ends a call when all ranks have, so nobody waits for room.
//
// H is a multiple of 8. BULK: see bulk.cuh; else vectors.cuh. Blocks: (SMs of a rank, ranks), all resident;
// threads: CHANNELS * 32.
#ifndef SENDERS
#define SENDERS 4
#endif
#ifndef PIECE
#define PIECE 4096  // bytes of a bulk copy of a sender
#endif
#ifndef PIECES
#define PIECES 4  // of a sender, in shared memory
#endif
#include "common/element.cuh"

struct Local {  // one rank of this launch
    u16* out;
    const u16 *bias_0, *bias_1;
    const int *where, *T, *origins, *firsts;
    u64 rank;
};

#include "combine/node.cuh"

static_assert(SENDERS >= 1 && SENDERS < CHANNELS, "a warp of each role");

struct Warp {
    const Node node;
    const Local& own;
    const NodeShared& shared;
    const int warp, lane, H, vectors, T, T_max;

    __device__ u64 bytes() const { return static_cast<u64>(H) * 2; }
    __device__ u64 part() const { return (static_cast<u64>(R) * T_max * bytes() + 127) / 128 * 128; }
    __device__ unsigned char* row(int row) const { return node.rest(node.g.rank) + row * bytes(); }
    __device__ unsigned char* inbox(int r, int by, int t) const {
        return node.rest(r) + part() + (static_cast<u64>(by) * T_max + t) * bytes();
    }
    __device__ u32* flag(int r, int by, int t) const {
        return reinterpret_cast<u32*>(node.rest(r) + 2 * part()) + static_cast<u64>(by) * T_max + t;
    }
    __device__ void send(Pipe& pipe);
    __device__ void receive(Pipe& pipe);
};

// The rows of other ranks' tokens, in turn for each of these ranks.
struct Turns {
    const Local& own;
    int rank, T_max, count;

    __device__ Turns(const Local& own, int T_max)
        : own(own), rank(static_cast<int>(own.rank)), T_max(T_max), count(0) {
        for (int c = 0; c < R; ++c)
            if (c != rank) count = max(count, own.firsts[c + 1] - own.firsts[c]);
        count = min(max(count, 0), T_max) * (R - 1);
    }
    // The n-th row; -1: its rank has none left. to: rank and token. What a dispatch that a dead rank ended
    // leaves is no row.
    __device__ int row(int n, int& to, int& t) const {
        to = (rank + 1 + n % max(R - 1, 1)) % R;
        const int at = own.firsts[to] + n / max(R - 1, 1);
        if (at < 0 || at >= R * T_max || at >= own.firsts[to + 1]) return -1;
        const int origin = own.origins[at];
        t = origin - to * T_max;
        return 0 <= t && t < T_max ? at : -1;
    }
};

#if BULK
// One lane sends. Copies of PIECES pieces are under way, into shared memory or out of it.
__device__ void Warp::send(Pipe& pipe) {
    const Turns turns(own, T_max);
    const u32 pieces = (bytes() + PIECE - 1) / PIECE;
    u32 loaded = 0, stored = 0;  // pieces
    u32 *done = nullptr, done_at = 0;  // the flag that waits for pieces before done_at
    struct Row {
        const unsigned char* from;
        unsigned char* to;
        u32* flag;
    } now{}, next{};
    int items = 0;
    const auto size = [&](u32 piece) {
        return piece + 1 < pieces ? PIECE : static_cast<u32>(bytes()) - piece * PIECE;
    };
    const auto release = [&] {
        fence_bulk();
        store_release_sys(done, number_of(shared.call));
        done = nullptr;
    };
    int n = node.first(warp);
    u32 claim = node.claim(shared, 1, SENDERS, turns.count);
    // the next row that this warp sends
    const auto find = [&](Row& row) {
        row.from = nullptr;
        while (!row.from && n < turns.count) {
            int to, t;
            const int found = turns.row(n, to, t);
            if (found >= 0) row = {this->row(found), inbox(to, node.g.rank, t), flag(to, node.g.rank, t)};
            n = node.claimed(claim);
            claim = node.claim(shared, 1, SENDERS, turns.count);
        }
    };
    const auto load = [&](const Row& row, u32 piece) {
        if (lane == 0) {
            const u32 at = loaded % PIECES;
            barrier_arrive_expect(pipe.barriers + 8 * at, size(piece));
            bulk_load(pipe.memory + at * PIECE, row.from + piece * PIECE, size(piece), pipe.barriers + 8 * at);
        }
        ++loaded;
    };
    find(now);
    if (!now.from) return;
    fence_bulk();
    find(next);
    // pieces that are loaded ahead: of this row and the next one
    const auto ahead = [&](u32 piece) {
        if (piece < pieces)
            load(now, piece);
        else if (next.from && piece - pieces < pieces)
            load(next, piece - pieces);
        else
            return false;
        return true;
    };
    u32 begun = 0;  // pieces of `now` and then `next` that are loaded or on their way
    while (begun < PIECES - 1 && ahead(begun)) ++begun;
    while (true) {
        for (u32 piece = 0; piece < pieces; ++piece) {
            const u32 at = stored % PIECES;
            barrier_wait(pipe.barriers + 8 * at, stored / PIECES & 1);
            if (lane == 0) {
                bulk_store(now.to + piece * PIECE, pipe.memory + at * PIECE, size(piece));
                bulk_commit();
                bulk_wait_read<1>();  // the piece before has left its place
            }
            ++stored;
            __syncwarp();
            if (ahead(begun)) ++begun;
            if (lane == 0 && done && stored > done_at + 1) {
                bulk_wait<2>();
                release();
            }
        }
        if (node.stalls(items++, SENDER)) break;
        if (lane == 0) {
            if (done) {
                bulk_wait<1>();
                release();
            }
            done = now.flag;
            done_at = stored;
        }
        if (!next.from) break;
        now = next;
        begun -= pieces;
        find(next);
    }
    if (lane == 0 && done) {
        bulk_wait<0>();
        release();
    }
    __syncwarp();
}
#else
__device__ void Warp::send(Pipe&) {
    const Turns turns(own, T_max);
    int items = 0;
    for (int n = node.first(warp); n < turns.count;) {
        const u32 claim = node.claim(shared, 1, SENDERS, turns.count);
        int to, t;
        const int found = turns.row(n, to, t);
        if (found >= 0) {
            if (node.stalls(items++, SENDER)) return;
            copy_row(inbox(to, node.g.rank, t), row(found), vectors);
            __syncwarp();
            if (lane == 0) {
                fence_sys();
                store_release_sys(flag(to, node.g.rank, t), number_of(shared.call));
            }
        }
        n = node.claimed(claim);
    }
}
#endif

__device__ void Warp::receive(Pipe& pipe) {
    const int rank = node.g.rank, receiver = warp - SENDERS;
    // -1 also for what is no row
    const auto row_of = [&](int t) {
        const int found = lane < R && t < T ? own.where[static_cast<u64>(lane) * T_max + t] : -1;
        return found < R * T_max ? found : -1;
    };
    int t = node.first(receiver), now = row_of(t);
    for (int items = 0; t < T; ++items) {
        const int next = node.claimed(node.claim(shared, 0, CHANNELS - SENDERS, T)), after = row_of(next);
        if (node.stalls(items, RECEIVER)) return;
        const bool waits = now >= 0 && lane != rank;
        const u32 number = number_of(shared.call);
        if (!node.g.until([&] { return !waits || load_acquire_sys(flag(rank, lane, t)) == number; }, lane, RECEIVER))
            return;
        const u32 present = __ballot_sync(ALL, now >= 0);
        const u64 from = reinterpret_cast<u64>(lane == rank ? row(max(now, 0)) : inbox(rank, lane < R ? lane : 0, t));
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
        t = next;
        now = after;
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
    constexpr int EACH_BARRIERS = STAGES > PIECES ? STAGES : PIECES;
    __shared__ alignas(8) u64 barriers[CHANNELS * EACH_BARRIERS];
    constexpr u32 SENDING = PIECES * PIECE, SUMMING = STAGES * SOURCES * CHUNK;
    pipe.memory = shared_address(dynamic_memory()) +
                  (warp < SENDERS ? warp * SENDING : SENDERS * SENDING + (warp - SENDERS) * SUMMING);
    pipe.barriers = shared_address(barriers + warp * EACH_BARRIERS);
    if (lane < EACH_BARRIERS) barrier_init(pipe.barriers + 8 * lane, 1);
    barrier_init_fence();
#endif
    wait_for_predecessor();
    Warp work{node, own, shared, warp, lane, call.H, call.H / 8, min(max(own.T[0], 0), call.T_max), call.T_max};
    if (threadIdx.x == 0) node.begin(shared);
    __syncthreads();
    let_successor_start();
    if (shared.dead) return;
    if (warp < SENDERS)
        work.send(pipe);
    else
        work.receive(pipe);
    node.end(shared, warp, RECEIVER);
}
