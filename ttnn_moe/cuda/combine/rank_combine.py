"""Launches of gpu_kernels/cuda/combine/rank_combine.cu: one or more ranks on one GPU, peers wherever they are."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import ContractError
from ...parallel.hierarchical.nodes import Nodes
from ..device import gpu
from ..jit import load
from ..jit.spec import Spec

STATUS, COUNTER, ALIGN = 256, 72, 128
"""Bytes: status words; the counters of a ring (tail and head, 32 each, got and sent, 4 each); what slots align to."""
MOST_RANKS, MOST_HERE = 32, 8
SHARED_MEMORY = (227 << 10) - 2048
"""Bytes of dynamic shared memory that a block of compute capability 9.0 leaves to bulk copies."""


class _Local(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_uint64) for name in ("x", "out", "bias_0", "bias_1", "masks", "rows", "T", "rank")),)


class _Call(ctypes.Structure):
    _fields_ = (
        ("heaps", ctypes.c_uint64 * MOST_RANKS),
        ("local", _Local * MOST_HERE),
        ("timeout", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("H", "T_max", "slots", "unused")),
    )


class Stopped(NamedTuple):
    """What a dead group's status says: this rank stopped, in this role of this call; who reported it."""

    peer: int
    role: int
    call: int
    reporter: int


