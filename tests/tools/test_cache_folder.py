"""Cache folders in trouble: full, read-only, cleared meanwhile, locked, of another user; what killed writers leave."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import pytest

from paths import python_path
from ttnn_moe import cache_folder
from ttnn_moe.cache_folder import LOCK, CacheFolder, CacheWarning, cache_path
from ttnn_moe.cuda.jit.store import Store
from ttnn_moe.errors import ContractError
from ttnn_moe.tenstorrent import files
from ttnn_moe.tenstorrent.emulator import build


@contextmanager
def told(*words: str) -> Iterator[None]:
    """Exactly one warning for each word, in order, and nothing else."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    texts = [str(one.message) for one in found if issubclass(one.category, CacheWarning)]
    assert len(texts) == len(words), texts
    for text, word in zip(texts, words, strict=True):
        assert word in text and "\n" not in text


@pytest.fixture(autouse=True)
def _told_nothing_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "_warned", set())


def make_kernel(where: Path) -> None:
    """Each maker asks the cache at `where` for two new things, and checks what it gets."""
    store = Store(where, 1 << 20)
    assert store.get("one", lambda: b"code") == b"code" and store.get("two", lambda: b"2") == b"2"


def make_build(where: Path) -> None:
    os.environ[build.CACHE_VARIABLE] = str(where)
    try:
        for name in ("one", "two"):
            assert build._cached(name, lambda part, name=name: part.write_text(name)).read_text() == name
    finally:
        del os.environ[build.CACHE_VARIABLE]
        for path in build._scratch().iterdir():
            path.unlink()


class Ttnn:
    """Tensors are strings. A file that holds "damaged" cannot be read."""

    DRAM_MEMORY_CONFIG = None

    def load_tensor(self, path: str, device: object) -> str:
        text = Path(path).read_text()
        if text == "damaged":
            raise RuntimeError("TT_THROW: no tensor")
        return text

    def dump_tensor(self, path: str, host: str) -> None:
        try:
            Path(path).write_text(host)
        except OSError as error:
            raise RuntimeError("TT_THROW: cannot write") from error

    def to_device(self, host: str, device: object, memory_config: object) -> str:
        return host


class Device:
    handle, emulated = None, False


def make_weights(where: Path) -> None:
    for name in ("one", "two"):
        assert files.kept(where / f"{name}.tensorbin", lambda name=name: name, Device()) == name  # type: ignore[arg-type]


MAKERS = {"kernels": make_kernel, "builds": make_build, "weights": make_weights}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "library", Ttnn)
    return MAKERS[request.param]


def entries(where: Path) -> list[Path]:
    return sorted(path for path in where.iterdir() if not path.name.startswith("."))


