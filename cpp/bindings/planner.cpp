// SPDX-License-Identifier: Apache-2.0
// ttnn_moe._planner: the program planner as Python sees it. Its types are in ttnn_moe/_planner.pyi.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/bindings.hpp"
#include "planner/chips.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using ttnn_moe::planner::Chip;
using ttnn_moe::planner::Grid;

namespace {

using XY = std::tuple<std::uint32_t, std::uint32_t>;

XY xy(Grid grid) { return {grid.x, grid.y}; }

}  // namespace

NB_MODULE(_planner, m) {
    m.doc() = "The Tenstorrent program planner: plain C++, no device and no ttnn needed.";

    nb::class_<Chip>(m, "Chip", "One chip of a board that programs can be planned for.")
        .def_ro("name", &Chip::name, "Board that carries the chip: n150, n300, p150.")
        .def_ro("arch", &Chip::arch, "tt-metal's name of the architecture: wormhole_b0, blackhole.")
        .def_ro("chips_per_board", &Chip::chips_per_board, "Chips on one board.")
        .def_prop_ro(
            "tensix_grid", [](const Chip& c) { return xy(c.tensix); },
            "Columns and rows of Tensix cores that are not harvested.")
        .def_prop_ro(
            "compute_grid", [](const Chip& c) { return xy(c.compute); },
            "Columns and rows left to programs beside the dispatch cores.")
        .def_ro("l1_bytes", &Chip::l1_bytes, "L1 of one Tensix core, bytes.")
        .def_ro("dram_bytes", &Chip::dram_bytes, "DRAM of one chip, bytes.")
        .def_ro("dram_banks", &Chip::dram_banks, "DRAM banks that tensors are interleaved over.")
        .def_ro("dram_bytes_per_s", &Chip::dram_bytes_per_s, "DRAM bandwidth of one chip, bytes/s.")
        .def_ro("clock_hz", &Chip::clock_hz, "Highest AI clock, Hz.")
        .def("__repr__", [](const Chip& c) {
            return "Chip(name='" + std::string(c.name) + "', arch='" + std::string(c.arch) + "')";
        });

    m.def(
        "chips",
        [] {
            const auto all = ttnn_moe::planner::chips();
            return std::vector<Chip>(all.begin(), all.end());
        },
        "Every chip that programs can be planned for, in order of name.");
    m.def("find_chip", &ttnn_moe::planner::find_chip, "name"_a, nb::rv_policy::copy,
          "The chip of that name. ValueError lists the known names.");

    bind_programs(m);
}
