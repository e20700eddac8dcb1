"""From a spec to code: what its key covers, sources that change, and what is missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttnn_moe.cuda.jit import build
from ttnn_moe.cuda.jit.build import CompileError
from ttnn_moe.cuda.jit.spec import Spec
from ttnn_moe.cuda.jit.store import Store
from ttnn_moe.errors import BackendUnavailable


def test_the_key_covers_the_options_but_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that compiles the same sources with other options finds no code of the release before."""
    monkeypatch.setattr(build, "compiler", lambda: "nvrtc 13.4")
    spec, options = Spec.of("common/combine", "sm_90a", TOP_K=8), build.options

    def key_with(**change: object) -> str:
        monkeypatch.setattr(build, "options", lambda spec: options(spec) | change)
        return build.key_of(spec)

    assert key_with() == key_with(include_path=["/elsewhere"])
    assert len({key_with(), key_with(std="c++20"), key_with(use_fast_math=True)}) == 3


@pytest.mark.parametrize("compiles", [True, False])
def test_sources_that_change_while_a_process_runs(
    compiles: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An update of the package, or an edit: code of the new sources is neither run nor kept under the old key."""

    def compile_spec(spec: Spec) -> bytes:
        if compiles:
            return b"code of the new sources"
        raise CompileError("the new source does not fit")

    monkeypatch.setattr(build, "compiler", lambda: "nvrtc 13.4")
    monkeypatch.setattr(build, "compile_spec", compile_spec)
    monkeypatch.setattr(build, "digest_now", lambda: "of the new sources")
    store = Store(tmp_path, 1 << 20)
    with pytest.raises(BackendUnavailable, match="changed since this process began.*start the process again"):
        build.code_of(Spec.of("common/combine", "sm_90a", TOP_K=8), store)
    assert store.entries() == []


def test_code_is_kept_in_the_store_that_is_given_or_in_the_users(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled: list[Spec] = []
    monkeypatch.setattr(build, "compiler", lambda: "nvrtc 13.4")
    monkeypatch.setattr(build, "compile_spec", lambda spec: compiled.append(spec) or b"code")
    given, users = (Store(tmp_path / name, 1 << 20) for name in ("given", "users"))
    monkeypatch.setattr(build, "Store", lambda: users)
    for store, kept in ((given, (1, 0)), (given, (1, 0)), (None, (1, 1)), (None, (1, 1))):
        assert build.code_of(Spec.of("common/combine", "sm_90a", TOP_K=8), store) == b"code"
        assert (len(given.entries()), len(users.entries())) == kept and len(compiled) == sum(kept)


@pytest.mark.parametrize("missing", ["cuda", "cuda.core", "cuda.bindings"])
def test_why_nothing_is_compiled_without_a_package(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> object:
        if missing == "cuda":
            raise ModuleNotFoundError(name)
        return None if name == missing else ...

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(build, "compiler", lambda: "nvrtc 13.4")
    package = "cuda.core" if missing == "cuda" else missing
    assert str(build.why_not.__wrapped__()).startswith(f"{package} is not installed; to fix it: pip install")


def test_why_nothing_is_compiled_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiler() -> str:
        raise RuntimeError("no libnvrtc.so.13\n  in any folder")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ...)
    monkeypatch.setattr(build, "compiler", compiler)
    words = r"NVRTC cannot be loaded (no libnvrtc.so.13 in any folder); to fix it: pip install 'cuda-core[cu13]'"
    assert build.why_not.__wrapped__() == words


def test_a_compiler_that_does_not_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [(0, 13, 4), (5, 0, 0)]
    nvrtc = SimpleNamespace(nvrtcVersion=lambda: answers.pop(0))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(nvrtc=nvrtc))
    assert build.compiler.__wrapped__() == "nvrtc 13.4"
    with pytest.raises(BackendUnavailable, match="NVRTC does not answer; got 5.*pip install"):
        build.compiler.__wrapped__()


def test_what_the_compiler_is_asked_and_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for cuda.core: macros, folder and format; code as bytes or text; its words, without their end."""
    asked: list[tuple[dict[str, Any], str]] = []
    codes: list[bytes | str | Exception] = [b"\x7fELF", ".version 9", RuntimeError("line 7: nonsense\n\0\n")]

    class Program:
        def __init__(self, source: str, language: str, options: dict[str, Any]):
            assert language == "c++" and 'extern "C"' in source
            self.options = options

        def compile(self, format: str) -> object:
            asked.append((self.options, format))
            code = codes.pop(0)
            if isinstance(code, Exception):
                raise code
            return SimpleNamespace(code=code)

    monkeypatch.setattr(build, "cuda_core", lambda: SimpleNamespace(Program=Program, ProgramOptions=dict))
    assert build.compile_spec(Spec.of("common/combine", "sm_90a", TOP_K=8, ADD=True)) == b"\x7fELF"
    assert build.compile_spec(Spec.of("common/combine", "compute_80")) == b".version 9"
    with pytest.raises(CompileError, match="cannot compile common/combine for sm_80; got line 7: nonsense;") as error:
        build.compile_spec(Spec.of("common/combine", "sm_80"))
    assert isinstance(error.value.__cause__, RuntimeError)
    (first, cubin), (second, ptx), _ = asked
    assert first["define_macro"] == [("ADD", "1"), ("TOP_K", "8")] and second["define_macro"] is None
    assert (first["arch"], cubin, second["arch"], ptx) == ("sm_90a", "cubin", "compute_80", "ptx")
    (folder,) = first["include_path"]
    assert (Path(folder) / "common" / "combine.cu").is_file() and first["name"] == "common/combine.cu"


def test_threads_that_compile_first_at_the_same_time() -> None:
    """cuda.core, imported by several threads at once, is found half made by some."""
    code = """
import threading
from ttnn_moe.cuda.jit import build
start, kinds = threading.Barrier(8), []
def run():
    start.wait()
    kinds.append(build.cuda_core().Program)
threads = [threading.Thread(target=run) for _ in range(8)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
assert len(kinds) == 8
"""
    pytest.importorskip("cuda.core")
    for _ in range(3):
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
