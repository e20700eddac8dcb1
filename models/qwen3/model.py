"""Qwen3-MoE for inference: plain torch around one mixture-of-experts operator.

Tokens are rows throughout: [T, H], where T counts the packed tokens of all sequences. With a cache, nothing here
reads a value back to the host, and every shape follows from sizes that the host knows.
Architecture: Qwen3 Technical Report, https://arxiv.org/abs/2505.09388.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from ttnn_moe import decoder, registry
from ttnn_moe.backend import run
from ttnn_moe.errors import RequestError
from ttnn_moe.kv import formats
from ttnn_moe.kv.bucketed.cache import BucketedCache
from ttnn_moe.kv.cache import CacheSizes, KVCache, RowCache
from ttnn_moe.kv.step import PrefillStep, Step
from ttnn_moe.kv.uncached import Uncached
from ttnn_moe.visible import shown

from .config import Qwen3MoeConfig
from .layers import MODULES, Changes, Embedding, Layer, Linear, Modules, MoE, RMSNorm


def sizes_of(config: Qwen3MoeConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> CacheSizes:
    """What a cache has to know of a model."""
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    return CacheSizes(config.num_hidden_layers, *heads, dtype, torch.device(device))


def rope_table(config: Qwen3MoeConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, head_dim / 2] fp32 of positions [T]."""
    half = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None].float() * (1.0 / config.rope_theta ** (half / config.head_dim))
    return angles.cos(), angles.sin()


M = TypeVar("M", bound=nn.Module)


def placed(make: Callable[[], M], dtype: torch.dtype, device: torch.device | str) -> M:
    """What make() gives, its weights allocated once, in their final place, and uninitialised."""
    with torch.device("meta"):
        model = make()
    return model.to(dtype).to_empty(device=device).eval()


