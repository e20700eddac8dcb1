"""Which of vLLM's MoE layers the operator can stand in for."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import torch

from ...contract import HIDDEN_DTYPES
from ...visible import shown

_DENSE_KERNELS = ("VLLM_USE_FLASHINFER_MOE_FP16",)
"""Variables by which vLLM's users choose kernels of dense layers."""
_GPT_OSS_KERNELS = (
    "VLLM_MXFP4_USE_MARLIN",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS",
)
"""Variables by which vLLM's users choose kernels of gpt-oss."""
_READ_THEIR_EXPERTS = ("FlintForCausalLM",)
"""Models whose own kernels read the experts' weights, in the order of the kernels that vLLM chose."""
_EXCHANGES = "allgather_reducescatter", "deepep_high_throughput"


def why_not(moe: Any, parallel: Any) -> str | None:
    """Why a layer stays with vLLM, as far as its configuration tells; None: it may be served.

    Args:
        moe: vLLM's FusedMoEConfig. parallel: vLLM's ParallelConfig, or None.
    """
    return (
        _why_not_kernels(_DENSE_KERNELS)
        or _why_not_asked(moe)
        or _why_not_form(moe)
        or _why_not_exchange(moe)
        or why_not_together(parallel)
    )


def why_not_model(model: Any) -> str | None:
    """Why all layers of a model stay with vLLM. model: vLLM's ModelConfig, or None."""
    for name in getattr(model, "architectures", None) or ():
        if name in _READ_THEIR_EXPERTS:
            return f"{name} has kernels of its own that read the experts"
    return None


def why_not_gpt_oss(moe: Any, model: Any, parallel: Any) -> str | None:
    """As `why_not`, of a layer of gpt-oss in MXFP4. model: vLLM's ModelConfig, or None."""
    if (reason := _why_not_kernels(_GPT_OSS_KERNELS)) is not None:
        return reason
    if getattr(getattr(getattr(model, "quantization_config", None), "moe", None), "activation", None) is not None:
        return "--quantization-config names a format of activations"
    if getattr(moe.activation, "value", moe.activation) != "swigluoai" or not moe.has_bias:
        return f"its activation is {shown(moe.activation)} {'with' if moe.has_bias else 'without'} biases"
    if moe.in_dtype != torch.bfloat16:
        return f"its activations are {moe.in_dtype}, not torch.bfloat16"
    return why_not_exchanged(moe) or _why_not_asked(moe) or why_not_together(parallel)


def why_not_exchanged(moe: Any) -> str | None:
    """Why a layer of packed experts is not served: they have no place in vLLM's exchange of tokens."""
    if moe.dp_size > 1 or moe.moe_parallel_config.use_all2all_kernels:
        return "tokens are exchanged between ranks (data parallelism); to change it: --data-parallel-size 1"
    return None


def _asked(name: str) -> bool:
    """Whether a variable of vLLM's is set, and not to 0."""
    return os.environ.get(name, "0") not in ("", "0")


def _why_not_kernels(names: tuple[str, ...]) -> str | None:
    if asked := [name for name in names if _asked(name)]:
        return f"{asked[0]} asks for a kernel of vLLM's; to change it: unset it"
    return None


def _why_not_asked(moe: Any) -> str | None:
    if moe.moe_backend != "auto":
        return f"moe_backend={shown(moe.moe_backend)} was asked for; to change it: leave out --moe-backend"
    if moe.is_lora_enabled:
        return "LoRA adapters change the experts' weights by request; to change it: serve without --enable-lora"
    return None


def _why_not_form(moe: Any) -> str | None:
    if moe.has_bias:
        return "its experts have biases, and their weights are not MXFP4"
    activation = getattr(moe.activation, "value", moe.activation)
    if activation != "silu" or not getattr(moe, "is_act_and_mul", True):
        return f"its activation is {shown(activation)}, not silu(gate) * up"
    if moe.swiglu_limit is not None:
        return f"its SwiGLU is clamped (swiglu_limit={moe.swiglu_limit})"
    if moe.in_dtype not in HIDDEN_DTYPES:
        return f"its activations are {moe.in_dtype}, not one of {[str(dtype)[6:] for dtype in HIDDEN_DTYPES]}"
    return None


def hands_out_tokens(parallel: Any) -> bool:
    """Whether vLLM's exchange gives tokens with the ids of their experts, or there is none.

    Args:
        parallel: vLLM's FusedMoEParallelConfig.
    """
    return not parallel.use_all2all_kernels or parallel.all2all_backend in _EXCHANGES


def _why_not_exchange(moe: Any) -> str | None:
    parallel = moe.moe_parallel_config
    if not hands_out_tokens(parallel):
        return (
            f"the operator does not take tokens from --all2all-backend {parallel.all2all_backend}; "
            f"to change it: --all2all-backend {' or '.join(_EXCHANGES)}"
        )
    return None


def why_not_together(parallel: Any) -> str | None:
    """Why all layers of an engine stay with vLLM."""
    if _asked("VLLM_BATCH_INVARIANT"):
        return "VLLM_BATCH_INVARIANT asks for sums that do not depend on the number of tokens"
    if getattr(parallel, "use_ubatching", False):
        return "two micro-batches run at a time, and the operator has one scratch; to change it: leave out --enable-dbo"
    if getattr(parallel, "enable_elastic_ep", False):
        return "ranks may come and go (elastic expert parallelism), which moves experts between layers"
    if _copies_weights():
        return (
            "its weights are on the host, and a call reads copies; to change it: leave out --offload-group-size, or "
            "--cpu-offload-gb where this machine has no pinned memory (UVA)"
        )
    return None


def _copies_weights() -> bool:
    """Whether vLLM offloads weights otherwise than by views of pinned memory, which kernels read where it lies."""
    with suppress(ImportError):
        from vllm.model_executor.offloader.base import NoopOffloader, get_offloader

        found = get_offloader()
        return not isinstance(found, NoopOffloader) and not getattr(found, "uva_offloading", False)
    return False


def why_not_layer(layer: Any, w13: torch.Tensor, w2: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Why a loaded layer stays with vLLM; None: it may be served."""
    if getattr(layer, "apply_router_weight_on_input", False):
        return "its routing weights multiply the input of the experts"
    E, rows, H = w13.shape
    if tuple(w2.shape) != (E, H, rows // 2) or rows % 2:
        return f"its weights do not fit together: w13 {tuple(w13.shape)}, w2 {tuple(w2.shape)}"
    for name, weight in (("w13", w13), ("w2", w2)):
        if weight.dtype != dtype:
            return f"{name} is {weight.dtype} and the activations are {dtype}"
        if not weight.is_contiguous():
            return f"{name} has gaps: strides {weight.stride()} of {tuple(weight.shape)}"
    return None
