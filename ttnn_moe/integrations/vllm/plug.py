"""Registering with vLLM: once a process, and never in vLLM's way."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import TtnnMoeError
from ...visible import said
from . import say, setting
from .surface import EXPERTS, GPT_OSS, GRAPHS, MODEL, QUANTISED, installed

HOOK = "UnquantizedFusedMoEMethod"
ARCHITECTURE = "Qwen3MoeForCausalLM"
CLASS = "ttnn_moe.integrations.vllm.qwen3:Qwen3Moe"
_UNKNOWN = (
    f"this vLLM is not known, and runs all MoE layers itself: {{}}; known are {EXPERTS.versions}; "
    "to change it: install one of these, or a newer ttnn-moe"
)
_TAKEN = (
    "another plug-in has taken vLLM's {}, and runs its layers: {}.{}; "
    "to change it: name the plug-ins to load, VLLM_PLUGINS=ttnn_moe"
)


def register() -> None:
    """Put the operator into vLLM's unquantised MoE layers and gpt-oss's; register this package's quantised checkpoints.

    vLLM calls it in every process, perhaps more than once. Nothing is raised: the reason is in vLLM's log.
    """
    try:
        level = setting.level()
        if level == setting.OFF:
            return
        _register_experts()
        _register_quantised()
        _register_gpt_oss()
        _register_graph_sizes()
        if level == setting.MODEL:
            _register_model()
    except TtnnMoeError as error:
        say.error(str(error))
    except Exception as error:  # vLLM starts without us, whatever a version of it holds
        say.error(f"could not register, and vLLM runs all layers itself: {said(error)}")


def _register_experts() -> None:
    reason = EXPERTS.why_not(installed)
    if reason is not None:
        say.warning(_UNKNOWN.format(reason))
        return
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot

    from .adapter import TtnnMoeExperts, TtnnMoeMethod

    lacking = {*getattr(TtnnMoeExperts, "__abstractmethods__", ()), *getattr(TtnnMoeMethod, "__abstractmethods__", ())}
    if lacking:
        say.warning(_UNKNOWN.format(f"its classes ask for {', '.join(sorted(lacking))}"))
        return
    other = op_registry_oot.get(HOOK)
    if other is TtnnMoeMethod:
        return
    if other is not None:
        say.warning(_TAKEN.format(HOOK, other.__module__, other.__qualname__))
        return
    CustomOp.register_oot(name=HOOK)(TtnnMoeMethod)


def _register_quantised() -> None:
    reason = QUANTISED.why_not(installed)
    if reason is not None:
        say.info(f"checkpoints of `ttnn-moe quantize` are not served by this vLLM: {reason}")
        return
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    from ...formats.stored import METHOD
    from .quantised import HOLDER, QuantisedConfig

    if HOLDER is None:
        say.info("checkpoints of `ttnn-moe quantize` are not served by this vLLM: its layer of experts is not known")
    elif METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(QuantisedConfig)


def _register_gpt_oss() -> None:
    reason = GPT_OSS.why_not(installed)
    if reason is not None:
        say.info(f"this vLLM runs gpt-oss's experts itself: {reason}")
        return
    from vllm.model_executor.layers import quantization

    from .gpt_oss import NAME, GptOssConfig

    other = quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG.get(NAME)
    if other is GptOssConfig:
        return
    if other is not None:
        say.warning(_TAKEN.format(NAME, other.__module__, other.__qualname__))
        return
    with _quiet("vllm.model_executor.layers.quantization"):
        quantization.register_quantization_config(NAME)(GptOssConfig)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Without a logger's warnings: vLLM 0.22 warns of any configuration that stands in for its own."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _register_graph_sizes() -> None:
    reason = GRAPHS.why_not(installed)
    if reason is not None:
        say.info(f"vLLM chooses the sizes of Qwen3-MoE's graphs itself: {reason}")
        return
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from .graph_sizes import GraphSizes

    MODELS_CONFIG_MAP.setdefault(ARCHITECTURE, GraphSizes)


def _register_model() -> None:
    reason = MODEL.why_not(installed)
    if reason is not None:
        say.warning(f"this vLLM runs Qwen3-MoE itself, but for experts: {reason}; known is {MODEL.versions}")
        return
    from vllm.model_executor.models.registry import ModelRegistry

    module, _, name = CLASS.partition(":")
    known = ModelRegistry.models.get(ARCHITECTURE)
    if (getattr(known, "module_name", None), getattr(known, "class_name", None)) != (module, name):
        ModelRegistry.register_model(ARCHITECTURE, CLASS)
