"""Runs on a 1x8 or 1x4 mesh. See tenstorrent_runs.py."""

from __future__ import annotations

import torch

import ttnn_moe
from assertions import assert_close
from tenstorrent_setup import (
    BF16,
    NUMERICS,
    back_from_bank_order,
    check_out,
    entries,
    mesh_D,
    mesh_placement,
    mesh_run,
    refused,
)
from ttnn_moe import Problem, tenstorrent
from ttnn_moe.selfcheck.bounds import poisoned
from ttnn_moe.selfcheck.edges import Case
from ttnn_moe.selfcheck.oracle import oracle
from ttnn_moe.tenstorrent import tensors


def _mesh_layer(case: Case, contiguous: bool = False) -> None:
    inputs = case.make(BF16)
    D = mesh_D()
    placement = ttnn_moe.Placement.uniform(case.E, D) if contiguous else mesh_placement(case.E, D)
    problem = Problem.of(case.T, case.K, inputs.experts, BF16, D=D)
    layer = ttnn_moe.prepare(problem, inputs.experts, placement, backend="tenstorrent")
    want = oracle(inputs.hidden, inputs.ids, inputs.weights, inputs.experts, NUMERICS)
    clean = inputs.hidden.clone()
    clean[inputs.spoiled] = 0
    outs = []
    for hidden in (inputs.hidden, clean):
        out = poisoned(case.T, case.H, dtype=BF16)
        layer(hidden, inputs.ids, inputs.weights, out=out)
        outs.append(out)
    good = [t for t in range(case.T) if t not in inputs.spoiled]
    check_out(outs[0][good], want[good], f"1x{D}, {case}")
    # two runs have the same bits, and so have other tokens where a token is NaN; of that token nothing is promised
    assert torch.equal(outs[0][good].view(torch.int16), outs[1][good].view(torch.int16))
    start = torch.randn(case.T, case.H).to(BF16)
    added = start.clone()
    layer(inputs.hidden, inputs.ids, inputs.weights, out=added, accumulate=True)
    again = oracle(inputs.hidden, inputs.ids, inputs.weights, inputs.experts, NUMERICS, start)
    assert_close(added[good], again[good], BF16, "added")


def _spoil(inputs) -> None:
    inputs.hidden[3, 1], inputs.hidden[9, 0] = float("nan"), float("inf")
    inputs.spoiled = [3, 9]
    for weight in inputs.experts.tensors.values():
        weight.mul_(2**-10)  # so small that the matrix unit makes finite numbers of the two tokens


@mesh_run
def mesh_partition() -> None:
    """Experts in no order on every device; NaN and infinity in two tokens change no bit of another."""
    _mesh_layer(Case("partition", T=37, E=16, K=3, H=256, I=64, change=_spoil))


@mesh_run
def mesh_split() -> None:
    """Every chip holds I / D of every expert; gate and up in 4 bits, down in 8."""
    case = Case("split", T=5, E=12, K=3, H=256, I=32 * mesh_D())
    inputs = case.make(BF16)
    device, exact = tenstorrent.open_device(mesh_D()), tenstorrent.ComputeConfig("HiFi4")
    for form in ("bfloat16", "bfloat4_b,bfloat8_b"):
        layer = tenstorrent.load_experts(inputs.experts, device, split=True, weight_format=form, compute=exact)
        assert (layer.E_local, layer.I_local) == (12, 32)
        dims = (2, 2, 1)
        forms = (layer.formats.gate_up, layer.formats.gate_up, layer.formats.down)
        gate, up, down = (
            torch.cat(back_from_bank_order(w, device, of), dim).transpose(1, 2)
            for w, of, dim in zip((layer.gate, layer.up, layer.down), forms, dims, strict=True)
        )
        kept = ttnn_moe.Experts.dense(torch.cat([gate, up], 1).to(BF16).contiguous(), down.to(BF16).contiguous())
        if form == "bfloat16":
            assert all(torch.equal(kept.tensors[n], inputs.experts.tensors[n]) for n in kept.tensors)
        hidden = tensors.replicate(inputs.hidden, device)
        routing = tenstorrent.DeviceRouting(
            tensors.replicate(inputs.ids, device), tensors.replicate(inputs.weights, device)
        )
        out = tensors.to_torch(ttnn_moe.moe(hidden, routing, layer), device)
        check_out(out, oracle(inputs.hidden, inputs.ids, inputs.weights, kept, NUMERICS), f"split, {form}")
    with refused("cannot be split", "I"):
        tenstorrent.load_experts(Case("odd", T=1, E=4, K=1, H=64, I=32).make(BF16).experts, device, split=True)


@mesh_run
def mesh_banked() -> None:
    """Weights by bank have the bits of interleaved ones, of whole experts and of parts."""
    D = mesh_D()
    device = tenstorrent.open_device(D)
    inputs = Case("banked", T=9, E=D, K=2, H=256, I=96 * D).make(BF16)
    hidden = tensors.replicate(inputs.hidden, device)
    routing = tenstorrent.DeviceRouting(
        tensors.replicate(inputs.ids, device), tensors.replicate(inputs.weights, device)
    )
    want = oracle(inputs.hidden, inputs.ids, inputs.weights, inputs.experts, NUMERICS)
    for split in (False, True):
        outs = []
        for form in ("bfloat16", "bfloat16,layout=banked"):
            layer = tenstorrent.load_experts(inputs.experts, device, split=split, weight_format=form)
            outs.append(tensors.to_torch(ttnn_moe.moe(hidden, routing, layer), device))
        check_out(outs[1], want, f"banked, split {split}")
        assert torch.equal(*outs)


@mesh_run
def mesh_uniform() -> None:
    _mesh_layer(Case("uniform", T=1, E=32, K=4, H=256, I=64), contiguous=True)


@mesh_run
def mesh_narrow() -> None:
    """H that the devices cannot share by whole tiles: the sum is scattered along the tokens instead."""
    _mesh_layer(Case("narrow", T=256, E=8, K=2, H=64, I=64))


@mesh_run
def mesh_qwen3() -> None:
    _mesh_layer(Case("qwen3", T=32, E=8, K=2, H=2048, I=768))


@mesh_run
def mesh_steps_and_refusals() -> None:
    from ttnn_moe import BackendUnavailable, Placement

    inputs = Case("refused", T=8, E=16, K=2, H=256, I=64).make(BF16)
    layer = tenstorrent.load_experts(inputs.experts, placement=Placement.uniform(16, mesh_D()))
    hidden = tensors.replicate(inputs.hidden, layer.device)
    routing = tenstorrent.DeviceRouting(
        tensors.replicate(inputs.ids, layer.device), tensors.replicate(inputs.weights, layer.device)
    )
    out = ttnn_moe.moe(hidden, routing, layer)
    want = oracle(inputs.hidden, inputs.ids, inputs.weights, inputs.experts, NUMERICS)
    check_out(tensors.to_torch(out, layer.device), want, "ttnn tensors on a mesh")
    ttnn_moe.moe(hidden, routing, layer, out=out, accumulate=True)
    check_out(tensors.to_torch(out, layer.device), 2 * want, "added on a mesh")
    before = entries()
    with refused("accumulate=True needs", "accumulate"):
        ttnn_moe.moe(hidden, routing, layer, accumulate=True)
    with refused("cannot be shared evenly", "E=10"):
        Placement.uniform(10, mesh_D())
    try:
        tenstorrent.open_device(1)
    except BackendUnavailable as error:
        assert "another mesh is open" in str(error)
    else:
        raise AssertionError("a second mesh was opened")
    assert entries() == before
