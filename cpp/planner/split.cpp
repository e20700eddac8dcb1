// SPDX-License-Identifier: Apache-2.0
#include "planner/split.hpp"

#include <algorithm>
#include <ranges>

namespace ttnn_moe::planner {

std::vector<std::vector<Piece>> split(std::uint32_t columns, std::uint32_t k_tiles, std::uint32_t cores,
                                      std::uint32_t min_tiles) {
    const std::uint64_t tiles = std::uint64_t{columns} * k_tiles;
    const std::uint64_t parts = std::clamp<std::uint64_t>(tiles / min_tiles, std::min(columns, cores), cores);
    std::vector<std::vector<Piece>> shares(parts);
    for (std::uint64_t i = 0; i < parts; i++) {
        const std::uint64_t end = tiles * (i + 1) / parts;
        for (std::uint64_t at = tiles * i / parts; at < end;) {
            const std::uint64_t stop = std::min(end, (at / k_tiles + 1) * k_tiles);
            const auto column = static_cast<std::uint32_t>(at / k_tiles);
            const auto begin = static_cast<std::uint32_t>(at % k_tiles);
            shares[i].push_back({column, begin, static_cast<std::uint32_t>(begin + stop - at)});
            at = stop;
        }
        // on the line, only the last piece can be passed on, and only the first can be waited for
        std::ranges::reverse(shares[i]);
    }
    return shares;
}

}  // namespace ttnn_moe::planner
