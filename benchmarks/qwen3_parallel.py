"""Qwen3-30B-A3B with random weights on several GPUs by tensor parallelism, beside one GPU in the same run.

    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/qwen3_parallel.py --json benchmarks/results/qwen3_parallel.json

Every rank makes the whole model from one seed and copies its share. A step is the median of blocks of decode steps of
the engine; one GPU, NCCL and the kernels take turns, and the slowest rank counts. Before a time stands the gate: sums
equal an fp32 sum bit for bit; logits of a few layers are near one GPU's, and the same bits on every rank. Another order
of sums may route a token to other experts, so most tokens must be near, and the median; with K = E, where each token
goes to all experts, every token must be.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from command_line import Json, numbers, run_script, write
from need_gpu import need_gpu
from qwen3_gpu import begin, make, prompts, seconds, traced
from torch import Tensor

from ttnn_moe.bench import report
from ttnn_moe.cuda.parallel import sums as kernels
from ttnn_moe.errors import TtnnMoeError
from ttnn_moe.models.qwen3 import PRESETS, TINY, Engine, Qwen3Moe, Tokenizer, generate, load_model
from ttnn_moe.models.qwen3.model import placed
from ttnn_moe.models.qwen3.parallel import load_shared
from ttnn_moe.models.qwen3.parallel.tensor import TensorQwen3
from ttnn_moe.models.qwen3.runtime.captured import CapturedRunner
from ttnn_moe.models.qwen3.runtime.generate import default_chunk
from ttnn_moe.models.qwen3.runtime.prefill_graphs import PrefillGraphs
from ttnn_moe.models.qwen3.split import Split
from ttnn_moe.parallel.ranks import Ranks, start
from ttnn_moe.parallel.ranks.sums import Collectives, PeerMemorySums

PROMPT, BLOCK = 128, 32
CALLS, REPLAYS = 96, 4
TASKS = ("Copy: AB12", "Reverse: hello", "Upper: abc", "Sort: dacb")
CLOSE, MOSTLY, MEDIAN = 0.05, 0.85, 0.02
"""Relative error of a token's logits that is close; the share of tokens that are; the bound of the median token."""
ALL_EXPERTS = 8
"""E = K of the model whose every token must be close."""


class Way:
    """The sums of a model; `use` chooses which."""

    def __init__(self, ways: dict[str, Collectives]):
        self.ways = ways
        self._now = next(iter(ways.values()))

    def use(self, name: str) -> None:
        self._now = self.ways[name]

    def add(self, part: Tensor, x: Tensor) -> Tensor:
        return self._now.add(part, x)

    def gather(self, part: Tensor) -> Tensor:
        return self._now.gather(part)

    def least(self, n: int) -> int:
        return self._now.least(n)

    def check(self) -> None:
        self._now.check()

    def step(self) -> AbstractContextManager[object]:
        return self._now.step()

    def fail(self, error: BaseException) -> None:
        self._now.fail(error)

    def captures(self) -> AbstractContextManager[object]:
        return self._now.captures()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._now.alone():
            yield


def share(whole: Qwen3Moe, split: Split, sums: Way) -> TensorQwen3:
    """A rank's part of a model, copied."""
    config = whole.config
    part = placed(lambda: TensorQwen3(config, "auto", split, sums), whole.dtype, whole.device)
    own = dict(part.named_parameters())
    D, rank = split.D, split.rank
    for name, tensor in whole.named_parameters():
        target = own[name].data
        changed = [d for d, (n, m) in enumerate(zip(tensor.shape, target.shape, strict=True)) if n != m]
        if not changed:
            target.copy_(tensor)
            continue
        (d,) = changed
        parts: list[Tensor] = [tensor]
        if name.endswith("gate_up"):
            parts = list(tensor.chunk(2, d))
        if "qkv" in name:
            heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
            parts = list(tensor.split([n * config.head_dim for n in heads], d))
        target.copy_(torch.cat([one.chunk(D, d)[rank] for one in parts], d))
    return part


@contextmanager
def slowest() -> Iterator[Callable[[float], float]]:
    """All ranks begin together; gives the most of what ranks say."""
    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))

    def most(value: float) -> float:
        said = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(said, dist.ReduceOp.MAX)
        return float(said)

    yield most


def sums_us(way: Callable[[Tensor, Tensor], Tensor], T: int, H: int) -> float:
    """Microseconds of a sum and residual in a graph of CALLS, each behind the one before."""
    part = torch.randn(T, H, device="cuda").bfloat16()
    x = torch.randn(T, H, device="cuda").bfloat16()

    def run() -> None:
        for _ in range(CALLS):
            way(part, x)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    taken = []
    for _ in range(7):
        with slowest() as most:
            begun, over = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()  # the GPUs begin together
            begun.record()
            for _ in range(REPLAYS):
                graph.replay()
            over.record()
            over.synchronize()
            taken.append(most(begun.elapsed_time(over) * 1000 / CALLS / REPLAYS))
    return statistics.median(taken)


