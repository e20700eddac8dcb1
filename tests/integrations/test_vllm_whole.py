"""Qwen3-MoE whole inside vLLM itself, on a CPU: its layers and its weights, and what stays with vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vllm_layers import REAL, tiny
from vllm_whole import built, config_of, held, kinds, logits, ready

pytestmark = [
    pytest.mark.skipif(not REAL, reason="vLLM is not installed: make test-vllm has it"),
    pytest.mark.usefixtures("own_model"),
]


def test_logits_are_those_of_vllms_model(whole: Any, tmp_path: Path, lines: list[tuple[int, str]]) -> None:
    ids, wanted = whole
    config = config_of(tiny(tmp_path))
    model = built(config, kinds()[0])
    assert not model.model.layers[0].paged and type(model).__name__ == "Qwen3Moe"
    assert held(model.model.layers[0].mlp.experts).quant_method.adds_itself
    found = logits(model, config, ids, torch.arange(37))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert any("runs Qwen3-MoE whole, but for attention" in line for _, line in lines)


@pytest.mark.parametrize("level", ["off", "experts", "model"])
def test_the_model_is_registered_once(
    make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: list[tuple[int, str]], level: str
) -> None:
    from vllm.model_executor.model_loader.utils import get_model_architecture
    from vllm.model_executor.models.registry import ModelRegistry

    from ttnn_moe.integrations.vllm import register

    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    monkeypatch.setenv("TTNN_MOE_VLLM", level)
    register()
    known = ModelRegistry.models["Qwen3MoeForCausalLM"]
    register()
    assert ModelRegistry.models["Qwen3MoeForCausalLM"] is known
    assert [line for _, line in lines if "ttnn-moe quantize" not in line] == []
    ours, vllms = kinds()
    found, _ = get_model_architecture(config_of(tiny(tmp_path)).model_config)
    assert found is (ours if level == "model" else vllms)


def test_a_model_on_meta_has_vllms_parameters(make: Any, tmp_path: Path) -> None:
    """So vLLM's loader finds them, by the names of Hugging Face's checkpoints."""
    ours, vllms = kinds()
    found, wanted = (built(config_of(tiny(tmp_path)), kind, "meta") for kind in (ours, vllms))
    shapes = [{name: weight.shape for name, weight in of.named_parameters()} for of in (found, wanted)]
    assert shapes[0] == shapes[1] and found.num_moe_layers == wanted.num_moe_layers == 2


def test_a_checkpoint_is_loaded(make: Any) -> None:
    """The bundled one: names of Hugging Face, by vLLM's own loading of weights."""
    from safetensors.torch import load_file

    from paths import ROOT
    from ttnn_moe.models.qwen3 import load_model

    folder = ROOT / "models/qwen3/tiny"
    tensors = {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}
    config = config_of(folder)
    with ready(config):
        made = kinds()[0](vllm_config=config)
        made.load_weights((key, value.float()) for key, value in tensors.items())
    wanted = load_model(folder, backend="reference").layers[1]
    torch.testing.assert_close(made.model.layers[1].self_attn.qkv_proj.weight, wanted.attention.qkv.weight.float())
    torch.testing.assert_close(made.model.layers[1].mlp.gate.weight, wanted.mlp.router.weight.float())


def rope_of(config: Any) -> dict[str, Any]:
    return config.model_config.hf_text_config.rope_parameters


