"""The `ttnn-moe` command. Each subcommand imports what it needs when it runs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from .command_line import needs, run_app
from .errors import ContractError, RequestError
from .sizes import natural
from .tables import console_of

if TYPE_CHECKING:
    import torch

app = typer.Typer(name="ttnn-moe", invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False)


# options of several commands; the default sizes of a layer are Qwen3-30B-A3B's
MOST = 1 << 24
Experts = Annotated[int, typer.Option(help="E, experts.", min=1, max=MOST)]
Topk = Annotated[int, typer.Option(help="K, experts per token.", min=1, max=MOST)]
Hidden = Annotated[int, typer.Option(help="H, hidden size.", min=1, max=MOST)]
Intermediate = Annotated[int, typer.Option(help="I, expert intermediate size.", min=1, max=MOST)]
Tokens = Annotated[str, typer.Option(help="Numbers of tokens of a call.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32; or bf16, fp16, fp32.")]
Format = Annotated[str, typer.Option(help="Of the experts' weights: dense, int4_24, mxfp4 or mxfp4_boxes.")]
Activation = Annotated[str, typer.Option(help="silu; or clamped_swiglu with biases, as gpt-oss has it, in mxfp4.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
MOST_TOKENS = 16384
TOKENS = f"1,8,32,128,512,1024,2048,4096,{MOST_TOKENS}"


def _print_version(asked: bool) -> None:
    if asked:
        from . import __version__

        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def _common(
    context: typer.Context,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log to stderr what is chosen, and why.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """One mixture-of-experts operator on several machines."""
    if verbose:
        from . import logs

        logs.enable("debug")
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def doctor(
    context: typer.Context,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Instead: the programs and the memory of this model on a Tenstorrent mesh, which need not be here. "
            "A Qwen3-MoE checkpoint's directory, or qwen3-30b-a3b.",
        ),
    ] = None,
    mesh: Annotated[str, typer.Option(help="With --plan: 1xD chips that share the model.")] = "1x8",
    chip: Annotated[str, typer.Option(help="With --plan: n150, n300 or p150.")] = "n300",
    weights: Annotated[
        str, typer.Option(help="With --plan: bfloat16, bfloat8_b, bfloat4_b; see generate --weights.")
    ] = "bfloat16",
    kv: Annotated[
        str | None, typer.Option(help="With --plan: bfloat8_b, the KV cache.", show_default="bfloat16")
    ] = None,
    batch: Annotated[int, typer.Option(help="With --plan: sequences.", min=1, max=MOST)] = 32,
    sequence: Annotated[int, typer.Option(help="With --plan: tokens of each sequence.", min=1, max=MOST)] = 128,
    as_json: Json = False,
) -> None:
    """Show which backends are here, why the others are not, versions and devices."""
    from . import doctor as doctor_

    if plan is not None:
        from .models.qwen3.config import config_of
        from .models.qwen3.tt.sizes import model_sizes
        from .tenstorrent import plans

        sizes = model_sizes(config_of(plan))
        formats = weights if kv is None else f"{weights},kv={kv}"
        report = plans.plan_model(plan, sizes, mesh, chip, formats, batch, sequence)
        if as_json:
            typer.echo(json.dumps(report.as_json(), indent=2))
        else:
            doctor_.render_plan(report, console_of())
        plans.check_fits(report, sizes)
        return
    needs(context, "--plan", "mesh", "chip", "weights", "kv", "batch", "sequence")
    found = doctor_.examine()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        doctor_.render(found, console_of())


@app.command()
def selfcheck(
    backend: Annotated[str, typer.Option(help="A backend, or auto: the first that is here.")] = "auto",
    dtype: Dtype = "bf16",
    format: Format = "dense",
) -> None:
    """Run every operator of a backend on this machine against plain arithmetic; the last line says what passed."""
    from .selfcheck import runner

    if not runner.selfcheck(backend, typer.echo, _dtype(dtype), _format(format)):
        raise typer.Exit(1)


@app.command()
def bench(
    tokens: Annotated[str, typer.Option(help="Numbers of tokens, as in 1,32,4096s; with an s: skewed routing.")],
    experts: Experts = 128,
    topk: Topk = 8,
    hidden: Hidden = 2048,
    intermediate: Intermediate = 768,
    dtype: Dtype = "bf16",
    backend: Annotated[str, typer.Option(help="A backend, or auto: all that can run here.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: the first the backend runs on.")] = None,
    rounds: Annotated[int, typer.Option(help="Samples of a time, at most.", min=1, max=MOST)] = 100,
    seed: Annotated[int, typer.Option(help="Of weights and draws.", min=0, max=2**63 - 1)] = 0,
    tune: Annotated[bool, typer.Option("--tune", help="Time the tiles of CUDA kernels and keep the fastest.")] = False,
    format: Format = "dense",
    activation: Activation = "silu",
    as_json: Json = False,
) -> None:
    """Measure one MoE layer of random weights, beside the floor of its bytes and operations."""
    from .bench import command
    from .bench.layer import Layer

    layer = Layer("layer", experts, topk, hidden, intermediate, weight_format=_format(format))
    if _activation(activation) != layer.activation:
        layer = layer.as_gpt_oss(activation)
    if tune:
        refused = ["--json"] * as_json + [f"--backend {backend}"] * (backend not in ("auto", "cuda"))
        if refused:
            expected = "tiles of backend cuda, and a table"
            raise RequestError("--tune has no such output or backend", got=" and ".join(refused), expected=expected)
        command.tune(layer, tokens, dtype, device, rounds, seed)
        return
    command.bench(layer, tokens, dtype, backend, device, rounds, seed, as_json)


@app.command()
def warmup(
    tokens: Annotated[
        str | None, typer.Option(help="Numbers of tokens of a call.", show_default=f"each up to {MOST_TOKENS}")
    ] = None,
    experts: Experts = 128,
    topk: Topk = 8,
    hidden: Hidden = 2048,
    intermediate: Intermediate = 768,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16; or bf16, fp16.")] = "bf16",
    arch: Annotated[str | None, typer.Option(help="sm_80, sm_90a, ...; default: this GPU's, or sm_90a.")] = None,
    format: Format = "dense",
    activation: Activation = "silu",
    tiles: Annotated[
        str | None, typer.Option(help="With --format mxfp4 on sm_120f: tiles instead of tokens, as in 8,16,64x256.")
    ] = None,
) -> None:
    """Compile the CUDA C++ kernels of a layer's sizes, so that the first call need not. Needs no GPU."""
    from .bench.layer import Layer
    from .cuda.moe.warmup import sizes_up_to, specs_of, target, warm_up

    if tiles is not None and (tokens is not None or not tiles):
        got = "--tokens and --tiles" if tiles else "--tiles ''"
        raise RequestError("tiles stand instead of tokens", got=got, expected="tokens, or names of tiles")
    kind, found, names = _dtype(dtype, "bfloat16", "float16"), target(arch), tiles.split(",") if tiles else []
    Layer("layer", experts, topk, hidden, intermediate, weight_format=_format(format))  # checks the sizes
    if names and not (format.startswith("mxfp4") and found.name == "sm_120f"):
        raise ContractError(
            "these kernels have no tiles to name",
            got=f"--format {format}, kernels for {found.name}",
            expected="--format mxfp4, kernels for sm_120f",
            remedy="--format mxfp4 --arch sm_120f, or no --tiles",
        )
    sizes = experts, topk, hidden, intermediate, kind, found, format, _activation(activation), names
    specs = specs_of(sizes_up_to(MOST_TOKENS) if tokens is None else _tokens(tokens), *sizes)
    start = time.perf_counter()
    made = warm_up(specs)
    took = f" in {time.perf_counter() - start:.1f} s" if made else ""
    typer.echo(f"{len(specs)} kernels for {found.name} are ready, {made} of them compiled now{took}")


