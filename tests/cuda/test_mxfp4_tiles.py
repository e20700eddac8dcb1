"""Tiles of MXFP4 products on compute capability 12.x: the bytes, which fit, and which T asks for."""

from __future__ import annotations

import pytest

from ttnn_moe import ContractError
from ttnn_moe.cuda.moe.mxfp4_tiles import CAPACITY, TILES, Tile, select_tile_m, why_not


def test_the_bytes_of_a_large_tile() -> None:
    tile = Tile(128, 256)
    assert CAPACITY == 101_376
    assert (tile.epilogue_bytes, CAPACITY - tile.epilogue_bytes) == (7_168, 94_208)
    assert tile.stage_bytes == 16_384 + 32_768 + 1_536 + 16 == 50_704
    assert tile.stages == 1
    assert why_not(tile) == "tile 128 x 256 needs 108576 bytes of shared memory for 2 stages, and a block has 101376"


def test_packed_operands_would_let_it_fit() -> None:
    assert why_not(Tile(128, 256, packed=True)) is None
    assert Tile(128, 128).stage_bytes - Tile(128, 128, packed=True).stage_bytes == 128 * 128


def test_the_tiles_that_run() -> None:
    small = {(M, N) for M in (8, 16, 32) for N in (64, 128)}
    plain = {(64, N) for N in (8, 16, 32, 64, 128, 256)} | {(128, N) for N in (8, 16, 32, 64, 128)}
    assert {(tile.M, tile.N) for tile in TILES} == small | plain | {(256, 64)} and len(TILES) == 18
    assert all(tile.swapped == ((tile.M, tile.N) not in plain) for tile in TILES)
    assert all(tile.physical in plain for tile in TILES), "swapping needs no other kernel"
    assert all(tile.epilogue_bytes + 2 * tile.stage_bytes <= CAPACITY for tile in TILES)


@pytest.mark.parametrize("M, N", [(128, 256), (256, 128), (256, 256)] + [(512, N) for N in (8, 64, 128, 256)])
def test_tiles_that_do_not_fit_are_refused_with_the_bytes(M: int, N: int) -> None:
    tile = Tile(M, N)
    reason = why_not(tile)
    assert reason is not None and f"needs {tile.epilogue_bytes + 2 * tile.stage_bytes} bytes" in reason


@pytest.mark.parametrize("M, N", [(8, 8), (16, 256), (32, 32), (256, 32), (64, 24), (48, 64), (128, 4)])
def test_tiles_of_another_form_are_refused(M: int, N: int) -> None:
    reason = why_not(Tile(M, N))
    assert reason is not None and ("another form" in reason or "bytes" in reason)


@pytest.mark.parametrize(
    "T, M",
    [(0, 8), (1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (65, 128), (128, 128)]
    + [(129, 256), (256, 256), (257, 256), (1 << 20, 256)],
)
def test_a_tile_from_the_tokens_alone(T: int, M: int) -> None:
    assert select_tile_m(T) == M


def test_a_negative_number_of_tokens_is_refused() -> None:
    with pytest.raises(ContractError, match="got -1"):
        select_tile_m(-1)
