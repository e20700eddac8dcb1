"""The cache of compiled kernels: whole entries only, one build a key, bounded, and errors for people."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ttnn_moe.cache_folder import CacheWarning
from ttnn_moe.cuda.jit import build, pool
from ttnn_moe.cuda.jit.build import CompileError
from ttnn_moe.cuda.jit.spec import Spec
from ttnn_moe.cuda.jit.store import HEAD, Store, directory, limit
from ttnn_moe.errors import BackendUnavailable, ContractError


def _never() -> bytes:
    raise AssertionError("built again")


def test_what_was_built_is_read_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "new", 1 << 20)
    assert store.read("a") is None
    assert store.get("a", lambda: b"code") == b"code"
    assert store.get("a", _never) == b"code"
    assert [(entry.key, entry.size) for entry in store.entries()] == [("a", HEAD + 4)]


DAMAGE = {
    "short": lambda data: data[:-1],
    "no_code": lambda data: data[: HEAD - 3],
    "empty": lambda data: b"",
    "bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "long": lambda data: data + b"x",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
def test_a_damaged_entry_is_built_again(tmp_path: Path, damage) -> None:
    store = Store(tmp_path, 1 << 20)
    store.get("a", lambda: b"code")
    path = tmp_path / "a.bin"
    path.write_bytes(damage(path.read_bytes()))
    assert store.get("a", lambda: b"code again") == b"code again"
    assert store.get("a", _never) == b"code again"


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 20)

    def fail() -> bytes:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        store.get("a", fail)
    assert store.entries() == [] and not list(tmp_path.glob("*.part"))
    assert store.get("a", lambda: b"code") == b"code"


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    store = Store(tmp_path, 3 * (HEAD + 100))
    for i, key in enumerate("abc"):
        store.get(key, lambda: bytes(100))
        os.utime(tmp_path / f"{key}.bin", (1000 + i, 1000 + i))
    store.get("a", _never)  # used now: b is the oldest
    store.get("d", lambda: bytes(100))
    assert {entry.key for entry in store.entries()} == {"a", "c", "d"}
    store.get("big", lambda: bytes(10_000))
    assert {entry.key for entry in store.entries()} == {"big"}, "what was just built is kept"
    (tmp_path / f".killed.{'0' * 16}.part").write_text("half")
    assert store.clear() == 1 and not list(tmp_path.iterdir()), "nor what a killed writer left"


def _one_of_many(where: str, count: str, start: float) -> None:
    def build() -> bytes:
        with open(count, "a") as file:
            file.write("built\n")
        time.sleep(0.3)
        return b"code"

    time.sleep(max(0.0, start - time.time()))
    assert Store(Path(where), 1 << 20).get("key", build) == b"code"


def test_eight_processes_that_start_together_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # none imports torch again
    count = tmp_path / "count"
    start = time.time() + 0.5
    workers = [
        context.Process(target=_one_of_many, args=(str(tmp_path / "store"), str(count), start)) for _ in range(8)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 8
    assert count.read_text() == "built\n"


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "below", 1 << 20)
    with pytest.warns(CacheWarning, match="TTNN_MOE_CACHE_DIR") as told:
        assert store.get("a", lambda: b"code") == b"code"
        assert store.get("b", lambda: b"code") == b"code"
    assert len(told) == 1 and store.entries() == []


def test_where_and_how_much(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TTNN_MOE_CACHE_DIR", str(tmp_path))
    assert directory() == tmp_path / "kernels"
    monkeypatch.delenv("TTNN_MOE_CACHE_DIR")
    assert directory().parts[-2:] == ("ttnn-moe", "kernels")
    monkeypatch.delenv("TTNN_MOE_CACHE_MB", raising=False)
    assert limit() == 512 << 20, "as its page says"
    monkeypatch.setenv("TTNN_MOE_CACHE_MB", "")
    assert limit() == 512 << 20
    monkeypatch.setenv("TTNN_MOE_CACHE_MB", "3")
    assert limit() == 3 << 20
    for wrong in ("three", "²", "٣", "-1", "9" * 5000):
        monkeypatch.setenv("TTNN_MOE_CACHE_MB", wrong)
        with pytest.raises(ContractError, match="whole number of megabytes; to fix it: .* 512 is"):
            limit()


def test_the_key_covers_what_the_code_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from ttnn_moe.cuda.jit import spec as module

    one = Spec.of("common/combine", "sm_90a", TOP_K=8, ADD=True)
    assert one == Spec.of("common/combine", "sm_90a", ADD=1, TOP_K=8)
    others = [
        Spec.of("common/few_down", "sm_90a", TOP_K=8, ADD=True),
        Spec.of("common/combine", "sm_80", TOP_K=8, ADD=True),
        Spec.of("common/combine", "sm_90a", TOP_K=8, ADD=False),
        Spec.of("common/combine", "sm_90a", TOP_K=8),
    ]
    keys = {one.key("nvrtc 13.4", {}), one.key("nvrtc 13.5", {}), *(other.key("nvrtc 13.4", {}) for other in others)}
    monkeypatch.setattr(module, "sources_digest", lambda: "of other sources")
    keys.add(one.key("nvrtc 13.4", {}))
    assert len(keys) == 7


def test_the_digest_covers_sources_and_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ttnn_moe.cuda.jit import spec as module

    (tmp_path / "common").mkdir()
    for name in ("common/a.cu", "common/b.cuh"):
        (tmp_path / name).write_text("one")
    monkeypatch.setattr(module, "kernel_path", lambda *parts: tmp_path)
    found = {module.digest_now()}
    for name in ("common/a.cu", "common/b.cuh", "common/c.cuh"):
        (tmp_path / name).write_text("two")
        found.add(module.digest_now())
    (tmp_path / "common" / "c.cuh").rename(tmp_path / "common" / "d.cuh")
    assert len({*found, module.digest_now()}) == 5


SPECS = [Spec.of("common/combine", "sm_90a", TOP_K=k) for k in range(4)]


def test_kernels_are_compiled_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other: one after the other they would not end."""
    together = threading.Barrier(2, timeout=30)
    done: list[Spec] = []

    def build_one(spec: Spec, store: Store) -> bytes:
        together.wait()
        return store.get(str(spec), lambda: b"code")

    monkeypatch.setattr(pool.build, "code_of", build_one)
    pool.compile_all(SPECS[:2], Store(tmp_path, 1 << 20), done.append)
    assert sorted(map(str, done)) == sorted(map(str, SPECS[:2]))


