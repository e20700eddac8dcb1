// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tt-metalium/sub_device_types.hpp>

#include "planner/problem.hpp"
#include "planner/program.hpp"
#include "ttnn/tensor/tensor.hpp"

namespace ttnn::operations::experimental::moe {

namespace planner = ::ttnn_moe::planner;

using SubDevice = std::optional<tt::tt_metal::SubDeviceId>;

// What a program may use of the device, or of each device of the mesh, that a tensor lies on: the cores of a
// sub-device, which are a rectangle from core (0, 0), or the whole compute grid.
planner::Machine machine_of(const ttnn::Tensor& tensor, const SubDevice& subdevice_id);

// The cores of a sub-device as one number: a program's hash takes it in. 0 without one.
std::uint64_t key_of(const ttnn::Tensor& tensor, const SubDevice& subdevice_id);

// The program of "routing", "gate_up", "project", "silu_mul" or "down", planned when first asked for: a cache
// hit plans nothing. Throws, in the words of checks.hpp, if there is none.
const planner::Program& plan(const std::string& name, const planner::Problem& problem,
                             const planner::Machine& machine);

// The T that a call of T tokens is planned for, so that one program serves many T: a power of two from 32.
std::uint32_t bound_of(std::uint32_t T);

// Rows of a step tensor: whole blocks of 32 for each expert.
std::uint32_t rows_of(const planner::Problem& problem);

}  // namespace ttnn::operations::experimental::moe