def test_folders_and_entries_are_for_their_user_alone(tmp_path: Path, make) -> None:
    before = os.umask(0)
    try:
        with told():
            make(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "a", tmp_path / "a" / "b")} == {0o700}
    found = entries(tmp_path / "a" / "b")
    assert len(found) == 2 and {path.stat().st_mode & 0o077 for path in found} == {0}, "no lock, no part remains"
    with told():
        make(tmp_path / "a" / "b")
    assert entries(tmp_path / "a" / "b") == found


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EDQUOT, errno.EIO, errno.ENOLCK])
@pytest.mark.parametrize("what", ["mkdir", "open", "replace", "unlink"])
def test_trouble_of_the_disk_costs_one_warning(
    tmp_path: Path, make, what: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root ignores modes, so the calls themselves fail, wherever they would change something in the folder."""
    where, real = tmp_path / "cache", getattr(os, what)
    if what != "mkdir":
        where.mkdir(0o700)
    if what == "unlink":
        make(where)
        for path in entries(where):
            path.chmod(0o666)

    def fail(path, *arguments, **options):
        changes = what != "open" or arguments[0] & (os.O_WRONLY | os.O_RDWR)
        if changes and str(where) in os.fspath(path):
            raise OSError(code, os.strerror(code), os.fspath(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, what, fail)
    known = getattr(pathlib, "_NormalAccessor", None)  # of Python 3.10, whose paths call what this holds
    if what != "open" and known is not None:
        monkeypatch.setattr(known, what, staticmethod(fail))
    if what == "unlink":
        with told("can write", os.strerror(code)):
            make(where)
    else:
        with told(os.strerror(code)):
            make(where)


def test_a_full_disk(tmp_path: Path, make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file can be made, and its bytes cannot be written."""

    def full_here(name: str, of: object, target: int) -> None:
        real = getattr(of, name)

        def write(*given: object) -> object:
            if tmp_path in Path(str(given[target])).parents:
                raise OSError(errno.ENOSPC, "no room")
            return real(*given)

        monkeypatch.setattr(of, name, write)

    full_here("write_text", Path, 0)
    full_here("write_bytes", Path, 0)
    full_here("copy", shutil, 1)
    with told("made again by every process"):
        make(tmp_path / "cache")
    assert entries(tmp_path / "cache") == [] and not list((tmp_path / "cache").glob(".*.part*"))


@pytest.mark.parametrize("in_the_way", ["file", "fifo", "folder", "link"])
def test_something_else_in_the_place_of_an_entry(tmp_path: Path, in_the_way: str) -> None:
    path = tmp_path / "one.bin"
    {
        "file": lambda: path.write_text("x"),
        "fifo": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "link": lambda: path.symlink_to("nowhere"),
    }[in_the_way]()
    with told(*(["made again by every process"] if in_the_way == "folder" else [])):
        make_kernel(tmp_path)
        make_kernel(tmp_path)
    assert path.is_dir() == (in_the_way == "folder") and not path.is_symlink() and (tmp_path / "two.bin").is_file()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user, which root may")
@pytest.mark.parametrize("whose", ["folder", "entry"])
def test_what_belongs_to_somebody_else_is_refused(tmp_path: Path, make, whose: str) -> None:
    make(tmp_path)
    planted = {path: path.read_bytes() for path in entries(tmp_path)}
    for path in planted:
        path.write_bytes(b"planted")
    for path in planted if whose == "entry" else [tmp_path]:
        os.chown(path, 12345, -1)
    with told("of user 12345"):
        make(tmp_path)
    assert {path.read_bytes() for path in planted} == ({b"planted"} if whose == "folder" else set(planted.values())), (
        "an entry is made again; a folder is left alone"
    )


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
@pytest.mark.parametrize("whose", ["folder", "entry"])
def test_what_others_can_write_is_refused(tmp_path: Path, make, whose: str, mode: int) -> None:
    make(tmp_path)
    for path in entries(tmp_path) if whose == "entry" else [tmp_path]:
        path.chmod(mode)
    with told("chmod 700" if whose == "folder" else "remove it"):
        make(tmp_path)
    if whose == "folder":
        tmp_path.chmod(0o700)
    with told():
        make(tmp_path)


def test_a_cache_that_is_cleared_meanwhile(tmp_path: Path, make) -> None:
    """By others, as fast as they can."""
    stop = threading.Event()

    def clear() -> None:
        while not stop.is_set():
            for path in (tmp_path / "cache").glob("*"):
                path.unlink(missing_ok=True)

    other = threading.Thread(target=clear)
    other.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CacheWarning)
            for _ in range(20):
                make_kernel(tmp_path / "cache") if make is make_build else make(tmp_path / "cache")
    finally:
        stop.set()
        other.join()


def test_damaged_weights_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "library", Ttnn)
    make_weights(tmp_path)
    (tmp_path / "one.tensorbin").write_text("damaged")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        make_weights(tmp_path)
    assert "made again" in str(found[0].message)
    with told():
        make_weights(tmp_path)


def test_a_held_lock_is_waited_for_with_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "WORD_S", 0.1)
    held = filelock.FileLock(tmp_path / f"one{LOCK}", thread_local=False)
    held.acquire()
    warn = cache_folder.CacheFolder._warn

    def freed(self: CacheFolder, *args: str, **parts: str) -> None:
        warn(self, *args, **parts)
        held.release()

    monkeypatch.setattr(cache_folder.CacheFolder, "_warn", freed)
    with told("another process makes one"):
        make_kernel(tmp_path)


def test_a_lock_that_is_held_for_ever_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "WORD_S", 0.1)
    monkeypatch.setattr(cache_folder, "PATIENCE_S", 0.1)
    with filelock.FileLock(tmp_path / f"one{LOCK}"), told("waits for it", "waits no longer"):
        make_kernel(tmp_path)
    assert len(entries(tmp_path)) == 3, "the lock of the other is left alone"


WRITER = """
import sys, time
from pathlib import Path
from ttnn_moe.whole_file import whole_file
with whole_file(Path(sys.argv[1])) as part:
    part.write_text("half")
    print("half", flush=True)
    time.sleep(60)
"""


