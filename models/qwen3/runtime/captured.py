"""The runner whose steps are graphs of the device, launched while it still runs the step before where it can."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ttnn_moe.accelerator import is_accelerator
from ttnn_moe.errors import ContractError, RequestError
from ttnn_moe.kv.cache import RowCache

from .decode_graphs import DecodeGraphs, buckets
from .graphs import Graphs, Progress, graphs_for
from .landing import Landing
from .language_model import BringsGraphs, ChangesKernels, LanguageModel
from .prefill_graphs import PrefillGraphs
from .requests import Request
from .runner import EagerRunner, Pending, Prompts, Runner, draw, next_tokens, run_prefill
from .sampling import NAN, marked
from .scheduler import Chunk


class CapturedRunner:
    """See Runner. Prefill steps are captured by `capture` only; decode steps when first needed, or by `capture`.

    Args:
        model, cache: what a graph can hold: see LanguageModel.why_not_captured and RowCache.why_not_captured.
        chunk: prompt tokens of a step.
        graphs: default: those of the model's device.
    """

    def __init__(self, model: LanguageModel, cache: RowCache, chunk: Chunk, graphs: Graphs | None = None):
        self.graphs = graphs_for(model.device) if graphs is None else graphs
        self.ahead, self.model, self.cache, self._chunk = self.graphs.ahead, model, cache, chunk
        self.steps = DecodeGraphs(model, cache, self.graphs)
        self.prompts: PrefillGraphs | None = None
        self._changes: Callable[[], int] = model.changes if isinstance(model, ChangesKernels) else lambda: 0
        self._since: int | None = None
        # two steps are under way at most
        self._landings = deque(Landing(self.steps.size, model.device) for _ in range(3))

    def prefill(self, prompts: Prompts, going: Sequence[Request], whole: Sequence[Request]) -> Pending:
        landing, n = self._begin(), len(going)
        where = [(request.row, request.position) for request in going]
        last, logits = self.steps.last if n else None, None
        if self.prompts is not None:
            logits = self.prompts.run(prompts.ids, prompts.chunks, prompts.ends, where, last)
        if logits is None:
            logits = run_prefill(self.model, self.cache, prompts, where, last)
        if not n and not whole:
            return landing
        tokens, nan = next_tokens(logits, [*going, *whole])
        landing.send(marked(tokens, nan))  # ahead of what only the next step needs
        if n:
            self.steps.advance(tokens[:n])
        if whole:
            positions, rows = [request.length for request in whole], [request.row for request in whole]
            self.steps.join(tokens[n:], positions, rows)
        return landing

    def decode(self, going: Sequence[Request]) -> Pending:
        landing = self._begin()
        if self.cache.moves:
            self.cache.begin([(request.row, request.position) for request in going])
        logits, tokens = self.steps.step(), self.steps.last
        if all(request.sampling.temperature == 0 for request in going):
            return landing.send(self.steps.made)
        draw(tokens, logits, going)
        return landing.send(marked(tokens, self.steps.made == NAN))

    def keep(self, places: Sequence[int]) -> None:
        self.steps.keep(places)

    @torch.inference_mode()
    def capture(self, progress: Progress | None) -> None:
        self._check_kernels()
        rows = self.cache.rows
        if self.prompts is None and self.cache.why_not_captured_prompts() is None:
            # the row whose prompt runs does not decode
            decoding = self.steps.size if rows > 1 else 0
            together = self._chunk.most + decoding
            most = max(self._chunk.alone, together)
            self.prompts = PrefillGraphs(self.model, self.cache, self.graphs, most, decoding, together)
        if self.cache.moves:
            self.cache.begin([])  # the last step may have been one of prompts, whose tokens a capture overwrites
        early, work = self.graphs.early, list[Callable[[], object]]()
        if early and self.prompts is not None:
            work += [partial(self.prompts.capture, *kind) for kind in self.prompts.kinds]
        # graphs that are not early take steps: their ranks serve each other meanwhile
        work += [partial(self.steps.capture if early else self.steps.rehearse, n) for n in buckets(rows)]
        for done, capture_one in enumerate(work):
            if progress is not None:
                progress(done, len(work))
            capture_one()
        if progress is not None:
            progress(len(work), len(work))

    def _check_kernels(self) -> None:
        """Raise ContractError where graphs that were captured hold kernels that do not take the weights."""
        now, graphs = self._changes(), self.steps.captured + (self.prompts is not None and self.prompts.captured)
        if graphs and now != self._since:
            raise ContractError(
                "captured steps do not fit the model's weights any more",
                got="weights that lie elsewhere, or int4_24 scales that fp16 does not hold and held before",
                expected="weights that the same kernels read where the old ones lay",
                remedy="make another engine after such a change of the weights",
            )
        self._since = now

    def _begin(self) -> Landing:
        self._check_kernels()
        self._landings.rotate()
        return self._landings[0].begin()


def runner_for(model: LanguageModel, cache: RowCache, chunk: Chunk, graphs: bool | None) -> Runner:
    """The runner of an engine; arguments and errors as Engine."""
    reason = cache.why_not_captured() or model.why_not_captured()
    if graphs and reason is not None:
        raise RequestError("no step of this model can be captured", got=reason, remedy="graphs=None")
    if graphs or (graphs is None and is_accelerator(model.device) and reason is None):
        return CapturedRunner(model, cache, chunk, model.graphs() if isinstance(model, BringsGraphs) else None)
    return EagerRunner(model, cache)
