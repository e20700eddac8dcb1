"""dispatch and combine of one rank, over any transport."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor

from ...arguments import is_size, seconds
from ...contract import HIDDEN_DTYPES, Placement
from ...errors import ContractError, GradientsRefused
from ...memory import check_tensors, dense
from ...placement import check_placement
from ...visible import shown
from ..compare import compare
from . import roles
from .engine import Engine
from .nodes import Nodes, ids_of, rank_masks
from .rings import Counts, Role
from .shared_memory import Layout
from .transport import Report, Transport


@dataclass(frozen=True)
class Sizes:
    """What all ranks agree on.

    Attributes:
        T: the most tokens of a rank. H: a multiple of 8. dtype: of hidden.
        wire: dtype in which combine's rows travel: bfloat16 (one rounding a hop) or float32.
    """

    shape: roles.Shape
    T: int
    H: int
    K: int
    dtype: torch.dtype = torch.bfloat16
    wire: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if not isinstance(self.shape, roles.Shape):
            raise ContractError("shape is no Shape", got=shown(self.shape), expected="a parallel.hierarchical.Shape")
        nodes, slots, channels = self.shape.nodes, self.shape.slots, self.shape.channels
        if not isinstance(nodes, Nodes):
            raise ContractError("nodes is no Nodes", got=shown(nodes), expected="a parallel.hierarchical.Nodes")
        if not all(map(is_size, (self.T, self.H, self.K))) or self.T < 0 or self.K < 1:
            sizes = f"T={self.T}, H={self.H}, K={self.K}"
            raise ContractError("sizes are out of range", got=sizes, expected="integers, T >= 0, K >= 1 and H")
        if self.H < 8 or self.H % 8:
            raise ContractError("H does not fit vector copies", got=self.H, expected="a positive multiple of 8")
        if not (is_size(slots) and is_size(channels)) or slots < 1 or slots & (slots - 1) or channels < 1:
            raise ContractError(
                "a ring has the wrong form",
                got=f"{shown(slots)} slots, {shown(channels)} channels",
                expected="a power of two of slots, so that counters may wrap around, and a channel or more",
            )
        if self.dtype not in HIDDEN_DTYPES:
            raise ContractError("unsupported dtype of hidden", got=self.dtype, expected="bfloat16, float16 or float32")
        if self.wire not in (torch.bfloat16, torch.float32):
            raise ContractError("unsupported wire dtype", got=self.wire, expected="bfloat16 or float32")

    def facts(self) -> dict[str, str]:
        """By name, for ranks to compare."""
        shape, nodes = self.shape, self.shape.nodes
        rings = {"R_inter": nodes.inter, "R_intra": nodes.intra, "channels": shape.channels, "slots": shape.slots}
        own = {"T": self.T, "H": self.H, "K": self.K, "dtype": self.dtype, "wire": self.wire}
        return {name: str(value) for name, value in (*rings.items(), *own.items())}

    @property
    def layout(self) -> Layout:
        """The memory that ranks share: rings of slots that hold a token with its ids and weights, or a row of fp32."""
        token = self.H * self.dtype.itemsize + self.K * 8
        slot = -(-max(token, 4 * self.H) // 16) * 16
        return Layout(self.shape.nodes, self.shape.channels, self.shape.slots, slot, -(-8 * (self.T + 1) // 16) * 16)


@dataclass(frozen=True)
class Meta:
    """Where the rows of one dispatch belong; combine wants it back.

    Attributes:
        masks: of each rank c, [T_c] int64: the ranks that hold a row of its token t.
        ids: [A, K] int32: the local expert of each pair of this rank's rows; -1: not here.
    """

    masks: tuple[Tensor, ...]
    ids: Tensor


@dataclass(frozen=True)
class Dispatched:
    """What came: rows [A, H], ids [A, K] int32 (local; -1: elsewhere), weights [A, K] fp32.

    The order is that of the rank of origin, then of the token.
    """

    rows: Tensor
    ids: Tensor
    weights: Tensor
    meta: Meta


class Group:
    """One rank of a group; every rank makes one, and all make the same calls, also those without a token.

    Before the first dispatch ranks compare sizes and placements.

    Args:
        transport: of this rank. sizes: the same on every rank. placement: with any rank; D is the number of ranks.
        timeout: seconds without progress after which a call ends the group. first: of tests, the counters' start.
    """

    def __init__(self, transport: Transport, sizes: Sizes, placement: Placement, timeout: float = 30.0, first: int = 0):
        if not isinstance(sizes, Sizes):
            raise ContractError("sizes is no Sizes", got=shown(sizes), expected="a parallel.hierarchical.Sizes")
        check_placement(placement)
        if placement.D != sizes.shape.nodes.R:
            raise ContractError(
                "the placement is not that of this topology", got=f"D={placement.D}", expected=sizes.shape.nodes.R
            )
        self.sizes, self.rank = sizes, transport.rank
        self._engine = Engine(transport, seconds("timeout", timeout))
        self._placement = placement
        self._local_of = placement.local_of(self.rank)
        self._counts: Counts = defaultdict(lambda: first)
        self._agreed = False
        digest = sha256(placement.device_expert_mapping.numpy().tobytes()).hexdigest()[:16]
        transport.tell({**sizes.facts(), "placement": f"{placement.E} experts, {digest}"})

    def dispatch(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Dispatched:
        """Each token goes once to each rank that holds one of its experts, with its ids and weights.

        Args:
            hidden: [T, H]. topk_ids: [T, K] global experts; others, as -1, go nowhere. topk_weights: [T, K] fp32.

        Raises:
            ContractError: a shape or a dtype is not that of sizes, or a tensor is not on the CPU; at the first call, on
                all ranks: a rank has other sizes or another placement.
            GradientsRefused: a tensor asks for gradients.
            PeerStopped: a rank died or stalled. The group is dead.
        """
        sizes = self.sizes
        check_tensors(hidden=hidden, topk_ids=topk_ids, topk_weights=topk_weights)
        T = len(hidden) if hidden.dim() else 0
        _check("hidden", hidden, (T, sizes.H), sizes.dtype)
        _check("topk_ids", topk_ids, (T, sizes.K), torch.int32, torch.int64)
        _check("topk_weights", topk_weights, (T, sizes.K), torch.float32)
        if T > sizes.T:
            raise ContractError("too many tokens for this group", got=T, expected=f"at most {sizes.T}")
        if not self._agreed:
            self._agree()
        named = ids_of(topk_ids, self._placement)
        masks = self._announce(rank_masks(named, self._placement))
        try:
            data = _Tokens(self, masks, dense(hidden), named, dense(topk_weights))
            lists = [mask.tolist() for mask in masks]
        except BaseException:
            self.leave()  # the others wait for these tokens, and not for another dispatch
            raise
        self._engine.run(roles.dispatch(sizes.shape, self.rank, lists, data, self._counts))
        inside = (data.ids >= 0) & (data.ids < self._placement.E)
        ids = torch.where(inside, self._local_of[data.ids.clamp(0, self._placement.E - 1).long()], -1)
        return Dispatched(data.rows, ids, data.weights, Meta(tuple(masks), ids))

    def combine(
        self,
        x: Tensor,
        meta: Meta,
        topk_weights: Tensor | None = None,
        bias_0: Tensor | None = None,
        bias_1: Tensor | None = None,
    ) -> Tensor:
        """[T, H] in the dtype of x: each token's sum over the ranks; see tree.tree_sum. Rows travel in sizes.wire.

        Args:
            x: [A, H], one row of each of dispatch's rows; or with topk_weights [A, K, H], one of each pair.
            topk_weights: [A, K] fp32: the expert side weighs its pairs, in fp32 and ascending k, before the first hop.
            bias_0, bias_1: [T, H], added before the one rounding to out.

        Raises:
            ContractError, GradientsRefused, PeerStopped: as dispatch. A combine that one rank refuses ends the group.
        """
        sizes = self.sizes
        try:
            if not isinstance(meta, Meta):
                raise ContractError("meta is no Meta", got=shown(meta), expected="dispatch's meta")
            A, T = len(meta.ids), len(meta.masks[self.rank])
            _check("x", x, (A, sizes.H) if topk_weights is None else (A, sizes.K, sizes.H), *HIDDEN_DTYPES)
            for name, bias in (("bias_0", bias_0), ("bias_1", bias_1)):
                if bias is not None:
                    _check(name, bias, (T, sizes.H), *HIDDEN_DTYPES)
            if topk_weights is None:
                rows = dense(x)  # slots take bytes
            else:
                _check("topk_weights", topk_weights, (A, sizes.K), torch.float32)
                rows = torch.zeros(A, sizes.H, dtype=torch.float32, device="cpu")
                for k in range(sizes.K):
                    weighed = rows + topk_weights[:, k, None] * x[:, k].float()
                    rows = torch.where(meta.ids[:, k, None] >= 0, weighed, rows)
            out = x.new_zeros(T, sizes.H)
            data = _Rows(self.rank, meta.masks, rows, sizes.wire, out, (bias_0, bias_1))
            lists = [mask.tolist() for mask in meta.masks]
        except BaseException:
            if sizes.shape.nodes.R > 1:  # the others wait for these rows, and not for another call
                self.leave()
            raise
        self._engine.run(roles.combine(sizes.shape, self.rank, lists, data, self._counts))
        return out

    def leave(self) -> None:
        """This rank makes no further call; the others raise PeerStopped that names it, now."""
        transport = self._engine.transport
        if transport.aborted() is None:  # the first report stays
            transport.abort(Report(self.rank, Role.OUTSIDE, self._engine.call + 1, self.rank))

    def _agree(self) -> None:
        told = self._engine.meet()
        compare(told, "one group", "sizes and placement")
        if None in told:
            self._engine.transport.abort(Report(told.index(None), Role.OUTSIDE, 1, self.rank))
            self._engine.check()
        self._agreed = True

    def _announce(self, mine: Tensor) -> list[Tensor]:
        masks: dict[int, Tensor] = {self.rank: mine}

        def learn(rank: int, slot: Tensor) -> None:
            words = slot.view(torch.int64)
            masks[rank] = words[1 : 1 + int(words[0])].clone()

        packed = torch.cat([mine.new_full((1,), len(mine)), mine]).view(torch.uint8)
        self._engine.run(roles.announce(self.sizes.shape.nodes, self.rank, packed, learn, self._counts))
        return [masks[rank] for rank in range(len(masks))]


class _Tokens:
    """roles.DispatchData: a slot holds a token, its ids and its weights."""

    def __init__(self, group: Group, masks: list[Tensor], hidden: Tensor, ids: Tensor, weights: Tensor):
        self._row = group.sizes.H * hidden.element_size()
        self._slots = torch.cat([_bytes(part) for part in (hidden, ids, weights)], 1)
        here = [mask >> group.rank & 1 for mask in masks]
        counts = torch.stack([mask.sum() for mask in here])
        starts = (counts.cumsum(0) - counts).tolist()
        self._row_of = [(mask.cumsum(0) - 1 + start).tolist() for mask, start in zip(here, starts, strict=True)]
        A = int(counts.sum())
        self.rows = hidden.new_empty(A, group.sizes.H)
        self.ids = ids.new_empty(A, group.sizes.K)
        self.weights = weights.new_empty(A, group.sizes.K)

    def own(self, t: int) -> Tensor:
        return self._slots[t]

    def deliver(self, c: int, t: int, slot: Tensor) -> None:
        row, K = self._row_of[c][t], self.ids.shape[1]
        at = self._row
        self.rows[row] = slot[:at].view(self.rows.dtype)
        self.ids[row] = slot[at : at + 4 * K].clone().view(torch.int32)
        self.weights[row] = slot[at + 4 * K : at + 8 * K].clone().view(torch.float32)


class _Rows:
    """roles.CombineData: fp32 values, slots in the wire dtype."""

    def __init__(
        self,
        rank: int,
        masks: tuple[Tensor, ...],
        rows: Tensor,
        wire: torch.dtype,
        out: Tensor,
        biases: tuple[Tensor | None, ...],
    ):
        self._rows, self._wire, self._out, self._biases = rows, wire, out, biases
        self._H = out.shape[1]
        here = torch.cat([mask >> rank & 1 for mask in masks])
        self._row_of = list((here.cumsum(0) - 1).split([len(mask) for mask in masks]))

    def own(self, c: int, t: int) -> Tensor:
        return self._rows[self._row_of[c][t]].float()

    def pack(self, value: Tensor) -> Tensor:
        return value.to(self._wire).view(torch.uint8)

    def unpack(self, slot: Tensor) -> Tensor:
        return slot[: self._H * self._wire.itemsize].view(self._wire).float()

    def add(self, total: Tensor | None, value: Tensor) -> Tensor:
        return value if total is None else total + value

    def finish(self, t: int, total: Tensor | None) -> None:
        if total is None:
            total = torch.zeros(self._H, dtype=torch.float32, device="cpu")
        for bias in self._biases:
            if bias is not None:
                total = total + bias[t].float()
        self._out[t] = total.to(self._out.dtype)


def _bytes(rows: Tensor) -> Tensor:
    """[T, n] uint8 of rows [T, N]."""
    # a column may count as contiguous whatever its stride, and only a stride of 1 can be viewed as bytes
    return rows.reshape(-1).view(torch.uint8).view(len(rows), rows.shape[1] * rows.element_size())


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    check_tensors(**{name: tensor})
    if tensor.layout is not torch.strided:
        raise ContractError(f"{name} is not dense", got=tensor.layout, expected="torch.strided")
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes or tensor.device.type != "cpu":
        raise ContractError(
            f"{name} has the wrong form",
            got=f"{list(tensor.shape)}, {tensor.dtype}, on {tensor.device}",
            expected=f"{list(shape)}, {' or '.join(map(str, dtypes))}, on the CPU",
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise GradientsRefused(
            f"{name} asks for gradients, and ranks exchange none", remedy="call it under torch.no_grad()"
        )
