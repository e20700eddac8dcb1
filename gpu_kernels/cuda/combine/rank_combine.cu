// out[t] = sum over nodes of (sum over the node's ranks of their rows of t), fp32, ascending: combine of R ranks.
//
// The roles of ttnn_moe/parallel/hierarchical/roles.py, a warp each: CHANNELS channels a block, and a coordinator. The launch has
// one or more ranks (blockIdx.y); each may lie on another GPU, or several on one. It knows its peers by their heaps alone.
//
// | argument (of a rank)  | shape       | dtype      | |
// |-----------------------|-------------|------------|------------------------------------------------------|
// | x                     | [A, H]      | bf16, fp16 | 16 bytes aligned                                     |
// | out                   | [T, H]      | as x       | tokens without a row: the biases, or zero            |
// | bias_0, bias_1        | [T, H]      | as x, null | added before the one rounding                        |
// | masks                 | [R, T_max]  | u64        | bit r: rank r has a row of token t of rank c         |
// | rows                  | [R, T_max]  | int32      | this rank's row of token t of rank c, in x           |
// | T                     | [R]         | int32      | tokens of each rank, up to T_max                     |
//
// H is a multiple of 8. Slots hold the wire dtype: bf16 (fp16), or fp32 (WIRE32). A ring's slots are a power of two.
// Blocks: (SMs of a rank, ranks), all resident; threads: (ROLES * CHANNELS + 1) * 32. By launch bounds at most 128 registers.
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
#define STALLS -1  // of tests: a rank that stops at its second item
#endif
#include "combine/rings.cuh"

constexpr int SENDERS = R_INTRA > 1, FORWARDERS = R_INTER > 1;
constexpr int ROLES = SENDERS + FORWARDERS + 1;
#ifndef COLUMNS
#define COLUMNS (R <= 2 && !WIRE32 ? 4 : R <= 8 ? 2 : 1)  // vectors of 8 columns a lane, at a time
#endif

struct Words {
    uint4 a;
#if WIRE32
    uint4 b;
#endif
};

__device__ __forceinline__ uint4 load_once(const void* from) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

// Columns of a row of x (own), or of a slot.
__device__ __forceinline__ Words load_columns(const unsigned char* from, int vector, bool own) {
    Words words;
#if WIRE32
    words.a = load_once(from + static_cast<u64>(vector) * (own ? 16 : 32));
    if (!own) words.b = load_once(from + static_cast<u64>(vector) * 32 + 16);
#else
    words.a = load_once(from + static_cast<u64>(vector) * 16);
#endif
    return words;
}

__device__ __forceinline__ void add_columns(float* sum, const Words& words, bool own) {
    const u32 a[4] = {words.a.x, words.a.y, words.a.z, words.a.w};
#if WIRE32
    if (!own) {
        const u32 b[4] = {words.b.x, words.b.y, words.b.z, words.b.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum[i] += __uint_as_float(a[i]);
            sum[4 + i] += __uint_as_float(b[i]);
        }
        return;
    }
#endif
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[2 * i] += first_of(a[i]);
        sum[2 * i + 1] += second_of(a[i]);
    }
}

__device__ __forceinline__ uint4 packed(const float* sum) {
    return make_uint4(pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7]));
}

