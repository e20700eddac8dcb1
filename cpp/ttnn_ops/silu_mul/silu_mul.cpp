// SPDX-License-Identifier: Apache-2.0
#include "silu_mul.hpp"

#include "device/silu_mul_device_operation.hpp"

namespace ttnn::experimental {

ttnn::Tensor moe_silu_mul(const ttnn::Tensor& gate, const ttnn::Tensor& up,
                          const std::optional<ttnn::Tensor>& output_tensor) {
    return prim::moe_silu_mul(gate, up, output_tensor);
}

}  // namespace ttnn::experimental
