"""Runs about what surrounds the kernels: program cache, ttnn tensors, refusals, weights. See tenstorrent_runs.py."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import ttnn_moe
from tenstorrent_setup import (
    BF16,
    NUMERICS,
    Layer,
    back_from_bank_order,
    check_out,
    entries,
    mesh_placement,
    refused,
    run,
)
from ttnn_moe import Experts, Routing, tenstorrent
from ttnn_moe.selfcheck.bounds import poisoned, token_errors
from ttnn_moe.selfcheck.oracle import oracle
from ttnn_moe.tenstorrent import host, programs, tensors

# Of a token, against the weights as the format keeps them. HiFi2 cuts the left operand to 7 bits; LoFi also cuts
# weights of bfloat8_b to 5. None: the default of a block format, HiFi3.
BOUNDS = {None: 1e-2, "LoFi": 8e-2, "HiFi2": 2e-2, "HiFi3": 1e-2, "HiFi4": 1e-2}
BF16_SUMS = 4e-2


@run
def program_cache() -> None:
    """New routings, buffers, weights and T up to the bound find the programs that are there, or make them again."""
    device = tenstorrent.open_device()
    first = None
    for seed, T in enumerate((40, 64, 33, 57)):
        layer = Layer.make(T=T, E=8, K=3, H=64, I=64, seed=seed)
        there = tenstorrent.load_experts(layer.experts, device)
        routing = Routing.from_topk(layer.ids, layer.weights, 8)
        out = poisoned(T, 64, dtype=BF16)
        host.run(layer.hidden, routing, there, out, seed % 2 == 1)
        if seed % 2 == 0:
            check_out(out, layer.want())
        first = first or entries()
        assert entries() == first, f"call {seed}: {entries()} programs, after the first call {first}"
    assert first is not None and first >= 3
    print(f"{first} programs after every call")
    if device.emulated:  # it has no cache that could forget
        return
    device.handle.clear_program_cache()
    out = poisoned(T, 64, dtype=BF16)
    host.run(layer.hidden, routing, there, out, False)
    check_out(out, layer.want(), "after ttnn forgot the programs")
    assert entries() == first


@run
def ttnn_tensors() -> None:
    """A model on the device: ttnn tensors in and out, through ttnn_moe.moe."""
    import ttnn

    device = tenstorrent.open_device()
    layer = Layer.make(T=37, E=8, K=3, H=128, I=64)
    there = tenstorrent.load_experts(layer.experts, device)
    hidden = tensors.replicate(layer.hidden, device)
    ids, weights = tensors.replicate(layer.ids, device), tensors.replicate(layer.weights, device)
    routing = tenstorrent.DeviceRouting(ids, weights)
    out = ttnn_moe.moe(hidden, routing, there)
    assert isinstance(out, ttnn.Tensor)
    check_out(tensors.to_torch(out, device), layer.want(), "allocated")
    start = torch.randn(37, 128)
    for kind in (torch.float32, BF16):
        into = tensors.replicate(start.to(kind), device, "TILE")
        same = ttnn_moe.moe(hidden, routing, there, out=into, accumulate=True, backend="tenstorrent")
        assert same is into
        check_out(tensors.to_torch(into, device), layer.want(start.to(kind)), f"added, {kind}")


@run
def bad_input_is_refused() -> None:
    """Before anything is enqueued: no program is built or run."""
    import ttnn

    device = tenstorrent.open_device()
    layer = Layer.make(T=40, E=8, K=3, H=64, I=64)
    there = tenstorrent.load_experts(layer.experts, device)
    hidden = tensors.replicate(layer.hidden, device)
    ids, weights = tensors.replicate(layer.ids, device), tensors.replicate(layer.weights, device)
    good = {"hidden": hidden, "ids": ids, "weights": weights, "out": None}
    long = layer.hidden.repeat(200, 1)
    ttnn_moe.moe(hidden, tenstorrent.DeviceRouting(ids, weights), there)  # what is right is remembered
    broken = {
        "layout": ({"hidden": tensors.replicate(layer.hidden, device, "TILE")}, "hidden has the wrong layout"),
        "dtype": ({"weights": tensors.replicate(layer.weights.to(BF16), device)}, "topk_weights has the wrong dtype"),
        "ids dtype": ({"ids": weights}, "topk_ids has the wrong dtype"),
        "shape": ({"hidden": tensors.replicate(layer.hidden[:, :32], device)}, "hidden has the wrong shape"),
        "rows": ({"ids": tensors.replicate(layer.ids[:7], device)}, "topk_ids has the wrong shape"),
        "host": ({"hidden": ttnn.from_torch(layer.hidden)}, "hidden is not on a device"),
        "L1": ({"hidden": ttnn.to_memory_config(hidden, ttnn.L1_MEMORY_CONFIG)}, "not interleaved in DRAM"),
        "out": ({"out": tensors.replicate(layer.hidden, device)}, "out has the wrong layout"),
        "too long": (
            {
                "hidden": tensors.replicate(long, device),
                "ids": tensors.replicate(layer.ids.repeat(200, 1), device),
                "weights": tensors.replicate(layer.weights.repeat(200, 1), device),
            },
            "T is beyond what one program takes",
        ),
        "torch": ({"hidden": layer.hidden.float().numpy()}, "hidden is no tensor"),
    }
    before = entries()
    for name, (change, message) in broken.items():
        given = {**good, **change}
        routing = tenstorrent.DeviceRouting(given["ids"], given["weights"])
        with refused(message, name):
            ttnn_moe.moe(given["hidden"], routing, there, out=given["out"])
    with refused("routing is of another kind", "torch routing"):
        ttnn_moe.moe(hidden, Routing.from_topk(layer.ids, layer.weights, 8), there)
    with refused("run on one backend", "backend"):
        ttnn_moe.moe(hidden, tenstorrent.DeviceRouting(ids, weights), there, backend="cuda")
    with refused("placement does not fit", "mesh"):
        tenstorrent.load_experts(layer.experts, device, placement=mesh_placement(8, 8))
    with refused("unknown weight format", "format"):
        tenstorrent.load_experts(layer.experts, device, weight_format="bfloat2_b")
    odd = Experts.dense(torch.zeros(4, 80, 72, dtype=BF16), torch.zeros(4, 72, 40, dtype=BF16))
    with refused("whole tiles", "odd sizes"):
        tenstorrent.load_experts(odd, device)
    assert entries() == before, "a program was built for a call that was refused"


def _weights(formats: str) -> None:
    """Each fidelity, against the oracle on the weights as the format keeps them."""
    device = tenstorrent.open_device()
    layer = Layer.make(T=40, E=6, K=3, H=128, I=96)
    cases = [(tenstorrent.ComputeConfig(fidelity), bound) for fidelity, bound in BOUNDS.items()]
    cases.append((tenstorrent.ComputeConfig("HiFi4", fp32_dest_acc_en=False), BF16_SUMS))
    outs = []
    for compute, bound in cases:
        there = tenstorrent.load_experts(layer.experts, device, weight_format=formats, compute=compute)
        forms = (there.formats.gate_up, there.formats.gate_up, there.formats.down)
        gate, up, down = (
            back_from_bank_order(w, device, form)[0].transpose(1, 2)
            for w, form in zip((there.gate, there.up, there.down), forms, strict=True)
        )
        kept = Experts.dense(torch.cat([gate, up], 1).to(BF16).contiguous(), down.to(BF16).contiguous())
        assert not torch.equal(kept.tensors["down"], layer.experts.tensors["down"])
        outs.append(poisoned(40, 128, dtype=BF16))
        host.run(layer.hidden, Routing.from_topk(layer.ids, layer.weights, 6), there, outs[-1], False)
        want = oracle(layer.hidden, layer.ids, layer.weights, kept, NUMERICS)
        error = float(token_errors(outs[-1], want).max())
        print(f"{formats}, {compute}: error {error:.2e}")
        assert error < bound, f"{formats}, {compute}: {error:.2e}"
    by_format, lofi, hifi2, hifi3, hifi4, _ = outs
    assert torch.equal(by_format, hifi3)
    if formats == "bfloat4_b":  # HiFi2 and HiFi4 add a phase of bits that such weights do not have
        assert torch.equal(lofi, hifi2) and torch.equal(hifi3, hifi4)


@run
def bfloat8_b_weights() -> None:
    _weights("bfloat8_b")


@run
def bfloat4_b_weights() -> None:
    _weights("bfloat4_b")


@run
def mixed_weights() -> None:
    """Gate and up in 4 bits, down in 8."""
    _weights("bfloat4_b,bfloat8_b")


@run
def banked_weights() -> None:
    """A part of every expert in each DRAM bank: the bits of interleaved weights."""
    device = tenstorrent.open_device()
    layer = Layer.make(T=40, E=6, K=3, H=256, I=96)  # 24 tiles: 8 and 12 banks share them evenly
    for formats in ("bfloat16", "bfloat4_b,bfloat8_b"):
        outs = []
        for layout in ("", ",layout=banked"):
            there = tenstorrent.load_experts(layer.experts, device, weight_format=formats + layout)
            assert there.formats.banked == bool(layout)
            outs.append(poisoned(40, 256, dtype=BF16))
            host.run(layer.hidden, Routing.from_topk(layer.ids, layer.weights, 6), there, outs[-1], False)
        assert torch.equal(*outs), formats
        if formats == "bfloat16":
            check_out(outs[1], layer.want())


@run
def weights_on_disk() -> None:
    """Made once; found again; made anew when a weight changes; nothing half-written is left."""
    device = tenstorrent.open_device()
    layer = Layer.make(T=20, E=4, K=2, H=64, I=64)

    def result(there: tenstorrent.DeviceExperts) -> torch.Tensor:
        out = poisoned(20, 64, dtype=BF16)
        host.run(layer.hidden, Routing.from_topk(layer.ids, layer.weights, 4), there, out, False)
        return out

    with tempfile.TemporaryDirectory() as folder:
        options = {"cache": folder, "least_cached_bytes": 0}
        first = result(tenstorrent.load_experts(layer.experts, device, **options))
        check_out(first, layer.want())
        files = {path.name: path.stat().st_mtime_ns for path in Path(folder).iterdir()}
        assert len(files) == 3
        again = result(tenstorrent.load_experts(layer.experts, device, **options))
        assert torch.equal(first, again)
        assert files == {path.name: path.stat().st_mtime_ns for path in Path(folder).iterdir()}
        layer.experts.tensors["down"][1, 2, 3] += 1
        changed = result(tenstorrent.load_experts(layer.experts, device, **options))
        check_out(changed, layer.want(), "after a change")
        tenstorrent.load_experts(layer.experts, device, weight_format="bfloat8_b", **options)
        assert len(list(Path(folder).iterdir())) == 9
        assert len(list(Path(folder).glob("tmp*"))) == 0
    with tempfile.TemporaryDirectory() as folder:
        tenstorrent.load_experts(layer.experts, device, cache=folder)
        assert not list(Path(folder).iterdir()), "a small layer is not worth a file"


@run
def more_tokens_than_a_program_takes() -> None:
    """Torch tensors are run in passes."""
    programs.MAX_T = 64
    layer = Layer.make(T=150, E=4, K=2, H=64, I=64)
    out = poisoned(150, 64, dtype=BF16)
    ttnn_moe.moe(
        layer.hidden, Routing.from_topk(layer.ids, layer.weights, 4), layer.experts, out=out, backend="tenstorrent"
    )
    check_out(out, layer.want())
