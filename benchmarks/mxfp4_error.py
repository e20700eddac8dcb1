"""What MXFP4 experts cost: relative errors on Gaussian values, and on the bundled checkpoint with its own tokens.

    python benchmarks/mxfp4_error.py

An error is ||got - want|| / ||want||; of a layer, over all its tokens, want is the output with the dense weights. Runs
on a CPU, in half a minute.
"""

from __future__ import annotations

import torch
from command_line import run_script
from int4_24_error import error, inputs_of, layers
from rich.console import Console

from ttnn_moe import Experts, Routing, moe
from ttnn_moe.formats import mxfp4, mxfp8, quantise_mxfp4
from ttnn_moe.models.qwen3 import TINY, load_model, terminal
from ttnn_moe.models.qwen3.tiny.batches import answer_ids
from ttnn_moe.models.qwen3.tiny.evaluate import heldout
from ttnn_moe.models.qwen3.tokenizer import Tokenizer


def values(n: int = 1 << 20) -> dict[str, float]:
    """Of Gaussian values by themselves."""
    x = torch.randn(n // 256, 256, generator=torch.Generator().manual_seed(0))
    out = {}
    for rule in quantise_mxfp4.RULES:
        out[f"mxfp4, {rule}"] = error(mxfp4.dequantise(*quantise_mxfp4.quantise(x, rule)), x)
    for rule in mxfp8.RULES:
        out[f"mxfp8, {rule}"] = error(mxfp8.dequantise(*mxfp8.quantise(x, rule)), x)
    return out


def gaussian(T: int = 512, E: int = 2, H: int = 256, I: int = 256) -> dict[str, float]:
    """Of a layer's output: Gaussian weights, white Gaussian tokens."""
    g = torch.Generator().manual_seed(0)
    gate_up = torch.randn(E, 2 * I, H, generator=g) * H**-0.5
    dense = Experts.dense(gate_up, torch.randn(E, H, I, generator=g) * I**-0.5)
    ids = torch.randint(0, E, (T, 1), generator=g)
    inputs = torch.randn(T, H, generator=g), Routing.from_topk(ids, torch.ones(T, 1), E)
    return {rule: layer(dense, *inputs, rule) for rule in quantise_mxfp4.RULES}


def layer(dense: Experts, hidden: torch.Tensor, routing: Routing, rule: str) -> float:
    """Of the output of dense experts."""
    return error(moe(hidden, routing, quantise_mxfp4.quantise_experts(dense, rule)), moe(hidden, routing, dense))


def tiny(asked: int = 40) -> dict[str, list[float]]:
    """Of the outputs of the bundled checkpoint's layers, on held-out prompts of each task."""
    model, tokenizer = load_model(TINY, "reference"), Tokenizer.from_directory(TINY).fast

    def run() -> None:
        for example in heldout(asked):
            prompt, answer = answer_ids(tokenizer, example)
            model(torch.tensor([prompt + answer]))

    inputs = inputs_of(model, run)
    experts = [mlp.experts for mlp in layers(model)]
    return {
        rule: [layer(dense, *given, rule) for dense, given in zip(experts, inputs, strict=True)]
        for rule in quantise_mxfp4.RULES
    }


def main() -> None:
    """Print the errors."""
    console = Console()
    for title, found in (("Gaussian values", values()), ("a layer of Gaussian weights", gaussian())):
        console.print(terminal.table(title, {name: f"{value:.4f}" for name, value in found.items()}))
    rows = {rule: ", ".join(f"{value:.4f}" for value in errors) for rule, errors in tiny().items()}
    console.print(terminal.table("the bundled checkpoint, by layer", rows))


if __name__ == "__main__":
    run_script(main)
