"""Long associative recalls: `KQXV=47 ` a thousand times, then the same keys again, whose values a model must give.

Keys come in families that differ in one letter. So a key of a cache must tell many near-duplicates apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .network import CONFIG
from .tokenizer import build

LETTERS, DIGITS = 26, 2
"""What a letter of a key may be; digits of a value."""


@dataclass(frozen=True)
class Pairs:
    """What a row holds.

    Attributes:
        letters: of a key. family: keys that differ in one letter, 26 at most. new: the part of a row's pairs that come
            for the first time; the others repeat one of them.
        skew: the n-th pair is asked in proportion to n^-skew; 0: all alike.
    """

    letters: int = 6
    family: int = 20
    new: float = 0.6
    skew: float = 0.0

    @property
    def width(self) -> int:
        """Tokens of a pair: letters, `=`, digits and a space."""
        return self.letters + DIGITS + 2

    def rows(self, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """ids and kinds [count, length] int64 on the generator's device; of kind 3 are the digits of a repeated pair.

        The kinds are those of `batches.WEIGHTS`. A row of whole pairs, then padding.
        """
        device, L = generator.device, self.letters
        pairs = length // self.width
        new = int(pairs * self.new)
        families = -(-new // self.family)

        def drawn(below: int, *shape: int) -> Tensor:
            return torch.randint(below, shape, device=device, generator=generator)

        def shuffled(*shape: int) -> Tensor:
            return torch.rand(shape, device=device, generator=generator).argsort(-1)

        keys = drawn(LETTERS, count, families, 1, L).expand(-1, -1, self.family, -1)
        at = drawn(L, count, families, 1, 1).expand(-1, -1, self.family, -1)
        keys = keys.scatter(-1, at, shuffled(count, families, LETTERS)[..., : self.family, None]).flatten(1, 2)
        keys = _take(keys, shuffled(count, keys.shape[1])[:, :new])
        odds = torch.arange(1, new + 1, device=device).float() ** -self.skew
        asked = torch.multinomial(odds.expand(count, -1), pairs - new, replacement=True, generator=generator)
        asked = shuffled(count, new).gather(1, asked)
        which = torch.cat((torch.arange(new, device=device).expand(count, -1), asked), 1)
        first, equals, zero, space = _symbols()
        values = _take(drawn(10, count, new, DIGITS), which) + zero
        mark = torch.ones_like(values[..., :1])
        tokens = torch.cat((_take(keys, which) + first, mark * equals, values, mark * space), -1)
        kind = torch.zeros_like(tokens)
        kind[:, new:, L + 1 : L + 1 + DIGITS] = 3
        ids = torch.full((count, length), CONFIG["pad_token_id"], device=device)
        kinds = torch.zeros_like(ids)
        ids[:, : pairs * self.width], kinds[:, : pairs * self.width] = tokens.flatten(1), kind.flatten(1)
        return ids, kinds


def _take(x: Tensor, which: Tensor) -> Tensor:
    """x [count, n, w] at which [count, m]."""
    return x.gather(1, which[..., None].expand(-1, -1, x.shape[-1]))


@lru_cache(maxsize=1)
def _symbols() -> tuple[int, ...]:
    """Ids of the first letter, of `=`, of the first digit and of a space: letters and digits have neighbouring ids."""
    tokenizer = build()
    return tuple(tokenizer.encode(symbol, add_special_tokens=False).ids[0] for symbol in "A=0 ")
