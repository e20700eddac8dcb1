"""The gate of benchmarks/kv_attention.py sees when the last token of a tier is lost. No GPU: attention is torch's."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from benchmark_scripts import script
from ttnn_moe.kv.bucketed.quantise import rotate
from ttnn_moe.kv.bucketed.reference import quantized_attention_bucketed

CAUGHT = 2
"""A lost token is off by so many bounds at least."""


@pytest.fixture
def kv(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    kv = script("kv_attention")
    monkeypatch.setattr(kv, "DEVICE", "cpu")
    monkeypatch.setattr(kv, "sets_for", lambda size: 2)
    torch.manual_seed(0)
    return kv


def times(calls, replays=15) -> float:
    for call in calls:
        call()
    return float(len(calls))


def without_last(tier):
    return replace(tier, counts=tier.counts - 1)


def attend(q, tiers, at, out=None, of=None):
    return quantized_attention_bucketed(q, tiers, at)


@pytest.mark.parametrize("name", ["mixed", "8", "3"])
def test_a_lost_token_of_any_tier_is_seen(kv: ModuleType, name: str) -> None:
    tokens = 4096
    counts = kv.mixed(tokens) if name == "mixed" else {int(name): tokens}
    tiers, at = kv.tiers_of(1, counts), torch.arange(1)
    q = torch.randn(1, 1, kv.HEADS, kv.D)
    want = quantized_attention_bucketed(q, tiers, at)
    assert want.isfinite().all() and kv.worst(want.bfloat16(), want) < kv.NEAR / CAUGHT
    for lost in range(len(tiers)):
        some = [without_last(tier) if i == lost else tier for i, tier in enumerate(tiers)]
        assert kv.worst(quantized_attention_bucketed(q, some, at), want) > CAUGHT * kv.NEAR


def test_a_kernel_that_loses_a_token_has_no_time(kv: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = kv.bucketed.Plan(4, 4)
    monkeypatch.setattr(kv, "microseconds", times)
    monkeypatch.setattr(kv.bucketed, "plan_of", lambda q, tiers: plan)
    monkeypatch.setattr(kv.bucketed, "launch", attend)
    counts = {3: 512, 16: 64}
    assert kv.bucketed_times(2, counts, [None], 1)["us"] == 2
    lossy = lambda q, tiers, *args, **named: attend(q, [without_last(tiers[0]), *tiers[1:]], *args)  # noqa: E731
    monkeypatch.setattr(kv.bucketed, "launch", lossy)
    assert str(kv.bucketed_times(2, counts, [None], 1)["us"]).startswith("WRONG")


def test_bf16_kernels_are_compared(kv: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(lost: int):
        def run(q, memory):
            kept = memory.keys.shape[2] - lost
            k, v = memory.keys[:, :, :kept].float(), memory.values[:, :, :kept].float()
            return kv.bf16_wanted(q[:, :, None], k, v)[:, :, 0].bfloat16()

        return run

    right = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(kv, "microseconds", times)
    monkeypatch.setattr(kv, "sdpa_kernel", lambda which: torch.nn.attention.sdpa_kernel(kv.SDPBackend.MATH))
    monkeypatch.setattr(kv.decode, "launch", kernel(0))
    assert {name: t for name, t in kv.bf16_times(2, 512).items() if t == 2} == {"cuDNN bf16": 2, "bf16 kernel": 2}
    monkeypatch.setattr(kv.decode, "launch", kernel(1))

    def lossy(q, k, v, **named):
        lost = int(q.dtype == torch.bfloat16)
        return right(q, k[:, :, : k.shape[2] - lost], v[:, :, : v.shape[2] - lost], **named)

    monkeypatch.setattr(kv.F, "scaled_dot_product_attention", lossy)
    found = kv.bf16_times(2, 512)
    assert all(str(found[name]).startswith("WRONG") for name in ("cuDNN bf16", "bf16 kernel"))


def test_the_bf16_kernel_of_prompts_is_compared(kv: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from ttnn_moe.kv.torch_forms import prefill_attention

    monkeypatch.setattr(kv, "microseconds", times)
    monkeypatch.setattr(kv, "prefill_attention", lambda q, memory, spans, tiles: prefill_attention(q, memory, spans))
    assert kv.bf16_prompt_times(8, 512) == 2

    def early(q, memory, spans, tiles):
        (span,) = spans
        return prefill_attention(q, memory, [replace(span, past=span.past - 1)])

    monkeypatch.setattr(kv, "prefill_attention", early)
    assert str(kv.bf16_prompt_times(8, 512)).startswith("WRONG")


def test_pieces_of_prompts_run_through_several_caches(kv: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Own:
        @classmethod
        def of(cls, *args):
            return cls()

        def pack(self, k, v, scale):
            self.k, self.v = k, v

    lost = 0

    def launch(q, at, own, which, n, tiers, row, scale):
        seen.append(id(tiers))
        past = [replace(tier, counts=tier.counts - lost) for tier in tiers]
        return kv.attend_piece(q, rotate(q.float()), at, own.k, own.v, past, at[:1])

    def unpacked(q, k, v, tiers, row, scale, room):
        own = Own()
        own.pack(k, v, scale)
        return launch(q, torch.arange(len(q)), own, 0, len(q), tiers, row, scale)

    monkeypatch.setattr(kv, "microseconds", times)
    monkeypatch.setattr(kv.bucketed_prompt, "Own", Own)
    monkeypatch.setattr(kv.bucketed_prompt, "launch", launch)
    monkeypatch.setattr(kv, "attend_unpacked", unpacked)
    monkeypatch.setattr(kv.bucketed_unpack.Room, "of", lambda *args: None)
    found = kv.prompt_times(8, {3: 512, 8: 64})
    assert {way: row["us"] for way, row in found.items()} == {"packed": 2, "unpacked": 2}
    assert len(set(seen)) == 2
    lost = 1
    assert not any("us" in row for row in kv.prompt_times(8, {3: 512, 8: 64}).values())
