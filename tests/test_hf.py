"""The operator as an experts implementation of transformers: parity with stock models, weights that change, graphs."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hf_models import (
    FP32,
    MODELS,
    assert_parity,
    batch,
    experts_of,
    first_experts,
    hf,
    make,
    need_cuda,
    run_with,
    transformers,
)
from numerics import token_errors
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import ttnn_moe
from ttnn_moe.hf import experts as hf_experts
from ttnn_moe.hf.inference import BackwardRefused


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        need_cuda()
    return request.param


@pytest.fixture(autouse=True)
def _forget_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


# parity with stock models


@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, device: str) -> None:
    model = make(name, device)
    assert_parity(model)
    want = {"cpu": "reference", "cuda": "cuda"}[device]
    assert set(hf.served(model).values()) == {want}


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


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_generate(name: str, use_cache: bool, device: str) -> None:
    model, inputs = make(name, device), batch(device)

    def run(model: nn.Module) -> Tensor:
        return model.generate(**inputs, max_new_tokens=8, do_sample=False, use_cache=use_cache)

    want, got = run_with(model, "eager", run), run_with(model, "ttnn_moe", run)
    assert set(hf.served(model)) == set(experts_of(model))
    assert got.shape[1] == 9 + 8 and torch.equal(got, want)


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


def test_ids_of_other_ranks_add_nothing() -> None:
    """Expert parallelism gives experts of other ranks the id num_experts."""
    module = first_experts(make("Qwen3Moe"))
    x, weights = torch.randn(5, 64), torch.rand(5, 2)
    ids = torch.randint(0, 8, (5, 2))
    off = torch.tensor([[1, 0], [0, 0], [1, 1], [0, 1], [0, 0]]).bool()
    run = ALL_EXPERTS_FUNCTIONS["ttnn_moe"]
    with torch.no_grad():
        module.config._experts_implementation = "eager"
        want = module(x, ids, weights.masked_fill(off, 0))
        assert (run(module, x, ids.masked_fill(off, 8), weights) - want).abs().max() < 1e-5
        assert run(module, x[:0], ids[:0], weights[:0]).shape == (0, 64)


def test_routing_weights_in_bf16() -> None:
    module = first_experts(make("Qwen3Moe"))
    x, weights, ids = torch.randn(5, 64), torch.rand(5, 2).bfloat16(), torch.randint(0, 8, (5, 2))
    run = ALL_EXPERTS_FUNCTIONS["ttnn_moe"]
    with torch.no_grad():
        assert torch.equal(run(module, x, ids, weights), run(module, x, ids, weights.float()))
        out = run(module.bfloat16(), x.bfloat16(), ids, weights)
    assert out.dtype == torch.bfloat16


def test_autocast_does_not_reach_the_operator(device: str) -> None:
    module = first_experts(make("Qwen3Moe", device))
    x, weights = torch.randn(3, 64, device=device), torch.rand(3, 2, device=device)
    ids = torch.randint(0, 8, (3, 2), device=device)
    run = ALL_EXPERTS_FUNCTIONS["ttnn_moe"]
    with torch.no_grad():
        want = run(module, x, ids, weights)
        with torch.autocast(device, torch.bfloat16):
            assert torch.equal(run(module, x, ids, weights), want)


# weights: never copied, never stale, never kept alive


def test_weights_are_used_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen, moe = make("Mixtral"), [], ttnn_moe.api.moe

    def spy(hidden, routing, experts, **options):
        seen.append(experts)
        return moe(hidden, routing, experts, **options)

    monkeypatch.setattr(hf_experts.api, "moe", spy)
    for _ in range(2):
        run_with(model, "ttnn_moe", lambda m: m(**batch()).logits)
    modules = list(experts_of(model).values())
    assert len(seen) == 2 * len(modules)
    for i, module in enumerate(modules):
        assert seen[i] is seen[i + len(modules)]
        tensors = seen[i].tensors
        assert tensors["gate_up"].data_ptr() == module.gate_up_proj.data_ptr()
        assert tensors["down"].data_ptr() == module.down_proj.data_ptr()


def replace_parameter(model: nn.Module) -> None:
    for module in experts_of(model).values():
        module.gate_up_proj = nn.Parameter(torch.randn_like(module.gate_up_proj) / 8)


def replace_data(model: nn.Module) -> None:
    for module in experts_of(model).values():
        module.down_proj.data = torch.randn_like(module.down_proj) / 5


def load(model: nn.Module, assign: bool = False) -> None:
    other = make("Qwen3Moe")
    model.load_state_dict(other.state_dict(), assign=assign)


def fewer_experts(model: nn.Module) -> None:
    for module in experts_of(model).values():
        module.num_experts = 9
        module.gate_up_proj.data = torch.randn(9, 64, 64) / 8
        module.down_proj.data = torch.randn(9, 64, 32) / 5


CHANGES = {
    "in place": lambda m: [p.mul_(1.1) for x in experts_of(m).values() for p in x.parameters()],
    "new Parameter": replace_parameter,
    "new .data": replace_data,
    "load_state_dict": load,
    "load_state_dict(assign)": lambda m: load(m, True),
    "other sizes": fewer_experts,
    "to fp64 and back": lambda m: m.double().float(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_seen(change: str) -> None:
    model, inputs = make("Qwen3Moe"), batch()
    before = run_with(model, "ttnn_moe", lambda m: m(**inputs).logits)
    with torch.no_grad():
        CHANGES[change](model)
    assert_parity(model)
    after = run_with(model, "ttnn_moe", lambda m: m(**inputs).logits)
    assert torch.equal(before, after) == (change == "to fp64 and back")


def test_to_another_dtype_and_device(device: str) -> None:
    model = make("Qwen3Moe")
    assert_parity(model)
    model.to(device)
    assert_parity(model)
    run = lambda m: m(**batch(device)).logits  # noqa: E731
    assert run_with(model.half(), "ttnn_moe", run).dtype == torch.float16
    assert_parity(model.float().to("cpu"))


def test_copies_are_independent() -> None:
    model = make("Qwen3Moe")
    assert_parity(model)
    twin = copy.deepcopy(model)
    assert not hf.served(twin)
    replace_parameter(twin)
    assert_parity(twin)
    assert_parity(model)


def test_models_and_replaced_weights_are_freed() -> None:
    model = make("Qwen3Moe")
    assert_parity(model)
    old = weakref.ref(first_experts(model).gate_up_proj)
    replace_parameter(model)
    gc.collect()
    assert old() is None, "weights that the module let go of are alive"
    assert_parity(model)
    module, weight = weakref.ref(first_experts(model)), weakref.ref(first_experts(model).down_proj)
    kept = len(hf_experts._BOUND)
    del model
    gc.collect()
    assert module() is None and weight() is None
    assert len(hf_experts._BOUND) < kept


def test_offloaded_weights_are_freed_after_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloading gives a layer its weights for the time of its call."""
    accelerate = pytest.importorskip("accelerate")
    model, inputs, alive, moe = make("Qwen3Moe"), batch(), [], ttnn_moe.api.moe
    want = run_with(model, "eager", lambda m: m(**inputs).logits)
    accelerate.cpu_offload(model, execution_device="cpu")
    ours = list(experts_of(model).values())

    def spy(*args, **options):
        bound = [hf_experts._BOUND[module] for module in ours if module in hf_experts._BOUND]
        alive.append(sum(one.weights._refs["down"]() is not None for one in bound))
        return moe(*args, **options)

    monkeypatch.setattr(hf_experts.api, "moe", spy)
    for _ in range(2):
        got = run_with(model, "ttnn_moe", lambda m: m(**inputs).logits)
        assert token_errors(got.flatten(0, 1), want.flatten(0, 1)).max() < FP32
    assert alive == [1] * 2 * len(ours)


