"""python layer_run.py OUTPUT CASE: one layer's operators on the device that ttnn_moe.tenstorrent opens.

Writes what each operator gave with torch.save: once on a device or simulator, once with TTNN_MOE_TT_DEVICE=emulator,
and the two are the same or within bf16 rounding. TT_METAL_SIMULATOR is set for both, if it is for one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[2] / "support")]

import torch  # noqa: E402

from tenstorrent_setup import Layer, OnDevice  # noqa: E402
from ttnn_moe import _planner, tenstorrent  # noqa: E402
from ttnn_moe.sizes import ceil_div  # noqa: E402
from ttnn_moe.tenstorrent import device as devices  # noqa: E402

LAYERS = {
    "small": dict(T=37, E=8, K=2, H=128, I=64, local=5),
    "wide": dict(T=70, E=6, K=3, H=352, I=160, local=4),
    "qwen3": dict(T=32, E=4, K=2, H=2048, I=768, local=2),
}


def main() -> None:
    torch.manual_seed(0)
    layer = Layer.make(**LAYERS[sys.argv[2]])
    there = tenstorrent.open_device()
    # the emulator does as the simulator that it is compared with
    direct = devices.unpacks_to_dest(there.arch, bool(os.environ.get(devices.SIMULATOR)))
    machine = there.machine
    there.machine = _planner.Machine(
        grid=machine.grid, l1_bytes=machine.l1_bytes, unpack_to_dest=direct, dram_banks=machine.dram_banks
    )
    on = OnDevice(layer, there)
    routed = on.route()
    activations = on.programs.gate_up(on.hidden, routed, on.gate, on.up)
    out = on.out()
    on.programs.down(activations, routed, on.down, out, False)
    counts = on.back(routed.tensors["num_routed_tokens"])[0]
    rows = sum(ceil_div(int(counts[e]), 32) * 32 for e in layer.mapping)
    torch.save(
        {
            "counts": counts,
            "tokens": [on.back(routed.tensors["routed_tokens"])[e, : counts[e]] for e in layer.mapping],
            "weights": [on.back(routed.tensors["routed_token_weights"])[e, : counts[e]] for e in layer.mapping],
            "activations": on.back(activations)[:rows],
            "out": on.back(out),
            "arch": on.device.arch,
        },
        sys.argv[1],
    )
    tenstorrent.close_device()


if __name__ == "__main__":
    main()
