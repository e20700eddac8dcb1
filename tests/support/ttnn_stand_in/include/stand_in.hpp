// SPDX-License-Identifier: Apache-2.0
// What the stand-in has where TT-NN has a device: it keeps every program that would run.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "tt-metalium/hal_types.hpp"
#include "tt-metalium/host_api.hpp"
#include "tt-metalium/sub_device_types.hpp"
#include "tt-metalium/tensor_types.hpp"

namespace tt::tt_metal::distributed {

class MeshDevice {
  public:
    MeshDevice(tt::ARCH arch, CoreCoord grid, std::uint32_t l1_bytes)
        : arch_(arch), grid_(grid), l1_bytes_(l1_bytes) {}

    tt::ARCH arch() const;
    CoreCoord compute_with_storage_grid_size() const;
    CoreCoord dram_grid_size() const;
    std::uint32_t l1_size_per_core() const;
    CoreRangeSet worker_cores(HalProgrammableCoreType core_type, SubDeviceId sub_device_id) const;
    CoreCoord worker_core_from_logical_core(const CoreCoord& logical_core) const;

    std::map<std::uint64_t, Program> programs;  // the program cache
    std::vector<ProgramDescriptor> launched;    // with the runtime arguments of that launch
    std::vector<CoreRangeSet> sub_devices;      // by id
    bool keep = true;                           // false: launched stays as it is, for timing
    std::uint64_t next_address = 1 << 20;

  private:
    tt::ARCH arch_;
    CoreCoord grid_;
    std::uint32_t l1_bytes_;
};

}  // namespace tt::tt_metal::distributed
