"""The classes of vLLM that the plug-in touches, small: names and signatures as in vllm 0.22.1, bodies of our own.

`make test-vllm` runs the same tests with vLLM itself, and compares these signatures with it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

MOE = "vllm.model_executor.layers.fused_moe"
QUANTIZATION = "vllm.model_executor.layers.quantization"
OFFLOADER = "vllm.model_executor.offloader.base"
op_registry_oot: dict[str, type] = {}
QUANTIZATION_METHODS: list[str] = ["fp8"]
CONFIGS: dict[str, type] = {}
CURRENT: list[Any] = []


class CustomOp(nn.Module):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(op_registry_oot.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, _decorated_op_cls: Any = None, name: str | None = None) -> Any:
        def decorator(op_cls: type) -> type:
            assert name is not None and name not in op_registry_oot, f"Duplicate op name: {name}"
            op_registry_oot[name] = op_cls
            return op_cls

        return decorator


class UnquantizedMoeBackend(Enum):
    FLASHINFER_CUTLASS = "FlashInfer CUTLASS"
    TRITON = "TRITON"


class FusedMoEActivationFormat(Enum):
    Standard = "standard"
    BatchedExperts = "batched"


class MoEActivation(Enum):
    SILU = "silu"
    GELU = "gelu"
    SWIGLUOAI = "swigluoai"


class TopKWeightAndReduceNoOP:
    pass


class FusedMoEExpertsModular:
    def __init__(self, moe_config: Any, quant_config: Any = None):
        self.moe_config, self.quant_config = moe_config, quant_config

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> Any:
        raise NotImplementedError

    def finalize_weight_and_reduce_impl(self) -> Any:
        raise NotImplementedError

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Any,
        a2_scale: Any,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        raise NotImplementedError


class VllmExperts(FusedMoEExpertsModular):
    """vLLM's own: its result is one."""

    def workspace_shapes(self, M: int, N: int, K: int, *rest: Any) -> Any:
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def apply(self, output: Tensor, *args: Any, **kwargs: Any) -> None:
        output.fill_(1)


class FusedMoEKernel:
    def __init__(self, experts: Any):
        self._experts = experts

    @property
    def fused_experts(self) -> Any:
        return self._experts

    def apply(self, x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, layer: Any) -> Tensor:
        experts = self._experts
        E, rows, _ = w1.shape
        shapes = experts.workspace_shapes(
            len(x), rows, x.shape[1], ids.shape[1], layer.global_num_experts, E, None, layer.activation
        )
        assert isinstance(experts.finalize_weight_and_reduce_impl(), TopKWeightAndReduceNoOP)
        *spaces, out = (x.new_empty(shape) for shape in shapes)
        experts.apply(
            output=out,
            hidden_states=x,
            w1=w1,
            w2=w2,
            topk_weights=weights,
            topk_ids=ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            a1q_scale=None,
            a2_scale=None,
            workspace13=spaces[0],
            workspace2=spaces[1],
            expert_tokens_meta=None,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
        )
        return out


@dataclass
class FusedMoEParallelConfig:
    tp_size: int = 1
    tp_rank: int = 0
    dp_size: int = 1
    enable_eplb: bool = False
    all2all_backend: str = "allgather_reducescatter"

    @property
    def use_all2all_kernels(self) -> bool:
        return self.dp_size > 1


@dataclass
class FusedMoEConfig:
    num_experts: int
    experts_per_token: int
    num_local_experts: int
    in_dtype: torch.dtype
    activation: Any = MoEActivation.SILU
    moe_parallel_config: FusedMoEParallelConfig = field(default_factory=FusedMoEParallelConfig)
    moe_backend: str = "auto"
    max_num_tokens: int = 64
    has_bias: bool = False
    is_act_and_mul: bool = True
    is_lora_enabled: bool = False
    swiglu_limit: float | None = None

    @property
    def dp_size(self) -> int:
        return self.moe_parallel_config.dp_size


class FusedMoEMethodBase:
    def __init__(self, moe: FusedMoEConfig):
        super().__init__()
        self.moe, self.moe_kernel = moe, None

    @property
    def is_monolithic(self) -> bool:
        return False

    def maybe_roundup_sizes(self, H: int, I: int, act_dtype: Any, parallel: Any) -> tuple[int, int]:
        return H, I

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        raise NotImplementedError

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Any,
    ) -> Tensor:
        raise NotImplementedError


