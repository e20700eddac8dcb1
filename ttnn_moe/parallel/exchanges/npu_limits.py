"""The documented limits of npu_moe_distribute_dispatch_v2 and combine_v2 on Ascend 910B (Atlas A2).

`comm_alg` is "hierarchy" (between servers by RDMA, within one by HCCS; the one that the page recommends) or "fullmesh".
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...ascend.limits import PAGES, Arguments, Limit
from ...ascend.operators import COMBINE, DISPATCH
from ...sizes import ceil_div

DEFAULT_BUFFER_MB = 200
MB = 2**20
ALGORITHMS = ("hierarchy", "fullmesh")
RANKS = {"hierarchy": (16, 32, 64), "fullmesh": (2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256)}
MOST_TOKENS = {"hierarchy": 512, "fullmesh": 256}
MOST_HIDDEN = {"hierarchy": 10 * 1024, "fullmesh": 7168}
# both pages: what they document of hierarchy holds from this driver on
HIERARCHY_DRIVER = "25.0.RC1.1"


def buffer_bytes(comm_alg: str, tokens: int, ranks: int, E: int, K: int, H: int) -> int:
    """Bytes of HCCL buffer that both pages ask for, bf16 or fp16; tokens: the most of any process."""
    if comm_alg == "hierarchy":
        token = H * 2 + 4 * _aligned(K, 8) * 4
        return (E + ranks // 4) * _aligned(tokens * token, 512) + 8 * MB
    return 2 * (tokens * ranks * min(E // ranks, K) * H * 2 + 2 * MB)


def _aligned(n: int, step: int) -> int:
    return ceil_div(n, step) * step


def rows_received(tokens: int, ranks: int, E: int, K: int) -> int:
    """A of the pages: the most rows that a process can receive."""
    return tokens * ranks * min(E // ranks, K)


def _alg(a: Arguments) -> str:
    return a["comm_alg"] if a["comm_alg"] in ALGORITHMS else "fullmesh"


def _x(a: Arguments) -> Tensor:
    return a["x"] if "x" in a else a["expand_x"]


def _both(rule: str, holds: object) -> tuple[Limit, Limit]:
    return _one(DISPATCH, rule, holds), _one(COMBINE, rule, holds)


def _one(operator: str, rule: str, holds: object) -> Limit:
    return Limit(operator, f"op-plugin: {PAGES}torch_npu-{operator}.md", rule, holds)  # type: ignore[arg-type]


EXCHANGE_LIMITS: tuple[Limit, ...] = (
    *_both("comm_alg is fullmesh or hierarchy", lambda a: a["comm_alg"] in ALGORITHMS),
    *_both(
        "ep_world_size is 16, 32 or 64 with hierarchy, 2 to 8, 16, 32, 64, 128 or 256 with fullmesh",
        lambda a: a["ep_world_size"] in RANKS[_alg(a)],
    ),
    *_both("ep_rank_id is one of the ranks", lambda a: 0 <= a["ep_rank_id"] < a["ep_world_size"]),
    *_both("group_ep is a name of 1 to 127 characters", lambda a: 1 <= len(a["group_ep"]) < 128),
    *_both("moe_expert_num is 1 to 1024", lambda a: 1 <= a["moe_expert_num"] <= 1024),
    *_both("moe_expert_num is a multiple of ep_world_size", lambda a: a["moe_expert_num"] % a["ep_world_size"] == 0),
    *_both(
        "hidden rows are [rows, H], bf16 or fp16",
        lambda a: _x(a).dim() == 2 and _x(a).dtype in (torch.bfloat16, torch.float16),
    ),
    *_both("H is a multiple of 32", lambda a: _x(a).shape[-1] % 32 == 0),
    *_both(
        "H is at most 7168 with fullmesh, 10240 with hierarchy", lambda a: 0 < _x(a).shape[-1] <= MOST_HIDDEN[_alg(a)]
    ),
    *_both(
        "a process has 1 to 256 tokens with fullmesh, 1 to 512 with hierarchy",
        lambda a: 0 < a["expert_ids"].shape[0] <= MOST_TOKENS[_alg(a)],
    ),
    *_both(
        "K is 1 to 16, and at most moe_expert_num",
        lambda a: 0 < a["expert_ids"].shape[-1] <= min(16, a["moe_expert_num"]),
    ),
    *_both(
        "expert_ids is [tokens, K] int32", lambda a: a["expert_ids"].dim() == 2 and a["expert_ids"].dtype == torch.int32
    ),
    *_both(
        "expert_scales is [tokens, K] fp32",
        lambda a: a["expert_scales"].shape == a["expert_ids"].shape and a["expert_scales"].dtype == torch.float32,
    ),
    *_both(
        "global_bs is 0 or the most tokens of any process times ep_world_size",
        lambda a: (
            a["global_bs"] == 0
            or (
                a["global_bs"] % a["ep_world_size"] == 0
                and a["global_bs"] // a["ep_world_size"] >= a["expert_ids"].shape[0]
            )
        ),
    ),
    _one(DISPATCH, "quant_mode is 0 or 2", lambda a: a.get("quant_mode", 0) in (0, 2)),
    _one(DISPATCH, "expert_token_nums_type is 0 or 1", lambda a: a.get("expert_token_nums_type", 1) in (0, 1)),
    _one(
        COMBINE,
        "comm_quant_mode is 0, or 2 with hierarchy",
        lambda a: a.get("comm_quant_mode", 0) == 0 or (a["comm_quant_mode"] == 2 and a["comm_alg"] == "hierarchy"),
    ),
    _one(
        COMBINE,
        "expand_scales is [A] fp32 and must be given",
        lambda a: (
            a.get("expand_scales") is not None
            and a["expand_scales"].dtype == torch.float32
            and tuple(a["expand_scales"].shape) == (a["expand_x"].shape[0],)
        ),
    ),
    _one(
        COMBINE,
        "assist_info_for_combine is [A * 128] int32",
        lambda a: (
            a["assist_info_for_combine"].dtype == torch.int32
            and tuple(a["assist_info_for_combine"].shape) == (a["expand_x"].shape[0] * 128,)
        ),
    ),
    _one(
        COMBINE,
        "expand_x holds at least as many rows as a process can receive",
        lambda a: (
            a["expand_x"].shape[0]
            >= rows_received(
                a["global_bs"] // a["ep_world_size"] or a["expert_ids"].shape[0],
                a["ep_world_size"],
                a["moe_expert_num"],
                a["expert_ids"].shape[-1],
            )
        ),
    ),
    *_both(
        "there are no shared experts: shared_expert_num and shared_expert_rank_num are left at 1 and 0",
        lambda a: a.get("shared_expert_num", 1) == 1 and a.get("shared_expert_rank_num", 0) == 0,
    ),
)
