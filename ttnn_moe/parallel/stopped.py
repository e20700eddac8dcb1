"""The error of ranks that cannot go on without one of them."""

from __future__ import annotations

import torch.distributed as dist

from ..errors import TtnnMoeError


class RankStopped(TtnnMoeError, RuntimeError):
    """A rank died, stalled or failed, and the ranks cannot go on. `peer` is its number; -1: not known.

    Args:
        peer: that stopped; it may be this rank. rank: this one. why: peer stopped.
    """

    def __init__(self, peer: int, rank: int, why: str):
        self.peer, self.rank, self.why = peer, rank, why
        super().__init__(
            f"{f'rank {peer}' if peer >= 0 else 'a rank'} stopped"
            + (f", and rank {rank} cannot go on without it" if peer != rank else ""),
            got=why,
            expected="all ranks take every step",
            remedy=f"look at {f'rank {peer}' if peer >= 0 else 'every rank'}'s log first, then start all ranks again",
        )

    def again(self) -> RankStopped:
        """A new error that says the same; this one keeps the frames of what raised it."""
        return RankStopped(self.peer, self.rank, self.why)


def of_a_collective(error: BaseException) -> bool:
    """Whether a library of torch.distributed may have raised it: most of them raise plain RuntimeErrors."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)
