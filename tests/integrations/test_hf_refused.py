"""What the experts implementation refuses, and how it says so; names, backends and versions of transformers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from hf_models import assert_parity, batch, first_experts, hf, make, transformers
from processes import run_python
from ttnn_moe import BackendUnavailable, ContractError, TtnnMoeError
from ttnn_moe.errors import GradientsRefused
from ttnn_moe.hf.gate import why_not
from ttnn_moe.models.qwen3 import TINY_INT4_24


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """Names that a test registers are gone after it."""
    before = set(ALL_EXPERTS_FUNCTIONS)
    yield
    for interface in (ExpertsInterface, *ExpertsInterface.__subclasses__()):
        for name in set(interface._global_mapping) - before - {"deepgemm_megamoe"}:
            del interface._global_mapping[name]


@pytest.mark.parametrize("name", [3, "", None, ["x"]])
def test_no_name(name: object) -> None:
    with pytest.raises(ContractError, match="no name of an experts implementation"):
        hf.register(name, backend="reference")


def test_what_is_no_model() -> None:
    with pytest.raises(ContractError, match="no model; got 3"):
        hf.served(3)


def call() -> tuple[Tensor, Tensor, Tensor]:
    """hidden_states, top_k_index, top_k_weights"""
    return torch.randn(3, 64), torch.randint(0, 8, (3, 2)), torch.rand(3, 2)


def set_attribute(name: str, value: object) -> Callable[[nn.Module], None]:
    return lambda module: setattr(module, name, value)


def relu(module: nn.Module) -> None:
    del module.act_fn
    module.act_fn = torch.relu


def own_gate(module: nn.Module) -> None:
    class Clamped(type(module)):  # type: ignore[misc]
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            return gate_up

    module.__class__ = Clamped


def wrapped_gate(module: nn.Module) -> None:
    gate = module._apply_gate

    @functools.wraps(gate)
    def doubled(gate_up: Tensor) -> Tensor:
        return 2 * gate(gate_up)

    module._apply_gate = doubled


def parametrise(module: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(module, "down_proj", nn.Identity())


def recast(dtype: torch.dtype) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        for weight in module.parameters():
            weight.requires_grad_(False)
            weight.data = weight.data.to(dtype)

    return change


def recast_one(module: nn.Module) -> None:
    module.down_proj.data = module.down_proj.data.bfloat16()


def transpose(module: nn.Module) -> None:
    module.down_proj.data = torch.randn(8, 32, 64).mT


def transpose_in_place(module: nn.Module) -> None:
    module.down_proj.data = module.down_proj.data.view(8, 32, 64).mT


def shard(module: nn.Module) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    module.down_proj = nn.Parameter(TwoTensor(module.down_proj.data, module.down_proj.data))


REFUSED = {
    "no gate": (set_attribute("has_gate", False), "no gate"),
    "biases": (set_attribute("has_bias", True), "biases"),
    "transposed": (set_attribute("is_transposed", True), "transposed"),
    "interleaved": (set_attribute("is_concatenated", False), "interleaved"),
    "post norm": (set_attribute("has_post_expert_norm", True), "normalises"),
    "own gate": (own_gate, "gate of its own.*Clamped"),
    "own gate of one module": (set_attribute("_apply_gate", lambda gate_up: gate_up), "gate of its own"),
    "wrapped gate": (wrapped_gate, "gate of its own"),
    "gate that is no function": (set_attribute("_apply_gate", functools.partial(torch.sum, dim=1)), "own.*partial"),
    "GELU": (set_attribute("act_fn", nn.GELU()), "activation.*GELU.*SiLU"),
    "ReLU function": (relu, "activation.*relu.*SiLU"),
    "no activation": (lambda module: delattr(module, "act_fn"), "activation.*NoneType"),
    "parametrised": (parametrise, "parametrised.*down_proj"),
    "scales": (lambda module: module.register_buffer("down_proj_scale", torch.ones(8)), "quantised.*down_proj_scale"),
    "no weights": (lambda module: delattr(module, "gate_up_proj"), "no weights gate_up_proj"),
    "tensor subclass": (shard, "no plain tensor.*TwoTensor"),
    "fp64": (recast(torch.float64), "dtype.*float64"),
    "fp8": (recast(torch.float8_e4m3fn), "quantised.*float8_e4m3fn"),
    "int8": (recast(torch.int8), "quantised.*int8"),
    "strides": (transpose, "laid out otherwise.*strides"),
    "strides of the same memory": (transpose_in_place, "laid out otherwise.*strides"),
    "shapes": (lambda module: setattr(module, "down_proj", nn.Parameter(torch.randn(8, 64, 31))), "fit together"),
    "one in bf16": (recast_one, "weights differ.*bfloat16"),
    "num_experts": (set_attribute("num_experts", 16), "num_experts=16"),
    "fewer num_experts": (set_attribute("num_experts", 4), "num_experts=4"),
}


@pytest.mark.parametrize("when", ["at first use", "after a call"])
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, when: str) -> None:
    change, reason = REFUSED[case]
    module = first_experts(make("Qwen3Moe"))
    x, ids, weights = call()
    run = ALL_EXPERTS_FUNCTIONS["ttnn_moe"]
    with torch.no_grad():
        if when == "after a call":
            run(module, x, ids, weights)
        change(module)
        with pytest.raises(ContractError, match=f"ttnn_moe cannot serve .*{reason}.*set_experts_implementation"):
            run(module, x, ids, weights)


@pytest.mark.parametrize("when", ["at first use", "after a call"])
@pytest.mark.parametrize("case", REFUSED)
def test_refused_when_compiled(case: str, when: str) -> None:
    module, run, inputs = first_experts(make("Qwen3Moe")), ALL_EXPERTS_FUNCTIONS["ttnn_moe"], call()
    compiled = torch.compile(lambda *inputs: run(module, *inputs), backend="eager", fullgraph=True)
    refused: tuple[type[Exception], ...] = (torch._dynamo.exc.Unsupported,)
    with torch.no_grad():
        if when == "after a call":
            compiled(*inputs)
            refused += (ContractError,)  # by the operator: torch 2.11 does not guard what .data of a weight is
        REFUSED[case][0](module)
        refusal = why_not(module)
        assert refusal is not None
        with pytest.raises(refused) as caught:
            compiled(*inputs)
    torch._dynamo.reset()
    if not isinstance(caught.value, ContractError):
        assert f"cannot serve {type(module).__name__}: {refusal.why}" in str(caught.value).replace("\\'", "'")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_class_that_gets_another_gate_is_refused(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module, run, inputs = first_experts(make("Qwen3Moe")), ALL_EXPERTS_FUNCTIONS["ttnn_moe"], call()
    called = torch.compile(run, backend="eager", fullgraph=True) if compiled else run
    with torch.no_grad():
        called(module, *inputs)
        monkeypatch.setattr(type(module), "_apply_gate", lambda self, gate_up: gate_up.chunk(2, -1)[0])
        with pytest.raises((ContractError, torch._dynamo.exc.Unsupported), match="gate of its own"):
            called(module, *inputs)
    torch._dynamo.reset()


def test_refusal_is_shown_through_a_model_and_its_compiled_form() -> None:
    model, inputs = make("Qwen3Moe", hidden_act="gelu"), batch()
    model.set_experts_implementation("ttnn_moe")
    with torch.no_grad():
        with pytest.raises(ContractError, match="activation.*GELU"):
            model(**inputs)
        with pytest.raises(ContractError, match="activation.*GELU"):
            torch.compile(model, backend="eager")(**inputs)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="cannot serve Qwen3MoeExperts: its activation"):
            torch.compile(model, backend="eager", fullgraph=True)(**inputs)
    torch._dynamo.reset()
    assert not hf.served(model)


def test_gpt_oss_is_refused() -> None:
    """A stock model with biases, its own gate, and another layout."""
    options = dict(num_local_experts=4, intermediate_size=32, head_dim=16, layer_types=["full_attention"] * 3)
    model = make("GptOss", **options)
    model.set_experts_implementation("ttnn_moe")
    with pytest.raises(
        ContractError,
        match="GptOssExperts: its experts have biases; its weights are transposed.*; its gate and up rows are inter",
    ):
        model(**batch())


def test_fp8_experts_are_refused() -> None:
    """A model quantised by transformers, which looks such modules up in another list."""
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    model = make("Qwen3Moe")
    config = transformers.FineGrainedFP8Config(weight_block_size=(16, 16), modules_to_not_convert=["lm_head"])
    replace_with_fp8_linear(model, config.modules_to_not_convert, config)
    model.config._experts_implementation = "ttnn_moe"
    experts = model.model.layers[0].mlp.experts
    assert type(experts).__name__ == "FP8Experts"
    with pytest.raises(ContractError, match="cannot serve FP8Experts: .*quantised.*down_proj_scale_inv"):
        experts(*call())


def test_no_backend_for_the_device() -> None:
    model = make("Qwen3Moe").to("meta")
    model.set_experts_implementation("ttnn_moe")
    with pytest.raises(BackendUnavailable, match="Qwen3MoeExperts on meta.*set_experts_implementation"):
        first_experts(model)(*(tensor.to("meta") for tensor in call()))


def test_dtype_of_hidden_states() -> None:
    x, ids, weights = call()
    with pytest.raises(ContractError, match="bfloat16 and torch.float32.*from_pretrained"):
        ALL_EXPERTS_FUNCTIONS["ttnn_moe"](first_experts(make("Qwen3Moe")), x.bfloat16(), ids, weights)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_may_give_hidden_states_another_dtype(compiled: bool) -> None:
    """Promotion gives fp32 between the layers of a bf16 model under autocast to fp16. Experts stay in bf16."""
    x, ids, weights = call()
    module, run = first_experts(make("Qwen3Moe").bfloat16()), ALL_EXPERTS_FUNCTIONS["ttnn_moe"]
    called = torch.compile(run, backend="eager", fullgraph=True) if compiled else run
    with torch.no_grad():
        want = run(module, x.bfloat16(), ids, weights)
        with torch.autocast("cpu", torch.float16):
            got = called(module, x, ids, weights)
    torch._dynamo.reset()
    assert got.dtype == torch.float32 and torch.equal(got, want.float())


@pytest.mark.parametrize("needs", ["x", "weights", "parameters"])
def test_backward_is_refused(needs: str) -> None:
    x, ids, weights = call()
    module = first_experts(make("Qwen3Moe")).requires_grad_(needs == "parameters")
    x.requires_grad_(needs == "x")
    weights.requires_grad_(needs == "weights")
    run = ALL_EXPERTS_FUNCTIONS["ttnn_moe"]
    out = run(module, x, ids, weights)
    with torch.no_grad():
        assert torch.equal(run(module, x, ids, weights), out)
    with pytest.raises(GradientsRefused, match="no backward pass.*to train.*grouped_mm.*no_grad"):
        out.sum().backward()


# names and backends


def test_backend_fixed_by_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    hf.register("ttnn_moe_on_the_cpu", backend="reference")
    model = make("Mixtral")
    assert_parity(model, name="ttnn_moe_on_the_cpu")
    assert set(hf.served(model).values()) == {"reference"}
    monkeypatch.setenv("TTNN_MOE_BACKEND", "tenstorrent")
    assert_parity(model, name="ttnn_moe_on_the_cpu")


def test_served_is_what_runs_now() -> None:
    model = make("Mixtral")
    assert_parity(model)
    assert set(hf.served(model).values()) == {"reference"}
    for other in ("grouped_mm", "eager"):
        model.set_experts_implementation(other)
        assert hf.served(model) == {}
    model.set_experts_implementation("ttnn_moe")
    assert set(hf.served(model).values()) == {"reference"}


def test_backend_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("Mixtral")
    monkeypatch.setenv("TTNN_MOE_BACKEND", "reference")
    assert_parity(model)
    monkeypatch.setenv("TTNN_MOE_BACKEND", "tenstorrent")
    for again in (model, make("Mixtral")):
        again.set_experts_implementation("ttnn_moe")
        with pytest.raises(BackendUnavailable, match="tenstorrent"), torch.no_grad():
            again(**batch())


def test_backend_that_is_not_here_is_refused_when_registered() -> None:
    with pytest.raises(BackendUnavailable, match="no such backend"):
        hf.register("ttnn_moe_x", backend="x")
    with pytest.raises(BackendUnavailable, match="tenstorrent"):
        hf.register("ttnn_moe_x", backend="tenstorrent")
    assert "ttnn_moe_x" not in ALL_EXPERTS_FUNCTIONS


@pytest.mark.parametrize("name", ["eager", "grouped_mm", "batched_mm"])
def test_names_of_transformers_are_left_alone(name: str) -> None:
    before = ALL_EXPERTS_FUNCTIONS.get(name)
    with pytest.raises(ContractError, match="there already"):
        hf.register(name)
    assert ALL_EXPERTS_FUNCTIONS.get(name) is before


def test_registering_again_is_allowed() -> None:
    hf.register()
    hf.register()


# without transformers


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(hf.TransformersUnsuitable, match="not installed.*pip install -U 'transformers>=5.7'") as caught:
        hf._require_transformers()
    assert isinstance(caught.value, TtnnMoeError) and isinstance(caught.value, ImportError)


@pytest.mark.parametrize("version", ["4.57.6", "5.6.2"])
def test_old_transformers(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # the module that an import statement finds: transformers may put a fresh one there
    module = sys.modules["transformers"]
    monkeypatch.setattr(module, "__version__", version)
    with pytest.raises(hf.TransformersUnsuitable, match=f"too old.*got {version}.*pip install"):
        hf._require_transformers()
    monkeypatch.setattr(module, "__version__", "5.24.0.dev0")
    hf._require_transformers()


def test_importing_the_package_leaves_transformers_alone() -> None:
    run_python("-c", "import sys, ttnn_moe; assert 'transformers' not in sys.modules")


def test_checkpoints_of_quantize_are_refused() -> None:
    """transformers would skip a quantisation that it does not know, and draw random experts."""
    with pytest.raises(ContractError, match="that ttnn-moe quantize made; got format 'int4_24'.*load_model"):
        transformers.AutoModelForCausalLM.from_pretrained(TINY_INT4_24, experts_implementation="ttnn_moe")
