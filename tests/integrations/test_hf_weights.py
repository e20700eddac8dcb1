"""Expert weights of a transformers model: used in place, never stale, never kept alive."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import ttnn_moe
from hf_models import FP32, assert_parity, batch, experts_of, first_experts, hf, make, on_devices, on_gpu, run_with
from ttnn_moe.hf import experts as hf_experts
from ttnn_moe.selfcheck.bounds import token_errors


@pytest.fixture(autouse=True)
def _forget_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


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


@pytest.mark.parametrize("T", [2, 64])
@pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=on_gpu, id=str(d)[6:]) for d in (torch.float32, torch.bfloat16)]
)
def test_a_call_takes_little_memory_on_a_gpu(dtype: torch.dtype, T: int) -> None:
    sizes = dict(num_experts=64, hidden_size=512, moe_intermediate_size=512, num_hidden_layers=1)
    module = first_experts(make("Qwen3Moe", "cuda", dtype, **sizes))
    x, weights = torch.randn(T, 512, device="cuda", dtype=dtype), torch.rand(T, 2, device="cuda")
    ids = torch.randint(0, 64, (T, 2), device="cuda")
    run = ALL_EXPERTS_FUNCTIONS["ttnn_moe"]
    with torch.no_grad():
        run(module, x, ids, weights)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(module, x, ids, weights)
    one_expert = 3 * 512 * 512 * dtype.itemsize
    assert torch.cuda.max_memory_allocated() - before < one_expert


def replace_parameter(model: nn.Module) -> None:
    for module in experts_of(model).values():
        module.gate_up_proj = nn.Parameter(torch.randn_like(module.gate_up_proj) / 8)


def replace_data(model: nn.Module) -> None:
    for module in experts_of(model).values():
        module.down_proj.data = torch.randn_like(module.down_proj) / 5


def load(model: nn.Module, assign: bool = False) -> None:
    other = make("Qwen3Moe", model.device)  # assign takes the tensors themselves, where they are
    model.load_state_dict(other.state_dict(), assign=assign)


def other_sizes(model: nn.Module) -> None:
    for module in experts_of(model).values():
        module.num_experts = 9
        module.gate_up_proj.data = torch.randn(9, 64, 64).to(model.device) / 8
        module.down_proj.data = torch.randn(9, 64, 32).to(model.device) / 5


CHANGES = {
    "in place": lambda m: [p.mul_(1.1) for x in experts_of(m).values() for p in x.parameters()],
    "new Parameter": replace_parameter,
    "new .data": replace_data,
    "load_state_dict": load,
    "load_state_dict(assign)": lambda m: load(m, True),
    "other sizes": other_sizes,
    "to fp64 and back": lambda m: m.double().float(),
}


@on_devices
@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_seen(change: str, device: str) -> None:
    model, inputs = make("Qwen3Moe", device), batch(device)
    before = run_with(model, "ttnn_moe", lambda m: m(**inputs).logits)
    with torch.no_grad():
        CHANGES[change](model)
    assert_parity(model)
    after = run_with(model, "ttnn_moe", lambda m: m(**inputs).logits)
    assert torch.equal(before, after) == (change == "to fp64 and back")


def test_changed_weights_are_seen_by_a_compiled_model() -> None:
    model, inputs = make("Qwen3Moe"), batch()
    model.set_experts_implementation("ttnn_moe")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for change in (None, *(name for name in CHANGES if name != "other sizes")):
        with torch.no_grad():
            if change is not None:
                CHANGES[change](model)
            got = compiled(**inputs, use_cache=False).logits
        want = run_with(copy.deepcopy(model), "eager", lambda m: m(**inputs, use_cache=False).logits)
        assert token_errors(got.flatten(0, 1), want.flatten(0, 1)).max() < FP32, change
    first_experts(model).act_fn = nn.GELU()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="its activation is another"), torch.no_grad():
        compiled(**inputs, use_cache=False)


def test_tied_weights() -> None:
    """Two layers with the same Parameter, which then changes, and is then another in one of them."""
    model = make("Qwen3Moe")
    assert_parity(model)
    first, second = experts_of(model).values()
    second.gate_up_proj = first.gate_up_proj
    assert_parity(model)
    with torch.no_grad():
        first.gate_up_proj.mul_(1.3)
    assert_parity(model)
    first.gate_up_proj = nn.Parameter(torch.randn_like(first.gate_up_proj) / 8)
    assert_parity(model)


@on_devices
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


def test_a_pickled_model_is_served_after_loading() -> None:
    model, inputs, file = make("Qwen3Moe"), batch(), io.BytesIO()
    want = run_with(model, "ttnn_moe", lambda m: m(**inputs).logits)
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert not hf.served(loaded)
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, want)
    assert set(hf.served(loaded)) == set(experts_of(model))


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
        alive.append(sum(ref() is not None for one in bound for ref, _ in one.known[1:]))
        return moe(*args, **options)

    monkeypatch.setattr(hf_experts.api, "moe", spy)
    for _ in range(2):
        got = run_with(model, "ttnn_moe", lambda m: m(**inputs).logits)
        assert token_errors(got.flatten(0, 1), want.flatten(0, 1)).max() < FP32
    assert alive == [1] * 2 * len(ours)
