"""Quantising to MXFP4 weights and to MXFP8 activations: rounding, scales, and what is refused."""

from __future__ import annotations

import pytest
import torch

from benchmark_scripts import script
from paths import ROOT
from ttnn_moe import ContractError, Experts
from ttnn_moe.formats import mxfp8, quantise_mxfp4, ue8m0
from ttnn_moe.formats.mxfp4 import dequantise, unpack
from ttnn_moe.formats.quantise_mxfp4 import RULES, quantise, quantise_experts
from ttnn_moe.selfcheck.edges import Case

GRID = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def nearest(value: float) -> float:
    """On the grid, by exact comparison; a tie goes to the even place; the sign stays."""
    size = min(abs(value), 6.0)
    least = min(abs(size - point) for point in GRID)
    found = [i for i, point in enumerate(GRID) if abs(size - point) == least]
    return GRID[found[0] if len(found) == 1 or found[0] % 2 == 0 else found[1]] * (-1 if value < 0 else 1)


def test_rounds_to_the_nearest_and_ties_to_even() -> None:
    middles = torch.tensor([(a + b) / 2 for a, b in zip(GRID, GRID[1:], strict=False)])
    near = [torch.nextafter(middles, torch.full_like(middles, to)) for to in (-9.0, 9.0)]
    values = torch.cat([middles, *near, torch.tensor(GRID), torch.linspace(0, 7.9, 400)])
    values = torch.cat([values, -values])
    values = values[values.abs() < 6]
    groups = torch.full((len(values), 32), 6.0)  # the scale is 1
    groups[:, 3] = values
    blocks, scales = quantise(groups, "ocp")
    assert (scales == 127).all()
    assert dequantise(blocks, scales)[:, 3].tolist() == [nearest(value) for value in values.tolist()]
    zeros = unpack(quantise(torch.tensor([[-0.0, 0.1] + [0.0] * 29 + [6.0], [-0.1] + [6.0] * 31]), "ocp")[0])
    assert zeros[:, 0].tolist() == [8, 8], "zeros keep their sign"


@pytest.mark.parametrize(
    "amax, scale",
    [(4.0, 127), (6.0, 127), (7.99, 127), (8.0, 128), (3.99, 126), (0.0, 0), (2.0**-140, 0), (2.0**-125, 0)]
    + [(2.0**-124, 1), (3.4e38, 252)],
)
def test_the_rule_of_the_specification(amax: float, scale: int) -> None:
    weights = torch.zeros(1, 32)
    weights[0, 17] = -amax
    blocks, scales = quantise(weights, "ocp")
    assert scales.tolist() == [[scale]] and dequantise(blocks, scales).isfinite().all()


@pytest.mark.parametrize("case", ["gaussian", "outlier", "uniform", "half", "tiny", "huge"])
def test_no_scale_has_a_smaller_error(case: str) -> None:
    g = torch.Generator().manual_seed(1)
    weights = torch.randn(200, 32, generator=g)
    if case == "outlier":
        weights[:, 5] *= 30
    elif case == "uniform":
        weights = torch.rand(200, 32, generator=g)
    elif case == "half":  # 4 becomes 3, and all others are exact
        weights = torch.full((200, 32), 0.25)
        weights[:, 9] = 4.0
    elif case in ("tiny", "huge"):
        weights = weights / weights.abs().amax(-1, keepdim=True) * (2.0**-126 if case == "tiny" else 3.4e38)
    blocks, scales = quantise(weights)
    assert dequantise(blocks, scales).isfinite().all()
    exact = weights.double()
    found = (dequantise(blocks, scales, torch.float64) - exact).square().sum(-1)
    every = []
    for byte in range(253):  # larger ones are infinite in fp32
        scale = 2.0 ** (byte - 127)
        codes = quantise_mxfp4._codes((exact / scale).float())
        sizes = quantise_mxfp4.magnitudes("cpu").double()[(codes & 7).int()] * scale
        every.append((torch.where(codes > 7, -sizes, sizes) - exact).square().sum(-1))
    # the search computes in fp32: of two scales with all but the same error it may take either
    assert (found <= torch.stack(every).amin(0) * (1 + 1e-5)).all()
    other = (dequantise(*quantise(weights, "ocp"), torch.float64) - exact).square().sum(-1)
    assert (found <= other * (1 + 1e-5)).all()
    if case not in ("tiny", "huge"):
        assert found.sum() < 0.98 * other.sum()


