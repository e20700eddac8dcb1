"""RMSNorm and RoPE of each query and key head; keys and values are written into the cache.

| argument | shape | dtype | |
|---|---|---|---|
| qkv | [T, Q + 2 KV, D] row-major | bf16, fp16, fp32 | heads of q, then k, then v |
| q_norm, k_norm | [D] | as qkv | |
| cos, sin | [T, D / 2] row-major | as qkv | of each token's position |
| rows, positions | [T] | int64 | cache row of each token, and where in it |
| num_tokens | [] | int32 | BOUND: tokens past it write nothing into the cache |
| q | [T, Q, D] row-major | as qkv, out | Q may be 0 |
| keys, values | [rows, KV, capacity, D] row-major | as qkv, out | PAGE > 0: [pages, KV, PAGE, D] |
| pages | [rows, capacity / PAGE] row-major | int32 | PAGE > 0: the pages of each row, in order |

STRIDE: elements from a token of keys, and of values, to the next; D, or more.

Grid: ceil(T * (Q + 2 KV) / BLOCK_R). D: a power of two. fp32 inside, one rounding. Consumers: the attention kernels.
PDL (sm_90 and newer): programmatic dependent launch. The kernel reads everything but qkv before it waits for its
predecessor. So a kernel that is launched without PDL must run between the writers of those inputs and this kernel.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["rows", "positions"])
def head_norm_rope(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    rows,
    positions,
    num_tokens,
    q,
    keys,
    values,
    pages,
    eps,
    T,
    capacity,
    Q: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    BOUND: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE: tl.constexpr,
    STRIDE: tl.constexpr,
):
    HALF: tl.constexpr = D // 2
    HEADS: tl.constexpr = Q + 2 * KV
    if PDL:
        gdc_launch_dependents()
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    t, head = (r // HEADS).to(tl.int64), r % HEADS
    real = t < T
    t = tl.minimum(t, T - 1)
    i = tl.arange(0, HALF)[None, :]
    is_q, is_k = (head < Q)[:, None], ((head >= Q) & (head < Q + KV))[:, None]
    norm_a = tl.where(is_q, tl.load(q_norm + i).to(tl.float32), tl.load(k_norm + i).to(tl.float32))
    norm_b = tl.where(is_q, tl.load(q_norm + HALF + i).to(tl.float32), tl.load(k_norm + HALF + i).to(tl.float32))
    c = tl.load(cos + t[:, None] * HALF + i).to(tl.float32)
    s = tl.load(sin + t[:, None] * HALF + i).to(tl.float32)
    row, position = tl.load(rows + t).to(tl.int64), tl.load(positions + t)
    kept = real[:, None] & (head >= Q)[:, None] & (position < capacity)[:, None]
    if BOUND:
        kept = kept & (t < tl.load(num_tokens))[:, None]
    if PAGE == 0:
        room = capacity
    else:
        within = position < capacity
        row = tl.load(pages + row * (capacity // PAGE) + position // PAGE, mask=within, other=0).to(tl.int64)
        position = position % PAGE
        room = PAGE
    if PDL:
        gdc_wait()
    at = qkv + (t * HEADS + head)[:, None] * D + i
    a, b = tl.load(at).to(tl.float32), tl.load(at + HALF).to(tl.float32)
    scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
    na, nb = a * scale * norm_a, b * scale * norm_b
    turned = is_q | is_k
    a, b = tl.where(turned, na * c - nb * s, a), tl.where(turned, nb * c + na * s, b)
    a, b = a.to(q.dtype.element_ty), b.to(q.dtype.element_ty)

    q_at = q + (t * Q + head)[:, None] * D + i
    mask = real[:, None] & is_q
    tl.store(q_at, a, mask=mask)
    tl.store(q_at + HALF, b, mask=mask)
    kv_head = tl.where(head < Q, 0, (head - Q) % KV)
    kv_at = ((row * KV + kv_head) * room + position)[:, None] * STRIDE + i
    k_at, v_at = keys + kv_at, values + kv_at
    tl.store(k_at, a, mask=kept & is_k)
    tl.store(k_at + HALF, b, mask=kept & is_k)
    tl.store(v_at, a, mask=kept & (~is_k))
    tl.store(v_at + HALF, b, mask=kept & (~is_k))
