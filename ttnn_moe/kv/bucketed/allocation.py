"""How many tokens of a row each tier holds: a budget in average bits to pages per row. Plain numbers.

A token begins in the high tier, of 8 or 16 bits. The first tokens (`sinks`) stay there. The others are in a ring of
`ring` tokens. From a full ring the oldest 32 tokens, a unit, move to the low tiers, for good. So a token changes its
tier once at most. The tier of a unit follows from the number of units before it. So the host plans every move without
reading the device, and every count of tokens follows from the length of the row.

The low tiers are two neighbours of 2, 3, 4, 8 and 16 bits. The distortion of b bits falls like 4^-b, a convex function.
So neighbours lose least where tokens weigh alike. docs/kv.md has the figures of other mixtures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from ...arguments import integer, number
from ...cuda.attention.tiers import BITS, UNIT
from ...errors import RequestError
from ...sizes import ceil_div

LEAST, MOST = 2.0, 16.0
"""Average bits of a budget."""

DEFAULT_BITS = 4.0
"""Average bits of a bucketed cache, unless asked for otherwise."""

HIGH = ((4, 92), (16, 112))
"""(sinks, ring) of high tiers, the smallest first, each of whole pages. Only pages of 32 tokens have a choice: pages
of 96 take the first, pages of 64 and 128 the second."""
SHARE = 16
"""A larger high tier than the smallest takes 1 / SHARE of the bits of a full row at most."""

HELD = "the first and the last tokens keep 8 bits, the others 2 or more"
LONG = 4096
"""Tokens of a row for which an error names a budget, where the caller names no longest row."""


@dataclass(frozen=True)
class Allocation:
    """The tiers of a row.

    Attributes:
        bits: average bits of a token's numbers in a full row, at most. capacity: tokens of a full row.
        page: tokens of a page.
        sinks: first tokens that stay in the high tier. ring: other tokens that the high tier holds, at most.
        high: bits of the high tier. low: bits of the lower and of the upper low tier; may be equal.
        units: units of a full row in low tiers. upper: those of them in the upper one.
    """

    bits: float
    capacity: int
    page: int
    sinks: int
    ring: int
    high: int
    low: tuple[int, int]
    units: int
    upper: int

    @property
    def tiers(self) -> tuple[int, ...]:
        """Bits of the tiers that hold tokens, ascending."""
        lower = self.low[:1] if self.units > self.upper else ()
        upper = self.low[1:] if self.upper else ()
        return tuple(sorted({*lower, *upper, self.high}))

    @property
    def high_slots(self) -> int:
        """Tokens of the high tier's part that every row has: sinks and ring."""
        return self.sinks + self.ring

    @property
    def recent(self) -> int:
        """The last tokens that are in the high tier, at least."""
        return self.ring - UNIT

    def moved(self, tokens: int) -> int:
        """Units of a row of so many tokens that are in low tiers, at most."""
        return max(0, tokens - self.sinks - self.recent) // UNIT if tokens >= self.high_slots else 0

    def due(self, tokens: int, units: int) -> int:
        """Units that move before the row takes another token, where it holds so many and `units` have moved."""
        held = tokens - self.sinks - UNIT * units
        return max(0, ceil_div(held - self.ring + 1, UNIT))

    def split(self, units: int) -> dict[int, int]:
        """Of the first `units` units to move, how many each tier takes; tiers that take none are there with 0.

        The numbers of both tiers only grow with `units`.
        """
        upper = units * self.upper // self.units if self.units else 0
        out = dict.fromkeys(self.tiers, 0)
        for bits, n in zip(self.low, (units - upper, upper), strict=True):
            if n:
                out[bits] = out.get(bits, 0) + n
        return out

    def pages_of(self, tokens: int) -> dict[int, int]:
        """Pages that a row of so many tokens takes of each tier; the high tier's own part not counted."""
        return {bits: ceil_div(n * UNIT, self.page) for bits, n in self.split(self.moved(tokens)).items()}

    def pool(self, bits: int, rows: int, pages: int) -> int:
        """Pages of a tier that serve any rows whose tokens take `pages` pages of `page` tokens together.

        A row rounds up twice, its units to a tier's and these to whole pages: by less than a page together.
        """
        share = self.split(self.units)[bits] if self.units else 0
        if not share:
            return 0
        return min(rows * self.pages_of(self.capacity)[bits], ceil_div(share * pages, self.units) + min(rows, pages))

    def average(self, tokens: int) -> float:
        """Average bits of a row of so many tokens, after all moves that are due: below it where tokens are few."""
        units = self.moved(tokens)
        low = sum(UNIT * bits * n for bits, n in self.split(units).items())
        return (low + self.high * (tokens - UNIT * units)) / tokens


