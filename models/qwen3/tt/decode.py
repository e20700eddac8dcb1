"""Decode steps on buffers that stay, so that a ttnn trace can hold a step, and replay it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from ttnn_moe.errors import RequestError
from ttnn_moe.tenstorrent import Device, tensors
from ttnn_moe.tenstorrent.device import SIMULATOR
from ttnn_moe.tenstorrent.runtime import is_emulator, library, wanted

from .attention import DecodeTables
from .cache import PagedCache
from .layers import Logits

Run = Callable[[Any, Any, PagedCache, DecodeTables], Logits]
"""(ids, positions, cache, tables) -> logits; ids and positions are ttnn [1, B] uint32."""


class Decoder:
    """Decode steps of one cache, and the traces that hold them.

    Args:
        device: the chips.
        run: the model.
        traced: capture the step of each B when it first runs, and replay it.
    """

    def __init__(self, device: Device, run: Run, traced: bool):
        self._device, self._run, self.traced = device, run, traced
        self._inputs: dict[int, tuple[Any, ...]] = {}
        self._tables: dict[int, torch.Tensor] = {}  # as they are on the device
        self._traces: dict[int, tuple[Any, Logits]] = {}
        _decoders(device).add(self)
        # with its cache: else they take room from the next one's. At the end of the process ttnn may be gone
        weakref.finalize(self, _release, device, self._traces).atexit = False

    def __call__(self, cache: PagedCache, ids: Sequence[int], positions: Sequence[int], rows: Sequence[int]) -> Logits:
        """Logits of a token of each of these B rows of the cache; valid until the next step."""
        ttnn = library()

        B, handle = len(ids), self._device.handle
        inputs = self._put(ids, positions, cache.table(rows))

        def run() -> Logits:
            ids, places, positions, table = inputs
            return self._run(ids, places, cache, DecodeTables(self._device, positions, table))

        if not self.traced:
            return run()
        if B not in self._traces:
            logits = run()  # compiles the programs of the trace, and is this step
            self._traces[B] = self._capture(run)
            return logits
        trace, out = self._traces[B]
        ttnn.execute_trace(handle, trace, cq_id=0, blocking=False)
        return out

    def _capture(self, run: Callable[[], Logits]) -> tuple[Any, Logits]:
        """The trace of a step, and the logits that its replay writes.

        Raises:
            RequestError: ttnn captured none; its reason.
        """
        ttnn, handle = library(), self._device.handle
        try:
            trace = ttnn.begin_trace_capture(handle, cq_id=0)
            try:
                try:
                    out = run()
                finally:
                    ttnn.end_trace_capture(handle, trace, cq_id=0)
            except BaseException:
                with suppress(RuntimeError):  # what came first is the reason
                    ttnn.release_trace(handle, trace)
                raise
        except RuntimeError as error:
            reason = next((line for line in str(error).splitlines() if line), "no reason")
            remedy = "run without traces: --no-trace, or load_model(traced=False)"
            raise RequestError("the decode step was not captured as a trace", got=reason, remedy=remedy) from error
        return trace, out

    def _put(self, ids: Sequence[int], positions: Sequence[int], table: torch.Tensor) -> tuple[Any, ...]:
        """ids and positions [1, B] uint32, positions [B] and table [B, pages] int32: buffers that stay."""
        ttnn = library()

        B, device = len(ids), self._device
        values = [
            (torch.tensor([list(ids)]).int(), "uint32"),
            (torch.tensor([list(positions)]).int(), "uint32"),
            (torch.tensor(positions).int(), "int32"),
        ]
        there, known = self._inputs.get(B), self._tables.pop(B, None)  # a copy that fails leaves an unknown table
        # rows get a new page every PAGE tokens
        if known is None or not torch.equal(table, known):
            values.append((table, "int32"))
        if there is None:
            release_traces(device)
            there = self._inputs[B] = tuple(tensors.replicate(one, device, dtype=dtype) for one, dtype in values)
        else:
            for (one, dtype), buffer in zip(values, there, strict=False):
                ttnn.copy_host_to_device_tensor(tensors.replicate(one, device, dtype=dtype, on_host=True), buffer)
        self._tables[B] = table
        return there


def release_traces(device: Device) -> None:
    """Forget the traces of all caches and models on a device: a replay overwrites what is allocated after its capture.

    Call it before an allocation that stays.
    """
    for decoder in _decoders(device):
        _release(device, decoder._traces)


def _decoders(device: Device) -> weakref.WeakSet[Decoder]:
    return device.cache.setdefault("decoders", weakref.WeakSet())  # type: ignore[no-any-return]


def _release(device: Device, traces: dict[int, tuple[Any, Logits]]) -> None:
    for trace, _ in () if device.closed else traces.values():
        library().release_trace(device.handle, trace)
    traces.clear()


def why_no_trace(device: str | None) -> str | None:
    """Why decode steps cannot be captured as traces; None: they can."""
    if is_emulator(wanted() if device is None else device):
        return "the emulator runs programs one by one"
    if os.environ.get("TT_METAL_SLOW_DISPATCH_MODE"):
        return "TT_METAL_SLOW_DISPATCH_MODE is set, and ttnn captures no trace then (simulators need it)"
    if os.environ.get(SIMULATOR):
        return "simulators dispatch without command queues, which traces need"
    return None


def check_trace(device: str | None) -> None:
    """Raise RequestError where no trace can be captured."""
    reason = why_no_trace(device)
    if reason is not None:
        raise RequestError("decode steps cannot be traced", got=reason, remedy="leave --trace out")
