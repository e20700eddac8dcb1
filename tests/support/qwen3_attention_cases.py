"""The model's attention kernels against the torch forms of ttnn_moe/kv; see qwen3_kernel_cases.py."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from qwen3_kernel_cases import BOUND, DEVICE, GPU, HOPPER, draw, error, seeds, tensor
from ttnn_moe.cuda.attention import decode, decode_sm90, decode_units, head_norm_rope, prefill_sm90
from ttnn_moe.cuda.attention import prefill as triton_prefill
from ttnn_moe.cuda.attention.memory import TURNS, Memory
from ttnn_moe.cuda.triton_launch import Tile
from ttnn_moe.kv import attention, torch_forms
from ttnn_moe.kv.cache import HeadNorms
from ttnn_moe.kv.step import Span


def case(
    rng: random.Random, dtype: torch.dtype, T: int, D: int | None = None, longest: int | None = None
) -> SimpleNamespace:
    """longest: capacity of a row, at most."""
    kv, group = rng.choice([1, 2, 4]), rng.choice([1, 3, 8])
    D = D or rng.choice([16, 64, 128])
    rows, capacity = T + 2, min(rng.choice([5, 70, 700 if T > 4 else 1500]), longest or 1500)
    return SimpleNamespace(
        kv=kv,
        heads=kv * group,
        D=D,
        rows=rows,
        capacity=capacity,
        keys=tensor(rows, kv, capacity, D, dtype=dtype),
        values=tensor(rows, kv, capacity, D, dtype=dtype),
    )


@seeds
def test_decode_attention_reads_only_its_keys(seed: int, dtype: torch.dtype) -> None:
    rng = draw(seed)
    T = rng.choice([1, 2, 5])
    c = case(rng, dtype, T, longest=None if GPU else 1100)  # eight parts
    q = tensor(T, c.heads, c.D, dtype=dtype)
    where = torch.tensor(rng.sample(range(c.rows), T), device=DEVICE)
    positions = torch.tensor([rng.choice([0, c.capacity - 1, rng.randrange(c.capacity)]) for _ in range(T)])
    count = rng.randint(0, T)
    bound = torch.tensor(count, dtype=torch.int32, device=DEVICE) if rng.random() < 0.5 else None
    count = T if bound is None else count
    # whatever lies past a row's length, or in another row, must not matter
    beyond = torch.ones(c.rows, c.capacity, dtype=torch.bool)
    for t in range(count):
        beyond[where[t], : positions[t] + 1] = False
    clean = Memory(c.keys.double(), c.values.double(), where, positions.to(DEVICE))
    want = torch_forms.decode_attention(q.double(), clean, c.capacity)
    for kept in (c.keys, c.values):
        kept.masked_fill_(beyond[:, None, :, None].to(DEVICE), float("nan"))
    memory = Memory(c.keys, c.values, where, positions.to(DEVICE), bound)
    for run in (decode.launch, lambda q, memory: attention.decode_attention(q, memory, c.capacity)):
        got = run(q, memory)
        if count:
            assert error(got[:count], want[:count]) <= BOUND[dtype]
        assert not got[count:].any(), "rows past num_tokens are zero"
        if GPU:
            assert torch.equal(got, run(q, memory))


@pytest.mark.skipif(not HOPPER, reason="no GPU runs code of compute capability 9.0 here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(40))
def test_decode_attention_on_hopper(seed: int, dtype: torch.dtype) -> None:
    """In every cut that takes this capacity, dense and in pages, more than once with the same bits."""
    rng = draw(seed)
    T, kv, group = rng.choice([1, 3, 16, 40, 200]), rng.choice([1, 2, 4]), rng.choice([1, 3, 8, 16])
    D, capacity = rng.choice([64, 128, 128]), rng.choice([5, 70, 256, 1000, 2048 if T < 40 else 256])
    q, rows = tensor(T, kv * group, D, dtype=dtype), T + 1
    keys, values = (tensor(rows, kv, capacity, D, dtype=dtype) for _ in range(2))
    where = torch.tensor(rng.sample(range(rows), T), device=DEVICE)
    positions = torch.tensor([rng.choice([0, capacity - 1, rng.randrange(capacity)]) for _ in range(T)], device=DEVICE)
    count = rng.randint(1, T)
    bound = torch.tensor(count, dtype=torch.int32, device=DEVICE) if rng.random() < 0.5 else None
    count = T if bound is None else count
    want = torch_forms.decode_attention(q.double(), Memory(keys.double(), values.double(), where, positions), capacity)
    seen = torch.zeros(rows, capacity, dtype=torch.bool, device=DEVICE)
    seen[where[:count]] = torch.arange(capacity, device=DEVICE) <= positions[:count, None]
    for kept in (keys, values):
        kept.masked_fill_(~seen[:, None, :, None], float("nan"))
    turns = torch.zeros(T * kv * 8, dtype=torch.int32, device=DEVICE)
    dense = Memory(keys, values, where, positions, bound, turns=turns)
    narrow = replace(dense, rows=where.int(), past_written=True)
    chosen = decode_sm90.plan(T * kv, capacity, torch.cuda.get_device_properties(0).multi_processor_count)
    other = decode_sm90.Plan(rng.choice([1, 2, 4, 8]), rng.choice([4, 8]), rng.choice([1, 2]), rng.choice([1, 2, 5]))
    pages, more = replace(paged(dense, 64), past_written=True), rng.choice([1, 40])
    units = decode_units.launch(positions, bound, pages.capacity, more, least=rng.choice([16, 64, 512]))
    for memory in (dense, narrow, paged(dense, rng.choice([16, 64])), pages, replace(pages, units=units)):
        assert decode_sm90.why_not(q.device, q, memory) is None
        for of in (chosen, other):
            got = torch.full_like(q, float("nan"))
            assert decode_sm90.launch(q, memory, got, of) is got
            assert error(got[:count], want[:count]) <= BOUND[dtype]
            assert not got[count:].any(), "rows past num_tokens are zero"
            for _ in range(5):
                assert torch.equal(got, decode_sm90.launch(q, memory, of=of))
    assert not turns.any()
    assert decode_sm90.why_not(q.device, q.float(), dense) is not None


@pytest.mark.skipif(not HOPPER, reason="no GPU runs code of compute capability 9.0 here")
@pytest.mark.parametrize(("T", "longest"), [(1, 2048), (1, 2049), (1, 9000), (1, 40_000), (2, 5000), (2, 40_000)])
def test_long_rows_of_few_tokens(T: int, longest: int) -> None:
    """Sections that share rows, with the same bits in each replay of a graph of layers that share turns."""
    draw(longest)
    layers, kv, heads, D, capacity = 6, 4, 32, 128, 40_960
    kept = [[tensor(T, kv, capacity, D, dtype=torch.bfloat16) for _ in range(2)] for _ in range(layers)]
    q, rows = tensor(T, heads, D, dtype=torch.bfloat16), torch.arange(T, device=DEVICE)
    positions = torch.randint(longest, (T,)).to(DEVICE)
    positions[0] = longest - 1
    turns = torch.zeros(TURNS, dtype=torch.int32, device=DEVICE)
    memories = [Memory(keys, values, rows, positions, past_written=True, turns=turns) for keys, values in kept]
    assert decode_sm90.why_not(q.device, q, replace(memories[0], turns=None)) is not None
    assert all(decode_sm90.why_not(q.device, q, memory) is None for memory in memories)
    got = [decode_sm90.launch(q, memory) for memory in memories]
    want = [torch_forms.decode_attention(q.double(), _double(memory), capacity) for memory in memories]
    for one, other in zip(got, want, strict=True):
        assert error(one, other) <= BOUND[torch.bfloat16]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = [decode_sm90.launch(q, memory) for memory in memories]
    for _ in range(50):
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True))
    assert not turns.any()


def _double(memory: Memory) -> Memory:
    return replace(memory, keys=memory.keys.double(), values=memory.values.double())


@pytest.mark.skipif(not HOPPER, reason="no GPU runs code of compute capability 9.0 here")
@pytest.mark.parametrize("T", [1, 8, 32, 128])
def test_decode_attention_behind_the_kernel_that_writes_its_key(T: int) -> None:
    """Both launched so that they overlap, many layers in a graph: as kernels that run one by one."""
    draw(0)
    layers, kv, heads, D, capacity = 12, 4, 32, 128, 256
    norms = HeadNorms(*(tensor(D, dtype=torch.bfloat16) for _ in range(2)), 1e-6)
    angle = torch.rand(T, 1, D // 2) * 6
    rope = (angle.cos().to(DEVICE, torch.bfloat16), angle.sin().to(DEVICE, torch.bfloat16))
    qkv = [tensor(T, heads + 2 * kv, D, dtype=torch.bfloat16) for _ in range(layers)]
    rows, positions = torch.arange(T, device=DEVICE), torch.randint(1, capacity, (T,)).to(DEVICE)
    kept = [[tensor(T, kv, capacity, D, dtype=torch.bfloat16) for _ in range(2)] for _ in range(layers)]

    def step(early: bool, apart: bool) -> list[Tensor]:
        out = []
        for given, (keys, values) in zip(qkv, kept, strict=True):
            memory = Memory(keys, values, rows, positions, past_written=early)
            q = head_norm_rope.launch(given, norms.q, norms.k, norms.eps, rope, memory)
            if apart:
                torch.cuda.synchronize()
            out.append(decode_sm90.launch(q, memory))
        return out

    want = step(early=False, apart=True)
    for early in (False, True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = step(early, apart=False)
        for _ in range(20):
            for keys, values in kept:  # a new token at the same place: what was there is not read
                keys[rows, :, positions] = values[rows, :, positions] = float("nan")
            graph.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def packed(rng: random.Random, c: SimpleNamespace, S: int) -> list[Span]:
    """Prompts in S of the cache's rows, with and without a past."""
    spans, first = [], 0
    for row in rng.sample(range(c.rows), S):
        past = rng.choice([0, rng.randrange(c.capacity)])
        n = rng.randint(1, c.capacity - past)
        n = min(n, 40) if not GPU else n
        spans.append(Span(row, first, n, past))
        first += n
    return spans


