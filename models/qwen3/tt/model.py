"""Qwen3-MoE on a Tenstorrent chip or 1xD mesh: a LanguageModel, as an engine takes it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from ttnn_moe import tenstorrent
from ttnn_moe.errors import RequestError
from ttnn_moe.kv import formats
from ttnn_moe.kv.cache import CacheSizes
from ttnn_moe.kv.step import DecodeStep, Step
from ttnn_moe.sizes import power_of_2
from ttnn_moe.tenstorrent import Device, ModelFormats, tensors
from ttnn_moe.tenstorrent.experts import weight_format
from ttnn_moe.tenstorrent.memory import PAGE
from ttnn_moe.tenstorrent.programs import MAX_T, programs_of

from ..checkpoint import Checkpoint, layer_slots, top_slots
from ..config import Qwen3MoeConfig
from ..layers import Layer
from ..model import Qwen3Moe, rope_table, sizes_of
from ..pieces import Progress
from ..runtime.candidates import Candidates
from ..runtime.sampling import Sampling
from .attention import DecodeTables, PrefillTables
from .cache import CACHES, PagedCache, check_kv, check_rows
from .decode import Decoder, release_traces, why_no_trace
from .drawn import Asked, Fetcher, Made, Tail, inverse_rows, inverses_of, tail_of, with_candidates
from .layers import Logits, Network, Place
from .operators import trace_bytes
from .passes import Packer, Pass
from .room import room_for
from .sizes import check_mesh
from .weights import LayerWeights, Mover, Router, check_sizes

LONGEST = MAX_T
"""Tokens of a pass, at most: longer prompts run in several. It is what one program of the experts takes, and what
`doctor --plan` counts activations of. Sizes whose programs take fewer tokens lower it."""


class Qwen3MoeTT:
    """A model on the device; `load_model` makes one.

    It runs steps that its own caches (`new_cache`) planned. Ids, logits and tokens are on the host.

    Attributes:
        config: its sizes.
        mesh: the chips it is on.
        traced: whether decode steps are captured as traces, and replayed.
        device, dtype: of the logits.
    """

    device, dtype = torch.device("cpu"), torch.bfloat16

    def __init__(
        self,
        config: Qwen3MoeConfig,
        mesh: Device,
        traced: bool = False,
        formats: ModelFormats | None = None,
        split: bool = False,
    ):
        check_sizes(config)
        self.config, self.mesh, self.traced = config, mesh, traced
        self._network, self._fetcher = Network(config, mesh), Fetcher(mesh, config.vocab_size)
        self._mover = Mover(config, mesh, formats or ModelFormats(), split)
        self._layers: list[LayerWeights] = []
        self._decoders: weakref.WeakKeyDictionary[PagedCache, Decoder] = weakref.WeakKeyDictionary()
        # steps whose programs and buffers are allocated
        self._prefilled: set[tuple[object, ...]] = set()
        self._drawn: set[tuple[int, Tail]] = set()

    def put_top(self, model: Qwen3Moe) -> None:
        """Move embeddings, last norm and head to the device."""
        self._embed = self._mover.embedding(model.embed.weight)
        self._norm = self._mover.norm(model.norm.weight)
        self._head = self._mover.head((model.head or model.embed).weight)
        positions = torch.arange(self.config.max_position_embeddings)
        self._cos, self._sin = (
            self._mover.table(torch.cat((half, half), -1).to(self.dtype)) for half in rope_table(self.config, positions)
        )

    def put_layer(self, layer: Layer) -> None:
        """Move the next layer to the device."""
        self._layers.append(self._mover.layer(layer, len(self._layers)))

    @property
    def where(self) -> str:
        return str(self.mesh)

    @property
    def cache_sizes(self) -> CacheSizes:
        """What a KV cache has to know of the model: on a mesh, the heads of one chip."""
        share = self._network.share
        return replace(sizes_of(self.config, self.dtype, self.device), heads=share.heads, kv_heads=share.kv_heads)

    def new_cache(
        self,
        rows: int,
        capacity: int,
        memory: int | None = None,
        page: int | None = None,
        kv: str = formats.PAGED,
        kv_bits: float | None = None,
    ) -> PagedCache:
        """See LanguageModel. Up to 32 rows; a page holds 32 tokens; kv is "paged" or "bfloat8_b"."""
        formats.check_format(kv, kv_bits)
        form = self._mover.formats.of("kv") if kv == formats.PAGED else kv
        check_kv(form)
        if page not in (None, PAGE):
            raise RequestError("a page has the wrong size", got=page, expected=f"{PAGE}, a tile's height")
        pages = None if memory is None else CACHES[form].pages_within(self.cache_sizes, rows, capacity, memory)
        return self.cache_of_pages(rows, capacity, pages, form)

    def cache_of_pages(self, rows: int, capacity: int, pages: int | None, form: str | None = None) -> PagedCache:
        """As new_cache, of so many pages besides the dummy page; None: as many as the rows can use.

        Args:
            form: of CACHES; default: what the model's formats say of kv.
        """
        rows = check_rows(rows)
        release_traces(self.mesh)
        K, sizes = self.config.num_experts_per_tok, self.cache_sizes
        bounds = [
            programs_of(self.mesh, layer.mlp.experts.sizes(K)).max_T
            for layer in self._layers
            if isinstance(layer.mlp, Router)
        ]
        packer = Packer(rows, min([LONGEST, *bounds]), self.config.max_position_embeddings)
        cache = CACHES[form or self._mover.formats.of("kv")](sizes, self.mesh, rows, capacity, packer, pages)
        self._decoders[cache] = Decoder(self.mesh, self._step, self.traced)
        return cache

    def trace(self, cache: PagedCache, wanted: bool) -> None:
        """Whether decode steps of this cache are replayed from now on, where the device can."""
        self._decoders[cache].traced = wanted and self.traced

    def why_not_captured(self) -> str | None:
        """See LanguageModel."""
        return "it runs on Tenstorrent chips, whose traces the model captures itself"

    def __call__(self, ids: Tensor, cache: PagedCache, step: Step) -> Tensor:
        """Logits [R, vocab_size] of the tokens that the step wants; see LanguageModel."""
        nothing = torch.empty(0, self.config.vocab_size, dtype=self.dtype)
        return torch.cat([nothing, *self._results(ids, cache, step, Asked(self._fetcher.whole))])

    def greedy(self, ids: Tensor, cache: PagedCache, step: Step) -> Tensor:
        """The first of the largest logits of each row of `__call__`, [R] int64; logits stay on the chips."""
        nothing = torch.empty(0, dtype=torch.int64)
        return torch.cat([nothing, *self._results(ids, cache, step, Asked(self._fetcher.first_largest))])

    def candidates(self, ids: Tensor, cache: PagedCache, step: Step, samplings: Sequence[Sampling]) -> Candidates:
        """See PicksTokens; of each row and chip the largest logits come to the host."""
        asked = Asked(self._fetcher.candidates, tail_of(samplings), inverses_of(samplings))
        return Candidates.joined([*self._results(ids, cache, step, asked)])

    def _results(self, ids: Tensor, cache: PagedCache, step: Step, asked: Asked[Made]) -> Iterable[Made]:
        """What is asked of the logits of the tokens that the step wants, in parts."""
        words = ids.tolist()
        if isinstance(step, DecodeStep):
            yield self._decode(words, cache, step, asked)
            return
        passes = cache.packer.passes(words, step)
        if step.decoding is not None:
            yield self._decode(words[: len(step.decoding.rows)], cache, step.decoding, asked)
        for one in passes:
            yield from self._prefill(one, cache, asked)

    def _prefill(self, one: Pass, cache: PagedCache, asked: Asked[Made]) -> Iterable[Made]:
        """Of the logits of the pass's ends, if it has any."""
        n = len(one.ends)
        wanted = power_of_2(n) if n else 0
        pieces = tuple((piece.size, piece.past) for piece in one.pieces)
        shape = pieces, wanted, asked.tail, cache.form, cache.total, cache.capacity
        if shape not in self._prefilled:  # its programs and buffers are allocated now
            self._prefilled.add(shape)
            release_traces(self.mesh)
        x = self._run(self._words(one.ids), self._words(one.positions), cache, cache.tables_of(one))
        if not n:
            return
        own, ends = asked.take(n, wanted), self._words(one.ends + one.ends[:1] * (wanted - n))
        yield asked.fetch(self._with_tail(self._logits(x, ends), asked.tail, own), n, own)

    def _decode(self, ids: list[int], cache: PagedCache, step: DecodeStep, asked: Asked[Made]) -> Made:
        # padding repeats the first row's token: it writes the same keys and values to the same place
        n = len(ids)
        places = [*range(n), *[0] * (power_of_2(n) - n)]
        rows, positions = step.rows.tolist(), step.positions.tolist()
        tokens, at, of = ([values[place] for place in places] for values in (ids, positions, rows))
        own = asked.take(n, len(places))
        logits = self._with_tail(self._decoders[cache](cache, tokens, at, of), asked.tail, own)
        kind = len(places), asked.tail
        if asked.tail is not Tail.GREEDY and kind not in self._drawn:  # its programs were allocated after the capture
            self._drawn.add(kind)
            release_traces(self.mesh)
        return asked.fetch(logits, n, own)

    def _step(self, ids: Any, positions: Any, cache: PagedCache, tables: DecodeTables) -> Logits:
        return self._logits(self._run(ids, positions, cache, tables), None)

    def _logits(self, x: Any, ends: Any) -> Logits:
        return self._network.logits(x, ends, self._norm, self._head)

    def _with_tail(self, logits: Logits, tail: Tail, inverses: Sequence[float]) -> Logits:
        """What the tail adds. No trace holds it: greedy steps and others replay the same one."""
        if tail is Tail.GREEDY:
            return logits
        inverse = inverse_rows(inverses, self.mesh) if tail is Tail.MASS else None
        return with_candidates(logits, inverse, self._network)

    def _run(self, ids: Any, positions: Any, cache: PagedCache, tables: PrefillTables | DecodeTables) -> Any:
        network = self._network
        place = Place(network.rows(positions, self._cos), network.rows(positions, self._sin), cache, tables)
        x = network.embed(ids, self._embed)
        for i, weights in enumerate(self._layers):
            x = network.layer(x, i, weights, place)
        return x

    def _words(self, values: Sequence[int]) -> Any:
        """The values as ttnn [1, n] uint32."""
        return tensors.replicate(torch.tensor([values]).int(), self.mesh, dtype="uint32")


