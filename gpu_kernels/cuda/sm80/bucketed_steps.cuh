// The steps of a warp of bucketed_attention, and their copies to shared memory.
#pragma once

#include "common/copies.cuh"
#include "sm80/bucketed_state.cuh"

// A step of a warp.
struct Step {
    const Tier* tiers;
    int at, end, kind = 0;

    __device__ __forceinline__ bool is() const { return at < end; }
    __device__ __forceinline__ void find() {
        if (is())
            while (at >= tiers[kind].end) ++kind;
    }
    // `steps` of the warp further; its tier is not before `from`.
    __device__ __forceinline__ Step next(int steps, int from) const {
        Step step{tiers, at + steps * WARPS, end, from};
        step.find();
        return step;
    }
    // In its tier.
    __device__ __forceinline__ int token() const {
        return (at - (kind ? tiers[kind - 1].end : 0)) * tokens_of_step(kind);
    }
    __device__ __forceinline__ int page() const { return is() ? tiers[kind].table[token() / PAGE] : 0; }
};

// Where a lane's part of a step lies; values are `apart` bytes behind their keys, and the second half `half`.
struct Source {
    const unsigned char* keys;
    const uint4* scales;
    u32 apart, half;

    __device__ __forceinline__ Source(const Step& step, int page, int kv_heads) {
        const int bits = bits_of_kind(step.kind), lane = threadIdx.x % 32;
        const u32 unit = static_cast<u32>(step.token()) % PAGE / 32;
        apart = PAGE * 16 * bits;
        half = step.kind == 3 ? 2048 : 512 * bits;
        const Tier& tier = step.tiers[step.kind];
        keys =
            tier.payload + static_cast<u64>(page) * (kv_heads * 2 * apart) + unit * (512 * bits) + lane * 16;
        scales = tier.scales + static_cast<u64>(page) * (kv_heads * (PAGE / 4)) + unit * 8 + lane / 4;
    }

    __device__ __forceinline__ void copy(u32 slot, int part, int kind) const {
        const unsigned char* from = keys + (part ? half : 0);
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const unsigned char* chunk = from + (which ? apart : 0);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                copy_16_if(kind < 4 && kind >= j - 1, slot + which * VALUES_AT + j * 512, chunk + j * 512);
        }
        copy_16_if(kind < 4, slot + SCALES_AT, scales + (part && kind < 3 ? 8 : 0));
    }
};
