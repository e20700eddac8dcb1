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
from processes import run_python

PACKAGE = ROOT / "ttnn_moe"
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


def inside(name: str, *packages: str) -> bool:
    return any(f"{name}.".startswith(f"ttnn_moe.{package}.") for package in packages)


def test_no_modules_import_each_other() -> None:
    assert circles() == []


def test_models_know_no_kernel_and_no_gpu() -> None:
    found = {
        (name, other)
        for name in graph()
        for other in graph()[name]
        if inside(name, "models") and inside(other, "cuda", "jit", "gpu_kernels", "device_kernels")
    }
    assert found == set()


def test_only_the_command_line_knows_models() -> None:
    found = {
        name
        for name in graph()
        if not inside(name, "models") and any(inside(other, "models") for other in graph()[name])
    }
    assert found == {"ttnn_moe.cli"}


def test_no_backend_imports_another() -> None:
    found = {
        (name, other)
        for backend in BACKENDS
        for name in graph()
        for other in graph()[name]
        if inside(name, backend) and inside(other, *(set(BACKENDS) - {backend}))
    }
    assert found == set()


def test_the_graph_sees_every_kind_of_import() -> None:
    """Of known modules: inside a function, from a package's own __init__, a module by its package."""
    assert "ttnn_moe.torch_ops" in graph()["ttnn_moe.api"], "inside a function"
    assert {"ttnn_moe.formats", "ttnn_moe.errors"} <= graph()["ttnn_moe.experts"], "relative, and a package's __init__"
    assert "ttnn_moe.registry" in graph()["ttnn_moe.eager"], "from . import a module"
    assert "ttnn_moe.models.qwen3.config" in graph()["ttnn_moe.models.qwen3.weights"], "in a folder that is a link"
    assert "ttnn_moe" not in graph()["ttnn_moe.api"], "the packages around a module run already"


def test_importing_the_package_alone_is_light() -> None:
    """With all its public names, which come when they are first used."""
    # torch itself imports cuda where that is installed
    code = (
        "import sys, torch; before = set(sys.modules); import ttnn_moe;"
        "[getattr(ttnn_moe, name) for name in ttnn_moe.__all__];"
        f"print((set(sys.modules) - before).intersection({HEAVY!r}))"
    )
    done = run_python("-c", code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout.strip() == "set()"