class Qwen3Moe(nn.Module):
    """The whole model. Weights are uninitialised: `load_model` or `weights.randomize` fills them.

    Args:
        config: sizes and switches.
        backend: the ttnn_moe backend that runs the experts.
        modules: makes the parts of its layers.
    """

    def __init__(self, config: Qwen3MoeConfig, backend: str = "auto", modules: Modules = MODULES):
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i, backend, modules) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.head = None if tied else Linear(config.hidden_size, config.vocab_size, bias=False)
        self._rope_table: tuple[Tensor, Tensor] | None = None
        self._mixtures = tuple(layer.mlp for layer in self.layers if isinstance(layer.mlp, MoE))
        self._changes, self._writes = Changes(), 0
        for moe in self._mixtures:
            moe.changes = self._changes
        self.requires_grad_(False)

    @classmethod
    def empty(cls, config: Qwen3MoeConfig, backend: str, dtype: torch.dtype, device: torch.device | str) -> Qwen3Moe:
        """A model whose weights are allocated once, in their final place, and uninitialised."""
        return placed(lambda: cls(config, backend), dtype, device)

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    @property
    def where(self) -> str:
        return str(self.device)

    @property
    def cache_sizes(self) -> CacheSizes:
        """What a KV cache has to know of the model."""
        return sizes_of(self.config, self.dtype, self.device)

    def new_cache(
        self,
        rows: int,
        capacity: int,
        memory: int | None = None,
        page: int | None = None,
        kv: str = formats.PAGED,
        kv_bits: float | None = None,
    ) -> RowCache:
        """See LanguageModel."""
        memory = self.cache_memory() if memory is None else memory
        cache = formats.new_cache(kv, kv_bits, self.cache_sizes, rows, capacity, memory, page)
        if isinstance(cache, BucketedCache):
            cache.equalise(self._norms("k_norm"), self._norms("q_norm"))
        return cache

    def cache_memory(self) -> int | None:
        """Bytes for keys and values where nobody says; None: the cache decides."""
        return None

    def _norms(self, name: str) -> Tensor:
        """[layers, head_dim] fp32, how large each channel of keys or queries is: they are normalised.

        RoPE mixes channel i with channel i + head_dim / 2.
        """
        norms = [module for key, module in self.named_modules() if key.endswith(f".attention.{name}")]
        weights = torch.stack([norm.weight.float() for norm in norms if isinstance(norm, RMSNorm)])
        return weights.square().unflatten(1, (2, -1)).mean(1).sqrt().repeat(1, 2)

    def changes(self) -> int:
        """See ChangesKernels."""
        writes = sum(moe.writes for moe in self._mixtures)
        if writes != self._writes:
            for moe in self._mixtures:
                _ = moe.experts  # looks at the new values
            self._writes = writes
        return self._changes.times

    def why_not_captured(self) -> str | None:
        """See LanguageModel."""
        npu = self.device.type == "npu"
        native = "ascend" if npu else "cuda"
        others = {registry.resolve(m.backend) for m in self.modules() if isinstance(m, MoE)} - {native}
        if others:
            return f"its experts run on {', '.join(sorted(others))}, not on {native}"
        if npu:
            return None
        config = self.config
        return decoder.why_not_captured(
            self.embed.weight, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, head_dim / 2] in the model's dtype, computed in fp32 from positions [T]."""
        if not decoder.uses_kernels(self.embed.weight):
            return self._rope_of(positions)
        # two small kernels instead of ten
        table = self._rope_table
        if table is None or (table[0].device, table[0].dtype) != (self.device, self.dtype):
            context = torch.arange(self.config.max_position_embeddings, device=self.device)
            table = self._rope_table = self._rope_of(context)
        return table[0][positions], table[1][positions]

    def _rope_of(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rope_table(self.config, positions)
        return cos[:, None].to(self.dtype), sin[:, None].to(self.dtype)

    @torch.no_grad()
    def forward(self, ids: Tensor, cache: KVCache | None = None, step: Step | None = None) -> Tensor:
        """Logits of the next token, in the dtype of the weights: torch.autocast changes no bit.

        Args:
            ids: [B, S] int64, B whole sequences (causal, nothing kept); with a cache [T], those of `step`.
            cache: keeps keys and values, and attends to them.
            step: from the cache: where each of the T tokens stands.

        Returns:
            [B, S, vocab_size], or with a cache [R, vocab_size] for the tokens step.logits_at (in a decode step: all).

        Raises:
            RequestError: a cache without a step, or a step without a cache. Without both: sequences longer than the
                context, ids outside the vocabulary or on another device.
        """
        return run(self._forward, ids, cache, step)

    def _forward(self, ids: Tensor, cache: KVCache | None, step: Step | None) -> Tensor:
        if not isinstance(ids, Tensor):
            raise RequestError(
                "ids are no tensor",
                got=shown(ids),
                expected="a torch tensor [B, S] int64",
                remedy="torch.tensor([ids]) for the ids of one sequence; generate() takes lists",
            )
        shape = ids.shape
        if (cache is None) != (step is None):
            raise RequestError(
                "a cache and a step belong together",
                got="a step alone" if cache is None else "a cache alone",
                expected="both, or neither",
                remedy="give the step that the cache planned, or leave both out",
            )
        if cache is None or step is None:
            cache, step = self._whole(ids)
        rope = self.rope(step.positions)
        logits_at, wanted = (step.logits_at, step.wanted()) if isinstance(step, PrefillStep) else (None, None)
        wanted_rope = rope if wanted is None else self.rope(wanted.positions)
        x = self.embed(ids.flatten())  # after positions and angles: see gpu_kernels/triton/head_norm_rope.py
        *before, last = self.layers
        for layer in before:
            x = layer(x, rope, cache, step)
        assert isinstance(last, Layer)
        if wanted is not None:  # of the other tokens, the last layer only writes keys and values
            last.attention.keep(x, last.attention_norm, rope, cache, step)
            x, rope, step, logits_at = x[logits_at], wanted_rope, wanted, None
        if len(x):
            x = last(x, rope, cache, step)
        if logits_at is not None:
            x = x[logits_at]
        logits = self.logits(x)
        return logits if len(shape) == 1 else logits.view(*shape, self.config.vocab_size)

    def logits(self, x: Tensor) -> Tensor:
        """[R, vocab_size] of x [R, H], which the last layer made."""
        return decoder.norm_linear(x, self.norm.weight, self.norm.eps, (self.head or self.embed).weight)

    def _whole(self, ids: Tensor) -> tuple[Uncached, PrefillStep]:
        if ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64):
            raise RequestError(
                "ids have the wrong form",
                got=f"{tuple(ids.shape)} {ids.dtype}",
                expected="[B, S] int64",
                remedy="ids.reshape(B, S).long()",
            )
        if ids.device != self.device:
            raise RequestError(
                "ids are on another device than the model",
                got=ids.device,
                expected=self.device,
                remedy="ids.to(model.device)",
            )
        B, S = ids.shape
        if S > self.config.max_position_embeddings:
            raise RequestError(
                "sequences exceed the context",
                got=f"{S} tokens",
                expected=f"at most {self.config.max_position_embeddings}",
                remedy="give shorter sequences",
            )
        if ids.numel() and not torch.compiler.is_compiling():
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.config.vocab_size:
                raise RequestError(
                    "ids out of range",
                    got=f"{low} .. {high}",
                    expected=f"0 .. {self.config.vocab_size - 1}",
                    remedy="make the ids with this checkpoint's tokenizer",
                )
        rows, positions = (torch.arange(n, device=ids.device) for n in (B, S))
        step = PrefillStep(rows.repeat_interleave(S), positions.repeat(B), S, logits_at=None, spans=())
        return Uncached(B, S), step
