"""The native planner's table of chips, against what the vendor prints about the boards."""

from __future__ import annotations

import ast

import pytest

from paths import ROOT

planner = pytest.importorskip("ttnn_moe._planner", reason="native planner: not built", exc_type=ModuleNotFoundError)

STUB = ROOT / "ttnn_moe" / "_planner.pyi"

# docs.tenstorrent.com, aibs/wormhole/specifications and aibs/blackhole/specifications, per board:
# Tensix cores, SRAM (1.5 MB a core), GB of DRAM, GB/s, GHz
BOARDS = {
    "n150": ("wormhole_b0", 72, 108, 12, 288, 1.0),
    "n300": ("wormhole_b0", 128, 192, 24, 576, 1.0),
    "p150": ("blackhole", 140, 210, 32, 512, 1.35),
}


def test_the_table_lists_these_boards_once_and_in_order() -> None:
    assert [chip.name for chip in planner.chips()] == sorted(BOARDS)


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_is_the_sum_of_its_chips(name: str) -> None:
    arch, cores, sram_mb, dram_gb, gb_per_s, ghz = BOARDS[name]
    chip = planner.find_chip(name)
    x, y = chip.tensix_grid
    assert (chip.name, chip.arch) == (name, arch)
    assert chip.chips_per_board * x * y == cores
    # programs get most of the 1.5 MiB of a core: on Wormhole 72 KiB of it is not addressable
    assert 0.95 * sram_mb * 2**20 <= chip.chips_per_board * x * y * chip.l1_bytes <= sram_mb * 2**20
    assert chip.chips_per_board * chip.dram_bytes == pytest.approx(dram_gb * 2**30, rel=0.01)
    assert chip.chips_per_board * chip.dram_bytes_per_s == gb_per_s * 10**9
    assert chip.clock_hz == ghz * 1e9


@pytest.mark.parametrize("name", BOARDS)
def test_dispatch_takes_one_row_or_column(name: str) -> None:
    chip = planner.find_chip(name)
    (x, y), (cx, cy) = chip.tensix_grid, chip.compute_grid
    assert (cx, cy) == ((x - 1, y) if chip.arch == "blackhole" else (x, y - 1))


def test_an_unknown_chip_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(ValueError, match=r"no chip is called 'e75'; .* n150, n300, p150$"):
        planner.find_chip("e75")
    with pytest.raises(TypeError):
        planner.find_chip(150)


def test_chips_are_constants() -> None:
    with pytest.raises(AttributeError):
        planner.find_chip("n150").l1_bytes = 1


def test_the_type_stub_says_what_the_module_is() -> None:
    """To make it again: python -m nanobind.stubgen -m ttnn_moe._planner -o ttnn_moe/_planner.pyi; make format."""
    stubgen = pytest.importorskip("nanobind.stubgen")
    made = stubgen.StubGen(planner)
    made.put(planner)
    assert _tree(made.get()) == _tree(STUB.read_text())


def _tree(source: str) -> str:
    return ast.dump(ast.parse(source), indent=1)
