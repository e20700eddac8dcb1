"""Shapes, dtypes and devices that do not fit: one clear error each, before any launch."""

from __future__ import annotations

import pytest
import torch

import ttnn_moe
from ttnn_moe import ContractError, Experts, Placement, Problem, Routing
from ttnn_moe.formats import FORMATS, DenseFormat, register_format

T, E, K, H, I = 6, 4, 2, 32, 16


def make(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, Routing, Experts]:
    experts = Experts.dense(torch.randn(E, 2 * I, H).to(dtype), torch.randn(E, H, I).to(dtype))
    routing = Routing.from_topk(torch.randint(0, E, (T, K)), torch.rand(T, K), E)
    return torch.randn(T, H).to(dtype), routing, experts


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda x, r, e: ttnn_moe.moe(x[None], r, e), r"hidden\.reshape\(-1, H\)"),
        (lambda x, r, e: ttnn_moe.moe(x[:, :-1], r, e), r"expected \[T, H\] = \(6, 32\)"),
        (lambda x, r, e: ttnn_moe.moe(x[:-1], r, e), "hidden has the wrong shape"),
        (lambda x, r, e: ttnn_moe.moe(x.bfloat16(), r, e), "different dtypes"),
        (lambda x, r, e: ttnn_moe.moe(x.double(), r, e), "unsupported dtype"),
        (lambda x, r, e: ttnn_moe.moe(x.to("meta"), r, e), "different devices"),
        (lambda x, r, e: ttnn_moe.moe(x, Routing.from_topk(r.topk_ids, r.topk_weights, 5), e), "disagree on E"),
        (lambda x, r, e: ttnn_moe.moe(x, r, e, out=torch.empty(T, H + 1)), "out has the wrong shape"),
        (lambda x, r, e: ttnn_moe.moe(x, r, e, out=torch.empty(T, H).to("meta")), r"shape or device; .* on meta"),
        (lambda x, r, e: ttnn_moe.moe(x, r, e, out=torch.empty(T, H).half()), "out has the wrong dtype"),
        (lambda x, r, e: ttnn_moe.moe(x, r, e, out=torch.empty(T, H).half()), r"expected torch\.float32\.$"),
        (lambda x, r, e: ttnn_moe.moe(x, r, e, out=torch.empty(H, T).t()), "out is not contiguous"),
        (lambda x, r, e: Routing.from_topk(r.topk_weights, r.topk_ids, E), "look swapped.*give the ids first"),
        (lambda x, r, e: Routing.from_topk(r.topk_ids.short(), r.topk_weights, E), r"int16.*topk_ids\.int\(\)"),
        (lambda x, r, e: Routing.from_topk(r.topk_ids, r.topk_weights.double(), E), r"topk_weights\.float\(\)"),
        (lambda x, r, e: ttnn_moe.moe(x, r, e, out=x), "shares memory"),
        (lambda x, r, e: ttnn_moe.moe(x, r, e, accumulate=True), "something to add to"),
        (lambda x, r, e: ttnn_moe.down_projection(torch.empty(3, I), r, e), r"\(12, 16\)"),
        (lambda x, r, e: ttnn_moe.silu_mul(torch.empty(3, I), torch.empty(3, H)), "gate and up do not fit"),
        (lambda x, r, e: ttnn_moe.silu_mul(x, x.to("meta")), "gate and up do not fit"),
        (lambda x, r, e: Experts.dense(torch.empty(E, 2 * I, H + 1), torch.empty(E, H, I)), r"\(4, 32, 32\)"),
        (lambda x, r, e: Experts.dense(torch.empty(E, 2 * I), torch.empty(E, H, I)), "three dimensions"),
        (lambda x, r, e: Experts.dense(torch.empty(E, H, 2 * I).mT, torch.empty(E, H, I)), r"\.contiguous\(\)"),
        (lambda x, r, e: Experts.dense(torch.empty(E, 2 * I, H).half(), torch.empty(E, H, I)), "differ"),
        (lambda x, r, e: Experts.dense(e.tensors["gate_up"], e.tensors["down"].to("meta")), "differ; got .* on meta"),
        (lambda x, r, e: Experts.dense(torch.empty(E, 2 * I, H).double(), torch.empty(E, H, I)), "unsupported dtype"),
        (lambda x, r, e: Experts.dense(torch.empty(0, 2 * I, H), torch.empty(0, H, I)), "positive"),
        (lambda x, r, e: Experts("int3", E, H, I, e.tensors), "unknown expert weight format"),
        (lambda x, r, e: Experts("dense", E, H, I, {"down": e.tensors["down"]}), "exactly two tensors"),
        (lambda x, r, e: Experts("dense", E, H, I, e.tensors, gate_up_order="mixed"), "unknown gate_up_order"),
        (lambda x, r, e: e.for_device(Placement.uniform(8, 2), 0), "another number of experts"),
        (lambda x, r, e: Problem(-1, E, K, H, I), "sizes are out of range"),
        (lambda x, r, e: Problem(T, E, K, H, I, D=3), "cannot be shared evenly"),
        (lambda x, r, e: Problem(T, E, K, H, I, torch.float64), "unsupported dtype"),
        (lambda x, r, e: Problem(T, E, K, H, I, torch.bfloat16, torch.float16), "out has the wrong dtype"),
        (lambda x, r, e: ttnn_moe.prepare(Problem(T, 8, K, H, I, x.dtype), e), "do not fit the problem"),
        (lambda x, r, e: ttnn_moe.prepare(Problem(T, E, K, H, I), e), "another dtype"),
        (
            lambda x, r, e: ttnn_moe.prepare(Problem.of(T, K, e, x.dtype), e, Placement.uniform(8, 2)),
            "another number of experts",
        ),
        (
            lambda x, r, e: ttnn_moe.prepare(Problem.of(2, K, e, x.dtype), e)(x, r.topk_ids, r.topk_weights),
            "larger than the prepared problem",
        ),
        (
            lambda x, r, e: ttnn_moe.prepare(Problem.of(T, K, e, x.dtype), e)(
                *(tensor.to("meta") for tensor in (x, r.topk_ids, r.topk_weights))
            ),
            "another device than the prepared layer; .*expected both on cpu",
        ),
        (
            lambda x, r, e: ttnn_moe.prepare(Problem.of(T, K + 1, e, x.dtype), e)(x, r.topk_ids, r.topk_weights),
            "got T=6, K=2; expected T <= 6, K = 3",
        ),
        (
            lambda x, r, e: ttnn_moe.prepare(Problem.of(T, K, e, x.dtype), e)(x.half(), r.topk_ids, r.topk_weights),
            "does not fit the prepared problem",
        ),
        (
            lambda x, r, e: ttnn_moe.prepare(Problem.of(T, K, e, x.dtype), e)(
                x, r.topk_ids, r.topk_weights, out=torch.empty(T, H + 1)
            ),
            "out has the wrong shape",
        ),
    ],
)
def test_refusals(call, match: str) -> None:
    with pytest.raises(ContractError, match=match):
        call(*make())


