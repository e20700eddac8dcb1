"""One routing of T tokens to E experts, in whichever view a kernel reads.

torch operators build every view on the device of the ids, without a host synchronisation. Shapes follow from T, K and E
only. Order is stable: pairs of one expert stand in ascending (t, k).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from .arguments import is_size
from .errors import ContractError
from .ids import check_ids, is_distinct
from .memory import check_tensors, dense
from .placement import MOST, Placement, check_placement
from .routing_views import PaddedView, SortedView, StepLayout, check_row_align, step_capacity, wide
from .visible import shown


@dataclass(frozen=True, eq=False, repr=False)
class Routing:
    """topk_ids [T, K] and topk_weights [T, K] of one call. Make it with `from_topk`.

    ids are global expert ids, int32 or int64, as given: an id outside 0 .. E-1 means "no expert" to every reader.
    num_tokens, if set, is the true number of tokens when T is only a bound: int32 [] on the same device; rows past
    it route nowhere and their output is not written. A value below 0 counts as 0, one above T as T.
    distinct: the caller promises ids of 0 .. E-1, none twice in a row. The views of this class do not rely on it.
    """

    topk_ids: Tensor
    topk_weights: Tensor
    E: int
    placement: Placement | None = None
    num_tokens: Tensor | None = None
    distinct: bool = False
    _cache: dict[int, StepLayout] = field(default_factory=dict)

    def __repr__(self) -> str:
        words = [f"T={self.T}, K={self.K}, E={self.E}"]
        if self.placement is not None:
            words.append(repr(self.placement))
        words += ["num_tokens"] * (self.num_tokens is not None) + ["distinct"] * self.distinct
        return f"Routing({', '.join([*words, str(self.topk_ids.device)])})"

    @classmethod
    def from_topk(
        cls,
        ids: Tensor,
        weights: Tensor,
        E: int,
        *,
        placement: Placement | None = None,
        num_tokens: Tensor | None = None,
        distinct: bool = False,
        check: bool = False,
    ) -> Routing:
        """Check shapes and dtypes (never values, unless asked) and hold the routing.

        Views are kept and do not follow a later write to ids, weights or num_tokens: make a new routing after one.

        Args:
            ids: [T, K] int32 or int64; -1, or any id outside 0 .. E-1, names no expert. Naming an expert twice
                counts twice. Non-contiguous ids and weights are copied.
            weights: [T, K] fp32 (bf16 and fp16 are converted).
            E: number of experts.
            placement: where experts live; needed by `device_expert_mapping` and `for_device`.
            num_tokens: true number of tokens, int32 [] or [1], where T is a bound.
            distinct: no user needs it: `moe` and `prepare` take this promise as ids="distinct".
            check: read the ids of true tokens back (a host synchronisation) and raise on the first that is neither -1
                nor valid.

        Raises:
            ContractError: a shape, dtype or device that does not fit; with check, an id out of range.
        """
        if not (type(ids) is Tensor and type(weights) is Tensor):
            check_tensors(topk_ids=ids, topk_weights=weights)
        shape = ids.shape
        if len(shape) != 2 or shape != weights.shape or shape[1] < 1:
            raise ContractError(
                "topk_ids and topk_weights do not fit together",
                got=f"{tuple(ids.shape)} and {tuple(weights.shape)}",
                expected="both [T, K] with K >= 1",
                remedy="flatten batch and sequence to T: topk_ids.flatten(0, 1)" if len(shape) == 3 else None,
            )
        if ids.dtype not in (torch.int32, torch.int64):
            swapped = ids.is_floating_point() and not weights.is_floating_point()
            raise ContractError(
                "topk_ids and topk_weights look swapped" if swapped else "topk_ids has the wrong dtype",
                got=f"ids of {ids.dtype} and weights of {weights.dtype}",
                expected="ids of int32 or int64, weights of float32",
                remedy="give the ids first, then the weights" if swapped else "topk_ids.int()",
            )
        if weights.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ContractError(
                "topk_weights has the wrong dtype", got=weights.dtype, expected="float32", remedy="topk_weights.float()"
            )
        if ids.device != weights.device:
            raise ContractError(
                "topk_ids and topk_weights are on different devices",
                got=f"{ids.device} and {weights.device}",
                expected="one device",
            )
        if not is_size(E) or not 1 <= E <= MOST:
            raise ContractError("E is no number of experts", got=shown(E), expected=f"an integer, 1 .. {MOST}")
        E = wide(E)
        if distinct is not True and distinct is not False:
            raise ContractError("distinct is no bool", got=shown(distinct), expected="True or False")
        if placement is not None:
            check_placement(placement)
            if placement.E != E:
                raise ContractError("placement is for another number of experts", got=placement.E, expected=E)
        if num_tokens is not None:
            check_tensors(num_tokens=num_tokens)
            # sparse ones cannot be reshaped
            if (
                num_tokens.layout is not torch.strided
                or num_tokens.numel() != 1
                or num_tokens.dtype != torch.int32
                or num_tokens.device != ids.device
            ):
                raise ContractError(
                    "num_tokens has the wrong form",
                    got=f"{tuple(num_tokens.shape)} {num_tokens.dtype} on {num_tokens.device}",
                    expected=f"[] int32 on {ids.device}",
                )
            num_tokens = num_tokens.reshape(())
        if check:
            ids = dense(ids)
            if ids.is_meta:
                raise ContractError("meta ids have no values to check", remedy="leave out check=True")
            check_ids(ids[: _true_tokens(num_tokens, len(ids))], E)
        weights = weights.float()
        if torch.compiler.is_dynamo_compiling():  # the op makes a routing of its own when it runs
            return cls(ids.contiguous(), weights.contiguous(), E, placement, num_tokens, distinct)
        num_tokens = None if num_tokens is None else dense(num_tokens)
        return cls(dense(ids), dense(weights), E, placement, num_tokens, distinct)

    def promised(self, ids: str) -> Routing:
        """This routing with what the caller promises of its ids: "any" (nothing) or "distinct".

        Raises:
            ContractError: ids is neither.
        """
        if is_distinct(ids) == self.distinct:
            return self
        return Routing(self.topk_ids, self.topk_weights, self.E, self.placement, self.num_tokens, not self.distinct)

    @property
    def T(self) -> int:
        """Tokens of the call, those past num_tokens included."""
        return self.topk_ids.shape[0]

    @property
    def K(self) -> int:
        """Experts a token."""
        return self.topk_ids.shape[1]

    def true_tokens(self) -> int:
        """Tokens that count, in 0 .. T. Waits for the device where num_tokens is set."""
        return _true_tokens(self.num_tokens, self.T)

    @cached_property
    def absent(self) -> Tensor:
        """[T, K] bool: the pairs that name no expert."""
        absent = (self.topk_ids < 0) | (self.topk_ids >= self.E)
        if self.num_tokens is not None:
            rows = torch.arange(self.T, device=self.topk_ids.device, dtype=torch.int32)
            absent |= (rows >= self.num_tokens)[:, None]
        return absent

    def ids_or(self, none: int) -> Tensor:
        """[T, K] int32 with `none` in place of every id that names no expert."""
        # where() would make a tensor of its number: an operation more
        return self.topk_ids.int().masked_fill(self.absent, none)

    @cached_property
    def ids(self) -> Tensor:
        """[T, K] int32 with every id that names no expert replaced by -1."""
        return self.ids_or(-1)

    @cached_property
    def _merged(self) -> tuple[Tensor, Tensor]:
        """(ids, weights) [T, K]: later duplicates of a (t, e) get id -1, their weights summed into the first."""
        ids = self.ids
        same = ids[:, :, None] == ids[:, None, :]
        weights = torch.zeros_like(self.topk_weights)
        for k in range(self.K):  # ascending k, in fp32; where() keeps another pair's NaN out
            weights = torch.where(same[:, :, k], weights + self.topk_weights[:, k, None], weights)
        place = torch.arange(self.K, dtype=torch.int32, device=ids.device)
        return ids.masked_fill((same & (place[:, None] > place)).any(-1), -1), weights

    def _sort(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Stable sort of pairs by expert: order [T*K] int64, counts [E] int64, sorted ids [T*K] (E = none)."""
        keys = torch.where(ids < 0, self.E, ids).flatten()
        keys, order = torch.sort(keys, stable=True)
        bounds = torch.searchsorted(keys, torch.arange(self.E + 1, device=keys.device, dtype=keys.dtype))
        return order, bounds.diff(), keys

    @cached_property
    def sorted(self) -> SortedView:
        """All pairs by expert, duplicates kept; see SortedView. Made on the ids' device, without a host sync."""
        order, counts, _ = self._sort(self.ids)
        offsets = _starts(counts)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        inverse = torch.where(self.ids < 0, -1, inverse.view(self.T, self.K))
        return SortedView(offsets.int(), order.int(), inverse.int())

    @cached_property
    def padded(self) -> PaddedView:
        """Tokens of each expert, duplicates merged; see PaddedView. Made on the ids' device, without a host sync."""
        ids, weights = self._merged
        order, counts, keys = self._sort(ids)
        # one spare column takes the pairs that name no expert
        rank = _rank(counts, keys)
        slot = torch.where(keys < self.E, keys.long() * self.T + rank, self.E * self.T)
        tokens = torch.full((self.E * self.T + 1,), -1, dtype=torch.int32, device=ids.device)
        token_weights = torch.zeros(self.E * self.T + 1, dtype=torch.float32, device=ids.device)
        tokens[slot] = (order // self.K).int()
        token_weights[slot] = weights.flatten()[order]
        shape = (self.E, self.T)
        return PaddedView(counts.int(), tokens[:-1].view(shape), token_weights[:-1].view(shape))

    def step_layout(self, row_align: int = 1) -> StepLayout:
        """Rows of the step tensors, [capacity, ...]: see StepLayout. Kept for later calls.

        Args:
            row_align: 1, or 32 for tiled machines.

        Raises:
            ContractError: as check_row_align.
        """
        row_align = check_row_align(row_align)
        if row_align not in self._cache:
            ids, weights = self._merged
            order, counts, keys = self._sort(ids)
            capacity = step_capacity(self.T, self.K, self.E, row_align)
            row_start = _starts((counts + row_align - 1) // row_align * row_align)
            rank = _rank(counts, keys)
            row = torch.where(keys < self.E, row_start[keys] + rank, capacity)
            row_tokens = torch.full((capacity + 1,), -1, dtype=torch.int32, device=ids.device)
            row_tokens[row] = (order // self.K).int()
            inverse = torch.empty_like(order)
            inverse[order] = row
            inverse = torch.where(ids < 0, -1, inverse.view(self.T, self.K)).int()
            self._cache[row_align] = StepLayout(row_align, capacity, row_start.int(), row_tokens[:-1], inverse, weights)
        return self._cache[row_align]

    @property
    def device_expert_mapping(self) -> Tensor:
        """[D, E/D] int32 on the CPU: global expert index of each local expert (D = 1 without a placement)."""
        return (self.placement or Placement.uniform(self.E)).device_expert_mapping

    def for_device(self, d: int | None = None) -> Routing:
        """This routing as device d (default: placement.rank) sees it: local expert ids, E/D experts, -1 elsewhere.

        Raises:
            ContractError: no such device; or D > 1, no rank and no d.
        """
        placement = self.placement or Placement.uniform(self.E)
        table = placement.local_table(d, self.topk_ids.device)
        ids = table.index_select(0, self.ids_or(self.E).flatten()).view(self.T, self.K)
        return Routing(ids, self.topk_weights, placement.E_local, None, self.num_tokens)


def _true_tokens(num_tokens: Tensor | None, T: int) -> int:
    return T if num_tokens is None else min(max(int(num_tokens), 0), T)


def _starts(counts: Tensor) -> Tensor:
    """[n+1] int64: 0 and the running sums of counts [n]."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _rank(counts: Tensor, keys: Tensor) -> Tensor:
    """[n] int64: the place of each sorted pair among those of its expert; keys [n] sorted, counts per expert."""
    return torch.arange(len(keys), device=keys.device) - _starts(counts)[keys]
