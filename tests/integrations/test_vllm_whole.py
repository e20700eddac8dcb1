"""Qwen3-MoE whole inside vLLM itself, on a CPU: its layers, the paged attention, and what stays with vLLM."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_vllm_model import tiny
from torch import Tensor

import vllm_layers
from vllm_layers import REAL

pytestmark = pytest.mark.skipif(not REAL, reason="vLLM is not installed: make test-vllm has it")
BLOCK = 16


@pytest.fixture(scope="module")
def make() -> Iterator[Any]:
    with vllm_layers.with_plugin() as made:
        yield made


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    from ttnn_moe.integrations.vllm import say

    monkeypatch.setenv("TTNN_MOE_BACKEND", "reference")
    monkeypatch.setattr(say, "_SAID", set())


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    logger = logging.getLogger("vllm.ttnn_moe")
    monkeypatch.setattr(logger, "log", lambda level, form, *args: found.append(form % args))
    return found


def config_of(folder: Path, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    given = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 256, "load_format": "dummy"}
    return EngineArgs(model=str(tiny(folder)), dtype="float32", **{**given, **options}).create_engine_config()


@contextmanager
def ready(config: Any) -> Iterator[None]:
    from vllm.config import set_current_vllm_config

    before = torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    try:
        with set_current_vllm_config(config), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(before)


def built(config: Any, kind: Any, device: str = "cpu") -> Any:
    """A model with random weights, equal for equal seeds, its experts loaded."""
    with ready(config), torch.device(device):
        made = kind(vllm_config=config)
        if device == "meta":
            return made
        generator = torch.Generator().manual_seed(0)
        for _, weight in sorted(made.named_parameters()):
            weight.data.normal_(1 if weight.dim() == 1 else 0, 0.08, generator=generator)
        for layer in made.model.layers:
            layer.mlp.experts.quant_method.process_weights_after_loading(layer.mlp.experts)
    return made


def kinds() -> tuple[Any, Any]:
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

    from ttnn_moe.integrations.vllm.qwen3 import Qwen3Moe

    return Qwen3Moe, Qwen3MoeForCausalLM


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [T, heads, D] after k, v [S, kv_heads, D], S >= T."""
    T, S = len(q), len(k)
    mask = torch.ones(T, S, dtype=torch.bool).tril(S - T)
    q, k, v = (x.transpose(0, 1).float() for x in (q, k, v))
    return F.scaled_dot_product_attention(q[None], k[None], v[None], mask, enable_gqa=True)[0].transpose(0, 1)


