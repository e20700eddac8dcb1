"""A linear layer of very few rows, fused with the RMSNorm before it and the residual sum after it. Bandwidth-bound.

    out = (NORM ? x / sqrt(mean(x^2) + eps) * norm : x) weight^T (+ bias) (+ residual)

| argument | shape | dtype | |
|---|---|---|---|
| x | [T, K] row-major | bf16, fp16, fp32 | |
| norm | [K] | as x | NORM: of RMSNorm; not rounded before the product |
| weight | [N, K] row-major | as x | |
| bias | [N] | as x | BIAS |
| residual | [T, N] row-major | as x | ADD; may be out |
| out | [T, N] row-major | as x, out | |
| normed | [T, K] row-major | as x, out | KEEP: the normalised x, written by program 0 |

Grid: ceil(N / BLOCK_N). T_PAD: T rounded up to a power of two. fp32 products and sums on the CUDA cores, in a fixed
order. PDL (sm_90 and newer): programmatic dependent launch; it prefetches the weight before it waits.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def few_linear(
    x,
    norm,
    weight,
    bias,
    residual,
    out,
    normed,
    eps,
    N,
    T: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    PDL: tl.constexpr,
    T_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # every tile is [T, N, K], with size 1 where it does not vary: all tiles share one layout
    t = tl.arange(0, T_PAD)[:, None, None]
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :, None]
    lane = tl.arange(0, BLOCK_K)[None, None, :]
    w_at = weight + tl.minimum(n, N - 1).to(tl.int64) * K
    total = tl.zeros([T_PAD, BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([T_PAD, 1, BLOCK_K], tl.float32)
    if PDL:
        gdc_launch_dependents()
        first = tl.load(w_at + lane, mask=lane < K, other=0.0)
        gdc_wait()
    else:
        first = tl.load(w_at + lane, mask=lane < K, other=0.0)
    for k0 in tl.static_range(0, K, BLOCK_K):
        k = k0 + lane
        if k0 == 0:
            w = first
        else:
            w = tl.load(w_at + k, mask=k < K, other=0.0)
        v = tl.load(x + t * K + k, mask=(t < T) & (k < K), other=0.0).to(tl.float32)
        if NORM:
            squares += v * v
            v *= tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
        total += w.to(tl.float32) * v
    y = tl.sum(total, 2)
    t2 = tl.arange(0, T_PAD)[:, None]
    n2 = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    inside = (t2 < T) & (n2 < N)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 2) / K + eps)
        y *= scale
        if KEEP:
            if tl.program_id(0) == 0:
                for k0 in tl.static_range(0, K, BLOCK_K):
                    k = k0 + lane
                    here = (t < T) & (k < K)
                    v = tl.load(x + t * K + k, mask=here, other=0.0).to(tl.float32)
                    v *= tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32) * scale[:, :, None]
                    tl.store(normed + t * K + k, v.to(normed.dtype.element_ty), mask=here)
    if BIAS:
        y += tl.load(bias + n2, mask=n2 < N, other=0.0).to(tl.float32)
    if ADD:
        y += tl.load(residual + t2.to(tl.int64) * N + n2, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + t2.to(tl.int64) * N + n2, y.to(out.dtype.element_ty), mask=inside)
