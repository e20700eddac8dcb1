"""benchmarks/vllm_serve.py as far as it goes without a GPU: what it would run, requests, comparison of tokens."""

from __future__ import annotations

import configparser
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark_scripts import script
from paths import ROOT
from ttnn_moe.models.qwen3.config import config_of


def test_a_dry_run_names_every_process(capsys: pytest.CaptureFixture[str]) -> None:
    script("vllm_serve").main(rows="32,256", dry_run=True)
    *runs, last = capsys.readouterr().out.splitlines()
    kinds = [line.split("--kinds ")[1].split()[0] for line in runs]
    assert kinds == [kind for kind in ("vllm", "experts", "model", "ours") for _ in range(2)]
    assert all("TTNN_MOE_VLLM=experts" in line for line in runs if "--kinds experts" in line)
    assert last == "256 requests, 77,351 prompt and 35,988 new tokens: 256 drawn"


def test_tokens_are_compared_with_vllms() -> None:
    serve = script("vllm_serve")
    same, other = [[1, 2], [3, 4]], [[1, 5], [6, 4]]
    cases = [("vllm", 32, same), ("vllm", 64, same), ("experts", 32, other), ("ours", 8, same)]
    results = [{"kind": kind, "rows": rows, "tokens": tokens} for kind, rows, tokens in cases]
    found = {(row["kind"], row["rows"]): row["tokens_as_vllm"] for row in serve.compared(results)}
    assert found["experts", 32] == {"first": 0.5, "positions": 0.5}
    assert found["vllm", 32] == found["vllm", 64] == {"first": 1.0, "positions": 1.0}, "itself at other rows"
    assert found["ours", 8] is None, "vLLM did not run at so many rows"
    json.dumps(found["experts", 32])


def test_vllm_finds_both_plug_ins(tmp_path: Path) -> None:
    folder = script("vllm_serve").entry_points(tmp_path)
    points = configparser.ConfigParser()
    points.read(folder / "ttnn_moe_bench-0.dist-info/entry_points.txt")
    assert points["vllm.general_plugins"]["ttnn_moe_bench"] == "vllm_random:register"


NAMES = {
    "attention.qkv.weight": "self_attn.qkv_proj.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "mlp.gate_up": "mlp.experts.w13_weight",
    "mlp.down": "mlp.experts.w2_weight",
    "mlp.router.weight": "mlp.gate.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
}
OUTER = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def test_weights_are_drawn_as_the_engine_draws_them() -> None:
    """Under vLLM's names, the same numbers: so tokens can be compared."""
    tiny = config_of(str(ROOT / "models/qwen3/tiny"))
    sizes = replace(tiny, num_hidden_layers=2, mlp_only_layers=(), tie_word_embeddings=False)
    model = script("qwen3_gpu").make(sizes, "cpu", torch.float32, "reference", 0)
    vllms = {}
    for name, parameter in model.named_parameters():
        layer, _, rest = name.removeprefix("layers.").partition(".")
        if name.startswith("layers."):
            vllms[f"model.layers.{layer}.{NAMES[rest]}"] = parameter
        else:
            vllms[OUTER[name]] = parameter
    drawn = {name: torch.empty_like(parameter) for name, parameter in vllms.items()}
    script("vllm_random").fill(drawn, 2)
    for name, parameter in vllms.items():
        torch.testing.assert_close(drawn[name], parameter.data, rtol=0, atol=0, msg=name)
    with pytest.raises(ValueError, match="does not know"):
        script("vllm_random").fill({**drawn, "model.layers.0.mlp.shared": drawn["model.norm.weight"]}, 2)


