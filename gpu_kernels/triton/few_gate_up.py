"""Activations of few token-expert pairs, without a sort: each pair reads its own expert's weights.

| argument | shape | dtype | |
|---|---|---|---|
| hidden | [T, H] row-major | bf16, fp16, fp32 | |
| gate, up | expert e's row n at (e * rows_of_expert + n) * row_stride elements, H contiguous | as hidden | |
| ids | [T, K] | int32 or int64 | any value; outside 0 .. E_ids-1 names no expert |
| expert_map | [E_ids] | int32 | HAS_MAP: local index of each global expert, -1 = not here |
| num_tokens | [] | int32 | HAS_BOUND: rows past it route nowhere |
| act | [T*K, I] row-major | as hidden, out | rows of pairs without an expert are not written |

Grid: (ceil(I / BLOCK_N), T*K). fp32 products and sums on the CUDA cores: bandwidth-bound on the weights.
"""

import triton
import triton.language as tl


@triton.jit
def few_gate_up(
    hidden,
    gate,
    up,
    ids,
    expert_map,
    num_tokens,
    act,
    E_ids,
    K,
    H,
    I,
    rows_of_expert,
    row_stride,
    HAS_MAP: tl.constexpr,
    HAS_BOUND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pair = tl.program_id(1)
    t = pair // K
    if HAS_BOUND:
        if t >= tl.load(num_tokens):
            return
    e = tl.load(ids + pair)
    if (e < 0) | (e >= E_ids):
        return
    e = e.to(tl.int32)
    if HAS_MAP:
        e = tl.load(expert_map + e)
        if e < 0:
            return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    base = e.to(tl.int64) * rows_of_expert
    w_at = (base + tl.minimum(n, I - 1)[:, None]) * row_stride + k[None, :]
    g_sum = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    u_sum = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for k0 in range(0, H, BLOCK_K):
        inside = k0 + k < H
        x = tl.load(hidden + t.to(tl.int64) * H + k0 + k, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gate + w_at + k0, mask=inside[None, :], other=0.0)
        u = tl.load(up + w_at + k0, mask=inside[None, :], other=0.0)
        g_sum += g.to(tl.float32) * x[None, :]
        u_sum += u.to(tl.float32) * x[None, :]
    g_all = tl.sum(g_sum, 1)
    out = g_all * tl.sigmoid(g_all) * tl.sum(u_sum, 1)
    tl.store(act + pair * I + n, out.to(act.dtype.element_ty), mask=n < I)
