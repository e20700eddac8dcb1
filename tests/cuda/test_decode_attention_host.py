"""Hopper's decode attention without a GPU: the kernel on the host, over lengths, cuts, and planted mistakes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cuda_gpus import gpu_of, pretend
from host_kernels import GXX, HostKernels, with_mistake
from qwen3_attention_cases import beside, paged
from qwen3_kernel_cases import error
from ttnn_moe.cuda.attention import decode_sm90, decode_units
from ttnn_moe.cuda.attention.decode_sm90 import Plan
from ttnn_moe.cuda.attention.memory import TURNS, Memory
from ttnn_moe.cuda.device import H200
from ttnn_moe.cuda.jit import build
from ttnn_moe.kv import torch_forms

pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")
lateness = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
BF16, F16 = torch.bfloat16, torch.float16
NAME = "sm90/decode_attention"
WAIT = "    wait_for_predecessor();\n"
# what the kernel before this one does: its key's and value's sign was wrong
WRITES = """    if (valid)
        for (int d = 0; d < D; ++d) {
            const int at = static_cast<int>(position);
            const int of = PAGE ? pages[row * pages_a_row + at / (PAGE ? PAGE : 1)] : 0;
            const u64 key = from.begin(at / TILE, of) + at % TILE * STRIDE + d;
            const_cast<u16*>(keys)[key] &= 0x7fff, const_cast<u16*>(values)[key] &= 0x7fff;
        }
