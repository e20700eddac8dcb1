"""Native builds, kept on disk: the engine, and a shared library for each kernel with its compile-time arguments.

An entry's name is a digest of all inputs: sources, the headers they include, flags, compiler and processor. Where the
cache folder cannot be used, this process keeps its builds in a temporary folder of its own.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ...cache_folder import CacheFolder, cache_path
from ...errors import BackendUnavailable, TtnnMoeError
from ...whole_file import whole_file

# The folder of kernels in a library's debug information: a library serves every checkout.
KERNELS = "/kernels"
CACHE_VARIABLE = "TTNN_MOE_EMULATOR_CACHE"
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
OPTIMISE = "-O1"  # kernels: most run once or a few times
_HOOKS = ("-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0")


class CompileError(TtnnMoeError, RuntimeError):
    """A kernel, or the engine, does not compile. The message holds the compiler's output."""


@dataclass(frozen=True)
class KernelBuild:
    """Everything that a kernel's library depends on, besides the compiler and the headers."""

    source: Path
    root: Path
    role: str
    arch: str
    compile_args: tuple[int, ...]
    named: tuple[tuple[str, int], ...]
    defines: tuple[tuple[str, str], ...]
    buffers: tuple[tuple[int, str, int], ...]
    fp32_dest: bool
    sanitizer: str | None


def sources() -> Path:
    """Folder of the engine's sources and headers."""
    for base in (Path(__file__).resolve().parents[3], Path(__file__).resolve().parent):
        if (base / "cpp" / "emulator" / "engine" / "main.cpp").exists():
            return base / "cpp" / "emulator"
    raise BackendUnavailable(
        "the emulator's C++ sources are missing",
        expected="cpp/emulator beside the ttnn_moe package",
        remedy="use a checkout of the repository",
    )


@functools.cache
def compiler() -> str:
    """Path of the C++ compiler: $CXX, else g++, c++ or clang++."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    for name in names:
        found = shutil.which(name)
        if found:
            return found
    raise BackendUnavailable(
        "the Tenstorrent emulator needs a C++ compiler",
        got=f"none of {', '.join(names)} on PATH",
        remedy="install g++ 12 or newer (Debian and Ubuntu: apt install g++), or "
        + ("correct or unset CXX: it is one command, without options" if os.environ.get("CXX") else "set CXX"),
    )


def cache_folder() -> Path:
    """Where builds are kept: $TTNN_MOE_EMULATOR_CACHE, else as cache_folder.py says."""
    return cache_path("emulator", CACHE_VARIABLE)


def engine(sanitizer: str | None = None) -> Path:
    """The engine's executable, built if it is absent. sanitizer: None, "address" or "thread"."""
    return _engine(sanitizer, sources(), cache_folder())


@functools.cache
def _engine(sanitizer: str | None, folder: Path, cache: Path) -> Path:
    """Its digest is taken once a process: a program is launched thousands of times."""
    flags = ["-std=c++20", "-O3", "-ffp-contract=off", f"-I{folder / 'include'}", f"-I{folder / 'engine'}"]
    link = ["-rdynamic", "-ldl"]
    if sanitizer is None:
        flags.append("-march=native")
    else:
        flags += ["-DEMULATOR_SANITIZED", "-g"]
        link.append(f"-fsanitize={sanitizer}")
        # ThreadSanitizer watches the kernels only: the engine runs them in turn, and tells it their order.
        if sanitizer == "address":
            flags.append("-fsanitize=address")
        else:
            flags.append("-DEMULATOR_TSAN")
            link.append("-Wl,--wrap=memcpy,--wrap=memset,--wrap=memmove")
    units = sorted((folder / "engine").glob("*.cpp"))
    digest = _digest(
        [*(str(flag).replace(str(folder), "") for flag in flags), *link], units, [folder / "include", folder / "engine"]
    )

    def build(target: Path) -> None:
        with ThreadPoolExecutor(_jobs()) as pool, tempfile.TemporaryDirectory() as scratch:
            objects = [Path(scratch) / f"{unit.stem}.o" for unit in units]
            jobs = [
                pool.submit(_compile, [*flags, "-c", str(unit), "-o", str(to)], f"the emulator's {unit.name}")
                for unit, to in zip(units, objects, strict=True)
            ]
            for job in jobs:
                job.result()
            _compile([*map(str, objects), "-o", str(target), *link], "the emulator")

    return _cached(f"engine-{digest}", build)


def build_all(builds: Sequence[KernelBuild]) -> list[tuple[Path, bool]]:
    """The library of each kernel, in order, and whether the kernel has writable globals."""
    with ThreadPoolExecutor(_jobs()) as pool:
        unique = {build: pool.submit(_kernel, build) for build in dict.fromkeys(builds)}
        return [unique[build].result() for build in builds]


