"""Scratch of prepared layers: one for each stream, and one call's launches at a time."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import ttnn_moe
from cuda_gpus import gpu_of, pretend
from cuda_layers import random_experts, random_routing
from ttnn_moe import Experts, Problem, Routing, registry
from ttnn_moe.cuda.arch import ARCHES, HOPPER, Target
from ttnn_moe.cuda.device import H200
from ttnn_moe.cuda.jit.spec import Spec
from ttnn_moe.cuda.moe import prepared, warmup
from ttnn_moe.cuda.moe.cuda_cpp import CudaCpp
from ttnn_moe.cuda.moe.families import Chosen, choose
from ttnn_moe.cuda.moe.family import Buffer, Call
from ttnn_moe.cuda.moe.prepared import PreparedCuda, Workspace

PROBLEM = Problem(8, 16, 4, 64, 64, torch.float32)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the current stream of an H200 that is not here; its memory is the host's."""
    pretend(monkeypatch, H200)
    current = [7]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: current[0], raising=False)

    def enter(stream: int) -> None:
        current[0] = stream

    return enter


def workspace(sums: bool = False) -> Workspace:
    made = Workspace(PROBLEM, torch.device("cpu"), sums)
    made._index = 0  # as of a GPU's
    return made


@pytest.mark.parametrize("sums", [False, True])
def test_streams_share_no_scratch(streams: Callable[[int], None], sums: bool) -> None:
    space, found = workspace(sums), {}
    chosen = choose(PROBLEM, prepared.target_of(torch.device("cpu")))
    assert isinstance(chosen, Chosen)
    for stream in (7, 8, 9, 7, 8):
        streams(stream)
        scratch = space.scratch()
        held = [*scratch.buffers(chosen), *([scratch.sums] if sums else [])]
        found.setdefault(stream, held)
        assert [x.data_ptr() for x in found[stream]] == [x.data_ptr() for x in held], "a stream keeps its scratch"
    addresses = [{x.data_ptr() for x in held} for held in found.values()]
    assert not any(a & b for i, a in enumerate(addresses) for b in addresses[:i])


def test_a_stream_first_seen_in_inference_mode(streams: Callable[[int], None]) -> None:
    space = workspace(sums=True)
    with torch.inference_mode():
        scratch = space.scratch()
    assert scratch.sums is not None
    scratch.sums.fill_(1.0)


def test_scratch_goes_with_its_owner(streams: Callable[[int], None]) -> None:
    """At once: a garbage collection may come late, and GPU memory is short until then."""
    gc.collect()
    gc.disable()
    try:
        space = workspace(sums=True)
        chosen = choose(PROBLEM, prepared.target_of(torch.device("cpu")))
        assert isinstance(chosen, Chosen)
        scratch = space.scratch()
        assert scratch.buffers(chosen) is scratch.buffers(chosen)
        held = [weakref.ref(scratch._memory), weakref.ref(scratch.sums)]
        del space, scratch
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()


def test_layers_prepared_at_the_same_time_share_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Workspace.__init__

    def slowly(self: Workspace, *args: object) -> None:
        time.sleep(0.1)
        make(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Workspace, "__init__", slowly)
    pretend(monkeypatch, H200)
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda _: Workspace.of(PROBLEM, torch.device("cpu"), False), range(2))
    assert one is two


def test_sums_are_fp32_whatever_the_default_is(streams: Callable[[int], None]) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        sums = workspace(sums=True).scratch().sums
    finally:
        torch.set_default_dtype(before)
    assert sums is not None and sums.dtype == torch.float32


class Slow:
    """A family of two launches, between which another thread may run."""

    alignment = 1

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(2)

    def launch(self, plan: object, call: Call, buffers: tuple[Tensor, ...]) -> None:
        (act,) = buffers
        act.copy_(call.hidden)
        for _ in range(50):
            self.pool.submit(int).result()  # lets other threads run
        call.out.copy_(2 * act)


