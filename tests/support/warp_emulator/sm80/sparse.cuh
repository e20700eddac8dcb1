// SPDX-License-Identifier: Apache-2.0
// In place of gpu_kernels/cuda/sm80/sparse.cuh; fragments as the PTX ISA has them: ldmatrix with .trans, and
// sparse mma.m16n8k32.
//
// | operand  | element          | lane                          | where in the lane                        |
// |----------|------------------|-------------------------------|------------------------------------------|
// | A        | row, chunk c     | row % 8 * 4 + c % 4           | word c / 4 * 2 + row / 8: the kept pair  |
// | B        | k, column        | column * 4 + k % 8 / 2        | word k / 8, half k % 2                   |
// | metadata | row, chunk c     | row % 8 * 4 + 2 * f + c / 4   | bits 16 * (row / 8) + 4 * (c % 4) on: 4  |
// | sums     | row, column      | row % 8 * 4 + column / 2      | row / 8 * 2 + column % 2                 |
//
// Metadata of a chunk: two bits, the channel of the first of the pair, two of the second; in order they
// ascend.
#pragma once

#include "common/element.cuh"
#include "sm80/halves.cuh"

inline void load_transposed(u32 (&words)[4], u32 address) {
    emulator::note('B');
    const int me = emulator::current, lane = me % 32;
    emulator::fibers[me].words[0] = address;
    emulator::meet_warp();
    for (int m = 0; m < 4; ++m) {
        words[m] = 0;
        for (int i = 0; i < 2; ++i) {
            const int row = lane % 4 * 2 + i, column = lane / 4;
            const u32 from = static_cast<u32>(emulator::fibers[me - lane + 8 * m + row].words[0]);
            u16 element;
            std::memcpy(&element, emulator::shared(from) + 2 * column, 2);
            words[m] |= static_cast<u32>(element) << 16 * i;
        }
    }
    emulator::meet_warp();
}

template <int SELECTOR, bool ORDERED = true, float (*VALUE)(u16) = value_of>
inline void multiply_sparse(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[4], u32 metadata) {
    const int me = emulator::current, lane = me % 32, first = me - lane;
    auto& mine = emulator::fibers[me].words;
    const auto words = [first](int of) { return emulator::fibers[first + of].words; };
    for (int i = 0; i < 4; ++i) mine[i] = a[i] | static_cast<u64>(b[i]) << 32;
    mine[4] = metadata;
    emulator::meet_warp();
    emulator::note(SELECTOR ? '1' : '0');
    for (int of = 0; of < 32; ++of)
        if (of % 4 / 2 != SELECTOR && words(of)[4] != 0)
            emulator::note('!');  // lanes that give none hold some
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int chunk = 0; chunk < 8; ++chunk) {
            const u32 pair = words(row % 8 * 4 + chunk % 4)[chunk / 4 * 2 + row / 8];
            const u32 given = words(row % 8 * 4 + 2 * SELECTOR + chunk / 4)[4];
            const u32 bits = given >> (16 * (row / 8) + 4 * (chunk % 4)) & 0xf;
            const u32 channels[2] = {bits & 3, bits >> 2};
            if (ORDERED && channels[0] >= channels[1]) emulator::fail("metadata that is not in order");
            if (channels[0] == channels[1]) emulator::fail("metadata that names a channel twice");
            for (int n = 0; n < 2; ++n) {
                const u32 k = 4 * chunk + channels[n];
                const u32 of_b = words(column * 4 + k % 8 / 2)[k / 8] >> 32;
                sums[i] += VALUE(pair >> 16 * n & 0xffff) * VALUE(of_b >> 16 * (k % 2) & 0xffff);
            }
        }
    }
    emulator::meet_warp();
}

template <int SELECTOR>
inline void multiply_sparse_fp16(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[4], u32 metadata) {
    multiply_sparse<SELECTOR, true, fp16_of>(sums, a, b, metadata);
}

template <int SELECTOR>
inline void multiply_unordered(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[4], u32 metadata) {
    multiply_sparse<SELECTOR, false>(sums, a, b, metadata);
}

inline u32 choose_bytes(u32 word, u32 which) { return __byte_perm(word, 0, which); }

inline u32 and_xor(u32 a, u32 b, u32 c) { return (a & b) ^ c; }

inline u32 multiply_add_bf16x2(u32 a, u32 b, u32 c) {
    return pack(fmaf(first_of(a), first_of(b), first_of(c)), fmaf(second_of(a), second_of(b), second_of(c)));
}