@pytest.mark.parametrize("rule", RULES)
def test_mxfp4_weights_stay_as_they_are(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 9, 48), generator=g, dtype=torch.uint8)
    scales = torch.randint(0, 253, (2, 9, 3), generator=g, dtype=torch.uint8)
    weights = dequantise(blocks, scales)
    assert torch.equal(dequantise(*quantise(weights, rule)), weights)
    others = torch.randn(3, 11, 64, generator=g)
    whole = quantise(others, rule)
    assert [part.shape for part in quantise(others[:, :0], rule)] == [(3, 0, 32), (3, 0, 2)]
    monkeypatch.setattr(quantise_mxfp4, "MAX_ELEMENTS", 5 * 64)  # rows are cut, and experts joined
    assert all(torch.equal(a, b) for a, b in zip(whole, quantise(others, rule), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer(dtype: torch.dtype) -> None:
    dense = Case("layer", T=1, E=3, H=96, I=32).make(dtype).experts
    dense = Experts.dense(*dense.tensors.values(), gate_up_order="interleaved")
    got = quantise_experts(dense)
    assert (got.format, got.gate_up_order, got.sizes) == ("mxfp4", "interleaved", [3, 96, 32])
    for e in range(3):
        for weights, want in zip(got.dequantize(e), dense.dequantize(e), strict=True):
            error = (weights - want.float()).norm() / want.float().norm()
            assert 0.09 < error < 0.125
    dense.tensors["down"][2, 3, 4] = torch.nan
    with pytest.raises(ContractError, match="mxfp4 cannot be made of these down: .* nan in matrix 2, row 3, channel 4"):
        quantise_experts(dense)
    with pytest.raises(ContractError, match="only dense experts"):
        quantise_experts(got)


def test_the_code_of_the_docs() -> None:
    text = (ROOT / "docs" / "mxfp4.md").read_text(encoding="utf-8")
    names: dict = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    assert torch.equal(names["again"].dequantize(0)[0], names["experts"].dequantize(0)[0])
    assert names["out"].isfinite().all()


def test_the_figures_of_the_docs() -> None:
    """benchmarks/mxfp4_error.py prints them; here with fewer values and prompts."""
    measure = script("mxfp4_error")
    wanted = {"mxfp4, error": 0.112, "mxfp4, ocp": 0.115, "mxfp8, ocp": 0.029, "mxfp8, up": 0.027}
    assert measure.values(1 << 18) == pytest.approx(wanted, abs=1e-3)
    assert measure.gaussian() == pytest.approx({"error": 0.193, "ocp": 0.199}, abs=2e-3)
    found = measure.tiny(asked=2)
    assert 0.07 < max(found["error"]) < max(found["ocp"]) < 0.12


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: quantise(torch.randn(4, 48)), r"\(4, 48\).*C a multiple of 32"),
        (lambda: quantise(torch.randn(64)), "cannot be quantised to mxfp4"),
        (lambda: quantise(torch.ones(4, 64).double()), "torch.float64"),
        (lambda: quantise(torch.ones(4, 64), "up"), r"unknown rule .* expected one of \['error', 'ocp'\]"),
        (lambda: quantise(torch.full((4, 64), torch.inf)), "inf in matrix 0, row 0, channel 0"),
        (lambda: mxfp8.quantise(torch.ones(4, 33)), r"mxfp8; got \(4, 33\)"),
        (lambda: mxfp8.quantise(torch.ones(4, 32).long()), "torch.int64"),
        (lambda: mxfp8.quantise(torch.ones(4, 32), "error"), "unknown rule"),
        (lambda: mxfp8.dequantise(mxfp8.quantise(torch.ones(4, 32))[0], torch.ones(4, 1)), "do not fit together"),
        (lambda: mxfp8.dequantise(torch.ones(4, 32), torch.ones(4, 1).byte()), r"float32 and \(4, 1\) torch.uint8"),
        (lambda: mxfp8.dequantise(*(part[:, :31] for part in mxfp8.quantise(torch.ones(4, 32)))), "do not fit"),
    ],
)
def test_refusals(call, match: str) -> None:
    with pytest.raises(ContractError, match=match):
        call()


def test_every_e4m3_number_at_every_scale_is_exact() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()]
    for byte in (0, 1, 9, 100, 127, 200, 246):
        groups = torch.zeros(len(numbers), 32)
        groups[:, 0], groups[:, 1] = numbers, 448
        groups *= ue8m0.decode(torch.tensor(byte, dtype=torch.uint8))
        for rule in mxfp8.RULES:
            values, scales = mxfp8.quantise(groups, rule)
            assert (scales == byte).all()
            assert torch.equal(mxfp8.dequantise(values, scales), groups)


@pytest.mark.parametrize("rule", mxfp8.RULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(rule: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    hidden = (torch.randn(50, 256, generator=g) * torch.logspace(-4, 3, 50)[:, None]).to(dtype)
    values, scales = mxfp8.quantise(hidden, rule)
    assert values.shape == hidden.shape and scales.shape == (50, 8) and scales.dtype == torch.uint8
    back, want = mxfp8.dequantise(values, scales), hidden.float()
    amax = want.unflatten(-1, (-1, 32)).abs().amax(-1)
    scale = ue8m0.decode(scales)
    floor = 2.0 ** (amax.log2().floor() - 8)
    assert torch.equal(scale, floor if rule == "ocp" else torch.where(amax > 448 * floor, 2 * floor, floor))
    limit = 448 * scale.repeat_interleave(32, -1)
    inside = want.abs() <= limit
    assert torch.equal(back[~inside], want[~inside].sign() * limit[~inside])
    step = torch.maximum(want.abs() / 16, limit / 448 / 1024)  # half of the last place
    assert ((back - want).abs() <= step)[inside].all()
    assert bool(inside.all()) == (rule == "up")


@pytest.mark.parametrize("rule", mxfp8.RULES)
def test_no_activation_becomes_infinite(rule: str) -> None:
    """`up` would double the scale of the largest numbers, and then round them up to 2^128."""
    values, scales = mxfp8.quantise(torch.full((1, 32), torch.finfo(torch.float32).max), rule)
    assert scales.tolist() == [[246]] and (mxfp8.dequantise(values, scales) == 448 * 2.0**119).all()


def test_what_is_not_finite_stays_in_its_group() -> None:
    hidden = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    clean = mxfp8.dequantise(*mxfp8.quantise(hidden))
    hidden[0, 40], hidden[1, 5], hidden[1, 70] = torch.nan, torch.inf, -torch.inf
    values, scales = mxfp8.quantise(hidden)
    back = mxfp8.dequantise(values, scales)
    assert (scales == 0xFF).tolist() == [[False, True, False], [True, False, True], [False] * 3]
    spoiled = (scales == 0xFF).repeat_interleave(32, -1)
    assert back[spoiled].isnan().all() and torch.equal(back[~spoiled], clean[~spoiled])
    zeros = mxfp8.quantise(torch.zeros(2, 32))
    assert not zeros[1].any() and not mxfp8.dequantise(*zeros).any()
