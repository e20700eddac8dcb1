"""What the chips of a mesh add up: a sum's parts are fp32 where the device reduces fp32, and the sum rounds once."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("ttnn_moe._planner", reason="native planner: not built", exc_type=ModuleNotFoundError)

from qwen3_checkpoints import TINY  # noqa: E402
from ttnn_moe import tenstorrent  # noqa: E402
from ttnn_moe.models.qwen3 import Qwen3MoeConfig  # noqa: E402
from ttnn_moe.models.qwen3.tt.layers import Network  # noqa: E402
from ttnn_moe.models.qwen3.tt.weights import Linear  # noqa: E402
from ttnn_moe.tenstorrent import tensors  # noqa: E402
from ttnn_moe.tenstorrent.runtime import library  # noqa: E402


@pytest.mark.parametrize("chip", ["n150", "p150"])
def test_attention_rounds_the_sum_of_its_heads_once(chip: str) -> None:
    if not tenstorrent.device.probe("emulator").available:
        pytest.skip(tenstorrent.device.probe("emulator").reason)
    tenstorrent.close_device()
    device = tenstorrent.open_device(2, device=f"emulator:{chip}")
    try:
        network = Network(Qwen3MoeConfig.from_directory(TINY), device)
        H = network.config.hidden_size
        weights = torch.zeros(2, 1, 64, H)
        weights[0, 0, :2] = torch.tensor([[256.0], [1.0]])  # 257 is no bfloat16: such parts would add up to 0
        weights[1, 0, 0] = -256.0
        x = tensors.shard(torch.ones(2, 1, 32, 64, dtype=torch.bfloat16), device, layout="TILE")
        by = Linear(tensors.shard(weights.bfloat16(), device, layout="TILE"))
        for part in library().get_device_tensors(network.summed(x, by)):
            got = library().to_torch(part)
            assert got.dtype == torch.bfloat16 and torch.equal(got, torch.ones_like(got))
    finally:
        tenstorrent.close_device()
