"""Processes that share the bundled checkpoint by experts or by tensors: tokens, bytes read, faults, the command."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from model_ranks import Failed, by_ranks
from processes import run_python
from ttnn_moe.errors import ContractError, RequestError
from ttnn_moe.kv import pages
from ttnn_moe.kv.paged import PagedCache
from ttnn_moe.models.qwen3 import TINY, TINY_INT4_24, Engine, Qwen3Moe, Tokenizer, demo, generate, load_model, pieces
from ttnn_moe.models.qwen3.checkpoint import EXPERTS, Checkpoint
from ttnn_moe.models.qwen3.parallel import load_shared
from ttnn_moe.models.qwen3.parallel.experts import ExpertsQwen3, TurnGraphs
from ttnn_moe.models.qwen3.parallel.serving import serve
from ttnn_moe.models.qwen3.parallel.tensor import TensorQwen3
from ttnn_moe.models.qwen3.runtime.captured import CapturedRunner
from ttnn_moe.models.qwen3.runtime.graphs import DeviceGraphs
from ttnn_moe.models.qwen3.runtime.scheduler import Chunk, Scheduler
from ttnn_moe.models.qwen3.split import Split
from ttnn_moe.models.qwen3.weights import filled
from ttnn_moe.parallel.compare import compare
from ttnn_moe.parallel.ranks import Ranks, RankStopped
from ttnn_moe.parallel.ranks.turns import Turns
from ttnn_moe.sizes import power_of_2

NEW = 10
# in bf16, sums of CPU ranks round to other tokens; the kernels of a GPU's exchange take no fp32
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
TASKS = ("Copy: AB12", "Reverse: hello", "Upper: abc", "Copy: zz9 q", "Sort: dacb")
WAYS = [
    pytest.param("experts", 2, "all_to_all", id="experts-2"),
    pytest.param("experts", 4, "hierarchical", id="experts-4-hierarchical", marks=pytest.mark.slow(4)),
    pytest.param("tensor", 2, "auto", id="tensor-2"),
    pytest.param("tensor", 4, "auto", id="tensor-4", marks=pytest.mark.slow(3)),
]


def prompts() -> list[list[int]]:
    words = Tokenizer.from_directory(TINY)
    chats = (words.apply_chat_template([{"role": "user", "content": t}], add_generation_prompt=True) for t in TASKS)
    return [words.encode(chat, add_special_tokens=False) for chat in chats]


def requests_of(rank: int) -> list[tuple[int, int]]:
    """(prompt, new tokens) of a rank: rank 1 has none, and the others differ in number and length."""
    return [(i, NEW - rank) for i in range(len(TASKS))][rank : rank + 1 + rank] if rank != 1 else []


def shared_tokens(ranks: Ranks, kind: str, exchange: str) -> dict[str, Any]:
    """Serve this rank's requests; with experts, one more is cancelled, and one fails by itself."""
    read, region_of = [], pieces.region_of

    def counted(*args: Any) -> torch.Tensor:
        read.append(region_of(*args))
        return read[-1]

    pieces.region_of = counted
    model = load_shared(TINY, ranks, kind, dtype=DTYPES[ranks.device.type], exchange=exchange)
    if kind == "tensor":
        tokens = generate(model, prompts(), max_new_tokens=NEW).tokens
        return {"tokens": tokens, "bytes": sum(part.nbytes for part in read)}
    engine = Engine(model, rows=2, capacity=256)
    waiting, made, numbers = requests_of(ranks.rank), {}, {}
    extra = [engine.add(prompts()[0], max_new_tokens=50) for _ in range(2)] if ranks.rank == 0 else []
    failed = []

    def more() -> bool:
        if waiting and engine.load().waiting < 2:
            prompt, new = waiting.pop(0)
            numbers[engine.add(prompts()[prompt], max_new_tokens=new)] = prompt
        if extra and len(made.get(extra[0], [])) == 3:
            assert engine.cancel(extra[0])
            # a draw that fails ends its own request
            engine._requests[extra[1]].fail(RuntimeError("a draw"))
            extra.clear()
        return bool(waiting or extra)

    def take(token: Any) -> None:
        (failed if token.error else made.setdefault(token.sequence, [])).append(token.token)

    serve(engine, more, take)
    tokens = {prompt: made[number] for number, prompt in numbers.items()}
    return {"tokens": tokens, "bytes": sum(part.nbytes for part in read), "failed": len(failed)}


