"""Who imports whom in ttnn_moe: no circles, and each layer knows only those below it.

The graph comes from the source: every import statement counts, also inside functions and under TYPE_CHECKING. Rule
for edges: importing a.b.c runs a, a.b and a.b.c, so the importer depends on all three, except on the packages that the
importer lies in (they are running already). `from a import b` names the module a.b where there is one, else a.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from paths import ROOT

PACKAGE = ROOT / "ttnn_moe"
# these need other packages to be imported at all, and nothing else in them is ours
KERNELS = ("ttnn_moe.gpu_kernels", "ttnn_moe.device_kernels")
BACKENDS = ("cuda", "tenstorrent", "ascend", "reference")
HEAVY = ("triton", "cuda", "transformers", "ttnn", "torch_npu", "typer", "rich", "ttnn_moe.models")


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by name; the folders that are links in a checkout included, once."""
    found = {}
    for path in sorted(PACKAGE.iterdir()):
        for file in [path] if path.suffix == ".py" else sorted(path.resolve().rglob("*.py")):
            inside = Path(path.name, file.relative_to(path.resolve())) if path.is_dir() else Path(path.name)
            parts = [part for part in inside.with_suffix("").parts if part != "__init__"]
            found[".".join(("ttnn_moe", *parts))] = file
    return found


def imports(name: str) -> set[str]:
    """Modules of the package that a module imports, by the rule above."""
    path = modules()[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found |= run_by(alias.name)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found |= run_by(inner if is_module(inner) else base)
    return {other for other in found if not f"{name}.".startswith(f"{other}.")}


def is_module(name: str) -> bool:
    return name in modules() or any(other.startswith(f"{name}.") for other in modules())


def run_by(name: str) -> set[str]:
    """What importing a module runs: itself and the packages around it."""
    parts = name.split(".")
    return {outer for n in range(1, len(parts) + 1) if (outer := ".".join(parts[:n])) in modules()}


@cache
def graph() -> dict[str, frozenset[str]]:
    return {name: frozenset(imports(name)) for name in modules()}


def circles() -> list[list[str]]:
    """Sets of modules that each reach all others of their set."""
    reach: dict[str, set[str]] = {}
    for start in graph():
        seen, stack = set(), [start]
        while stack:
            for other in graph()[stack.pop()] - seen:
                seen.add(other)
                stack.append(other)
        reach[start] = seen
    found = {frozenset(other for other in reach[name] if name in reach[other]) for name in reach if name in reach[name]}
    return sorted(sorted(circle) for circle in found)


if __name__ == "__main__":
    for c in circles():
        print(c)
