"""The CPU backend: plain torch, one matrix product per expert, fast enough to be the default on a CPU.

bf16 and fp16 products accumulate in fp32 and round once per product; fp32 is fp32 throughout. SiLU, the product with
up, the routing weights and the sum over k are fp32 everywhere. Weights are read in place, once per expert and block
of rows; weights of an expert without a token are not read.

int4_24 and mxfp4 weights are decoded to exact fp32 a block at a time, and their products are fp32: gate and up are not
rounded.

With TTNN_MOE_CHECK_IDS=1 it checks ids that a caller promised to be distinct.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from threading import Lock

import torch
from torch import Tensor

from .activations import ALPHA, LIMIT, SILU
from .backend import Numerics, Prepared, Probe
from .contract import Experts, Placement, Problem, Routing
from .ids import check_distinct
from .reference_products import PRODUCTS, Products, products_of

CHECK_ENV = "TTNN_MOE_CHECK_IDS"
# rows of one expert worked on at a time: past 512 the products gain nothing, and their buffers grow
BLOCK_ROWS = 512
# experts of few rows are worked on together up to this many: fewer calls, and buffers that stay in the L2 cache
PACKED_ROWS = 128
# tokens combined at a time: keeps the fp32 sums in the cache
BLOCK_TOKENS = 64


class Workspace:
    """Buffers of one call of up to `pairs` token-expert pairs; reused by later calls."""

    def __init__(self, pairs: int, T: int, H: int, I: int, dtype: torch.dtype, gate_up_dtype: torch.dtype):
        rows = min(pairs, BLOCK_ROWS)
        self.hidden = torch.empty(rows, H, dtype=dtype, device="cpu")
        self.gate_up = torch.empty(rows, 2 * I, dtype=gate_up_dtype, device="cpu")
        self.product = torch.empty(rows, I, dtype=torch.float32, device="cpu")
        self.activations = torch.empty(rows, I, dtype=dtype, device="cpu")
        # the spare last row is zero: pairs that name no expert point at it
        self.expert_out = torch.empty(pairs + 1, H, dtype=dtype, device="cpu")
        tokens = min(T, BLOCK_TOKENS)
        self.total = torch.empty(tokens, H, dtype=torch.float32, device="cpu")
        self.picked = torch.empty(tokens, H, dtype=dtype, device="cpu")


class ReferenceBackend:
    """See the module's docstring."""

    name = "reference"

    @classmethod
    def probe(cls) -> Probe:
        return Probe(True, devices=(f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)",))

    def why_not(self, problem: Problem) -> str | None:
        if problem.device == "meta":
            return "it runs on the CPU, and meta tensors have no values; to fix it: make them on the CPU, with values"
        if problem.device != "cpu":
            return f"it runs on the CPU, and the tensors are on {problem.device!r}; to fix it: move them to the CPU"
        if problem.weight_format not in PRODUCTS:
            return f"it runs {', '.join(reversed(PRODUCTS))} weights, not {problem.weight_format!r}"
        return None

    def numerics(self, problem: Problem) -> Numerics:
        if problem.dtype == torch.float32:
            return Numerics()
        gate_up = problem.dtype if problem.weight_format == "dense" else None
        return Numerics(gate_up=gate_up, activation=problem.dtype, expert_out=problem.dtype)

    def prepare(self, problem: Problem, experts: Experts, placement: Placement | None) -> PreparedReference:
        return PreparedReference(self, problem, experts, placement)

    def check_promise(self, routing: Routing) -> None:
        """Check ids that were promised to be distinct, where TTNN_MOE_CHECK_IDS=1 asks for it.

        Raises:
            ContractError: naming the first t and k that break the promise.
        """
        if routing.distinct and os.environ.get(CHECK_ENV) == "1":
            check_distinct(routing.topk_ids[: routing.true_tokens()], routing.E)

    def moe(self, hidden: Tensor, routing: Routing, experts: Experts, out: Tensor, accumulate: bool) -> None:
        self.check_promise(routing)
        T, K = routing.T, routing.K
        products = products_of(experts, min(T * K, BLOCK_ROWS), hidden.dtype)
        space = Workspace(T * K, T, experts.H, experts.I, hidden.dtype, products.gate_up_dtype)
        self.run(hidden, routing, experts, products, out, accumulate, space)

    def run(
        self,
        hidden: Tensor,
        routing: Routing,
        experts: Experts,
        products: Products,
        out: Tensor,
        accumulate: bool,
        space: Workspace,
    ) -> None:
        """The whole operator in a given workspace."""
        view = routing.sorted
        starts = view.expert_offsets.tolist()
        tokens = view.pairs // routing.K
        pairs = routing.T * routing.K
        for block in _blocks(starts):
            first, n = block[0][1], block[-1][2] - block[0][1]
            x = torch.index_select(hidden, 0, tokens[first : first + n], out=space.hidden[:n])
            both, act = space.gate_up[:n], space.activations[:n]
            sizes = [end - start for _, start, end in block]
            for (e, _, _), a, b in zip(block, x.split(sizes), both.split(sizes), strict=True):
                products.multiply(a, "gate_up", e, b)
            _activate(experts.activation, *_split(both, experts), space.product[:n], act)
            rows = space.expert_out[first : first + n]
            for (e, _, _), a, b in zip(block, act.split(sizes), rows.split(sizes), strict=True):
                products.multiply(a, "down", e, b)
        _combine(space.expert_out[: pairs + 1], view.inverse, routing, routing.topk_weights, out, accumulate, space)

    def gate_projection(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int) -> Tensor:
        return _step(hidden, routing, experts, row_align, _gate_and_up(experts)[0])

    def up_projection(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int) -> Tensor:
        return _step(hidden, routing, experts, row_align, _gate_and_up(experts)[1])

    def gate_up(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int) -> Tensor:
        def finish(both: Tensor) -> Tensor:
            gate, up = _split(both, experts)
            product, act = (gate.new_empty(gate.shape, dtype=dtype) for dtype in (torch.float32, hidden.dtype))
            return _activate(experts.activation, gate, up, product, act)

        return _step(hidden, routing, experts, row_align, None, finish)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return _activate(SILU, gate, up, gate.new_empty(gate.shape, dtype=torch.float32), torch.empty_like(gate))

    def down_projection(
        self, activations: Tensor, routing: Routing, experts: Experts, row_align: int, out: Tensor, accumulate: bool
    ) -> None:
        layout = routing.step_layout(row_align)
        space = Workspace(layout.capacity, routing.T, experts.H, 1, activations.dtype, activations.dtype)
        products = products_of(experts, layout.capacity, activations.dtype)
        for e, rows, _ in _real_rows(layout.row_start.tolist(), layout.row_tokens):
            products.multiply(activations[rows], "down", e, space.expert_out[rows])
        _combine(space.expert_out, layout.inverse, routing, layout.weights, out, accumulate, space)


class PreparedReference(Prepared):
    """A layer with its workspace; a call allocates its output and the routing's index tensors, O(T*K).

    Threads that call one layer take turns. With a placement, D devices are run one after the other, as a mesh would.
    """

    def __init__(self, backend: ReferenceBackend, problem: Problem, experts: Experts, placement: Placement | None):
        super().__init__(problem, experts, placement)
        self._backend, self._turn = backend, Lock()
        # one process that drives the mesh holds all experts; a rank holds its own, and so does a lone device
        held = (
            [experts.for_device(placement, d) for d in range(placement.D)]
            if placement is not None and placement.rank is None
            else [experts]
        )
        pairs = problem.T * problem.K
        self._experts = [(mine, products_of(mine, min(pairs, BLOCK_ROWS), problem.dtype)) for mine in held]
        gate_up_dtype = self._experts[0][1].gate_up_dtype
        self._space = Workspace(pairs, problem.T, problem.H, problem.I, problem.dtype, gate_up_dtype)
        # fp32 sums over devices, and the partial sum of one
        sums = 2, problem.T, problem.H
        several = len(self._experts) > 1
        self._sums = torch.empty(sums, dtype=torch.float32, device="cpu") if several else None

    def _run(self, hidden: Tensor, routing: Routing, out: Tensor, accumulate: bool) -> None:
        self._backend.check_promise(routing)
        with self._turn:
            if self._sums is None:
                local = routing if self.placement is None else routing.for_device()
                self._backend.run(hidden, local, *self._experts[0], out, accumulate, self._space)
            else:
                self._run_mesh(hidden, routing, out, accumulate, self._sums)

    def _run_mesh(self, hidden: Tensor, routing: Routing, out: Tensor, accumulate: bool, sums: Tensor) -> None:
        n = routing.true_tokens()
        total, partial = sums[:, : routing.T]
        total.copy_(out) if accumulate else total.zero_()
        for d, experts in enumerate(self._experts):
            self._backend.run(hidden, routing.for_device(d), *experts, partial, False, self._space)
            total[:n] += partial[:n]
        out[:n] = total[:n]


def _blocks(starts: list[int]) -> list[list[tuple[int, int, int]]]:
    """Sorted rows in blocks: several experts of PACKED_ROWS in all, or one of up to BLOCK_ROWS.

    Each is a list of (expert, first row, end row). Only an expert of more than BLOCK_ROWS is cut, so that weights
    are read once.
    """
    blocks: list[list[tuple[int, int, int]]] = []
    for e, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        for row in range(start, end, BLOCK_ROWS):
            piece = (e, row, min(row + BLOCK_ROWS, end))
            if blocks and piece[2] - blocks[-1][0][1] <= PACKED_ROWS:
                blocks[-1].append(piece)
            else:
                blocks.append([piece])
    return blocks


def _step(
    hidden: Tensor,
    routing: Routing,
    experts: Experts,
    row_align: int,
    part: slice | None,
    finish: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """[capacity, I]: each expert's tokens times a part of its gate and up weights, finished; zeros in padding rows."""
    layout = routing.step_layout(row_align)
    products = products_of(experts, layout.capacity, hidden.dtype)
    out = hidden.new_zeros(layout.capacity, experts.I)
    N = 2 * experts.I if part is None else experts.I
    for e, rows, tokens in _real_rows(layout.row_start.tolist(), layout.row_tokens):
        product = hidden.new_empty(len(tokens), N, dtype=products.gate_up_dtype)
        products.multiply(hidden[tokens], "gate_up", e, product, part)
        out[rows] = product if finish is None else finish(product)
    return out


def _real_rows(starts: list[int], row_tokens: Tensor) -> list[tuple[int, slice, Tensor]]:
    """(expert, its rows without padding, their tokens) of each expert that has a token."""
    found = []
    for e, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        tokens = row_tokens[start:end]
        tokens = tokens[tokens >= 0]
        if len(tokens):
            found.append((e, slice(start, start + len(tokens)), tokens))
    return found


def _gate_and_up(experts: Experts) -> tuple[slice, slice]:
    """Where gate and up are among 2I rows or columns."""
    if experts.gate_up_order == "interleaved":
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, experts.I), slice(experts.I, None)


def _split(both: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """gate and up halves of [..., 2I]."""
    gate, up = _gate_and_up(experts)
    return both[..., gate], both[..., up]


def _activate(activation: str, gate: Tensor, up: Tensor, product: Tensor, out: Tensor) -> Tensor:
    """The activation in fp32, rounded once to out. product is scratch; clamped_swiglu cuts up in place."""
    product.copy_(gate)
    if activation == SILU:
        torch.nn.functional.silu(product, inplace=True)
        product.mul_(up)
    else:  # gate * sigmoid(ALPHA * gate) is silu(ALPHA * gate) / ALPHA
        product.clamp_(max=LIMIT).mul_(ALPHA)
        torch.nn.functional.silu(product, inplace=True).mul_(1 / ALPHA)
        product.addcmul_(product, up.clamp_(-LIMIT, LIMIT))
    return out.copy_(product)


def _combine(
    rows: Tensor, inverse: Tensor, routing: Routing, weights: Tensor, out: Tensor, accumulate: bool, space: Workspace
) -> None:
    """out[t] (+)= sum over ascending k of weights[t, k] * rows[inverse[t, k]], in fp32; -1 adds nothing."""
    T = routing.true_tokens()
    rows[-1].zero_()
    none = inverse < 0
    inverse = torch.where(none, len(rows) - 1, inverse).long()
    weights = torch.where(none, 0.0, weights)
    for first in range(0, T, BLOCK_TOKENS):
        block = slice(first, min(first + BLOCK_TOKENS, T))
        n = block.stop - first
        total, picked = space.total[:n], space.picked[:n]
        total.copy_(out[block]) if accumulate else total.zero_()
        for k in range(routing.K):
            torch.index_select(rows, 0, inverse[block, k], out=picked)
            total.addcmul_(picked, weights[block, k, None])
        out[block] = total
