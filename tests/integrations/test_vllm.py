"""The plug-in in vLLM's MoE layers, on the reference backend. Without vLLM: in a stand-in of its classes."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from torch import nn

import vllm_layers
import vllm_stand_in
from paths import ROOT
from processes import run_python
from ttnn_moe.errors import ContractError
from vllm_layers import HOOK, METHOD, REAL, E, H, applied, call, expected, served, warnings

BF16, FP32 = torch.bfloat16, torch.float32


pytestmark = pytest.mark.usefixtures("on_the_cpu")


def registry() -> dict[str, Any]:
    from vllm.model_executor.custom_op import op_registry_oot

    return op_registry_oot


# the hook


def test_vllm_has_what_the_adapter_uses(make: Any) -> None:
    from ttnn_moe.integrations.vllm.surface import EXPERTS, GPT_OSS, QUANTISED, installed

    assert EXPERTS.why_not(installed) is None
    assert QUANTISED.why_not(installed) is None
    assert GPT_OSS.why_not(installed) is None


def test_a_second_registration_changes_nothing(make: Any, lines: list[Any]) -> None:
    from ttnn_moe.integrations.vllm import register

    hook = registry()[HOOK]
    register()
    assert registry()[HOOK] is hook and hook.__module__ == "ttnn_moe.integrations.vllm.adapter"
    assert warnings(lines) == []


@pytest.mark.parametrize(
    ("value", "taken", "said"),
    [
        ("off", False, None),
        ("experts", True, None),
        ("MODEL", True, None),
        ("yes", False, "TTNN_MOE_VLLM has no such value; got 'yes'; expected one of off, experts, model; to fix it"),
    ],
)
def test_the_setting(
    make: Any, lines: list[Any], monkeypatch: pytest.MonkeyPatch, value: str, taken: bool, said: str | None
) -> None:
    from ttnn_moe.integrations.vllm import register
    from ttnn_moe.integrations.vllm.surface import MODEL, installed

    hook = registry().pop(HOOK)
    if REAL:
        from vllm.model_executor.models.registry import ModelRegistry

        monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    monkeypatch.setenv("TTNN_MOE_VLLM", value)
    try:
        register()
        assert (HOOK in registry()) == taken
        if value == "MODEL" and MODEL.why_not(installed) is not None:
            said = "this vLLM runs Qwen3-MoE itself, but for experts"
        found = warnings(lines)
        assert len(found) == bool(said) and all(said in text for text in found if said)
    finally:
        registry()[HOOK] = hook


def test_another_plug_in_keeps_the_class(make: Any, lines: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from ttnn_moe.integrations.vllm import register

    class Other:
        pass

    monkeypatch.setitem(registry(), HOOK, Other)
    register()
    assert registry()[HOOK] is Other
    assert "another plug-in" in lines[0][1] and "VLLM_PLUGINS=ttnn_moe" in lines[0][1]


def _takes_more(self: Any, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, shared: Any, new: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("module", "path", "value", "said"),
    [
        (METHOD, "UnquantizedFusedMoEMethod.apply", _takes_more, "takes self, layer, x, topk_weights, topk_ids, sh"),
        (f"{vllm_stand_in.MOE}.modular_kernel", "FusedMoEKernel.fused_experts", None, "is not there"),
        (f"{vllm_stand_in.MOE}.config", "FusedMoEConfig", lambda num_experts: None, "lacks experts_per_token"),
    ],
)
def test_an_unknown_vllm_is_left_alone(
    make: Any, lines: list[Any], monkeypatch: pytest.MonkeyPatch, module: str, path: str, value: Any, said: str
) -> None:
    from ttnn_moe.integrations.vllm import register

    hook = registry().pop(HOOK)
    try:
        if value is None:
            owner, _, name = path.partition(".")
            monkeypatch.delattr(f"{module}.{owner}.{name}")
        else:
            monkeypatch.setattr(f"{module}.{path}", value)
        register()
        assert HOOK not in registry()
        assert lines[0][0] == logging.WARNING and said in lines[0][1] and "to change it" in lines[0][1]
    finally:
        registry()[HOOK] = hook


def test_a_vllm_that_asks_for_more_is_left_alone(make: Any, lines: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from ttnn_moe.integrations.vllm import adapter, register

    hook = registry().pop(HOOK)
    try:
        monkeypatch.setattr(adapter.TtnnMoeExperts, "__abstractmethods__", frozenset({"something_new"}), raising=False)
        register()
        assert HOOK not in registry() and "something_new" in lines[0][1]
    finally:
        registry()[HOOK] = hook


def test_whatever_fails_vllm_starts(make: Any, lines: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from ttnn_moe.integrations.vllm import plug

    monkeypatch.setattr(plug, "_register_experts", lambda: 1 / 0)
    plug.register()
    assert lines[0][0] == logging.ERROR and "ZeroDivisionError" in lines[0][1]


# a served layer


@pytest.mark.parametrize("direct", [True, False], ids=["apply", "experts"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_layer_has_the_references_numbers(make: Any, dtype: torch.dtype, direct: bool) -> None:
    layer = make(dtype)
    assert served(layer)
    layer.quant_method._direct = direct
    for T in (1, 7, 33):
        given = call(T, dtype)
        found = applied(layer, given[0].clone(), *given[1:])
        torch.testing.assert_close(found, expected(*given, layer.w13_weight, layer.w2_weight), rtol=0, atol=0)


def test_weights_are_those_of_vllm(make: Any) -> None:
    """No copy: what vLLM changes where it lies is seen."""
    layer = make(loaded=False)
    at = layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()
    layer.quant_method.process_weights_after_loading(layer)
    assert at == (layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr())
    prepared = layer.quant_method._served._prepared
    layer.w2_weight.data.mul_(2)
    given = call(5)
    torch.testing.assert_close(
        applied(layer, *given), expected(*given, layer.w13_weight, layer.w2_weight), rtol=0, atol=0
    )
    assert layer.quant_method._served._prepared is prepared, "nothing was prepared again"


def test_a_shuffled_layout_is_not_taken(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer swaps the halves of w13: a served layer keeps them, a refused one has what vLLM chose."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend as Backend

    chosen = Backend.FLASHINFER_CUTLASS, vllm_stand_in.VllmExperts
    monkeypatch.setattr(f"{METHOD}.select_unquantized_moe_backend", lambda moe_config: chosen)
    layer = make(loaded=False)
    before = layer.w13_weight.detach().clone()
    layer.quant_method.process_weights_after_loading(layer)
    assert served(layer) and torch.equal(layer.w13_weight, before)
    method = make.method(is_lora_enabled=True)
    assert (method.unquantized_backend, method.experts_cls) == chosen


def test_more_tokens_than_one_call_takes(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ttnn_moe.integrations.vllm import served as served_layer

    monkeypatch.setattr(served_layer, "MOST_TOKENS", 16)
    layer = make()
    assert layer.quant_method._served.T == 16
    given = call(45)
    torch.testing.assert_close(
        applied(layer, *given), expected(*given, layer.w13_weight, layer.w2_weight), rtol=0, atol=0
    )


def _parameter(layer: Any) -> None:
    layer.w13_weight = nn.Parameter(torch.randn_like(layer.w13_weight), requires_grad=False)


def _data(layer: Any) -> None:
    layer.w2_weight.data = torch.randn_like(layer.w2_weight)


def _in_place(layer: Any) -> None:
    layer.w13_weight.data.neg_()


def _reload(layer: Any) -> None:
    layer.w2_weight.data.normal_()
    layer.quant_method.process_weights_after_loading(layer)


def _eplb(layer: Any) -> None:
    """Experts change places, as EPLB moves them."""
    order = torch.arange(E - 1, -1, -1)
    for weight in (layer.w13_weight, layer.w2_weight):
        weight.data.copy_(weight.data[order])


@pytest.mark.parametrize("change", [_parameter, _data, _in_place, _reload, _eplb])
def test_a_layer_follows_its_weights(make: Any, change: Any) -> None:
    layer, given = make(), call(9)
    before = applied(layer, *given)
    change(layer)
    after = applied(layer, *given)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, expected(*given, layer.w13_weight, layer.w2_weight), rtol=0, atol=0)


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("held", [[4, 4], [8], [3, 3, 2]], ids=str)
def test_ranks_together_are_the_whole(make: Any, held: list[int], ids: torch.dtype) -> None:
    """EP: each rank has some of the experts and a map, -1 for the others; results sum up. Uneven ranks too."""
    from ttnn_moe.integrations.vllm.adapter import dense
    from ttnn_moe.integrations.vllm.served import ServedLayer

    whole, given = make(FP32), call(11, FP32, ids=ids)
    given[2][3, 0] = -1
    w13, w2 = whole.w13_weight.data, whole.w2_weight.data
    order = torch.randperm(E, generator=torch.Generator().manual_seed(3))
    total, first = torch.zeros(11, H), 0
    for number in held:
        here = order[first : first + number]
        expert_map = torch.full((E,), -1, dtype=torch.int32)
        expert_map[here] = torch.arange(number, dtype=torch.int32)
        first += number
        layer = ServedLayer(dense, E, vllm_layers.K, 64, FP32)
        total += layer(*given, (w13[here], w2[here]), expert_map)
    torch.testing.assert_close(total, expected(*given, w13, w2))


def test_long_calls_add_to_out_and_another_map_is_noticed(make: Any) -> None:
    from ttnn_moe.integrations.vllm.adapter import dense
    from ttnn_moe.integrations.vllm.served import ServedLayer, local_ids

    whole, given = make(FP32), call(45, FP32)
    w13, w2 = whole.w13_weight.data, whole.w2_weight.data
    layer = ServedLayer(dense, E, vllm_layers.K, 16, FP32)
    got = layer(*given, (w13, w2), None, out=torch.ones(45, H), accumulate=True)
    torch.testing.assert_close(got, 1 + expected(*given, w13, w2))
    maps = [torch.arange(E, dtype=torch.int32), torch.arange(E, dtype=torch.int32).flip(0)]
    for expert_map in maps:
        local = given[0], given[1], local_ids(given[2], expert_map)
        torch.testing.assert_close(layer(*given, (w13, w2), expert_map), expected(*local, w13, w2))
    ids = torch.tensor([[0, 2, 3, -1, 99]])
    assert local_ids(ids, torch.tensor([-1, 0, 1])).tolist() == [[-1, 1, -1, -1, -1]]


def test_shards_of_tensor_parallel_ranks_sum_to_the_whole(make: Any) -> None:
    from ttnn_moe.integrations.vllm.adapter import dense
    from ttnn_moe.integrations.vllm.served import ServedLayer

    whole, given = make(FP32), call(6, FP32)
    gate, up = whole.w13_weight.data.chunk(2, 1)
    parts = zip(gate.chunk(2, 1), up.chunk(2, 1), whole.w2_weight.data.chunk(2, 2), strict=True)
    total = torch.zeros(6, H)
    for one_gate, one_up, one_down in parts:
        weights = torch.cat([one_gate, one_up], 1), one_down.contiguous()
        total += ServedLayer(dense, E, vllm_layers.K, 64, FP32)(*given, weights, None)
    torch.testing.assert_close(total, expected(*given, whole.w13_weight, whole.w2_weight))


@pytest.mark.slow(12)
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where a GPU is")
@pytest.mark.skipif(REAL, reason="vLLM turns Triton off where it finds no GPU")
def test_kernels_of_the_cuda_backend_in_a_layer() -> None:
    """Their scratch is shared and stays, and they read vLLM's own map of experts."""
    pytest.importorskip("triton")
    environment = {"TRITON_INTERPRET": "1", "TTNN_MOE_BACKEND": "cuda"}
    assert run_python(ROOT / "tests/support/vllm_interpreted.py", **environment).stdout.endswith("passed\n")


def test_kernels_compile_while_weights_are_read(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for layers of one size; a failure is left to where kernels are needed."""
    from ttnn_moe import reference
    from ttnn_moe.integrations.vllm import load

    begun, ended = [], threading.Event()

    def compile_ahead(self: Any, problem: Any, device: torch.device) -> None:
        begun.append((problem.T, problem.E, problem.I, device.type))
        ended.set()
        raise ContractError("NVRTC is not here", got="nothing")

    monkeypatch.setattr(load, "_BEGUN", set())
    monkeypatch.setattr(reference.ReferenceBackend, "compile_ahead", compile_ahead, raising=False)
    layers = [make(loaded=False), make(loaded=False)]
    assert ended.wait(10) and begun == [(layers[0].quant_method.moe.max_num_tokens, E, vllm_layers.I, "cpu")]
    layers[0].quant_method.process_weights_after_loading(layers[0])
    assert served(layers[0])
