"""What the caches hold: the command `ttnn-moe cache`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from .cache_folder import CacheFolder
from .cuda.jit.store import Store
from .cuda.moe import tuned
from .errors import ContractError
from .tenstorrent import files
from .tenstorrent.emulator import build


def report() -> Iterator[str]:
    """A line a cache: its folder, entries and MB, and what killed writers left.

    Raises:
        ContractError: after the last line, a folder that is not used; the message says why.
    """
    store = Store()
    folders = _folders(store)
    for what, one in folders.items():
        kept = one.entries()
        held = f"{_megabytes(kept):.1f}" + (f" of at most {store.most / 2**20:.0f}" if one is store.folder else "")
        left = one.unfinished()
        partial = f"; {len(left)} unfinished files of killed writers, {_megabytes(left):.1f} MB" if left else ""
        yield f"{one.where}: {len(kept)} {what}, {held} MB{partial}"
    troubles: dict[str, str] = {}
    for one in folders.values():
        if (reason := one.distrust()) is not None:
            troubles.setdefault(reason, one.remedy)
        elif (path := _in_the_way(one.where)) is not None:
            troubles.setdefault(f"{path}, which is no folder", f"set {one.setting} to a folder")
        elif (path := _closed(one.where)) is not None:
            wrong = f"{path}, in which this user cannot make folders"
            troubles.setdefault(wrong, f"set {one.setting} to a folder that this user can write to")
    refused = [f"{reason}; to fix it: {remedy}" for reason, remedy in troubles.items()]
    if refused:
        raise ContractError("a cache is not used", got=refused[0], details=refused[1:])


def clear() -> Iterator[str]:
    """Remove every compiled kernel, and what killed writers left in any cache; a line that says how many kernels."""
    store = Store()
    yield f"removed {store.clear()} kernels from {store.where}"
    for folder in _folders(store).values():
        folder.sweep()


def _folders(store: Store) -> dict[str, CacheFolder]:
    """By what their entries are."""
    builds = CacheFolder(build.cache_folder(), build.CACHE_VARIABLE)
    folders = {"kernels": store.folder, "files of tuned tiles": tuned.folder(), "emulator builds": builds}
    if os.environ.get(files.CACHE) != "off":
        folders["files of weights"] = CacheFolder(files.named_folder(), files.CACHE)
    return folders


def _in_the_way(where: Path) -> Path | None:
    """What stands in the place of a folder or of one above it, and is none."""
    return next((path for path in (where, *where.parents) if os.path.lexists(path) and not os.path.isdir(path)), None)


def _closed(where: Path) -> Path | None:
    """The folder in which a folder that is not there would be made, if this user cannot write to it."""
    # path.is_dir() would raise where this user may not look
    near = next(path for path in (where, *where.parents) if os.path.isdir(path))
    return None if near == where or os.access(near, os.W_OK | os.X_OK) else near


def _megabytes(found: list[tuple[Path, os.stat_result]]) -> float:
    return sum(one.st_size for _, one in found) / 2**20
