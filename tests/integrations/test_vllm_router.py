"""Router and choice of experts in one launch, in vLLM's own layers on a CPU; plain torch stands in for the kernel."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ttnn_moe.cuda.router import clustered
from ttnn_moe.decoder import torch_forms
from ttnn_moe.errors import BackendUnavailable
from vllm_layers import REAL, tiny
from vllm_whole import built, config_of, held, kinds, logits

pytestmark = [
    pytest.mark.skipif(not REAL, reason="vLLM is not installed: make test-vllm has it"),
    pytest.mark.usefixtures("on_the_cpu"),
]
MOST = 16


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each launch of the stand-in, which takes up to MOST. Routers are those of a GPU."""
    from vllm.model_executor.layers.fused_moe.router import router_factory

    if hasattr(router_factory, "current_platform"):  # from vLLM 0.33 on, which has a router of its own for CPUs
        monkeypatch.setattr(router_factory, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    found: list[int] = []

    def launch(x: Tensor, norm: None, eps: float, weight: Tensor, K: int, renormalise: bool) -> Any:
        found.append(len(x))
        ids, weights = torch_forms.route(F.linear(x, weight), K, renormalise)
        return ids.int(), weights, x

    def why_not(device: torch.device, x: Tensor, *args: Any) -> str | None:
        return None if 0 < len(x) <= MOST else "too many tokens"

    monkeypatch.setattr(clustered, "launch", launch)
    monkeypatch.setattr(clustered, "why_not", why_not)
    monkeypatch.setattr(clustered, "MOST", (2 * MOST, MOST))
    monkeypatch.setattr(clustered.pool, "compile_missing", lambda specs: len(specs))
    return found


def runner_of(layer: Any) -> Any:
    return getattr(layer.mlp.experts, "runner", layer.mlp.experts)


def test_vllm_has_what_is_used(make: Any) -> None:
    from ttnn_moe.integrations.vllm.surface import ROUTER, installed

    assert ROUTER.why_not(installed) is None


def test_few_tokens_are_routed_in_one_launch(whole: Any, launches: list[int], tmp_path: Path, lines: list[Any]) -> None:
    ids, wanted = whole
    config = config_of(tiny(tmp_path))
    model = built(config, kinds()[1])
    for T, taken in ((MOST, [MOST] * 2), (MOST + 1, [])):
        launches.clear()
        found = logits(model, config, ids[:T], torch.arange(T))
        assert launches == taken
        torch.testing.assert_close(found, wanted[:T], rtol=1e-3, atol=1e-3)
    assert [text for _, text in lines if "routes up to 16 tokens" in text]


def test_the_weight_is_the_gates(whole: Any, launches: list[int], tmp_path: Path) -> None:
    """A reload may put another parameter there. Without the new one, ids would be others."""
    ids, _ = whole
    config = config_of(tiny(tmp_path))
    model = built(config, kinds()[1])
    before = logits(model, config, ids[:5], torch.arange(5))
    for layer in model.model.layers:
        gate = layer.mlp.gate
        gate.weight = torch.nn.Parameter(gate.weight.detach().flip(0).clone(), requires_grad=False)
    after = logits(model, config, ids[:5], torch.arange(5))
    assert launches == [5] * 4
    assert float((after - before).abs().max()) > 1e-2


def test_vllm_still_sees_the_ids(whole: Any, launches: list[int], tmp_path: Path) -> None:
    """As --enable-return-routed-experts asks."""
    ids, _ = whole
    config = config_of(tiny(tmp_path))
    model = built(config, kinds()[1])
    seen: list[Tensor] = []
    for layer in model.model.layers:
        runner_of(layer).router.set_capture_fn(seen.append)
    logits(model, config, ids[:5], torch.arange(5))
    assert len(launches) == 2 and [tuple(of.shape) for of in seen] == [(5, model.config.num_experts_per_tok)] * 2


@pytest.mark.parametrize("skipped", [True, False])
def test_padding_that_vllm_knows_names_no_expert(
    whole: Any, launches: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, skipped: bool
) -> None:
    """From vLLM 0.33 on, which says so to its own kernel."""
    from vllm.forward_context import override_forward_context
    from vllm.model_executor.layers.fused_moe.router import fused_topk_router

    if not hasattr(fused_topk_router, "_get_padding_mask"):
        pytest.skip("this vLLM routes padding, too")
    monkeypatch.setenv("VLLM_MOE_SKIP_PADDING", str(int(skipped)))
    layer = built(config_of(tiny(tmp_path)), kinds()[1]).model.layers[0]
    x = torch.randn(4, layer.mlp.gate.weight.shape[1])
    with override_forward_context(SimpleNamespace(is_padding=torch.arange(9) >= 3)):
        weights, ids = runner_of(layer).router._compute_routing(x, layer.mlp.gate(x)[0], torch.int32)
    assert launches == [4] and bool((ids[:3] >= 0).all()) and bool((ids[3] == -1).all()) == skipped
    assert weights.shape == ids.shape


CHANGES = {
    "no gate": lambda runner: setattr(runner, "gate", None),
    "bias": lambda runner: setattr(runner.gate, "bias", torch.nn.Parameter(torch.zeros(1))),
    "quantised": lambda runner: setattr(runner.gate, "quant_method", object()),
    "with a shared expert's": lambda runner: setattr(runner, "_fse_fuse_gate", True),
    "no pair": lambda runner: setattr(runner.gate, "return_bias", False),
    "context parallelism": lambda runner: setattr(runner.moe_config.moe_parallel_config, "pcp_size", 2),
    "sigmoid": lambda runner: setattr(runner.router, "scoring_func", "sigmoid"),
    "another router": lambda runner: setattr(runner, "router", SimpleNamespace(scoring_func="softmax")),
    "fewer experts": lambda runner: setattr(runner.router, "global_num_experts", 1),
    "other experts": lambda runner: setattr(runner.moe_config, "num_logical_experts", 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_vllm_routes_itself(lines: list[Any], whole: Any, launches: list[int], tmp_path: Path, name: str) -> None:
    from ttnn_moe.integrations.vllm import router

    config = config_of(tiny(tmp_path))
    layer = built(config, kinds()[1]).model.layers[0]
    runner, gate, of = runner_of(layer), layer.mlp.gate, runner_of(layer).router
    assert "forward" in vars(gate) and "_compute_routing" in vars(of)
    del gate.forward, of._compute_routing
    CHANGES[name](runner)
    router.take(held(layer.mlp.experts), router.layers_of(config))
    assert [text for _, text in lines if "routers of MoE layers stay with vLLM: " in text]
    assert "forward" not in vars(gate) and "_compute_routing" not in vars(of)


@pytest.mark.parametrize("error", [BackendUnavailable("kernels cannot be made"), AttributeError("cannot be made")])
def test_a_kernel_that_cannot_be_compiled(
    whole: Any, launches: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: list[Any], error: Exception
) -> None:
    """vLLM starts, and routes itself."""

    def fails(*args: Any) -> None:
        raise error

    monkeypatch.setattr(clustered, "compile_ahead", fails)
    model = built(config_of(tiny(tmp_path)), kinds()[1])
    assert not any("forward" in vars(layer.mlp.gate) for layer in model.model.layers)
    said = [text for _, text in lines if "routers of MoE layers stay with vLLM: " in text]
    assert any("cannot be made" in text for text in said)


def test_where_no_kernel_serves_vllm_routes(whole: Any, tmp_path: Path) -> None:
    model = built(config_of(tiny(tmp_path)), kinds()[1])
    assert not any("forward" in vars(layer.mlp.gate) for layer in model.model.layers)


def test_our_own_layers_keep_their_router(whole: Any, launches: list[int], own_model: None, tmp_path: Path) -> None:
    model = built(config_of(tiny(tmp_path)), kinds()[0])
    assert not any("forward" in vars(layer.mlp.gate) for layer in model.model.layers)
