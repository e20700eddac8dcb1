"""The kernels of MXFP4 weights without a GPU: on the host, through the launches of a call, and their plans."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import packed_calls
from host_kernels import GXX, HostKernels, with_mistake
from mxfp4_cases import GPT_OSS, Form, random_mxfp4, spoil
from packed_calls import EXPERTS, PAIRS, problem_of
from ttnn_moe import Problem, Routing
from ttnn_moe.arranging import arranged
from ttnn_moe.cuda.arch import ARCHES, HOPPER, Arch, Target
from ttnn_moe.cuda.device import H200
from ttnn_moe.cuda.moe.family import Call
from ttnn_moe.cuda.moe.mxfp4_few import MXFP4_FEW, MXFP4_FEW_BOXES, ColumnPlan, ColumnSizes
from ttnn_moe.cuda.moe.sm80_mxfp4 import MXFP4, ManyTile, NarrowTile
from ttnn_moe.cuda.moe.sort import Sorters
from ttnn_moe.cuda.moe.sorted import SortedPlan
from ttnn_moe.formats.mxfp4 import NAME

on_host = pytest.mark.skipif(GXX is None, reason="g++ is not installed")
BF16 = torch.bfloat16
Sizes = ColumnSizes | NarrowTile | ManyTile


def worst(
    kernels: HostKernels,
    monkeypatch: pytest.MonkeyPatch,
    sizes: Sizes,
    T: int,
    H: int,
    I: int,
    form: Form,
    add: bool = False,
    bound: int | None = None,
    scale: int = 0,
    boxed: bool = False,
) -> float:
    """Run a call of four experts, three a token; 0 if it is within the bound of the oracle, else infinity.

    scale: added to the scales of up rows, and taken from hidden as a power of two.
    """
    torch.manual_seed(T)
    experts = random_mxfp4(EXPERTS, H, I, form, "cpu")
    spoil(experts, 2)
    hidden, weights = torch.randn(T, H).bfloat16(), torch.rand(T, PAIRS)
    if scale:
        up = slice(1, None, 2) if form.order == "interleaved" else slice(I, None)
        scales = experts.tensors["gate_up_scales"][:2, up]
        scales.copy_(torch.randint(max(0, scale - 2), scale + 2, scales.shape))
        hidden *= 2.0 ** ((125 - scale) / 2)
    problem = problem_of(experts, T)
    few = isinstance(sizes, ColumnSizes)
    family = (MXFP4_FEW_BOXES if boxed else MXFP4_FEW) if few else MXFP4
    given = arranged(experts) if boxed else experts
    plan = ColumnPlan(problem, HOPPER, sizes) if few else SortedPlan(problem, HOPPER, sizes, Sorters(128))
    return packed_calls.worst(
        kernels, monkeypatch, family, plan, hidden, weights, experts, few=few, given=given, add=add, bound=bound
    )


FEW, NARROW, MANY = ColumnSizes(up_unroll=1, down_unroll=1), NarrowTile(4, 8, 2, 3), ManyTile(4, 32, 2)
CALLS: list[tuple[Sizes, int, int, int, Form]] = [
    (ColumnSizes(), 2, 352, 160, GPT_OSS),
    (ColumnSizes(2, 1, 2, 2, 1, 2), 1, 96, 1056, Form(bias=torch.float32)),
    (NARROW, 3, 96, 32, Form()),
    (NARROW, 13, 672, 96, GPT_OSS),
    (NarrowTile(4, 4, 3, 3), 9, 352, 64, Form(order="interleaved")),
    (MANY, 9, 160, 96, Form(bias=torch.float32)),
    (ManyTile(8, 16, 2, blocks=2), 11, 160, 160, Form(bias=torch.float32)),
    (ManyTile(8, 32, 3, blocks=2), 30, 288, 192, GPT_OSS),
    (ManyTile(8, 48, 2, blocks=2), 45, 160, 96, GPT_OSS),
    (ManyTile(12, 64, 3), 66, 352, 192, GPT_OSS),
    (ManyTile(4, 96, 2), 85, 288, 96, Form()),
    (NarrowTile(4, 16, 2, 3), 30, 160, 96, Form(GPT_OSS.activation, torch.float32)),
]


@on_host
@pytest.mark.slow(40)
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize(("sizes", "T", "H", "I", "form"), CALLS, ids=str)
def test_a_call_is_within_the_bound(
    sizes: Sizes, T: int, H: int, I: int, form: Form, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged tiles and chunks, an expert of NaN without tokens, ids of no expert, in scratch full of NaN."""
    kernels = HostKernels(tmp_path, late, together=3)
    assert worst(kernels, monkeypatch, sizes, T, H, I, form, add=late, bound=(T + 1) // 2 if late else None) == 0


@on_host
@pytest.mark.parametrize("sizes", [NARROW, NarrowTile(4, 16, 2, 3), MANY], ids=str)
def test_bits_do_not_depend_on_which_block_makes_an_item(
    sizes: NarrowTile | ManyTile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks claim items as they come, so an item may be a block's first or its tenth."""
    torch.manual_seed(0)
    T = 13
    experts = random_mxfp4(EXPERTS, 672, 416, GPT_OSS, "cpu")
    hidden, ids = torch.randn(T, 672).bfloat16(), torch.rand(T, EXPERTS).topk(PAIRS).indices.int()
    routing = Routing.from_topk(ids, torch.rand(T, PAIRS), EXPERTS)
    outs = []
    for blocks in (1, 2, 3, 5):
        kernels = HostKernels(tmp_path, together=blocks, resident=blocks)
        call = Call(hidden, routing, experts, torch.full((T, 672), torch.nan), False)
        plan = SortedPlan(problem_of(experts, T), HOPPER, sizes, Sorters(128))
        packed_calls.launch(kernels, monkeypatch, MXFP4, plan, call)
        assert kernels.sound
        outs.append(call.out)
    assert outs[0].isfinite().all()
    for out in outs[1:]:
        assert torch.equal(out, outs[0])


@on_host
@pytest.mark.parametrize(
    ("sizes", "T", "H", "I", "form", "scale"),
    [
        (ColumnSizes(), 2, 352, 160, GPT_OSS, 0),
        (ColumnSizes(2, 1, 2, 2, 1, 2), 1, 96, 1056, Form(bias=torch.float32), 0),
        (FEW, 3, 96, 32, Form(), 200),
    ],
    ids=str,
)
def test_arranged_weights(
    sizes: Sizes, T: int, H: int, I: int, form: Form, scale: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Boxes, units and stages that are cut."""
    kernels = HostKernels(tmp_path, together=3)
    assert worst(kernels, monkeypatch, sizes, T, H, I, form, scale=scale, boxed=True) == 0


@on_host
@pytest.mark.parametrize("sizes", [FEW, NARROW, MANY, ManyTile(4, 32, 3)], ids=str)
@pytest.mark.parametrize("scale", [2, 200, 240])
def test_scales_near_the_ends(sizes: Sizes, scale: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worst(HostKernels(tmp_path, together=3), monkeypatch, sizes, 3, 96, 32, Form(), scale=scale) == 0


@on_host
@pytest.mark.parametrize(
    ("sizes", "kernel", "line", "instead"),
    [
        (FEW, "few_gate_up", "lane / 4 == 2 * t", "lane / 4 == t"),
        (FEW, "few_down", "own ? x + 4 * t : zeros", "x + 4 * t"),
        (NARROW, "narrow", "word << 6, even_signs", "word << 2, even_signs"),  # swapped nibbles
        (NARROW, "narrow", "min(4 * c + t, of_scales.groups - 1)", "min(4 * c, of_scales.groups - 1)"),
        (NARROW, "narrow", "x.x, x.z, 0x7632", "x.x, x.y, 0x7632"),
        (NARROW, "narrow", "copies_wait<DEPTH - 1>();", "copies_wait<DEPTH>();"),
        (NARROW, "narrow", "channel < groups * 32", "true"),
        (NARROW, "narrow", "large = __syncthreads_or(", "large = ("),
        (MANY, "many", "copies_wait<STAGES - 2>();", "copies_wait<STAGES - 1>();"),
        (MANY, "many", "h * of.to_high) * groups) % 4", "0 * of.to_high) * groups) % 4"),
        (MANY, "many", "min(groups - group, 4)", "min(groups - group, 3)"),
        (MANY, "many", "< groups ? 255 : 0", "< groups ? 255 : 255"),
        (MANY, "many", "step ? b[n].z : b[n].x", "step ? b[n].x : b[n].z"),
        (MANY, "many", "2 * (2 * m + h) & 3", "2 * (2 * m) & 3"),
    ],
)
def test_a_mistake_is_seen(
    sizes: Sizes, kernel: str, line: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"sm80/mxfp4_{kernel}"
    kernels = HostKernels(tmp_path, True, with_mistake(tmp_path, name, line, instead), together=3)
    assert worst(kernels, monkeypatch, sizes, 5, 352, 32, Form(order="interleaved")) > 0


@on_host
def test_activations_that_count_before_they_are_written_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "                __syncthreads();  // all activations of the previous item are written\n"
    wrong = with_mistake(tmp_path, "sm80/mxfp4_many", line, "")
    assert worst(HostKernels(tmp_path, False, wrong, together=3), monkeypatch, MANY, 9, 160, 96, Form()) > 0


@pytest.mark.parametrize(
    ("rows", "tile", "with_99_kib"),
    [
        (5, NARROW, NARROW),
        (6, ManyTile(8, 32, 3, blocks=2), ManyTile(8, 16, 2, blocks=2)),
        (14, ManyTile(8, 32, 3, blocks=2), ManyTile(8, 16, 2, blocks=2)),
        (26, ManyTile(8, 32, 3, blocks=2), ManyTile(12, 64, 2)),
        (27, ManyTile(8, 48, 2, blocks=2), ManyTile(12, 64, 2)),
        (43, ManyTile(12, 64, 3), ManyTile(12, 64, 2)),
        (57, ManyTile(12, 96, 3), ManyTile(8, 96, 2)),
        (81, ManyTile(8, 128, 3), ManyTile(8, 96, 2)),
    ],
    ids=str,
)
def test_rows_of_an_expert_on_average_choose_the_tile(rows: int, tile: Sizes, with_99_kib: Sizes) -> None:
    problem = Problem(rows * 32, 128, 4, 2880, 2880, weight_format=NAME)
    assert MXFP4.tile(problem, ARCHES[8, 0]) == tile
    assert MXFP4.tile(problem, ARCHES[8, 6]) == with_99_kib


@pytest.mark.parametrize("arch", [ARCHES[8, 0], ARCHES[8, 6], HOPPER], ids=lambda arch: arch.name)
def test_plans_fit(arch: Arch) -> None:
    target = Target(H200, arch)
    for E, K, H, I in ((128, 4, 2880, 2880), (128, 8, 2048, 768), (32, 4, 2880, 2880), (256, 8, 7168, 2048)):
        for T in (1, 2, 3, 4, 8, 9, 33, 64, 65, 255, 256, 1000, 4096, 65536):
            problem = Problem(T, E, K, H, I, weight_format=NAME)
            for family in (MXFP4_FEW, MXFP4):
                if family.why_not(problem, target) is None:
                    uses = family.uses(family.plan(problem, target), ids64=True, add=False)
                    assert all(use.shared_memory <= arch.shared_memory for use in uses)
