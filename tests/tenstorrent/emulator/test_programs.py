"""Programs that keep the rules: what they compute, what is counted, and that every run is the same."""

from __future__ import annotations

import errno
import mmap
import os
import resource

import pytest
import torch
from device_cases import FP32, numbers
from programs import KERNELS, block, buffer, grid, matmul, moved, pairs, spread, tilize, unary

from ttnn_moe.errors import BackendUnavailable
from ttnn_moe.tenstorrent.emulator import ComputeConfig, EmulatedChip, Program, Result, run

CHIPS = ("p150", "n150")


def emulate(program: Program, device: EmulatedChip, **tensors) -> Result:
    return run(program, device, tensors, root=KERNELS)


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("cores", [grid(1), grid(2, 2), grid(8, 8)], ids=len)
def test_tiles_are_copied_bit_for_bit(chip, cores):
    device = EmulatedChip(chip)
    values = numbers(96, 160)
    a, out = device.tensor(values), device.empty((96, 160), "bfloat16")
    result = emulate(unary(15, cores), device, a=a, out=out)
    assert torch.equal(out.read(), values)
    assert out.written().all()
    assert result.total("dram_read_bytes") == result.total("dram_written_bytes") == 15 * 2048
    assert result.total("unpacked_tiles") == result.total("packed_tiles") == 15
    assert result.tensors["a"] == {"read_bytes": 15 * 2048, "written_bytes": 0}
    assert result.total("tile_multiplies") == result.total("sfpu_tiles") == 0


@pytest.mark.parametrize("fmt", ["float32", "bfloat8_b", "int32"])
def test_formats(fmt):
    device = EmulatedChip()
    values = torch.arange(-1024, 1024).reshape(64, 32)
    values = values.int() if fmt == "int32" else values.float() / 64
    a, out = device.tensor(values, fmt), device.empty((64, 32), fmt)
    config = ComputeConfig(fp32_dest_acc=fmt != "bfloat8_b", unpack_to_dest_fp32=(0,) if fmt == "float32" else ())
    emulate(unary(2, grid(1), fmt=fmt, out_fmt=fmt, config=config), device, a=a, out=out)
    assert torch.equal(out.read(), a.read())
    if fmt != "bfloat8_b":
        assert torch.equal(a.read(), values)
    else:
        assert distance(a.read(), values) < 0.01


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("form", ["bfloat8_b", "bfloat4_b"])
def test_blocks_are_unpacked_as_ttnn_packs_them(chip, form):
    device, values = EmulatedChip(chip), numbers(64, 64)
    a, out = device.tensor(values, form), device.empty((64, 64), "bfloat16")
    emulate(unary(4, grid(2), fmt=form), device, a=a, out=out)
    assert torch.equal(out.read().float(), a.read())
    assert distance(a.read(), values) < (0.15 if form == "bfloat4_b" else 0.01)


def test_fp32_through_a_source_register_is_cut_to_tf32():
    device = EmulatedChip()
    values = torch.full((32, 32), 1 + 2**-9 + 2**-20)
    a, out = device.tensor(values, "float32"), device.empty((32, 32), "float32")
    emulate(unary(1, grid(1), fmt="float32", out_fmt="float32", config=FP32), device, a=a, out=out)
    assert (out.read() == 1 + 2**-9).all()