def attended(c: SimpleNamespace, spans: list[Span], dtype: torch.dtype) -> tuple[Tensor, Memory, Tensor]:
    """Queries, the cache with poison where nobody may look, and what is right."""
    q = tensor(sum(span.n for span in spans), c.heads, c.D, dtype=dtype)
    nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    wide = Memory(c.keys.double(), c.values.double(), nothing, nothing)
    want = torch_forms.prefill_attention(q.double(), wide, spans)
    for row in range(c.rows):
        used = max((span.past + span.n for span in spans if span.row == row), default=0)
        for kept in (c.keys, c.values):
            kept[row, :, used:] = float("nan")
    return q, Memory(c.keys, c.values, nothing, nothing), want


def tiles_of(spans: list[Span], keys: Tensor) -> Tensor:
    """Words that the kernels read of these sequences, as PagedCache.plan makes them."""
    queries = triton_prefill.queries_of(keys.shape[-1], keys.element_size())
    words = triton_prefill.tiles_of(((span.first, span.n, span.past, span.row) for span in spans), queries)
    return torch.tensor(words, dtype=torch.int32).to(keys.device)


def paged(memory: Memory, page: int) -> Memory:
    """The same cache in scattered pages; NaN in page 0, which no row has, and past a row's capacity."""
    (rows, kv, capacity, D), device = memory.keys.shape, memory.keys.device
    most = -(-capacity // page)
    table = 1 + torch.randperm(rows * most).view(rows, most).to(device)
    shuffled = []
    for kept in (memory.keys, memory.values):
        pages = torch.full((1 + rows * most, kv, page, D), float("nan"), dtype=kept.dtype, device=device)
        for row in range(rows):
            for at in range(most):
                part = kept[row, :, at * page : (at + 1) * page]
                pages[table[row, at], :, : part.shape[1]] = part
        shuffled.append(pages)
    keys, values = shuffled
    return replace(memory, keys=keys, values=values, pages=table.int())


def beside(memory: Memory) -> Memory:
    """The same cache with each token's key and value side by side, as vLLM 0.33 has them."""
    keys, values = torch.cat((memory.keys, memory.values), -1).chunk(2, -1)
    return replace(memory, keys=keys, values=values)


@pytest.mark.parametrize("page", [0, 16], ids=["dense", "pages"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_keys_and_values_side_by_side(dtype: torch.dtype, page: int) -> None:
    """Every kernel, to the bit as with keys and values apart."""
    draw(page)
    T, kv, heads, D, capacity = 3, 2, 8, 128, 70
    rope = tuple(tensor(T, 1, D // 2, dtype=dtype) for _ in range(2))
    norms, qkv = HeadNorms(*(tensor(D, dtype=dtype) for _ in range(2)), 1e-6), tensor(T, heads + 2 * kv, D, dtype=dtype)
    kept = (tensor(T, kv, capacity, D, dtype=dtype) for _ in range(2))
    positions = torch.tensor([69, 0, 20], device=DEVICE)
    apart = Memory(*kept, torch.arange(T, device=DEVICE), positions)
    spans = [Span(row, row, 1, at) for row, at in enumerate(positions.tolist())]
    tiles = tiles_of(spans, apart.keys)
    memory = paged(apart, page) if page else apart
    found = []
    for form in (memory, beside(memory)):
        assert form.stride == (D if form is memory else 2 * D)
        q = head_norm_rope.launch(qkv, norms.q, norms.k, norms.eps, rope, form)
        runs = [
            decode.launch(q, form),
            attention.decode_attention(q, form, capacity),
            triton_prefill.launch(q, form, tiles),
            attention.prefill_attention(q, form, spans, tiles),
        ]
        found.append([q, *runs, form.keys, form.values])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_other_strides_are_refused() -> None:
    like = tensor(2, 2, 16, 64, dtype=torch.bfloat16)
    q, at = tensor(1, 4, 64, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for keys in (like.transpose(0, 1), like.transpose(1, 2).contiguous().transpose(1, 2), like[:, :1]):
        memory = Memory(keys, keys, at, at)
        assert "strides" in (decode.why_not(q, memory) or "")
        assert "strides" in (head_norm_rope.why_not(tensor(1, 8, 64, dtype=torch.bfloat16), memory) or "")
    memory, heads = Memory(like, like, at, at), tensor(1, 8, 64, dtype=torch.bfloat16)
    norms = HeadNorms(*(tensor(n, dtype=torch.bfloat16)[:: n // 64] for n in (64, 128)), 1e-6)
    loose, angles = (tensor(1, 1, n, dtype=torch.bfloat16)[..., :: n // 32] for n in (64, 32))
    for of, rope, serves in (
        (HeadNorms(norms.q, norms.q, 1e-6), (angles, angles), True),
        (norms, (angles, angles), False),
        (HeadNorms(norms.q, norms.q, 1e-6), (angles, loose), False),
    ):
        assert (attention.NORM_ROPE_WRITE.families[0].why_not(at.device, heads, of, rope, memory) is None) == serves


@seeds
def test_prefill_attention(seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = draw(seed)
    if not GPU:  # tiles in which short prompts have every kind of edge
        tile = Tile({"BLOCK_M": rng.choice([16, 32]), "BLOCK_N": rng.choice([16, 32]), "STAGES": 2}, 4)
        monkeypatch.setattr(triton_prefill, "tile", lambda D, itemsize, warpgroups=True: tile)
    S = rng.randint(1, 3)
    c = case(rng, dtype, S, longest=None if GPU else 200)
    spans = packed(rng, c, S)
    q, memory, want = attended(c, spans, dtype)
    got = triton_prefill.launch(q, memory, tiles_of(spans, c.keys))
    assert error(got, want) <= BOUND[dtype]


@pytest.mark.skipif(not HOPPER, reason="no GPU runs code of compute capability 9.0 here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(40))
def test_prefill_attention_on_hopper(seed: int, dtype: torch.dtype) -> None:
    """Dense and in pages, with tiles that hold nothing, more than once with the same bits."""
    rng = draw(seed)
    S = rng.randint(1, 6)
    c = case(rng, dtype, S, 128)
    if seed % 4 == 0:  # more items than blocks, and long rows
        c = SimpleNamespace(kv=4, heads=32, D=128, rows=3, capacity=2100)
        c.keys, c.values = (tensor(3, 4, 2100, 128, dtype=dtype) for _ in range(2))
        S = rng.randint(1, 3)
    spans = packed(rng, c, S)
    q, memory, want = attended(c, spans, dtype)
    tiles = tiles_of(spans, c.keys)
    tiles = torch.cat((tiles, tiles.new_zeros(rng.choice([0, 8]))))
    for here in (memory, *(paged(memory, page) for page in (16, 64, 256))):
        assert prefill_sm90.why_not(q.device, q, here, tiles) is None
        got = torch.full_like(q, float("nan"))
        assert prefill_sm90.launch(q, here, tiles, got) is got
        assert error(got, want) <= BOUND[dtype]
        assert torch.equal(got, attention.prefill_attention(q, here, spans, tiles))
    for other in (q.float(), q[..., :64]):
        assert prefill_sm90.why_not(q.device, other, memory, tiles) is not None
    apart = torch.full((*q.shape[:2], 136), float("nan"), dtype=dtype, device=DEVICE)[..., :128]
    assert prefill_sm90.why_not(q.device, q, memory, tiles, apart) is not None
    assert triton_prefill.why_not(q, memory, tiles, apart) is not None
    assert torch.equal(attention.prefill_attention(q, memory, spans, tiles, apart), apart)
    assert error(apart, want) <= BOUND[dtype]
