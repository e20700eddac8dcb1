"""Qwen3-MoE whole inside vLLM itself, on a CPU: its layers, the paged attention, and what stays with vLLM."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import vllm_layers
from ttnn_moe.integrations.vllm.surface import ATTENTION, MODEL
from vllm_layers import REAL, tiny

pytestmark = pytest.mark.skipif(not REAL, reason="vLLM is not installed: make test-vllm has it")
BLOCK = 16


@pytest.fixture(scope="module")
def make() -> Iterator[Any]:
    with vllm_layers.with_plugin() as made:
        vllm_layers.needs(MODEL)
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
    return EngineArgs(model=str(folder), dtype="float32", **{**given, **options}).create_engine_config()


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
            experts = held(layer.mlp.experts)
            experts.quant_method.process_weights_after_loading(experts)
    return made


def kinds() -> tuple[Any, Any]:
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

    from ttnn_moe.integrations.vllm.qwen3 import Qwen3Moe

    return Qwen3Moe, Qwen3MoeForCausalLM


def held(experts: Any) -> Any:
    from ttnn_moe.integrations.vllm.adapter import held

    return held(experts)


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
    monkeypatch.setattr(linear, lambda *asked: lambda layer, x, weight, bias=None: F.linear(x, weight, bias))
    rotary = RotaryEmbedding.forward_native
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", rotary)
    monkeypatch.setattr(fused_topk_router, "fused_topk", softmax_route)
    monkeypatch.setattr(Attention, "forward", one_sequence)
    config = config_of(tiny(tmp_path))
    ids = torch.randint(100, (37,), generator=torch.Generator().manual_seed(1))
    return ids, logits(built(config, kinds()[1]), config, ids, torch.arange(37))


def test_logits_are_those_of_vllms_model(whole: Any, tmp_path: Path, lines: list[str]) -> None:
    ids, wanted = whole
    config = config_of(tiny(tmp_path))
    model = built(config, kinds()[0])
    assert not model.model.layers[0].paged and type(model).__name__ == "Qwen3Moe"
    assert held(model.model.layers[0].mlp.experts).quant_method.adds_itself
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
    vllm_layers.needs(ATTENTION)
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


@pytest.mark.parametrize("level", ["off", "experts", "model"])
def test_the_model_is_registered_once(
    make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: list[str], level: str
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
    assert [line for line in lines if "ttnn-moe quantize" not in line] == []
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
    "dbo": (lambda config: setattr(config.parallel_config, "enable_dbo", True), "--enable-dbo"),
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


def test_where_layers_do_not_serve_the_model_is_vllms(
    make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: list[str]
) -> None:
    monkeypatch.delenv("TTNN_MOE_BACKEND")
    ours, vllms = kinds()
    assert type(built(config_of(tiny(tmp_path)), ours, "meta")) is vllms
    assert lines[0] == ("ttnn-moe: Qwen3-MoE stays with vLLM, whose experts may be served: only CUDA GPUs are served")


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


@pytest.mark.parametrize("own", [False, True])
def test_steps_over_vllms_blocks(paged: Any, whole: Any, lines: list[str], own: bool) -> None:
    """Prompts in pieces beside another sequence, then decode steps: the logits of the whole sequence.

    Prompts run FlashAttention, or this package's kernel as on Hopper.
    """
    ids, wanted = whole
    assert not paged.builder.own_prompts and paged.builder.reorder_batch_threshold == 1
    paged.builder.own_prompts = own
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


def test_decode_tokens_beside_prompts_run_the_decode_kernel(
    paged: Any, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM puts them first. The logits are those of the whole sequence."""
    from ttnn_moe.integrations.vllm import attention

    ids, wanted = whole
    paged.builder.own_prompts = True
    found, ran = [], []
    decode = attention.decode_attention
    monkeypatch.setattr(
        attention, "decode_attention", lambda q, memory, *args: (ran.append(len(q)), decode(q, memory, *args))[1]
    )
    for new, lengths, rows in (([20, 3], [20, 3], slice(0, 20)), ([1, 5], [21, 8], slice(0, 1)), ([9], [30], slice(9))):
        positions, metadata = paged.step(new, lengths)
        given = [ids[lengths[0] - new[0] : lengths[0]], *[torch.arange(n) for n in new[1:]]]
        found.append(logits(paged.model, paged.config, torch.cat(given), positions, metadata)[rows])
        step = next(iter(metadata.values()))
        assert step.alone == (new[0] == 1) and len(step.spans) == len(new) - step.alone
    torch.testing.assert_close(torch.cat(found), wanted[:30], rtol=1e-3, atol=1e-3)
    assert ran == [1, 1], "once a layer"


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
    kept, keys = weakref.ref(layer.kv_cache), weakref.ref(memory.keys)
    assert layer.impl.memory(layer.kv_cache, step).keys is memory.keys
    del memory
    layer.kv_cache = torch.zeros(0)
    assert kept() is None and keys() is None, "vLLM frees a cache with which it measured graphs"


