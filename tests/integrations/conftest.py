"""What tests of the plug-in for vLLM share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import vllm_layers
from ttnn_moe.integrations.vllm.surface import ATTENTION, MODEL, SIDE_BY_SIDE
from vllm_layers import tiny
from vllm_whole import BLOCK, built, config_of, flash, kinds, logits, one_sequence, ready, softmax_route


@pytest.fixture(scope="module")
def make() -> Iterator[Any]:
    """Makes layers of vLLM; the plug-in is registered."""
    with vllm_layers.with_plugin() as made:
        yield made


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """Layers run on the reference backend, and each line is said anew."""
    from ttnn_moe.integrations.vllm import say

    monkeypatch.setenv("TTNN_MOE_BACKEND", "reference")
    monkeypatch.delenv("TTNN_MOE_VLLM", raising=False)
    monkeypatch.setattr(say, "_SAID", set())


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """What the plug-in says in vLLM's log: level and text."""
    found: list[tuple[int, str]] = []
    logger = logging.getLogger("vllm.ttnn_moe")
    monkeypatch.setattr(logger, "log", lambda level, form, *args: found.append((level, form % args)))
    return found


@pytest.fixture
def own_model(on_the_cpu: None) -> None:
    """This vLLM takes Qwen3-MoE whole."""
    vllm_layers.needs(MODEL)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Tensor, Tensor]:
    """Ids, and the logits of vLLM's own model."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.fused_moe.router import fused_topk_router
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    linear = "vllm.model_executor.layers.linear.dispatch_unquantized_gemm"
    monkeypatch.setattr(linear, lambda *asked: lambda layer, x, weight, bias=None: F.linear(x, weight, bias))
    rotary = RotaryEmbedding.forward_native
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", rotary)
    monkeypatch.setattr(fused_topk_router, "fused_topk", softmax_route)
    monkeypatch.setattr(Attention, "forward", one_sequence)
    config = config_of(tiny(tmp_path))
    ids = torch.randint(100, (37,), generator=torch.Generator().manual_seed(1))
    return ids, logits(built(config, kinds()[1]), config, ids, torch.arange(37))


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch, whole: Any, tmp_path: Path) -> Any:
    """A model that keeps keys and values in vLLM's blocks, and a function that builds a step's metadata."""
    vllm_layers.needs(ATTENTION, SIDE_BY_SIDE)
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends import flash_attn
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from ttnn_moe.integrations.vllm import attention, model_gate

    monkeypatch.setattr(
        CpuPlatform, "get_attn_backend_cls", classmethod(lambda cls, chosen, **asked: chosen.get_path())
    )
    monkeypatch.setattr(model_gate, "own_attention", lambda config: True)
    monkeypatch.setattr(flash_attn.FlashAttentionImpl, "forward", flash)
    config = config_of(tiny(tmp_path))
    model = built(config, kinds()[0])
    layers = [layer.self_attn.attn for layer in model.model.layers]
    first = layers[0]
    for layer in layers:
        if attention.side_by_side():
            layer.kv_cache = torch.zeros(9, first.num_kv_heads, BLOCK, 2 * first.head_size)
        else:
            layer.kv_cache = torch.zeros(2, 9, first.num_kv_heads, BLOCK, first.head_size).transpose(2, 3)
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=first.num_kv_heads, head_size=first.head_size, dtype=torch.float32
    )
    with ready(config):
        builder = attention.Builder(spec, [layer.layer_name for layer in layers], config, torch.device("cpu"))
    blocks = torch.tensor([[3, 1, 7], [2, 5, 4]], dtype=torch.int32)

    def step(new: list[int], lengths: list[int], padding: int = 0) -> tuple[Tensor, Any]:
        """Positions, and metadata of a step that adds so many tokens to sequences, which then have these lengths."""
        at = [range(length - n, length) for n, length in zip(new, lengths, strict=True)]
        slots = [int(blocks[row, i // BLOCK]) * BLOCK + i % BLOCK for row, part in enumerate(at) for i in part]
        positions = torch.tensor([i for part in at for i in part] + [255] * padding)
        starts = torch.tensor([0, *new]).cumsum(0)
        starts = torch.cat([starts, starts[-1:].expand(padding)]).int()
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor([*lengths, *[0] * padding], dtype=torch.int32),
            num_reqs=len(new) + padding,
            num_actual_tokens=len(positions),
            max_query_len=max(new),
            max_seq_len=max(lengths),
            block_table_tensor=F.pad(blocks[: len(new)], (0, 0, 0, padding)),
            slot_mapping=torch.tensor(slots + [-1] * padding),
            positions=positions,
            seq_lens_cpu_upper_bound=torch.tensor([*lengths, *[0] * padding], dtype=torch.int32),
        )
        made = builder.build(0, common)
        return positions, {layer.layer_name: made for layer in layers}

    return SimpleNamespace(model=model, config=config, step=step, builder=builder)
