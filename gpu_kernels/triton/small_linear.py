"""A linear layer of few rows on the tensor cores, with the residual sum after it: bound by reading the weight.

    out = x weight^T (+ bias) (+ residual)

| argument | shape | dtype | |
|---|---|---|---|
| x | [T, K] row-major | bf16, fp16, fp32 | |
| weight | [N, K] row-major | as x | |
| bias | [N] | as x | BIAS |
| residual | [T, N] row-major | as x | ADD; may be out |
| out | [T, N] row-major | as x, out | |

Grid: ceil(N / BLOCK_N). T_PAD: T rounded up to a power of two, 16 or more: every program holds all rows, and BLOCK_N is
so small that there are programs for every multiprocessor. fp32 sums in a fixed order. PDL (sm_90 and newer):
launched while its predecessor ends; the first of the weight is fetched before waiting for it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def small_linear(
    x, weight, bias, residual, out, T, N, K,
    BIAS: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, EVEN_K: tl.constexpr,
    T_PAD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t, lane = tl.arange(0, T_PAD), tl.arange(0, BLOCK_K)
    x_at = x + t[:, None] * K + lane[None, :]
    w_at = weight + tl.minimum(n, N - 1)[:, None].to(tl.int64) * K + lane[None, :]
    real = (t < T)[:, None]
    w = tl.load(w_at, mask=(lane < K)[None, :], other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    v = tl.load(x_at, mask=real & (lane < K)[None, :], other=0.0)
    total = tl.dot(v, w.T, input_precision=PRECISION)
    for k in range(BLOCK_K, K, BLOCK_K):
        if EVEN_K:
            v = tl.load(x_at + k, mask=real, other=0.0)
            w = tl.load(w_at + k)
        else:
            v = tl.load(x_at + k, mask=real & (k + lane < K)[None, :], other=0.0)
            w = tl.load(w_at + k, mask=(k + lane < K)[None, :], other=0.0)
        total = tl.dot(v, w.T, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    inside = real & (n < N)[None, :]
    at = t[:, None].to(tl.int64) * N + n[None, :]
    if ADD:
        total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
