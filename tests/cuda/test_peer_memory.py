"""Expert parallelism by the CUDA kernels of dispatch and combine: what refuses it, and layers on two GPUs."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from model_ranks import by_ranks
from ttnn_moe import accelerator
from ttnn_moe.contract import Experts, Placement, Problem, Routing
from ttnn_moe.cuda.combine.channel import Came, Sizes
from ttnn_moe.errors import ContractError
from ttnn_moe.parallel import ExpertParallel, exchanges
from ttnn_moe.parallel.exchanges import Topology, agreement, peer_memory, symmetric
from ttnn_moe.parallel.exchanges.exchange import world_of
from ttnn_moe.parallel.exchanges.hierarchical import MACHINES
from ttnn_moe.parallel.exchanges.peer_memory import PeerMemoryExchange
from ttnn_moe.parallel.hierarchical import Nodes
from ttnn_moe.parallel.ranks import Ranks
from ttnn_moe.reference import ReferenceBackend
from ttnn_moe.registry import choose

BF16 = torch.bfloat16
PROBLEM = Problem(64, 16, 4, 256, 128, BF16, D=2, device="cuda")


@pytest.mark.parametrize(
    ("problem", "changes", "why"),
    [
        (PROBLEM, {"placement": Placement.uniform(16, 1, 0)}, "1 ranks"),
        (PROBLEM, {"placement": Placement.uniform(16, 16, 0)}, "16 ranks"),
        (PROBLEM, {"wire": torch.float32}, "wire=torch.bfloat16"),
        (PROBLEM, {"nodes": Nodes(2, 2)}, "4 ranks"),
        (replace(PROBLEM, H=260), {}, "H=260"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_why_not(problem: Problem, changes: dict, why: str) -> None:
    runs = choose(replace(PROBLEM, device="cpu", D=1), "reference")
    topology = Topology(Placement.uniform(16, 2, 0), runs, wire=BF16)
    said = PeerMemoryExchange.why_not(problem, replace(topology, **changes))
    assert said is not None and why in said


def chosen_of(ranks: Ranks, T: int, connected: bool) -> None:
    """Rank 0's GPU copies in bulk, through shared memory that T tokens of a rank may not fit; the others' do not."""
    torch.cuda.is_available = lambda: True
    peer_memory.gpu = lambda: SimpleNamespace(capability=(8 + (ranks.rank == 0), 0))  # type: ignore[assignment]
    peer_memory._reaches_peers = lambda: connected or ranks.rank == 0
    placement = Placement.uniform(16, ranks.size, ranks.rank)
    runs = choose(replace(PROBLEM, device="cpu", D=1), "reference")
    exchanges.choose("hierarchical", replace(PROBLEM, T=T, D=ranks.size), Topology(placement, runs, wire=BF16))


@pytest.mark.parametrize(
    ("T", "connected", "why"), [(1 << 20, True, "rank 0: .*shared memory"), (64, False, "rank 1: .*GPU does not reach")]
)
def test_all_ranks_refuse_where_one_cannot(T: int, connected: bool, why: str, tmp_path: Path) -> None:
    begin, timeout = time.monotonic(), 40.0
    for failed in by_ranks(chosen_of, 2, tmp_path, T, connected, timeout=timeout):
        assert failed.kind == "BackendUnavailable" and re.search(why, failed.text), failed
    assert time.monotonic() - begin < timeout / 2, "a rank waited for the timeout"


def odd(rows: torch.Tensor) -> torch.Tensor:
    """The same rows, contiguous, at no multiple of 16 bytes."""
    flat = torch.cat((rows.new_zeros(1), rows.flatten()))
    return flat[1:].view(rows.shape)


def test_rows_that_are_not_aligned_are_copied() -> None:
    """The kernels load 16 bytes at a time."""
    sent: list[torch.Tensor] = []

    class Channel:
        def dispatch(self, hidden: torch.Tensor, *_: object) -> None:
            sent.append(hidden)
            raise InterruptedError

    exchange = PeerMemoryExchange.__new__(PeerMemoryExchange)
    exchange._channel = exchange._local = Channel()  # type: ignore[assignment]
    exchange._counts = torch.arange(4, dtype=torch.int32)[:, None]
    rows, routing = torch.randn(3, 8).to(BF16), Routing.from_topk(torch.zeros(3, 2).int(), torch.ones(3, 2), 4)
    assert odd(rows).data_ptr() % 16
    for hidden in (rows, odd(rows), rows.t().contiguous().t()):
        with pytest.raises(InterruptedError):
            exchange(hidden, routing, None)  # type: ignore[arg-type]
        assert torch.equal(sent[-1], rows) and sent[-1].is_contiguous() and sent[-1].data_ptr() % 16 == 0
    assert sent[0] is rows, "no copy is made without need"


@pytest.mark.parametrize(("given", "sent"), [(None, 3), (2, 2), (3, 3), (5, 3), (0, 0)])
@pytest.mark.parametrize("most", [3, 8])
def test_no_token_past_the_rows_of_a_call_is_sent(given: int | None, sent: int, most: int) -> None:
    """The kernels know the most tokens of a call, and no more of this one than its number."""
    counts: list[int] = []

    class Channel:
        def dispatch(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, T: torch.Tensor) -> None:
            counts.append(min(int(T), most))  # as the kernels read it
            raise InterruptedError

    exchange = PeerMemoryExchange.__new__(PeerMemoryExchange)
    exchange._channel = exchange._local = Channel()  # type: ignore[assignment]
    exchange._counts = torch.arange(most + 1, dtype=torch.int32)[:, None]
    number = None if given is None else torch.tensor(given, dtype=torch.int32)
    routing = Routing.from_topk(torch.zeros(3, 2).int(), torch.ones(3, 2), 4, num_tokens=number)
    with pytest.raises(InterruptedError):
        exchange(torch.randn(3, 8).to(BF16), routing, None)  # type: ignore[arg-type]
    assert counts == [sent]


def test_ranks_whose_heaps_have_other_parts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's GPU copies in bulk, the other's does not: the rings of their heaps lie elsewhere."""
    own, other = (Sizes(2, 1, 256, 64, BF16, 4, 8, fast).plans()[0] for fast in (True, False))

    def gather(facts: dict[str, str], group: object) -> list[dict[str, str]]:
        return [facts, {name: str(getattr(other, name)) for name in facts}]

    monkeypatch.setattr(agreement, "gather", gather)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    with pytest.raises(ContractError, match="rank 1: bulk: got False, expected True as rank 0"):
        peer_memory._heap(own, None)  # type: ignore[arg-type]


