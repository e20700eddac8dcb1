"""What an adapter uses of vLLM, by name and signature. A vLLM that differs is left alone.

A table, not a version: vLLM moves these classes in any release. The same table is compared with the source of a vLLM
that is not installed.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from ...visible import said

_MOE = "vllm.model_executor.layers.fused_moe"
_QUANTIZATION = "vllm.model_executor.layers.quantization"
_MXFP4 = f"{_QUANTIZATION}.mxfp4"

Names = tuple[str, ...]
Found = Callable[[str, str], Sequence[str]]
"""(module, attribute path) -> names of the parameters of a function, of the fields of a dataclass; () of other values.

Raises LookupError for what is not there.
"""


@dataclass(frozen=True)
class Surface:
    """One family of versions.

    Attributes:
        versions: in words.
        exact: module and attribute -> parameters that a function must have, in order.
        has: module and attribute -> names among its parameters or fields; () asks for its existence alone.
    """

    versions: str
    exact: Mapping[tuple[str, str], Names]
    has: Mapping[tuple[str, str], Names]

    def why_not(self, found: Found) -> str | None:
        """What differs first, or None."""
        for (module, path), names in {**self.exact, **self.has}.items():
            try:
                got = tuple(found(module, path))
            except LookupError as error:
                return f"{module}.{path} is not there ({error})"
            if (module, path) in self.exact:
                if got != names:
                    return f"{module}.{path} takes {', '.join(got)}; expected {', '.join(names)}"
            elif lacking := [name for name in names if name not in got]:
                return f"{module}.{path} lacks {', '.join(lacking)}"
        return None


_APPLY: Names = ("self", "layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input")
"""What a method's `apply` takes."""
_CONFIG: dict[tuple[str, str], Names] = {
    (f"{_MOE}.config", "FusedMoEConfig"): (
        "num_experts",
        "experts_per_token",
        "num_local_experts",
        "activation",
        "moe_parallel_config",
        "in_dtype",
        "moe_backend",
        "max_num_tokens",
        "has_bias",
        "is_lora_enabled",
        "swiglu_limit",
    ),
    (f"{_MOE}.config", "FusedMoEParallelConfig"): ("dp_size", "all2all_backend"),
    (f"{_MOE}.config", "FusedMoEParallelConfig.use_all2all_kernels"): ("self",),
}
"""What `gate` asks of a layer's configuration."""

EXPERTS = Surface(
    "0.22.1 to 0.33.0",
    exact={
        (f"{_MOE}.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod.__init__"): ("self", "moe"),
        (f"{_MOE}.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod.process_weights_after_loading"): (
            "self",
            "layer",
        ),
        (f"{_MOE}.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod.apply"): _APPLY,
        (f"{_MOE}.modular_kernel", "FusedMoEExpertsModular.workspace_shapes"): (
            "self",
            "M",
            "N",
            "K",
            "topk",
            "global_num_experts",
            "local_num_experts",
            "expert_tokens_meta",
            "activation",
        ),
        (f"{_MOE}.modular_kernel", "FusedMoEExpertsModular.apply"): (
            "self",
            "output",
            "hidden_states",
            "w1",
            "w2",
            "topk_weights",
            "topk_ids",
            "activation",
            "global_num_experts",
            "expert_map",
            "a1q_scale",
            "a2_scale",
            "workspace13",
            "workspace2",
            "expert_tokens_meta",
            "apply_router_weight_on_input",
        ),
    },
    has={
        ("vllm.model_executor.custom_op", "CustomOp.register_oot"): ("name",),
        (f"{_MOE}.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod.create_weights"): ("layer", "num_experts"),
        ("vllm.model_executor.custom_op", "op_registry_oot"): (),
        **_CONFIG,
        (f"{_MOE}.modular_kernel", "FusedMoEKernel.fused_experts"): ("self",),
        (f"{_MOE}.modular_kernel", "FusedMoEActivationFormat.Standard"): (),
        (f"{_MOE}.modular_kernel", "FusedMoEExpertsModular.finalize_weight_and_reduce_impl"): ("self",),
        (f"{_MOE}.topk_weight_and_reduce", "TopKWeightAndReduceNoOP"): (),
        (f"{_MOE}.oracle.unquantized", "UnquantizedMoeBackend.TRITON"): (),
    },
)
"""The hook on layers of bf16, fp16 and fp32 weights."""

