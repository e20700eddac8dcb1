"""gpt-oss with MXFP4 experts in transformers: its quantiser leaves the experts packed where ours are to run them.

transformers' own quantiser of "mxfp4" dequantises the experts, or lays them out for its Triton kernels. Ours stands in
for it: where one of our experts implementations is asked for, the experts of a checkpoint in MXFP4 keep their tensors,
under the checkpoint's names. Everything else is left to transformers' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.quantizers import auto
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ...activations import ALPHA, CLAMPED_SWIGLU, LIMIT
from ...arranging import arrange, gains, restore, restored
from ...contract import Experts
from ...errors import ContractError
from ...formats import mxfp4_boxes
from ...formats.mxfp4 import GROUP, check_scales
from ..gpt_oss import GATE_UP_ORDER, NAMES, OTHERWISE, check_activation

METHOD = "mxfp4"


def is_ours(implementation: str | None) -> bool:
    """Whether an experts implementation of that name is one that ttnn_moe.hf.register made."""
    return getattr(ALL_EXPERTS_FUNCTIONS.get(implementation), "__module__", None) == f"{__package__}.experts"


class Mxfp4Experts(nn.Module):
    """The experts of one layer, as a gpt-oss checkpoint holds them; biases are fp32.

    Attributes:
        arranged: the parameters hold arranged bytes (`ttnn_moe.arrange`); a state dict has the checkpoint's.
    """

    arranged = False

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        check_activation(getattr(config, "swiglu_alpha", ALPHA), getattr(config, "swiglu_limit", LIMIT))
        E, H, I = config.num_local_experts, config.hidden_size, config.intermediate_size
        for size, n in (("hidden_size", H), ("intermediate_size", I)):
            if n % GROUP:
                raise ContractError(
                    f"{size} does not fit MXFP4 experts", got=n, expected=f"a multiple of {GROUP}", remedy=OTHERWISE
                )
        self.num_experts, self.hidden_size, self.intermediate_size = E, H, I
        for name, R, K in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
            for part, shape in (("blocks", (E, R, K // GROUP, GROUP // 2)), ("scales", (E, R, K // GROUP))):
                bits = torch.empty(shape, dtype=torch.uint8)
                self.register_parameter(f"{name}_{part}", nn.Parameter(bits, requires_grad=False))
            bias = torch.empty(E, R, dtype=torch.float32)
            self.register_parameter(f"{name}_bias", nn.Parameter(bias, requires_grad=False))

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        """hidden_states [T, H], router_indices and routing_weights [T, K] -> [T, H]; as experts.experts_forward.

        Raises:
            ContractError: the model's experts implementation is none of ours.
        """
        name = self.config._experts_implementation
        if not is_ours(name):
            raise ContractError(
                "the model was loaded with packed MXFP4 experts, which this experts implementation cannot run",
                got=repr(name),
                expected="one that ttnn_moe.hf.register made",
                remedy=f"load the model again: from_pretrained(..., experts_implementation={name or 'eager'!r})",
            )
        return ALL_EXPERTS_FUNCTIONS[name](self, hidden_states, router_indices, routing_weights)

    def arrange(self) -> None:
        """Arrange the parameters where that gains: once they are loaded, and before the first call."""
        if any(_local(parameter) is not parameter for parameter in self.parameters()):
            return  # transformers gives a call this rank's parts
        experts = self._experts()
        if gains(experts):
            arrange(experts, self._mark)

    def _mark(self, arranged: bool) -> None:
        self.arranged = arranged

    def _experts(self) -> Experts:
        flat = {
            name: tensor.data.flatten(2) if tensor.dim() == 4 else tensor for name, tensor in self.tensors().items()
        }
        return experts_of(flat, self.arranged)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in restored(self._experts()).tensors.items() if self.arranged else ():
            destination[prefix + NAMES[name]] = tensor.view(destination[prefix + NAMES[name]].shape)

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *args: Any) -> None:
        # a call may have bound the experts: their bytes stay arranged, also where this fails
        before = self.arranged
        try:
            if before:
                restore(self._experts(), self._mark)
            super()._load_from_state_dict(state, prefix, metadata, *args)
        finally:
            if before and not self.arranged:
                if metadata.get("assign_to_params_buffers"):  # tensors of the caller, whose bytes stay
                    for parameter in self.parameters():
                        parameter.data = parameter.data.clone()
                arrange(self._experts(), self._mark)

    def tensors(self) -> dict[str, Tensor]:
        """Those of the Experts, by its names; as they lie."""
        state = self.__dict__["_parameters"]
        return {name: state.get(theirs) for name, theirs in NAMES.items()}


def _local(tensor: Any) -> Tensor:
    """This rank's part of a DTensor; another tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def experts_of(tensors: Mapping[str, Tensor], arranged: bool) -> Experts:
    """Experts of `Mxfp4Experts.tensors`, whose blocks are [E, R, C/2] here. Reads no values."""
    E, H, half_I = tensors["down_blocks"].shape
    return Experts(mxfp4_boxes.NAME if arranged else METHOD, E, H, 2 * half_I, tensors, GATE_UP_ORDER, CLAMPED_SWIGLU)


