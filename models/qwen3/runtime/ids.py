"""Token ids that callers give, as tensors on the host."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence, Set
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ttnn_moe.arguments import as_integer
from ttnn_moe.errors import RequestError
from ttnn_moe.visible import shown


def host_ids(ids: Sequence[int]) -> Tensor:
    """int64, on the host. torch.tensor takes twenty times as long, and a GPU waits for it.

    Raises:
        OverflowError: one is negative, or has more than 64 bits.
        TypeError: one is no integer.
    """
    # unsigned: array takes them twice as fast
    return torch.frombuffer(array("Q", ids), dtype=torch.int64)


def checked_ids(name: str, ids: Any, V: int, most: int, ordered: bool = True) -> Tensor:
    """What a caller gives as token ids: int64 [n] on the host, each 0 .. V - 1.

    Args:
        name: for errors.
        ids: a sequence, an array or a tensor of integers. most: more are not read.
        ordered: refuse a set.

    Raises:
        RequestError: something else, more than `most` ids, or one out of range.
    """
    if isinstance(ids, Tensor):
        items, found = None, _from_tensor(name, ids, most)
    else:
        items = _items(name, ids, most, ordered)
        found = _from_items(name, items, V)
    if len(found) == 0:
        return found
    least, largest = map(int, found.aminmax())
    # array takes True for 1
    others = (one for one in items or () if type(one) is not int)
    bools = least <= 1 and any(as_integer(one) is None for one in others)
    if bools or least < 0 or largest >= V:
        raise _bad_id(name, found.tolist() if items is None else items, V)
    return found


def count_of(name: str, ids: Any) -> int:
    """How many ids a caller gives, before they are read.

    Raises:
        RequestError: `ids` cannot hold any.
    """
    try:
        return len(ids)
    except Exception:  # no length, a tensor without dimensions, a range of 10**30
        raise _no_ids(name, ids) from None


def _from_tensor(name: str, ids: Tensor, most: int) -> Tensor:
    no_integers = ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool
    if ids.layout is not torch.strided or ids.dim() != 1 or (no_integers and ids.numel()):
        raise _no_ids(name, ids)
    if len(ids) > most:
        raise _too_many(name, len(ids), most)
    try:
        return ids.detach().to("cpu", torch.int64, copy=True)  # the caller may write to its own
    except Exception:  # a meta tensor
        raise _no_ids(name, ids) from None


def _from_items(name: str, items: list[Any], V: int) -> Tensor:
    if not items:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    try:
        return host_ids(items)
    except Exception:  # no integer, one too large, or whatever a foreign __index__ raises
        raise _bad_id(name, items, V) from None


def _items(name: str, ids: Any, most: int, ordered: bool) -> list[Any]:
    if type(ids) is list and len(ids) <= most:  # the common case: a GPU waits for these checks
        return ids
    if isinstance(ids, (str, Mapping)) or (ordered and isinstance(ids, Set)):
        raise _no_ids(name, ids)
    n = count_of(name, ids)
    if n > most:
        raise _too_many(name, n, most)
    try:
        # tolist makes Python ints of an array's
        return list(islice(ids.tolist() if hasattr(ids, "tolist") else ids, most))
    except Exception:  # not iterable, or whatever a foreign __iter__ raises
        raise _no_ids(name, ids) from None


def _no_ids(name: str, ids: Any) -> RequestError:
    return RequestError(
        f"{name} is no list of token ids",
        got=shown(ids),
        expected="a sequence, an array or a vector of integers",
        remedy="encode text with a tokenizer",
    )


def _too_many(name: str, n: int, most: int) -> RequestError:
    return RequestError(f"{name} has too many ids", got=n, expected=f"at most {most}", remedy="give fewer")


def _bad_id(name: str, items: Sequence[Any], V: int) -> RequestError:
    """The first that is no id."""
    found = [as_integer(item) for item in items]
    at = next((i for i, one in enumerate(found) if one is None or not 0 <= one < V), 0)
    return RequestError(
        f"{'no integer' if found[at] is None else 'id out of range'} at position {at} of {name}",
        got=shown(items[at]),
        expected=f"an integer 0 .. {V - 1}",
        remedy="encode text with this model's tokenizer",
    )
