"""Checkpoints of `ttnn-moe quantize` in vLLM: the experts stay packed, in the tensors that the files hold.

`ttnn_moe.formats.stored` has the tensors. All weights but the experts' are dense. Nothing else runs these experts, so
what cannot be served is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import layer as _layers
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from ... import arranging
from ...contract import Experts
from ...errors import BackendUnavailable, CheckpointError, ContractError
from ...formats import int4_24, mxfp4, mxfp4_boxes
from ...formats.stored import METHOD, STORED, StoredFormat, StoredTensor, known
from ...visible import shown
from . import arranged, gate, load, router
from .served import ServedLayer

HOLDER: Any = getattr(_layers, "FusedMoE", None) or getattr(_layers, "RoutedExperts", None)
"""vLLM's layer that has the weights of experts; from 0.33 on, one inside it. None: neither is there."""
_REMEDY = "quantise the original checkpoint again with this version of ttnn-moe"


def part(stored: StoredTensor, tensor: Tensor, here: Tensor | None, rank: int, of: int) -> Tensor:
    """What this rank holds of a checkpoint's tensor: experts `here` (None: all), and its share of I."""
    if here is not None:
        tensor = tensor[here]
    if of == 1:
        return tensor
    if stored.inner is not None:
        return tensor.chunk(of, stored.inner)[rank]
    assert stored.rows is not None
    gate_rows, up_rows = tensor.chunk(2, stored.rows)
    return torch.cat([gate_rows.chunk(of, stored.rows)[rank], up_rows.chunk(of, stored.rows)[rank]], stored.rows)


def experts_of(
    fmt: StoredFormat, H: int, I: int, *tensors: Tensor, fp16_scales: bool = False, arranged: bool = False
) -> Experts:
    """Experts of a checkpoint's tensors; reads no values.

    Args:
        fp16_scales: as in Experts. arranged: tensors of mxfp4 have the bytes of mxfp4_boxes.
    """
    held = {stored.name: tensor.detach() for stored, tensor in zip(fmt.tensors.values(), tensors, strict=True)}
    name = mxfp4_boxes.NAME if arranged else fmt.name
    return Experts(name, len(tensors[0]), H, I, held, fp16_scales=fp16_scales)


