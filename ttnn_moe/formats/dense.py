"""Dense experts in the Hugging Face layout: gate_up [E, 2I, H], down [E, H, I], taken as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ContractError
from ..memory import check_layout
from .format import ExpertWeights, check_silu, select_experts

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class DenseFormat:
    """bf16, fp16 or fp32 weights, row-major, one dtype and one device for both tensors."""

    name = "dense"
    multiple = 1

    def check(self, experts: ExpertWeights) -> None:
        if set(experts.tensors) != {"gate_up", "down"}:
            raise ContractError(
                "dense experts need exactly two tensors", got=sorted(experts.tensors), expected="['down', 'gate_up']"
            )
        check_silu(self.name, experts)
        E, H, I = experts.E, experts.H, experts.I
        gate_up, down = experts.tensors["gate_up"], experts.tensors["down"]
        for name, tensor, shape in (("gate_up", gate_up, (E, 2 * I, H)), ("down", down, (E, H, I))):
            if tuple(tensor.shape) != shape:
                raise ContractError(
                    f"{name} has the wrong shape",
                    got=tuple(tensor.shape),
                    expected=f"{shape} ({'[E, 2I, H]' if name == 'gate_up' else '[E, H, I]'})",
                    remedy="give gate_up [E, 2I, H] and down [E, H, I] of one E, H and I",
                )
            if tensor.dtype not in DTYPES:
                raise ContractError(f"{name} has an unsupported dtype", got=tensor.dtype, expected=list(DTYPES))
            check_layout(tensor)
            if not tensor.is_contiguous():
                raise ContractError(
                    f"{name} is not contiguous",
                    got=f"strides {tensor.stride()}",
                    expected=f"row-major {shape}",
                    remedy="lay the weights out once, at load: .contiguous()",
                )
        if gate_up.dtype != down.dtype or gate_up.device != down.device:
            raise ContractError(
                "gate_up and down differ",
                got=f"{gate_up.dtype} on {gate_up.device} and {down.dtype} on {down.device}",
                expected="one dtype, one device",
            )

    def dequantize(self, experts: ExpertWeights, e: int) -> tuple[Tensor, Tensor]:
        gate_up, down = experts.tensors["gate_up"][e], experts.tensors["down"][e]
        if experts.gate_up_order == "interleaved":
            gate_up = torch.cat([gate_up[0::2], gate_up[1::2]])
        return gate_up, down

    def select(self, experts: ExpertWeights, index: Tensor) -> dict[str, Tensor]:
        return select_experts(experts.tensors, index)