@pytest.mark.parametrize(
    ("options", "sizes", "most", "more"),
    [
        ({}, {}, 512, True),
        ({"max_num_seqs": 16}, {}, 32, True),
        ({"max_num_batched_tokens": 1000}, {}, 512, True),
        ({}, {"cudagraph_capture_sizes": [1, 2, 700]}, 700, False),
        ({}, {"max_cudagraph_capture_size": 64}, 64, False),
        ({"enable_lora": True}, {}, 512, False),
    ],
)
def test_larger_steps_have_graphs_too(
    tmp_path: Path, options: dict[str, Any], sizes: dict[str, Any], most: int, more: bool
) -> None:
    """vLLM's own sizes stay, and a user's choice is the user's."""
    from vllm.config import CUDAGraphMode

    from ttnn_moe.integrations.vllm.graph_sizes import MORE, GraphSizes

    found = []
    for asked in (lambda config: None, GraphSizes.verify_and_update_config):
        config = config_of(tiny(tmp_path), **{"max_num_seqs": 256, "enforce_eager": False, **options})
        compilation = config.compilation_config
        # vLLM asks before it chooses; a CPU has no graphs
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
        for name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size"):
            setattr(compilation, name, sizes.get(name))
        asked(config)
        config._set_cudagraph_sizes()
        found.append(compilation.cudagraph_capture_sizes)
    without, with_ours = found
    assert with_ours[: len(without)] == without and without[-1] == most
    limit = config.scheduler_config.max_num_batched_tokens
    assert with_ours[len(without) :] == ([size for size in MORE if size <= limit] if more else [])


def test_no_operator_writes_over_its_arguments(make: Any) -> None:
    """vLLM's compiler drops copies of what they would write over."""
    from ttnn_moe.integrations.vllm import operators

    for name in ("norm_linear", "linear_add", "experts", "begin_stream", "linear_experts"):
        schema = getattr(getattr(torch.ops, operators.NAMESPACE), name).default._schema
        assert not schema.is_mutable and not any(argument.alias_info for argument in schema.returns), name


def test_strided_cos_and_sin_are_refused(paged: Any) -> None:
    """Kernels read rows without gaps. vLLM's compiler once dropped the copies that closed them: wrong tokens."""
    impl = paged.model.model.layers[0].self_attn.attn.impl
    _, metadata = paged.step([3], [3])
    cos, sin = torch.zeros(3, 1, 64).chunk(2, -1)
    qkv = torch.zeros(3, impl.num_heads + 2 * impl.num_kv_heads, impl.head_size)
    with pytest.raises(AssertionError, match="cos has strides"):
        impl.forward(None, qkv, cos, sin, torch.zeros(0), next(iter(metadata.values())), torch.zeros(3, 1, 1))