def select_unquantized_moe_backend(moe_config: Any) -> Any:
    return UnquantizedMoeBackend.FLASHINFER_CUTLASS, VllmExperts


class UnquantizedFusedMoEMethod(FusedMoEMethodBase, CustomOp):
    def __init__(self, moe: FusedMoEConfig):
        super().__init__(moe)
        choose = sys.modules[f"{MOE}.unquantized_fused_moe_method"].select_unquantized_moe_backend  # type: ignore[attr-defined]
        self.unquantized_backend, self.experts_cls = choose(moe_config=moe)

    def create_weights(self, layer: Any, num_experts: int, hidden_size: int, I: int, dtype: Any, **rest: Any) -> None:
        for name, shape in (("w13", (num_experts, 2 * I, hidden_size)), ("w2", (num_experts, hidden_size, I))):
            weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
            layer.register_parameter(f"{name}_weight", weight)

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.unquantized_backend == UnquantizedMoeBackend.FLASHINFER_CUTLASS:
            first, second = layer.w13_weight.data.chunk(2, 1)
            layer.w13_weight = nn.Parameter(torch.cat([second, first], 1), requires_grad=False)
        if self.moe_kernel is None:
            self.moe_kernel = FusedMoEKernel(self.experts_cls(self.moe))  # type: ignore[assignment]

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Any,
    ) -> Tensor:
        kernel: Any = self.moe_kernel
        return kernel.apply(x, layer.w13_weight, layer.w2_weight, topk_weights, topk_ids, layer)


class FusedMoE(nn.Module):
    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype = torch.bfloat16,
        quant_config: Any = None,
        prefix: str = "",
        apply_router_weight_on_input: bool = False,
        activation: str = "silu",
        has_bias: bool = False,
        **options: Any,
    ):
        super().__init__()
        self.global_num_experts = self.local_num_experts = num_experts
        self.expert_map, self.activation = None, MoEActivation(activation)
        self.apply_router_weight_on_input = apply_router_weight_on_input
        form = {"activation": self.activation, "has_bias": has_bias}
        self.moe_config = FusedMoEConfig(num_experts, top_k, num_experts, params_dtype, **form)
        method = None if quant_config is None else quant_config.get_quant_method(self, prefix)
        self.quant_method = method or UnquantizedFusedMoEMethod(self.moe_config)
        sizes = self.quant_method.maybe_roundup_sizes(hidden_size, intermediate_size, params_dtype, None)
        self.quant_method.create_weights(self, num_experts, *sizes, params_dtype, weight_loader=self.weight_loader)

    def weight_loader(self, param: Any, loaded_weight: Tensor, weight_name: str, shard_id: Any, expert_id: Any) -> None:
        """gpt-oss's: all experts of a tensor, which may have more rows and channels."""
        param.data[tuple(slice(size) for size in loaded_weight.shape)].copy_(loaded_weight)


class LinearBase(nn.Module):
    pass


class UnquantizedLinearMethod:
    pass


class QuantizationConfig:
    def __init__(self) -> None:
        super().__init__()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        raise NotImplementedError


class Mxfp4MoeBackend(Enum):
    TRITON = "TRITON"


def select_mxfp4_moe_backend(moe_config: Any) -> Any:
    return Mxfp4MoeBackend.TRITON, VllmExperts


