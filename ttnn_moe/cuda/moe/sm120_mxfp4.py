"""MXFP4 experts on compute capability 12.x: block-scaled products of MXFP8 tokens, sm120/mxfp4_product.cu.

hidden and the activations become MXFP8, by the rule "up" of formats/mxfp8.py. TTNN_MOE_MXFP4_ACTIVATIONS=mxfp4 makes
them MXFP4 instead, by the rule "ocp" of formats/quantise_mxfp4.py: half the bytes and twice the rate, less exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ...activations import CLAMPED_SWIGLU
from ...contract import Problem
from ...errors import ContractError
from ...formats.mxfp4 import NAME
from ...formats.ue8m0 import GROUP
from ...sizes import ceil_div, natural
from ..arch import ARCHES, Arch, Target
from ..jit import load
from ..jit.load import Launch
from . import sort
from .cuda_cpp import arch_of, launches_of, limits
from .family import Buffer, Call
from .mxfp4_activations import MXFP4, MXFP8, why_not_read
from .mxfp4_tiles import TILES, TILES_M, Tile, select_tile_m, why_not
from .pairs import local_experts
from .sort import Words
from .sorted import Sorted, SortedPlan
from .tuned import tuned_tiles
from .uses import Use, bias_pointers, gate_up_rows

_THREADS = 256  # of mx_quantise

# M -> N that is chosen
_N = {8: 64, 16: 64, 32: 64, 64: 128, 128: 128, 256: 64}


def tile_named(text: str, packed: bool = False) -> Tile:
    """The tile "M x N", as in 8x128; of "M" alone, the one that is chosen for M tokens.

    Raises:
        ContractError: no such tile, with the bytes of shared memory that it would need.
    """
    sizes = [natural(size.strip()) for size in text.split("x")]
    M = sizes[0]
    if not 1 <= len(sizes) <= 2 or M is None or sizes[-1] is None:
        raise ContractError("no tile", got=repr(text), expected="M, or M x N, as in 8 or 8x128")
    tile = Tile(M, sizes[1] or 0 if len(sizes) == 2 else _N.get(M, 64), packed)
    if Tile(tile.M, tile.N) not in TILES:
        of_M = sorted(one.N for one in TILES if one.M == tile.M)
        expected = f"N of {of_M} for M {tile.M}" if of_M else f"M of {list(TILES_M)}"
        # a tile of FP4 may fit where that of MXFP8 does not; both have one list
        reason = why_not(tile) or f"{why_not(replace(tile, packed=False))}; FP4 tiles have the sizes of MXFP8 tiles"
        raise ContractError("this tile cannot run", got=reason, expected=expected)
    return tile


@dataclass(frozen=True, eq=False)
class MxPlan(SortedPlan[Tile]):
    """SortedPlan, with the launches between: quantise hidden, gate/up, (quantise act), down.

    Attributes:
        software: the kernels compute block-scaled products without their instructions, for tests elsewhere.
        unfused: calls of these sizes, of any number of tokens, may take a tile that is not fused.
    """

    software: bool = False
    unfused: bool = False

    @cached_property
    def strides(self) -> tuple[int, int]:
        """Bytes of a row of scales of hidden and of the activations."""
        return scale_bytes(self.problem.H), scale_bytes(self.problem.I)


def scale_bytes(channels: int) -> int:
    """Bytes of a row of scales of tokens: a multiple of 4, as 128 channels take."""
    return ceil_div(channels, 4 * GROUP) * 4


class Sm120Mxfp4(Sorted[Tile]):
    """See the module's docstring.

    Args:
        packed: tokens and activations are MXFP4. software: for tests on GPUs of other compute capabilities.
    """

    name = "sm120_mxfp4"
    kernels = "CUDA C++ kernels of block-scaled products, MXFP8 activations"
    weight_format = NAME
    least_tile = 8
    operands: str = MXFP8

    def __init__(self, packed: bool = False, software: bool = False):
        self.packed, self.software = packed, software
        if packed:
            self.operands = MXFP4
            self.name, self.kernels = "sm120_fp4", "CUDA C++ kernels of block-scaled products, MXFP4 activations"

    def why_not(self, problem: Problem, target: Target) -> str | None:
        reason = limits(problem, target, self.weight_format, (torch.bfloat16,), multiple=GROUP, silu_only=False)
        if reason is not None:
            return reason
        if not self.software and arch_of(target).name != ARCHES[12, 0].name:
            return f"its instructions are those of compute capability 12.x, not of {arch_of(target).name}"
        return why_not_read(self.operands)

    def tile(self, problem: Problem, arch: Arch) -> Tile:
        M = select_tile_m(problem.T)
        return Tile(M, _N[M], self.packed)

    def tiles(self) -> tuple[Tile, ...]:
        return tuple(Tile(tile.M, tile.N, self.packed) for tile in TILES)

    def checked_tiles(self) -> tuple[Tile, ...]:
        return self.tiles()

    def kernel(self, tile: Tile) -> str:
        return "sm120/mxfp4_product"

    def plan(self, problem: Problem, target: Target) -> MxPlan:
        """Scratch grows with T: where `bench --tune` kept a tile that is not fused, every plan has its scratch."""
        plan, kept = super().plan(problem, target), tuned_tiles(problem, target, self.candidates(arch_of(target)))
        assert isinstance(plan, MxPlan)
        return replace(plan, unfused=not all(tile.fused for tile in kept))

    def plan_of(self, problem: Problem, arch: Arch, tile: Tile) -> MxPlan:
        return MxPlan(problem, arch, tile, sort.choose(problem, arch), self.software, not tile.fused)

    def scratch(self, plan: SortedPlan[Tile]) -> tuple[Buffer, ...]:
        """Activations, expert outputs, words of the sort; tokens, scales of both; unrounded activations."""
        assert isinstance(plan, MxPlan)
        problem, u8 = plan.problem, torch.uint8
        T, P, H, I = problem.T, problem.T * problem.K, problem.H, problem.I
        words = Words.of(P, local_experts(problem), self.least_tile, plan.sorters.parts).count
        per_byte, (of_hidden, of_act) = (2 if self.packed else 1), plan.strides
        fp32 = (Buffer((P, I), torch.float32),) if plan.unfused else ()
        tokens = Buffer((T, H // per_byte), u8), Buffer((T, of_hidden), u8)
        act = Buffer((P, I // per_byte), u8), Buffer((P, of_act), u8)
        return *tokens, *act, Buffer((P, H), problem.dtype), Buffer((words,), torch.int32), *fp32

    def uses(self, plan: SortedPlan[Tile], ids64: bool, add: bool) -> tuple[Use, ...]:
        problem, arch, tile = plan.problem, plan.arch, plan.tile
        defines = tile.defines | {"CLAMPED": problem.activation == CLAMPED_SWIGLU, "SOFTWARE_ATOMS": self.software}
        product = Use.of(arch, self.kernel(tile), tile.shared_memory, **defines)
        quantise, quantise_act = (
            Use.of(arch, "sm120/mx_quantise", FROM32=fp32, PACKED=self.packed) for fp32 in (False, True)
        )
        out = {"FP16": False, "TOP_K": problem.K, "ADD": add, "DISCARD": False}
        return (
            quantise,
            *sort.sort_uses(arch, plan.sorters, local_experts(problem), ids64, tile.granule),
            product,
            *(() if tile.fused else (quantise_act,)),
            product,
            Use.of(arch, "common/combine", OUT32=problem.out_dtype == torch.float32, **out),
        )

    def bind(self, plan: SortedPlan[Tile], uses: tuple[Use, ...], device: int) -> tuple[Launch, ...]:
        problem, tile = plan.problem, plan.tile
        T, E, K, H, I = problem.T, problem.E, problem.K, problem.H, problem.I
        quantise, *others, down, combine = uses
        quantise_act = () if tile.fused else (others.pop(),)
        *sorts, gate_up = others

        def quantising(use: Use, rows: int, channels: int) -> Launch:
            return use.bind(device, (ceil_div(rows * channels // 8, _THREADS),), _THREADS, rows, channels)

        return (
            quantising(quantise, T, H),
            *sort.bind_sorts(tuple(sorts), plan.sorters, device, T * K, E, local_experts(problem), K, tile.M),
            self.bind_product(plan, gate_up, device, H, I, *gate_up_rows(problem.gate_up_order, I)),
            *(quantising(use, T * K, I) for use in quantise_act),
            self.bind_product(plan, down, device, I, H, 1, 0),
            sort.bind_combine(combine, device, T, H),
        )

    def bind_product(self, plan: SortedPlan[Tile], use: Use, device: int, *sizes: int) -> Launch:
        threads = plan.tile.threads
        blocks = use.resident_blocks(plan.arch, device, threads)
        return use.bind(device, (blocks,), threads, *sizes)

    def launch(self, plan: SortedPlan[Tile], call: Call, buffers: tuple[Tensor, ...]) -> None:
        routing, words, tensors = call.routing, plan.words, call.experts.tensors
        x, x_scales, act, act_scales, rows, at, *fp32 = (buffer.data_ptr() for buffer in buffers)
        blocks, scales, down_blocks, down_scales = (
            tensors[f"{name}_{of}"].data_ptr() for name in ("gate_up", "down") for of in ("blocks", "scales")
        )
        gate_up_bias, down_bias = (bias_pointers(tensors.get(f"{name}_bias")) for name in ("gate_up", "down"))
        stream, route = load.stream(call.hidden.device.index), call.route
        sorted_rows = at + words.tiles, at + words.num_tiles
        quantise, *others, down, combine = launches_of(self, plan, call)
        quantise_act = None if plan.tile.fused else others.pop()
        *sorts, gate_up = others

        quantise(stream, call.hidden.data_ptr(), 0, 0, x, x_scales)
        sort.launch_sorts(sorts, stream, route, at, words)
        made = (act, act_scales) if plan.tile.fused else (fp32[0], 0)
        gate_up(stream, x, x_scales, at, blocks, scales, *gate_up_bias, *sorted_rows, *made)
        if quantise_act is not None:
            quantise_act(stream, fp32[0], *sorted_rows, act, act_scales)
        down(stream, act, act_scales, 0, down_blocks, down_scales, *down_bias, *sorted_rows, rows, 0)
        combine(stream, rows, at + words.inverse, routing.topk_weights.data_ptr(), route[2], call.out.data_ptr())


SM120_MXFP4 = Sm120Mxfp4()
SM120_FP4 = Sm120Mxfp4(packed=True)
