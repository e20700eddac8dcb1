"""The processes of one model: they compare what they run, agree on each step, and name the rank that stopped."""

from .faults import RankStopped
from .ranks import Ranks, start

__all__ = ["RankStopped", "Ranks", "start"]
