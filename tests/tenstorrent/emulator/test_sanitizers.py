"""Engine and kernels under AddressSanitizer and ThreadSanitizer; and that the latter sees a race that is there."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from device_cases import numbers
from programs import KERNELS, buffer, grid, matmul, spread, tilize, unary

from ttnn_moe.tenstorrent.emulator import ComputeConfig, EmulatedChip, Kernel, Program, run
from ttnn_moe.tenstorrent.emulator.run import EngineFailed

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_clean(sanitizer):
    device = EmulatedChip()
    values = numbers(64, 96)
    a, rows = device.tensor(values), device.tensor(values, tiled=False)
    out, copies, back = (device.empty((n, 96), "bfloat16") for n in (64, 6 * 64, 64))
    more = {"root": KERNELS, "sanitizer": sanitizer}
    run(unary(6, grid(2, 2), silu=True), device, {"a": a, "out": out}, **more)
    run(spread(6, 3, 2), device, {"a": a, "out": copies}, **more)
    assert torch.equal(copies.read(), values.repeat(6, 1))
    run(tilize(2, 3, grid(2)), device, {"a": rows, "out": back}, **more)
    assert torch.equal(back.read(), values)
    b, product = device.tensor(numbers(96, 64)), device.empty((64, 64), "bfloat16")
    program = matmul(2, 3, 2, grid(2), ComputeConfig())
    run(program, device, {"a": a, "b": b, "out": product}, **more)
    plain = device.empty((64, 64), "bfloat16")
    run(program, device, {"a": a, "b": b, "out": plain}, root=KERNELS)
    assert torch.equal(product.read(), plain.read())


def test_address_sanitizer_sees_a_kernel_outside_its_stack():
    device = EmulatedChip()
    kernel = Kernel("broken/stack.cpp", "reader", grid(1), args={(0, 0): [5]})
    with pytest.raises(EngineFailed, match="stack-buffer-overflow"):
        run(Program([kernel], [buffer(0, grid(1))]), device, {}, root=KERNELS, sanitizer="address")


@pytest.mark.parametrize("define, races", [("RACES", True), ("TAKES_TURNS", False)])
def test_thread_sanitizer_sees_two_roles_at_one_word(define, races):
    device, cores = EmulatedChip(), grid(1)
    kernels = [Kernel("broken/two_roles.cpp", role, cores, defines={define: "1"}) for role in ("reader", "writer")]
    program = Program(kernels, [buffer(0, cores), buffer(1, cores)])
    if races:
        with pytest.raises(EngineFailed, match="data race"):
            run(program, device, {}, root=KERNELS, sanitizer="thread")
    else:
        run(program, device, {}, root=KERNELS, sanitizer="thread")


@pytest.mark.skipif(importlib.util.find_spec("ttnn_moe._planner") is None, reason="ttnn_moe._planner is not built")
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_the_operators_are_clean(sanitizer):
    from tenstorrent_setup import Layer, OnDevice, check_out, check_routing
    from ttnn_moe.tenstorrent import device, runtime
    from ttnn_moe.tenstorrent.emulator import library

    device.close_device()
    runtime.use(library)
    try:
        layer = Layer.make(T=37, E=8, K=2, H=128, I=64, local=5)
        on = OnDevice(layer, device.Device.of(library.open_mesh(1, "p150", sanitizer=sanitizer)))
        routed = on.route()
        check_routing(on, routed)
        activations = on.programs.gate_up(on.hidden, routed, on.gate, on.up)
        out = on.out()
        on.programs.down(activations, routed, on.down, out, False)
        check_out(on.back(out), layer.want())
    finally:
        runtime.use(None)
