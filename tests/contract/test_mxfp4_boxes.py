"""Arranged MXFP4 experts: the order of chunks, its inverse, and the CPU backend on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ttnn_moe
from interrupts import Interrupt, each_interrupt, run_to
from mxfp4_cases import FORMS, Form, random_mxfp4, spoil
from ttnn_moe import ContractError, Experts, Problem, Routing, arranging
from ttnn_moe.formats import get_format, in_place, mxfp4_boxes
from ttnn_moe.formats.mxfp4_boxes import NAME, chunk_order

SIZES = st.integers(1, 12).map(lambda n: 32 * n)


@settings(max_examples=20, deadline=None)
@given(H=SIZES, I=SIZES, form=st.sampled_from(FORMS))
def test_restore_is_the_inverse(H: int, I: int, form: Form) -> None:
    experts = random_mxfp4(2, H, I, form, "cpu")
    spoil(experts, 0)
    before = {name: tensor.clone() for name, tensor in experts.tensors.items()}
    dense = experts.dequantize(1)
    boxes = ttnn_moe.arrange(experts)
    assert boxes.format == NAME
    assert all(boxes.tensors[name].data_ptr() == tensor.data_ptr() for name, tensor in experts.tensors.items())
    assert all(torch.equal(a, b) for a, b in zip(boxes.dequantize(1), dense, strict=True))
    after = ttnn_moe.restore(boxes)
    assert after.format == "mxfp4" and (after.gate_up_order, after.activation) == (form.order, form.activation)
    assert all(
        torch.equal(after.tensors[name].view(torch.uint8), old.view(torch.uint8)) for name, old in before.items()
    )


def test_tensors_that_share_memory_are_refused() -> None:
    """Bytes of one would change places twice."""
    experts = random_mxfp4(2, 128, 128, FORMS[0], "cpu")
    held = dict(experts.tensors)
    blocks = held["gate_up_blocks"]
    held["down_blocks"] = blocks.view(-1)[: held["down_blocks"].numel()].view(held["down_blocks"].shape)
    before = blocks.clone()
    with pytest.raises(ContractError, match="share memory.*clone"):
        ttnn_moe.arrange(replace(experts, tensors=held))
    assert torch.equal(blocks, before)


def test_a_mark_that_cannot_keep_it_leaves_the_bytes_of_before() -> None:
    experts = random_mxfp4(2, 32, 32, Form(), "cpu")
    before = {name: tensor.clone() for name, tensor in experts.tensors.items()}

    def failing(_: bool) -> None:
        raise OSError("no room")

    no_mark: Any = None
    for mark, error, words in (
        (no_mark, ContractError, "got None; expected a function"),
        (failing, OSError, "no room"),
    ):
        with pytest.raises(error, match=words):
            ttnn_moe.arrange(experts, mark)
        assert all(torch.equal(tensor, before[name]) for name, tensor in experts.tensors.items())


@pytest.mark.parametrize("order", ["halves", "interleaved", None])
def test_the_order_of_chunks(order: str | None) -> None:
    """Chunk by chunk, as sm80/mxfp4_boxes.cuh writes it."""
    groups, I = 11, 160
    R = 2 * I if order else 336
    want = []

    def row(fragment: int, r: int, units: int) -> int:
        """Of down; of gate_up, whose fragments have 4 * units rows."""
        if order is None:
            return 16 * fragment + r
        half, g = divmod(r, 2 * units)
        channel = fragment // 16 * 128 + g // 2 * 32 + g % 2 * 4 + fragment % 16 // 4 * 8 + fragment % 4
        return 2 * channel + half if order == "interleaved" else half * I + channel

    fragments = R // 16 if order is None else -(-I // 128) * 16
    for box in range(0, fragments, 8):
        units = 4 if order is None else min(4, I // 32 - box // 16 * 4)
        for stage in range(0, groups, 8):
            for fragment in range(box, min(box + 8, fragments)):
                for unit in range(stage, min(stage + 8, groups), 4):
                    for r in range(4 * units):
                        want += [row(fragment, r, units) * groups + c for c in range(unit, min(unit + 4, groups))]
    assert chunk_order(R, groups, order).tolist() == want


@pytest.mark.parametrize("form", FORMS[:3], ids=str)
def test_the_reference_runs_them(form: Form) -> None:
    experts = random_mxfp4(4, 96, 160, form, "cpu")
    hidden, ids = torch.randn(9, 96), torch.randint(-1, 4, (9, 2))
    routing = Routing.from_topk(ids, torch.rand(9, 2), 4)
    boxes = arranging.arranged(experts)
    want = ttnn_moe.moe(hidden, routing, experts, backend="reference")
    assert torch.equal(ttnn_moe.moe(hidden, routing, boxes, backend="reference"), want)
    layer = ttnn_moe.prepare(Problem.of(9, 2, boxes, torch.float32), boxes, backend="reference")
    assert torch.equal(layer(hidden, ids, routing.topk_weights), want)


def test_experts_of_a_device_are_a_slice() -> None:
    experts = random_mxfp4(4, 64, 32, Form(), "cpu")
    boxes = arranging.arranged(experts)
    some = get_format(NAME).select(boxes, torch.tensor([1, 2]))
    assert all(torch.equal(tensor, boxes.tensors[name][1:3]) for name, tensor in some.items())


@pytest.fixture(params=["arrange", "restore"])
def exchange(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[Experts, Callable[[int], int], int]:
    """Experts; what changes their order with an interrupt before line `at`; and how many lines that runs."""
    monkeypatch.setattr(mxfp4_boxes, "_BLOCK", 1)  # an expert at a time
    experts = random_mxfp4(2, 32, 32, Form(), "cpu")
    back = request.param == "restore"
    experts = ttnn_moe.arrange(experts) if back else experts

    def change(at: int) -> int:
        work = partial(ttnn_moe.restore if back else ttnn_moe.arrange, experts)
        return run_to(at, work, in_place, mxfp4_boxes)

    before = {name: tensor.clone() for name, tensor in experts.tensors.items()}
    for _ in range(2):  # the first time, tables are made
        lines = change(-1)
        for name, tensor in experts.tensors.items():
            tensor.copy_(before[name])
    return experts, change, lines


def test_an_interrupt_leaves_the_bytes_of_before(exchange: tuple[Experts, Callable[[int], int], int]) -> None:
    experts, change, lines = exchange
    before = {name: tensor.clone() for name, tensor in experts.tensors.items()}
    for at in range(lines):
        with pytest.raises(Interrupt):
            change(at)
        assert all(torch.equal(tensor, before[name]) for name, tensor in experts.tensors.items()), at


@pytest.mark.parametrize("back", [False, True], ids=["arrange", "restore"])
def test_a_mark_agrees_with_the_bytes_wherever_an_interrupt_comes(back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind the last byte, where the caller's next statement would have kept it."""
    monkeypatch.setattr(mxfp4_boxes, "_BLOCK", 1)
    plain = random_mxfp4(2, 32, 32, Form(), "cpu")
    boxes = arranging.arranged(plain)
    experts = boxes if back else plain
    given = {name: tensor.clone() for name, tensor in experts.tensors.items()}
    bytes_of = {side.format: {name: t.clone() for name, t in side.tensors.items()} for side in (plain, boxes)}
    marks = [back]

    def work() -> None:
        marks[:] = [back]
        for name, tensor in experts.tensors.items():
            tensor.copy_(given[name])
        (ttnn_moe.restore if back else ttnn_moe.arrange)(experts, marks.append)

    def check() -> None:
        want = bytes_of[NAME if marks[-1] else "mxfp4"]
        assert all(torch.equal(tensor, want[name]) for name, tensor in experts.tensors.items()), marks

    assert each_interrupt(work, check, in_place, mxfp4_boxes, arranging) > 50
    assert marks == [back, not back]