STAYS = {
    "quantised": (lambda config: setattr(config, "quant_config", object()), "quantised"),
    "lora": (lambda config: setattr(config, "lora_config", object()), "LoRA"),
    "draft": (lambda config: setattr(config, "speculative_config", object()), "speculative"),
    "pipeline": (lambda config: setattr(config.parallel_config, "pipeline_parallel_size", 2), "pipeline"),
    "eplb": (lambda config: setattr(config.parallel_config, "enable_eplb", True), "EPLB"),
    "context": (lambda config: setattr(config.parallel_config, "decode_context_parallel_size", 2), "context"),
    "connector": (lambda config: setattr(config, "kv_transfer_config", object()), "KV connector"),
    "window": (lambda config: setattr(config.cache_config, "sliding_window", 64), "window"),
    "rope": (
        lambda config: setattr(config.model_config.hf_text_config, "rope_parameters", {"rope_type": "linear"}),
        "RoPE is 'linear'",
    ),
    "mrope": (lambda config: rope_of(config).update(mrope_section=[8, 12, 12]), "M-RoPE"),
    "partial": (lambda config: rope_of(config).update(partial_rotary_factor=0.5), "part of each head"),
    "prefetch": (lambda config: setattr(config.offload_config.prefetch, "offload_group_size", 8), "offloading"),
    "uva": (lambda config: setattr(config.offload_config.uva, "cpu_offload_gb", 8), "offloading"),
    "dbo": (lambda config: setattr(config.parallel_config, "enable_dbo", True), "--enable-dbo"),
    "ipc": (lambda config: setattr(config.load_config, "load_format", "ipc_cache"), "--load-format ipc_cache"),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_stays_with_vllm(make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """One line says why, and the class gives vLLM's own model."""
    from ttnn_moe.integrations.vllm import model_gate

    config = config_of(tiny(tmp_path))
    assert model_gate.why_not(config) is None
    change, said = STAYS[name]
    change(config)
    reason = model_gate.why_not(config)
    assert reason is not None and said in reason


def test_where_layers_do_not_serve_they_are_vllms(
    make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: list[tuple[int, str]]
) -> None:
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeModel

    monkeypatch.delenv("TTNN_MOE_BACKEND")
    assert type(built(config_of(tiny(tmp_path)), kinds()[0], "meta").model) is Qwen3MoeModel
    assert lines[0][1] == (
        "ttnn-moe: Qwen3-MoE stays with vLLM, whose experts may be served: only CUDA GPUs are served"
    )


@pytest.mark.parametrize(("backend", "served"), [("", False), ("auto", False), ("reference", True)])
def test_without_a_gpu_a_backend_is_named(
    make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: str, served: bool
) -> None:
    from ttnn_moe.integrations.vllm import model_gate

    monkeypatch.setenv("TTNN_MOE_BACKEND", backend)
    assert (model_gate.why_not(config_of(tiny(tmp_path))) is None) is served


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("task", ["embed", "classify"])
def test_models_that_pool(make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, served: bool, task: str) -> None:
    """vLLM makes a class of the model's, without its head. Of tied weights 0.22.1 itself makes none."""
    from vllm.model_executor.models import adapters

    if not served:
        monkeypatch.delenv("TTNN_MOE_BACKEND")
    config = config_of(tiny(tmp_path), runner="pooling", convert=task)
    config.model_config.hf_text_config.tie_word_embeddings = served
    pools = {"embed": adapters.as_embedding_model, "classify": adapters.as_seq_cls_model}[task]
    made = built(config, pools(kinds()[0]), "meta")
    assert hasattr(made, "pooler") and (type(made.model).__module__ == kinds()[0].__module__) is served


def test_hidden_states_that_vllm_pools(whole: Any, tmp_path: Path) -> None:
    """Those of every token, after all layers."""
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.models.adapters import as_embedding_model

    ids, found = whole[0], []
    for kind in kinds():
        config = config_of(tiny(tmp_path), runner="pooling", convert="embed")
        config.model_config.hf_text_config.tie_word_embeddings = False
        made = built(config, as_embedding_model(kind))
        with ready(config), set_forward_context(None, config):
            found.append(made(input_ids=ids, positions=torch.arange(37)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


def test_experts_that_are_refused_run_in_vllms_layer(whole: Any, tmp_path: Path) -> None:
    """As with data parallelism, where vLLM exchanges tokens."""
    ids, wanted = whole
    config = config_of(tiny(tmp_path))
    model = built(config, kinds()[0])
    for layer in model.model.layers:
        held(layer.mlp.experts).quant_method._direct = False
    torch.testing.assert_close(logits(model, config, ids, torch.arange(37)), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("first", [True, False])
def test_one_rank_alone_begins_with_the_residual(whole: Any, tmp_path: Path, first: bool) -> None:
    """Tensor parallelism: vLLM sums what the ranks' operators give."""
    from vllm.forward_context import set_forward_context

    from ttnn_moe.integrations.vllm.qwen3 import OPS

    config = config_of(tiny(tmp_path))
    layer = built(config, kinds()[0]).model.layers[0]
    x = torch.randn(5, layer.hidden_size)
    with ready(config), set_forward_context(None, config):
        attended, weight = torch.randn(5, layer.self_attn.o_proj.weight.shape[1]), layer.self_attn.o_proj.weight
        out = OPS.linear_add(x, attended, weight, first)
        torch.testing.assert_close(out, F.linear(attended, weight) + (x if first else 0))
        parts = []
        for adds in (False, True):
            held(layer.mlp.experts).quant_method.adds = adds
            norm, router = layer.post_attention_layernorm.weight, layer.mlp.gate.weight
            parts.append(OPS.experts(x, norm, layer.eps, router, layer.K, layer.renormalise, layer.experts_name))
        torch.testing.assert_close(parts[1], parts[0] + x)