def share_of(split: Split) -> int:
    """Bytes of the checkpoint that a rank must read: what it holds, whatever the loader does."""
    checkpoint = Checkpoint(TINY)
    total = 0
    for name, header in checkpoint.headers.items():
        nbytes, parts = pieces.bytes_of(header), 1
        if split.kind == "experts" and EXPERTS in name:
            parts = split.D
        if split.kind == "tensor" and any(f"{p}_proj" in name for p in ("q", "o", "gate", "up", "down")):
            parts = split.D
        if split.kind == "tensor" and any(f"{p}_proj" in name for p in ("k", "v")):
            parts = min(split.D, checkpoint.config.num_key_value_heads)
        total += nbytes // parts
    return total


def tokens_alone(device: str) -> list[list[int]]:
    """One process's tokens of each prompt, by itself."""
    model = load_model(TINY, device=device, dtype=DTYPES[device])
    return [generate(model, [ids], max_new_tokens=NEW).tokens[0] for ids in prompts()]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    return tokens_alone("cpu")


class Alone:
    """Stands in for the other ranks: sums and logits stay this rank's own. stopped: what the second step finds."""

    def __init__(self, stopped: Exception | None = None):
        self._stopped, self._steps = stopped, 0

    def add(self, part: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x + part

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def least(self, n: int) -> int:
        return n

    def check(self) -> None:
        self._steps += 1
        if self._stopped is not None and self._steps == 2:
            raise self._stopped


@pytest.mark.parametrize("directory", [TINY, TINY_INT4_24], ids=["dense", "int4_24"])
def test_parts_of_experts_add_up(directory: Path) -> None:
    """Each rank's I/D channels, and each rank's E/D experts, against the whole layer."""
    checkpoint, layer = Checkpoint(directory), 1
    whole = load_model(directory, device="cpu", dtype=torch.float32).layers[layer].mlp
    x = torch.randn(5, checkpoint.config.hidden_size, generator=torch.Generator().manual_seed(0))
    ids, weights = torch.randint(0, 16, (5, 2), dtype=torch.int32), torch.rand(5, 2)
    want, total = whole.add_experts(torch.zeros_like(x), ids, weights, x, None), torch.zeros_like(x)
    for rank in range(2):
        split = Split("tensor", 2, rank)
        make: Any = partial(TensorQwen3, checkpoint.config, "reference", split, Alone())
        part = filled(checkpoint, make, "reference", "cpu", torch.float32, split=split)
        total = part.layers[layer].mlp.add_experts(total, ids, weights, x, None)
        split = Split("experts", 2, rank)
        make = partial(ExpertsQwen3, checkpoint.config, "reference", split, Turns(None, None, 1.0))
        part = filled(checkpoint, make, "reference", "cpu", torch.float32, split=split)
        for name, tensor in part.layers[layer].mlp.tensors.items():
            assert torch.equal(tensor, whole.tensors[name][8 * rank : 8 * (rank + 1)])
    torch.testing.assert_close(total, want, rtol=1e-4, atol=1e-5)


def test_an_engine_raises_what_a_step_found_on_the_device() -> None:
    checkpoint, split = Checkpoint(TINY), Split("tensor", 2, 0)
    for stopped in (None, RankStopped(1, 0, "it waited in vain")):
        make = partial(TensorQwen3, checkpoint.config, "reference", split, Alone(stopped))
        engine = Engine(filled(checkpoint, make, "reference", "cpu", split=split), rows=1, capacity=16)
        engine.add([1, 2, 3], max_new_tokens=3, stop_ids=())
        assert len(engine.step()) == 1
        with pytest.raises(RankStopped) if stopped else nullcontext():
            engine.step()
        assert (engine._life.error is not None) == (stopped is not None)


def test_a_part_of_fused_rows_is_gate_then_up() -> None:
    gate, up = torch.arange(4 * 8 * 3).view(4, 8, 3).chunk(2, 1)
    for rank in range(2):
        here = torch.full((4, 4, 3), -1)
        for there, own in Split("tensor", 2, rank).regions("l.mlp.experts.gate_up_proj", (4, 8, 3), (4, 4, 3)):
            here[own] = torch.cat((gate, up), 1)[there]
        assert torch.equal(here, torch.cat((gate.chunk(2, 1)[rank], up.chunk(2, 1)[rank]), 1))


@pytest.mark.parametrize("kind, size, exchange", WAYS)
def test_every_rank_gets_one_processs_tokens(
    kind: str, size: int, exchange: str, alone: list[list[int]], tmp_path: Path
) -> None:
    for rank, result in enumerate(by_ranks(shared_tokens, size, tmp_path, kind, exchange)):
        assert isinstance(result, dict), result
        if kind == "experts":
            assert result["tokens"] == {i: alone[i][:new] for i, new in requests_of(rank)}
            assert result["failed"] == (1 if rank == 0 else 0)
        else:
            assert result["tokens"] == alone
        assert result["bytes"] == share_of(Split(kind, size, rank))


class Later:
    """Runs what was captured when it is replayed."""

    def __init__(self, run: Callable[[], torch.Tensor]):
        self._run, self.out = run, torch.empty(0)

    def replay(self) -> None:
        self.out = self._run()


def capture_fails(ranks: Ranks) -> list[int]:
    """A request of rank 0, between two captures of its steps: for the first there is no memory. Rank 1 serves."""
    model, failing = load_shared(TINY, ranks, "experts", exchange="all_to_all"), [MemoryError("no graph")]
    made: list[int] = []

    def capture(graphs: TurnGraphs, run: Callable[[], torch.Tensor], inputs: object = None) -> Later:
        if failing:
            raise failing.pop()
        return Later(run)

    DeviceGraphs.capture = capture  # type: ignore[assignment, method-assign]
    if ranks.rank == 0:
        graphs = TurnGraphs.__new__(TurnGraphs)
        graphs._model, graphs._bound = model, 0
        engine = Engine(model, rows=2, capacity=64)
        engine.runner = CapturedRunner(model, engine.cache, 24, graphs)
        engine.scheduler = Scheduler(engine.runner, engine.cache, Chunk(24, 24))
        with pytest.raises(MemoryError, match="no graph"):
            engine.capture()
        engine.add(prompts()[0], max_new_tokens=NEW, stop_ids=())
        while engine.busy:
            made += [token.token for token in engine.step()]
        engine.capture()
    model.leave()
    return made


def test_ranks_stay_in_step_where_a_capture_fails(tmp_path: Path) -> None:
    """The turn was taken, and the other ranks wait for this one's experts."""
    want = generate(load_model(TINY, device="cpu"), prompts()[:1], max_new_tokens=NEW, stop_ids=()).tokens[0]
    assert by_ranks(capture_fails, 2, tmp_path, timeout=12.0) == [want, []]


def bad_work(ranks: Ranks, how: str, exchange: str) -> str:
    """Rank 1 dies or raises in its third step, in the second layer with experts."""
    model = load_shared(TINY, ranks, "experts", exchange=exchange)
    if ranks.rank == 1:
        moe, calls = model.layers[3].mlp, []
        add_experts = moe.add_experts

        def failing(*args: Any) -> torch.Tensor:
            calls.append(1)
            if len(calls) == 3:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("of rank 1's own")
            return add_experts(*args)

        moe.add_experts = failing
    generate(model, [prompts()[ranks.rank]], max_new_tokens=NEW)
    model.leave()
    return "not reached"


TWO_GPUS = (pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))


