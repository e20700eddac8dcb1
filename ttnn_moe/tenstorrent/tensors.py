"""Tensors between torch and a device or mesh, and the checks of ttnn tensors before a kernel gets them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ContractError
from .device import Device
from .runtime import library

_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.int32: "int32"}


def replicate(
    tensor: Tensor, device: Device, layout: str = "ROW_MAJOR", dtype: str | None = None, on_host: bool = False
) -> Any:
    """A torch tensor on every device, in DRAM.

    Args:
        dtype: a name of ttnn's; default: the tensor's, which is bfloat16, float32 or int32. layout: "ROW_MAJOR" or
            "TILE". on_host: not moved to the device yet.

    Raises:
        ContractError: a dtype without a name. BackendUnavailable: the device is closed.
    """
    device.check_open()
    ttnn, name = library(), dtype or _name_of(tensor)
    mapper = ttnn.ReplicateTensorToMesh(device.handle) if device.D > 1 else None
    return _from_torch(tensor, name, layout, device, mapper, on_host)


def shard(
    tensor: Tensor, device: Device, dtype: str | None = None, layout: str = "ROW_MAJOR", on_host: bool = False
) -> Any:
    """A torch tensor, cut along its first dimension: each device gets one part. Arguments as `replicate`."""
    device.check_open()
    ttnn, name = library(), dtype or _name_of(tensor)
    mapper = ttnn.ShardTensorToMesh(device.handle, dim=0) if device.D > 1 else None
    return _from_torch(tensor, name, layout, device, mapper, on_host)


def _name_of(tensor: Tensor) -> str:
    if tensor.dtype not in _NAMES:
        raise ContractError(
            "a tensor has a dtype that kernels do not read",
            got=tensor.dtype,
            expected=", ".join(map(str, _NAMES)),
            remedy="tensor.int() for ids, tensor.float() for routing weights, tensor.bfloat16() for hidden",
        )
    return _NAMES[tensor.dtype]


def _from_torch(tensor: Tensor, dtype: str, layout: str, device: Device, mapper: Any, on_host: bool) -> Any:
    ttnn = library()

    # ttnn tilizes fp32 for a mesh on its chips, which Wormhole's simulator does not run
    by_host = on_host or (dtype == "float32" and layout == "TILE" and not device.machine.unpack_to_dest)
    made = ttnn.from_torch(
        tensor.contiguous(),
        dtype=getattr(ttnn, dtype),
        layout=getattr(ttnn, f"{layout}_LAYOUT"),
        device=None if by_host else device.handle,
        memory_config=None if by_host else ttnn.DRAM_MEMORY_CONFIG,
        mesh_mapper=mapper,
    )
    if by_host and not on_host:
        return ttnn.to_device(made, device.handle, memory_config=ttnn.DRAM_MEMORY_CONFIG)
    return made


def empty(shape: tuple[int, ...], dtype: str, layout: str, device: Device) -> Any:
    """An uninitialised tensor on every device, in DRAM."""
    return _made("empty", shape, dtype, layout, device)


def zeros(shape: tuple[int, ...], dtype: str, layout: str, device: Device) -> Any:
    """A tensor of zeros on every device, in DRAM."""
    return _made("zeros", shape, dtype, layout, device)


def _made(kind: str, shape: tuple[int, ...], dtype: str, layout: str, device: Device) -> Any:
    device.check_open()
    ttnn = library()

    return getattr(ttnn, kind)(
        list(shape),
        dtype=getattr(ttnn, dtype),
        layout=getattr(ttnn, f"{layout}_LAYOUT"),
        device=device.handle,
        memory_config=ttnn.DRAM_MEMORY_CONFIG,
    )


def to_torch(tensor: Any, device: Device) -> Tensor:
    """The copy that the first device holds."""
    ttnn = library()

    return ttnn.to_torch(tensor if device.D == 1 else ttnn.get_device_tensors(tensor)[0])


def parts_to_torch(tensor: Any, device: Device) -> list[Tensor]:
    """The copies, or parts, of all devices."""
    ttnn = library()

    return [ttnn.to_torch(part) for part in (ttnn.get_device_tensors(tensor) if device.D > 1 else [tensor])]


def forms(given: Sequence[Any], device: Device) -> tuple[Any, ...] | None:
    """A cheap key of all that `check` looks at: calls with equal keys need one check.

    Args:
        given: tensors, or None.

    Returns:
        The specs of the tensors (shape, dtype, layout, memory); None if one is not a ttnn tensor of this device.
    """
    if device.emulated:
        return None
    handle, kind = device.handle, library().Tensor
    for tensor in given:
        if tensor is not None and not (isinstance(tensor, kind) and tensor.device() is handle):
            return None
    return tuple(None if tensor is None else tensor.spec for tensor in given)


def check(
    name: str,
    tensor: Any,
    shape: tuple[int, ...],
    dtypes: tuple[str, ...],
    layout: str,
    device: Device,
    *,
    reshape: str | None = None,
) -> None:
    """Check a ttnn tensor before a kernel gets it: shape, dtype, layout and place.

    Args:
        reshape: the remedy for another shape.

    Raises:
        ContractError: it names the tensor, what it is, what it should be, and the ttnn call that converts it.
    """
    ttnn = library()

    if not isinstance(tensor, ttnn.Tensor):
        kind = type(tensor)
        raise ContractError(
            f"{name} is not a ttnn tensor",
            got=f"a {kind.__module__}.{kind.__qualname__}",
            expected="a ttnn.Tensor on the device",
            remedy="ttnn.from_torch(tensor, device=device.handle), or call ttnn_moe.moe with torch tensors alone",
        )
    if tuple(tensor.shape) != shape:
        raise ContractError(f"{name} has the wrong shape", got=tuple(tensor.shape), expected=shape, remedy=reshape)
    wanted = [getattr(ttnn, dtype) for dtype in dtypes]
    if tensor.dtype not in wanted:
        raise ContractError(
            f"{name} has the wrong dtype",
            got=_tail(tensor.dtype),
            expected=" or ".join(dtypes),
            remedy=f"ttnn.typecast({name}, ttnn.{dtypes[0]})",
        )
    if tensor.layout != getattr(ttnn, f"{layout}_LAYOUT"):
        raise ContractError(
            f"{name} has the wrong layout",
            got=_tail(tensor.layout),
            expected=layout,
            remedy=f"ttnn.to_layout({name}, ttnn.{layout}_LAYOUT)",
        )
    if tensor.storage_type() != ttnn.StorageType.DEVICE:
        raise ContractError(
            f"{name} is not on a device",
            got=_tail(tensor.storage_type()),
            expected="DEVICE",
            remedy=f"ttnn.to_device({name}, device)",
        )
    if tensor.device() != device.handle:
        raise ContractError(f"{name} is on another device", got=tensor.device(), expected=device.handle)
    if tensor.memory_config() != ttnn.DRAM_MEMORY_CONFIG:
        raise ContractError(
            f"{name} is not interleaved in DRAM",
            got=tensor.memory_config(),
            expected="DRAM_MEMORY_CONFIG",
            remedy=f"ttnn.to_memory_config({name}, ttnn.DRAM_MEMORY_CONFIG)",
        )


def _tail(value: object) -> str:
    return str(value).rsplit(".", 1)[-1]
