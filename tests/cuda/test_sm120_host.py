"""The MXFP4 kernels of compute capability 12.x on the host, with software atoms: whole calls, and mistakes in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from host_kernels import GXX, HostKernels, with_mistake
from sm120_cases import BF16, ROUTINGS, Sm120Case, outputs, packed, worst
from ttnn_moe.cuda.arch import HOPPER
from ttnn_moe.cuda.moe.mxfp4_tiles import TILES_M, Tile
from ttnn_moe.cuda.moe.sm120_mxfp4 import Sm120Mxfp4, tile_named
from ttnn_moe.cuda.moe.uses import Use
from ttnn_moe.formats import mxfp8, quantise_mxfp4
from ttnn_moe.selfcheck.bounds import BOUND, worst_error

pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")

# weights on the A side; on the B side, with a kernel that quantises activations; FP4 by FP4
TILES = [Tile(8, 64), Tile(64, 64), Tile(64, 8), packed(Tile(16, 64))]
SMALL = Sm120Case(9, 2, 96, 64)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(tmp_path_factory.mktemp("kernels"), late=True)


@pytest.mark.parametrize(
    ("case", "tile"),
    [
        *((SMALL, tile) for tile in TILES),
        *((Sm120Case(11, 2, 64, 32, what=what), TILES[0]) for what in ROUTINGS),
        (Sm120Case(5, 2, 160, 96, order="interleaved", add=True, bound=3), TILES[0]),
        (Sm120Case(5, 2, 160, 96, what="skewed"), TILES[1]),
        (Sm120Case(1, 2, 32, 32), TILES[2]),
        *((Sm120Case(10, 8, 64, 32, E=128), tile) for tile in (TILES[0], TILES[2])),
    ],
    ids=str,
)
def test_a_call_is_within_the_bound(
    case: Sm120Case, tile: Tile, built: HostKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies land as late as they may."""
    built.use(monkeypatch)
    assert worst(case, tile) <= BOUND[BF16] and built.sound


@pytest.mark.parametrize(
    "case",
    [SMALL, Sm120Case(64, 4, 32, 32, E=16, what="skewed"), Sm120Case(140, 1, 32, 32, what="one expert")],
    ids=str,
)
def test_tiles_of_every_size_give_the_same_bits(
    case: Sm120Case, built: HostKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one expert has 215 or 140 rows, and so several tiles."""
    built.use(monkeypatch)
    first, want, _ = outputs(case, TILES[0])
    assert worst_error(first, want) <= BOUND[BF16]
    for M in TILES_M:
        out, _, clean = outputs(case, tile_named(str(M)))
        assert clean and torch.equal(out, first), f"M = {M}"
    assert built.sound


def test_a_fused_tile_runs_where_another_kept_tile_is_not(built: HostKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan has scratch that the call does not use."""
    built.use(monkeypatch)
    plan_of = Sm120Mxfp4.plan_of
    monkeypatch.setattr(Sm120Mxfp4, "plan_of", lambda *given: replace(plan_of(*given), unfused=True))
    assert worst(SMALL, TILES[0]) <= BOUND[BF16] and built.sound


@pytest.mark.parametrize("bias", [BF16, torch.float32], ids=["bf16", "fp32"])
def test_a_layer_of_gpt_oss(bias: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = HostKernels(tmp_path)  # copies land early
    kernels.use(monkeypatch)
    assert worst(Sm120Case(6, 2, 96, 64, order="interleaved", bias=bias), TILES[0]) <= BOUND[BF16] and kernels.sound


def some_rows(channels: int) -> torch.Tensor:
    """Of ordinary, zero, small and large numbers; one that is NaN, one that is infinite; the edges of the scale."""
    rows = torch.randn(40, channels) * 2.0 ** torch.arange(-130, 126, 6.4)[:40, None]
    rows[3] = 0
    rows[4, 5], rows[5, -3] = torch.nan, -torch.inf
    rows[6, :3] = torch.tensor([448.0, 449.0, -464.0]) * 2.0**-9
    rows[7] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(channels // 8)
    return rows


@pytest.mark.parametrize("channels", [32, 96, 288])
@pytest.mark.parametrize(("fp32", "fp4"), [(False, False), (True, False), (False, True)])
def test_rows_are_quantised_as_the_formats_do(
    channels: int, fp32: bool, fp4: bool, built: HostKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    built.use(monkeypatch)
    rows = some_rows(channels).to(torch.float32 if fp32 else BF16)
    R, stride = len(rows), -(-channels // 128) * 4
    values = torch.full((R, channels // (2 if fp4 else 1)), 0x55, dtype=torch.uint8)
    scales = torch.full((R, stride), 0x55, dtype=torch.uint8)
    use = Use.of(HOPPER, "sm120/mx_quantise", FROM32=fp32, PACKED=fp4)
    launch = use.bind(0, (-(-R * channels // 8 // 256),), 256, R, channels)
    launch(None, rows.data_ptr(), 0, 0, values.data_ptr(), scales.data_ptr())
    assert built.sound and not scales[:, channels // 32 :].any()
    finite = rows.isfinite().unflatten(1, (-1, 32)).all(2)
    scales = scales[:, : channels // 32]
    here = finite.repeat_interleave(len(values[0]) // len(finite[0]), 1)  # what a NaN scale spoils has any value
    if fp4:
        want, of_groups = quantise_mxfp4.quantise(rows.where(finite.repeat_interleave(32, 1), 0), "ocp")
        of_groups = of_groups.where(finite, 0xFF)
        magnitude = 0x77  # zeros may have either sign
    else:
        want, of_groups = mxfp8.quantise(rows, "up")
        want, magnitude = want.view(torch.uint8), 0x7F
    assert torch.equal(scales, of_groups)
    assert torch.equal(values[here] & magnitude, want[here] & magnitude)
    if not fp4:
        assert torch.equal(values[here & (want & magnitude > 0)], want[here & (want & magnitude > 0)])


SWAPPED, PLAIN, UNFUSED = TILES[:3]
MISTAKES = {
    "scale_of_another_group": (UNFUSED, "multiply_scaled<SWAPPED, K>(", "multiply_scaled<SWAPPED, K ^ 1>("),
    "unshifted_scales": (SWAPPED, "(r * (given.channels / GROUP) & 3) << 2 * i", "(r & 0) << i"),
    "unpadded": (
        UNFUSED,
        "to + WEIGHTS + place(row + PASS * i, chunk),",
        "to + WEIGHTS + place(row + PASS * i, chunk / 2) + chunk % 2 * 8,",
    ),
    "fragment_row": (UNFUSED, "row + m * 16 + lanes % 16, 2 * k + lanes / 16", "row + lanes / 2, 2 * k + lanes % 2"),
    "a_stage_too_early": (UNFUSED, "copies_wait<STAGES - 2>();", "copies_wait<STAGES - 1>();"),
    "maxima_of_one_warp": (SWAPPED, "for (int i = 0; i < GROUP_WARPS; ++i)", "for (int i = 0; i < 1; ++i)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tile, line, instead = MISTAKES[mistake]
    sources = with_mistake(tmp_path, "sm120/mxfp4_product", line, instead)
    kernels = HostKernels(tmp_path, True, sources)
    kernels.use(monkeypatch)
    error = worst(SMALL, tile)
    assert error > BOUND[BF16] or not kernels.sound
