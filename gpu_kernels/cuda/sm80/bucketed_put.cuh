// SPDX-License-Identifier: Apache-2.0
// A token of a high tier, of 8 or 16 bits: where it lies, and its write by a warp.
#pragma once

#include "sm80/quantise_levels.cuh"

#ifndef HIGH
#define HIGH 8  // bits of the tier
#endif
#ifndef PAGE
#define PAGE 64
#endif

struct HighTier {
    unsigned char* payload;  // [pages, KV, 2, PAGE * 16 * HIGH]
    u16* scales;             // [pages, KV, PAGE / 32, 8, 4, 2]
    int kv_heads;

    __device__ __forceinline__ unsigned char* unit(u64 page, int head, int slot, bool values) const {
        return payload + ((page * kv_heads + head) * 2 + values) * (PAGE * 16 * HIGH) +
               slot / 32 * (512 * HIGH);
    }
    __device__ __forceinline__ u16* scale(u64 page, int head, int slot, bool values) const {
        const int t = slot % 32;
        return scales + (page * kv_heads + head) * (PAGE * 2) + (slot / 32 * 32 + t % 8 * 4 + t / 8) * 2 +
               values;
    }

    // Quantise x, channels 4 * lane .. 4 * lane + 3 of a rotated vector, and write it.
    __device__ __forceinline__ void put(const float (&x)[4], u64 page, int head, int slot,
                                        bool values) const {
        u32 levels[4];
        const float by = quantised<HIGH>(x, levels);
        const int lane = threadIdx.x % 32;
        unsigned char* to = unit(page, head, slot, values);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = byte_of_level<HIGH>(slot % 32, 4 * lane + i, values);
            if (HIGH == 8)
                to[at] = static_cast<unsigned char>(levels[i]);
            else
                *reinterpret_cast<u16*>(to + at) = static_cast<u16>(levels[i]);
        }
        if (lane == 0) *scale(page, head, slot, values) = scale_bits(by);
    }

    // Channels 4 * lane .. 4 * lane + 3 of a token.
    __device__ __forceinline__ void get(float (&x)[4], u64 page, int head, int slot, bool values) const {
        const int lane = threadIdx.x % 32;
        const unsigned char* from = unit(page, head, slot, values);
        const float by = first_of_fp16(*scale(page, head, slot, values));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = byte_of_level<HIGH>(slot % 32, 4 * lane + i, values);
            if (HIGH == 8)
                x[i] = __fmul_rn(static_cast<float>(from[at]) - 127.5f, by);
            else
                x[i] = __fmul_rn(first_of(*reinterpret_cast<const u16*>(from + at)), by);
        }
    }
};

// Four neighbouring channels of bf16, from their place to fp32.
__device__ __forceinline__ void four_of(float (&x)[4], const u16* from) {
    const uint2 words = *reinterpret_cast<const uint2*>(from);
    x[0] = first_of(words.x), x[1] = second_of(words.x), x[2] = first_of(words.y), x[3] = second_of(words.y);
}

// A key or value of a step as tiers hold it: keys are divided by their channels' scales, both are rotated.
// by: those of the lane's channels.
__device__ __forceinline__ void turn(float (&x)[4], const float4& by, bool values) {
    if (!values) {
        x[0] = __fdiv_rn(x[0], by.x), x[1] = __fdiv_rn(x[1], by.y);
        x[2] = __fdiv_rn(x[2], by.z), x[3] = __fdiv_rn(x[3], by.w);
    }
    hadamard(x);
}

// The slot of a position in its row's high tier.
__device__ __forceinline__ int slot_of(int position, int sinks, int ring) {
    return position < sinks ? position : sinks + (position - sinks) % ring;
}
