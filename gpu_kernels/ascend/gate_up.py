"""Activations of sorted rows on Ascend: silu(x Wg) * (x Wu). It gathers x by token; both products share one pass.

For triton-ascend 3.2. Never run on an NPU.

| argument | shape | dtype | |
|---|---|---|---|
| hidden | [T, H] row-major | bf16, fp16, fp32 | |
| gate_up | [E, 2I, H] row-major, an expert's gate rows first | as hidden | |
| ends | [E] | int32 | where each expert's sorted rows end |
| row_tokens | [rows] | int32 | token of each sorted row; -1: such a row is zero |
| tiles | [number of tiles, 2] | int32 | (expert, first row) of each tile of BLOCK_M rows |
| num_tiles | [1] | int32 | tiles that there are |
| act | [rows, I] row-major | as hidden, out | rows outside every tile are not written |

Grid: one program per cube core; each loops over tiles and column blocks, since more programs than cores would run in
waves. Two fp32 accumulators of BLOCK_M * BLOCK_N must fit L0C (128 KiB on a 910B). Two operands of BLOCK_K must fit the
L0 buffers (64 KiB each). The vector part's unified buffer (192 KiB) is the tightest: 64 x 128 x 64 fits; 128 x 128 x 64
and 64 x 256 x 64 miss it by 2,048 bits (bishengir-compile of ascendnpu-ir 1.2.0 for Ascend910B3).
ttnn_moe/ascend/tiles.py chooses the blocks. One rounding, to act. I and H need not be multiples of the blocks.
"""

import triton
import triton.language as tl


@triton.jit
def gate_up(
    hidden,
    gate_up,
    ends,
    row_tokens,
    tiles,
    num_tiles,
    act,
    H,
    I,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CAST: tl.constexpr,
):
    # CAST: operands of a product are made fp32, for the interpreter, whose bf16 products are wrong
    columns = tl.cdiv(I, BLOCK_N)
    tasks = tl.load(num_tiles) * columns
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        tile = task // columns
        e = tl.load(tiles + 2 * tile)
        end = tl.load(ends + e)
        rows = tl.load(tiles + 2 * tile + 1) + tl.arange(0, BLOCK_M)
        tokens = tl.load(row_tokens + rows, mask=rows < end, other=-1)
        n = (task % columns) * BLOCK_N + tl.arange(0, BLOCK_N)
        x_at = hidden + tl.maximum(tokens, 0)[:, None].to(tl.int64) * H
        w_at = gate_up + (e.to(tl.int64) * 2 * I + n[:, None]) * H
        g_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        u_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k0 in range(0, H, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            x = tl.load(x_at + k[None, :], mask=(tokens >= 0)[:, None] & (k < H)[None, :], other=0.0)
            inside = (n < I)[:, None] & (k < H)[None, :]
            g = tl.load(w_at + k[None, :], mask=inside, other=0.0)
            u = tl.load(w_at + I * H + k[None, :], mask=inside, other=0.0)
            if CAST:
                x, g, u = x.to(tl.float32), g.to(tl.float32), u.to(tl.float32)
            g_sum = tl.dot(x, tl.trans(g), g_sum)
            u_sum = tl.dot(x, tl.trans(u), u_sum)
        out = g_sum * tl.sigmoid(g_sum) * u_sum
        out_at = act + rows[:, None].to(tl.int64) * I + n[None, :]
        tl.store(out_at, out.to(act.dtype.element_ty), mask=(rows < end)[:, None] & (n < I)[None, :])
