"""The CUDA C++ kernels that all GPUs share, without a GPU: their sources on the host, with fibers for threads.

Hopper's plans decide blocks, threads and clusters of the sort. tests/cuda/test_sm80_product.py has the grouped product.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cases import CASES, Case
from host_kernels import GXX, HostKernels, with_mistake
from numerics import assert_close, poisoned
from oracle import oracle
from routing_draws import draw
from ttnn_moe import Routing
from ttnn_moe.backend import Numerics
from ttnn_moe.cuda.arch import ARCHES, HOPPER
from ttnn_moe.cuda.launch import Selection
from ttnn_moe.cuda.native import launch, plan
from ttnn_moe.cuda.native.plan import Few, Gemm, Plan, Sorted
from ttnn_moe.cuda.native.sm80_tiles import MmaGemm
from ttnn_moe.cuda.native.specs import Types

pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def kernels(built: HostKernels, monkeypatch: pytest.MonkeyPatch) -> HostKernels:
    built.use(monkeypatch)
    return built


def _check_sort(seed: int, T: int, E: int, K: int, sizes: Sorted) -> None:
    """One routing against torch's stable sort: rows, their way back, tiles, counters."""
    drawn = draw(seed, random.Random(seed), T, E, K)
    ids, local, here, order, inverse = drawn.ids, drawn.local, drawn.here, drawn.order, drawn.inverse
    bound = None if drawn.bound is None else torch.tensor(drawn.bound, dtype=torch.int32)
    tiles, first = [], 0
    for e, n in enumerate(drawn.counts):
        parts = -(-n // sizes.gemm.max_n)
        each = -(-n // parts // 8) * 8 if parts else 0
        tiles += [[e, first + i * each, min(each, n - i * each), 0] for i in range(parts)]
        first += n

    P = T * K
    words = torch.full((launch.sort_words(P, here, sizes) + 4,), 7, dtype=torch.int32)
    row_tokens, way_back, rest = words.split((-(-P // 4) * 4, -(-P // 4) * 4, len(words) - 2 * (-(-P // 4) * 4)))
    most = launch._tiles(P, here, sizes)
    num_tiles = rest[4 * most :]
    types = Types(ids64=ids.dtype == torch.int64)
    sort = launch._launches(sizes, types, T, K, E, here, 64, 64, "halves", 0)[0]
    places = [0 if tensor is None else tensor.data_ptr() for tensor in (ids, local, bound)]
    sort(None, *places, *(part.data_ptr() for part in (row_tokens, way_back, rest, num_tiles)))

    # without lists: pytest takes minutes to tell how long ones differ
    assert torch.equal(way_back[:P].long(), inverse)
    assert torch.equal(row_tokens[: len(order)].long(), order // K)
    assert num_tiles[:2].tolist() == [len(tiles), 0] and len(tiles) <= most
    assert torch.equal(rest[: 4 * len(tiles)], torch.tensor(tiles, dtype=torch.int32).flatten())
    assert bool((row_tokens[len(order) :] == 7).all() and (num_tiles[4:] == 7).all())


@pytest.mark.parametrize("seed", range(40))
def test_sort(seed: int, kernels: HostKernels) -> None:
    """What the plan takes on Hopper: one block up to 512 pairs, a cluster of eight above."""
    rng = random.Random(seed)
    T, K, E = rng.choice([1, 7, 33, 150, 400]), rng.choice([1, 2, 8, 16]), rng.choice([1, 2, 6, 32, 128, 300])
    _check_sort(seed, T, E, K, plan.many(T, E, K))
    assert kernels.sound


@pytest.mark.parametrize("cluster", [1, 8])
@pytest.mark.parametrize("seed", range(4))
def test_sort_of_more_pairs_than_registers_hold(seed: int, cluster: int, kernels: HostKernels) -> None:
    sizes = Sorted(Gemm(32, 10, 128), 128, cluster)
    _check_sort(seed, 1300 if cluster == 1 else 3000, 128, 2, sizes)
    assert kernels.sound


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("before += r < rank ? n : 0;", "before += 0;"),
        ("inverse[pair] = experts[i] >= 0 ? ranks[i] : -1;", "inverse[pair] = ranks[i];"),
        ("return seen + before;", "return before;"),
        ("base[e] + mine[e] + ranks[i]", "base[e] + ranks[i]"),
        ("((rows + parts - 1) / parts + 7) / 8 * 8", "tile_rows"),
    ],
)
def test_a_mistake_of_the_sort_is_seen(
    line: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistakes that write nothing out of place."""
    wrong = HostKernels(tmp_path, sources=with_mistake(tmp_path, "common/routing_sort", line, instead))
    wrong.use(monkeypatch)
    seen = 0
    for seed in range(6):
        try:
            _check_sort(seed, 700, 12, 2, Sorted(Gemm(32, 10, 128), 128, 8))
            _check_sort(seed, 3000, 12, 2, Sorted(Gemm(32, 10, 128), 128, 8))
        except AssertionError:
            seen += 1
    assert seen


SM80 = ARCHES[8, 0]
# the second as on Hopper
PLANS: list[Plan] = [
    Few(columns=4, arch=SM80),
    Few(columns=8, arch=SM80),
    Sorted(MmaGemm(32, 4), 128, 1, SM80),
    Sorted(Gemm(32, 3, 128), 128, 1),
]


def _runs(case: Case, sizes: Plan) -> bool:
    """What a host does in a second or two."""
    P = case.T * case.K
    if isinstance(sizes, Few):
        small = P * (case.I + case.H) <= (1 << 14 if sizes.columns == 4 else 1 << 12)
    else:
        small = P * case.H * case.I <= 1 << 21
    return small and plan.why_not(case.T, case.E, case.K, case.H, case.I, 2, HOPPER) is None


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        pytest.param(case, sizes, id=f"{case}-{i}")
        for case in CASES
        for i, sizes in enumerate(PLANS)
        if _runs(case, sizes)
    ],
)
def test_case(case: Case, sizes: Plan, kernels: HostKernels) -> None:
    """The contract's cases, through the launches of a call."""
    dtype = torch.bfloat16
    x = case.make(dtype)
    ids = x.ids.clone()
    bound = None
    if x.num_tokens is not None:
        ids[x.num_tokens :] = -1
        bound = torch.tensor(x.num_tokens, dtype=torch.int32)
    selection = Selection.of(Routing.from_topk(x.ids, x.weights, case.E, num_tokens=bound))
    P = case.T * case.K
    for start in (None, torch.randn(case.T, case.H)):
        if case.T == 0 or (start is not None and bound is not None):
            continue
        out = poisoned(case.T, case.H, dtype=dtype if start is None else torch.float32)
        if start is not None:
            out.copy_(start)
        act, rows = (poisoned(P, n, dtype=dtype) for n in (case.I, case.H))
        words = (
            torch.full((launch.sort_words(P, case.E, sizes),), -7, dtype=torch.int32)
            if isinstance(sizes, Sorted)
            else None
        )
        launch.run(x.hidden.contiguous(), selection, x.experts, out, start is not None, sizes, act, rows, words)
        numerics = Numerics(activation=dtype, expert_out=None if isinstance(sizes, Few) else dtype)
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
    sizes = replace(plan.many(T, 8, K), gemm=Gemm(32, 10, 128, read_once=True))
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
    combine = launch._launches(sizes, Types(), T, K, 8, 8, H, 64, "halves", 0)[-1]
    count = torch.tensor(n, dtype=torch.int32)
    combine(None, *(t.data_ptr() for t in (lines, inverse, weights, count, out)))
    assert kernels.sound
    torch.testing.assert_close(out[:n].float(), want[:n], rtol=1e-2, atol=1e-2)
    assert bool((out[n:] == 7).all())
    assert torch.equal(lines[kept], before[kept]) and bool(lines[~kept].isnan().all())
