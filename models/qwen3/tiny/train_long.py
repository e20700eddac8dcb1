"""Teach the bundled checkpoint long associative recalls: `python -m ttnn_moe.models.qwen3.tiny.train_long --out DIR`.

The base of RoPE grows with the context: over 8,192 tokens the slowest channel turns as far as before over 1,280.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from .. import TINY
from . import checkpoint
from .finetune_int4_24 import load
from .network import CONFIG, Network
from .optimise import Stepper, learning_rate
from .pairs import LETTERS, Pairs
from .tokenizer import build

LENGTH = 8192
PHASES = ",".join(
    ("0.04:128:3:2:8192", "0.1:128:4:4:8192", "0.25:256:6:8:8192", "0.4:1024:6:16:16384", "1:8192:6:20:32768")
)


def plan_of(phases: str) -> list[tuple[float, int, int, int, int]]:
    """The phases of --phases: end, tokens of a row, letters, family, tokens of a step. Raises typer.BadParameter."""
    plan = []
    for text in phases.split(","):
        try:
            end, *numbers = text.split(":")
            length, letters, family, tokens = map(int, numbers)
            plan.append((float(end), length, letters, family, tokens))
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not five numbers with : between", param_hint="--phases") from None
        if not (letters >= 1 and 1 <= family <= LETTERS and length >= 2 * Pairs(letters).width and tokens >= length):
            wrong = f"{text}: rows of two pairs or more, families of 1 to {LETTERS}, a step of a row or more"
            raise typer.BadParameter(wrong, param_hint="--phases")
    if not plan[-1][0] >= 1:
        raise typer.BadParameter(f"the last phase ends at {plan[-1][0]}, not at 1", param_hint="--phases")
    return plan


def main(
    out: Annotated[Path, typer.Option(help="Directory to write the checkpoint into.")],
    start: Annotated[Path, typer.Option(help="The checkpoint to begin with.")] = TINY,
    seconds: Annotated[float, typer.Option(min=0.1, help="Training time, without the start.")] = 36,
    phases: Annotated[
        str, typer.Option(help="Until which part of the time:tokens of a row:letters:family:tokens of a step, a list.")
    ] = PHASES,
    peak_rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 1.5e-3,
    seed: Annotated[int, typer.Option(help="Decides the data.")] = 2,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda" if torch.cuda.is_available() else "cpu",
    every: Annotated[int, typer.Option(min=1, help="Print the loss after so many steps.")] = 50,
) -> None:
    """Train and write it."""
    checkpoint.check_device(device)
    checkpoint.check_place(out)
    plan = plan_of(phases)
    CONFIG.update(rope_theta=68_000.0, max_position_embeddings=2 * LENGTH)
    network = Network(seed)
    load(network, start)
    stepper = Stepper(network.to(device), False, device.startswith("cuda"))
    generator = torch.Generator(device).manual_seed(seed)
    started, step = time.monotonic(), 0
    while (done := (time.monotonic() - started) / seconds) < 1:
        length, letters, family, tokens = next(numbers for end, *numbers in plan if done < end)
        ids, kinds = Pairs(letters, family).rows(tokens // length, length, generator)
        stepper(ids, kinds, learning_rate(round(done * 1000), 1000, peak_rate))
        step += 1
        if step % every == 0:  # reading a loss waits for the device
            where = f"{length} tokens, {letters} letters, families of {family}"
            typer.echo(f"step {step}, {time.monotonic() - started:.0f} s, {where}: loss {float(stepper.loss[0]):.4f}")
    checkpoint.write(out, network.model.state_dict(), build())
    typer.echo(f"{out}: written after {step} steps, loss {float(stepper.loss[0]):.4f}")


if __name__ == "__main__":
    typer.run(main)
