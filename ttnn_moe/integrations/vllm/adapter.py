"""vLLM's method of unquantised MoE layers, and its experts class, with the operator in them.

Layers stay vLLM's: weights, router, shared experts, collectives. Where vLLM exchanges tokens between ranks itself (DP
with or without EP), its modular kernel calls `TtnnMoeExperts`; elsewhere `apply` calls the operator, one copy less.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from ...contract import Experts
from . import gate, load, router, say
from .served import ServedLayer

HOOK = "UnquantizedFusedMoEMethod"


class TtnnMoeExperts(modular_kernel.FusedMoEExpertsModular):
    """The operator between vLLM's prepare and finalize: tokens come from all ranks, results go back to them."""

    served: ServedLayer | None = None

    @staticmethod
    def activation_format() -> Any:
        return modular_kernel.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation.value == "silu"

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return gate.hands_out_tokens(moe_parallel_config)

    def supports_expert_map(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No workspace but the output: scratch is the operator's own, made at load."""
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        assert self.served is not None, "the method gives it, once weights are there"
        self.served(hidden_states, topk_weights, topk_ids, (w1, w2), expert_map, output)


class TtnnMoeMethod(UnquantizedFusedMoEMethod):
    """vLLM's method, whose layers the operator runs where it can. What it refuses stays as vLLM chose.

    Attributes:
        adds: whether `add` will add to its output; None: nobody calls it.
        stream: [most tokens, H], the residual stream of the model that calls `add`; None: it has none.
        true_tokens: [] int32, tokens of a step of that model that are no padding. None: nobody counts them.
    """

    def __init__(self, moe: Any):
        super().__init__(moe)
        self._served: ServedLayer | None = None
        self.adds: bool | None = None
        self.stream: torch.Tensor | None = None
        self.true_tokens: torch.Tensor | None = None
        self._direct = moe.dp_size == 1 and not moe.moe_parallel_config.use_all2all_kernels
        config = get_current_vllm_config_or_none()
        self._layers = router.layers_of(config)
        reason = gate.why_not_model(getattr(config, "model_config", None))
        reason = reason or gate.why_not(moe, getattr(config, "parallel_config", None))
        self._may_serve = reason is None
        if reason is not None:
            say.warning(f"MoE layers stay with vLLM: {reason}")
            return
        # Triton's layout of weights is the operator's: gate rows, then up rows, nothing shuffled or padded
        self._choose(UnquantizedMoeBackend.TRITON, TtnnMoeExperts)

    def _choose(self, backend: Any, experts_cls: Any) -> None:
        """Take another backend than vLLM chose; keep vLLM's."""
        given: Any = self
        self._vllms = given.unquantized_backend, given.experts_cls
        given.unquantized_backend, given.experts_cls = backend, experts_cls

    def create_weights(self, layer: Any, num_experts: int, *sizes: Any, **attributes: Any) -> None:
        super().create_weights(layer, num_experts, *sizes, **attributes)
        if self._may_serve and num_experts == self.moe.num_experts:
            load.begin(self._layer(num_experts), (layer.w13_weight, layer.w2_weight))

    def _layer(self, E: int) -> ServedLayer:
        moe = self.moe
        return ServedLayer(dense, E, moe.experts_per_token, moe.max_num_tokens * moe.dp_size, moe.in_dtype)

    def process_weights_after_loading(self, layer: Any) -> None:
        first = self.moe_kernel is None
        if self._may_serve and first:
            self._served = self._try(layer)
            if self._served is None:
                self._may_serve = False
                self._choose(*self._vllms)
        super().process_weights_after_loading(layer)
        if self._served is not None:
            self.moe_kernel.fused_experts.served = self._served  # vLLM may have made another kernel
            if first and self._direct and self.adds is None:
                router.take(layer, self._layers)

    def _try(self, layer: Any) -> ServedLayer | None:
        weights = layer.w13_weight, layer.w2_weight
        reason = gate.why_not_layer(layer, *weights, self.moe.in_dtype)
        if reason is not None:
            say.warning(f"MoE layers stay with vLLM: {reason}")
            return None
        served = self._layer(layer.global_num_experts)
        ready = load.ready(served, weights, layer.expert_map, both_ids=not self._direct, adds=bool(self.adds))
        return served if ready else None

    @property
    def adds_itself(self) -> bool:
        """Whether a model calls `add`, and no runner of vLLM's."""
        return self.adds is not None and self._direct and self._served is not None

    def add(
        self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, out: torch.Tensor
    ) -> None:
        """The experts of x [T, H], added to out [T, H], or written to it."""
        assert self._served is not None and self.adds is not None
        weights = layer.w13_weight, layer.w2_weight
        self._served(x, topk_weights, topk_ids, weights, layer.expert_map, out, self.adds, self.true_tokens)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        served = self._served
        if served is None or not self._direct:
            return super().apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
        # shared experts are the runner's here, before this call or on a stream beside it
        return served(x, topk_weights, topk_ids, (layer.w13_weight, layer.w2_weight), layer.expert_map)


def dense(w13: torch.Tensor, w2: torch.Tensor) -> Experts:
    """w13 [E, 2I, H] (gate rows, then up rows), w2 [E, H, I]; zero-copy."""
    return Experts.dense(w13.detach(), w2.detach())


def held(experts: Any) -> Any:
    """The module that has the weights and the method of a layer of experts: from vLLM 0.33 on, one inside it."""
    return getattr(experts, "routed_experts", experts)