class QuantisedConfig(QuantizationConfig):
    """vLLM's view of quantization_config.

    Raises:
        CheckpointError: another format or version.
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        name, version = config.get("format"), config.get("version")
        if name not in STORED or version != STORED[name].version:
            raise CheckpointError(
                "config.json describes experts of an unknown format",
                got=f"format {shown(name)}, version {shown(version)}",
                expected=f"one of {known()}",
                remedy=_REMEDY,
            )
        self.format = STORED[name]

    def get_name(self) -> Any:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantisedConfig:
        return cls(config)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, HOLDER):
            return QuantisedMethod(layer.moe_config, self.format, prefix)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


class QuantisedMethod(FusedMoEMethodBase):
    """Packed experts of one layer.

    Raises:
        BackendUnavailable: the operator cannot serve such a layer.
    """

    def __init__(self, moe: Any, fmt: StoredFormat, prefix: str):
        super().__init__(moe)
        self.format, self.prefix = fmt, prefix
        self._served: ServedLayer | None = None
        self._form: dict[str, bool] = {}
        config = get_current_vllm_config_or_none()
        self._layers = router.layers_of(config)
        parallel = getattr(config, "parallel_config", None)
        reason = gate.why_not_exchanged(moe) or gate.why_not(moe, parallel)
        if reason is not None:
            raise BackendUnavailable(f"{prefix}: these quantised experts cannot be served: {reason}")

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        H, I = hidden_size, intermediate_size_per_partition
        of = self.format.multiple
        if H % of or I % of:
            raise ContractError(
                f"{self.prefix}: this rank's experts do not fit the format {self.format.name}",
                got=f"H={H}, I={I}",
                expected=f"multiples of {of}",
                remedy="a smaller --tensor-parallel-size, or --enable-expert-parallel",
            )
        self._sizes = H, I
        for name, stored in self.format.tensors.items():
            bits = torch.empty(stored.shape(num_experts, H, I), dtype=stored.dtype)
            parameter = torch.nn.Parameter(bits, requires_grad=False)
            layer.register_parameter(name, parameter)
            parameter.weight_loader = self._loader(layer, name, stored)  # type: ignore[attr-defined]
        # from vLLM 0.33 on the layer is given its part of a checkpoint, and would look for dense experts
        layer.load_weights = partial(self._load, layer)
        if self.format.name == mxfp4.NAME:
            layer.register_state_dict_post_hook(arranged.restore_state)

    def _load(self, layer: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """The checkpoint's tensors of one layer, by their names in it; yields those names."""
        for name, loaded in weights:
            parameter = layer.get_parameter(name)
            parameter.weight_loader(parameter, loaded)
            yield name

    def _loader(self, layer: Any, name: str, stored: StoredTensor) -> Callable[[Tensor, Tensor], None]:
        """vLLM's weight loader of one tensor. A reload asks for its name, and exchanges its argument `param`."""

        def weight_loader(layer: Any, param: Tensor, loaded_weight: Tensor) -> None:
            self._fill(layer, name, stored, param, loaded_weight)

        return MethodType(weight_loader, layer)  # bound as vLLM's, so that what a reload keeps forgets the layer

    def _fill(self, layer: Any, name: str, stored: StoredTensor, parameter: Tensor, loaded: Tensor) -> None:
        """Copy this rank's part of a checkpoint's tensor, into the order that the parameter has."""
        local, here = layer.expert_map, None
        if local is not None:
            local = local.cpu()
            here = torch.tensor([int((local == index).nonzero()) for index in range(len(parameter))])
        parallel = self.moe.moe_parallel_config
        own = part(stored, loaded, here, parallel.tp_rank, parallel.tp_size)
        if own.shape != parameter.shape or own.dtype != parameter.dtype:
            raise CheckpointError(
                f"{self.prefix}.{name} has another form",
                got=f"{tuple(own.shape)} {own.dtype} on this rank",
                expected=f"{tuple(parameter.shape)} {parameter.dtype}",
                remedy=_REMEDY,
            )
        arranged.fill(parameter, own, name)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check the scales, allocate scratch, compile kernels; again after a reload.

        Raises:
            ContractError: a scale is no number. BackendUnavailable: nothing can run the layer here.
        """
        weights, moe = self._weights(layer), self.moe
        form = self._processed(layer, weights)
        if self._served is None:
            served = ServedLayer(
                partial(experts_of, self.format, *self._sizes, **form),
                *(layer.global_num_experts, moe.experts_per_token, moe.max_num_tokens, moe.in_dtype),
            )
            reason = load.why_not(served, weights, layer.expert_map, both_ids=False)
            if reason is not None:
                raise BackendUnavailable(f"{self.prefix}: these quantised experts cannot be served: {reason}")
            self._served, self._form = served, form
            router.take(layer, self._layers)

    def _processed(self, layer: Any, weights: tuple[Tensor, ...]) -> dict[str, bool]:
        """Check the scales, arrange bytes; what `experts_of` takes beside sizes and tensors.

        After a reload it is what it was before: captured graphs have kernels for it.
        """
        if self.format.name == int4_24.NAME:
            int4_24.check_scales(**{name: getattr(layer, name) for name in self.format.tensors})
            fits = int4_24.fit_fp16(*weights)
            if self._form.get("fp16_scales") and not fits:
                raise ContractError(
                    f"{self.prefix}: fp16 does not hold the scales of the reloaded experts, and held those before",
                    remedy="start vLLM with the new checkpoint",
                )
            return self._form or {"fp16_scales": fits}
        scales = {name: getattr(layer, name) for name, stored in self.format.tensors.items() if stored.scales}
        mxfp4.check_scales(**{name: tensor for name, tensor in scales.items() if not arranged.is_arranged(tensor)})
        form = self._form or {"arranged": arranging.gains(experts_of(self.format, *self._sizes, *weights))}
        if form["arranged"]:
            for name, parameter in zip(self.format.tensors, weights, strict=True):
                arranged.arrange(parameter, arranged.Kind(name.replace("_proj_", "_")))
        return form

    def _weights(self, layer: Any) -> tuple[Tensor, ...]:
        return tuple(getattr(layer, name) for name in self.format.tensors)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        assert self._served is not None, "weights are loaded before a call"
        return self._served(x, topk_weights, topk_ids, self._weights(layer), layer.expert_map)
