// SPDX-License-Identifier: Apache-2.0
// PTX of the Hopper kernels: mbarriers, TMA copies, warpgroup products.
#pragma once

#include "common/copies.cuh"
#include "common/flags.cuh"

struct alignas(64) TensorMap {
    u64 opaque[16];
};

// ---- clusters

// Two floats to the same variable in another block's shared memory: that block's barrier, at the same place
// as this one's, counts the 8 bytes once they are there. No fence is needed.
__device__ __forceinline__ void send_two(u32 here, u32 rank, u32 barrier, float first, float second) {
    asm volatile(
        "{.reg .b32 there, counts; mapa.shared::cluster.u32 there, %0, %2;\n"
        "mapa.shared::cluster.u32 counts, %1, %2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {%3, %4}, [counts];}" ::
            "r"(here),
        "r"(barrier), "r"(rank), "f"(first), "f"(second)
        : "memory");
}

// One float, of which the barrier counts 4 bytes.
__device__ __forceinline__ void send_one(u32 here, u32 rank, u32 barrier, float value) {
    asm volatile(
        "{.reg .b32 there, counts; mapa.shared::cluster.u32 there, %0, %2;\n"
        "mapa.shared::cluster.u32 counts, %1, %2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %3, [counts];}" ::"r"(here),
        "r"(barrier), "r"(rank), "f"(value)
        : "memory");
}

// Bytes of this block, a multiple of 16, to a place in another block's shared memory, whose barrier counts
// them. This block must not exit before.
__device__ __forceinline__ void send_bytes(u32 from, u32 here, u32 rank, u32 barrier, u32 bytes) {
    asm volatile(
        "{.reg .b32 there, counts; mapa.shared::cluster.u32 there, %1, %2;\n"
        "mapa.shared::cluster.u32 counts, %3, %2;\n"
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [%0], %4, "
        "[counts];}" ::"r"(from),
        "r"(here), "r"(rank), "r"(barrier), "r"(bytes)
        : "memory");
}

// ---- barriers: 8 bytes of shared memory each

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Some warps of a block; id 1 to 15.
__device__ __forceinline__ void named_sync(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrive at one of named_sync's barriers without waiting; same count.
__device__ __forceinline__ void named_arrive(u32 id, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- copies

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tensor_load_2d(u32 to, const TensorMap* map, u32 barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
        "[%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y)
        : "memory");
}

__device__ __forceinline__ void tensor_load_3d(u32 to, const TensorMap* map, u32 barrier, int x, int y,
                                               int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
        "%5}], "
        "[%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

__device__ __forceinline__ void tensor_load_4d(u32 to, const TensorMap* map, u32 barrier, int x, int y, int z,
                                               int u) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u)
        : "memory");
}

__device__ __forceinline__ void tensor_load_5d(u32 to, const TensorMap* map, u32 barrier, int x, int y, int z,
                                               int u, int v) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v)
        : "memory");
}

// With an L2 eviction policy.
__device__ __forceinline__ void tensor_load_3d(u32 to, const TensorMap* map, u32 barrier, int x, int y, int z,
                                               u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%4, %5, %6}], [%2], %3;" ::"r"(to),
        "l"(map), "r"(barrier), "l"(policy), "r"(x), "r"(y), "r"(z)
        : "memory");
}

__device__ __forceinline__ void tensor_load_5d(u32 to, const TensorMap* map, u32 barrier, int x, int y, int z,
                                               int u, int v, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(to),
        "l"(map), "r"(barrier), "l"(policy), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v)
        : "memory");
}

// Contiguous bytes, a multiple of 16.
__device__ __forceinline__ void bytes_load(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// Contiguous bytes, a multiple of 16, to L2 alone. Later writes by other kernels find them there.
__device__ __forceinline__ void bytes_prefetch(const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// One arrival of this thread once all its copies have landed.
__device__ __forceinline__ void copies_arrive(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Make this thread's generic writes to shared memory, and those it observed, visible to the tensor cores and
// TMA.
__device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void store_float(u32 to, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}

__device__ __forceinline__ void store_two(u32 to, float first, float second) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(first), "f"(second) : "memory");
}

__device__ __forceinline__ void store_16(u32 to, uint4 words) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words.x), "r"(words.y),
                 "r"(words.z), "r"(words.w)
                 : "memory");
}

__device__ __forceinline__ u32 load_word(u32 from) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
    return word;
}

__device__ __forceinline__ u32 load_byte(u32 from) {
    u32 byte;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(from) : "memory");
    return byte;
}

// Four 8 x 8 matrices, each stored transposed; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_transposed(u32 row, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// Not transposed.
__device__ __forceinline__ void store_matrices(u32 row, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// ---- arithmetic

// Two products of elements.
__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
    u32 word;
#if FP16
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
#else
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
#endif
    return word;
}

// Eight products.
__device__ __forceinline__ uint4 times(uint4 a, uint4 b) {
    return make_uint4(multiply_pairs(a.x, b.x), multiply_pairs(a.y, b.y), multiply_pairs(a.z, b.z),
                      multiply_pairs(a.w, b.w));
}

__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Keep the computation of a non-negative value before the code that follows, e.g. a wait for products, which
// ptxas would otherwise move up. Implemented as a store that never executes. memory: any shared address.
__device__ __forceinline__ void before_all_else(float value, u32 memory) {
    asm volatile(
        "{.reg .pred never; setp.lt.f32 never, %0, 0f00000000;\n"
        "@never st.shared.f32 [%1], %0;}" ::"f"(value),
        "r"(memory)
        : "memory");
}

// ---- registers of a warpgroup

template <int COUNT>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
