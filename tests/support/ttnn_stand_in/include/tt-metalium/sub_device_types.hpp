// SPDX-License-Identifier: Apache-2.0
// Stand-in: of tt-metal's header only what cpp/ttnn_ops uses.
#pragma once

#include <cstdint>

namespace ttsl {

template <typename Value, typename Tag>
class StrongType {
  public:
    explicit StrongType(Value value) : value_(value) {}

    const Value& operator*() const { return value_; }

  private:
    Value value_;
};

}  // namespace ttsl

namespace tt::tt_metal {

using SubDeviceId = ttsl::StrongType<std::uint8_t, struct SubDeviceIdTag>;

}  // namespace tt::tt_metal
