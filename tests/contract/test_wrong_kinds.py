"""Arguments of another kind or layout than asked for: one error that says what to give; and what the objects print."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch

import ttnn_moe
from ttnn_moe import BackendUnavailable, ContractError, Experts, Placement, Problem, Routing
from ttnn_moe.formats import int4_24
from ttnn_moe.formats.quantise_int4_24 import quantise_experts
from ttnn_moe.formats.quantise_mxfp4 import quantise_experts as quantise_mxfp4
from ttnn_moe.reference import ReferenceBackend

T, E, K, H, I = 8, 4, 2, 64, 128
IDS, WEIGHTS = torch.zeros(T, K, dtype=torch.int32), torch.ones(T, K)


def dense() -> Experts:
    return Experts.dense(torch.randn(E, 2 * I, H), torch.randn(E, H, I))


def problem() -> Problem:
    return Problem.of(T, K, dense(), torch.float32)


def routing() -> Routing:
    return Routing.from_topk(IDS, WEIGHTS, E)


def turned() -> Experts:
    """From stacked weights of nn.Linear, which from_projections wants transposed."""
    return Experts.from_projections(torch.randn(E, I, H), torch.randn(E, I, H), torch.randn(E, H, I))


CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "a backend as placement": (
        lambda: ttnn_moe.prepare(problem(), dense(), "reference"),  # type: ignore[arg-type]
        "no Placement.*got 'reference'.*to fix it: backend='reference'",
    ),
    "a number as placement": (
        lambda: ttnn_moe.prepare(problem(), dense(), 3),  # type: ignore[arg-type]
        "no Placement; got 3; expected a ttnn_moe.Placement, or None",
    ),
    "E as text": (lambda: Routing.from_topk(IDS, WEIGHTS, "4"), "no number of experts; got '4'"),  # type: ignore[arg-type]
    "no E": (lambda: Routing.from_topk(IDS, WEIGHTS, None), "no number of experts; got None"),  # type: ignore[arg-type]
    "E as bool": (lambda: Routing.from_topk(IDS, WEIGHTS, True), "no number of experts; got True"),
    "placement of a routing": (
        lambda: Routing.from_topk(IDS, WEIGHTS, E, placement=3),  # type: ignore[arg-type]
        "no Placement; got 3",
    ),
    "ids [B, S, K]": (
        lambda: Routing.from_topk(IDS.view(2, 4, K), WEIGHTS.view(2, 4, K), E),
        r"to fix it: .*topk_ids.flatten\(0, 1\)",
    ),
    "why a number": (lambda: ttnn_moe.why(3), "no Problem; got 3"),  # type: ignore[arg-type]
    "why nothing": (lambda: ttnn_moe.why(None), "no Problem; got None"),  # type: ignore[arg-type]
    "a problem of no experts": (lambda: Problem.of(T, K, None, torch.float32), "no Experts; got None"),  # type: ignore[arg-type]
    "T as text": (lambda: Problem.of("8", K, dense(), torch.float32), "no integers; got T='8'"),  # type: ignore[arg-type]
    "no K": (lambda: Problem.of(T, None, dense(), torch.float32), "no integers.*K=None"),  # type: ignore[arg-type]
    "placed E as text": (lambda: Placement.uniform("4", 2), "no integers; got E='4', D=2"),  # type: ignore[arg-type]
    "D as float": (lambda: Placement.uniform(4, 2.0), "no integers; got E=4, D=2.0"),  # type: ignore[arg-type]
    "packed vectors": (lambda: int4_24.pack(*torch.ones(3, 4)), r"do not fit together; got \(4,\), \(4,\), \(4,\)"),
    "packed lists": (lambda: int4_24.pack([1], [1], [1]), "values is no tensor"),  # type: ignore[arg-type]
    "no words": (lambda: Experts.int4_24(None, None), "w13 is no tensor; got None"),  # type: ignore[arg-type]
    "lists of words": (lambda: Experts.int4_24([1], [2]), r"w13 is no tensor; got \[1\]"),  # type: ignore[arg-type]
    "no projections": (lambda: Experts.from_projections(None, None, None), "gate is no tensor"),  # type: ignore[arg-type]
    "a projection of two dimensions": (
        lambda: Experts.from_projections(torch.ones(E, H, I), torch.ones(E, H, I), torch.ones(I, H)),
        "projection weights do not fit together",
    ),
    "to a dtype": (lambda: dense().to(torch.float16), "no device; got torch.float16"),  # type: ignore[arg-type]
    "to a device that is not here": (
        lambda: dense().to("cuda:99"),
        "no device; got 'cuda:99': .*; expected a torch device that is here.*: ttnn-moe doctor",
    ),
    "row_align as text": (lambda: routing().step_layout("a"), "row_align is out of range; got 'a'"),  # type: ignore[arg-type]
    "a device as placement": (lambda: dense().for_device(0), "no Placement; got 0"),  # type: ignore[arg-type]
    "a device as text": (
        lambda: dense().for_device(Placement.uniform(E, 2), "1"),  # type: ignore[arg-type]
        "no such device in this placement; got '1'; expected 0 .. 1",
    ),
    "a rank as float": (lambda: Placement.uniform(E, 2, 1.0), "rank is not a device.*got 1.0"),  # type: ignore[arg-type]
    "no mapping": (lambda: Placement.from_mapping(None), "no mapping of experts; got None"),  # type: ignore[arg-type]
    "a mapping of fractions": (lambda: Placement.from_mapping([[0, 1.5]]), "no mapping of experts"),  # type: ignore[list-item]
    "more pairs than int32 counts": (
        lambda: ttnn_moe.prepare(Problem.of(2**62, K, dense(), torch.float32), dense()),
        r"too many token-expert pairs; got T=4611686018427387904, K=2; expected T \* K <= 2147483647",
    ),
    "calibration without routing": (
        lambda: quantise_experts(dense(), torch.randn(T, H)),
        "calibration needs .*; got hidden without routing; expected both, or neither; to fix it: give routing too",
    ),
    "calibration without hidden": (
        lambda: quantise_experts(dense(), routing=routing()),
        "calibration needs .*; got routing without hidden",
    ),
    "hidden of exchanged experts": (
        lambda: ttnn_moe.moe(torch.randn(T, H), routing(), turned()),
        r"to fix it: H=128 and I=64 of the experts look exchanged; .*from_projections takes gate .*transpose\(1, 2\)",
    ),
    "hidden of exchanged prepared experts": (
        lambda: ttnn_moe.prepare(Problem.of(T, K, turned(), torch.float32), turned())(torch.randn(T, H), IDS, WEIGHTS),
        "to fix it: H=128 and I=64 of the experts look exchanged",
    ),
    "hidden [B, S, H] of a layer": (
        lambda: ttnn_moe.prepare(problem(), dense())(torch.randn(2, 4, H), IDS, WEIGHTS),
        r"to fix it: flatten batch and sequence to T: hidden.reshape\(-1, H\)",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_error_says_what_to_give(name: str) -> None:
    call, match = CALLS[name]
    with pytest.raises(ContractError, match=match):
        call()


@pytest.mark.parametrize("lack", [MemoryError(), RuntimeError("[x] DefaultCPUAllocator: you tried 4 bytes")])
def test_a_workspace_that_the_host_does_not_hold(lack: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(*_: object) -> None:
        raise lack

    monkeypatch.setattr(ReferenceBackend, "prepare", prepare)
    with pytest.raises(BackendUnavailable, match="no room for the workspace .*got T=8, .*: prepare for fewer tokens T"):
        ttnn_moe.prepare(problem(), dense(), backend="reference")
    monkeypatch.setattr(ReferenceBackend, "prepare", lambda *_: torch.empty(-1))
    with pytest.raises(RuntimeError, match="negative dimension"):
        ttnn_moe.prepare(problem(), dense(), backend="reference")


def test_projections_of_linear_layers_transposed_are_the_dense_ones() -> None:
    want = dense()
    gate, up = want.tensors["gate_up"].chunk(2, dim=1)
    got = Experts.from_projections(gate.transpose(1, 2), up.transpose(1, 2), want.tensors["down"].transpose(1, 2))
    assert all(torch.equal(got.tensors[name], want.tensors[name]) for name in want.tensors)


# what the objects print


class Unread(torch.Tensor):
    """Fails whoever prints its values."""

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        raise AssertionError("values were printed")


def test_objects_print_sizes_not_values() -> None:
    weights = [torch.randn(E, 2 * I, H), torch.randn(E, H, I)]
    experts = Experts.dense(*(tensor.as_subclass(Unread) for tensor in weights))
    assert repr(experts) == "Experts(dense, E=4, H=64, I=128, float32, cpu)"
    placement = Placement.uniform(E, 2)
    assert repr(placement) == "Placement(E=4, D=2)"
    assert repr(Placement.uniform(E, 2, 1)) == "Placement(E=4, D=2, rank=1)"
    assert repr(routing()) == "Routing(T=8, K=2, E=4, cpu)"
    bound = torch.tensor(3, dtype=torch.int32)
    whole = Routing.from_topk(IDS, WEIGHTS, E, placement=placement, num_tokens=bound, distinct=True)
    assert repr(whole) == "Routing(T=8, K=2, E=4, Placement(E=4, D=2), num_tokens, distinct, cpu)"
    layer = ttnn_moe.prepare(problem(), dense(), backend="reference")
    assert repr(layer) == "PreparedReference(T=8, E=4, K=2, H=64, I=128, float32, dense weights, on cpu)"


def test_other_formats_print_what_they_have() -> None:
    packed = quantise_mxfp4(dense()).tensors
    biases = torch.zeros(E, 2 * I), torch.zeros(E, H)
    experts = Experts.mxfp4(
        **packed, gate_up_bias=biases[0], down_bias=biases[1], activation="clamped_swiglu", gate_up_order="interleaved"
    )
    assert repr(experts) == "Experts(mxfp4, E=4, H=64, I=128, interleaved, clamped_swiglu, biases, cpu)"


# experts on another device


@pytest.mark.parametrize("form", ["dense", "int4_24", "mxfp4", "arranged"])
def test_experts_move_and_stay_what_they_are(form: str) -> None:
    made = {
        "dense": dense,
        "int4_24": lambda: quantise_experts(dense()),
        "mxfp4": lambda: quantise_mxfp4(dense()),
        "arranged": lambda: ttnn_moe.arrange(quantise_mxfp4(dense())),
    }
    experts = made[form]()
    there = experts.to("meta")
    assert there.device.type == "meta" and experts.device.type == "cpu"
    assert there.spec == experts.spec and there.sizes == experts.sizes
    here = experts.to(torch.device("cpu"))
    assert all(here.tensors[name] is tensor for name, tensor in experts.tensors.items())


def test_tensors_are_what_a_file_holds(tmp_path) -> None:
    """As docs/operator.md says: the tensors are stored, and Experts is made of them again."""
    experts = dense()
    torch.save(dict(experts.tensors), tmp_path / "experts.pt")
    again = Experts.dense(**torch.load(tmp_path / "experts.pt"))
    assert torch.equal(again.tensors["down"], experts.tensors["down"])
    assert repr(pickle.loads(pickle.dumps(experts))) == repr(experts)
