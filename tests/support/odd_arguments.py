"""Arguments of every kind, most of them wrong: what a client may send, or a bug pass on."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st


class Broken:
    """Every way to read it raises."""

    def _raise(self, *_: object) -> Any:
        raise ZeroDivisionError("broken")

    __index__ = __float__ = __int__ = __len__ = __iter__ = __getitem__ = __repr__ = __str__ = __le__ = _raise


class Liar(list):
    """A list that says it is longer than it is."""

    def __len__(self) -> int:
        return 7


def tensors() -> st.SearchStrategy[Any]:
    dtypes = [torch.int64, torch.int8, torch.uint8, torch.float32, torch.bool, torch.complex64]
    shapes = [(), (1,), (3,), (2, 2), (0,)]
    return st.builds(lambda shape, dtype: torch.ones(shape).to(dtype), st.sampled_from(shapes), st.sampled_from(dtypes))


def arrays() -> st.SearchStrategy[Any]:
    kinds = [np.int64, np.uint8, np.float16, np.float64, np.bool_, np.complex64, np.str_]
    return st.builds(
        lambda n, kind: np.ones(n).astype(kind), st.sampled_from([(), 1, 3, (2, 2)]), st.sampled_from(kinds)
    )


def scalars() -> st.SearchStrategy[Any]:
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 20),
        st.sampled_from([10**400, 10**5000, -(10**30), 2**63, 2**63 - 1, 2**64, 511, 512]),
        st.sampled_from([0.0, -0.0, 1.0, 2.0, 2.5, 1e-40, 5e-324, 1e308, 1e-12]),
        st.floats(),
        st.fractions(max_denominator=10),
        st.decimals(),
        st.complex_numbers(),
        st.sampled_from([Fraction(1, 10**400), Fraction(10**400), Decimal("NaN"), Decimal("Infinity")]),
        st.builds(
            lambda kind, n: kind(n), st.sampled_from([np.int8, np.int64, np.float32, np.bool_]), st.integers(0, 9)
        ),
        st.text(max_size=5),
        st.binary(max_size=5),
        st.builds(Broken),
        st.sampled_from([object(), len, int, range(10**30), range(10**12), range(3), ...]),
        tensors(),
        arrays(),
    )


def anything() -> st.SearchStrategy[Any]:
    """A scalar, or a collection of them."""
    few = st.lists(scalars(), max_size=4)
    return st.one_of(
        scalars(),
        few,
        st.lists(st.integers(0, 20), max_size=4),
        few.map(tuple),
        few.map(Liar),
        few.map(iter),
        st.sets(st.integers(-2, 600), max_size=3),
        st.dictionaries(st.integers(0, 5), st.integers(0, 5), max_size=3),
        st.lists(few, max_size=2),
    )
