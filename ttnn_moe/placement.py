"""Where experts live: device_expert_mapping, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from .arguments import as_integer, is_size
from .errors import ContractError
from .memory import check_tensors
from .visible import shown

MOST = 2**31 - 1
"""Experts of a placement, which int32 numbers."""


@dataclass(frozen=True, eq=False, repr=False)
class Placement:
    """A partition of E experts over D devices, E/D each, in any order.

    Attributes:
        device_expert_mapping: [D, E/D] int32 on the CPU; row d holds the global expert index of each local
            expert of device d.
        rank: the device this process is, or None where one process drives the whole mesh.

    Raises:
        ContractError: not a partition of 0 .. E-1, or rank outside 0 .. D-1.
    """

    device_expert_mapping: Tensor
    rank: int | None = None
    _tables: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        mapping = self.device_expert_mapping
        if not isinstance(mapping, Tensor):
            raise ContractError(
                "device_expert_mapping is no tensor",
                got=shown(mapping),
                expected="[D, E/D] int32 on the CPU",
                remedy="Placement.from_mapping(rows, rank)",
            )
        check_tensors(device_expert_mapping=mapping)
        plain = mapping.dtype == torch.int32 and mapping.device.type == "cpu" and mapping.layout is torch.strided
        if not plain or mapping.dim() != 2 or mapping.numel() == 0:
            raise ContractError(
                "device_expert_mapping has the wrong form",
                got=f"shape {tuple(mapping.shape)}, {mapping.dtype}, on {mapping.device}",
                expected="[D, E/D] int32 on the CPU",
            )
        if not torch.equal(mapping.flatten().sort().values, torch.arange(self.E, dtype=torch.int32, device="cpu")):
            raise _no_partition(mapping.tolist(), self.E)
        if self.rank is not None and not self._has(self.rank):
            raise ContractError(
                "rank is not a device of this placement", got=shown(self.rank), expected=f"0 .. {self.D - 1}"
            )

    @classmethod
    def uniform(cls, E: int, D: int = 1, rank: int | None = None) -> Placement:
        """Device d holds experts d*E/D .. (d+1)*E/D - 1.

        Raises:
            ContractError: D does not divide E, or E, D or rank is out of range.
        """
        check_even(E, D)
        if E > MOST:
            raise ContractError("E is out of range", got=shown(E), expected=f"at most {MOST}, which int32 numbers")
        return cls(torch.arange(E, dtype=torch.int32, device="cpu").reshape(D, E // D), rank)

    @classmethod
    def from_mapping(cls, mapping: Sequence[Sequence[int]] | Tensor, rank: int | None = None) -> Placement:
        """From D rows of E/D global expert indices each; rows must be equally long.

        mapping: lists, arrays, or one tensor [D, E/D] of any integer dtype. Bools and floats are no indices.

        Raises:
            ContractError: no such rows, or not a partition of 0 .. E-1.
        """
        rows = _rows_of(mapping)
        if len({len(row) for row in rows}) != 1:
            raise ContractError(
                "devices hold different numbers of experts",
                got=[len(row) for row in rows],
                expected="E/D experts on each of D devices",
            )
        E = sum(map(len, rows))
        if not all(0 <= e < E for row in rows for e in row):  # int32 would wrap around
            raise _no_partition(rows, E)
        return cls(torch.tensor(rows, dtype=torch.int32, device="cpu"), rank)

    def __repr__(self) -> str:
        return f"Placement(E={self.E}, D={self.D}" + ("" if self.rank is None else f", rank={self.rank}") + ")"

    @property
    def D(self) -> int:
        """Devices that share the experts."""
        return self.device_expert_mapping.shape[0]

    @property
    def E(self) -> int:
        """Experts of all devices."""
        return self.device_expert_mapping.numel()

    @property
    def E_local(self) -> int:
        """Experts of each device: E / D."""
        return self.device_expert_mapping.shape[1]

    @cached_property
    def device_of(self) -> Tensor:
        """[E] int32: the device that holds each global expert."""
        out = torch.empty(self.E, dtype=torch.int32, device="cpu")
        devices = torch.arange(self.D, dtype=torch.int32, device="cpu")[:, None].expand(self.D, self.E_local)
        out[self.device_expert_mapping.long()] = devices
        return out

    def local_of(self, d: int | None = None) -> Tensor:
        """[E] int32: index of each global expert among device d's (default: rank's); -1 = not there."""
        d = self._device(d)
        out = torch.full((self.E,), -1, dtype=torch.int32, device="cpu")
        out[self.device_expert_mapping[d].long()] = torch.arange(self.E_local, dtype=torch.int32, device="cpu")
        return out

    def local_table(self, d: int | None, device: torch.device) -> Tensor:
        """[E+1] int32 on a torch device: `local_of(d)`, and -1 for an id of E. Copied there once, then kept."""
        key = self._device(d), device
        found = self._tables.get(key)
        if found is None:
            with torch.inference_mode(False):
                local = self.local_of(d)
                found = self._tables[key] = torch.cat([local, local.new_full((1,), -1)]).to(device)
        return found

    def _device(self, d: int | None) -> int:
        d = self.rank if d is None else d
        if d is None and self.D == 1:
            d = 0
        if d is None or not self._has(d):
            raise ContractError("no such device in this placement", got=shown(d), expected=f"0 .. {self.D - 1}")
        return d

    def _has(self, d: int) -> bool:
        return is_size(d) and 0 <= d < self.D


def _rows_of(mapping: object) -> list[list[int]]:
    """Integers in rows, as they were given. Raises ContractError for anything else."""
    refused = ContractError("no mapping of experts", got=shown(mapping), expected="D rows of E/D expert indices")
    if isinstance(mapping, Tensor):
        check_tensors(mapping=mapping)
        if mapping.is_meta or mapping.layout is not torch.strided:
            raise refused
        mapping = mapping.tolist()
    try:
        rows = [[as_integer(e) for e in row] for row in mapping]  # type: ignore[attr-defined]
    except TypeError:
        raise refused from None
    if any(e is None for row in rows for e in row):
        raise refused
    return rows  # type: ignore[return-value]


def _no_partition(got: object, E: int) -> ContractError:
    return ContractError(
        "device_expert_mapping is not a partition of the experts",
        got=got,
        expected=f"each of 0 .. {E - 1} exactly once",
    )


def check_placement(value: object) -> None:
    """Raise ContractError unless value is a Placement."""
    if not isinstance(value, Placement):
        raise ContractError("placement is no Placement", got=shown(value), expected="a ttnn_moe.Placement")


def check_even(E: int, D: int) -> None:
    """Raise ContractError unless D devices can hold the same number of E experts."""
    if not (is_size(E) and is_size(D)):
        raise ContractError("E and D are no integers", got=f"E={shown(E)}, D={shown(D)}", expected="E and D as int")
    if E < 1 or D < 1 or E % D:
        raise ContractError(
            "E experts cannot be shared evenly by D devices",
            got=f"E={E}, D={D}",
            expected="E >= 1 divisible by D >= 1",
            remedy="choose a D that divides E",
        )
