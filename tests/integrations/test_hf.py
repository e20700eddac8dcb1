"""The operator as an experts implementation of transformers: parity with stock models, compiled and in CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from cuda_gpus import no_host_sync
from hf_models import (
    FP32,
    MODELS,
    assert_parity,
    batch,
    experts_of,
    first_experts,
    hf,
    make,
    on_devices,
    on_gpu,
    run_with,
    transformers,
)
from paths import TINY
from ttnn_moe.errors import GradientsRefused
from ttnn_moe.selfcheck.bounds import token_errors


@pytest.fixture(autouse=True)
def _forget_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


# parity with stock models


@on_devices
@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, device: str) -> None:
    model = make(name, device)
    assert_parity(model)
    want = {"cpu": "reference", "cuda": "cuda"}[device]
    assert set(hf.served(model).values()) == {want}


@on_devices
@pytest.mark.parametrize("name", MODELS)
def test_logits_with_a_cache(name: str, device: str) -> None:
    """Prefill and two decode steps, one token a sequence."""
    model, inputs = make(name, device), batch(device, (6, 6))

    def run(model: nn.Module) -> Tensor:
        ids, cache, logits = inputs["input_ids"], None, []
        for piece in (ids[:, :4], ids[:, 4:5], ids[:, 5:]):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits)
        return torch.cat(logits, 1)

    assert_parity(model, run)


@on_devices
@pytest.mark.parametrize("name", MODELS)
def test_logits_bf16(name: str, device: str) -> None:
    """As near to the fp32 model of the same weights as transformers' own implementation is."""
    model, inputs = make(name, device, torch.bfloat16), batch(device)
    real = inputs["attention_mask"].bool().cpu()
    exact = run_with(copy.deepcopy(model).float(), "eager", lambda m: m(**inputs).logits).cpu()[real]
    errors = {}
    for implementation in ("eager", "ttnn_moe"):
        logits = run_with(model, implementation, lambda m: m(**inputs).logits).cpu()[real]
        assert logits.dtype == torch.bfloat16
        # the median: a router's near tie, decided otherwise in bf16, changes a whole token in either
        errors[implementation] = float(token_errors(logits, exact).median())
    assert errors["ttnn_moe"] < 1.3 * errors["eager"] < 0.1, errors


@on_devices
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_generate(name: str, use_cache: bool, device: str) -> None:
    model, inputs = make(name, device), batch(device)

    def run(model: nn.Module) -> Tensor:
        return model.generate(**inputs, max_new_tokens=8, do_sample=False, use_cache=use_cache)

    want, got = run_with(model, "eager", run), run_with(model, "ttnn_moe", run)
    assert set(hf.served(model)) == set(experts_of(model))
    assert got.shape[1] == 9 + 8 and torch.equal(got, want)


@on_devices
def test_trained_checkpoint(device: str) -> None:
    """The bundled checkpoint, loaded by transformers itself, writes the same text."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(TINY, dtype=torch.float32, experts_implementation="ttnn_moe").to(device)
    inputs = transformers.AutoTokenizer.from_pretrained(TINY)("Once upon a time", return_tensors="pt").to(device)

    def run(model: nn.Module) -> Tensor:
        return model.generate(**inputs, max_new_tokens=24, min_new_tokens=24, do_sample=False)

    got = run(model)
    assert set(hf.served(model)) == set(experts_of(model))
    assert torch.equal(got, run_with(model, "eager", run))


def test_experts_weigh_enough_to_be_seen() -> None:
    """The bound above would notice one expert's weights off by a thousandth."""
    model, inputs = make("Qwen3Moe"), batch()
    before = run_with(model, "ttnn_moe", lambda m: m(**inputs).logits)
    with torch.no_grad():
        first_experts(model).down_proj[3] *= 1.001
    after = run_with(model, "ttnn_moe", lambda m: m(**inputs).logits)
    assert token_errors(after.flatten(0, 1), before.flatten(0, 1)).max() > 5 * FP32