@dataclass(frozen=True)
class Plan:
    """What all ranks of a group agree on.

    Attributes:
        inter, intra: nodes, and ranks of a node; up to 32 ranks.
        H: a multiple of 8. T: the most tokens of a rank. dtype: of x and out. wire: dtype, or float32.
        sms: multiprocessors that a rank takes, one block each. slots: of a ring, a power of two.
        channels: of a block, one warp of each role each; 0: as many as fit.
        bulk: rows travel by bulk copies through shared memory (compute capability 9.0 and newer, wire = dtype), not by
            16-byte copies of each thread.
        overlap: launches start while their predecessor ends (programmatic dependent launch, 9.0 and newer), and are
            not cooperative: nothing else may hold the GPU's multiprocessors.
        columns, stages: vectors of 8 that a lane adds at a time, chunks in flight of a channel; 0: what fits.
        send_rows: rows of a sender in shared memory, 1 or 2.
        stalls: for tests only, a rank that stops.
    """

    inter: int
    intra: int
    H: int
    T: int
    dtype: torch.dtype = torch.bfloat16
    wire: torch.dtype = torch.bfloat16
    sms: int = 24
    slots: int = 4
    channels: int = 0
    bulk: bool = False
    overlap: bool = False
    columns: int = 0
    stages: int = 0
    send_rows: int = 2
    stalls: int = -1

    def __post_init__(self) -> None:
        nodes = Nodes(self.inter, self.intra)
        if nodes.R > MOST_RANKS:
            raise ContractError("unsupported topology", got=f"{self.inter} x {self.intra}", expected="up to 32 ranks")
        if self.H < 8 or self.H % 8:
            raise ContractError("H does not fit vector copies", got=self.H, expected="a positive multiple of 8")
        if self.slots < 1 or self.slots & (self.slots - 1):
            raise ContractError("slots of a ring are not a power of two", got=self.slots, expected="1, 2, 4, ...")
        if self.dtype not in (torch.bfloat16, torch.float16) or self.wire not in (self.dtype, torch.float32):
            raise ContractError(
                "unsupported dtypes", got=f"{self.dtype}, wire {self.wire}", expected="bf16 or fp16; the same, or fp32"
            )

        if self.bulk and (self.wire is not self.dtype or self.shared_memory > SHARED_MEMORY):
            raise ContractError(
                "bulk copies do not serve this plan",
                got=f"wire {self.wire}, {self.shared_memory} bytes of shared memory",
                expected=f"the wire in {self.dtype}, up to {SHARED_MEMORY} bytes",
                remedy="bulk=False, or fewer channels",
            )

    @property
    def R(self) -> int:
        return self.inter * self.intra

    @property
    def roles(self) -> int:
        """Warps of a channel: a receiver; a sender and a forwarder where the topology has work for them."""
        return 1 + (self.intra > 1) + (self.inter > 1)

    @property
    def W(self) -> int:
        most = {1: 15, 2: 7, 3: 5}[self.roles]
        if self.bulk:
            most = max(1, min(most, SHARED_MEMORY // self._channel_memory))
        return self.channels or most

    @property
    def chunk(self) -> int:
        sources = self.intra + self.inter - 1
        return 2048 if sources <= 2 else 1024 if sources <= 4 else 512

    @property
    def chunks_in_flight(self) -> int:
        return self.stages or min(7, -(-self.H * 2 // self.chunk))

    @property
    def _channel_memory(self) -> int:
        """Bytes of shared memory of a channel: rows of its sender, the stages of its receiver and forwarder."""
        summed = self.intra + self.inter - 1 + (self.intra if self.inter > 1 else 0)
        return (self.send_rows * self.H * 2 if self.intra > 1 else 0) + self.chunks_in_flight * self.chunk * summed

    @property
    def shared_memory(self) -> int:
        return self.W * self._channel_memory if self.bulk else 0

    @property
    def threads(self) -> int:
        return (self.roles * self.W + 1) * 32

    @property
    def heap(self) -> int:
        """Bytes of a rank's heap, which starts as zeros."""
        rings = (self.intra + 1) * self.inter * self.sms * self.W
        slot = self.H * self.wire.itemsize
        return -(-(STATUS + rings * COUNTER) // ALIGN) * ALIGN + rings * self.slots * slot

    def spec(self, arch: str) -> Spec:
        sizes: dict[str, object] = {"R_INTER": self.inter, "R_INTRA": self.intra, "CHANNELS": self.W}
        if self.columns:
            sizes["COLUMNS"] = self.columns
        if self.bulk:
            sizes |= {"BULK": True, "CHUNK": self.chunk, "STAGES": self.chunks_in_flight, "SEND_ROWS": self.send_rows}
        if self.stalls >= 0:
            sizes["STALLS"] = self.stalls
        wide, half = self.wire is torch.float32, self.dtype is torch.float16
        return Spec.of("combine/rank_combine", arch, WIRE32=wide, FP16=half, **sizes)


class RankCombine:
    """Ranks of one group on one GPU; one launch combines for all of them.

    Args:
        plan: the same for all ranks. device: index of the GPU.
        ranks: those that run here. heaps: of every rank, zeroed before the first launch of any rank: addresses that
            this GPU can read and write.
        timeout: seconds of a wait without progress.

    Raises:
        ContractError: the blocks of all ranks here do not fit the GPU at one time.
    """

    def __init__(
        self, plan: Plan, device: int, ranks: Sequence[int], heaps: Sequence[int], timeout: float = 10.0, arch: str = ""
    ):
        found = gpu(device)
        self.plan, self.device, self.ranks = plan, device, tuple(ranks)
        arch = arch or (f"{found.sm}a" if found.capability[0] == 9 else found.sm)
        spec = plan.spec(arch)
        fits = load.resident_blocks(spec, device, plan.threads, plan.shared_memory)
        if len(self.ranks) * plan.sms > fits or len(self.ranks) > MOST_HERE:
            raise ContractError(
                "the ranks' blocks must run at the same time",
                got=f"{len(self.ranks)} ranks of {plan.sms} blocks",
                expected=f"{fits} blocks, {MOST_HERE} ranks",
                remedy="fewer multiprocessors a rank",
            )
        self._kernel = load.kernel(spec, device, plan.shared_memory)
        self._call = _Call(timeout=int(timeout * 1e9), H=plan.H, T_max=plan.T, slots=plan.slots)
        self._call.heaps[: plan.R] = list(heaps)
        for n, rank in enumerate(self.ranks):
            self._call.local[n].rank = rank
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._call))
        self._config = _config(plan, len(self.ranks))

    def bind(
        self,
        n: int,
        x: Tensor,
        masks: Tensor,
        rows: Tensor,
        T: Tensor,
        out: Tensor,
        bias_0: Tensor | None = None,
        bias_1: Tensor | None = None,
    ) -> None:
        """Tensors of the n-th rank here, for the launches that follow; shapes as the kernel's table."""
        local = self._call.local[n]
        local.x, local.out, local.masks, local.rows, local.T = (t.data_ptr() for t in (x, out, masks, rows, T))
        local.bias_0, local.bias_1 = (0 if bias is None else bias.data_ptr() for bias in (bias_0, bias_1))

    def launch(self) -> None:
        """On torch's current stream of the GPU. All ranks of the group launch."""
        from cuda.bindings import driver

        self._config.hStream = driver.CUstream(torch._C._cuda_getCurrentRawStream(self.device))
        function = driver.CUfunction(int(self._kernel.handle))
        load._check(driver.cuLaunchKernelEx(self._config, function, ctypes.addressof(self._arguments), 0))


def _config(plan: Plan, ranks: int) -> Any:
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


def pointers(masks: Sequence[Tensor], T: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """masks [R, T] int64, rows [R, T] int32 and T [R] int32 of a rank, from the masks of every rank.

    A row's number counts the rank's rows in ascending rank, then token; -1: the rank has none.
    """
    R, device = len(masks), masks[0].device
    all_masks = torch.zeros(R, T, dtype=torch.int64, device=device)
    for c, mask in enumerate(masks):
        all_masks[c, : len(mask)] = mask
    here = all_masks >> rank & 1
    rows = torch.where(here.bool(), here.flatten().cumsum(0).view(R, T) - 1, -1).int()
    return all_masks, rows, torch.tensor([len(mask) for mask in masks], dtype=torch.int32, device=device)
