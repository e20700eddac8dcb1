"""Steps of Qwen3 on emulated Tenstorrent chips: what a pass holds, pages, candidates of draws, replayed traces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qwen3_checkpoints import TINY, make, prompts
from tenstorrent_model_runs import encode
from ttnn_moe import RequestError
from ttnn_moe.models.qwen3 import Engine, Qwen3MoeConfig, generate, load_model, tt
from ttnn_moe.models.qwen3.model import sizes_of
from ttnn_moe.models.qwen3.runtime import runner
from ttnn_moe.models.qwen3.runtime.generate import engine_for
from ttnn_moe.models.qwen3.runtime.sampling import Sampling
from ttnn_moe.models.qwen3.tt import cache as caches
from ttnn_moe.models.qwen3.tt import decode, drawn
from ttnn_moe.models.qwen3.tt.cache import PagedCache
from ttnn_moe.models.qwen3.tt.layers import Logits
from ttnn_moe.models.qwen3.tt.passes import Packer
from ttnn_moe.tenstorrent.emulator import library as emulated_ttnn

SIZES = {"moe_intermediate_size": 64, "router_scale": 8.0}


def cache_without_a_device(monkeypatch: pytest.MonkeyPatch, rows: int, capacity: int, longest: int) -> PagedCache:
    monkeypatch.setattr(caches.tensors, "zeros", lambda *form: None)
    sizes = sizes_of(Qwen3MoeConfig.from_directory(TINY), torch.bfloat16)
    return PagedCache(sizes, None, rows, capacity, Packer(rows, longest, 191))  # type: ignore[arg-type]


def test_what_a_pass_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces begin at pages, are padded to powers of two, fill passes, and wait for what fills a page."""
    cache = cache_without_a_device(monkeypatch, 2, 200, 128)
    cache.open(0, 200)
    cache.open(1, 40)
    ids, passes = list(range(150)), cache.packer.passes
    assert passes(ids[:20], cache.prefill([(0, 20)], [])) == []
    (one,) = passes(ids[20:50], cache.prefill([(0, 30)], []))
    assert one.ids == ids[:32] and one.positions == list(range(32)) and not one.ends
    step = cache.prefill([(0, 100), (1, 5)], [99, 104])
    first, second = passes([*ids[50:], 1, 2, 3, 4, 5], step)
    assert first.ids == [*ids[32:], *[149] * 10] and first.ends == [117]
    assert first.positions == list(range(32, 160))
    assert [(piece.row, piece.first, piece.size, piece.past) for piece in first.pieces] == [(0, 0, 128, 32)]
    assert second.ids == [1, 2, 3, 4, *[5] * 28] and second.ends == [4]
    written, seen = cache.pages_of(first.pieces[0])
    assert written.tolist() == [[2, 3, 4, 5]] and seen[0, :7].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert cache.lengths[:2] == [150, 5] and cache.table([1]).tolist() == [[8, 9, 0, 0, 0, 0, 0]]
    # tokens that decode come first in the step, and in no pass
    cache.close(1)
    cache.open(1, 40)
    (one,) = passes([7, *ids[:35]], cache.prefill([(1, 35)], [34], [(0, 150)]))
    assert one.ids == [*ids[:35], *[34] * 29] and one.ends == [34]


def test_padding_has_no_position_past_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """RoPE's tables end there, and a chip would read behind them."""
    cache = cache_without_a_device(monkeypatch, 1, 192, 128)
    cache.open(0, 190)
    _, last = cache.packer.passes([1] * 190, cache.prefill([(0, 190)], [189]))
    assert last.positions == [*range(128, 191), 190]


def test_rows_give_their_pages_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_without_a_device(monkeypatch, 3, 64, 128)
    assert (cache.total, cache.free, cache.needed(33), cache.capacity) == (6, 6, 2, 64)
    cache.open(2, 64)
    cache.open(0, 10)
    assert cache.free == 3 and cache.room(0) == 32
    taken = cache.table([2])
    assert cache.packer.passes([1] * 5, cache.prefill([(2, 5)], [])) == []
    cache.close(2)
    assert cache.free == 5
    cache.open(1, 64)
    assert torch.equal(cache.table([1]), taken) and cache.lengths[1] == 0
    cache.open(2, 32)
    (one,) = cache.packer.passes([2] * 3, cache.prefill([(2, 3)], [2]))
    assert set(one.ids) == {2}, "what waited belonged to another sequence"
    with pytest.raises(RequestError, match="got 3 tokens and 30 more; expected at most 32"):
        cache.prefill([(2, 30)], [])
    with pytest.raises(RequestError, match="got 32 tokens and 1 more"):
        cache.decode([0], [32])


