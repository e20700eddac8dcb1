"""A program as data. run() takes these classes, the planner's own, or any with the same attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...errors import ContractError
from .chip import ChipModel

Core = tuple[int, int]


@dataclass(frozen=True)
class Placeholder:
    """A value that is known only when a program runs.

    Args:
        kind: "address" of a tensor, "accessor" (compile-time arguments of its TensorAccessor), "scalar", "noc_x" of
            grid column `index`, "noc_y" of grid row `index`.
        name: of the tensor or the scalar.
        index: column or row.
    """

    kind: str
    name: str = ""
    index: int = 0


@dataclass
class ComputeConfig:
    """Settings of a compute kernel, as ttnn.ComputeConfigDescriptor."""

    math_fidelity: str = "HiFi4"
    fp32_dest_acc: bool = False
    approx: bool = False
    dst_full_sync: bool = False
    unpack_to_dest_fp32: Sequence[int] = ()


@dataclass
class Kernel:
    """One kernel on some cores: source (below the folder of kernels), role (reader, writer, compute), arguments."""

    source: str
    role: str
    cores: Sequence[Core]
    compile_args: Sequence[Any] = ()
    named_compile_args: Mapping[str, int] = field(default_factory=dict)
    defines: Mapping[str, str] = field(default_factory=dict)
    common_args: Sequence[Any] = ()
    args: Mapping[Core, Sequence[Any]] = field(default_factory=dict)
    config: ComputeConfig = field(default_factory=ComputeConfig)


@dataclass
class CircularBuffer:
    """A circular buffer, at one L1 address on all its cores; `address` (an L1 offset) only to force one."""

    index: int
    total_size: int
    page_size: int
    format: str
    cores: Sequence[Core]
    address: int | None = None


@dataclass
class Semaphore:
    """A semaphore on some cores."""

    id: int
    initial: int
    cores: Sequence[Core]


@dataclass
class Program:
    """Kernels, circular buffers and semaphores of one launch."""

    kernels: Sequence[Kernel]
    buffers: Sequence[CircularBuffer] = ()
    semaphores: Sequence[Semaphore] = ()


class HasAddress(Protocol):
    """A tensor as a program needs it; dram.Tensor is one."""

    def buffer_address(self) -> int: ...
    def accessor_args(self) -> list[int]: ...


class Values:
    """The placeholders of one call, resolved."""

    def __init__(self, tensors: Mapping[str, HasAddress], scalars: Mapping[str, int], chip: ChipModel):
        self._tensors, self._scalars, self._chip = tensors, scalars, chip

    def numbers(self, args: Sequence[Any]) -> list[int]:
        """Every argument as a 32-bit number; an accessor is several."""
        out: list[int] = []
        for arg in args:
            if isinstance(arg, int):
                out.append(arg & 0xFFFFFFFF)
            elif arg.kind == "accessor":
                out.extend(self._tensor(arg.name).accessor_args())
            elif arg.kind == "address":
                out.append(self._tensor(arg.name).buffer_address())
            elif arg.kind == "scalar":
                out.append(self._scalars[arg.name] & 0xFFFFFFFF)
            elif arg.kind in ("noc_x", "noc_y"):
                out.append((self._chip.noc_x if arg.kind == "noc_x" else self._chip.noc_y)[arg.index])
            else:
                raise ContractError(
                    "unknown placeholder in a program",
                    got=arg.kind,
                    expected="accessor, address, scalar, noc_x or noc_y",
                )
        return out

    def _tensor(self, name: str) -> HasAddress:
        if name not in self._tensors:
            raise ContractError(
                "a program names a tensor that the call lacks", got=name, expected=sorted(self._tensors)
            )
        return self._tensors[name]
