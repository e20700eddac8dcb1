"""Layers that the plug-in leaves to vLLM, and what it says. Without vLLM: in a stand-in of its classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vllm_stand_in
from ttnn_moe.errors import ContractError
from vllm_layers import METHOD, REAL, served, warnings

pytestmark = pytest.mark.usefixtures("on_the_cpu")
REFUSED = {
    "backend": ({"moe_backend": "triton"}, "moe_backend='triton' was asked for"),
    "lora": ({"is_lora_enabled": True}, "LoRA"),
    "biases": ({"has_bias": True}, "biases"),
    "gelu": ({"activation": SimpleNamespace(value="gelu", is_gated=True)}, "its activation is 'gelu'"),
    "ungated": ({"is_act_and_mul": False}, "not silu(gate) * up"),
    "clamped": ({"swiglu_limit": 7.0}, "swiglu_limit=7.0"),
    "dtype": ({"in_dtype": torch.float64}, "torch.float64"),
    **{name: ({"exchange": name}, f"--all2all-backend {name}") for name in ("moonep", "deepep_v2", "nixl_ep")},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_that_cannot_be_served_stays_as_vllm_chose(
    make: Any, lines: list[Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fields, said = REFUSED[name]
    chosen = object(), vllm_stand_in.VllmExperts
    monkeypatch.setattr(f"{METHOD}.select_unquantized_moe_backend", lambda moe_config: chosen)
    for _ in range(2):
        method = make.method(**fields)
        assert (method.unquantized_backend, method.experts_cls) == chosen and method._served is None
    refusals = warnings(lines)
    assert len(refusals) == 1 and said in refusals[0], "one line for all layers"


@pytest.mark.parametrize(
    ("parallel", "said"), [({"use_ubatching": True}, "--enable-dbo"), ({"enable_elastic_ep": True}, "elastic")]
)
def test_engines_that_are_not_served(make: Any, parallel: dict[str, Any], said: str) -> None:
    from ttnn_moe.integrations.vllm import gate

    reason = gate.why_not(make(loaded=False).quant_method.moe, SimpleNamespace(**parallel))
    assert reason is not None and said in reason


def test_a_model_that_reads_the_experts_itself_keeps_vllms_order(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flint's kernels on Blackwell end with an error where FlashInfer's order is not there."""
    from ttnn_moe.integrations.vllm import adapter

    config = SimpleNamespace(model_config=SimpleNamespace(architectures=["FlintForCausalLM"]), parallel_config=None)
    monkeypatch.setattr(adapter, "get_current_vllm_config_or_none", lambda: config)
    chosen = _triton()
    monkeypatch.setattr(f"{METHOD}.select_unquantized_moe_backend", lambda moe_config: chosen)
    assert not served(make())


@pytest.mark.parametrize("name", ["VLLM_BATCH_INVARIANT", "VLLM_USE_FLASHINFER_MOE_FP16"])
def test_variables_of_vllms_that_ask_for_its_kernels(make: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from ttnn_moe.integrations.vllm import gate

    moe = make(loaded=False).quant_method.moe
    for value in ("", "0"):
        monkeypatch.setenv(name, value)
        assert gate.why_not(moe, None) is None
    monkeypatch.setenv(name, "1")
    assert name in str(gate.why_not(moe, None))


@pytest.mark.parametrize(("uva", "refused"), [(True, False), (False, True), (None, True)])
def test_weights_on_the_host(make: Any, monkeypatch: pytest.MonkeyPatch, uva: bool | None, refused: bool) -> None:
    """Views of pinned memory stay where they are. Else a call gets copies, and a prefetch shares them."""
    from ttnn_moe.integrations.vllm import gate

    offloader = SimpleNamespace() if uva is None else SimpleNamespace(uva_offloading=uva)
    monkeypatch.setattr(f"{vllm_stand_in.OFFLOADER}._instance", offloader)
    reason = gate.why_not(make(loaded=False).quant_method.moe, None)
    assert (reason is not None) == refused and (not refused or "on the host" in str(reason))


def _no_memory(*args: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 708.00 MiB.\nmore")


def _no_kernel(*args: Any) -> None:
    raise ContractError("no kernels run this problem", got="H=100")


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (_no_memory, "no memory for the operator's scratch (CUDA out of memory. Tried to allocate 708.00 MiB.); to"),
        (_no_kernel, "no kernels run this problem; got H=100"),
    ],
)
def test_what_fails_at_load_stays_with_vllm(
    make: Any, lines: list[Any], monkeypatch: pytest.MonkeyPatch, fails: Any, said: str
) -> None:
    from ttnn_moe.integrations.vllm.served import ServedLayer

    chosen = _triton()
    monkeypatch.setattr(f"{METHOD}.select_unquantized_moe_backend", lambda moe_config: chosen)
    monkeypatch.setattr(ServedLayer, "prepare", fails)
    layer = make()
    method = layer.quant_method
    assert not served(layer) and (method.unquantized_backend, method.experts_cls) == chosen
    assert isinstance(method.moe_kernel.fused_experts, chosen[1])
    assert said in lines[0][1]


@pytest.mark.parametrize(
    ("options", "backend", "said"),
    [
        ({"apply_router_weight_on_input": True}, "reference", "multiply the input"),
        ({}, "", "backend 'cuda' cannot run here"),
        ({}, "auto", "backend 'cuda' cannot run here"),
        ({}, "cudda", "no such backend"),
    ],
)
def test_layers_that_are_refused_once_they_are_loaded(
    make: Any, lines: list[Any], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], backend: str, said: str
) -> None:
    monkeypatch.setenv("TTNN_MOE_BACKEND", backend)
    chosen = _triton()
    monkeypatch.setattr(f"{METHOD}.select_unquantized_moe_backend", lambda moe_config: chosen)
    assert not served(make(**options))
    assert said in lines[0][1]


def _triton() -> tuple[Any, Any]:
    """A choice of vLLM's that loads on a CPU."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend as Backend

    if not REAL:
        return Backend.TRITON, vllm_stand_in.VllmExperts
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    return Backend.TRITON, TritonExperts
