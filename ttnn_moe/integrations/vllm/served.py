"""The experts of one vLLM layer, prepared, and prepared again where vLLM has put other weights or another map."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from ... import api, registry
from ...backend import Backend, CompilesAhead, Prepared, SharesScratch
from ...contract import Experts, Placement, Problem
from ...errors import ContractError
from . import setting

MOST_TOKENS = 16_384
"""Tokens of one call. More run in several calls, so that scratch is bounded."""

Make = Callable[..., Experts]
"""The weights of a layer, in the order in which it holds them, as Experts; reads no values."""


@dataclass(frozen=True, eq=False)
class VllmPlacement(Placement):
    """Where experts live, with vLLM's own map on the device: what vLLM saves and restores, kernels read.

    Attributes:
        expert_map: [E] int32 on the device: the index of each expert on this rank, or -1.
    """

    expert_map: Tensor | None = None

    @classmethod
    def of(cls, expert_map: Tensor, E_local: int) -> VllmPlacement | None:
        """None: the ranks hold different numbers of experts. Reads the map: a host synchronisation."""
        local = expert_map.to("cpu", torch.int32)
        E = len(local)
        if E % E_local:
            return None
        here = [int((local == index).nonzero()) for index in range(E_local)]
        others = [e for e in range(E) if int(local[e]) < 0]
        rows = torch.tensor([*here, *others], dtype=torch.int32).reshape(E // E_local, E_local)
        return cls(rows, 0, expert_map.to(torch.int32))

    def local_of(self, d: int | None = None) -> Tensor:
        assert self.expert_map is not None and d in (None, self.rank)
        return self.expert_map


class ServedLayer:
    """Calls of one layer, of any number of tokens.

    Args:
        make: see Make.
        E: experts that ids name, of all ranks. K: experts per token.
        tokens: the most that vLLM schedules in one call.
        dtype: of hidden.
    """

    def __init__(self, make: Make, E: int, K: int, tokens: int, dtype: torch.dtype):
        self._make = make
        self.E, self.K, self.T, self.dtype = E, K, max(1, min(tokens, MOST_TOKENS)), dtype
        self._known: tuple[Any, ...] | None = None
        self._prepared: Prepared | None = None
        self._map: Tensor | None = None

    def prepare(self, weights: tuple[Tensor, ...], expert_map: Tensor | None) -> Prepared:
        """Scratch and kernels for these weights.

        Raises:
            ContractError, BackendUnavailable: nothing can run them. torch.OutOfMemoryError: no room for scratch.
        """
        experts = self._make(*weights)
        placement = None if expert_map is None else VllmPlacement.of(expert_map, experts.E)
        self._map = None if placement is not None else expert_map
        if expert_map is None and self.E != experts.E:
            raise ContractError("the layer holds some of the experts, without a map", got=experts.E, expected=self.E)
        full, backend = self._chosen(experts, placement)
        with torch.inference_mode(False), torch.no_grad():
            # vLLM runs one step at a time, on one stream or on the one that it captures on
            if isinstance(backend, SharesScratch):
                prepared = backend.prepare_in_turn(full, experts, placement)
            else:
                prepared = backend.prepare(full, experts, placement)
        self._known, self._prepared = _known(weights, expert_map), prepared
        return prepared

    def compile_ahead(self, weights: tuple[Tensor, ...]) -> None:
        """Compile kernels in a thread of their own; for layers whose weights, not yet read, are of all experts.

        Raises:
            ContractError, BackendUnavailable: as prepare.
        """
        full, backend = self._chosen(self._make(*weights), None)
        if isinstance(backend, CompilesAhead):
            Thread(target=_quietly, args=(backend.compile_ahead, full, weights[0].device), daemon=True).start()

    def _chosen(self, experts: Experts, placement: Placement | None) -> tuple[Problem, Backend]:
        problem = Problem.of(self.T, self.K, experts, self.dtype)
        E = experts.E if placement is None else self.E
        full = api.described(Problem(self.T, E, self.K, problem.H, problem.I, self.dtype), experts, placement)
        return full, registry.choose(full, registry.AUTO if setting.names_backend() else "cuda")

    def __call__(
        self,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        weights: tuple[Tensor, ...],
        expert_map: Tensor | None,
        out: Tensor | None = None,
        accumulate: bool = False,
        num_tokens: Tensor | None = None,
    ) -> Tensor:
        """x [T, H], topk_weights and topk_ids [T, K] -> out [T, H]; ids name experts of all ranks, -1 none.

        Args:
            accumulate: add to out. num_tokens: [] int32, as of a prepared layer; a hint, for the first self.T tokens.
        """
        layer = self._prepared
        if layer is None or self._known != _known(weights, expert_map):
            layer = self.prepare(weights, expert_map)
        if self._map is not None:
            topk_ids = local_ids(topk_ids, self._map)
        T = len(x)
        if T <= self.T:
            return layer(x, topk_ids, topk_weights, out=out, accumulate=accumulate, num_tokens=num_tokens)
        if out is None:
            out = torch.empty_like(x)
        for first in range(0, T, self.T):
            rows = slice(first, first + self.T)
            layer(x[rows], topk_ids[rows], topk_weights[rows], out=out[rows], accumulate=accumulate)
        return out


def _quietly(work: Callable[..., None], *args: Any) -> None:
    """What fails here fails again where it is needed, and is said there."""
    with suppress(Exception):
        work(*args)


def _known(weights: tuple[Tensor, ...], expert_map: Tensor | None) -> tuple[Any, ...]:
    """What a prepared layer depends on. Values may change where they lie: kernels read them at each call."""
    map_at = None if expert_map is None else expert_map.data_ptr()
    return (map_at, *((weight.data_ptr(), weight.shape, weight.dtype) for weight in weights))


def local_ids(topk_ids: Tensor, expert_map: Tensor) -> Tensor:
    """Ids of this rank's experts, -1 for those of others; where ranks hold different numbers of experts."""
    known = (topk_ids >= 0) & (topk_ids < len(expert_map))
    return torch.where(known, expert_map[topk_ids.clamp(0, len(expert_map) - 1).long()].to(topk_ids.dtype), -1)
