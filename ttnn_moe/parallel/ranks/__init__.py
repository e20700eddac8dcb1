"""The processes of one model: they compare what they run, agree on each step, and name the rank that stopped."""

from ..stopped import RankStopped
from .ranks import Ranks, check_launched, own_device, start

__all__ = ["RankStopped", "Ranks", "check_launched", "own_device", "start"]