@pytest.mark.slow(5)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=TWO_GPUS)])
@pytest.mark.parametrize("exchange", ["all_to_all", "hierarchical"])
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_rank_that_stops_in_a_step_is_named(how: str, exchange: str, device: str, tmp_path: Path) -> None:
    size = 4 if exchange == "all_to_all" and device == "cpu" else 2
    results = by_ranks(bad_work, size, tmp_path, how, exchange, timeout=8.0, device=device)
    stopped = results.pop(1)
    assert stopped is None if how == "kill" else stopped.kind == "ValueError", stopped
    for result in results:
        assert isinstance(result, Failed) and (result.kind, result.peer) == ("RankStopped", 1), result
        assert "rank 1 stopped" in result.text and ("of rank 1's own" in result.text) == (how == "raise")


def with_other_memory(ranks: Ranks) -> tuple[int, list[list[int]]]:
    """An engine for more rows than fit, on ranks that have memory for so many pages each."""
    model = load_shared(TINY, ranks, "tensor", dtype=torch.float32)
    one = PagedCache.page_bytes(model.cache_sizes)
    pages.free_memory = lambda device: (5, 3)[ranks.rank] * one // 4 * 5 + 5
    engine = Engine(model, rows=4, capacity=128)
    return engine.cache.total, generate(model, prompts(), engine=engine, max_new_tokens=NEW).tokens


