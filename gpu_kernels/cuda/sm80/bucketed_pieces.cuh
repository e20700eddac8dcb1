// SPDX-License-Identifier: Apache-2.0
// The pieces of a warp of bucketed_attention, and their copies to shared memory.
#pragma once

#include "common/copies.cuh"
#include "sm80/bucketed_state.cuh"

// log2 of the pieces of 32 tokens.
__device__ __forceinline__ constexpr int fold_of(int kind) { return kind < 3 ? 0 : kind - 2; }

// Where a warp is in its row's pieces, which lie tier by tier.
struct Place {
    const Tier* tiers;
    int kind, at, stop, rest;  // piece of the tier; where the warp leaves it; pieces that follow it
    int page;                  // of the piece

    // first: among the row's pieces.
    __device__ __forceinline__ Place(const Tier* of, int first, int pieces) : tiers(of), kind(0), at(first) {
        while (kind < KINDS - 1 && at >= tiers[kind].pieces) at -= tiers[kind++].pieces;
        stop = min(at + pieces, tiers[kind].pieces);
        rest = pieces - (stop - at);
        look_up(kind);
    }

    __device__ __forceinline__ bool is() const { return at < stop; }

    // KIND is `kind`, which the compiler may know.
    __device__ __forceinline__ void look_up(int KIND) {
        if (is()) page = tiers[KIND].table[static_cast<u32>(at) / (PAGE / 32) >> fold_of(KIND)];
    }

    __device__ __forceinline__ void go_on(int KIND) {
        if (++at == stop && rest) {
            do ++kind;
            while (!tiers[kind].pieces);
            at = 0;
            stop = min(rest, tiers[kind].pieces);
            rest -= stop;
            look_up(kind);
        } else {
            look_up(KIND);
        }
    }

    // Copy the lane's part of the piece.
    __device__ __forceinline__ void copy(int KIND, u32 slot, int kv_heads) const {
        const Tier& tier = tiers[KIND];
        const int bits = bits_of_kind(KIND), lane = threadIdx.x % 32;
        const u32 apart = PAGE * 16 * bits, piece = static_cast<u32>(at) % (PAGE / 32 << fold_of(KIND));
        const u64 page_at = row_at(reinterpret_cast<u64>(tier.payload), page, kv_heads * 2 * apart);
        const u64 scales_at = row_at(reinterpret_cast<u64>(tier.scales), page, kv_heads * (PAGE * 4));
        const auto* keys =
            reinterpret_cast<const unsigned char*>(page_at) + (piece * (512 * min(bits, 4)) + lane * 16);
        const unsigned char* values = keys + apart;
        const uint4* scales =
            reinterpret_cast<const uint4*>(scales_at) + ((piece >> fold_of(KIND)) * 8 + lane / 4);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            copy_16_if(KIND >= j - 1, slot + j * 512, keys + j * 512);
            copy_16_if(KIND >= j - 1, slot + VALUES_AT + j * 512, values + j * 512);
        }
        copy_16(slot + SCALES_AT, scales);
    }
};
