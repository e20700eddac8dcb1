"""Stand-ins for CANN's shared libraries, so that torch_npu imports where CANN is not installed.

They hold what torch_npu's own libraries leave undefined: one C function each, that does nothing and returns 0. With
them the operator schemas and the shape functions are torch_npu's own; no kernel, stream or device is.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

# sonames of CANN that torch_npu names as needed; libop_plugin_atb.so is loaded by torch_npu on demand only
LIBRARIES = ("hccl", "ascendcl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")


def why_not() -> str | None:
    """Why torch_npu with stand-ins cannot be had here, or None."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed: make test-ascend installs it beside the environment of the tests"
    import torch

    if built := torch.version.cuda or torch.version.hip:  # with or without such a GPU
        return f"torch_npu does not load beside a torch built for CUDA or ROCm ({built}): install torch's CPU build"
    if (accelerator := torch._C._get_accelerator().type) not in ("cpu", "npu"):
        return f"torch_npu does not load beside a torch built for {accelerator}"
    for tool in ("nm", "ldd"):
        if shutil.which(tool) is None:
            return f"{tool} is not on PATH: install binutils"
    if _compiler() is None:
        return "there is no C compiler: install gcc"
    return None


def import_torch_npu(folder: Path) -> object:
    """torch_npu, over stand-ins built in folder when CANN's libraries are absent."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    # torch_npu asks for CANN's version and warns where there is none
    if not _have_cann():
        for path in build(folder):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    import torch_npu

    return torch_npu


def build(folder: Path) -> list[Path]:
    """Compile the stand-ins: the first defines every missing function, the others are empty and carry the names."""
    made = []
    for i, name in enumerate(LIBRARIES):
        source, library = folder / f"{name}.c", folder / f"lib{name}.so"
        functions = sorted(missing()) if i == 0 else []
        source.write_text("".join(f"long {function}(void) {{ return 0; }}\n" for function in functions))
        command = [_compiler() or "cc", "-shared", "-fPIC", "-fno-builtin", "-w", f"-Wl,-soname,{library.name}"]
        subprocess.run([*command, "-o", library, source], check=True, capture_output=True)
        made.append(library)
    return made


@cache
def missing() -> frozenset[str]:
    """C functions that torch_npu's libraries use and that neither they, nor torch, nor the system defines."""
    import torch

    npu = _folder("torch_npu")
    ours = [*npu.glob("_C*.so"), *(npu / "lib").glob("libtorch_npu.so"), npu / "lib" / "libtensorpipe.so"]
    ours += [npu / "lib" / "libnpu_profiler.so"]
    others = {*(Path(torch.__file__).parent / "lib").glob("*.so*"), *_system_libraries(ours)}
    undefined = set().union(*(_symbols(path, "--undefined-only") for path in ours))
    defined = set().union(*(_symbols(path, "--defined-only") for path in (*ours, *others)))
    # Python's own functions are in the interpreter
    return frozenset(
        name for name in undefined - defined if re.fullmatch(r"[A-Za-z]\w*", name) and not name.startswith("Py")
    )


def _symbols(path: Path, which: str) -> set[str]:
    listed = subprocess.run(["nm", "-D", which, path], capture_output=True, text=True, check=True).stdout
    rows = (line.split() for line in listed.splitlines())
    # w and v: weak, may stay undefined
    return {row[-1].split("@")[0] for row in rows if len(row) >= 2 and row[-2] not in "wv"}


def _system_libraries(paths: list[Path]) -> set[Path]:
    listed = subprocess.run(["ldd", *paths], capture_output=True, text=True).stdout
    return {Path(match) for match in re.findall(r"(?:=>\s+)?(/\S+)\s+\(0x", listed)}


def _have_cann() -> bool:
    try:
        ctypes.CDLL("libascendcl.so")
    except OSError:
        return False
    return True


def _folder(package: str) -> Path:
    found = importlib.util.find_spec(package)
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def _compiler() -> str | None:
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


if __name__ == "__main__":
    sys.stdout.write("\n".join(sorted(missing())) + "\n")
