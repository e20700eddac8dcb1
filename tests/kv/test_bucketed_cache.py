"""The bucketed cache by itself: where tokens are after any steps, what attention reads, what is refused."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ttnn_moe.cuda.attention.tiers import UNIT
from ttnn_moe.errors import ContractError, RequestError
from ttnn_moe.kv.bucketed import allocation
from ttnn_moe.kv.bucketed.cache import BucketedCache
from ttnn_moe.kv.bucketed.quantise import rotate
from ttnn_moe.kv.bucketed.storage import read_units
from ttnn_moe.kv.cache import CacheSizes
from ttnn_moe.kv.formats import bytes_for, least_capacity, new_cache
from ttnn_moe.kv.step import DecodeStep, PrefillStep, Step

SIZES = CacheSizes(2, 4, 2, 32, torch.float32, torch.device("cpu"))
ERRORS = {2: 0.65, 3: 0.35, 4: 0.18, 8: 0.02, 16: 0.006}
"""Relative error of a vector, at most."""


@pytest.fixture(autouse=True)
def _small_high_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "HIGH", ((4, 60),))


class Sequences:
    """Keys, values and queries of sequences [rows, layers, tokens, heads, D], fed to a cache."""

    def __init__(self, cache: BucketedCache, rows: int, tokens: int):
        self.cache, generator = cache, torch.Generator().manual_seed(1)
        draw = partial(torch.randn, generator=generator)
        self.k, self.v = (draw(rows, 2, tokens, 2, 32) for _ in range(2))
        self.q = draw(rows, 2, tokens, 4, 32)
        self.lengths = [0] * rows

    def run(self, step: Step, places: list[tuple[int, int]]) -> list[Tensor]:
        """Outputs of both layers for tokens (row, position)."""
        rows, at = (list(x) for x in zip(*places, strict=True))
        out = []
        for layer in range(2):
            self.cache.write(layer, self.k[rows, layer, at], self.v[rows, layer, at], step)
            out.append(self.cache.attend(layer, self.q[rows, layer, at], step))
        return out

    def prefill(self, chunks: list[tuple[int, int]], decoding: list[int]) -> tuple[list[tuple[int, int]], list[Tensor]]:
        first = [(row, self.lengths[row]) for row in decoding]
        places = list(first)
        for row, n in chunks:
            places += [(row, self.lengths[row] + i) for i in range(n)]
            self.lengths[row] += n
        step = self.cache.prefill(chunks, range(sum(n for _, n in chunks)), first)
        for row in decoding:
            self.lengths[row] += 1
        return places, self.run(step, places)

    def decode(self, rows: list[int]) -> tuple[list[tuple[int, int]], list[Tensor]]:
        places = [(row, self.lengths[row]) for row in rows]
        step = self.cache.decode(rows, [at for _, at in places])
        for row in rows:
            self.lengths[row] += 1
        return places, self.run(step, places)

    def expected(self, places: list[tuple[int, int]], layer: int) -> Tensor:
        """Attention in fp32 to keys and values as they were written."""
        out = []
        for row, at in places:
            q, k, v = self.q[row, layer, at], self.k[row, layer, : at + 1], self.v[row, layer, : at + 1]
            k, v = (x.transpose(0, 1)[None] for x in (k, v))
            out.append(F.scaled_dot_product_attention(q[None, :, None], k, v, enable_gqa=True)[0, :, 0])
        return torch.stack(out)


def stored(cache: BucketedCache, row: int, layer: int) -> dict[int, tuple[int, Tensor, Tensor]]:
    """By position: bits, key and value [kv_heads, D] of every token that the tiers hold."""
    found: dict[int, tuple[int, Tensor, Tensor]] = {}
    for bits, tiers in cache.places.tiers.items():
        tier, count = tiers.each[layer], int(cache.places.counts[bits][row])
        per = tier.page // UNIT
        if not count:
            continue
        units = [int(tier.table[row, u // per]) * per + u % per for u in range(count // UNIT)]
        k, v, held = read_units(tier, torch.tensor(units, dtype=torch.int64))
        for i, unit in enumerate(units):
            for t in range(UNIT):
                if held[i, t]:
                    position = int(tier.token_ids[unit // per, unit % per * UNIT + t])
                    assert position not in found, "a token is in one tier"
                    found[position] = bits, rotate(k[i, t]), rotate(v[i, t])
    return found


@pytest.mark.slow(20)
@pytest.mark.parametrize(("bits", "seed"), [(3, 0), (6, 1), (16, 0)])
def test_every_token_is_in_one_tier_whatever_the_steps(bits: float, seed: int) -> None:
    rng = random.Random(seed)
    cache = BucketedCache(SIZES, 3, 512, 30, bits, 32)
    fed = Sequences(cache, 3, 512)
    for row in range(3):
        cache.open(row, 220)
    filling = {row: rng.randint(1, 170) for row in range(3)}
    while filling or min(fed.lengths) < 180:
        decoding = [row for row in range(3) if row not in filling and fed.lengths[row] < 219]
        chunks = [(row, min(n, rng.choice([1, 9, 33, 250]))) for row, n in filling.items() if rng.random() < 0.6]
        places, out = fed.prefill(chunks, decoding) if chunks else fed.decode(decoding) if decoding else ([], [])
        for row, n in chunks:
            filling[row] -= n
            if not filling[row]:
                del filling[row]
        for layer, attended in enumerate(out):
            assert attended.isfinite().all()
            if bits == 16:
                torch.testing.assert_close(attended, fed.expected(places, layer), rtol=0.02, atol=0.02)
    fed.decode([0, 1, 2])
    own = cache.allocation
    for row in range(3):
        for layer in range(2):
            found = stored(cache, row, layer)
            assert sorted(found) == list(range(fed.lengths[row]))
            for position, (b, *got) in found.items():
                if position < own.sinks or position >= fed.lengths[row] - own.recent:
                    assert b == own.high
                for x, want in zip(got, (fed.k, fed.v), strict=True):
                    error = (x - want[row, layer, position]).norm(dim=-1) / want[row, layer, position].norm(dim=-1)
                    assert error.max() < ERRORS[b]
        counts = {b: sum(1 for found_bits, *_ in found.values() if found_bits == b) for b in own.tiers}
        moved = own.split(cache.places.units[row])
        assert all(counts[b] == UNIT * moved[b] for b in own.tiers if b != own.high)
        cache.close(row)
    assert cache.free == cache.total and all(pool.free == pool.n for pool in cache.places.pools.values())


def test_a_row_sees_nothing_of_the_row_before_it() -> None:
    cache = BucketedCache(SIZES, 1, 256, 8, 4, 32)
    for n in (200, 5):
        cache.open(0, n)
        fed = Sequences(cache, 1, 256)
        fed.prefill([(0, n - 2)], [])
        fed.decode([0])
        places, out = fed.decode([0])
        assert sorted(stored(cache, 0, 0)) == list(range(n))
        cache.close(0)
    torch.testing.assert_close(out[1], fed.expected(places, 1), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("values", [False, True], ids=["key", "value"])
def test_not_a_number_stays_in_its_row(values: bool, bad: float) -> None:
    """It reaches no token before its piece of the prompt; a key reaches no token before its own."""
    cache, at = BucketedCache(SIZES, 2, 256, 16, 4, 32), 120
    fed = Sequences(cache, 2, 256)
    (fed.v if values else fed.k)[0, :, at] = bad
    for row in range(2):
        cache.open(row, 200)
    seen = {}
    for chunks in ([(0, 100), (1, 5)], [(0, 50), (1, 7)]):
        places, out = fed.prefill(chunks, [])
        seen |= dict(zip(places, out[0].isfinite().flatten(1).all(1).tolist(), strict=True))
    places, out = fed.decode([0, 1])
    seen |= dict(zip(places, out[0].isfinite().flatten(1).all(1).tolist(), strict=True))
    assert all(finite for (row, position), finite in seen.items() if row == 1 or position < 100)
    assert not any(finite for (row, position), finite in seen.items() if row == 0 and position >= at)
    assert values or all(finite for (row, position), finite in seen.items() if position < at)


def test_tokens_that_later_queries_attend_to_keep_more_bits() -> None:
    cache = BucketedCache(SIZES, 1, 512, 16, 3, 32)
    fed = Sequences(cache, 1, 512)
    heavy = torch.arange(10, 400, 9)
    fed.k[:, :, heavy], fed.q[:, :, -150:] = 3.0, 1.0
    fed.q[0, :, 300:400] = 1.0
    cache.open(0, 450)
    fed.prefill([(0, 400)], [])
    fed.decode([0])
    found = stored(cache, 0, 1)
    upper = cache.allocation.low[1]
    moved = [p for p in heavy.tolist() if found[p][0] != cache.allocation.high]
    assert len(moved) > 30 and all(found[p][0] == upper for p in moved)


def test_the_last_layer_may_want_some_tokens_only() -> None:
    """PrefillStep.wanted: tokens that were written come again, as a decode step."""
    cache = BucketedCache(SIZES, 3, 256, 24, 16, 32)
    fed = Sequences(cache, 3, 256)
    for row in range(3):
        cache.open(row, 200)
    fed.prefill([(0, 90), (1, 70)], [])
    chunks, first = [(1, 30), (2, 6)], [(0, 90)]
    step = cache.prefill(chunks, [29, 33, 35], first)
    wanted = step.wanted()
    assert isinstance(step, PrefillStep) and isinstance(wanted, DecodeStep)
    places = [(0, 90), *((1, 70 + i) for i in range(30)), *((2, i) for i in range(6))]
    rows, at = (list(x) for x in zip(*places, strict=True))
    some = [places[0], places[30], places[34], places[36]]
    mine, mine_at = (list(x) for x in zip(*some, strict=True))
    cache.write(0, fed.k[rows, 0, at], fed.v[rows, 0, at], step)
    cache.write(0, fed.k[mine, 0, mine_at], fed.v[mine, 0, mine_at], wanted)
    torch.testing.assert_close(
        cache.attend(0, fed.q[mine, 0, mine_at], wanted), fed.expected(some, 0), rtol=0.02, atol=0.02
    )


@pytest.mark.parametrize("bits", [2.5, 3, 6, 16])
def test_memory_is_what_the_tensors_take(bits: float) -> None:
    cache = BucketedCache.within(SIZES, 4, 1024, None, 64, bits)
    layers = [tiers.together for tiers in cache.places.tiers.values()]
    assert cache.bytes == sum(x.nbytes for tier in layers for x in (tier.payload, tier.scales, tier.token_ids))
    assert cache.total == 4 * 1024 // 64, "all that the rows can use"
    small = BucketedCache.within(SIZES, 4, 1024, cache.bytes // 2, 64, bits)
    assert small.bytes <= cache.bytes // 2 < bytes_for("bucketed", bits, SIZES, 4, 1024) + 1
    assert BucketedCache.within(SIZES, 4, 1024, small.bytes, 64, bits).total == small.total > 1, "just enough"
    assert bytes_for("bucketed", 3, SIZES, 8, 32768) < bytes_for("paged", None, SIZES, 8, 32768) / 8, "of fp32"


def test_rows_are_as_long_as_asked_or_as_the_budget_needs() -> None:
    least = least_capacity("bucketed", 3, 1)
    assert BucketedCache.within(SIZES, 1, least, None, 64, 3).capacity == least
    assert [least_capacity("bucketed", 3, n) for n in (least - 1, least, least + 1)] == [least, least, least + 1]
    assert least_capacity("paged", None, 1) == 1


REFUSED = {
    "a word": (lambda: new_cache("int4", None, SIZES, 1, 512), RequestError, "kv='int4'; expected one of"),
    "bits of bf16": (lambda: new_cache("paged", 3, SIZES, 1, 512), RequestError, "kv_bits=3; expected kv='bucketed'"),
    "short rows": (lambda: new_cache("bucketed", 2.2, SIZES, 1, 256), RequestError, "bits=2.2 in rows of 256"),
    "little memory": (
        lambda: new_cache("bucketed", 3, SIZES, 2, 512, memory=1000),
        RequestError,
        "1,000 bytes; expected at least [0-9,]+: 64 tokens of 8 bits for each of 2 rows",
    ),
    "no key/value heads": (
        lambda: new_cache("bucketed", 3, CacheSizes(1, 2, 0, 32, torch.float32, torch.device("cpu")), 1, 512),
        RequestError,
        "kv_heads=0; expected an integer, 1 ",
    ),
    "heads that do not divide": (
        lambda: new_cache("bucketed", 3, CacheSizes(1, 3, 2, 32, torch.float32, torch.device("cpu")), 1, 512),
        RequestError,
        "3 heads, 2 key/value heads",
    ),
    "head_dim": (
        lambda: new_cache("bucketed", 3, CacheSizes(1, 2, 2, 48, torch.float32, torch.device("cpu")), 1, 512),
        ContractError,
        "head_dim=48; expected a multiple of 32",
    ),
    "bytes of no format": (
        lambda: bytes_for("int4", None, SIZES, 1, 64),
        RequestError,
        "no such KV-cache format; got kv='int4'; expected one of .*; to fix it: leave kv out",
    ),
    "two bits": (
        lambda: least_capacity("bucketed", 2, 10),
        RequestError,
        "more than 2: .*take kv_bits=2.05, which rows of 4096 tokens",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_refused_and_why(name: str) -> None:
    make, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        make()


def test_a_row_stands_once_in_a_step() -> None:
    """A second chunk would not meet the first one's tokens, which are packed by the next step."""
    cache = BucketedCache(SIZES, 2, 256, 16, 4, 32)
    for row in range(2):
        cache.open(row, 100)
    fed = Sequences(cache, 2, 256)
    fed.prefill([(0, 40), (1, 20)], [])
    for call in (
        lambda: cache.prefill([(1, 3), (0, 5), (1, 4)], [11]),
        lambda: cache.prefill([(1, 3)], [2], [(0, 40), (1, 20)]),
        lambda: cache.prefill([(0, 3)], [2], [(1, 20), (1, 21)]),
        lambda: cache.decode([1, 0, 1], [20, 40, 21]),
    ):
        with pytest.raises(RequestError, match="row 1 2 times; expected each row once.*to fix it: give a row's tokens"):
            call()
    assert cache.lengths[:2] == [40, 20]
    places, out = fed.prefill([(1, 7)], [0])
    torch.testing.assert_close(out[1], fed.expected(places, 1), rtol=0.1, atol=0.1)