def test_a_missing_token_of_square_experts_is_no_exchange_of_sizes() -> None:
    experts = Experts.dense(torch.empty(E, 2 * H, H), torch.empty(E, H, H))
    x, routing, _ = make()
    with pytest.raises(ContractError, match="hidden has the wrong shape") as error:
        ttnn_moe.moe(x[:-1], routing, experts)
    assert error.value.remedy is None


@pytest.mark.parametrize(
    ("gate_up", "down", "turned"),
    [
        ((E, H, 2 * I), (E, I, H), "gate_up and down"),
        ((E, 2 * I, H), (E, I, H), "gate_up and down"),  # 2I == H: gate_up fits either way
        ((E, 2 * I, H + 1), (E, I, H + 1), "down"),
        ((E, H + 1, 2 * I), (E, H + 1, I), "gate_up"),
        ((E, H, 2 * H), (E, H, H), "gate_up and down"),
    ],
)
def test_transposed_weights_are_told(gate_up, down, turned: str) -> None:
    remedy = " and ".join(f"{name}.transpose(1, 2).contiguous()" for name in turned.split(" and "))
    with pytest.raises(
        ContractError, match=r"look transposed.*expected gate_up \[E, 2I, H\], down \[E, H, I\]"
    ) as error:
        Experts.dense(torch.empty(gate_up), torch.empty(down))
    assert error.value.remedy == f"{remedy}, once, at load"


def test_a_reason_with_a_remedy_and_another_remedy() -> None:
    error = ContractError("x is wrong", got="it is old; to fix it: wait", remedy="pass 2")
    assert str(error) == "x is wrong; got it is old; to fix it: wait; or: pass 2."


def test_error_has_its_parts() -> None:
    error = ContractError("x is wrong", got=1, expected=2, remedy="pass 2")
    assert str(error) == "x is wrong; got 1; expected 2; to fix it: pass 2."
    assert isinstance(error, ValueError)
    assert (error.got, error.expected, error.remedy) == (1, 2, "pass 2")


