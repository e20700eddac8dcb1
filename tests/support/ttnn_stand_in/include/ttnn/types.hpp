// SPDX-License-Identifier: Apache-2.0
// Stand-in: of ttnn's header only what cpp/ttnn_ops uses.
#pragma once

namespace ttnn {

class MeshCoordinate {};

}  // namespace ttnn
