"""What families of grouped CUDA C++ products share: limits, sort, combine, and scratch."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ...contract import Problem
from ..arch import Arch, Target
from ..jit import load
from ..jit.load import Launch
from . import sort
from .cuda_cpp import CudaCpp, arch_of, dense_limits, launches_of, why_not_products
from .family import Buffer, Call
from .pairs import local_experts
from .sort import Sorters, Words
from .tuned import tuned_tile
from .uses import Use

LEAST_TILE = 16


class Tile(Protocol):
    """Sizes of a grouped product: a dataclass, whose fields in upper case are the defines of the kernel.

    Attributes:
        max_n: rows of a tile at most.
        granule: rows of a tile that the product makes together: fewer take as long.
        read_once: L2 drops each expert output that combine has read.
        shared_memory: bytes of a block.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def max_n(self) -> int: ...

    @property
    def granule(self) -> int: ...

    @property
    def read_once(self) -> bool: ...

    @property
    def shared_memory(self) -> int: ...


TileT = TypeVar("TileT", bound=Tile)


@dataclass(frozen=True, eq=False)
class SortedPlan(Generic[TileT]):
    """Sort, both grouped products in one launch, combine."""

    problem: Problem
    arch: Arch
    tile: TileT
    sorters: Sorters

    @cached_property
    def words(self) -> Words:
        problem = self.problem
        return Words.of(problem.T * problem.K, local_experts(problem), self.tile.max_n, self.sorters.parts)

    def product(self, name: str, **defines: object) -> Use:
        """The kernel of the products."""
        sizes = {field.upper(): size for field, size in asdict(self.tile).items()}
        fp16 = self.problem.dtype == torch.float16
        return Use.of(self.arch, name, self.tile.shared_memory, FP16=fp16, **sizes, **defines)


class Sorted(CudaCpp[SortedPlan[TileT]]):
    """A family whose products read rows sorted by expert.

    Attributes:
        least_tile: rows of the smallest tiles of any plan.
    """

    rounds_expert_out = True
    least_tile = LEAST_TILE

    @abstractmethod
    def tile(self, problem: Problem, arch: Arch) -> TileT:
        """Sizes of the products of a problem."""

    def tiles(self) -> tuple[TileT, ...]:
        """Tiles that `ttnn-moe bench --tune` may choose instead, of any architecture's shared memory."""
        return ()

    def checked_tiles(self) -> tuple[TileT, ...]:
        """Tiles that `ttnn-moe selfcheck` runs, one by one."""
        return ()

    def candidates(self, arch: Arch) -> list[TileT]:
        """Those of `tiles` that an architecture can hold."""
        return [tile for tile in self.tiles() if tile.shared_memory <= arch.shared_memory]

    @abstractmethod
    def kernel(self, tile: TileT) -> str:
        """The kernel of products in such tiles, under gpu_kernels/cuda."""

    def product_defines(self, problem: Problem) -> dict[str, object]:
        """Definitions of the kernel of products, besides the sizes of a tile."""
        return {}

    def prepares(self, plan: SortedPlan[TileT]) -> bool:
        """Whether a kernel of the call runs before the sort, which does not read what that kernel writes."""
        return False

    @abstractmethod
    def bind_product(self, plan: SortedPlan[TileT], use: Use, device: int) -> Launch:
        """The launch of the products, with everything but addresses."""

    def plan(self, problem: Problem, target: Target) -> SortedPlan[TileT]:
        arch = arch_of(target)
        return self.plan_of(
            problem, arch, tuned_tile(problem, target, self.candidates(arch)) or self.tile(problem, arch)
        )

    def plan_of(self, problem: Problem, arch: Arch, tile: TileT) -> SortedPlan[TileT]:
        """A plan with a tile of `tiles` or `checked_tiles`."""
        return SortedPlan(problem, arch, tile, sort.choose(problem, arch))

    def scratch(self, plan: SortedPlan[TileT]) -> tuple[Buffer, ...]:
        """Activations, expert outputs, words of the sort. Words for the smallest tiles grow with T."""
        problem = plan.problem
        P, E, dtype = problem.T * problem.K, local_experts(problem), problem.dtype
        words = Words.of(P, E, min(plan.tile.max_n, self.least_tile), plan.sorters.parts).count
        return Buffer((P, problem.I), dtype), Buffer((P, problem.H), dtype), Buffer((words,), torch.int32)

    def uses(self, plan: SortedPlan[TileT], ids64: bool, add: bool) -> tuple[Use, ...]:
        problem, arch = plan.problem, plan.arch
        out = {"FP16": problem.dtype == torch.float16, "TOP_K": problem.K, "ADD": add}
        # whole lines of 128 bytes alone can be dropped
        drops = plan.tile.read_once and problem.H % 64 == 0
        out |= {"OUT32": problem.out_dtype == torch.float32, "DISCARD": drops}
        return (
            *sort.sort_uses(arch, plan.sorters, local_experts(problem), ids64, plan.tile.granule, self.prepares(plan)),
            plan.product(self.kernel(plan.tile), **self.product_defines(problem)),
            Use.of(arch, "common/combine", **out),
        )

    def bind(self, plan: SortedPlan[TileT], uses: tuple[Use, ...], device: int) -> tuple[Launch, ...]:
        problem, (*sorts, product, combine) = plan.problem, uses
        T, E, K = problem.T, problem.E, problem.K
        sizes = T * K, E, local_experts(problem), K, plan.tile.max_n
        return (
            *sort.bind_sorts(tuple(sorts), plan.sorters, device, *sizes),
            self.bind_product(plan, product, device),
            sort.bind_combine(combine, device, T, problem.H),
        )


class SortedProduct(Sorted[TileT]):
    """A family whose calls are a sort, one launch of both products, and a combine."""

    @abstractmethod
    def launch_product(
        self, product: Launch, stream: Any, call: Call, routed: tuple[int, int, int], act: int, rows: int
    ) -> None:
        """Launch the products.

        Args:
            routed: addresses of row_tokens, tiles and num_tiles. act, rows: of activations and expert outputs.
        """

    def launch(self, plan: SortedPlan[TileT], call: Call, buffers: tuple[Tensor, ...]) -> None:
        (*sorts, product, combine), routing, words = launches_of(self, plan, call), call.routing, plan.words
        act, rows, at = (buffer.data_ptr() for buffer in buffers)
        stream, route = load.stream(call.hidden.device.index), call.route
        sort.launch_sorts(sorts, stream, route, at, words)
        self.launch_product(product, stream, call, (at, at + words.tiles, at + words.num_tiles), act, rows)
        combine(stream, rows, at + words.inverse, routing.topk_weights.data_ptr(), route[2], call.out.data_ptr())


class SortedDense(SortedProduct[TileT]):
    """A family of dense weights.

    Attributes:
        folder: of its products, under gpu_kernels/cuda; see Arch.products.
    """

    folder: str

    def kernel(self, tile: TileT) -> str:
        return f"{self.folder}/grouped_mlp"

    def why_not(self, problem: Problem, target: Target) -> str | None:
        return dense_limits(problem, target) or why_not_products(target, self.folder)
