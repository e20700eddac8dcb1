"""What families of grouped CUDA C++ products share: sort, products, combine, and their scratch."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ...contract import Problem
from ..arch import Arch
from ..jit import load
from ..jit.load import Launch
from . import sort
from .cuda_cpp import CudaCpp, launches_of
from .family import Buffer, Call
from .pairs import local_experts
from .sort import Sorters, Words
from .uses import Use, pointer

LEAST_TILE = 16


class Tile(Protocol):
    """Sizes of a grouped product.

    Attributes:
        max_n: rows of a tile at most.
        read_once: combine lets go of the expert outputs in L2 that it has read.
    """

    @property
    def max_n(self) -> int: ...

    @property
    def read_once(self) -> bool: ...


TileT = TypeVar("TileT", bound=Tile)


@dataclass(frozen=True, eq=False)
class SortedPlan(Generic[TileT]):
    """Sort, grouped products, combine."""

    problem: Problem
    arch: Arch
    tile: TileT
    sorters: Sorters

    @cached_property
    def words(self) -> Words:
        problem = self.problem
        return Words.of(problem.T * problem.K, local_experts(problem), self.tile.max_n)


class Sorted(CudaCpp[SortedPlan[TileT]]):
    """A family whose products read rows sorted by expert."""

    rounds_expert_out = True

    @abstractmethod
    def product_uses(self, plan: SortedPlan[TileT]) -> tuple[Use, ...]: ...

    @abstractmethod
    def bind_products(self, plan: SortedPlan[TileT], uses: tuple[Use, ...], device: int) -> tuple[Launch, ...]: ...

    @abstractmethod
    def products(
        self,
        launches: tuple[Launch, ...],
        stream: object,
        call: Call,
        routed: tuple[int, int, int],
        act: int,
        rows: int,
    ) -> None:
        """Launch the products.

        Args:
            routed: addresses of row_tokens, tiles and num_tiles. act, rows: of activations and expert outputs.
        """

    def scratch(self, plan: SortedPlan[TileT]) -> tuple[Buffer, ...]:
        """Activations, expert outputs, words of the sort (for the smallest tiles, so that they grow with T)."""
        problem = plan.problem
        P, E, dtype = problem.T * problem.K, local_experts(problem), problem.dtype
        words = Words.of(P, E, min(plan.tile.max_n, LEAST_TILE)).count
        return Buffer((P, problem.I), dtype), Buffer((P, problem.H), dtype), Buffer((words,), torch.int32)

    def uses(self, plan: SortedPlan[TileT], ids64: bool, add: bool) -> tuple[Use, ...]:
        problem, arch = plan.problem, plan.arch
        out = {"FP16": problem.dtype == torch.float16, "TOP_K": problem.K, "ADD": add}
        out |= {"OUT32": problem.out_dtype == torch.float32, "DISCARD": plan.tile.read_once}
        return (
            sort.sort_use(arch, plan.sorters, local_experts(problem), ids64),
            *self.product_uses(plan),
            Use.of(arch, "common/combine", **out),
        )

    def bind(self, plan: SortedPlan[TileT], uses: tuple[Use, ...], device: int) -> tuple[Launch, ...]:
        problem, (first, *products, combine) = plan.problem, uses
        T, E, K = problem.T, problem.E, problem.K
        return (
            sort.bind_sort(first, plan.sorters, device, T * K, E, local_experts(problem), K, plan.tile.max_n),
            *self.bind_products(plan, tuple(products), device),
            sort.bind_combine(combine, device, T, problem.H),
        )

    def launch(self, plan: SortedPlan[TileT], call: Call, buffers: tuple[Tensor, ...]) -> None:
        launches, routing, words = launches_of(self, plan, call), call.routing, plan.words
        act, rows, row_tokens = (buffer.data_ptr() for buffer in buffers)
        inverse, tiles, num_tiles = row_tokens + words.inverse, row_tokens + words.tiles, row_tokens + words.num_tiles
        stream, bound = load.stream(call.hidden.device.index), pointer(routing.num_tokens)
        route = routing.topk_ids.data_ptr(), pointer(call.expert_map), bound
        launches[0](stream, *route, row_tokens, inverse, tiles, num_tiles)
        self.products(launches[1:-1], stream, call, (row_tokens, tiles, num_tiles), act, rows)
        launches[-1](stream, rows, inverse, routing.topk_weights.data_ptr(), bound, call.out.data_ptr())