def test_ranks_of_tensors_keep_as_many_pages_as_each_other(alone: list[list[int]], tmp_path: Path) -> None:
    """Else they would admit other requests to a step, whose parts they sum."""
    assert by_ranks(with_other_memory, 2, tmp_path, timeout=12.0) == [(3, alone)] * 2


def drawn(ranks: Ranks) -> list[list[int]]:
    model = load_shared(TINY, ranks, "tensor")
    engine, made = Engine(model, rows=1, capacity=64), list[list[int]]()
    for _ in range(2):
        number = engine.add([1, 2, 3], max_new_tokens=20, temperature=1.5, stop_ids=())
        made.append([token.token for token in engine.stream(number)])
    return made + generate(model, [[1, 2, 3]], max_new_tokens=20, temperature=1.5, stop_ids=()).tokens


def test_ranks_of_tensors_draw_the_same_tokens_where_no_seed_is_given(tmp_path: Path) -> None:
    one, other = by_ranks(drawn, 2, tmp_path)
    assert one == other and len({tuple(tokens) for tokens in one}) == 3


def bad_sums(ranks: Ranks, how: str) -> str:
    """Rank 1 dies, stands still or raises in a decode step of tensor parallelism."""
    made = []

    def third(token: Any) -> None:
        made.append(token)
        if ranks.rank == 1 and len(made) == 3:
            if how == "raise":
                raise ValueError("of rank 1's own")
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    generate(load_shared(TINY, ranks, "tensor"), prompts()[:1], max_new_tokens=40, on_token=third)
    return "not reached"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=TWO_GPUS)])
@pytest.mark.parametrize("how", ["kill", "stop", "raise"])
def test_a_rank_that_stops_in_a_sum_is_named(how: str, device: str, tmp_path: Path) -> None:
    timeout, lost = 8.0 if device == "cuda" else 4.0, [1] if how == "stop" else []
    other, stopped = by_ranks(bad_sums, 2, tmp_path, how, timeout=timeout, device=device, lost=lost)
    assert stopped.kind == "ValueError" if how == "raise" else stopped is None
    assert isinstance(other, Failed) and (other.kind, other.peer) == ("RankStopped", 1), other
    assert ("of rank 1's own" in other.text) == (how == "raise")


