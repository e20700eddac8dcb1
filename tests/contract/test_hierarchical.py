"""Hierarchical dispatch and combine over shared memory: equal to the tree oracle, whatever the rings and topology."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from delivered import delivered
from rank_processes import Case, by_processes, by_threads
from ttnn_moe.contract import Placement
from ttnn_moe.errors import ContractError, GradientsRefused
from ttnn_moe.parallel.hierarchical import Group, Nodes, PeerStopped, Shape, Sizes, group, tree_sum
from ttnn_moe.parallel.hierarchical.nodes import rank_masks
from ttnn_moe.parallel.hierarchical.shared_memory import SharedMemory, SharedMemoryTransport

F32, BF16 = torch.float32, torch.bfloat16
CASES = {
    "one rank": Case(1, 1, (5,)),
    "two ranks of a node": Case(1, 2, (5, 3), channels=2),
    "two nodes of one rank, ring size 1": Case(2, 1, (4, 6), slots=1, wire=F32),
    "2 x 4, no token on three": Case(2, 4, (6, 0, 3, 1, 0, 0, 5, 2), channels=2, slots=1),
    "4 x 2, fp32": Case(4, 2, (1, 2, 3, 4, 0, 2, 1, 3), dtype=F32, wire=F32, slots=4),
    "fp32 rows in steps": Case(1, 2, (5, 3), dtype=F32, wire=F32, in_steps=True),
    "fp32 rows on a bf16 wire": Case(2, 2, (4, 3, 2, 5), dtype=F32),
    "3 x 3, counters wrap around": Case(3, 3, (4, 3, 2, 5, 4, 1, 0, 2, 6), first=2**32 - 2, turns=3),
    "8 in a node": Case(1, 8, (2, 1, 0, 3, 2, 1, 1, 2), H=8, K=1),
    "8 nodes": Case(8, 1, (2, 1, 0, 3, 2, 1, 1, 2), H=24),
    "nobody has a token": Case(2, 2, (0, 0, 0, 0)),
}


def check(case: Case, results: list) -> None:
    for turn in range(case.turns):
        inputs = [case.inputs(rank, turn) for rank in range(len(case.tokens))]
        for rank, result in enumerate(results):
            assert len(result["turns"]) == case.turns, result
            sent, out = result["turns"][turn]
            masks = rank_masks(inputs[rank][1], case.placement)
            assert torch.equal(sent.meta.masks[rank], masks)
            assert torch.equal(out, case.want(rank, turn, masks))
            got, want = (sent.rows, sent.ids, sent.weights), delivered(inputs, case.placement, rank)
            assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_tree_oracle(case: Case) -> None:
    check(case, by_threads(case))


def test_processes_2x4() -> None:
    case = Case(2, 4, (6, 0, 3, 1, 0, 0, 5, 2), slots=1, turns=2)
    check(case, by_processes(case)[0])


def test_the_oracle_by_hand() -> None:
    """2 x 2, rank 1: three roundings differ from one."""
    rows = torch.tensor([1.0, 2**-9, 2**-9, 2**-9]).reshape(4, 1, 1).expand(4, 1, 8)
    mask, nodes = torch.tensor([15]), Nodes(2, 2)
    assert tree_sum(rows, mask, nodes, 1, F32)[0, 0] == 1 + 3 * 2**-9
    # rows and the other node's partial, 2^-8, are exact in bf16; the sum is fp32
    assert tree_sum(rows, mask, nodes, 1)[0, 0] == 1 + 3 * 2**-9
    swapped = rows.flip(0)
    assert tree_sum(swapped, mask, nodes, 1)[0, 0] == 2**-8 + 1, "the other node's partial, 1 + 2^-9, is rounded to 1"
    assert tree_sum(rows, torch.tensor([2]), nodes, 1, biases=(rows[3], None))[0, 0] == 2**-8
    assert bool((tree_sum(rows * torch.nan, torch.tensor([0]), nodes, 1) == 0).all())


def test_weights_are_applied_by_the_expert_side() -> None:
    """Pairs that are not here are not read; the sum over k is fp32 and ascending."""
    sizes = Sizes(Shape(Nodes(1, 1)), 2, 8, 2, wire=F32)
    memory = SharedMemory(sizes.layout)
    group = Group(SharedMemoryTransport(memory, 0), sizes, Placement.uniform(2))
    ids = torch.tensor([[0, -1], [1, 0]], dtype=torch.int32)
    sent = group.dispatch(torch.ones(2, 8).bfloat16(), ids, torch.tensor([[0.5, 9.0], [0.25, 2.0]]))
    pairs = torch.arange(4.0).reshape(2, 2, 1).expand(2, 2, 8).bfloat16() + 1
    pairs[0, 1] = torch.nan
    out = group.combine(pairs, sent.meta, sent.weights)
    assert out[:, 0].tolist() == [0.5, 0.25 * 3 + 2 * 4]
    memory.detach_name()


SIZES, PAIR = Sizes(Shape(Nodes(1, 2)), 4, 16, 3), Placement.uniform(6, 2)
OTHERS = {
    "K: got 4, expected 3": (replace(SIZES, K=4), PAIR),
    "H: got 32, expected 16": (replace(SIZES, H=32), PAIR),
    "T: got 5, expected 4": (replace(SIZES, T=5), PAIR),
    "dtype: got torch.float16, expected torch.bfloat16": (replace(SIZES, dtype=torch.float16), PAIR),
    "wire: got torch.float32, expected torch.bfloat16": (replace(SIZES, wire=F32), PAIR),
    "slots: got 8, expected 4": (replace(SIZES, shape=Shape(Nodes(1, 2), slots=8)), PAIR),
    "R_inter: got 2, expected 1": (replace(SIZES, shape=Shape(Nodes(2, 1))), PAIR),
    "R_intra: got 3, expected 2": (replace(SIZES, shape=Shape(Nodes(1, 3))), Placement.uniform(6, 3)),
    "placement: got 6 experts, ": (SIZES, Placement.from_mapping([[5, 4, 3], [2, 1, 0]])),
}


@pytest.mark.parametrize("words", OTHERS)
def test_every_rank_says_what_another_rank_was_made_for(words: str) -> None:
    """K, dtype, wire and placement change no byte of the memory's layout."""
    memory, (other, placement) = SharedMemory(SIZES.layout), OTHERS[words]
    theirs = SharedMemory(other.layout, memory.name)
    memory.detach_name()
    groups = [
        Group(SharedMemoryTransport(memory, 0), SIZES, PAIR, 0.5),
        Group(SharedMemoryTransport(theirs, 1), other, placement, 0.5),
    ]

    def call(group: Group) -> None:
        K = group.sizes.K
        ids, weights = torch.zeros(2, K, dtype=torch.int32), torch.ones(2, K)
        with pytest.raises(ContractError, match=f"the ranks do not run one group; got rank 1: {words}.*to fix it"):
            group.dispatch(torch.ones(2, group.sizes.H, dtype=group.sizes.dtype), ids, weights)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(call, groups))


