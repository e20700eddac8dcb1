"""MXFP4 experts: the bytes, what is refused, and the CPU backend against the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import ttnn_moe
from assertions import assert_close
from format_cases import check_against_oracle, check_workspace
from mxfp4_cases import CASES as GPU_CASES
from mxfp4_cases import FORMS, Form, as_gpt_oss, check_case, interleaved, near_the_ends, spoil_idle
from ttnn_moe import BackendUnavailable, ContractError, Experts, Placement, Problem, Routing, registry
from ttnn_moe.backend import Numerics
from ttnn_moe.formats.mxfp4 import BIASES, TENSORS, dequantise, pack, unpack
from ttnn_moe.formats.quantise_mxfp4 import quantise_experts
from ttnn_moe.reference_products import Mxfp4Products
from ttnn_moe.selfcheck.edges import CASES, Case, Inputs
from ttnn_moe.selfcheck.oracle import oracle

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
E, H, I = 3, 128, 64


def e2m1(code: int) -> float:
    """Sign, two bits of exponent of bias 1, one of mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
    return -size if sign else size


def drawn(E: int = E, H: int = H, I: int = I, seed: int = 0) -> dict[str, torch.Tensor]:
    """Bytes of any bits, but for the scales: 2^-3 to 2^3."""
    g = torch.Generator().manual_seed(seed)
    out = {}
    for name, R, K in (("gate_up", 2 * I, H), ("down", H, I)):
        out[f"{name}_blocks"] = torch.randint(0, 256, (E, R, K // 2), generator=g, dtype=torch.uint8)
        out[f"{name}_scales"] = torch.randint(124, 131, (E, R, K // 32), generator=g, dtype=torch.uint8)
    return out


def test_every_byte_with_every_scale() -> None:
    """A group of 32 channels for each pair: its byte, 16 times."""
    byte, scale = torch.arange(256, dtype=torch.uint8).repeat(256, 1), torch.arange(256, dtype=torch.uint8)
    blocks = byte[..., None].expand(256, 256, 16).reshape(256, 256 * 16)  # row: the scale; groups: the bytes
    scales = scale[:, None].expand(256, 256)
    want = torch.tensor([[e2m1(b & 15), e2m1(b >> 4)] for b in range(256)], dtype=torch.float64)
    want = want * torch.tensor([2.0 ** (s - 127) for s in range(255)] + [torch.nan], dtype=torch.float64)[:, None, None]
    want = want[:, :, None].expand(256, 256, 16, 2).reshape(256, -1)
    exact, single = dequantise(blocks, scales, torch.float64), dequantise(blocks, scales)
    assert torch.equal(exact[:255], want[:255]) and torch.equal(exact.signbit()[:255], want.signbit()[:255])
    assert torch.equal(single[:255], want[:255].float()) and torch.equal(single.signbit()[:255], want.signbit()[:255])
    assert single[:253].isfinite().all(), "only scales above 2^125 can overflow"
    assert exact[255].isnan().all() and single[255].isnan().all()


def test_codes_pack_and_unpack() -> None:
    codes = torch.arange(256)
    codes = torch.stack((codes & 15, codes >> 4), 1).flatten()
    assert torch.equal(pack(codes), torch.arange(256, dtype=torch.uint8)), "the low four bits come first"
    assert torch.equal(unpack(pack(codes)), codes.to(torch.uint8))
    assert dequantise(torch.zeros(0, 16, dtype=torch.uint8), torch.zeros(0, 1, dtype=torch.uint8)).shape == (0, 32)


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda b, s: pack(torch.arange(3)), r"cannot be packed; got \(3,\)"),
        (lambda b, s: pack(torch.empty(2, 0).long()), r"cannot be packed; got \(2, 0\)"),
        (lambda b, s: pack(torch.tensor([1, 16])), "out of range; got torch.int64"),
        (lambda b, s: pack(torch.tensor([1j, 2])), "out of range; got torch.complex64"),
        (lambda b, s: pack(torch.tensor([True, False])), "out of range; got torch.bool"),
        (lambda b, s: pack(torch.ones(2)), "expected integers 0 .. 15"),
        (lambda b, s: unpack(b.short()), "blocks has the wrong dtype"),
        (lambda b, s: dequantise(b, s.view(torch.int8)), r"scales.view\(torch.uint8\)"),
        (lambda b, s: dequantise(b[:, 1:], s), r"do not fit together; got \(4, 31\) and \(4, 2\)"),
        (lambda b, s: dequantise(b, s[:3]), r"\[\.\.\., R, C/32\], C a multiple of 32"),
        (lambda b, s: dequantise(b, s, torch.bfloat16), "no such dtype"),
    ],
)
def test_refused_bytes(call, match: str) -> None:
    with pytest.raises(ContractError, match=match):
        call(torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8))


