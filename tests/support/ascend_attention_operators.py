"""CPU implementations of the cache's torch_npu operators, after their pages; see ascend_operators.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ascend_operators import refuse
from ttnn_moe.ascend import attention


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
    **others: object,
) -> tuple[Tensor, Tensor]:
    """npu_fused_infer_attention_score over pages, BSND, no mask or the causal one; fp32 inside, one rounding."""
    arguments = dict(locals())
    given = {name for name, value in others.items() if value not in (None, 0)}
    if given or block_table is None or softmax_lse_flag or sparse_mode not in (0, attention.CAUSAL):
        raise NotImplementedError(f"the stand-in has pages and the causal mask alone, not {sorted(given)}")
    refuse(attention.ATTENTION, arguments, attention.LIMITS)
    B, S, _, D = query.shape
    causal = sparse_mode == attention.CAUSAL and S > 1
    if atten_mask is not None and not torch.equal(atten_mask.bool(), torch.ones_like(atten_mask.bool()).triu(1)):
        raise RuntimeError("atten_mask is not the upper triangle, which the page leaves to its user")
    if S > 1 and (atten_mask is None) != (sparse_mode == 0):
        raise NotImplementedError("the stand-in has no other mask than the causal one")
    # queries past their length are not written
    out = torch.full_like(query, float("nan"))
    for b in range(B):
        n = S if actual_seq_lengths is None else actual_seq_lengths[b % len(actual_seq_lengths)]
        held = actual_seq_lengths_kv[b % len(actual_seq_lengths_kv)]  # type: ignore[index]
        blocks = block_table[b, : -(-held // block_size)].long()
        if bool(((blocks < 0) | (blocks >= len(key))).any()):
            raise RuntimeError(f"block_table names blocks outside 0 .. {len(key) - 1}")
        if not held:
            out[b, :n] = 0
            continue
        k, v = (pages[blocks].flatten(0, 1)[:held].unflatten(1, (-1, D)).float() for pages in (key, value))
        k, v = (x.repeat_interleave(num_heads // num_key_value_heads, 1) for x in (k, v))
        scores = torch.einsum("snd,knd->nsk", query[b, :n].float(), k) * scale
        if causal:
            scores.masked_fill_(torch.ones(n, held).triu(held - n + 1).bool(), float("-inf"))
        out[b, :n] = torch.einsum("nsk,knd->snd", scores.softmax(-1), v).to(query.dtype)
    return out, torch.zeros(1)


def scatter(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """npu_scatter_nd_update_: input[indices[i]] = updates[i], in place."""
    refuse(attention.WRITE, locals(), attention.LIMITS)
    axes = indices.long().unbind(-1)
    if any(bool(((axis < 0) | (axis >= size)).any()) for axis, size in zip(axes, input.shape, strict=False)):
        raise RuntimeError(f"indices lie outside {tuple(input.shape[: len(axes)])}")
    input[axes] = updates
    return input


IMPLEMENTATIONS = {attention.ATTENTION: fused_attention, attention.WRITE: scatter}