"""


def _worst(
    host: HostKernels,
    monkeypatch: pytest.MonkeyPatch,
    positions: list[int],
    *,
    of: Plan,
    kv: int = 2,
    group: int = 8,
    D: int = 128,
    page: int = 64,
    capacity: int = 300,
    bound: int | None = None,
    early: bool = True,
    dtype: torch.dtype = BF16,
    written: bool = False,
    narrow: bool = False,
    together: bool = False,
    units: int = 0,
) -> float:
    """Largest relative error of a token; infinite for what nobody may do. NaN lies wherever nobody may look.

    written: the kernel before this one writes each token's own key and value, see WRITES. narrow: rows are int32.
    together: a token's key and value lie side by side. units: keys of a unit, at least.
    """
    host.use(monkeypatch)
    decode_sm90._launch.cache_clear()
    T = len(positions)
    rows = torch.randperm(T + 1)[:T]
    q = torch.randn(T, kv * group, D).to(dtype)
    keys, values = (torch.randn(T + 1, kv, capacity, D).to(dtype) for _ in range(2))
    at = torch.tensor(positions)
    newest = rows, slice(None), at.clamp(max=capacity - 1)
    if written:
        keys[newest], values[newest] = keys[newest].abs(), values[newest].abs()
    want = torch_forms.decode_attention(q.double(), Memory(keys.double(), values.double(), rows, at), capacity)
    if written:
        keys[newest], values[newest] = -keys[newest], -values[newest]
    n = T if bound is None else bound
    beyond = torch.ones(T + 1, capacity, dtype=torch.bool)
    for t in range(n):
        beyond[rows[t], : positions[t] + 1] = False
    for kept in (keys, values):
        kept.masked_fill_(beyond[:, None, :, None], float("nan"))
    count = None if bound is None else torch.tensor(bound, dtype=torch.int32)
    turns = torch.zeros(T * kv * of.parts, dtype=torch.int32)
    made = decode_units.launch(at, count, capacity, 3, least=units) if units else None
    memory = Memory(keys, values, rows.int() if narrow else rows, at, count, turns=turns)
    if page:
        memory = paged(memory, page)
    if together:
        memory = beside(memory)
    out = torch.full((T + 1, kv * group, D), 7.0).to(dtype)
    decode_sm90.launch(q, replace(memory, past_written=early, units=made), out[:T], of)
    if not host.sound or not bool((out[T:] == 7).all()) or bool(out[n:T].any()) or bool(turns.any()):
        return float("inf")
    return error(out[:n], want[:n]) if n else 0.0


@lateness
@pytest.mark.parametrize(
    ("positions", "options"),
    [
        ([191, 0, 70], {"of": Plan(4, 4, 1), "capacity": 256}),
        ([191, 15, 16], {"of": Plan(4, 4, 1), "capacity": 256, "early": False, "page": 16, "narrow": True}),
        ([255, 128], {"of": Plan(1, 8, 2), "capacity": 256, "bound": 1}),
        ([299, 17, 31, 48], {"of": Plan(1, 4, 2), "page": 0, "bound": 3, "group": 4}),
        ([299, 17], {"of": Plan(1, 4, 2), "page": 0, "early": False}),
        ([129, 64], {"of": Plan(2, 8, 1), "group": 1, "D": 64, "page": 32}),
        ([299, 0], {"of": Plan(8, 4, 4), "kv": 1, "page": 256, "capacity": 512}),
        ([470], {"of": Plan(2, 4, 2), "kv": 1, "capacity": 512, "dtype": F16, "group": 16}),
        ([470], {"of": Plan(2, 4, 2), "kv": 1, "capacity": 512, "early": False, "group": 11}),
        ([511, 3], {"of": Plan(1, 4, 4), "kv": 1, "capacity": 512, "D": 64, "dtype": F16}),
        ([40, 7], {"of": Plan(8, 4, 1), "kv": 1, "D": 64, "bound": 0}),
        ([5], {"of": Plan(1, 4, 1), "page": 0, "capacity": 7}),
        ([299, 31, 32, 0], {"of": Plan(2, 1, 1, 3), "kv": 1}),
        ([299, 0, 140], {"of": Plan(1, 2, 2, 4), "page": 0, "early": False, "bound": 2}),
        ([699, 130], {"of": Plan(8, 1, 2, 2), "kv": 1, "group": 16, "capacity": 704}),
        ([699, 511], {"of": Plan(4, 4, 2, 2), "page": 0, "D": 64, "capacity": 700, "dtype": F16}),
        ([299, 17], {"of": Plan(1, 4, 2), "together": True}),
        ([17, 0, 299, 31], {"of": Plan(1, 4, 2), "bound": 3, "units": 512}),
        ([17, 0, 299, 140], {"of": Plan(1, 4, 2), "units": 64}),
        ([299, 250], {"of": Plan(1, 2, 2), "units": 16, "early": False, "page": 16, "narrow": True}),
        ([511, 0, 400], {"of": Plan(1, 4, 1), "kv": 1, "capacity": 512, "units": 100, "D": 64, "dtype": F16}),
        ([299, 17], {"of": Plan(1, 4, 2), "units": 32, "page": 0, "group": 16, "bound": 1}),
        ([129, 64], {"of": Plan(2, 8, 1), "page": 0, "D": 64, "early": False, "together": True}),
    ],
    ids=str,
)
def test_decode_attention(
    positions: list[int], options: dict, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with one key, whole and ragged tiles, rings, parts without keys, and tokens that do not count."""
    torch.manual_seed(0)
    bound = 2e-3 if options.get("dtype") == F16 else 1.2e-2
    assert _worst(HostKernels(tmp_path, late), monkeypatch, positions, **options) < bound


