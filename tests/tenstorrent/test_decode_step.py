"""What a decode step of the model calls, counted on the emulator: operators as the trace region assumes, and what is
made on the host. And where traces are captured by default."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("ttnn_moe._planner", reason="native planner: not built", exc_type=ModuleNotFoundError)

from qwen3_checkpoints import TINY  # noqa: E402
from ttnn_calls import counted  # noqa: E402
from ttnn_moe import RequestError, tenstorrent  # noqa: E402
from ttnn_moe.models.qwen3 import Qwen3MoeConfig, tt  # noqa: E402
from ttnn_moe.models.qwen3.tt import decode  # noqa: E402
from ttnn_moe.models.qwen3.tt import model as models
from ttnn_moe.models.qwen3.tt.operators import operators, trace_bytes  # noqa: E402
from ttnn_moe.models.qwen3.tt.request import Options, check  # noqa: E402
from ttnn_moe.tenstorrent.device import SIMULATOR  # noqa: E402
from ttnn_moe.tenstorrent.emulator import library  # noqa: E402
from ttnn_moe.tenstorrent.runtime import DEVICE  # noqa: E402

SLOW = "TT_METAL_SLOW_DISPATCH_MODE"
PROMPT = 40


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(DEVICE, "emulator")
    if not tenstorrent.device.probe().available:
        pytest.skip(tenstorrent.device.probe().reason)
    tenstorrent.close_device()
    yield
    tenstorrent.close_device()


@pytest.mark.slow(10)
@pytest.mark.parametrize("D", [1, 2])
def test_calls_of_a_decode_step(D: int, emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tt.load_model(TINY, D)
    cache = model.new_cache(2, 128)
    for row in (0, 1):
        cache.open(row, 128)
    prompts = torch.full((2 * PROMPT,), 5)
    model(prompts, cache, cache.prefill([(0, PROMPT), (1, PROMPT)], [PROMPT - 1, 2 * PROMPT - 1]))
    calls = counted(monkeypatch, model.mesh)

    def step(past: int) -> dict[str, int]:
        calls.counts.clear()
        model(torch.tensor([5, 6]), cache, cache.decode([0, 1], [past, past]))
        assert calls.operators == operators(model.config, D)
        assert calls.counts["launch"] == 3 * 2  # two sparse layers
        return dict(calls.counts)

    step(PROMPT)  # of two rows, for the first time
    for past in (PROMPT + 1, PROMPT + 2):
        found = step(past)
        # ids, and positions as two operators want them; no settings, no buffers
        assert found["from_torch"] == found["copy_host_to_device_tensor"] == 3
        made = {"empty", "zeros", "create_sharded_memory_config", "num_cores_to_corerangeset_in_subcoregrids"}
        assert not made & set(found)


def test_a_table_that_changed_is_sent(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows in another order have other pages."""
    model = tt.load_model(TINY)
    cache = model.new_cache(2, 64)
    for row in (0, 1):
        cache.open(row, 64)
    model(torch.full((6,), 5), cache, cache.prefill([(0, 3), (1, 3)], [2, 5]))
    model(torch.tensor([5, 6]), cache, cache.decode([0, 1], [3, 3]))
    calls = counted(monkeypatch, model.mesh)
    model(torch.tensor([6, 5]), cache, cache.decode([1, 0], [4, 4]))
    assert calls.counts["copy_host_to_device_tensor"] == 4


