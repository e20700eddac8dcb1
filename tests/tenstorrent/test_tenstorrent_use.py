"""What a caller of the Tenstorrent backend may leave out, change or do out of order; on emulated chips."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("ttnn_moe._planner", reason="native planner: not built", exc_type=ModuleNotFoundError)

import ttnn_moe  # noqa: E402
from paths import ROOT  # noqa: E402
from tenstorrent_setup import Layer, check_out, check_rows, on_device  # noqa: E402
from ttnn_moe import BackendUnavailable, ContractError, Placement, Problem, Routing, _planner, tenstorrent  # noqa: E402
from ttnn_moe.tenstorrent import runtime, tensors  # noqa: E402
from ttnn_moe.tenstorrent.backend import TenstorrentBackend  # noqa: E402
from ttnn_moe.tenstorrent.device import Device  # noqa: E402
from ttnn_moe.tenstorrent.layer_sizes import Sizes, plan_layer  # noqa: E402
from ttnn_moe.tenstorrent.runtime import DEVICE  # noqa: E402
from ttnn_moe.tenstorrent.too_large import too_large  # noqa: E402
from ttnn_moe.tenstorrent.weight_formats import FORMATS  # noqa: E402

pytestmark = pytest.mark.usefixtures("emulated", "no_files")
NAME = "tenstorrent"


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTNN_MOE_TT_CACHE", "off")


@pytest.fixture
def layer() -> Layer:
    return Layer.make(T=37, E=8, K=3, H=128, I=64)


def routing_of(layer: Layer) -> Routing:
    return Routing.from_topk(layer.ids, layer.weights, layer.E)


def prepared(layer: Layer, placement: Placement | None = None) -> ttnn_moe.backend.Prepared:
    problem = Problem.of(layer.T, layer.K, layer.experts, torch.bfloat16)
    return ttnn_moe.prepare(problem, layer.experts, placement, backend=NAME)


def test_steps_have_rows_in_order_whatever_placement_was_loaded(layer: Layer) -> None:
    op = prepared(layer, Placement.from_mapping([torch.randperm(layer.E).tolist()]))
    check_out(op(layer.hidden, layer.ids, layer.weights), layer.want())
    given = routing_of(layer), layer.experts
    steps = {"gate": ttnn_moe.gate_projection, "up": ttnn_moe.up_projection, "activations": ttnn_moe.gate_up}
    layer.mapping = torch.arange(layer.E, dtype=torch.int32)
    got = {name: step(layer.hidden, *given, row_align=32, backend=NAME) for name, step in steps.items()}
    check_rows(layer, got)
    activations = ttnn_moe.gate_up(layer.hidden, *given, row_align=32, backend="reference")
    check_out(ttnn_moe.down_projection(activations, *given, row_align=32, backend=NAME), layer.want())


@pytest.mark.parametrize("row_align", [1, 48])
def test_steps_take_any_row_align(row_align: int, layer: Layer) -> None:
    given, align = (routing_of(layer), layer.experts), {"row_align": row_align}
    real = given[0].step_layout(row_align).row_tokens >= 0
    for step in (ttnn_moe.gate_projection, ttnn_moe.up_projection, ttnn_moe.gate_up):
        got, want = (step(layer.hidden, *given, **align, backend=name) for name in (NAME, "reference"))  # type: ignore[arg-type]
        assert got.shape == want.shape and torch.allclose(got[real].float(), want[real].float(), rtol=2e-2, atol=1e-2)
    activations = ttnn_moe.gate_up(layer.hidden, *given, **align)  # type: ignore[arg-type]
    check_out(ttnn_moe.down_projection(activations, *given, **align, backend=NAME), layer.want())  # type: ignore[arg-type]


def test_weights_that_changed_in_place_are_loaded_again(layer: Layer) -> None:
    def run() -> torch.Tensor:
        return ttnn_moe.moe(layer.hidden, routing_of(layer), layer.experts, backend=NAME)

    check_out(run(), layer.want())
    layer.experts.tensors["down"].mul_(-3)
    check_out(run(), layer.want())
    down = layer.experts.tensors["down"]
    down.data = down.data * -1  # other memory
    check_out(run(), layer.want())
    assert torch.equal(run(), run())


def test_inference_tensors_have_no_versions(layer: Layer) -> None:
    with torch.inference_mode():
        made = ttnn_moe.Experts.dense(*(layer.experts.tensors[name].clone() for name in ("gate_up", "down")))
    check_out(ttnn_moe.moe(layer.hidden, routing_of(layer), made, backend=NAME), layer.want())


def test_without_a_placement_the_devices_in_use_share_the_experts_in_order(layer: Layer) -> None:
    device = tenstorrent.open_device(4)
    there = tenstorrent.load_experts(layer.experts)
    assert there.device is device and there.placement is not None
    assert torch.equal(there.placement.device_expert_mapping, Placement.uniform(8, 4).device_expert_mapping)
    check_out(ttnn_moe.moe(layer.hidden, routing_of(layer), layer.experts, backend=NAME), layer.want())
    check_out(prepared(layer)(layer.hidden, layer.ids, layer.weights), layer.want())
    split = tenstorrent.load_experts(Layer.make(T=1, E=3, K=1, H=32, I=128).experts, split=True)
    assert split.device is device and split.I_local == 32


def test_what_cannot_be_meant_on_an_open_mesh_is_refused(layer: Layer) -> None:
    tenstorrent.open_device(3)
    with pytest.raises(ContractError, match="choose a D that divides E"):
        tenstorrent.load_experts(layer.experts)
    with pytest.raises(BackendUnavailable, match=r"another mesh is open.*close_device\(\)"):
        tenstorrent.load_experts(layer.experts, placement=Placement.uniform(8, 4))
    with pytest.raises(ContractError, match=r"no placement; to fix it: open_device\(D\)"):
        tenstorrent.load_experts(layer.experts, split=True)
    with pytest.raises(ContractError, match="does not fit experts and mesh.*to fix it: another mesh"):  # 8 % 3 != 0
        tenstorrent.load_experts(layer.experts, tenstorrent.device.current(), placement=Placement.uniform(8, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("D", [1, 2])
def test_ttnn_tensors_accumulate(D: int, dtype: torch.dtype, layer: Layer) -> None:
    """The sum is fp32, and rounds once: as the host adds an fp32 result to out."""
    device = tenstorrent.open_device(D)
    experts = tenstorrent.load_experts(layer.experts)
    hidden, routing = on_device(layer, device)
    start = torch.randn(layer.T, layer.H).to(dtype)
    plain, into = (tensors.replicate(x, device, "TILE") for x in (torch.zeros(layer.T, layer.H), start))
    ttnn_moe.moe(hidden, routing, experts, out=plain)
    assert ttnn_moe.moe(hidden, routing, experts, out=into, accumulate=True) is into
    once = (tensors.to_torch(plain, device) + start).to(dtype)
    parts = tensors.parts_to_torch(into, device)
    assert len(parts) == D
    for got in parts:
        assert got.dtype == dtype and torch.allclose(got, once, rtol=0, atol=1e-5 if dtype == torch.float32 else 0)
    check_out(parts[0], layer.want(start))
    out = start.clone()
    ttnn_moe.moe(layer.hidden, routing_of(layer), layer.experts, out=out, accumulate=True, backend=NAME)
    assert torch.equal(out, parts[0]), "torch tensors take the same way"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_mesh_of_wormhole_s_simulator_accumulates(
    dtype: torch.dtype, layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stopped ttsim 1.10: ttnn's sum and cast of fp32 tensors, and fp32 tiles made on the chips of a mesh."""

    def runs(operator: str, *operands: Any) -> None:
        assert not all(x.dtype in ("float32", torch.float32) for x in operands), f"the simulator stops at {operator}"

    def from_torch(x: torch.Tensor, *, layout: str, device: Any = None, **rest: Any) -> Any:
        if device is not None and layout == library.TILE_LAYOUT:
            runs("from_torch", x)
        return made(x, layout=layout, device=device, **rest)

    def add(a: Any, b: Any, **rest: Any) -> Any:
        runs("add", a, b)
        return added(a, b, **rest)

    def typecast(x: Any, dtype: str) -> Any:
        runs("typecast", x)
        return cast(x, dtype)

    device = tenstorrent.open_device(2, device="emulator:n150")
    machine = device.machine
    device.machine = _planner.Machine(
        grid=machine.grid, l1_bytes=machine.l1_bytes, unpack_to_dest=False, dram_banks=machine.dram_banks
    )
    library = runtime.library()
    made, added, cast = library.from_torch, library.add, library.typecast
    for name, stand_in in (("from_torch", from_torch), ("add", add), ("typecast", typecast)):
        monkeypatch.setattr(library, name, stand_in, raising=False)
    start = torch.randn(layer.T, layer.H).to(dtype)
    out = start.clone()
    layer.mapping = torch.arange(layer.E, dtype=torch.int32)
    ttnn_moe.moe(layer.hidden, routing_of(layer), layer.experts, out=out, accumulate=True, backend=NAME)
    check_out(out, layer.want(start))


