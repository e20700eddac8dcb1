"""Attention over pages on Ascend: torch_npu's fused operator, the write before it, and their documented limits.

Pages are token-major, [blocks, PAGE, kv_heads * head_dim] ("BnBsH"): the one layout that BSND queries take, so queries
need no copy. Lengths are host numbers, as the operator takes them. Never run on an NPU.

Source: op-plugin's pages of both operators, at the commit that limits.py names; attention as in
https://arxiv.org/abs/2205.14135.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .limits import PAGES, Arguments, Limit, broken, describe

ATTENTION, WRITE = "npu_fused_infer_attention_score", "npu_scatter_nd_update_"
PAGE = 128
"""Tokens of a page: what prompts take, at least, and what the operator's page recommends."""
MASK = 2048
"""Rows and columns of the mask that causal modes take."""
CAUSAL = 3
"""sparse_mode: the last query sees every key."""
LENGTHS = "actual_seq_lengths_kv"
"""The argument that a captured step takes anew at every replay."""


def causal_mask(device: torch.device | str) -> Tensor:
    """[MASK, MASK] int8, 1 above the diagonal."""
    return torch.ones(MASK, MASK, dtype=torch.int8, device=device).triu(1)


def arguments(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Sequence[int], mask: Tensor | None
) -> dict[str, Any]:
    """The call for B sequences of S queries, by the operator's own names.

    Args:
        q: [B, S, heads, head_dim]. keys, values: [blocks, PAGE, kv_heads * head_dim].
        table: [B, n] int32, the blocks of each sequence. lengths: of each, the keys that its last query sees.
        mask: of causal_mask where S > 1; None: S is 1.
    """
    S, heads, head_dim = q.shape[1:]
    causal = {} if mask is None else {"atten_mask": mask, "sparse_mode": CAUSAL, "actual_seq_lengths": [S] * len(q)}
    return {
        "query": q,
        "key": keys,
        "value": values,
        **causal,
        LENGTHS: list(lengths),
        "block_table": table,
        "num_heads": heads,
        "scale": head_dim**-0.5,
        "input_layout": "BSND",
        "num_key_value_heads": keys.shape[2] // head_dim,
        "block_size": keys.shape[1],
    }


def attend(npu: Any, call: dict[str, Any]) -> Tensor:
    """Attention [B, S, heads, head_dim] of `arguments`. A graph's update wants the first three in place."""
    q, keys, values = (call.pop(name) for name in ("query", "key", "value"))
    return getattr(npu, ATTENTION)(q, keys, values, **call)[0]


