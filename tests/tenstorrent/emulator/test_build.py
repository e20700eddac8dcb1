"""Builds of the emulator: what is built once, what is built again, and what is said when nothing can be."""

from __future__ import annotations

import shutil

import pytest
import torch
from programs import KERNELS, grid, unary

from ttnn_moe.errors import BackendUnavailable, ContractError
from ttnn_moe.tenstorrent.emulator import EmulatedChip, build, run


@pytest.fixture
def kernels(tmp_path):
    return shutil.copytree(KERNELS, tmp_path / "kernels")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of its own that begins with the engine that is there."""
    engine = build.engine()
    folder = tmp_path / "cache"
    folder.mkdir()
    shutil.copy2(engine, folder / engine.name)
    monkeypatch.setenv(build.CACHE_VARIABLE, str(folder))
    return folder


def emulate(root, **more):
    device = EmulatedChip()
    a, out = device.tensor(torch.ones(64, 32).bfloat16()), device.empty((64, 32), "bfloat16")
    return run(unary(2, grid(1), **more), device, {"a": a, "out": out}, root=root)


def libraries(cache):
    return {path.name: path.stat().st_mtime_ns for path in cache.glob("*.so")}


def test_a_kernel_is_built_once(kernels, cache):
    emulate(kernels)
    first = libraries(cache)
    assert len(first) == 3
    emulate(kernels)
    assert libraries(cache) == first


def test_a_change_of_an_included_file_builds_again(kernels, cache):
    (kernels / "size.hpp").write_text("#pragma once\n")
    reader = kernels / "read_tiles.cpp"
    reader.write_text('#include "size.hpp"\n' + reader.read_text())
    emulate(kernels)
    before = libraries(cache)
    (kernels / "size.hpp").write_text("#pragma once\n// changed\n")
    emulate(kernels)
    assert len(libraries(cache).keys() - before.keys()) == 1


def test_compile_time_settings_build_again(kernels, cache):
    emulate(kernels)
    before = libraries(cache)
    emulate(kernels, silu=True)
    assert len(libraries(cache).keys() - before.keys()) == 1


def test_a_broken_entry_is_never_seen(kernels, cache, monkeypatch):
    """The library appears whole or not at all: a build that fails leaves nothing."""
    (kernels / "unary.cpp").write_text("void kernel_main() { this is no C++; }\n")
    with pytest.raises(build.CompileError, match="unary.cpp does not compile"):
        emulate(kernels)
    assert not [name for name in libraries(cache) if "unary" in name]


def test_a_missing_source(kernels, cache):
    with pytest.raises(build.CompileError, match="source is missing"):
        emulate(kernels, reader="no_such.cpp")


def test_a_missing_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    build.compiler.cache_clear()
    try:
        with pytest.raises(BackendUnavailable, match=r"a C\+\+ compiler.*no-such-compiler.*g\+\+ 12.*or unset CXX"):
            build.compiler()
    finally:
        monkeypatch.undo()
        build.compiler.cache_clear()


def test_names_that_are_not_there():
    device = EmulatedChip()
    a = device.tensor(torch.ones(64, 32).bfloat16())
    with pytest.raises(ContractError, match="names a tensor that the call lacks.*out"):
        run(unary(2, grid(1)), device, {"a": a}, root=KERNELS)


def test_a_tensor_of_another_device():
    device, other = EmulatedChip(), EmulatedChip()
    a, out = device.tensor(torch.ones(64, 32).bfloat16()), other.empty((64, 32), "bfloat16")
    with pytest.raises(ContractError, match="tensor out is not on this device"):
        run(unary(2, grid(1)), device, {"a": a, "out": out}, root=KERNELS)


def test_memory_is_used_again():
    device = EmulatedChip()
    for _ in range(3):
        tensor = device.tensor(torch.ones(64, 64).bfloat16())
        address, storage = tensor.address, tensor.storage
        tensor.free()
    again = device.empty((64, 64), "bfloat16")
    assert (again.address, again.storage) == (address, storage)
