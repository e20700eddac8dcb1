"""Router and choice of experts in one launch, in layers that vLLM routes itself.

vLLM's runner calls its gate for logits, then its router with them: two or three kernels. For as many tokens as this
package's kernel takes, the gate hands its tokens on, and the router asks the kernel. What vLLM does with the ids then
(EPLB, capture of routed experts, their dtype) stays vLLM's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...cuda.router import clustered
from ...errors import TtnnMoeError
from ...visible import said
from . import say
from .surface import ROUTER, installed


def layers_of(config: Any) -> Mapping[str, Any]:
    """vLLM's MoE layers by name. config: VllmConfig, or None."""
    return getattr(getattr(config, "compilation_config", None), "static_forward_context", {})


def take(layer: Any, layers: Mapping[str, Any]) -> None:
    """Route a loaded layer by the kernel from now on; or say why vLLM routes it.

    Args:
        layer: as a method of vLLM's has it. layers: see layers_of.
    """
    try:
        reason = ROUTER.why_not(installed) or _take(layer, layers)
    except Exception as error:  # vLLM starts without the kernel, whatever a version of it holds
        reason = str(error) if isinstance(error, TtnnMoeError) else said(error)
    if reason is not None:
        say.info(f"routers of MoE layers stay with vLLM: {reason}")


def _take(layer: Any, layers: Mapping[str, Any]) -> str | None:
    runner = getattr(layer, "runner", None) or layers.get(getattr(layer, "layer_name", ""))
    if runner is None:
        return "no runner of vLLM's has the layer"
    if (reason := _why_not(runner)) is not None:
        return reason
    gate, router = runner.gate, runner.router
    routing = OneLaunch(gate, router)
    if (reason := routing.why_not(gate.weight.new_empty(1, gate.weight.shape[1]))) is not None:
        return f"{clustered.NAME}: {reason}"
    most = clustered.compile_ahead(gate.weight, router.top_k, router.renormalize)
    gate.forward, router._compute_routing = routing.gate, routing.route
    say.info(f"routes up to {most} tokens of a step by {clustered.NAME}")
    return None


def _why_not(runner: Any) -> str | None:
    """Why vLLM's runner does not multiply by one dense weight, and take the K largest of a softmax; None: it does."""
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

    gate, router, moe = runner.gate, runner.router, runner.moe_config
    if gate is None:
        return "the model itself multiplies by the router's weight"
    if type(gate) not in (ReplicatedLinear, GateLinear) or not getattr(gate, "return_bias", True):
        return f"the router's weight is a {type(gate).__name__}"
    if type(gate.quant_method) is not UnquantizedLinearMethod or gate.bias is not None:
        return "the router's weight is quantised, or has a bias"
    if getattr(runner, "_fse_fuse_gate", True):
        return "the router's weight is joined with that of a shared expert"
    if type(router) is not FusedTopKRouter or router.scoring_func != "softmax":
        return "they do not choose the K largest of a softmax"
    # experts that EPLB holds twice have one row
    if moe.num_logical_experts != gate.weight.shape[0] or router.global_num_experts < gate.weight.shape[0]:
        return "their weight has no row for each expert"
    if moe.pcp_size > 1:
        return "tokens are exchanged between logits and choice (context parallelism)"
    return None


class OneLaunch:
    """Stands in for a gate's `forward` and for its router's `_compute_routing`."""

    def __init__(self, gate: Any, router: Any):
        self._linear, self._router = gate, router
        self._logits, self._choose = gate.forward, router._compute_routing
        # from vLLM 0.33 on: tokens of a step -> [T] bool, which of them are a graph's padding; or None
        self._padding = getattr(sys.modules[type(router).__module__], "_get_padding_mask", lambda T: None)

    def _arguments(self, x: Tensor) -> tuple[Any, ...]:
        return x, None, 0.0, self._linear.weight, self._router.top_k, self._router.renormalize

    def why_not(self, x: Tensor) -> str | None:
        """Why the kernel does not take x [T, H]; None: it does."""
        return clustered.why_not(x.device, *self._arguments(x))

    def gate(self, x: Tensor) -> tuple[Tensor, Any]:
        """Logits [T, E] of x [T, H]; or x itself, where `route` does without."""
        return (x, None) if self.why_not(x) is None else self._logits(x)

    def route(
        self, hidden_states: Tensor, router_logits: Tensor, indices_type: Any, *, input_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Weights and ids [T, K] of hidden_states [T, H]; of a graph's padding -1, where vLLM says which that is."""
        if router_logits is not hidden_states:
            return self._choose(hidden_states, router_logits, indices_type, input_ids=input_ids)
        ids, weights, _ = clustered.launch(*self._arguments(hidden_states))
        padding = self._padding(len(ids))
        return weights, ids if padding is None else ids.masked_fill_(padding[:, None], -1)