def test_accumulate_needs_an_out_and_out_needs_to_be_on_the_device(layer: Layer) -> None:
    device = tenstorrent.open_device(2)
    experts, (hidden, routing) = tenstorrent.load_experts(layer.experts), on_device(layer, device)
    with pytest.raises(ContractError, match=r"needs an out to add to; got no out; expected out: a ttnn tensor \[37"):
        ttnn_moe.moe(hidden, routing, experts, accumulate=True)
    with pytest.raises(ContractError, match=r"out is not a ttnn tensor; got a torch.Tensor; .*ttnn.from_torch"):
        ttnn_moe.moe(hidden, routing, experts, out=torch.zeros(37, 128))  # type: ignore[arg-type]


def test_use_after_close_says_what_to_do(layer: Layer) -> None:
    device = tenstorrent.open_device()
    experts, given = tenstorrent.load_experts(layer.experts), on_device(layer, device)
    op = prepared(layer)
    op(layer.hidden, layer.ids, layer.weights)
    tenstorrent.close_device()
    assert device.closed
    for call in (
        lambda: ttnn_moe.moe(*given, experts),
        lambda: op(layer.hidden, layer.ids, layer.weights),
        lambda: tensors.replicate(layer.hidden, device),
        lambda: tensors.empty((32, 32), "bfloat16", "TILE", device),
        lambda: tenstorrent.load_experts(layer.experts, device),
    ):
        with pytest.raises(BackendUnavailable, match=r"the device is closed.*open_device\(\), then load_experts or"):
            call()
    check_out(ttnn_moe.moe(layer.hidden, routing_of(layer), layer.experts, backend=NAME), layer.want())
    with pytest.raises(BackendUnavailable, match="the device is closed"):  # another one is open
        op(layer.hidden, layer.ids, layer.weights)


