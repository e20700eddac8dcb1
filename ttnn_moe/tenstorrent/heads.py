"""How the chips of a 1xD mesh share the heads of grouped-query attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ContractError


def fits_heads(heads: int, D: int) -> bool:
    """Whether D chips can share so many query heads."""
    return heads % D == 0 or D % heads == 0


@dataclass(frozen=True)
class HeadShare:
    """The heads of one chip; every chip has as many. Make it with `of`.

    Attributes:
        D: chips. heads, kv_heads: of each chip; kv_heads divides heads.
        group: query heads of the model that share a key head.
        copies: neighbouring chips with the same heads. Only the first of them adds to the sum over the chips.
    """

    D: int
    heads: int
    kv_heads: int
    group: int
    copies: int

    @classmethod
    def of(cls, heads: int, kv_heads: int, D: int) -> HeadShare:
        """The share of each of D chips: a part of the query heads, and the key heads that these read.

        A key head lies on every chip that reads it: 4 key heads on 8 chips lie on 2 chips each. Where D is a multiple
        of the query heads, several chips hold the same head.

        Raises:
            ContractError: D neither divides the query heads nor is a multiple of them.
        """
        if not fits_heads(heads, D):
            fits = max(d for d in range(1, D) if heads % d == 0)
            raise ContractError(
                "the chips cannot share the query heads evenly",
                got=f"{heads} query heads on 1x{D}",
                expected="a D that divides the query heads, or a multiple of them",
                remedy=f"--mesh 1x{fits}",
            )
        own, group = max(1, heads // D), heads // kv_heads
        # runs of query heads that read one key head, none of them across two chips
        return cls(D, own, own // math.gcd(own, group), group, max(1, D // heads))

    def queries(self, chip: int) -> list[int]:
        """The model's query heads on a chip."""
        first = chip // self.copies * self.heads
        return list(range(first, first + self.heads))

    def keys(self, chip: int) -> list[int]:
        """The model's key (and value) heads on a chip: for each run of heads / kv_heads queries the one it reads."""
        return [head // self.group for head in self.queries(chip)[:: self.heads // self.kv_heads]]

    def adds(self, chip: int) -> bool:
        """Whether a chip's attention counts in the sum over the chips."""
        return chip % self.copies == 0