def test_one_that_fails_stops_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(spec: Spec, store: Store) -> bytes:
        raise CompileError(f"no {spec}")

    monkeypatch.setattr(pool.build, "code_of", fail)
    with pytest.raises(CompileError, match="no common/combine"):
        pool.compile_all(SPECS, Store(tmp_path, 1 << 20))


def test_kernels_that_have_not_begun_are_left_out_after_one_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Spec] = []
    stopped = threading.Event()

    class OneThread(ThreadPoolExecutor):
        def __init__(self, **options: str):
            super().__init__(1, **options)

        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(False, cancel_futures=cancel_futures)
            stopped.set()
            super().shutdown(wait)

    def build_one(spec: Spec, store: Store) -> bytes:
        begun.append(spec)
        if len(begun) == 1:
            raise CompileError(f"no {spec}")
        stopped.wait(30)
        return b"code"

    monkeypatch.setattr(pool, "ThreadPoolExecutor", OneThread)
    monkeypatch.setattr(pool.build, "code_of", build_one)
    with pytest.raises(CompileError):
        pool.compile_all(SPECS, Store(tmp_path, 1 << 20))
    assert len(begun) <= 2, "the second may begin before the first one's error arrives"


def test_what_the_users_store_lacks_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTNN_MOE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(pool.build, "why_not", lambda: None)
    monkeypatch.setattr(pool.build, "compiler", lambda: "nvrtc")
    monkeypatch.setattr(pool.build, "code_of", lambda spec, store: store.get(build.key_of(spec), lambda: b"code"))
    assert [pool.compile_missing(SPECS[:n]) for n in (3, 4, 4)] == [3, 1, 0]
    assert len(Store(tmp_path / "kernels").entries()) == 4


def test_what_is_missing_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool.build, "why_not", lambda: None)
    monkeypatch.setattr(pool.build, "compiler", lambda: "nvrtc")
    store = Store(tmp_path, 1 << 20)
    store.get(build.key_of(SPECS[0]), lambda: b"code")
    assert pool.missing([*SPECS, *SPECS], store) == SPECS[1:]
    monkeypatch.setattr(pool.build, "why_not", lambda: "cuda.core is not installed")
    with pytest.raises(BackendUnavailable, match="cuda.core is not installed"):
        pool.missing(SPECS, store)