@app.command()
def why(
    context: typer.Context,
    tokens: Tokens = TOKENS,
    experts: Experts = 128,
    topk: Topk = 8,
    hidden: Hidden = 2048,
    intermediate: Intermediate = 768,
    dtype: Dtype = "bf16",
    backend: Annotated[str, typer.Option(help="A backend, or auto: the first that can.")] = "auto",
    device: Annotated[
        str | None,
        typer.Option(help="Where the tensors are: cuda or cpu.", show_default="cuda where a GPU is, else cpu"),
    ] = None,
    format: Format = "dense",
    operators: Annotated[
        bool, typer.Option("--operators", help="Also the other operators of a decoder layer.")
    ] = False,
    heads: Annotated[int, typer.Option(help="With --operators: query heads.", min=1, max=MOST)] = 32,
    kv_heads: Annotated[int, typer.Option(help="With --operators: key and value heads.", min=1, max=MOST)] = 4,
    head_dim: Annotated[int, typer.Option(help="With --operators: size of a head.", min=1, max=MOST)] = 128,
) -> None:
    """Show what runs a layer's sizes on this machine, with which kernels, and why nothing else does. Needs no GPU."""
    from . import explain, registry
    from .bench.layer import Layer
    from .cuda.device import interpreted

    if not operators:
        needs(context, "--operators", "heads", "kv_heads", "head_dim")
    kind, console = _dtype(dtype), console_of()
    here = registry.probe("cuda").available and not interpreted()
    where = explain.device_type(("cuda" if here else "cpu") if device is None else device)
    layer = Layer("layer", experts, topk, hidden, intermediate, kind, _format(format))
    counts = _tokens(tokens)
    problems = [layer.problem(T, where) for T in counts]
    if operators and heads % kv_heads:
        raise RequestError(
            "query heads do not share key and value heads evenly",
            got=f"--heads {heads} --kv-heads {kv_heads}",
            expected="heads that are a multiple of kv-heads",
        )
    there = explain.where_operators_run(where) if operators else None  # before anything is printed
    if there is not None and max(counts) > MOST:
        raise RequestError("too many tokens", got=max(counts), expected=f"at most {MOST} with --operators")
    if device is None:
        typer.echo(f"tensors on {where}: {'a' if here else 'no'} GPU is here")
    explain.print_moe(problems, backend, console)
    if there is not None:
        if there.type != where:
            typer.echo(f"no {where} device is here: the other operators are those of tensors on the CPU")
        explain.print_operators(counts, hidden, heads, kv_heads, head_dim, experts, topk, kind, there, console)