QUANTISED = Surface(
    "0.22.1 to 0.33.0",
    exact={
        (f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase.create_weights"): (
            "self",
            "layer",
            "num_experts",
            "hidden_size",
            "intermediate_size_per_partition",
            "params_dtype",
            "extra_weight_attrs",
        ),
        (f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase.apply"): _APPLY,
    },
    has={
        (_QUANTIZATION, "register_quantization_config"): ("quantization",),
        (f"{_QUANTIZATION}.base_config", "QuantizationConfig.get_quant_method"): ("layer", "prefix"),
        ("vllm.model_executor.layers.linear", "UnquantizedLinearMethod"): (),
    },
)
"""Checkpoints of `ttnn-moe quantize`."""

GPT_OSS = Surface(
    "0.22.1 to 0.33.0",
    exact={
        (_MXFP4, "GptOssMxfp4MoEMethod.__init__"): ("self", "moe"),
        (_MXFP4, "GptOssMxfp4MoEMethod.process_weights_after_loading"): ("self", "layer"),
        (_MXFP4, "GptOssMxfp4MoEMethod.get_fused_moe_quant_config"): ("self", "layer"),
        (_MXFP4, "GptOssMxfp4MoEMethod.apply"): _APPLY,
    },
    has={
        **_CONFIG,
        ("vllm.model_executor.custom_op", "CustomOp.register_oot"): ("name",),
        (_MXFP4, "GptOssMxfp4MoEMethod.create_weights"): ("layer", "num_experts"),
        (f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase.is_monolithic"): ("self",),
        (_MXFP4, "GptOssMxfp4Config"): (),
        (_MXFP4, "Mxfp4Config.get_quant_method"): ("layer", "prefix"),
        (_QUANTIZATION, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG"): (),
        (_QUANTIZATION, "register_quantization_config"): ("quantization",),
    },
)
"""MXFP4 experts of gpt-oss, in vLLM's own parameters."""


_ROUTER = f"{_MOE}.router"

ROUTER = Surface(
    "0.22.1 to 0.33.0",
    exact={
        (f"{_ROUTER}.fused_topk_router", "FusedTopKRouter._compute_routing"): (
            "self",
            "hidden_states",
            "router_logits",
            "indices_type",
            "input_ids",
        ),
        (f"{_ROUTER}.gate_linear", "GateLinear.forward"): ("self", "x"),
        ("vllm.model_executor.layers.linear", "ReplicatedLinear.forward"): ("self", "x"),
    },
    has={
        (f"{_ROUTER}.fused_topk_router", "FusedTopKRouter.__init__"): (
            "top_k",
            "global_num_experts",
            "scoring_func",
            "renormalize",
        ),
        (f"{_MOE}.runner.moe_runner", "MoERunner.__init__"): ("moe_config", "gate", "router", "shared_expert_gate"),
        (f"{_MOE}.config", "FusedMoEConfig"): ("num_logical_experts",),
        (f"{_MOE}.config", "FusedMoEConfig.pcp_size"): ("self",),
        (f"{_MOE}.runner.moe_runner", "MoERunner._forward_impl"): ("hidden_states", "router_logits"),
        ("vllm.model_executor.layers.linear", "UnquantizedLinearMethod"): (),
    },
)
"""Router and choice of experts of a layer that vLLM's runner routes."""

GRAPHS = Surface(
    "0.22.1 to 0.33.0",
    exact={},
    has={
        ("vllm.model_executor.models.config", "MODELS_CONFIG_MAP"): (),
        ("vllm.model_executor.models.config", "VerifyAndUpdateConfig.verify_and_update_config"): ("vllm_config",),
        ("vllm.config.compilation", "CompilationConfig"): ("cudagraph_capture_sizes", "max_cudagraph_capture_size"),
        ("vllm.config.vllm", "VllmConfig.performance_mode"): (),
        ("vllm.config.vllm", "VllmConfig"): ("offload_config", "load_config"),
    },
)
"""Sizes of graphs of Qwen3-MoE."""

_ATTENTION = "vllm.v1.attention"
_FLASH = f"{_ATTENTION}.backends.flash_attn"
_QWEN3 = "vllm.model_executor.models.qwen3_moe"
_LAYOUT = f"{_ATTENTION}.backend", "AttentionBackend.get_required_kv_cache_layout"

MODEL = Surface(
    "0.22.1 to 0.33.0",
    exact={
        (_QWEN3, "Qwen3MoeModel.forward"): ("self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds"),
        (_QWEN3, "Qwen3MoeForCausalLM.__init__"): ("self", "vllm_config", "prefix"),
    },
    has={
        (_QWEN3, "Qwen3MoeDecoderLayer.__init__"): ("self", "vllm_config", "prefix"),
        (_QWEN3, "Qwen3MoeModel"): (),
        (_FLASH, "FlashAttentionMetadata"): (),
        ("vllm.config.vllm", "VllmConfig"): ("offload_config", "load_config"),
        (f"{_ATTENTION}.backends.registry", "AttentionBackendEnum.CUSTOM"): (),
        (f"{_ATTENTION}.backends.registry", "register_backend"): ("backend", "class_path"),
        ("vllm.forward_context", "get_forward_context"): (),
        ("vllm.utils.torch_utils", "_encode_layer_name"): ("layer_name",),
        ("vllm.utils.torch_utils", "_resolve_layer_name"): ("layer_name",),
        ("vllm.utils.torch_utils", "direct_register_custom_op"): ("op_name", "mutates_args", "fake_impl", "target_lib"),
        ("vllm.model_executor.models.registry", "_ModelRegistry.register_model"): ("model_arch", "model_cls"),
    },
)
"""Qwen3-MoE whole, but for attention."""

ATTENTION = Surface(
    "0.22.1",
    exact={
        (f"{_ATTENTION}.backend", "AttentionImpl.forward"): (
            "self",
            "layer",
            "query",
            "key",
            "value",
            "kv_cache",
            "attn_metadata",
            "output",
            "output_scale",
            "output_block_scale",
        ),
        (_FLASH, "FlashAttentionMetadataBuilder.build"): (
            "self",
            "common_prefix_len",
            "common_attn_metadata",
            "fast_build",
        ),
    },
    has={
        (_FLASH, "FlashAttentionImpl.forward"): ("layer", "query", "kv_cache", "attn_metadata", "output"),
        (_FLASH, "FlashAttentionMetadata"): ("num_actual_tokens", "block_table", "query_start_loc"),
        (_FLASH, "FlashAttentionBackend.forward_includes_kv_cache_update"): (),
        (f"{_ATTENTION}.backend", "CommonAttentionMetadata"): (
            "query_start_loc",
            "query_start_loc_cpu",
            "seq_lens_cpu_upper_bound",
            "positions",
            "slot_mapping",
            "max_query_len",
            "num_reqs",
            "num_actual_tokens",
        ),
        _LAYOUT: (),
        (f"{_ATTENTION}.backend", "AttentionBackend.get_preferred_block_size"): ("default_block_size",),
        (f"{_ATTENTION}.backend", "AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE"): (),
        ("vllm.model_executor.layers.attention.attention", "unified_attention_with_output"): (
            "query",
            "key",
            "value",
            "output",
            "layer_name",
        ),
    },
)
"""Attention over vLLM's blocks, of Qwen3-MoE whole: some hold keys, some values."""

SIDE_BY_SIDE = Surface(
    "0.33.0",
    exact=ATTENTION.exact,
    has={
        **{name: wanted for name, wanted in ATTENTION.has.items() if name != _LAYOUT},
        (f"{_ATTENTION}.backend", "AttentionBackend.supported_kv_cache_layouts"): (),
        ("vllm.v1.kv_cache_layout", "KVCacheLayout.LBHNC"): (),
    },
)
"""The same, where a block has a token's key and value side by side."""


def installed(module: str, path: str) -> Sequence[str]:
    """`Found` of the vLLM that Python imports."""
    try:
        value: Any = reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise LookupError(said(error)) from error
    if isinstance(value, property):
        value = value.fget
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return list(inspect.signature(value).parameters) if inspect.isfunction(value) or inspect.ismethod(value) else ()
