"""The allocator of the bucketed cache: budgets to tiers, and where a token is at any length. Numbers alone."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttnn_moe.cuda.attention.tiers import BITS, UNIT
from ttnn_moe.errors import RequestError
from ttnn_moe.kv.bucketed.allocation import Allocation, allocate, least_capacity

BUDGETS = st.floats(2.1, 16) | st.sampled_from([2.5, 3, 4, 6, 8, 16])
CAPACITIES = st.integers(1, 40_000)
PAGES = st.sampled_from([32, 64])


def allocated(bits: float, capacity: int, page: int) -> Allocation | None:
    try:
        return allocate(bits, capacity, page)
    except RequestError:
        return None


@given(BUDGETS, CAPACITIES, PAGES)
def test_a_budget_is_kept_and_nearly_used(bits: float, capacity: int, page: int) -> None:
    own = allocated(bits, capacity, page)
    if own is None:
        least = 2 + 6 * (own_high := 224) / max(capacity, own_high)
        assert bits < least, "only a small budget, or a short row, has no tiers"
        return
    assert own.average(own.capacity) <= bits + 1e-9 and set(own.tiers) <= set(BITS)
    if own.units:
        step = own.low[1] - own.low[0]
        assert bits >= own.high or bits - own.average(own.capacity) <= step * UNIT / own.capacity + 1e-9
    assert 4 <= own.sinks <= 16 and 60 <= own.recent <= 144 and own.high in (8, 16)
    assert own.capacity % page == 0 and own.high_slots % page == 0
    assert BITS.index(own.low[1]) - BITS.index(own.low[0]) <= 1, "neighbours"


@pytest.mark.parametrize(("bits", "tokens"), [(8.1, 7680), (9, 768), (12, 192), (16, 64)])
def test_the_high_tier_has_16_bits_where_all_others_keep_8(bits: float, tokens: int) -> None:
    """In rows that are long enough: docs/kv.md has two of these."""
    long = allocate(bits, tokens)
    assert long.high == 16 and (not long.units or long.low[0] >= 8)
    assert tokens == 64 or allocate(bits, tokens - 64).high == 8


@given(BUDGETS, CAPACITIES, PAGES, st.data())
def test_a_row_that_grows(bits: float, capacity: int, page: int, data: st.DataObject) -> None:
    """In any pieces: the ring never overflows, the newest stay, what moved stays, and the pages suffice."""
    own = allocated(bits, capacity, page)
    if own is None:
        return
    assert own.moved(own.high_slots) == own.due(own.high_slots, 0) == 1 and not own.moved(own.high_slots - 1)
    tokens = units = 0
    end = data.draw(st.integers(1, own.capacity))
    while tokens < end:
        due = own.due(tokens, units)
        before, after = own.split(units), own.split(units + due)
        assert all(after[b] >= before[b] for b in after) and sum(after.values()) == units + due
        units += due
        held = tokens - UNIT * units
        assert held < own.high_slots, "room for one more"
        assert not units or held >= own.sinks + own.recent or not due
        assert units <= own.moved(max(tokens, 1)), "what a request of this length reserves suffices"
        pages = own.pages_of(tokens) if tokens else {}
        assert all(UNIT * n <= pages[b] * page for b, n in own.split(units).items() if n)
        tokens += data.draw(st.sampled_from([1, 1, 7, 40, 300, end]))
        tokens = min(tokens, end)


@given(BUDGETS, st.integers(64, 4096), PAGES, st.integers(1, 6), st.data())
def test_pools_serve_whatever_pages_count(
    bits: float, capacity: int, page: int, rows: int, data: st.DataObject
) -> None:
    own = allocated(bits, capacity, page)
    if own is None:
        return
    most = own.capacity // page
    pages = data.draw(st.integers(1, rows * most))
    left, taken = pages, dict.fromkeys(own.tiers, 0)
    for _ in range(rows):
        n = data.draw(st.integers(0, min(left, most)))
        left -= n
        for b, count in own.pages_of(n * page).items():
            taken[b] += count
    assert all(count <= own.pool(b, rows, pages) for b, count in taken.items())


def test_a_pool_has_room_for_what_each_row_rounds_up() -> None:
    own, rows = allocate(7.9, 4096, 64), 6
    assert [own.pages_of(128)[4], own.split(own.units)[4], own.units] == [1, 4, 125]
    assert own.pool(4, rows, 2 * rows) == rows + 1, "rows of two pages take one of 4 bits each"


@pytest.mark.parametrize("page", [32, 64, 96, 128])
def test_whole_rows_of_any_length_round_up_by_less_than_a_page(page: int) -> None:
    found = [own for n in range(9, 65) if (own := allocated(n / 4, 40 * page, page)) is not None and own.units]
    assert len(found) > 40
    for own in found:
        full = own.split(own.units)
        for n in range(1, own.capacity // page + 1):
            assert all(count < full[b] * n / own.units + 1 for b, count in own.pages_of(n * page).items())


def test_of_8_bits_the_larger_high_tier_costs_nothing() -> None:
    assert [allocate(bits, 512, 32).high_slots for bits in (7.99, 8)] == [96, 128]


@given(BUDGETS, PAGES)
def test_least_capacity_reaches_the_budget(bits: float, page: int) -> None:
    assert allocate(bits, least_capacity(bits, page), page).bits == bits


@pytest.mark.parametrize("longest", [None, 100, 2048, 40_960])
def test_two_bits_name_a_budget_that_the_longest_row_reaches(longest: int | None) -> None:
    with pytest.raises(RequestError, match="got kv_bits=2; expected more than 2: ") as error:
        least_capacity(2, 64, longest, "kv_bits")
    bits, capacity = re.fullmatch(
        r"take kv_bits=([\d.]+), which rows of (\d+) tokens reach", error.value.remedy
    ).groups()
    assert allocate(float(bits), int(capacity)) and int(capacity) <= (longest or 4096)


@given(BUDGETS, st.integers(1, 4096), PAGES)
def test_a_refusal_names_a_budget_and_a_capacity_that_do(bits: float, capacity: int, page: int) -> None:
    try:
        allocate(bits, capacity, page)
    except RequestError as error:
        enough, longer = re.fullmatch(r"take bits=([\d.]+), or a capacity of (\d+) tokens", error.remedy).groups()
        assert float(enough) >= bits and allocate(float(enough), capacity, page)
        assert int(longer) > capacity and allocate(bits, int(longer), page)


REFUSED = {
    "short rows": (
        (2.5, 512, 32),
        "bits=2.5 in rows of 512.*at least 2.75: .*take bits=2.75, or a capacity of 1024 tokens",
    ),
    "a longer row than the context": (
        (2.5, 512, 32, 1000),
        r"at least 2.75: .*take bits=2.75, or a capacity of 1000 tokens\.$",
    ),
    "no room in the context": ((2.2, 512, 32, 1000), r"at least 2.75: .*take bits=2.75\.$"),
    "two bits": ((2, 1 << 20, 64), r"bits=2 in rows of 1048576.*at least 2.01: .*: take bits=2.01\.$"),
    "one bit": ((1.9, 4096, 64), "bits=1.9; expected an average from 2 to 16"),
    "more than 16": ((16.5, 4096, 64), "bits=16.5"),
    "no number": ((float("nan"), 4096, 64), "bits is no finite number"),
    "a word": (("3", 4096, 64), "bits='3'"),
    "no units": ((3, 4096, 48), "page=48; expected 32, 64, 96 or 128"),
    "half a unit": ((3, 4096, 16), "page=16"),
    "no tokens": ((3, 0, 64), "capacity=0"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_refused_and_why(name: str) -> None:
    given_, words = REFUSED[name]
    with pytest.raises(RequestError, match=words):
        allocate(*given_)  # type: ignore[arg-type]


def test_high_tiers_of_each_size_of_page() -> None:
    """As docs/kv.md says."""
    sizes = [768, 1536, 7680, 30720]
    for bits in (3.0, 6.0, 9.0, 16.0):
        high = {page: [allocate(bits, n, page).high_slots for n in sizes] for page in (32, 64, 96, 128)}
        assert high[64] == high[128] == [128] * 4 and high[96] == [96] * 4
        want = [128 if bits >= 8 or 128 * 8 * 16 <= bits * n else 96 for n in sizes]
        assert high[32] == want
    for bits, least in ((9.0, 768), (8.1, 7680)):
        assert [allocate(bits, n, 64).high for n in (least - 64, least)] == [8, 16]
