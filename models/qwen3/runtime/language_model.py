"""What the runtime needs of a model. Qwen3Moe and tt.Qwen3MoeTT implement it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ttnn_moe.errors import ContractError, RequestError
from ttnn_moe.kv.cache import RowCache
from ttnn_moe.kv.formats import PAGED
from ttnn_moe.visible import shown

from .candidates import Candidates
from .graphs import Graphs
from .sampling import Sampling, fresh_seed


class LanguageConfig(Protocol):
    """What the runtime reads of a model's config. eos_token_ids: any of them ends a text."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int:
        """Tokens of the context."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


class LanguageModel(Protocol):
    """A model that runs steps. A step is a `DecodeStep` or a `PrefillStep` that one of its caches planned."""

    @property
    def config(self) -> LanguageConfig: ...

    @property
    def device(self) -> torch.device:
        """Where ids and logits are. The host, if the model moves them to its own device."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def where(self) -> str:
        """The machine, in words."""

    def new_cache(
        self,
        rows: int,
        capacity: int,
        memory: int | None = None,
        page: int | None = None,
        kv: str = PAGED,
        kv_bits: float | None = None,
    ) -> RowCache:
        """An empty cache in a format that the model has.

        Args:
            rows: sequences at a time. capacity: tokens of a row, at most.
            memory: bytes for keys and values; default: the cache decides, and takes no more than its rows can use.
            page: tokens of a page; default: the format's.
            kv, kv_bits: see kv.formats.new_cache.

        Raises:
            RequestError: sizes that the format or the device does not take; memory for less than one page; no such
                format of this model.
        """

    def why_not_captured(self) -> str | None:
        """Why no graph of the device can hold a step of this model; None: one can."""

    def __call__(self, ids: Tensor, cache: Any, step: Any) -> Tensor:
        """Logits [R, vocab_size]: of all tokens of a DecodeStep, or of PrefillStep.logits_at.

        Args:
            ids: [T] int64, the tokens of the step; those of PrefillStep.decoding come first.
        """


def check_model(model: object) -> None:
    """Raise RequestError unless an engine can ask this for a config and a cache."""
    if isinstance(model, type) or not (hasattr(model, "config") and hasattr(model, "new_cache")):
        raise RequestError(
            "no model",
            got=shown(model),
            expected="a Qwen3Moe or another LanguageModel",
            remedy="make one: load_model(DIR)",
        )


def check_weights(model: LanguageModel, before: tuple[torch.device, torch.dtype]) -> None:
    """Raise ContractError unless the model still has the device and the dtype that its cache was made for."""
    if (model.device, model.dtype) != before:
        raise ContractError(
            "the model's weights do not fit the engine's cache any more",
            got=f"{model.dtype} on {model.device}",
            expected=f"{before[1]} on {before[0]}",
            remedy="make another engine after such a change, or change the weights back",
        )


@runtime_checkable
class PicksTokens(LanguageModel, Protocol):
    """A model whose logits are better left on its device."""

    def greedy(self, ids: Tensor, cache: Any, step: Any) -> Tensor:
        """The first of the largest of each row of logits, [R] int64. Arguments as `__call__`."""

    def candidates(self, ids: Tensor, cache: Any, step: Any, samplings: Sequence[Sampling]) -> Candidates:
        """The largest logits of each of R rows, for draws as samplings [R] ask. Other arguments as `__call__`."""


@runtime_checkable
class BringsGraphs(LanguageModel, Protocol):
    """A model whose steps need graphs of its own."""

    def graphs(self) -> Graphs:
        """New ones, for an engine."""


@runtime_checkable
class ChangesKernels(LanguageModel, Protocol):
    """A model whose weights may change in place so that its captured steps run kernels that do not take them."""

    def changes(self) -> int:
        """How often they did. Waits for nothing, unless weights changed."""


@runtime_checkable
class DrawsSeeds(LanguageModel, Protocol):
    """A model whose requests several processes run, each by itself: they must draw the same numbers."""

    def fresh_seed(self) -> int:
        """A seed that nobody had, the same in all processes."""


def fresh_of(model: LanguageModel) -> Callable[[], int]:
    """What draws a seed for a request of this model that names none."""
    return model.fresh_seed if isinstance(model, DrawsSeeds) else fresh_seed


@runtime_checkable
class SharesSteps(LanguageModel, Protocol):
    """A model that several processes run: a step may end because one of them stopped or failed."""

    def check(self, nan: bool) -> None:
        """Raise what went wrong in a step that is over.

        Args:
            nan: a token of the step is NaN, and another process may be why. Otherwise `check` waits for nothing.
        """

    def fail(self, error: BaseException) -> None:
        """This error ended a step of this process, in the model or before it."""
