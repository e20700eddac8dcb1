"""Signatures of a vLLM that is not installed, from its Python sources: `surface.Found` of a folder that holds vllm/."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def found_in(folder: Path) -> Callable[[str, str], Sequence[str]]:
    """(module, attribute path) -> parameters of a function, fields of a dataclass, () of other values."""

    def found(module: str, path: str) -> Sequence[str]:
        node: Any = _tree(folder, module)
        for name in path.split("."):
            inner = _named(node, name)
            if inner is None:
                raise LookupError(f"no {name}")
            node = inner
        if isinstance(node, ast.FunctionDef):
            given = node.args
            names = [*given.posonlyargs, *given.args, *filter(None, [given.vararg]), *given.kwonlyargs]
            parameters = [name.arg for name in (*names, *filter(None, [given.kwarg]))]
            bound = any(getattr(of, "id", None) == "classmethod" for of in node.decorator_list)
            return parameters[1:] if bound else parameters
        if isinstance(node, ast.ClassDef):
            return [
                of.target.id
                for of in node.body
                if isinstance(of, ast.AnnAssign)
                and isinstance(of.target, ast.Name)
                and "ClassVar" not in ast.unparse(of.annotation)
            ]
        return ()

    return found


def abstract_methods(folder: Path, module: str, *classes: str) -> set[str]:
    """Names that these classes of a module leave to subclasses."""
    bodies = [_named(_tree(folder, module), name).body for name in classes]
    return {
        of.name
        for body in bodies
        for of in body
        if isinstance(of, ast.FunctionDef)
        and any(getattr(by, "id", "") == "abstractmethod" for by in of.decorator_list)
    }


def _tree(folder: Path, module: str) -> ast.Module:
    base = folder.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return ast.parse(path.read_text(encoding="utf-8"))
    raise LookupError("no such file")


def _named(node: Any, name: str) -> Any:
    """What a module or a class calls by a name: its last definition, an assignment or an import."""
    for of in reversed(node.body):
        if isinstance(of, (ast.FunctionDef, ast.ClassDef)) and of.name == name:
            return of
        targets = of.targets if isinstance(of, ast.Assign) else [of.target] if isinstance(of, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return of
        if isinstance(of, ast.ImportFrom) and any(name in (alias.asname, alias.name) for alias in of.names):
            return of
    return None
