"""The KV cache in pages and the engine on the model's Triton kernels, against the dense cache and the torch forms.

Run by test_qwen3_kernels.py in a process of its own, as qwen3_decode_cases.py is.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

import qwen3_last_layer
from cuda_gpus import no_host_sync
from qwen3_attention_cases import case, paged, tiles_of
from qwen3_checkpoints import TINY, make, prompts
from qwen3_decode_cases import DEVICE, GPU, SIZES, VOCAB, both
from qwen3_kernel_cases import BOUND, draw, draws, error, tensor
from ttnn_moe import decoder
from ttnn_moe.cuda.attention import head_norm_rope
from ttnn_moe.cuda.attention import prefill as triton_prefill
from ttnn_moe.cuda.attention.memory import Memory
from ttnn_moe.cuda.linear import few_rows
from ttnn_moe.cuda.triton_launch import Tile
from ttnn_moe.kv import attention, torch_forms
from ttnn_moe.kv.cache import HeadNorms
from ttnn_moe.kv.step import Span
from ttnn_moe.models.qwen3 import Engine, Qwen3Moe, Tokenizer, generate, load_model
from ttnn_moe.models.qwen3.runtime import prefill_graphs
from ttnn_moe.models.qwen3.runtime.graphs import graphs_for
from ttnn_moe.models.qwen3.runtime.landing import Landing
from ttnn_moe.models.qwen3.runtime.prefill_graphs import PrefillGraphs
from ttnn_moe.models.qwen3.tiny import tasks
from ttnn_moe.sizes import power_of_2

seeds = draws(8 if GPU else 4)


@pytest.fixture(autouse=True)
def _suited(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    if not GPU:  # as in qwen3_decode_cases.py
        monkeypatch.setattr(few_rows, "tile", lambda T, N, K: (64, min(512, power_of_2(K)), 4))
        monkeypatch.setattr(head_norm_rope, "ROWS_ALONE", 16)


def gathered(memory: Memory) -> tuple[Tensor, Tensor]:
    """Keys and values in pages, dense."""
    assert memory.pages is not None
    return torch_forms.dense(memory, torch.arange(len(memory.pages), device=DEVICE), memory.capacity)


@seeds
@pytest.mark.parametrize("page", [16, 64])
def test_keys_and_values_go_to_their_pages_and_nowhere_else(seed: int, page: int, dtype: torch.dtype) -> None:
    rng = draw(seed)
    kv, group, D, T = rng.choice([1, 2]), rng.choice([1, 3, 8]), rng.choice([16, 64]), rng.choice([1, 3, 9])
    rows, capacity = T + 2, 2 * page
    qkv = tensor(T, kv * (group + 2), D, dtype=dtype)
    norms = HeadNorms(tensor(D, dtype=dtype), tensor(D, dtype=dtype), 1e-6)
    angle = torch.rand(T, 1, D // 2) * 6
    rope = (angle.cos().to(DEVICE, dtype), angle.sin().to(DEVICE, dtype))
    where = torch.tensor(rng.sample(range(rows), T), device=DEVICE)
    positions = torch.randint(capacity, (T,)).to(DEVICE)
    bound = torch.tensor(rng.randint(0, T), dtype=torch.int32, device=DEVICE) if rng.random() < 0.7 else None
    keys = tensor(rows, kv, capacity, D, dtype=dtype)
    dense = Memory(keys, keys * 2, where, positions, bound)
    pages = paged(dense, page)
    unused = torch.ones(len(pages.keys), dtype=torch.bool, device=DEVICE)
    unused[pages.pages.long()] = False
    want = attention.norm_rope_write(qkv, norms, rope, dense)
    got = attention.norm_rope_write(qkv, norms, rope, pages)
    assert got is not None and want is not None and torch.equal(got, want)
    for have, expected in zip(gathered(pages), (dense.keys, dense.values), strict=True):
        assert torch.equal(have, expected)
    assert bool(pages.keys[unused].isnan().all() and pages.values[unused].isnan().all())


@seeds
@pytest.mark.parametrize("page", [16, 64])
def test_decode_attention_in_pages(seed: int, page: int, dtype: torch.dtype) -> None:
    rng = draw(seed)
    T = rng.choice([1, 2, 5])
    c = case(rng, dtype, T, longest=None if GPU else 1100)
    capacity = -(-c.capacity // page) * page
    keys, values = (tensor(c.rows, c.kv, capacity, c.D, dtype=dtype) for _ in range(2))
    q = tensor(T, c.heads, c.D, dtype=dtype)
    where = torch.tensor(rng.sample(range(c.rows), T), device=DEVICE)
    last = torch.tensor([rng.choice([0, capacity - 1, rng.randrange(capacity)]) for _ in range(T)]).to(DEVICE)
    count = rng.randint(0, T)
    bound = torch.tensor(count, dtype=torch.int32, device=DEVICE) if rng.random() < 0.5 else None
    count = T if bound is None else count
    dense = Memory(keys, values, where, last, bound)
    pages = paged(dense, page)
    want = torch_forms.decode_attention(q.double(), Memory(keys.double(), values.double(), where, last), capacity)
    # what lies past a row's last key must not matter
    for t, row in enumerate(where.tolist()):
        n = int(last[t]) + 1
        for kept in (pages.keys, pages.values):
            for at in range(n // page, capacity // page):
                kept[pages.pages[row, at], :, max(0, n - at * page) :] = float("nan")
    torch_form = torch_forms.decode_attention(q.float(), widened(pages), capacity)
    got = attention.decode_attention(q, pages, capacity)
    if count:
        assert error(got[:count], want[:count]) <= BOUND[dtype]
        assert error(torch_form[:count], want[:count]) <= BOUND[dtype]
    assert not got[count:].any(), "rows past num_tokens are zero"
    if page == 64:  # the same products in the same order
        assert torch.equal(got, attention.decode_attention(q, dense, capacity))


def widened(memory: Memory) -> Memory:
    return Memory(
        memory.keys.float(), memory.values.float(), memory.rows, memory.positions, memory.num_tokens, memory.pages
    )


@seeds
def test_prefill_attention_in_pages(seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = draw(seed)
    page = rng.choice([16, 32, 64])
    if not GPU:
        tile = Tile({"BLOCK_M": rng.choice([16, 32]), "BLOCK_N": rng.choice([16, 32]), "STAGES": 2}, 4)
        monkeypatch.setattr(triton_prefill, "tile", lambda D, itemsize, warpgroups=True: tile)
    S = rng.randint(1, 3)
    c = case(rng, dtype, S, longest=None if GPU else 200)
    capacity = -(-c.capacity // page) * page
    keys, values = (tensor(c.rows, c.kv, capacity, c.D, dtype=dtype) for _ in range(2))
    spans, first = [], 0
    for row in rng.sample(range(c.rows), S):
        past = rng.choice([0, rng.randrange(capacity)])
        n = min(rng.randint(1, capacity - past), capacity if GPU else 40)
        spans.append(Span(row, first, n, past))
        first += n
    q = tensor(first, c.heads, c.D, dtype=dtype)
    nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    pages = paged(Memory(keys, values, nothing, nothing), page)
    wide = Memory(keys.double(), values.double(), nothing, nothing)
    want = torch_forms.prefill_attention(q.double(), wide, spans)
    if not GPU:
        assert error(torch_forms.prefill_attention(q.float(), widened(pages), spans), want) <= BOUND[dtype]
    got = triton_prefill.launch(q, pages, tiles_of(spans, pages.keys))
    assert error(got, want) <= BOUND[dtype]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Qwen3Moe, Qwen3Moe]:
    return both(make(tmp_path_factory.mktemp("model"), **SIZES))


def drain(engine: Engine, got: dict[int, list[int]]) -> None:
    while engine.busy:
        for token in engine.step():
            got.setdefault(token.sequence, []).append(token.token)


def test_requests_come_and_go_and_get_what_they_get_alone(pair: tuple[Qwen3Moe, Qwen3Moe], monkeypatch) -> None:
    """Greedy ones and ones that draw; prompts in pieces, in captured steps and not; too few rows and pages for all."""
    monkeypatch.setattr(prefill_graphs, "SMALLEST", 16)
    monkeypatch.setattr(prefill_graphs, "LARGEST", 16)
    ours, theirs = pair
    rng = random.Random(0)
    texts = prompts([5, 19, 2, 12, 30, 7, 1, 9] if GPU else [5, 19, 2, 12], VOCAB)
    new = 24 if GPU else 5
    drawn = {"temperature": 1.2, "top_k": 50, "top_p": 0.9}
    asked = []
    with decoder.plain():
        for i, text in enumerate(texts):
            options = {"max_new_tokens": rng.randint(2, new), "seed": i, **(drawn if i % 2 else {})}
            free = generate(theirs, [text], stop_ids=(), **options).tokens[0]
            options["stop_ids"] = (free[len(free) // 2],) if i % 3 == 2 else ()
            asked.append((text, options, generate(theirs, [text], **options).tokens[0]))
    page = 16
    memory = 5 * page * 2 * 2 * 2 * ours.config.head_dim * 4
    engine = Engine(ours, 3, 64, memory=memory, page=page, prefill_chunk=18, graphs=True)
    assert engine.cache.total == 5
    engine.capture()
    mixed = set()
    run = PrefillGraphs.run

    def spy(self: PrefillGraphs, ids: Tensor, *where) -> Tensor | None:
        logits = run(self, ids, *where)
        mixed.add((logits is not None, bool(where[2])))
        return logits

    monkeypatch.setattr(PrefillGraphs, "run", spy)
    got: dict[int, list[int]] = {}
    numbers = []
    for text, options, _ in asked:
        numbers.append(engine.add(text, **options))
        for token in engine.step():
            got.setdefault(token.sequence, []).append(token.token)
    drain(engine, got)
    assert [got[number] for number in numbers] == [want for _, _, want in asked]
    assert engine.load().free_pages == 5 and engine.load().free_rows == 3
    assert {(True, True), (False, True), (True, False)} <= mixed, "captured or too large; with rows that decode or not"


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("captured", [False, True])
def test_the_last_layer_runs_only_for_tokens_whose_logits_are_wanted(
    pair: tuple[Qwen3Moe, Qwen3Moe], captured: bool, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_graphs, "SMALLEST", 16)
    monkeypatch.setattr(prefill_graphs, "LARGEST", 16)
    for seed in range(6 if GPU else 1):
        cache = qwen3_last_layer.cache_of(pair[0], page)
        if captured:
            fixed = PrefillGraphs(pair[0], cache, graphs_for(pair[0].device), decoding=4)
            for kind in fixed.kinds:
                fixed.capture(*kind)
            qwen3_last_layer.check(*pair, cache, seed, fixed=fixed)
        else:
            qwen3_last_layer.check(*pair, cache, seed, qwen3_last_layer.any_tokens)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
class TestOnAGpu:
    def test_nothing_but_reading_tokens_waits(
        self, pair: tuple[Qwen3Moe, Qwen3Moe], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing else, not even where requests come and go; and no step is captured again."""
        read = Landing.tokens

        def wait(landing: Landing) -> list[int]:
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("default")
            tokens = read(landing)
            torch.cuda.set_sync_debug_mode(mode)
            return tokens

        monkeypatch.setattr(Landing, "tokens", wait)
        ours = pair[0]
        engine = Engine(ours, 4, 64, page=16)
        engine.capture()
        texts = prompts([5, 9, 12, 20], VOCAB)
        for warm in (True, False):
            captured = dict(engine.runner.steps._captured)
            with no_host_sync(not warm):
                for i, text in enumerate(texts):
                    engine.add(text, max_new_tokens=4 + 3 * i, stop_ids=(), temperature=i % 2 * 0.8, seed=i)
                    engine.step()
                while engine.busy:
                    engine.step()
            assert engine.runner.steps._captured == captured

    def test_same_requests_same_bits(self, pair: tuple[Qwen3Moe, Qwen3Moe]) -> None:
        texts, runs = prompts([4, 30, 9], VOCAB), []
        for _ in range(3):
            engine, got = Engine(pair[0], 2, 64, page=16), {}
            for text in texts:
                engine.add(text, max_new_tokens=20, stop_ids=())
            drain(engine, got)
            runs.append(engine.cache.k[:, 1:].clone())
        assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])

    def test_clients_in_threads_and_the_bundled_checkpoint(self) -> None:
        ours, theirs = both(TINY, torch.bfloat16)
        tokenizer = Tokenizer.from_directory(TINY)
        texts = [
            tokenizer.encode(
                tokenizer.apply_chat_template(e.messages, add_generation_prompt=True), add_special_tokens=False
            )
            for task in tasks.TASKS
            for e in tasks.examples(task, "heldout", 8)
        ]
        with decoder.plain():
            expected = generate(theirs, texts, max_new_tokens=48).tokens
        engine = Engine(ours, 16, 512)
        engine.capture()
        got: list[list[int]] = [[] for _ in texts]

        def client(i: int) -> None:
            got[i] = [token.token for token in engine.stream(engine.add(texts[i], max_new_tokens=48))]

        threads = [threading.Thread(target=client, args=(i,)) for i in range(len(texts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == expected


def test_memory_of_a_real_model_is_counted_in_pages(tmp_path: Path) -> None:
    model = load_model(make(tmp_path, **SIZES), backend="cuda", device=DEVICE, dtype=torch.float32)
    config = model.config
    one = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 16 * 4
    engine = Engine(model, 3, 64, memory=7 * one + one - 1, page=16)
    assert engine.cache.total == 7 and engine.fits(33) == 3 and engine.fits(64) == 1
    held = engine.cache.k[:, 1:].nbytes + engine.cache.v[:, 1:].nbytes
    assert held == 7 * one
