"""Fine-tune the tiny checkpoint for int4_24: `python -m ttnn_moe.models.qwen3.tiny.finetune_int4_24 --out DIR`.

Straight-through: a pass computes with int4_24 weights, and their gradients go to fp32 weights behind them. It starts
with experts that a calibration quantised; the other weights are trained too.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from rich.console import Console
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader

from ttnn_moe.formats.quantise_int4_24 import rounded

from .. import TINY, load_model, terminal
from ..checkpoint import slots
from ..layers import MoE
from ..quantize import quantize_model
from . import checkpoint, evaluate
from .batches import LENGTHS, Conversations, Steps
from .network import Network
from .optimise import CURRICULUM, Stepper, learning_rate
from .tokenizer import build

CALIBRATION_ROWS = 48

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
console = Console(soft_wrap=True)


def straight_through(weights: Tensor) -> Tensor:
    """int4_24 weights whose gradient is that of `weights`."""
    return weights + (rounded(weights.detach()) - weights.detach())


def calibrated(folder: Path, tokenizer: Tokenizer) -> Path:
    """The bundled checkpoint with experts quantised on training rows, made in a folder."""
    rows = Conversations(tokenizer, "calibration")
    text = folder / "calibration.txt"
    text.write_text("".join(rows.row(LENGTHS[-1]) for _ in range(CALIBRATION_ROWS)))
    quantize_model(TINY, folder / "start", calibrate=text, device="cpu")
    return folder / "start"


def load(network: Network, directory: Path) -> None:
    """Fill the network from a checkpoint of its sizes, with experts of any format."""
    model = load_model(directory, "reference", "cpu", torch.float32)
    state = {name: tensor for name, tensor in slots(model).items() if ".mlp.experts." not in name}
    for i, layer in enumerate(model.layers):
        if isinstance(layer.mlp, MoE):
            pairs = [layer.mlp.experts.dequantize(e) for e in range(layer.mlp.experts.E)]
            for name, tensors in zip(checkpoint.FUSED, zip(*pairs, strict=True), strict=True):
                state[f"model.layers.{i}.mlp.experts.{name}"] = torch.stack(tensors)
    left = network.model.load_state_dict(state, strict=False)
    assert not left.unexpected_keys and set(left.missing_keys) <= {"lm_head.weight"}, left


def write(out: Path, network: Network, tokenizer: Tokenizer) -> None:
    """Write the checkpoint with experts in int4_24."""
    state = {
        name: rounded(value) if name.rpartition(".")[2] in checkpoint.FUSED else value
        for name, value in network.model.state_dict().items()
    }
    with TemporaryDirectory() as folder:  # of fp32 experts that int4_24 holds exactly
        checkpoint.write(Path(folder, "dense"), state, tokenizer, torch.float32)
        quantize_model(Path(folder, "dense"), out, device="cpu")


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Directory to write the checkpoint into: none yet, or empty.")],
    steps: Annotated[int, typer.Option(min=0, help="Training steps; 0 = write the calibrated start.")] = 2_000,
    tokens: Annotated[int, typer.Option(min=1280, help="Tokens of a step.")] = 16_384,
    peak_rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Decides the data.")] = 1,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda" if torch.cuda.is_available() else "cpu",
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that make data; by default one a core.")] = None,
    log_every: Annotated[int, typer.Option(min=1, help="Print the losses after so many steps.")] = 250,
    examples: Annotated[int, typer.Option(min=0, help="Held-out examples of each task to measure on.")] = 200,
    graphs: Annotated[bool, typer.Option(help="CUDA graphs on CUDA.")] = True,
) -> None:
    """Fine-tune the bundled checkpoint for int4_24 experts, and write it."""
    checkpoint.check_device(device)
    checkpoint.check_place(out, empty=True)
    on_cuda = device.startswith("cuda")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    tokenizer = build()
    started = time.monotonic()
    network = Network(seed)
    with TemporaryDirectory() as folder:
        load(network, calibrated(Path(folder), tokenizer))
    network.to(device).expert_weights = straight_through
    console.print(f"calibrated after {time.monotonic() - started:.0f} s")
    stepper = Stepper(network, False, graphs and on_cuda)
    shares, generator = torch.tensor(CURRICULUM[-1][1]), torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(shares, max(1, steps), True, generator=generator)[:steps]
    data = Steps(tokenizer.to_str(), [LENGTHS[i] for i in drawn], tokens, seed)
    workers = max(1, (os.cpu_count() or 2) - 1) if workers is None else workers
    loader = DataLoader(
        data, batch_size=None, num_workers=workers, pin_memory=on_cuda, prefetch_factor=8 if workers else None
    )
    for step, (ids, kinds) in enumerate(loader, start=1):
        stepper(ids, kinds, learning_rate(step - 1, steps, peak_rate))
        if step % log_every == 0 or step == steps:
            loss, balance = stepper.loss.tolist()
            console.print(f"step {step}: loss {loss:.4f}, balance {balance:.3f}, {time.monotonic() - started:.0f} s")
    write(out, network.cpu(), tokenizer)
    console.print(terminal.text(f"{out}: written after {time.monotonic() - started:.0f} s"))
    if examples:
        model, asked = load_model(out, "reference"), evaluate.heldout(examples)
        found = evaluate.scores(asked, evaluate.answered(model, tokenizer, asked))
        console.print(", ".join(f"{task} {score.accuracy:.1%}" for task, score in found.items()))


if __name__ == "__main__":
    app(prog_name="python -m ttnn_moe.models.qwen3.tiny.finetune_int4_24")
