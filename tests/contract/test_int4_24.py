"""int4_24 experts: the words, what is refused, quantising, and the CPU backend against the oracle."""

from __future__ import annotations

import struct

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.fx.experimental.proxy_tensor import make_fx

import ttnn_moe
from assertions import assert_close
from format_cases import check_against_oracle, check_workspace
from ttnn_moe import BackendUnavailable, ContractError, Experts, Placement, Problem, Routing, registry
from ttnn_moe.formats.int4_24 import NAME, dequantise, fit_fp16, pack, unpack
from ttnn_moe.reference_products import Int4_24Products
from ttnn_moe.selfcheck.edges import CASES, Case, Inputs

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HALF = 1 << 48
NAN, INFINITE = 0x7FC0 * HALF, -0x80 * HALF  # words whose scale is NaN, and minus infinity


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Words of any bits, but for the scales: finite, of order one."""
    g = torch.Generator().manual_seed(seed)
    low = torch.randint(0, HALF, shape, generator=g)
    scales = torch.randn(shape, generator=g).to(torch.bfloat16).view(torch.int16)
    return low + scales.long() * HALF


def decoded(word: int) -> list[float]:
    """The 32 channels of a word, by the format's definition: chunk i keeps channel 4i + 2 * pair + slot."""
    bits = word & (1 << 64) - 1
    scale = struct.unpack("<f", struct.pack("<I", bits >> 48 << 16))[0]
    out = [0.0] * 32
    for i in range(8):
        q4, idx2 = bits >> 4 * i & 0xF, bits >> 32 + 2 * i & 0x3
        pair, slot = idx2 >> 1, idx2 & 1
        out[4 * i + 2 * pair + slot] = (q4 - 8) * scale
    return out


words_of_any_bits = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=2 * 2 * 3, max_size=2 * 2 * 3)


@SETTINGS
@given(words_of_any_bits)
def test_any_bits_unpack_pack_and_decode(bits: list[int]) -> None:
    words = torch.tensor(bits).view(2, 3, 2)  # [G2, R, 2]
    assert torch.equal(pack(*unpack(words)), words)
    weights = dequantise(words)
    assert weights.shape == (3, 128)
    for g2 in range(2):
        for r in range(3):
            for half in range(2):
                got = weights[r, 64 * g2 + 32 * half :][:32]
                want = torch.tensor(decoded(int(words[g2, r, half])))
                if want.isfinite().all():
                    assert torch.equal(got, want)
                elif want.isnan().any():
                    assert not got.isfinite().any()