def _on_device(config: Qwen3MoeConfig, D: int, device: str | None, traced: bool | None, *weights: Any) -> Qwen3MoeTT:
    """The model before its weights (`weights`: formats, split) are read.

    A device that is open already has the trace region that it was opened with."""
    reason, room = why_no_trace(device) if traced is None else None, trace_bytes(config, D)
    capture = reason is None if traced is None else traced
    mesh = tenstorrent.open_device(D, device, room if capture else None)
    if capture and mesh.trace_bytes < room:
        small = f"the device was opened with {mesh.trace_bytes} bytes for traces, not {room}"
        if traced is None:
            capture, reason = False, small
        elif mesh.opened_here:  # of others' devices it is not known
            raise RequestError("decode steps cannot be traced", got=small, remedy=tenstorrent.device.CLOSE)
    if reason is not None:
        logger.info("decode steps run eagerly: {}", reason)
    return Qwen3MoeTT(config, mesh, capture, *weights)


def load_model(
    directory: str | Path,
    D: int = 1,
    device: str | None = None,
    progress: Progress | None = None,
    traced: bool | None = None,
    *,
    weights: str | None = None,
    split: bool = False,
) -> Qwen3MoeTT:
    """Put a checkpoint on one chip, or a 1xD mesh; the host holds one layer at a time.

    Args:
        directory, progress: as ttnn_moe.models.qwen3.load_model.
        D: chips. device: as in ttnn_moe.tenstorrent.open_device.
        traced: capture decode steps as traces, and replay them; default: where the device can. This needs fast
            dispatch.
        weights: the matrices' formats, as in "bfloat4_b,bfloat8_b,attention=bfloat8_b,head=bfloat8_b"; see
            ttnn_moe.tenstorrent.ModelFormats.parse. Default: what TTNN_MOE_TT_WEIGHTS names, else bfloat16.
        split: every chip holds 1 / D of each expert's I, instead of E / D experts; see ttnn_moe.tenstorrent.balance.

    Raises:
        CheckpointError: as ttnn_moe.models.qwen3.load_model, or sizes that the device does not take.
        BackendUnavailable: no such device, or fewer than D chips.
        RequestError: the model does not fit the chips' memory, or the open device's room for traces is too small.
        ContractError: experts or heads that D chips cannot share, or unknown formats; nothing was opened.
    """
    checkpoint = Checkpoint(directory)
    layers = checkpoint.config.num_hidden_layers
    formats = ModelFormats.parse(weight_format() if weights is None else weights, layers)
    check_mesh(checkpoint.config, D, split)
    model = _on_device(checkpoint.config, D, device, traced, formats, split)
    put(checkpoint, model, progress)
    return model