def spoilt(name: str, where: tuple[int, ...]) -> dict[str, torch.Tensor]:
    tensors = drawn()
    tensors[name][where] = 0xFF
    return tensors


def biases(gate_up=(E, 2 * I), down=(E, H), dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"gate_up_bias": torch.zeros(gate_up, dtype=dtype), "down_bias": torch.zeros(down, dtype=dtype)}


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda t: {"gate_up_blocks": t["gate_up_blocks"].int()}, "gate_up_blocks has the wrong dtype"),
        (lambda t: {"gate_up_scales": t["gate_up_scales"][..., :3]}, "gate_up_blocks and gate_up_scales do not fit"),
        (lambda t: {"down_blocks": t["down_blocks"][..., :31]}, "down_blocks and down_scales do not fit together"),
        (
            lambda t: {name: t[name][0] for name in ("gate_up_blocks", "gate_up_scales")},
            r"three dimensions; got gate_up_blocks \(128, 64\)",
        ),
        (
            lambda t: {name: t[name][:, :-1] for name in ("gate_up_blocks", "gate_up_scales")},
            r"\(3, 128, 64\) \(\[E, 2I, H/2\]\)",
        ),
        (lambda t: {name: t[name][:2] for name in ("down_blocks", "down_scales")}, "down_blocks has the wrong shape"),
        (lambda t: {name: s[:0].unflatten(2, (-1, 16)) if "blocks" in name else s[:0] for name, s in t.items()}, "E=0"),
        (lambda t: {"down_blocks": t["down_blocks"].mT.contiguous().mT}, r"\.contiguous\(\)"),
        (
            lambda t: {
                "down_blocks": t["down_blocks"].unflatten(-1, (-1, 16)).transpose(1, 2).contiguous().transpose(1, 2)
            },
            r"down_blocks is not contiguous.*\.contiguous\(\)",
        ),
        (lambda t: {"down_scales": t["down_scales"].to("meta")}, "are apart; got cpu and meta"),
        (lambda t: {"gate_up_order": "mixed"}, "unknown gate_up_order"),
        (lambda t: {"activation": "gelu"}, r"unknown activation; got 'gelu'.*clamped_swiglu"),
        (lambda t: {"down_bias": torch.zeros(E, H)}, "exactly four tensors, or six with biases"),
        (lambda t: {"gate_up_bias": torch.zeros(E, 2 * I)}, r"or also \['down_bias', 'gate_up_bias'\]"),
        (lambda t: biases(gate_up=(E, I)), r"gate_up_bias has the wrong shape; got \(3, 64\).*\[E, 2I\]"),
        (lambda t: biases(down=(E, I)), r"down_bias has the wrong shape; got \(3, 64\).*\[E, H\]"),
        (lambda t: biases(dtype=torch.float16), "gate_up_bias has the wrong dtype; got torch.float16"),
        (lambda t: {**biases(), "down_bias": torch.zeros(E, H).bfloat16()}, "down_bias .* the same for both biases"),
        (lambda t: {**biases(), "down_bias": torch.zeros(H, E).T}, r"down_bias is not contiguous"),
        (lambda t: {**biases(), "down_bias": None}, "or six with biases"),
        (lambda t: {**biases(), "down_bias": torch.zeros(E, H, device="meta")}, "are apart"),
        (
            lambda t: spoilt("gate_up_scales", (1, 7, 2)),
            r"gate_up_scales has .* NaN; got 0xFF for expert 1, row 7, group 2 \(channels 64 to 95\)",
        ),
        (lambda t: spoilt("down_scales", (2, 127, 1)), r"down_scales .* expert 2, row 127, group 1 \(channels 32"),
    ],
)
def test_refused_experts(change, match: str) -> None:
    tensors = drawn()
    with pytest.raises(ContractError, match=match):
        Experts.mxfp4(**{**tensors, **change(tensors)})