@pytest.mark.parametrize("D, vocabulary, columns", [(4, 323, 1 << 15), (1, 320, 128)])
def test_candidates_are_the_largest_logits(
    D: int, vocabulary: int, columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emulated: None
) -> None:
    """Of chips that share the vocabulary unevenly, and of rows that topk takes in chunks."""
    monkeypatch.setattr(drawn, "MOST_COLUMNS", columns)
    layers = {"num_hidden_layers": 1, "mlp_only_layers": [0]}
    model = tt.load_model(make(tmp_path, **SIZES, **layers, vocab_size=vocabulary), D)
    cache = model.new_cache(3, 32)
    for row in range(3):
        cache.open(row, 32)
    samplings, temperatures = [Sampling(0.7), Sampling(), Sampling(1.5, 0, 0.9)], torch.tensor([0.7, 1.0, 1.5]).double()
    words = torch.tensor(sum(prompts([5, 3, 9], vocabulary), []))
    step = cache.prefill([(0, 5), (1, 3), (2, 9)], [4, 7, 16])
    after = cache.decode([0, 1, 2], [5, 3, 9])
    for ids, one in ((words, step), (words[:3], after)):
        found = model.candidates(ids, cache, one, samplings)
        logits = found.whole()
        assert torch.equal(logits.gather(1, found.tokens[:, :32]).float(), found.values[:, :32])
        assert torch.equal(found.values[:, :32], logits.float().topk(32).values)
        assert torch.equal(found.first, logits.argmax(1))
        want = ((logits.double() - logits.double().amax(1, keepdim=True)) / temperatures[:, None]).exp().sum(1)
        assert torch.allclose(found.mass[[0, 2]], want[[0, 2]], rtol=1e-5)
    few = model.candidates(words[:3], cache, after, [Sampling(1.0, 20)] * 3)
    assert few.mass.isnan().all() and torch.equal(few.values, found.values)
    assert torch.equal(few.whole(), model(words[:3], cache, after))


def test_of_equal_candidates_the_first_token_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a chip and among chips, in whichever order topk names them."""
    monkeypatch.setattr(drawn.tensors, "parts_to_torch", lambda tensor, device: list(tensor))
    parts = torch.zeros(2, 1, 1, 40)
    parts[0, ..., [5, 9]] = parts[1, ..., [0, 3]] = 2.0
    values, places = parts.flip(-1).sort(dim=-1, descending=True, stable=True)
    largest, at = parts.max(-1)
    made = Logits(parts, largest, at, values[..., : drawn.CANDIDATES], 39 - places[..., : drawn.CANDIDATES])
    found = drawn.Fetcher(SimpleNamespace(D=2), 80).candidates(made, 1, ())  # type: ignore[arg-type]
    tokens = found.tokens[0].tolist()
    assert tokens[:4] == [5, 9, 40, 43] and found.values[0, :5].tolist() == [2.0] * 4 + [0.0]
    assert tokens[4:] == sorted(tokens[4:])


def test_drawn_tokens_are_those_of_the_whole_logits(monkeypatch: pytest.MonkeyPatch, emulated: None) -> None:
    """Requests of several kinds in one batch; no logits come to the host where the candidates decide."""
    ids = encode(["Copy: AB12", "What is 38+990?", "Sort: VBYIJAQ"])
    model = tt.load_model(TINY)
    kinds = ({"temperature": 0.9, "top_k": 20}, {"temperature": 0.9, "top_p": 0.9}, {})

    def answers() -> list[list[int]]:
        engine, got = Engine(model, 3, 64), [[], [], []]
        for one, kind in zip(ids, kinds, strict=True):
            engine.add(one, max_new_tokens=4, seed=3, **kind)
        while engine.busy:
            for token in engine.step():
                got[token.sequence].append(token.token)
        return got

    whole: list[int] = []
    fetch = drawn.Fetcher.whole
    monkeypatch.setattr(drawn.Fetcher, "whole", lambda *args: [fetch(*args), whole.append(1)][0])
    found = answers()
    assert all(found) and not whole
    monkeypatch.setattr(runner, "PicksTokens", type(None))
    assert answers() == found and whole


DRAWN = {"temperature": 0.8, "top_k": 20, "seed": 1}


class Traces:
    """What ttnn does with traces, on the emulator: a capture runs nothing that counts, a replay runs it again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.captured: list[Callable[[], None]] = []
        self.replays, self.released, self._recording = 0, 0, False
        step = tt.Qwen3MoeTT._step

        def copied(made: object, out: object) -> None:
            for name in ("parts", "largest", "at"):
                emulated_ttnn.copy(getattr(made, name), getattr(out, name))

        def recorded(model: tt.Qwen3MoeTT, *args: object) -> object:
            out = step(model, *args)
            if self._recording:
                self.captured.append(lambda: copied(step(model, *args), out))
            return out

        monkeypatch.setattr(tt.Qwen3MoeTT, "_step", recorded)
        for name in ("begin_trace_capture", "end_trace_capture", "execute_trace", "release_trace"):
            monkeypatch.setattr(emulated_ttnn, name, getattr(self, name), raising=False)

    def begin_trace_capture(self, device: object, *, cq_id: int) -> int:
        self._recording = True
        return len(self.captured)

    def end_trace_capture(self, device: object, trace: int, *, cq_id: int) -> None:
        self._recording = False

    def execute_trace(self, device: object, trace: int, *, cq_id: int, blocking: bool) -> None:
        self.replays += 1
        self.captured[trace]()

    def release_trace(self, device: object, trace: int) -> None:
        self.released += 1


