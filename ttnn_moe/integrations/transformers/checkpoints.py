"""Checkpoints of `ttnn-moe quantize`. transformers would load them with random experts, so it is told to refuse."""

from __future__ import annotations

from typing import Any, NoReturn

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...errors import ContractError
from ...formats.stored import METHOD


class Refused(QuantizationConfigMixin):
    """What transformers takes for the quantization_config of such a checkpoint."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], *_: Any, **__: Any) -> NoReturn:
        """Raises ContractError."""
        raise ContractError(
            "transformers cannot load experts that ttnn-moe quantize made",
            got=f"format {config_dict.get('format')!r}",
            expected="a checkpoint with dense experts, or gpt-oss's own MXFP4",
            remedy="ttnn_moe.models.qwen3.load_model, ttnn-moe generate --model, or vLLM with ttnn-moe's plug-in",
        )


def register() -> None:
    """Make transformers refuse such checkpoints; a second call does nothing."""
    if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(METHOD)(Refused)
