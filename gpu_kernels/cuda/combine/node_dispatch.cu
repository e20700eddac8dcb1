// Each token goes once to each rank of one node that has one of its experts, straight to its row: dispatch.
//
// | argument (of a rank)    | shape            | dtype      | |
// |-------------------------|------------------|------------|--------------------------------------------------|
// | x                       | [T, H]           | bf16, fp16 | 16 bytes aligned                                 |
// | ids, weights            | [T, K]           | int32, fp32| ids outside 0 .. E-1 go nowhere                  |
// | T                       | [1]              | int32      | tokens of this rank, up to T_max                 |
// | owner, index            | [E]              | int32      | rank of an expert; its number on this rank       |
// | where                   | [R, T_max]       | int32      | out: row of token t in rank r's rows, or -1      |
// | A                       | [1]              | int32      | out: rows that came here                         |
//
// | heap, the kernel's part | shape            | written by                                                |
// |-------------------------|------------------|-----------------------------------------------------------|
// | tokens                  | [2, R] u32       | each rank: its T, of even and of odd calls                |
// | masks                   | [2, R, T_max] u32| each rank: the ranks that a token goes to                 |
// | rows                    | [R * T_max, H]   | every rank; out: the first A, by rank, then token         |
// | row_ids, row_weights    | [R * T_max, K]   | every rank; out: local experts, -1: not here              |
//
// Each part is 128 bytes aligned. A rank announces call n + 1 only after call n, for which it waited for all ranks
// to enter it. So all ranks have ended call n - 1, and two copies of the masks are enough.
//
// H is a multiple of 8. A warp a token. BULK: see bulk.cuh; else vectors.cuh. Blocks: (SMs of a rank, ranks), all
// resident; threads: (CHANNELS + 1) * 32. Dynamic shared memory: rows (BULK), then R * ceil(T_max / 32) * 8 bytes.
#define STAGES 1
#include "common/element.cuh"

struct Local {  // one rank of this launch
    const u16* x;
    const int* ids;
    const float* weights;
    const int *T, *owner, *index;
    int *where, *A;
    u64 rank;
};

#include "combine/node.cuh"

struct Found {  // in shared memory
    u32 dead, A;
    u32 before[R];  // rows of lower ranks, at each rank
};

struct Warp {
    const Node node;
    const Local& own;
    const u32 call;
    const int warp, lane, H, K, T, T_max, segments;
    u32 *bits, *base;  // of this rank's tokens, [R, segments]: who gets them; rows before them
    Carrier carrier;

    __device__ static u64 up(u64 bytes) { return (bytes + 127) / 128 * 128; }
    __device__ u32* tokens(int r, int by) const {
        return reinterpret_cast<u32*>(node.rest(r)) + (call & 1) * R + by;
    }
    __device__ u32* mask(int r, int by, int t) const {
        const u64 at = (static_cast<u64>(call & 1) * R + by) * T_max + t;
        return reinterpret_cast<u32*>(node.rest(r)) + 2 * R + at;
    }
    __device__ unsigned char* rows(int r) const {
        return node.rest(r) + up((2 * R + 2 * static_cast<u64>(R) * T_max) * 4);
    }
    __device__ int* row_ids(int r) const {
        return reinterpret_cast<int*>(rows(r) + up(static_cast<u64>(R) * T_max * H * 2));
    }
    __device__ float* row_weights(int r) const {
        return reinterpret_cast<float*>(reinterpret_cast<unsigned char*>(row_ids(r)) +
                                        up(static_cast<u64>(R) * T_max * K * 4));
    }
    __device__ bool known(int e) const { return static_cast<u32>(e) < static_cast<u32>(node.g.call.E); }

    __device__ void announce() const;
    __device__ bool number(Found& found) const;
    __device__ void send();
};

// This rank's masks to every rank.
__device__ void Warp::announce() const {
    for (int t = (blockIdx.x * CHANNELS + warp) * 32 + lane; t < T; t += gridDim.x * CHANNELS * 32) {
        u32 to = 0;
        for (int k = 0; k < K; ++k) {
            const int e = own.ids[static_cast<u64>(t) * K + k];
            if (known(e)) to |= 1u << own.owner[e];
        }
#pragma unroll
        for (int r = 0; r < R; ++r) store_relaxed_sys(mask(r, node.g.rank, t), to);
    }
    if (blockIdx.x == 0 && warp == 0 && lane < R) store_relaxed_sys(tokens(lane, node.g.rank), T);
    workers_sync();
    if (node.stalls(1, ANNOUNCER)) return;
    if (warp == 0) node.enter();
}

