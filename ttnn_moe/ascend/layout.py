"""Expert weights as npu_grouped_matmul reads them: [E, inner, N], made once for each Experts object.

The operator takes transposed weights, so that the Hugging Face layout is used in place. Interleaved gate and up rows
are put into halves, which is one copy.

TTNN_MOE_ASCEND_NZ=1 asks for the format FRACTAL_NZ instead: the order in which the chip's matrix unit reads. It is a
copy of the weights, made once. CANN's page (ops-transformer, gmm/grouped_matmul/README.md) allows it for bf16 and fp16.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..contract import Experts
from ..errors import ContractError
from ..memory import states

ENV = "TTNN_MOE_ASCEND_NZ"
FRACTAL_NZ = 29
# CANN's check of H, I and N in this format: ALIGN_NZ_K of gmm/grouped_matmul/op_host/op_api/aclnn_grouped_matmul.cpp
NZ_ALIGN = 16


@dataclass(frozen=True)
class Weights:
    """gate_up [E, H, 2I] (gate columns first) and down [E, I, H]: transposed in memory, or in FRACTAL_NZ."""

    gate_up: Tensor
    down: Tensor

    @property
    def E(self) -> int:
        """Experts."""
        return self.down.shape[0]


# with the states that the tensors had
_MADE: weakref.WeakKeyDictionary[Experts, tuple[object, dict[bool, Weights]]] = weakref.WeakKeyDictionary()


def nz_asked_for() -> bool:
    """Whether the environment asks for FRACTAL_NZ.

    Raises:
        ContractError: TTNN_MOE_ASCEND_NZ is neither 0 nor 1.
    """
    value = os.environ.get(ENV) or "0"
    if value not in ("0", "1"):
        raise ContractError(f"{ENV} is no switch", got=repr(value), expected="0 or 1", remedy=f"unset {ENV}")
    return value == "1"


def weights_of(experts: Experts, npu: Any = None) -> Weights:
    """The weights of dense experts; the second call for the same object finds what the first made.

    A change that `memory.states` sees makes new ones.

    npu: torch_npu, to make them FRACTAL_NZ; None: they are used in place.
    """
    now = states(experts.tensors.values())
    known, made = _MADE.get(experts, (None, {}))
    if known != now:
        made = {}
        _MADE[experts] = now, made
    nz = npu is not None
    if nz not in made:
        gate_up, down = experts.tensors["gate_up"], experts.tensors["down"]
        if experts.gate_up_order == "interleaved":
            # [E, I, 2, H] -> [E, 2, I, H]
            gate_up = gate_up.unflatten(1, (experts.I, 2)).transpose(1, 2).flatten(1, 2).contiguous()
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        made[nz] = Weights(_nz(npu, gate_up), _nz(npu, down)) if nz else Weights(gate_up, down)
    return made[nz]


def _nz(npu: Any, weight: Tensor) -> Tensor:
    # off by default, and the cast would leave the weight as it is
    npu.npu.config.allow_internal_format = True
    return npu.npu_format_cast(weight.contiguous(), FRACTAL_NZ)  # type: ignore[no-any-return]
