"""Qwen3 with every tensor on (emulated) Tenstorrent chips: every kind of model, pieces of prompts, requests, refusals.

The bundled checkpoint's answers, on devices and simulators too: tenstorrent_model_runs.py.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from own_registry import own_registry
from qwen3_checkpoints import TINY, make, prompts
from tenstorrent_model_runs import encode, least_correlation
from ttnn_moe import BackendUnavailable, ContractError, RequestError, tenstorrent
from ttnn_moe.errors import CheckpointError
from ttnn_moe.kv import formats
from ttnn_moe.models.qwen3 import PRESETS, Engine, Qwen3MoeConfig, bench, demo, generate, load_model, tt
from ttnn_moe.models.qwen3.model import sizes_of
from ttnn_moe.models.qwen3.runtime import runner
from ttnn_moe.models.qwen3.runtime.generate import engine_for
from ttnn_moe.models.qwen3.runtime.sampling import Sampling
from ttnn_moe.models.qwen3.tt import cache as caches
from ttnn_moe.models.qwen3.tt import drawn
from ttnn_moe.models.qwen3.tt import model as models
from ttnn_moe.models.qwen3.tt.cache import EightBitCache, PagedCache
from ttnn_moe.models.qwen3.tt.passes import Packer
from ttnn_moe.models.qwen3.tt.profile import Profile, prepare
from ttnn_moe.models.qwen3.tt.request import Options, check, chips_of, splits
from ttnn_moe.models.qwen3.tt.room import room_for
from ttnn_moe.models.qwen3.tt.sizes import check_mesh
from ttnn_moe.tenstorrent.emulator import library as emulated_ttnn
from ttnn_moe.tenstorrent.memory import PAGE
from ttnn_moe.tenstorrent.runtime import DEVICE

EMULATOR = "emulator"
# whole tiles; a large router, so that rounding swaps experts that matter little
SIZES = {"moe_intermediate_size": 64, "router_scale": 8.0}
KINDS = {
    "untied": (1, {}),
    "tied": (1, {"tie_word_embeddings": True}),
    "a head that 4 chips cannot share evenly": (4, {"vocab_size": 323}),
    "dense and sparse layers": (2, {"mlp_only_layers": [1]}),
    "all dense": (1, {"mlp_only_layers": [0, 1]}),
    "weights not normalised": (1, {"norm_topk_prob": False}),
    "biases": (1, {"attention_bias": True}),
    "biases, key heads on two chips each": (4, {"attention_bias": True}),
    "biases, query heads on two chips each": (8, {"attention_bias": True}),
    "query heads that read two key heads, on each chip": (2, {"num_attention_heads": 6, "num_key_value_heads": 3}),
    "two query heads of three that read one key head": (
        6,
        {"num_attention_heads": 12, "num_key_value_heads": 4, "num_experts": 6, "num_experts_per_tok": 2},
    ),
    "one kv head": (1, {"num_key_value_heads": 1}),
    "no gqa, wide heads": (1, {"num_key_value_heads": 4, "head_dim": 64}),
    "an expert a chip, every expert": (8, {"num_experts_per_tok": 8}),
    "more experts than topk takes at least": (1, {"num_experts": 72}),
}


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No device is open before or after."""
    if importlib.util.find_spec("ttnn_moe._planner") is None:
        pytest.skip("ttnn_moe._planner is not built: plans come from it")
    monkeypatch.setenv(DEVICE, EMULATOR)
    found = tenstorrent.device.probe()
    if not found.available:
        pytest.skip(found.reason)
    tenstorrent.close_device()
    with own_registry():
        yield
    tenstorrent.close_device()


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_of_model_against_the_reference(kind: str, tmp_path: Path, emulated: None) -> None:
    D, changes = KINDS[kind]
    directory = make(tmp_path, num_hidden_layers=2, **SIZES, **changes)
    model, reference = tt.load_model(directory, D), load_model(directory, "reference", dtype=torch.float32)
    texts = prompts([35, 1, 32], model.config.vocab_size)
    cache = model.new_cache(3, 40)
    for row in range(3):
        cache.open(row, 38)
    got = model(torch.tensor(sum(texts, [])), cache, cache.prefill([(0, 35), (1, 1), (2, 32)], [34, 35, 67]))
    for forced in prompts([3, 3], model.config.vocab_size, seed=2):
        want = torch.stack([reference(torch.tensor([text]))[0, -1] for text in texts])
        assert least_correlation(got, want) > 0.99
        texts = [[*text, token] for text, token in zip(texts, forced, strict=True)]
        got = model(torch.tensor(forced), cache, cache.decode(range(3), [len(text) - 1 for text in texts]))


