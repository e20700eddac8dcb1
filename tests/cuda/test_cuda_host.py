"""The CUDA C++ kernels that all GPUs share, without a GPU: their sources on the host, with fibers for threads.

Hopper's plans decide blocks, threads and clusters of the sort. tests/cuda/test_sm80_product.py has the grouped product.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from assertions import assert_close
from host_kernels import GXX, HostKernels, with_mistake
from host_products import Tile, family_of, plan_of
from routing_draws import draw
from ttnn_moe import Problem, Routing
from ttnn_moe.backend import Numerics
from ttnn_moe.cuda.arch import ARCHES, HOPPER, Arch, Target
from ttnn_moe.cuda.device import H200
from ttnn_moe.cuda.moe import sort
from ttnn_moe.cuda.moe.cuda_cpp import dense_limits
from ttnn_moe.cuda.moe.family import Call
from ttnn_moe.cuda.moe.few import FEW, FewPlan, FewSizes
from ttnn_moe.cuda.moe.pairs import tiles_bound
from ttnn_moe.cuda.moe.sm80 import SM80, WarpTile
from ttnn_moe.cuda.moe.sm90 import SM90, MlpTile
from ttnn_moe.cuda.moe.sort import Sorters, Words
from ttnn_moe.cuda.moe.uses import Use
from ttnn_moe.selfcheck.bounds import poisoned
from ttnn_moe.selfcheck.edges import CASES, Case
from ttnn_moe.selfcheck.oracle import oracle
from ttnn_moe.sizes import ceil_div

pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def kernels(built: HostKernels, monkeypatch: pytest.MonkeyPatch) -> HostKernels:
    built.use(monkeypatch)
    return built


GRANULE = 16


def _check_sort(seed: int, T: int, E: int, K: int, tile: int, sorters: Sorters) -> None:
    """One routing against torch's stable sort: rows, their way back, tiles, counters."""
    drawn = draw(seed, random.Random(seed), T, E, K)
    ids, local, here, order, inverse = drawn.ids, drawn.local, drawn.here, drawn.order, drawn.inverse
    some = (2**30 + 5 if seed % 2 else None) if drawn.bound is None else drawn.bound  # any bound above T counts as T
    bound = None if some is None else torch.tensor(some, dtype=torch.int32)
    tiles, first = [], 0
    for e, n in enumerate(drawn.counts):
        parts, granules, begin = ceil_div(n, tile), ceil_div(n, GRANULE), first
        for i in range(parts):
            rows = min((granules // parts + (i < granules % parts)) * GRANULE, first + n - begin)
            tiles.append([e, begin, rows, 0])
            begin += rows
        first += n

    P = T * K
    place = Words.of(P, here, tile, sorters.parts)
    words = torch.full((place.count + 4,), 7, dtype=torch.int32)
    row_tokens, way_back = words[: place.inverse // 4], words[place.inverse // 4 : place.tiles // 4]
    rest, num_tiles = words[place.tiles // 4 :], words[place.num_tiles // 4 : place.counts // 4]
    most = tiles_bound(P, here, tile)
    uses = sort.sort_uses(HOPPER, sorters, here, ids.dtype == torch.int64, GRANULE)
    given = tuple(0 if tensor is None else tensor.data_ptr() for tensor in (ids, local, bound))
    launches = sort.bind_sorts(uses, sorters, 0, P, E, here, K, tile)
    sort.launch_sorts(launches, None, given, words.data_ptr(), place)

    # without lists: pytest takes minutes to tell how long ones differ
    assert torch.equal(way_back[:P].long(), inverse)
    assert torch.equal(row_tokens[: len(order)].long(), order // K)
    assert num_tiles[:2].tolist() == [len(tiles), 0] and len(tiles) <= most
    assert torch.equal(rest[: 4 * len(tiles)], torch.tensor(tiles, dtype=torch.int32).flatten())
    assert bool(
        (row_tokens[len(order) :] == 7).all() and (num_tiles[2:] == 7).all() and (words[place.count :] == 7).all()
    )


@pytest.mark.parametrize("seed", range(40))
def test_sort(seed: int, kernels: HostKernels) -> None:
    """What the plan takes on Hopper: one block up to 512 pairs, a cluster of eight above."""
    rng = random.Random(seed)
    T, K, E = rng.choice([1, 7, 33, 150, 400]), rng.choice([1, 2, 8, 16]), rng.choice([1, 2, 6, 32, 128, 300])
    plan = SM90.plan(Problem(T, E, K, 64, 64), Target(H200, HOPPER))
    _check_sort(seed, T, E, K, plan.tile.max_n, plan.sorters)
    assert kernels.sound


@pytest.mark.parametrize("seed", range(8))
def test_sort_in_parts(seed: int, kernels: HostKernels) -> None:
    """What the plan takes before Hopper, which has no clusters: parts above 2,048 pairs, counted by a launch before."""
    rng = random.Random(seed)
    T, K, E = rng.choice([200, 300, 700]), rng.choice([8, 16]), rng.choice([1, 6, 128, 300])
    plan = SM80.plan(Problem(T, E, K, 64, 64), Target(H200, ARCHES[8, 0]))
    assert (plan.sorters.parts > 1) == (T * K > 2048)
    _check_sort(seed, T, E, K, plan.tile.max_n, plan.sorters)
    assert kernels.sound


@pytest.mark.parametrize("sorters", [Sorters(128), Sorters(128, 8), Sorters(128, 1, 5)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_sort_of_more_pairs_than_registers_hold(seed: int, sorters: Sorters, kernels: HostKernels) -> None:
    _check_sort(seed, 3000 if sorters.cluster * sorters.parts > 1 else 1300, 128, 2, 32, sorters)
    assert kernels.sound


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("before += r < rank ? n : 0;", "before += 0;"),
        ("inverse[pair] = experts[i] >= 0 ? ranks[i] : -1;", "inverse[pair] = ranks[i];"),
        ("return seen + before;", "return before;"),
        ("base[e] + mine[e] + ranks[i]", "base[e] + ranks[i]"),
        ("const int n = min((each + (i < more)) * GRANULE", "const int n = min(tile_rows"),
        ("parts > 1 ? granules / parts : granules", "parts > 1 ? granules / parts + 1 : granules"),
        ("rows <= tile_rows ? rows > 0 : ", "rows < tile_rows ? rows > 1 : "),
        ("row_tokens[row] = tokens[i]", "row_tokens[row] = tokens[0]"),
    ],
)
def test_a_mistake_of_the_sort_is_seen(
    line: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistakes that write nothing out of place."""
    wrong = HostKernels(tmp_path, sources=with_mistake(tmp_path, "common/routing_sort", line, instead))
    wrong.use(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(6):
            _check_sort(seed, 700, 12, 2, 32, Sorters(128, 8))
            _check_sort(seed, 3000, 12, 2, 32, Sorters(128, 8))


# the second as on Hopper
SIZES: list[FewSizes | Tile] = [FewSizes(), FewSizes(columns=8, prefetch=3), WarpTile(2, 2, 32, 4), MlpTile(32, 3, 128)]


def _runs(case: Case, sizes: FewSizes | Tile) -> bool:
    """What a host does in a second or two."""
    P = case.T * case.K
    if isinstance(sizes, FewSizes):
        small = P * (case.I + case.H) <= (1 << 14 if sizes.columns == 4 else 1 << 12)
    else:
        small = P * case.H * case.I <= 1 << 21
    problem = Problem(case.T, case.E, case.K, case.H, case.I)
    return small and dense_limits(problem, Target(H200, HOPPER)) is None


def _launch(problem: Problem, sizes: FewSizes | Tile, call: Call) -> Numerics:
    """Launch a call with given sizes; where it rounds."""
    P, dtype = problem.T * problem.K, problem.dtype
    act, rows = (poisoned(P, n, dtype=dtype) for n in (problem.I, problem.H))
    if isinstance(sizes, FewSizes):
        FEW.launch(FewPlan(problem, ARCHES[8, 0], sizes), call, (act,))
        return Numerics(activation=dtype)
    family, plan = family_of(sizes), plan_of(problem, sizes, Sorters(128))
    family.launch(plan, call, (act, rows, torch.full((plan.words.count,), -7, dtype=torch.int32)))
    return Numerics(activation=dtype, expert_out=dtype)


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        pytest.param(case, sizes, id=f"{case}-{i}")
        for case in CASES
        for i, sizes in enumerate(SIZES)
        if _runs(case, sizes)
    ],
)
def test_case(case: Case, sizes: FewSizes | Tile, kernels: HostKernels) -> None:
    """The contract's cases, through the launches of a call."""
    dtype = torch.bfloat16
    x = case.make(dtype)
    ids = x.ids.clone()
    bound = None
    if x.num_tokens is not None:
        ids[x.num_tokens :] = -1
        bound = torch.tensor(x.num_tokens, dtype=torch.int32)
    routing = Routing.from_topk(x.ids, x.weights, case.E, num_tokens=bound)
    for start in (None, torch.randn(case.T, case.H)):
        if case.T == 0 or (start is not None and (bound is not None or not case.accumulates)):
            continue
        out = poisoned(case.T, case.H, dtype=dtype if start is None else torch.float32)
        if start is not None:
            out.copy_(start)
        problem = Problem.of(case.T, case.K, x.experts, dtype, out.dtype)
        call = Call(x.hidden.contiguous(), routing, x.experts, out, start is not None)
        numerics = _launch(problem, sizes, call)
        want = oracle(x.hidden, ids, x.weights, x.experts, numerics, start)
        n = case.T if x.num_tokens is None else x.num_tokens
        good = [t for t in range(n) if t not in x.spoiled]
        assert_close(out[good], want[good], dtype, f"start {start is not None}")
        assert all(not out[t].isfinite().all() for t in x.spoiled)
        assert bool((out[n:] == 1e4).all()), "rows past num_tokens were written"
    assert kernels.sound


@pytest.mark.parametrize(("T", "K", "H", "bound"), [(5, 8, 64, None), (3, 16, 2112, None), (6, 1, 320, 4)])
def test_combine_lets_go_of_what_it_has_read(T: int, K: int, H: int, bound: int | None, kernels: HostKernels) -> None:
    """Of that and of nothing else; on the host a line is lost at once."""
    weights, rows = torch.rand(T, K), torch.randn(T * K, H).bfloat16()
    inverse = torch.randperm(T * K).int().view(T, K)
    inverse[1, 0] = -1
    out = torch.full((T, H), 7.0).bfloat16()
    n = T if bound is None else bound
    read = inverse[:n].flatten()
    kept = torch.ones(T * K, dtype=torch.bool)
    kept[read[read >= 0].long()] = False
    want = torch.where(
        (inverse >= 0)[..., None], weights[..., None] * rows[inverse.clamp_min(0).long()].float(), 0.0
    ).sum(1)
    before = rows.clone()
    storage = torch.empty(T * K * H + 64, dtype=torch.bfloat16)  # lines of 128 bytes
    offset = -storage.data_ptr() % 128 // 2
    lines = storage[offset : offset + T * K * H].view(T * K, H).copy_(rows)
    use = Use.of(HOPPER, "common/combine", FP16=False, TOP_K=K, OUT32=False, ADD=False, DISCARD=True)
    combine = sort.bind_combine(use, 0, T, H)
    count = torch.tensor(n, dtype=torch.int32)
    combine(None, *(t.data_ptr() for t in (lines, inverse, weights, count, out)))
    assert kernels.sound
    torch.testing.assert_close(out[:n].float(), want[:n], rtol=1e-2, atol=1e-2)
    assert bool((out[n:] == 7).all())
    assert torch.equal(lines[kept], before[kept]) and bool(lines[~kept].isnan().all())


@pytest.mark.parametrize(("arch", "carveouts"), [(HOPPER, [50, None]), (ARCHES[8, 0], [None, None])], ids=str)
def test_carveouts_of_few_pairs(arch: Arch, carveouts: list[int | None]) -> None:
    """Measured on Hopper alone."""
    plan = FEW.plan(Problem(1, 128, 8, 2048, 768), Target(H200, arch))
    assert [use.carveout for use in FEW.uses(plan, ids64=False, add=False)] == carveouts
