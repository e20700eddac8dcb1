"""ttnn-moe doctor --plan: the programs are the planner's, the bytes the tensors', what does not fit is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from command import run
from paths import ROOT

planner = pytest.importorskip("ttnn_moe._planner", reason="native planner: not built", exc_type=ModuleNotFoundError)

from ttnn_moe.errors import ContractError  # noqa: E402
from ttnn_moe.models.qwen3 import PRESETS, TINY, Qwen3MoeConfig  # noqa: E402
from ttnn_moe.models.qwen3.model import Qwen3Moe, sizes_of  # noqa: E402
from ttnn_moe.models.qwen3.tt.cache import PagedCache  # noqa: E402
from ttnn_moe.models.qwen3.tt.sizes import model_sizes  # noqa: E402
from ttnn_moe.sizes import ceil_div  # noqa: E402
from ttnn_moe.tenstorrent import memory, plans, runtime  # noqa: E402
from ttnn_moe.tenstorrent.device import Device  # noqa: E402
from ttnn_moe.tenstorrent.emulator import EmulatedChip  # noqa: E402
from ttnn_moe.tenstorrent.emulator import library as emulated  # noqa: E402
from ttnn_moe.tenstorrent.layer_sizes import Sizes  # noqa: E402
from ttnn_moe.tenstorrent.programs import LayerPrograms  # noqa: E402

NAME = "qwen3-30b-a3b"
QWEN3 = PRESETS[NAME]


def report(mesh="1x8", chip="n300", weights="bfloat16", batch=32, sequence=128, config=QWEN3, model=NAME):
    return plans.plan_model(model, model_sizes(config), mesh, chip, weights, batch, sequence)


def on_chip(made) -> dict[str, int]:
    return {part.name: part.per_chip for part in made.parts}


def part_of(name: str) -> str:
    """The part that a tensor of the checkpoint, or a parameter of models/qwen3/layers.py, belongs to."""
    kinds = {
        "norm": "norms",
        "embed": "embedding",
        "head": "head",
        ".experts.": "experts",
        "router": "router",
        "mlp.gate.": "router",
        "mlp.gate_up": "experts",
        "attn": "attention",
        "attention": "attention",
        "mlp": "dense",
    }
    return next(part for words, part in kinds.items() if words in name)


def test_weights_are_the_parameters_of_the_model() -> None:
    with torch.device("meta"):
        model = Qwen3Moe(QWEN3)
    wanted = Counter[str]()
    for name, parameter in model.named_parameters():
        wanted["experts" if parameter.ndim == 3 else part_of(name)] += 2 * parameter.numel()
    assert sum(wanted.values()) == 2 * 30_532_122_624
    one = on_chip(report("1x1"))
    assert {name: one[name] for name in wanted} == wanted
    # shared by eight: 16 experts each, and 151936 / 8 columns of the head, in whole tiles; 4 query heads and 1 of the 4
    # key heads, which lies on two chips
    eight = report("1x8")
    attention = 48 * 2048 * ((4 + 1 + 1) * 128 + 4 * 128) * 2
    shared = {name: wanted[name] // 8 for name in ("experts", "embedding")}
    shared |= {"head": 2048 * (594 * 32) * 2, "attention": attention}
    assert {part.name: part.chips for part in eight.parts if part.chips > 1} == dict.fromkeys([*shared, "KV cache"], 8)
    assert {name: on_chip(eight)[name] for name in wanted} == {**wanted, **shared}


def test_weights_are_the_tensors_of_a_checkpoint() -> None:
    wanted = Counter[str]()
    for path in sorted(TINY.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                assert tensor.dtype == torch.bfloat16
                dense = any(f"layers.{i}.mlp." in name for i in (0, 2, 4))
                wanted["dense layers" if dense else part_of(name)] += tensor.nbytes
    made = on_chip(report("1x1", config=Qwen3MoeConfig.from_directory(TINY), batch=1))
    # the head is tied: the file has it once, the device needs it in rows and in tiles
    assert made["head"] == made["embedding"] == wanted["embedding"]
    wanted["router"] *= 2  # 16 experts are half a tile's columns
    assert {name: made[name] for name in wanted} == wanted


def test_eight_bits_cache_and_rope_by_hand() -> None:
    wide, narrow = on_chip(report()), on_chip(report(weights="bfloat8_b"))
    assert wide["experts"] == 48 * 16 * 3 * 2048 * 768 * 2
    assert narrow["experts"] == 48 * 16 * 3 * (2048 // 32) * (768 // 32) * 1088
    # one of the 4 key heads on each of 8 chips
    assert wide["KV cache"] == 48 * 2 * (1 + 32 * 4) * 1 * 32 * 128 * 2
    assert on_chip(report(sequence=129))["KV cache"] == 48 * 2 * (1 + 32 * 5) * 1 * 32 * 128 * 2  # whole pages
    for sequence in (128, 129):
        held = (1 + 32 * ceil_div(sequence, 32)) * PagedCache.page_bytes(sizes_of(QWEN3, torch.bfloat16))
        assert on_chip(report("1x1", sequence=sequence))["KV cache"] == held
        assert on_chip(report(sequence=sequence))["KV cache"] * 4 == held
    assert wide["RoPE"] == 2 * 40960 * 128 * 2
    assert {name: n for name, n in wide.items() if narrow[name] != n}.keys() == {"experts"}
    eight = on_chip(report(weights="bfloat8_b,kv=bfloat8_b"))
    assert eight.pop("KV cache") * 32 == narrow.pop("KV cache") * 17 and eight == narrow


def test_biases_of_attention_by_hand() -> None:
    """Of qkv and out, a row of tiles each; on a chip of eight, of its own columns of qkv."""
    biased = dataclasses.replace(QWEN3, attention_bias=True)
    for mesh, columns in (("1x1", 5120 + 2048), ("1x8", (4 + 1 + 1) * 128 + 2048)):
        plain, more = on_chip(report(mesh)), on_chip(report(mesh, config=biased))
        assert more.pop("attention") - plain.pop("attention") == 48 * 32 * columns * 2 and more == plain


def test_activations_by_hand() -> None:
    T, H, logits = 4096, 2048, 32 * 151936 * 2
    attention = 2 * T * H * 2 + T * 5120 * 2 + T * 4608 * 2 + T * 4096 * 2
    assert on_chip(report("1x1", "p150"))["activations"] == attention + logits
    # with few heads the widest moment is the MoE's; on a mesh it has the device's part, in fp32 on Blackhole
    few = dataclasses.replace(QWEN3, num_attention_heads=4)
    moe = 3 * T * H * 2 + T * H * 2 + T * 128 * 4 + T * 8 * 8
    assert on_chip(report("1x1", "p150", config=few))["activations"] == moe + logits
    parts, own = T * H * 4 + T * H * 4 // 8 + T * H * 2, 32 * (594 * 32) * 2
    for config in (few, QWEN3):
        assert on_chip(report(chip="p150", config=config))["activations"] == moe + parts + own


@pytest.mark.parametrize("chip", ["n150", "p150"])
def test_workspace_is_what_the_operators_allocate(chip: str, monkeypatch) -> None:
    monkeypatch.setattr(runtime, "_emulated", emulated)
    device = Device.of(emulated.open_mesh(1, chip))
    emulated_chip = device.handle.devices[0]
    programs = LayerPrograms(device, Sizes(128, 16, 8, 2048, 768))
    before = set(map(id, emulated_chip.tensors))
    for bound in (32, 4096):
        for name, form in programs.buffers(bound).items():
            programs._buffer(name, form, bound)
    taken = sum(t.pages * t.page_size for t in emulated_chip.tensors if id(t) not in before)
    assert on_chip(report(chip=chip))["MoE workspace"] == taken > 0


@pytest.mark.parametrize(
    ("shape", "dtype", "tiled"),
    [((3, 70, 100), "bfloat16", True), ((2, 64, 96), "bfloat8_b", True), ((33, 64), "int32", False)],
)
def test_bytes_of_a_tensor_are_those_of_its_pages(shape, dtype, tiled) -> None:
    tensor = EmulatedChip("p150").empty(shape, dtype, tiled=tiled)
    assert memory.tensor_bytes((shape, dtype, "TILE" if tiled else "ROW_MAJOR")) == tensor.pages * tensor.page_size


@pytest.mark.parametrize(
    ("weights", "tokens"),
    [("bfloat16", 6336), ("bfloat8_b", 10656), ("bfloat16,kv=bfloat8_b", 11968), ("bfloat8_b,kv=bfloat8_b", 20096)],
)
def test_context_of_32_sequences_on_n150(weights: str, tokens: int) -> None:
    """Keys and values of a chip's own heads leave room for more than 5,000 tokens a sequence, as the page says."""
    assert tokens > 5000 and f"{tokens:,}" in (ROOT / "docs/tenstorrent.md").read_text()
    assert plans.longest_sequence(model_sizes(QWEN3), 8, "wormhole_b0", weights, 32) == tokens
    assert report(chip="n150", sequence=tokens, weights=weights).fits
    assert not report(chip="n150", sequence=tokens + memory.PAGE, weights=weights).fits