@pytest.mark.parametrize(
    "sizes, names, match",
    [
        ((E, 100, I), 4, "H does not fit mxfp4 experts; got 100; expected a multiple of 32"),
        ((E, H, 65), 4, "I does not fit.*65"),
        ((E, H, I), 3, "exactly four tensors"),
    ],
)
def test_refused_sizes(sizes: tuple[int, int, int], names: int, match: str) -> None:
    with pytest.raises(ContractError, match=match):
        Experts("mxfp4", *sizes, dict(list(drawn().items())[:names]))


def test_other_formats_have_silu() -> None:
    words = torch.zeros(2, 1, 128, 2).long(), torch.zeros(2, 1, 64, 2).long()
    for experts in (Experts.dense(torch.zeros(2, 8, 4), torch.zeros(2, 4, 4)), Experts.int4_24(*words)):
        with pytest.raises(ContractError, match="have another activation; got clamped_swiglu; expected silu"):
            replace(experts, activation="clamped_swiglu")


def test_sizes_come_from_the_bytes_and_nothing_is_copied() -> None:
    tensors = drawn() | biases(dtype=torch.bfloat16)
    experts = Experts.mxfp4(**tensors, activation="clamped_swiglu")
    assert experts.sizes == [E, H, I] and experts.dtype is None
    assert all(experts.tensors[name].data_ptr() == tensor.data_ptr() for name, tensor in tensors.items())
    again = Experts.from_spec(experts.spec, experts.sizes, list(experts.tensors.values()))
    assert again.spec == experts.spec and again.activation == "clamped_swiglu" and again.biased
    gate_up, down = experts.dequantize(1)
    assert torch.equal(gate_up, dequantise(tensors["gate_up_blocks"], tensors["gate_up_scales"])[1])
    assert torch.equal(down, dequantise(tensors["down_blocks"], tensors["down_scales"])[1])
    # as gpt-oss stores them
    grouped = {n: t.unflatten(-1, (-1, 16)) if n.endswith("blocks") else t for n, t in tensors.items()}
    grouped["activation"] = "clamped_swiglu"
    same = Experts.mxfp4(**grouped)
    assert all(torch.equal(same.tensors[name], tensor) for name, tensor in tensors.items())
    assert same.tensors["down_blocks"].data_ptr() == tensors["down_blocks"].data_ptr()


@pytest.mark.parametrize("gpt_oss", [False, True])
def test_interleaved_rows(gpt_oss: bool) -> None:
    experts = as_gpt_oss(Experts.mxfp4(**drawn()), torch.float32) if gpt_oss else Experts.mxfp4(**drawn())
    mixed = interleaved(experts)
    assert torch.equal(experts.dequantize(2)[0], mixed.dequantize(2)[0])
    assert (experts.biases(2) is None) == (mixed.biases(2) is None) == (not gpt_oss)
    if gpt_oss:
        assert torch.equal(experts.biases(2)[0], mixed.biases(2)[0])  # type: ignore[index]
    x, routing = torch.randn(9, H), Routing.from_topk(torch.randint(0, E, (9, 2)), torch.rand(9, 2), E)
    for call in (ttnn_moe.moe, ttnn_moe.gate_up, ttnn_moe.gate_projection, ttnn_moe.up_projection):
        torch.testing.assert_close(call(x, routing, mixed), call(x, routing, experts))


@pytest.mark.parametrize("mapping", [None, [[3, 1], [0, 2]]])
def test_selected_for_a_device(mapping) -> None:
    experts = as_gpt_oss(Experts.mxfp4(**drawn(E=4)))
    placement = Placement.uniform(4, 2) if mapping is None else Placement.from_mapping(mapping)
    for d in range(2):
        local = experts.for_device(placement, d)
        for i, e in enumerate(placement.device_expert_mapping[d].tolist()):
            assert torch.equal(local.dequantize(i)[1], experts.dequantize(e)[1])
            for bias, want in zip(local.biases(i), experts.biases(e), strict=True):  # type: ignore[arg-type]
                assert torch.equal(bias, want)
        assert local.activation == "clamped_swiglu"


