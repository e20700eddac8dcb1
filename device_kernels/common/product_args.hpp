// SPDX-License-Identifier: Apache-2.0
// Sizes and buffers that all kernels of a product (gate_up, down) share: named compile-time arguments of one
// plan.
#pragma once

#include <cstdint>

namespace moe {

constexpr uint32_t kExperts = get_named_compile_time_arg_val("experts");             // of all devices
constexpr uint32_t kLocalExperts = get_named_compile_time_arg_val("local_experts");  // of this device
constexpr uint32_t kKTiles = get_named_compile_time_arg_val("k_tiles");
constexpr uint32_t kColumns = get_named_compile_time_arg_val("columns");
constexpr uint32_t kWeights =
    get_named_compile_time_arg_val("weights");                       // right operands: gate and up, or one
constexpr uint32_t kKMax = get_named_compile_time_arg_val("k_max");  // tiles of the largest share
constexpr uint32_t kCores = get_named_compile_time_arg_val("cores");
constexpr uint32_t kGridColumns = get_named_compile_time_arg_val("grid_columns");
constexpr uint32_t kChunk = get_named_compile_time_arg_val("chunk");  // chunk ... window: homes.hpp
constexpr uint32_t kChunks = get_named_compile_time_arg_val("chunks");
constexpr uint32_t kSlots = get_named_compile_time_arg_val("slots");
constexpr uint32_t kWindow = get_named_compile_time_arg_val("window");
constexpr uint32_t cb_plan_c = get_named_compile_time_arg_val("cb_plan_c");
constexpr uint32_t cb_plan_w = get_named_compile_time_arg_val("cb_plan_w");
constexpr uint32_t cb_home = get_named_compile_time_arg_val("cb_home");
constexpr uint32_t cb_x = get_named_compile_time_arg_val("cb_x");
constexpr uint32_t cb_w = get_named_compile_time_arg_val("cb_w");
constexpr uint32_t cb_part_in = get_named_compile_time_arg_val("cb_part_in");
constexpr uint32_t cb_part_out = get_named_compile_time_arg_val("cb_part_out");
constexpr uint32_t cb_out = get_named_compile_time_arg_val("cb_out");

constexpr uint32_t kTileBytes = 2048;  // bf16

}  // namespace moe
