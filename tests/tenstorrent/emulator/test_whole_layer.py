"""The operator's own layer, whole: 4096 tokens, Qwen3-30B-A3B's sizes, one device of eight; every token is checked."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("ttnn_moe._planner", reason="native planner: not built", exc_type=ModuleNotFoundError)

from tenstorrent_setup import BF16, Layer, OnDevice, check_routing  # noqa: E402
from ttnn_moe import tenstorrent  # noqa: E402

T, E, K, H, I, E_LOCAL = 4096, 128, 8, 2048, 768, 16
BOUND = 2e-3  # of a token; the contract's is 1e-2


def wanted(layer: Layer) -> torch.Tensor:
    """What this device adds to the sum: fp32, with the roundings that the backend declares."""
    out = torch.zeros(T, H)
    for e in layer.mapping.tolist():
        here = layer.ids == e
        tokens = here.any(1).nonzero()[:, 0]
        gate_up, down = (matrix.float() for matrix in layer.experts.dequantize(e))
        gate, up = (layer.hidden[tokens].float() @ gate_up.T).chunk(2, 1)
        rows = (torch.nn.functional.silu(gate) * up).to(BF16).float() @ down.T
        weights = (layer.weights * here).sum(1)[tokens].to(BF16).float()
        out.index_add_(0, tokens, rows * weights[:, None])
    return out


@pytest.mark.slow(25)
@pytest.mark.parametrize("chip", ["n300", pytest.param("p150", marks=pytest.mark.long)])
def test_every_token_of_the_whole_layer(chip: str) -> None:
    tenstorrent.close_device()
    device = tenstorrent.open_device(device=f"emulator:{chip}")
    try:
        device.handle.exact = False  # without the rounding of the FPU, which takes longer
        layer = Layer.make(T=T, E=E, K=K, H=H, I=I, local=E_LOCAL)
        on = OnDevice(layer, device)
        routed = on.route()
        check_routing(on, routed)
        out = on.out(dtype=torch.float32)
        on.programs.down(on.programs.gate_up(on.hidden, routed, on.gate, on.up), routed, on.down, out, False)
        got, want = on.back(out), wanted(layer)
        elsewhere = ~torch.isin(layer.ids, layer.mapping).any(1)
        assert elsewhere.any() and (got[elsewhere] == 0).all()
        errors = ((got - want).norm(dim=1) / want.norm(dim=1))[~elsewhere]
        assert len(errors) > T / 2 and errors.max() < BOUND, f"worst token {errors.max():.2e}"
    finally:
        tenstorrent.close_device()
