// Stand-in: of tt-metal's header only what cpp/ttnn_ops uses.
#pragma once

#include <stdexcept>
#include <string>

namespace tt::assert {

[[noreturn]] inline void tt_throw(const char* format, const std::string& text) {
    const std::string whole = format;
    const std::size_t at = whole.find("{}");
    throw std::runtime_error("TT_THROW: " + whole.substr(0, at) + text + whole.substr(at + 2));
}

}  // namespace tt::assert

#define TT_THROW(...) ::tt::assert::tt_throw(__VA_ARGS__)
