"""Score a checkpoint on the held-out examples: python -m ttnn_moe.models.qwen3.tiny.score [--model DIR]."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ttnn_moe import registry
from ttnn_moe.errors import RequestError
from ttnn_moe.tables import console_of

from .. import TINY, load_model, terminal
from ..config import Qwen3MoeConfig
from ..tokenizer import Tokenizer
from .evaluate import answered, heldout, scores
from .tokenizer import END, PAD, START

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    model: Annotated[
        Path, typer.Option(help="Checkpoint in Hugging Face format.", show_default="the bundled one")
    ] = TINY,
    backend: terminal.Backend = "auto",
    device: Annotated[str | None, typer.Option(help="torch device; default: what suits the backend.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; default: the checkpoint's.")] = None,
    examples: Annotated[int, typer.Option(min=1, help="Held-out examples of each task.")] = 300,
    seed: Annotated[int, typer.Option(help="Which examples.")] = 0,
) -> None:
    """Print the share of held-out examples that greedy decoding answers exactly, by task."""
    # every check comes before the weights are read
    Qwen3MoeConfig.from_directory(model)
    tokenizer = Tokenizer.from_directory(model).fast
    lacking = [token for token in (PAD, START, END) if tokenizer.token_to_id(token) is None]
    if lacking:
        raise RequestError(
            f"{model} has another tokenizer than the tasks need",
            got=f"no {', '.join(lacking)}",
            remedy="give a checkpoint with Qwen's chat markers",
        )
    with terminal.loading(f"loading {model.name}") as progress:
        network = load_model(model, backend, device, dtype, progress)
    asked = heldout(examples, seed)
    found = scores(asked, answered(network, tokenizer, asked, network.device))
    name = registry.resolve(backend, network.device.type)
    where = f"{name} on {network.device}, {str(network.dtype).removeprefix('torch.')}"
    rows = {task: f"{score.accuracy:.1%} of {score.asked}" for task, score in found.items()}
    console_of().print(terminal.table(where, rows))


if __name__ == "__main__":
    raise SystemExit(terminal.run(app, None, "python -m ttnn_moe.models.qwen3.tiny.score"))
