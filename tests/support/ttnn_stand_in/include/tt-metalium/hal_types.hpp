// SPDX-License-Identifier: Apache-2.0
// Stand-in: of tt-metal's header only what cpp/ttnn_ops uses.
#pragma once

namespace tt::tt_metal {

enum class HalProgrammableCoreType { TENSIX };

}  // namespace tt::tt_metal
