// SPDX-License-Identifier: Apache-2.0
// What every kernel sees before its own first line: words of tt-metal's dialect, arguments, circular buffers.
// Names and signatures are those of ttnn 0.81; the last two parameters of a function say which line calls it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "emulator/abi.h"

#define FORCE_INLINE inline __attribute__((always_inline))
#define ALWI inline __attribute__((always_inline))
#define tt_l1_ptr
#define tt_reg_ptr
#define KERNEL_BUILD
using uint = unsigned int;

enum class DataFormat : std::uint8_t {
    Float32 = 0,
    Float16 = 1,
    Bfp8 = 2,
    Bfp4 = 3,
    Tf32 = 4,
    Float16_b = 5,
    Bfp8_b = 6,
    Bfp4_b = 7,
    Int32 = 8,
    UInt16 = 9,
    Lf8 = 10,
    Bfp2 = 11,
    Int8 = 14,
    Bfp2_b = 15,
    UInt32 = 24,
    UInt8 = 30,
    Invalid = 255
};

namespace ckernel {}
using namespace ckernel;

// One thread runs all of a compute kernel.
#define UNPACK(...) __VA_ARGS__
#define MATH(...) __VA_ARGS__
#define PACK(...) __VA_ARGS__

FORCE_INLINE std::uint32_t get_arg_addr(int index, EMU_PLACE) {
    EMU_HERE;
    return emu_arg_address(index, 0);
}
FORCE_INLINE std::uint32_t get_common_arg_addr(int index, EMU_PLACE) {
    EMU_HERE;
    return emu_arg_address(index, 1);
}
template <typename T>
FORCE_INLINE T get_arg_val(int index, EMU_PLACE) {
    static_assert(sizeof(T) == 4, "arguments have 4 bytes");
    EMU_HERE;
    return *reinterpret_cast<T*>(static_cast<std::uintptr_t>(emu_arg_address(index, 0)));
}
template <typename T>
FORCE_INLINE T get_common_arg_val(int index, EMU_PLACE) {
    static_assert(sizeof(T) == 4, "arguments have 4 bytes");
    EMU_HERE;
    return *reinterpret_cast<T*>(static_cast<std::uintptr_t>(emu_arg_address(index, 1)));
}

inline std::uint8_t get_absolute_logical_x() { return static_cast<std::uint8_t>(emu_logical_x()); }
inline std::uint8_t get_absolute_logical_y() { return static_cast<std::uint8_t>(emu_logical_y()); }
inline std::uint8_t get_relative_logical_x() { return static_cast<std::uint8_t>(emu_logical_x()); }
inline std::uint8_t get_relative_logical_y() { return static_cast<std::uint8_t>(emu_logical_y()); }

FORCE_INLINE void cb_reserve_back(std::int32_t cb, std::int32_t pages, EMU_PLACE) {
    EMU_HERE;
    emu_cb_reserve_back(cb, pages);
}
FORCE_INLINE void cb_push_back(std::int32_t cb, std::int32_t pages, EMU_PLACE) {
    EMU_HERE;
    emu_cb_push_back(cb, pages);
}
FORCE_INLINE void cb_wait_front(std::int32_t cb, std::int32_t pages, EMU_PLACE) {
    EMU_HERE;
    emu_cb_wait_front(cb, pages);
}
FORCE_INLINE void cb_pop_front(std::int32_t cb, std::int32_t pages, EMU_PLACE) {
    EMU_HERE;
    emu_cb_pop_front(cb, pages);
}

#include "emulator/buffer_formats.h"
