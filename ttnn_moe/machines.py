"""Machines that the package knows by name and that this version holds no kernels for.

Asking for one is refused with what the machine lacks, and `ttnn-moe doctor` lists them. A backend's own module takes
the name over in registry.py.
"""

from __future__ import annotations

import importlib.util

from .backend import Probe


class NoKernels:
    """A name without kernels: its probe says so, after what it saw of the machine."""

    name = ""

    @classmethod
    def seen(cls) -> str:
        """What of this machine is here or is missing."""
        raise NotImplementedError

    @classmethod
    def probe(cls) -> Probe:
        return Probe(False, f"this version has no {cls.name} kernels ({cls.seen()})", "use the reference backend")


class Tenstorrent(NoKernels):
    name = "tenstorrent"

    @classmethod
    def seen(cls) -> str:
        return "ttnn is installed" if importlib.util.find_spec("ttnn") else "ttnn is not installed"
