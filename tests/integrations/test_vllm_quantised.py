"""Checkpoints of `ttnn-moe quantize` in vLLM, on the reference backend. Without vLLM: in a stand-in of its classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ttnn_moe
import vllm_layers
from ttnn_moe.contract import Experts
from ttnn_moe.errors import BackendUnavailable, CheckpointError, ContractError
from ttnn_moe.formats.stored import STORED
from ttnn_moe.integrations.vllm.surface import QUANTISED
from vllm_layers import E, H, I, K, applied, call
from vllm_packed import config, filled, packed

WIDE = 2 * I  # so that two ranks hold a multiple of 64


@pytest.fixture(scope="module")
def make() -> Iterator[Any]:
    with vllm_layers.with_plugin() as made:
        vllm_layers.needs(QUANTISED)
        yield made


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTNN_MOE_BACKEND", "reference")


@pytest.mark.parametrize("name", ["int4_24", "mxfp4"])
def test_a_layer_has_the_references_numbers(make: Any, name: str) -> None:
    experts, tensors = packed(name)
    layer = filled(make, name, tensors)
    layer.quant_method.process_weights_after_loading(layer)
    x, weights, ids = call(9)
    routing = ttnn_moe.Routing.from_topk(ids, weights, E)
    expected = ttnn_moe.moe(x, routing, experts, backend="reference")
    torch.testing.assert_close(applied(layer, x, weights, ids), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["int4_24", "mxfp4"])
@pytest.mark.parametrize("ranks", ["tensor", "expert"])
def test_ranks_hold_their_parts(make: Any, name: str, ranks: str) -> None:
    from ttnn_moe.integrations.vllm.quantised import experts_of, part
    from ttnn_moe.integrations.vllm.served import ServedLayer

    experts, tensors = packed(name, WIDE)
    fmt, (x, weights, ids) = STORED[name], call(7)
    total = torch.zeros(7, H)
    for rank in range(2):
        here = torch.arange(4 * rank, 4 * rank + 4) if ranks == "expert" else None
        share = (0, 1) if ranks == "expert" else (rank, 2)
        parts = tuple(part(stored, tensors[key], here, *share).contiguous() for key, stored in fmt.tensors.items())
        local = WIDE // share[1]
        count = 4 if here is not None else E
        assert [own.shape for own in parts] == [stored.shape(count, H, local) for stored in fmt.tensors.values()]
        expert_map = None
        if here is not None:
            expert_map = torch.full((E,), -1, dtype=torch.int32)
            expert_map[here] = torch.arange(4, dtype=torch.int32)

        def held(*tensors: Tensor, local: int = local) -> Experts:
            return experts_of(fmt, H, local, *tensors)

        total += ServedLayer(held, E, K, 64, torch.bfloat16)(x, weights, ids, parts, expert_map).float()
    routing = ttnn_moe.Routing.from_topk(ids, weights, E)
    expected = ttnn_moe.moe(x, routing, experts, backend="reference").float()
    assert float((total - expected).norm() / expected.norm()) < 1e-2, "one rounding to bf16 a rank"


@pytest.mark.parametrize(
    ("name", "key", "bits"), [("int4_24", "w13", 0x7FC0 << 48), ("mxfp4", "down_proj_scales", 255)]
)
def test_a_scale_that_is_no_number_is_named(make: Any, name: str, key: str, bits: int) -> None:
    _, tensors = packed(name)
    broken = {**tensors, key: tensors[key].clone()}
    broken[key].view(-1)[5] = bits
    layer = filled(make, name, broken)
    with pytest.raises(ContractError, match=key):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("change", [{"format": "int3"}, {"version": 2}, {"format": None}], ids=str)
def test_unknown_formats_are_refused(make: Any, change: dict[str, Any]) -> None:
    from ttnn_moe.integrations.vllm.quantised import QuantisedConfig

    with pytest.raises(CheckpointError, match="unknown format.*quantise the original"):
        QuantisedConfig.from_config({"format": "mxfp4", "version": 1, **change})


def test_a_tensor_of_another_form_is_refused(make: Any) -> None:
    _, tensors = packed("mxfp4")
    layer = make(loaded=False, quant_config=config("mxfp4"))
    parameter = layer.gate_up_proj_blocks
    with pytest.raises(CheckpointError, match="gate_up_proj_blocks has another form"):
        parameter.weight_loader(parameter, tensors["gate_up_proj_blocks"][:, :, :3])
    scales = layer.gate_up_proj_scales
    with pytest.raises(CheckpointError, match="gate_up_proj_scales has another form"):
        scales.weight_loader(scales, tensors["gate_up_proj_scales"].float())


def test_what_cannot_be_served_is_an_error(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TTNN_MOE_BACKEND")
    _, tensors = packed("mxfp4")
    layer = filled(make, "mxfp4", tensors)
    with pytest.raises(BackendUnavailable, match="cannot be served: backend 'cuda' cannot run here"):
        layer.quant_method.process_weights_after_loading(layer)


def test_data_parallelism_is_an_error(make: Any) -> None:
    """Packed experts have no place in vLLM's exchange of tokens."""
    from ttnn_moe.integrations.vllm.quantised import QuantisedMethod

    moe = vllm_layers._changed(filled(make, "mxfp4", packed("mxfp4")[1]).moe_config, {"dp_size": 2})
    with pytest.raises(BackendUnavailable, match="layer 3: .*--data-parallel-size 1"):
        QuantisedMethod(moe, STORED["mxfp4"], "layer 3")