def test_dense_is_zero_copy_and_projections_agree() -> None:
    x, routing, experts = make()
    gate_up, down = experts.tensors["gate_up"], experts.tensors["down"]
    assert Experts.dense(gate_up, down).tensors["gate_up"].data_ptr() == gate_up.data_ptr()
    same = Experts.from_projections(gate_up[:, :I].mT, gate_up[:, I:].mT, down.mT)
    assert torch.equal(ttnn_moe.moe(x, routing, experts), ttnn_moe.moe(x, routing, same))


def test_interleaved_gate_up() -> None:
    x, routing, experts = make()
    gate_up, down = experts.tensors["gate_up"], experts.tensors["down"]
    mixed = torch.stack([gate_up[:, :I], gate_up[:, I:]], 2).reshape(E, 2 * I, H)
    interleaved = Experts.dense(mixed, down, gate_up_order="interleaved")
    assert torch.equal(interleaved.dequantize(1)[0], gate_up[1])
    torch.testing.assert_close(ttnn_moe.moe(x, routing, interleaved), ttnn_moe.moe(x, routing, experts))
    torch.testing.assert_close(ttnn_moe.gate_up(x, routing, interleaved), ttnn_moe.gate_up(x, routing, experts))


def test_a_problem_of_dense_experts_is_that_of_their_sizes() -> None:
    """Plans and compiled kernels are found by it."""
    assert Problem.of(T, K, make()[2], torch.float32) == Problem(T, E, K, H, I, torch.float32)


def test_spec_round_trip() -> None:
    _, _, experts = make()
    again = Experts.from_spec(experts.spec, experts.sizes, list(experts.tensors.values()))
    assert again.spec == experts.spec
    assert again.tensors.keys() == experts.tensors.keys()


def test_a_new_format_needs_no_second_interface() -> None:
    """A format defined here runs through moe() on no backend, and the refusal says so."""

    class Halved(DenseFormat):
        name = "halved"

    register_format(Halved())
    try:
        x, routing, dense = make()
        experts = Experts("halved", E, H, I, dense.tensors)
        with pytest.raises(ttnn_moe.BackendUnavailable, match="dense weights, not 'halved'"):
            ttnn_moe.moe(x, routing, experts)
    finally:
        FORMATS.pop("halved")


@pytest.mark.parametrize("mapping", [None, [[3, 1], [0, 2]], [[2, 0], [1, 3]], [[0, 2, 1, 3]]])
def test_experts_for_device(mapping) -> None:
    _, _, experts = make()
    placement = Placement.uniform(E, 2) if mapping is None else Placement.from_mapping(mapping)
    for d in range(placement.D):
        local = experts.for_device(placement, d)
        for i, e in enumerate(placement.device_expert_mapping[d].tolist()):
            assert torch.equal(local.dequantize(i)[0], experts.dequantize(e)[0])
    if mapping is None:
        assert local.tensors["down"].data_ptr() == experts.tensors["down"][2].data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("D", [1, 2, 4])
def test_mesh_sums_partials_in_ascending_device(dtype: torch.dtype, D: int) -> None:
    """One process that drives a mesh gives the sum of what each rank gives, bit for bit."""
    x, routing, experts = make(dtype)
    problem = Problem.of(T, K, experts, dtype)
    whole = ttnn_moe.prepare(problem, experts, Placement.uniform(E, D))(x, routing.topk_ids, routing.topk_weights)
    total = torch.zeros(T, H)
    fp32_out = Problem.of(T, K, experts, dtype, torch.float32)
    for rank in range(D):
        placement = Placement.uniform(E, D, rank)
        layer = ttnn_moe.prepare(fp32_out, experts.for_device(placement), placement)
        total += layer(x, routing.topk_ids, routing.topk_weights)
    assert torch.equal(whole, total.to(dtype))
    plain = ttnn_moe.moe(x, routing, experts)
    torch.testing.assert_close(whole, plain, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-3)


def test_prepared_accumulates_over_a_mesh() -> None:
    x, routing, experts = make()
    layer = ttnn_moe.prepare(Problem.of(T, K, experts, x.dtype), experts, Placement.uniform(E, 2))
    out = torch.ones(T, H)
    layer(x, routing.topk_ids, routing.topk_weights, out=out, accumulate=True)
    torch.testing.assert_close(out, 1 + layer(x, routing.topk_ids, routing.topk_weights))
