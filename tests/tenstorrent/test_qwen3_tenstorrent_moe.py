"""The sparse MLP of Qwen3 on emulated Tenstorrent chips, alone: router, top K and experts, against the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("ttnn_moe._planner", reason="native planner: not built", exc_type=ModuleNotFoundError)

from assertions import assert_close  # noqa: E402
from tenstorrent_setup import NUMERICS  # noqa: E402
from ttnn_moe import Experts, tenstorrent  # noqa: E402
from ttnn_moe.models.qwen3 import TINY, Qwen3MoeConfig  # noqa: E402
from ttnn_moe.models.qwen3.tt.moe import MoE  # noqa: E402
from ttnn_moe.models.qwen3.tt.weights import LEAST_EXPERTS, NEVER, Linear, Router  # noqa: E402
from ttnn_moe.selfcheck.oracle import oracle  # noqa: E402
from ttnn_moe.tenstorrent import tensors  # noqa: E402

E, K, H, I = 8, 3, 128, 64
BF16 = torch.bfloat16


class Layer:
    """Random weights of one layer, on the host and on D chips."""

    def __init__(self, D: int, normalised: bool):
        g = torch.Generator().manual_seed(0)
        self.normalised = normalised
        self.router = torch.randn(E, H, generator=g).to(BF16)
        gate_up = (torch.randn(E, 2 * I, H, generator=g) * H**-0.5).to(BF16)
        self.experts = Experts.dense(gate_up, (torch.randn(E, H, I, generator=g) * I**-0.5).to(BF16))
        self.device = tenstorrent.open_device(D)
        config = replace(Qwen3MoeConfig.from_directory(TINY), num_experts_per_tok=K, norm_topk_prob=normalised)
        self.moe = MoE(config, self.device, None)
        absent = LEAST_EXPERTS - E
        weight = torch.nn.functional.pad(self.router.T, (0, absent))
        bias = torch.tensor([[0.0] * E + [NEVER] * absent]).to(BF16)
        linear = Linear(*(tensors.replicate(x, self.device, "TILE") for x in (weight, bias)))
        self.weights = Router(linear, tenstorrent.load_experts(self.experts, self.device))

    def want(self, x: torch.Tensor) -> torch.Tensor:
        logits = (x.float() @ self.router.float().T).to(BF16)
        if self.normalised:
            largest, ids = logits.topk(K)
            weights = largest.float().softmax(-1).to(BF16)
        else:
            weights, ids = logits.float().softmax(-1).to(BF16).topk(K)
        return oracle(x, ids.int(), weights.float(), self.experts, NUMERICS)


@pytest.mark.parametrize("normalised", [True, False], ids=["normalised", "not normalised"])
@pytest.mark.parametrize("D", [1, 2])
def test_the_experts_of_a_layer(D: int, normalised: bool, emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTNN_MOE_TT_CACHE", "off")
    layer, kept = Layer(D, normalised), []
    for T in (5, 40, 5):
        x = torch.randn(T, H, generator=torch.Generator().manual_seed(T)).to(BF16)
        out = layer.moe(tensors.replicate(x[None, None], layer.device, "TILE"), layer.weights)
        assert tuple(out.shape) == (1, 1, T, H) and out.layout == "TILE_LAYOUT"
        for part in tensors.parts_to_torch(out, layer.device):
            assert_close(part[0, 0], layer.want(x), BF16, f"T={T}")
        kept.append(layer.moe._out(T, H))
    few, many, again = kept
    assert many is None and few is again and (few is None) == (D > 1), "decode steps on a chip share a buffer"
