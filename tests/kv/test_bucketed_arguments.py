"""What attention to packed tiers and the kernel of writes refuse, the same on every device: a kernel reads bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bucketed_tiers import filled
from ttnn_moe.choice import TORCH
from ttnn_moe.cuda import device
from ttnn_moe.cuda.attention import bucketed_write
from ttnn_moe.cuda.attention.bucketed_write import Ring
from ttnn_moe.cuda.device import H200
from ttnn_moe.cuda.jit import build
from ttnn_moe.errors import ContractError
from ttnn_moe.kv.bucketed import writes
from ttnn_moe.kv.bucketed.attention import quantized_attention_bucketed
from ttnn_moe.kv.cache import HeadNorms
from ttnn_moe.kv.step import DecodeStep

T, n, HEADS, KV, D = 2, 3, 8, 4, 128


def arguments() -> dict[str, Any]:
    rows = filled({2: [40, 0], 8: [10, 5]}, KV, D)
    q = torch.randn(T, n, HEADS, D).bfloat16()
    return {
        "q": q,
        "tiers": rows.tiers,
        "rows": torch.tensor([1, 0]),
        "positions": torch.tensor([0, 20]),
        "num_tokens": torch.tensor(2, dtype=torch.int32),
        "out": torch.empty_like(q),
        "mass": [torch.zeros(len(tier.payload)) for tier in rows.tiers],
        "q_scale": torch.ones(D),
    }


def changed(field: str, change: Any) -> Any:
    """The second tier with another tensor."""
    return lambda tiers: [tiers[0], replace(tiers[1], **{field: change(getattr(tiers[1], field))})]


def other_rows(counts: list[int], kv_heads: int) -> Any:
    """The second tier from another cache."""
    return lambda tiers: [tiers[0], *filled({8: counts}, kv_heads, D).tiers]


REFUSED = {
    "other key/value heads": (
        "tiers",
        other_rows([10, 5], 2),
        r"\[2, 8\] bits are not of one layer; got \[4, 2\] key/value heads; expected as many key/value heads in each",
    ),
    "other rows": ("tiers", other_rows([10, 5, 1], KV), r"got \[2, 3\] rows; expected as many rows in each; to fix it"),
    "payload of int8": ("tiers", changed("payload", lambda x: x.view(torch.int8)), "payload of the tier of 8 bits"),
    "scales of fp32": (
        "tiers",
        changed("scales", lambda x: x.float()),
        r"scales of the tier of 8 bits does not fit; got .* of torch.float32 on cpu; expected .* of torch.float16 on",
    ),
    "scales of fewer pages": ("tiers", changed("scales", lambda x: x[1:]), "scales of the tier of 8 bits"),
    "int64 token_ids": ("tiers", changed("token_ids", lambda x: x.long()), "token_ids of the tier of 8 bits"),
    "int64 table": ("tiers", changed("table", lambda x: x.long()), "table of the tier of 8 bits"),
    "counts of one row": (
        "tiers",
        changed("counts", lambda x: x[:1]),
        r"got \[1\] of .*; expected \[2\] of torch.int32",
    ),
    "payload in steps": ("tiers", changed("payload", lambda x: x.repeat(1, 1, 2, 1)[:, :, ::2]), "payload .*strides"),
    "scales of one page": ("tiers", changed("scales", lambda x: x[:1].expand(x.shape)), "scales of the tier of 8 bits"),
    "token_ids in steps": ("tiers", changed("token_ids", lambda x: x.repeat(1, 2)[:, ::2]), "token_ids of the tier"),
    "counts in steps": (
        "tiers",
        changed("counts", lambda x: x.repeat(2)[::2]),
        r"counts .*strides \[2\]; expected .*row",
    ),
    "a table by columns": ("tiers", changed("table", lambda x: torch.cat((x, x), 1).t().contiguous().t()), "table of"),
    "a table of one line": ("tiers", changed("table", lambda x: x[:1].expand(x.shape)), "table of the tier of 8 bits"),
    "a tier on another device": ("tiers", changed("counts", lambda x: x.to("meta")), "on meta; expected .* on cpu"),
    "int32 rows": (
        "rows",
        lambda x: x.int(),
        r"rows does not fit q; got \[2\] of torch.int32 .*expected \[2\] of torch",
    ),
    "too few rows": ("rows", lambda x: x[:1], "rows does not fit q"),
    "rows in steps": ("rows", lambda x: x.repeat_interleave(2)[::2], "rows does not fit q; .*not contiguous"),
    "int32 positions": ("positions", lambda x: x.int(), "positions does not fit q"),
    "positions of queries": ("positions", lambda x: x.repeat(n), "positions does not fit q"),
    "a long num_tokens": ("num_tokens", lambda x: x.long(), "num_tokens does not fit q"),
    "a vector of num_tokens": ("num_tokens", lambda x: x[None], "num_tokens does not fit q"),
    "out of fp32": ("out", lambda x: x.float(), "out does not fit q"),
    "out of other sizes": ("out", lambda x: x[:, :1], "out does not fit q"),
    "out in steps": ("out", lambda x: x.repeat(1, 1, 1, 2)[..., ::2], "out does not fit q; .*not contiguous"),
    "q_scale of bf16": ("q_scale", lambda x: x.bfloat16(), "q_scale does not fit q"),
    "q_scale of half a head": ("q_scale", lambda x: x[:64], "q_scale does not fit q"),
    "mass of one tier": ("mass", lambda x: x[:1], "a tensor for each tier"),
    "mass of fp16": ("mass", lambda x: [m.half() for m in x], "mass of 2 bits does not fit q"),
    "heads that do not divide": ("q", lambda x: x[:, :, :6], "does not fit the queries"),
    "integers": ("q", lambda x: x.int(), "q has the wrong dtype"),
    "another device": ("rows", lambda x: x.to("meta"), "rows does not fit q; got .* on meta"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_does_not_fit_is_refused(name: str) -> None:
    given = arguments()
    assert quantized_attention_bucketed(**given) is given["out"]
    which, change, words = REFUSED[name]
    if which == "q":
        given["out"] = None
    with pytest.raises(ContractError, match=words):
        quantized_attention_bucketed(**{**given, which: change(given[which])})


def test_a_table_may_be_a_part_of_a_wider_one() -> None:
    given = arguments()
    want = quantized_attention_bucketed(**given).clone()
    given["tiers"] = changed("table", lambda x: torch.cat((x, x), 1)[:, : x.shape[1]])(given["tiers"])
    assert torch.equal(quantized_attention_bucketed(**given), want)


@pytest.mark.parametrize("shape", [(0, 1, HEADS, D), (2, 0, HEADS, D), (2, 1, 0, D)], ids=str)
def test_no_query_is_no_output(shape: tuple[int, ...]) -> None:
    rows = filled({2: [40, 0], 3: [1, 1], 16: [10, 5]}, KV, D)
    assert quantized_attention_bucketed(torch.randn(shape), rows.tiers, torch.arange(shape[0])).shape == shape


def write(**changes: Any) -> str:
    """What writes heads into the high tier on an H200."""
    (tier,) = filled({8: [96]}, KV, D).tiers
    x = torch.randn(T, HEADS + 2 * KV, D).bfloat16()
    norms, rope = [torch.ones(D).bfloat16() for _ in range(2)], [torch.ones(T, 1, D // 2).bfloat16() for _ in range(2)]
    given = {
        "k_norm": norms[1],
        "sin": rope[1],
        "rows": torch.zeros(T, dtype=torch.int64),
        "positions": torch.arange(T),
        "num_tokens": None,
        **changes,
    }
    step = DecodeStep(given["rows"], given["positions"], 96, given["num_tokens"])
    ring = Ring(tier, torch.ones(D), 4, 92, True)
    runs = writes.WRITE.explain(
        torch.device("cuda:0"), x, HeadNorms(norms[0], given["k_norm"], 1e-6), (rope[0], given["sin"]), ring, step
    )[0]
    if not {"k_norm", "sin"} & changes.keys():
        k = x[:, :KV].contiguous()
        assert writes.PUT.explain(torch.device("cuda:0"), k, k, ring, step)[0] == runs
    return runs


WRITES = {
    "norms of fp32": {"k_norm": torch.ones(D)},
    "sines of fp32": {"sin": torch.ones(T, 1, D // 2)},
    "sines in steps": {"sin": torch.ones(T, 1, D).bfloat16()[..., ::2]},
    "int32 rows": {"rows": torch.zeros(T, dtype=torch.int32)},
    "int32 positions": {"positions": torch.zeros(T, dtype=torch.int32)},
    "a long num_tokens": {"num_tokens": torch.tensor(1)},
}


@pytest.mark.parametrize("name", list(WRITES))
def test_the_kernel_of_writes_leaves_what_it_cannot_read_to_the_torch_form(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "query", lambda _: H200)
    monkeypatch.setattr(build, "why_not", lambda: None)
    assert write() == bucketed_write.NAME
    assert write(num_tokens=torch.tensor(1, dtype=torch.int32)) == bucketed_write.NAME
    assert write(**WRITES[name]) == TORCH