def test_asked_for_when_loading(tmp_path: Path) -> None:
    saved = make("Qwen3Moe")
    saved.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="ttnn_moe")
    assert loaded.config._experts_implementation == "ttnn_moe"
    inputs = batch()
    want = run_with(saved, "eager", lambda m: m(**inputs).logits)
    with torch.no_grad():
        got = loaded(**inputs).logits
    assert set(hf.served(loaded)) == set(experts_of(loaded))
    assert token_errors(got.flatten(0, 1), want.flatten(0, 1)).max() < FP32
    made = transformers.AutoModelForCausalLM.from_config(saved.config, experts_implementation="ttnn_moe")
    assert made.config._experts_implementation == "ttnn_moe"


@on_devices
def test_ids_of_other_ranks_add_nothing(device: str) -> None:
    """Expert parallelism gives experts of other ranks the id num_experts."""
    module = first_experts(make("Qwen3Moe", device))
    x, weights = torch.randn(5, 64, device=device), torch.rand(5, 2, device=device)
    ids = torch.randint(0, 8, (5, 2), device=device)
    off = torch.tensor([[1, 0], [0, 0], [1, 1], [0, 1], [0, 0]], device=device).bool()
    run = ALL_EXPERTS_FUNCTIONS["ttnn_moe"]
    with torch.no_grad():
        module.config._experts_implementation = "eager"
        want = module(x, ids, weights.masked_fill(off, 0))
        # their weights are not zero here: it is the id that counts
        assert (run(module, x, ids.masked_fill(off, 8), weights) - want).abs().max() < 1e-5
        assert run(module, x[:0], ids[:0], weights[:0]).shape == (0, 64)


