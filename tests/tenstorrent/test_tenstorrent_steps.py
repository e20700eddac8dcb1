"""The steps on ttnn tensors, with the routing by expert: their results, and what they refuse; on emulated chips."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("ttnn_moe._planner", reason="native planner: not built", exc_type=ModuleNotFoundError)

from paths import ROOT  # noqa: E402
from tenstorrent_setup import Layer, check_out, check_rows, mesh_placement, on_device  # noqa: E402
from ttnn_moe import BackendUnavailable, ContractError, Routing, tenstorrent  # noqa: E402
from ttnn_moe.tenstorrent import Device, DeviceRouting, ExpertRouting, tensors  # noqa: E402
from ttnn_moe.tenstorrent.runtime import library  # noqa: E402

pytestmark = pytest.mark.usefixtures("emulated")
BOUND = 64


@pytest.fixture(autouse=True)
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTNN_MOE_TT_CACHE", "off")


@pytest.fixture
def layer() -> Layer:
    return Layer.make(T=37, E=8, K=3, H=128, I=64)


def by_expert(layer: Layer, device: Device) -> ExpertRouting:
    """A caller's tensors, as docs/tenstorrent.md lists them; nothing past an expert's tokens may be used."""
    view = Routing.from_topk(layer.ids, layer.weights, layer.E).padded
    tokens, weights = torch.full((layer.E, BOUND), 2**30, dtype=torch.int32), torch.full((layer.E, BOUND), torch.nan)
    for e, n in enumerate(view.num_routed_tokens.tolist()):
        tokens[e, :n], weights[e, :n] = view.routed_tokens[e, :n], view.routed_token_weights[e, :n]
    counts = view.num_routed_tokens.reshape(1, layer.E).int()
    given = (tensors.replicate(x, device) for x in (counts, tokens, weights.bfloat16()))
    return ExpertRouting(layer.T, layer.K, *given)


@pytest.mark.parametrize("D", [1, 2])
@pytest.mark.parametrize("given", [True, False], ids=["out given", "allocated"])
def test_steps_take_a_routing_by_expert(D: int, given: bool, layer: Layer) -> None:
    device = tenstorrent.open_device(D)
    experts = tenstorrent.load_experts(layer.experts)
    routing, (hidden, _) = by_expert(layer, device), on_device(layer, device)
    form = (experts.step_rows(layer.T, layer.K), layer.I), "bfloat16", "TILE"
    outs = [tensors.empty(*form, device) if given else None for _ in range(4)]
    gate = tenstorrent.gate_projection(hidden, routing, experts, out=outs[0])
    up = tenstorrent.up_projection(hidden, routing, experts, out=outs[1])
    apart = tenstorrent.silu_mul(gate, up, routing, experts, out=outs[2])
    fused = tenstorrent.gate_up(hidden, routing, experts, out=outs[3])
    made = [gate, up, apart, fused]
    assert not given or all(one is out for one, out in zip(made, outs, strict=True))
    assert len({one.buffer_address() for one in made}) == 4, "no step overwrites another's result"
    start = torch.randn(layer.T, layer.H).bfloat16()
    for activations in (apart, fused):
        out = tensors.replicate(start, device, "TILE")
        assert tenstorrent.down_projection(activations, routing, experts, out=out, accumulate=True) is out
        plain = tenstorrent.down_projection(activations, routing, experts)
        assert plain.dtype == ("bfloat16" if D == 1 else "float32")
        rows = {"gate": gate, "up": up, "activations": activations}
        for d in range(D):
            assert experts.placement is not None
            layer.mapping = experts.placement.device_expert_mapping[d]
            check_rows(layer, {name: tensors.parts_to_torch(one, device)[d] for name, one in rows.items()})
            check_out(tensors.parts_to_torch(out, device)[d], layer.want(start), f"device {d}, added")
            check_out(tensors.parts_to_torch(plain, device)[d], layer.want(), f"device {d}")


@pytest.mark.parametrize("chip", ["n150", "p150"])
def test_each_device_of_a_mesh_runs_the_steps_of_its_experts(chip: str) -> None:
    """The code of docs/tenstorrent.md: a step runs on all devices, each with its own experts."""
    D, layer = 8, Layer.make(T=100, E=32, K=8, H=128, I=64)
    device = tenstorrent.open_device(D, device=f"emulator:{chip}")
    placement = mesh_placement(layer.E, D)
    experts = tenstorrent.load_experts(layer.experts, placement=placement)
    hidden, by_token = on_device(layer, device)
    page = (ROOT / "docs" / "tenstorrent.md").read_text().split("### Step by step")[1]
    names = {"tenstorrent": tenstorrent, "hidden": hidden, "layer": experts, **vars(by_token)}
    exec(page.split("```python\n")[1].split("```")[0], names)
    rows = {name: tensors.parts_to_torch(names[name], device) for name in ("gate", "up", "activations")}
    counts = tensors.parts_to_torch(names["routing"].num_routed_tokens, device)
    for d, part in enumerate(tensors.parts_to_torch(names["out"], device)):
        layer.mapping = placement.device_expert_mapping[d]
        own = torch.isin(torch.arange(layer.E), layer.mapping)
        assert torch.equal(counts[d][0], torch.bincount(layer.ids.flatten(), minlength=layer.E) * own)
        check_rows(layer, {name: parts[d] for name, parts in rows.items()})
        check_out(part, layer.want(), f"device {d}")


@pytest.mark.parametrize(("T", "K"), [(1, 1), (33, 3)])
def test_one_token_and_one_more_than_a_tile_of_tokens(T: int, K: int) -> None:
    layer, device = Layer.make(T=T, E=8, K=K, H=128, I=64), tenstorrent.open_device()
    experts, (hidden, by_token) = tenstorrent.load_experts(layer.experts), on_device(layer, device)
    routing = tenstorrent.route(by_token, experts)
    out = tenstorrent.down_projection(tenstorrent.gate_up(hidden, routing, experts), routing, experts)
    layer.mapping = torch.arange(layer.E, dtype=torch.int32)
    check_out(tensors.to_torch(out, device), layer.want())


def test_route_keeps_what_a_call_before_it_returned(layer: Layer) -> None:
    device = tenstorrent.open_device()
    experts, (hidden, by_token) = tenstorrent.load_experts(layer.experts), on_device(layer, device)
    first = tenstorrent.route(by_token, experts)
    other = Layer.make(T=40, E=8, K=3, H=128, I=64, seed=1)
    tenstorrent.route(on_device(other, device)[1], experts)
    out = tenstorrent.down_projection(tenstorrent.gate_up(hidden, first, experts), first, experts)
    layer.mapping = torch.arange(layer.E, dtype=torch.int32)
    check_out(tensors.to_torch(out, device), layer.want())


class On:
    """The arguments of every step, all of them right."""

    def __init__(self, layer: Layer):
        self.device = tenstorrent.open_device()
        self.experts = tenstorrent.load_experts(layer.experts)
        self.routing = by_expert(layer, self.device)
        self.hidden, self.by_token = on_device(layer, self.device)
        self.rows = self.tiles(self.experts.step_rows(layer.T, layer.K), layer.I)

    def tiles(self, *shape: int, dtype: str = "bfloat16", layout: str = "TILE") -> Any:
        return tensors.empty(shape, dtype, layout, self.device)

    def routed(self, **changed: Any) -> ExpertRouting:
        return replace(self.routing, **changed)

    def gate_up(self, **changed: Any) -> Any:
        given = {"hidden": self.hidden, "routing": self.routing, "experts": self.experts, **changed}
        return tenstorrent.gate_up(**given)

    def down(self, **changed: Any) -> Any:
        given = {"activations": self.rows, "routing": self.routing, "experts": self.experts, **changed}
        return tenstorrent.down_projection(**given)


# by what is wrong: the call, and what the error says
REFUSED: dict[str, tuple[Callable[[On], Any], str]] = {
    "weights of fp32": (
        lambda on: on.down(routing=on.routed(routed_token_weights=on.tiles(8, BOUND, dtype="float32"))),
        r"routed_token_weights has the wrong dtype; got float32; expected bfloat16; to fix it: ttnn.typecast\(routed_",
    ),
    "T columns": (
        lambda on: on.gate_up(routing=on.routed(routed_tokens=on.tiles(8, 37, dtype="int32", layout="ROW_MAJOR"))),
        r"routed_tokens has the wrong shape; got \(8, 37\); expected \(8, 64\); to fix it: ttnn.pad to 64 columns",
    ),
    "a vector": (
        lambda on: on.gate_up(routing=on.routed(num_routed_tokens=on.tiles(8, dtype="int32", layout="ROW_MAJOR"))),
        r"got \(8,\); expected \(1, 8\); to fix it: ttnn.reshape\(num_routed_tokens, \[1, 8\]\)",
    ),
    "tokens in tiles": (
        lambda on: on.gate_up(routing=on.routed(routed_tokens=on.tiles(8, BOUND, dtype="int32"))),
        "routed_tokens has the wrong layout; got TILE_LAYOUT; expected ROW_MAJOR; to fix it: ttnn.to_layout",
    ),
    "32 rows of out": (
        lambda on: on.down(out=on.tiles(32, 128)),
        r"out has the wrong shape; got \(32, 128\); expected \(37, 128\)",
    ),
    "nothing to add to": (lambda on: on.down(accumulate=True), r"needs an out to add to; .*\[37, 128\] in tiles"),
    "rows of activations": (lambda on: on.down(activations=on.tiles(64, 64)), "activations has the wrong shape"),
    "hidden of another T": (lambda on: on.gate_up(routing=on.routed(T=38)), r"hidden .* \(37, 128\); expected \(38, "),
    "T of no call": (lambda on: on.gate_up(routing=on.routed(T=0)), "got T=0, K=3; expected integers from 1 on"),
    "too many tokens": (
        lambda on: on.gate_up(routing=on.routed(T=5000)),
        "T is beyond .* got 5000; expected T <= 4096",
    ),
    "out of gate_up": (lambda on: on.gate_up(out=on.tiles(96, 64)), r"out has the wrong shape; got \(96, 64\)"),
    "fp32 out of gate_up": (
        lambda on: on.gate_up(out=on.tiles(*on.rows.shape, dtype="float32")),
        "out has the wrong dtype; got float32; expected bfloat16",
    ),
    "out of silu_mul": (
        lambda on: tenstorrent.silu_mul(on.rows, on.rows, on.routing, on.experts, out=on.tiles(96, 64)),
        "out has the wrong shape",
    ),
    "up of silu_mul": (
        lambda on: tenstorrent.silu_mul(on.rows, on.tiles(96, 64), on.routing, on.experts),
        r"up has the wrong shape; got \(96, 64\)",
    ),
    "a sharded hidden": (
        lambda on: on.gate_up(hidden=sharded(on.hidden)),
        "hidden is not interleaved in DRAM; got ShardedMemoryConfig.*; to fix it: ttnn.to_memory_config.hidden, ",
    ),
    "a sharded hidden of moe": (
        lambda on: tenstorrent.moe(sharded(on.hidden), on.by_token, on.experts),
        "hidden is not interleaved in DRAM; got ShardedMemoryConfig",
    ),
    "tiles of a matrix": (
        lambda on: on.gate_up(experts=on.tiles(8, 128, 64)),
        r"experts is of another kind; got a Tensor; expected a tenstorrent.DeviceExperts; to fix it: load_experts\(",
    ),
    "a routing by token": (
        lambda on: on.gate_up(routing=on.by_token),
        r"routing is of another kind; got a DeviceRouting; .*ExpertRouting; to fix it: route\(by_token, experts\)",
    ),
    "ids of one token": (
        lambda on: tenstorrent.route(DeviceRouting(on.tiles(3, dtype="int32", layout="ROW_MAJOR"), None), on.experts),
        r"topk_ids has the wrong shape; got \(3,\); expected \[T, K\]",
    ),
    "ids of no token": (
        lambda on: tenstorrent.route(DeviceRouting(SimpleNamespace(shape=(0, 3)), None), on.experts),
        r"topk_ids has the wrong shape; got \(0, 3\); expected \[T, K\], both from 1 on",
    ),
    "tokens of no expert": (
        lambda on: tenstorrent.route(DeviceRouting(SimpleNamespace(shape=(37, 0)), None), on.experts),
        r"topk_ids has the wrong shape; got \(37, 0\); expected \[T, K\], both from 1 on",
    ),
    "ids in bf16": (
        lambda on: tenstorrent.route(replace(on.by_token, topk_ids=on.tiles(37, 3, layout="ROW_MAJOR")), on.experts),
        "topk_ids has the wrong dtype; got bfloat16; expected int32",
    ),
    "weights of topk in bf16": (
        lambda on: tenstorrent.route(
            replace(on.by_token, topk_weights=on.tiles(37, 3, layout="ROW_MAJOR")), on.experts
        ),
        "topk_weights has the wrong dtype; got bfloat16; expected float32",
    ),
}


def sharded(tensor: Any) -> Any:
    ttnn = library()
    core = ttnn.CoreCoord(0, 0)
    place = ttnn.create_sharded_memory_config(
        (32, 128),
        core_grid=ttnn.CoreRangeSet({ttnn.CoreRange(core, core)}),
        strategy=ttnn.ShardStrategy.HEIGHT,
        use_height_and_width_as_shard_shape=True,
    )
    return ttnn.to_memory_config(tensor, place)


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_tensors_are_refused_before_a_program_runs(name: str, layer: Layer, monkeypatch: Any) -> None:
    call, said = REFUSED[name]
    on = On(layer)
    monkeypatch.setattr(type(on.device.handle), "launch", None)
    with pytest.raises(ContractError, match=said):
        call(on)


def test_a_closed_device_is_named(layer: Layer) -> None:
    on = On(layer)
    tenstorrent.close_device()
    for call in (on.gate_up, lambda: on.tiles(32, 32), lambda: tensors.shard(torch.zeros(1, 32), on.device)):
        with pytest.raises(BackendUnavailable, match="the device is closed"):
            call()