def one_sequence(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In place of vLLM's attention, which has no CPU kernels in a wheel for CUDA: all tokens are one sequence."""
    heads = (x.view(len(x), -1, self.head_size) for x in (q, k, v))
    return causal(*heads).flatten(1).to(q.dtype)


def softmax_route(hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool, **other: Any) -> Any:
    """In place of vLLM's CUDA kernel."""
    weights, ids = gating_output.float().softmax(-1).topk(topk)
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, ids.int(), None


def logits(model: Any, config: Any, ids: Tensor, positions: Tensor, metadata: Any = None) -> Tensor:
    from vllm.forward_context import set_forward_context

    with ready(config), set_forward_context(metadata, config):
        return F.linear(model.model(ids, positions), model.lm_head.weight).float()


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Tensor, Tensor]:
    """Ids, and the logits of vLLM's own model."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.fused_moe.router import fused_topk_router
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    linear = "vllm.model_executor.layers.linear.dispatch_unquantized_gemm"
    monkeypatch.setattr(linear, lambda: lambda layer, x, weight, bias: F.linear(x, weight, bias))
    rotary = RotaryEmbedding.forward_native
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", rotary)
    monkeypatch.setattr(fused_topk_router, "fused_topk", softmax_route)
    monkeypatch.setattr(Attention, "forward", one_sequence)
    config = config_of(tmp_path)
    ids = torch.randint(100, (37,), generator=torch.Generator().manual_seed(1))
    return ids, logits(built(config, kinds()[1]), config, ids, torch.arange(37))


def test_logits_are_those_of_vllms_model(whole: Any, tmp_path: Path, lines: list[str]) -> None:
    ids, wanted = whole
    config = config_of(tmp_path)
    model = built(config, kinds()[0])
    assert not model.model.layers[0].paged and type(model).__name__ == "Qwen3Moe"
    assert model.model.layers[0].mlp.experts.quant_method.adds_itself
    found = logits(model, config, ids, torch.arange(37))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert any("runs Qwen3-MoE whole, but for attention" in line for line in lines)


def flash(
    self: Any, layer: Any, q: Tensor, key: Any, value: Any, kv_cache: Tensor, step: Any, output: Tensor
) -> Tensor:
    """In place of FlashAttention: causal attention to vLLM's blocks [2, blocks, BLOCK, kv_heads, D]."""
    starts = step.query_start_loc.tolist()
    for row, (first, end) in enumerate(zip(starts, starts[1:], strict=False)):
        k, v = (kept[step.block_table[row].long()].flatten(0, 1)[: step.seq_lens[row]] for kept in kv_cache)
        output[first:end] = causal(q[first:end], k, v).to(q.dtype)
    return output


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch, whole: Any, tmp_path: Path) -> Any:
    """A model that keeps keys and values in vLLM's blocks, and a function that builds a step's metadata."""
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
    config = config_of(tmp_path)
    model = built(config, kinds()[0])
    layers = [layer.self_attn.attn for layer in model.model.layers]
    first = layers[0]
    for layer in layers:
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
        )
        made = builder.build(0, common)
        return positions, {layer.layer_name: made for layer in layers}

    return SimpleNamespace(model=model, config=config, step=step)


def test_steps_over_vllms_blocks(paged: Any, whole: Any, lines: list[str]) -> None:
    """Prompts in pieces beside another sequence, then decode steps: the logits of the whole sequence."""
    ids, wanted = whole
    other = torch.arange(9)
    positions, metadata = paged.step([20, 3], [20, 3])
    found = [logits(paged.model, paged.config, torch.cat([ids[:20], other[:3]]), positions, metadata)[:20]]
    positions, metadata = paged.step([9, 1], [29, 4])
    found += [logits(paged.model, paged.config, torch.cat([ids[20:29], other[3:4]]), positions, metadata)[:9]]
    for n in range(29, 37):
        positions, metadata = paged.step([1, 1], [n + 1, n - 24])
        now = next(iter(metadata.values()))
        assert now.decode and now.scheduler_metadata is None
        found += [logits(paged.model, paged.config, torch.stack([ids[n], other[n - 28]]), positions, metadata)[:1]]
    torch.testing.assert_close(torch.cat(found), wanted, rtol=1e-3, atol=1e-3)


def test_padding_of_a_decode_step_writes_nothing(paged: Any, whole: Any) -> None:
    """Count is what kernels read; the torch forms write all, so padding's block is the null one."""
    _, metadata = paged.step([1, 1], [1, 1], padding=3)
    step = next(iter(metadata.values()))
    assert step.count.item() == 2 and step.at.shape == (5,) and step.rows.shape == (5,)


def test_a_step_without_metadata_is_zero(paged: Any) -> None:
    """vLLM measures memory with such steps."""
    ids = torch.arange(12)
    assert logits(paged.model, paged.config, ids, ids).isfinite().all()


def test_vllms_block_table_is_read_where_it_lies(paged: Any) -> None:
    from ttnn_moe.integrations.vllm import attention

    backend = attention.Backend
    assert backend.get_preferred_block_size(16) == 64 and backend.get_required_kv_cache_layout() == "HND"
    layer = paged.model.model.layers[0].self_attn.attn
    _, metadata = paged.step([1, 1], [17, 3])
    step = metadata[layer.layer_name]
    memory = layer.impl.memory(layer.kv_cache, step)
    assert memory.keys.data_ptr() == layer.kv_cache.data_ptr() and memory.page == BLOCK
    assert memory.pages is step.block_table and memory.num_tokens is step.count
