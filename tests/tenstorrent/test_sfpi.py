"""The fetch of SFPI: verified, and every failure of files, servers and archives is one error with a remedy."""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import platform
import socket
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from ttnn_moe import BackendUnavailable
from ttnn_moe.tenstorrent import device, sfpi


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a ttnn without the compiler."""
    monkeypatch.setattr(sfpi, "SYSTEM", tmp_path / "opt")
    (tmp_path / "ttnn").mkdir()
    return tmp_path / "ttnn"


def _compiler(root: Path) -> Path:
    return root / "runtime" / "sfpi" / sfpi.COMPILER


def _release(ttnn: Path, source: Path, digest: str) -> None:
    """ttnn's note of the SFPI release that it wants."""
    note = ttnn / "tt_metal" / "sfpi-version"
    note.parent.mkdir(parents=True)
    note.write_text(
        f"# sfpi release 1.2.3\nsfpi_repo='{source.as_uri()}'\nsfpi_version='1.2.3'\nsfpi_hashtype='sha256'\n"
        f"sfpi_{platform.machine()}_debian_txz_hash='{digest}'\n"
    )


def test_the_compiler_is_fetched_and_verified(installed: Path, tmp_path: Path) -> None:
    """From a folder that stands for the vendor's releases."""
    held = tmp_path / "releases" / "download" / "1.2.3"
    held.mkdir(parents=True)
    archive = held / f"sfpi_1.2.3_{platform.machine()}_debian.txz"
    made = tmp_path / "made" / "sfpi" / sfpi.COMPILER
    made.parent.mkdir(parents=True)
    made.write_text("a compiler")
    with tarfile.open(archive, "w:xz") as tar:
        tar.add(tmp_path / "made" / "sfpi", "sfpi")
    _release(installed, tmp_path, hashlib.sha256(archive.read_bytes()).hexdigest())
    assert sfpi.install(installed) == installed / "runtime" / "sfpi"
    assert _compiler(installed).read_text() == "a compiler"
    assert [path.name for path in (installed / "runtime").iterdir()] == ["sfpi"]
    archive.unlink()
    assert sfpi.install(installed) == installed / "runtime" / "sfpi"  # there already


def test_the_probe_looks_where_the_compiler_is_installed(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Below TT_METAL_HOME where that is set, else in ttnn's folder."""
    (installed / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    home = tmp_path / "tt-metal"
    for variable, root in (("", installed), (str(home), home)):
        monkeypatch.setenv("TT_METAL_HOME", variable)
        assert sfpi.root() == root and device._compiler() == _compiler(root)
        _compiler(root).parent.mkdir(parents=True)
        _compiler(root).write_text("a compiler")
        assert sfpi.main() == 0 and capsys.readouterr().out.strip() == str(root / "runtime" / "sfpi")


def test_the_command_prints_no_warning(tmp_path: Path) -> None:
    """runpy warns of a module that its package has imported already."""
    (tmp_path / "ttnn.py").write_text("")
    root = str(Path(sfpi.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "ttnn_moe.tenstorrent.sfpi"],
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{tmp_path}", "TT_METAL_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and done.stderr.startswith("ttnn names no SFPI release"), done.stderr


def test_another_file_than_ttnn_expects_is_refused(installed: Path, tmp_path: Path) -> None:
    held = tmp_path / "releases" / "download" / "1.2.3"
    held.mkdir(parents=True)
    _release(installed, tmp_path, "0" * 64)
    with pytest.raises(BackendUnavailable, match="could not be downloaded"):
        sfpi.install(installed)
    (held / f"sfpi_1.2.3_{platform.machine()}_debian.txz").write_bytes(b"something else")
    with pytest.raises(BackendUnavailable, match="not the file that ttnn expects"):
        sfpi.install(installed)
    assert not _compiler(installed).exists()
    with pytest.raises(BackendUnavailable, match="no SFPI release for sparc"):
        sfpi.release(installed, "sparc")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


TAR = io.BytesIO()
with tarfile.open(fileobj=TAR, mode="w:xz") as _tar:
    _tar.addfile(tarfile.TarInfo("../outside"))
ARCHIVES = {
    "empty": b"",
    "no xz": b"something else",
    "half xz": lzma.compress(bytes(5000))[:40],
    "no tar": lzma.compress(bytes(range(256))),
    "leads outside": TAR.getvalue(),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_that_cannot_be_unpacked(name: str, installed: Path, tmp_path: Path) -> None:
    archive = tmp_path / "releases" / "download" / "1.2.3" / f"sfpi_1.2.3_{platform.machine()}_debian.txz"
    archive.parent.mkdir(parents=True)
    archive.write_bytes(ARCHIVES[name])
    _release(installed, tmp_path, _sha256(ARCHIVES[name]))
    with pytest.raises(
        BackendUnavailable, match="(cannot be unpacked|holds no compiler).*install Tenstorrent's sfpi package"
    ):
        sfpi.install(installed)
    assert list((installed / "runtime").iterdir()) == []


@pytest.mark.parametrize("missing", ["sfpi_repo", "sfpi_version", "sfpi_hashtype", "_txz_hash"])
def test_a_note_that_lacks_a_line_names_no_release(missing: str, installed: Path, tmp_path: Path) -> None:
    _release(installed, tmp_path, "0" * 64)
    note = installed / "tt_metal" / "sfpi-version"
    note.write_text("".join(line for line in note.read_text().splitlines(True) if missing not in line))
    with pytest.raises(BackendUnavailable, match="names no SFPI release"):
        sfpi.install(installed)


@pytest.mark.parametrize("note", [b"\xff\xfe", None])
def test_a_note_that_cannot_be_read(note: bytes | None, installed: Path) -> None:
    path = installed / "tt_metal" / "sfpi-version"
    path.parent.mkdir()
    path.mkdir() if note is None else path.write_bytes(note)
    with pytest.raises(BackendUnavailable, match="sfpi-version cannot be read"):
        sfpi.install(installed)


def test_a_folder_that_cannot_be_written(installed: Path, tmp_path: Path) -> None:
    _release(installed, tmp_path, "0" * 64)
    (installed / "runtime").write_text("a file")
    with pytest.raises(BackendUnavailable, match="cannot be put into"):
        sfpi.install(installed)


ANSWERS = {
    "silent": b"",
    "cut off": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf",
    "no HTTP": b"hello\r\n\r\n",
    "absent": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_server_that_does_not_serve(
    answer: str, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sfpi, "SILENCE_S", 0.3 if answer == "silent" else 30)
    _release(installed, tmp_path, "0" * 64)
    note = installed / "tt_metal" / "sfpi-version"
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        note.write_text(note.read_text().replace(tmp_path.as_uri(), url))
        done = threading.Event()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(10_000)
                connection.sendall(ANSWERS[answer])
                if answer == "silent":
                    done.wait(10)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            words = "not the file that ttnn expects" if answer == "cut off" else "could not be downloaded"
            with pytest.raises(BackendUnavailable, match=f"{words}.*install Tenstorrent's sfpi package"):
                sfpi.install(installed)
        finally:
            done.set()
            thread.join()
