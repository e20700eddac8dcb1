"""The one function that finds kernel sources.

gpu_kernels and device_kernels are folders of this package. In a checkout, also one installed as editable, they are
links to the folders of the repository.
"""

from __future__ import annotations

from pathlib import Path

from .errors import ContractError, TtnnMoeError

FOLDERS = ("gpu_kernels", "device_kernels")


class SourceMissing(TtnnMoeError, FileNotFoundError):
    """A kernel source that the package should have brought along is not there."""


def kernel_path(*parts: str) -> Path:
    """Path of a kernel source file or folder.

    Args:
        parts: the path from the root, e.g. `"gpu_kernels", "cuda", "sm80", "mma.cuh"`; may hold slashes.

    Raises:
        ContractError: the path does not lead into one of FOLDERS.
        SourceMissing: it does, but nothing is there.
    """
    root = Path(__file__).resolve().parent
    path = root.joinpath(*parts).resolve()
    if not parts or not any(path.is_relative_to((root / folder).resolve()) for folder in FOLDERS):
        raise ContractError(
            "not the path of a kernel source", got=repr("/".join(parts)), expected=f"a path in {' or '.join(FOLDERS)}"
        )
    if not path.exists():
        raise SourceMissing(
            f"kernel source {'/'.join(parts)} is missing",
            got=f"nothing at {path}",
            expected="the kernel folders of the ttnn_moe package",
            remedy="install ttnn-moe again (pip install --force-reinstall --no-deps), or use a whole checkout",
        )
    return path