class Quantizer(Mxfp4HfQuantizer):
    """See the module's docstring."""

    packed = False

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        # only the model says whether its experts are ours: until then nothing is asked of the machine
        self._environment = args, kwargs

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        ours = is_ours(model.config._experts_implementation)
        if not (ours and self.pre_quantized and not self.quantization_config.dequantize):
            given, options = self._environment
            super().validate_environment(*given, **options)
            return super()._process_model_before_weight_loading(model, **kwargs)
        skipped = self.quantization_config.modules_to_not_convert
        skipped = self.get_modules_to_not_convert(model, skipped, model._keep_in_fp32_modules)
        for name, module in list(model.named_modules()):
            if isinstance(module, modeling_gpt_oss.GptOssExperts) and should_convert_module(name, skipped):
                with torch.device("meta"):
                    model.set_submodule(name, Mxfp4Experts(module.config))
                self.packed = True
        return model

    def get_weight_conversions(self) -> list[Any]:
        return [] if self.packed else super().get_weight_conversions()

    def update_weight_conversions(self, weight_conversions: list[Any], *model: Any) -> list[Any]:
        return weight_conversions if self.packed else super().update_weight_conversions(weight_conversions, *model)

    def get_state_dict_and_metadata(self, *given: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
        return (None, {}) if self.packed else super().get_state_dict_and_metadata(*given, **options)

    @property
    def is_compileable(self) -> bool:
        return self.packed or super().is_compileable

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        modules = {name: module for name, module in model.named_modules() if isinstance(module, Mxfp4Experts)}
        found = {key: value for name, module in modules.items() for key, value in module.named_parameters(prefix=name)}
        _check_loaded(found)
        for key, value in found.items():
            if key.endswith("_scales"):
                check_scales(**{key: _local(value)})
        for module in modules.values():
            module.arrange()
        return super()._process_model_after_weight_loading(model, **kwargs)


def _check_loaded(tensors: Mapping[str, Tensor]) -> None:
    """Raise ContractError for tensors that the checkpoint lacks: transformers leaves their memory as it was."""
    loaded = {name: hasattr(tensor, "_is_hf_initialized") for name, tensor in tensors.items() if not tensor.is_meta}
    missing = [name for name, known in loaded.items() if not known]
    if missing and len(missing) < len(loaded):  # else transformers marks none
        raise ContractError(
            "the checkpoint lacks tensors of its packed MXFP4 experts",
            got=f"no {', '.join(missing[:6])}" + ", ..." * (len(missing) > 6),
            expected=f"for each layer {[*NAMES.values()]}",
            remedy="download the checkpoint again",
        )


def register() -> None:
    """Put the quantiser in the place of transformers' own."""
    auto.AUTO_QUANTIZER_MAPPING[METHOD] = Quantizer
