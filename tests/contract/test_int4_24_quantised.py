"""Quantising to int4_24: what is kept, the scales, calibration, and what is refused."""

from __future__ import annotations

import pytest
import torch

from benchmark_scripts import script
from paths import ROOT
from ttnn_moe import ContractError, Experts, Routing
from ttnn_moe.formats import quantise_int4_24
from ttnn_moe.formats.int4_24 import dequantise, pack, unpack
from ttnn_moe.formats.quantise_int4_24 import quantise, quantise_experts
from ttnn_moe.selfcheck.edges import Case


def output_error(weights: torch.Tensor, words: torch.Tensor, moments: torch.Tensor) -> float:
    """The squared error of the output."""
    difference = weights.double() - dequantise(words).double()
    return float((difference @ moments.double() * difference).sum())


def lattice(*shape: int) -> torch.Tensor:
    """Weights [*shape] that int4_24 holds exactly."""
    *lead, K = shape
    values, index = torch.randint(-8, 8, (*lead, K // 4)), torch.randint(0, 4, (*lead, K // 4))
    return dequantise(pack(values, index, torch.randn(*lead, K // 32).to(torch.bfloat16)))


@pytest.mark.parametrize("moments", [None, torch.eye(128)], ids=["plain", "white"])
def test_weights_of_the_format_are_kept(moments: torch.Tensor | None) -> None:
    weights = lattice(2, 40, 128)
    assert torch.equal(dequantise(quantise(weights, moments)), weights)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30])
def test_the_largest_of_four_is_kept(scale: float) -> None:
    weights = torch.randn(2, 8, 64) * scale
    words = quantise(weights)
    index = unpack(words)[1].long()[..., None]
    chunks, got = (x.unflatten(-1, (-1, 4)) for x in (weights, dequantise(words)))
    kept, rounded = (x.gather(-1, index).squeeze(-1).unflatten(-1, (-1, 8)) for x in (chunks, got))
    assert torch.equal(kept.abs().flatten(-2), chunks.abs().amax(-1))
    most = kept.abs().amax(-1, keepdim=True)
    assert bool(((rounded - kept).abs() <= most / 5).all())


def test_no_scale_overflows() -> None:
    """The largest fp32 over 1 is no bf16."""
    weights = torch.randn(8, 64).clamp(-1, 1) * torch.finfo(torch.float32).max
    assert bool(unpack(quantise(weights))[2].isfinite().all())


def test_scales_are_near_the_best_of_all() -> None:
    kept = torch.randn(300, 8)
    candidates = torch.arange(0x3D00, 0x4080, dtype=torch.int16).view(torch.bfloat16).float()
    candidates = torch.cat([candidates, -candidates])

    def error(scales: torch.Tensor) -> torch.Tensor:
        q = (kept[:, None] / scales[..., None]).round().clamp(-8, 7)
        return (q * scales[..., None] - kept[:, None]).square().sum(-1)

    found = quantise_int4_24._scales(kept, torch.ones_like(kept)).float()
    assert float(error(found[:, None]).sum() / error(candidates.expand(300, -1)).amin(-1).sum()) < 1.1


def test_calibration_lowers_the_error_of_the_output() -> None:
    x = torch.randn(600, 24) @ torch.randn(24, 128) + 0.5 * torch.randn(600, 128)
    weights, moments = torch.randn(2, 32, 128).to(torch.bfloat16), x.T @ x
    plain, calibrated = quantise(weights), quantise(weights, moments)
    assert output_error(weights, calibrated, moments) < 0.4 * output_error(weights, plain, moments)
    each = quantise(torch.nn.Parameter(weights), torch.stack([moments, torch.eye(128)]))
    assert torch.equal(each[0], calibrated[0])
    # a power of two changes nothing but the scales
    scaled = quantise(weights.float() * 2.0**90, moments)
    assert torch.equal(dequantise(scaled) / 2.0**90, dequantise(calibrated))
    # without inputs: as without moments
    assert torch.equal(quantise(weights, torch.zeros(128, 128)), plain)
    # without correlations: but for near ties, which the calibrated variant settles by the rounding errors
    assert float((each[1] != plain[1]).float().mean()) < 0.05
    assert output_error(weights[1], each[1], torch.eye(128)) <= output_error(weights[1], plain[1], torch.eye(128))


@pytest.mark.parametrize("moments", [None, torch.eye(64) + 0.3], ids=["plain", "calibrated"])
def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch, moments: torch.Tensor | None) -> None:
    weights = torch.randn(2, 33, 64)
    whole = dequantise(quantise(weights, moments))
    monkeypatch.setattr(quantise_int4_24, "MAX_ELEMENTS", 7 * 64)
    torch.testing.assert_close(dequantise(quantise(weights, moments)), whole)


@pytest.mark.parametrize("calibrated", [False, True], ids=["plain", "calibrated"])
def test_a_layer_in_both_orders_of_rows(calibrated: bool) -> None:
    """Both orders give the same weights; an expert without a token gets those of plain rounding."""
    x = Case("layer", T=300, E=3, K=1, H=64, I=64).make(torch.bfloat16)
    x.ids[x.ids == 1] = 0
    gate_up, down = x.experts.tensors["gate_up"], x.experts.tensors["down"]
    mixed = torch.stack(gate_up.chunk(2, 1), 2).reshape(gate_up.shape)
    interleaved = Experts.dense(mixed, down, gate_up_order="interleaved")
    tokens = (x.hidden, x.routing()) if calibrated else ()
    got, want = quantise_experts(interleaved, *tokens), quantise_experts(x.experts, *tokens)
    assert (got.format, got.gate_up_order, got.sizes) == ("int4_24", "interleaved", [3, 64, 64])
    for e in range(3):
        for a, b in zip(got.dequantize(e), want.dequantize(e), strict=True):
            torch.testing.assert_close(a, b)
    plain = quantise_experts(x.experts)
    assert torch.equal(want.tensors["w2"][1], plain.tensors["w2"][1])
    assert torch.equal(want.tensors["w13"][0], plain.tensors["w13"][0]) != calibrated


def test_neither_autocast_nor_a_power_of_two_changes_a_word() -> None:
    """Both change what is multiplied: to bf16, or beyond fp32."""
    x = Case("layer", T=300, E=2, K=1, H=64, I=64).make(torch.float32)
    x.hidden[:] = torch.randn(300, 4) @ torch.randn(4, 64)
    want = quantise_experts(x.experts, x.hidden, x.routing())
    with torch.autocast("cpu", torch.bfloat16):
        got = quantise_experts(x.experts, x.hidden, x.routing())
    assert all(torch.equal(got.tensors[name], words) for name, words in want.tensors.items())
    weights, moments = x.experts.tensors["down"], (x.hidden.T @ x.hidden).double()
    assert torch.equal(quantise(weights, moments * 2.0**1000), quantise(weights, moments))
    assert quantise_experts(x.experts, x.hidden * 1e14, x.routing()).format == "int4_24"
    with pytest.raises(
        ContractError, match="hidden is too large: activations of expert 0 overflow fp32; got hidden up"
    ):
        quantise_experts(x.experts, x.hidden * 1e30, x.routing())


def test_the_code_of_the_docs() -> None:
    text = (ROOT / "docs" / "int4_24.md").read_text(encoding="utf-8")
    names: dict = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    assert torch.equal(names["again"].dequantize(0)[0], names["calibrated"].dequantize(0)[0])
    assert names["out"].isfinite().all()


def test_the_figures_of_the_docs() -> None:
    """benchmarks/int4_24_error.py prints them; here with fewer prompts."""
    measure = script("int4_24_error")
    gaussian = measure.gaussian()
    assert 0.86 < gaussian["by magnitude"] < 0.90
    found = measure.tiny(calibration=10, asked=2)
    errors = {name: max(each) for name, (each, _) in found.items()}
    assert 0.75 < errors["by magnitude"] < 0.9
    assert errors["calibrated"] < 0.4


def test_what_is_not_finite_is_named() -> None:
    x = Case("layer", T=9, E=3, K=1, H=64, I=64).make(torch.bfloat16)
    x.hidden[5, 7] = torch.inf
    with pytest.raises(ContractError, match="hidden: .* inf in matrix 0, row 5, channel 7"):
        quantise_experts(x.experts, x.hidden, x.routing())
    x.experts.tensors["down"][2, 3, 4] = torch.nan
    with pytest.raises(ContractError, match="down: .* nan in matrix 2, row 3, channel 4"):
        quantise_experts(x.experts)


def test_padding_calibrates_nothing_and_may_hold_anything() -> None:
    x = Case("layer", T=90, E=2, K=1, H=64, I=64).make(torch.float32)
    want = quantise_experts(x.experts, x.hidden[:70], Routing.from_topk(x.ids[:70], x.weights[:70], 2))
    x.hidden[70:] = torch.nan
    routing = Routing.from_topk(x.ids, x.weights, 2, num_tokens=torch.tensor(70, dtype=torch.int32))
    got = quantise_experts(x.experts, x.hidden, routing)
    assert all(torch.equal(got.tensors[name], words) for name, words in want.tensors.items())


def spoilt(value: float) -> torch.Tensor:
    weights = torch.randn(2, 4, 64)
    weights[1, 2, 9] = value
    return weights


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: quantise(torch.randn(4, 96)), r"\(4, 96\).*C a multiple of 64"),
        (lambda: quantise(torch.randn(64)), "cannot be quantised to int4_24"),
        (lambda: quantise(torch.ones(4, 64, dtype=torch.int8)), "torch.int8"),
        (lambda: quantise(torch.ones(4, 64).double()), "torch.float64"),
        (lambda: quantise(torch.randn(4, 64), torch.eye(128)), "moments do not fit"),
        (lambda: quantise(spoilt(float("nan"))), "weights: not all are finite; got nan in matrix 1, row 2, channel 9"),
        (lambda: quantise(torch.randn(4, 64), torch.full((64, 64), torch.inf)), "moments: not all are finite"),
        (
            lambda: quantise(torch.randn(4, 64), torch.ones(64, 64) - 3 * torch.eye(64)),
            "not those of any inputs; got .*x.T @ x",
        ),
        (lambda: quantise_experts(quantise_experts(Experts.dense(lattice(1, 128, 64), lattice(1, 64, 64)))), "dense"),
        (
            lambda: quantise_experts(
                Experts.dense(torch.randn(2, 128, 64), torch.randn(2, 64, 64)),
                torch.randn(3, 64),
                Routing.from_topk(torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1), 2),
            ),
            "do not fit the experts",
        ),
        (lambda: quantise_experts(Experts.dense(torch.randn(1, 144, 64), torch.randn(1, 64, 72))), "multiple of 64"),
    ],
)
def test_refusals(call, match: str) -> None:
    with pytest.raises(ContractError, match=match):
        call()
