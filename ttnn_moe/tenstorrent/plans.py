"""Programs and memory of a whole model on a mesh that need not be here: what `ttnn-moe doctor --plan` shows."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ContractError
from ..sizes import ceil_div
from .all_reduce import partial_dtype
from .device import MOST_CHIPS, Device
from .heads import fits_heads
from .layer_sizes import Sizes
from .memory import PAGE, ModelSizes, Part, parts, tensor_bytes
from .programs import LEAST_T, LayerPrograms
from .runtime import PLANNER_REMEDY
from .weight_formats import FORMATS, ModelFormats

if TYPE_CHECKING:
    from .._planner import Chip, Program

MODEL_OPERATORS = ("routing", "gate_up", "down")
SMALLEST = {"wormhole_b0": "n150", "blackhole": "p150"}
"""The chip with the least memory of each architecture."""


@dataclass(frozen=True)
class Plan:
    """One operator's program for calls of up to T tokens, on one chip.

    Attributes:
        cores: that run the program. share: least and most `unit` of a core. l1_bytes: buffers of a core.
        weight_bytes, row_bytes: DRAM traffic of a call of T tokens whose uniform routing reaches every expert of the
            chip: each weight once, and the least traffic for the rows of its pairs.
    """

    operator: str
    T: int
    cores: int
    share: tuple[int, int]
    unit: str
    l1_bytes: int
    weight_bytes: int
    row_bytes: int


@dataclass(frozen=True)
class Report:
    """A model on a mesh. Make it with `plan_model`."""

    model: str
    mesh: str
    chip: str
    weight_format: str
    batch: int
    sequence: int
    usable_l1: int
    dram_bytes: int
    plans: list[Plan]
    parts: list[Part]

    @property
    def needed(self) -> int:
        """Bytes of DRAM of each chip."""
        return sum(part.per_chip for part in self.parts)

    @property
    def fits(self) -> bool:
        return self.needed <= self.dram_bytes

    def as_json(self) -> dict[str, Any]:
        """The report as plain values, with the bytes that are needed and whether they fit."""
        return {**asdict(self), "needed": self.needed, "fits": self.fits}


def devices_of(mesh: str) -> int:
    """D of "1xD".

    Raises:
        ContractError: the mesh has another form, or more than 32 chips.
    """
    found = re.fullmatch(r"1x([1-9]\d?)", mesh)
    if not found or int(found[1]) > MOST_CHIPS:
        raise ContractError("no such mesh", got=repr(mesh), expected=f"1xD, with D from 1 to {MOST_CHIPS}")
    return int(found[1])


def plan_model(
    model: str, sizes: ModelSizes, mesh: str, chip: str, weight_format: str, batch: int, sequence: int
) -> Report:
    """Every program of the first layer with experts, and the memory of the model.

    Args:
        weight_format: of every matrix, as ModelFormats.parse reads it.

    Raises:
        ContractError: a mesh, a chip, a format or sizes that the planner does not support; heads or experts that the
            chips cannot share.
    """
    D, kind = devices_of(mesh), _chip(chip)
    formats = ModelFormats.parse(weight_format, sizes.layers)
    if sizes.E % D:
        raise ContractError(
            "the chips cannot share the experts evenly", got=f"E={sizes.E} on {mesh}", expected="E % D == 0"
        )
    if batch < 1 or not 1 <= sequence <= sizes.context:
        raise ContractError(
            "no such call",
            got=f"batch {batch}, sequence {sequence}",
            expected=f"batch >= 1, sequence 1 .. {sizes.context}",
        )
    sizes.share(D)
    programs = _programs(sizes, kind, D, str(formats.experts(sizes.layers - sizes.sparse_layers)))
    machine = programs.device.machine
    return Report(
        model,
        mesh,
        chip,
        weight_format,
        batch,
        sequence,
        machine.usable_l1,
        kind.dram_bytes,
        list(_plans(programs)),
        parts(sizes, programs, batch, sequence, formats),
    )


def longest_sequence(sizes: ModelSizes, D: int, arch: str, weight_format: str, batch: int) -> int:
    """Tokens of each of `batch` sequences that fit D chips of an architecture beside the model, whole pages; 0: none.

    Raises:
        ContractError: there is no planner, an unknown format, or heads that the chips cannot share.
    """
    chip, formats = _chip(SMALLEST[arch]), ModelFormats.parse(weight_format, sizes.layers)
    programs = _programs(sizes, chip, D, str(formats.experts(sizes.layers - sizes.sparse_layers)))

    def exceeds(pages: int) -> bool:
        found = parts(sizes, programs, batch, pages * PAGE, formats)
        return sum(part.per_chip for part in found) > chip.dram_bytes

    return PAGE * bisect_left(range(1, 1 + sizes.context // PAGE), True, key=exceeds)


def check_fits(report: Report, sizes: ModelSizes) -> None:
    """Refuse a model that does not fit.

    Raises:
        ContractError: the model needs more memory than the chips have. It names the bytes, and options that fit.
    """
    if report.fits:
        return
    largest = sorted(report.parts, key=lambda part: -part.per_chip)[:3]
    raise ContractError(
        f"{report.model} does not fit the memory of {report.mesh} {report.chip}",
        got=f"{in_words(report.needed)} a chip ({', '.join(f'{p.name} {in_words(p.per_chip)}' for p in largest)}, ...)",
        expected=f"at most {in_words(report.dram_bytes)}",
        remedy=" or ".join(_remedies(report, sizes)) or "a smaller --batch or --sequence, or chips with more memory",
    )


def _remedies(report: Report, sizes: ModelSizes) -> Iterable[str]:
    """The smallest changes of mesh and format that fit."""
    D = devices_of(report.mesh)
    larger = [d for d in range(D + 1, MOST_CHIPS + 1) if sizes.E % d == 0 and fits_heads(sizes.heads, d)]
    plain = report.weight_format in FORMATS
    for weight_format in FORMATS[FORMATS.index(report.weight_format) :] if plain else (report.weight_format,):
        for devices in [D, *larger]:
            mesh = f"1x{devices}"
            other = plan_model(report.model, sizes, mesh, report.chip, weight_format, report.batch, report.sequence)
            if other.fits:
                options = [f"--mesh {mesh}"] if devices != D else []
                if weight_format != report.weight_format:
                    options.append(f"--weights {weight_format}")
                yield f"{' '.join(options)} ({in_words(other.needed)})"
                break


def in_words(size: int) -> str:
    """A number of bytes in MiB or GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _chip(name: str) -> Chip:
    try:
        from .. import _planner
    except ImportError as error:
        raise ContractError("there is no planner", got=str(error), remedy=PLANNER_REMEDY) from None
    try:
        return _planner.find_chip(name)
    except ValueError as error:
        raise ContractError(str(error)) from None


