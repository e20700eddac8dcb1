"""SFPI, the compiler of Tensix kernels, for the installed ttnn: python -m ttnn_moe.tenstorrent.sfpi

ttnn's wheel does not hold the compiler: tt_metal/sfpi-version names the release and its SHA-256. ttnn.download_sfpi of
0.81.1 looks for a file that the wheel lacks.
"""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import shutil
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

from ..errors import BackendUnavailable

COMPILER = Path("compiler") / "bin" / "riscv-tt-elf-g++"
# the vendor's package installs here; ttnn looks here first
SYSTEM = Path("/opt/tenstorrent/sfpi")
MANUAL = f"install Tenstorrent's sfpi package, which unpacks to {SYSTEM}"


def folder(ttnn: Path) -> Path:
    """The folder of the compiler for an installed ttnn: the system's if it is there, else inside ttnn."""
    return SYSTEM if (SYSTEM / COMPILER).exists() else ttnn / "runtime" / "sfpi"


def release(ttnn: Path, machine: str | None = None) -> tuple[str, str]:
    """(URL, SHA-256) of the archive that ttnn names.

    Raises:
        BackendUnavailable: ttnn names none for this machine.
    """
    path = ttnn / "tt_metal" / "sfpi-version"
    named = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        key, equals, value = line.partition("=")
        if equals:
            named[key.strip()] = value.strip().strip("'\"")
    machine = machine or platform.machine()
    version, digest = named.get("sfpi_version"), named.get(f"sfpi_{machine}_debian_txz_hash")
    if not version or not digest or named.get("sfpi_hashtype") != "sha256":
        raise BackendUnavailable(
            f"ttnn names no SFPI release for {machine}", got=f"{path}: {named or 'absent'}", remedy=MANUAL
        )
    file = f"sfpi_{version}_{machine}_debian.txz"
    return f"{named['sfpi_repo']}/releases/download/{version}/{file}", digest


def install(ttnn: Path) -> Path:
    """Download, verify and unpack the compiler, unless it is there. Returns its folder.

    Raises:
        BackendUnavailable: no release for this machine, no connection, or another file than ttnn expects.
    """
    there = folder(ttnn)
    if (there / COMPILER).exists():
        return there
    url, digest = release(ttnn)
    there.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=there.parent) as scratch:
        archive = Path(scratch) / "sfpi.txz"
        try:
            with urllib.request.urlopen(url) as source, archive.open("wb") as kept:
                shutil.copyfileobj(source, kept)
        except OSError as error:
            raise BackendUnavailable(f"SFPI could not be downloaded from {url}", got=error, remedy=MANUAL) from None
        got = hashlib.sha256(archive.read_bytes()).hexdigest()
        if got != digest:
            raise BackendUnavailable(f"{url} is not the file that ttnn expects", got=got, expected=digest)
        unpacked = Path(scratch) / "unpacked"
        with tarfile.open(archive) as tar:
            tar.extractall(unpacked, filter="data")
        found = next(iter(sorted(unpacked.rglob(str(COMPILER)))), None)
        if found is None:
            raise BackendUnavailable(f"{url} holds no compiler", expected=str(COMPILER))
        found.parents[2].replace(there)
    return there


def main() -> int:
    spec = importlib.util.find_spec("ttnn")
    if spec is None or spec.origin is None:
        print("ttnn is not installed", file=sys.stderr)
        return 1
    try:
        print(install(Path(spec.origin).parent))
    except BackendUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
