"""Build the tiny checkpoint from nothing: `python -m ttnn_moe.models.qwen3.tiny.train --out DIR`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch.utils.data import DataLoader

from .. import terminal
from . import checkpoint, evaluate
from .batches import Steps
from .network import Network
from .optimise import Stepper, learning_rate, noise_share, row_lengths
from .tasks import Example
from .tokenizer import build

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
console = Console(soft_wrap=True)


def measure(directory: Path, asked: Sequence[Example], tokenizer: Tokenizer, device: str) -> dict[str, evaluate.Score]:
    """Scores of the bf16 checkpoint in `directory`, run by transformers: what the files hold, not what was trained."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(device).eval()
    return evaluate.scores(asked, evaluate.answered(lambda ids: model(ids).logits, tokenizer, asked, device))


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Directory to write the checkpoint into; made if it is missing.")],
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 40_000,
    tokens: Annotated[int, typer.Option(min=1280, help="Tokens of a step.")] = 32_768,
    peak_rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 2e-3,
    expert_noise: Annotated[float, typer.Option(help="Noise on the experts' weights, relative to their rows.")] = 0.08,
    seed: Annotated[int, typer.Option(help="Decides first weights and data.")] = 0,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda" if torch.cuda.is_available() else "cpu",
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that make data; by default one a core.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Write the checkpoint and measure it after so many steps.")] = 4_000,
    log_every: Annotated[int, typer.Option(min=1, help="Print the losses after so many steps.")] = 500,
    examples: Annotated[int, typer.Option(min=0, help="Held-out examples of each task to measure on.")] = 200,
    compile_blocks: Annotated[bool, typer.Option("--compile/--no-compile", help="torch.compile on CUDA.")] = True,
    graphs: Annotated[bool, typer.Option(help="CUDA graphs on CUDA.")] = True,
) -> None:
    """Train the tiny Qwen3-MoE on synthetic tasks and write it as a Hugging Face checkpoint."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    on_cuda = device.startswith("cuda")
    checkpoint.check_device(device)
    checkpoint.check_place(out)
    # the workers are the parallelism
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = build()
    network = Network(seed).to(device)
    stepper = Stepper(network, compile_blocks and on_cuda, graphs and on_cuda)
    asked = evaluate.heldout(examples)
    if workers is None:
        workers = max(1, (os.cpu_count() or 2) - 1)
    data = Steps(tokenizer.to_str(), row_lengths(steps, seed), tokens, seed)
    loader = DataLoader(
        data, batch_size=None, num_workers=workers, pin_memory=on_cuda, prefetch_factor=8 if workers else None
    )
    started = time.monotonic()
    printed = 0, started
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=steps)
        for step, (ids, kinds) in enumerate(loader, start=1):
            stepper(ids, kinds, learning_rate(step - 1, steps, peak_rate), expert_noise * noise_share(step - 1, steps))
            # reading a loss waits for the device
            if step % log_every == 0 or step % 100 == 0 or step == steps:
                loss, balance = stepper.loss.tolist()
                progress.update(bar, completed=step, description=f"loss {loss:.3f}")
                if step % log_every == 0 or step == steps:
                    speed = (step - printed[0]) / (time.monotonic() - printed[1])
                    printed = step, time.monotonic()
                    console.print(f"step {step}: loss {loss:.4f}, balance {balance:.3f}, {speed:.1f} steps/s")
            if step % every == 0 or step == steps:
                checkpoint.write(out, network.model.state_dict(), tokenizer)
                if examples:
                    found = measure(out, asked, tokenizer, device)
                    console.print(f"step {step}: " + ", ".join(f"{t} {s.accuracy:.1%}" for t, s in found.items()))
    console.print(terminal.text(f"{out}: written after {time.monotonic() - started:.0f} s"))


if __name__ == "__main__":
    app(prog_name="python -m ttnn_moe.models.qwen3.tiny.train")
