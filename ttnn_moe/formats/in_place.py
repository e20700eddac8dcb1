"""Bytes of tensors that change in place, part by part: all of them, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from ..errors import ContractError
from ..visible import shown


class Torn(ContractError):
    """Some parts are changed, and others are not."""


Mark = Callable[[bool], object]
"""Keeps for the owner of tensors which bytes they have. An interrupt may come before or after the call: what it keeps
agrees with the bytes all the same."""


def no_mark(_: bool) -> None:
    """The Mark of tensors whose owner keeps none."""


@dataclass(frozen=True)
class Part:
    """A part of a tensor: some experts.

    Attributes:
        held: its memory. there: its new bytes, in memory of their own, from those that it has. back: the inverse.
    """

    held: Tensor
    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


def change(parts: Sequence[Part], mark: Mark = no_mark) -> None:
    """Give each part its new bytes. Where that fails or is interrupted, all parts have their old bytes again.

    Args:
        mark: called with True once all parts have their new bytes, and with False once they have the old ones again.
            Where it raises an error both times, the first one is raised.

    Raises:
        Torn: bringing the old bytes back failed or was interrupted, too.
    """
    # how many parts are changed, and the new bytes of the next: an interrupt may come before or after their copy
    at: tuple[int, Tensor | None] = 0, None
    try:
        for i, part in enumerate(parts):
            at = i, part.there(part.held)
            part.held.copy_(at[1])
            at = i + 1, None
        mark(True)
    except BaseException:
        try:
            _undo(parts, *at)
            with suppress(Exception):  # of the mark: the bytes are the old ones
                mark(False)
        except BaseException as error:
            raise Torn(
                "the weights lie in two orders",
                got=f"{shown(error)} while a change that had failed was undone",
                expected="one order",
                remedy="load them again",
            ) from error
        raise


def _undo(parts: Sequence[Part], changed: int, begun: Tensor | None) -> None:
    if begun is not None:
        parts[changed].held.copy_(parts[changed].back(begun))
    for part in parts[:changed]:
        part.held.copy_(part.back(part.held))
