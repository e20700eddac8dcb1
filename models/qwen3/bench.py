"""Measure a size: ttnn-moe bench-model --config qwen3-30b-a3b --random-weights [--layers N]."""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ttnn_moe import registry
from ttnn_moe.bench.layer import free_bytes
from ttnn_moe.errors import RequestError
from ttnn_moe.kv.formats import PAGED, bytes_for
from ttnn_moe.kv.pages import MOST_ROWS
from ttnn_moe.tables import console_of
from ttnn_moe.whole_file import check_place, whole_file

from . import terminal, tt
from .config import PRESETS, Qwen3MoeConfig, config_of
from .model import Qwen3Moe, sizes_of
from .runtime.generate import check_fits, default_chunk, generate
from .runtime.language_model import LanguageModel
from .runtime.requests import check_request
from .tt import request
from .weights import check_computes, device_of, dtype_of, load_model, randomize

MOST = 1 << 20

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def bench(
    config: Annotated[str, typer.Option(help=f"One of {sorted(PRESETS)}, or a checkpoint's directory.")],
    random_weights: Annotated[bool, typer.Option(help="Make weights instead of loading them.")] = False,
    layers: Annotated[int | None, typer.Option(help="Keep this many layers only.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences.", max=MOST_ROWS)] = 1,
    kv: terminal.KV = PAGED,
    kv_bits: terminal.KVBits = None,
    prompt_len: Annotated[int, typer.Option(help="Prompt tokens per sequence.", max=MOST)] = 128,
    new_tokens: Annotated[int, typer.Option(help="New tokens per sequence.", max=MOST)] = 32,
    backend: terminal.Backend = "auto",
    device: terminal.Device = None,
    mesh: terminal.Mesh = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; or bf16, fp16, fp32.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and the prompts.", min=0, max=2**63 - 1)] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Time prefill and decode of a Qwen3-MoE of a given size."""
    registry.resolve(backend)
    if json_file is not None:
        check_place(json_file, "--json")
    sizes = _sizes(config, layers, random_weights)
    options = request.Options(mesh, device, dtype, kv=kv)
    on_chips = request.asked_for(backend, device)
    place = torch.device("cpu") if on_chips else device_of(device, backend)
    check_computes(place)
    kind = torch.bfloat16 if on_chips else dtype_of(dtype) or sizes.dtype or torch.bfloat16
    prompt_tokens, context = batch * prompt_len, prompt_len + new_tokens
    if min(batch, prompt_len, new_tokens) < 1:
        raise RequestError(
            "nothing to time",
            got=f"--batch {batch} --prompt-len {prompt_len} --new-tokens {new_tokens}",
            expected="1 or more of each",
        )
    check_request(sizes, [[0] * prompt_len], new_tokens)
    with terminal.spelled("kv", "kv_bits"):
        needed = memory_needed(sizes, kind, batch, prompt_len, new_tokens, default_chunk(place), kv, kv_bits)
    D = 0
    if on_chips and random_weights:
        raise RequestError(
            "weights are not made on a Tenstorrent device", got="--random-weights", remedy="a checkpoint's directory"
        )
    if on_chips:
        D = request.check(sizes, batch, options)
        request.quiet()
    else:
        options.refuse(backend)
        _check_memory(needed, place, batch, random_weights)
    start = time.perf_counter()
    network: LanguageModel
    if random_weights:
        network = Qwen3Moe.empty(sizes, backend, kind, place)
        randomize(network, seed)
    else:
        with terminal.loading(f"loading {config}") as progress:
            if on_chips:
                network = tt.load_model(config, D, device, progress)
            else:
                network = load_model(config, backend, place, kind, progress)
    load_s = time.perf_counter() - start
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(sizes.vocab_size, (batch, prompt_len), generator=generator).tolist()
    # the pages of others are larger than those that were counted
    memory = needed["KV cache"] if not on_chips and place.type in ("cpu", "cuda") else None
    engine, warm_up_s = terminal.warmed_up(network, prompts, new_tokens, kv, kv_bits, memory)
    check_fits(engine, batch, context, "lower --batch, --prompt-len or --new-tokens")
    stats = generate(network, prompts, max_new_tokens=new_tokens, stop_ids=(), engine=engine).stats
    figures: dict[str, Any] = {
        "config": config,
        "layers": sizes.num_hidden_layers,
        "random_weights": random_weights,
        "dtype": str(kind).removeprefix("torch."),
        "backend": request.NAME if on_chips else registry.resolve(backend, place.type),
        "device": network.where if on_chips else _device_name(place),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "batch": batch,
        "prompt_len": prompt_len,
        "new_tokens": new_tokens,
        "weight_bytes": needed["weights"],
        "kv_cache_bytes": needed["KV cache"],
        "load_s": load_s,
        "warm_up_s": warm_up_s,
        "time_to_first_token_s": stats.first_token_s,
        "prefill_tokens_per_s": prompt_tokens / stats.first_token_s,
        # None: the first token was the last
        "tokens_per_s_user": stats.tokens_per_s_user if stats.decode_steps else None,
        "tokens_per_s": stats.tokens_per_s if stats.decode_steps else None,
    }
    rows = {
        "weights": f"{needed['weights'] / 2**30:.2f} GiB",
        "KV cache": f"{needed['KV cache'] / 2**30:.3f} GiB for {batch} x {context} tokens",
        "load": terminal.seconds(load_s),
        "compile and warm up": terminal.seconds(warm_up_s),
        "time to first token": f"{terminal.seconds(stats.first_token_s)} for {batch} x {prompt_len} tokens",
    }
    if stats.decode_steps:
        rows["tokens/s/user"] = f"{stats.tokens_per_s_user:.2f}"
        rows["tokens/s"] = f"{stats.tokens_per_s:.2f}"
    where = f"{figures['backend']} on {figures['device']}, {figures['dtype']}"
    title = f"{config}, {sizes.num_hidden_layers} layers: {where}"
    try:
        if json_file is not None:
            with whole_file(json_file) as part:
                part.write_text(json.dumps(figures, indent=2) + "\n")
    finally:  # neither of the two may lose the figures of the other
        console_of().print(terminal.table(title, rows))


def _sizes(name: str, layers: int | None, random_weights: bool) -> Qwen3MoeConfig:
    sizes = config_of(name)
    if name in PRESETS and not random_weights:
        raise RequestError(
            f"{name} is a size without weights", remedy="add --random-weights, or give a checkpoint's directory"
        )
    if layers is None:
        return sizes
    if not random_weights:
        raise RequestError("--layers cuts a model that is made, not loaded", remedy="add --random-weights")
    if not 1 <= layers <= sizes.num_hidden_layers:
        raise RequestError("--layers is out of range", got=layers, expected=f"1 .. {sizes.num_hidden_layers}")
    return dataclasses.replace(sizes, num_hidden_layers=layers)


def memory_needed(
    config: Qwen3MoeConfig,
    dtype: torch.dtype,
    batch: int,
    prompt_len: int,
    new_tokens: int,
    chunk: int,
    kv: str = PAGED,
    kv_bits: float | None = None,
) -> dict[str, int]:
    """Bytes of each kind: weights and KV cache exactly; activations of a chunk as a generous estimate in fp32."""
    with torch.device("meta"):
        weights = Qwen3Moe(config).to(dtype).parameters()  # words keep their dtype
    T = min(batch * prompt_len, chunk)
    K, I, H = config.num_experts_per_tok, config.moe_intermediate_size, config.hidden_size
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    activations = 4 * (T * (K * (3 * I + H) + 4 * H + 3 * heads) + 3 * batch * config.vocab_size)
    return {
        "weights": sum(parameter.nbytes for parameter in weights),
        "KV cache": bytes_for(
            kv, kv_bits, sizes_of(config, dtype), batch, prompt_len + new_tokens, config.max_position_embeddings
        ),
        "activations": activations,
    }


def _check_memory(needed: dict[str, int], device: torch.device, batch: int, made: bool) -> None:
    free, total = free_bytes(device), sum(needed.values())
    if total > free:
        parts = ", ".join(f"{name} {value / 2**30:.1f}" for name, value in needed.items())
        lower = ["--layers"] * made + ["--batch"] * (batch > 1) + ["--prompt-len"]
        raise RequestError(
            f"this does not fit the memory of {device}",
            got=f"a need of {total / 2**30:.1f} GiB ({parts})",
            expected=f"at most {free / 2**30:.1f} GiB, what is free now",
            remedy=f"lower {' or '.join(lower)}, or use a larger device",
        )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine() if device.type == "cpu" else str(device)


def main(args: Sequence[str] | None = None) -> int:
    """Run the benchmark with these arguments (default: the command line); returns the exit code."""
    return terminal.run(app, args, "ttnn-moe bench-model")


if __name__ == "__main__":
    sys.exit(main())
