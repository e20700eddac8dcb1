"""What int4_24 experts cost: relative errors on Gaussian weights, and on the bundled checkpoint with its own tokens.

    python benchmarks/int4_24_error.py

An error is ||got - want|| / ||want|| over all tokens of a layer; want is the output with the dense weights. Calibration
reads training prompts, errors and answers are of held-out ones. Runs on a CPU, in about a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from command_line import run_script
from rich.console import Console
from torch import Tensor

from ttnn_moe import Experts, Routing, decoder, moe
from ttnn_moe.formats.quantise_int4_24 import quantise_experts
from ttnn_moe.models.qwen3 import TINY, load_model, terminal
from ttnn_moe.models.qwen3.layers import MoE
from ttnn_moe.models.qwen3.model import Qwen3Moe
from ttnn_moe.models.qwen3.tiny.batches import answer_ids
from ttnn_moe.models.qwen3.tiny.evaluate import answered, heldout, scores
from ttnn_moe.models.qwen3.tiny.tasks import TASKS, examples
from ttnn_moe.models.qwen3.tokenizer import Tokenizer

Inputs = list[tuple[Tensor, Routing]]
"""Of each layer with experts: hidden [T, H] and its routing."""


def error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def gaussian(T: int = 2048, E: int = 2, H: int = 256, I: int = 256) -> dict[str, float]:
    """Errors on Gaussian weights and white Gaussian tokens."""
    torch.manual_seed(0)
    dense = Experts.dense(torch.randn(E, 2 * I, H) * H**-0.5, torch.randn(E, H, I) * I**-0.5)
    return {name: _error(dense, quantised, *_draw(T, E, H)) for name, quantised in _both(dense, *_draw(T, E, H))}


def _draw(T: int, E: int, H: int) -> tuple[Tensor, Routing]:
    return torch.randn(T, H), Routing.from_topk(torch.randint(0, E, (T, 1)), torch.ones(T, 1), E)


def _both(dense: Experts, hidden: Tensor, routing: Routing) -> Iterator[tuple[str, Experts]]:
    yield "by magnitude", quantise_experts(dense)
    yield "calibrated", quantise_experts(dense, hidden, routing)


def _error(dense: Experts, quantised: Experts, hidden: Tensor, routing: Routing) -> float:
    return error(moe(hidden, routing, quantised), moe(hidden, routing, dense))


def inputs_of(model: Qwen3Moe, run: Callable[[], object]) -> Inputs:
    """What each layer with experts is given while run() runs."""
    seen: dict[int, list[tuple[Tensor, ...]]] = {}

    def see(mlp: MoE, args: tuple, _: object) -> None:
        x, norm, step = args
        ids, weights, hidden = decoder.norm_route(
            x, norm.weight, norm.eps, mlp.router.weight, mlp.K, mlp.norm_topk_prob
        )
        seen.setdefault(id(mlp), []).append((hidden, ids, weights))

    hooks = [mlp.register_forward_hook(see) for mlp in layers(model)]
    with torch.inference_mode():
        run()
    for hook in hooks:
        hook.remove()
    found = []
    for mlp in layers(model):
        hidden, ids, weights = (torch.cat(parts) for parts in zip(*seen[id(mlp)], strict=True))
        found.append((hidden, Routing.from_topk(ids, weights, mlp.router.out_features)))
    return found


def layers(model: Qwen3Moe) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


@contextmanager
def experts_replaced(model: Qwen3Moe, replaced: list[Experts]) -> Iterator[None]:
    """The model computes with other experts."""
    for mlp, experts in zip(layers(model), replaced, strict=True):
        mlp._experts_of, mlp._experts = (mlp.gate_up,), experts
    try:
        yield
    finally:
        for mlp in layers(model):
            mlp._experts = None


def tiny(calibration: int = 60, asked: int = 40, ask: bool = True) -> dict[str, tuple[list[float], dict[str, float]]]:
    """Of each variant: the errors of the checkpoint's layers, and the share of right answers of each task.

    Args:
        calibration: training prompts of each task. asked: held-out prompts of each task. ask: count right answers.
    """
    model, tokenizer = load_model(TINY, "reference"), Tokenizer.from_directory(TINY).fast

    def read(split: str, count: int) -> Callable[[], None]:
        def run() -> None:
            for task in TASKS:
                for example in examples(task, split, count):
                    prompt, answer = answer_ids(tokenizer, example)
                    model(torch.tensor([prompt + answer]))

        return run

    def right() -> dict[str, float]:
        questions = heldout(asked) if ask else []
        found = scores(questions, answered(model, tokenizer, questions))
        return {task: score.accuracy for task, score in found.items()}

    known, new = inputs_of(model, read("train", calibration)), inputs_of(model, read("heldout", asked))
    dense = [mlp.experts for mlp in layers(model)]
    out = {"dense": ([0.0] * len(dense), right())}
    pairs = [dict(_both(experts, *inputs)) for experts, inputs in zip(dense, known, strict=True)]
    for name in pairs[0]:
        made = [pair[name] for pair in pairs]
        errors = [_error(a, b, *inputs) for a, b, inputs in zip(dense, made, new, strict=True)]
        with experts_replaced(model, made):
            out[name] = errors, right()
    return out


def main() -> None:
    """Print the errors, and the share of right answers."""
    console = Console()
    console.print(terminal.table("Gaussian", {name: f"{value:.3f}" for name, value in gaussian().items()}))
    for name, (errors, right) in tiny().items():
        rows = {f"layer {i}": f"{value:.3f}" for i, value in enumerate(errors)}
        console.print(terminal.table(name, rows | {task: f"{share:.0%}" for task, share in right.items()}))


if __name__ == "__main__":
    run_script(main)
