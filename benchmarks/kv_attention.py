"""Decode attention to a bucketed KV cache beside bf16: torch's SDPA (cuDNN) and this package's bf16 kernel.

    python benchmarks/kv_attention.py --json FILE [--rows 1,8,32] [--tokens 4096,32768]
    python benchmarks/kv_attention.py --json FILE --prompts 128,2048 --tokens 4096,32768

With --prompts: a piece of a prompt of so many tokens after so many packed ones, by both ways, beside this package's
bf16 kernel.
--queries 1,4,8: so many queries a row, as speculative decoding asks.

32 query heads, 4 key/value heads, head_dim 128. Each time is the median of replays of a CUDA graph that goes through as
many caches as L2 does not hold. `mixed` has 3.0 bits on average: 64 tokens of 16 bits, 2% of 8, 20% of 4, the others of
2 and 3.

The gate: before its time, each implementation's output on the first cache is compared with torch, cuDNN's and the bf16
kernels' too. Of up to three rows or queries, every head must be near. The last token of each tier, and of a bf16 cache,
has larger keys and values, so that the output shows when it is lost. What is wrong has no time.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from command_line import Json, numbers, run_script, write
from need_gpu import need_gpu
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ttnn_moe.cuda.attention import bucketed, bucketed_prompt, bucketed_unpack, decode, prefill
from ttnn_moe.cuda.attention.memory import Memory
from ttnn_moe.cuda.attention.tiers import UNIT, Tier
from ttnn_moe.kv.attention import prefill_attention
from ttnn_moe.kv.bucketed.packing import pack, unpack
from ttnn_moe.kv.bucketed.prompts import attend_piece, attend_unpacked
from ttnn_moe.kv.bucketed.quantise import rotate
from ttnn_moe.kv.bucketed.reference import quantized_attention_bucketed
from ttnn_moe.kv.bucketed.storage import PAGE, bytes_of_token
from ttnn_moe.kv.step import Span
from ttnn_moe.sizes import ceil_div

DEVICE = "cuda"
HEADS, KV_HEADS, D = 32, 4, 128
NEAR = 0.02
"""Relative error of a head's output that is near."""
NEAR_OF_PIECES = 0.04
"""Of pieces of a prompt, which have thousands of heads. Rows that become bf16 first reached 0.023 on an H100."""
LOUD_KEY, LOUD_VALUE = 3, 4
"""How much larger the last token of a tier is. 16 bits: keys and values are N(0, 1), the others' deviation is 1.7."""
WARM_UP = 0.1
"""Seconds of replays that are not timed. For milliseconds after other work, 1 x 512k takes an eighth longer."""

L2_BYTES, BANDWIDTH = 160e6, 4.4e12
"""What the caches of one graph exceed; bytes a second that an H200 reads."""

CASES = [(1, 4096), (1, 32768), (8, 4096), (8, 32768), (32, 4096), (32, 32768), (1, 524288)]


