"""Tiles that `ttnn-moe bench --tune` found on this machine, which plans then take.

One file for each GPU and architecture, in tiles/ of the folder that cache_folder.py names. A change of any kernel
source makes the file void.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from ...cache_folder import CacheFolder, cache_path
from ...contract import Problem
from ...logs import logger
from ..arch import Target
from ..jit.spec import sources_digest
from .cuda_cpp import arch_of
from .pairs import local_experts

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

TileT = TypeVar("TileT", bound="DataclassInstance")
REACH = 2.0
"""A tile serves numbers of tokens up to this factor away from the one that it was found for."""


def folder() -> CacheFolder:
    """Where the files lie."""
    return CacheFolder(cache_path("tiles"))


def file_of(target: Target) -> str:
    """The file's name for a GPU and an architecture."""
    name = "".join(letter if letter.isalnum() else "-" for letter in target.gpu.name)
    return f"{name}-{arch_of(target).name}.json"


def sizes_of(problem: Problem) -> dict[str, Any]:
    """What an entry is found by, besides the number of tokens."""
    sizes = {"E": local_experts(problem), "K": problem.K, "H": problem.H, "I": problem.I}
    return {**sizes, "dtype": str(problem.dtype).removeprefix("torch."), "weights": problem.weight_format}


def tuned_tile(problem: Problem, target: Target, able: Collection[TileT]) -> TileT | None:
    """The tile found for a problem or one with about as many tokens; None: nothing was found that is among `able`."""
    if not able or problem.T < 1:
        return None
    entries = _entries(file_of(target))
    if not entries:
        return None
    sizes = sizes_of(problem)
    near = {abs(math.log(problem.T / entry["T"])): entry for entry in entries if entry["sizes"] == sizes}
    if not near or min(near) > math.log(REACH):
        return None
    return next((tile for tile in able if asdict(tile) == near[min(near)]["tile"]), None)


def tuned_tiles(problem: Problem, target: Target, able: Collection[TileT]) -> list[TileT]:
    """The tiles among `able` that were found for a problem's sizes, whatever its number of tokens."""
    sizes = sizes_of(problem)
    found = [entry["tile"] for entry in _entries(file_of(target)) if entry["sizes"] == sizes]
    return [tile for tile in able if asdict(tile) in found]


def keep(target: Target, found: Iterable[tuple[Problem, Any]]) -> str | None:
    """Add tiles, in place of earlier ones for the same sizes and tokens; the file's path. None: a warning says why.

    The file appears whole or not at all, and one process writes at a time.
    """
    name, where = file_of(target), folder()
    new = [{"sizes": sizes_of(problem), "T": problem.T, "tile": asdict(tile)} for problem, tile in found]
    with where.lock(name):
        _entries.cache_clear()
        again = [(entry["sizes"], entry["T"]) for entry in new]
        kept = [entry for entry in _entries(name) if (entry["sizes"], entry["T"]) not in again]
        text = json.dumps({"kernels": sources_digest(), "entries": [*kept, *new]}, indent=1) + "\n"
        path = where.keep(name, lambda part: part.write_text(text))
    _entries.cache_clear()
    return None if path is None else str(path)


@cache
def _entries(name: str) -> list[dict[str, Any]]:
    path = folder().find(name)
    if path is None:
        return []
    with suppress(OSError, ValueError, KeyError, TypeError):
        data = json.loads(path.read_text())
        if data["kernels"] == sources_digest():
            return [entry for entry in data["entries"] if entry["T"] >= 1 and entry["sizes"] and entry["tile"]]
    logger.info("{} is of other kernels, or no file of tiles: it is not used", path)
    return []
