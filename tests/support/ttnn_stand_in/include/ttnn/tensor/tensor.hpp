// SPDX-License-Identifier: Apache-2.0
// Stand-in: of ttnn's header only what cpp/ttnn_ops uses.
#pragma once

#include <memory>

#include "tt-metalium/tensor_types.hpp"

namespace ttnn {

enum class StorageType { HOST, DEVICE };

class Tensor {
  public:
    Tensor(tt::tt_metal::TensorSpec spec, tt::tt_metal::distributed::MeshDevice* device,
           std::shared_ptr<tt::tt_metal::Buffer> buffer);
    Tensor(const Tensor&) = default;
    Tensor& operator=(const Tensor&) = default;
    ~Tensor();

    tt::tt_metal::DataType dtype() const;
    tt::tt_metal::Layout layout() const;
    const tt::tt_metal::Shape& logical_shape() const;
    const tt::tt_metal::MemoryConfig& memory_config() const;
    StorageType storage_type() const;
    tt::tt_metal::Buffer* buffer() const;                   // throws if the tensor is not on a device
    tt::tt_metal::distributed::MeshDevice* device() const;  // likewise

  private:
    std::shared_ptr<const tt::tt_metal::TensorSpec> spec_;  // shared by copies, as in ttnn
    tt::tt_metal::distributed::MeshDevice* device_;
    std::shared_ptr<tt::tt_metal::Buffer> buffer_;
};

}  // namespace ttnn

#include "stand_in.hpp"
