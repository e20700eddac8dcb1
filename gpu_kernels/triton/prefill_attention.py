"""Causal attention of packed prompts, whole or in chunks, to their cached keys.

| argument | shape | dtype | |
|---|---|---|---|
| q | [T, KV * G, D] row-major | bf16, fp16, fp32 | packed: the queries of one sequence follow one another |
| keys, values | [rows, KV, capacity, D] row-major | as q | those of the queries are in them |
| | PAGE > 0: [pages, KV, PAGE, D] row-major | | key n of a row is key n % PAGE of its page n / PAGE |
| pages | [rows, capacity / PAGE] row-major | int32 | PAGE > 0: pages of each row, in order |
| tiles | [tiles, 4] row-major | int32 | per tile of BLOCK_M queries: first token, queries, position of the first, \
cache row |
| out | [T, KV * G, D] row-major | as q, out | |

Grid: (KV * G, tiles), tiles with the most keys first. scale: softmax scale times log2(e). A query at position p attends
to keys 0 .. p of its row. PAGE is a multiple of BLOCK_N. STRIDE: elements from a token of keys, and of values, to the
next; D, or more. Online softmax in fp32 (https://arxiv.org/abs/2205.14135).
"""

import triton
import triton.language as tl


@triton.jit
def _attend(
    queries,
    k_at,
    v_at,
    table,
    first,
    end,
    limit,
    position,
    highest,
    total,
    sums,
    scale,
    KV: tl.constexpr,
    STRIDE: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PAGE: tl.constexpr,
):
    j = tl.arange(0, BLOCK_N)
    for start in tl.range(first, end, BLOCK_N, num_stages=STAGES):
        n = start + j
        if PAGE == 0:
            at = start * STRIDE
        else:
            at = (tl.load(table + start // PAGE).to(tl.int64) * (KV * PAGE) + start % PAGE) * STRIDE
        if MASKED:
            k = tl.load(k_at + at, mask=(n < limit)[None, :], other=0.0)
            v = tl.load(v_at + at, mask=(n < limit)[:, None], other=0.0)
        else:
            k = tl.load(k_at + at)
            v = tl.load(v_at + at)
        scores = tl.dot(queries, k, input_precision=PRECISION) * scale
        if MASKED:
            scores = tl.where(n[None, :] <= position[:, None], scores, float("-inf"))
        new = tl.maximum(highest, tl.max(scores, 1))
        p = tl.exp2(scores - new[:, None])
        shrink = tl.exp2(highest - new)
        total = total * shrink + tl.sum(p, 1)
        sums = tl.dot(p.to(v.dtype), v, sums * shrink[:, None], input_precision=PRECISION)
        highest = new
    return highest, total, sums


@triton.jit
def prefill_attention(
    q,
    keys,
    values,
    pages,
    tiles,
    out,
    scale,
    capacity,
    KV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PAGE: tl.constexpr,
    STRIDE: tl.constexpr,
):
    head, tile = tl.program_id(0), tl.program_id(1)
    token = tl.load(tiles + tile * 4)
    queries_here = tl.load(tiles + tile * 4 + 1)
    past = tl.load(tiles + tile * 4 + 2)
    row = tl.load(tiles + tile * 4 + 3).to(tl.int64)
    m, d, j = tl.arange(0, BLOCK_M), tl.arange(0, D), tl.arange(0, BLOCK_N)
    position = past + m
    at = ((token + m)[:, None].to(tl.int64) * (KV * G) + head) * D + d[None, :]
    real = (m < queries_here)[:, None]
    queries = tl.load(q + at, mask=real, other=0.0)
    if PAGE == 0:
        base = (row * KV + head // G) * capacity * STRIDE
        table = pages
    else:
        base = head // G * PAGE * STRIDE
        table = pages + row * (capacity // PAGE)
    k_at = keys + base + j[None, :] * STRIDE + d[:, None]
    v_at = values + base + j[:, None] * STRIDE + d[None, :]
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, D], tl.float32)
    # first the keys that every query attends to, then those that need the causal mask
    whole = past // BLOCK_N * BLOCK_N
    limit = past + queries_here
    highest, total, sums = _attend(
        queries,
        k_at,
        v_at,
        table,
        0,
        whole,
        limit,
        position,
        highest,
        total,
        sums,
        scale,
        KV,
        STRIDE,
        False,
        PRECISION,
        BLOCK_N,
        STAGES,
        PAGE,
    )
    highest, total, sums = _attend(
        queries,
        k_at,
        v_at,
        table,
        whole,
        limit,
        limit,
        position,
        highest,
        total,
        sums,
        scale,
        KV,
        STRIDE,
        True,
        PRECISION,
        BLOCK_N,
        STAGES,
        PAGE,
    )
    tl.store(out + at, (sums / total[:, None]).to(out.dtype.element_ty), mask=real)
