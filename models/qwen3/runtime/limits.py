"""How much an engine takes: the one check of its arguments, and what could never run on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ttnn_moe.accelerator import is_accelerator
from ttnn_moe.arguments import integer
from ttnn_moe.errors import RequestError
from ttnn_moe.kv.bucketed.cache import BucketedCache
from ttnn_moe.kv.cache import RowCache
from ttnn_moe.kv.formats import PAGED
from ttnn_moe.kv.pages import MOST_ROWS
from ttnn_moe.sizes import power_of_2
from ttnn_moe.visible import shown

from .language_model import LanguageModel
from .requests import Request
from .scheduler import Chunk

STEP, EAGER_STEP = 2048, 4096
"""Tokens of a step on a GPU, unless asked for otherwise: more at a time would keep those that decode waiting. Steps of
prompts into a bucketed cache are no graphs: the host takes as long to launch 2,048 tokens as 4,096."""

CPU_STEP, CPU_ALONE = 256, 2048
"""The same elsewhere; and of one prompt, while nobody decodes. On a GPU that is EAGER_STEP."""


@dataclass(frozen=True)
class Limits:
    """The numbers among the arguments of Engine, of any type; after a check, of the right one.

    Attributes:
        rows, capacity, memory, page, prefill_chunk, max_waiting: see Engine. prefill_chunk, after a check: a Chunk.
    """

    rows: Any
    capacity: Any
    memory: Any
    page: Any
    prefill_chunk: Any
    max_waiting: Any

    def checked(self, model: LanguageModel, cache: RowCache | None, kv: str, kv_bits: float | None = None) -> Limits:
        """Integers within range, defaults filled in; of a given cache, its rows and no more than its capacity.

        Raises:
            RequestError: see Engine.
        """
        optional = ("capacity", "memory", "page", "prefill_chunk", "max_waiting")
        given = {name: integer(name, value) for name in optional if (value := getattr(self, name)) is not None}
        rows, context = integer("rows", self.rows, high=MOST_ROWS), model.config.max_position_embeddings
        capacity = min(given.get("capacity", context), context)
        if cache is not None:
            check_cache(cache, model, given, kv, kv_bits)
            rows, capacity = cache.rows, min(capacity, cache.capacity)
        return Limits(
            rows,
            capacity,
            given.get("memory"),
            given.get("page"),
            _chunk(model, cache, kv, rows, given.get("prefill_chunk")),
            given.get("max_waiting"),
        )


def _chunk(model: LanguageModel, cache: RowCache | None, kv: str, rows: int, asked: int | None) -> Chunk:
    # later pieces of a prompt see what a bucketed cache kept of those before: who else runs must not change pieces
    gpu, bucketed = is_accelerator(model.device), kv != PAGED or isinstance(cache, BucketedCache)
    if asked:
        return Chunk(asked, asked, bucketed)
    most = max(256, (EAGER_STEP if bucketed else STEP) - power_of_2(rows)) if gpu else CPU_STEP
    return Chunk(most, most if bucketed else EAGER_STEP if gpu else CPU_ALONE, bucketed)


def check_cache(cache: RowCache, model: LanguageModel, given: dict[str, int], kv: str, kv_bits: float | None) -> None:
    """Raise RequestError if an engine of this model, with these other arguments, cannot have the cache."""
    if not isinstance(cache, RowCache):
        raise RequestError("no cache", got=shown(cache), expected="a RowCache", remedy="leave cache= out")
    both = [*sorted({"memory", "page"} & given.keys()), *["kv"] * (kv != PAGED), *["kv_bits"] * (kv_bits is not None)]
    if both:
        raise RequestError(
            "a given cache has its own pages and format",
            got=f"cache= and {' and '.join(both)}",
            expected="one of them",
            remedy="leave out memory, page, kv and kv_bits, or cache",
        )
    sizes = getattr(model, "cache_sizes", cache.sizes)
    if cache.sizes != sizes:
        raise RequestError(
            "the cache is for another model", got=cache.sizes, expected=sizes, remedy="make it from model.cache_sizes"
        )
    if cache.free != cache.total:
        raise RequestError(
            "the cache is in use",
            got=f"{cache.free} free pages of {cache.total}",
            expected="an empty cache",
            remedy="make a cache for each engine",
        )


def check_waiting(waiting: int, most: int | None) -> None:
    """Raise RequestError where so many requests wait that another may not; most: None: any number may."""
    if most is not None and waiting >= most:
        raise RequestError(
            "too many requests wait",
            got=f"{waiting} that came before",
            expected=f"fewer than {most}",
            remedy="step the engine, ask later, or make it with a larger max_waiting",
        )


def check_queue(requests: int, rows: int, most: int | None) -> None:
    """Raise RequestError if more than `most` of so many requests would wait for one of the rows."""
    if most is not None and requests > rows + most:
        raise RequestError(
            "too many requests would wait",
            got=f"{requests} prompts for {rows} rows",
            expected=f"at most {rows + most}",
            remedy="generate for fewer at a time, or make the engine with a larger max_waiting",
        )


def check_room(request: Request, cache: RowCache, capacity: int) -> None:
    """Raise RequestError for a request that could never run, however long it waits."""
    asked = f"{request.length} tokens and {request.max_new_tokens} new ones"
    if request.length + request.max_new_tokens > capacity:
        raise RequestError(
            "the request is too long for a row of the engine",
            got=asked,
            expected=f"at most {capacity} together",
            remedy="shorten it, or make the engine with a larger capacity",
        )
    needed, pages = cache.needed(request.tokens), cache.total
    if needed > pages:
        raise RequestError(
            "the request does not fit the engine's memory, even alone",
            got=f"{asked}, which take {needed} pages",
            expected=f"at most {pages} pages",
            remedy="shorten it, or make the engine with more memory",
        )
