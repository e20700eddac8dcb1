"""Tensors in a device's layout, made once and kept on disk.

TTNN_MOE_TT_CACHE names the folder; "off" keeps nothing. The default is ttnn-moe/tenstorrent in the user's cache folder.
A file's name is a digest of the values and of everything that shapes the file. A file appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import platformdirs
import torch
from torch import Tensor

from ..whole_file import whole_file
from .device import Device
from .runtime import library

CACHE = "TTNN_MOE_TT_CACHE"
# smaller tensors take less time than their digest
LEAST_CACHED_BYTES = 16 << 20
_LAYOUT_VERSION = 1


def folder(device: Device, cache: Path | str | None = None) -> Path | None:
    """The folder of the files: `cache`, else as the module says. None: nothing is kept."""
    named = str(cache) if cache is not None else os.environ.get(CACHE)
    # an emulated device reads no files: making tensors in memory is quick enough
    if named == "off" or device.emulated:
        return None
    return Path(named) if named else Path(platformdirs.user_cache_path("ttnn-moe")) / "tenstorrent"


def digest(values: Iterable[Tensor], *about: object) -> str:
    """Digest of tensors and of `about`. It reads a tensor in parts of its first dimension, without a copy of all."""
    ttnn = library()

    made = hashlib.blake2b(digest_size=20)
    made.update(repr((_LAYOUT_VERSION, getattr(ttnn, "__version__", ""), *about)).encode())
    for tensor in values:
        for part in tensor:
            made.update(part.contiguous().reshape(-1).view(torch.uint8).numpy())
    return made.hexdigest()


def kept(path: Path | None, make: Callable[[], Any], device: Device) -> Any:
    """The tensor of that file, on the device. If there is no file, make() gives it on the host, and it is written."""
    ttnn = library()

    if path is not None and path.exists():
        return ttnn.load_tensor(str(path), device=device.handle)
    host = make()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, path.suffix) as part:  # the name must end as ttnn's files do
            ttnn.dump_tensor(str(part), host)
    return ttnn.to_device(host, device.handle, memory_config=ttnn.DRAM_MEMORY_CONFIG)
