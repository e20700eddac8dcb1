"""Decode attention: one query token per sequence over its cached keys, split into SPLITS parts (split KV).

| argument | shape | dtype | |
|---|---|---|---|
| q | [T, KV * G, D] row-major | bf16, fp16, fp32 | G query heads share a key/value head |
| keys, values | [rows, KV, capacity, D] row-major | as q | only keys 0 .. position are read |
| | PAGE > 0: [pages, KV, PAGE, D] row-major | | key n of a row is key n % PAGE of its page n / PAGE |
| pages | [rows, capacity / PAGE] row-major | int32 | PAGE > 0: pages of each row, in order |
| rows, positions | [T] | int64 | cache row and position of each token, whose own key is in the cache |
| num_tokens | [] | int32 | BOUND: tokens past it read nothing; their result is zero |
| out | [T, KV * G, D] row-major | as q, out | SPLITS == 1 |
| partial | [T, KV * G, SPLITS, D] | fp32, out | else: each part's result |
| lse | [T, KV * G, SPLITS] | fp32, out | else: log2 of each part's sum of exponentials; -inf: no key |

Grid: (T, KV, SPLITS). The G query heads of a key/value head are the rows of one tensor-core product, padded to
G_PAD >= 16. Lengths are read on the device. scale: softmax scale times log2(e). Parts differ by at most BLOCK_N keys;
PAGE is a multiple of BLOCK_N. STRIDE: elements from a token of keys, and of values, to the next; D, or more. Consumer:
merge_attention where SPLITS > 1.
PDL (sm_90 and newer): programmatic dependent launch. The kernel reads rows, positions and num_tokens before it waits
for its predecessor; head_norm_rope.py says what that demands.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize_on_alignment=["rows", "positions"])
def decode_attention(
    q,
    keys,
    values,
    pages,
    rows,
    positions,
    num_tokens,
    out,
    partial,
    lse,
    scale,
    capacity,
    KV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    BOUND: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
    G_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PAGE: tl.constexpr,
    STRIDE: tl.constexpr,
):
    t, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    g, d, j = tl.arange(0, G_PAD), tl.arange(0, D), tl.arange(0, BLOCK_N)
    length = tl.load(positions + t).to(tl.int32) + 1
    if BOUND:
        length = tl.where(t < tl.load(num_tokens), length, 0)
    length = tl.minimum(length, capacity)
    share = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N
    first = part * share
    end = tl.minimum(first + share, length)
    row = tl.load(rows + t).to(tl.int64)
    if PAGE == 0:
        base = (row * KV + head) * capacity * STRIDE
    q_head = t * (KV * G) + head * G + g
    if PDL:
        gdc_wait()
    queries = tl.load(q + q_head[:, None].to(tl.int64) * D + d[None, :], mask=(g < G)[:, None], other=0.0)

    highest = tl.full([G_PAD], float("-inf"), tl.float32)
    total = tl.zeros([G_PAD], tl.float32)
    sums = tl.zeros([G_PAD, D], tl.float32)
    for start in tl.range(first, end, BLOCK_N, num_stages=STAGES):
        n = start + j
        if PAGE == 0:
            k_at = keys + base + n[None, :].to(tl.int64) * STRIDE + d[:, None]
            v_at = values + base + n[:, None].to(tl.int64) * STRIDE + d[None, :]
        else:
            page = tl.load(pages + row * (capacity // PAGE) + start // PAGE).to(tl.int64)
            at = ((page * KV + head) * PAGE + start % PAGE) * STRIDE
            k_at = keys + at + j[None, :] * STRIDE + d[:, None]
            v_at = values + at + j[:, None] * STRIDE + d[None, :]
        k = tl.load(k_at, mask=(n < end)[None, :], other=0.0)
        scores = tl.dot(queries, k, input_precision=PRECISION) * scale
        scores = tl.where((n < end)[None, :], scores, float("-inf"))
        new = tl.maximum(highest, tl.max(scores, 1))
        p = tl.exp2(scores - new[:, None])
        shrink = tl.exp2(highest - new)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(v_at, mask=(n < end)[:, None], other=0.0)
        sums = tl.dot(p.to(v.dtype), v, sums * shrink[:, None], input_precision=PRECISION)
        highest = new
    sums = sums / tl.where(total == 0, 1.0, total)[:, None]
    if SPLITS == 1:
        at = out + q_head[:, None].to(tl.int64) * D + d[None, :]
        tl.store(at, sums.to(out.dtype.element_ty), mask=(g < G)[:, None])
    else:
        at = q_head.to(tl.int64) * SPLITS + part
        tl.store(partial + at[:, None] * D + d[None, :], sums, mask=(g < G)[:, None])
        tl.store(lse + at, tl.where(total == 0, float("-inf"), highest + tl.log2(total)), mask=g < G)