def test_the_memory_of_a_closed_chip_is_free_while_the_experts_live(layer: Layer) -> None:
    device = tenstorrent.open_device()
    ttnn_moe.moe(layer.hidden, routing_of(layer), layer.experts, backend=NAME)
    chip = weakref.ref(device.handle.devices[0])
    tenstorrent.close_device()
    del device
    gc.collect()
    assert chip() is None


def test_threads_open_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from ttnn_moe.tenstorrent.emulator import library

    opened, together, make = [], threading.Barrier(4), library.open_mesh

    def open_mesh(*args: Any) -> Any:
        opened.append(args)
        time.sleep(0.05)
        return make(*args)

    def use() -> None:
        together.wait()
        tenstorrent.open_device()

    monkeypatch.setattr(library, "open_mesh", open_mesh)
    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 1


@pytest.mark.parametrize("D", [0, -1, True, "2", 2.0, None, 33], ids=repr)
def test_a_mesh_of_no_such_size_is_refused(D: Any) -> None:
    with pytest.raises(ContractError, match="got D="):
        tenstorrent.open_device(D)
    assert tenstorrent.device.current() is None


def test_arguments_of_another_kind_are_named(layer: Layer) -> None:
    device = tenstorrent.open_device()
    load: Any = tenstorrent.load_experts
    for call, said in (
        (lambda: load(layer.experts, compute="HiFi3"), r"compute is of another kind; got 'HiFi3'; .*ComputeConfig\("),
        (lambda: load(layer.experts, weight_format=("bfloat8_b",)), "formats of weights are no text"),
        (lambda: load(layer.experts, device.handle), "device is of another kind; .*expected a Device, or None"),
        (lambda: load(layer.experts, placement=[[0]]), "placement is of another kind"),
        (lambda: load(layer), "no Experts; got"),
        (lambda: tenstorrent.attach(device), r"handle is no device; got a Device; .*attach\(device.handle\)"),
        (lambda: tenstorrent.attach(None), "handle is no device; got a NoneType"),
    ):
        with pytest.raises(ContractError, match=said):
            call()
    experts, (hidden, routing) = load(layer.experts), on_device(layer, device)
    moe: Any = tenstorrent.moe
    for given, said in (
        ((tenstorrent.route(routing, experts), experts), "routing is of another kind; got a ExpertRouting; .*Device"),
        (((1, 2), experts), "routing is of another kind; got a tuple"),
        ((routing, layer.experts), r"experts is of another kind; got a Experts; .*load_experts\("),
    ):
        with pytest.raises(ContractError, match=said):
            moe(hidden, *given)
    for T, K in ((3, 0), (-3, 2), ("3", 2)):
        with pytest.raises(ContractError, match=f"got T={T!r}, K={K}; expected integers, T >= 0 and K >= 1"):
            experts.step_rows(T, K)


