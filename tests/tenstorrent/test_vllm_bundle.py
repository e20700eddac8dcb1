"""The model as vllm-tt-plugin calls it, on the emulator: tokens of the reference, pages as vLLM deals them out."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from own_registry import own_registry
from qwen3_checkpoints import TINY
from tenstorrent_model_runs import encode
from ttnn_moe import tenstorrent
from ttnn_moe.errors import RequestError
from ttnn_moe.kv.cache import CacheSizes
from ttnn_moe.models.qwen3 import Qwen3MoeConfig, generate, load_model
from ttnn_moe.models.qwen3.tt import vllm as adapter
from ttnn_moe.models.qwen3.tt.bundles import FOLDER
from ttnn_moe.models.qwen3.tt.sizes import model_sizes
from ttnn_moe.models.qwen3.tt.vllm import Qwen3MoeForCausalLM
from ttnn_moe.tenstorrent.memory import PAGE
from ttnn_moe.tenstorrent.plans import longest_sequence

PROMPTS = ["Copy: AB12", "What is 38+990?", "Sort: VBYIJAQ"]
ROWS, CAPACITY, BLOCKS = 4, 96, 16
QWEN3_30B = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
CONFIG = SimpleNamespace(_name_or_path=str(TINY))


@pytest.fixture(params=[1, 2])
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Qwen3MoeForCausalLM]:
    pytest.importorskip("ttnn_moe._planner", reason="plans come from it")
    monkeypatch.setenv("TTNN_MOE_TT_DEVICE", "emulator")
    if not (found := tenstorrent.device.probe()).available:
        pytest.skip(found.reason)
    tenstorrent.close_device()
    with own_registry():
        handle = tenstorrent.open_device(request.param).handle
        yield Qwen3MoeForCausalLM.initialize_vllm_model(CONFIG, handle, ROWS, CAPACITY, tt_data_parallel=1)
    tenstorrent.close_device()


def shape(sizes: CacheSizes, block: int = PAGE) -> tuple[int, int, int, int]:
    return BLOCKS, sizes.kv_heads, block, sizes.head_dim


def padded(texts: list[list[int]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one in texts], batch_first=True).int()


def serve(model: Qwen3MoeForCausalLM, texts: list[list[int]], new: int, tables: Tensor) -> list[list[int]]:
    """Greedy tokens, as the plugin's runner asks for them: rows of a decode step are padded with position -1."""
    cache = model.allocate_kv_cache(shape(model.model.cache_sizes), torch.bfloat16, model.model.cache_sizes.layers)
    model.warmup_model_decode(cache, max_batch_size=2, num_blocks=3)
    lengths = torch.tensor([len(one) for one in texts])
    logits = model.prefill_forward(
        tokens=padded(texts), page_table=tables, kv_cache=cache, enable_trace=False, prompt_lens=lengths, start_pos=None
    )
    assert logits.shape == (len(texts), 1, model.model.config.vocab_size)
    made = [[token] for token in logits[:, -1].argmax(-1).tolist()]
    for step in range(new - 1):
        tokens, places = torch.zeros(ROWS, 1, dtype=torch.int32), torch.full((ROWS,), -1, dtype=torch.int32)
        tokens[: len(texts), 0] = torch.tensor([one[-1] for one in made])
        places[: len(texts)] = lengths + step
        table = torch.zeros(ROWS, tables.shape[1], dtype=torch.int32)
        table[: len(texts)] = tables
        out = model.decode_forward(tokens=tokens, page_table=table, kv_cache=cache, start_pos=places)
        out, events = model.read_decode_output(out, async_read=True)
        out = model.process_decode_output_host(out, is_tokens=False)
        assert not events and not out[len(texts) :].any()
        for one, token in zip(made, out[: len(texts), -1].argmax(-1).tolist(), strict=True):
            one.append(token)
    return made


@pytest.mark.slow(20)
def test_tokens_of_the_reference(served: Qwen3MoeForCausalLM) -> None:
    texts = encode(PROMPTS)
    want = generate(load_model(TINY, "reference"), texts, max_new_tokens=5).tokens
    # pages in no order, as a server that has run for a while deals them out
    tables = torch.tensor([[9, 2, 5], [1, 14, 3], [7, 4, 0]], dtype=torch.int32)
    got = serve(served, texts, 5, tables)
    assert [one[: len(wanted)] for one, wanted in zip(got, want, strict=True)] == want


def test_a_cached_prefix(served: Qwen3MoeForCausalLM) -> None:
    """Another prompt begins with the same page: its tokens are not run again."""
    sizes = served.model.cache_sizes
    cache = served.allocate_kv_cache(shape(sizes), torch.bfloat16, sizes.layers)
    text = (encode(["Sort: " + "VBYIJAQ" * 12])[0] * 3)[:70]
    table = torch.tensor([[6, 3, 8]], dtype=torch.int32)
    whole = served.prefill_forward(padded([text]), table, cache, [70])
    other = torch.tensor([[6, 10, 11]], dtype=torch.int32)
    again = served.prefill_forward(padded([text]), other, cache, [70], start_pos=torch.tensor([PAGE]))
    assert torch.equal(again.argmax(-1), whole.argmax(-1))
    assert torch.nn.functional.cosine_similarity(again.float(), whole.float(), dim=-1).min() > 0.999