@pytest.mark.parametrize(
    ("T", "more", "least", "longest", "bound"),
    [(1, 1, 16, 3, None), (3, 5, 32, 400, 2), (130, 66, 512, 3000, 77), (1024, 30, 64, 900, None), (5, 4, 16, 50, 0)],
)
def test_units(
    T: int, more: int, least: int, longest: int, bound: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tile once, in units of about one length, the longest first; slots and room suffice."""
    host = HostKernels(tmp_path)
    host.use(monkeypatch)
    decode_units._launch.cache_clear()
    positions = torch.randint(0, longest, (T,), generator=torch.Generator().manual_seed(T))
    positions[0] = 1 << 40
    capacity = longest + 7
    count = None if bound is None else torch.tensor(bound, dtype=torch.int32)
    units = decode_units.launch(positions, count, capacity, more, least=least)
    assert host.sound and units.shape == (T + more, 4)
    n = T if bound is None else bound
    tiles = [-(-min(int(at) + 1, capacity) // 16) if t < n else 0 for t, at in enumerate(positions)]
    most = max(-(-least // 16), -(-sum(tiles) // more))
    found = [unit for unit in units.tolist() if unit[0] >= 0]
    assert units[len(found) :].eq(torch.tensor([-1, 0, 0, 0], dtype=torch.int32)).all()
    lengths = [end - first for _, first, end, _ in found]
    assert max(lengths) <= most
    assert all(after <= before + 1 for before, after in zip(lengths, lengths[1:], strict=False))
    slots = []
    for t in range(T):
        own = sorted((unit for unit in found if unit[0] & 0xFFFF == t), key=lambda unit: unit[1])
        assert own[0][1] == 0 and own[-1][2] == tiles[t]
        assert all(before[2] == after[1] for before, after in zip(own, own[1:], strict=False))
        assert {unit[0] >> 16 for unit in own} == {len(own)} and [unit[3] >> 16 for unit in own] == [*range(len(own))]
        if len(own) > 1:
            (base,) = {unit[3] & 0xFFFF for unit in own}
            slots += range(base, base + len(own))
    assert sorted(slots) == [*range(len(slots))] and len(slots) <= 2 * more


@lateness
@pytest.mark.parametrize("seed", range(4))
def test_any_lengths(seed: int, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the cut of a real GPU. Cuts repeat, since each is compiled."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    capacity = (64, 256, 256, 1000)[seed]
    positions = [rng.randrange(capacity) for _ in range(3)]
    of = decode_sm90.plan((8, 32, 64, 4)[seed], capacity, 132)
    options = {"kv": 1, "capacity": capacity, "early": seed % 2 == 0, "page": 64 if seed < 3 else 0}
    assert _worst(HostKernels(tmp_path, late), monkeypatch, positions, of=of, **options) < 1.2e-2


def _with_writes(tmp_path: Path, *changes: tuple[str, str]) -> dict[str, Path]:
    """The kernel, that sees its predecessor's writes when it waits; and a mistake: lines, and what is there instead."""
    sources = with_mistake(tmp_path, NAME, WAIT, WRITES)
    for line, instead in changes:
        source = sources[NAME].read_text()
        assert line in source
        sources[NAME].write_text(source.replace(line, instead))
    return sources


@lateness
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(("page", "stages"), [(64, 1), (0, 4)])
def test_what_the_kernel_before_writes_is_read_after_the_wait(
    page: int, stages: int, early: bool, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    host = HostKernels(tmp_path, late, _with_writes(tmp_path))
    options = {"kv": 1, "page": page, "of": Plan(2, 4, stages), "early": early, "written": True}
    assert _worst(host, monkeypatch, [100, 0, 15, 16, 299], **options) < 1.2e-2


NONE = ("copy_16_if(newest && lane < 2 * CHUNKS,", "copy_16_if(newest && lane < 0,")


@pytest.mark.parametrize(
    "changes",
    [
        [NONE],
        [NONE, ("TILE, length - 1, length);", "TILE, length, length);")],
        [("newest_row = (length - 1) % TILE", "newest_row = 0")],
    ],
    ids=["not read", "read with the others", "another key"],
)
def test_a_mistake_about_the_newest_key_is_seen(
    changes: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    host = HostKernels(tmp_path, False, _with_writes(tmp_path, *changes))
    assert _worst(host, monkeypatch, [100, 0, 3], kv=1, of=Plan(2, 4, 1), written=True) > 0.1


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("first_tile = section * ALL_WARPS,", "first_tile = 0,"),
        ("== sections - 1;", "== sections;"),
        ("if (*last) *turn = 0;", ""),
        ("(t * kv_heads + head) * PARTS + rank;", "(t * kv_heads + head) * PARTS;"),
        ("result.store(first + section * pitch)", "result.store(first)"),
        ("result.merge(first, first + 2 * QUERIES, sections,", "result.merge(first, first + 2 * QUERIES, 1,"),
        ("to[QUERIES + query()] = total;", "to[QUERIES + query()] = 1.0f;"),
    ],
)
def test_a_mistake_about_sections_is_seen(
    line: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    host = HostKernels(tmp_path, False, with_mistake(tmp_path, NAME, line, instead))
    assert _worst(host, monkeypatch, [299, 0, 140, 64], of=Plan(2, 1, 2, 3), kv=1) > 0.02


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("first_tile = unit.first,", "first_tile = 0,"),
        ("end_tile - me - 1) / warps", "tiles - me - 1) / warps"),
        ("== sections - 1;", "== sections;"),
        ("if (*last) *turn = 0;", ""),
        ("result.store(first + section * pitch)", "result.store(first)"),
        ("const int pitch = kv_heads * PART;", "const int pitch = PART;"),
    ],
)
def test_a_mistake_about_units_is_seen(
    line: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    host = HostKernels(tmp_path, False, with_mistake(tmp_path, NAME, line, instead))
    assert _worst(host, monkeypatch, [140, 0, 299, 280], of=Plan(1, 2, 2), units=64) > 0.02


@pytest.mark.parametrize(
    ("line", "instead", "late"),
    [
        ("lane / 4 + i / 2 * 8 < left ?", "true ?", False),
        ("if (first + row >= length) store_16", "if (false) store_16", False),
        ("copies_wait<0>();\n        else", ";\n        else", True),
        ("copies_wait<STAGES - 1>();", ";", True),
        ("highest[n][i] = most;", "", False),
        ("sums[m][n][i] *= shrink[n][i % 2];", "", False),
        ("total[n][i] * shrink[n][i]", "total[n][i]", False),
        ("step = 4; step < 32; step *= 2) total", "step = 4; step < 16; step *= 2) total", False),
        ("m * 8 / COLUMNS,", "0,", False),
        ("if (lane / 4 < PARTS)", "if (lane / 4 < 1)", False),
        ("barrier_wait(memory + BARRIER, 0);", ";", False),
        ("total = fmaf(states[w * state_pitch + QUERIES + query()], weight, total);", "total += weight;", False),
        ("rank * COLUMNS + column(e)", "column(e)", False),
        ("row * pages_a_row", "0", False),
        ("page = from.page_of(ahead + warps);", ";", False),
        ("const bool valid = !num_tokens || t < *num_tokens;", "const bool valid = true;", False),
        ("position < capacity ? position + 1 : capacity", "position", False),
        ("* kv_heads + head) * PAGE", "* kv_heads) * PAGE", False),
        ("(chunk ^ row % 8)", "chunk * 0", False),
    ],
)
def test_a_mistake_is_seen(
    line: str, instead: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    host = HostKernels(tmp_path, late, with_mistake(tmp_path, NAME, line, instead))
    options = {"page": 16, "capacity": 720, "group": 4, "bound": 2, "of": Plan(2, 4, 2)}
    assert _worst(host, monkeypatch, [701, 90, 370], **options) > 0.02


def test_slots_are_read_before_sums_take_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    mistake = with_mistake(tmp_path, NAME, "        __syncthreads();  // all slots were read\n", "        ;\n")
    host = HostKernels(tmp_path, False, mistake)
    assert _worst(host, monkeypatch, [79], kv=1, of=Plan(1, 4, 2)) > 0.02


def test_a_nan_stays_in_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    host = HostKernels(tmp_path)
    host.use(monkeypatch)
    decode_sm90._launch.cache_clear()
    q = torch.randn(2, 16, 128).bfloat16()
    keys, values = (torch.randn(2, 2, 64, 128).bfloat16() for _ in range(2))
    memory = Memory(keys, values, torch.arange(2), torch.tensor([50, 60]))
    good = decode_sm90.launch(q, memory, of=Plan(2, 4, 1))
    keys[0, 0, 3, 7] = float("nan")
    q[1, 15, 0] = float("nan")
    got = decode_sm90.launch(q, memory, of=Plan(2, 4, 1))
    assert bool(got[0, :8].isnan().all() and got[1, 15].isnan().all())
    assert torch.equal(got[0, 8:], good[0, 8:]) and torch.equal(got[1, :15], good[1, :15])


def test_cuts() -> None:
    """Clusters of what 132 multiprocessors run at a time; a tile a warp where rows are short; all within a block."""
    assert decode_sm90.plan(4, 256, 132) == Plan(4, 4, 1)
    assert decode_sm90.plan(32, 256, 132) == Plan(4, 4, 1)
    assert decode_sm90.plan(64, 256, 132) == Plan(2, 8, 1)
    assert decode_sm90.plan(128, 256, 132) == Plan(1, 8, 2)
    assert decode_sm90.plan(1024, 256, 132) == Plan(1, 4, 2)
    assert decode_sm90.plan(4, 4096, 132, counted=True) == decode_sm90.plan(4, 40_960, 132) == Plan(8, 4, 4)
    assert decode_sm90.plan(4, 40_960, 132, counted=True) == Plan(8, 4, 2, sections=4)
    assert decode_sm90.plan(4, 4200, 100, counted=True) == Plan(8, 4, 2, sections=3)
    assert decode_sm90.plan(8, 1 << 17, 132, counted=True) == Plan(8, 4, 2, sections=2)
    assert decode_sm90.plan(16, 8192, 132) == Plan(8, 4, 2)
    assert decode_sm90.plan(32, 8192, 132) == Plan(8, 4, 1)
    assert decode_sm90.plan(48, 8192, 132) == Plan(4, 4, 2)
    assert decode_sm90.plan(64, 8192, 132) == Plan(4, 4, 1)
    assert decode_sm90.plan(128, 8192, 132) == Plan(2, 4, 2)
    assert decode_sm90.plan(12, 1 << 17, 132, counted=True).sections == 1
    for pairs in (1, 2, 4, 8, 30, 64, 128, 133, 256, 1000, 9999):
        for capacity in (1, 16, 64, 100, 256, 1000, 2048, 4096, 1 << 17):
            of = decode_sm90.plan(pairs, capacity, 132)
            for D, group in ((64, 1), (128, 8), (128, 16)):
                assert of.shared_memory(D, group) <= 227 << 10


def test_what_is_divided_into_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of so many tokens that blocks wait for one another; in long caches also those of a wave of blocks."""
    pretend(monkeypatch, H200)
    device = torch.device("cuda", 0)
    for capacity, first in ((64, 67), (4096, 67), (4097, 23), (1 << 17, 23)):
        served = [T for T in range(1, 1100) if decode_units.serves(T, 4, capacity, device)]
        assert served == [*range(first, 1025)]
        of = decode_sm90.plan_of_units(capacity)
        assert of.parts == of.sections == 1 and of.shared_memory(128, 8) <= 64 << 10
    assert decode_units.extra(4, device) == 66
    assert not decode_units.serves(200, 4, 1280, torch.device("cpu"))
    pretend(monkeypatch, gpu_of((8, 0), multiprocessors=108))
    assert not decode_units.serves(200, 4, 1280, device)


def test_cuts_that_are_compiled_ahead_serve_every_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, H200)
    begin = decode_sm90.cuts_begin(100, 4, 2048, torch.device("cuda", 0))
    assert begin[0] == 1 and len(begin) < 10
    cuts = {decode_sm90.plan(4 * T, 2048, H200.multiprocessors) for T in begin}
    assert cuts == {decode_sm90.plan(4 * T, 2048, H200.multiprocessors) for T in range(1, 101)}


def test_rows_that_eight_parts_do_not_spread_keep_the_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, H200)
    monkeypatch.setattr(build, "why_not", lambda: None)

    def why_not(
        T: int, capacity: int, dtype: torch.dtype = BF16, D: int = 128, page: int = 64, turns: int = 0
    ) -> str | None:
        q, words = (torch.empty(T, 32, D, dtype=dtype, device="meta"), torch.empty(T, dtype=torch.int64, device="meta"))
        keys = torch.empty(1, 4, page, D, dtype=dtype, device="meta")
        table = torch.empty(T, capacity // page, dtype=torch.int32, device="meta")
        counts = torch.empty(turns, dtype=torch.int32, device="meta") if turns else None
        memory = Memory(keys, keys, words, words, None, table, turns=counts)
        return decode_sm90.why_not(torch.device("cuda", 0), q, memory)

    assert why_not(1, 4096) is why_not(1, 64) is why_not(4, 1 << 15) is why_not(256, 1 << 17) is None
    for T, capacity in ((1, 4160), (2, 8192), (2, 1 << 15)):
        assert "8 parts" in str(why_not(T, capacity)) and "8 parts" in str(why_not(T, capacity, turns=8))
        assert why_not(T, capacity, turns=TURNS) is None
    assert why_not(1, 256, torch.float32) == "neither bf16 nor fp16"
    assert "head_dim" in str(why_not(1, 256, D=256)) and "page" in str(why_not(1, 256, page=8))