def test_a_rank_that_makes_no_group_is_named() -> None:
    memory = SharedMemory(SIZES.layout)
    memory.detach_name()
    group = Group(SharedMemoryTransport(memory, 0), SIZES, PAIR, 0.1)
    for _ in range(2):
        with pytest.raises(PeerStopped, match="rank 1 stopped in call 1, before it"):
            group.dispatch(torch.ones(1, 16).bfloat16(), torch.zeros(1, 3, dtype=torch.int32), torch.ones(1, 3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Nodes(9, 1),
        lambda: Nodes(1, 0),
        lambda: Nodes(1.5, 1),  # type: ignore[arg-type]
        lambda: Sizes(Shape(Nodes(1, 1)), -1, 16, 2),
        lambda: Sizes(Shape(Nodes(1, 1)), 4, 16, 0),
        lambda: Sizes(Shape(Nodes(1, 1)), 4, 16.0, 2),  # type: ignore[arg-type]
        lambda: Sizes(Shape(Nodes(1, 1)), 4, 12, 2),
        lambda: Sizes(Shape(Nodes(1, 1), slots=3), 4, 16, 2),
        lambda: Sizes(Shape(Nodes(1, 1)), 4, 16, 2, torch.int8),
        lambda: Sizes(Shape(Nodes(1, 1)), 4, 16, 2, wire=torch.float16),
        lambda: Sizes(Shape((1, 1)), 4, 16, 2),  # type: ignore[arg-type]
        lambda: SharedMemory(SIZES),  # type: ignore[arg-type]
        lambda: Group(SharedMemoryTransport(SharedMemory(SIZES.layout), 0), SIZES.layout, PAIR),  # type: ignore[arg-type]
        lambda: SharedMemory(SIZES.layout, "/dev/null"),
        lambda: SharedMemory(SIZES.layout, "/proc/0/fd/3"),
        lambda: SharedMemory(SIZES.layout, "/proc/\0"),
        lambda: SharedMemory(SIZES.layout, 5),  # type: ignore[arg-type]
    ],
)
def test_refuses(make) -> None:
    with pytest.raises(ContractError, match="got"):
        make()


def test_a_file_of_anybody_else_is_not_written_to(tmp_path: Path) -> None:
    file, link = tmp_path / "weights", tmp_path / "link"
    file.write_bytes(b"7" * SharedMemory(SIZES.layout)._map.size())
    link.symlink_to(file)
    for name in (file, link):
        with pytest.raises(ContractError, match="no memory of a group.*memfd:ttnn-moe-ranks.*to fix it: attach by"):
            SharedMemory(SIZES.layout, str(name))


