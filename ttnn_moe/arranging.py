"""MXFP4 experts in the order that Hopper's kernels read, in place, and back."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import torch

from . import registry
from .contract import Experts, Problem, check_kind
from .errors import ContractError
from .formats import int4_24, mxfp4, mxfp4_boxes
from .formats.in_place import Mark, no_mark
from .memory import first_shared
from .visible import shown


def arrange(experts: Experts, mark: Mark = no_mark) -> Experts:
    """The same weights as `mxfp4_boxes`, in the same tensors. Do not use `experts` afterwards: their bytes moved.

    Needs temporary memory for a few experts. `restore` is the inverse. Tensors may come from inference mode. Where it
    fails or is interrupted, `experts` are as before.

    Args:
        mark: called with whether the bytes are arranged now. An interrupt may come between the return of `arrange`
            and the caller's next statement: what `mark` keeps is right then, too.

    Raises:
        ContractError: no Experts, or experts of another format; two tensors share memory; it failed, and so did
            bringing the old bytes back: load the weights again.
    """
    return _changed(experts, mxfp4.NAME, mxfp4_boxes.NAME, mark)


def restore(experts: Experts, mark: Mark = no_mark) -> Experts:
    """The same weights as `mxfp4`, in the same tensors: the inverse of `arrange`, with its arguments.

    Raises:
        ContractError: as `arrange`.
    """
    return _changed(experts, mxfp4_boxes.NAME, mxfp4.NAME, mark)


def arranged(experts: Experts) -> Experts:
    """The same weights as `mxfp4_boxes`, in tensors of their own.

    Raises:
        ContractError: experts of another format.
    """
    check_kind(experts, Experts)
    copies = {name: tensor.clone() for name, tensor in experts.tensors.items()}
    return arrange(replace(experts, tensors=copies))


def gains(experts: Experts) -> bool:
    """Whether `arrange` makes experts faster where they lie: mxfp4 on a Hopper GPU."""
    if experts.format != mxfp4.NAME or experts.device.type != "cuda":
        return False
    problem = replace(Problem.of(1, 1, experts, torch.bfloat16), weight_format=mxfp4_boxes.NAME)
    return registry.why_not(problem).get("cuda") is None


def at_load(experts: Experts, mark: Mark = no_mark) -> Experts:
    """For loaders, which own the tensors: `arrange` where it gains; of int4_24, whether fp16 holds scales."""
    if experts.format == int4_24.NAME:
        return replace(experts, fp16_scales=int4_24.fit_fp16(*experts.tensors.values()))
    return arrange(experts, mark) if gains(experts) else experts


def restored(experts: Experts) -> Experts:
    """The same weights as mxfp4, in tensors of their own.

    Raises:
        ContractError: experts of another format.
    """
    check_kind(experts, Experts)
    return restore(replace(experts, tensors={name: tensor.clone() for name, tensor in experts.tensors.items()}))


def _changed(experts: Experts, before: str, after: str, mark: Mark) -> Experts:
    check_kind(experts, Experts)
    if experts.format != before:
        raise ContractError("experts have another format", got=experts.format, expected=before)
    if not callable(mark):
        raise ContractError(
            "mark cannot be called", got=shown(mark), expected="a function of a bool", remedy="leave mark out"
        )
    changed = replace(experts, format=after)  # before a byte moves: it may raise
    for (name, tensor), (_, other) in combinations(experts.tensors.items(), 2):
        if first_shared(tensor, other) is not None:
            raise ContractError(
                "bytes of these experts cannot change places: two tensors share memory",
                got=name,
                expected="tensors of their own",
                remedy=f"clone {name}",
            )
    mxfp4_boxes.reorder(experts.tensors, experts.gate_up_order, inverse=after == mxfp4.NAME, mark=mark)
    return changed