@pytest.mark.parametrize(
    ("name", "group", "promise"),
    [("Qwen3Moe", False, "distinct"), ("Qwen3Moe", True, "any"), ("Mixtral", False, "any"), ("Qwen2Moe", False, "any")],
)
def test_what_is_promised_of_ids(name: str, group: bool, promise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expert parallelism marks experts of other ranks, and needs a process group."""
    seen, moe = set(), hf.experts.api.moe

    def spy(*args, ids: str, **options) -> Tensor:
        seen.add(ids)
        return moe(*args, ids=ids, **options)

    monkeypatch.setattr(hf.experts.api, "moe", spy)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: group)
    run_with(make(name), "ttnn_moe", lambda m: m(**batch()).logits)
    assert seen == {promise}


def test_routing_weights_in_bf16() -> None:
    module = first_experts(make("Qwen3Moe"))
    x, weights, ids = torch.randn(5, 64), torch.rand(5, 2).bfloat16(), torch.randint(0, 8, (5, 2))
    run = ALL_EXPERTS_FUNCTIONS["ttnn_moe"]
    with torch.no_grad():
        assert torch.equal(run(module, x, ids, weights), run(module, x, ids, weights.float()))
        out = run(module.bfloat16(), x.bfloat16(), ids, weights)
    assert out.dtype == torch.bfloat16


@on_devices
def test_autocast_does_not_reach_the_operator(device: str) -> None:
    module = first_experts(make("Qwen3Moe", device))
    x, weights = torch.randn(3, 64, device=device), torch.rand(3, 2, device=device)
    ids = torch.randint(0, 8, (3, 2), device=device)
    run = ALL_EXPERTS_FUNCTIONS["ttnn_moe"]
    with torch.no_grad():
        want = run(module, x, ids, weights)
        with torch.autocast(device, torch.bfloat16):
            assert torch.equal(run(module, x, ids, weights), want)


# torch.compile, CUDA graphs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "grad"),
    # every model, and both of one model; with --long the others
    [
        pytest.param(name, grad, marks=[pytest.mark.long] * (i > 0 and grad == bool(i % 2)))
        for i, name in enumerate(MODELS)
        for grad in (False, True)
    ],
)
def test_compiled_whole(name: str, grad: bool) -> None:
    model, inputs = make(name), batch()
    want = run_with(model, "eager", lambda m: m(**inputs).logits)
    model.set_experts_implementation("ttnn_moe")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(grad):
        got = compiled(**inputs, use_cache=False).logits
    assert token_errors(got.flatten(0, 1), want.flatten(0, 1)).max() < FP32
    if grad:
        with pytest.raises(GradientsRefused, match="grouped_mm"):
            got.sum().backward()


def test_exported() -> None:
    model, inputs = make("Qwen3Moe").requires_grad_(False), {**batch(), "use_cache": False}
    want = run_with(model, "eager", lambda m: m(**inputs).logits)
    model.set_experts_implementation("ttnn_moe")
    exported = torch.export.export(model, (), inputs)
    assert "ttnn_moe.moe" in exported.graph_module.code
    got = exported.module()(**inputs).logits
    assert token_errors(got.flatten(0, 1), want.flatten(0, 1)).max() < FP32


def shortfall(model: nn.Module, inputs: dict[str, Tensor], tokens: Tensor) -> float:
    """How far below the best logit of model the tokens generated after inputs are, on average."""
    mask = torch.nn.functional.pad(
        inputs["attention_mask"], (0, tokens.shape[1] - inputs["input_ids"].shape[1]), value=1
    )
    logits = run_with(model, "eager", lambda m: m(input_ids=tokens, attention_mask=mask, use_cache=False).logits)
    first = inputs["input_ids"].shape[1]
    logits, chosen = logits[:, first - 1 : -1], tokens[:, first:, None]
    return float((logits.amax(-1) - logits.gather(-1, chosen)[..., 0]).mean())


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_generate_compiled(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """generate() compiles decoding where the cache is static: with CUDA graphs on a GPU."""
    model, inputs = make("Qwen3Moe", device, dtype), batch(device)
    exact = copy.deepcopy(model).float()
    options = {"mode": "reduce-overhead"} if device == "cuda" else {"backend": "aot_eager", "mode": None}
    config = transformers.generation.CompileConfig(fullgraph=True, **options)
    config._compile_all_devices = True
    graphs = torch._dynamo.utils.counters["stats"]
    replays, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(1), replay(graph)))

    def run(model: nn.Module, **more) -> Tensor:
        return model.generate(**inputs, max_new_tokens=8, do_sample=False, **more)

    want = run_with(model, "eager", run)
    before = graphs["unique_graphs"]
    got = run_with(model, "ttnn_moe", lambda m: run(m, cache_implementation="static", compile_config=config))
    assert graphs["unique_graphs"] > before, "nothing was compiled"
    # of 8 tokens one comes from the prefill and one from a step that warms up
    assert len(replays) >= (6 if device == "cuda" else 0), "decoding ran outside CUDA graphs"
    assert got.shape == want.shape
    if dtype == torch.float32:
        assert torch.equal(got, want)
    # in bf16 another token may win by a hair
    assert shortfall(exact, inputs, got) < 0.1
    wrong = torch.cat([got[:, :9], got[:, 9:].roll(1, 0)], 1)
    assert shortfall(exact, inputs, wrong) > 0.5


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, marks=on_gpu, id="fp32"), pytest.param(torch.bfloat16, marks=on_gpu, id="bf16")],
)
def test_no_host_sync_and_capturable(dtype: torch.dtype) -> None:
    module = first_experts(make("Qwen3Moe", "cuda", dtype))
    run = ALL_EXPERTS_FUNCTIONS["ttnn_moe"]
    for T in (1, 5, 200):
        x = torch.randn(T, 64, device="cuda", dtype=dtype)
        ids, weights = torch.randint(0, 8, (T, 2), device="cuda"), torch.rand(T, 2, device="cuda")
        with torch.no_grad():
            want = run(module, x, ids, weights)
            with no_host_sync():
                run(module, x, ids, weights)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = run(module, x, ids, weights)
            out.zero_()
            graph.replay()
        assert torch.equal(out, want)
