// SPDX-License-Identifier: Apache-2.0
// A page of cb_ids: a block's tokens (32 uint32), routing weights (32 bf16), number of tokens (uint32), at
// these bytes.
#pragma once

#include <cstdint>

namespace moe {

constexpr uint32_t kBlockWeights = 128;
constexpr uint32_t kBlockCount = 192;

}  // namespace moe
