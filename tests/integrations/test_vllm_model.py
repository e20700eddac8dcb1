"""Whole models in vLLM itself, on a CPU, and the sources of other versions: `make test-vllm` has both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttnn_moe
import vllm_layers
import vllm_sources
from paths import ROOT
from ttnn_moe.integrations.vllm.surface import (
    ATTENTION,
    EXPERTS,
    GPT_OSS,
    GRAPHS,
    MODEL,
    QUANTISED,
    ROUTER,
    SIDE_BY_SIDE,
)
from vllm_layers import REAL, H, expected, route
from vllm_stand_in import MOE

needs_vllm = pytest.mark.skipif(not REAL, reason="vLLM is not installed: make test-vllm has it")
SOURCES = [Path(folder) for folder in os.environ.get("TTNN_MOE_VLLM_SOURCES", "").split(":") if folder]


@pytest.fixture(scope="module")
def make() -> Iterator[Any]:
    with vllm_layers.with_plugin() as made:
        yield made


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTNN_MOE_BACKEND", "reference")


def model(folder: Path, device: str) -> Any:
    """The model of a folder's config.json, its weights not loaded."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    options = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 256, "load_format": "dummy"}
    config = EngineArgs(model=str(folder), **options).create_engine_config()
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    try:
        with set_current_vllm_config(config), torch.device(device):
            return initialize_model(vllm_config=config), config
    finally:
        torch.set_default_dtype(before)


def moe_layers(of: nn.Module) -> dict[str, Any]:
    return {name: layer for name, layer in of.named_modules() if type(layer).__name__ in ("FusedMoE", "RoutedExperts")}


@needs_vllm
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_model_of_two_layers_is_served(make: Any, tmp_path: Path, device: str) -> None:
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    made, config = model(vllm_layers.tiny(tmp_path), device)
    layers = moe_layers(made)
    assert len(layers) == 2
    for layer in layers.values():
        assert type(layer.quant_method).__name__ == "TtnnMoeMethod"
        assert layer.w13_weight.device.type == device
    if device == "cpu":
        for layer in layers.values():
            for weight in (layer.w13_weight, layer.w2_weight):
                weight.data.normal_(0, 0.1)
        process_weights_after_loading(made, config.model_config, torch.device("cpu"))
        assert all(layer.quant_method._served is not None for layer in layers.values())
        scratch = {id(layer.quant_method._served._prepared) for layer in layers.values()}
        assert len(scratch) == 2


@needs_vllm
def test_a_quantised_checkpoint_is_loaded_and_served(make: Any) -> None:
    """The bundled int4_24 model, by vLLM's own loading of weights."""
    from safetensors.torch import load_file
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    vllm_layers.needs(QUANTISED)
    folder = ROOT / "models/qwen3/tiny_int4_24"
    made, config = model(folder, "cpu")
    tensors = {key: value for file in sorted(folder.glob("*.safetensors")) for key, value in load_file(file).items()}
    made.load_weights(iter(tensors.items()))
    process_weights_after_loading(made, config.model_config, torch.device("cpu"))
    layers = {name.removesuffix(".routed_experts"): layer for name, layer in moe_layers(made).items()}
    assert set(layers) == {key.rpartition(".")[0] for key in tensors if key.endswith("experts.w13")}
    for name, layer in layers.items():
        experts = ttnn_moe.Experts.int4_24(tensors[f"{name}.w13"], tensors[f"{name}.w2"])
        x = torch.randn(5, experts.H, generator=torch.Generator().manual_seed(1)).bfloat16()
        weights, ids = route(x, torch.randn(5, experts.E, generator=torch.Generator().manual_seed(2)), 2, True)
        routing = ttnn_moe.Routing.from_topk(ids, weights, experts.E)
        wanted = ttnn_moe.moe(x, routing, experts, backend="reference")
        torch.testing.assert_close(vllm_layers.applied(layer, x, weights, ids), wanted, rtol=0, atol=0)


@needs_vllm
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_a_layer_runs_in_vllms_runner(make: Any, shared: bool) -> None:
    """Router, shared experts and the operator together: forward of the whole layer."""
    from vllm.forward_context import get_forward_context, set_forward_context

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    layer = make(shared_experts=Twice() if shared else None)
    x = torch.randn(6, H, generator=torch.Generator().manual_seed(4)).bfloat16()
    logits = torch.randn(6, vllm_layers.E, generator=torch.Generator().manual_seed(5))
    with set_forward_context(None, make.config):
        get_forward_context().all_moe_layers = None  # layers by their names: those of other tests are there too
        found = layer.whole(x.clone(), logits)
    wanted = expected(x, *route(x, logits, vllm_layers.K, True), layer.w13_weight, layer.w2_weight)
    torch.testing.assert_close(found, 2 * x + wanted if shared else wanted, rtol=0, atol=0)


@needs_vllm
def test_vllm_finds_the_plug_in(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import plugins
    from vllm.model_executor.custom_op import op_registry_oot

    entry = 'ttnn_moe = "ttnn_moe.integrations.vllm:register"'
    assert (
        f'[project.entry-points."{plugins.DEFAULT_PLUGINS_GROUP}"]\n{entry}\n' in (ROOT / "pyproject.toml").read_text()
    )
    info = tmp_path / "ttnn_moe-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ttnn-moe\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[{plugins.DEFAULT_PLUGINS_GROUP}]\n{entry.replace(chr(34), '')}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("VLLM_PLUGINS", "ttnn_moe")
    hook = op_registry_oot.pop(vllm_layers.HOOK)
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    try:
        plugins.load_general_plugins()
        assert op_registry_oot[vllm_layers.HOOK] is hook
    finally:
        op_registry_oot[vllm_layers.HOOK] = hook


@pytest.mark.skipif(not SOURCES, reason="TTNN_MOE_VLLM_SOURCES names no folder that holds another vLLM's vllm/")
@pytest.mark.parametrize("folder", SOURCES, ids=lambda folder: folder.name)
def test_other_versions_have_what_the_adapter_uses(make: Any, folder: Path) -> None:
    from ttnn_moe.integrations.vllm.adapter import TtnnMoeExperts

    classes = "FusedMoEExperts", "FusedMoEExpertsModular"
    asked = vllm_sources.abstract_methods(folder, f"{MOE}.modular_kernel", *classes)
    assert len(asked) > 5 and asked <= set(vars(TtnnMoeExperts))
    assert EXPERTS.why_not(vllm_sources.found_in(folder)) is None
    assert QUANTISED.why_not(vllm_sources.found_in(folder)) is None
    assert GPT_OSS.why_not(vllm_sources.found_in(folder)) is None
    assert ROUTER.why_not(vllm_sources.found_in(folder)) is None
    assert GRAPHS.why_not(vllm_sources.found_in(folder)) is None


@needs_vllm
def test_sources_are_read_as_the_installed_are(make: Any) -> None:
    import vllm

    from ttnn_moe.integrations.vllm.surface import installed

    found = vllm_sources.found_in(Path(vllm.__file__).parent.parent)
    for surface in (EXPERTS, MODEL, ATTENTION, SIDE_BY_SIDE, QUANTISED, GPT_OSS, GRAPHS, ROUTER):
        if surface.why_not(installed) is not None:
            continue
        for module, path in {**surface.exact, **surface.has}:
            assert list(found(module, path)) == list(installed(module, path)), (module, path)
