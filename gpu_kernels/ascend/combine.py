"""Sum each token's expert outputs on Ascend: out[t] = sum over ascending k of weights[t, k] * rows[inverse[t, k]].

For triton-ascend 3.2. Never run on an NPU.

| argument | shape | dtype | |
|---|---|---|---|
| rows | [rows, H] row-major | bf16, fp16, fp32 | expert outputs, sorted by expert |
| inverse | [T, K] | int32 | row of each pair; -1: adds nothing, its weight is not used |
| weights | [T, K] | fp32 | |
| out | [T, H] row-major | as rows or fp32, out | |

Grid: one program per vector core; each loops over tokens and blocks of H. Sums are fp32, in a fixed order. A block
takes 14 bytes an element of the unified buffer (192 KiB on a 910B): BLOCK_H = 8192 fits, and 16384 does not
(bishengir-compile of ascendnpu-ir 1.2.0 for Ascend910B3). ttnn_moe/ascend/tiles.py chooses it.
"""

import triton
import triton.language as tl


@triton.jit
def combine(rows, inverse, weights, out, T, H, K: tl.constexpr, BLOCK_H: tl.constexpr):
    blocks = tl.cdiv(H, BLOCK_H)
    for task in range(tl.program_id(0), T * blocks, tl.num_programs(0)):
        t = task // blocks
        h = (task % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        total = tl.zeros([BLOCK_H], tl.float32)
        for k in range(K):
            row = tl.load(inverse + t * K + k)
            weight = tl.where(row >= 0, tl.load(weights + t * K + k), 0.0)
            y = tl.load(rows + tl.maximum(row, 0).to(tl.int64) * H + h, mask=(h < H) & (row >= 0), other=0.0)
            total += weight * y.to(tl.float32)
        tl.store(out + t.to(tl.int64) * H + h, total.to(out.dtype.element_ty), mask=h < H)