// The rows of this rank's tokens: after all ranks announced. false: the group is dead.
__device__ bool Warp::number(Found& found) const {
    const int rank = node.g.rank;
    if (warp == 0) {
        const bool met = node.entered((call + 1) * gridDim.x, ANNOUNCER);
        if (lane == 0) found.dead = !met;
    }
    workers_sync();
    if (found.dead) return false;
    const int T_of = lane < R ? min(static_cast<int>(load_relaxed_sys(tokens(rank, lane))), T_max) : 0;
    constexpr int BATCH = 4;
    const int all = R * segments;
    for (int first = warp * BATCH; first < all; first += CHANNELS * BATCH) {
        u32 to[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int at = min(first + i, all - 1), c = at / segments, t = at % segments * 32 + lane;
            to[i] = t < __shfl_sync(ALL, T_of, c) ? load_relaxed_sys(mask(rank, c, t)) : 0;
        }
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
            if (lane == rank && mine) atomicAdd(&found.A, __popc(mine));
        }
    }
    workers_sync();
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

__device__ void Warp::send() {
    const int r = lane < R ? lane : 0;
    int items = 0;
    for (int t = warp * gridDim.x + blockIdx.x; t < T; t += gridDim.x * CHANNELS) {
        const int at = r * segments + t / 32;
        const u32 word = bits[at], below = (1u << (t % 32)) - 1;
        const bool has = lane < R && word >> (t % 32) & 1;
        const u32 row = base[at] + __popc(word & below);
        if (lane < R) own.where[static_cast<u64>(lane) * T_max + t] = has ? static_cast<int>(row) : -1;
        const u32 targets = __ballot_sync(ALL, has);
        if (!targets) continue;
        if (node.stalls(items++, SENDER)) return;
        carrier.reuse<SEND_ROWS - 1>();
        carrier.fetch(own.x + static_cast<u64>(t) * H);
        for (int k = lane; k < K; k += 32) {
            const u64 from = static_cast<u64>(t) * K + k;
            const int e = own.ids[from], owner = known(e) ? own.owner[e] : -1, index = known(e) ? own.index[e] : -1;
            const float weight = own.weights[from];
            for (u32 todo = targets; todo; todo &= todo - 1) {
                const int s = __ffs(todo) - 1, to_bits = s * segments + t / 32;
                const u64 to = static_cast<u64>(base[to_bits] + __popc(bits[to_bits] & below)) * K + k;
                row_ids(s)[to] = owner == s ? index : -1;
                row_weights(s)[to] = weight;
            }
        }
        carrier.arrive();
        for (u32 todo = targets; todo; todo &= todo - 1) {
            const int s = __ffs(todo) - 1;
            carrier.put(rows(s) + static_cast<u64>(__shfl_sync(ALL, row, s)) * H * 2);
        }
        carrier.commit();
    }
}

extern "C" __global__ void __launch_bounds__((CHANNELS + 1) * 32, 1)
    node_dispatch(const __grid_constant__ Call call) {
    __shared__ NodeShared shared;
    __shared__ Found found;
    const Local& own = call.local[blockIdx.y];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Group g(call, static_cast<int>(own.rank), gridDim.x * CHANNELS, call.H * 2);
    const Node node{g};
    u32* words = reinterpret_cast<u32*>(dynamic_memory());
    Carrier carrier{};
#if BULK
    __shared__ alignas(8) u64 barriers[(CHANNELS + 1) * SEND_ROWS];
    const u32 bytes = call.H * 2;
    carrier = {shared_address(words) + warp * SEND_ROWS * bytes, shared_address(barriers + warp * SEND_ROWS), bytes,
               SEND_ROWS, 0};
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
        found.A = 0;
    }
    if (threadIdx.x < R) found.before[threadIdx.x] = 0;
    __syncthreads();
    let_successor_start();
    if (shared.dead) return;
    if (warp == CHANNELS) return node.beat(shared);
    Warp work{node, own, shared.call, warp, lane, call.H, call.K, T, call.T_max, segments, words,
              words + R * segments, carrier};
    work.announce();
    if (work.number(found)) {
        work.send();
        work.carrier.settle<0>();
        if (blockIdx.x == 0 && threadIdx.x == 0) *own.A = found.A;
    }
    node.end(shared, warp, RECEIVER);
}