class Handle:
    """A ttnn mesh device, as far as `attach` looks before it takes it."""

    def __init__(self, *shape: int):
        self.shape = shape

    def get_num_devices(self) -> int:
        return int(torch.tensor(self.shape).prod())


@pytest.mark.parametrize("shape", [(2, 4), (8, 1)])
def test_a_mesh_of_another_shape_is_refused(shape: tuple[int, int]) -> None:
    x, y = shape
    with pytest.raises(ContractError, match=rf"got {x}x{y}; expected 1xD; to fix it: mesh.reshape\(.*MeshShape\(1, 8"):
        tenstorrent.attach(Handle(*shape))
    assert tenstorrent.device.current() is None


def test_a_mesh_of_shape_1xD_is_attached() -> None:
    from ttnn_moe.tenstorrent.emulator import library

    handle = library.open_mesh(2)
    handle.shape = (1, 2)  # type: ignore[attr-defined]
    assert tenstorrent.attach(handle).D == 2


def test_an_emulated_mesh_that_was_attached_runs(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    from ttnn_moe.tenstorrent.emulator import library

    monkeypatch.delenv(DEVICE)
    device = tenstorrent.attach(library.open_mesh(2, "n150", seed=7))
    assert device.emulated and runtime.library() is library
    check_out(ttnn_moe.moe(layer.hidden, routing_of(layer), layer.experts, backend=NAME), layer.want())
    assert tenstorrent.open_device(2) is tenstorrent.open_device(2, device="emulator:n150") is device
    tenstorrent.close_device()
    assert runtime._emulated is None


def test_another_device_than_the_open_one_is_refused() -> None:
    device = tenstorrent.open_device(device="emulator")
    for same in (None, "emulator", "emulator:p150"):
        assert tenstorrent.open_device(device=same) is device
    for other in ("emulator:n150", ""):
        expected = rf"another device is open; got 'emulator:p150'; expected '{other}'; to fix it: .*close_device\(\)"
        with pytest.raises(ContractError, match=expected):
            tenstorrent.open_device(device=other)
    assert tenstorrent.device.current() is device


def test_auto_takes_the_next_backend_where_the_open_mesh_cannot() -> None:
    """Before anything moves: experts that the devices cannot share, or a placement on another number of them."""
    tenstorrent.open_device(4)
    odd = Layer.make(T=5, E=6, K=2, H=64, I=32)
    problem = Problem.of(odd.T, odd.K, odd.experts, torch.bfloat16)
    said = TenstorrentBackend().why_not(problem)
    assert said is not None and "the 4 devices that are open cannot share E=6 experts evenly; to fix it" in said
    check_out(ttnn_moe.moe(odd.hidden, routing_of(odd), odd.experts), odd.want())
    even = Problem.of(5, 2, Layer.make(T=5, E=8, K=2, H=64, I=32).experts, torch.bfloat16, D=2)
    said = TenstorrentBackend().why_not(even)
    assert said is not None and "a mesh of 4 devices is open, and the placement has 2" in said


def test_steps_of_more_tokens_than_a_program_takes_run_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    from ttnn_moe.tenstorrent import programs

    monkeypatch.setattr(programs, "MAX_T", 64)
    layer = Layer.make(T=150, E=5, K=3, H=64, I=32)
    layer.mapping = torch.arange(5, dtype=torch.int32)
    layer.ids[::7, 1] = -1
    layer.ids[::5, 2] = layer.ids[::5, 0]
    routing = routing_of(layer)
    steps = {"gate": ttnn_moe.gate_projection, "up": ttnn_moe.up_projection, "activations": ttnn_moe.gate_up}
    given = routing, layer.experts
    check_rows(layer, {name: step(layer.hidden, *given, row_align=32, backend=NAME) for name, step in steps.items()})
    activations = ttnn_moe.gate_up(layer.hidden, *given, row_align=32, backend="reference")
    start = torch.randn(layer.T, layer.H)
    for accumulate in (False, True):
        out = start.clone()
        ttnn_moe.down_projection(activations, *given, row_align=32, out=out, accumulate=accumulate, backend=NAME)
        check_out(out, layer.want(start if accumulate else None))


def test_steps_on_a_mesh_are_refused_before_weights_move(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    tenstorrent.open_device(2)
    monkeypatch.setattr("ttnn_moe.tenstorrent.host.load_experts", None)
    with pytest.raises(ContractError, match=r"run on one device; got a mesh of 2; .*open_device\(1\), or backend='ref"):
        ttnn_moe.gate_up(layer.hidden, routing_of(layer), layer.experts, row_align=32, backend=NAME)


TOO_LARGE = {"H": 4096, "I": 2304}


@pytest.mark.parametrize("opened", [True, False], ids=["open", "named"])
def test_experts_too_large_for_l1_are_refused_with_what_helps(opened: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE, "emulator:n150")
    if opened:
        tenstorrent.open_device()
    problem = Problem(T=4, E=8, K=2, dtype=torch.bfloat16, **TOO_LARGE)
    said = TenstorrentBackend().why_not(problem)
    assert said is not None and "no room for its share of an expert" in said and "8x8 cores" in said
    remedies = said.split("to fix it: ")[1]
    assert "TTNN_MOE_TT_WEIGHTS=bfloat8_b,bfloat16)" in remedies and "split=True) on a mesh of 1x" in remedies, remedies
    assert "p150" in remedies
    # every one is true
    monkeypatch.setenv("TTNN_MOE_TT_WEIGHTS", remedies.split("TTNN_MOE_TT_WEIGHTS=")[1].split(")")[0])
    assert TenstorrentBackend().why_not(problem) is None
    monkeypatch.delenv("TTNN_MOE_TT_WEIGHTS")
    tenstorrent.close_device()
    monkeypatch.setenv(DEVICE, "emulator:p150")
    assert TenstorrentBackend().why_not(problem) is None
    monkeypatch.setenv(DEVICE, "")
    assert TenstorrentBackend().why_not(problem) is None, "a card says what it is when it is opened"


@pytest.mark.parametrize(
    ("form", "fits"), [("bfloat4_b,bfloat16", "bfloat4_b,bfloat8_b"), ("bfloat16,layout=banked", "layout=banked")]
)
def test_a_format_that_fits_changes_as_little_as_it_can(form: str, fits: str) -> None:
    """Of gate and up, or of down; the layout stays."""
    device = Device.to_plan_for(_planner.find_chip("n150"), 1)
    sizes = Sizes(8, 8, 2, 4096, 3072 if "4_b" in form else 2048, form)
    said = str(too_large(device, sizes, "down does not fit"))
    found = said.split("weight_format='")[1].split("'")[0]
    assert fits in found
    plan_layer(replace(sizes, weight_format=found), device.machine, 32)


def test_too_many_experts_for_the_lists_of_routing() -> None:
    device = Device.to_plan_for(_planner.find_chip("n150"), 1)
    said = str(too_large(device, Sizes(16384, 16384, 8, 64, 64, "bfloat16"), "routing does not fit a core's L1"))
    assert "lists of routing" in said and "fewer experts a device" in said


def test_the_documented_largest_experts_are_the_planner_s() -> None:
    section = (ROOT / "docs" / "tenstorrent.md").read_text().split("### The largest experts")[1].split("\n#")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [(row[0], row[1]) for row in rows] == list(product(("n150", "n300", "p150"), FORMATS))
    for chip, form, *largest in rows:
        machine = Device.to_plan_for(_planner.find_chip(chip), 1).machine
        for H, I in zip((int(cell.removeprefix("H = ")) for cell in head[2:]), map(int, largest), strict=True):
            for local, K, more in ((8, 1, 96), (8, 8, 96), (16, 8, 96), (128, 1, 32), (128, 8, 32)):
                plan_layer(Sizes(128, local, K, H, I, form), machine, 32)
                with pytest.raises(ValueError, match="does not fit a core's L1"):
                    plan_layer(Sizes(128, local, K, H, I + more, form), machine, 32)


def test_too_large_experts_are_refused_before_weights_move(monkeypatch: pytest.MonkeyPatch) -> None:
    tenstorrent.open_device(device="emulator:n150")
    monkeypatch.setattr(tensors, "shard", None)
    shape = TOO_LARGE["H"], TOO_LARGE["I"]
    with torch.device("meta"):
        experts = ttnn_moe.Experts.dense(
            torch.empty(2, 2 * shape[1], shape[0], dtype=torch.bfloat16), torch.empty(2, *shape, dtype=torch.bfloat16)
        )
    with pytest.raises(ContractError, match="no room for its share of an expert.*weight_format='bfloat8_b,bfloat16'"):
        tenstorrent.load_experts(experts)


def test_silu_mul_names_the_size_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 48).bfloat16()
    with pytest.raises(BackendUnavailable, match="I must be a multiple of 32, the side of a tile, not 48"):
        ttnn_moe.silu_mul(x, x, backend=NAME)
    wide = torch.randn(3, 16384).bfloat16()  # as experts, H = I = 16384 would be too large
    want = (torch.nn.functional.silu(wide.float()) * wide.float()).bfloat16()
    got = ttnn_moe.silu_mul(wide, wide, backend=NAME)
    assert torch.allclose(got.float(), want.float(), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("move", [tensors.replicate, tensors.shard])
def test_a_dtype_that_kernels_do_not_read_is_named(move: Any) -> None:
    device = tenstorrent.open_device()
    with pytest.raises(ContractError, match=r"got torch.int64; expected torch.bfloat16, .*; to fix it: tensor.int\(\)"):
        move(torch.zeros(2, 2, dtype=torch.int64), device)