def test_a_measurement_by_an_engine_of_fixed_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every figure of a run, of an engine whose tokens are all 1."""
    serve = script("vllm_serve")
    monkeypatch.setattr(serve, "REST", 0)

    def run(todo: list[tuple[list[int], int]]) -> tuple[float, list[list[int]]]:
        return sum(new for _, new in todo) / 1000, [[1] * new for _, new in todo]

    kept: list[Any] = []
    asked = serve.Asked([1, 32, 128], [512, 4096])
    serve.measured(run, 32, 2, asked, serve.OURS, lambda found: kept.append(json.loads(json.dumps(found))), 1e12)
    assert len(kept) == 5, "two rounds, two steps, a prefill: each is kept"
    found = kept[-1]
    assert found["new_tokens_per_s"] == pytest.approx(1000) and found["tokens_again"]["first"] == 1
    assert {B: round(ms, 6) for B, ms in found["steps_ms"].items()} == {"1": 1.0, "32": 32.0}
    assert found["prefill_ms"] == found["rested_prefill_ms"] == {"512": 1.0} and len(found["all_s"]) == 2
    assert serve.of_rounds([9.0, 2.0, 4.0])["seconds"] == 3 and serve.of_rounds([9.0])["seconds"] == 9
    late: list[Any] = []
    serve.measured(run, 32, 2, asked, serve.OURS, late.append, 0)
    assert not late, "no figure begins after the limit"


def test_one_engine_measures_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve, limits = script("vllm_serve"), []

    def made(rows: int, layers: int, folder: Path, sizes: list[int], **options: Any) -> Any:
        return lambda todo: (1.0, [[1] * new for _, new in todo]), limits.append, {"vllm": "0.22.1"}

    monkeypatch.setattr(serve, "vllm_run", made)
    part = tmp_path / "part.json"
    serve.one_kind("model", [256, 128], 1, serve.Asked([1], [512], 60, [1, 8]), 48, tmp_path, part)
    rows = json.loads(part.read_text())
    assert [(row["kind"], row["rows"], len(row["steps_ms"])) for row in rows] == [("model", 256, 1), ("model", 128, 0)]
    assert limits == [256, 128]


def test_results_are_read_and_tabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve, tables = script("vllm_serve"), script("model_tables")
    one = {"new_tokens_per_s": 6000.4, "steps_ms": {"1": 2.5}, "prefill_ms": {"4096": 60.0}, "tokens": [[1, 2]]}
    rested = {"rested_prefill_ms": {"4096": 55.0}}  # files of before have none
    kinds = {"vllm": {"vllm": "0.22.1", **rested}, "model": {"new_tokens_per_s": 7654.3}, "ours": {"tokens": [[1, 3]]}}
    rows = [{"kind": kind, "rows": 256, **one, **other} for kind, other in kinds.items()]
    file = tmp_path / "vllm_serve.json"
    serve.write(file, serve.compared(rows))
    assert [row["tokens"] for row in serve.read(file)] == [row["tokens"] for row in rows]
    assert 'tokens"' not in file.read_text()
    monkeypatch.setattr(script("table_text"), "RESULTS", tmp_path)
    lines = tables.vllm_serve().splitlines()
    assert lines[0] == "|  | vLLM | `model` | this package's engine |" and "| 6,000 | 7,654 | 6,000 |" in lines[2]
    assert "| decode step, batch 1, ms | 2.50 | 2.50 | 2.50 |" in lines
    assert "| prefill of 4,096 tokens after 0.3 s of rest, ms | 55.00 |  |  |" in lines
    assert "| all tokens as vLLM's |  | 100.0% | 50.0% |" in lines


HEADS, KV_HEADS = 4, 2
SHAPES = {  # of two layers: vocabulary 24, H 16, heads of 8, E 4, I 8
    "model.embed_tokens.weight": (24, 16),
    "self_attn.qkv_proj.weight": ((HEADS + 2 * KV_HEADS) * 8, 16),
    "self_attn.o_proj.weight": (16, HEADS * 8),
    "mlp.experts.w13_weight": (4, 16, 16),
    "mlp.experts.w2_weight": (4, 16, 8),
    "mlp.gate.weight": (4, 16),
    "lm_head.weight": (24, 16),
}


def _filled(tp: int, of: int, experts: list[int] | None) -> dict[str, torch.Tensor]:
    """The weights of one rank."""
    split = {"embed_tokens": 0, "qkv_proj": 0, "o_proj": 1, "w13_weight": 1, "w2_weight": 2, "lm_head": 0}
    random, out = script("vllm_random"), {}
    for name, _ in random.order(2):
        kind = name.split(".", 3)[-1] if ".layers." in name else name
        shape = list(SHAPES.get(kind, (16,)))
        for word, dimension in split.items():
            if word in name and not ("experts" in name and experts is not None):
                shape[dimension] //= of
        if "experts" in name and experts is not None:
            shape[0] = len(experts)
        out[name] = torch.empty(shape)
    held = None if experts is None else torch.tensor(experts)
    random.fill(out, 2, rank=random.Rank(tp, of, HEADS, KV_HEADS, held))
    return out


def test_ranks_hold_parts_of_the_same_weights() -> None:
    whole = _filled(0, 1, None)
    one, two = (_filled(rank, 2, None) for rank in range(2))
    for name, weight in whole.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            joined = torch.cat([one[name], two[name]])
        elif name.endswith("qkv_proj.weight"):
            parts = [part[name].split([16, 8, 8]) for part in (one, two)]
            joined = torch.cat([torch.cat(pair) for pair in zip(*parts, strict=True)])
        elif name.endswith("w13_weight"):
            joined = torch.cat([part[name][:, rows] for rows in (slice(4), slice(4, 8)) for part in (one, two)], 1)
        elif name.endswith(("o_proj.weight", "w2_weight")):
            joined = torch.cat([one[name], two[name]], -1)
        else:
            torch.testing.assert_close(one[name], two[name], rtol=0, atol=0)
            joined = one[name]
        torch.testing.assert_close(joined, weight, rtol=0, atol=0, msg=name)
    here = _filled(0, 1, [2, 3])
    for name, weight in whole.items():
        torch.testing.assert_close(here[name], weight[2:] if "experts" in name else weight, rtol=0, atol=0, msg=name)


def test_processes_of_an_engine_run_together(tmp_path: Path) -> None:
    """Two data-parallel processes of an engine: times are from the first start to the last end, tokens in order."""
    ranks, serve = script("vllm_ranks"), script("vllm_serve")
    todo = serve.requests()
    order = {id_of(prompt): index for index, (prompt, _) in enumerate(todo)}

    def run(asked: list[tuple[list[int], int]]) -> tuple[float, list[list[int]]]:
        time.sleep(max(new for _, new in asked) / 1e5)
        return 0.0, [[order.get(id_of(prompt), -1)] * new for prompt, new in asked]

    about = {"vllm": "0.22.1", "batched_tokens": 1, "graphs": "FULL", "blocks": 1, "ready_s": 1.0}
    with ThreadPoolExecutor(2) as pool:
        members = [ranks.Member(tmp_path, rank, 2) for rank in range(2)]
        for done in [pool.submit(one.measure, run, 3, [2, 8], about) for one in members]:
            done.result(60)
    parts = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(2)]
    engine = ranks.Engine("model", "dp", 2)
    found = ranks.merged(engine, parts, 48)
    assert found["tokens"] == [[index] * new for index, (_, new) in enumerate(todo)]
    assert found["tokens_again"] == {"first": 1.0, "positions": 1.0} and len(found["all_s"]) == 3
    assert list(found["steps_ms"]) == ["2", "8"] and found["steps_again"] == {"2": 1, "8": 1}
    assert found["new_tokens_per_s"] > 0
    assert set(ranks.compared([found])[0]["tokens_as"]) == {"dp_model"}


def id_of(prompt: list[int]) -> tuple[int, ...]:
    return tuple(prompt)


def test_a_dry_run_names_every_process_of_every_engine(capsys: pytest.CaptureFixture[str]) -> None:
    script("vllm_ranks").main(dry_run=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("--engines ")[1].split()[0] for line in lines] == [
        *("tp:model", "dp:model", "dp:model", "tp:vllm", "dp:experts", "dp:experts")
    ]
    assert [line.split("VLLM_DP_RANK=")[1].split()[0] for line in lines if "dp:model" in line] == ["0", "1"]
    with pytest.raises(Exception, match="tp:ours"):
        script("vllm_ranks").main(engines="tp:ours", dry_run=True)


def test_results_of_several_gpus_are_tabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, tables = script("vllm_ranks"), script("model_tables")
    one = {"gpus": 2, "rows": 256, "vllm": "0.22.1", "tokens": [[1, 2]], "tokens_again": {"first": 1, "positions": 0.9}}
    one |= {"new_tokens_per_s": 6000.4, "steps_ms": {"2": 2.5}}
    model = {"kind": "model", "split": "dp", "steps_ms": {}, "tokens": [[1, 3]], "steps_again": {"2": 1.0}}
    rows = ranks.compared([{**one, **model}, {**one, "kind": "vllm", "split": "tp"}])
    script("vllm_serve").write(tmp_path / "vllm_ranks.json", rows)
    monkeypatch.setattr(script("table_text"), "RESULTS", tmp_path)
    lines = tables.vllm_ranks().splitlines()
    assert lines[0] == "|  | TP 2, vLLM | DP 2 + EP, `model` |" and "| 6,000 | 6,000 |" in lines[2]
    assert "| decode step, batch 2, ms | 2.50 |  |" in lines and "| all tokens as vLLM's | 100.0% | 50.0% |" in lines
    assert "| tokens of steps, repeated |  | 100.0% |" in lines