def test_the_launches_of_one_call_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads on one stream, with two layers of one problem."""
    pretend(monkeypatch, H200)
    T, H = PROBLEM.T, PROBLEM.H
    chosen = Chosen(Slow(), None, (Buffer((T, H), torch.float32),), {})  # type: ignore[arg-type]
    monkeypatch.setattr(prepared, "chosen_for", lambda call: chosen)
    experts = Experts.dense(torch.zeros(16, 128, 64), torch.zeros(16, 64, 64))
    layers = [PreparedCuda(PROBLEM, experts, None) for _ in range(2)]
    assert layers[0]._space is layers[1]._space
    ids, weights = torch.zeros(T, 4, dtype=torch.int32), torch.zeros(T, 4)

    def work(number: int) -> bool:
        x = torch.full((T, H), float(number))
        return all(torch.equal(layers[number](x, ids, weights), 2 * x) for _ in range(20))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(work, range(2)))


gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not registry.probe("cuda").available, reason=f"cuda: {registry.probe('cuda').reason}"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]


def _gpu(test: Callable[..., None]) -> Callable[..., None]:
    for mark in gpu:
        test = mark(test)
    return test


@_gpu
@pytest.mark.parametrize("T", [1, 8, 200])
@pytest.mark.parametrize("how", ["threads on one stream", "threads on streams", "streams", "graphs"])
def test_calls_at_the_same_time(T: int, how: str) -> None:
    """Two layers of one problem, called at the same time, give what each gives alone."""
    E, K, H, I = 32, 4, 512, 256
    layers, calls, want = [], [], []
    for _ in range(2):
        experts, routing = random_experts(E, H, I), random_routing(T, E, K)
        hidden = torch.randn(T, H, device="cuda").bfloat16()
        layers.append(ttnn_moe.prepare(Problem.of(T, K, experts, torch.bfloat16), experts, backend="cuda"))
        calls.append((hidden, routing.topk_ids, routing.topk_weights))
        want.append(ttnn_moe.moe(hidden, routing, experts, backend="cuda"))
    outs = [torch.empty(50, T, H, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    torch.cuda.synchronize()
    side = [torch.cuda.Stream() for _ in range(2)]

    def work(i: int) -> None:
        with torch.cuda.stream(side[0 if how == "threads on one stream" else i]):
            for out in outs[i]:
                layers[i](*calls[i], out=out)

    if how == "graphs":
        graphs = []
        for i in range(2):
            work(i)
            torch.cuda.synchronize()
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[i], stream=side[i]):
                work(i)
        for out in outs:
            out.zero_()
        torch.cuda.synchronize()
        for i in range(2):
            with torch.cuda.stream(side[i]):
                graphs[i].replay()
    elif how == "streams":
        for first in range(50):
            for i in range(2):
                with torch.cuda.stream(side[i]):
                    layers[i](*calls[i], out=outs[i][first])
    else:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, range(2)))
    torch.cuda.synchronize()
    for i in range(2):
        assert all(torch.equal(out, want[i]) for out in outs[i])


@_gpu
def test_a_write_by_a_kernel_is_seen_by_autograd() -> None:
    T, E, K, H, I = 4, 8, 2, 128, 64
    experts, routing = random_experts(E, H, I), random_routing(T, E, K)
    hidden = torch.randn(T, H, device="cuda").bfloat16()
    out, factor = torch.ones_like(hidden), torch.ones_like(hidden, requires_grad=True)
    product = factor * out
    ttnn_moe.moe(hidden, routing, experts, out=out, backend="cuda")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@_gpu
@pytest.mark.parametrize("T", [1, 3, 200])
def test_negative_views_on_the_gpu(T: int) -> None:
    E, K, H, I = 8, 2, 128, 64
    experts, routing = random_experts(E, H, I), random_routing(T, E, K)
    hidden = torch.randn(T, H, device="cuda").bfloat16()
    want = ttnn_moe.moe(hidden, routing, experts, backend="cuda")
    weights = torch._neg_view(-routing.topk_weights)  # type: ignore[attr-defined]
    again = Routing.from_topk(routing.topk_ids, weights, E)
    got = ttnn_moe.moe(torch._neg_view(-hidden), again, experts, backend="cuda")  # type: ignore[attr-defined]
    assert torch.equal(got, want)


def test_kernels_of_a_problem_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of the same problem, or of one already compiled, compiles nothing."""
    asked: list[list[Spec]] = []
    monkeypatch.setattr(warmup.pool, "missing", lambda specs, store: list(specs))
    monkeypatch.setattr(warmup.pool, "compile_all", lambda specs, store: asked.append(specs))
    monkeypatch.setattr(warmup, "_MADE", set())
    problem = Problem(64, 128, 8, 2048, 768, device="cuda")
    target = Target(H200, HOPPER)
    assert warmup.compile_up_to(problem, target) == len(asked[0]) > 4
    assert warmup.compile_up_to(problem, target) == 0 and len(asked) == 1
    assert warmup.compile_up_to(problem, Target(H200, None, "no NVRTC")) == 0 and len(asked) == 1
    warmup.compile_up_to(problem, target, 33, ids64=True, add=True)
    assert len(asked) == 2 and all(("ID64", "1") in spec.defines for spec in asked[1] if "sort" in spec.name)


SIZES = [
    ("dense", (128, 8, 2048, 768), HOPPER, H200),
    ("int4_24", (128, 8, 2048, 768), HOPPER, H200),
    ("mxfp4", (32, 4, 2880, 2880), HOPPER, H200),
    ("dense", (60, 4, 2048, 1408), ARCHES[8, 0], gpu_of((8, 0), 108)),
]


@pytest.mark.parametrize(("weight_format", "sizes", "arch", "gpu"), SIZES)
def test_no_call_needs_a_kernel_that_was_not_compiled(weight_format, sizes, arch, gpu) -> None:
    E, K, H, I = sizes
    problem = Problem(4096, E, K, H, I, weight_format=weight_format, device="cuda")
    target = Target(gpu, arch)
    made = {*warmup.specs_up_to(problem, target)}
    for T in (*range(1, 200), *range(200, 4097, 37)):
        chosen = choose(replace(problem, T=T), target)
        assert isinstance(chosen, Chosen) and isinstance(chosen.family, CudaCpp)
        assert {use.spec for use in chosen.family.uses(chosen.plan, False, False)} <= made, T
