"""Attention of a few queries a row to keys and values in tiers of 2, 3, 4, 8 and 16 bits, in one launch.

| argument | shape | dtype | |
|---|---|---|---|
| q | [T, N, KV * G, D] row-major | bf16, fp16, fp32 | D: a multiple of 32 |
| rows, positions | [T] | int64 | row of the tables of each entry; CAUSAL: position of its first query |
| num_tokens | [] | int32 | BOUND: entries past it read nothing; their result is zero |
| partial | [T, N, KV * G, SPLITS, D_PAD] | fp32, out | each part's result |
| lse | [T, N, KV * G, SPLITS] | fp32, out | log2 of each part's sum of exponentials; -inf: no key |
| then, for each tier of TIERS (a bit 1 << bits), else None: | | | |
| payload | [pages, KV, 2, PAGE * D * bits / 32] | int32 | words of keys, then of values: kv/bucketed/packing.py |
| scales | [pages, KV, PAGE / 32, 8, 4, 2] | fp16 | (key, value) of token 8 i + j of a unit at j, i; key < 0: no token |
| ids | [pages, PAGE] | int32 | CAUSAL: position of each token; a query sees no later one |
| table | [rows, wide] | int32 | pages of each row |
| counts | [rows] | int32 | slots in use |

Grid: (T, KV, SPLITS). The N * G queries of a key/value head are the rows of one tensor-core product, padded to Q_PAD,
at least 16. D_PAD: D, padded to a power of two. Counts are read on the device. scale: softmax scale times log2(e). A
program takes its share of each tier's units of 32 tokens. Consumer: merge_attention.
"""

import triton
import triton.language as tl