def test_equalised_keys_stand_outlier_channels() -> None:
    by = torch.ones(32)
    by[[3, 17]] = 25.0
    errors = []
    for equalised in (False, True):
        cache = BucketedCache(SIZES, 1, 256, 8, 4, 32)
        if equalised:
            cache.equalise(by.repeat(2, 1), (1 / by).repeat(2, 1))
        fed = Sequences(cache, 1, 256)
        fed.k, fed.q = fed.k * by, fed.q / by
        cache.open(0, 256)
        fed.prefill([(0, 250)], [])
        places, out = fed.decode([0])
        want = fed.expected(places, 0)
        errors.append(float((out[0] - want).norm() / want.norm()))
    assert errors[1] < 0.25 < 0.5 * errors[0] + 0.25
    assert errors[1] < 0.5 * errors[0]


def test_a_channel_that_is_zero_in_every_key_or_query_is_equalised_too() -> None:
    cache, sizes = BucketedCache(SIZES, 1, 256, 8, 16, 32), torch.ones(2, 2, 32)
    sizes[0, :, 3] = sizes[1, :, 17] = 0.0
    cache.equalise(*sizes)
    assert cache._key_scale.amin(-1).allclose(torch.tensor(1e-3).sqrt()), "a zero counts as a thousandth of the loudest"
    fed = Sequences(cache, 1, 256)
    fed.k, fed.q = fed.k * sizes[0, 0], fed.q * sizes[1, 0]
    cache.open(0, 256)
    fed.prefill([(0, 250)], [])
    places, out = fed.decode([0])
    torch.testing.assert_close(out[0], fed.expected(places, 0), rtol=0.02, atol=0.02)


