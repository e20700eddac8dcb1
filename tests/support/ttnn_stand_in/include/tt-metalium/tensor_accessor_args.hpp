// SPDX-License-Identifier: Apache-2.0
// Stand-in: of tt-metal's header only what cpp/ttnn_ops uses.
#pragma once

#include <cstdint>
#include <vector>

#include "tt-metalium/tensor_types.hpp"

template <typename Flag>
class Flags {
  public:
    Flags(Flag flag) : value(flag) {}
    Flag value;
};

namespace tensor_accessor {
enum class ArgConfig : std::uint8_t { None };
using ArgsConfig = Flags<ArgConfig>;
}  // namespace tensor_accessor

namespace tt::tt_metal {

class TensorAccessorArgs {
  public:
    explicit TensorAccessorArgs(const Buffer& buffer,
                                tensor_accessor::ArgsConfig args_config = tensor_accessor::ArgConfig::None);

    void append_to(std::vector<std::uint32_t>& compile_time_args) const;

  private:
    const Buffer* buffer_;
};

}  // namespace tt::tt_metal
