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
#include "common/cluster.cuh"
#include "common/copies.cuh"

#ifndef FP32
#define FP32 0
#endif
#ifndef THREADS
#define THREADS 1024
#endif

constexpr int WARPS = THREADS / 32, BINS = 2048, OWN = BINS / THREADS, PART = BINS / CLUSTER;
constexpr int LIST = 256;             // tokens that are taken one by one
constexpr int AHEAD = 4;              // reads of a thread at a time
constexpr float STEP = 44.0f / BINS;  // of a bin, in powers of two
constexpr double UNIT = 1 << 20;      // of amounts: the first weight of a bin
constexpr double WHOLE = 1ull << 44;  // of masses: the largest weight

struct Shared {
    u32 counts[BINS], deficits[BINS];  // of this block; after `add_blocks`, of the cluster
    u32 part_counts[PART], part_deficits[PART];
    u64 masses[BINS];  // of the first pass; with `tokens`
    u32 tokens[BINS];
    u64 found[2][LIST];  // of this block's tokens, by turns: a peer may still read the last ones
    u64 list[LIST];      // of the cluster's
    u32 amounts[LIST];   // theirs
    u64 lowest, highest;
    u64 sums[2][WARPS];
    u64 before_count, before_amount;  // what `search` found, with bin and inside
    u64 at, mass;                     // what `find` found
    int bin, inside;
    int found_count[2];
};

struct Row {
    const uint4* logits;
    int units;                 // of 16 bytes
    float largest, per_logit;  // bins
};

// How many bins a logit is below the largest. Rounded step by step, so that every pass finds the same.
__device__ __forceinline__ float place_of(const Row& row, float value) {
    const float place = __fmul_rn(__fsub_rn(row.largest, value), row.per_logit);
    return place > 0.0f ? place : 0.0f;  // inf - inf, too
}

// What is missing in its bin's first weight, in 1 / UNIT of it. Below 2^14, so that 2^18 of them fit a word.
__device__ __forceinline__ u32 deficit_of(float place) {
    const float over = __fsub_rn(place, static_cast<float>(static_cast<int>(place)));
    const float deficit = __fmul_rn(__fsub_rn(1.0f, exp2f(__fmul_rn(over, -STEP))), static_cast<float>(UNIT));
    return deficit > 0.0f ? static_cast<u32>(deficit + 0.5f) : 0;
}

// Masses of an amount 1 in a bin.
__device__ __forceinline__ double scale_of(int bin) {
    return exp2(static_cast<double>(bin) * -STEP) * (WHOLE / UNIT);
}

// Ascending in the order of draws; no two tokens have the same.
__device__ __forceinline__ u64 key_of(float value, int token) {
    const u32 bits = __float_as_uint(value + 0.0f);  // -0 is 0
    const u32 below = bits >> 31 ? bits : ~(bits | 0x80000000u);
    return static_cast<u64>(below) << 32 | static_cast<u32>(token);
}

__device__ __forceinline__ float value_of(u64 key) {
    const u32 below = key >> 32;
    return __uint_as_float(below >> 31 ? below : ~below & 0x7fffffffu);
}

// do_(value, token) for each logit of this block's part of the row.
template <class Do>
__device__ __forceinline__ void each(const Row& row, Do do_) {
    constexpr int ALL = CLUSTER * THREADS;
    for (int first = rank_in_cluster() * THREADS + threadIdx.x; first < row.units; first += AHEAD * ALL) {
        uint4 read[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) read[k] = load_once(row.logits + min(first + k * ALL, row.units - 1));
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const int unit = first + k * ALL;
            if (unit >= row.units) break;
            const u32 words[4] = {read[k].x, read[k].y, read[k].z, read[k].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (FP32) {
                    do_(__uint_as_float(words[i]), unit * 4 + i);
                } else {
                    do_(first_of(words[i]), unit * 8 + 2 * i);
                    do_(second_of(words[i]), unit * 8 + 2 * i + 1);
                }
            }
        }
    }
}