def test_a_model_whose_keys_are_zero_is_equalised_too() -> None:
    cache = BucketedCache(SIZES, 1, 256, 8, 16, 32)
    cache.equalise(torch.zeros(2, 32), torch.ones(2, 32))
    assert cache._key_scale.isfinite().all() and (cache._key_scale > 0).all()


def test_a_device_gets_tables_and_counts_when_they_changed() -> None:
    places = BucketedCache(SIZES, 2, 256, 16, 4, 32).places
    places._device_words = places._host.clone()  # as on a device
    for change in (lambda: places.take(1, {3: 1, 4: 2, 8: 0}), lambda: places.give(1)):
        change()
        assert not torch.equal(places._device_words, places._host)
        places.refresh()
        assert torch.equal(places._device_words, places._host)
    places._device_words.zero_()
    places.refresh()
    assert not places._device_words.any(), "nothing changed, so nothing is copied"


@pytest.mark.parametrize(
    "fails", ["bucketed.cache.zeros", "bucketed.cache.empty_mass", "bucketed.places.Places.refresh"]
)
def test_a_step_that_fails_has_grown_no_row(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who catches it may give the same tokens again, in a smaller step."""

    def no_room(*_: object) -> None:
        raise RequestError("no room")

    made = []
    for failing in (False, True):
        cache = BucketedCache(SIZES, 2, 256, 14, 3, 32)
        fed = Sequences(cache, 2, 256)
        for row in range(2):
            cache.open(row, 200)
        out = fed.prefill([(0, 70)], [])[1]
        if failing:
            with monkeypatch.context() as patch:
                patch.setattr(f"ttnn_moe.kv.{fails}", no_room)
                with pytest.raises(RequestError, match="no room"):
                    cache.prefill([(1, 129)], [0], [(0, 70)])
            assert cache.lengths == [70, 0, 0]
        out += fed.prefill([(1, 65)], [0])[1] + fed.prefill([(1, 64)], [0])[1] + fed.decode([0, 1])[1]
        made.append((out, [sorted(stored(cache, row, 0)) for row in range(2)]))
    assert made[0][1] == made[1][1] == [list(range(73)), list(range(130))]
    assert all(torch.equal(one, other) for one, other in zip(made[0][0], made[1][0], strict=True))
