// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace ttnn::operations::experimental::moe {

void bind_down(nanobind::module_& module);

}  // namespace ttnn::operations::experimental::moe
