"""What the README shows, run."""

from __future__ import annotations

import re

import torch

from benchmark_scripts import script
from paths import ROOT
from ttnn_moe import registry

README = (ROOT / "README.md").read_text()


def test_the_lines_of_use_run() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    out = names["out"]
    assert isinstance(out, torch.Tensor) and out.shape == (names["T"], names["H"])
    assert out.isfinite().all() and out.std() > 0


def test_the_backend_table_lists_the_backends() -> None:
    table = README.partition("## Backends")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (\w+) \|", table, re.M)[1:] == registry.backends()


def test_the_measured_table_is_what_the_results_hold() -> None:
    assert script("tables").updated(README) == README, "run python benchmarks/tables.py"
