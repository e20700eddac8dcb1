// SPDX-License-Identifier: Apache-2.0
// In place of gpu_kernels/cuda/sm90/wgmma.cuh; matrices in shared memory and fragments as the PTX ISA draws
// them. A product is made when it is issued or, late, when it is waited for: by all threads of the warpgroup,
// each its own sums, before any of them goes on.
#pragma once

#include "sm90/ptx.cuh"

// Addresses in units of 16 bytes, as in descriptors.
inline u64 operand(u32 address) { return address / 16; }
constexpr u64 OPERAND_STEP = 2;

inline u64 advance(u64 operand, u32 by) { return operand + by; }

inline u64 columns(u32 address, u32 next) { return address / 16 | static_cast<u64>(next) << 32; }
constexpr u64 COLUMNS_STEP = 16 * 128 / 16;

inline void products_begin() {}
inline void sum_here(float&) {}

inline void products_commit() {
    auto& fiber = emulator::fibers[emulator::current];
    fiber.products.push_back(std::move(fiber.open_products));
    fiber.open_products.clear();
}

template <int LEFT>
void products_wait() {
    emulator::meet_warpgroup();
    auto& groups = emulator::fibers[emulator::current].products;
    for (; static_cast<int>(groups.size()) > LEFT; groups.pop_front())
        for (const auto& product : groups.front()) product();
    emulator::meet_warpgroup();
}

namespace emulator {

inline u16 bits(int block, u32 address) {
    u16 bits;
    std::memcpy(&bits, memories[block].bytes + swizzled(address), 2);
    return bits;
}

inline float element(int block, u32 address) { return value_of(bits(block, address)); }

// Row r, element k of 16, of an operand whose K lies along its rows of 128 bytes.
inline u32 along(u64 operand, int r, int k) { return static_cast<u32>(operand) * 16 + r * 128 + k * 2; }

// Column n, element k, of one whose rows are elements of K.
inline u32 across(u64 columns, int n, int k) {
    return static_cast<u32>(columns) * 16 + n / 64 * static_cast<u32>(columns >> 32) + k * 128 + n % 64 * 2;
}

template <class A, class B>
void issue(float* sums, int count, bool add, A a, B b) {
    auto make = [=] {
        const int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
        float left[2][16];  // of both rows of A
        for (int i = 0; i < 2; ++i)
            for (int k = 0; k < 16; ++k) left[i][k] = a(row + i * 8, k);
        // a thread's sums: of two columns, row by row
        for (int first = 0; first < count; first += 4)
            for (int column = 0; column < 2; ++column) {
                float right[16];
                for (int k = 0; k < 16; ++k) right[k] = b(first * 2 + thread % 4 * 2 + column, k);
                for (int i = 0; i < 2; ++i) {
                    float& to = sums[first + i * 2 + column];
                    float sum = add ? to : 0;
                    for (int k = 0; k < 16; ++k) sum += left[i][k] * right[k];
                    to = sum;
                }
            }
    };
    if (late)
        fibers[current].open_products.push_back(make);
    else
        make();
}

}  // namespace emulator

template <int N>
void product(float* d, u64 a, u64 b, bool add) {
    const int block = emulator::block();
    emulator::issue(
        d, N / 2, add, [=](int row, int k) { return emulator::element(block, emulator::along(a, row, k)); },
        [=](int column, int k) { return emulator::element(block, emulator::along(b, column, k)); });
}

template <int N>
void products(float* d, u64 a, u64 b, bool add) {
    for (int step = 0; step < 4; ++step)
        product<N>(d, a + step * OPERAND_STEP, b + step * OPERAND_STEP, add || step > 0);
}

namespace emulator {

// A in registers: element_of_b(column, k).
template <class B>
void issue_registers(float* d, int count, const u32* a, bool add, B element_of_b) {
    // four lanes share two rows of A
    const int me = current;
    fibers[me].words[0] = reinterpret_cast<uintptr_t>(a);
    meet_warp();
    std::array<const u32*, 4> lanes;
    for (int i = 0; i < 4; ++i) lanes[i] = reinterpret_cast<const u32*>(fibers[me / 4 * 4 + i].words[0]);
    meet_warp();
    issue(
        d, count, add,
        [=](int row, int k) {
            return value_of(lanes[k % 8 / 2][row / 8 % 2 + k / 8 * 2] >> (k % 2 * 16) & 0xffff);
        },
        element_of_b);
    meet_warp();  // nobody changes what others multiply
}

}  // namespace emulator

inline void product_of_registers(float* d, const u32* a, u64 b, bool add) {
    emulator::issue_registers(d, 64, a, add, [=, block = emulator::block()](int column, int k) {
        return emulator::element(block, emulator::across(b, column, k));
    });
}

template <int N>
void product_of_registers(float* d, const u32* a, u64 b, bool add) {
    emulator::issue_registers(d, N / 2, a, add, [=, block = emulator::block()](int column, int k) {
        return emulator::element(block, emulator::along(b, column, k));
    });
}
