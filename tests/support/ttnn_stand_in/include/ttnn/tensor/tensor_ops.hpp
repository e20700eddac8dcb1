// SPDX-License-Identifier: Apache-2.0
// Stand-in: of ttnn's header only what cpp/ttnn_ops uses.
#pragma once

#include "ttnn/tensor/tensor.hpp"

namespace ttnn {

Tensor create_device_tensor(const tt::tt_metal::TensorSpec& tensor_spec,
                            tt::tt_metal::distributed::MeshDevice* device,
                            std::optional<tt::tt_metal::TensorTopology> tensor_topology = std::nullopt);

}  // namespace ttnn