def test_weights_and_keys_of_8_bits_and_split_experts_against_the_reference(tmp_path: Path, emulated: None) -> None:
    directory = make(tmp_path, **{**SIZES, "mlp_only_layers": [1], "moe_intermediate_size": 64})
    eight = "bfloat8_b,attention=bfloat8_b,dense=bfloat8_b,head=bfloat8_b"
    model = tt.load_model(directory, 2, weights=eight, split=True)
    reference = load_model(directory, "reference", dtype=torch.float32)
    texts = prompts([5, 1], model.config.vocab_size)
    cache = model.new_cache(2, 32, kv="bfloat8_b")
    assert {part.dtype for part in cache.k + cache.v} == {"bfloat8_b"}
    for row in range(2):
        cache.open(row, 8)
    got = model(torch.tensor(sum(texts, [])), cache, cache.prefill([(0, 5), (1, 1)], [4, 5]))
    for new in (3, 4):
        want = torch.stack([reference(torch.tensor([text]))[0, -1] for text in texts])
        assert least_correlation(got, want) > 0.99
        texts = [[*text, new] for text in texts]
        got = model(torch.tensor([new, new]), cache, cache.decode([0, 1], [len(text) - 1 for text in texts]))


def test_each_matrix_has_the_format_that_names_it(tmp_path: Path, emulated: None) -> None:
    directory = make(tmp_path, **{**SIZES, "mlp_only_layers": [1]})
    text = "bfloat4_b,bfloat8_b,attention=bfloat8_b,attention@1=bfloat16,dense=bfloat4_b,experts@2=bfloat8_b"
    model = tt.load_model(directory, weights=text)
    first, second, third = model._layers
    assert [str(layer.mlp.experts.formats) for layer in (first, third)] == ["bfloat4_b,bfloat8_b", "bfloat8_b"]
    assert [first.mlp.experts.gate.dtype, first.mlp.experts.down.dtype] == ["bfloat4_b", "bfloat8_b"]
    assert [layer.qkv.weight.dtype for layer in model._layers] == ["bfloat8_b", "bfloat16", "bfloat8_b"]
    assert second.mlp.up.weight.dtype == "bfloat4_b" and third.out.weight.dtype == "bfloat8_b"
    assert first.mlp.linear.weight.dtype == first.attention_norm.dtype == "bfloat16"


@pytest.mark.parametrize("chunk, longest", [(7, 2048), (200, 64)])
def test_prompts_in_pieces(chunk: int, longest: int, monkeypatch: pytest.MonkeyPatch, emulated: None) -> None:
    """As generate cuts them, or as passes do; an engine serves again."""
    monkeypatch.setattr(models, "LONGEST", longest)
    ids = encode(["Copy: AB12", "Sort: " + "VBYIJAQ" * 12, "What is 38+990?"])
    model = tt.load_model(TINY)
    engine = engine_for(model, ids, 5)
    want = generate(load_model(TINY, "reference"), ids, max_new_tokens=5)
    for _ in range(2):
        assert generate(model, ids, max_new_tokens=5, prefill_chunk=chunk, engine=engine).tokens == want.tokens


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


def test_requests_that_come_at_different_times(emulated: None) -> None:
    """A prompt that runs beside a decode step, a row that another request had: each gets what it gets alone."""
    model = tt.load_model(TINY)
    ids = encode(["Copy: AB12", "Reverse: of this a whole page is filled, and more", "What is 38+990?"])
    alone = [generate(model, [prompt], max_new_tokens=6).tokens[0] for prompt in ids]
    engine = Engine(model, 2, 128, memory=6 * PagedCache.page_bytes(model.cache_sizes))
    got: dict[int, list[int]] = {}
    numbers, arrivals = [engine.add(ids[0], max_new_tokens=6)], {2: ids[1], 3: ids[2]}
    for step in range(30):
        for token in engine.step():
            got.setdefault(token.sequence, []).append(token.token)
        if step in arrivals:
            numbers.append(engine.add(arrivals[step], max_new_tokens=6))
    assert not engine.busy and [got[number] for number in numbers] == alone
    assert engine.load().free_pages == engine.cache.total == 6


