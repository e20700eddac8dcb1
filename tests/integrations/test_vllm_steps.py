"""Steps of Qwen3-MoE whole inside vLLM, on a CPU: attention over vLLM's blocks, padding, graphs."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_layers import REAL, tiny
from vllm_whole import BLOCK, config_of, held, logits

pytestmark = [
    pytest.mark.skipif(not REAL, reason="vLLM is not installed: make test-vllm has it"),
    pytest.mark.usefixtures("own_model"),
]


@pytest.mark.parametrize("own", [False, True])
def test_steps_over_vllms_blocks(paged: Any, whole: Any, lines: list[tuple[int, str]], own: bool) -> None:
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


def test_attention_is_divided_into_units(paged: Any, whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a kernel gains by it. Graphs keep the address of the units."""
    from ttnn_moe.cuda.attention import decode_units
    from ttnn_moe.integrations.vllm import attention

    asked: list[Any] = []
    monkeypatch.setattr(decode_units, "serves", lambda T, kv_heads, capacity, device: T > 1)
    monkeypatch.setattr(decode_units, "extra", lambda kv_heads, device: 3)
    monkeypatch.setattr(decode_units, "launch", lambda *args: (asked.append(args), args[-1])[1])
    builder, given = paged.builder, []
    decode = attention.decode_attention
    monkeypatch.setattr(
        attention, "decode_attention", lambda q, memory, *a: (given.append(memory.units), decode(q, memory, *a))[1]
    )
    builder.own_prompts, builder.units = True, torch.empty(7, 4, dtype=torch.int32)
    for new, lengths, padding in (
        ([20, 15], [20, 15], 0),
        ([1, 1], [16, 21], 2),
        ([1, 1], [16, 21], 3),  # more than there is room for
        ([1, 1], [22, 4], 0),
        ([1, 5], [23, 9], 0),
    ):
        positions, metadata = paged.step(new, lengths, padding)
        given.append(next(iter(metadata.values())).units)
        if not padding:  # the torch form reads the keys of padding, too
            logits(paged.model, paged.config, whole[0][: len(positions)], positions, metadata)
    assert [units is builder.units for units in given] == [False, True, False, *[True] * 3, *[False] * 3]
    assert [(args[0].tolist(), int(args[1]), args[2:4]) for args in asked] == [
        ([15, 20, 255, 255], 2, (3 * BLOCK, 3)),
        ([21, 3], 2, (3 * BLOCK, 3)),
    ]


def test_padding_of_a_decode_step_writes_nothing(paged: Any, whole: Any) -> None:
    """Count is what kernels read; the torch forms write all, so padding's block is the null one."""
    _, metadata = paged.step([1, 1], [1, 1], padding=3)
    step = next(iter(metadata.values()))
    assert step.count.item() == 2 and step.at.shape == (5,) and step.rows.shape == (5,)


def test_padding_of_any_step_runs_no_expert(paged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What graphs read has one address, since they hold no metadata. Before the first step all tokens count."""
    model = paged.model.model
    counts, served = [], type(held(model.layers[0].mlp.experts).quant_method._served)
    call = served.__call__
    monkeypatch.setattr(served, "__call__", lambda self, *args: (counts.append(args[-1]), call(self, *args))[1])
    ids = torch.arange(3)
    logits(paged.model, paged.config, ids, ids)
    assert int(model.true_tokens) == paged.config.scheduler_config.max_num_batched_tokens
    for new, lengths, padding in (([20, 3], [20, 3], 4), ([1, 1], [21, 4], 3), ([1, 5], [22, 9], 0)):
        paged.step(new, lengths, padding)
        assert int(model.true_tokens) == sum(new)
    assert counts and all(count is model.true_tokens for count in counts)


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
        ({"max_num_batched_tokens": 300}, {}, 300, True),
        ({}, {"cudagraph_capture_sizes": [1, 2, 700]}, 700, False),
        ({}, {"max_cudagraph_capture_size": 64}, 64, False),
        ({"enable_lora": True}, {}, 512, False),
    ],
)
def test_larger_steps_have_graphs_too(
    tmp_path: Path, options: dict[str, Any], sizes: dict[str, Any], most: int, more: bool
) -> None:
    """vLLM's own sizes stay, and a user's choice is the user's."""
    from ttnn_moe.integrations.vllm.graph_sizes import MORE

    without, with_ours, limit = _sizes_of_graphs(tmp_path, options, sizes)
    assert with_ours[: len(without)] == without and without[-1] == most
    assert with_ours[len(without) :] == ([size for size in MORE if size <= limit] if more else [])


def test_vllms_own_sizes_stay_on_blackwell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 captures up to 1,024 tokens there."""
    from vllm.platforms.cpu import CpuPlatform

    monkeypatch.setattr(CpuPlatform, "is_device_capability_family", classmethod(lambda cls, asked, *of: asked == 100))
    without, with_ours, _ = _sizes_of_graphs(tmp_path, {"max_num_seqs": 1024}, {})
    assert set(without) <= set(with_ours)


def _sizes_of_graphs(folder: Path, options: dict[str, Any], sizes: dict[str, Any]) -> tuple[list[int], list[int], int]:
    """Sizes without the plug-in, sizes with it, and the most tokens of a step."""
    from vllm.config import CUDAGraphMode

    from ttnn_moe.integrations.vllm.graph_sizes import GraphSizes

    found = []
    for asked in (lambda config: None, GraphSizes.verify_and_update_config):
        config = config_of(tiny(folder), **{"max_num_seqs": 256, "enforce_eager": False, **options})
        compilation = config.compilation_config
        # vLLM asks before it chooses; a CPU has no graphs
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
        for name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size"):
            setattr(compilation, name, sizes.get(name))
        asked(config)
        config._set_cudagraph_sizes()
        found.append(compilation.cudagraph_capture_sizes)
    return found[0], found[1], config.scheduler_config.max_num_batched_tokens


@pytest.mark.parametrize("level", ["off", "experts", "model"])
def test_the_plug_in_chooses_sizes_of_graphs(make: Any, monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    """Also where vLLM's own model runs: this package's experts wait for the host as well. Another's choice stays."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.model_executor.models.registry import ModelRegistry

    from ttnn_moe.integrations.vllm import register
    from ttnn_moe.integrations.vllm.graph_sizes import GraphSizes
    from ttnn_moe.integrations.vllm.plug import ARCHITECTURE

    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    monkeypatch.setenv("TTNN_MOE_VLLM", level)
    monkeypatch.delitem(MODELS_CONFIG_MAP, ARCHITECTURE, raising=False)
    try:
        register()
        assert MODELS_CONFIG_MAP.get(ARCHITECTURE) is (None if level == "off" else GraphSizes)
        MODELS_CONFIG_MAP[ARCHITECTURE] = object
        register()
        assert MODELS_CONFIG_MAP[ARCHITECTURE] is object
    finally:
        MODELS_CONFIG_MAP.pop(ARCHITECTURE, None)


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
