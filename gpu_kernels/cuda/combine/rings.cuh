// Rings between ranks: a rank's heap, its counters, waits that end, and who is to blame.
//
// | heap of a rank | bytes                        | written by |
// |----------------|------------------------------|----------------------------------------------------------|
// | Status         | 256                          | this rank; its report by any rank                        |
// | tails          | RINGS * C * 32, one u32 each | the producer of a ring into this rank                    |
// | heads          | the same                     | the consumer of a ring out of this rank                  |
// | got, sent      | RINGS * C * 4 each           | this rank: items of earlier calls                        |
// | slots          | RINGS * C * slots * slot     | the producer of a ring into this rank                    |
//
// Ring of channel ch, by its other end: inside a node (local * R_INTER + far) * C + ch, where far is the node
// at the other end of the stream; between nodes (R_INTRA * R_INTER + node) * C + ch.
#pragma once

#include "common/element.cuh"

constexpr int R = R_INTER * R_INTRA;
constexpr int RINGS = (R_INTRA + 1) * R_INTER;  // a channel, into one rank
constexpr u32 ALL = 0xffffffffu;
static_assert(R <= 32, "a lane for each rank");

enum Role : int { OUTSIDE, SENDER, FORWARDER, RECEIVER, COORDINATOR };

struct Status {
    u32 beat, entered, ended,
        aborted;  // ended counts blocks; aborted: 1 once claimed, 2 once the report is whole
    u32 peer, role, call, reporter;
    u32 unused[56];
};

struct Local {  // one rank of this launch
    const u16* x;
    u16* out;
    const u16 *bias_0, *bias_1;
    const u64* masks;
    const int* rows;
    const int* T;
    u64 rank;
};

struct Call {
    u64 heaps[32];
    Local local[8];
    u64 timeout;  // nanoseconds
    int H, T_max, slots, unused;
};

__device__ __forceinline__ u32 load_acquire_sys(const u32* from) {
    u32 word;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
}

__device__ __forceinline__ u32 load_relaxed_sys(const u32* from) {
    u32 word;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
}

__device__ __forceinline__ void store_release_sys(u32* to, u32 word) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

__device__ __forceinline__ void store_relaxed_sys(u32* to, u32 word) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

__device__ __forceinline__ bool reached(u32 counter, u32 count) {
    return static_cast<int>(counter - count) >= 0;
}

// The whole warp: name the rank that stopped, to every rank. peer: the one that this warp waits for.
__device__ __noinline__ void blame(const Call& call, int rank, int peer, int role) {
    const auto status = [&](int r) { return reinterpret_cast<Status*>(call.heaps[r]); };
    const int r = threadIdx.x % 32;
    const u32 entered = load_relaxed_sys(&status(rank)->entered);
    bool stopped = false, outside = false;
    if (r < R && r != rank) {
        const u32 before = load_relaxed_sys(&status(r)->beat);
        const u64 start = nanoseconds();
        while (nanoseconds() - start < call.timeout / 4) __nanosleep(1000);
        const u32 its = load_relaxed_sys(&status(r)->entered);
        const bool finished = load_relaxed_sys(&status(r)->ended) == its * gridDim.x;
        outside = finished;
        stopped = load_relaxed_sys(&status(r)->beat) == before && !(finished && reached(its, entered));
    }
    const u32 found = __ballot_sync(ALL, stopped);
    if (found && !(found >> peer & 1)) peer = __ffs(found) - 1;
    if (__ballot_sync(ALL, outside) >> peer & 1 && found) role = OUTSIDE;
    if (r < R && atomicCAS_system(&status(r)->aborted, 0u, 1u) == 0) {
        Status* to = status(r);
        store_relaxed_sys(&to->peer, peer);
        store_relaxed_sys(&to->role, role);
        store_relaxed_sys(&to->call, entered);
        store_relaxed_sys(&to->reporter, rank);
        store_release_sys(&to->aborted, 2u);
    }
    __syncwarp();
}

// One rank's view of the group.
struct Group {
    const Call& call;
    int rank, node, local, C, slot;  // slot: bytes

    __device__ Group(const Call& call, int rank, int C, int slot)
        : call(call), rank(rank), node(rank / R_INTRA), local(rank % R_INTRA), C(C), slot(slot) {}

    __device__ unsigned char* heap(int r) const { return reinterpret_cast<unsigned char*>(call.heaps[r]); }
    __device__ Status* status(int r) const { return reinterpret_cast<Status*>(heap(r)); }
    __device__ u32* tail(int r, int ring) const {
        return reinterpret_cast<u32*>(heap(r) + sizeof(Status)) + ring * 8;
    }
    __device__ u32* head(int r, int ring) const { return tail(r, RINGS * C + ring); }
    __device__ u32* got(int ring) const { return tail(rank, 2 * RINGS * C) + ring; }
    __device__ u32* sent(int ring) const { return got(RINGS * C + ring); }
    __device__ unsigned char* data(int r, int ring, u32 item) const {
        const u64 first = sizeof(Status) + static_cast<u64>(RINGS) * C * 72;
        const u64 n = static_cast<u64>(ring) * call.slots + (item & (call.slots - 1));
        return heap(r) + (first + 127) / 128 * 128 + n * slot;
    }
    __device__ int inside(int other, int far, int ch) const { return (other * R_INTER + far) * C + ch; }
    __device__ int between(int other, int ch) const { return (R_INTRA * R_INTER + other) * C + ch; }

    __device__ bool aborted() const { return load_relaxed_sys(&status(rank)->aborted) != 0; }

    // The whole warp waits until each active lane's counter, in this rank's heap, is at least count: acquire.
    // false: the group is dead. peer: whom the lane waits for.
    __device__ bool wait(bool active, const u32* counter, u32 count, int peer, int role) const {
        u64 start = 0;
        for (u32 looks = 1;; ++looks) {
            const bool met = !active || reached(load_acquire_sys(counter), count);
            const u32 missing = __ballot_sync(ALL, !met);
            if (!missing) return true;
            if (looks % 256) continue;
            if (__any_sync(ALL, aborted())) return false;
            const u64 now = __shfl_sync(ALL, nanoseconds(), 0);
            if (!start) start = now;
            if (now - start <= call.timeout) continue;
            blame(call, rank, __shfl_sync(ALL, peer, __ffs(missing) - 1), role);
            return false;
        }
    }
};
