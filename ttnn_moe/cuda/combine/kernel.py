"""What combine and dispatch of ranks share: the plan of their rings, and launches for one or more ranks of a GPU."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...arguments import seconds
from ...errors import ContractError
from ...placement import Placement
from ..device import gpu
from ..jit import load
from ..jit.spec import Spec

STATUS, COUNTER, ALIGN = 256, 72, 128
"""Bytes: status words; the counters of a ring (tail and head, 32 each, got and sent, 4 each); what slots align to."""
MOST_RANKS, MOST_HERE = 32, 8
SHARED_MEMORY = (227 << 10) - 3072
"""Bytes of dynamic shared memory that a block of compute capability 9.0 leaves to bulk copies."""


class Stopped(NamedTuple):
    """What a dead group's status says: this rank stopped, in this role of this call; who reported it."""

    peer: int
    role: int
    call: int
    reporter: int


@dataclass(frozen=True)
class RingPlan(ABC):
    """What all ranks of a group agree on.

    Attributes:
        inter, intra: nodes, and ranks of a node; up to 32 ranks.
        H: a multiple of 8. T: the most tokens of a rank. dtype: of tokens.
        sms: multiprocessors that a rank takes, one block each. slots: of a ring, a power of two.
        channels: of a block, one warp of each role each; 0: as many as fit.
        bulk: rows travel by bulk copies through shared memory (compute capability 9.0), not by 16-byte copies of each
            thread.
        overlap: launches start while their predecessor ends (programmatic dependent launch, 9.0 and newer), and are
            not cooperative: nothing else may hold the GPU's multiprocessors.
        send_rows: rows of a sender in shared memory, 1 to 4.
        stalls, stall_role: for tests only, a rank that stops, in this role (hierarchical.rings.Role).
    """

    inter: int
    intra: int
    H: int
    T: int
    dtype: torch.dtype = torch.bfloat16
    sms: int = 24
    slots: int = 4
    channels: int = 0
    bulk: bool = False
    overlap: bool = False
    send_rows: int = 1
    stalls: int = -1
    stall_role: int = 1

    kernel: ClassVar[str]

    def __post_init__(self) -> None:
        if not (1 <= self.inter <= 8 and 1 <= self.intra <= 8 and self.R <= MOST_RANKS):
            raise ContractError(
                "unsupported topology", got=f"{self.inter} x {self.intra}", expected="1 .. 8 each, up to 32 ranks"
            )
        if self.H < 8 or self.H % 8 or self.T < 1:
            raise ContractError(
                "sizes do not fit vector copies",
                got=f"H={self.H}, T={self.T}",
                expected="H a positive multiple of 8, and a token",
            )
        if self.slots < 1 or self.slots & (self.slots - 1):
            raise ContractError("slots of a ring are not a power of two", got=self.slots, expected="1, 2, 4, ...")
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise ContractError("unsupported dtype", got=self.dtype, expected="bfloat16 or float16")
        if not 1 <= self.send_rows <= 4:
            raise ContractError("rows of a sender", got=self.send_rows, expected="1 to 4")
        if self.shared_memory > SHARED_MEMORY:
            raise ContractError(
                "a block's rows do not fit its shared memory",
                got=f"{self.shared_memory} bytes",
                expected=f"up to {SHARED_MEMORY} bytes",
                remedy="bulk=False, fewer channels, or a smaller T",
            )

    @property
    def R(self) -> int:
        """Ranks."""
        return self.inter * self.intra

    @property
    @abstractmethod
    def roles(self) -> int:
        """Warps of a channel."""

    @property
    @abstractmethod
    def channel_memory(self) -> int:
        """Bytes of shared memory of a channel, with bulk copies."""

    @property
    def fixed_memory(self) -> int:
        """Bytes of dynamic shared memory of a block, beside its channels."""
        return 0

    @property
    @abstractmethod
    def slot(self) -> int:
        """Bytes."""

    @property
    def W(self) -> int:
        """Channels of a block: as asked, else as many as its warps and its shared memory allow."""
        most = {1: 15, 2: 7, 3: 5}[self.roles]
        if self.bulk:
            most = max(1, min(most, (SHARED_MEMORY - self.fixed_memory) // self.channel_memory))
        return self.channels or most

    @property
    def shared_memory(self) -> int:
        return self.fixed_memory + (self.W * self.channel_memory if self.bulk else 0)

    @property
    def threads(self) -> int:
        """Of a block: a warp of each role a channel, and the coordinator."""
        return (self.roles * self.W + 1) * 32

    @property
    def heap(self) -> int:
        """Bytes of a rank's heap, which starts as zeros and aligns to 128 bytes."""
        rings = (self.intra + 1) * self.inter * self.sms * self.W
        return aligned(aligned(STATUS + rings * COUNTER) + rings * self.slots * self.slot)

    def spec(self, arch: str) -> Spec:
        return Spec.of(f"combine/{self.kernel}", arch, **self.defines())

    def defines(self) -> dict[str, object]:
        found: dict[str, object] = {"R_INTER": self.inter, "R_INTRA": self.intra, "CHANNELS": self.W}
        found["FP16"] = self.dtype is torch.float16
        if self.bulk:
            found |= {"BULK": True, "SEND_ROWS": self.send_rows}
        if self.stalls >= 0:
            found |= {"STALLS": self.stalls, "STALL_ROLE": self.stall_role}
        return found


def check_topology(plan: RingPlan, placement: Placement) -> None:
    """Raise ContractError unless the placement has as many ranks as the plan."""
    if placement.D != plan.R:
        raise ContractError("the placement is not that of this topology", got=f"D={placement.D}", expected=plan.R)


def aligned(count: int) -> int:
    """count, rounded up to a multiple of ALIGN; bytes."""
    return -(-count // ALIGN) * ALIGN


P = TypeVar("P", bound=RingPlan)


class RankKernel(Generic[P]):
    """Ranks of one group on one GPU; one launch serves all of them. A subclass binds the tensors of a rank.

    Args:
        plan: the same for all ranks. device: index of the GPU.
        ranks: those that run here. heaps: of every rank, zeroed before the first launch of any rank: addresses that
            this GPU can read and write.
        timeout: seconds of a wait without progress.

    Raises:
        ContractError: the blocks of all ranks here do not fit the GPU at one time.
    """

    local: ClassVar[type[ctypes.Structure]]
    """The kernel's struct of one rank."""

    def __init__(self, plan: P, device: int, ranks: Sequence[int], heaps: Sequence[int], timeout: float = 10.0):
        found = gpu(device)
        self.plan, self.device, self.ranks = plan, device, tuple(ranks)
        spec = plan.spec(f"{found.sm}a" if found.capability[0] == 9 else found.sm)
        fits = load.resident_blocks(spec, device, plan.threads, plan.shared_memory)
        if len(self.ranks) * plan.sms > fits or len(self.ranks) > MOST_HERE:
            raise ContractError(
                "the ranks' blocks must run at the same time",
                got=f"{len(self.ranks)} ranks of {plan.sms} blocks",
                expected=f"{fits} blocks, {MOST_HERE} ranks",
                remedy="fewer multiprocessors a rank",
            )
        self._kernel = load.kernel(spec, device, plan.shared_memory)
        self._call = _call_of(self.local)(
            timeout=int(seconds("timeout", timeout) * 1e9), H=plan.H, T_max=plan.T, slots=plan.slots
        )
        self._call.heaps[: plan.R] = list(heaps)
        for n, rank in enumerate(self.ranks):
            self._call.local[n].rank = rank
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._call))
        self._config = _config(plan, len(self.ranks))

    def launch(self) -> None:
        """On torch's current stream of the GPU. All ranks of the group launch."""
        from cuda.bindings import driver

        self._config.hStream = driver.CUstream(torch._C._cuda_getCurrentRawStream(self.device))
        function = driver.CUfunction(int(self._kernel.handle))
        load._check(driver.cuLaunchKernelEx(self._config, function, ctypes.addressof(self._arguments), 0))


def _call_of(local: type[ctypes.Structure]) -> Any:
    class Call(ctypes.Structure):
        _fields_ = (
            ("heaps", ctypes.c_uint64 * MOST_RANKS),
            ("local", local * MOST_HERE),
            ("timeout", ctypes.c_uint64),
            *((name, ctypes.c_int) for name in ("H", "T_max", "slots", "K", "E", "unused")),
        )

    return Call


def _config(plan: RingPlan, ranks: int) -> Any:
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = plan.sms, ranks, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = plan.threads, 1, 1
    config.sharedMemBytes = plan.shared_memory
    attribute = driver.CUlaunchAttribute()
    if plan.overlap:
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
    else:
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
    config.attrs, config.numAttrs = [attribute], 1
    return config


def stopped(heap: Tensor) -> Stopped | None:
    """What a rank's heap (uint8, on its GPU) says; None while the group is alive. Waits for the GPU."""
    words = heap[:32].view(torch.int32).tolist()
    return Stopped(*words[4:8]) if words[3] else None
