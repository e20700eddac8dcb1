"""Attention over pages on an NPU: the operators' stand-ins, their documented limits, and the cache on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ascend_stand_in
from ttnn_moe.ascend import attention, limits
from ttnn_moe.errors import RequestError
from ttnn_moe.kv.cache import CacheSizes
from ttnn_moe.kv.npu_paged import NpuPagedCache
from ttnn_moe.kv.paged import PagedCache

BF16 = torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def good(which: int) -> tuple[str, dict[str, Any]]:
    """A chunk of a prompt, decoding tokens, and the write, at Qwen3-30B-A3B's sizes."""
    name, call = list(attention.calls(32, 4, 128, BF16, attention.PAGE, 320))[which]
    return name, dict(call)


CHUNK, DECODE, WRITE = 0, 1, 2

# rule -> the call, and what makes it break the rule, and it alone
BREAKS: dict[str, tuple[int, Callable[[dict[str, Any]], Any]]] = {
    "query is bf16 or fp16": (CHUNK, lambda a: a.update({name: a[name].float() for name in ("query", "key", "value")})),
    "key and value have query's dtype": (CHUNK, lambda a: a.update(value=a["value"].half())),
    "query, key, value and block_table are contig": (CHUNK, lambda a: a.update(key=a["key"].mT.contiguous().mT)),
    "query is [B, S, N, D] in BSND": (CHUNK, lambda a: a.update(input_layout="BNSD")),
    "key and value have one shape": (CHUNK, lambda a: a.update(value=a["value"][1:])),
    "in BSND, pages are": (CHUNK, lambda a: a.update(block_size=256)),
    "key heads * D is at most": (
        CHUNK,
        lambda a: a.update(
            query=empty(1, 2, 256, 512),
            num_heads=256,
            num_key_value_heads=128,
            key=(k := empty(320, 128, 65536)),
            value=k,
        ),
    ),
    "there are at most 65536 sequences": (
        DECODE,
        lambda a: a.update(
            query=empty(65537, 1, 32, 128), block_table=empty(65537, 320, dtype=torch.int32), actual_seq_lengths_kv=[1]
        ),
    ),
    "there are at most 256 query heads": (
        CHUNK,
        lambda a: a.update(
            query=empty(1, 2, 512, 128), num_heads=512, num_key_value_heads=8, key=(k := empty(320, 128, 1024)), value=k
        ),
    ),
    "query heads are key heads times": (CHUNK, lambda a: a.update(query=empty(1, 2, 30, 128), num_heads=30)),
    "D is a multiple of 16": (
        CHUNK,
        lambda a: a.update(query=empty(1, 2, 32, 120), key=(k := empty(320, 128, 480)), value=k),
    ),
    "block_size is 128": (
        CHUNK,
        lambda a: a.update(
            block_size=64, key=(k := empty(640, 64, 512)), value=k, block_table=empty(1, 640, dtype=torch.int32)
        ),
    ),
    "block_table is int32": (CHUNK, lambda a: a.update(block_table=empty(1, 320, dtype=torch.int64))),
    "keys of a sequence are at most": (DECODE, lambda a: a.update(block_table=empty(2, 2049, dtype=torch.int32))),
    "with pages there are actual": (CHUNK, lambda a: a.update(actual_seq_lengths_kv=None)),
    "actual_seq_lengths are none": (CHUNK, lambda a: a.update(actual_seq_lengths=[3])),
    "sparse_mode is 0 to 4": (CHUNK, lambda a: a.update(sparse_mode=5)),
    "atten_mask is bool": (CHUNK, lambda a: a.update(atten_mask=empty(2048, 2048))),
    "in sparse_mode 2 to 4": (CHUNK, lambda a: a.update(atten_mask=empty(2, 2, dtype=torch.int8))),
    "inner_precise is 0 to 3": (DECODE, lambda a: a.update(inner_precise=2)),
    "input is bf16": (
        WRITE,
        lambda a: a.update(input=a["input"].to(torch.int32), updates=a["updates"].to(torch.int32)),
    ),
    "updates have input's dtype": (WRITE, lambda a: a.update(updates=a["updates"].half())),
    "input has one to eight": (WRITE, lambda a: a.update(input=empty(*[2] * 9), updates=empty(2, *[2] * 8))),
    "indices are int32 or int64": (WRITE, lambda a: a.update(indices=empty(2, 1))),
    "indices are [..., n]": (WRITE, lambda a: a.update(indices=empty(2, 3, dtype=torch.int32), updates=empty(2))),
    "updates are indices' leading": (WRITE, lambda a: a.update(updates=empty(3, 512))),
}


def test_every_limit_has_a_call_that_breaks_it() -> None:
    assert len(BREAKS) == len(attention.LIMITS)
    for which in (CHUNK, DECODE, WRITE):
        assert not limits.broken(*good(which), attention.LIMITS)


@pytest.mark.parametrize("rule", BREAKS)
def test_a_call_that_breaks_one_limit_alone(rule: str) -> None:
    which, change = BREAKS[rule]
    operator, call = good(which)
    change(call)
    (row,) = limits.broken(operator, call, attention.LIMITS)
    assert row.rule.startswith(rule)


@pytest.fixture(scope="module")
def npu() -> Any:
    return ascend_stand_in.npu()


