"""The documented limits of npu_moe_distribute_dispatch_v2 and combine_v2 on Ascend 910B (Atlas A2), for each CANN.

`comm_alg` is "hierarchy" (between servers by RDMA, within one by HCCS; the one that the page recommends) or "fullmesh".
The operators are CANN's, so CANN's version says what holds; a torch_npu serves several.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...ascend.limits import PAGES, Arguments, Limit
from ...ascend.operators import COMBINE, DISPATCH
from ...sizes import ceil_div

DEFAULT_BUFFER_MB = 200
MB = 2**20
ALGORITHMS = ("hierarchy", "fullmesh")
MOST_HIDDEN = {"hierarchy": 10 * 1024, "fullmesh": 7168}
# the pages: what they document of hierarchy holds from this driver on
HIERARCHY_DRIVER = "25.0.RC1.1"
RANKS_OF_A_SERVER = 8


def rows_received(tokens: int, ranks: int, E: int, K: int) -> int:
    """A of the pages: the most rows that a process can receive."""
    return tokens * ranks * min(E // ranks, K)


def _aligned(n: int, step: int) -> int:
    return ceil_div(n, step) * step


def _token_bytes(K: int, H: int) -> int:
    """A row in bf16 or fp16, and four words for each of its experts."""
    return H * 2 + 4 * _aligned(K, 8) * 4


def _fullmesh_buffer(tokens: int, ranks: int, E: int, K: int, H: int) -> int:
    return 2 * (rows_received(tokens, ranks, E, K) * H * 2 + 2 * MB)


def _hierarchy_buffer_8(tokens: int, ranks: int, E: int, K: int, H: int) -> int:
    return E * tokens * _token_bytes(K, H) + 104 * MB


def _hierarchy_buffer_9(tokens: int, ranks: int, E: int, K: int, H: int) -> int:
    return (E + ranks // 4) * _aligned(tokens * _token_bytes(K, H), 512) + 8 * MB


@dataclass(frozen=True, eq=False)
class Release:
    """What CANN's releases of one line allow. Numbers are for each comm_alg.

    Attributes:
        cann: the releases. source: where the numbers stand. ranks: sizes of the group, and says: the same in words.
        tokens: the most of one process. experts: the most of all. local_experts: the most of one process.
        buffer: bytes of HCCL buffer that (tokens, ranks, E, K, H) need; tokens: the most of any process.
    """

    cann: tuple[str, ...]
    source: str
    ranks: Mapping[str, Collection[int]]
    says: Mapping[str, str]
    tokens: Mapping[str, int]
    experts: Mapping[str, int]
    local_experts: Mapping[str, int]
    buffer: Mapping[str, Callable[[int, int, int, int, int], int]]

    def buffer_bytes(self, comm_alg: str, tokens: int, ranks: int, E: int, K: int, H: int) -> int:
        """Bytes of HCCL buffer, bf16 or fp16."""
        return self.buffer[comm_alg](tokens, ranks, E, K, H)


_ANY = 1 << 30
RELEASES = (
    Release(
        cann=("8.3", "8.5"),
        # pages of op-plugin's branches 7.2.0 and 7.3.0; where they and the tiling differ, the smaller number of experts
        source="op-plugin 7.2.0, 7.3.0: docs/context/; ops-transformer: moe_distribute_dispatch_v2_tiling.cpp",
        ranks={"hierarchy": (16, 32, 64), "fullmesh": range(16, 257, 8)},
        says={"hierarchy": "16, 32 or 64", "fullmesh": "a multiple of 8 from 16 to 256"},
        tokens={"hierarchy": 256, "fullmesh": 256},
        experts={"hierarchy": 512, "fullmesh": 512},
        local_experts={"hierarchy": _ANY, "fullmesh": 24},
        buffer={"hierarchy": _hierarchy_buffer_8, "fullmesh": _fullmesh_buffer},
    ),
    Release(
        cann=("9",),
        source=f"op-plugin 26: {PAGES}; ops-transformer: moe_distribute_dispatch_v2_tiling_arch22.cpp",
        ranks={"hierarchy": (16, 32, 64), "fullmesh": (2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256)},
        says={"hierarchy": "16, 32 or 64", "fullmesh": "2 to 8, 16, 32, 64, 128 or 256"},
        tokens={"hierarchy": 512, "fullmesh": 256},
        experts={"hierarchy": 512, "fullmesh": 1024},
        local_experts={"hierarchy": _ANY, "fullmesh": _ANY},
        buffer={"hierarchy": _hierarchy_buffer_9, "fullmesh": _fullmesh_buffer},
    ),
)
KNOWN = tuple(cann for release in RELEASES for cann in release.cann)


def release_of(cann: str) -> Release | None:
    """The limits of a CANN, such as "8.5.0" or "8.3.RC1"; None: they are not known."""
    return next((one for one in RELEASES if any(f"{cann}.".startswith(f"{line}.") for line in one.cann)), None)


def _alg(a: Arguments) -> str:
    return a["comm_alg"] if a["comm_alg"] in ALGORITHMS else "fullmesh"


def _x(a: Arguments) -> Tensor:
    return a["x"] if "x" in a else a["expand_x"]


@cache
def limits_of(release: Release) -> tuple[Limit, ...]:
    """One row for each rule of the pair of operators, as in ascend.limits."""

    def one(operator: str, rule: str, holds: Callable[[Arguments], bool]) -> Limit:
        return Limit(operator, f"torch_npu-{operator}.md ({release.source})", rule, holds)

    def both(rule: str, holds: Callable[[Arguments], bool]) -> tuple[Limit, Limit]:
        return one(DISPATCH, rule, holds), one(COMBINE, rule, holds)

    def each(numbers: Mapping[str, object]) -> str:
        return ", ".join(f"{numbers[alg]} with {alg}" for alg in ALGORITHMS)

    return (
        *both("comm_alg is fullmesh or hierarchy", lambda a: a["comm_alg"] in ALGORITHMS),
        *both(f"ep_world_size is {each(release.says)}", lambda a: a["ep_world_size"] in release.ranks[_alg(a)]),
        *both("ep_rank_id is one of the ranks", lambda a: 0 <= a["ep_rank_id"] < a["ep_world_size"]),
        *both("group_ep is a name of 1 to 127 characters", lambda a: 1 <= len(a["group_ep"]) < 128),
        *both(
            f"moe_expert_num is at least 1, at most {each(release.experts)}",
            lambda a: 1 <= a["moe_expert_num"] <= release.experts[_alg(a)],
        ),
        *both("moe_expert_num is a multiple of ep_world_size", lambda a: a["moe_expert_num"] % a["ep_world_size"] == 0),
        *(
            both(
                f"a process has at most {release.local_experts['fullmesh']} experts with fullmesh",
                lambda a: a["moe_expert_num"] // a["ep_world_size"] <= release.local_experts[_alg(a)],
            )
            if release.local_experts["fullmesh"] < _ANY
            else ()
        ),
        *both(
            "hidden rows are [rows, H], bf16 or fp16",
            lambda a: _x(a).dim() == 2 and _x(a).dtype in (torch.bfloat16, torch.float16),
        ),
        *both("H is a multiple of 32", lambda a: _x(a).shape[-1] % 32 == 0),
        *both(f"H is at most {each(MOST_HIDDEN)}", lambda a: 0 < _x(a).shape[-1] <= MOST_HIDDEN[_alg(a)]),
        *both(
            f"a process has 1 token or more, at most {each(release.tokens)}",
            lambda a: 0 < a["expert_ids"].shape[0] <= release.tokens[_alg(a)],
        ),
        *both(
            "K is 1 to 16, and at most moe_expert_num",
            lambda a: 0 < a["expert_ids"].shape[-1] <= min(16, a["moe_expert_num"]),
        ),
        *both(
            "expert_ids is [tokens, K] int32",
            lambda a: a["expert_ids"].dim() == 2 and a["expert_ids"].dtype == torch.int32,
        ),
        *both(
            "expert_scales is [tokens, K] fp32",
            lambda a: a["expert_scales"].shape == a["expert_ids"].shape and a["expert_scales"].dtype == torch.float32,
        ),
        *both(
            "global_bs is 0 or the most tokens of any process times ep_world_size",
            lambda a: (
                a["global_bs"] == 0
                or (
                    a["global_bs"] % a["ep_world_size"] == 0
                    and a["global_bs"] // a["ep_world_size"] >= a["expert_ids"].shape[0]
                )
            ),
        ),
        one(DISPATCH, "quant_mode is 0 or 2", lambda a: a.get("quant_mode", 0) in (0, 2)),
        one(DISPATCH, "expert_token_nums_type is 0 or 1", lambda a: a.get("expert_token_nums_type", 1) in (0, 1)),
        one(
            COMBINE,
            "comm_quant_mode is 0, or 2 with hierarchy",
            lambda a: a.get("comm_quant_mode", 0) == 0 or (a["comm_quant_mode"] == 2 and a["comm_alg"] == "hierarchy"),
        ),
        one(
            COMBINE,
            "expand_scales is [A] fp32 and must be given",
            lambda a: (
                a.get("expand_scales") is not None
                and a["expand_scales"].dtype == torch.float32
                and tuple(a["expand_scales"].shape) == (a["expand_x"].shape[0],)
            ),
        ),
        one(
            COMBINE,
            "assist_info_for_combine is [A * 128] int32",
            lambda a: (
                a["assist_info_for_combine"].dtype == torch.int32
                and tuple(a["assist_info_for_combine"].shape) == (a["expand_x"].shape[0] * 128,)
            ),
        ),
        one(
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
        *both(
            "there are no shared experts: shared_expert_num and shared_expert_rank_num are left at 1 and 0",
            lambda a: a.get("shared_expert_num", 1) == 1 and a.get("shared_expert_rank_num", 0) == 0,
        ),
    )
