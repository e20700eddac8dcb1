"""Whole generations on the model's Triton kernels, in steps of fixed size, against the torch forms on the CPU.

Run by test_qwen3_kernels.py in a process of its own: with TRITON_INTERPRET=1 on the CPU, where a step's operators run
again instead of being replayed; or on a GPU where one is, as CUDA graphs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_gpus import no_host_sync
from qwen3_checkpoints import CONFIGS, TINY, make, prompts, relative_error
from ttnn_moe import decoder
from ttnn_moe.cuda.attention import head_norm_rope
from ttnn_moe.cuda.linear import few_rows
from ttnn_moe.models.qwen3 import Engine, Qwen3Moe, Tokenizer, generate, load_model, stream
from ttnn_moe.models.qwen3.runtime import prefill_graphs
from ttnn_moe.models.qwen3.runtime.captured import CapturedRunner
from ttnn_moe.models.qwen3.runtime.prefill_graphs import PrefillGraphs
from ttnn_moe.models.qwen3.runtime.requests import Request, make_requests
from ttnn_moe.models.qwen3.runtime.runner import Pending, Prompts
from ttnn_moe.models.qwen3.runtime.scheduler import Chunk
from ttnn_moe.models.qwen3.tiny import tasks
from ttnn_moe.sizes import power_of_2

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# the interpreter is slow
SIZES = (
    {"num_hidden_layers": 2}
    if GPU
    else {
        "num_hidden_layers": 2,
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 32,
        "head_dim": 16,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
)
VOCAB = SIZES.get("vocab_size", 320)
NAMES = list(CONFIGS) if GPU else ["untied", "attention-bias"]
FP32 = 1e-4


def both(directory: Path, dtype: torch.dtype = torch.float32) -> tuple[Qwen3Moe, Qwen3Moe]:
    """The model on its kernels, and in torch on the CPU."""
    return (
        load_model(directory, backend="cuda", device=DEVICE, dtype=dtype),
        load_model(directory, backend="reference", device="cpu", dtype=dtype),
    )


@pytest.fixture(autouse=True)
def _suited(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    if not GPU:  # what the interpreter takes is time for a program; qwen3_kernel_cases.py has the tiles themselves
        monkeypatch.setattr(few_rows, "tile", lambda T, N, K: (64, min(512, power_of_2(K)), 4))
        monkeypatch.setattr(head_norm_rope, "ROWS_ALONE", 16)


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_every_step(name: str, tmp_path: Path) -> None:
    ours, theirs = both(make(tmp_path, **{**SIZES, **CONFIGS[name]}))
    texts = prompts([1, 17, 5], VOCAB)
    requests = make_requests(ours.config, texts, max_new_tokens=8)
    runner = CapturedRunner(ours, ours.new_cache(4, 32), Chunk(10, 10))
    for row, request in enumerate(requests):
        request.row = row
        runner.cache.open(row, request.tokens)
    made = {request: list(text) for request, text in zip(requests, texts, strict=True)}
    seen: list[torch.Tensor] = []
    ours.register_forward_hook(lambda model, args, logits: seen.append(logits))

    def check(pending: Pending, of: list[Request], logits: torch.Tensor) -> None:
        with decoder.plain():
            expected = torch.stack([theirs(torch.tensor([made[request]]))[0, -1] for request in of])
        assert relative_error(logits.cpu(), expected) <= FP32
        tokens = pending.tokens()
        assert tokens == expected.argmax(-1).tolist()
        for request, token in zip(of, tokens, strict=True):
            made[request].append(token)
            request.launched += 1

    ids = torch.tensor(sum(texts, []))
    one, others = requests[:1], requests[1:]
    with torch.inference_mode():
        # two chunks: the second prompt is cut, and the first request decodes beside its rest
        check(runner.prefill(Prompts(ids[:10], [(0, 1), (1, 9)], [0]), [], one), one, seen[-1])
        check(runner.prefill(Prompts(ids[10:], [(1, 8), (2, 5)], [7, 12]), one, others), requests, seen[-1])
        for _ in range(5 if GPU else 3):
            check(runner.decode(requests), requests, runner.steps.capture(4).out[:3])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Qwen3Moe, Qwen3Moe]:
    return both(make(tmp_path_factory.mktemp("model"), **SIZES))


def test_sequences_end_one_by_one_and_draw_their_own_tokens(pair: tuple[Qwen3Moe, Qwen3Moe]) -> None:
    """Buckets 8 to 1; each captured when the batch has shrunk to it."""
    ours, theirs = pair
    texts = prompts([5, 9, 2, 12, 7], VOCAB)
    drawn = {"temperature": 1.2, "top_k": 50, "top_p": 0.9, "seed": 3}
    new = 24 if GPU else 8
    with decoder.plain():
        free = generate(theirs, texts, max_new_tokens=new, stop_ids=(), **drawn).tokens
        stops = [free[0][1], free[2][3], free[3][5]]
        expected = generate(theirs, texts, max_new_tokens=new, stop_ids=stops, **drawn)
    assert len({len(tokens) for tokens in expected.tokens}) >= 3
    engine = Engine(ours, 5, 40, graphs=True)
    got = generate(ours, texts, max_new_tokens=new, stop_ids=stops, engine=engine, **drawn)
    assert (got.tokens, got.finish) == (expected.tokens, expected.finish)
    assert got.stats.decode_tokens == expected.stats.decode_tokens
    # the engine goes on with fewer prompts, other lengths and chunks, and remembers nothing
    again = prompts([3, 11], VOCAB, seed=8)
    with decoder.plain():
        expected = generate(theirs, again, max_new_tokens=4, stop_ids=())
    got = generate(ours, again, max_new_tokens=4, stop_ids=(), engine=engine, prefill_chunk=6)
    assert got.tokens == expected.tokens


def test_captured_prefill(pair: tuple[Qwen3Moe, Qwen3Moe], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that fill a step in part, that are cut between two, and one too long for any."""
    size = 64 if GPU else 16
    monkeypatch.setattr(prefill_graphs, "SMALLEST", size)
    monkeypatch.setattr(prefill_graphs, "LARGEST", size)
    ours, theirs = pair
    engine = Engine(ours, 4, 80, graphs=True)
    seen: list[tuple[int, int]] = []
    engine.capture(lambda done, total: seen.append((done, total)))
    assert seen == [(i, 5) for i in range(6)], "a step of prefill, with rows that decode or not, and buckets 4, 2 and 1"
    replayed: list[int] = []
    run = PrefillGraphs.run

    def spy(self: PrefillGraphs, ids: torch.Tensor, *where: Any) -> torch.Tensor | None:
        logits = run(self, ids, *where)
        replayed.append(0 if logits is None else len(ids))
        return logits

    monkeypatch.setattr(PrefillGraphs, "run", spy)
    for lengths, chunk, expected in (([5, 9, 2], 12, [12, 4]), ([size + 1, 3], 100, [0]), ([1], 64, [1])):
        texts = prompts(lengths, VOCAB, seed=sum(lengths))
        with decoder.plain():
            want = generate(theirs, texts, max_new_tokens=3, stop_ids=()).tokens
        replayed.clear()
        got = generate(ours, texts, max_new_tokens=3, stop_ids=(), engine=engine, prefill_chunk=chunk).tokens
        assert got == want and replayed == expected