@triton.jit
def _levels(words, x, lane, half, mask, BITS: tl.constexpr, V: tl.constexpr):
    """Level `half` of pair x of a lane of a unit; words: the unit's."""
    at = lane * V
    if BITS == 3:
        group, field = x // 16, x % 16
        word = 3 * group + tl.minimum(field, 14) // 5
        found = tl.load(words + word // V * (32 * V) + at + word % V, mask=mask, other=0)
        level = (found >> (field % 5 * 3 + 16 * half)) & 7
        last = tl.zeros_like(level)
        for i in tl.static_range(3):
            word = 3 * group + i
            found = tl.load(words + word // V * (32 * V) + at + word % V, mask=mask & (field == 15), other=0)
            last += ((found >> (15 + 16 * half)) & 1) << i
        return tl.where(field == 15, last, level)
    else:
        FIELDS: tl.constexpr = 16 // BITS
        word = x // FIELDS
        found = tl.load(words + word // V * (32 * V) + at + word % V, mask=mask, other=0)
        return (found >> (x % FIELDS * BITS + 16 * half)) & ((1 << BITS) - 1)


@triton.jit
def _numbers(levels, scale, BITS: tl.constexpr):
    """What levels stand for, in fp32."""
    if BITS == 16:
        return (levels << 16).to(tl.float32, bitcast=True) * scale[:, None]
    else:
        HALF: tl.constexpr = ((1 << BITS) - 1) * 0.5
        return (levels.to(tl.float32) - HALF) * scale[:, None]


@triton.jit
def _attend(
    queries,
    highest,
    total,
    sums,
    payload,
    scales,
    ids,
    table,
    counts,
    wide,
    row,
    last,
    head,
    part,
    valid,
    scale,
    KV: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    V: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BITS: tl.constexpr,
):
    UNITS: tl.constexpr = PAGE // 32
    WORDS: tl.constexpr = D * BITS
    s, d = tl.arange(0, 32), tl.arange(0, D_PAD)
    x = (s // 8)[:, None] * (D // 8) + (d // 8)[None, :]
    k_lane, k_half = (s % 8)[:, None] * 4 + (d % 8 // 2)[None, :], (d % 2)[None, :] + (s * 0)[:, None]
    v_lane, v_half = (s % 8 // 2)[:, None] + (d % 8)[None, :] * 4, (s % 2)[:, None] + (d * 0)[None, :]
    real = (d < D)[None, :] & (s >= 0)[:, None]
    count = tl.where(valid, tl.minimum(tl.load(counts + row), wide * PAGE), 0)
    units = tl.cdiv(count, 32)
    for unit in tl.range(units * part // SPLITS, units * (part + 1) // SPLITS):
        page = tl.load(table + row * wide + unit // UNITS).to(tl.int64)
        place = page * KV + head
        words = payload + place * (2 * UNITS * WORDS) + unit % UNITS * WORDS
        at = scales + (place * UNITS + unit % UNITS) * 64 + (s % 8 * 4 + s // 8) * 2
        k_scale, v_scale = tl.load(at).to(tl.float32), tl.load(at + 1).to(tl.float32)
        # a NaN is no negative number
        held = (unit * 32 + s < count) & ((k_scale >= 0) | (k_scale != k_scale))
        seen = held[None, :] & (last[:, None] == last[:, None])
        if CAUSAL:
            seen = seen & (tl.load(ids + page * PAGE + unit % UNITS * 32 + s)[None, :] <= last[:, None])
        k = _numbers(_levels(words, x, k_lane, k_half, real, BITS, V), k_scale, BITS)
        k = tl.where(held[:, None] & real, k, 0.0).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(p, 1)
        v = _numbers(_levels(words + UNITS * WORDS, x, v_lane, v_half, real, BITS, V), v_scale, BITS)
        v = tl.where(held[:, None] & real, v, 0.0).to(queries.dtype)
        sums = tl.dot(p.to(v.dtype), v, sums * shrink[:, None], input_precision=PRECISION)
        highest = new
    return highest, total, sums


@triton.jit
def bucketed_attention(
    q,
    rows,
    positions,
    num_tokens,
    partial,
    lse,
    payload_2,
    scales_2,
    ids_2,
    table_2,
    counts_2,
    payload_3,
    scales_3,
    ids_3,
    table_3,
    counts_3,
    payload_4,
    scales_4,
    ids_4,
    table_4,
    counts_4,
    payload_8,
    scales_8,
    ids_8,
    table_8,
    counts_8,
    payload_16,
    scales_16,
    ids_16,
    table_16,
    counts_16,
    wide_2,
    wide_3,
    wide_4,
    wide_8,
    wide_16,
    scale,
    TIERS: tl.constexpr,
    N: tl.constexpr,
    KV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    Q_PAD: tl.constexpr,
    V: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    BOUND: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    t, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    r, d = tl.arange(0, Q_PAD), tl.arange(0, D_PAD)
    valid = True
    if BOUND:
        valid = t < tl.load(num_tokens)
    row = tl.load(rows + t)
    last = r // G
    if CAUSAL:
        last = last + tl.load(positions + t).to(tl.int32)
    q_head = (t * N + r // G) * (KV * G) + head * G + r % G
    real = (r < N * G)[:, None] & (d < D)[None, :]
    queries = tl.load(q + q_head[:, None].to(tl.int64) * D + d[None, :], mask=real, other=0.0)
    highest = tl.full([Q_PAD], float("-inf"), tl.float32)
    total = tl.zeros([Q_PAD], tl.float32)
    sums = tl.zeros([Q_PAD, D_PAD], tl.float32)
    if TIERS & 4:
        highest, total, sums = _attend(
            *(queries, highest, total, sums, payload_2, scales_2, ids_2, table_2, counts_2, wide_2),
            *(row, last, head, part, valid, scale, KV, D, D_PAD, V, PAGE, SPLITS, CAUSAL, PRECISION, 2),
        )
    if TIERS & 8:
        highest, total, sums = _attend(
            *(queries, highest, total, sums, payload_3, scales_3, ids_3, table_3, counts_3, wide_3),
            *(row, last, head, part, valid, scale, KV, D, D_PAD, V, PAGE, SPLITS, CAUSAL, PRECISION, 3),
        )
    if TIERS & 16:
        highest, total, sums = _attend(
            *(queries, highest, total, sums, payload_4, scales_4, ids_4, table_4, counts_4, wide_4),
            *(row, last, head, part, valid, scale, KV, D, D_PAD, V, PAGE, SPLITS, CAUSAL, PRECISION, 4),
        )
    if TIERS & 256:
        highest, total, sums = _attend(
            *(queries, highest, total, sums, payload_8, scales_8, ids_8, table_8, counts_8, wide_8),
            *(row, last, head, part, valid, scale, KV, D, D_PAD, V, PAGE, SPLITS, CAUSAL, PRECISION, 8),
        )
    if TIERS & 65536:
        highest, total, sums = _attend(
            *(queries, highest, total, sums, payload_16, scales_16, ids_16, table_16, counts_16, wide_16),
            *(row, last, head, part, valid, scale, KV, D, D_PAD, V, PAGE, SPLITS, CAUSAL, PRECISION, 16),
        )
    sums = sums / tl.where(total == 0, 1.0, total)[:, None]
    at = q_head.to(tl.int64) * SPLITS + part
    mask = r < N * G
    tl.store(partial + at[:, None] * D_PAD + d[None, :], sums, mask=mask[:, None])
    tl.store(lse + at, tl.where(total == 0, float("-inf"), highest + tl.log2(total)), mask=mask)
