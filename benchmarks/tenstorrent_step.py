"""What a decode step of Qwen3-30B-A3B reads on a chip of a 1x8 mesh, and an estimate of its time. Nothing was timed.

    PYTHONPATH=. python benchmarks/tenstorrent_step.py --json benchmarks/results/tenstorrent_cost.json

Experts are counted in the emulator (tenstorrent_cost.py writes the counts to the same file). The bytes of ttnn's
operators are the sizes of the weights and of the keys and values that they read once a step, as
`ttnn-moe doctor --plan` lists them. Activations between ttnn's operators are not counted.

The estimate adds bytes over bandwidth, launches and sums over the chips. Its constants are others': see SOURCES.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from command_line import run_script, write

from ttnn_moe import _planner
from ttnn_moe.models.qwen3 import PRESETS
from ttnn_moe.models.qwen3.tt.operators import SUMMED_ATTENTION, WIDENED, operators
from ttnn_moe.models.qwen3.tt.sizes import model_sizes
from ttnn_moe.sizes import ceil_div
from ttnn_moe.tenstorrent.balance import visits
from ttnn_moe.tenstorrent.memory import PAGE, ModelSizes, tensor_bytes
from ttnn_moe.tenstorrent.plans import plan_model
from ttnn_moe.tenstorrent.weight_formats import ModelFormats

NAME, D, SEQUENCE = "qwen3-30b-a3b", 8, 128
EIGHT = "attention=bfloat8_b,head=bfloat8_b"
KEYS = f"{EIGHT},kv=bfloat8_b"
INTERLEAVED, BY_BANK = 0.65, 0.90
LAUNCH_US, SUM_US = (2.0, 5.0), (45.0, 65.0)
SOURCES = {
    "bandwidth": "65% of the peak for weights interleaved over DRAM banks, 90% for weights sharded by bank. Both are "
    "upstream's figures. tt-metal's moe_gpt reads bfloat4_b at 258 of 288 GB/s on Wormhole",
    "sum": "45 to 65 us for reduce_scatter and all_gather of [32, 2048] over 8 chips. These are upstream's figures",
    "launch": "2 to 5 us for an operator in a trace. This is an assumption, from no measurement of this model",
}


@dataclass(frozen=True)
class Way:
    """A way to run the model: how attention, experts and formats lie on the chips."""

    name: str
    weights: str
    split: bool
    shared_attention: bool


WAYS = (
    Way("replicated attention, bfloat16", "bfloat16", False, False),
    Way("heads by 8, bfloat8_b", f"bfloat8_b,{EIGHT}", False, True),
    Way("heads by 8, gate_up bfloat4_b, else bfloat8_b", f"bfloat4_b,bfloat8_b,{EIGHT}", False, True),
    Way("the same, experts split by 8", f"bfloat4_b,bfloat8_b,{EIGHT}", True, True),
    Way("heads by 8, experts bfloat4_b, else bfloat8_b", f"bfloat4_b,{EIGHT}", False, True),
    Way("gate_up bfloat4_b, else bfloat8_b, keys and values too", f"bfloat4_b,bfloat8_b,{KEYS}", False, True),
    Way("experts bfloat4_b, else bfloat8_b, keys and values too", f"bfloat4_b,{KEYS}", False, True),
    Way("the same, head bfloat4_b", f"bfloat4_b,{KEYS},head=bfloat4_b", False, True),
    Way(
        "experts bfloat4_b, else bfloat8_b, keys, values and router too",
        f"bfloat4_b,{KEYS},router=bfloat8_b",
        False,
        True,
    ),
    Way("experts bfloat4_b and split, else bfloat8_b, keys and values too", f"bfloat4_b,{KEYS}", True, True),
)


@dataclass(frozen=True)
class Step:
    """Bytes that the busiest chip reads and writes in a decode step.

    Attributes:
        way, weights, split: as in Way.
        experts: of the weights that the most visited chip reads, on average. other: what our operators move besides.
        model_us: of our operators of all layers, by the emulator's model of time, in proportion to the visited
            experts; 0: this case was not emulated.
        operators: of a step. sums: reduce_scatter with all_gather.
    """

    way: str
    weights: str
    split: bool
    B: int
    attention: int
    experts: int
    other: int
    head: int
    kv: int
    model_us: float
    operators: int
    sums: int

    @property
    def total(self) -> int:
        return self.attention + self.experts + self.other + self.head + self.kv


def attention_bytes(model: ModelSizes, formats: ModelFormats, shared: bool) -> int:
    """Of qkv and out of all layers on a chip; shared: its heads of D, and its keys' and values' heads."""
    chips = D if shared else 1
    heads, kv = model.heads // chips, max(1, model.kv_heads // chips)
    form = formats.of("attention")
    qkv = tensor_bytes(((model.H, (heads + 2 * kv) * model.head_dim), form, "TILE"))
    return model.layers * (qkv + tensor_bytes(((heads * model.head_dim, model.H), form, "TILE")))


def kv_bytes(model: ModelSizes, formats: ModelFormats, B: int, shared: bool) -> int:
    """Keys and values that B rows of SEQUENCE tokens attend to, in whole pages."""
    heads = max(1, model.kv_heads // (D if shared else 1))
    pages = B * ceil_div(SEQUENCE, PAGE)
    return 2 * model.layers * tensor_bytes(((pages, heads, PAGE, model.head_dim), formats.of("kv"), "TILE"))


def step(way: Way, B: int, counted: list[dict[str, Any]], chip: str) -> Step:
    """The step of B rows. counted: tenstorrent_cost.json's rows."""
    config, formats = PRESETS[NAME], ModelFormats.parse(way.weights)
    model = model_sizes(config)
    parts = {part.name: part for part in plan_model(NAME, model, f"1x{D}", chip, way.weights, B, SEQUENCE).parts}
    # the model's own sizes, where it shares attention over the chips
    own = way.shared_attention and parts["attention"].chips == D
    attention = parts["attention"].per_chip if own else attention_bytes(model, formats, way.shared_attention)
    seen = visits(model.E, model.K, D, B)
    expert = parts["experts"].per_chip * D // (model.layers * model.E)
    of_one = {(row["T"], row.get("split", False), row["weights"]): row for row in counted if row["chip"] == chip}
    row = of_one.get((B, way.split, str(formats.experts())))
    any_row = row or of_one[B, way.split, next(form for b, s, form in of_one if (b, s) == (B, way.split))]
    visited = seen.mean if way.split else seen.most
    return Step(
        way.name,
        way.weights,
        way.split,
        B,
        attention + parts["router"].per_chip,
        int(model.layers * expert * visited),
        model.layers * any_row["other_bytes"],
        parts["head"].per_chip,
        kv_bytes(model, formats, B, way.shared_attention),
        model.layers * row["simulated_us"] * visited / row["active_experts"] * (D if way.split else 1) if row else 0.0,
        operators(config, D) - (0 if way.shared_attention else model.layers * (SUMMED_ATTENTION + WIDENED)),
        model.sparse_layers + (model.layers if way.shared_attention else 0),
    )


