"""Tenstorrent: the host side. Plans come from ttnn_moe._planner, kernels from device_kernels/, and ttnn runs them.

    device = tenstorrent.open_device()            # or open_device(8): a 1x8 mesh; or attach(yours)
    experts = tenstorrent.load_experts(experts)   # torch weights to tiles on the device, once
    routing = tenstorrent.DeviceRouting(topk_ids, topk_weights)      # ttnn tensors
    out = ttnn_moe.moe(hidden, routing, experts)                     # ttnn tensors in, ttnn tensor out

`gate_projection`, `up_projection`, `gate_up`, `silu_mul` and `down_projection` run one step each on ttnn tensors. Their
routing is by expert: an `ExpertRouting` of the caller's tensors, or of `route`.

With torch tensors, `ttnn_moe.moe(..., backend="tenstorrent")` moves them to the device and the result back.
"""

from .device import Device, attach, close_device, open_device
from .experts import DeviceExperts, load_experts
from .layer import DeviceRouting, moe
from .steps import ExpertRouting, down_projection, gate_projection, gate_up, route, silu_mul, up_projection
from .weight_formats import ComputeConfig, ExpertFormats, ModelFormats

__all__ = [
    "ComputeConfig",
    "Device",
    "DeviceExperts",
    "DeviceRouting",
    "ExpertFormats",
    "ExpertRouting",
    "ModelFormats",
    "attach",
    "close_device",
    "down_projection",
    "gate_projection",
    "gate_up",
    "load_experts",
    "moe",
    "open_device",
    "route",
    "silu_mul",
    "up_projection",
]