def test_a_small_model_has_room_for_its_whole_context() -> None:
    sizes = dataclasses.replace(model_sizes(Qwen3MoeConfig.from_directory(TINY)), context=100)
    assert plans.longest_sequence(sizes, 1, "blackhole", "bfloat16", 2) == 96, "whole pages"


def test_traffic_of_an_operator_by_hand() -> None:
    """Uniform routing: an eighth of T * 8 pairs on each of eight chips, T."""
    for plan in report(weights="bfloat4_b,bfloat8_b").plans:
        T, weights = plan.T, 16 * (2048 // 32) * (768 // 32)
        assert (plan.weight_bytes, plan.row_bytes) == {
            "routing": (0, T * 8 * (4 + 4) + T * (4 + 2) + 128 * 4),
            "gate_up": (2 * weights * 576, T * (2048 + 768) * 2),
            "down": (weights * 1088, T * (768 + 2048) * 2),
        }[plan.operator]


@pytest.mark.parametrize("chip", ["n150", "n300", "p150"])
def test_programs_are_those_of_the_planner(chip: str) -> None:
    made = report(chip=chip)
    found = planner.find_chip(chip)
    bounds = sorted({plan.T for plan in made.plans})
    assert bounds == [32, 64, 128, 256, 512, 1024, 2048, 4096]
    machine = planner.Machine(grid=found.compute_grid, l1_bytes=found.l1_bytes)
    assert (made.usable_l1, made.dram_bytes) == (machine.usable_l1, found.dram_bytes)
    by_name = {(plan.operator, plan.T): plan for plan in made.plans}
    for T in bounds:
        problem = planner.Problem(T=T, E=128, E_local=16, K=8, H=2048, I=768, out_format="float32")
        for name, matrices in (("routing", 0), ("gate_up", 2), ("down", 1)):
            plan, program = by_name[name, T], getattr(planner, f"plan_{name}")(problem, machine)
            assert (plan.cores, plan.l1_bytes) == (len(program.kernels[0].cores), program.l1_bytes)
            assert plan.weight_bytes == 16 * matrices * 2048 * 768 * 2
            least, most = plan.share
            if not matrices:  # the last reader has the rest
                readers = program.kernels[0].named_compile_args["readers"]
                assert (readers - 1) * most + least == T and 1 <= least <= most
            else:
                assert least * plan.cores <= matrices * 64 * 24 <= most * plan.cores and most - least <= matrices


def test_what_does_not_fit_is_refused_with_numbers_and_a_remedy_that_is_true() -> None:
    made = report("1x4", "n150")
    assert not made.fits and made.needed > made.dram_bytes == 12 << 30
    with pytest.raises(ContractError) as error:
        plans.check_fits(made, model_sizes(QWEN3))
    text = str(error.value)
    assert f"{made.needed / 2**30:.2f} GiB a chip" in text and "expected at most 12.00 GiB" in text
    for remedy, other in (
        ("--mesh 1x8", report("1x8", "n150")),
        ("--weights bfloat8_b", report("1x4", "n150", "bfloat8_b")),
    ):
        assert other.fits and f"{remedy} ({other.needed / 2**30:.2f} GiB)" in text
    plans.check_fits(report(), model_sizes(QWEN3))
    with pytest.raises(ContractError, match="a smaller --batch"):  # no mesh and no format has room for this
        huge = report(batch=4096, sequence=40960)
        plans.check_fits(huge, model_sizes(QWEN3))


def test_the_issue_s_table(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert run(monkeypatch, "doctor", "--plan", NAME, "--mesh", "1x8", "--kv", "bfloat8_b") == 0
    out = capsys.readouterr().out
    made = report(weights="bfloat16,kv=bfloat8_b")
    rows = [line.split() for line in out.splitlines() if line.strip()]
    assert sum(row[0] in plans.MODEL_OPERATORS for row in rows) == len(made.plans)
    for part in made.parts:
        assert any(" ".join(row).startswith(part.name) and row[-1] in ("GiB", "MiB") for row in rows), part.name
    assert f"{made.needed / 2**30:.2f} GiB" in out and "fits" in rows[-1][0]


def test_json_of_a_directory_and_of_what_does_not_fit(monkeypatch, capsys) -> None:
    assert run(monkeypatch, "doctor", "--plan", str(TINY), "--mesh", "1x1", "--chip", "p150", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["needed"] == sum(part["per_chip"] for part in found["parts"])
    assert {plan["operator"] for plan in found["plans"]} == set(plans.MODEL_OPERATORS)
    args = ("--plan", NAME, "--mesh", "1x1", "--chip", "p150", "--json")
    assert run(monkeypatch, "doctor", *args) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["fits"] is False
    assert "does not fit" in captured.err and "--mesh 1x2" in captured.err


BAD = {
    "model": (("nonesuch",), "'nonesuch'"),
    "empty directory": (("{tmp}",), "config.json"),
    "mesh": ((NAME, "--mesh", "2x4"), "1xD"),
    "no chip at all": ((NAME, "--mesh", "1x0"), "1xD"),
    "shares": ((NAME, "--mesh", "1x3"), "E=128 on 1x3"),
    "chip": ((NAME, "--chip", "p9"), "n150, n300, p150"),
    "weights": ((NAME, "--weights", "int4"), "bfloat8_b"),
    "keys and values": ((NAME, "--kv", "bfloat4_b"), "kv=bfloat16 or kv=bfloat8_b"),
    "batch": ((NAME, "--batch", "0"), "'--batch'"),
    "sequence": ((NAME, "--sequence", "40961"), "40960"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_one_message_and_code_2(name: str, monkeypatch, capsys, tmp_path: Path) -> None:
    args, words = BAD[name]
    assert run(monkeypatch, "doctor", "--plan", *(arg.format(tmp=tmp_path) for arg in args)) == 2
    captured = capsys.readouterr()
    assert words in captured.err and "Traceback" not in captured.err and captured.out == ""


def test_without_the_planner_it_says_how_to_have_it(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ttnn_moe._planner", None)
    monkeypatch.delattr("ttnn_moe._planner", raising=False)
    with pytest.raises(ContractError, match="pip install -e"):
        report()


def test_the_documented_table_is_what_it_prints() -> None:
    text = (ROOT / "docs" / "tenstorrent.md").read_text()
    rows = re.findall(r"\| (1x\d), (bfloat\w+) \| ([\d.]+) GiB \| (.*) \| (.*) \|", text)
    assert len(rows) == 4
    for mesh, weights, needed, *verdicts in rows:
        for chip, verdict in zip(("n150", "p150"), verdicts, strict=True):
            made = report(mesh, chip, weights)
            assert f"{made.needed / 2**30:.2f}" == needed and made.fits == (verdict == "fits")
            if not made.fits:
                with pytest.raises(ContractError) as error:
                    plans.check_fits(made, model_sizes(QWEN3))
                assert all(option in str(error.value) for option in re.findall(r"`(.*?)`", verdict))
