"""Activations of sorted rows: silu(x Wg) * (x Wu). It gathers x by token and makes both products in one pass.

| argument | shape | dtype | |
|---|---|---|---|
| hidden | [T, H] row-major | bf16, fp16, fp32 | |
| gate, up | expert e's row n at (e * rows_of_expert + n) * row_stride elements, H contiguous | as hidden | |
| offsets, row_tokens, tiles, num_tiles | as routing_sort writes them | int32 | row_tokens may hold -1: such a row \
is zero |
| act | [rows, I] row-major | as hidden, out | rows outside every tile are not written |

Grid: (tiles bound) * ceil(I / BLOCK_N) programs. Column blocks of one tile are neighbours, so that L2 serves the rows,
and the tiles of one expert read its weights at the same time. fp32 accumulators; one rounding, to act.
"""

import triton
import triton.language as tl


@triton.jit
def gate_up(
    hidden,
    gate,
    up,
    offsets,
    row_tokens,
    tiles,
    num_tiles,
    act,
    H,
    I,
    rows_of_expert,
    row_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    columns = tl.cdiv(I, BLOCK_N)
    tile = tl.program_id(0) // columns
    if tile >= tl.load(num_tiles):
        return
    e = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1)
    end = tl.load(offsets + e + 1)
    rows = first + tl.arange(0, BLOCK_M)
    tokens = tl.load(row_tokens + rows, mask=rows < end, other=-1)
    real = tokens >= 0
    k = tl.arange(0, BLOCK_K)
    x_at = hidden + tl.maximum(tokens, 0)[:, None].to(tl.int64) * H + k[None, :]

    n = (tl.program_id(0) % columns) * BLOCK_N + tl.arange(0, BLOCK_N)
    base = e.to(tl.int64) * rows_of_expert
    w_at = (base + tl.minimum(n, I - 1)[None, :]) * row_stride + k[:, None]
    g_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    u_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in range(0, H, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_at + k0, mask=real[:, None], other=0.0)
        else:
            x = tl.load(x_at + k0, mask=real[:, None] & (k0 + k < H)[None, :], other=0.0)
        if EVEN_K:
            g = tl.load(gate + w_at + k0)
            u = tl.load(up + w_at + k0)
        else:
            g = tl.load(gate + w_at + k0, mask=(k0 + k < H)[:, None], other=0.0)
            u = tl.load(up + w_at + k0, mask=(k0 + k < H)[:, None], other=0.0)
        g_sum = tl.dot(x, g, g_sum, input_precision=PRECISION)
        u_sum = tl.dot(x, u, u_sum, input_precision=PRECISION)
    out = g_sum * tl.sigmoid(g_sum) * u_sum
    out_at = act + rows[:, None].to(tl.int64) * I + n[None, :]
    tl.store(out_at, out.to(act.dtype.element_ty), mask=(rows < end)[:, None] & (n < I)[None, :])
