"""Files that appear whole or not at all; pipes, devices and links stay what they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paths import python_path
from ttnn_moe.whole_file import whole_file


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
