"""Reading config.json and safetensors: what loads, what is refused with which words, and how much memory."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from processes import run_python
from qwen3_checkpoints import TINY, make, prompts, reference, relative_error
from ttnn_moe.errors import BackendUnavailable, CheckpointError
from ttnn_moe.models.qwen3 import PRESETS, Qwen3MoeConfig, Tokenizer, load_model
from ttnn_moe.models.qwen3.checkpoint import INDEX
from ttnn_moe.models.qwen3.config import MOST
from ttnn_moe.models.qwen3.layers import MoE
from ttnn_moe.visible import visible

IDS = torch.tensor(prompts([11, 11]))


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a GPU is, which "auto" would choose; tests/support/qwen3_*_cases.py run there."""
    monkeypatch.setenv("TTNN_MOE_BACKEND", "reference")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make(tmp_path / "model")


def edit(directory: Path, **changes: object) -> None:
    """Change config.json; None removes a field."""
    path = directory / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def rewrite(directory: Path, change) -> None:
    """Apply change(dict of tensors) to the one weight file."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def fuse(tensors: dict[str, torch.Tensor], layers, E: int) -> None:
    """Rename the experts of these layers to transformers 5's fused form."""
    for layer in layers:
        name = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors.pop(f"{name}{e}.{part}_proj.weight") for e in range(E)])
            for part in ("gate", "up", "down")
        )
        tensors[name + "gate_up_proj"] = torch.cat((gate, up), dim=1)
        tensors[name + "down_proj"] = down


