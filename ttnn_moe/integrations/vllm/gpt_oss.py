"""gpt-oss in vLLM: its MXFP4 experts, in vLLM's own parameters, run by the operator.

vLLM keeps the checkpoint, weight loaders and sizes. A layer that cannot be served keeps vLLM's kernels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, GptOssMxfp4MoEMethod

from ... import arranging, registry
from ...activations import CLAMPED_SWIGLU
from ...contract import Experts
from ...errors import ContractError
from ...formats import mxfp4, mxfp4_boxes
from ..gpt_oss import GATE_UP_ORDER
from . import arranged, gate, load, say, setting
from .quantised import HOLDER
from .served import ServedLayer

NAME = "gpt_oss_mxfp4"
PARAMETERS = {
    "gate_up_blocks": "w13_weight",
    "gate_up_scales": "w13_weight_scale",
    "down_blocks": "w2_weight",
    "down_scales": "w2_weight_scale",
    "gate_up_bias": "w13_bias",
    "down_bias": "w2_bias",
}
"""vLLM's parameter that holds each tensor of the format."""


class GptOssConfig(GptOssMxfp4Config):
    """vLLM's view of gpt-oss's quantization_config."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, HOLDER):
            return GptOssMethod(layer.moe_config)
        return super().get_quant_method(layer, prefix)


def experts_of(*tensors: Tensor, is_arranged: bool = False) -> Experts:
    """Experts of a layer's parameters, in the order of PARAMETERS; reads no values."""
    held = {name: tensor.detach() for name, tensor in zip(PARAMETERS, tensors, strict=True)}
    E, rows, half = held["gate_up_blocks"].shape
    name = mxfp4_boxes.NAME if is_arranged else mxfp4.NAME
    return Experts(name, E, 2 * half, rows // 2, held, gate_up_order=GATE_UP_ORDER, activation=CLAMPED_SWIGLU)


class GptOssMethod(GptOssMxfp4MoEMethod):
    """vLLM's method, whose layers the operator runs where it can. What it refuses stays as vLLM chose."""

    def __init__(self, moe: Any):
        super().__init__(moe)
        self._served: ServedLayer | None = None
        self._arranges = False
        config = get_current_vllm_config_or_none()
        reason = gate.why_not_gpt_oss(
            moe, getattr(config, "model_config", None), getattr(config, "parallel_config", None)
        )
        self._may_serve = self._may(reason)

    def _may(self, reason: str | None) -> bool:
        if reason is not None:
            say.warning(f"gpt-oss's MoE layers stay with vLLM: {reason}")
        return reason is None

    @property
    def is_monolithic(self) -> bool:
        """Whether the layer takes scores of the router, not its choices."""
        return not self._may_serve and super().is_monolithic

    def create_weights(self, layer: Any, num_experts: int, *sizes: Any, **attributes: Any) -> None:
        super().create_weights(layer, num_experts, *sizes, **attributes)
        if not self._may_serve:
            return
        weights = self._weights(layer)
        try:
            self._arranges = arranging.gains(experts_of(*weights))
        except ContractError as error:
            self._may_serve = self._may(str(error))
            return
        if not self._arranges and not setting.names_backend():
            # nobody has compared the other kernels of MXFP4 with vLLM's
            reason = f"only GPUs of compute capability 9.0 are served; to change it: {registry.ENV}=cuda"
            self._may_serve = self._may(reason)
            return
        for name in PARAMETERS.values():
            arranged.follow(layer, getattr(layer, name), name)
        layer.register_state_dict_post_hook(arranged.restore_state)
        if num_experts == self.moe.num_experts:
            load.begin(self._layer(num_experts), weights)

    def _layer(self, E: int) -> ServedLayer:
        moe, make = self.moe, partial(experts_of, is_arranged=self._arranges)
        return ServedLayer(make, E, moe.experts_per_token, moe.max_num_tokens, moe.in_dtype)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Allocate scratch, compile kernels, arrange bytes; again after a reload."""
        first = self._served is None
        if self._may_serve and first:
            self._served = self._try(layer)
        if self._served is not None and self._arranges:
            try:
                self._arrange(layer)
            except torch.OutOfMemoryError as error:
                if not first:
                    raise  # captured graphs have the operator's kernels
                self._served = None
                self._may(f"there is no memory to arrange bytes ({str(error).splitlines()[0]})")
        if self._served is None:
            self._may_serve = False
            super().process_weights_after_loading(layer)

    def _arrange(self, layer: Any) -> None:
        """All tensors, or none."""
        done: list[Tensor] = []
        try:
            for name in mxfp4.TENSORS:
                arranged.arrange(getattr(layer, PARAMETERS[name]), arranged.Kind(name, GATE_UP_ORDER))
                done.append(getattr(layer, PARAMETERS[name]))
        except torch.OutOfMemoryError:
            for parameter in done:
                arranged.restore(parameter)
            raise

    def _try(self, layer: Any) -> ServedLayer | None:
        weights = self._weights(layer)
        served = self._layer(layer.global_num_experts)
        reason = None
        if getattr(layer, "apply_router_weight_on_input", False):
            reason = "its routing weights multiply the input of the experts"
        try:
            mxfp4.check_scales(**{name: getattr(layer, name) for name in PARAMETERS.values() if "_scale" in name})
        except ContractError as error:
            reason = str(error)
        reason = reason or load.why_not(served, weights, layer.expert_map, both_ids=False)
        return served if self._may(reason) else None

    def _weights(self, layer: Any) -> tuple[Tensor, ...]:
        return tuple(getattr(layer, name) for name in PARAMETERS.values())

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        return super().get_fused_moe_quant_config(layer) if self._served is None else None

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        if self._served is None:
            return super().apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
        return self._served(x, topk_weights, topk_ids, self._weights(layer), layer.expert_map)
