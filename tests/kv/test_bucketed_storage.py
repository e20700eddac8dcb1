"""Storage of a bucketed KV cache: packing, quantisation, tiers in pages, and attention to them in torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketed_tiers import DISTORTION, bound_of, filled, lost
from ttnn_moe.cuda.attention.tiers import BITS, UNIT, Tier
from ttnn_moe.errors import ContractError
from ttnn_moe.kv.bucketed.packing import pack, unpack
from ttnn_moe.kv.bucketed.quantise import dequantise, quantise, rotate
from ttnn_moe.kv.bucketed.reference import add_mass, attend_bucket, merge, quantized_attention_bucketed
from ttnn_moe.kv.bucketed.storage import empty_layers, put_tokens, read_units, write_units


def empty_tier(bits: int, pages: int, D: int) -> Tier:
    """Of one layer with two heads."""
    tables = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    return empty_layers(bits, 1, pages, 2, D, *tables).each[0]


ERRORS = {2: 0.8, 3: 0.45, 4: 0.25, 8: 0.02, 16: 0.006}
"""Relative error of a vector, at most."""


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(BITS), st.sampled_from([32, 64, 96, 128, 256]), st.booleans(), st.integers(0, 2**31))
def test_pack_keeps_every_level(bits: int, D: int, values: bool, seed: int) -> None:
    levels = torch.randint(2**bits, (2, 32, D), generator=torch.Generator().manual_seed(seed))
    packed = pack(levels, bits, values)
    assert packed.dtype == torch.uint8 and packed.shape == (2, 32 * D * bits // 8)
    assert torch.equal(unpack(packed, bits, D, values), levels)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("values", [False, True])
def test_a_level_out_of_range_changes_no_neighbour(bits: int, values: bool) -> None:
    levels = torch.randint(2**bits, (32, 64))
    odd = levels.clone()
    odd[3, 5], odd[8, 9] = -1, 2**bits + 1
    got = unpack(pack(odd, bits, values), bits, 64, values)
    levels[3, 5], levels[8, 9] = 2**bits - 1, 1
    assert torch.equal(got, levels)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("page", [32, 64, 128])
def test_the_parts_of_a_tier_by_name(bits: int, page: int) -> None:
    """k_qx and v_qx unpack, with k_scale and v_scale, to the tokens that attention reads."""
    (tier,) = filled({bits: [90]}, 2, 64, page=page).tiers
    pages, units = len(tier.payload), page // UNIT
    k, v, held = read_units(tier, torch.arange(pages * units))
    held = held.reshape(pages, 1, page, 1)
    for packed, scale, x, values in ((tier.k_qx, tier.k_scale, k, False), (tier.v_qx, tier.v_scale, v, True)):
        levels = unpack(packed.unflatten(2, (units, -1)), bits, 64, values).flatten(2, 3)
        want = x.view(pages, units, UNIT, 2, 64).permute(0, 3, 1, 2, 4).flatten(2, 3)
        assert scale.shape == (pages, 2, page)
        assert torch.equal(torch.where(held, dequantise(levels, scale, bits), 0.0), torch.where(held, want, 0.0))


def test_three_bits_by_hand() -> None:
    levels = torch.zeros(32, 128, dtype=torch.int64)
    levels[0, 0], levels[0, 1], levels[0, 8 * 15] = 5, 6, 0b101
    words = pack(levels, 3, values=False).view(torch.int32).tolist()
    # lane 0: words 0, 1, 2 of the first 16 pairs
    assert words[0] & 0xFFFFFFFF == 5 | 6 << 16 | 1 << 15
    assert words[1] == 0
    assert words[2] == 1 << 15


@pytest.mark.parametrize("bits", BITS)
def test_quantise_is_as_good_as_it_can_be(bits: int) -> None:
    x = torch.randn(500, 128)
    levels, scale = quantise(x, bits)
    error = (dequantise(levels, scale, bits) - x).square().mean().item()
    assert error < DISTORTION[bits]
    assert int(levels.max()) < 2**bits and int(levels.min()) >= 0


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(BITS), st.floats(-20, 20), st.integers(0, 2**31))
def test_quantise_takes_any_vector(bits: int, power: float, seed: int) -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    x[0] = 0
    got, most = dequantise(*quantise(x, bits), bits), x.abs().amax(-1)
    assert bool(torch.isfinite(got).all())
    error = (got - x).norm(dim=-1)
    inside = (most >= 0.008) & (most <= 65_000)
    assert bool((error <= ERRORS[bits] * x.norm(dim=-1))[inside].all()), "the range that docs/kv.md says"
    assert bool((error <= ERRORS[bits] * 0.008 * 32**0.5)[most < 0.008].all())
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    found = dequantise(*quantise(x, bits), bits)
    assert bool(found[1, 3].isnan()) and not bool(found[2, 5].isfinite())
    assert bool(torch.isfinite(found[[0, 3]]).all())


@pytest.mark.parametrize("D", [32, 96, 128])
def test_rotation_is_its_own_inverse(D: int) -> None:
    x, y = torch.randn(2, 3, D, dtype=torch.float64)
    assert torch.allclose(rotate(rotate(x)), x)
    assert torch.allclose(rotate(x) @ rotate(y).T, x @ y.T)


@pytest.mark.parametrize("bits", BITS)
def test_units_of_tokens_come_back(bits: int) -> None:
    tier = empty_tier(bits, 3, 64)
    k, v = torch.randn(2, 2, 32, 2, 64)
    held = torch.rand(2, 32) < 0.8
    write_units(tier, torch.tensor([5, 2]), k, v, held)
    got_k, got_v, got = read_units(tier, torch.tensor([5, 2]))
    assert torch.equal(got, held)
    for x, found in ((k, got_k), (v, got_v)):
        want = dequantise(*quantise(x, bits), bits)
        assert torch.equal(found[held], want[held]) and not bool(found[~held].any())
    assert not any(bool(x.any()) for x in read_units(tier, torch.tensor([0, 1, 3, 4]))[:2])


@pytest.mark.parametrize("bits", [8, 16])
def test_single_tokens_are_written_as_units_are(bits: int) -> None:
    one, other = empty_tier(bits, 2, 96), empty_tier(bits, 2, 96)
    k, v = torch.randn(2, 32, 2, 96)
    write_units(one, torch.tensor([3]), k[None], v[None])
    order = torch.randperm(32)
    put_tokens(other, torch.ones(32, dtype=torch.int64), 32 + order, k[order], v[order])
    assert torch.equal(one.payload, other.payload) and torch.equal(one.scales, other.scales)


@pytest.mark.parametrize("n", [1, 4])
def test_attention_to_tiers_is_attention_to_all_tokens(n: int) -> None:
    """The tiers' dequantised tokens, in one sequence, through torch's attention."""
    rows = filled({2: [40, 0, 3], 3: [0, 0, 70], 4: [33, 0, 1], 8: [1, 5, 64], 16: [9, 8, 12]}, kv_heads=2, D=64)
    q = torch.randn(3, n, 4, 64)
    at = torch.tensor([2, 0, 1])
    positions = rows.lengths[at] - n
    got = quantized_attention_bucketed(q, rows.tiers, at, positions)
    for i, row in enumerate(at.tolist()):
        k, v = rows.dense(row)
        seen = torch.arange(len(k)) <= positions[i] + torch.arange(n)[:, None]
        want = F.scaled_dot_product_attention(
            q[i].transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=seen, enable_gqa=True
        )
        assert torch.allclose(got[i], want.transpose(0, 1), atol=1e-5)
    parts = [attend_bucket(tier.bits, q, tier, at, positions) for tier in rows.tiers]
    assert torch.allclose(merge(parts[::-1]), got, atol=1e-6)
    mass = [torch.zeros(len(tier.payload)) for tier in rows.tiers]
    add_mass(q, rows.tiers, at, positions, None, mass)
    assert sum(float(part.sum()) for part in mass) == pytest.approx(3 * n * 4, rel=1e-4)
    add_mass(q, rows.tiers, at, positions, torch.tensor(2, dtype=torch.int32), mass)
    assert sum(float(part.sum()) for part in mass) == pytest.approx((3 + 2) * n * 4, rel=1e-4)


def test_scores_whose_exponentials_overflow() -> None:
    rows, q = filled({2: [40], 8: [33], 16: [9]}, kv_heads=1, D=64, spread=100.0), torch.randn(1, 1, 2, 64)
    k, v = rows.dense(0)
    assert float((q[0, 0] @ k[:, 0].T).amax()) / 8 > 89, "past fp32's range"
    want = F.scaled_dot_product_attention(*(x.transpose(0, 1).double() for x in (q[0], k, v)), enable_gqa=True)
    got = quantized_attention_bucketed(q, rows.tiers, torch.tensor([0]))[0].transpose(0, 1)
    assert torch.allclose(got.double(), want, atol=1e-3)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [1, 500])
def test_a_tier_loses_what_its_bits_lose(bits: int, n: int) -> None:
    """Attention to one tier, against attention to the keys and values before they were quantised."""
    rows, q = filled({bits: [n, 130]}, 2, 128, holes=0.1), torch.randn(2, 1, 16, 128)
    loss = lost(quantized_attention_bucketed(q, rows.tiers, torch.arange(2)), q, rows)
    assert loss < bound_of(bits)
    assert bits == 16 or loss > bound_of(bits) / 4, "this many bits do lose"


def test_a_row_without_tokens_gives_zero() -> None:
    rows = filled({4: [0, 40]}, kv_heads=1, D=32)
    got = quantized_attention_bucketed(torch.randn(2, 1, 2, 32), rows.tiers, torch.tensor([0, 1]))
    assert not bool(got[0].any()) and bool(got[1].any())


def test_a_token_of_nan_stays_in_its_row() -> None:
    rows = filled({2: [40, 40], 16: [3, 3]}, kv_heads=1, D=32, nan=(0, 7))
    got = quantized_attention_bucketed(torch.randn(2, 1, 2, 32), rows.tiers, torch.tensor([0, 1]))
    assert bool(got[0].isnan().all()) and bool(got[1].isfinite().all())


def test_what_does_not_fit_is_refused() -> None:
    tier, at = empty_tier(4, 1, 64), torch.zeros(1, dtype=torch.int64)
    q = torch.randn(1, 1, 4, 64)
    with pytest.raises(ContractError, match="no tier has these bits; got 5"):
        pack(torch.zeros(32, 64, dtype=torch.int64), 5, values=False)
    with pytest.raises(ContractError, match="got head_dim=80; expected a multiple of 32"):
        pack(torch.zeros(32, 80, dtype=torch.int64), 4, values=False)
    with pytest.raises(ContractError, match="the tier has other bits; got 3; expected 4"):
        attend_bucket(3, q, tier, at)
    with pytest.raises(ContractError, match="does not fit the queries"):
        quantized_attention_bucketed(torch.randn(1, 1, 4, 32), [tier], at)
    with pytest.raises(ContractError, match="tiers of different bits"):
        quantized_attention_bucketed(q, [tier, tier], at)
    with pytest.raises(ContractError, match="single tokens"):
        put_tokens(tier, at, at, q[0, :, :2], q[0, :, :2])
