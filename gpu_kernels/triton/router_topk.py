"""Top-K routing of each token: softmax over E logits, the K largest, their weights.

SLICES > 0 (few tokens): it also sums the partial logits of router_logits and writes the normalised token.

| argument | shape | dtype | |
|---|---|---|---|
| logits | [T, E] row-major | bf16, fp16, fp32 | SLICES == 0 |
| partial, squares | [SLICES, T, E], [SLICES, T] | fp32 | SLICES > 0: of router_logits, added in a fixed order |
| x, norm | [T, H] row-major, [H] | bf16, fp16, fp32 | SLICES > 0 |
| normed | [T, H] row-major | as x, out | SLICES > 0: x / sqrt(mean(x^2) + eps) * norm, rounded once |
| ids | [T, K] row-major | int32, out | descending logit, of equal ones the lowest expert first; NaN counts as largest |
| weights | [T, K] row-major | fp32, out | softmax over all E; RENORMALISE: divided by their sum |

Grid: T. One program holds the logits of one token; E_PAD is a power of two. ids are always in 0 .. E-1; NaN logits give
NaN weights.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["T"])
def router_topk(
    logits,
    partial,
    squares,
    x,
    norm,
    normed,
    ids,
    weights,
    eps,
    T,
    E,
    H,
    K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SLICES: tl.constexpr,
    PDL: tl.constexpr,
    E_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
    S_PAD: tl.constexpr,
    H_PAD: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E_PAD)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if SLICES == 0:
        z = tl.load(logits + t * E + e, mask=e < E, other=float("-inf")).to(tl.float32)
    else:
        s = tl.arange(0, S_PAD)
        at = partial + (s[:, None] * T + t) * E + e[None, :]
        z = tl.sum(tl.load(at, mask=(s < SLICES)[:, None] & (e < E)[None, :], other=0.0), 0)
        scale = tl.rsqrt(tl.sum(tl.load(squares + s * T + t, mask=s < SLICES, other=0.0), 0) / H + eps)
        z = tl.where(e < E, z * scale, float("-inf"))
        h = tl.arange(0, H_PAD)
        v = tl.load(x + t * H + h, mask=h < H, other=0.0).to(tl.float32)
        v = v * scale * tl.load(norm + h, mask=h < H, other=0.0).to(tl.float32)
        tl.store(normed + t * H + h, v.to(normed.dtype.element_ty), mask=h < H)
    z = tl.where(z == 0, 0.0, z)  # -0 is 0
    highest = tl.max(z, 0)
    total = tl.sum(tl.where(e < E, tl.exp(z - highest), 0.0), 0)
    # one integer key: by value, NaN first, ties to the lowest expert
    bits = z.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(z != z, 0x7FFFFFFF, order)
    key = (order.to(tl.int64) << 32) | (E_PAD - 1 - e).to(tl.int64)
    key = tl.where(e < E, key, -0x7FFFFFFFFFFFFFFF - 1)
    k = tl.arange(0, K_PAD)
    best_ids = tl.zeros([K_PAD], tl.int32)
    best = tl.zeros([K_PAD], tl.float32)
    for i in tl.static_range(K):
        top = tl.max(key, 0)
        chosen = E_PAD - 1 - (top & 0xFFFFFFFF).to(tl.int32)
        order_top = (top >> 32).to(tl.int32)
        value = tl.where(order_top < 0, order_top ^ 0x7FFFFFFF, order_top).to(tl.float32, bitcast=True)
        best_ids = tl.where(k == i, chosen, best_ids)
        best = tl.where(k == i, tl.exp(value - highest) / total, best)
        key = tl.where(e == chosen, -0x7FFFFFFFFFFFFFFF - 1, key)
    if RENORMALISE:
        best = best / tl.sum(best, 0)
    tl.store(ids + t * K + k, best_ids, mask=k < K)
    tl.store(weights + t * K + k, best, mask=k < K)