def test_shards_hold_the_same_model(directory: Path, tmp_path: Path) -> None:
    sharded = make(tmp_path / "sharded", shards="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert torch.equal(load_model(sharded)(IDS), load_model(directory)(IDS))


def test_fused_expert_names_hold_the_same_model(directory: Path) -> None:
    expected = load_model(directory)(IDS)

    # one layer stays as it is
    rewrite(directory, lambda tensors: fuse(tensors, layers=(0, 2), E=8))
    assert torch.equal(load_model(directory)(IDS), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype, directory: Path, tmp_path: Path) -> None:
    assert {p.dtype for p in load_model(directory, dtype=dtype).parameters()} == {dtype}
    stored = make(tmp_path / "stored", dtype)
    assert {p.dtype for p in load_model(stored).parameters()} == {dtype}
    with pytest.raises(CheckpointError, match="float64"):
        load_model(directory, dtype="float64")


def test_progress_ends_at_the_size_of_the_tensors(directory: Path) -> None:
    seen: list[tuple[int, int]] = []
    model = load_model(directory, progress=lambda done, total: seen.append((done, total)))
    total = sum(p.numel() * 4 for p in model.parameters())
    assert seen[-1] == (total, total) and seen == sorted(seen)


def test_a_tied_head_may_be_stored_if_it_is_the_same(tmp_path: Path) -> None:
    directory = make(tmp_path, tie_word_embeddings=True)
    expected = load_model(directory)(IDS)
    rewrite(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(load_model(directory)(IDS), expected)
    rewrite(directory, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(CheckpointError, match="lm_head.weight of its own"):
        load_model(directory)


def test_every_tensor_that_differs_is_named_at_once(directory: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.experts.7.up_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["model.layers.9.extra"] = torch.zeros(3)
        tensors["lm_head.weight"] = torch.zeros(4, 64)
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(32, dtype=torch.int8)

    rewrite(directory, spoil)
    with pytest.raises(CheckpointError) as error:
        load_model(directory)
    for words in (
        "5 tensors",
        "missing model.layers.1.mlp.experts.7.up_proj.weight [48, 64]",
        "missing model.norm.weight [64]",
        "unexpected model.layers.9.extra [3]",
        "mis-shaped lm_head.weight: [4, 64], expected [320, 64]",
        "wrong dtype of model.layers.0.self_attn.q_norm.weight: I8",
    ):
        assert words in str(error.value)


def truncate(directory: Path, keep: float, name: str = "model.safetensors") -> None:
    path = directory / name
    os.truncate(path, int(path.stat().st_size * keep))


def set_index(directory: Path, text: str) -> None:
    (directory / "model.safetensors").rename(directory / "model-1.safetensors")
    (directory / "model.safetensors.index.json").write_text(text)


DAMAGE = {
    "no config": (lambda d: (d / "config.json").unlink(), "no config.json"),
    "config is no JSON": (lambda d: (d / "config.json").write_text("{"), "config.json cannot be read"),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), "JSON object"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "it has no weights"),
    "half a file": (lambda d: truncate(d, 0.5), "model.safetensors is not a whole safetensors file"),
    "half a header": (lambda d: truncate(d, 0.001), "model.safetensors is not a whole safetensors file"),
    "empty file": (lambda d: truncate(d, 0), "model.safetensors is not a whole safetensors file"),
    "index is no JSON": (lambda d: set_index(d, "nonsense"), "index.json cannot be read"),
    "index without map": (lambda d: set_index(d, "{}"), "index.json has the wrong form"),
    "absent shard": (lambda d: set_index(d, '{"weight_map": {"x": "model-2.safetensors"}}'), "no model-2.safetensors"),
    "file elsewhere": (lambda d: set_index(d, '{"weight_map": {"x": "../x.safetensors"}}'), "outside"),
    "another model": (lambda d: edit(d, model_type="llama"), "another architecture"),
    "another class": (lambda d: edit(d, architectures=["Qwen3MoeForSequenceClassification"]), "another architecture"),
    "missing field": (lambda d: edit(d, num_local_experts=None, hidden_size=None), "no hidden_size, num_experts"),
    "missing theta": (lambda d: edit(d, rope_parameters=None), "no rope_theta"),
    "yarn": (lambda d: edit(d, rope_scaling={"rope_type": "yarn", "factor": 4.0}), "RoPE variant"),
    "half of each head": (
        lambda d: edit(d, rope_scaling={"rope_type": "default", "partial_rotary_factor": 0.5}),
        "RoPE variant",
    ),
    "sliding window of the default size": (lambda d: edit(d, use_sliding_window=True, sliding_window=None), "4096"),
    "sliding window": (lambda d: edit(d, use_sliding_window=True, sliding_window=64), "sliding-window"),
    "attention to later tokens": (lambda d: edit(d, is_causal=False), "is_causal of"),
    "activation": (lambda d: edit(d, hidden_act="gelu"), "activation"),
    "quantised": (lambda d: edit(d, quantization_config={"quant_method": "fp8"}), "fp8"),
    "text for a size": (lambda d: edit(d, hidden_size="64"), "hidden_size"),
    "heads": (lambda d: edit(d, num_key_value_heads=3), "share the key/value heads"),
    "odd heads": (lambda d: edit(d, head_dim=9), "head_dim does not fit RoPE; got 9"),
    "one dense layer without a size": (
        lambda d: edit(d, mlp_only_layers=[0], intermediate_size=0),
        "dense layers need intermediate_size; got 0",
    ),
    "more per token than experts": (lambda d: edit(d, num_experts_per_tok=9), "num_experts_per_tok=9"),
    "a million layers": (lambda d: edit(d, num_hidden_layers=10**6), "num_hidden_layers is out of range; got 1000000"),
    "a billion experts": (lambda d: edit(d, num_local_experts=10**9), "num_experts is out of range; got 1000000000"),
    "as many as allowed": (
        lambda d: edit(d, num_hidden_layers=1024, num_local_experts=16384),
        "expected at least 5033",
    ),
    "two numbers of experts": (lambda d: edit(d, num_experts=9), "num_experts and num_local_experts"),
    "another dtype": (lambda d: edit(d, dtype="float64"), "dtype in"),
    "megabytes for a name": (lambda d: edit(d, model_type="x" * 3_000_000), "another architecture"),
    "megabytes for a size": (lambda d: edit(d, hidden_size=["x" * 99] * 30_000), "hidden_size"),
    "other sizes": (lambda d: edit(d, vocab_size=321), "expected [321, 64]"),
}


@pytest.mark.parametrize("name", list(DAMAGE))
def test_damage_is_refused_with_words(name: str, directory: Path) -> None:
    damage, words = DAMAGE[name]
    damage(directory)
    with pytest.raises(CheckpointError) as error:
        load_model(directory)
    assert words in str(error.value)
    assert len(str(error.value).splitlines()) <= 4 and len(str(error.value)) < 4000
    assert str(directory) in str(error.value)


@pytest.mark.parametrize("name", MOST)
@pytest.mark.parametrize("value", [10**400, -1, 2.0, True, None])
def test_sizes_have_bounds(name: str, value: object) -> None:
    sizes = dataclasses.asdict(PRESETS["qwen3-30b-a3b"])
    assert Qwen3MoeConfig(**sizes)
    for wrong in (MOST[name] + 1, value):
        with pytest.raises(CheckpointError, match=f"{name} is out of range"):
            Qwen3MoeConfig(**{**sizes, name: wrong})


def test_an_absent_directory_a_file_and_an_absent_backend(directory: Path) -> None:
    with pytest.raises(CheckpointError, match="not a model directory"):
        load_model(directory / "nowhere")
    with pytest.raises(CheckpointError, match="not a model directory"):
        load_model(directory / "config.json")
    with pytest.raises(BackendUnavailable, match="no-such-backend"):
        load_model(directory, backend="no-such-backend")


def test_config_of_transformers_4_and_5(directory: Path) -> None:
    new = Qwen3MoeConfig.from_directory(directory)
    edit(
        directory,
        num_local_experts=None,
        num_experts=8,
        rope_parameters=None,
        rope_theta=10000.0,
        rope_scaling=None,
        dtype=None,
        torch_dtype="float32",
    )
    assert Qwen3MoeConfig.from_directory(directory) == new
    assert (new.num_experts, new.rope_theta, new.dtype) == (8, 10000.0, torch.float32)
    edit(directory, head_dim=None)
    assert Qwen3MoeConfig.from_directory(directory).head_dim == 16


def test_stop_tokens_of_both_files(directory: Path) -> None:
    (directory / "generation_config.json").write_text('{"eos_token_id": [9, 5, 11]}')
    assert Qwen3MoeConfig.from_directory(directory).eos_token_ids == (5, 9, 11)


def test_preset_has_the_size_of_its_name() -> None:
    from ttnn_moe.models.qwen3.bench import memory_needed

    needed = memory_needed(PRESETS["qwen3-30b-a3b"], torch.bfloat16, 1, 1, 1, 2048)
    assert needed["weights"] == 2 * 30_532_122_624  # parameters of Qwen3-30B-A3B


def test_a_single_file_beside_an_index_is_read_as_by_transformers(directory: Path) -> None:
    expected = load_model(directory)(IDS)
    make(directory.parent / "other", shards="100KB")
    for path in (directory.parent / "other").glob("model*"):
        path.rename(directory / path.name)
    shard = min(directory.glob("*-of-*"))
    save_file({name: tensor + 1 for name, tensor in load_file(shard).items()}, shard)
    assert torch.equal(load_model(directory)(IDS), expected)
    assert relative_error(reference(directory)(IDS).logits, expected) < 1e-4


def test_an_index_that_names_another_shard_loads_as_by_transformers(tmp_path: Path) -> None:
    directory = make(tmp_path, shards="100KB")
    expected = load_model(directory)(IDS)
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = min(index["weight_map"].values())
    (directory / INDEX).write_text(json.dumps(index))
    assert torch.equal(load_model(directory)(IDS), expected)
    assert relative_error(reference(directory)(IDS).logits, expected) < 1e-4


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    directory = make(tmp_path, shards="100KB")
    first, *_, last = sorted(directory.glob("*-of-*"))
    again = next(iter(load_file(first)))
    save_file({**load_file(last), again: load_file(first)[again] + 1}, last)
    with pytest.raises(CheckpointError, match="in two files") as error:
        load_model(directory)
    for words in (again, first.name, last.name):
        assert words in str(error.value)


def test_a_sliding_window_of_size_null_is_none(directory: Path) -> None:
    expected = load_model(directory)(IDS)
    values = {**json.loads((directory / "config.json").read_text()), "use_sliding_window": True, "sliding_window": None}
    (directory / "config.json").write_text(json.dumps(values))
    assert torch.equal(load_model(directory)(IDS), expected)
    theirs = reference(directory)
    assert theirs.config.sliding_window is None and relative_error(theirs(IDS).logits, expected) < 1e-4


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\udc9b", "\x1b]0;x\x07", "[bold]x[/]", "loop", "folder"])
def test_odd_paths(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder" / "config.json").mkdir(parents=True)
    for read in (Qwen3MoeConfig.from_directory, load_model, Tokenizer.from_directory):
        with pytest.raises(CheckpointError) as error:
            read(tmp_path / name)
        assert visible(name) in str(error.value) and str(error.value).isprintable()


def test_weights_that_move_leave_nothing_behind() -> None:
    """Layers that were prepared for the old weights do not keep them."""
    model = load_model(TINY, backend="reference", device="cpu", dtype=torch.float32)
    sparse = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoE)]
    for moe in sparse:
        moe.prepared(4)
    old = [weakref.ref(tensor) for moe in sparse for tensor in moe.experts.tensors.values()]
    model.half()
    gc.collect()
    assert old and all(tensor() is None for tensor in old)


MEASURE = """
import sys, torch
from ttnn_moe.models.qwen3 import load_model

def memory(kind):  # of this process since it was executed
    return int(open("/proc/self/status").read().split(kind + ":")[1].split()[0]) * 1024

torch.ones(4).bfloat16().float()
before = memory("VmRSS")
model = load_model(sys.argv[1])
weights = sum(p.numel() * p.element_size() for p in model.parameters())
print((memory("VmHWM") - before) / weights, weights)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("fused", [False, True])
def test_peak_memory_of_loading(fused: bool, tmp_path: Path) -> None:
    """One file of some 300 MB: the peak above the start is below 1.3 times the weights."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 768, "num_experts": 40, "num_hidden_layers": 3}
    directory = make(tmp_path, torch.bfloat16, **sizes)
    if fused:
        rewrite(directory, lambda tensors: fuse(tensors, layers=range(3), E=40))
    ratio, weights = map(float, run_python("-c", MEASURE, directory).stdout.split())
    assert weights > 250e6
    assert 0.9 < ratio < 1.3, ratio