@pytest.mark.gpu
@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize("exchange", ["tensor", "hierarchical", "all_to_all"])
def test_several_gpus_make_one_processs_tokens(exchange: str, gpus: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    alone = tokens_alone("cuda")
    tie = TASKS.index("Copy: zz9 q")  # in bf16 its third token is one of two with the same logit
    kind, by = ("tensor", "auto") if exchange == "tensor" else ("experts", exchange)
    for rank, result in enumerate(by_ranks(shared_tokens, gpus, tmp_path, kind, by, device="cuda")):
        assert isinstance(result, dict), result
        found = result["tokens"] if kind == "experts" else dict(enumerate(result["tokens"]))
        assert list(found) == ([i for i, _ in requests_of(rank)] if kind == "experts" else list(range(len(TASKS))))
        for prompt, tokens in found.items():
            assert prompt == tie or tokens == alone[prompt][: len(tokens)]


def order_of_layers(ranks: Ranks) -> list[tuple[str, int]]:
    """What the layers do: "made" or "ran", of a size. Rank 1 only serves."""
    model, said = load_shared(TINY, ranks, "experts", exchange="all_to_all"), []

    def heard(moe: Any) -> None:
        prepared, add_experts = moe.prepared, moe.add_experts

        def making(T: int) -> Any:
            if power_of_2(T) not in moe._prepared:
                said.append(("made", power_of_2(T)))
            return prepared(T)

        def running(*args: Any) -> torch.Tensor:
            said.append(("ran", power_of_2(model.turns.most)))
            return add_experts(*args)

        moe.prepared, moe.add_experts = making, running

    for moe in model.shared():
        heard(moe)
    if ranks.rank == 0:
        generate(model, prompts()[:1], max_new_tokens=2)
    model.leave()
    return said


def test_all_layers_of_a_size_are_made_before_one_runs(tmp_path: Path) -> None:
    """Else a kernel of the first layer may wait for a rank that waits for this host, which waits for the kernel."""
    for said in by_ranks(order_of_layers, 2, tmp_path):
        sizes = {size for _, size in said}
        assert len(sizes) == 2, said
        for size in sizes:
            words = [word for word, of in said if of == size]
            assert words == sorted(words) and words[-1] == "ran", words


def other_checkpoint(ranks: Ranks) -> Qwen3Moe:
    return load_shared(TINY_INT4_24 if ranks.rank == 2 else TINY, ranks, "experts")


def test_a_rank_with_another_checkpoint_is_named(tmp_path: Path) -> None:
    for result in by_ranks(other_checkpoint, 3, tmp_path):
        assert result.kind == "ContractError" and "rank 2: checkpoint: got" in result.text
        assert "rank 2: format of the experts: got int4_24, expected dense as rank 0" in result.text


FACTS = {"ttnn_moe": "1", "checkpoint": "abc", "K": "8", "layout": "experts, 4 ranks"}


@pytest.mark.parametrize("field", FACTS)
@pytest.mark.parametrize("rank", range(3))
def test_the_handshake_names_rank_field_and_values(field: str, rank: int) -> None:
    facts = [dict(FACTS) for _ in range(3)]
    compare(facts)
    facts[rank][field] = "other"
    with pytest.raises(ContractError, match=f"rank {rank}: {field}: got other, expected {FACTS[field]}"):
        compare(facts)
    del facts[rank][field]
    with pytest.raises(ContractError, match=f"rank {rank}: {field}: got nothing"):
        compare(facts)


@pytest.mark.parametrize(
    "kind, D, words",
    [
        ("experts", 3, "num_experts = 16; expected multiples of 3; to fix it: "),
        ("tensor", 3, "num_attention_heads = 4"),
        ("tensor", 8, "num_attention_heads"),
    ],
)
def test_numbers_of_ranks_that_do_not_divide_are_refused(kind: str, D: int, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        Split(kind, D, 0).local(Checkpoint(TINY).config)


@pytest.mark.parametrize(("kv_heads", "taken"), [(2, True), (12, True), (3, True), (4, False)])
def test_ranks_share_key_value_heads_evenly(kv_heads: int, taken: bool) -> None:
    """Of 6 ranks, 2 or 3 hold the same head, or each holds several."""
    sizes = {"moe_intermediate_size": 12, "intermediate_size": 12, "vocab_size": 12}
    config = replace(Checkpoint(TINY).config, num_attention_heads=12, num_key_value_heads=kv_heads, **sizes)
    if taken:
        assert Split("tensor", 6, 0).local(config).num_key_value_heads == max(1, kv_heads // 6)
    else:
        with pytest.raises(RequestError, match="num_key_value_heads = 4; .*a multiple or a divisor"):
            Split("tensor", 6, 0).local(config)


@pytest.mark.slow(12)
def test_the_command_under_torchrun() -> None:
    """Panels of all prompts, in order, as one process shows them."""
    asked = [word for text in TASKS[:3] for word in ("--prompt", text)]
    one = ["-m", "ttnn_moe", "generate", *asked, "--max-new-tokens", "8", "--device", "cpu", "--backend", "reference"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    outs = [run_python(*one), run_python(*torchrun, *one, "--parallel", "experts", OMP_NUM_THREADS="1")]
    want, shared = ([line for line in out.stdout.splitlines() if line.startswith("│ ")][:3] for out in outs)
    assert shared == want and len(want) == 3 and "AB12" in want[0]
    new = [next(line for line in out.stderr.splitlines() if "new tokens" in line) for out in outs]
    assert new[0].split("new tokens")[1].split() == new[1].split("new tokens")[1].split()  # of all ranks


@pytest.mark.parametrize(
    "options, words",
    [
        (["--parallel", "experts"], "torchrun --nproc-per-node"),
        (["--parallel", "layers"], "ranks cannot share that"),
        (["--parallel", "experts", "--exchange", "pigeon"], "unknown exchange"),
        (["--exchange", "hierarchical"], "--exchange is of --parallel experts"),
        (["--parallel", "tensor", "--exchange", "hierarchical"], "--exchange is of --parallel experts"),
        (["--parallel", "experts", "--device", "cuda:1"], "by LOCAL_RANK"),
        (["--parallel", "tensor", "--mesh", "1x8"], "--mesh is of backend tenstorrent"),
    ],
)
def test_what_the_command_refuses(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert demo.main(["--device", "cpu", *options]) == 2
    assert words in capsys.readouterr().err


def test_torchrun_without_parallel_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert demo.main(["--device", "cpu"]) == 2
    assert "add --parallel experts" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "")
    demo._check_alone("auto")
