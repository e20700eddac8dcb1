"""Merge the parts of decode_attention by their log-sum-exp, in the order of the parts.

| argument | shape | dtype | |
|---|---|---|---|
| partial | [T * heads, SPLITS, D] row-major | fp32 | as decode_attention writes it |
| lse | [T * heads, SPLITS] | fp32 | -inf: the part had no key |
| out | [T * heads, D] row-major | bf16, fp16, fp32, out | zero where no part had a key |

Grid: T * heads.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def merge_attention(partial, lse, out, D: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    part, d = tl.arange(0, SPLITS), tl.arange(0, D)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    share = tl.load(lse + r * SPLITS + part)
    here = share > float("-inf")
    highest = tl.max(share, 0)
    weight = tl.where(here | (share != share), tl.exp2(share - highest), 0.0)
    values = tl.load(partial + (r * SPLITS + part)[:, None] * D + d[None, :], mask=here[:, None], other=0.0)
    total = tl.sum(weight, 0)
    merged = tl.sum(values * weight[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + r * D + d, merged.to(out.dtype.element_ty))
