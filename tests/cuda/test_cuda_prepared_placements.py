"""Layers prepared with a placement, without a GPU: one GPU runs all devices' experts, or those of its rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ttnn_moe
from cuda_gpus import pretend
from ttnn_moe import Experts, Placement, Problem, Routing
from ttnn_moe.cuda.device import H200
from ttnn_moe.cuda.moe import prepared
from ttnn_moe.cuda.moe.families import Chosen
from ttnn_moe.cuda.moe.family import Buffer, Call
from ttnn_moe.cuda.moe.prepared import PreparedCuda, Workspace

T, E, K, H, I = 6, 8, 3, 64, 64
PROBLEM = Problem(T, E, K, H, I, torch.float32)


class Reference:
    """A family that computes as the reference does, and counts its launches."""

    alignment = 1

    def __init__(self) -> None:
        self.launches = 0

    def launch(self, plan: object, call: Call, buffers: tuple[Tensor, ...]) -> None:
        self.launches += 1
        routing, ids = call.routing, call.routing.topk_ids.long()
        if call.expert_map is not None:
            ids = call.expert_map[ids.clamp(0, E - 1)].where((ids >= 0) & (ids < E), -1)
        local = Routing.from_topk(ids.int(), routing.topk_weights, call.experts.E, num_tokens=routing.num_tokens)
        ttnn_moe.moe(call.hidden, local, call.experts, out=call.out, accumulate=call.accumulate, backend="reference")


@pytest.fixture(scope="module")
def family() -> Any:
    """The one that every call of this module chooses, on an H200 that is not here."""
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, H200)
        made = Reference()
        patch.setattr(prepared, "chosen_for", lambda call: Chosen(made, None, (), {}))  # type: ignore[arg-type]
        yield made


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_call_sums_over_the_devices(family: Reference, data: st.DataObject) -> None:
    """Experts in any order on 1, 2 or 4 devices; it adds where asked, and leaves rows from num_tokens on."""
    D, seed = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(0, 99))
    order = data.draw(st.permutations(range(E)))
    rank = data.draw(st.one_of(st.none(), st.integers(0, D - 1)))
    tokens, accumulate = data.draw(st.integers(0, T)), data.draw(st.booleans())
    bound = data.draw(st.one_of(st.none(), st.integers(0, tokens)))
    g = torch.Generator().manual_seed(seed)
    whole = Experts.dense(torch.randn(E, 2 * I, H, generator=g) / 8, torch.randn(E, H, I, generator=g) / 8)
    mapping = [order[d * E // D : (d + 1) * E // D] for d in range(D)]
    placement = Placement.from_mapping(mapping, rank=rank)
    experts = whole if rank is None else whole.for_device(placement, rank)
    layer = PreparedCuda(PROBLEM, experts, placement)

    hidden, weights = torch.randn(tokens, H, generator=g), torch.rand(tokens, K, generator=g)
    ids = torch.randint(-1, E + 1, (tokens, K), dtype=torch.int32, generator=g)
    num_tokens = None if bound is None else torch.tensor(bound, dtype=torch.int32)
    out = torch.randn(tokens, H, generator=g)
    counted = ids if rank is None else ids.where(torch.isin(ids, torch.tensor(mapping[rank])), -1)
    routing = Routing.from_topk(counted, weights, E, num_tokens=num_tokens)
    want = ttnn_moe.moe(hidden, routing, whole, out=out.clone(), accumulate=accumulate, backend="reference")
    family.launches = 0
    layer(hidden, ids, weights, out=out, accumulate=accumulate, num_tokens=num_tokens)
    torch.testing.assert_close(out, want)
    assert family.launches == (0 if tokens == 0 else 1 if rank is not None else D)


def test_buffers_of_a_call_do_not_overlap(family: Reference) -> None:
    """Each begins at a multiple of 16 bytes, in memory that holds all of them."""
    scratch = prepared.Scratch(PROBLEM, torch.device("cpu"), sums=False)
    assert scratch.sums is None
    needed = (
        Buffer((3, 5), torch.float32),
        Buffer((7,), torch.int16),
        Buffer((129, 4), torch.int32),
        Buffer((2,), torch.float32),
    )
    chosen = Chosen(family, None, needed, {})  # type: ignore[arg-type]
    held = scratch.buffers(chosen)
    assert [(x.shape, x.dtype) for x in held] == [(buffer.shape, buffer.dtype) for buffer in needed]
    first = scratch._memory.data_ptr()
    assert all((x.data_ptr() - first) % 16 == 0 for x in held)
    ends = [x.data_ptr() + x.nbytes for x in held]
    assert all(end <= x.data_ptr() for end, x in zip(ends, held[1:], strict=False))
    assert ends[-1] - first <= prepared.bytes_of(needed)


@pytest.mark.parametrize("in_turn", [False, True])
def test_streams_of_a_gpu_share_scratch_where_calls_take_turns(in_turn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparing a layer makes the scratch of the current stream: its first call there allocates none."""
    made: list[object] = []
    current = [7]
    monkeypatch.setattr(prepared, "_SHARED", {})
    monkeypatch.setattr(prepared, "Scratch", lambda *given: made.append(given) or object())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current[index], raising=False)
    space = Workspace.of(PROBLEM, torch.device("cuda", 0), False, in_turn)
    assert len(made) == 1
    assert Workspace.of(PROBLEM, torch.device("cuda", 0), False, in_turn) is space
    assert len(made) == 1
    found = {}
    for current[0] in (7, 8, 9, 8):
        scratch = space.scratch()
        assert found.setdefault(0 if in_turn else current[0], scratch) is scratch
    assert len(made) == len(set(map(id, found.values()))) == (1 if in_turn else 3)


def test_calls_of_a_layer_take_turns_only_where_its_caller_says_so(family: Reference) -> None:
    experts = Experts.dense(torch.zeros(E, 2 * I, H), torch.zeros(E, H, I))
    owners = False, True, "one owner", "another"
    layers = [PreparedCuda(PROBLEM, experts, None, in_turn=owner) for owner in owners]
    spaces = [Workspace.of(PROBLEM, experts.device, False, owner) for owner in owners]
    assert [layer._space for layer in layers] == spaces and len(set(map(id, spaces))) == len(owners)


def test_a_layer_compiles_what_its_caller_names(family: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless asked for otherwise: from one token on, int32 ids, and no output that is added to."""
    monkeypatch.setattr(prepared, "compile_up_to", lambda problem, target, *asked: asked)
    experts = Experts.dense(torch.zeros(E, 2 * I, H), torch.zeros(E, H, I))
    layer = PreparedCuda(PROBLEM, experts, None)
    assert layer.compile() == (1, False, False)
    assert layer.compile(5, ids64=True) == (5, True, False) and layer.compile(accumulate=True) == (1, False, True)
