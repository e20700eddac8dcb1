"""The gate of benchmarks/tune_triton.py: a tile that writes nothing, or something else, has no time. No GPU."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import pytest
import torch

from benchmark_scripts import script
from ttnn_moe.cuda.moe.triton_launch import SortedRows
from ttnn_moe.errors import TtnnMoeError
from ttnn_moe.selfcheck.oracle import oracle

T, E, K, H, I = 6, 4, 2, 32, 16


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with kernels in torch, on the CPU; a time is 1."""
    tune = script("tune_triton")
    monkeypatch.setattr(tune, "DEVICE", "cpu")
    monkeypatch.setattr(tune, "measure", lambda calls, budget_ms=30: 1.0)
    monkeypatch.setattr(tune, "candidates", lambda m, product: iter([tune.ANY]))
    for name in ("sort", "gate_up", "down", "combine", "few"):
        monkeypatch.setattr(tune.launch, name, globals()[name])
    torch.manual_seed(0)
    return tune


def sort(routing, expert_map, experts, tiles, words) -> SortedRows:
    ids = routing.topk_ids.flatten().long()
    order = ids.argsort(stable=True)
    offsets = torch.cat([ids.new_zeros(1), ids.bincount(minlength=experts).cumsum(0)])
    begins = [[e, i] for e in range(experts) for i in range(int(offsets[e]), int(offsets[e + 1]), tiles.m)]
    at = torch.tensor(begins, dtype=torch.int32)
    return SortedRows(offsets, order // routing.K, order.argsort(), at, torch.tensor([len(at)]), len(at))


def by_expert(rows: SortedRows):
    for e, (first, last) in enumerate(zip(rows.offsets[:-1], rows.offsets[1:], strict=True)):
        yield e, slice(int(first), int(last))


def gate_up(hidden, experts, rows, act, m, tile) -> None:
    for e, own in by_expert(rows):
        gate, up = (hidden[rows.row_tokens[own]] @ experts.tensors["gate_up"][e].T).float().chunk(2, 1)
        act[own] = (torch.nn.functional.silu(gate) * up).bfloat16()


def down(act, experts, rows, out, m, tile) -> None:
    for e, own in by_expert(rows):
        out[own] = act[own] @ experts.tensors["down"][e].T


def combine(rows, inverse, weights, num_tokens, out, accumulate, block_h) -> None:
    out.copy_((rows[inverse.view(weights.shape)].float() * weights[..., None]).sum(1))


def few(call, act, tiles) -> None:
    call.out.copy_(oracle(call.hidden, call.routing.topk_ids, call.routing.topk_weights, call.experts))


def nothing(*args) -> None:
    pass


def without_last_row(right, where, *args) -> None:
    kept = args[where][-1].clone()
    right(*args)
    args[where][-1] = kept


@pytest.mark.parametrize("product", ["gate_up", "down"])
def test_products(tune: ModuleType, product: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    sets = [tune.experts_of(E, H, I)]
    found = partial(tune.products_of, T, 16, tune.Layer(T, E, K, H, I, 16), product, sets)
    assert [row["us"] for row in found()] == [1.0]
    monkeypatch.setattr(tune.launch, product, partial(without_last_row, globals()[product], 3))
    assert found() == []
    monkeypatch.setattr(tune.launch, product, nothing)
    assert found() == []
    assert capsys.readouterr().out.count("WRONG") == 2


def test_sort_and_combine(tune: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[bool] = []
    monkeypatch.setattr(
        tune.launch, "sort", lambda *args: filled.append(bool((args[-1] == -tune.POISON).all())) or sort(*args)
    )
    found = tune.sort_and_combine(T, E, K, H)
    assert [row["product"] for row in found] == ["sort"] * 4 + ["combine"] * 4
    assert filled[1:] == [True] * 4  # each is checked in poisoned memory
    monkeypatch.setattr(tune.launch, "combine", nothing)
    assert [row["product"] for row in tune.sort_and_combine(T, E, K, H)] == ["sort"] * 4


@pytest.mark.parametrize("name", ["offsets", "row_tokens", "inverse", "tiles", "num_tiles"])
def test_a_wrong_sort_is_named(tune: ModuleType, name: str) -> None:
    layer = tune.Layer(T, E, K, H, I, 16)
    found = sort(layer.routing, None, E, tune.SortedTiles(16, tune.ANY, tune.ANY), None)
    assert tune.sort_is_wrong(layer.routing, found, 16) is None
    getattr(found, name).flatten()[-1] += 1
    assert tune.sort_is_wrong(layer.routing, found, 16) == name


def test_few(tune: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "FEW_SPACE", ([4], [32], [1], [1]))
    sets = [tune.experts_of(E, H, I) for _ in range(2)]
    assert [row["product"] for row in tune.few(T, sets, E, K, H, I)] == ["few gate_up", "few down"]
    monkeypatch.setattr(tune.launch, "few", nothing)
    with pytest.raises(TtnnMoeError, match="the gate is shut"):
        tune.few(T, sets, E, K, H, I)
