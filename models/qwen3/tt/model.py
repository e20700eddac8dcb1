"""Qwen3-MoE on a Tenstorrent chip or 1xD mesh, as `generate` and `Session` take a model."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ttnn_moe import Placement, tenstorrent
from ttnn_moe.sizes import power_of_2 as bucket
from ttnn_moe.tenstorrent import Device, tensors
from ttnn_moe.tenstorrent.operators import Sizes, operators

from ..checkpoint import Checkpoint, Progress, layer_slots, top_slots
from ..config import Qwen3MoeConfig
from ..model import Layer, Qwen3Moe, rope_table
from .attention import DecodeAttention, PrefillAttention
from .cache import LONGEST, Decode, PagedCache, Pass, Prefill
from .decode import TRACE_BYTES, Decoder
from .layers import Attended, Network
from .memory import room_for
from .weights import LayerWeights, Linear, Mover, Router, check_sizes


class Qwen3MoeTT:
    """A model on the device; `load_model` makes one.

    Calling it runs a step of a cache of its own (`new_cache`) and gives logits on the host.

    Attributes:
        config: its sizes. mesh: the chips it is on. traced: whether decode steps are captured, and replayed.
        device, dtype: of the logits.
    """

    device, dtype = torch.device("cpu"), torch.bfloat16

    def __init__(self, config: Qwen3MoeConfig, mesh: Device, traced: bool = False):
        check_sizes(config)
        self.config, self.mesh, self.traced = config, mesh, traced
        self._network, self._mover = Network(config, mesh), Mover(mesh)
        self._layers: list[LayerWeights] = []
        self._decoders: weakref.WeakKeyDictionary[PagedCache, Decoder] = weakref.WeakKeyDictionary()

    def put_top(self, model: Qwen3Moe) -> None:
        """Move embeddings, last norm and head there."""
        self._embed = self._mover.embedding(model.embed.weight)
        self._norm = self._mover.norm(model.norm.weight)
        self._head = Linear(self._mover.head((model.head or model.embed).weight))
        positions = torch.arange(self.config.max_position_embeddings)
        self._cos, self._sin = (
            self._mover.embedding(torch.cat((half, half), -1).to(self.dtype))
            for half in rope_table(self.config, positions)
        )

    def put_layer(self, layer: Layer) -> None:
        """Move the next layer there."""
        self._layers.append(self._mover.layer(layer))

    @property
    def where(self) -> str:
        return str(self.mesh)

    def new_cache(self, rows: int, capacity: int) -> PagedCache:
        """Room for generations, of up to 32 sequences."""
        for decoder in self._decoders.values():
            decoder.release()
        K = self.config.num_experts_per_tok
        bounds = [
            operators(self.mesh, Sizes.of_experts(layer.mlp.experts, K)).max_T
            for layer in self._layers
            if isinstance(layer.mlp, Router)
        ]
        cache = PagedCache(self.config, self.mesh, rows, capacity, min([LONGEST, *bounds]))
        self._decoders[cache] = Decoder(self.mesh, self._step, self.traced)
        return cache

    def __call__(self, ids: Tensor, cache: PagedCache, step: Prefill | Decode) -> Tensor:
        """Logits [R, vocab_size] of the tokens that the step wants, or of all rows; see RowCache."""
        if isinstance(step, Decode):
            return self._decode(ids.tolist(), cache, step)
        parts = [self._prefill(one, cache) for one in cache.passes(ids.tolist(), step)]
        return torch.cat([part for part in parts if part is not None] or [torch.empty(0, self.config.vocab_size)])

    def _prefill(self, one: Pass, cache: PagedCache) -> Tensor | None:
        x = self._run(self._words(one.ids), self._words(one.positions), PrefillAttention(cache, one))
        if not one.ends:
            return None
        ends = one.ends + one.ends[-1:] * (bucket(len(one.ends)) - len(one.ends))
        return self._to_host(self._network.logits(x, self._words(ends), self._norm, self._head), len(one.ends))

    def _decode(self, ids: list[int], cache: PagedCache, step: Decode) -> Tensor:
        # rows past those in use do again what the first does
        again = [0] * (bucket(len(ids)) - len(ids))
        rows = [*range(len(ids)), *again]
        tokens, positions = [ids[row] for row in rows], [step.positions[row] for row in rows]
        return self._to_host(self._decoders[cache](cache, tokens, positions, rows), len(ids))

    def _step(self, ids: Any, positions: Any, attend: DecodeAttention) -> Any:
        return self._network.logits(self._run(ids, positions, attend), None, self._norm, self._head)

    def _run(self, ids: Any, positions: Any, attend: Any) -> Any:
        network = self._network
        attended = Attended(network.embed(positions, self._cos), network.embed(positions, self._sin), attend)
        x = network.embed(ids, self._embed)
        for i, weights in enumerate(self._layers):
            x = network.layer(x, i, weights, attended)
        return x

    def _words(self, values: Sequence[int]) -> Any:
        """[1, n] uint32."""
        return tensors.replicate(torch.tensor([values]).int(), self.mesh, dtype="uint32")

    def _to_host(self, logits: Any, n: int) -> Tensor:
        parts = tensors.parts_to_torch(logits, self.mesh)
        whole = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts], -1)
        return whole[:n, : self.config.vocab_size]


def load_model(
    directory: str | Path, D: int = 1, device: str | None = None, progress: Progress | None = None, traced: bool = False
) -> Qwen3MoeTT:
    """Put a checkpoint on one chip, or a 1xD mesh; the host holds one layer at a time.

    Args:
        directory, progress: as ttnn_moe.models.qwen3.load_model.
        D: chips. device: which, as ttnn_moe.tenstorrent.open_device.
        traced: capture decode steps as traces, and replay them; needs fast dispatch.

    Raises:
        CheckpointError: as ttnn_moe.models.qwen3.load_model, or sizes that the device does not take.
        BackendUnavailable: no such device, or fewer than D chips.
        RequestError: it does not fit their memory.
        ContractError: experts that D chips cannot share.
    """
    checkpoint = Checkpoint(directory)
    config = checkpoint.config
    if config.num_experts:
        Placement.uniform(config.num_experts, D)
    model = Qwen3MoeTT(config, tenstorrent.open_device(D, device, TRACE_BYTES if traced else None), traced)
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
        model.put_top(host)
        for i, layer in enumerate(host.layers):
            assert isinstance(layer, Layer)
            layer.to_empty(device="cpu")
            read(layer_slots(layer, i, checkpoint.fused))
            with room_for("the model", f"room for {i} of {len(host.layers)} layers on {model.where}", "more chips"):
                model.put_layer(layer)
            layer.to("meta")
    return model
