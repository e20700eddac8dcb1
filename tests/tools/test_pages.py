"""Pages: their Python runs where a CPU can run it; links, options, families and variables exist and are all listed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from paths import ROOT
from processes import run_python
from ttnn_moe.cli import app
from ttnn_moe.cuda.moe.families import FAMILIES
from ttnn_moe.models.qwen3 import bench, demo, profile
from ttnn_moe.models.qwen3.quantize import command
from ttnn_moe.parallel.exchanges import EXCHANGES

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
VARIABLE = re.compile(r"TTNN_MOE_[A-Z0-9_]*[A-Z0-9](?![A-Z0-9_])")
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(page: str) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.S)
    assert found, f"{page} shows no Python"
    return found


def run(code: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(code, "a page", "exec"), names)
    return names


@pytest.mark.parametrize(("page", "count"), [("int4_24.md", 1), ("mxfp4.md", 2)])
def test_a_format_is_quantised_run_and_taken_apart(page: str, count: int) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for code in blocks(page)[:count]:
        run(code, names)
    out, dense, routing = names["out"], names["dense"], names.get("routing")
    routing = routing or names["tm"].Routing.from_topk(names["ids"], names["weights"], names["E"])
    want = names["tm"].moe(names["hidden"], routing, dense)
    assert out.shape == want.shape and 0 < float((out - want).norm() / want.norm()) < 0.9
    assert names["again"].format == page.removesuffix(".md")


def test_a_prepared_layer_and_the_steps_give_what_the_operator_gives() -> None:
    names: dict[str, Any] = {}
    outs = [run(code, names)["out"] for code in blocks("operator.md")]
    want = names["tm"].moe(names["hidden"], names["routing"], names["experts"])
    for out in outs:
        torch.testing.assert_close(out, want)


def test_the_model_answers_streams_and_quantises_its_cache(capsys: pytest.CaptureFixture[str]) -> None:
    answer, *engines = blocks("qwen3.md")
    names = run(answer, {})
    assert capsys.readouterr().out == "AB12\n"
    for code in engines:
        run(code.replace("max_new_tokens=200", "max_new_tokens=4").replace('"cuda"', '"reference"'), names)
    assert len(engines) == 2 and capsys.readouterr().out
    run(blocks("kv.md")[0], names := {})
    assert names["engine"].cache.sizes == names["model"].cache_sizes and names["engine"].cache.allocation.bits == 3


@pytest.mark.parametrize("number, says", [(0, "all_to_all, largest difference"), (2, "request 0: AB12")])
def test_scripts_of_several_processes_run(number: int, says: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(blocks("expert_parallel.md")[number])
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    out = run_python(*launcher, script, OMP_NUM_THREADS="1").stdout
    assert f"rank 0{':' if number == 0 else ','} {says}" in out and "rank 1" in out
    assert all(float(error) < 1e-5 for error in re.findall(r"difference (\S+)", out))


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.S)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    heads = (re.sub(r"[^\w\- ]", "", head.strip().lower()) for head in re.findall(r"^#+ (.*)$", prose(page), re.M))
    return {head.replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)]+)\)", prose(page)):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not link.startswith("http") and not (target.exists() and (not anchor or anchor in anchors(target))):
            dead.append(link)
    assert dead == []


def options() -> dict[str, set[str]]:
    """By command of ttnn-moe."""
    apps = {"generate": demo.app, "bench-model": bench.app, "quantize": command.app, "profile": profile.app}
    found = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    found |= {name: typer.main.get_command(one) for name, one in apps.items()}
    return {
        name: {option for parameter in one.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for name, one in found.items()
    }


def test_commands_and_their_options_exist() -> None:
    known, wrong = options(), []
    for page, name in zip(PAGES, NAMES, strict=True):
        for used, rest in re.findall(r"(?:ttnn-moe|-m ttnn_moe) ([a-z][a-z-]*)([^`\n#]*)", page.read_text()):
            asked = set(re.findall(r"--[a-z-]+", rest)) - {"--help"}
            if used not in known or not asked <= known[used]:
                wrong.append(f"{name}: ttnn-moe {used}{rest}")
    assert wrong == []


def test_pages_list_all_families_and_exchanges() -> None:
    cuda = (ROOT / "docs/cuda.md").read_text()
    rows = "\n".join(line.split("|")[1] for line in cuda.splitlines() if line.startswith("| "))
    assert [family.name for family in FAMILIES if not re.search(rf"\b{family.name}\b", rows)] == []
    shared = (ROOT / "docs/expert_parallel.md").read_text()
    assert [kind.name for kind in EXCHANGES if f"\n| {kind.name} |" not in shared] == []


def test_every_variable_is_on_a_page() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    sources = [*(ROOT / "ttnn_moe").rglob("*.py"), *(ROOT / "models").rglob("*.py")]
    read = {name for path in sources for name in VARIABLE.findall(path.read_text())}
    assert read - set(VARIABLE.findall(pages)) == set()