def made(case: Case, dtype: torch.dtype) -> Inputs:
    """The case with its weights quantised, at sizes that the format has; where they are NaN, so are the scales."""
    inputs = replace(case, H=-(-case.H // 32) * 32, I=-(-case.I // 32) * 32).make(dtype)
    dense = inputs.experts
    spoiled = {name: tensor.isnan().flatten(1).any(1) for name, tensor in dense.tensors.items()}
    experts = quantise_experts(
        replace(dense, tensors={name: tensor.nan_to_num() for name, tensor in dense.tensors.items()})
    )
    for name, experts_of in spoiled.items():
        experts.tensors[f"{name}_scales"][experts_of] = 0xFF
    inputs.experts = experts
    if case.T % 2 == 0:
        inputs.experts = interleaved(experts)
    return inputs


@pytest.mark.parametrize(
    "case, dtype",
    [(c, d) for c in CASES for d in DTYPES if d == torch.bfloat16 or c.name in ("plain", "wide", "token_bound")],
    ids=str,
)
def test_matches_the_oracle(case: Case, dtype: torch.dtype) -> None:
    check_against_oracle(case, made(case, dtype))


GPT_OSS = ("plain", "one_token", "no_token", "duplicates", "absent_ids", "nan_and_inf_tokens", "token_bound", "skewed")


@pytest.mark.parametrize("dtype, bias_dtype", [(d, b) for d in DTYPES[::2] for b in DTYPES[::2]], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.name in GPT_OSS], ids=str)
def test_experts_of_gpt_oss_match_the_oracle(case: Case, dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    x = made(case, dtype)
    x.experts = as_gpt_oss(x.experts, bias_dtype)
    spoil_idle(x)
    check_against_oracle(case, x, steps=False)
    layer = ttnn_moe.prepare(x.problem, x.experts)
    assert (layer.problem.activation, layer.problem.biased) == ("clamped_swiglu", True)


@pytest.mark.parametrize("case", [c for c in GPU_CASES if c.H * c.I <= 96 * 64 or c.what == "out of range"], ids=str)
def test_cases_of_gpus(case) -> None:
    for form in FORMS[:3]:
        check_case(case, form, Numerics(activation=torch.bfloat16, expert_out=torch.bfloat16), "reference", "cpu")


@pytest.mark.parametrize("high", [False, True])
def test_scales_near_the_ends(high: bool) -> None:
    for form in (Form(), Form(order="interleaved")):
        experts, hidden = near_the_ends(form, high, "cpu")
        routing = Routing.from_topk(torch.randint(0, 4, (9, 2)), torch.rand(9, 2), 4)
        want = oracle(hidden, routing.topk_ids, routing.topk_weights, experts)
        assert want.isfinite().all() and (want.norm(dim=1) > 1e-30).all()
        assert_close(ttnn_moe.moe(hidden, routing, experts), want, torch.bfloat16)


def test_the_clamped_swiglu_of_gpt_oss() -> None:
    """Each step on its own, from numbers written here; gates and ups beyond the limits, NaN and infinity."""
    gate = torch.tensor([-torch.inf, -60, -7.5, -1, 0, 1, 6.9, 7.1, 300, torch.inf, torch.nan, 1, 1])
    up = torch.tensor([1, 2, -9, -8, 3, -1, 7.1, 6.9, 80, -80, 1, torch.nan, torch.inf])
    I = len(gate)
    tensors = drawn(1, 32, 32)
    for name, tensor in tensors.items():
        tensor.fill_(0 if name.endswith("blocks") else 127)
    tensors["down_blocks"][0, :, 0] = 2  # down is 1 in the first channel
    gate_up_bias = torch.zeros(1, 64)
    gate_up_bias[0, :I], gate_up_bias[0, 32 : 32 + I] = gate, up
    experts = Experts.mxfp4(**tensors, gate_up_bias=gate_up_bias, down_bias=torch.full((1, 32), 0.25))
    experts = replace(experts, activation="clamped_swiglu")
    x, routing = torch.zeros(1, 32), Routing.from_topk(torch.zeros(1, 1).int(), torch.full((1, 1), 2.0), 1)
    cut, wide = gate.double().clamp(max=7), up.double().clamp(-7, 7) + 1
    want = (cut / (1 + (-1.702 * cut).exp()) * wide).float()
    act = ttnn_moe.gate_up(x, routing, experts)[0, :I]
    torch.testing.assert_close(act, want, equal_nan=True)
    assert act[[0, 10, 11]].isnan().all() and 55.99 < float(act[8]) < 56
    torch.testing.assert_close(ttnn_moe.gate_projection(x, routing, experts)[0, :I], gate, equal_nan=True)
    torch.testing.assert_close(ttnn_moe.up_projection(x, routing, experts)[0, :I], up, equal_nan=True)
    gate_up_bias[0, 0] = 2
    finite = {**experts.tensors, "gate_up_bias": gate_up_bias.nan_to_num(posinf=9, neginf=-9)}
    out = ttnn_moe.moe(x, routing, replace(experts, tensors=finite))
    first = 2 / (1 + torch.tensor(-3.404).exp()) * 2  # of gate 2 and up 1
    torch.testing.assert_close(out, (2 * (first + 0.25)).expand(1, 32))


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = made(Case("plain"), torch.bfloat16)
    whole = ttnn_moe.moe(x.hidden, x.routing(), x.experts)
    weights = x.experts.dequantize(1)[0]
    monkeypatch.setattr("ttnn_moe.reference_products.BLOCK_WEIGHTS", 48 * 128)
    monkeypatch.setattr("ttnn_moe.formats.mxfp4._BLOCK", 5 * 64)
    assert torch.equal(x.experts.dequantize(1)[0], weights)
    down = [x.experts.tensors[f"down_{part}"] for part in ("blocks", "scales")]
    assert torch.equal(dequantise(*down, torch.float64), dequantise(*down).double())
    assert_close(ttnn_moe.moe(x.hidden, x.routing(), x.experts), whole, torch.bfloat16)


def test_a_prepared_call_decodes_in_its_workspace() -> None:
    """A call allocates nothing as large as one expert's bytes: no dense copy of a weight, and no decoded block."""
    x = made(Case("plain", T=16, H=512, I=512), torch.bfloat16)
    check_workspace(x, x.experts.tensors["down_blocks"][0].nbytes)


def test_an_expert_without_a_token_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    x = made(Case("plain"), torch.bfloat16)
    x.ids[x.ids == 2] = 3
    seen = set()
    decode = Mxfp4Products.decode
    monkeypatch.setattr(Mxfp4Products, "decode", lambda *args: seen.add(args[2]) or decode(*args))
    ttnn_moe.moe(x.hidden, x.routing(), x.experts)
    assert seen == set(range(8)) - {2}


@pytest.mark.parametrize("trace", ["compile", "make_fx"])
def test_one_node_for_tracers(trace: str) -> None:
    x = made(Case("plain"), torch.bfloat16)

    def call(hidden, ids, weights, *tensors):
        experts = Experts.mxfp4(*tensors, activation="clamped_swiglu")
        return ttnn_moe.moe(hidden, Routing.from_topk(ids, weights, 8), experts)

    args = x.hidden, x.ids, x.weights, *(as_gpt_oss(x.experts).tensors[name] for name in (*TENSORS, *BIASES))
    compiled = torch.compile(call, fullgraph=True, backend="eager") if trace == "compile" else make_fx(call)(*args)
    assert torch.equal(compiled(*args), call(*args))


@pytest.mark.parametrize("backend", ["cuda", "tenstorrent", "ascend"])
def test_other_backends_say_why_not(backend: str) -> None:
    problem = Problem(4, 8, 2, 128, 128, weight_format="mxfp4", activation="clamped_swiglu", biased=True)
    assert "mxfp4 weights, biases, clamped_swiglu" in str(problem)
    assert registry.why_not(problem)[backend] is not None
    with pytest.raises(BackendUnavailable):
        registry.choose(problem, backend)
