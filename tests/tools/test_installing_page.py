"""docs/installing.md has one table of all variables, and one of all errors."""

from __future__ import annotations

import ast
import re

from paths import ROOT

PAGE = (ROOT / "docs" / "installing.md").read_text()
SOURCES = [*(ROOT / "ttnn_moe").rglob("*.py"), *(ROOT / "models").rglob("*.py")]
VARIABLE = re.compile(r"TTNN_MOE_[A-Z0-9_]*[A-Z0-9](?![A-Z0-9_])")


def rows(section: str) -> list[list[str]]:
    lines = [line for line in PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_table_of_variables_has_those_that_code_reads_and_a_page_that_explains_each() -> None:
    listed = {row[0].strip("`"): row[2] for row in rows("Variables")}
    read = {name for path in SOURCES for name in VARIABLE.findall(path.read_text())}
    of_cmake = {"TTNN_MOE_WITH_TTNN", "TTNN_MOE_PLANNER"}
    assert set(listed) == read - of_cmake
    for name, link in listed.items():
        target = re.findall(r"\]\(([^)#]*)", link)[0]
        assert f"`{name}" in ((ROOT / "docs" / target).read_text() if target else PAGE.split("## Variables")[0]), name


def test_the_table_of_errors_has_every_subclass() -> None:
    names = {"TtnnMoeError"}
    found = []
    for path in [ROOT / "ttnn_moe" / "errors.py", *SOURCES]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and names & {getattr(base, "id", "") for base in node.bases}:
                other = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id not in names]
                found.append((node.name, *other))
    listed = [(re.findall(r"`(\w+)`", row[0])[0], row[0].rpartition(", ")[2]) for row in rows("Errors")]
    assert set(listed) == set(found)
