"""The share of the experts in a decode step of a Qwen3-MoE checkpoint: ttnn-moe profile --model DIR [--batch 1].

A step is timed as the engine runs it. The experts are timed alone: the calls of all layers with the tokens and routings
of one step, captured in one CUDA graph where the engine captures steps. The share says whether faster products of
experts, such as other tiles, can pay.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from ttnn_moe.accelerator import is_accelerator, module_of
from ttnn_moe.errors import RequestError
from ttnn_moe.sizes import ceil_div
from ttnn_moe.tables import console_of

from . import terminal
from .layers import MoE
from .model import Qwen3Moe
from .runtime.captured import CapturedRunner
from .runtime.engine import Engine
from .runtime.generate import check_fits, default_chunk
from .runtime.graphs import graphs_for
from .weights import device_of, dtype_of, load_model

MOST = 1 << 16
ROUNDS = 5
LITTLE, MUCH = 0.1, 0.3

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Shares:
    """Seconds of a decode step, and of the experts of all its layers."""

    step_s: float
    experts_s: float

    @property
    def share(self) -> float:
        return self.experts_s / self.step_s

    @property
    def decision(self) -> str:
        """Whether work on the products of experts pays: below 10%, 10 to 30%, above 30%."""
        if self.share < LITTLE:
            return "stop: below 10%, faster products of experts gain next to nothing"
        if self.share <= MUCH:
            return "proceed with care: 10 to 30%, expect modest gains"
        return "worthwhile: above 30%, faster products of experts pay"


def measure(model: Qwen3Moe, prompts: Sequence[Sequence[int]], steps: int) -> Shares:
    """Time decode steps of these prompts, and the experts in them.

    Raises:
        RequestError: the model has no layer with experts; prompts and steps exceed the context; not all prompts fit the
            memory of an engine's cache; a sequence ended before the last step.
    """
    if not any(isinstance(module, MoE) for module in model.modules()):
        raise RequestError("the model has no layer with experts", expected="a mixture-of-experts model")
    length = _length(model, sum(map(len, prompts)), max(map(len, prompts)), steps)
    work = _experts_of_a_step(model, prompts, length)
    engine = _begun(model, prompts, length, None)
    engine_s = _median(lambda: [engine.step() for _ in range(steps)], model.device) / steps
    _check_all_decode(engine)

    def run() -> None:
        for call in work:
            call()

    again: Callable[[], object] = run
    if isinstance(engine.runner, CapturedRunner) and is_accelerator(model.device):
        again = graphs_for(model.device).capture(_tensor_after(run, model.device)).replay
    return Shares(engine_s, _median(lambda: [again() for _ in range(steps)], model.device) / steps)


def _length(model: Qwen3Moe, tokens: int, longest: int, steps: int) -> int:
    """Tokens of the longest sequence at the end, of prompts with so many tokens together.

    Raises:
        RequestError: the context does not hold them.
    """
    # while later prompts run, the first ones decode
    filling = ceil_div(tokens, default_chunk(model.device))
    new, context = (ROUNDS + 1) * steps + filling + 1, model.config.max_position_embeddings
    if longest + new > context:
        raise RequestError(
            "the context is too short for these samples",
            got=f"{longest} prompt tokens, and {new} new ones for {ROUNDS + 1} x {steps} steps after {filling} "
            "of prompts",
            expected=f"at most {context} together",
            remedy="lower --prompt-len, --steps or --batch",
        )
    return longest + new


def _begun(model: Qwen3Moe, prompts: Sequence[Sequence[int]], length: int, graphs: bool | None) -> Engine:
    """An engine in which all prompts decode.

    Raises:
        RequestError: its cache does not hold all of them; a sequence ended.
    """
    engine = Engine(model, len(prompts), length, prefill_chunk=default_chunk(model.device), graphs=graphs)
    check_fits(engine, len(prompts), length, "lower --batch, --prompt-len or --steps")
    for prompt in prompts:
        engine.add(list(prompt), max_new_tokens=length - len(prompt), stop_ids=())
    while engine.scheduler.waiting or engine.scheduler.filling:
        engine.step()
    _check_all_decode(engine)
    return engine


def _check_all_decode(engine: Engine) -> None:
    """Raise RequestError if a sequence ended."""
    going = sum(not request.over for request in engine.scheduler.decoding)
    if going < engine.rows:
        raise RequestError(
            "a sequence ended before the last step",
            got=f"{going} that decode",
            expected=f"all {engine.rows}",
            remedy="look for NaN or infinity in the weights",
        )


def _experts_of_a_step(model: Qwen3Moe, prompts: Sequence[Sequence[int]], length: int) -> list[Callable[[], Tensor]]:
    """The call of the experts of each layer in one decode step, to be made again; its inputs are kept."""
    engine = _begun(model, prompts, length, False)
    calls: list[Callable[[], Tensor]] = []

    def keep(module: MoE, given: tuple[Any, ...]) -> None:
        x, norm, step = given
        x = x.clone()
        calls.append(partial(module.add_experts, x, *module.route(x, norm), step.num_tokens))

    hooks = [module.register_forward_pre_hook(keep) for module in model.modules() if isinstance(module, MoE)]
    try:
        engine.step()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _tensor_after(run: Callable[[], None], device: torch.device) -> Callable[[], Tensor]:
    """What `capture` takes."""
    made = torch.zeros((), device=device)

    def call() -> Tensor:
        run()
        return made

    return call


def _median(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run, the median of ROUNDS after one more."""
    taken = []
    with torch.inference_mode():
        for _ in range(ROUNDS + 1):
            start = time.perf_counter()
            run()
            if is_accelerator(device):
                module_of(device).synchronize(device)
            taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


@app.command()
def profile(
    model: Annotated[str, typer.Option(help="Qwen3-MoE checkpoint in Hugging Face format.")],
    batch: Annotated[int, typer.Option(help="Sequences that decode.", min=1, max=MOST)] = 1,
    prompt_len: Annotated[int, typer.Option(help="Prompt tokens of each.", min=1, max=MOST)] = 64,
    steps: Annotated[int, typer.Option(help="Decode steps in each of the five samples.", min=1, max=MOST)] = 16,
    backend: terminal.Backend = "auto",
    device: terminal.Device = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; or bf16, fp16, fp32.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Print the share of the experts in a decode step of a Qwen3-MoE checkpoint, and whether faster ones would pay."""
    with terminal.loading(f"loading {model}") as progress:
        network = load_model(model, backend, device_of(device, backend), dtype_of(dtype), progress)
    _length(network, batch * prompt_len, prompt_len, steps)  # before so many prompts are made
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(network.config.vocab_size, (batch, prompt_len), generator=generator).tolist()
    found = measure(network, prompts, steps)
    if as_json:
        figures = {"step_s": found.step_s, "experts_s": found.experts_s, "share": found.share}
        print(json.dumps({**figures, "decision": found.decision, "batch": batch, "device": network.where}))
        return
    rows = {
        "decode step": terminal.seconds(found.step_s),
        "experts of all layers": terminal.seconds(found.experts_s),
        "share": f"{found.share:.0%}",
        "decision": found.decision,
    }
    console_of().print(terminal.table(f"{model}: batch {batch} on {network.where}", rows))


def main(args: Sequence[str] | None = None) -> int:
    """Run the profile with these arguments (default: the command line); returns the exit code."""
    return terminal.run(app, args, "ttnn-moe profile")


if __name__ == "__main__":
    sys.exit(main())