def test_replayed_steps(monkeypatch: pytest.MonkeyPatch, emulated: None) -> None:
    """Traces read what the buffers hold; one for each number of rows; released before anything is allocated."""
    traces = Traces(monkeypatch)
    ids = encode(["Copy: AB12", "Copy: K7M2P4Q", "Copy: Q"])
    model = tt.load_model(TINY, traced=True)
    want = generate(load_model(TINY, "reference"), ids, max_new_tokens=9)
    engine = engine_for(model, ids, 9)
    assert generate(model, ids, max_new_tokens=9, engine=engine).tokens == want.tokens
    assert len(traces.captured) == 3 and traces.replays >= 4  # 4, 2 and 1 rows
    # the first buffers of a number of rows are allocated after the traces of the numbers before
    assert traces.released == 2
    before = traces.replays
    assert generate(model, ids, max_new_tokens=9, engine=engine).tokens == want.tokens
    assert traces.replays > before
    # a trace holds no draws: their programs are allocated behind the first step's capture, which is released
    released = traces.released
    drawn_tokens = generate(model, ids, max_new_tokens=9, engine=engine, **DRAWN).tokens
    assert traces.released > released
    before = traces.replays
    assert generate(model, ids, max_new_tokens=9, engine=engine, **DRAWN).tokens == drawn_tokens
    assert traces.replays > before
    # a prompt alone is another pass: its programs and buffers are allocated now
    held = len(traces.captured)
    assert generate(model, ids[:1], max_new_tokens=9, engine=engine).tokens == want.tokens[:1]
    assert traces.released == held < len(traces.captured)
    model.new_cache(1, 32)
    assert traces.released == len(traces.captured)


def test_traces_of_other_caches_and_models_are_released_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch, emulated: None
) -> None:
    traces = Traces(monkeypatch)
    model = tt.load_model(TINY, traced=True)
    one, other = (model.new_cache(1, capacity) for capacity in (64, 128))

    def prefill(cache: PagedCache) -> None:
        cache.open(0, 64)
        model(torch.full((3,), 5), cache, cache.prefill([(0, 3)], [2]))

    def decode_of(cache: PagedCache, position: int) -> None:
        model(torch.tensor([5]), cache, cache.decode([0], [position]))

    prefill(other)
    decode_of(other, 3)
    assert (len(traces.captured), traces.released) == (1, 0)
    prefill(one)  # its page tables have another shape: other programs
    assert traces.released == 1
    decode_of(other, 4)
    assert (len(traces.captured), traces.released) == (2, 1)
    decode_of(one, 3)  # allocates its inputs
    assert (len(traces.captured), traces.released) == (3, 2)
    decode_of(one, 4)
    assert (len(traces.captured), traces.replays) == (3, 1)
    tt.load_model(TINY, traced=True)
    assert traces.released == 3


@pytest.mark.parametrize("again", [False, True], ids=["", "and so does its release"])
@pytest.mark.parametrize(("fails", "error"), [("run", KeyboardInterrupt), ("run", RequestError), ("end", RequestError)])
def test_a_trace_whose_capture_fails_is_released(
    fails: str, error: type[BaseException], again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def end(handle: object, trace: int, cq_id: int) -> None:
        calls.append(("end", trace))
        if fails == "end":
            raise RuntimeError("no room")

    def release(handle: object, trace: int) -> None:
        calls.append(("release", trace))
        if again:
            raise RuntimeError("no such trace")

    def step(*args: object) -> Any:
        raise KeyboardInterrupt if error is KeyboardInterrupt else RuntimeError("no room")

    library = SimpleNamespace(begin_trace_capture=lambda *_, **__: 7, end_trace_capture=end, release_trace=release)
    monkeypatch.setattr(decode, "library", lambda: library)
    device: Any = SimpleNamespace(handle=None, closed=False, cache={})
    made = decode.Decoder(device, step, True)
    with pytest.raises(error, match="got no room" if error is RequestError else None):
        made._capture(step if fails == "run" else lambda: None)  # type: ignore[arg-type, return-value]
    assert calls == [("end", 7), ("release", 7)]


@pytest.mark.parametrize("closed", [False, True])
def test_traces_are_released_with_their_cache(closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed device has none any more."""
    released: list[int] = []
    library = SimpleNamespace(release_trace=lambda handle, trace: released.append(trace))
    monkeypatch.setattr(decode, "library", lambda: library)
    device: Any = SimpleNamespace(handle=None, closed=closed, cache={})
    made = decode.Decoder(device, lambda *args: None, True)  # type: ignore[arg-type, return-value]
    made._traces.update({1: (7, None), 2: (8, None)})  # type: ignore[dict-item]
    del made
    assert released == ([] if closed else [7, 8])
