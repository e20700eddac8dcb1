"""Attention never takes ttnn's approximation of exp, whose errors are 1e-2.

ttnn approximates exp without a program config, and where a decode step's heads fill half a tile or less.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("ttnn_moe._planner", reason="native planner: not built", exc_type=ModuleNotFoundError)

from ttnn_moe import tenstorrent  # noqa: E402
from ttnn_moe.models.qwen3.tt.attention import DecodeTables, Exact, PieceTables, PrefillTables  # noqa: E402
from ttnn_moe.models.qwen3.tt.passes import Piece  # noqa: E402
from ttnn_moe.tenstorrent import Device, tensors  # noqa: E402
from ttnn_moe.tenstorrent.runtime import library  # noqa: E402

B, SIZE = 3, 64


@pytest.fixture
def device() -> Iterator[Device]:
    if not tenstorrent.device.probe("emulator").available:
        pytest.skip(tenstorrent.device.probe("emulator").reason)
    tenstorrent.close_device()
    yield tenstorrent.open_device(1, device="emulator")
    tenstorrent.close_device()


@pytest.fixture
def seen(device: Device, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, SimpleNamespace]]:
    """Query heads and program config of each call of ttnn's attention."""
    found: list[tuple[int, SimpleNamespace]] = []

    def call(heads_at: int, real: Any, q: Any, *given: Any, program_config: Any, **options: Any) -> Any:
        found.append((int(q.shape[heads_at]), program_config))
        return real(q, *given, **options)

    for name, real in vars(library().transformer).items():
        heads_at = 2 if name.endswith("decode") else 1
        monkeypatch.setattr(library().transformer, name, partial(call, heads_at, real))
    return found


def moved(device: Device, *shape: int) -> tuple[torch.Tensor, Any]:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()
    return values.float(), tensors.replicate(values, device, "TILE")


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 1), (16, 1), (24, 1), (32, 1), (32, 4), (4, 2)])
def test_exp_is_exact(heads: int, kv_heads: int, device: Device, seen: list[tuple[int, SimpleNamespace]]) -> None:
    exact = Exact.of(device, None)
    (keys, k), (values, v) = (moved(device, n, kv_heads, 32, SIZE) for n in (2, 2))
    pages = tensors.replicate(torch.tensor([[1]]).int(), device)
    prefill, q = moved(device, 1, heads, 32, SIZE)
    got = PrefillTables([PieceTables(Piece(row=0, first=0, size=32, past=0), pages, pages)]).attend(k, v, q, exact)
    check(got, prefill, keys, values, causal=True)

    table = tensors.replicate(torch.tensor([[1]] * B).int(), device)
    positions = tensors.replicate(torch.full((B,), 31).int(), device)
    decode, q = moved(device, 1, heads, B, SIZE)
    check(DecodeTables(device, positions, table).attend(k, v, q, exact), decode, keys, values, causal=False)
    assert [config.exp_approx_mode for _, config in seen] == [False, False]
    # several key heads have their own query heads, and stay in half a tile
    assert seen[1][0] == (32 if kv_heads == 1 else heads)


def check(got: Any, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool) -> None:
    """Attention to the second page."""
    want = torch.nn.functional.scaled_dot_product_attention(q, keys[1:], values[1:], is_causal=causal, enable_gqa=True)
    assert tuple(got.shape) == q.shape
    torch.testing.assert_close(library().to_torch(got).float(), want, atol=2e-2, rtol=1e-2)
