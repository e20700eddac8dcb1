"""silu(gate) * up, element by element, in fp32 and rounded once.

gate, up, out: [n] contiguous, bf16, fp16 or fp32. Grid: ceil(n / BLOCK).
"""

import triton
import triton.language as tl


@triton.jit
def silu_mul(gate, up, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < n, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=at < n)
