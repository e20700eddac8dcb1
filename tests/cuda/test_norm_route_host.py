"""Hopper's router on the host: choice, weights, normalised tokens; see test_sm90_host.py. GPU: qwen3_kernel_cases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from host_kernels import GXX, HostKernels, with_mistake
from ttnn_moe import decoder
from ttnn_moe.cuda.router import clustered

pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")
EPS = 1e-6


def _tensors(T: int, H: int, E: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The last token is so small that EPS changes it; the first of more than one is zero."""
    torch.manual_seed(T)
    x = 2 * torch.randn(T, H)
    x[:-1][:1] = 0
    x[-1] *= 5e-4
    return x.to(dtype), torch.randn(H).to(dtype), (torch.randn(E, H) * H**-0.5).to(dtype)


def _logits(x: Tensor, norm: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """fp64 logits of x * norm as it is rounded, and the normalised x."""
    wide = x.double()
    scale = (wide.square().mean(1, keepdim=True) + EPS).rsqrt()
    return (x * norm).double() @ weight.double().T * scale, wide * scale * norm.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("T", "H", "E", "K", "renormalise"),
    [
        (1, 512, 128, 8, True),
        (7, 1024, 128, 1, False),
        (8, 512, 256, 16, True),
        (37, 512, 128, 6, False),
        (107, 512, 128, 8, True),
    ],
)
def test_the_router(
    T: int,
    H: int,
    E: int,
    K: int,
    renormalise: bool,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last cases have clusters that are full, and one with five tokens, or with eleven of sixteen."""
    host = HostKernels(tmp_path)
    _check(host, _tensors(T, H, E, dtype), K, renormalise, monkeypatch)


def _check(
    host: HostKernels,
    tensors: tuple[Tensor, Tensor, Tensor],
    K: int,
    renormalise: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host.use(monkeypatch)
    clustered._launch.cache_clear()
    x, norm, weight = tensors
    ids, weights, normed = clustered.launch(x, norm, EPS, weight, K, renormalise)
    assert host.sound
    logits, want = _logits(*tensors)
    best = logits.sort(dim=1, descending=True, stable=True).indices[:, :K]
    assert torch.equal(ids.long(), best)
    of = torch.softmax(logits, 1).gather(1, best)
    of = of / of.sum(1, keepdim=True) if renormalise else of
    assert float((weights - of).abs().max()) < 1e-5
    assert float((normed.double() - want).norm() / want.norm()) < (4e-3 if x.dtype == torch.bfloat16 else 5e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("T", "E"), [(5, 256), (107, 128)])
def test_without_a_norm(T: int, E: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostKernels(tmp_path)
    host.use(monkeypatch)
    clustered._launch.cache_clear()
    x, _, weight = _tensors(T, 512, E, dtype)
    ids, weights, same = clustered.launch(x, None, EPS, weight, 8, True)
    assert host.sound and same is x
    logits = x.double() @ weight.double().T
    best = logits.sort(dim=1, descending=True, stable=True).indices[:, :8]
    assert torch.equal(ids.long(), best)
    of = torch.softmax(logits, 1).gather(1, best)
    assert float((weights - of / of.sum(1, keepdim=True)).abs().max()) < 1e-5


def test_ties_and_what_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `route` chooses: the lowest of equal experts; NaN is the largest, and makes the weights NaN."""
    HostKernels(tmp_path).use(monkeypatch)
    clustered._launch.cache_clear()
    x, norm, weight = _tensors(4, 512, 128, torch.bfloat16)
    weight[:, 1:] = 0
    weight[:, 0] = torch.arange(128).remainder(5)
    x[:, 0], norm[0] = torch.tensor([1.0, -1.0, 0.0, 1.0]), 1
    x[3, 7] = torch.nan
    ids, weights, _ = clustered.launch(x, norm, EPS, weight, 8, True)
    fours, zeros = range(4, 44, 5), range(0, 40, 5)
    assert ids.tolist() == [list(fours), list(zeros), list(range(8)), list(range(8))]
    assert bool(weights[3].isnan().all()) and torch.allclose(weights[:3], torch.full((3, 8), 0.125))


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("rank * OWN + e]), g,", "rank * OWN + e]), g ^ 1,"),
        ("barrier_wait(full, 0);", ""),
        ("scaled.z, scaled.w", "scaled.w, scaled.z"),
        ("full, logit * scale);", "full, logit);"),
        ("if (own && best.at == i)", "if (own && i == 0)"),
    ],
)
def test_a_mistake_is_seen(line: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostKernels(tmp_path, sources=with_mistake(tmp_path, "sm90/norm_route", line, instead))
    with pytest.raises(AssertionError):
        _check(host, _tensors(5, 512, 128, torch.bfloat16), 8, True, monkeypatch)


def test_the_definition_is_near() -> None:
    """torch's form rounds the normalised token, the kernel x * norm: logits differ by rounding alone."""
    x, norm, weight = _tensors(3, 512, 128, torch.bfloat16)
    with decoder.plain():
        normed = decoder.rms_norm(x, norm, EPS)
    logits, _ = _logits(x, norm, weight)
    assert float((normed.double() @ weight.double().T - logits).abs().max()) < 3e-2