def heap_of(ranks: Ranks, fails: str) -> tuple[torch.Tensor, list[int]]:
    """Symmetric memory of the CPU; this step of it fails on rank 1."""

    def step(name: str) -> None:
        if ranks.rank == 1 and fails == name:
            raise torch.OutOfMemoryError(f"no memory in {name}")

    def empty(nbytes: int, **options: Any) -> torch.Tensor:
        step("empty")
        return torch.full((nbytes,), 9, **options)

    def rendezvous(memory: torch.Tensor, group: dist.ProcessGroup) -> SimpleNamespace:
        dist.barrier(group)  # torch's waits for all ranks, too
        step("rendezvous")
        return SimpleNamespace(buffer_ptrs=[7] * ranks.size)

    symmetric_memory.empty, symmetric_memory.rendezvous = empty, rendezvous
    torch.cuda.synchronize = lambda *_: None
    return symmetric.shared(256, torch.device("cpu"), world_of(ranks.group), "remedy")


@pytest.mark.parametrize("step", ["empty", "rendezvous"])
def test_all_ranks_raise_at_once_where_one_has_no_memory(step: str, tmp_path: Path) -> None:
    begin, timeout = time.monotonic(), 40.0
    for failed in by_ranks(heap_of, 3, tmp_path, step, timeout=timeout):
        assert failed.kind == "BackendUnavailable", failed
        assert f"rank 1: OutOfMemoryError: no memory in {step}" in failed.text and "to fix it: remedy" in failed.text
        assert "rank 0:" not in failed.text
    assert time.monotonic() - begin < timeout / 2, "a rank waited for the timeout"


def test_memory_of_all_ranks(tmp_path: Path) -> None:
    for memory, addresses in by_ranks(heap_of, 3, tmp_path, "none"):
        assert not memory.any() and len(memory) == 256 and addresses == [7, 7, 7]


