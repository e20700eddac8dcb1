"""What Qwen3-30B-A3B's MoE layer costs one device of a 1x8 Tenstorrent mesh: counted in the emulator, not timed.

    PYTHONPATH=. python benchmarks/tenstorrent_cost.py --json benchmarks/results/tenstorrent_cost.json \
        --plot docs/tenstorrent_cost.svg

The plot needs matplotlib (pip install '.[plot]'). The device is the one of the mesh that most pairs go to.

The planner's programs and the kernels of device_kernels/ run unchanged; docs/emulator.md says what is counted and how
the minimum of each figure is defined. Values are zeros: counts do not depend on them. The roofline time is the larger
of the layer's DRAM bytes over the board's bandwidth and its tile multiplies on the busiest core; no card was timed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from command_line import Json, one_of, run_script, write
from rich.console import Console
from rich.table import Table
from table_text import need_matplotlib
from torch import Tensor

from ttnn_moe import _planner
from ttnn_moe.sizes import ceil_div, power_of_2
from ttnn_moe.tenstorrent.device import bank_cores_of
from ttnn_moe.tenstorrent.emulator import CHIPS, EmulatedChip, Result, run
from ttnn_moe.tenstorrent.emulator.formats import find_format
from ttnn_moe.tenstorrent.emulator.links import load
from ttnn_moe.tenstorrent.emulator.mesh import Mesh
from ttnn_moe.tenstorrent.weight_formats import FIDELITIES, FORMATS, ExpertFormats

E, D, K, H, I = 128, 8, 8, 2048, 768
LOCAL = E // D
MESSAGES = ("dram_packets", "noc_packets", "barriers", "semaphore_messages")
CYCLES_OF_A_PHASE = 16  # of a 32 x 32 x 32 multiply
PHASES = {form: FIDELITIES.index(_planner.default_fidelity(form)) + 1 for form in FORMATS}


@dataclass
class Cost:
    """Counts of one layer on one device, and what they are over the least possible."""

    chip: str
    routing: str
    weights: str
    T: int
    pairs: int  # token-expert pairs of the device
    active_experts: int
    weight_bytes: int
    weight_over: float
    other_bytes: int
    other_over: float
    tile_multiplies: int
    multiplies_over: float
    cores: int
    cores_with_weights: int
    max_over_mean: float
    l1_high_water: int
    roofline_us: float
    simulated_us: float
    dram_packets: int  # reads and writes of DRAM
    noc_packets: int  # reads, writes and multicasts between cores
    barriers: int  # waits of a role for its transfers
    signals: int  # semaphore messages; a multicast is one
    split: bool = False  # every device holds I / D of all experts
    hops: float = 0.0  # links of the NoC that a byte from DRAM passes, on average
    link_us: float = 0.0  # what the busiest link carries from DRAM in each program, over a link's bandwidth
    exchanged_us: float = 0.0  # the same, had each kernel read over the other NoC

    @property
    def case(self) -> tuple[object, ...]:
        return self.chip, self.routing, self.weights, self.T, self.split


def draw(T: int, routing: str) -> tuple[Tensor, Tensor]:
    """ids [T, K] and weights. uniform: any K of E experts; skewed: as a Zipf law in order of the experts."""
    g = torch.Generator().manual_seed(0)
    scores = -torch.log(torch.rand(T, E, generator=g).clamp_min(1e-9))  # exponential variates
    share = torch.ones(E) if routing == "uniform" else 1.0 / torch.arange(1, E + 1).float()
    weights, ids = (share / scores).topk(K)
    return ids.int(), weights / weights.sum(-1, keepdim=True)


def emulate(chip: str, T: int, routing: str, weight_format: str, split: bool = False) -> Cost:
    """Costs of the device that most pairs go to; split: of any, which holds 1 / D of every expert."""
    model, formats = CHIPS[chip], ExpertFormats.parse(weight_format)
    device = EmulatedChip(model)
    bound = max(32, power_of_2(T))
    local, width = (E, I // D) if split else (LOCAL, I)
    sizes = {"T": bound, "E": E, "E_local": local, "K": K, "H": H, "I": width}
    problem = _planner.Problem(**sizes, weight_format=formats.gate_up, banked=formats.banked)
    of_down = _planner.Problem(**sizes, weight_format=formats.down, banked=formats.banked)
    near = bank_cores_of(Mesh(model), model.arch, model.grid)
    machine = _planner.Machine(grid=model.grid, l1_bytes=model.l1_size, dram_banks=model.dram_banks, bank_cores=near)
    ids, weights = draw(T, routing)
    here = int(torch.bincount(ids.flatten().long() // local, minlength=E // local).argmax()) * local
    tensors: dict[str, Any] = {
        "topk_ids": device.tensor(ids, "int32", tiled=False),
        "topk_weights": device.tensor(weights, "float32", tiled=False),
        "device_expert_mapping": device.tensor(here + torch.arange(local)[None], "int32", tiled=False),
        "num_routed_tokens": device.empty((1, E), "int32", tiled=False),
        "routed_tokens": device.empty((E, problem.padded_tokens), "int32", tiled=False),
        "routed_token_weights": device.empty((E, problem.padded_tokens), "bfloat16", tiled=False),
        "hidden": device.tensor(torch.zeros(T, H), "bfloat16", tiled=False),
    }
    gate, up = (device.tensor(torch.zeros(local, H, width), formats.gate_up) for _ in range(2))
    down = device.tensor(torch.zeros(local, width, H), formats.down)
    activations = device.empty((max(problem.max_blocks, 1) * 32, width), "bfloat16")
    out = device.empty((T, H), "bfloat16")

    def launch(program: Any, more: dict[str, Any], **scalars: int) -> Result:
        return run(program, device, {**tensors, **more}, scalars, exact=False)

    routed = launch(_planner.plan_routing(problem, machine), {}, T=T)
    first = launch(_planner.plan_gate_up(problem, machine, 2), {"weight_0": gate, "weight_1": up, "out": activations})
    second = launch(
        _planner.plan_down(of_down, machine),
        {"weight_0": down, "activations": activations, "out": out},
        token_tiles=ceil_div(T, 32),
        accumulate=0,
    )
    tokens = torch.bincount(ids.flatten().long(), minlength=E)[here : here + local]
    return count(chip, routing, formats, tokens, T, width, [routed, first, second])


def count(
    chip: str, routing: str, formats: ExpertFormats, tokens: Tensor, T: int, width: int, results: list[Result]
) -> Cost:
    model = CHIPS[chip]
    pairs, active = int(tokens.sum()), int((tokens > 0).sum())
    _, first, second = results
    weight_bytes = sum(
        r.tensors[name]["read_bytes"] for r in (first, second) for name in ("weight_0", "weight_1") if name in r.tensors
    )
    every = sum(r.total("dram_read_bytes") + r.total("dram_written_bytes") for r in results)
    gate_up, down = (find_format(name).tile_bytes for name in (formats.gate_up, formats.down))
    least_weights = active * (2 * gate_up + down) * (H // 32) * (width // 32)
    # x once per pair, activations once each way, out once; all bf16
    least_other = pairs * H * 2 + 2 * pairs * width * 2 + T * H * 2
    multiplies = sum(r.total("tile_multiplies") for r in results)
    least_multiplies = int(((tokens + 31) // 32).sum()) * 3 * (H // 32) * (width // 32)
    cores = model.grid[0] * model.grid[1]
    work: dict[tuple[int, int], int] = {}
    cycles = dict[tuple[int, int], int]()
    readers = 0
    for result in (first, second):
        for core, counters in result.cores.items():
            multiplied = counters["tile_multiplies"]
            work[core] = work.get(core, 0) + multiplied
            phases = PHASES[formats.gate_up if result is first else formats.down]
            cycles[core] = cycles.get(core, 0) + multiplied * phases * CYCLES_OF_A_PHASE
    readers = min(
        sum(counters["tile_multiplies"] > 0 for counters in result.cores.values()) for result in (first, second)
    )
    busiest = max(work.values(), default=0)
    roofline = max(every / model.dram_bytes_per_s, max(cycles.values(), default=0) / model.clock_hz)
    loads = [load(model, result) for result in results]
    exchanged = [load(model, result, exchanged=True) for result in results]
    us_of_a_byte = 1e6 / model.noc_bytes_per_cycle / model.clock_hz  # on a link
    return Cost(
        chip,
        routing,
        str(formats),
        T,
        pairs,
        active,
        weight_bytes,
        _over(weight_bytes, least_weights),
        every - weight_bytes,
        _over(every - weight_bytes, least_other),
        multiplies,
        _over(multiplies, least_multiplies),
        cores,
        readers,
        _over(busiest, sum(work.values()) / cores),
        max(core["l1_high_water"] for r in results for core in r.cores.values()),
        roofline * 1e6,
        sum(r.cycles for r in results) / model.clock_hz * 1e6,
        *(sum(r.total(name) for r in results) for name in MESSAGES),
        width != I,
        sum(one.carried for one in loads) / sum(one.read for one in loads),
        *(sum(one.busiest for one in of) * us_of_a_byte for of in (loads, exchanged)),
    )


def _over(value: float, least: float) -> float:
    return value / least if least else float(value > 0)


def table(costs: list[Cost]) -> Table:
    made = Table(title=f"Qwen3-30B-A3B's layer, one of {D} devices: E/D={LOCAL} K={K} H={H} I={I}")
    for head in (
        "chip",
        "weights",
        "routing",
        "T",
        "pairs",
        "active",
        "weights MB",
        "over",
        "other MB",
        "over",
        "multiplies",
        "over",
        "max/mean",
        "cores",
        "L1 KiB",
        "roofline us",
        "model us",
        "DRAM packets",
        "NoC packets",
        "barriers",
        "signals",
        "hops",
        "link us",
    ):
        made.add_column(head, justify="right")
    for c in costs:
        made.add_row(
            c.chip,
            c.weights,
            c.routing,
            f"{c.T}{' split' if c.split else ''}",
            str(c.pairs),
            str(c.active_experts),
            f"{c.weight_bytes / 1e6:.1f}",
            f"{c.weight_over:.3f}",
            f"{c.other_bytes / 1e6:.2f}",
            f"{c.other_over:.2f}",
            str(c.tile_multiplies),
            f"{c.multiplies_over:.3f}",
            f"{c.max_over_mean:.2f}",
            f"{c.cores_with_weights}/{c.cores}",
            str(ceil_div(c.l1_high_water, 1024)),
            f"{c.roofline_us:.0f}",
            f"{c.simulated_us:.0f}",
            *map(str, (c.dram_packets, c.noc_packets, c.barriers, c.signals)),
            f"{c.hops:.1f}",
            f"{c.link_us:.0f}",
        )
    return made


def draw_plot(costs: list[Cost], path: Path) -> None:
    """Roofline and modelled time of each chip against T, and what of the roofline is weights."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "tenstorrent_cost", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    chips = list(dict.fromkeys(c.chip for c in costs))
    figure, axes = pyplot.subplots(1, len(chips), figsize=(4.6 * len(chips), 4.2), sharey=True, squeeze=False)
    for axis, chip in zip(axes[0], chips, strict=True):
        for routing, colour in (("uniform", "#2471a3"), ("skewed", "#c0392b")):
            rows = [c for c in costs if (c.chip, c.routing, c.weights) == (chip, routing, costs[0].weights)]
            if not rows:
                continue
            T = [c.T for c in rows]
            axis.plot(T, [c.simulated_us for c in rows], "o-", color=colour, markersize=4, label=f"{routing}: model")
            axis.plot(T, [c.roofline_us for c in rows], "--", color=colour, label=f"{routing}: roofline")
            least = [c.weight_bytes / CHIPS[chip].dram_bytes_per_s * 1e6 for c in rows]
            axis.plot(T, least, ":", color=colour, label=f"{routing}: weights alone")
        axis.set(xscale="log", yscale="log", xlabel="T, tokens", title=f"{chip} ({CHIPS[chip].arch})")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("microseconds, counted in the emulator; no card was timed")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def main(
    tokens: Annotated[str, typer.Option(help="T, separated by commas.")] = "1,32,128,4096",
    chips: Annotated[str, typer.Option(help="n150 (Wormhole), p150 (Blackhole).")] = "n150,p150",
    routings: Annotated[str, typer.Option(help="uniform, skewed.")] = "uniform,skewed",
    weights: Annotated[
        str, typer.Option(help="With / between: bfloat16, bfloat8_b, bfloat4_b,bfloat8_b.")
    ] = "bfloat16",
    split: Annotated[bool, typer.Option("--split", help="Every device holds a part of every expert.")] = False,
    json_file: Json = None,
    plot: Annotated[Path | None, typer.Option(help="Draw them here.")] = None,
) -> None:
    """Count what the layer costs one device."""
    one_of(chips, CHIPS, "chips")
    if plot is not None:
        need_matplotlib()
    costs = [
        emulate(chip, int(T), routing, form, split)
        for chip in chips.split(",")
        for form in weights.split("/")
        for routing in routings.split(",")
        for T in tokens.split(",")
    ]
    if json_file is not None:
        kept = json.loads(json_file.read_text()) if json_file.exists() else {}
        known = {cost.case: cost for cost in (Cost(**row) for row in kept.get("costs", ()))}
        known.update((cost.case, cost) for cost in costs)
        about = {**kept, "E": E, "D": D, "K": K, "H": H, "I": I, "costs": [asdict(cost) for cost in known.values()]}
        write(json_file, about)
    Console(width=230).print(table(costs))
    if plot is not None:
        draw_plot(costs, plot)


if __name__ == "__main__":
    run_script(main)
