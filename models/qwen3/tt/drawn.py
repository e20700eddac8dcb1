"""What becomes of a step's logits: the largest of each row, or candidates that the host draws from.

Each chip finds the largest of its part of the vocabulary, and adds up what a draw from all of it needs. The host joins
the chips' candidates. It draws by itself, since a request's tokens depend on its seed, not on its place in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ttnn_moe.sizes import ceil_div, power_of_2
from ttnn_moe.tenstorrent import Device, tensors
from ttnn_moe.tenstorrent.all_reduce import partial_dtype
from ttnn_moe.tenstorrent.runtime import library

from ..runtime.candidates import TEMPERATURES, Candidates, needs_mass
from ..runtime.sampling import Sampling
from .layers import Logits, Network
from .weights import NEVER, TILE

Made = TypeVar("Made")

CANDIDATES = 32
"""Logits of each row that a chip sends to the host, or more: as many of each chunk."""
MOST_COLUMNS = 1 << 15
"""ttnn.topk runs on several cores where a row's length is a power of two up to this one."""


class Tail(Enum):
    """What a step makes of its logits: the largest; also candidates; also the mass, for draws from all V."""

    GREEDY, CANDIDATES, MASS = range(3)


@dataclass(frozen=True)
class Asked(Generic[Made]):
    """What a step's logits become on the host.

    Attributes:
        fetch: (logits, n, inverses of their first n rows) -> of those rows.
        inverses: of Tail.MASS, 1 / temperature of each row of the step, in order.
    """

    fetch: Callable[[Logits, int, Sequence[float]], Made]
    tail: Tail = Tail.GREEDY
    inverses: Iterator[float] = field(default_factory=lambda: iter(()))

    def take(self, n: int, of: int) -> list[float]:
        """The inverses of the next n rows, of a step that pads them to `of` by repeating the first; or none."""
        own = [*islice(self.inverses, n)]
        return own + own[:1] * (of - n)


def tail_of(samplings: Sequence[Sampling]) -> Tail:
    """What a step has to make of its logits for these rows."""
    return Tail.MASS if any(map(needs_mass, samplings)) else Tail.CANDIDATES


def inverses_of(samplings: Sequence[Sampling]) -> Iterator[float]:
    """1 / temperature, where a chip adds exponentials up at it; greedy rows have any."""
    least, most = TEMPERATURES
    return (1 / min(max(one.temperature, least), most) for one in samplings)


def inverse_rows(inverses: Sequence[float], device: Device) -> Any:
    """inverses as ttnn [1, 1, R, 1] tiles in the dtype of sums."""
    rows = torch.tensor(inverses, dtype=torch.float32).view(1, 1, -1, 1)
    return tensors.replicate(rows, device, "TILE", partial_dtype(device))


def chunks_of(V: int) -> tuple[int, int]:
    """How many rows topk makes of a row of V logits, and their length, a power of two."""
    chunks = ceil_div(V, MOST_COLUMNS)
    return chunks, max(2 * TILE, power_of_2(ceil_div(V, chunks)))


def with_candidates(made: Logits, inverse: Any, network: Network) -> Logits:
    """These logits with candidates, and with the mass unless inverse is None.

    Args:
        inverse: of each row, as inverse_rows gives it.
    """
    ttnn = library()

    x = made.parts
    R, V = int(x.shape[2]), int(x.shape[3])
    chunks, length = chunks_of(V)
    wide = x if V == chunks * length else ttnn.pad(x, [1, 1, R, chunks * length], [0, 0, 0, 0], NEVER)
    if chunks > 1:
        wide = ttnn.reshape(wide, (1, 1, R * chunks, length))
    values, places = ttnn.topk(wide, CANDIDATES, dim=-1)
    if inverse is None:
        return replace(made, values=values, places=places)
    largest = ttnn.max(x, dim=-1, keepdim=True)
    if inverse.dtype != x.dtype:
        x, largest = (ttnn.typecast(one, inverse.dtype) for one in (x, largest))
    powers = ttnn.exp(ttnn.multiply(ttnn.subtract(x, largest), inverse))
    mass = ttnn.sum(powers, dim=-1, compute_kernel_config=network.exact)
    return replace(made, values=values, places=places, mass=mass)


class Fetcher:
    """Brings logits of a vocabulary of V, shared by the chips, to the host."""

    def __init__(self, device: Device, V: int):
        self.device, self.V = device, V

    def whole(self, logits: Logits, n: int, _: Sequence[float]) -> Tensor:
        """All logits, [n, V]."""
        parts = tensors.parts_to_torch(logits.parts, self.device)
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts], -1)[:n, : self.V]

    def first_largest(self, logits: Logits, n: int, _: Sequence[float]) -> Tensor:
        """The first of the largest, [n] int64."""
        return self._first(logits, self._flat(logits.largest, n).float(), n)

    def candidates(self, logits: Logits, n: int, inverses: Sequence[float]) -> Candidates:
        columns, D = int(logits.parts.shape[-1]), self.device.D
        chunks, length = chunks_of(columns)
        values, places = (self._flat(one, n * chunks * CANDIDATES) for one in (logits.values, logits.places))
        at = places.long().view(D, n, chunks, -1) + torch.arange(chunks)[:, None] * length
        tokens = at + torch.arange(D).view(D, 1, 1, 1) * columns
        # padding, of chunks and of the vocabulary
        found = values.float().view_as(at).masked_fill((at >= columns) | (tokens >= self.V), -torch.inf)
        found, tokens = (one.transpose(0, 1).reshape(n, -1) for one in (found, tokens))
        # of equal logits the first token first
        tokens, order = tokens.sort(1)
        found, again = found.gather(1, order).sort(dim=1, descending=True, stable=True)
        largest = self._flat(logits.largest, n).float()
        mass = torch.full((n,), torch.nan, dtype=torch.float64)
        if logits.mass is not None:
            # each chip's is of its own largest
            below = (largest - largest.amax(0)).double() * torch.tensor(inverses[:n], dtype=torch.float64)
            mass = (self._flat(logits.mass, n).double() * below.exp()).sum(0)
        first = self._first(logits, largest, n)
        return Candidates(found, tokens.gather(1, again), first, mass, cache(lambda: self.whole(logits, n, ())))

    def _first(self, logits: Logits, largest: Tensor, n: int) -> Tensor:
        chip = largest.argmax(0)
        return chip * int(logits.parts.shape[-1]) + self._flat(logits.at, n).long().gather(0, chip[None])[0]

    def _flat(self, tensor: Any, n: int) -> Tensor:
        """Each chip's first n values, [D, n]."""
        return torch.stack([part.flatten()[:n] for part in tensors.parts_to_torch(tensor, self.device)])