class Alone:
    """A channel between no ranks: what is sent comes to the rank itself."""

    def __init__(self, T: int, R: int):
        A, H, K = R * T, PROBLEM.H, PROBLEM.K
        self.expert_out = torch.zeros(A, H, dtype=BF16)
        ids, count = torch.full((A, K), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        self.came = Came(torch.zeros(A, H, dtype=BF16), ids, torch.zeros(A, K), count)

    def dispatch(self, *_: object) -> Came:
        return self.came

    def combine(self, out: torch.Tensor, *_: object) -> None:
        out.zero_()

    def seen(self) -> None:
        pass


def first_call_of(ranks: Ranks, fails: int) -> torch.Tensor:
    """A layer, and its first call; this rank has no memory for the scratch of its experts."""
    prepare = ReferenceBackend.prepare

    def prepared(*given: Any) -> Any:
        if ranks.rank == fails:
            raise torch.OutOfMemoryError("no memory for scratch")
        return prepare(*given)

    ReferenceBackend.prepare = prepared  # type: ignore[method-assign]
    return layer_of(ranks, lambda problem, topology: Alone(problem.T, ranks.size))


def layer_of(ranks: Ranks, channel_of: Any) -> torch.Tensor:
    """What the first call of a layer gives, whose ranks share such a channel."""
    PeerMemoryExchange.why_not = lambda problem, topology: None  # type: ignore[assignment]
    peer_memory._channel_of = channel_of
    torch.cuda.current_device = lambda: "cpu"
    MACHINES["cpu"] = PeerMemoryExchange
    problem = replace(PROBLEM, device="cpu", D=ranks.size)
    experts = Experts.dense(torch.zeros(8, 256, 256, dtype=BF16), torch.zeros(8, 256, 128, dtype=BF16))
    placement = Placement.uniform(16, ranks.size, ranks.rank)
    layer = ExpertParallel(problem, experts, placement, backend="reference", exchange="hierarchical", wire=BF16)
    dist.barrier()
    return layer(torch.ones(4, 256, dtype=BF16), torch.zeros(4, 4, dtype=torch.int32), torch.ones(4, 4))


def test_all_ranks_raise_at_once_where_one_has_no_memory_for_its_experts(tmp_path: Path) -> None:
    """Behind its dispatch a rank may not find that out: the others' kernels would wait for the timeout."""
    for failed in by_ranks(first_call_of, 2, tmp_path, 1):
        assert failed.kind == "BackendUnavailable", failed
        assert (
            "rank 1: OutOfMemoryError: no memory for scratch" in failed.text and "exchange='all_to_all'" in failed.text
        )


def test_the_first_call_finds_its_experts_ready(tmp_path: Path) -> None:
    for out in by_ranks(first_call_of, 2, tmp_path, -1):
        assert not out.any() and len(out) == 4


class Devices:
    """A module of devices, of which another one than the experts' is current."""

    current = "another"

    def current_device(self) -> int:
        return 5

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.current, before = str(device), self.current
        yield
        self.current = before


def where_it_runs(ranks: Ranks) -> list[str]:
    """The current device while a layer makes its channel, and while its call dispatches and combines."""
    devices, seen = Devices(), []
    accelerator.is_accelerator, accelerator.module_of = lambda device: True, lambda device: devices

    class Seen(Alone):
        def __init__(self, *sizes: int):
            super().__init__(*sizes)
            seen.append(devices.current)

        def dispatch(self, *given: object) -> Came:
            seen.append(devices.current)
            return super().dispatch(*given)

        def combine(self, *given: Any) -> None:
            seen.append(devices.current)
            super().combine(*given)

    layer_of(ranks, lambda problem, topology: Seen(problem.T, ranks.size))
    return [*seen, devices.current]


def test_the_experts_device_is_current_in_a_layer(tmp_path: Path) -> None:
    """Else peers would get another GPU's memory, and kernels would be launched there."""
    assert by_ranks(where_it_runs, 2, tmp_path) == [["cpu", "cpu", "cpu", "another"]] * 2


def test_layers_of_a_channel_share_one_scratch_on_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that only one rank takes can then not lack memory."""
    owners: list[object] = []

    class InTurn(ReferenceBackend):  # a class of its own: Python remembers which classes fit a protocol
        def prepare_in_turn(self, problem: Problem, experts: Experts, placement: None, owner: object) -> Any:
            owners.append(owner)
            return self.prepare(problem, experts, placement)

    monkeypatch.setattr(agreement, "gather", lambda said, group: [said])
    channel: Any = Alone(8, 2)
    topology = Topology(
        Placement.uniform(16, 2, 0), choose(replace(PROBLEM, device="cpu", D=1), "reference"), wire=BF16
    )
    monkeypatch.setattr(peer_memory.registry, "choose", lambda problem, name: InTurn())
    for _ in range(2):
        exchange = PeerMemoryExchange(channel, replace(PROBLEM, T=8), topology)
        exchange.ready(Experts.dense(torch.zeros(8, 256, 256, dtype=BF16), torch.zeros(8, 256, 128, dtype=BF16)))
    assert owners == [channel, channel]


@pytest.mark.gpu
@pytest.mark.parametrize(("gpus", "nodes"), [(2, None), (4, None), (4, Nodes(2, 2))], ids=str)
def test_layers_on_several_gpus(gpus: int, nodes: Nodes | None, tmp_path: Path) -> None:
    """Eager and replayed from a graph: as all_to_all but for the rounding of partials, and the same every time."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (gpus, nodes, port, str(tmp_path)), nprocs=gpus)
    assert len(list(tmp_path.iterdir())) == gpus


def _rank(rank: int, D: int, nodes: Nodes | None, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=D)
    problem = replace(PROBLEM, D=D)
    E, K, H, I = PROBLEM.E, PROBLEM.K, PROBLEM.H, PROBLEM.I
    g = torch.Generator().manual_seed(3)
    gate_up = (torch.randn(E, 2 * I, H, generator=g) / 16).to("cuda", BF16)
    down = (torch.randn(E, H, I, generator=g) / 11).to("cuda", BF16)
    own = slice(rank * E // D, (rank + 1) * E // D)
    experts = Experts.dense(gate_up[own].contiguous(), down[own].contiguous())
    placement = Placement.uniform(E, D, rank)
    layer = ExpertParallel(problem, experts, placement, exchange="hierarchical", wire=BF16, nodes=nodes)
    other = ExpertParallel(problem, experts, placement, exchange="all_to_all")
    g = torch.Generator().manual_seed(10 + rank)
    for T in (64, 5, 0, 1):
        hidden = torch.randn(T, H, generator=g).to("cuda", BF16)
        ids = torch.randint(-1, E, (T, K), generator=g).int().cuda()
        weights = torch.rand(T, K, generator=g).cuda()
        got = layer(hidden, ids, weights)
        assert torch.equal(got, layer(hidden, ids, weights))
        torch.testing.assert_close(got, other(hidden, ids, weights), rtol=2e-2, atol=2e-2)
        x = torch.randn(T, H, generator=g).to("cuda", BF16)
        want = other(hidden, ids, weights, out=x.clone(), accumulate=True)
        torch.testing.assert_close(layer(hidden, ids, weights, out=x, accumulate=True), want, rtol=2e-2, atol=2e-2)
        assert torch.equal(got, layer(odd(hidden), ids, weights, out=odd(torch.zeros_like(got))))
    assert layer.kernels is not None and other.kernels is None
    count = torch.tensor(3, dtype=torch.int32, device="cuda")
    hidden, ids = torch.randn(8, H, device="cuda").to(BF16), torch.randint(E, (8, K), device="cuda").int()
    weights, out = torch.rand(8, K, device="cuda"), torch.zeros(8, H, device="cuda", dtype=BF16)
    layer(hidden, ids, weights, out=out, num_tokens=count)
    want, graph = out.clone(), torch.cuda.CUDAGraph()
    assert bool((out[3:] == 0).all())
    with torch.cuda.graph(graph):
        layer(hidden, ids, weights, out=out, num_tokens=count)
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, want)
    layer.kernels.look()
    torch.cuda.synchronize()
    layer.kernels.check()
    dist.barrier()
    Path(folder, str(rank)).touch()
    os._exit(0)  # NCCL's threads may outlive the graph
