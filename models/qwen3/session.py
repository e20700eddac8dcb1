"""What generations share: a KV cache and, on CUDA, captured decode steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager

from torch import Tensor

from ttnn_moe import decoder, registry
from ttnn_moe.errors import RequestError

from .decode import FixedSteps, HostSteps, Steps
from .model import LanguageModel, MoE, Qwen3Moe
from .prefill import FixedPrefill, Progress, capture_all, prefill


class Session:
    """Memory to generate with, kept from one generation to the next; serves one at a time.

    Args:
        model: whose weights stay in place meanwhile: captured steps hold their addresses.
        rows: sequences of one generation, at most.
        capacity: tokens of one sequence, at most: prompt and new ones, less the last.
        graphs: decode in steps of fixed size, which are CUDA graphs on a GPU; None = where they serve the model.

    Raises:
        RequestError: rows or capacity below 1; graphs asked for where they do not serve.
    """

    def __init__(self, model: LanguageModel, rows: int, capacity: int, graphs: bool | None = None):
        if min(rows, capacity) < 1:
            raise RequestError("a session needs room", got=f"rows={rows}, capacity={capacity}", expected="1 or more")
        served = serves(model)
        if graphs and not served:
            raise RequestError(
                "this model has no decode step that can be captured",
                got=f"a model on {model.device}",
                expected="backend cuda, an NVIDIA GPU from sm_80 on, triton, head_dim a power of two from 16 to 256",
                remedy="graphs=None",
            )
        self.model, self.rows, self.capacity = model, rows, capacity
        self.cache = model.new_cache(rows, capacity)
        use = model.device.type == "cuda" and served if graphs is None else graphs
        self.steps: Steps
        if use:
            assert isinstance(model, Qwen3Moe)
            self.steps = FixedSteps(model, self.cache)
        else:
            self.steps = HostSteps(model, self.cache)
        self._prefill: FixedPrefill | None = None
        self._busy = False

    @classmethod
    def of(cls, model: LanguageModel, prompts: Sequence[Sized], max_new_tokens: int) -> Session:
        """One that just holds these prompts and their continuations."""
        return cls(model, len(prompts), max(map(len, prompts)) + max_new_tokens - 1)

    def capture(self, progress: Progress | None = None) -> None:
        """Capture the decode step of every batch bucket now, rather than when first needed, and the prefill of up to
        4,096 tokens, which otherwise is not captured at all; nothing without graphs.

        Args:
            progress: called with graphs captured so far and graphs in all.
        """
        if not isinstance(self.steps, FixedSteps):
            return
        if self._prefill is None:
            self._prefill = FixedPrefill(self.steps.model, self.cache, self.steps.pool)
        capture_all(self._prefill, self.steps, self.rows, progress)

    def prefill(self, ids: Tensor, chunks: Sequence[tuple[int, int]], ends: Sequence[int]) -> Tensor:
        """See prefill.prefill."""
        return prefill(self.model, self.cache, self._prefill, ids, chunks, ends)

    def check(self, prompts: Sequence[Sized], max_new_tokens: int) -> None:
        """Raise RequestError if these do not fit, or another generation is under way."""
        longest = max(map(len, prompts), default=1) + max_new_tokens - 1
        if self._busy:
            raise RequestError(
                "the session serves another generation", remedy="end that one (close its stream), or make a session"
            )
        if len(prompts) > self.rows or longest > self.capacity:
            raise RequestError(
                "the session is too small",
                got=f"{len(prompts)} prompts of up to {longest} tokens with their new ones",
                expected=f"at most {self.rows} of {self.capacity}",
                remedy="make a larger session",
            )

    @contextmanager
    def serving(self, B: int) -> Iterator[Session]:
        """Rows 0 .. B-1 of the cache are empty at the start; nobody else gets them meanwhile."""
        self._busy = True
        try:
            self.cache.clear(B)
            yield self
        finally:
            self._busy = False


def serves(model: LanguageModel) -> bool:
    """Whether decode steps of fixed size can run this model: Triton kernels fit it, and its experts run on cuda."""
    if not isinstance(model, Qwen3Moe):
        return False
    config = model.config
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    backends = {registry.resolve(module.backend) for module in model.modules() if isinstance(module, MoE)}
    return decoder.why_not_captured(model.embed.weight, *heads) is None and backends <= {"cuda"}
