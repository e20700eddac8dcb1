// SPDX-License-Identifier: Apache-2.0
// A token for each of n rows of logits, drawn with its row's temperature, top-k and top-p: the first, in
// descending order of logits (of equal ones the lowest token first), at which the cumulative weight of the
// kept tokens exceeds uniform * (weight kept).
//
// | argument | shape  | dtype            |                                                                     |
// |----------|--------|------------------|---------------------------------------------------------------------|
// | logits   | [R, V] | bf16, fp16, fp32 | row-major, 16 bytes; V a multiple of 8, at most 2^18                |
// | draws    | [5, n] | fp64             | row of logits; uniform in [0, 1); temperature > 0; top_k, 0: all;   |
// |          |        |                  | top_p                                                               |
// | tokens   | [R]    | int64            | in: a largest logit of each of the n rows; out: their tokens. Rows  |
// |          |        |                  | whose largest is NaN or -inf keep theirs                            |
//
// A row's largest logit weighs 1. A token that weighs less than 2^-44 is never drawn. Sums are integers, so a
// row's token depends neither on the other rows nor on CLUSTER.
//
// Each row has a cluster of CLUSTER blocks (before sm_90 one block), which read the row again in each pass.
// The first pass counts the tokens in 2,048 bins by the logarithm of their weight. In a bin, an amount is so
// many tokens less their small deficits. `find` then looks for a place in the order: its bin, and one by one
// the tokens of that bin. Where they are many, further passes split the bin by logit and token. Every block
// finds the same. Threads: THREADS, at least LIST; blocks: (CLUSTER, n); dynamic shared memory:
// sizeof(Shared).
#include "common/draw_bins.cuh"

// The lowest and the highest key of a bin.
__device__ __forceinline__ void bounds_of(Shared& shared, const Row& row, int bin, u64& lowest,
                                          u64& highest) {
    lowest = ~0ull, highest = 0;
    each_of(row, bin, [&](float, u64 key) { lowest = min(lowest, key), highest = max(highest, key); });
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        lowest = min(lowest, __shfl_xor_sync(~0u, lowest, step));
        highest = max(highest, __shfl_xor_sync(~0u, highest, step));
    }
    if (threadIdx.x % 32 == 0)
        shared.sums[0][threadIdx.x / 32] = lowest, shared.sums[1][threadIdx.x / 32] = highest;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < WARPS; ++i)
            lowest = min(lowest, shared.sums[0][i]), highest = max(highest, shared.sums[1][i]);
        shared.lowest = lowest, shared.highest = highest;
    }
    sync_cluster();
    lowest = ~0ull, highest = 0;
    for (int rank = 0; rank < CLUSTER; ++rank) {
        lowest = min(lowest, read_long(&shared.lowest, rank));
        highest = max(highest, read_long(&shared.highest, rank));
    }
}

// The token after which the count of tokens, or their mass, is more than `target`. There is one. turn: 0 and
// 1, by turns.
__device__ __forceinline__ void find(Shared& shared, const Row& row, bool by_count, u64 target, int turn) {
    if (threadIdx.x == 0) shared.found_count[turn] = 0;
    u32 counts[OWN];
    u64 amounts[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        counts[i] = shared.tokens[threadIdx.x * OWN + i];
        amounts[i] = shared.masses[threadIdx.x * OWN + i];
    }
    search(shared, counts, amounts, [&](u64 count, u64 mass) { return (by_count ? count : mass) > target; });
    const int bin = shared.bin;
    const u64 base = shared.before_amount;
    const double scale = scale_of(bin);
    const auto mass_of = [&](u64 amount) {
        return base + static_cast<u64>(static_cast<double>(amount) * scale);
    };
    u64 count = shared.before_count, amount = 0;  // before `lowest`
    u64 lowest = 0, highest = ~0ull;
    int inside = shared.inside;
    const auto passed = [&](u64 more_count, u64 more) {
        return (by_count ? count + more_count : mass_of(amount + more)) > target;
    };
    if (inside > LIST) bounds_of(shared, row, bin, lowest, highest);
    while (inside > LIST) {
        int shift = 0;
        while ((highest - lowest) >> shift >= BINS) ++shift;
        clear(shared);
        each_of(row, bin, [&](float place, u64 key) {
            if (key < lowest || key > highest) return;
            add(shared, static_cast<int>((key - lowest) >> shift), place);
        });
        add_blocks(shared);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            counts[i] = shared.counts[threadIdx.x * OWN + i];
            amounts[i] = amount_in(shared, threadIdx.x * OWN + i);
        }
        search(shared, counts, amounts, passed);
        count += shared.before_count, amount += shared.before_amount, inside = shared.inside;
        lowest += static_cast<u64>(shared.bin) << shift;
        highest = lowest + (1ull << shift) - 1;
    }
    each_of(row, bin, [&](float, u64 key) {
        if (key < lowest || key > highest) return;
        shared.found[turn][atomicAdd(shared.found_count + turn, 1)] = key;
    });
    sync_cluster();
    for (int rank = 0, first = 0; rank < CLUSTER; ++rank) {
        const int more = read_from(shared.found_count + turn, rank);
        if (static_cast<int>(threadIdx.x) < more) {
            const u64 key = read_long(shared.found[turn] + threadIdx.x, rank);
            shared.list[first + threadIdx.x] = key;
            shared.amounts[first + threadIdx.x] =
                static_cast<u32>(UNIT) - deficit_of(place_of(row, value_of(key)));
        }
        first += more;
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < inside) {
        const u64 own = shared.list[threadIdx.x];
        u64 before_count = 0, before = 0;
        for (int i = 0; i < inside; ++i)
            if (shared.list[i] < own) ++before_count, before += shared.amounts[i];
        const u64 up_to = before + shared.amounts[threadIdx.x];
        if (!passed(before_count, before) && passed(before_count + 1, up_to))
            shared.at = own, shared.mass = mass_of(amount + up_to);
    }
    __syncthreads();
}

