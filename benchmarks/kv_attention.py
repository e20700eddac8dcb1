"""Decode attention to a bucketed KV cache beside bf16: torch's SDPA (cuDNN) and this package's bf16 kernel.

    python benchmarks/kv_attention.py --json FILE [--rows 1,8,32] [--tokens 4096,32768]
    python benchmarks/kv_attention.py --json FILE --prompts 128,2048 --tokens 4096,32768

With --prompts: a piece of a prompt of so many tokens after so many packed ones, by both ways, beside this package's
bf16 kernel.
--queries 1,4,8: so many queries a row, as speculative decoding asks.

32 query heads, 4 key/value heads, head_dim 128. Each time is the median of replays of a CUDA graph that goes through as
many caches as L2 does not hold. `mixed` has 3.0 bits on average: 64 tokens of 16 bits, 2% of 8, 20% of 4, the others of
2 and 3. Every result is compared with the definition in torch before it is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ttnn_moe.cuda.attention import bucketed, bucketed_prompt, bucketed_unpack, decode, prefill
from ttnn_moe.cuda.attention.memory import Memory
from ttnn_moe.cuda.attention.tiers import UNIT, Tier
from ttnn_moe.kv.attention import prefill_attention
from ttnn_moe.kv.bucketed.prompts import attend_piece, attend_unpacked
from ttnn_moe.kv.bucketed.quantise import rotate
from ttnn_moe.kv.bucketed.reference import quantized_attention_bucketed
from ttnn_moe.kv.bucketed.storage import PAGE, bytes_of_token
from ttnn_moe.kv.step import Span
from ttnn_moe.sizes import ceil_div

HEADS, KV_HEADS, D = 32, 4, 128
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
        table = torch.randperm(pages, device="cuda").view(rows, wide).int()
        payload = torch.empty(pages, KV_HEADS, 2, PAGE * D * bits // 8, dtype=torch.uint8, device="cuda")
        scales = torch.rand(pages, KV_HEADS, PAGE // UNIT, 8, 4, 2, device="cuda") * 2**-bits + 2**-bits
        if bits == 16:
            payload.view(torch.bfloat16).normal_()
            scales.fill_(1)
        else:
            payload.random_()
        ids = torch.empty(pages, PAGE, dtype=torch.int32, device="cuda")
        ids[table.long()] = (done + torch.arange(wide * PAGE, device="cuda").int()).view(wide, PAGE)
        done += n
        filled = torch.full((rows,), n, dtype=torch.int32, device="cuda")
        tiers.append(Tier(bits, payload, 4 * scales.half() if bits < 16 else scales.half(), ids, table, filled))
    return tiers


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


def sets_for(size: int) -> int:
    return max(4, min(100, ceil_div(int(L2_BYTES), size)))  # several: starting a graph takes microseconds


def bucketed_times(
    rows: int, counts: dict[int, int], plans: list[bucketed.Plan | None], queries: int
) -> dict[str, object]:
    """Microseconds and the error of each plan (None: the default one). All queries see all tokens."""
    size = rows * sum(n * bytes_of_token(bits, KV_HEADS, D) for bits, n in counts.items())
    sets = [tiers_of(rows, counts) for _ in range(sets_for(size))]
    q = torch.randn(rows, queries, HEADS, D, device="cuda").bfloat16()
    at, out = torch.arange(rows, device="cuda"), torch.empty_like(q)
    some = torch.tensor(sorted({0, rows - 1}), device="cuda")
    want = quantized_attention_bucketed(q[some].float(), sets[0], some)
    found: dict[str, object] = {"floor": size / BANDWIDTH * 1e6, "sets": len(sets)}
    for plan in plans:
        of = plan or bucketed.plan_of(q, sets[0])
        name = f"{of.warps}w {of.splits}s"
        if plan is None:
            found["plan"], name = name, "us"
        got = bucketed.launch(q, sets[0], at, of=of)[some].float()
        error = float((got - want).norm() / want.norm())
        if not error < 0.01:
            found[name] = f"WRONG: error {error}"
            continue
        calls = [lambda tiers=tiers, of=of: bucketed.launch(q, tiers, at, out=out, of=of) for tiers in sets]
        found[name] = round(microseconds(calls), 2)
    return found


def prompt_times(n: int, counts: dict[int, int]) -> dict[str, dict[str, float]]:
    """Microseconds of a piece of n tokens after those of the counts, packed and unpacked; and the errors."""
    tiers, at, past = tiers_of(1, counts), torch.arange(n, device="cuda"), sum(counts.values())
    k, v = torch.randn(2, n, KV_HEADS, D, device="cuda").bfloat16()
    q, scale = torch.randn(n, HEADS, D, device="cuda").bfloat16(), torch.ones(D, device="cuda")
    own = bucketed_prompt.Own.of([(0, n)], KV_HEADS, PAGE, k.device)
    memory = torch.empty(bucketed_unpack.numbers_of(KV_HEADS, past + n), dtype=torch.bfloat16, device="cuda")
    room = bucketed_unpack.Room.of(memory, KV_HEADS, past, n)

    def packed() -> Tensor:
        own.pack(k, v, scale)
        return bucketed_prompt.launch(q, at, own, 0, n, tiers, 0, scale)

    some = torch.tensor(sorted({0, n // 2, n - 1}), device="cuda")
    want = attend_piece(q[some], rotate(q[some].float()), some, k, v, tiers, at[:1]).float()
    found: dict[str, dict[str, float]] = {}
    for way, run in (("packed", packed), ("unpacked", lambda: attend_unpacked(q, k, v, tiers, 0, scale, room))):
        error = float((run()[some].float() - want).norm() / want.norm())
        found[way] = {"error": error, **({"us": round(microseconds([run] * 3, 5), 1)} if error < 0.01 else {})}
    return found


def bf16_prompt_times(n: int, past: int) -> float:
    """Microseconds of this package's bf16 kernel for the same piece."""
    k, v = torch.randn(2, 1, KV_HEADS, past + n, D, device="cuda").bfloat16()
    q = torch.randn(n, HEADS, D, device="cuda").bfloat16()
    memory = Memory(k, v, torch.zeros(n, dtype=torch.int64, device="cuda"), past + torch.arange(n, device="cuda"))
    tiles = torch.tensor(prefill.tiles_of([(0, n, past, 0)], prefill.queries_of(D, 2)), dtype=torch.int32).cuda()
    return round(microseconds([lambda: prefill_attention(q, memory, [Span(0, 0, n, past)], tiles)] * 3, 5), 1)