def test_attention_by_hand(npu: Any) -> None:
    """Two query heads of one key head over two pages of 128; the second query sees one key more."""
    g = torch.Generator().manual_seed(2)
    held, n, D = 130, 2, 16
    q, k, v = (torch.randn(shape, generator=g).half() for shape in ((1, n, 2, D), (held, D), (held, D)))
    keys, values = torch.full((4, 128, D), 9.0).half(), torch.full((4, 128, D), 9.0).half()
    for pages, rows in ((keys, k), (values, v)):
        pages[3], pages[1, : held - 128] = rows[:128], rows[128:]
    table = torch.tensor([[3, 1]], dtype=torch.int32)
    call = attention.arguments(q, keys, values, table, [held], attention.causal_mask("cpu"))
    out = attention.attend(npu, call)
    for s in range(n):
        seen = held - n + 1 + s
        for head in range(2):
            weights = (k[:seen].double() @ q[0, s, head].double() * D**-0.5).softmax(0)
            want = weights @ v[:seen].double()
            assert float((out[0, s, head].double() - want).norm() / want.norm()) < 2e-3


@pytest.mark.parametrize(
    "change, match",
    [
        ({"atten_mask": torch.zeros(2048, 2048, dtype=torch.int8)}, "upper triangle"),
        ({"block_table": torch.tensor([[4]], dtype=torch.int32)}, "outside 0 .. 3"),
        ({"block_size": 64}, "pages are"),
        ({"scale_of": 1.0}, "scale_of"),
    ],
)
def test_the_stand_in_refuses_what_the_page_forbids(npu: Any, change: dict[str, Any], match: str) -> None:
    pages, table = torch.zeros(4, 128, 16).half(), torch.zeros(1, 1, dtype=torch.int32)
    call = attention.arguments(torch.zeros(1, 2, 1, 16).half(), pages, pages, table, [5], attention.causal_mask("cpu"))
    with pytest.raises((RuntimeError, NotImplementedError), match=match):
        attention.attend(npu, call | change)


def test_a_write_outside_the_pages_is_refused(npu: Any) -> None:
    pages = torch.zeros(2, 128, 16).half()
    attention.write(npu, pages, torch.tensor([[255]], dtype=torch.int32), torch.ones(1, 1, 16).half())
    assert bool((pages[1, 127] == 1).all()) and float(pages.sum()) == 16
    with pytest.raises(RuntimeError, match="outside"):
        attention.write(npu, pages, torch.tensor([[256]], dtype=torch.int32), torch.ones(1, 1, 16).half())


def test_the_cache_attends_as_the_paged_one_does(npu: Any) -> None:
    """Chunks of prompts, decoding rows beside them, tokens whose logits are wanted, and rows that come and go."""
    sizes = CacheSizes(2, 4, 2, 32, torch.float16, torch.device("cpu"))
    ours, theirs = NpuPagedCache(sizes, 3, 300, 7, npu), PagedCache(sizes, 3, 300, 16)
    g = torch.Generator().manual_seed(4)

    def both(make: Callable[[Any], Any]) -> None:
        steps = [make(cache) for cache in (ours, theirs)]
        T = len(steps[0].rows)
        for layer in range(2):
            q, k, v = (torch.randn(T, heads, 32, generator=g).half() for heads in (4, 2, 2))
            outs = []
            for cache, step in zip((ours, theirs), steps, strict=True):
                cache.write(layer, k, v, step)
                outs.append(cache.attend(layer, q, step))
                if layer and (wanted := getattr(step, "wanted", lambda: None)()) is not None:
                    at = step.logits_at
                    cache.write(layer, k[at], v[at], wanted)
                    outs.append(cache.attend(layer, q[at], wanted))
            half = len(outs) // 2
            for got, want in zip(outs[:half], outs[half:], strict=True):
                torch.testing.assert_close(got.float(), want.float(), rtol=2e-3, atol=2e-3)

    for row, tokens in ((0, 300), (1, 40), (2, 140)):
        for cache in (ours, theirs):
            cache.open(row, tokens)
    both(lambda cache: cache.prefill([(0, 130), (1, 1)], [129, 130]))
    both(lambda cache: cache.prefill([(0, 150), (2, 3)], [152], [(1, 1)]))
    both(lambda cache: cache.decode([0, 1, 2], [280, 2, 3]))
    for cache in (ours, theirs):
        cache.close(0)
        cache.open(0, 200)
    both(lambda cache: cache.prefill([(0, 129)], [5, 128], [(1, 3), (2, 4)]))


@pytest.mark.parametrize(
    "sizes, match",
    [
        ((4, 2, 24, torch.float16), "multiple of 16"),
        ((4, 2, 32, torch.float32), "bf16 or fp16"),
        ((512, 8, 32, torch.float16), "256 query heads"),
    ],
)
def test_a_model_beyond_the_operator_is_refused_with_the_rule(npu: Any, sizes: Any, match: str) -> None:
    heads, kv_heads, head_dim, dtype = sizes
    with pytest.raises(RequestError, match=match):
        NpuPagedCache(CacheSizes(1, heads, kv_heads, head_dim, dtype, torch.device("cpu")), 1, 64, 1, npu)


def test_another_page_is_refused(npu: Any) -> None:
    sizes = CacheSizes(1, 4, 2, 32, torch.float16, torch.device("cpu"))
    with pytest.raises(RequestError, match="page=64"):
        NpuPagedCache.within(sizes, 1, 64, 1 << 20, 64, npu)