def _tokens(text: str) -> list[int]:
    counts = [natural(count.strip()) for count in text.split(",")]
    if not all(counts):
        raise ContractError("these are no numbers of tokens", got=repr(text), expected="numbers like 1,512")
    return [count for count in counts if count]


def _format(name: str) -> str:
    from .formats import get_format

    return get_format(name).name


def _activation(name: str) -> str:
    from .activations import ACTIVATIONS

    if name not in ACTIVATIONS:
        raise ContractError("unknown activation", got=repr(name), expected=f"one of {list(ACTIVATIONS)}")
    return name


def _dtype(name: str, *able: str) -> torch.dtype:
    """able: long names; default: all."""
    from .arguments import FLOATS, names_of
    from .contract import HIDDEN_DTYPES

    dtypes = [FLOATS[long] for long in able] or HIDDEN_DTYPES
    if FLOATS.get(name) not in dtypes:
        raise ContractError("unknown dtype", got=repr(name), expected=names_of(*dtypes))
    return FLOATS[name]


@app.command()
def cache(
    clear: Annotated[
        bool, typer.Option("--clear", help="Remove every compiled kernel, and what killed writers left.")
    ] = False,
) -> None:
    """Show the caches: folders, what they hold, and what killed writers left; or remove the compiled kernels."""
    from . import caches

    for line in caches.clear() if clear else caches.report():
        typer.echo(line)


# the model's own parsers take every option, --help too: they are defined once
FORWARDED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=FORWARDED, add_help_option=False)
def generate(context: typer.Context) -> None:
    """Generate text with a Qwen3-MoE checkpoint (options: ttnn-moe generate --help)."""
    from .models.qwen3 import demo

    raise typer.Exit(run_app(demo.app, context.args, "ttnn-moe generate"))


@app.command("bench-model", context_settings=FORWARDED, add_help_option=False)
def bench_model(context: typer.Context) -> None:
    """Time prefill and decode of a Qwen3-MoE of a given size (options: ttnn-moe bench-model --help)."""
    from .models.qwen3 import bench

    raise typer.Exit(run_app(bench.app, context.args, "ttnn-moe bench-model"))


@app.command(context_settings=FORWARDED, add_help_option=False)
def quantize(context: typer.Context) -> None:
    """Convert the experts of a Qwen3-MoE checkpoint to another format (options: ttnn-moe quantize --help)."""
    from .models.qwen3.quantize import command

    raise typer.Exit(run_app(command.app, context.args, "ttnn-moe quantize"))


@app.command(context_settings=FORWARDED, add_help_option=False)
def profile(context: typer.Context) -> None:
    """Show the experts' share of a Qwen3-MoE checkpoint's decode step (options: ttnn-moe profile --help)."""
    from .models.qwen3 import profile as profile_

    raise typer.Exit(run_app(profile_.app, context.args, "ttnn-moe profile"))


def run(args: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (default: those of the process); returns its exit code.

    Raises:
        RequestError: an argument is wrong. Other errors pass, to command_line.guarded.
    """
    given = list(sys.argv[1:] if args is None else args)
    for option, value in zip(["", *given], given, strict=False):
        name, equals, _ = value.partition("=")
        if any("\ud800" <= one <= "\udfff" for one in value) and (name if equals else option) not in PATHS:
            raise RequestError(
                "an argument is not UTF-8 text",
                got=ascii(value[:100]),
                expected=f"UTF-8; only {', '.join(PATHS)} take other bytes",
            )
    return run_app(app, given, "ttnn-moe")


# options whose values may hold any bytes
PATHS = ("--model", "--config", "--plan", "--json", "--out", "--calibrate")
