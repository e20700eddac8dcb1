#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>

#include "emulator/common.h"

#ifndef KERNEL_COMPILE_TIME_ARGS
#define KERNEL_COMPILE_TIME_ARGS
#endif

namespace emulator {
template <class... Ts>
constexpr std::array<std::uint32_t, sizeof...(Ts)> numbers(Ts... values) {
    return {static_cast<std::uint32_t>(values)...};
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
constexpr std::pair<std::string_view, std::uint32_t> named_arguments[] = {KERNEL_COMPILE_TIME_ARG_MAP};
}
constexpr std::uint32_t get_named_ct_arg(std::string_view name) {
    for (const auto& [known, value] : emulator::named_arguments) {
        if (known == name) {
            return value;
        }
    }
    throw "no compile-time argument of that name";
}
constexpr std::uint32_t get_named_compile_time_arg_val(std::string_view name) {
    return get_named_ct_arg(name);
}
#endif