def bf16_times(rows: int, tokens: int) -> dict[str, object]:
    """Microseconds of SDPA and of the bf16 kernel."""
    size = rows * tokens * KV_HEADS * D * 4
    kv: list[tuple[Tensor, ...]] = [
        tuple(torch.empty(2, rows, KV_HEADS, tokens, D, dtype=torch.bfloat16, device="cuda").normal_())
        for _ in range(sets_for(size))
    ]
    q = torch.randn(rows, HEADS, D, device="cuda").bfloat16()
    at, positions = torch.arange(rows, device="cuda"), torch.full((rows,), tokens - 1, device="cuda")
    found: dict[str, object] = {"bf16 floor": size / BANDWIDTH * 1e6}

    def sdpa(k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)

    def own(k: Tensor, v: Tensor) -> Tensor:
        return decode.launch(q, Memory(k, v, at, positions))

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for name, run in (("cuDNN bf16", sdpa), ("bf16 kernel", own)):
            try:
                found[name] = round(microseconds([lambda k=k, v=v, run=run: run(k, v) for k, v in kv]), 2)
            except RuntimeError as error:
                found[name] = f"failed: {str(error)[:200]}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--tokens", default="4096,32768,524288")
    parser.add_argument("--plans", default="", help="such as 4:4, warps:splits, beside the default plan")
    parser.add_argument("--queries", default="1", help="of a row, at most 8")
    parser.add_argument("--prompts", default="", help="tokens of a piece: time these instead")
    parser.add_argument("--no-bf16", action="store_true")
    args = parser.parse_args()
    rows, tokens = (set(map(int, given.split(","))) for given in (args.rows, args.tokens))
    plans: list[bucketed.Plan | None] = [None]
    for given in filter(None, args.plans.split(",")):
        plans.append(bucketed.Plan(*map(int, given.split(":"))))
    results: list[dict[str, object]] = []
    torch.manual_seed(0)
    forms = (("3.0 bits, mixed", mixed), ("8 bits", lambda L: {8: L}), ("3 bits", lambda L: {3: L}))
    where = {"device": torch.cuda.get_device_name()}
    for n, L in ((int(n), L) for n in filter(None, args.prompts.split(",")) for L in sorted(tokens)):
        piece: dict[str, object] = {"piece": n, "past": L, **where}
        piece |= {name: prompt_times(n, counts(L)) for name, counts in forms}
        piece["bf16 kernel"] = bf16_prompt_times(n, L)
        print(json.dumps(piece), flush=True)
        results.append(piece)
    each = [] if args.prompts else [(B, L, int(n)) for B, L in CASES for n in args.queries.split(",")]
    for B, L, n in each:
        if B not in rows or L not in tokens:
            continue
        case: dict[str, object] = {"rows": B, "tokens": L, **where, **({"queries": n} if n > 1 else {})}
        for name, counts in forms:
            case[name] = bucketed_times(B, counts(L), plans, n)
            torch.cuda.empty_cache()
        if not args.no_bf16 and n == 1:
            case |= bf16_times(B, L)
            torch.cuda.empty_cache()
        print(json.dumps(case), flush=True)
        results.append(case)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
