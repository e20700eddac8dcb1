"""Files that appear whole or not at all; pipes, devices and links stay what they are."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paths import python_path
from ttnn_moe.errors import RequestError
from ttnn_moe.whole_file import check_place, whole_file


def test_it_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with whole_file(path) as part:
        part.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), whole_file(path, ".bin") as part:
        assert part.suffix == ".bin" and part.parent == tmp_path
        part.write_bytes(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), whole_file(tmp_path / "none" / "a"):
        pass


def test_a_place_is_tried_and_stays_what_it_is(tmp_path: Path) -> None:
    """Nobody reads the pipe: to open it would wait."""
    (tmp_path / "old").write_text("old")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "old", tmp_path / "new", tmp_path / "pipe", Path("/dev/null"), Path("/dev/stdout")):
        check_place(path, "--json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "pipe"]
    assert (tmp_path / "old").read_text() == "old"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("none/a", "got no folder .*none; expected a file, .*: make the folder, or give another --json"),
        (".", "Is a directory"),
        ("file/a", "Not a directory"),
        ("a" * 300, "File name too long"),
        ("/proc/a", "got No such file or directory.*: give another --json"),
        ("socket", "a block device or a socket"),
    ],
)
def test_a_place_that_cannot_be_written(
    place: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    Path("file").write_text("")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        with pytest.raises(RequestError, match=f"cannot be written; .*{words}"):
            check_place(Path(place), "--json")


def test_devices_and_links_stay_what_they_are(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o600)
    link.symlink_to("real.json")
    for path in (link, Path("/dev/null"), tmp_path / "new.json"):
        before = path.lstat().st_mode if path.exists() else None
        with whole_file(path) as part:
            part.write_text("new")
        assert before in (None, path.lstat().st_mode)
    assert real.read_text() == link.read_text() == "new" and real.stat().st_mode & 0o777 == 0o600
    dangling = tmp_path / "dangling"
    dangling.symlink_to("made.json")
    with whole_file(dangling) as part:
        part.write_text("new")
    assert dangling.is_symlink() and (tmp_path / "made.json").read_text() == "new"


def test_a_fifo_gets_everything_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reader = subprocess.Popen(["cat", path], stdout=subprocess.PIPE)
    with pytest.raises(ValueError, match="stop"), whole_file(path) as part:
        part.write_text("half")
        raise ValueError("stop")
    with whole_file(path) as part:
        part.write_text("all")
    assert reader.communicate(timeout=30)[0] == b"all" and path.is_fifo()


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
def test_an_open_descriptor_gets_the_bytes_in_order(name: str, tmp_path: Path) -> None:
    """Also where it is a regular file, which a replacement would take away from under it."""
    (tmp_path / "link").symlink_to("/dev/stdout")
    code = "import os, sys, pathlib; from ttnn_moe.whole_file import whole_file\n"
    code += "os.write(1, b'before ')\nwith whole_file(pathlib.Path(sys.argv[1])) as part: part.write_text('json ')\n"
    code += "os.write(1, b'after')"
    out = tmp_path / "out"
    with out.open("w") as file:
        environment = {**os.environ, "PYTHONPATH": python_path()}
        command = [sys.executable, "-c", code, name]
        subprocess.run(command, stdout=file, cwd=tmp_path, env=environment, check=True, timeout=60)
    assert out.read_text() == "before json after"


def test_folders_and_block_devices_are_no_files(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(IsADirectoryError), whole_file(tmp_path):
        pass
    device = tmp_path / "disk"
    try:
        os.mknod(device, 0o600 | 0o060000, os.makedev(7, 250))
    except PermissionError:
        pytest.skip("makes a device node, which this user may not")
    with pytest.raises(OSError, match="block device"), whole_file(device) as part:
        part.write_text("x")


def test_a_link_planted_at_the_name_of_the_unfinished_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precious, path = tmp_path / "precious", tmp_path / "a"
    precious.write_text("kept")
    monkeypatch.setattr("secrets.token_hex", lambda n: "0" * 2 * n)
    (tmp_path / f".a.{'0' * 16}.part").symlink_to(precious)
    with pytest.raises(FileExistsError), whole_file(path) as part:
        part.write_text("other")
    assert precious.read_text() == "kept" and not path.exists()