def write(npu: Any, pages: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Put rows [T, kv_heads, head_dim] into pages [blocks, PAGE, kv_heads * head_dim] at slots [T, 1] int32."""
    getattr(npu, WRITE)(pages.flatten(0, 1), slots, rows.flatten(1))


def why_not(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, page: int, columns: int) -> str | None:
    """The first documented limit that a model and a cache of these sizes would break, or None.

    Args:
        page: tokens of a block. columns: blocks of a sequence, at most.
    """
    for operator, call in calls(heads, kv_heads, head_dim, dtype, page, columns):
        for row in broken(operator, call, LIMITS):
            return describe(row, call)
    return None


def calls(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, page: int, columns: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(operator, arguments) of a prompt's chunk, of decoding tokens and of the write before them, on meta tensors."""
    meta = torch.device("meta")
    pages = torch.empty(columns, page, kv_heads * head_dim, dtype=dtype, device=meta)
    for B, S in ((1, 2), (2, 1)):
        q = torch.empty(B, S, heads, head_dim, dtype=dtype, device=meta)
        table = torch.empty(B, columns, dtype=torch.int32, device=meta)
        mask = torch.empty(MASK, MASK, dtype=torch.int8, device=meta) if S > 1 else None
        yield ATTENTION, arguments(q, pages, pages, table, [columns * page] * B, mask)
    slots = torch.empty(2, 1, dtype=torch.int32, device=meta)
    rows = torch.empty(2, kv_heads * head_dim, dtype=dtype, device=meta)
    yield WRITE, {"input": pages.flatten(0, 1), "indices": slots, "updates": rows}


def _one(operator: str, rule: str, holds: Any) -> Limit:
    return Limit(operator, f"op-plugin: {PAGES}torch_npu-{operator}.md", rule, holds)


def _several(a: Arguments) -> bool:
    return a["query"].shape[1] > 1


def _D(a: Arguments) -> int:
    return a["query"].shape[-1]


def _room(a: Arguments) -> int:
    return a["block_table"].shape[-1] * a["block_size"]


def _mask_fits(a: Arguments) -> bool:
    if a.get("sparse_mode", 0) not in (2, 3, 4):
        return True
    mask = a.get("atten_mask")
    return mask is not None and tuple(mask.shape)[-2:] == (MASK, MASK) and mask.numel() == MASK * MASK


LIMITS: tuple[Limit, ...] = (
    _one(ATTENTION, "query is bf16 or fp16", lambda a: a["query"].dtype in (torch.bfloat16, torch.float16)),
    _one(
        ATTENTION,
        "key and value have query's dtype (int8 pages are left out here)",
        lambda a: a["key"].dtype == a["value"].dtype == a["query"].dtype,
    ),
    _one(
        ATTENTION,
        "query, key, value and block_table are contiguous",
        lambda a: all(a[name].is_contiguous() for name in ("query", "key", "value", "block_table")),
    ),
    _one(
        ATTENTION,
        "query is [B, S, N, D] in BSND, N as num_heads",
        lambda a: (
            a.get("input_layout") == "BSND" and a["query"].dim() == 4 and a["query"].shape[2] == a.get("num_heads")
        ),
    ),
    _one(ATTENTION, "key and value have one shape", lambda a: a["key"].shape == a["value"].shape),
    _one(
        ATTENTION,
        "in BSND, pages are [blocks, block_size, key heads * D]",
        lambda a: tuple(a["key"].shape[1:]) == (a["block_size"], a["num_key_value_heads"] * _D(a)),
    ),
    _one(ATTENTION, "key heads * D is at most 65535", lambda a: a["key"].shape[-1] <= 65535),
    _one(ATTENTION, "there are at most 65536 sequences", lambda a: len(a["query"]) <= 65536),
    _one(ATTENTION, "there are at most 256 query heads", lambda a: a["query"].shape[2] <= 256),
    _one(
        ATTENTION,
        "query heads are key heads times 1 to 64",
        lambda a: (
            a["num_heads"] in range(a["num_key_value_heads"], 64 * a["num_key_value_heads"] + 1)
            and a["num_heads"] % a["num_key_value_heads"] == 0
        ),
    ),
    _one(ATTENTION, "D is a multiple of 16, at most 512", lambda a: _D(a) % 16 == 0 and 16 <= _D(a) <= 512),
    _one(
        ATTENTION,
        "block_size is 128, 256, 384 or 512 for several queries, else a multiple of 16 up to 512",
        lambda a: 0 < a["block_size"] <= 512 and a["block_size"] % (128 if _several(a) else 16) == 0,
    ),
    _one(
        ATTENTION,
        "block_table is int32 [B, blocks of a sequence]",
        lambda a: (
            a["block_table"].dtype == torch.int32
            and a["block_table"].dim() == 2
            and len(a["block_table"]) == len(a["query"])
        ),
    ),
    _one(
        ATTENTION,
        "keys of a sequence are at most 20971520, of a lone query 262144",
        lambda a: _room(a) <= (20971520 if _several(a) else 262144),
    ),
    _one(
        ATTENTION,
        "with pages there are actual_seq_lengths_kv, one or one a sequence, none above its pages",
        lambda a: len(a.get(LENGTHS) or ()) in (1, len(a["query"])) and all(0 <= n <= _room(a) for n in a[LENGTHS]),
    ),
    _one(
        ATTENTION,
        "actual_seq_lengths are none, one or one a sequence, none above S",
        lambda a: (
            a.get("actual_seq_lengths") is None
            or (
                len(a["actual_seq_lengths"]) in (1, len(a["query"]))
                and all(0 <= n <= a["query"].shape[1] for n in a["actual_seq_lengths"])
            )
        ),
    ),
    _one(ATTENTION, "sparse_mode is 0 to 4", lambda a: a.get("sparse_mode", 0) in range(5)),
    _one(
        ATTENTION,
        "atten_mask is bool, int8 or uint8",
        lambda a: a.get("atten_mask") is None or a["atten_mask"].dtype in (torch.bool, torch.int8, torch.uint8),
    ),
    _one(ATTENTION, "in sparse_mode 2 to 4 atten_mask is [2048, 2048]", _mask_fits),
    _one(
        ATTENTION,
        "inner_precise is 0 to 3, of a lone query 0 or 1",
        lambda a: a.get("inner_precise", 0) in range(4 if _several(a) else 2),
    ),
    _one(
        WRITE,
        "input is bf16, fp16, fp32, int8, int64 or bool",
        lambda a: (
            a["input"].dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.int64, torch.bool)
        ),
    ),
    _one(WRITE, "updates have input's dtype", lambda a: a["updates"].dtype == a["input"].dtype),
    _one(WRITE, "input has one to eight dimensions", lambda a: 1 <= a["input"].dim() <= 8),
    _one(WRITE, "indices are int32 or int64", lambda a: a["indices"].dtype in (torch.int32, torch.int64)),
    _one(
        WRITE,
        "indices are [..., n], n no more than input's dimensions",
        lambda a: a["indices"].dim() >= 2 and a["indices"].shape[-1] <= a["input"].dim(),
    ),
    _one(
        WRITE,
        "updates are indices' leading axes and input's trailing ones",
        lambda a: a["updates"].shape == (*a["indices"].shape[:-1], *a["input"].shape[a["indices"].shape[-1] :]),
    ),
)
