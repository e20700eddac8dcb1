"""Tensors in a device's layout, made once and kept on disk.

TTNN_MOE_TT_CACHE names the folder; "off" keeps nothing. The default is tenstorrent/ of the folder that cache_folder.py
names. A file's name is a digest of the values and of everything that shapes the file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cache_folder import CacheFolder, CacheWarning, cache_path
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
    return Path(cache) if cache is not None else named_folder()


def named_folder() -> Path:
    """The folder of the files where no caller names another."""
    return cache_path("tenstorrent", CACHE)


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
    """The tensor of that file, on the device. If there is no file, make() gives it on the host, and it is written.

    A file that ttnn cannot read is made again. Where the folder cannot be used, the tensor comes from make().
    """
    ttnn = library()

    def to_device(host: Any) -> Any:
        return ttnn.to_device(host, device.handle, memory_config=ttnn.DRAM_MEMORY_CONFIG)

    if path is None:
        return to_device(make())
    cache = CacheFolder(path.parent, CACHE)
    loaded = _loaded(cache, path.name, device)
    if loaded is not None:
        return loaded
    with cache.lock(path.name):
        loaded = _loaded(cache, path.name, device)  # another process may have written it meanwhile
        if loaded is not None:
            return loaded
        host = make()
        cache.keep(path.name, lambda part: _dump(part, host), path.suffix)  # the name must end as ttnn's files do
    return to_device(host)


def _loaded(cache: CacheFolder, name: str, device: Device) -> Any:
    """The tensor of an entry; None: there is no such entry, or ttnn cannot read it."""
    path = cache.find(name)
    if path is None:
        return None
    try:
        return library().load_tensor(str(path), device=device.handle)
    except (OSError, RuntimeError) as error:
        if path.exists():
            warnings.warn(f"{path} cannot be read and is made again: {error}", CacheWarning, stacklevel=2)
        return None


def _dump(part: Path, host: Any) -> None:
    try:
        library().dump_tensor(str(part), host)
    except RuntimeError as error:  # what ttnn raises for a full disk
        raise OSError(errno.EIO, str(error)) from error
