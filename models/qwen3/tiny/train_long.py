"""Teach the bundled checkpoint long recalls: `python -m ttnn_moe.models.qwen3.tiny.train_long --out DIR`.

The base of RoPE grows with the context: over 8,192 tokens the slowest channel turns as far as before over 1,280.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from .. import TINY
from . import checkpoint
from .batches import Conversations, prompt_text
from .finetune_int4_24 import load
from .network import CONFIG, Network
from .optimise import Stepper, learning_rate
from .tasks import stream
from .tokenizer import END, build

LENGTHS = (2048, 8192)
SHORT = 0.25
"""The part of the training that has rows of the first length."""

BYTES = 1.86
"""Of a token in a recall with sentences, about."""


class LongRecalls(Conversations):
    """Rows that are one recall and questions about it; `fill` of the row is the recall, from and to."""

    split, fill = "train", (0.4, 0.85)

    def row(self, length: int) -> str:
        size = int(BYTES * length * self.rng.uniform(*self.fill))
        found = stream(
            "recall", self.split, f"{self.seed}/{self.rng.random()}", context=(size, size), questions=128, hay_share=1.0
        )
        example = next(found)
        turns = [(example.prompt, example.answer), *example.follow_ups]
        return "".join(f"{prompt_text(prompt)}{answer}{END}\n" for prompt, answer in turns)


class Rows(IterableDataset[tuple[Tensor, Tensor]]):
    """Endless batches of one row length: ids [B, S] int16, kinds [B, S] uint8."""

    def __init__(self, tokenizer_json: str, length: int, tokens: int, seed: int):
        self.tokenizer_json, self.length, self.tokens, self.seed = tokenizer_json, length, tokens, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        of = LongRecalls(Tokenizer.from_str(self.tokenizer_json), f"{self.seed}/{worker.id if worker else 0}")
        while True:
            ids, kinds = of.rows(self.tokens // self.length, self.length)
            yield torch.from_numpy(ids), torch.from_numpy(kinds)


def main(
    out: Annotated[Path, typer.Option(help="Directory to write the checkpoint into.")],
    seconds: Annotated[float, typer.Option(help="Training time, without the start.")] = 75,
    tokens: Annotated[int, typer.Option(min=LENGTHS[-1], help="Tokens of a step.")] = 32_768,
    peak_rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Decides the data.")] = 2,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda" if torch.cuda.is_available() else "cpu",
    workers: Annotated[int | None, typer.Option(help="Processes that make data; by default one a core.")] = None,
) -> None:
    """Train and write it."""
    on_cuda = device.startswith("cuda")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    CONFIG.update(rope_theta=68_000.0, max_position_embeddings=2 * LENGTHS[-1])
    tokenizer, network = build(), Network(seed)
    load(network, TINY)
    stepper = Stepper(network.to(device), False, on_cuda)
    workers = max(1, (os.cpu_count() or 2) - 1) if workers is None else workers
    loaders = [
        iter(DataLoader(Rows(tokenizer.to_str(), n, tokens, seed), batch_size=None, num_workers=workers // share))
        for n, share in zip(LENGTHS, (3, 1), strict=True)
    ]
    started, step = time.monotonic(), 0
    while (done := (time.monotonic() - started) / seconds) < 1:
        ids, kinds = next(loaders[done >= SHORT])
        stepper(ids, kinds, learning_rate(round(done * 1000), 1000, peak_rate))
        step += 1
        if step % 50 == 0:  # reading a loss waits for the device
            typer.echo(f"step {step}, {time.monotonic() - started:.0f} s: loss {float(stepper.loss[0]):.4f}")
    checkpoint.write(out, network.model.state_dict(), tokenizer)
    typer.echo(f"{out}: written after {step} steps, loss {float(stepper.loss[0]):.4f}")


if __name__ == "__main__":
    typer.run(main)
