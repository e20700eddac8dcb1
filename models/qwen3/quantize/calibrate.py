"""Activations of a calibration text, carried through a model one layer at a time."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ttnn_moe import decoder
from ttnn_moe.contract import Routing
from ttnn_moe.errors import RequestError
from ttnn_moe.kv.step import PrefillStep
from ttnn_moe.kv.uncached import Uncached

from ..checkpoint import EMBED, Checkpoint, layer_slots
from ..config import Qwen3MoeConfig
from ..files import read_text
from ..layers import Layer, MoE
from ..model import rope_table
from ..tokenizer import Tokenizer

SEQUENCE = 2048
"""Tokens of a sequence, at most: the text is cut into such pieces."""
_BATCH_TOKENS = 16384
_MOST_CHARACTERS = 32  # of a text, for each token that is wanted


@dataclass(frozen=True)
class Calibration:
    """Tokens to calibrate with.

    Attributes:
        batches: [B, S] int64 each. digest: of all tokens and of how they are cut.
    """

    batches: tuple[Tensor, ...]
    digest: str

    @property
    def T(self) -> int:
        """Tokens of all batches."""
        return sum(ids.numel() for ids in self.batches)

    @classmethod
    def of_file(cls, path: Path, directory: Path, config: Qwen3MoeConfig, most: int) -> Calibration:
        """The first `most` tokens of a text file, by the tokenizer of the checkpoint in `directory`.

        Raises:
            CheckpointError: a file that cannot be read. RequestError: no token, or one outside of the vocabulary.
        """
        tokenizer = Tokenizer.from_directory(directory)
        text = read_text(path, "name a text file that this user can read", _MOST_CHARACTERS * most)
        ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False)[:most], dtype=torch.int64)
        if not len(ids):
            raise RequestError(
                f"{path} cannot calibrate {directory}",
                got="no tokens",
                expected="a text of at least one token",
                remedy="give a text of the kind that the model is for",
            )
        if int(ids.max()) >= config.vocab_size:
            raise RequestError(
                f"{path} cannot calibrate {directory}",
                got=f"token {int(ids.max())}",
                expected=f"tokens below {config.vocab_size}",
                remedy="take the tokenizer.json that belongs to this model",
            )
        S = min(SEQUENCE, config.max_position_embeddings)
        whole = len(ids) - len(ids) % S
        batches = [*ids[:whole].view(-1, S).split(max(1, _BATCH_TOKENS // S))] if whole else []
        if whole < len(ids):
            batches.append(ids[whole:][None])
        return cls(tuple(batches), hashlib.sha256(f"{S} {ids.tolist()}".encode()).hexdigest())


@dataclass(frozen=True)
class Routed:
    """What the experts of a layer get: hidden [T, H]; of each expert its tokens and their weights."""

    hidden: Tensor
    tokens: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]


class Activations:
    """The hidden states of all tokens before a layer, in the model's dtype on the device."""

    def __init__(self, checkpoint: Checkpoint, calibration: Calibration, device: torch.device):
        self.checkpoint, self.batches, self.device = checkpoint, calibration.batches, device
        with checkpoint.reader() as read:
            table = read(EMBED).to(checkpoint.dtype)
        self._x = [F.embedding(ids.flatten(), table).to(device) for ids in self.batches]

    @torch.no_grad()
    def attend(self, i: int) -> Routed | None:
        """Run layer i but for its experts; None: it has none, and has run whole."""
        config, layer, found = self.checkpoint.config, self._layer(i), []
        for b, ids in enumerate(self.batches):
            B, S = ids.shape
            positions = torch.arange(S, device=self.device).repeat(B)
            step = PrefillStep(
                torch.arange(B, device=self.device).repeat_interleave(S), positions, S, logits_at=None, spans=()
            )
            cos, sin = (part[:, None].to(self.checkpoint.dtype) for part in rope_table(config, positions))
            x = layer.attention(self._x[b], layer.attention_norm, (cos, sin), Uncached(B, S), step)
            norm, mlp = layer.mlp_norm, layer.mlp
            if isinstance(mlp, MoE):
                found.append(decoder.norm_route(x, norm.weight, norm.eps, mlp.router.weight, mlp.K, mlp.norm_topk_prob))
            else:
                x = mlp(x, norm, step)
            self._x[b] = x
        if not found:
            return None
        ids, weights, hidden = (torch.cat(parts) for parts in zip(*found, strict=True))
        K = config.num_experts_per_tok
        routing = Routing.from_topk(ids, weights, config.num_experts).sorted
        starts = routing.expert_offsets.tolist()
        pairs = [routing.pairs[a:b].long() for a, b in zip(starts, starts[1:], strict=False)]
        return Routed(hidden, tuple(p // K for p in pairs), tuple(weights.flatten()[p] for p in pairs))

    def add(self, y: Tensor) -> None:
        """Add what the experts made, y [T, H]."""
        at = 0
        for b, x in enumerate(self._x):
            self._x[b] = x + y[at : at + len(x)].to(x.dtype)
            at += len(x)

    def _layer(self, i: int) -> Layer:
        """Layer i without its experts."""
        config = self.checkpoint.config
        with torch.device("meta"):
            layer = Layer(config, i, "reference")
        layer.to(self.checkpoint.dtype)
        mlp = layer.mlp.router if isinstance(layer.mlp, MoE) else layer.mlp
        for module in (layer.attention_norm, layer.attention, layer.mlp_norm, mlp):
            module.to_empty(device=self.device)
        slots = layer_slots(layer, i, self.checkpoint.fused)
        self.checkpoint.read({name: slot for name, slot in slots.items() if not slot.is_meta})
        return layer


def expert_output(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """[n, H] fp32 of tokens x [n, H], with logical weights gate_up [2I, H] and down [H, I]."""
    gate, up = F.linear(x.float(), gate_up.float()).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down.float())


def memory_needed(config: Qwen3MoeConfig, calibration: Calibration | None) -> int:
    """Bytes on the device while a layer is calibrated, about."""
    if calibration is None:
        return 0
    T, H, I = calibration.T, config.hidden_size, config.moe_intermediate_size
    return T * H * 16 + 50 * max(H, I) ** 2
