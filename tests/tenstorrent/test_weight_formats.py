"""Formats of weights: how they are written, what they hold, and when experts are better split over the chips."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ttnn_moe import Experts
from ttnn_moe.errors import ContractError
from ttnn_moe.tenstorrent import ComputeConfig, ExpertFormats, ModelFormats, host
from ttnn_moe.tenstorrent.balance import prefer_split, visits
from ttnn_moe.tenstorrent.emulator.formats import FORMATS, pack_blocks, unpack_blocks
from ttnn_moe.tenstorrent.experts import weight_format


@pytest.mark.parametrize(
    ("text", "gate_up", "down"),
    [("bfloat16", "bfloat16", "bfloat16"), ("bfloat4_b,bfloat8_b", "bfloat4_b", "bfloat8_b")],
)
def test_formats_of_experts(text, gate_up, down):
    formats = ExpertFormats.parse(text)
    assert (formats.gate_up, formats.down, str(formats)) == (gate_up, down, text)
    assert ModelFormats.parse(text).experts(7) == formats


@pytest.mark.parametrize("text", [3, [], b"bfloat16"], ids=str)
def test_formats_that_are_no_text_are_refused(text: object) -> None:
    for formats in (ModelFormats, ExpertFormats):
        with pytest.raises(ContractError, match="formats of weights are no text; got"):
            formats.parse(text)  # type: ignore[arg-type]


def test_weights_by_bank_are_a_layout_of_every_layer():
    formats = ExpertFormats.parse("bfloat4_b,bfloat8_b,layout=banked")
    assert formats.banked and (formats.gate_up, formats.down) == ("bfloat4_b", "bfloat8_b")
    assert ExpertFormats.parse(str(formats)) == formats != ExpertFormats.parse("bfloat4_b,bfloat8_b")
    assert str(ExpertFormats.parse("bfloat8_b,layout=interleaved")) == "bfloat8_b"
    whole = ModelFormats.parse("bfloat4_b,bfloat8_b,layout=banked,head=bfloat8_b")
    assert [whole.experts(i) for i in range(2)] == [formats] * 2
    assert ModelFormats.parse("layout=banked").experts() == ExpertFormats.parse("bfloat16,layout=banked")
    for text in ("bfloat16,layout=columns", "bfloat16,layout=banked,layout=banked"):
        with pytest.raises(ContractError, match="layout"):
            ExpertFormats.parse(text)
    for text in ("layout=columns", "layout@1=banked"):
        with pytest.raises(
            ContractError, match=f"layout .*; got '{text}'; expected layout=interleaved or layout=banked"
        ):
            ModelFormats.parse(text)


def test_the_last_rule_of_a_group_and_layer_holds():
    formats = ModelFormats.parse("bfloat4_b,attention=bfloat8_b,experts@0-1=bfloat8_b,down@3=bfloat16,head=bfloat8_b")
    assert [str(formats.experts(i)) for i in range(4)] == [*["bfloat8_b"] * 2, "bfloat4_b", "bfloat4_b,bfloat16"]
    assert [formats.of(group, 5) for group in ("attention", "dense", "head", "embedding")] == [
        *("bfloat8_b", "bfloat16", "bfloat8_b", "bfloat16")
    ]
    assert str(ModelFormats.parse("")) == "bfloat16"


@pytest.mark.parametrize(
    "text",
    [
        *("int4", "bfloat8_b,bfloat4_b,bfloat16", "attention=fp8", "norms=bfloat8_b", "embedding=bfloat8_b"),
        *(
            "attention=bfloat8_b,bfloat4_b",
            "down@x=bfloat8_b",
            "=bfloat8_b",
            "kv=bfloat4_b",
            "kv@1=bfloat8_b",
            "head@3=bfloat8_b",
        ),
    ],
)
def test_what_is_no_format_is_refused(text):
    with pytest.raises(ContractError):
        ModelFormats.parse(text)


@pytest.mark.parametrize("item", ["experts@=bfloat8_b", "gate_up@-1=bfloat8_b", " bfloat8_b"])
def test_an_item_that_is_not_read_is_named(item):
    with pytest.raises(ContractError, match=f"got '{item}'"):
        ModelFormats.parse(item)


@pytest.mark.parametrize("item", ["kv=foo", "kv=bfloat4_b", "kv@1=bfloat8_b"])
def test_a_wrong_format_of_the_cache_names_those_that_it_has(item):
    with pytest.raises(ContractError, match=f"KV cache .*; got '{item}'; expected kv=bfloat16 or kv=bfloat8_b"):
        ModelFormats.parse(item)


@pytest.mark.parametrize("item", ["gate_up@5-2=bfloat8_b", "attention@8=bfloat8_b", "experts@0-8=bfloat8_b"])
def test_layers_that_are_not_there_are_refused(item):
    words = rf"names no layers of the model; got '{item}'; expected GROUP@FIRST-LAST, FIRST <= LAST <= 7\."
    with pytest.raises(ContractError, match=words):
        ModelFormats.parse(item, layers=8)
    assert ModelFormats.parse("gate_up@2-2=bfloat8_b").of("gate_up", 2) == "bfloat8_b"
    assert ModelFormats.parse("gate_up@0-7=bfloat8_b", layers=8).of("gate_up", 7) == "bfloat8_b"


def test_an_unknown_fidelity_is_refused():
    with pytest.raises(ContractError, match="HiFi9"):
        ComputeConfig("HiFi9")


# (sixteen values' kind, values, as ttnn 0.81.1's from_torch and to_torch give them back in bfloat4_b)
KEPT = {
    "ties to even": ([1.75, 0.125, 0.375, 0.625, 0.875, -1.125, -1.375], [1.75, 0.0, 0.5, 0.5, 1.0, -1.0, -1.5]),
    "largest of a step rounds no further up": ([1.99, 1.0], [1.75, 1.0]),
    "subnormal": ([2**-130, 2**-127], [0.0, 0.0]),
    "not a number": ([float("inf"), float("nan"), 1.0], [float("inf"), float("nan"), 0.0]),
}


@pytest.mark.parametrize("name", KEPT)
def test_bfloat4_b_is_what_ttnn_makes_of_it(name):
    values, want = (np.pad(np.array(side, np.float32), (0, 1024 - len(side)))[None] for side in KEPT[name])
    kind = FORMATS["bfloat4_b"]
    assert np.array_equal(unpack_blocks(pack_blocks(values, kind), kind), want, equal_nan=True)


@pytest.mark.parametrize(("form", "bound"), [("bfloat8_b", 2**-7), ("bfloat4_b", 2**-3)])
def test_a_block_format_is_off_by_half_a_step_of_the_largest_of_sixteen(form, bound):
    values = torch.randn(8, 1024, generator=torch.Generator().manual_seed(0)).numpy()
    kind = FORMATS[form]
    packed = pack_blocks(values, kind)
    assert packed.shape == (8, kind.tile_bytes)
    kept = unpack_blocks(packed, kind)
    largest = np.abs(values).reshape(8, 64, 16).max(-1, keepdims=True)
    assert (np.abs(kept - values).reshape(8, 64, 16) <= bound * largest).all()
    assert np.array_equal(unpack_blocks(pack_blocks(kept, kind), kind), kept)  # once stored, nothing more is lost


@pytest.mark.parametrize(("E", "K", "D", "B"), [(128, 8, 8, 1), (16, 2, 4, 3), (8, 8, 2, 5)])
def test_visited_experts_are_those_that_drawing_gives(E, K, D, B):
    found = visits(E, K, D, B)
    draws = 4000
    ids = torch.rand(draws, B, E, generator=torch.Generator().manual_seed(0)).topk(K).indices.flatten(1)
    per_chip = torch.zeros(draws, E).scatter_(1, ids, 1).view(draws, D, -1).sum(-1)
    assert found.mean == pytest.approx(float(per_chip.mean()), rel=0.02)
    assert found.most == pytest.approx(float(per_chip.amax(-1).mean()), rel=0.02)


def test_experts_are_split_where_a_step_visits_few():
    choice = [prefer_split(128, 8, 8, B, 768) for B in (1, 2, 4, 32)]
    assert choice == [True, True, False, False]
    assert not prefer_split(128, 8, 8, 1, 128) and not prefer_split(128, 8, 1, 1, 768)


@pytest.mark.parametrize("said", ["bfloat8_b,bfloat8_b", "bfloat8_b,attention=bfloat4_b"])
def test_what_the_environment_names_is_loaded_once(said, monkeypatch):
    """Two spellings of one format are one."""
    device = SimpleNamespace(cache={})
    found = SimpleNamespace(device=device, formats=ExpertFormats.parse("bfloat8_b"), placement=None)
    calls = []
    monkeypatch.setenv("TTNN_MOE_TT_WEIGHTS", said)
    monkeypatch.setattr(host, "load_experts", lambda *args, **options: calls.append(options) or found)
    monkeypatch.setattr(host.devices, "current", lambda: device if calls else None)
    experts = Experts.dense(torch.zeros(2, 64, 32).bfloat16(), torch.zeros(2, 32, 32).bfloat16())
    assert host.loaded(experts) is host.loaded(experts) is found
    assert [options["weight_format"] for options in calls] == ["bfloat8_b"]


def test_formats_that_the_environment_names_wrongly(monkeypatch):
    monkeypatch.setenv("TTNN_MOE_TT_WEIGHTS", "zz")
    with pytest.raises(
        ContractError, match="TTNN_MOE_TT_WEIGHTS: unknown weight format; got 'zz'.*unset TTNN_MOE_TT_W"
    ):
        weight_format()
