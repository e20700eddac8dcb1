"""Router and choice of experts in one launch, in layers that vLLM routes itself.

vLLM's runner calls its gate for logits, then its router with them: two or three kernels. For as many tokens as this
package's kernel takes, the gate hands its tokens on, and the router asks the kernel. What vLLM does with the ids then
(EPLB, capture of routed experts, their dtype) stays vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...cuda.router import clustered
from ...errors import TtnnMoeError
from . import say
from .surface import ROUTER, installed


def layers_of(config: Any) -> Mapping[str, Any]:
    """vLLM's MoE layers by name. config: VllmConfig, or None."""
    return getattr(getattr(config, "compilation_config", None), "static_forward_context", {})


def take(layer: Any, layers: Mapping[str, Any]) -> None:
    """Route a loaded layer by the kernel from now on, where it can.

    Args:
        layer: as a method of vLLM's has it. layers: see layers_of.
    """
    if ROUTER.why_not(installed) is not None:
        return
    runner = getattr(layer, "runner", None) or layers.get(getattr(layer, "layer_name", ""))
    if runner is None or not _plain(runner):
        return
    gate, router = runner.gate, runner.router
    routing = OneLaunch(gate, router)
    most = next((T for T in clustered.MOST if routing.serves(gate.weight.new_empty(T, gate.weight.shape[1]))), 0)
    if not most:
        return
    try:
        clustered.compile_ahead(gate.weight, router.top_k, router.renormalize)
    except TtnnMoeError as error:
        say.warning(f"routers of MoE layers stay with vLLM: {error}")
        return
    gate.forward, router._compute_routing = routing.gate, routing.route
    say.info(f"routes up to {most} tokens of a step by {clustered.NAME}")


def _plain(runner: Any) -> bool:
    """Whether vLLM's runner multiplies by one dense weight, and takes the K largest of a softmax."""
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

    gate, router = runner.gate, runner.router
    return (
        type(gate) in (ReplicatedLinear, GateLinear)
        and type(gate.quant_method) is UnquantizedLinearMethod
        and gate.bias is None
        and not getattr(runner, "_fse_fuse_gate", True)
        and type(router) is FusedTopKRouter
        and router.scoring_func == "softmax"
        and router.global_num_experts == gate.weight.shape[0]
    )


class OneLaunch:
    """Stands in for a gate's `forward` and for its router's `_compute_routing`."""

    def __init__(self, gate: Any, router: Any):
        self._linear, self._router = gate, router
        self._logits, self._choose = gate.forward, router._compute_routing

    def _arguments(self, x: Tensor) -> tuple[Any, ...]:
        return x, None, 0.0, self._linear.weight, self._router.top_k, self._router.renormalize

    def serves(self, x: Tensor) -> bool:
        """Whether the kernel takes x [T, H]."""
        return clustered.why_not(x.device, *self._arguments(x)) is None

    def gate(self, x: Tensor) -> tuple[Tensor, Any]:
        """Logits [T, E] of x [T, H]; or x itself, where `route` does without."""
        return (x, None) if self.serves(x) else self._logits(x)

    def route(
        self, hidden_states: Tensor, router_logits: Tensor, indices_type: Any, *, input_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Weights and ids [T, K] of hidden_states [T, H]."""
        if router_logits is not hidden_states:
            return self._choose(hidden_states, router_logits, indices_type, input_ids=input_ids)
        ids, weights, _ = clustered.launch(*self._arguments(hidden_states))
        return weights, ids