def load_onto(mesh: Device, directory: str | Path) -> Qwen3MoeTT:
    """As load_model, on a mesh that the caller opened, with or without a trace region."""
    checkpoint = Checkpoint(directory)
    check_mesh(checkpoint.config, mesh.D)
    traced = why_no_trace("emulator" if mesh.emulated else "") is None
    formats = ModelFormats.parse(weight_format(), checkpoint.config.num_hidden_layers)
    model = Qwen3MoeTT(checkpoint.config, mesh, traced, formats)
    put(checkpoint, model)
    return model


def put(checkpoint: Checkpoint, model: Qwen3MoeTT, progress: Progress | None = None) -> None:
    """Move a checkpoint's weights to the model's chips, a layer at a time."""
    config = checkpoint.config
    release_traces(model.mesh)
    with torch.device("meta"):
        host = Qwen3Moe(config, "tenstorrent").to(model.dtype)
    done = 0

    def read(slots: dict[str, Tensor]) -> None:
        nonlocal done
        before = done

        def advance(now: int, _: int) -> None:
            nonlocal done
            done = before + now
            if progress is not None:
                progress(done, checkpoint.nbytes)

        checkpoint.read(slots, advance)

    for part in filter(None, (host.embed, host.norm, host.head)):
        part.to_empty(device="cpu")
    read(top_slots(host))
    checkpoint.check_tied_head(host.embed.weight)
    with torch.inference_mode():
        with room_for("the model", f"no room for embedding, head and RoPE's tables on {model.where}", "more chips"):
            model.put_top(host)
        for i, layer in enumerate(host.layers):
            assert isinstance(layer, Layer)
            layer.to_empty(device="cpu")
            read(layer_slots(layer, i, checkpoint.fused))
            with room_for("the model", f"room for {i} of {len(host.layers)} layers on {model.where}", "more chips"):
                model.put_layer(layer)
            layer.to("meta")
