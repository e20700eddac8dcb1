"""SFPI, the compiler of Tensix kernels, for the installed ttnn: python -m ttnn_moe.tenstorrent.sfpi

ttnn's wheel does not hold the compiler: tt_metal/sfpi-version names the release and its SHA-256. ttnn.download_sfpi of
0.81.1 looks for a file that the wheel lacks.
"""

from __future__ import annotations

import hashlib
import importlib.util
import lzma
import os
import platform
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

from ..errors import BackendUnavailable
from ..visible import said

COMPILER = Path("compiler") / "bin" / "riscv-tt-elf-g++"
# the vendor's package installs here; ttnn looks here first
SYSTEM = Path("/opt/tenstorrent/sfpi")
SILENCE_S, DOWNLOAD_S = 60.0, 1800.0
MANUAL = f"install Tenstorrent's sfpi package, which unpacks to {SYSTEM}"


def root() -> Path | None:
    """Where ttnn has its runtime: TT_METAL_HOME, else the folder of the installed ttnn; None: ttnn is not installed."""
    spec = importlib.util.find_spec("ttnn")
    if spec is None or spec.origin is None:
        return None
    return Path(os.environ.get("TT_METAL_HOME") or Path(spec.origin).parent)


def folder(root: Path) -> Path:
    """The folder of the compiler for a root of ttnn: the system's if it is there, else below the root."""
    return SYSTEM if (SYSTEM / COMPILER).exists() else root / "runtime" / "sfpi"


def release(root: Path, machine: str | None = None) -> tuple[str, str]:
    """(URL, SHA-256) of the archive that ttnn names.

    Raises:
        BackendUnavailable: ttnn names none for this machine.
    """
    path = root / "tt_metal" / "sfpi-version"
    named = {}
    with _told(f"{path} cannot be read"):
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            key, equals, value = line.partition("=")
            if equals:
                named[key.strip()] = value.strip().strip("'\"")
    machine = machine or platform.machine()
    digest = named.get(f"sfpi_{machine}_debian_txz_hash")
    version, repository = named.get("sfpi_version"), named.get("sfpi_repo")
    if not version or not repository or not digest or named.get("sfpi_hashtype") != "sha256":
        raise BackendUnavailable(
            f"ttnn names no SFPI release for {machine}", got=f"{path}: {named or 'absent'}", remedy=MANUAL
        )
    return f"{repository}/releases/download/{version}/sfpi_{version}_{machine}_debian.txz", digest


@contextmanager
def _told(what: str) -> Iterator[None]:
    """What files, connections and archives raise, as an error that says what to do."""
    try:
        yield
    except (OSError, ValueError, EOFError, HTTPException, tarfile.TarError, lzma.LZMAError) as error:
        got = " ".join(said(error).split())
        raise BackendUnavailable(what, got=got, remedy=MANUAL) from None


def _download(url: str, archive: Path) -> str:
    """Fetch a file; returns its SHA-256."""
    digest, deadline = hashlib.sha256(), time.monotonic() + DOWNLOAD_S
    with urllib.request.urlopen(url, timeout=SILENCE_S) as source, archive.open("wb") as kept:
        while data := source.read(1 << 20):
            digest.update(data)
            kept.write(data)
            if time.monotonic() > deadline:
                raise TimeoutError(f"not complete after {DOWNLOAD_S} s")
    return digest.hexdigest()


def install(root: Path) -> Path:
    """Download, verify and unpack the compiler, unless it is there. Returns its folder.

    Raises:
        BackendUnavailable: no release for this machine, no connection, another file than ttnn expects, an archive or a
            folder that cannot be used, a server that is silent for SILENCE_S or slower than DOWNLOAD_S.
    """
    there = folder(root)
    if (there / COMPILER).exists():
        return there
    url, digest = release(root)
    with _told(f"SFPI cannot be put into {there}"):
        there.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=there.parent) as scratch:
            archive, unpacked = Path(scratch) / "sfpi.txz", Path(scratch) / "unpacked"
            with _told(f"SFPI could not be downloaded from {url}"):
                got = _download(url, archive)
            if got != digest:
                raise BackendUnavailable(
                    f"{url} is not the file that ttnn expects", got=got, expected=digest, remedy=MANUAL
                )
            with _told(f"{url} cannot be unpacked"), tarfile.open(archive) as tar:
                tar.extractall(unpacked, filter="data")
            found = next(iter(sorted(unpacked.rglob(str(COMPILER)))), None)
            if found is None:
                raise BackendUnavailable(f"{url} holds no compiler", expected=str(COMPILER), remedy=MANUAL)
            found.parents[2].replace(there)
    return there


def main() -> int:
    """Install SFPI's compiler for the ttnn that is here. Returns the exit code."""
    here = root()
    if here is None:
        print("ttnn is not installed", file=sys.stderr)
        return 1
    try:
        print(install(here))
    except BackendUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