def test_a_column_in_steps_travels() -> None:
    """torch calls a transposed row of one column contiguous, whatever its stride."""
    sizes = replace(SIZES, K=1, shape=Shape(Nodes(1, 1)))
    memory = SharedMemory(sizes.layout)
    group = Group(SharedMemoryTransport(memory, 0), sizes, Placement.uniform(2))
    ids, weights = torch.tensor([[0, 1, 0]], dtype=torch.int32).t(), torch.tensor([[1.0, 2.0, 3.0]]).t()
    sent = group.dispatch(torch.ones(3, 16).bfloat16(), ids, weights)
    assert torch.equal(sent.ids, ids) and torch.equal(sent.weights, weights)
    assert group.dispatch(torch.ones(0, 16).bfloat16(), ids[:0], weights[:0]).rows.shape == (0, 16)


def test_a_combine_that_one_rank_refuses_ends_the_group() -> None:
    """The others wait for its rows: another call of this rank would send masks."""
    case = Case(1, 2, (3, 2), timeout=30.0)
    memory, begin = SharedMemory(case.sizes.layout), time.monotonic()
    memory.detach_name()
    both = threading.Barrier(2)

    def rank(r: int) -> list[object]:
        one, said = Group(SharedMemoryTransport(memory, r), case.sizes, case.placement, case.timeout), []
        sent = one.dispatch(*case.inputs(r))
        both.wait(case.timeout)  # else the refusal may end a dispatch that the other rank has not left
        x = sent.rows.double() if r == 0 else sent.rows
        for call in (lambda: one.combine(x, sent.meta), lambda: one.dispatch(*case.inputs(r))):
            with pytest.raises((ContractError, PeerStopped)) as error:
                call()
            said.append(getattr(error.value, "report", None))
        return said

    with ThreadPoolExecutor(2) as pool:
        (refused, dead), others = pool.map(rank, range(2))
    assert refused is None and others == [dead, dead] and (dead.peer, dead.reporter) == (0, 0)
    assert time.monotonic() - begin < case.timeout / 2


def test_a_call_refuses_what_does_not_fit() -> None:
    sizes = Sizes(Shape(Nodes(1, 1)), 2, 8, 2)
    memory = SharedMemory(sizes.layout)
    memory.detach_name()
    with pytest.raises(ContractError, match="topology"):
        Group(SharedMemoryTransport(memory, 0), sizes, Placement.uniform(2, 2))
    group = Group(SharedMemoryTransport(memory, 0), sizes, Placement.uniform(2))
    hidden, ids, weights = torch.ones(2, 8).bfloat16(), torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 2)
    for wrong in ((hidden.float(), ids, weights), (hidden, ids[:1], weights), (hidden, ids, weights.double())):
        with pytest.raises(ContractError, match="wrong form"):
            group.dispatch(*wrong)
    with pytest.raises(ContractError, match="too many"):
        group.dispatch(hidden.repeat(2, 1), ids.repeat(2, 1), weights.repeat(2, 1))
    sent = group.dispatch(hidden, ids, weights)
    with pytest.raises(ContractError, match="bias_1"):
        group.combine(sent.rows, sent.meta, bias_1=hidden[:1])
    for dtype in (torch.int32, torch.int8, torch.float64):
        with pytest.raises(ContractError, match="x has the wrong form"):
            group.combine(sent.rows.to(dtype), sent.meta)
    for timeout in (0.0, float("nan"), None):
        with pytest.raises(ContractError, match="timeout"):
            Group(SharedMemoryTransport(memory, 0), sizes, Placement.uniform(2), timeout)  # type: ignore[arg-type]
    for call in (
        lambda: group.dispatch(hidden.clone().requires_grad_(), ids, weights),
        lambda: group.combine(sent.rows.clone().requires_grad_(), sent.meta),
    ):
        with pytest.raises(GradientsRefused, match=r"asks for gradients.*torch\.no_grad"):
            call()
    with pytest.raises(ContractError, match="hidden has the wrong form; got .* on meta; expected .* on the CPU"):
        group.dispatch(hidden.to("meta"), ids, weights)
    with torch.no_grad():
        assert torch.equal(group.combine(sent.rows.clone().requires_grad_(), sent.meta), hidden)
    wide = torch.tensor([[0, 2**32 + 1], [2, 1]])
    assert group.dispatch(hidden, wide, weights).ids.tolist() == [[0, -1], [-1, 1]], "no id wraps around"


def test_a_dispatch_that_fails_behind_its_masks_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for tokens: another dispatch of this rank would send masks."""
    case = Case(1, 2, (3, 2), timeout=30.0)
    works = group._Tokens.__init__

    def failing(self: object, of: Group, *given: object) -> None:
        if of.rank == 0:
            raise MemoryError("no room")
        works(self, of, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(group._Tokens, "__init__", failing)
    memory, begin = SharedMemory(case.sizes.layout), time.monotonic()
    memory.detach_name()

    def rank(r: int) -> list[object]:
        one, said = Group(SharedMemoryTransport(memory, r), case.sizes, case.placement, case.timeout), []
        for _ in range(2):
            with pytest.raises((MemoryError, PeerStopped)) as error:
                one.dispatch(*case.inputs(r))
            said.append(error.value.report.peer if isinstance(error.value, PeerStopped) else str(error.value))
        return said

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, range(2))) == [["no room", 0], [0, 0]]
    assert time.monotonic() - begin < case.timeout / 2