def test_a_table_whose_copy_failed_is_sent_again(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with the table of before would write keys into pages of other rows."""
    model = tt.load_model(TINY)
    cache = model.new_cache(2, 64)
    for row in (0, 1):
        cache.open(row, 64)
    model(torch.full((6,), 5), cache, cache.prefill([(0, 3), (1, 3)], [2, 5]))
    model(torch.tensor([5, 6]), cache, cache.decode([0, 1], [3, 3]))
    copy = library.copy_host_to_device_tensor
    for rows in ([1, 0], [0, 1]):  # the second is that of before: part of the first may have arrived
        copies: list[None] = []

        def fourth(host: Any, out: Any, copies: list[None] = copies) -> None:
            copies.append(None)
            if len(copies) == 4:
                raise RuntimeError("no copy")
            copy(host, out)

        monkeypatch.setattr(library, "copy_host_to_device_tensor", fourth)
        with pytest.raises(RuntimeError, match="no copy"):
            model(torch.tensor([6, 5]), cache, cache.decode(rows, [4, 4]))
    monkeypatch.setattr(library, "copy_host_to_device_tensor", copy)
    calls = counted(monkeypatch, model.mesh)
    model(torch.tensor([6, 5]), cache, cache.decode(rows, [4, 4]))
    assert calls.counts["copy_host_to_device_tensor"] == 4


def test_a_capture_that_fails_says_how_to_run_without(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(*_: Any, **__: Any) -> None:
        raise RuntimeError("\nTT_FATAL: the trace region is too small\nbacktrace")

    monkeypatch.setattr(library, "begin_trace_capture", begin, raising=False)
    model = tt.load_model(TINY, traced=True)
    cache = model.new_cache(1, 32)
    cache.open(0, 32)
    model(torch.full((3,), 5), cache, cache.prefill([(0, 3)], [2]))
    with pytest.raises(RequestError, match="got TT_FATAL: the trace region is too small; to fix it"):
        model(torch.tensor([5]), cache, cache.decode([0], [3]))


def test_the_trace_region() -> None:
    config = Qwen3MoeConfig.from_directory(TINY)
    assert operators(config, 1) == 11 + 5 * 18 + 2 * 17 + 3 * 7
    assert operators(config, 4) == operators(config, 1) + 1 + 5 * (3 + 2) + 2 * 5  # one key head: two views
    assert operators(config, 8) == operators(config, 4) + 1 + 5 + 2  # H = 128 is half a tile for each of 8 chips
    # six numbers of rows: 1, 2, 4 ... 32
    assert trace_bytes(config, 8) == operators(config, 8) * 6 * 32 * 1024


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A machine with a card, which is opened by name only; what open_device was asked for."""
    asked: list[tuple[Any, ...]] = []

    class Mesh:
        trace_bytes = 0

    def open_device(D: int, device: str | None, room: int | None) -> Mesh:
        asked.append((D, device, room))
        mesh = Mesh()
        mesh.trace_bytes = room or 0
        return mesh

    for name in (DEVICE, SLOW, SIMULATOR):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tenstorrent, "open_device", open_device)
    monkeypatch.setattr(models, "Qwen3MoeTT", lambda config, mesh, traced: traced)
    return asked


@pytest.mark.parametrize(
    ("environment", "device", "reason"),
    [
        ({}, None, None),
        ({SLOW: "1"}, None, SLOW),
        ({SIMULATOR: "/a/libttsim.so"}, None, "simulators"),
        ({}, "emulator", "the emulator"),
        ({DEVICE: "emulator:n150"}, None, "the emulator"),
    ],
    ids=str,
)
def test_traces_are_on_where_the_device_can(
    environment: dict[str, str],
    device: str | None,
    reason: str | None,
    opened: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = Qwen3MoeConfig.from_directory(TINY)
    said: list[str] = []
    monkeypatch.setattr(models.logger, "info", lambda text, *args: said.append(text.format(*args)))
    found = decode.why_no_trace(device)
    assert (found is None) == (reason is None) and (reason or "") in (found or "")
    assert models._on_device(config, 1, device, None) is (reason is None)
    assert opened == [(1, device, trace_bytes(config, 1) if reason is None else None)]
    assert len(said) == (reason is not None) and all("eagerly" in text and str(reason) in text for text in said)
    # asked for and not: as asked; the command line refuses what cannot be
    assert models._on_device(config, 1, device, False) is False and len(said) == (reason is not None)
    if reason is not None:
        monkeypatch.setattr(models.tenstorrent.device, "probe", lambda device: tenstorrent.device.Probe(True))
        with pytest.raises(RequestError, match="cannot be traced"):
            check(config, 1, Options(device=device, trace=True))


def test_a_device_that_was_opened_with_less_room_runs_eagerly_or_says_so(
    opened: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Qwen3MoeConfig.from_directory(TINY)
    small = type("Mesh", (), {"trace_bytes": 7, "opened_here": True})()
    monkeypatch.setattr(tenstorrent, "open_device", lambda *_: small)
    said: list[str] = []
    monkeypatch.setattr(models.logger, "info", lambda text, *args: said.append(text.format(*args)))
    assert models._on_device(config, 1, None, None) is False
    assert "opened with 7 bytes for traces" in said[0]
    with pytest.raises(RequestError, match="opened with 7 bytes for traces, not [0-9]+.*close_device"):
        models._on_device(config, 1, None, True)
    small.opened_here = False
    assert models._on_device(config, 1, None, True) is True
