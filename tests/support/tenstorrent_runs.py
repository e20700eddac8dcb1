"""Runs on a Tenstorrent device or simulator, each in a process of its own: tenstorrent_runs.py NAME.

tests/tenstorrent/test_tenstorrent.py starts them. A run fails by raising; what it prints is for the record.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable

import torch

from targets import Target
from tenstorrent_names import MESH_NAMES, NAMES
from tenstorrent_setup import BF16, MESH_RUNS, RUNS, Layer, OnDevice, check_out, check_routing, check_rows, part_of, run
from ttnn_moe import tenstorrent
from ttnn_moe.selfcheck.edges import CASES, Case


def whole_chain(layer: Layer, on: OnDevice, what: str) -> None:
    """Routing, gate/up, down, each checked on its own."""
    routed = on.route()
    check_routing(on, routed)
    activations = on.programs.gate_up(on.hidden, routed, on.gate, on.up)
    check_rows(layer, {"activations": on.back(activations)})
    out = on.out()
    on.programs.down(activations, routed, on.down, out, False)
    check_out(on.back(out), layer.want(), what)


@run
def any_partition() -> None:
    """Some of the experts, in no order; the others' tokens are not seen."""
    layer = Layer.make(T=45, E=16, K=4, H=128, I=96, local=5)
    whole_chain(layer, OnDevice(layer, tenstorrent.open_device()), "partition")


@run
def broken_ids() -> None:
    """-1, ids out of range, one expert named several times by a token (weights summed in fp32 in ascending k)."""
    layer = Layer.make(T=70, E=8, K=4, H=64, I=64, local=6)
    ids = layer.ids
    ids[0, 0], ids[1, 1], ids[2, 2], ids[3, 3] = -1, 8, 2**31 - 1, -(2**31)
    ids[4], ids[5] = -1, 3
    ids[6] = torch.tensor([2, 5, 2, 2])
    here = int(layer.mapping[0])
    ids[40:60] = here
    layer.weights[7, 0], layer.weights[8, 1] = 1e-39, -3.5e8  # subnormal; large
    ids[7], layer.weights[7, 1] = here, 2e-39
    # the sum in ascending k is 0, 1, 0; in any other order it is not
    for t, three in enumerate(((1e8, 1.0, -1e8), (1e8, -1e8, 1.0), (1.0, 1e8, -1e8)), 9):
        ids[t], ids[t, 3], layer.weights[t, :3] = here, -1, torch.tensor(three)
    on = OnDevice(layer, tenstorrent.open_device())
    routed = on.route()
    check_routing(on, routed)


@run
def routing_4096() -> None:
    """The prefill's routing of one device of eight, on at least half the grid."""
    layer = Layer.make(T=4096, E=128, K=8, H=32, I=32, local=16)
    on = OnDevice(layer, tenstorrent.open_device())
    check_routing(on, on.route())
    named = on.programs._launcher("routing", 4096).program.kernels[0].named_compile_args
    columns, rows = on.device.machine.grid
    assert named["readers"] * 2 >= columns * rows
    print(f"{named['readers']} of {columns * rows} cores list tokens")


@run
def steps() -> None:
    """gate, up and SiLU*mul apart give what the fused pass gives."""
    layer = Layer.make(T=50, E=6, K=3, H=96, I=160, local=4)
    on = OnDevice(layer, tenstorrent.open_device())
    routed = on.route()
    gate = on.programs.project(on.hidden, routed, on.gate, "gate")
    up = on.programs.project(on.hidden, routed, on.up, "up")
    product = on.programs.silu_mul(gate, up, routed.bound)
    fused = on.programs.gate_up(on.hidden, routed, on.gate, on.up)
    got = {"gate": on.back(gate), "up": on.back(up)}
    check_rows(layer, got)
    for what, rows in (("steps", product), ("fused", fused)):
        check_rows(layer, {"activations": on.back(rows)})
        out = on.out()
        on.programs.down(rows, routed, on.down, out, False)
        check_out(on.back(out), layer.want(), what)


@run
def idle_weights_are_not_read() -> None:
    """NaN in the weights of experts without a token stays where it is."""
    layer = Layer.make(T=20, E=6, K=2, H=64, I=64)
    layer.ids[(layer.ids == 2) | (layer.ids == 5)] = 1
    for tensor in layer.experts.tensors.values():
        tensor[2], tensor[5] = float("nan"), float("inf")
    whole_chain(layer, OnDevice(layer, tenstorrent.open_device()), "idle")


@run
def nothing_routed_here() -> None:
    """No expert of this device has a token: zeros, or what was there."""
    layer = Layer.make(T=33, E=8, K=2, H=64, I=64, local=2)
    layer.ids[torch.isin(layer.ids, layer.mapping)] = -1
    on = OnDevice(layer, tenstorrent.open_device())
    routed = on.route()
    activations = on.programs.gate_up(on.hidden, routed, on.gate, on.up)
    out = on.out()
    on.programs.down(activations, routed, on.down, out, False)
    assert bool((on.back(out) == 0).all())
    start = torch.randn(33, 64).to(BF16)
    out = on.out(start)
    on.programs.down(activations, routed, on.down, out, True)
    assert torch.equal(on.back(out), start)


@run
def windows_and_long_chains() -> None:
    """A small grid, so that blocks come in several windows; few tiles a core, so that sums pass through many cores."""
    device = tenstorrent.open_device()
    for grid, least, T in (((3, 2), 2, 300), ((7, 3), 1, 100), ((1, 1), 1, 40)):
        device.machine = part_of(device.machine, grid, least)
        device.cache.clear()
        layer = Layer.make(T=T, E=8, K=3, H=352, I=96, local=7)
        on = OnDevice(layer, device)
        named = on.programs._launcher("gate_up", on.programs.bound(T)).program.kernels[0].named_compile_args
        whole_chain(layer, on, f"grid {grid}, {named['cores']} cores, windows of {named['window']} blocks")


