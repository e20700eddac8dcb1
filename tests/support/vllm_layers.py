"""MoE layers of vLLM on a CPU: vLLM's own where it can be imported, else those of the stand-in."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ttnn_moe
import vllm_stand_in
from paths import ROOT

REAL = getattr(importlib.util.find_spec("vllm"), "origin", None) is not None
"""Whether vLLM itself is here. A mere folder of that name has no origin."""
E, K, H, I = 8, 2, 128, 64
HOOK = "UnquantizedFusedMoEMethod"
METHOD = f"{vllm_stand_in.MOE}.unquantized_fused_moe_method"


@contextmanager
def engine() -> Iterator[Any]:
    """vLLM, or its stand-in, as far as a layer needs it; yields a function that makes layers."""
    if not REAL:
        with vllm_stand_in.installed():
            yield _layers(lambda: nullcontext())
        return
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()  # the wheel is for CUDA, and finds none
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.v1.worker.workspace import init_workspace_manager

    config = VllmConfig(device_config=DeviceConfig("cpu"))
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "file://" + tempfile.mktemp(), 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    init_workspace_manager(torch.device("cpu"))
    made = _layers(lambda: set_current_vllm_config(config))
    made.config = config
    yield made


@contextmanager
def with_plugin() -> Iterator[Any]:
    """As engine, with the plug-in registered."""
    with engine() as made:
        from ttnn_moe.integrations.vllm import register

        register()
        yield made


def needs(*surfaces: Any) -> None:
    """Skip the tests of what this vLLM is not served with, by any of these."""
    from ttnn_moe.integrations.vllm.surface import installed

    reasons = [surface.why_not(installed) for surface in surfaces]
    if all(reasons):
        pytest.skip(f"not served in this vLLM: {'; '.join(map(str, reasons))}")


def served(layer: Any) -> bool:
    """Whether the operator runs the layer."""
    return layer.quant_method._served is not None


def warnings(lines: list[tuple[int, str]]) -> list[str]:
    """The texts among a log's (level, text) that warn."""
    return [text for level, text in lines if level >= logging.WARNING]


def _layers(current: Any) -> Any:
    def make(dtype: torch.dtype = torch.bfloat16, loaded: bool = True, **options: Any) -> Any:
        """A layer with random weights, loaded as vLLM loads one; options: of FusedMoE."""
        sizes = {"num_experts": E, **options}
        layers = importlib.import_module(f"{vllm_stand_in.MOE}.layer")
        with current():
            prefix = sizes.pop("prefix", f"model.layers.{next(_COUNT)}.mlp.experts")
            factory = getattr(layers, "FusedMoE", None) or layers.FusedMoEFactory
            given = {"top_k": K, "hidden_size": H, "intermediate_size": I, "params_dtype": dtype, **sizes}
            whole = factory(prefix=prefix, custom_routing_function=route, **given)
        layer = getattr(whole, "routed_experts", whole)  # from 0.33 on they hold the weights
        object.__setattr__(layer, "whole", whole)  # no submodule
        generator = torch.Generator().manual_seed(next(_COUNT))
        for weight in layer.parameters():
            if weight.dtype == dtype:
                weight.data.normal_(0, 0.1, generator=generator)
        if loaded:
            layer.quant_method.process_weights_after_loading(layer)
        return layer

    def method(**fields: Any) -> Any:
        """The method of a layer whose configuration has other fields; its weights are not loaded."""
        kind = importlib.import_module(f"{vllm_stand_in.MOE}.unquantized_fused_moe_method")
        moe = _changed(make(loaded=False).moe_config, fields)
        with current():
            return kind.UnquantizedFusedMoEMethod(moe)

    make.method = method  # type: ignore[attr-defined]
    make.current = current  # type: ignore[attr-defined]
    return make


_COUNT = iter(range(1 << 30))


def _changed(moe: Any, fields: dict[str, Any]) -> Any:
    """A FusedMoEConfig with other fields; `exchange` names the all-to-all backend of its ranks."""
    moe = copy.copy(moe)
    for name, value in fields.items():
        if isinstance(getattr(type(moe), name, None), property):
            moe.__class__ = type("Changed", (type(moe),), {name: value})
        else:
            setattr(moe, name, value)
    if "exchange" in fields:
        parallel = moe.moe_parallel_config = copy.copy(moe.moe_parallel_config)
        parallel.__class__ = type("Exchanged", (type(parallel),), {"use_all2all_kernels": True})
        parallel.all2all_backend = fields["exchange"]
    return moe


def route(hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Top-k in torch: vLLM's own is a CUDA kernel."""
    found = gating_output.float().topk(topk)
    return found.values.softmax(-1), found.indices.int()


def call(T: int, dtype: torch.dtype = torch.bfloat16, experts: int = E, ids: torch.dtype = torch.int32) -> Any:
    """x [T, H], topk_weights, topk_ids [T, K]."""
    generator = torch.Generator().manual_seed(T)
    x = torch.randn(T, H, generator=generator).to(dtype)
    return x, torch.rand(T, K, generator=generator), torch.randint(experts, (T, K), generator=generator).to(ids)


def expected(x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """The reference's result."""
    experts = ttnn_moe.Experts.dense(w13.data, w2.data)
    return ttnn_moe.moe(x, ttnn_moe.Routing.from_topk(ids, weights, experts.E), experts, backend="reference")


def applied(layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """What the layer's method computes."""
    return layer.quant_method.apply(layer, x, weights, ids, None, None)


def tiny(folder: Path) -> Path:
    """A Qwen3-MoE of two layers."""
    config = json.loads((ROOT / "models/qwen3/tiny/config.json").read_text())
    config |= {"num_hidden_layers": 2, "mlp_only_layers": []}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
