"""What ranks that share the bundled checkpoint run, and what one process makes alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ttnn_moe.models.qwen3 import TINY, Engine, Tokenizer, generate, load_model, pieces
from ttnn_moe.models.qwen3.parallel import load_shared
from ttnn_moe.models.qwen3.parallel.serving import serve
from ttnn_moe.parallel.ranks import Ranks

NEW = 10
# in bf16, sums of CPU ranks round to other tokens; the kernels of a GPU's exchange take no fp32
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
TASKS = ("Copy: AB12", "Reverse: hello", "Upper: abc", "Copy: zz9 q", "Sort: dacb")


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


def tokens_alone(device: str) -> list[list[int]]:
    """One process's tokens of each prompt, by itself."""
    model = load_model(TINY, device=device, dtype=DTYPES[device])
    return [generate(model, [ids], max_new_tokens=NEW).tokens[0] for ids in prompts()]


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

    def step(self) -> AbstractContextManager[object]:
        return nullcontext()

    def fail(self, error: BaseException) -> None:
        pass

    def captures(self) -> AbstractContextManager[object]:
        return nullcontext()

    def alone(self) -> AbstractContextManager[object]:
        return nullcontext()

    def check(self) -> None:
        self._steps += 1
        if self._stopped is not None and self._steps == 2:
            raise self._stopped


class Later:
    """Runs what was captured when it is replayed."""

    def __init__(self, run: Callable[[], torch.Tensor]):
        self._run, self.out = run, torch.empty(0)

    def replay(self) -> None:
        self.out = self._run()