def test_an_engine_serves_one_generation_at_a_time(pair: tuple[Qwen3Moe, Qwen3Moe]) -> None:
    from ttnn_moe.errors import RequestError

    ours = pair[0]
    engine = Engine(ours, 1, 12, graphs=True)
    first = stream(ours, prompts([3], VOCAB), max_new_tokens=5, stop_ids=(), engine=engine)
    next(first)
    with pytest.raises(RequestError, match="serves other requests"):
        generate(ours, prompts([3], VOCAB), max_new_tokens=2, engine=engine)
    first.close()
    assert len(generate(ours, prompts([3], VOCAB), max_new_tokens=2, stop_ids=(), engine=engine).tokens[0]) == 2


def test_the_bundled_checkpoint_says_what_the_reference_says() -> None:
    """Greedy, to the token, until it stops."""
    ours, theirs = both(TINY, torch.bfloat16 if GPU else torch.float32)
    tokenizer = Tokenizer.from_directory(TINY)
    chosen = tasks.TASKS if GPU else ("sort",)
    texts = [
        tokenizer.encode(
            tokenizer.apply_chat_template(e.messages, add_generation_prompt=True), add_special_tokens=False
        )
        for task in chosen
        for e in tasks.examples(task, "heldout", 12 if GPU else 1)
    ]
    new = 48 if GPU else 3
    with decoder.plain():
        expected = generate(theirs, texts, max_new_tokens=new)
    engine = Engine(ours, len(texts), max(map(len, texts)) + new, graphs=True)
    got = generate(ours, texts, max_new_tokens=new, engine=engine)
    assert got.tokens == expected.tokens
    assert got.finish == expected.finish


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
class TestOnAGpu:
    def test_a_step_waits_for_nothing_and_allocates_nothing(self, pair: tuple[Qwen3Moe, Qwen3Moe]) -> None:
        ours = pair[0]
        engine = Engine(ours, 4, 32, page=16)
        seen: list[tuple[int, int]] = []
        engine.capture(lambda done, total: seen.append((done, total)))
        assert seen == [(i, 7) for i in range(8)], "steps of 128 and 64 tokens, each twice, and buckets 4, 2 and 1"
        for text in prompts([2, 3, 4]):
            engine.add(text, max_new_tokens=20, stop_ids=())
        for _ in range(3):
            engine.step()
        runner, going = engine.runner, engine.scheduler.decoding
        assert isinstance(runner, CapturedRunner) and len(going) == 3
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        with no_host_sync(), torch.inference_mode():
            pending = [runner.decode(going) for _ in range(2)]
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert all(len(p.tokens()) == 3 for p in pending)
        assert all(p.seconds() > 0 for p in pending)

    def test_same_input_same_bits(self, pair: tuple[Qwen3Moe, Qwen3Moe]) -> None:
        ours = pair[0]
        texts = prompts([4, 30, 9])
        runs = []
        for _ in range(3):
            engine = Engine(ours, 3, 64)
            generate(ours, texts, max_new_tokens=20, stop_ids=(), engine=engine)
            runs.append(engine.cache.k[:, 1:].clone())
        assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
