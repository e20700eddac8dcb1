"""Sum each token's expert outputs: out[t] (+)= sum over ascending k of weights[t, k] * rows[inverse[t, k]], in fp32.

| argument | shape | dtype | |
|---|---|---|---|
| rows | [rows, H] row-major | bf16, fp16, fp32 | what grouped_matmul wrote |
| inverse | [T, K] | int32 | row of each pair; -1: adds nothing, its weight is not used |
| weights | [T, K] | fp32 | |
| num_tokens | [] | int32 | HAS_BOUND: tokens past it are not written |
| out | [T, H] row-major | as rows or fp32, out | ADD: added to |

Grid: (T, ceil(H / BLOCK_H)). The sum has a fixed order and no atomics.
"""

import triton
import triton.language as tl


@triton.jit
def combine(
    rows,
    inverse,
    weights,
    num_tokens,
    out,
    H,
    K: tl.constexpr,
    HAS_BOUND: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    t = tl.program_id(0)
    if HAS_BOUND:
        if t >= tl.load(num_tokens):
            return
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = h < H
    out_at = out + t.to(tl.int64) * H + h
    total = tl.zeros([BLOCK_H], tl.float32)
    if ADD:
        total += tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        row = tl.load(inverse + t * K + k)
        weight = tl.where(row >= 0, tl.load(weights + t * K + k), 0.0)
        y = tl.load(rows + tl.maximum(row, 0).to(tl.int64) * H + h, mask=inside & (row >= 0), other=0.0)
        total += weight * y.to(tl.float32)
    tl.store(out_at, total.to(out.dtype.element_ty), mask=inside)