@SETTINGS
@given(st.data())
def test_every_value_and_position_round_trips(data: st.DataObject) -> None:
    R, K = data.draw(st.integers(1, 5)), 64 * data.draw(st.integers(1, 3))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    # a rotation of all 64 pairs: every int4 at every position of its four, in every chunk over the examples
    pair = (torch.arange(2 * R * K // 4) + data.draw(st.integers(0, 63))) % 64
    values, index = (part.view(2, R, K // 4) for part in ((pair // 4 - 8).to(torch.int8), (pair % 4).to(torch.uint8)))
    scales = torch.randint(-(1 << 15), 1 << 15, (2, R, K // 32), generator=g).to(torch.int16).view(torch.bfloat16)
    words = pack(values, index, scales)
    assert words.shape == (2, K // 64, R, 2)
    again = unpack(words)
    assert torch.equal(again[0], values) and torch.equal(again[1], index)
    assert torch.equal(again[2].view(torch.int16), scales.view(torch.int16)), "bits of a scale, NaN and -0 included"


def test_every_value_decodes_at_every_position() -> None:
    rest = (0x3F80 << 48) | 0x88888888  # scale 1, all values 0
    wanted = [(i, q4, idx2) for i in range(8) for q4 in range(16) for idx2 in range(4)]
    words = [rest ^ (q4 ^ 8) << 4 * i | idx2 << 32 + 2 * i for i, q4, idx2 in wanted]
    weights = dequantise(torch.tensor(words).view(1, -1, 2)).view(-1, 32)
    for (i, q4, idx2), row in zip(wanted, weights.tolist(), strict=True):
        want = [0.0] * 32
        want[4 * i + idx2] = q4 - 8
        assert row == want


def test_one_word_by_hand() -> None:
    word = (0x3F80 << 48) | 0b11 << 32 | 0xF | 0x8 * 0x11111110  # scale 1, chunk 0: 7 at channel 3, else 0
    weights = dequantise(torch.tensor([[[word, word + (1 << 55)]]]))[0]  # the second scale is 2
    assert weights.nonzero().flatten().tolist() == [3, 35] and weights[[3, 35]].tolist() == [7, 14]


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda v, i, s: pack(v[..., :-1], i, s), "do not fit together"),
        (lambda v, i, s: pack(v[..., :8], i[..., :8], s[..., :1]), "C a multiple of 64"),
        (lambda v, i, s: pack(v, i, s.float()), "scales have the wrong dtype"),
        (lambda v, i, s: pack(v + 1, i, s), "values are out of range; got torch.int8 from -7 to 8"),
        (lambda v, i, s: pack(v, i + 1, s), "index are out of range"),
        (lambda v, i, s: pack(v.float(), i, s), "integers -8 .. 7"),
        (lambda v, i, s: unpack(v), "wrong dtype"),
        (lambda v, i, s: dequantise(v.long()[:, :3]), r"expected \[\.\.\., C/64, R, 2\]"),
    ],
)
def test_packing_refuses(call, match: str) -> None:
    values = (torch.arange(64).view(4, 16) % 16 - 8).to(torch.int8)
    index = (torch.arange(64).view(4, 16) % 4).to(torch.uint8)
    with pytest.raises(ContractError, match=match):
        call(values, index, torch.ones(4, 2, dtype=torch.bfloat16))


E, H, I = 3, 128, 64


def words_of(E: int = E, H: int = H, I: int = I, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return drawn(E, H // 64, 2 * I, 2, seed=seed), drawn(E, I // 64, H, 2, seed=seed + 1)


def spoilt(words: torch.Tensor, where: tuple[int, ...], word: int) -> torch.Tensor:
    words = words.clone()
    words[where] = word
    return words


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda a, b: Experts.int4_24(a.double(), b), "w13 has the wrong dtype"),
        (lambda a, b: Experts.int4_24(a, b.view(torch.uint64)), r"w2\.view\(torch\.int64\)"),
        (lambda a, b: Experts.int4_24(a[0], b), r"four dimensions; got w13 \(2, 128, 2\)"),
        (lambda a, b: Experts.int4_24(a[..., :1], b), "w13 has the wrong shape"),
        (lambda a, b: Experts.int4_24(a[:, :, :-1], b), r"\(3, 2, 128, 2\) \(\[E, H/64, 2I, 2\]\)"),
        (lambda a, b: Experts.int4_24(a, b[:2]), r"w2 has the wrong shape.*\(3, 1, 128, 2\) \(\[E, I/64, H, 2\]\)"),
        (lambda a, b: Experts.int4_24(a[:, :0], b), r"wrong shape; got \(3, 0, 128, 2\)"),
        (lambda a, b: Experts.int4_24(a.mT.contiguous().mT, b), r"\.contiguous\(\)"),
        (lambda a, b: Experts.int4_24(a, b.to("meta")), "w13 and w2 differ"),
        (lambda a, b: Experts.int4_24(a, b, gate_up_order="mixed"), "unknown gate_up_order"),
        (lambda a, b: Experts("int4_24", E, 100, I, {"w13": a, "w2": b}), "H does not fit.*100.*multiple of 64"),
        (lambda a, b: Experts("int4_24", E, H, 65, {"w13": a, "w2": b}), "I does not fit.*65.*multiple of 64"),
        (lambda a, b: Experts("int4_24", E, H, I, {"w13": a}), "exactly two tensors"),
        (
            lambda a, b: Experts.int4_24(spoilt(a, (1, 1, 7, 0), NAN), b),
            r"w13 has a scale that is not finite; got nan for expert 1, row 7, group 2 \(channels 64 to 95\)",
        ),
        (
            lambda a, b: Experts.int4_24(a, spoilt(b, (2, 0, 9, 1), INFINITE)),
            r"-inf for expert 2, row 9, group 1 \(channels 32 to 63\)",
        ),
    ],
)
def test_refused_experts(call, match: str) -> None:
    with pytest.raises(ContractError, match=match):
        call(*words_of())


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_finite_scale_is_taken(sign: int) -> None:
    w13, w2 = words_of()
    most = sign * torch.finfo(torch.bfloat16).max
    w13[1, 1, 7, 0] = int(torch.tensor(most, dtype=torch.bfloat16).view(torch.int16)) * HALF + 0x99999999  # ones
    group = Experts.int4_24(w13, w2).dequantize(1)[0][7, 64:96]
    assert group[group != 0].tolist() == [most] * 8


def test_sizes_come_from_the_words_and_nothing_is_copied() -> None:
    w13, w2 = words_of()
    experts = Experts.int4_24(w13, w2)
    assert experts.sizes == [E, H, I] and experts.dtype is None
    assert experts.tensors["w13"].data_ptr() == w13.data_ptr()
    again = Experts.from_spec(experts.spec, experts.sizes, list(experts.tensors.values()))
    assert again.spec == experts.spec
    gate_up, down = experts.dequantize(1)
    assert dequantise(w13[:0]).shape == (0, 2 * I, H) and dequantise(w13[:, :, :0]).shape == (E, 0, H)
    assert torch.equal(gate_up, dequantise(w13)[1]) and torch.equal(down, dequantise(w2)[1])


def test_interleaved_rows() -> None:
    w13, w2 = words_of()
    mixed = torch.stack([w13[:, :, :I], w13[:, :, I:]], 3).reshape(w13.shape)
    halves, interleaved = Experts.int4_24(w13, w2), Experts.int4_24(mixed, w2, gate_up_order="interleaved")
    assert torch.equal(halves.dequantize(2)[0], interleaved.dequantize(2)[0])
    x, routing = torch.randn(9, H), Routing.from_topk(torch.randint(0, E, (9, 2)), torch.rand(9, 2), E)
    for call in (ttnn_moe.moe, ttnn_moe.gate_up, ttnn_moe.gate_projection, ttnn_moe.up_projection):
        torch.testing.assert_close(call(x, routing, interleaved), call(x, routing, halves))


@pytest.mark.parametrize("mapping", [None, [[3, 1], [0, 2]]])
def test_selected_for_a_device(mapping) -> None:
    experts = Experts.int4_24(*words_of(E=4))
    placement = Placement.uniform(4, 2) if mapping is None else Placement.from_mapping(mapping)
    for d in range(2):
        local = experts.for_device(placement, d)
        for i, e in enumerate(placement.device_expert_mapping[d].tolist()):
            assert torch.equal(local.dequantize(i)[1], experts.dequantize(e)[1])
    if mapping is None:
        assert local.tensors["w2"].data_ptr() == experts.tensors["w2"][2].data_ptr()


def made(case: Case, dtype: torch.dtype, interleaved: bool = False) -> Inputs:
    """The case with words of any bits in place of its weights, scaled alike."""
    inputs = case.make(dtype)
    w13, w2 = words_of(case.E, case.H, case.I)
    tensors = []
    for words, K in ((w13, case.H), (w2, case.I)):
        values, index, scales = unpack(words)
        tensors.append(pack(values, index, (scales * (0.4 * K**-0.5)).to(torch.bfloat16)))
    inputs.experts = Experts.int4_24(*tensors, gate_up_order="interleaved" if interleaved else "halves")
    return inputs


# those of the contract that the format's sizes allow, but for the one that puts NaN in the weights
FITTING = [case for case in CASES if case.H % 64 == case.I % 64 == 0 and case.name != "idle_expert_nan_weights"]


@pytest.mark.parametrize(
    "case, dtype",
    [(c, d) for c in FITTING for d in DTYPES if d == torch.bfloat16 or c.name in ("plain", "wide", "token_bound")],
    ids=str,
)
def test_matches_the_oracle(case: Case, dtype: torch.dtype) -> None:
    check_against_oracle(case, made(case, dtype, interleaved=case.T % 2 == 0))


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = made(Case("plain"), torch.bfloat16)
    whole = ttnn_moe.moe(x.hidden, x.routing(), x.experts)
    weights = x.experts.dequantize(1)[0]
    monkeypatch.setattr("ttnn_moe.reference_products.BLOCK_WEIGHTS", 48 * 128)
    monkeypatch.setattr("ttnn_moe.formats.int4_24._BLOCK", 30)
    assert torch.equal(x.experts.dequantize(1)[0], weights)
    assert_close(ttnn_moe.moe(x.hidden, x.routing(), x.experts), whole, torch.bfloat16)


def test_a_prepared_call_decodes_in_its_workspace() -> None:
    """A call allocates nothing as large as one expert's words: no dense copy of a weight, and no decoded block."""
    x = made(Case("plain", T=16, H=512, I=512), torch.bfloat16)
    check_workspace(x, min(words[0].nbytes for words in x.experts.tensors.values()))


def test_an_expert_without_a_token_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    x = made(Case("plain"), torch.bfloat16)
    x.ids[x.ids == 2] = 3
    seen = set()
    multiply = Int4_24Products.multiply
    monkeypatch.setattr(Int4_24Products, "multiply", lambda *args: seen.add(args[3]) or multiply(*args))
    ttnn_moe.moe(x.hidden, x.routing(), x.experts)
    assert seen == set(range(8)) - {2}


@pytest.mark.parametrize("trace", ["compile", "make_fx"])
def test_one_node_for_tracers(trace: str) -> None:
    x = made(Case("plain"), torch.bfloat16)

    def call(hidden, ids, weights, w13, w2):
        return ttnn_moe.moe(hidden, Routing.from_topk(ids, weights, 8), Experts.int4_24(w13, w2))

    args = x.hidden, x.ids, x.weights, x.experts.tensors["w13"], x.experts.tensors["w2"]
    compiled = torch.compile(call, fullgraph=True, backend="eager") if trace == "compile" else make_fx(call)(*args)
    assert torch.equal(compiled(*args), call(*args))


@pytest.mark.parametrize("backend", ["cuda", "tenstorrent", "ascend"])
def test_other_backends_say_why_not(backend: str) -> None:
    problem = Problem(4, 8, 2, 128, 128, weight_format="int4_24")
    assert registry.why_not(problem)[backend] is not None
    with pytest.raises(BackendUnavailable):
        registry.choose(problem, backend)


@pytest.mark.parametrize(
    ("scale", "fits"),
    [(0.0, True), (2.0**-13, True), (-31.875, True), (32.0, False), (2.0**-14, False), (2.0**-130, False)],
)
def test_scales_that_fp16_holds(scale: float, fits: bool) -> None:
    """The largest scale of an expert's rows decides; smaller ones may be anything."""
    E, H, I = 2, 64, 128
    made = []
    for R, channels, largest in ((2 * I, H, 0.5), (H, I, scale)):
        scales = torch.full((E, R, channels // 32), 0.0, dtype=torch.bfloat16)
        scales[1, 3, 0] = scales[1, R - 2, 0] = largest
        values = torch.ones(E, R, channels // 4, dtype=torch.int8)
        made.append(pack(values, values, scales))
    assert fit_fp16(*made) is fits
    for wrong in (made[0][0], made[0][None]):
        with pytest.raises(ContractError, match=r"words have the wrong shape; got .*; expected \[E, C/64, R, 2\]"):
            fit_fp16(wrong)
    experts = Experts.int4_24(*made)
    assert experts.fp16_scales is fits
    assert Experts.from_spec(experts.spec, experts.sizes, list(experts.tensors.values())).fp16_scales is fits
    assert not Experts(NAME, E, H, I, experts.tensors).fp16_scales


@pytest.mark.parametrize(
    ("which", "where"),
    [
        (0, (1, slice(None))),
        (1, (2, slice(None))),
        (0, (0, slice(64))),
        (0, (2, slice(64, None))),
        (0, (1, slice(1, None, 2))),
    ],
    ids=["gate and up", "down", "gate", "up", "interleaved up"],
)
def test_one_experts_scales_may_be_too_small_for_fp16(which: int, where: tuple[int, slice]) -> None:
    """Beside those of others, and gate beside up: another token, or another factor, would hide the error."""
    E, H, I = 3, 64, 64
    for by, fits in ((2.0**-11, True), (2.0**-13, False), (0.0, True)):
        made = []
        for tensor, (R, channels) in enumerate(((2 * I, H), (H, I))):
            scales = torch.full((E, R, channels // 32), 0.5, dtype=torch.bfloat16)
            if tensor == which:
                scales[where] *= by
            values = torch.ones(E, R, channels // 4, dtype=torch.int8)
            made.append(pack(values, values, scales))
        assert fit_fp16(*made) is fits, by
