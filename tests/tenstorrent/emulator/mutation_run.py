"""One small layer on three emulated cores: its operators with mutated kernels, and what was found."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from mutation import Mutation
from torch import Tensor

from tenstorrent_setup import Layer, OnDevice, check_out, check_routing, check_rows, part_of, rows_of
from ttnn_moe.sources import kernel_path
from ttnn_moe.tenstorrent import device
from ttnn_moe.tenstorrent.emulator import library
from ttnn_moe.tenstorrent.emulator.run import EngineFailed

OPERATORS = ("routing", "gate_up", "down", "silu_mul")
COUNTERS = "dram_read_bytes dram_written_bytes noc_read_bytes noc_written_bytes tile_multiplies semaphore_messages"


def small_layer() -> Layer:
    """Two windows of gate_up, chunks that end early, columns that cores share, an idle expert, odd ids and weights."""
    layer = Layer.make(T=130, E=8, K=5, H=288, I=64, local=7)
    idle, full = (int(e) for e in layer.mapping[-2:])
    layer.ids[layer.ids == idle] = -1
    layer.ids[:, 0] = full
    layer.ids[3, 1], layer.ids[4, 2] = 10**6, -(10**6)
    layer.ids[7, 1:], layer.ids[8, 1:], layer.ids[9, 1:] = -1, -1, -1
    # the sum in ascending k is 0, 1, 0; in any other order it is not
    layer.ids[7:10, 1:3] = full
    for t, weights in enumerate(((1e8, 1.0, -1e8), (1e8, -1e8, 1.0), (1.0, 1e8, -1e8)), 7):
        layer.weights[t, :3] = torch.tensor(weights)
    layer.weights[10] = 1.0 + 2.0**-8  # half a step of bf16
    return layer


class Runs:
    """The layer's operators, with any kernels."""

    def __init__(self, seed: int = 0):
        self.layer = small_layer()
        self.mesh = library.open_mesh(1, seed=seed, check=False, keep=True, timeout_s=20)
        there = device.Device.of(self.mesh)
        there.machine = part_of(there.machine, (3, 1), 2)
        self.on = OnDevice(self.layer, there)
        self.merged = self._merged()
        self.plain: dict[str, dict[str, int]] = {}
        self.last: list[Tensor] = []  # what the operator gave

    def _merged(self) -> Layer:
        """With duplicates summed in fp32, as routing does, for the oracle."""
        layer = self.layer
        ids, weights = layer.ids.clone(), layer.weights.clone()
        ids[7:10, 1:] = -1
        weights[7:10, 0] = torch.tensor([0.0, 1.0, 0.0])
        return replace(layer, ids=ids, weights=weights)

    def found(self, operator: str, root: Path | None = None) -> set[str]:
        """What is found in one operator: kinds of findings, "wrong ...", "more ..."."""
        wrong: set[str] = set()

        def check(name: str, body: Callable[[], object]) -> None:
            try:
                body()
            except AssertionError:
                wrong.add(f"wrong {name}")

        on, layer = self.on, self.merged
        at = {name: root if name == operator else None for name in OPERATORS}
        try:
            routed = self._at(at["routing"], on.route)
            if operator == "routing":
                picked = routed.pick("num_routed_tokens", "routed_tokens", "routed_token_weights")
                counts, *lists = map(on.back, picked.values())
                self.last = [counts, *(rows[e, : counts[0, e]] for rows in lists for e in range(layer.E))]
                check("routing", lambda: check_routing(on, routed))
            elif operator == "silu_mul":
                gate = on.programs.project(on.hidden, routed, on.gate, "gate")
                up = on.programs.project(on.hidden, routed, on.up, "up")
                rows = self._at(root, lambda: on.programs.silu_mul(gate, up, routed.bound))
                self._keep_rows(rows)
                check("product", lambda: check_rows(layer, {"activations": on.back(rows)}))
            else:
                rows = self._at(at["gate_up"], lambda: on.programs.gate_up(on.hidden, routed, on.gate, on.up))
                if operator == "gate_up":
                    self._keep_rows(rows)
                    check("activations", lambda: check_rows(layer, {"activations": on.back(rows)}))
                else:
                    out = on.out()
                    self._at(root, lambda: on.programs.down(rows, routed, on.down, out, False))
                    self.last = [on.back(out)]
                    check("out", lambda: check_out(on.back(out), layer.want()))
        except EngineFailed:
            return {"crash"}
        (result,) = self.mesh.results[-1]
        totals = {name: result.total(name) for name in COUNTERS.split()}
        plain = self.plain.setdefault(operator, totals)
        more = {f"more {name}" for name, total in totals.items() if total > plain[name]}
        return wrong | more | {finding.kind for finding in result.findings}

    def _keep_rows(self, rows: object) -> None:
        values = self.on.back(rows)
        self.last = [values[row : row + len(tokens)] for _, row, tokens in rows_of(self.merged)]

    def findings(self) -> list[str]:
        """Of the last run."""
        return [str(finding) for finding in self.mesh.results[-1][0].findings]

    def _at(self, root: Path | None, launch: Callable[[], object]):  # type: ignore[no-untyped-def]
        self.mesh.root = root
        try:
            return launch()
        finally:
            self.mesh.root = None


def mutate(mutation: Mutation, folder: Path) -> Path:
    """A copy of the kernels with the mistake."""
    made = Path(shutil.copytree(kernel_path("device_kernels"), folder / "device_kernels"))
    file = made / mutation.file
    text = file.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file} holds {mutation.old!r} {text.count(mutation.old)} times"
    file.write_text(text.replace(mutation.old, mutation.new))
    return made