class GptOssMxfp4MoEMethod(FusedMoEMethodBase):
    def __init__(self, moe: FusedMoEConfig):
        super().__init__(moe)
        choose = sys.modules[f"{QUANTIZATION}.mxfp4"].select_mxfp4_moe_backend  # type: ignore[attr-defined]
        self.mxfp4_backend, self.experts_cls = choose(moe)

    @property
    def is_monolithic(self) -> bool:
        return True

    def maybe_roundup_sizes(self, H: int, I: int, act_dtype: Any, parallel: Any) -> tuple[int, int]:
        return H, 64 * -(-I // 64)

    def create_weights(self, layer: Any, num_experts: int, H: int, I: int, dtype: Any, **attributes: Any) -> None:
        for name, rows, channels in (("w13", 2 * I, H), ("w2", H, I)):
            shapes = {"weight": (rows, channels // 2), "weight_scale": (rows, channels // 32), "bias": (rows,)}
            for part, shape in shapes.items():
                kind = torch.bfloat16 if part == "bias" else torch.uint8
                weight = nn.Parameter(torch.zeros(num_experts, *shape, dtype=kind), requires_grad=False)
                layer.register_parameter(f"{name}_{part}", weight)
                for attribute, value in attributes.items():
                    setattr(weight, attribute, value)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.moe_kernel = object()  # type: ignore[assignment]

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        return object()

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Any,
    ) -> Tensor:
        assert self.moe_kernel is not None
        return torch.ones_like(x)


class Mxfp4Config(QuantizationConfig):
    @classmethod
    def from_config(cls, config: Any) -> Any:
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        return GptOssMxfp4MoEMethod(layer.moe_config) if isinstance(layer, FusedMoE) else UnquantizedLinearMethod()


class GptOssMxfp4Config(Mxfp4Config):
    pass


def register_quantization_config(quantization: str) -> Any:
    def wrapper(config: type) -> type:
        QUANTIZATION_METHODS.append(quantization)
        CONFIGS[quantization] = config
        return config

    return wrapper


def get_quantization_config(quantization: str) -> type:
    return CONFIGS[quantization]


class NoopOffloader:
    pass


def get_offloader() -> Any:
    return sys.modules[OFFLOADER]._instance


def get_current_vllm_config_or_none() -> Any:
    return CURRENT[-1] if CURRENT else None


_ALL = {
    "vllm.config": (get_current_vllm_config_or_none,),
    "vllm.model_executor.custom_op": (CustomOp,),
    OFFLOADER: (NoopOffloader, get_offloader),
    f"{MOE}.config": (FusedMoEConfig, FusedMoEParallelConfig),
    f"{MOE}.modular_kernel": (FusedMoEActivationFormat, FusedMoEExpertsModular, FusedMoEKernel),
    f"{MOE}.activation": (MoEActivation,),
    f"{MOE}.oracle.mxfp4": (Mxfp4MoeBackend,),
    f"{MOE}.oracle.unquantized": (UnquantizedMoeBackend,),
    f"{MOE}.topk_weight_and_reduce": (TopKWeightAndReduceNoOP,),
    f"{MOE}.fused_moe_method_base": (FusedMoEMethodBase,),
    f"{MOE}.unquantized_fused_moe_method": (UnquantizedFusedMoEMethod, select_unquantized_moe_backend),
    f"{MOE}.layer": (FusedMoE,),
    "vllm.model_executor.layers.linear": (LinearBase, UnquantizedLinearMethod),
    f"{QUANTIZATION}.base_config": (QuantizationConfig,),
    QUANTIZATION: (register_quantization_config, get_quantization_config),
    f"{QUANTIZATION}.mxfp4": (GptOssMxfp4Config, GptOssMxfp4MoEMethod, Mxfp4Config, select_mxfp4_moe_backend),
}


@contextmanager
def installed() -> Iterator[None]:
    """These classes where vLLM's would be; nothing of them, and of what imported them, stays."""
    before = set(sys.modules)
    for name, values in _ALL.items():
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            inner = ".".join(parts[:n])
            module = sys.modules.setdefault(inner, types.ModuleType(inner))
            if n > 1:
                setattr(sys.modules[".".join(parts[: n - 1])], parts[n - 1], module)
            module.__path__ = []
        for value in values:
            setattr(sys.modules[name], value.__name__, value)
    sys.modules["vllm.model_executor.custom_op"].op_registry_oot = op_registry_oot  # type: ignore[attr-defined]
    sys.modules[OFFLOADER]._instance = NoopOffloader()  # type: ignore[attr-defined]
    sys.modules[QUANTIZATION].QUANTIZATION_METHODS = QUANTIZATION_METHODS  # type: ignore[attr-defined]
    sys.modules[QUANTIZATION]._CUSTOMIZED_METHOD_TO_QUANT_CONFIG = CONFIGS  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            if name == "vllm" or name.startswith(("vllm.", "ttnn_moe.integrations.vllm")):
                del sys.modules[name]
        op_registry_oot.clear()
        CONFIGS.clear()
        QUANTIZATION_METHODS[:] = ["fp8"]
