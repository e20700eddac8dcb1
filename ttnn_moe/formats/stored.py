"""Experts as checkpoints of `ttnn-moe quantize` store them: names, shapes and dtypes of a layer's tensors.

config.json of such a checkpoint says {"quant_method": "ttnn_moe", "format": "int4_24" or "mxfp4", "version": 1}.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import int4_24, mxfp4

METHOD = "ttnn_moe"
"""quant_method of config.json."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a layer's experts.

    Attributes:
        name: in `Experts`. shape: (E, H, I) -> its shape. dtype: of it.
        rows: the dimension that holds 2I rows, gate first; None: the dimension `inner` holds I.
        inner: see rows.
        scales: whether it holds scales alone.
    """

    name: str
    shape: Callable[[int, int, int], tuple[int, ...]]
    dtype: torch.dtype
    rows: int | None = None
    inner: int | None = None
    scales: bool = False


@dataclass(frozen=True)
class StoredFormat:
    """One format of experts.

    Attributes:
        name: in `ttnn_moe.formats`. version: of the tensors' names and layout in files.
        multiple: of which H and I have to be.
        tensors: by their names in a checkpoint, after "mlp.experts."; in the order of `Experts`.
    """

    name: str
    version: int
    multiple: int
    tensors: dict[str, StoredTensor]


_GROUP = mxfp4.GROUP
_INT4_24 = StoredFormat(
    int4_24.NAME,
    1,
    int4_24.Int4_24Format.multiple,
    {
        "w13": StoredTensor("w13", lambda E, H, I: (E, H // 64, 2 * I, 2), torch.int64, rows=2),
        "w2": StoredTensor("w2", lambda E, H, I: (E, I // 64, H, 2), torch.int64, inner=1),
    },
)
# names as gpt-oss has them
_MXFP4 = StoredFormat(
    mxfp4.NAME,
    1,
    mxfp4.Mxfp4Format.multiple,
    {
        "gate_up_proj_blocks": StoredTensor("gate_up_blocks", lambda E, H, I: (E, 2 * I, H // 2), torch.uint8, rows=1),
        "gate_up_proj_scales": StoredTensor(
            "gate_up_scales", lambda E, H, I: (E, 2 * I, H // _GROUP), torch.uint8, rows=1, scales=True
        ),
        "down_proj_blocks": StoredTensor("down_blocks", lambda E, H, I: (E, H, I // 2), torch.uint8, inner=2),
        "down_proj_scales": StoredTensor(
            "down_scales", lambda E, H, I: (E, H, I // _GROUP), torch.uint8, inner=2, scales=True
        ),
    },
)
STORED = {fmt.name: fmt for fmt in (_INT4_24, _MXFP4)}
"""Formats of checkpoints by name."""


def known() -> list[str]:
    """The formats with their versions, for error messages."""
    return [f"{fmt.name}, version {fmt.version}" for fmt in STORED.values()]
