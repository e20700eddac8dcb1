"""Sorted rows through their experts' weights: out[row] = x[row] W_e^T. The down projection, and single projections.

| argument | shape | dtype | |
|---|---|---|---|
| x | [rows, M] row-major; GATHER: [T, M], row r is x[row_tokens[r]] | bf16, fp16, fp32 | |
| weights | expert e's row n at (e * rows_of_expert + n) * row_stride elements, M contiguous | as x | |
| offsets, row_tokens, tiles, num_tiles | as routing_sort writes them | int32 | |
| out | [rows, N] row-major | as x, out | rows outside every tile are not written |

Grid: (tiles bound) * ceil(N / BLOCK_N) programs. fp32 accumulators; one rounding, to out.
"""

import triton
import triton.language as tl


@triton.jit
def grouped_matmul(
    x,
    weights,
    offsets,
    row_tokens,
    tiles,
    num_tiles,
    out,
    M,
    N,
    rows_of_expert,
    row_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATHER: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    columns = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) // columns
    if tile >= tl.load(num_tiles):
        return
    e = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1)
    end = tl.load(offsets + e + 1)
    rows = first + tl.arange(0, BLOCK_M)
    real = rows < end
    source = rows
    if GATHER:
        source = tl.load(row_tokens + rows, mask=real, other=-1)
        real = source >= 0
    k = tl.arange(0, BLOCK_K)
    x_at = x + tl.maximum(source, 0)[:, None].to(tl.int64) * M + k[None, :]

    n = (tl.program_id(0) % columns) * BLOCK_N + tl.arange(0, BLOCK_N)
    base = e.to(tl.int64) * rows_of_expert
    w_at = (base + tl.minimum(n, N - 1)[None, :]) * row_stride + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in range(0, M, BLOCK_K):
        if EVEN_K:
            a = tl.load(x_at + k0, mask=real[:, None], other=0.0)
        else:
            a = tl.load(x_at + k0, mask=real[:, None] & (k0 + k < M)[None, :], other=0.0)
        if EVEN_K:
            w = tl.load(weights + w_at + k0)
        else:
            w = tl.load(weights + w_at + k0, mask=(k0 + k < M)[:, None], other=0.0)
        total = tl.dot(a, w, total, input_precision=PRECISION)
    out_at = out + rows[:, None].to(tl.int64) * N + n[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=(rows < end)[:, None] & (n < N)[None, :])