@pytest.mark.parametrize("served", [1], indirect=True)
def test_refused(served: Qwen3MoeForCausalLM) -> None:
    sizes, start = served.model.cache_sizes, Qwen3MoeForCausalLM.initialize_vllm_model
    with pytest.raises(RequestError, match="block-size 32"):
        served.allocate_kv_cache(shape(sizes, 64), torch.bfloat16, sizes.layers)
    with pytest.raises(RequestError, match="another model"):
        served.allocate_kv_cache(shape(sizes), torch.bfloat16, 1 + sizes.layers)
    cache = served.allocate_kv_cache(shape(sizes), torch.bfloat16, sizes.layers)
    for begin in (5, 64):
        with pytest.raises(RequestError, match="inside a page or behind its end"):
            served.prefill_forward(torch.ones(1, 40), torch.ones(1, 3), cache, [40], [begin])
    handle = served.model.mesh.handle
    for option in ({"tt_data_parallel": 2}, {"n_layers": 1}, {"optimizations": "performance"}, {"max_batch_size": 33}):
        with pytest.raises(RequestError):
            start(CONFIG, handle, **{"max_batch_size": 4, "max_seq_len": 96, **option})
    with pytest.raises(RequestError, match="hf download"):
        start(SimpleNamespace(_name_or_path="Qwen/Qwen3-30B-A3B"), handle, 4, 96)


@pytest.mark.parametrize("served", [1], indirect=True)
def test_warm_up(served: Qwen3MoeForCausalLM) -> None:
    sizes = served.model.cache_sizes
    cache = served.allocate_kv_cache(shape(sizes), torch.bfloat16, sizes.layers)
    served.warmup_model_prefill(cache, enable_trace=False, can_sample_on_device=False)
    shapes = {shape for (one,), *_ in served.model._prefilled for shape in [one]}
    assert shapes == {(32, 0), (64, 0), (128, 0)}


@pytest.mark.parametrize("served", [1], indirect=True)
def test_steps_are_replayed_only_where_the_plugin_says_so(served: Qwen3MoeForCausalLM) -> None:
    """The emulator captures nothing, so a capture fails."""
    served.model.traced = True
    sizes = served.model.cache_sizes
    cache = served.allocate_kv_cache(shape(sizes), torch.bfloat16, sizes.layers)
    zeros = torch.zeros(1, dtype=torch.int32)
    served.decode_forward(zeros[:, None], zeros, zeros[:, None], cache, enable_trace=False)
    with pytest.raises(AttributeError, match="begin_trace_capture"):
        served.decode_forward(zeros[:, None], zeros, zeros[:, None], cache, enable_trace=True)


@pytest.mark.parametrize(
    "arch, D, batch, least, most", [("wormhole_b0", 8, 32, 1, 40960), ("blackhole", 4, 32, 1, 40960)]
)
def test_tokens_that_fit(
    arch: str, D: int, batch: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    pytest.importorskip("ttnn_moe._planner", reason="plans come from it")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((TINY / "config.json").read_text())))
    monkeypatch.setattr(adapter, "library", lambda: SimpleNamespace(get_arch_name=lambda: arch))
    room = Qwen3MoeForCausalLM.get_max_tokens_all_users(
        model_name=str(tmp_path), num_devices=D, tt_data_parallel=1, max_model_len=96, max_num_seqs=batch
    )
    assert least <= room <= 96 * batch and room % PAGE == 0


def test_the_blocks_that_the_plugin_adds_fit_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """One for each request, as get_num_available_blocks_tt adds them."""
    pytest.importorskip("ttnn_moe._planner", reason="plans come from it")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((TINY / "config.json").read_text()) | QWEN3_30B))
    monkeypatch.setattr(adapter, "library", lambda: SimpleNamespace(get_arch_name=lambda: "wormhole_b0"))
    sizes = model_sizes(Qwen3MoeConfig.from_directory(tmp_path))
    room, batch = longest_sequence(sizes, 8, "wormhole_b0", "bfloat16", 32), 32
    assert room < 40960
    for asked in (40960, room, room - PAGE, 96):
        found = Qwen3MoeForCausalLM.get_max_tokens_all_users(str(tmp_path), 8, max_model_len=asked, max_num_seqs=batch)
        assert found == min(room - PAGE, asked) * batch
    monkeypatch.setattr(adapter, "longest_sequence", lambda *_: PAGE)
    with pytest.raises(RequestError, match="no room for keys and values"):
        Qwen3MoeForCausalLM.get_max_tokens_all_users(str(tmp_path), 8, max_model_len=96, max_num_seqs=batch)


def test_bundle() -> None:
    """What the plugin reads of a folder in EXTRA_MODELS_DIR."""
    (found,) = [path for path in FOLDER.iterdir() if (path / "vllm_metadata.json").is_file()]
    said = json.loads((found / "vllm_metadata.json").read_text())
    module, _, name = said["main_class"].partition(":")
    assert said["arch"] == name == json.loads((TINY / "config.json").read_text())["architectures"][0]
    assert getattr(inspect.importlib.import_module(module), name) is Qwen3MoeForCausalLM  # type: ignore[attr-defined]