def _kernel(build: KernelBuild) -> tuple[Path, bool]:
    folder = sources()
    text = _prelude(build)
    flags = ["-std=c++17", OPTIMISE, "-g1", "-fPIC", "-fvisibility=hidden", "-fpermissive", "-w", "-ffp-contract=off"]
    link = ["-shared"]
    if build.sanitizer is None:
        flags += _HOOKS
    else:
        flags.append(f"-fsanitize={build.sanitizer}")
        link.append(f"-fsanitize={build.sanitizer}")
    include = [folder / "include", build.root, build.source.parent]
    digest = _digest([text, *flags, *link, KERNELS], [build.source], include)

    def compile_to(target: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            unit, made = Path(scratch) / "kernel.cpp", Path(scratch) / "kernel.o"
            unit.write_text(text + f'#include "{build.source}"\n' + _ENTRY)
            places = [f"-ffile-prefix-map={build.root}={KERNELS}", *(f"-I{place}" for place in include)]
            _compile([*flags, *places, "-c", str(unit), "-o", str(made)], str(build.source.name))
            _compile([str(made), "-o", str(target), *link], str(build.source.name))

    library = _cached(f"{build.source.parent.name}-{build.source.stem}-{digest}.so", compile_to)
    return library, _has_globals(library)


_ENTRY = """
extern "C" __attribute__((visibility("default"))) void emulator_kernel_main() { kernel_main(); }
"""


def _prelude(build: KernelBuild) -> str:
    processor = {"reader": "COMPILE_FOR_NCRISC", "writer": "COMPILE_FOR_BRISC", "compute": "COMPILE_FOR_TRISC"}
    lines = [
        f"#define ARCH_{'BLACKHOLE' if build.arch == 'blackhole' else 'WORMHOLE'}",
        f"#define {processor[build.role]}",
        f"#define KERNEL_COMPILE_TIME_ARGS {','.join(map(str, build.compile_args))}",
        f"#define EMULATOR_FP32_DEST {'true' if build.fp32_dest else 'false'}",
    ]
    if build.named:
        pairs = ", ".join(f'{{"{name}", {value}u}}' for name, value in build.named)
        lines.append(f"#define KERNEL_COMPILE_TIME_ARG_MAP {pairs}")
    if build.buffers:
        rows = ", ".join(f"{{{index}, DataFormat::{form}, {size}}}" for index, form, size in build.buffers)
        lines.append(f"#define EMULATOR_CB_FORMATS {rows}")
    lines += [f"#define {name} {value}" for name, value in build.defines]
    return "\n".join([*lines, '#include "emulator/common.h"', ""])


def _cached(name: str, build: Callable[[Path], object]) -> Path:
    cache = CacheFolder(cache_folder(), CACHE_VARIABLE)
    found = cache.find(name)
    if found is not None:
        return found
    with cache.lock(name):
        found = cache.find(name)
        if found is None:
            made = _scratch() / name
            if not made.exists():
                with whole_file(made) as part:
                    build(part)
            found = cache.keep(name, lambda part: shutil.copy(made, part))
            if found is None:
                return made
            made.unlink()
    return found


@functools.cache
def _scratch() -> Path:
    """A folder for builds of this process, removed when it ends."""
    made = tempfile.mkdtemp(prefix="ttnn-moe-builds-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def _compile(arguments: Sequence[str], what: str) -> None:
    done = subprocess.run([compiler(), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(f"{what} does not compile for the emulator", got=done.stderr[-6000:])


def _digest(words: Sequence[str], files: Sequence[Path], include: Sequence[Path]) -> str:
    """Of the words and of every file that is compiled. It is taken again when a file has another size or time."""
    key = (tuple(words), tuple(files), tuple(include))
    known = _digests.get(key)
    if known is not None and all(_stamp(path) == stamp for path, stamp in known[0].items()):
        return known[1]
    hasher = hashlib.sha256()
    for word in (*words, _version(), _processor()):
        hasher.update(word.encode() + b"\0")
    stamps = {}
    for path in _closure(files, include):
        stamps[path] = _stamp(path)
        hasher.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    _digests[key] = stamps, hasher.hexdigest()[:24]
    return _digests[key][1]


_Stamp = tuple[int, int]
_digests: dict[tuple[tuple[str, ...], tuple[Path, ...], tuple[Path, ...]], tuple[dict[Path, _Stamp | None], str]] = {}


def _stamp(path: Path) -> _Stamp | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _closure(files: Sequence[Path], include: Sequence[Path]) -> list[Path]:
    """The files and all that they include with quotes, from the folders or beside the includer."""
    todo, seen = list(files), dict[Path, None]()
    # Headers that the wrapper around a kernel includes.
    todo += [place / "emulator" / "common.h" for place in include if (place / "emulator" / "common.h").exists()]
    while todo:
        path = todo.pop().resolve()
        if path in seen:
            continue
        if not path.exists():
            raise CompileError("a kernel's source is missing", got=str(path))
        seen[path] = None
        for name in _INCLUDE.findall(path.read_bytes()):
            for place in (path.parent, *include):
                found = place / os.fsdecode(name)
                if found.exists():
                    todo.append(found)
                    break
    return sorted(seen)


@functools.cache
def _version() -> str:
    done = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=False)
    return done.stdout


@functools.cache
def _processor() -> str:
    """The processor, for which -march=native compiles."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    return next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")


@functools.cache
def _has_globals(library: Path) -> bool:
    """Whether a kernel has writable variables at file scope. On the device each core has its own copy."""
    tool = shutil.which("nm")
    if tool is None:
        return True
    done = subprocess.run([tool, "--defined-only", str(library)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return True
    runtime = (
        "completed.0",
        "__bss_start",
        "_edata",
        "_end",
        "__TMC_END__",
        "__dso_handle",
        "_DYNAMIC",
        "_GLOBAL_OFFSET",
    )
    for line in done.stdout.splitlines():
        parts = line.split()
        if (
            len(parts) == 3
            and parts[1] in "bBdD"
            and not parts[2].startswith(runtime)
            and "__frame_dummy" not in parts[2]
        ):
            if "_array_entry" not in parts[2]:
                return True
    return False


def _jobs() -> int:
    return max(1, min(8, os.cpu_count() or 1))
