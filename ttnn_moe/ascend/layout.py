"""Expert weights as npu_grouped_matmul reads them: [E, inner, N], made once for each Experts object.

The operator takes transposed weights, so that the Hugging Face layout is used in place. Interleaved gate and up rows
are put into halves, which is one copy.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch import Tensor

from ..contract import Experts


@dataclass(frozen=True)
class Weights:
    """gate_up [E, H, 2I] (gate columns first) and down [E, I, H], transposed in memory."""

    gate_up: Tensor
    down: Tensor

    @property
    def E(self) -> int:
        return self.down.shape[0]


_MADE: weakref.WeakKeyDictionary[Experts, Weights] = weakref.WeakKeyDictionary()


def weights_of(experts: Experts) -> Weights:
    """The weights of dense experts; the second call for the same object finds what the first made."""
    found = _MADE.get(experts)
    if found is None:
        gate_up, down = experts.tensors["gate_up"], experts.tensors["down"]
        if experts.gate_up_order == "interleaved":
            # [E, I, 2, H] -> [E, 2, I, H]
            gate_up = gate_up.unflatten(1, (experts.I, 2)).transpose(1, 2).flatten(1, 2).contiguous()
        found = _MADE[experts] = Weights(gate_up.transpose(1, 2), down.transpose(1, 2))
    return found