def test_32_sequences_that_end_at_different_times(emulated: None) -> None:
    """Rows leave, others move up; sampled sequences repeat."""
    words = ["A1", "ZZ9", "Q", "K7M2P4", "08"]
    ids = encode([f"Copy: {words[i % 5]}{i}" for i in range(32)])
    model = tt.load_model(TINY)
    want = generate(load_model(TINY, "reference"), ids, max_new_tokens=6)
    got = generate(model, ids, max_new_tokens=6)
    assert got.tokens == want.tokens and len({len(tokens) for tokens in got.tokens}) > 2
    sampled = [generate(model, ids[:3], max_new_tokens=3, temperature=0.8, seed=3).tokens for _ in range(2)]
    assert sampled[0] == sampled[1]


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


def test_the_demo(capsys: pytest.CaptureFixture[str], emulated: None) -> None:
    args = ["--backend", "tenstorrent", "--device", EMULATOR, "--mesh", "1x2", "--prompt", "Copy: 62DEADB9"]
    assert demo.main(args) == 0
    said = capsys.readouterr().out
    assert "62DEADB9" in said and "tenstorrent on emulated blackhole 1x2" in said


def test_the_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str], emulated: None) -> None:
    sizes = ["--config", str(TINY), "--batch", "2", "--prompt-len", "20", "--new-tokens", "3"]
    args = [*sizes, "--backend", "tenstorrent", "--device", EMULATOR, "--mesh", "1x2"]
    assert bench.main([*args, "--json", str(tmp_path / "out.json")]) == 0
    said = " ".join(capsys.readouterr().out.split())  # the title may be broken into lines
    assert "tenstorrent on emulated blackhole 1x2, bfloat16" in said
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["backend"] == "tenstorrent" and figures["tokens_per_s"] > 0
    for more, words in (
        (["--random-weights"], "not made on a Tenstorrent device"),
        (["--mesh", "8"], "1xD, as in 1x8"),
        (["--batch", "33"], "at most 32"),
        (["--dtype", "float32"], "in bfloat16"),
    ):
        assert bench.main([*args, *more]) == 2
        assert words in capsys.readouterr().err
    assert bench.main([*sizes, "--mesh", "1x2", "--backend", "reference"]) == 2
    assert "is of backend tenstorrent" in capsys.readouterr().err


