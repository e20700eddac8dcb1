"""Making a layer ready while vLLM loads it, so that nothing is allocated or compiled after vLLM has measured memory."""

from __future__ import annotations

import time
from contextlib import suppress

import torch
from torch import Tensor

from ...errors import TtnnMoeError
from . import say
from .served import ServedLayer

_REMEDY = "to change it: a smaller --max-num-batched-tokens, or more memory"


_BEGUN: set[tuple[object, ...]] = set()


def begin(served: ServedLayer, weights: tuple[Tensor, ...]) -> None:
    """Compile kernels while vLLM reads weights; once a process for layers of one size."""
    key = served.E, served.K, served.T, served.dtype, *(weight.shape for weight in weights)
    if weights[0].device.type == "meta" or key in _BEGUN:
        return
    _BEGUN.add(key)
    with suppress(TtnnMoeError):  # `ready` says it
        served.compile_ahead(weights)


def ready(
    served: ServedLayer,
    weights: tuple[Tensor, ...],
    expert_map: Tensor | None,
    both_ids: bool = False,
    adds: bool = False,
) -> bool:
    """Allocate scratch and compile kernels, several at a time; if that fails, say why, once, and return False.

    Args:
        both_ids: calls may come with int64 ids as well as int32 ones. adds: calls add to their output.
    """
    reason = why_not(served, weights, expert_map, both_ids, adds)
    if reason is not None:
        say.warning(f"MoE layers stay with vLLM: {reason}")
    return reason is None


def why_not(
    served: ServedLayer, weights: tuple[Tensor, ...], expert_map: Tensor | None, both_ids: bool, adds: bool = False
) -> str | None:
    """As `ready`; the reason, or None."""
    try:
        prepared = served.prepare(weights, expert_map)
        start = time.perf_counter()
        made = sum(
            prepared.compile(ids64=ids64, accumulate=adds) for ids64 in ((False, True) if both_ids else (False,))
        )
    except torch.OutOfMemoryError as error:
        return f"there is no memory for the operator's scratch ({str(error).splitlines()[0]}); {_REMEDY}"
    except TtnnMoeError as error:
        return str(error)
    if made:
        say.info(f"compiled {made} kernels in {time.perf_counter() - start:.1f} s")
    say.info(f"runs MoE layers of {prepared.problem}")
    return None
