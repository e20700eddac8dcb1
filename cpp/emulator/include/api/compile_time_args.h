// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "emulator/common.h"

#ifndef KERNEL_COMPILE_TIME_ARGS
#define KERNEL_COMPILE_TIME_ARGS
#endif

// No <array> and no <string_view>: they take a quarter of a kernel's compilation.
namespace emulator {
template <std::size_t N>
struct Numbers {
    std::uint32_t values[N + 1];

    constexpr std::size_t size() const { return N; }
    constexpr std::uint32_t operator[](std::size_t i) const { return values[i]; }
};
template <class... Ts>
constexpr Numbers<sizeof...(Ts)> numbers(Ts... values) {
    return {{static_cast<std::uint32_t>(values)..., 0}};
}
}  // namespace emulator
constexpr auto kernel_compile_time_args = emulator::numbers(KERNEL_COMPILE_TIME_ARGS);

template <std::uint32_t Index>
constexpr std::uint32_t get_ct_arg() {
    static_assert(Index < kernel_compile_time_args.size(), "the kernel has fewer compile-time arguments");
    return kernel_compile_time_args[Index];
}
#define get_compile_time_arg_val(index) get_ct_arg<index>()

#ifdef KERNEL_COMPILE_TIME_ARG_MAP
namespace emulator {
struct Named {
    const char* name;
    std::uint32_t value;
};
constexpr Named named_arguments[] = {KERNEL_COMPILE_TIME_ARG_MAP};
}  // namespace emulator
constexpr std::uint32_t get_named_ct_arg(const char* name) {
    for (const auto& [known, value] : emulator::named_arguments) {
        if (__builtin_strcmp(known, name) == 0) {
            return value;
        }
    }
    throw "no compile-time argument of that name";
}
constexpr std::uint32_t get_named_compile_time_arg_val(const char* name) { return get_named_ct_arg(name); }
#endif