// The first pass: tokens and masses of all bins, and their sums.
__device__ __forceinline__ void count_all(Shared& shared, const Row& row, u64& count, u64& mass) {
    clear(shared);
    each(row, [&](float value, int) {
        const float place = place_of(row, value);
        if (place < static_cast<float>(BINS)) add(shared, static_cast<int>(place), place);
    });
    add_blocks(shared);
    count = mass = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int bin = threadIdx.x * OWN + i;
        const u64 of = static_cast<u64>(static_cast<double>(amount_in(shared, bin)) * scale_of(bin));
        shared.tokens[bin] = shared.counts[bin], shared.masses[bin] = of;
        count += shared.counts[bin], mass += of;
    }
    const u64 own_count = count, own_mass = mass;
    sums_before(shared, count, mass);
    if (threadIdx.x == THREADS - 1) shared.before_count = count + own_count, shared.mass = mass + own_mass;
    __syncthreads();
    count = shared.before_count, mass = shared.mass;
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS)
    draw_tokens(const void* logits, const double* draws, long long* tokens, int V, int n) {
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_memory());
    wait_for_predecessor();
    let_successor_start();
    const double* own = draws + blockIdx.y;
    const long long at = static_cast<long long>(own[0]);
    constexpr int BYTES = FP32 ? 4 : 2;
    const auto* bytes = static_cast<const unsigned char*>(logits) + at * V * BYTES;
    const long long best = min(max(tokens[at], 0ll), V - 1ll);
    const float largest = FP32 ? reinterpret_cast<const float*>(bytes)[best]
                               : first_of(reinterpret_cast<const u16*>(bytes)[best]);
    // the divisor is no subnormal, nor its inverse
    const double per_logit = 1.4426950408889634 / min(max(own[2 * n], 1e-37), 1e37) / STEP;
    const Row row{reinterpret_cast<const uint4*>(bytes), V * BYTES / 16, largest,
                  static_cast<float>(per_logit)};
    sync_cluster();  // `best` is read before it is written
    if (largest > __int_as_float(0xff800000)) {
        u64 count, kept;
        count_all(shared, row, count, kept);
        // where top-k ends, where top-p ends, and the draw
#pragma unroll 1
        for (int step = 0, turn = 0; step < 3; ++step) {
            u64 target;
            if (step == 0) {
                const double top_k = own[3 * n];
                if (!(top_k > 0.0 && top_k < static_cast<double>(count))) continue;
                target = static_cast<u64>(top_k) - 1;
            } else if (step == 1) {
                const double top_p = own[4 * n];
                if (!(top_p < 1.0)) continue;
                const u64 least = static_cast<u64>(ceil(top_p * static_cast<double>(kept)));
                target = min(max(least, u64{1}), kept) - 1;
            } else {
                target = min(static_cast<u64>(own[n] * static_cast<double>(kept)), kept - 1);
            }
            find(shared, row, step == 0, target, turn);
            turn ^= 1;
            kept = shared.mass;
        }
        if (rank_in_cluster() == 0 && threadIdx.x == 0) tokens[at] = static_cast<u32>(shared.at);
    }
    sync_cluster();  // peers read this block's memory
}
