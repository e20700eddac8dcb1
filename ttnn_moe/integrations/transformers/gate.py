"""Which experts modules of transformers the operator can stand in for: only those whose own forward it equals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.activations import SiLUActivation
from transformers.integrations.moe import use_experts_implementation

from ...contract import HIDDEN_DTYPES
from ...formats.mxfp4 import BIAS_DTYPES, BIASES
from ..gpt_oss import NAMES
from .mxfp4 import Mxfp4Experts

WEIGHTS = ("gate_up_proj", "down_proj")

# attributes that transformers sets on every experts module: the value the operator needs, and what another one means
_LAYOUT = {
    "has_gate": (True, "its experts have no gate"),
    "has_bias": (False, "its experts have biases"),
    "is_transposed": (False, "its weights are transposed, gate_up_proj [E, H, 2I] and down_proj [E, I, H]"),
    "is_concatenated": (True, "its gate and up rows are interleaved"),
    "has_post_expert_norm": (False, "it normalises the experts' outputs"),
}


@use_experts_implementation
class _WithoutOwnGate:
    def __init__(self, config: Any):
        pass

    def forward(self) -> None:
        pass


# what transformers gives a class that has no gate of its own: act_fn(gate) * up
_DEFAULT_GATE = _WithoutOwnGate._apply_gate.__code__  # type: ignore[attr-defined]

_WATCHED = (*_LAYOUT, "num_experts", "_apply_gate", "arranged")


@dataclass(frozen=True)
class Refusal:
    """Why a module is not served. remedy: None: to take another experts implementation."""

    why: str
    got: object
    expected: object
    remedy: str | None = None


def why_not(module: nn.Module) -> Refusal | None:
    """None if the operator computes what module's own forward does. Reads no values; torch.compile traces it."""
    if isinstance(module, Mxfp4Experts):
        return _why_not_parametrised(module) or _why_not_packed(module)
    # unknown tensors before the gate: of a quantised module it is they that say why
    return (
        _why_not_layout(module) or _why_not_tensors(module) or _why_not_activation(module) or _why_not_weights(module)
    )


def traits(module: Any) -> tuple[object, ...]:
    """What a module's Experts depend on besides the weights themselves; cheap, to tell whether to make them again."""
    state = module.__dict__
    own = (*map(state.get, _WATCHED), *state["_parameters"], *state["_buffers"])
    # a class may get another gate later
    return type(module), getattr(type(module), "_apply_gate", None), getattr(module, "act_fn", None), *own


def _why_not_layout(module: Any) -> Refusal | None:
    why, got, expected = [], [], []
    for attribute, (needed, meaning) in _LAYOUT.items():
        value = getattr(module, attribute, needed)
        if value != needed:
            why.append(meaning)
            got.append(f"{attribute}={value}")
            expected.append(f"{attribute}={needed}")
    return Refusal("; ".join(why), ", ".join(got), ", ".join(expected)) if why else None


def _why_not_parametrised(module: Any) -> Refusal | None:
    if parametrize.is_parametrized(module):
        return Refusal("its weights are parametrised", list(module.parametrizations), "plain parameters")
    return None


def _why_not_packed(module: Any) -> Refusal | None:
    # accelerate takes a state dict, which has the checkpoint's bytes, and puts those in place of the arranged ones
    hook = getattr(module, "_hf_hook", None)
    if module.arranged and any(getattr(each, "offload", False) is True for each in getattr(hook, "hooks", (hook,))):
        return Refusal(
            "accelerate offloads its arranged weights",
            "a model that was offloaded after it was loaded",
            "a model that is offloaded while it is loaded",
            "load the model again: from_pretrained(..., device_map=...)",
        )
    tensors = module.tensors()
    if missing := [NAMES[name] for name, tensor in tensors.items() if tensor is None]:
        return Refusal("it lacks tensors", missing, [*NAMES.values()], "load the model again")
    dtypes = [tensors[name].dtype for name in BIASES]
    if dtypes[0] not in BIAS_DTYPES or dtypes[0] != dtypes[1]:
        return Refusal(
            "its biases have another dtype",
            dtypes,
            f"one of {list(BIAS_DTYPES)} for both",
            "load the model again: from_pretrained(..., dtype=torch.float16) keeps biases in fp32",
        )
    return None


def _why_not_tensors(module: Any) -> Refusal | None:
    if (refusal := _why_not_parametrised(module)) is not None:
        return refusal
    # their number too: not every torch.compile looks again when only the names are read
    number = len(module._parameters) + len(module._buffers)
    others = [key for key in (*module._parameters, *module._buffers) if key not in WEIGHTS]
    if number > len(WEIGHTS) or others:
        return Refusal("it has tensors that the operator does not know (quantised?)", others, f"only {list(WEIGHTS)}")
    return None


def _why_not_activation(module: Any) -> Refusal | None:
    gate = getattr(module, "_apply_gate", None)
    # by its code, which torch.compile reads right; of a method it misreads __module__ (2.11) and a getattr of __func__
    if gate is not None and getattr(gate, "__code__", None) is not _DEFAULT_GATE:
        got = getattr(gate, "__qualname__", type(gate).__name__)
        return Refusal("it has a gate of its own", got, "silu(gate) * up")
    act_fn = getattr(module, "act_fn", None)
    if not (act_fn is nn.functional.silu or type(act_fn) in (nn.SiLU, SiLUActivation)):
        return Refusal("its activation is another", getattr(act_fn, "__name__", type(act_fn).__name__), "SiLU")
    return None


def _why_not_weights(module: Any) -> Refusal | None:
    for key in WEIGHTS:
        weight = getattr(module, key, None)
        if not isinstance(weight, Tensor):
            return Refusal(f"it has no weights {key}", type(weight).__name__, "a tensor")
        if hasattr(type(weight), "__tensor_flatten__"):  # so torch.compile sees it, too
            return Refusal(f"{key} is no plain tensor (quantised or sharded?)", type(weight).__name__, "a plain tensor")
        if weight.dtype not in HIDDEN_DTYPES:
            return Refusal(f"{key} has an unsupported dtype (quantised?)", weight.dtype, list(HIDDEN_DTYPES))
        if weight.dim() != 3 or not weight.is_contiguous():
            got = f"shape {tuple(weight.shape)}, strides {weight.stride()}"
            return Refusal(f"{key} is laid out otherwise", got, "three dimensions, row-major")
    return _why_not_together(module, module.gate_up_proj, module.down_proj)


def _why_not_together(module: Any, gate_up: Tensor, down: Tensor) -> Refusal | None:
    E, H, I = down.shape
    if tuple(gate_up.shape) != (E, 2 * I, H):
        got = f"gate_up_proj {tuple(gate_up.shape)}, down_proj {tuple(down.shape)}"
        return Refusal("its weights do not fit together", got, "[E, 2I, H] and [E, H, I]")
    if gate_up.dtype != down.dtype or gate_up.device != down.device:
        got = f"{gate_up.dtype} on {gate_up.device} and {down.dtype} on {down.device}"
        return Refusal("its weights differ", got, "one dtype, one device")
    num_experts = getattr(module, "num_experts", E)
    if num_experts != E:
        return Refusal("it says another number of experts than it has weights of", f"num_experts={num_experts}", E)
    return None