def mixed(tokens: int) -> dict[int, int]:
    """Tokens of each tier: 3.0 bits on average."""
    count = {16: 64, 8: tokens // 50, 4: tokens // 5}
    rest = tokens - sum(count.values())
    bits = 3 * tokens - sum(bits * n for bits, n in count.items())
    return {2: 3 * rest - bits, 3: bits - 2 * rest, **count}


def tiers_of(rows: int, counts: dict[int, int]) -> list[Tier]:
    """Random packed tokens; the pages of a tier are in random order."""
    tiers = []
    done = 0
    for bits, n in sorted(counts.items()):
        wide = ceil_div(n, PAGE)
        pages = rows * wide
        table = torch.randperm(pages, device=DEVICE).view(rows, wide).int()
        payload = torch.empty(pages, KV_HEADS, 2, PAGE * D * bits // 8, dtype=torch.uint8, device=DEVICE)
        scales = torch.rand(pages, KV_HEADS, PAGE // UNIT, 8, 4, 2, device=DEVICE) * 2**-bits + 2**-bits
        if bits == 16:
            payload.view(torch.bfloat16).normal_()
            scales.fill_(1)
        else:
            payload.random_()
        ids = torch.empty(pages, PAGE, dtype=torch.int32, device=DEVICE)
        ids[table.long()] = (done + torch.arange(wide * PAGE, device=DEVICE).int()).view(wide, PAGE)
        done += n
        filled = torch.full((rows,), n, dtype=torch.int32, device=DEVICE)
        tiers.append(Tier(bits, payload, 4 * scales.half() if bits < 16 else scales.half(), ids, table, filled))
        make_last_loud(tiers[-1], n - 1)
    return tiers


def make_last_loud(tier: Tier, slot: int) -> None:
    """Larger keys and values of this slot in every row: some heads give it much of their attention."""
    pages, unit, i = tier.table[:, slot // PAGE].long(), slot % PAGE // UNIT, slot % UNIT
    if tier.bits < 16:
        tier.scales[pages, :, unit, i % 8, i // 8] *= torch.tensor([LOUD_KEY, LOUD_VALUE], device=DEVICE).half()
        return
    payload = tier.payload.unflatten(3, (PAGE // UNIT, -1))
    for which, factor in enumerate((LOUD_KEY, LOUD_VALUE)):
        levels = unpack(payload[pages, :, which, unit], 16, D, values=which == 1)
        x = levels[..., i, :].to(torch.int16).view(torch.bfloat16) * (1.7 * factor)
        levels[..., i, :] = x.view(torch.int16).long()
        payload[pages, :, which, unit] = pack(levels, 16, values=which == 1)


def worst(got: Tensor, want: Tensor) -> float:
    """The largest relative error of a head of a query; infinite where a value is not finite."""
    got, want = got.float(), want.float()
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    return float(errors.nan_to_num(nan=float("inf")).max())


def microseconds(calls: list[Callable[[], object]], replays: int = 15) -> float:
    """Of one call, the median."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    until = time.monotonic() + WARM_UP
    while time.monotonic() < until:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def size_of(counts: dict[int, int]) -> int:
    """Packed bytes of a row."""
    return sum(n * bytes_of_token(bits, KV_HEADS, D) for bits, n in counts.items())


def sets_for(size: int) -> int:
    return max(4, min(100, ceil_div(int(L2_BYTES), size)))  # several: starting a graph takes microseconds


def bucketed_times(
    rows: int, counts: dict[int, int], plans: list[bucketed.Plan | None], queries: int
) -> dict[str, object]:
    """Microseconds and the error of each plan (None: the default one). All queries see all tokens."""
    size = rows * size_of(counts)
    sets = [tiers_of(rows, counts) for _ in range(sets_for(size))]
    q = torch.randn(rows, queries, HEADS, D, device=DEVICE).bfloat16()
    at, out = torch.arange(rows, device=DEVICE), torch.empty_like(q)
    some = torch.tensor(sorted({0, rows - 1}), device=DEVICE)
    want = quantized_attention_bucketed(q[some].float(), sets[0], some)
    found: dict[str, object] = {"floor": size / BANDWIDTH * 1e6, "sets": len(sets)}
    for plan in plans:
        of = plan or bucketed.plan_of(q, sets[0])
        name = f"{of.warps}w {of.splits}s"
        if plan is None:
            found["plan"], name = name, "us"
        error = worst(bucketed.launch(q, sets[0], at, of=of)[some], want)
        if not error < NEAR:
            found[name] = f"WRONG: error {error}"
            continue
        calls = [lambda tiers=tiers, of=of: bucketed.launch(q, tiers, at, out=out, of=of) for tiers in sets]
        found[name] = round(microseconds(calls), 2)
    return found


def prompt_times(n: int, counts: dict[int, int]) -> dict[str, dict[str, float]]:
    """Microseconds of a piece of n tokens after those of the counts, packed and unpacked; and the errors."""
    past, size = sum(counts.values()), size_of(counts)
    sets = [tiers_of(1, counts) for _ in range(sets_for(size))]
    at = torch.arange(n, device=DEVICE)
    k, v = torch.randn(2, n, KV_HEADS, D, device=DEVICE).bfloat16()
    q, scale = torch.randn(n, HEADS, D, device=DEVICE).bfloat16(), torch.ones(D, device=DEVICE)
    own = bucketed_prompt.Own.of([(0, n)], KV_HEADS, PAGE, k.device)
    memory = torch.empty(bucketed_unpack.numbers_of(KV_HEADS, past + n), dtype=torch.bfloat16, device=DEVICE)
    room = bucketed_unpack.Room.of(memory, KV_HEADS, past, n)

    def packed(tiers: list[Tier]) -> Tensor:
        own.pack(k, v, scale)
        return bucketed_prompt.launch(q, at, own, 0, n, tiers, 0, scale)

    def unpacked(tiers: list[Tier]) -> Tensor:
        return attend_unpacked(q, k, v, tiers, 0, scale, room)

    some = torch.tensor(sorted({0, n // 2, n - 1}), device=DEVICE)
    want = attend_piece(q[some], rotate(q[some].float()), some, k, v, sets[0], at[:1]).float()
    found: dict[str, dict[str, float]] = {}
    for way, run in (("packed", packed), ("unpacked", unpacked)):
        error = worst(run(sets[0])[some], want)
        found[way] = {"error": error, "sets": len(sets)}
        if error < NEAR_OF_PIECES:
            found[way]["us"] = round(microseconds([partial(run, tiers) for tiers in sets], 5), 1)
    return found


def bf16_caches(rows: int, tokens: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values [rows, kv_heads, tokens, D] of as many caches as L2 does not hold; the last token is loud."""
    caches = []
    for _ in range(sets_for(rows * tokens * KV_HEADS * D * 4)):
        k, v = torch.empty(2, rows, KV_HEADS, tokens, D, dtype=torch.bfloat16, device=DEVICE).normal_()
        k[:, :, -1] *= 1.7 * LOUD_KEY
        v[:, :, -1] *= 1.7 * LOUD_VALUE
        caches.append((k, v))
    return caches


def bf16_wanted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of q [B, heads, n, D] to all keys of its row, in fp32 by torch's plain form."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), enable_gqa=True)


def bf16_prompt_times(n: int, past: int) -> float | str:
    """Microseconds of this package's bf16 kernel for the same piece, or what is wrong."""
    caches = bf16_caches(1, past + n)
    q = torch.randn(n, HEADS, D, device=DEVICE).bfloat16()
    rows, positions = torch.zeros(n, dtype=torch.int64, device=DEVICE), past + torch.arange(n, device=DEVICE)
    tiles = torch.tensor(prefill.tiles_of([(0, n, past, 0)], prefill.queries_of(D, 2)), dtype=torch.int32).to(DEVICE)

    def run(k: Tensor, v: Tensor) -> Tensor:
        return prefill_attention(q, Memory(k, v, rows, positions), [Span(0, 0, n, past)], tiles)

    k, v = caches[0]
    got = run(k, v)
    for i in sorted({0, n // 2, n - 1}):
        seen = past + i + 1
        want = bf16_wanted(q[None, i, :, None], k[:, :, :seen], v[:, :, :seen])[0, :, 0]
        if not (error := worst(got[i], want)) < NEAR:
            return f"WRONG: error {error}"
    return round(microseconds([partial(run, k, v) for k, v in caches], 5), 1)


def bf16_times(rows: int, tokens: int) -> dict[str, object]:
    """Microseconds of SDPA and of the bf16 kernel."""
    caches = bf16_caches(rows, tokens)
    q = torch.randn(rows, HEADS, D, device=DEVICE).bfloat16()
    at, positions = torch.arange(rows, device=DEVICE), torch.full((rows,), tokens - 1, device=DEVICE)
    some = sorted({0, rows - 1})
    want = bf16_wanted(q[some, :, None], *(x[some] for x in caches[0]))[:, :, 0]
    found: dict[str, object] = {"bf16 floor": rows * tokens * KV_HEADS * D * 4 / BANDWIDTH * 1e6}

    def sdpa(k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]

    def own(k: Tensor, v: Tensor) -> Tensor:
        return decode.launch(q, Memory(k, v, at, positions))

    for name, run in (("cuDNN bf16", sdpa), ("bf16 kernel", own)):
        try:
            error = worst(run(*caches[0])[some], want)
            if error < NEAR:
                found[name] = round(microseconds([partial(run, k, v) for k, v in caches]), 2)
            else:
                found[name] = f"WRONG: error {error}"
        except RuntimeError as failure:
            found[name] = f"failed: {str(failure)[:200]}"
    return found


def main(
    rows: str = "1,8,32",
    tokens: str = "4096,32768,524288",
    plans: Annotated[str, typer.Option(help="Such as 4:4, warps:splits, beside the default plan.")] = "",
    queries: Annotated[str, typer.Option(help="Of a row, at most 8.")] = "1",
    prompts: Annotated[str, typer.Option(help="Tokens of a piece: time these instead.")] = "",
    bf16: Annotated[bool, typer.Option(help="Time bf16 attention too.")] = True,
    json_file: Json = None,
) -> None:
    """Measure, and write JSON; a line a case."""
    need_gpu()
    counted, lengths = (set(numbers(given)) for given in (rows, tokens))
    tried: list[bucketed.Plan | None] = [None]
    for given in filter(None, plans.split(",")):
        tried.append(bucketed.Plan(*map(int, given.split(":"))))
    results: list[dict[str, object]] = []
    torch.manual_seed(0)
    forms = (("3.0 bits, mixed", mixed), ("8 bits", lambda L: {8: L}), ("3 bits", lambda L: {3: L}))
    where = {"device": torch.cuda.get_device_name()}
    for n, L in ((int(n), L) for n in filter(None, prompts.split(",")) for L in sorted(lengths)):
        piece: dict[str, object] = {"piece": n, "past": L, **where}
        piece |= {name: prompt_times(n, counts(L)) for name, counts in forms}
        piece["bf16 kernel"] = bf16_prompt_times(n, L)
        print(json.dumps(piece), flush=True)
        results.append(piece)
    each = [] if prompts else [(B, L, int(n)) for B, L in CASES for n in queries.split(",")]
    for B, L, n in each:
        if B not in counted or L not in lengths:
            continue
        case: dict[str, object] = {"rows": B, "tokens": L, **where, **({"queries": n} if n > 1 else {})}
        for name, counts in forms:
            case[name] = bucketed_times(B, counts(L), tried, n)
            torch.cuda.empty_cache()
        if bf16 and n == 1:
            case |= bf16_times(B, L)
            torch.cuda.empty_cache()
        print(json.dumps(case), flush=True)
        results.append(case)
    if json_file is not None:
        write(json_file, results)


if __name__ == "__main__":
    run_script(main)