REFUSED = {
    "mesh of another form": (["--mesh", "2x4"], "got '2x4'; expected 1xD"),
    "no mesh": (["--mesh", "1x0"], "got '1x0'"),
    "experts that cannot be shared": (["--mesh", "1x3"], "cannot be shared evenly"),
    "another device": (["--device", "cuda"], "no device cuda of backend tenstorrent"),
    "another board": (["--device", "emulator:n900"], "no such chip to emulate"),
    "another dtype": (["--dtype", "float16"], "--dtype float16"),
    "a KV cache of a GPU": (["--kv", "bucketed"], "got kv=bucketed; expected one of ['paged', 'bfloat8_b']"),
    "a trace on the emulator": (["--trace"], "cannot be traced"),
    "a profile on the emulator": (["--profile"], "cannot be timed"),
    "a trace and a profile": (["--trace", "--profile"], "not both"),
    "too many prompts": (["--prompt", "x"] * 33, "got 33; expected at most 32"),
    "prompt over the context": (["--prompt", "x1y2" * 2000], "too long for the context"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_the_demo_refuses(name: str, capsys: pytest.CaptureFixture[str], emulated: None) -> None:
    args, words = REFUSED[name]
    assert demo.main(["--backend", "tenstorrent", *args]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.out == ""


def test_what_is_of_no_other_backend(capsys: pytest.CaptureFixture[str]) -> None:
    given = (["--mesh", "1x1"], ["--trace"], ["--profile"], ["--weights", "bfloat8_b"], ["--experts", "split"])
    for args in (*given, ["--kv", "bfloat8_b"]):
        assert demo.main(["--backend", "reference", *args]) == 2
        assert f"{args[0]} is of backend tenstorrent" in capsys.readouterr().err


def test_meshes() -> None:
    assert [chips_of(mesh) for mesh in (None, "1x1", "1x8", "1x32")] == [1, 1, 8, 32]
    for mesh in ("", "8", "1x", "1x08", "x8", "1x8 ", "1x8x1", "8x1", "-1x8"):
        with pytest.raises(RequestError, match="wrong form"):
            chips_of(mesh)


def test_whether_experts_are_split() -> None:
    config = PRESETS["qwen3-30b-a3b"]
    found = {
        (words, rows): splits(config, rows, Options("1x8", experts=words))
        for words in (None, "placed", "split", "auto")
        for rows in (1, 32)
    }
    assert {key for key, split in found.items() if split} == {("split", 1), ("split", 32), ("auto", 1)}
    for words, mesh in (("both", "1x8"), ("split", "1x16")):
        with pytest.raises(RequestError, match="--experts cannot be had"):
            splits(config, 1, Options(mesh, experts=words))


def test_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICE, raising=False)
    monkeypatch.setattr(
        tenstorrent.device, "probe", lambda device: tenstorrent.device.Probe(False, "no card", "buy one")
    )
    with pytest.raises(BackendUnavailable, match="no card; to fix it: buy one"):
        check(Qwen3MoeConfig.from_directory(TINY), 1, Options())


def test_sizes_that_are_no_tiles_are_refused(tmp_path: Path, emulated: None) -> None:
    with pytest.raises(CheckpointError, match="moe_intermediate_size=48, head_dim=96"):
        tt.load_model(make(tmp_path, head_dim=96))


def test_engines_too_large_and_too_small(emulated: None) -> None:
    model = tt.load_model(TINY)
    with pytest.raises(RequestError, match="got 33; expected at most 32"):
        Engine(model, 33, 8)
    with pytest.raises(RequestError, match="too long for a row"):
        generate(model, [[1] * 20], max_new_tokens=20, engine=Engine(model, 1, 32))
    with pytest.raises(RequestError, match="no step of this model can be captured"):
        Engine(model, 1, 8, graphs=True)
    with pytest.raises(RequestError, match="got 64; expected 32"):
        Engine(model, 1, 8, page=64)
    with pytest.raises(RequestError, match="the memory holds no page"):
        Engine(model, 1, 8, memory=100)
    cache = model.new_cache(1, 4)
    cache.open(0, 4)
    with pytest.raises(RequestError, match="got 0 tokens and 33 more; expected at most 32"):
        cache.prefill([(0, 33)], [32])
    with pytest.raises(BackendUnavailable, match="another mesh is open"):
        tt.load_model(TINY, 2)


def test_memory_of_a_cache() -> None:
    config = Qwen3MoeConfig.from_directory(TINY)
    per_token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    sizes = sizes_of(config, torch.bfloat16)
    assert PagedCache.page_bytes(sizes) == PAGE * per_token == formats.bytes_for("paged", None, sizes, 1, 64) / 2
    eight = PAGE * per_token * 17 // 32
    assert EightBitCache.page_bytes(sizes) == eight == formats.bytes_for("bfloat8_b", None, sizes, 1, 64) / 2
    with pytest.raises(RequestError, match="kv='bfloat8_b' on cpu; .*; to fix it: leave kv out"):
        formats.new_cache("bfloat8_b", None, sizes, 1, 32)
    with pytest.raises(RequestError, match="the KV cache does not fit the chips' memory; got 9 MiB"):
        with room_for("the KV cache", "9 MiB", "less"):
            raise RuntimeError("Out of Memory: Not enough space to allocate")
    with pytest.raises(RuntimeError, match="something else"), room_for("it", "1", "less"):
        raise RuntimeError("something else")


def test_a_profile_adds_up() -> None:
    profile = Profile()
    for name, seconds in (("a", 0.001), ("b", 0.5), ("a", 0.002)):
        profile.add(name, seconds)
    assert profile.rows() == {"b (1)": "500.0 ms", "a (2)": "3.0 ms"}


def test_hooks_are_asked_for_before_ttnn_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import sys
    from types import SimpleNamespace

    monkeypatch.delenv(DEVICE, raising=False)
    monkeypatch.setenv("TTNN_CONFIG_OVERRIDES", '{"enable_logging": true}')
    monkeypatch.delitem(sys.modules, "ttnn", raising=False)
    prepare(None)
    assert os.environ["TTNN_CONFIG_OVERRIDES"] == '{"enable_logging": true, "enable_fast_runtime_mode": false}'
    monkeypatch.setitem(sys.modules, "ttnn", SimpleNamespace(CONFIG=SimpleNamespace(enable_fast_runtime_mode=True)))
    with pytest.raises(RequestError, match="without its hooks"):
        prepare(None)


def test_contract_errors_come_before_a_device_is_opened(emulated: None) -> None:
    with pytest.raises(ContractError, match="D=5"):
        tt.load_model(TINY, 5)
    config = dataclasses.replace(Qwen3MoeConfig.from_directory(TINY), num_attention_heads=12)
    said = "got 12 query heads on 1x8; expected a D that divides the query heads, .*; to fix it: --mesh 1x6"
    for asked in (lambda: check_mesh(config, 8), lambda: check(config, 1, Options(mesh="1x8"))):
        with pytest.raises(ContractError, match=said):
            asked()
    assert tenstorrent.device.current() is None
