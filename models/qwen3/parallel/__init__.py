"""One model whose weights several processes share: by experts, or by tensors."""

from .load import load_shared

__all__ = ["load_shared"]