# torch.compile, CUDA graphs


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("name", MODELS)
def test_compiled_whole(name: str, grad: bool) -> None:
    model, inputs = make(name), batch()
    want = run_with(model, "eager", lambda m: m(**inputs).logits)
    model.set_experts_implementation("ttnn_moe")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(grad):
        got = compiled(**inputs, use_cache=False).logits
    assert token_errors(got.flatten(0, 1), want.flatten(0, 1)).max() < FP32
    if grad:
        with pytest.raises(BackwardRefused, match="grouped_mm"):
            got.sum().backward()


def test_generate_compiled(device: str) -> None:
    """generate() compiles decoding where the cache is static: with CUDA graphs on a GPU."""
    model, inputs = make("Qwen3Moe", device), batch(device)
    options = {"mode": "reduce-overhead"} if device == "cuda" else {"backend": "aot_eager", "mode": None}
    config = transformers.generation.CompileConfig(fullgraph=True, **options)
    config._compile_all_devices = True
    graphs = torch._dynamo.utils.counters["stats"]

    def run(model: nn.Module, **more) -> Tensor:
        return model.generate(**inputs, max_new_tokens=8, do_sample=False, **more)

    want = run_with(model, "eager", run)
    before = graphs["unique_graphs"]
    got = run_with(model, "ttnn_moe", lambda m: run(m, cache_implementation="static", compile_config=config))
    assert graphs["unique_graphs"] > before, "nothing was compiled"
    assert torch.equal(got, want)


@pytest.mark.gpu
def test_no_host_sync_and_capturable() -> None:
    need_cuda()
    module = first_experts(make("Qwen3Moe", "cuda", torch.bfloat16))
    run = ALL_EXPERTS_FUNCTIONS["ttnn_moe"]
    for T in (1, 5, 200):
        x = torch.randn(T, 64, device="cuda", dtype=torch.bfloat16)
        ids, weights = torch.randint(0, 8, (T, 2), device="cuda"), torch.rand(T, 2, device="cuda")
        with torch.no_grad():
            want = run(module, x, ids, weights)
            torch.cuda.set_sync_debug_mode("error")
            try:
                run(module, x, ids, weights)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = run(module, x, ids, weights)
            out.zero_()
            graph.replay()
        assert torch.equal(out, want)
