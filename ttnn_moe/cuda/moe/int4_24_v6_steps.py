"""The steps of v6 one by one, as its contract names them: permute, K2, K4, combine; and all of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...accelerator import on
from ...arguments import as_integer
from ...contract import Experts, Problem, Routing
from ...errors import ContractError
from ...memory import check_tensors
from ...no_gradients import without_gradients
from ...visible import shown
from ..arch import target_of
from ..jit import load
from . import sort
from .family import Call
from .int4_24_v6 import INT4_24_V6


@dataclass(frozen=True)
class Permuted:
    """Rows of hidden sorted by expert.

    Attributes:
        X_perm: [M, H] bf16, M = T * K; rows that no pair has are undefined.
        OffE: [E + 1] int32; the rows of expert e are OffE[e] .. OffE[e + 1] - 1.
        Inv: [T, K] int32, the row of each pair; -1: its id names no expert.
        Eids: [U] int32, U = min(E, M): the experts that have a row, ascending; then -1.
    """

    X_perm: Tensor
    OffE: Tensor
    Inv: Tensor
    Eids: Tensor


def why_not_on(device: torch.device) -> str | None:
    """Why no kernel reads words on a device, or None. Tests that run the kernels on the host replace it."""
    return None if device.type == "cuda" else f"the words are on {device}, and v6 runs on NVIDIA GPUs"


def _why_not(problem: Problem, experts: Experts) -> str | None:
    if (reason := why_not_on(experts.device)) is not None:
        return reason
    if problem.T == 0:
        return "it has no launch for T=0"
    if any(words.data_ptr() % INT4_24_V6.alignment for words in experts.tensors.values()):
        return f"words begin at no multiple of {INT4_24_V6.alignment} bytes"
    return INT4_24_V6.why_not(problem, target_of(experts.device))


class FusedMoE:
    """int4_24 experts on one GPU, for calls of exactly T tokens with K experts each. No call waits for the GPU.

    Args:
        experts: int4_24, contiguous, at a multiple of 16 bytes, on a GPU. T, K: of every call; T is 1 or more.

    Raises:
        ContractError: v6 does not run these sizes, this format or this device.
    """

    def __init__(self, experts: Experts, T: int, K: int):
        if as_integer(T) is None or as_integer(K) is None:
            raise ContractError("sizes are no integers", got=f"T={shown(T)}, K={shown(K)}", expected="two integers")
        self.experts, self.problem = experts, Problem.of(int(T), int(K), experts, torch.bfloat16)
        if (reason := _why_not(self.problem, experts)) is not None:
            raise ContractError(
                "v6 does not run this problem",
                got=reason,
                expected="int4_24 experts on an NVIDIA GPU, T of 1 or more, K of 1 to 16",
                remedy="call ttnn_moe.moe, which runs every problem",
            )
        device, target = experts.device, target_of(experts.device)
        self._device = device
        self._plan = INT4_24_V6.plan(self.problem, target)
        index = 0 if device.index is None else device.index
        self._uses = INT4_24_V6.uses(self._plan, ids64=False, add=False)
        (*sorts, self._permute, k2, k4, self._combine) = INT4_24_V6.bind(self._plan, self._uses, index)
        self._sorts = tuple(sorts)
        # by whether blockIdx.y is an index into Eids, or the expert itself
        *_, k2_use, k4_use, _ = self._uses
        self._k2 = {True: k2, False: self._plan.bind_k2(k2_use, index, experts.E)}
        self._k4 = {True: k4, False: self._plan.bind_k4(k4_use, index, experts.E)}

    def apply(self, hidden: Tensor, topk_ids: Tensor, topk_ws: Tensor) -> Tensor:
        """out [T, H] bf16 of hidden [T, H] bf16, topk_ids [T, K] int32, topk_ws [T, K] fp32: one call of the family."""
        return self._run(
            lambda: self._apply(hidden, topk_ids, topk_ws), hidden=hidden, topk_ids=topk_ids, topk_ws=topk_ws
        )

    def _apply(self, hidden: Tensor, topk_ids: Tensor, topk_ws: Tensor) -> Tensor:
        out = torch.empty_like(hidden)
        call = Call(hidden, Routing.from_topk(topk_ids, topk_ws, self.problem.E), self.experts, out, False)
        buffers = tuple(self._empty(*b.shape, dtype=b.dtype) for b in INT4_24_V6.scratch(self._plan))
        with self._here():
            INT4_24_V6.launch(self._plan, call, buffers)
        return out

    def permute(self, hidden: Tensor, topk_ids: Tensor) -> Permuted:
        """Sort the pairs of hidden [T, H] bf16 and topk_ids [T, K] int32 by expert, and gather their rows."""
        made: list[Permuted] = []

        def run() -> Tensor:
            made.append(self._permuted(hidden, topk_ids))
            return made[0].X_perm

        rows = self._run(run, hidden=hidden, topk_ids=topk_ids)
        return replace(made[0], X_perm=rows)

    def _permuted(self, hidden: Tensor, topk_ids: Tensor) -> Permuted:
        plan, words, problem = self._plan, self._plan.words, self.problem
        memory = self._empty(words.count, dtype=torch.int32)
        at, inverse = memory.data_ptr(), words.inverse // 4
        out = Permuted(
            self._empty(plan.most_rows, problem.H),
            self._empty(problem.E + 1, dtype=torch.int32),
            memory[inverse : inverse + plan.most_rows].view(problem.T, problem.K),
            self._empty(plan.active, dtype=torch.int32),
        )
        gathered = (tensor.data_ptr() for tensor in (out.X_perm, out.OffE, out.Eids))
        with self._here():
            stream = load.stream(self._device.index)
            sort.launch_sorts(self._sorts, stream, (topk_ids.data_ptr(), 0, 0), at, words)
            self._permute(stream, hidden.data_ptr(), at, at + words.tiles, at + words.num_tiles, *gathered)
        return out

    def k2(self, X_perm: Tensor, OffE: Tensor, Eids: Tensor | None = None) -> Tensor:
        """X2_perm [M, I] bf16 = silu(X_perm Wg_e) * (X_perm Wu_e). Without Eids, blockIdx.y is the expert."""
        launch, given = self._k2[Eids is not None], (X_perm, OffE, Eids)
        run = lambda: self._product(launch, *given, "w13", self.problem.I)  # noqa: E731
        return self._run(run, X_perm=X_perm, OffE=OffE, Eids=Eids)

    def k4(self, X2_perm: Tensor, OffE: Tensor, Eids: Tensor | None = None) -> Tensor:
        """Y_perm [M, H] bf16 = X2_perm Wd_e."""
        launch, given = self._k4[Eids is not None], (X2_perm, OffE, Eids)
        run = lambda: self._product(launch, *given, "w2", self.problem.H)  # noqa: E731
        return self._run(run, X2_perm=X2_perm, OffE=OffE, Eids=Eids)

    def combine(self, Y_perm: Tensor, Inv: Tensor, topk_ws: Tensor) -> Tensor:
        """out [T, H] bf16: the K rows of each token, weighted by topk_ws [T, K] fp32, in ascending k."""
        return self._run(lambda: self._combined(Y_perm, Inv, topk_ws), Y_perm=Y_perm, Inv=Inv, topk_ws=topk_ws)

    def _combined(self, Y_perm: Tensor, Inv: Tensor, topk_ws: Tensor) -> Tensor:
        out = self._empty(self.problem.T, self.problem.H)
        with self._here():
            given = (tensor.data_ptr() for tensor in (Y_perm, Inv, topk_ws))
            self._combine(load.stream(self._device.index), *given, 0, out.data_ptr())
        return out

    def _product(
        self, launch: load.Launch, rows: Tensor, OffE: Tensor, Eids: Tensor | None, words: str, width: int
    ) -> Tensor:
        out = self._empty(self._plan.most_rows, width)
        with self._here():
            given = rows.data_ptr(), OffE.data_ptr(), load.pointer(Eids), self.experts.tensors[words].data_ptr()
            launch(load.stream(self._device.index), *given, out.data_ptr())
        return out

    def _run(self, run: Callable[[], Tensor], **tensors: Tensor | None) -> Tensor:
        """run(), after a check of the tensors by their names; its result has no gradients."""
        given = {name: tensor for name, tensor in tensors.items() if name != "Eids" or tensor is not None}
        check_tensors(**given)

        def checked() -> Tensor:
            self._check(given)  # type: ignore[arg-type]
            return run()

        return without_gradients(checked, *given.values())  # type: ignore[arg-type]

    def _check(self, tensors: dict[str, Tensor]) -> None:
        """Raise ContractError unless tensors have the shape and dtype of their names, contiguous, on the GPU."""
        problem, M, bf16 = self.problem, self._plan.most_rows, torch.bfloat16
        pairs = problem.T, problem.K
        wanted = {
            "hidden": ((problem.T, problem.H), bf16),
            "topk_ids": (pairs, torch.int32),
            "topk_ws": (pairs, torch.float32),
            "X_perm": ((M, problem.H), bf16),
            "X2_perm": ((M, problem.I), bf16),
            "Y_perm": ((M, problem.H), bf16),
            "OffE": ((problem.E + 1,), torch.int32),
            "Inv": (pairs, torch.int32),
            "Eids": ((self._plan.active,), torch.int32),
        }
        for name, tensor in tensors.items():
            shape, dtype = wanted[name]
            fits = tuple(tensor.shape) == shape and tensor.dtype == dtype and tensor.device == self._device
            plain = tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_neg()
            if not fits or not plain or tensor.data_ptr() % 16:
                strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
                negative = ", a negative view" if tensor.is_neg() else ""
                raise ContractError(
                    f"{name} does not fit",
                    got=f"{tuple(tensor.shape)} {tensor.dtype}, strides {strides}, on {tensor.device}{negative}",
                    expected=f"{shape} {dtype}, contiguous, at a multiple of 16 bytes, on {self._device}",
                    remedy="copy it there: torch.empty(shape, dtype=..., device=...).copy_(tensor)",
                )

    def _empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _here(self) -> AbstractContextManager[object]:
        return on(self._device)
