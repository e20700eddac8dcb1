// SPDX-License-Identifier: Apache-2.0
// Loads and stores of memory that another GPU, or the host, reads or writes meanwhile.
#pragma once

#include "common/element.cuh"

constexpr u32 PATIENCE = 256;  // loads between two looks at the clock

// Two words of 64 bits; each arrives whole.
__device__ __forceinline__ void store_words(u64 to, u64 first, u64 second) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(first), "l"(second)
                 : "memory");
}

__device__ __forceinline__ void load_words(u64 from, u64 (&words)[2]) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(words[0]), "=l"(words[1])
                 : "l"(from)
                 : "memory");
}

__device__ __forceinline__ u32 load_flag(u64 from) {
    u32 word;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
}

// After what this thread wrote, or observed behind a barrier.
__device__ __forceinline__ void store_flag(u64 to, u32 word) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

// 16 bytes that another GPU wrote before its flag.
__device__ __forceinline__ uint4 load_put(u64 from) {
    uint4 words;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from)
                 : "memory");
    return words;
}

__device__ __forceinline__ void store_put(u64 to, uint4 words) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y),
                 "r"(words.z), "r"(words.w)
                 : "memory");
}

__device__ __forceinline__ u64 load_word(const u64* from) {
    u64 word;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
}

__device__ __forceinline__ void store_word(u64* to, u64 word) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

// Store where there is 0. What there was.
__device__ __forceinline__ u64 store_first(u64* to, u64 word) {
    u64 was;
    asm volatile("atom.relaxed.sys.global.cas.b64 %0, [%1], 0, %2;"
                 : "=l"(was)
                 : "l"(to), "l"(word)
                 : "memory");
    return was;
}

__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}
