"""Partial router logits of a few tokens, split over H, fused with the RMSNorm before the router. router_topk sums them.

    partial[s, t, e] = sum over h in slice s of x[t, h] * norm[h] * weight[e, h],   squares[s, t] = sum of x[t, h]^2

| argument | shape | dtype | |
|---|---|---|---|
| x | [T, H] row-major | bf16, fp16, fp32 | not normalised; its product with norm is rounded to its dtype |
| norm | [H] | as x | |
| weight | [E, H] row-major | as x | |
| partial | [SLICES, T, E] | fp32, out | SLICES: ceil(H / BLOCK_H) |
| squares | [SLICES, T] | fp32, out | |

Grid: (ceil(E / BLOCK_E), SLICES, ceil(T / BLOCK_T)), one tensor-core product each: the split over H spreads the small
router matrix over the whole GPU. PDL (sm_90 and newer): it prefetches the weight before it waits for its predecessor.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["T"])
def router_logits(
    x,
    norm,
    weight,
    partial,
    squares,
    T,
    E,
    H,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    s = tl.program_id(1)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = s * BLOCK_H + tl.arange(0, BLOCK_H)
    w_at = weight + e[:, None].to(tl.int64) * H + h[None, :]
    w = tl.load(w_at, mask=(e < E)[:, None] & (h < H)[None, :], other=0.0)
    gain = tl.load(norm + h, mask=h < H, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    here = (t < T)[:, None] & (h < H)[None, :]
    v = tl.load(x + t[:, None].to(tl.int64) * H + h[None, :], mask=here, other=0.0).to(tl.float32)
    if tl.program_id(0) == 0:
        tl.store(squares + s * T + t, tl.sum(v * v, 1), mask=t < T)
    scaled = (v * gain[None, :]).to(w.dtype)
    product = tl.dot(scaled, w.T, input_precision=PRECISION)
    at = partial + (s * T + t)[:, None].to(tl.int64) * E + e[None, :]
    tl.store(at, product, mask=(t < T)[:, None] & (e < E)[None, :])
