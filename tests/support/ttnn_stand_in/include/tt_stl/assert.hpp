// SPDX-License-Identifier: Apache-2.0
// Stand-in: of tt-metal's header only what cpp/ttnn_ops uses.
#pragma once

#include <cstddef>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace tt::assert {

// Each {} of the format is the next argument.
template <typename... Args>
[[noreturn]] void tt_throw(const char* kind, std::string_view format, const Args&... args) {
    std::ostringstream text;
    text << kind << ": ";
    [[maybe_unused]] const auto next = [&](const auto& arg) {
        const std::size_t at = format.find("{}");
        if (at == format.npos) {
            throw std::logic_error("a message has more arguments than {}");
        }
        text << format.substr(0, at) << arg;
        format.remove_prefix(at + 2);
    };
    (next(args), ...);
    if (format.find("{}") != format.npos) {
        throw std::logic_error("a message has fewer arguments than {}");
    }
    text << format;
    throw std::runtime_error(text.str());
}

}  // namespace tt::assert

#define TT_THROW(...) ::tt::assert::tt_throw("TT_THROW", __VA_ARGS__)
#define TT_FATAL(condition, ...)                                          \
    do {                                                                  \
        if (not(condition)) [[unlikely]] {                                \
            ::tt::assert::tt_throw("TT_FATAL: " #condition, __VA_ARGS__); \
        }                                                                 \
    } while (0)
