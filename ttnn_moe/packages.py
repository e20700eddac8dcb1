"""Versions of the packages that this one uses where they are installed, and how to install them."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import torch

# module that is imported -> the distribution that brings it
PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "safetensors": "safetensors",
    "triton": "triton",
    "cuda.core": "cuda-core",
    "cuda.bindings": "cuda-bindings",
    "ttnn": "ttnn",
    "torch_npu": "torch-npu",
}


def install(extra: str) -> str:
    """The command that installs this package with an extra. No package index has the package: a checkout does."""
    return f"pip install '.[{extra}]' in a checkout of ttnn-moe"


def versions(*modules: str) -> dict[str, str | None]:
    """Version of each module of PACKAGES, or of those named; None: not installed.

    Modules are not imported, since some start a device; torch itself is, and says what it was built with.
    """
    return {
        module: torch.__version__ if module == "torch" else _version(module, PACKAGES[module])
        for module in modules or PACKAGES
    }


def _version(module: str, package: str) -> str | None:
    """Version of an installed package, None if absent. Not imported: some start a device when they are."""
    try:
        if importlib.util.find_spec(module) is None:
            return None
        return importlib.metadata.version(package)
    except ModuleNotFoundError:  # a parent package is absent, or the module has no distribution
        return None