def estimate(made: Step, chip: str, share: float) -> tuple[float, float]:
    """The least and the most milliseconds of a step, at this share of the peak bandwidth.

    Our operators take the emulator's time where that is more than their bytes take.
    """
    us = 1e6 / (_planner.find_chip(chip).dram_bytes_per_s * share)
    ours = max((made.experts + made.other) * us, made.model_us)
    rest = (made.attention + made.head + made.kv) * us
    low, high = (made.operators * launch + made.sums * one for launch, one in zip(LAUNCH_US, SUM_US, strict=True))
    return (ours + rest + low) / 1e3, (ours + rest + high) / 1e3


def main(
    json_path: Annotated[Path, typer.Option("--json", help="tenstorrent_cost.py's file; the steps are added.")],
    chip: Annotated[str, typer.Option(help="n150 (Wormhole), p150 (Blackhole).")] = "n150",
) -> None:
    """Count every way to run the model, and estimate its time."""
    data = json.loads(json_path.read_text())
    counted = [row for row in data["costs"] if row["routing"] == "uniform"]
    rows = []
    for way in WAYS:
        for B in (1, 32):
            made = step(way, B, counted, chip)
            times = {
                str(share): [round(ms, 2) for ms in estimate(made, chip, share)] for share in (INTERLEAVED, BY_BANK)
            }
            rows.append({**asdict(made), "total": made.total, "ms": times})
            print(f"{way.name}, B {B}: {made.total / 1e9:.2f} GB, {times}")
    data["steps"] = {"model": NAME, "mesh": f"1x{D}", "chip": chip, "S": SEQUENCE, "sources": SOURCES, "rows": rows}
    write(json_path, data)


if __name__ == "__main__":
    run_script(main)