def test_what_killed_writers_left_is_counted_and_removed(tmp_path: Path) -> None:
    cache, writers = CacheFolder(tmp_path), []
    for number in range(2):
        command = [sys.executable, "-c", WRITER, str(tmp_path / f"{number}.bin")]
        environment = {**os.environ, "PYTHONPATH": python_path()}
        writers.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=environment))
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == b"half\n"
    assert cache.unfinished() == [], "both are written"
    writers[0].send_signal(signal.SIGKILL)
    writers[0].wait()
    assert len(cache.unfinished()) == 1 and cache.unfinished()[0][1].st_size == 4
    cache.keep("another", lambda part: part.write_text(""))
    assert cache.unfinished() == [] and len(list(tmp_path.glob(".*.part"))) == 1
    writers[1].kill()
    writers[1].wait()
    cache.sweep()
    assert [path.name for path in tmp_path.iterdir()] == ["another"]


def test_what_killed_writers_left_goes_by_age_where_there_are_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", none)
    for name, age in (("new", 0), ("old", 100_000)):
        path = tmp_path / f".{name}.{'0' * 16}.part"
        path.touch()
        os.utime(path, (time.time() - age,) * 2)
    assert [path.name.split(".")[1] for path, _ in CacheFolder(tmp_path).unfinished()] == ["old"]


def test_without_home_and_without_an_entry_in_passwd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import pwd
    import tempfile

    def nobody(uid: int) -> object:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "TTNN_MOE_CACHE_DIR", build.CACHE_VARIABLE, files.CACHE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(pwd, "getpwnam", nobody)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = cache_path("kernels")
    assert place == tmp_path / f"ttnn-moe-{os.geteuid()}-kernels", "no folder between, which others may have made"
    with told():
        make_kernel(place)
    assert place.stat().st_mode & 0o777 == 0o700
    for named in ("~/cache", "~nobody/cache"):
        monkeypatch.setenv("TTNN_MOE_CACHE_DIR", named)
        with pytest.raises(ContractError, match="no such home"):
            cache_path("kernels")


def test_one_setting_moves_every_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TTNN_MOE_CACHE_DIR", str(tmp_path / "all"))
    for name in (build.CACHE_VARIABLE, files.CACHE):
        monkeypatch.delenv(name, raising=False)
    assert build.cache_folder() == tmp_path / "all" / "emulator"
    assert files.folder(Device()) == tmp_path / "all" / "tenstorrent"  # type: ignore[arg-type]
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "own"))
    assert build.cache_folder() == tmp_path / "own"


def test_neither_locks_nor_folders_are_entries(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("old.lock", ".hidden"):
        (tmp_path / name).touch()
    with cache.lock("one"):
        assert cache.entries() == []
        cache.keep("one", lambda part: part.touch())
        assert [path.name for path, _ in cache.entries()] == ["one"]


def test_an_entry_that_cannot_be_looked_at_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("one")
    with told("made again by every process"):
        assert [CacheFolder(tmp_path).find("one") for _ in range(2)] == [None, None]


def test_a_folder_that_another_process_makes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with told():
        kept = CacheFolder(tmp_path).keep("one", lambda part: part.write_text("1"))
    assert kept == tmp_path / "one" and kept.read_text() == "1"


def test_nothing_is_made_or_removed_in_a_folder_that_is_not_trusted(tmp_path: Path) -> None:
    found = {"one", f".one.{'0' * 16}.part", f"two{LOCK}"}
    for name in found:
        (tmp_path / name).touch()
    tmp_path.chmod(0o777)
    cache = CacheFolder(tmp_path)
    with told("chmod 700"), cache.lock("three"):
        assert cache.keep("one", lambda part: pytest.fail("it is written")) is None
        assert {path.name for path in tmp_path.iterdir()} == found


def test_a_lock_is_removed_before_it_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise whoever waits could get it, and lose its file to the one before: two would make the entry."""
    lock, release, there = tmp_path / f"one{LOCK}", filelock.FileLock.release, list[bool]()

    def released(self: filelock.FileLock, *args: object, **options: object) -> None:
        there.append(lock.exists())
        release(self, *args, **options)

    monkeypatch.setattr(filelock.FileLock, "release", released)
    with pytest.raises(KeyError), CacheFolder(tmp_path).lock("one"):
        assert lock.exists()
        raise KeyError
    assert there and not any(there) and list(tmp_path.iterdir()) == []
