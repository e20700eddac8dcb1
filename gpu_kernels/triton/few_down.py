"""Down projection and weighted sum of few tokens, without a sort. Producer: few_gate_up.

| argument | shape | dtype | |
|---|---|---|---|
| act | [T*K, I] row-major | bf16, fp16, fp32 | |
| down | expert e's row n at (e * H + n) * I elements | as act | |
| ids, expert_map, num_tokens | as few_gate_up | | |
| weights | [T, K] | fp32 | of a pair without an expert: not used |
| out | [T, H] row-major | as act or fp32, out | ADD: added to |

Grid: (ceil(H / BLOCK_N), T). Sums in fp32, over ascending k; one rounding, to out.
"""

import triton
import triton.language as tl


@triton.jit
def few_down(
    act,
    down,
    ids,
    expert_map,
    num_tokens,
    weights,
    out,
    E_ids,
    H,
    I,
    K: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_BOUND: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    t = tl.program_id(1)
    if HAS_BOUND:
        if t >= tl.load(num_tokens):
            return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    i = tl.arange(0, BLOCK_K)
    out_at = out + t.to(tl.int64) * H + n
    total = tl.zeros([BLOCK_N], tl.float32)
    if ADD:
        total += tl.load(out_at, mask=n < H, other=0.0).to(tl.float32)
    for k in tl.range(0, K, num_stages=STAGES):
        e = tl.load(ids + t * K + k)
        here = (e >= 0) & (e < E_ids)
        e = tl.where(here, e, 0).to(tl.int32)
        if HAS_MAP:
            e = tl.load(expert_map + e)
            here = here & (e >= 0)
            e = tl.maximum(e, 0)
        weight = tl.where(here, tl.load(weights + t * K + k), 0.0)
        w_at = (e.to(tl.int64) * H + tl.minimum(n, H - 1)[:, None]) * I + i[None, :]
        y = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for i0 in range(0, I, BLOCK_K):
            inside = here & (i0 + i < I)
            a = tl.load(act + (t * K + k) * I + i0 + i, mask=inside, other=0.0).to(tl.float32)
            w = tl.load(down + w_at + i0, mask=inside[None, :], other=0.0)
            y += w.to(tl.float32) * a[None, :]
        total += weight * tl.sum(y, 1)
    tl.store(out_at, total.to(out.dtype.element_ty), mask=n < H)
