"""What a step of the engine costs on a CPU: it follows the tokens held, not what rows could hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qwen3_checkpoints import TINY
from ttnn_moe.cuda.attention.memory import Memory
from ttnn_moe.kv import torch_forms
from ttnn_moe.kv.step import Span
from ttnn_moe.models.qwen3 import Engine, Qwen3Moe, load_model, tt
from ttnn_moe.tenstorrent.emulator.dram import Tensor as Part

CONTEXT = 40_960


class Elements(TorchDispatchMode):
    """Counts elements that operators make, and those that attention reads."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, made = ([x for x in tree_leaves(tree) if isinstance(x, Tensor)] for tree in ((args, kwargs), out))
        own = {x.untyped_storage().data_ptr() for x in given}
        self.n += sum(x.numel() for x in made if x.untyped_storage().data_ptr() not in own)
        if "attention" in str(func):
            self.n += sum(x.numel() for x in given)
        return out


@pytest.fixture(scope="module")
def model() -> Qwen3Moe:
    made = load_model(TINY, backend="reference", device="cpu", dtype=torch.float32)
    made.config = dataclasses.replace(made.config, max_position_embeddings=CONTEXT)
    return made


def steps(engine: Engine, lengths: list[int], n: int = 4) -> list[int]:
    """Elements of each of n decode steps, with prompts of these lengths in the cache."""
    for length in lengths:
        engine.add([7] * length, max_new_tokens=n + 8, stop_ids=())
    while engine.scheduler.waiting or engine.scheduler.filling:
        engine.step()
    out = []
    for _ in range(n):
        with Elements() as elements:
            assert len(engine.step()) == len(lengths)
        out.append(elements.n)
    return out


@pytest.mark.parametrize("kv", ["paged", "bucketed"])
def test_a_step_costs_the_same_whatever_the_capacity(model: Qwen3Moe, kv: str) -> None:
    steps(Engine(model, 4, 1024, kv=kv), [20, 9])  # makes what a process keeps
    assert steps(Engine(model, 4, kv=kv), [20, 9]) == steps(Engine(model, 4, 1024, kv=kv), [20, 9])


@pytest.mark.parametrize("kv", ["paged", "bucketed"])
def test_a_long_sequence_costs_the_short_ones_nothing(model: Qwen3Moe, kv: str) -> None:
    def engine() -> Engine:
        return Engine(model, 16, 4096, kv=kv)

    short, long = [5] * 15, [1500]
    alone = [sum(each) for each in zip(*(steps(engine(), part) for part in (short, long)), strict=True)]
    together = steps(engine(), [*short, *long])
    assert all(have <= 1.1 * want for have, want in zip(together, alone, strict=True))


def test_a_piece_of_a_prompt_costs_what_its_own_sequence_holds(model: Qwen3Moe) -> None:
    def piece(others: list[int]) -> int:
        """Elements of the last step of a prompt of 300 tokens, whose first 256 are in the cache."""
        engine = Engine(model, 16, 4096, kv="bucketed")
        for length in others:
            engine.add([7] * length, max_new_tokens=99, stop_ids=())
        while engine.scheduler.waiting or engine.scheduler.filling:
            engine.step()
        decode = Elements()
        with decode:
            engine.step()
        engine.add([7] * 300, max_new_tokens=9, stop_ids=())
        engine.step()
        with Elements() as elements:
            engine.step()
        return elements.n - decode.n

    assert piece([1500]) <= 1.1 * piece([200])


def test_an_engine_of_the_whole_context_takes_no_memory_yet(model: Qwen3Moe) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    engine = Engine(model)
    assert engine.capacity == CONTEXT and engine.cache.k.nbytes > 1 << 30
    assert resident() - before < 64 << 20


def test_a_step_on_the_emulator_reads_and_writes_the_pages_held(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ttnn_moe._planner", reason="plans come from it")
    model, counts = tt.load_model(TINY, 1, "emulator"), []
    read, write = Part.read, Part.write
    monkeypatch.setattr(Part, "read", lambda part, *which: moved.append((part, out := read(part, *which))) or out)
    monkeypatch.setattr(Part, "write", lambda part, x, *which: moved.append((part, x)) or write(part, x, *which))
    for capacity in (64, model.config.max_position_embeddings):
        moved: list[tuple[Part, Tensor]] = []
        engine = Engine(model, 2, capacity)
        engine.add([7] * 20, max_new_tokens=3, stop_ids=())
        moved.clear()  # the cache is made
        while engine.busy:
            engine.step()
        own = {id(part) for kept in (engine.cache.k, engine.cache.v) for x in kept for part in x.parts}
        counts.append(sum(x.numel() for part, x in moved if id(part) in own))
    assert counts[0] == counts[1] > 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5000), max_size=40))
def test_sequences_attend_with_others_of_their_length(lengths: list[int]) -> None:
    groups = list(torch_forms.alike(lengths))
    assert sorted(place for places, _ in groups for place in places) == list(range(len(lengths)))
    for places, longest in groups:
        own = [lengths[place] for place in places]
        assert longest == max(own) and (longest <= torch_forms.MIN or min(own) >= longest // 2)
        assert places == sorted(places)
    assert len(groups) <= 14


def test_one_mask_is_kept() -> None:
    """All layers of a step take it; those of the steps before are gone."""
    keys = torch.randn(2, 1, 64, 8)
    memory, q = Memory(keys, keys, *torch.zeros(2, 1, dtype=torch.int64)), torch.randn(30, 1, 8)
    torch_forms._mask.cache_clear()
    for past in (1, 5, 9):
        for _ in range(3):
            torch_forms.prefill_attention(q, memory, [Span(0, 0, 30, past)])
    assert torch_forms._mask.cache_info()[:4] == (6, 3, 1, 1), "hits, misses, most, now"
