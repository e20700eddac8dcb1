// SPDX-License-Identifier: Apache-2.0
// In place of gpu_kernels/cuda/sm90/sparse.cuh; fragments and metadata as sm80/sparse.cuh has them, a warp each.
#pragma once

#include "sm80/halves.cuh"
#include "sm90/ptx.cuh"
#include "sm90/wgmma.cuh"

namespace emulator {

// value: of an element's bits.
template <int N, int SELECTOR>
void sparse_product_of(float (*value)(u16), float* d, const u32* a, u32 metadata, u64 b, bool add) {
    const int me = emulator::current, block = emulator::block();
    auto& mine = emulator::fibers[me].words;
    mine[0] = reinterpret_cast<uintptr_t>(a);
    mine[1] = metadata;
    emulator::meet_warp();
    std::array<const u32*, 4> lanes;
    std::array<u32, 2> given;
    for (int i = 0; i < 4; ++i) lanes[i] = reinterpret_cast<const u32*>(emulator::fibers[me / 4 * 4 + i].words[0]);
    for (int i = 0; i < 2; ++i) given[i] = static_cast<u32>(emulator::fibers[me / 4 * 4 + 2 * SELECTOR + i].words[1]);
    emulator::meet_warp();
    auto make = [=] {
        for (int i = 0; i < N / 2; ++i) {
            const int high = i / 2 % 2, column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
            float sum = 0;
            for (int chunk = 0; chunk < 8; ++chunk) {
                const u32 pair = lanes[chunk % 4][chunk / 4 * 2 + high];
                const u32 bits = given[chunk / 4] >> (16 * high + 4 * (chunk % 4)) & 0xf;
                const u32 kept[2] = {bits & 3, bits >> 2};
                if (kept[0] == kept[1]) emulator::fail("metadata that names a channel twice");
                for (int n = 0; n < 2; ++n)
                    sum += value(pair >> 16 * n & 0xffff) *
                           value(emulator::bits(block, emulator::along(b, column, 4 * chunk + kept[n])));
            }
            d[i] = (add ? d[i] : 0.0f) + sum;
        }
    };
    if (emulator::late)
        emulator::fibers[emulator::current].open_products.push_back(make);
    else
        make();
    emulator::meet_warp();  // nobody changes what others multiply
}

}  // namespace emulator

template <int N, int SELECTOR>
void sparse_product(float* d, const u32* a, u32 metadata, u64 b, bool add) {
    emulator::sparse_product_of<N, SELECTOR>(value_of, d, a, metadata, b, add);
}
template <int N, int SELECTOR>
void sparse_product_fp16(float* d, const u32* a, u32 metadata, u64 b, bool add) {
    emulator::sparse_product_of<N, SELECTOR>(fp16_of, d, a, metadata, b, add);
}

inline u64 further(u64 operand, u32 by) { return advance(operand, by); }

inline u32 low_twice(u32 value) { return (value & 0xffff) * 0x10001u; }
inline u32 high_twice(u32 value) { return (value >> 16) * 0x10001u; }

namespace emulator {

inline void copy(const Copy& copy) {
    if (!late) land(copy);
    fibers[current].open.push_back(copy);
}

}  // namespace emulator

inline void copy_8(u32 to, const void* from) { emulator::copy({to, from, 8}); }

inline int later(int value) { return value; }

inline void bytes_load(u32 to, const void* from, u32 bytes, u32 barrier, u64) { bytes_load(to, from, bytes, barrier); }