def _programs(sizes: ModelSizes, chip: Chip, D: int, weight_format: str) -> LayerPrograms:
    layer = Sizes(sizes.E, sizes.E // D, sizes.K, sizes.H, sizes.I, weight_format)
    return LayerPrograms(Device.to_plan_for(chip, D), layer)


def _plans(programs: LayerPrograms) -> Iterable[Plan]:
    out_format = partial_dtype(programs.device) if programs.device.D > 1 else "bfloat16"
    T = LEAST_T
    while T <= programs.max_T:
        for name in MODEL_OPERATORS:
            yield _plan(programs, name, T, programs.plan(name, T, out_format))
        T *= 2


def _plan(programs: LayerPrograms, name: str, T: int, program: Program) -> Plan:
    s = programs.sizes
    kernel = program.kernels[0]
    pairs = ceil_div(T * s.K * s.E_local, s.E)
    weights = 0
    if name == "routing":
        named = kernel.named_compile_args
        share, unit = (T - (named["readers"] - 1) * named["share"], named["share"]), "tokens"
        rows = T * s.K * 8 + pairs * 6 + s.E * 4
    else:
        shape = (s.E_local, s.H, s.I)
        matrices, inner = (2, s.H) if name == "gate_up" else (1, s.I)
        form = s.formats.gate_up if name == "gate_up" else s.formats.down
        weights = matrices * tensor_bytes((shape, form, "TILE"))
        tiles = [_tiles(kernel.args[core]) * matrices for core in kernel.cores]
        share, unit = (min(tiles), max(tiles)), "weight tiles"
        rows = pairs * inner * 2 + (pairs * s.I if name == "gate_up" else T * s.H) * 2
    return Plan(name, T, len(kernel.cores), share, unit, program.l1_bytes, weights, rows)


def _tiles(args: list[Any]) -> int:
    """Tiles in the pieces of a core; see device_kernels/common/pieces.hpp."""
    return sum(end - begin for begin, end in zip(args[5::3], args[6::3], strict=True))
