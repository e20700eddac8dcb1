"""Machines of 910B servers, as the ranks of a group would tell them."""

from __future__ import annotations

from ttnn_moe.ascend.machine import Machine


def machines(
    ranks: int, cann: str = "9.0.0", buffer: str = "4000", of_server: int = 8, **others: object
) -> list[Machine]:
    """One for each rank; the first of_server ranks are on the first server, and so on. A switch joins them."""
    return [
        Machine(**{"cann": cann, "buffer": buffer, "network": "switch", "server": str(rank // of_server), **others})  # type: ignore[arg-type]
        for rank in range(ranks)
    ]