@run
def random_sizes() -> None:
    """Sizes, grids and partitions that nobody chose."""
    device = tenstorrent.open_device()
    whole = device.machine
    for seed in range(6):
        draw = random.Random(seed)
        E = draw.randint(1, 20)
        sizes = {
            "T": draw.choice([1, 31, 33, draw.randint(2, 200)]),
            "E": E,
            "K": draw.randint(1, min(E, 5)),
            "H": 32 * draw.randint(1, 14),
            "I": 32 * draw.randint(1, 9),
            "local": draw.randint(1, E),
        }
        grid = (draw.randint(1, whole.grid[0]), draw.randint(1, whole.grid[1]))
        device.machine = part_of(whole, grid, draw.randint(1, 6))
        device.cache.clear()
        layer = Layer.make(**sizes, seed=seed)
        whole_chain(layer, OnDevice(layer, device), f"{sizes} on {device.machine.grid}")


@run
def shared_tokens_never_race() -> None:
    """Every expert has every token, with cancelling weights: the sum over experts is in order and complete."""
    layer = Layer.make(T=96, E=4, K=4, H=128, I=64)
    on = OnDevice(layer, tenstorrent.open_device())
    outs = []
    for _ in range(3):
        routed = on.route()
        out = on.out()
        activations = on.programs.gate_up(on.hidden, routed, on.gate, on.up)
        on.programs.down(activations, routed, on.down, out, False)
        outs.append(on.back(out))
    check_out(outs[0], layer.want())
    assert all(torch.equal(outs[0].view(torch.int16), out.view(torch.int16)) for out in outs[1:])


def _qwen3(T: int) -> None:
    layer = Layer.make(T=T, E=4, K=2, H=2048, I=768, local=3)
    if T == 1:
        layer.mapping = torch.cat([layer.ids[0], layer.mapping]).unique()[:3].int()
    on = OnDevice(layer, tenstorrent.open_device())
    whole_chain(layer, on, f"H=2048 I=768 T={T}")
    columns, rows = on.device.machine.grid
    for name in ("gate_up", "down"):
        assert len(on.programs._launcher(name, on.programs.bound(T)).program.kernels[0].cores) == columns * rows


@run
def qwen3_1() -> None:
    _qwen3(1)


@run
def qwen3_32() -> None:
    _qwen3(32)


@run
def qwen3_128() -> None:
    _qwen3(128)


@run
def skewed_4096() -> None:
    """The prefill's T, most tokens on two experts: several windows, sums of 128 tiles of tokens a column."""
    layer = Layer.make(T=4096, E=16, K=4, H=64, I=32, local=8)
    g = torch.Generator().manual_seed(1)
    popular = torch.full((16,), 0.05)
    popular[layer.mapping[:2].long()] = 1.0
    layer.ids = torch.multinomial(popular.expand(4096, 16), 4, generator=g).int()
    whole_chain(layer, OnDevice(layer, tenstorrent.open_device()), "T=4096, skewed")


@run
def harvested_grids() -> None:
    """Real sizes on grids with fewer columns and rows than the chip's kind has, by programs for 4096 tokens."""
    device = tenstorrent.open_device()
    whole = device.machine
    for grid in ((8, 7), (7, 8)) if whole.grid[0] == 8 else ((11, 10), (12, 9)):
        device.machine = part_of(whole, grid)
        device.cache.clear()
        layer = Layer.make(T=20, E=2, K=1, H=2048, I=768, local=1)
        on = OnDevice(layer, device)
        assert on.programs.max_T == 4096
        on.programs.bound = lambda T: 4096  # type: ignore[method-assign]
        whole_chain(layer, on, f"grid {grid}")


def _case(case: Case) -> Callable[[], None]:
    def run_case() -> None:
        from contract_cases import TestCases

        target = Target("tenstorrent", dtypes=(BF16,), row_align=32)
        tests = TestCases()
        found = {}
        tests.test_fused(target, case, BF16, found.__setitem__)
        print(f"fp64 error {found.get('fp64_error', 0.0):.2e}")
        tests.test_prepared(target, case, BF16)
        tests.test_fp32_out_and_accumulate(target, case, BF16)
        if case.make(BF16).num_tokens is None:  # a bound on T is for the whole operator
            tests.test_steps(target, case, BF16)

    return run_case


import tenstorrent_host_runs  # noqa: E402
import tenstorrent_mesh_runs  # noqa: E402
import tenstorrent_model_runs  # noqa: E402

assert (
    tenstorrent_host_runs and tenstorrent_mesh_runs and tenstorrent_model_runs
)  # they add theirs to RUNS and MESH_RUNS

for _each in CASES:
    if f"case_{_each}" in NAMES:
        RUNS[f"case_{_each}"] = _case(_each)


def main() -> None:
    name = sys.argv[1]
    if name == "describe":
        device = tenstorrent.open_device()
        columns, rows = device.machine.grid
        import ttnn

        print(f"DEVICE {device.arch} {ttnn.GetNumAvailableDevices()} {columns}x{rows}")
        return
    torch.manual_seed(0)
    os.environ.setdefault("TTNN_MOE_TT_CACHE", "off")
    assert (list(RUNS), list(MESH_RUNS)) == (NAMES, MESH_NAMES), "tenstorrent_names.py does not list the runs"
    ({**RUNS, **MESH_RUNS})[name]()
    tenstorrent.close_device()
    print("PASSED", name)


if __name__ == "__main__":
    main()
