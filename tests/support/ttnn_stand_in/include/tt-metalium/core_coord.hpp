// SPDX-License-Identifier: Apache-2.0
// Stand-in: of tt-metal's header only what cpp/ttnn_ops uses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tt {

struct xy_pair {
    std::size_t x = 0;
    std::size_t y = 0;

    xy_pair() = default;
    xy_pair(std::size_t x, std::size_t y) : x(x), y(y) {}
};

namespace tt_metal {

using CoreCoord = ::tt::xy_pair;

class CoreRange {
  public:
    CoreCoord start_coord;
    CoreCoord end_coord;

    CoreRange(const CoreCoord& start_coord, const CoreCoord& end_coord);
};

class CoreRangeSet {
  public:
    CoreRangeSet() = default;
    CoreRangeSet(std::vector<CoreRange>&& core_ranges);

    CoreRange bounding_box() const;
    std::uint32_t num_cores() const;

    const std::vector<CoreRange>& ranges() const;

  private:
    std::vector<CoreRange> ranges_;
};

}  // namespace tt_metal
}  // namespace tt
