"""Tiny stock models of transformers, and the comparison of experts implementations on them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ttnn_moe import registry
from ttnn_moe.selfcheck.bounds import token_errors

transformers = pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

import ttnn_moe.hf as hf  # noqa: E402

COMMON = dict(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts_per_tok=2,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
MODELS = {
    "Qwen3Moe": dict(num_experts=8, moe_intermediate_size=32, intermediate_size=48, head_dim=16, mlp_only_layers=[1]),
    "Mixtral": dict(num_local_experts=4, intermediate_size=48),
    "Olmoe": dict(num_experts=8, intermediate_size=32, norm_topk_prob=True),
    "Qwen2Moe": dict(num_experts=8, moe_intermediate_size=32, intermediate_size=48, shared_expert_intermediate_size=64),
}
FP32 = 1e-5


def make(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32, **options) -> nn.Module:
    """A stock model whose experts weigh as much in the output as its residual stream does."""
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **MODELS.get(name, {}), **options})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.to(device, dtype)


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "gate_up_proj")}


def first_experts(model: nn.Module) -> nn.Module:
    return next(iter(experts_of(model).values()))


def batch(device: str = "cpu", lengths: tuple[int, ...] = (9, 4, 7)) -> dict[str, Tensor]:
    """Sequences of several lengths, padded on the left."""
    ids = torch.randint(2, 64, (len(lengths), max(lengths)))
    mask = torch.tensor([[0] * (max(lengths) - n) + [1] * n for n in lengths])
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.to(device)}


def run_with(model: nn.Module, implementation: str, run: Callable[[nn.Module], Tensor]) -> Tensor:
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        return run(model)


def assert_parity(model: nn.Module, run: Callable[[nn.Module], Tensor] | None = None, name: str = "ttnn_moe") -> None:
    """What run gives (default: logits of a padded batch) is the same with our experts and with the eager ones."""
    inputs = batch(model.device)
    run = run or (lambda model: model(**inputs, use_cache=False).logits)
    want, got = run_with(model, "eager", run), run_with(model, name, run)
    assert set(hf.served(model)) == set(experts_of(model))
    worst = float(token_errors(got.flatten(0, -2), want.flatten(0, -2).cpu()).max())
    assert worst < FP32, f"a token is off by {worst:.1e}"


# marks of what needs a GPU, and the devices that a test runs on
on_gpu = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"no CUDA device: {registry.probe('cuda').reason}"),
)
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