def allocate(
    bits: float, capacity: int, page: int = 64, longest: int | None = None, option: str = "bits"
) -> Allocation:
    """The tiers of rows of `capacity` tokens that hold `bits` bits a number on average when they are full.

    Args:
        bits: 2 .. 16, any fraction. Scales come on top: 16 bits for head_dim numbers.
        capacity: tokens of a row; rounded up to whole pages.
        page: tokens of a page, a multiple of 32.
        longest: tokens that a row may have; an error names no larger capacity. Default: any number.
        option: what the caller calls `bits`, for errors.

    Raises:
        RequestError: bits out of range; a budget that no mix of tiers reaches at this capacity, with the least that one
            does, and with the capacity that reaches it.
    """
    bits = _check_bits(bits, option)
    capacity, page = integer("capacity", capacity), check_page(page)
    capacity = ceil_div(capacity, page) * page
    best, _ = _best(bits, capacity, page)
    if best is None:
        enough = _enough(capacity, page)
        found = _reaching(bits, page)
        longer = None if found is None else found.capacity
        if longest is not None and (longer is None or longer > longest):
            longer = longest if _best(bits, longest // page * page, page)[0] is not None else None
        raise RequestError(
            "no mix of tiers reaches this budget",
            got=f"{option}={bits:g} in rows of {capacity} tokens",
            expected=f"at least {enough:.2f}: {HELD}",
            remedy=f"take {option}={enough:.2f}" + (f", or a capacity of {longer} tokens" if longer else ""),
        )
    return best


def _check_bits(bits: float, option: str) -> float:
    return number(option, bits, LEAST, MOST, f"an average from {LEAST:g} to {MOST:g}")


def _best(bits: float, capacity: int, page: int) -> tuple[Allocation | None, float]:
    """The tiers, or None where no mix of them reaches the budget; and the least budget that one reaches."""
    best, least = None, MOST
    for sinks, ring in HIGH:
        if (sinks + ring) % page:
            continue
        for high in (8, 16):
            empty = Allocation(bits, capacity, page, sinks, ring, high, (BITS[0], BITS[0]), 0, 0)
            units = empty.moved(capacity)
            least = min(least, replace(empty, units=units).average(capacity))
            found = _filled(empty, units)
            if found is not None and (best is None or _affordable(found, best)):
                best = found
    return best, least


def _enough(capacity: int, page: int) -> float:
    """The least budget that a row reaches, rounded up to hundredths, so that what an error names is enough."""
    _, least = _best(LEAST, capacity, page)
    hundredths = range(ceil(least * 100), 100 * int(MOST) + 1)
    return next(n / 100 for n in hundredths if _best(n / 100, capacity, page)[0] is not None)


def _reaching(bits: float, page: int) -> Allocation | None:
    """The tiers of the shortest row, of a power of two tokens, that reaches a budget; None: no row does."""
    sizes = (ceil_div(1 << n, page) * page for n in range(6, 25))
    return next((found for size in sizes if (found := _best(bits, size, page)[0]) is not None), None)


def check_page(page: int) -> int:
    """A page's tokens.

    Raises:
        RequestError: no multiple of 32, or one that no high tier fills.
    """
    found = integer("page", page)
    if found % UNIT or all((sinks + ring) % found for sinks, ring in HIGH):
        raise RequestError(
            "a page has the wrong size",
            got=f"page={found}",
            expected=f"32, 64, 96 or 128 tokens in a bucketed cache: whole units of {UNIT}",
            remedy="leave page out",
        )
    return found


def least_capacity(bits: float, page: int = 64, longest: int | None = None, option: str = "bits") -> int:
    """Tokens of a row that reaches a budget: a power of two.

    Args:
        longest, option: for errors, as `allocate`'s.

    Raises:
        RequestError: bits or page out of range; 2 bits, which no row reaches.
    """
    found = _reaching(_check_bits(bits, option), check_page(page))
    if found is None:
        capacity = max(page, (LONG if longest is None else longest) // page * page)
        raise RequestError(
            "no row reaches this budget",
            got=f"{option}={bits:g}",
            expected=f"more than {LEAST:g}: {HELD}",
            remedy=f"take {option}={_enough(capacity, page):.2f}, which rows of {capacity} tokens reach",
        )
    return found.capacity


def _affordable(found: Allocation, instead_of: Allocation) -> bool:
    """Whether the larger high tier costs no low tier, and little. Its bits are 16 in budgets above 8 only."""
    if found.high == 8:
        cheap = found.bits >= 8 or found.high_slots * found.high * SHARE <= found.bits * found.capacity
    else:
        cheap = found.bits > 8
    return cheap and found.low[0] >= min(instead_of.low[0], instead_of.high)


def _filled(empty: Allocation, units: int) -> Allocation | None:
    """With the best low tiers for so many units; None: the budget does not reach 2 bits for them."""
    bits, capacity, high = empty.bits, empty.capacity, empty.high
    if not units:
        return empty if high <= bits else None
    left = (bits * capacity - high * (capacity - UNIT * units)) / (UNIT * units)
    if left < BITS[0]:
        return None
    lower = max(b for b in BITS if b <= left)
    if lower >= high:
        return replace(empty, low=(high, high), units=units)
    upper = BITS[BITS.index(lower) + 1]
    # a small margin, so that 3.0 is not 2.999
    n = int((left - lower) / (upper - lower) * units + 1e-9)
    return replace(empty, low=(lower, upper), units=units, upper=n)
