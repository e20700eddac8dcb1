"""Weight formats, quantisers, experts and groups refuse what they cannot read, in errors of the package's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ttnn_moe
from ttnn_moe import BackendUnavailable, ContractError, Experts, Placement, Problem, Routing, registry
from ttnn_moe.formats import (
    DenseFormat,
    get_format,
    int4_24,
    mxfp4,
    mxfp8,
    quantise_int4_24,
    quantise_mxfp4,
    register_format,
)
from ttnn_moe.parallel.hierarchical import Group, Nodes, Shape, Sizes
from ttnn_moe.parallel.hierarchical.shared_memory import SharedMemory, SharedMemoryTransport

T, E, K, H, I = 8, 4, 2, 64, 64
FLOAT8 = torch.float8_e4m3fn
HIDDEN, WEIGHTS = torch.randn(T, H), torch.ones(T, K)
IDS = torch.arange(T * K, dtype=torch.int32).view(T, K) % E
EXPERTS = Experts.dense(torch.randn(E, 2 * I, H), torch.randn(E, H, I))
ROUTING = Routing.from_topk(IDS, WEIGHTS, E)
MATRIX, EYE = torch.randn(H, H), torch.eye(H)
WORDS, (BLOCKS, SCALES) = quantise_int4_24.quantise(MATRIX), quantise_mxfp4.quantise(MATRIX)
VALUES, BYTES = mxfp8.quantise(MATRIX)
CODES, BF16 = torch.zeros(1, 16, dtype=torch.int32), torch.ones(1, 2, dtype=torch.bfloat16)
NO_TENSOR: list[Any] = [None, 3, "x", [1.0], np.zeros((64, 64))]
NO_VALUES = [MATRIX.to("meta"), MATRIX.to_sparse()]

CALLS: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    "arrange": (ttnn_moe.arrange, [None, "x", EXPERTS]),
    "restore": (ttnn_moe.restore, [None, "x", EXPERTS]),
    "sizes of experts": (lambda v: Experts("dense", v, H, I, EXPERTS.tensors), [None, "4", 4.0, True]),
    "format of experts": (lambda v: Experts(v, E, H, I, EXPERTS.tensors), [None, ["dense"], {}]),
    "tensors of experts": (lambda v: Experts("dense", E, H, I, v), [None, 3, {"gate_up": 1, "down": 2}]),
    "projections": (
        lambda v: Experts.from_projections(torch.ones(E, H, I), v, torch.ones(E, I, H)),
        [torch.ones(E, H, I, device="meta"), torch.ones(E, H, I, dtype=torch.bfloat16)],
    ),
    "logical weights": (EXPERTS.dequantize, [E, -1, None, "a", 1.0]),
    "get_format": (get_format, [[], None, {}]),
    "register_format": (register_format, [None, object(), DenseFormat]),
    "int4_24 quantise": (quantise_int4_24.quantise, NO_TENSOR + NO_VALUES),
    "moments": (
        lambda v: quantise_int4_24.quantise(MATRIX, v),
        [3, [1.0], EYE + 0j, EYE.bool(), EYE.to("meta"), EYE.to_sparse(), EYE.numpy(), EYE.to(FLOAT8)],
    ),
    "int4_24 experts": (quantise_int4_24.quantise_experts, [None, "x", EXPERTS.to("meta")]),
    "calibration": (
        lambda v: quantise_int4_24.quantise_experts(EXPERTS, v, ROUTING),
        [[1], HIDDEN.numpy(), HIDDEN + 0j, HIDDEN.bool(), HIDDEN.to("meta"), HIDDEN.to_sparse(), HIDDEN.to(FLOAT8)],
    ),
    "routing of a calibration": (lambda v: quantise_int4_24.quantise_experts(EXPERTS, HIDDEN, v), [[1], "x", IDS]),
    "int4_24 values": (
        lambda v: int4_24.pack(v, CODES, BF16),
        [
            None,
            CODES + 0j,
            CODES.bool(),
            CODES.float(),
            CODES.to(FLOAT8),
            CODES.to("meta"),
            (CODES + 8).to(torch.uint64),
        ],
    ),
    "int4_24 index": (lambda v: int4_24.pack(CODES, v, BF16), [CODES + 4, CODES.to("meta"), CODES.numpy()]),
    "int4_24 unpack": (int4_24.unpack, [*NO_TENSOR, WORDS.to_sparse()]),
    "int4_24 dequantise": (int4_24.dequantise, [*NO_TENSOR, WORDS.to_sparse()]),
    "int4_24 fit_fp16": (int4_24.fit_fp16, NO_TENSOR),
    "mxfp4 quantise": (quantise_mxfp4.quantise, NO_TENSOR + NO_VALUES),
    "mxfp4 experts": (quantise_mxfp4.quantise_experts, [None, "x", EXPERTS.to("meta")]),
    "mxfp4 pack": (mxfp4.pack, [*NO_TENSOR, CODES.to("meta"), CODES + 16, (CODES - 1).to(torch.uint64)]),
    "mxfp4 unpack": (mxfp4.unpack, [*NO_TENSOR, torch.tensor(3, dtype=torch.uint8), BLOCKS.to_sparse()]),
    "mxfp4 blocks": (lambda v: mxfp4.dequantise(v, SCALES), [*NO_TENSOR, BLOCKS.to("meta"), BLOCKS.to_sparse()]),
    "mxfp4 scales": (lambda v: mxfp4.dequantise(BLOCKS, v), [*NO_TENSOR, SCALES.to("meta"), SCALES.to_sparse()]),
    "mxfp8 quantise": (mxfp8.quantise, [*NO_TENSOR, MATRIX.to_sparse()]),
    "mxfp8 values": (lambda v: mxfp8.dequantise(v, BYTES), [*NO_TENSOR, VALUES.to("meta")]),
    "mxfp8 scales": (lambda v: mxfp8.dequantise(VALUES, v), [*NO_TENSOR, BYTES.to("meta")]),
    "num_tokens": (
        lambda v: Routing.from_topk(IDS, WEIGHTS, E, num_tokens=v),
        [torch.ones(1, dtype=torch.int32).to_sparse()],
    ),
    "distinct": (lambda v: Routing.from_topk(IDS, WEIGHTS, E, distinct=v), [None, "no", 1]),
    "E": (lambda v: Routing.from_topk(IDS, WEIGHTS, v), [2**31, 2**40]),
    "device": (lambda v: Problem(T, E, K, H, I, device=v), [None, 0, ["cpu"]]),
    "activation": (lambda v: Problem(T, E, K, H, I, activation=v), [None, "gelu", ["silu"]]),
    "gate_up_order": (lambda v: Problem(T, E, K, H, I, gate_up_order=v), [None, "half", ["halves"]]),
    "weight_format": (lambda v: Problem(T, E, K, H, I, weight_format=v), [None, ["dense"], {}]),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_cannot_be_read_is_refused(name: str) -> None:
    call, values = CALLS[name]
    for value in values:
        with pytest.raises(ContractError):
            call(value)


PROBLEM = Problem.of(T, K, EXPERTS, torch.float32)
NAMED: dict[str, Callable[[Any], Any]] = {
    "moe": lambda v: ttnn_moe.moe(HIDDEN, ROUTING, EXPERTS, backend=v),
    "recorded moe": lambda v: ttnn_moe.moe(HIDDEN.clone().requires_grad_(), ROUTING, EXPERTS, backend=v),
    "prepare": lambda v: ttnn_moe.prepare(PROBLEM, EXPERTS, backend=v),
    "silu_mul": lambda v: ttnn_moe.silu_mul(HIDDEN, HIDDEN, backend=v),
    "why": lambda v: ttnn_moe.why(PROBLEM, v),
    "resolve": registry.resolve,
}


@pytest.mark.parametrize("name", NAMED)
def test_a_backend_is_asked_for_by_its_name(name: str) -> None:
    for value in (None, 3, ["cuda"], {}, torch.ones(2), b"cuda"):
        with pytest.raises(ContractError, match=r"backend is no name; got .*; expected one of \['auto', 'cuda'"):
            NAMED[name](value)
    with pytest.raises(BackendUnavailable, match="no such backend; got 'nonsense'"):
        NAMED[name]("nonsense")


@pytest.mark.parametrize("device", [torch.device("cpu"), "cpu", "cpu:0", torch.device("cpu", 0)])
def test_a_device_of_a_problem_is_its_type(device: Any) -> None:
    problem = Problem(T, E, K, H, I, torch.float32, device=device)
    assert problem.device == "cpu" and ttnn_moe.why(problem).chosen == "reference"


def test_more_pairs_than_int32_counts_run_nowhere() -> None:
    many = Problem(2**40, E, K, H, I, torch.float32)
    why = ttnn_moe.why(many)
    assert why.chosen is None
    reason = "it has T * K = 2199023255552 token-expert pairs, more than the 2147483647 that int32 counts"
    assert reason in registry.why_not(many)["reference"]
    with pytest.raises(BackendUnavailable, match="no backend can run this problem"):
        registry.choose(many)


def test_padding_is_not_checked() -> None:
    two, ids, hidden = torch.tensor(2, dtype=torch.int32), IDS.clone(), HIDDEN.clone()
    ids[2:], hidden[2:] = 99, torch.nan
    routing = Routing.from_topk(ids, WEIGHTS, E, num_tokens=two, check=True)
    got = quantise_int4_24.quantise_experts(EXPERTS, hidden, routing)
    want = quantise_int4_24.quantise_experts(EXPERTS, HIDDEN[:2], Routing.from_topk(IDS[:2], WEIGHTS[:2], E))
    assert all(torch.equal(got.tensors[name], want.tensors[name]) for name in want.tensors)
    with pytest.raises(ContractError, match="out of range at t=2, k=0"):
        Routing.from_topk(ids, WEIGHTS, E, num_tokens=two + 1, check=True)
    hidden[1] = torch.nan
    with pytest.raises(ContractError, match="hidden: not all are finite"):
        quantise_int4_24.quantise_experts(EXPERTS, hidden, routing)


def group_of() -> Group:
    sizes = Sizes(Shape(Nodes(1, 1)), T, H, K, torch.float32, torch.float32)
    memory = SharedMemory(sizes.layout)
    memory.detach_name()
    return Group(SharedMemoryTransport(memory, 0), sizes, Placement.uniform(E), 5.0)


def test_a_group_refuses_other_kinds() -> None:
    group = group_of()
    sent = group.dispatch(HIDDEN, IDS, WEIGHTS)
    for value in (*NO_TENSOR, torch.tensor(1.0), HIDDEN.to_sparse()):
        for call in (
            lambda v: group.dispatch(v, IDS, WEIGHTS),
            lambda v: group.dispatch(HIDDEN, v, WEIGHTS),
            lambda v: group.dispatch(HIDDEN, IDS, v),
            lambda v: group.combine(v, sent.meta),
        ):
            with pytest.raises(ContractError):
                call(value)
    with pytest.raises(ContractError, match="meta is no Meta"):
        group.combine(HIDDEN, None)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="placement is no Placement"):
        Group(None, group.sizes, None)  # type: ignore[arg-type]
    shapes: list[Any] = [None, Shape(Nodes(1, 1), channels="a"), Shape(Nodes(1, 1), slots=2.0)]  # type: ignore[arg-type]
    for shape in shapes:
        with pytest.raises(ContractError):
            Sizes(shape, T, H, K)


def test_a_group_sends_what_negative_views_say() -> None:
    group = group_of()
    negative = torch._neg_view(-HIDDEN)
    sent = group.dispatch(negative, IDS, torch._neg_view(-WEIGHTS))
    assert torch.equal(sent.rows, HIDDEN) and torch.equal(sent.weights, WEIGHTS)
    assert torch.equal(group.combine(negative, sent.meta), HIDDEN)