__device__ __forceinline__ void store_slot(unsigned char* to, int vector, const float* sum) {
#if WIRE32
    float4* at = reinterpret_cast<float4*>(to + static_cast<u64>(vector) * 32);
    at[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    at[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
#else
    *reinterpret_cast<uint4*>(to + static_cast<u64>(vector) * 16) = packed(sum);
#endif
}

// A warp of one role and one channel; a lane stands for a rank where the roles look at all of them.
struct Warp {
    const Group& g;
    const Local& own;
    const int ch, w, lane, H, vectors;
    volatile u32* counts;  // [RINGS], shared: items that this block's consumer of the channel has read

    __device__ u64 address_of_lane(const void* pointer, int from) const {
        return __shfl_sync(ALL, reinterpret_cast<u64>(pointer), from);
    }

    __device__ const unsigned char* x_row(int row) const {
        return reinterpret_cast<const unsigned char*>(own.x + static_cast<u64>(row) * H);
    }

    // This lane's rank c: the mask of its token t; 0 past its end.
    __device__ u64 mask_of(int c, bool some, int t, int T) const {
        return some && t < T ? own.masks[static_cast<u64>(c) * g.call.T_max + t] : 0;
    }

    __device__ bool stalls(int items) const {
        if (STALLS != g.rank || items < 1) return false;
        while (!g.aborted()) __nanosleep(1000);
        return true;
    }

    __device__ void send() const;
    __device__ void forward() const;
    __device__ void receive() const;
};

__device__ void Warp::send() const {
    // lane c: the stream to rank c, through the rank of this node with c's local index
    const int c = lane < R ? lane : 0, far = c / R_INTRA, other = c % R_INTRA;
    const bool some = lane < R && other != g.local;
    const int T = some ? own.T[c] : 0, ring = g.inside(g.local, far, ch), back = g.inside(other, far, ch);
    u32 items = some ? *g.sent(back) : 0, freed = some ? load_relaxed_sys(g.head(g.rank, back)) : 0;
    const int most = __reduce_max_sync(ALL, T), forwarder = g.node * R_INTRA + other;
    u64 mask = mask_of(c, some, ch, T);
    int row = some && ch < T ? own.rows[static_cast<u64>(c) * g.call.T_max + ch] : -1, number = 0;
    for (int t = ch; t < most; t += g.C) {
        u32 todo = __ballot_sync(ALL, mask >> g.rank & 1);
        const unsigned char* from = x_row(row);
        const int next = t + g.C;
        mask = mask_of(c, some, next, T);
        row = some && next < T ? own.rows[static_cast<u64>(c) * g.call.T_max + next] : -1;
        for (; todo; todo &= todo - 1) {
            const int s = __ffs(todo) - 1;
            if (stalls(number++)) return;
            const u32 item = __shfl_sync(ALL, items, s);
            const u32 want = item + 1 - g.call.slots;
            if (!reached(__shfl_sync(ALL, freed, s), want)) {
                if (!g.wait(lane == s, g.head(g.rank, back), want, forwarder, SENDER)) return;
                if (lane == s) freed = load_relaxed_sys(g.head(g.rank, back));
            }
            const int to_rank = __shfl_sync(ALL, forwarder, s);
            const auto source = reinterpret_cast<const unsigned char*>(address_of_lane(from, s));
            unsigned char* to = g.data(to_rank, __shfl_sync(ALL, ring, s), item);
            constexpr int N = WIRE32 ? 2 : 2 * COLUMNS;
            for (int v = lane; v < vectors; v += 32 * N) {
                uint4 words[N];
#pragma unroll
                for (int u = 0; u < N; ++u)
                    if (v + 32 * u < vectors) words[u] = load_once(source + static_cast<u64>(v + 32 * u) * 16);
#pragma unroll
                for (int u = 0; u < N; ++u)
                    if (v + 32 * u < vectors) {
#if WIRE32
                        float sum[8] = {};
                        add_columns(sum, Words{words[u], {}}, true);
                        store_slot(to, v + 32 * u, sum);
#else
                        *reinterpret_cast<uint4*>(to + static_cast<u64>(v + 32 * u) * 16) = words[u];
#endif
                    }
            }
            __syncwarp();
            if (lane == s) store_release_sys(g.tail(forwarder, ring), ++items);
        }
    }
    if (some) *g.sent(back) = items;
}

// Add this node's rows of a token, in ascending local index. rows: an address in each lane (n0 + local index).
__device__ __forceinline__ void sum_node(float (*sum)[8], const Warp& warp, u32 here, int n0, u64 row_of_lane,
                                         int v) {
    constexpr int GROUP = R_INTRA < 4 && !WIRE32 ? R_INTRA : WIRE32 ? 2 : 4;  // rows in flight
#pragma unroll
    for (int first = 0; first < R_INTRA; first += GROUP) {
        Words words[GROUP][COLUMNS];
#pragma unroll
        for (int la = first; la < first + GROUP && la < R_INTRA; ++la) {
            if (!(here >> la & 1)) continue;
            const auto from = reinterpret_cast<const unsigned char*>(__shfl_sync(ALL, row_of_lane, n0 + la));
#pragma unroll
            for (int u = 0; u < COLUMNS; ++u)
                if (v + 32 * u < warp.vectors) words[la - first][u] = load_columns(from, v + 32 * u, la == warp.g.local);
        }
#pragma unroll
        for (int la = first; la < first + GROUP && la < R_INTRA; ++la) {
            if (!(here >> la & 1)) continue;
#pragma unroll
            for (int u = 0; u < COLUMNS; ++u)
                if (v + 32 * u < warp.vectors) add_columns(sum[u], words[la - first][u], la == warp.g.local);
        }
    }
}

__device__ void Warp::forward() const {
    // lane n: the stream to rank (n, local)
    const int far = lane < R_INTER ? lane : 0, c = far * R_INTRA + g.local;
    const bool some = lane < R_INTER && far != g.node;
    const int T = some ? own.T[c] : 0, out = g.between(far, ch);
    const u64 here_bits = (1ull << R_INTRA) - 1;
    u32 items = some ? *g.sent(out) : 0;
    const int most = __reduce_max_sync(ALL, T);
    u64 mask = mask_of(c, some, ch, T);
    int row = some && ch < T ? own.rows[static_cast<u64>(c) * g.call.T_max + ch] : -1, number = 0;
    for (int t = ch; t < most; t += g.C) {
        const u32 part = static_cast<u32>(mask >> (g.node * R_INTRA) & here_bits);
        const int x_of = row;
        u32 todo = __ballot_sync(ALL, part != 0);
        const int next = t + g.C;
        mask = mask_of(c, some, next, T);
        row = some && next < T ? own.rows[static_cast<u64>(c) * g.call.T_max + next] : -1;
        for (; todo; todo &= todo - 1) {
            const int n = __ffs(todo) - 1;
            const u32 here = __shfl_sync(ALL, part, n);
            if (stalls(number++)) return;
            // lane la: the row of rank (node, la)
            const int la = lane < R_INTRA ? lane : 0, entry = la * R_INTER + n;
            const bool comes = lane < R_INTRA && la != g.local && here >> la & 1;
            const u32 got = comes ? counts[entry] : 0;
            if (!g.wait(comes, g.tail(g.rank, g.inside(la, n, ch)), got + 1, g.node * R_INTRA + la, FORWARDER)) return;
            const u32 item = __shfl_sync(ALL, items, n);
            const u32* head = g.head(g.rank, g.between(n, ch));
            if (!g.wait(lane == 0, head, item + 1 - g.call.slots, n * R_INTRA + g.local, FORWARDER)) return;
            const int mine = __shfl_sync(ALL, x_of, n);
            const u64 from = reinterpret_cast<u64>(la == g.local ? x_row(mine)
                                                                 : g.data(g.rank, g.inside(la, n, ch), got));
            unsigned char* to = g.data(n * R_INTRA + g.local, g.between(g.node, ch), item);
            for (int base = 0; base < vectors; base += 32 * COLUMNS) {
                float sum[COLUMNS][8] = {};
                sum_node(sum, *this, here, 0, from, base + lane);
#pragma unroll
                for (int u = 0; u < COLUMNS; ++u)
                    if (base + lane + 32 * u < vectors) store_slot(to, base + lane + 32 * u, sum[u]);
            }
            __syncwarp();
            if (comes) counts[entry] = got + 1;
            if (lane == n) store_release_sys(g.tail(c, g.between(g.node, ch)), ++items);
        }
    }
    if (some) *g.sent(out) = items;
}

__device__ void Warp::receive() const {
    // lane r: rank r as a source: of rows in this node, of its node's partial where it has this local index
    const int r = lane < R ? lane : 0, n_of = r / R_INTRA, la_of = r % R_INTRA;
    const bool inside = lane < R && n_of == g.node && r != g.rank;
    const bool partial = lane < R && n_of != g.node && la_of == g.local;
    const int T = own.T[g.rank];
    const u64* masks = own.masks + static_cast<u64>(g.rank) * g.call.T_max;
    const int* rows = own.rows + static_cast<u64>(g.rank) * g.call.T_max;
    const int entry = inside ? la_of * R_INTER + g.node : R_INTRA * R_INTER + n_of;
    const int ring = entry * g.C + ch;
    const u64 node_bits = (1ull << R_INTRA) - 1;
    u64 mask = ch < T ? masks[ch] : 0;
    int row = ch < T ? rows[ch] : -1;
    for (int t = ch; t < T; t += g.C) {
        const u64 now = mask;
        const int x_of = row, next = t + g.C;
        mask = next < T ? masks[next] : 0;
        row = next < T ? rows[next] : -1;
        if (stalls((t - ch) / g.C)) return;
        const u32 nodes_here = __ballot_sync(ALL, lane < R_INTER && now >> (lane * R_INTRA) & node_bits);
        const bool comes = (inside && now >> r & 1) || (partial && nodes_here >> n_of & 1);
        const u32 got = comes ? counts[entry] : 0;
        if (!g.wait(comes, g.tail(g.rank, ring), got + 1, r, RECEIVER)) return;
        const u64 from = reinterpret_cast<u64>(lane == g.rank ? x_row(x_of) : g.data(g.rank, ring, got));
        const u32 here = static_cast<u32>(now >> (g.node * R_INTRA) & node_bits);
        u16* to = own.out + static_cast<u64>(t) * H;
        for (int base = 0; base < vectors; base += 32 * COLUMNS) {
            float total[COLUMNS][8] = {};
            const int v = base + lane;
#pragma unroll
            for (int n = 0; n < R_INTER; ++n) {
                if (!(nodes_here >> n & 1)) continue;
                if (n == g.node) {
                    if (R_INTER == 1 || R_INTRA == 1) {
                        sum_node(total, *this, here, g.node * R_INTRA, from, v);
                    } else {
                        float part[COLUMNS][8] = {};
                        sum_node(part, *this, here, g.node * R_INTRA, from, v);
#pragma unroll
                        for (int u = 0; u < COLUMNS; ++u)
#pragma unroll
                            for (int i = 0; i < 8; ++i) total[u][i] += part[u][i];
                    }
                } else {
                    const auto slot = reinterpret_cast<const unsigned char*>(
                        __shfl_sync(ALL, from, n * R_INTRA + g.local));
#pragma unroll
                    for (int u = 0; u < COLUMNS; ++u)
                        if (v + 32 * u < vectors) add_columns(total[u], load_columns(slot, v + 32 * u, false), false);
                }
            }
#pragma unroll
            for (int u = 0; u < COLUMNS; ++u) {
                const int column = v + 32 * u;
                if (column >= vectors) continue;
#pragma unroll
                for (int b = 0; b < 2; ++b) {
                    const u16* bias = b ? own.bias_1 : own.bias_0;
                    if (!bias) continue;
                    Words words{};
                    words.a = load_once(bias + static_cast<u64>(t) * H + column * 8);
                    add_columns(total[u], words, true);
                }
                *reinterpret_cast<uint4*>(to + column * 8) = packed(total[u]);
            }
        }
        __syncwarp();
        if (comes) counts[entry] = got + 1;
    }
}

// Gives read slots back, and shows that this rank lives.
__device__ void coordinate(const Group& g, volatile u32* counts, volatile u32* left) {
    const int lane = threadIdx.x % 32, first = blockIdx.x * CHANNELS;
    Status* status = g.status(g.rank);
    constexpr int EACH = (CHANNELS * RINGS + 31) / 32;
    u32 gave[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        gave[i] = i * 32 + lane < CHANNELS * RINGS ? counts[i * 32 + lane] : 0;
    const bool beats = blockIdx.x == 0 && lane == 0;
    u32 beat = beats ? load_relaxed_sys(&status->beat) : 0;
    for (u32 looks = 1;; ++looks) {
        const bool last = *left == 0;
        __syncwarp();
        __threadfence_block();
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int at = i * 32 + lane;
            if (at >= CHANNELS * RINGS) continue;
            const u32 count = counts[at];
            if (count == gave[i]) continue;
            const int w = at / RINGS, entry = at % RINGS, between = entry - R_INTRA * R_INTER;
            gave[i] = count;
            const int source = between < 0 ? g.node * R_INTRA + entry / R_INTER : between * R_INTRA + g.local;
            const int ring = between < 0 ? g.inside(g.local, entry % R_INTER, first + w) : g.between(g.node, first + w);
            store_release_sys(g.head(source, ring), count);
        }
        if (__any_sync(ALL, last)) break;
        if (beats && !(STALLS == g.rank)) store_relaxed_sys(&status->beat, ++beat);
        if (looks % 256 == 0 && __any_sync(ALL, g.aborted())) return;
    }
    for (int at = lane; at < CHANNELS * RINGS; at += 32) *g.got(at % RINGS * g.C + first + at / RINGS) = counts[at];
    __threadfence();
    __syncwarp();
    if (lane == 0) atomicAdd(&status->ended, 1u);
    if (blockIdx.x != 0) return;
    // other blocks may still wait for peers: this rank lives until they end
    const u32 all = load_relaxed_sys(&status->entered) * gridDim.x;
    for (u32 looks = 1; load_relaxed_sys(&status->ended) != all; ++looks) {
        if (beats && !(STALLS == g.rank)) store_relaxed_sys(&status->beat, ++beat);
        if (looks % 256 == 0 && __any_sync(ALL, g.aborted())) return;
    }
}

extern "C" __global__ void __launch_bounds__((ROLES * CHANNELS + 1) * 32, 1) rank_combine(const __grid_constant__ Call call) {
    __shared__ u32 counts[CHANNELS * RINGS];
    __shared__ u32 left;
    const Local& own = call.local[blockIdx.y];
    const int C = gridDim.x * CHANNELS, warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * CHANNELS;
    const Group g(call, static_cast<int>(own.rank), C, call.H * (WIRE32 ? 4 : 2));
    if (threadIdx.x == 0) left = ROLES * CHANNELS;
    for (int at = threadIdx.x; at < CHANNELS * RINGS; at += blockDim.x)
        counts[at] = *g.got(at % RINGS * C + first + at / RINGS);
    if (threadIdx.x == 0 && blockIdx.x == 0) store_relaxed_sys(&g.status(g.rank)->entered, g.status(g.rank)->entered + 1);
    __syncthreads();
    if (g.aborted()) return;
    if (warp == ROLES * CHANNELS) {
        coordinate(g, counts, &left);
        return;
    }
    const int role = warp / CHANNELS, w = warp % CHANNELS;
    const Warp work{g, own, first + w, w, lane, call.H, call.H / 8, counts + w * RINGS};
    if (role == 0) {
        work.receive();
    } else if (FORWARDERS && role == 1) {
        work.forward();
    } else {
        work.send();
    }
    __syncwarp();
    __threadfence_block();
    if (lane == 0) atomicSub(&left, 1u);
}
