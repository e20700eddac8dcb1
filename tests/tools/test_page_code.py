"""The Python that pages show runs, where a CPU can run it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from paths import ROOT


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


def test_the_model_answers_streams_and_quantises_its_cache(capsys: pytest.CaptureFixture[str]) -> None:
    answer, engine, _ = blocks("qwen3.md")
    names = run(answer, {})
    first = capsys.readouterr().out
    assert first.strip()
    names["prompts"] = [names["ids"]]
    run(engine.replace("max_new_tokens=200", "max_new_tokens=4"), names)
    assert capsys.readouterr().out
    run(blocks("kv.md")[0], names)
    assert names["engine"].cache.sizes == names["model"].cache_sizes and names["engine"].cache.allocation.bits == 3