@pytest.mark.parametrize(("limit", "words"), [("files", "File too large"), ("addresses", "Cannot allocate memory")])
def test_limits_that_leave_no_room_for_the_dram_are_named(limit, words, monkeypatch):
    """ulimit -f and ulimit -v."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(*_, **__):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    if limit == "addresses":
        monkeypatch.setattr(mmap, "mmap", full)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, before[1]))
    try:
        with pytest.raises(BackendUnavailable, match=f"got {words}; expected 64 GiB of .*; to fix it: ulimit -v"):
            EmulatedChip()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_silu():
    device = EmulatedChip()
    values = numbers(64, 64) * 4
    a, out = device.tensor(values), device.empty((64, 64), "bfloat16")
    result = emulate(unary(4, grid(2), silu=True), device, a=a, out=out)
    torch.testing.assert_close(out.read().float(), torch.nn.functional.silu(values.float()), rtol=2**-8, atol=1e-6)
    assert result.total("sfpu_tiles") == 4


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    "config, bound",
    [
        (FP32, 2.5e-3),
        (ComputeConfig(), 8e-3),
        (ComputeConfig("HiFi2", fp32_dest_acc=True), 5e-3),
        (ComputeConfig("LoFi", fp32_dest_acc=True), 5e-2),
    ],
    ids=["fp32", "bf16", "hifi2", "lofi"],
)
def test_matmul(chip, config, bound):
    device = EmulatedChip(chip)
    x, y = numbers(64, 160), numbers(160, 96, seed=1)
    out = device.empty((64, 96), "bfloat16")
    result = emulate(matmul(2, 5, 3, grid(2, 2), config), device, a=device.tensor(x), b=device.tensor(y), out=out)
    assert distance(out.read(), x.double() @ y.double()) < bound
    assert result.total("tile_multiplies") == 2 * 5 * 3


def test_destination_registers_round_at_each_accumulation():
    """256 ones, then a half many times: in bf16 each half is lost, and two of them make the next even number."""
    device = EmulatedChip()
    x, y = torch.zeros(32, 32 * 9), torch.zeros(32 * 9, 32)
    x[:, 0], y[0] = 16, 16
    x[:, 32:], y[32:] = 0.25, 0.125
    sums = {}
    for name, config in (("bf16", ComputeConfig()), ("fp32", FP32)):
        out = device.empty((32, 32), "float32")
        program = matmul(1, 9, 1, grid(1), config, out_fmt="float32")
        emulate(program, device, a=device.tensor(x.bfloat16()), b=device.tensor(y.bfloat16()), out=out)
        sums[name] = out.read()
    assert (sums["fp32"] == 256 + 8).all()
    assert (sums["bf16"] == 256).all()


@pytest.mark.parametrize("rt, ct", [(1, 4), (2, 2), (4, 1)])
def test_matmul_block_is_matmul_tiles(rt, ct):
    device = EmulatedChip()
    x, y = numbers(rt * 32, 96), numbers(96, ct * 32, seed=1)
    a, b = device.tensor(x), device.tensor(y)
    outs = [device.empty((rt * 32, ct * 32), "bfloat16") for _ in range(2)]
    for tiles, out in enumerate(outs):
        emulate(block(rt, 3, ct, FP32, tiles=bool(tiles)), device, a=a, b=b, out=out)
    assert torch.equal(outs[0].read(), outs[1].read())
    assert distance(outs[0].read(), x.double() @ y.double()) < 3e-3


@pytest.mark.parametrize("op", [0, 1, 2], ids=["add", "sub", "mul"])
@pytest.mark.parametrize("how", [0, 1, 2, 3], ids=["none", "column", "row", "scalar"])
def test_binary(how, op):
    device = EmulatedChip()
    x, y = numbers(64, 32), numbers(64, 32, seed=1)
    out = device.empty((64, 32), "bfloat16")
    emulate(pairs(2, grid(1), how, op), device, a=device.tensor(x), b=device.tensor(y), out=out)
    tiles = y.float().reshape(2, 32, 32)
    tiles = [tiles, tiles[:, :, :1], tiles[:, :1], tiles[:, :1, :1]][how].expand(2, 32, 32).reshape(64, 32)
    want = [torch.add, torch.sub, torch.mul][op](x.float(), tiles)
    # a product is added to bf16 in four phases, each of which rounds
    torch.testing.assert_close(out.read().float(), want, rtol=2**-6 if op == 2 else 2**-7, atol=1e-6)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("back", [False, True], ids=["tilize", "untilize"])
def test_rows_and_tiles(chip, back):
    device = EmulatedChip(chip)
    values = numbers(96, 128)
    a, out = device.tensor(values, tiled=back), device.empty((96, 128), "bfloat16", tiled=not back)
    emulate(tilize(3, 4, grid(2), back=back), device, a=a, out=out)
    assert torch.equal(out.read(), values)


@pytest.mark.parametrize("role", ["reader", "writer"])
def test_multicast_and_semaphores(role):
    device = EmulatedChip()
    values = numbers(64, 96)
    a, out = device.tensor(values), device.empty((6 * 64, 96), "bfloat16")
    result = emulate(spread(6, 3, 2, role), device, a=a, out=out)
    assert torch.equal(out.read(), values.repeat(6, 1))
    assert result.total("multicast_bytes") == 6 * 2048
    assert result.total("multicast_received_bytes") == 5 * 6 * 2048
    assert result.tensors["a"]["read_bytes"] == 6 * 2048  # once, not once for each core
    assert result.cores[0, 0]["semaphore_messages"] == 6
    assert result.cores[0, 0][f"{role}_waiting"] > 0


def test_multicast_across_the_columns_that_are_no_cores():
    """Blackhole's columns 7 and 8 lie on both sides of NoC columns without Tensix cores."""
    device = EmulatedChip("p150")
    values = numbers(32, 32)
    a, out = device.tensor(values), device.empty((9 * 32, 32), "bfloat16")
    emulate(spread(1, 9, 1), device, a=a, out=out)
    assert torch.equal(out.read(), values.repeat(9, 1))


def test_every_run_is_the_same():
    device = EmulatedChip()
    x, y = device.tensor(numbers(64, 128)), device.tensor(numbers(128, 64, seed=1))
    runs = []
    for _ in range(2):
        out = device.empty((64, 64), "bfloat16")
        result = emulate(matmul(2, 4, 2, grid(2, 2), ComputeConfig()), device, a=x, b=y, out=out)
        runs.append((out.read(), result.cores, result.steps))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1:] == runs[1][1:]


def test_each_core_has_its_own_globals():
    device = EmulatedChip()
    out = device.empty((3, 4), "int32", tiled=False)
    cores = grid(3)
    kernel = moved("globals.cpp", "reader", "out", cores, {core: [i] for i, core in enumerate(cores)})
    emulate(Program([kernel], [buffer(0, cores)]), device, out=out)
    assert out.read().tolist() == [[12, 14, 16, 18]] * 3


def test_time_grows_with_the_work_and_shrinks_with_the_cores():
    device = EmulatedChip()
    x, y = device.tensor(numbers(128, 256)), device.tensor(numbers(256, 128, seed=1))
    out = device.empty((128, 128), "bfloat16")
    cycles = [emulate(matmul(4, 8, 4, grid(n), FP32), device, a=x, b=y, out=out).cycles for n in (1, 4)]
    assert 2 < cycles[0] / cycles[1] < 4.5


def test_l1_high_water():
    device = EmulatedChip()
    a, out = device.tensor(numbers(32, 32)), device.empty((32, 32), "bfloat16")
    result = emulate(unary(1, grid(1)), device, a=a, out=out)
    assert result.cores[0, 0]["l1_high_water"] == device.chip.l1_first + 2 * 2 * 2048