def exact(ranks: Ranks, way: Callable[[Tensor, Tensor], Tensor], T: int, H: int, repeats: int = 20) -> bool:
    """Whether every sum is the fp32 sum in ascending rank, rounded once."""
    good = True
    for seed in range(repeats):
        draws = [torch.Generator("cuda").manual_seed(100 * seed + rank) for rank in range(ranks.size + 1)]
        *parts, x = (torch.randn(T, H, generator=g, device="cuda").bfloat16() for g in draws)
        want = sum((part.float() for part in parts), torch.zeros(T, H, device="cuda")) + x.float()
        good &= torch.equal(way(parts[ranks.rank].clone(), x.clone()), want.bfloat16())
    return good


def sums(ranks: Ranks, one: PeerMemorySums, nccl: Collectives, T: int, H: int) -> dict[str, Any]:
    """Microseconds of a sum of [T, H] by each kernel that takes it, and by NCCL."""
    row: dict[str, Any] = {"T": T, "H": H, "exact": True, "nccl": sums_us(nccl.add, T, H)}
    part = torch.empty(T, H, dtype=torch.bfloat16, device="cuda")
    for name, why_not, add in (
        ("words", kernels.why_not, kernels.add),
        ("tiles", kernels.why_not_many, kernels.add_many),
    ):
        if why_not(one.heap, part) is None:
            row["exact"] &= exact(ranks, partial(add, one.heap), T, H)
            row[name] = sums_us(partial(add, one.heap), T, H)
    return row


def near(ranks: Ranks, whole: Qwen3Moe, part: TensorQwen3, T: int) -> dict[str, Any]:
    """Logits of T tokens of both: the share of tokens that are close, the median error, equal bits on all ranks."""
    ids = torch.randint(whole.config.vocab_size, (1, T), generator=torch.Generator().manual_seed(T)).to(whole.device)
    want, got = whole(ids)[0].float(), part(ids)[0]
    words = got.contiguous().view(torch.int16).long()
    same = len(set(ranks.meet(str(int((words * torch.arange(1, words.shape[1] + 1, device=words.device)).sum()))))) == 1
    errors = (got.float() - want).norm(dim=1) / want.norm(dim=1)
    close = float((errors < CLOSE).float().mean())
    sizes = {"E": whole.config.num_experts, "K": whole.config.num_experts_per_tok}
    return {"T": T, **sizes, "close": close, "median": float(errors.median()), "same_bits": same}


def wrong(row: dict[str, Any]) -> str | None:
    """What shuts the gate in a row of `near`; None: nothing."""
    if not row["same_bits"]:
        return "ranks have other bits"
    needed = 1.0 if row["K"] == row["E"] else MOSTLY
    if not row["close"] >= needed:
        return f"{row['close']:.1%} of the tokens are close, not {needed:.0%}"
    if not row["median"] <= MEDIAN:
        return f"the median token is off by {row['median']:.2%}, more than {MEDIAN:.0%}"
    return None


def tokens_of_tiny(ranks: Ranks) -> bool:
    """The bundled checkpoint: every rank's tokens beside one GPU's."""
    words = Tokenizer.from_directory(TINY)
    chats = [words.apply_chat_template([{"role": "user", "content": t}], add_generation_prompt=True) for t in TASKS]
    texts = [words.encode(chat, add_special_tokens=False) for chat in chats]
    alone = generate(load_model(TINY, device=ranks.device), texts, max_new_tokens=12).tokens
    return generate(load_shared(TINY, ranks, "tensor"), texts, max_new_tokens=12).tokens == alone


class Decoding:
    """An engine whose every step decodes B sequences."""

    def __init__(self, model: Qwen3Moe, B: int, blocks: int):
        capacity = PROMPT + (blocks + 3) * BLOCK + 40
        self.engine = Engine(model, B, capacity, prefill_chunk=default_chunk(model.device))
        begin(self.engine, prompts(B, PROMPT, model.config.vocab_size))
        for _ in range(4):
            self.engine.step()

    def block(self) -> float:
        """Seconds of a step, of the slowest rank."""
        with slowest() as most:
            start = time.perf_counter()
            for _ in range(BLOCK):
                self.engine.step()
            torch.cuda.synchronize()
            return most((time.perf_counter() - start) / BLOCK)


def prefilling(model: Qwen3Moe, n: int) -> Engine:
    """An engine that runs a prompt of n tokens as a graph."""
    engine = Engine(model, 1, n + 1, prefill_chunk=default_chunk(model.device))
    runner = engine.runner
    assert isinstance(runner, CapturedRunner)
    runner.prompts = PrefillGraphs(model, engine.cache, runner.graphs, n)
    runner.prompts.capture(n, False)
    return engine