// do_(key) for each of those in one bin.
template <class Do>
__device__ __forceinline__ void each_of(const Row& row, int bin, Do do_) {
    const float from = bin, to = bin + 1;
    each(row, [&](float value, int token) {
        const float place = place_of(row, value);
        if (place >= from && place < to) do_(place, key_of(value, token));
    });
}

__device__ __forceinline__ u32 read_word(const u32* here, int rank) {
    return read_from(reinterpret_cast<const int*>(here), rank);
}

__device__ __forceinline__ u64 read_long(const u64* here, int rank) {
    const u32* words = reinterpret_cast<const u32*>(here);
    return static_cast<u64>(read_word(words + 1, rank)) << 32 | read_word(words, rank);
}

__device__ __forceinline__ void clear(Shared& shared) {
    for (int i = threadIdx.x; i < BINS; i += THREADS) shared.counts[i] = shared.deficits[i] = 0;
    __syncthreads();
}

__device__ __forceinline__ void add(Shared& shared, int bin, float place) {
    atomicAdd(shared.counts + bin, 1u);
    if (const u32 deficit = deficit_of(place)) atomicAdd(shared.deficits + bin, deficit);
}

// The sums over the cluster of what its blocks added: each block makes a part, then all read the parts.
__device__ __forceinline__ void add_blocks(Shared& shared) {
    if (CLUSTER == 1) return __syncthreads();
    sync_cluster();
    for (int i = threadIdx.x; i < PART; i += THREADS) {
        const int bin = rank_in_cluster() * PART + i;
        u32 count = 0, deficit = 0;
#pragma unroll
        for (int rank = 0; rank < CLUSTER; ++rank) {
            count += read_word(shared.counts + bin, rank);
            deficit += read_word(shared.deficits + bin, rank);
        }
        shared.part_counts[i] = count, shared.part_deficits[i] = deficit;
    }
    sync_cluster();
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int bin = i * THREADS + threadIdx.x;
        shared.counts[bin] = read_word(shared.part_counts + bin % PART, bin / PART);
        shared.deficits[bin] = read_word(shared.part_deficits + bin % PART, bin / PART);
    }
    __syncthreads();
}

__device__ __forceinline__ u64 amount_in(const Shared& shared, int bin) {
    return static_cast<u64>(shared.counts[bin]) * static_cast<u64>(UNIT) - shared.deficits[bin];
}

// What the threads before this one have of both.
__device__ __forceinline__ void sums_before(Shared& shared, u64& count, u64& amount) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u64 own_count = count, own_amount = amount;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u64 more_count = __shfl_up_sync(~0u, count, step);
        const u64 more_amount = __shfl_up_sync(~0u, amount, step);
        if (lane >= step) count += more_count, amount += more_amount;
    }
    __syncthreads();
    if (lane == 31) shared.sums[0][warp] = count, shared.sums[1][warp] = amount;
    __syncthreads();
    count -= own_count, amount -= own_amount;
    for (int i = 0; i < warp; ++i) count += shared.sums[0][i], amount += shared.sums[1][i];
}

// The first bin after which `passed` (of the count and the amount up to there) holds. There is one. counts,
// amounts: of bins OWN * threadIdx.x and on.
template <class Passed>
__device__ __forceinline__ void search(Shared& shared, const u32 (&counts)[OWN], const u64 (&amounts)[OWN],
                                       Passed passed) {
    u64 count = 0, amount = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) count += counts[i], amount += amounts[i];
    sums_before(shared, count, amount);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const u64 next_count = count + counts[i], next_amount = amount + amounts[i];
        if (!passed(count, amount) && passed(next_count, next_amount)) {
            shared.bin = threadIdx.x * OWN + i, shared.inside = counts[i];
            shared.before_count = count, shared.before_amount = amount;
        }
        count = next_count, amount = next_amount;
    }
    __syncthreads();
}

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
