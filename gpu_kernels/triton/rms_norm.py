"""RMSNorm of rows: out = x / sqrt(mean(x^2) + eps) * weight, in fp32 and rounded once.

| argument | shape | dtype | |
|---|---|---|---|
| x | [T, H] row-major | bf16, fp16, fp32 | |
| weight | [H] | as x | |
| out | [T, H] row-major | as x, out | may not be x |

Grid: T. BLOCK: H rounded up to a power of two. PDL: programmatic dependent launch (sm_90 and newer).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def rms_norm(x, weight, out, eps, H, BLOCK: tl.constexpr, PDL: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    inside = h < H
    w = tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    v = tl.load(x + t * H + h, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 0) / H + eps)
    tl.store(out + t * H + h, (v * scale * w).to(out.dtype.element_ty), mask=inside)