def main(
    config: str = "qwen3-30b-a3b",
    layers: int | None = None,
    batches: str = "1,8,32,128",
    prefills: str = "512,4096",
    traces: str = "1,32",
    sizes: Annotated[str, typer.Option(help="Rows of sums to time alone.")] = "1,8,32,128,256",
    ways: Annotated[str, typer.Option(help="nccl, kernels.")] = "nccl,kernels",
    blocks: Annotated[int, typer.Option(help="Blocks of steps of each.")] = 4,
    gate_layers: int = 4,
    gate: Annotated[str, typer.Option(help="Tokens of the gate.")] = "1,8,32,300",
    timeout: float = 60.0,
    tiny: bool = True,
    alone: Annotated[bool, typer.Option(help="One GPU beside it.")] = True,
    seed: int = 0,
    folder: Annotated[Path | None, typer.Option("--kernels", help="Folder: one traced step of each.")] = None,
    json_file: Json = None,
) -> None:
    """Measure on every rank; rank 0 prints and writes."""
    need_gpu()
    begun = time.perf_counter()
    ranks = start("cuda", timeout)
    shape = PRESETS[config]
    H, V = shape.hidden_size, shape.vocab_size // ranks.size
    data: dict[str, Any] = {
        "machine": {"name": torch.cuda.get_device_name(), "gpus": ranks.size},
        "versions": report.versions(),
        "config": config,
        "layers": layers or shape.num_hidden_layers,
        "gate": [],
        "sums": [],
        "decode": [],
        "prefill": [],
        "traces": {},
    }

    def say(*what: object) -> None:
        if ranks.rank == 0:
            print(f"{time.perf_counter() - begun:5.1f}", *what, flush=True)
            if json_file is not None:
                write(json_file, data)

    one = PeerMemorySums(ranks, H, V)
    found = {"nccl": Collectives(ranks), "kernels": one}
    way = Way({name: found[name] for name in ways.split(",")})
    for T in numbers(sizes):
        data["sums"].append(sums(ranks, one, found["nccl"], T, H))
        say("sum", data["sums"][-1])
    if gate_layers:
        fewer = dataclasses.replace(shape, num_hidden_layers=gate_layers)
        for model in (fewer, dataclasses.replace(fewer, num_experts=ALL_EXPERTS, num_experts_per_tok=ALL_EXPERTS)):
            few = make(model, "cuda", torch.bfloat16, "auto", seed)
            part = share(few, Split("tensor", ranks.size, ranks.rank), way)
            for name in way.ways:
                way.use(name)
                for T in numbers(gate):
                    logits = near(ranks, few, part, T)
                    data["gate"].append({"way": name, **logits, "wrong": wrong(logits)})
                    say("gate", data["gate"][-1])
            del few, part
    if tiny:
        data["tiny"] = tokens_of_tiny(ranks)
        say("tiny: tokens equal one GPU's:", data["tiny"])
    good = (
        all(row["exact"] for row in data["sums"])
        and all(row["wrong"] is None for row in data["gate"])
        and data.get("tiny", True)
    )
    say("gate:", good)
    if not good:
        ranks.close()
        raise TtnnMoeError("the gate is shut: tensor parallelism gives other results than one GPU")
    kept = shape if layers is None else dataclasses.replace(shape, num_hidden_layers=layers)
    whole = make(kept, "cuda", torch.bfloat16, "auto", seed)
    part = share(whole, Split("tensor", ranks.size, ranks.rank), way)
    say("weights")
    models: dict[str, Qwen3Moe] = {**({"alone": whole} if alone else {}), **dict.fromkeys(way.ways, part)}
    kinds = list(models)
    for B in numbers(batches):
        runs: dict[str, Decoding] = {}
        for kind in kinds:
            if kind != "alone":
                way.use(kind)
            runs[kind] = Decoding(models[kind], B, blocks)
        taken: dict[str, list[float]] = {kind: [] for kind in kinds}
        for i in range(blocks):
            for kind in kinds[:: -1 if i % 2 else 1]:
                taken[kind].append(runs[kind].block())
        row: dict[str, Any] = {
            "B": B,
            "prompt": PROMPT,
            "all_s": taken,
            **{k: statistics.median(v) for k, v in taken.items()},
        }
        data["decode"].append(row)
        say("decode", B, {k: round(row[k] * 1e3, 3) for k in kinds})
        if str(B) in traces.split(","):
            for kind in kinds:
                ranks.meet()
                keep = folder / f"kernels_{kind}_{B}.txt" if folder and ranks.rank == 0 else None
                data["traces"][f"{kind} {B}"] = trace = traced(runs[kind].engine.step, 5, keep)
                parts = {k: (round(v["us"]), v["kernels"]) for k, v in trace["parts"].items()}
                say("trace", B, kind, round(trace["us"]), parts)
        del runs
    for n in numbers(prefills):
        engines, texts = {}, prompts(1, n, kept.vocab_size)
        for kind in kinds:
            if kind != "alone":
                way.use(kind)
            engines[kind] = prefilling(models[kind], n)
            seconds(models[kind], engines[kind], texts, 1)
        filled: dict[str, list[float]] = {kind: [] for kind in kinds}
        for i in range(2 * blocks):
            for kind in kinds[:: -1 if i % 2 else 1]:
                with slowest() as most:
                    filled[kind].append(most(seconds(models[kind], engines[kind], texts, 1)))
        data["prefill"].append({"n": n, "all_s": filled, **{k: statistics.median(v) for k, v in filled.items()}})
        say("prefill", n, {k: round(data["prefill"][-1][k] * 1e3, 2) for k in kinds})
        del engines
    ranks.close()


if __name__ == "__main__":
    run_script(main)
