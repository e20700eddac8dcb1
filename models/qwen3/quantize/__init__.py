"""Conversion of a checkpoint to another format of the experts: `ttnn-moe quantize`."""

from .convert import quantize_model

__all__ = ["quantize_model"]