def test_a_mark_is_undone_with_the_bytes() -> None:
    experts, marks = random_mxfp4(2, 32, 32, Form(), "cpu"), list[bool]()
    before = {name: tensor.clone() for name, tensor in experts.tensors.items()}

    def mark(arranged: bool) -> None:
        marks.append(arranged)
        if arranged:
            raise Interrupt

    with pytest.raises(Interrupt):
        ttnn_moe.arrange(experts, mark)
    assert marks == [True, False]
    assert all(torch.equal(tensor, before[name]) for name, tensor in experts.tensors.items())


def test_no_weight_is_a_number_where_the_old_bytes_do_not_come_back(
    exchange: tuple[Experts, Callable[[int], int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, change, lines = exchange
    undo = in_place._undo

    def failing(*args: Any) -> None:
        run_to(3, partial(undo, *args), in_place, mxfp4_boxes)

    monkeypatch.setattr(in_place, "_undo", failing)
    with pytest.raises(ContractError, match=r"two orders; got Interrupt\(\) .*; to fix it: load them again"):
        change(lines - 1)
    for e in range(2):
        assert all(matrix.isnan().all() for matrix in experts.dequantize(e))


def test_a_tensor_that_is_torn_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_mxfp4(2, 32, 32, Form(), "cpu").tensors["down_blocks"]
    monkeypatch.setattr(mxfp4_boxes, "_BLOCK", 1)
    calls: list[Tensor] = []

    def failing(*args: Tensor) -> Tensor:
        calls.append(args[0])
        if len(calls) > 1:
            raise MemoryError("no room")
        return exchange(*args)

    exchange = mxfp4_boxes._exchange
    monkeypatch.setattr(mxfp4_boxes, "_exchange", failing)
    with pytest.raises(ContractError, match=r"two orders; got MemoryError\('no room'\) while .*load them again"):
        mxfp4_boxes.reorder_tensor("down_blocks", blocks, "halves", inverse=False)


def test_tensors_of_inference_mode() -> None:
    with torch.inference_mode():
        experts = random_mxfp4(1, 64, 32, Form(), "cpu")
    assert ttnn_moe.arrange(experts).format == NAME


def test_what_is_refused_and_what_does_not_gain() -> None:
    experts = random_mxfp4(1, 64, 32, Form(), "cpu")
    with pytest.raises(ContractError, match="another format; got mxfp4; expected mxfp4_boxes"):
        ttnn_moe.restore(experts)
    with pytest.raises(ContractError, match="got mxfp4_boxes; expected mxfp4"):
        ttnn_moe.arrange(arranging.arranged(experts))
    assert not arranging.gains(experts) and arranging.at_load(experts) is experts
