"""Sums and gathers of ranks: on the host one rank after the other, on a GPU ranks at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from host_kernels import GXX, HostKernels, with_mistake
from ttnn_moe.cuda.parallel import sums
from ttnn_moe.cuda.parallel.heap import CALLS, MOST_RANKS, REPORT, TILES, WORDS_AT, Heap, Report, nbytes
from ttnn_moe.errors import ContractError
from ttnn_moe.sizes import ceil_div

BF16, F16 = torch.bfloat16, torch.float16
SIZES = [(3, 64), (1, 2048), (4, 20), (1, 2304)]


def parts_of(ranks: int, T: int, n: int, dtype: torch.dtype, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """A part of each rank, and x."""
    *parts, x = torch.randn(ranks + 1, T, n, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return parts, x


def sum_of(parts: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """fp32, in ascending rank, then x."""
    total = torch.zeros(x.shape)
    for part in parts:
        total = total + part.float()
    return (total + x.float()).to(x.dtype)


class HostRank:
    """The rank under test, whose kernels run on the host. The others are heaps that the test reads and writes."""

    def __init__(self, ranks: int, rank: int, capacity: int = 2304, timeout: float = 3.0, calls: int = 0):
        self.room = capacity
        self.heaps = [torch.zeros(nbytes(ranks, capacity, self.room), dtype=torch.uint8) for _ in range(ranks)]
        addresses = [heap.data_ptr() for heap in self.heaps]
        self.heap = Heap(self.heaps[rank], addresses, rank, capacity, self.room, timeout)
        self.rank, self.capacity, self.ranks, self.call = rank, capacity, ranks, calls
        self.heaps[rank][CALLS:WORDS_AT].view(torch.int32).fill_(calls - (1 << 32) if calls >> 31 else calls)

    def words(self, to: int, source: int, chunks: int) -> torch.Tensor:
        """[chunks, 2, 2] int32: data and number of the call, where rank `source` puts into rank `to` in this call."""
        words = self.heaps[to][WORDS_AT : self.flags_at].view(torch.int32)
        every = words.view(2, self.ranks, self.capacity, 2, 2)
        return every[self.call % 2, source, :chunks]

    @property
    def flags_at(self) -> int:
        return WORDS_AT + 32 * self.ranks * self.capacity

    def tiles(self, to: int, source: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Flags [2 hops, n tiles] int32, and rows: what rank `source` puts into rank `to` in this call of many."""
        rows_at = self.flags_at + 16 * self.ranks * TILES
        flags = self.heaps[to][self.flags_at : rows_at].view(torch.int32).view(2, 2, self.ranks, TILES)
        rows = self.heaps[to][rows_at:].view(like.dtype).view(2, self.ranks, -1)[self.call % 2, source]
        count = ceil_div(len(like), sums.tile_of(len(like)))
        return flags[self.call % 2, :, source, :count], rows[: like.numel()].view_as(like)

    @property
    def number(self) -> int:
        """Of this call, as int32."""
        return self.call - (1 << 32) if self.call >> 31 else self.call

    def columns(self, H: int) -> list[slice]:
        """The columns that each rank sums."""
        ends = [8 * (H // 8 * rank // self.ranks) for rank in range(self.ranks + 1)]
        return [slice(first, end) for first, end in pairwise(ends)]

    def expect_many(self, parts: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """As expect, of many rows: the others' parts of this rank's columns, and their sums of their own."""
        self.call = (self.call + 1) % (1 << 32) or 2
        columns = self.columns(total.shape[1])
        for source, part in enumerate(parts):
            if source != self.rank:
                flags, rows = self.tiles(self.rank, source, part)
                rows[:, columns[self.rank]] = part[:, columns[self.rank]]
                rows[:, columns[source]] = total[:, columns[source]]
                flags.fill_(self.number)

    def sent_many(self, part: torch.Tensor, total: torch.Tensor) -> bool:
        """As sent, of many rows."""
        good, columns = True, self.columns(total.shape[1])
        for to in range(self.ranks):
            if to != self.rank:
                flags, rows = self.tiles(to, self.rank, part)
                good &= bool((flags == self.number).all())
                good &= torch.equal(rows[:, columns[to]], part[:, columns[to]])
                good &= torch.equal(rows[:, columns[self.rank]], total[:, columns[self.rank]])
        return good

    def expect(self, parts: Sequence[torch.Tensor], torn: bool = False) -> None:
        """The other ranks put their parts of the next call."""
        self.call = (self.call + 1) % (1 << 32) or 2
        for source, part in enumerate(parts):
            if source != self.rank:
                put = self.words(self.rank, source, part.numel() // 4)
                put[..., 0] = part.view(torch.int32).view(-1, 2)
                put[..., 1] = self.number
                if torn:
                    put[-1, 1, 1] -= 2

    def sent(self, part: torch.Tensor) -> bool:
        """Whether all other ranks have the rank's part, and its own heap does not."""
        want = part.view(torch.int32).view(-1, 2)
        return all(
            torch.equal(self.words(to, self.rank, len(want))[..., 0], want) == (to != self.rank)
            for to in range(self.ranks)
        )


def run(host: HostKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    host.use(monkeypatch)
    sums._add.cache_clear()
    sums._gather.cache_clear()
    sums._add_many.cache_clear()


def some_calls(ranks: int, rank: int, dtype: torch.dtype = BF16, calls: int = 0) -> bool:
    """Whether sums and gathers of several sizes, one behind the other, are right."""
    at = HostRank(ranks, rank, calls=calls)
    good = True
    for seed, (T, n) in enumerate(SIZES):
        parts, x = parts_of(ranks, T, n, dtype, seed)
        at.expect(parts)
        got = sums.add(at.heap, parts[rank], x.clone())
        good &= torch.equal(got, sum_of(parts, x)) and at.sent(parts[rank])
    for seed, (T, n) in enumerate(SIZES):
        parts, _ = parts_of(ranks, T, n, dtype, seed + 100)
        at.expect(parts)
        out = torch.zeros(T, ranks * n, dtype=dtype)
        good &= torch.equal(sums.gather(at.heap, parts[rank], out), torch.cat(parts, 1)) and at.sent(parts[rank])
    for seed, (T, n) in enumerate([(17, 64), (3, 2048), (25, 72), (1, 2304)]):
        parts, x = parts_of(ranks, T, n, dtype, seed)
        want = sum_of(parts, x)
        at.expect_many(parts, want)
        got = sums.add_many(at.heap, parts[rank], x.clone())
        good &= torch.equal(got, want) and at.sent_many(parts[rank], want)
    return good and at.heap.report() is None


needs_compiler = pytest.mark.skipif(GXX is None, reason="g++ is not installed")


@needs_compiler
@pytest.mark.parametrize(
    ("ranks", "rank", "dtype", "calls"),
    [(2, 1, F16, (1 << 31) - 3), (3, 1, BF16, (1 << 32) - 6), (8, 0, BF16, 0)],
    ids=str,
)
def test_a_rank_sends_its_part_and_adds_all(
    ranks: int, rank: int, dtype: torch.dtype, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = HostKernels(tmp_path)
    run(host, monkeypatch)
    assert some_calls(ranks, rank, dtype, calls)
    assert host.sound


def waits(torn: bool) -> bool:
    """Whether rank 1 of 3 names the rank whose words never come, keeps x, tells all, and waits no more after that."""
    at = HostRank(3, 1)
    parts, x = parts_of(3, 2, 64, BF16, 0)
    at.expect(parts, torn)
    if not torn:
        at.words(1, 2, at.capacity).zero_()
    peer, kept = 0 if torn else 2, x.clone()
    sums.add(at.heap, parts[1], x)
    good = at.heap.report() == Report(peer, 1, 1) and torch.equal(x[-1, -4:], kept[-1, -4:])
    words = [heap[REPORT : REPORT + 8].view(torch.int64).item() for heap in at.heaps]
    good &= words == [1 << 32 | 1 << 8 | peer + 1] * 3
    # the first report stays
    at.heaps[1][REPORT : REPORT + 8].view(torch.int64).fill_(5 << 32 | 2 << 8 | 1)
    sums.gather(at.heap, parts[1], torch.zeros(2, 192, dtype=BF16))
    return good and at.heap.report() == Report(0, 2, 5)


def waits_for_a_tile(hop: int) -> bool:
    """As waits, of many rows: the second tile of rank 2 never comes, with its parts or with its sums."""
    at = HostRank(3, 1)
    parts, x = parts_of(3, 20, 64, BF16, 0)
    at.expect_many(parts, sum_of(parts, x))
    at.tiles(1, 2, parts[2])[0][hop, 1] = 0
    kept, tile, columns = x.clone(), slice(sums.TILE, 2 * sums.TILE), at.columns(64)[1 + hop]
    sums.add_many(at.heap, parts[1], x)
    return at.heap.report() == Report(2, 1, 1) and torch.equal(x[tile, columns], kept[tile, columns])


@needs_compiler
def test_a_rank_that_waits_in_vain_names_the_other_and_tells_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(HostKernels(tmp_path), monkeypatch)
    assert waits(torn=False) and waits(torn=True) and waits_for_a_tile(0) and waits_for_a_tile(1)


@needs_compiler
@pytest.mark.slow(1.5)
@pytest.mark.parametrize(
    ("kernel", "line", "instead"),
    [
        ("add_parts", "(call & 1) * RANKS + source) * capacity", "source) * capacity"),
        ("add_parts", "if (call == 0) call = 2;", ""),
        ("add_parts", "words[1] >> 32 == call", "true"),
        ("add_parts", "threadIdx.x * gridDim.x", "threadIdx.x * BLOCKS"),
        ("add_parts", "if (whole) sums[c]", "sums[c]"),
        ("add_many", "ranks.flag(rank, n, 0)", "ranks.flag(rank, 0, 0)"),
        ("add_many", "ranks.flag(rank, n, 1)", "ranks.flag(rank, n, 0)"),
        ("add_many", "if (__syncthreads_or(speaks && !ranks.await(other, n, 0))) break;", ""),
        ("add_many", "if (__syncthreads_or(speaks && !ranks.await(other, n, 1))) break;", ""),
        ("add_many", "(call & 1) * RANKS + source) * room", "source) * room"),
        ("add_many", "VECTORS * r / RANKS", "VECTORS / RANKS * r"),
        ("add_many", "r <= RANKS; ++r) add", "r < RANKS; ++r) add"),
    ],
)
def test_a_mistake_is_seen(
    kernel: str, line: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(HostKernels(tmp_path, sources=with_mistake(tmp_path, f"parallel/{kernel}", line, instead)), monkeypatch)
    seen = waits(torn=True) and waits_for_a_tile(0) and waits_for_a_tile(1)
    assert not (seen and some_calls(3, 1, calls=(1 << 32) - 3))


def test_what_no_heap_serves() -> None:
    memory = torch.zeros(nbytes(2, 64, 32), dtype=torch.uint8)
    for wrong, addresses in ((memory, [0]), (memory, [0] * (MOST_RANKS + 1)), (memory[:-1], [0, 0])):
        with pytest.raises(ContractError, match="no heap"):
            Heap(wrong, addresses, 0, 64, 32, 1.0)
    heap = Heap(memory, [memory.data_ptr()] * 2, 0, 64, 32, 1.0)
    part = torch.zeros(4, 64, dtype=BF16)
    assert sums.why_not(heap, part) is None
    for other in (part.float(), part[:, :62].contiguous(), part.repeat(2, 1), part.repeat(1, 2)[:, :64]):
        assert sums.why_not(heap, other) and sums.why_not_many(heap, other)


def test_a_heap_keeps_its_words_on_the_host_whatever_the_default_device() -> None:
    memory = torch.zeros(nbytes(2, 64, 32), dtype=torch.uint8)
    with torch.device("meta"):
        heap = Heap(memory, [3, 4], 0, 64, 32, 1.0)
    assert heap.report() is None and heap.said.device.type == "cpu"
    assert memory[:16].view(torch.int64).tolist() == [3, 4]


def gpu_counts() -> list[int]:
    return [n for n in (1, 2, 4) if n <= max(torch.cuda.device_count(), 1)]


class GpuRanks:
    """Ranks of this process: several on a GPU, each on a stream of its own."""

    def __init__(self, ranks: int, gpus: int, capacity: int = 1 << 16, timeout: float = 5.0):
        from ttnn_moe.cuda.combine import peers

        self.devices = [rank * gpus // ranks for rank in range(ranks)]
        if gpus > 1:
            peers.enable(range(gpus))
        n = nbytes(ranks, capacity, capacity)
        memories = [torch.zeros(n, dtype=torch.uint8, device=f"cuda:{device}") for device in self.devices]
        at = [memory.data_ptr() for memory in memories]
        self.heaps = [Heap(memory, at, rank, capacity, capacity, timeout) for rank, memory in enumerate(memories)]
        self.streams = [torch.cuda.Stream(device) for device in self.devices]
        self.wait()

    def wait(self) -> None:
        for device in set(self.devices):
            torch.cuda.synchronize(device)

    def load(self, work: Callable[[int], object]) -> None:
        """Load the kernels of work(rank): none waits, and loading one waits for those that run on the same GPU."""
        for heap in self.heaps:
            heap.memory[REPORT : REPORT + 8].fill_(1)
        self.run(work)
        for heap in self.heaps:
            heap.memory[REPORT : REPORT + 8].zero_()
            heap.said.zero_()

    def run(self, work: Callable[[int], object], ranks: Sequence[int] | None = None) -> None:
        """work(rank) on every rank's stream; all are launched before any is waited for."""
        self.wait()
        for rank in range(len(self.heaps)) if ranks is None else ranks:
            with torch.cuda.device(self.devices[rank]), torch.cuda.stream(self.streams[rank]):
                work(rank)
        self.wait()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGpus:
    @pytest.mark.parametrize("gpus", gpu_counts())
    @pytest.mark.parametrize(("ranks", "dtype"), [(2, BF16), (2, F16), (4, BF16)], ids=str)
    def test_sums_and_gathers_in_graphs(self, ranks: int, dtype: torch.dtype, gpus: int) -> None:
        if gpus > ranks:
            pytest.skip("a GPU without a rank")
        at = GpuRanks(ranks, gpus)
        sizes = [(1, 2048), (16, 2048), (3, 64), (1, 4096), (30, 2304), (200, 64)]
        inputs = [parts_of(ranks, T, n, dtype, seed) for seed, (T, n) in enumerate(sizes)]
        places = [f"cuda:{device}" for device in at.devices]
        held = [[(parts[r].to(places[r]), x.to(places[r])) for parts, x in inputs] for r in range(ranks)]
        totals = [[x.clone() for _, x in held[r]] for r in range(ranks)]
        wide = [[torch.empty(len(x), ranks * x.shape[1], dtype=dtype, device=x.device) for _, x in h] for h in held]

        def calls(rank: int) -> None:
            for (part, x), total, out in zip(held[rank], totals[rank], wide[rank], strict=True):
                total.copy_(x)
                (sums.add_many if len(part) > 20 else sums.add)(at.heaps[rank], part, total)
                sums.gather(at.heaps[rank], part, out)

        def right() -> bool:
            wanted = [(sum_of(parts, x), torch.cat(parts, 1)) for parts, x in inputs]
            return all(
                torch.equal(totals[r][i].cpu(), want) and torch.equal(wide[r][i].cpu(), every)
                for r in range(ranks)
                for i, (want, every) in enumerate(wanted)
            )

        at.load(calls)
        at.run(calls)
        assert right()
        graphs = [torch.cuda.CUDAGraph() for _ in range(ranks)]
        for rank, graph in enumerate(graphs):
            with torch.cuda.device(at.devices[rank]), torch.cuda.graph(graph, stream=at.streams[rank]):
                calls(rank)
        for _ in range(20):
            for one in (*sum(totals, []), *sum(wide, [])):
                one.fill_(float("nan"))
            at.run(lambda rank: graphs[rank].replay())
            assert right()
        assert [heap.report() for heap in at.heaps] == [None] * ranks

    @pytest.mark.parametrize("gpus", gpu_counts())
    @pytest.mark.parametrize("add", [sums.add, sums.add_many])
    def test_an_absent_rank_is_named_by_all(self, add: Callable[..., object], gpus: int) -> None:
        at = GpuRanks(4, gpus, timeout=0.1)
        held = [torch.ones(2, 64, dtype=BF16, device=f"cuda:{device}") for device in at.devices]
        at.load(lambda rank: add(at.heaps[rank], held[rank], held[rank].clone()))
        at.run(lambda rank: add(at.heaps[rank], held[rank], held[rank].clone()), [0, 1, 3])
        reports = [heap.report() for heap in at.heaps]
        assert reports[2] is None
        assert {report.peer for rank, report in enumerate(reports) if report or rank != 2} == {2}
