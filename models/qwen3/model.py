"""Qwen3-MoE for inference: plain torch around one mixture-of-experts operator.

Tokens are rows throughout: [T, H], where T counts the packed tokens of all sequences. With a cache, nothing here
reads a value back to the host, and every shape follows from sizes that the host knows.
Architecture: Qwen3 Technical Report, https://arxiv.org/abs/2505.09388.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ttnn_moe
from ttnn_moe import arranging, decoder, registry
from ttnn_moe.backend import Prepared, run
from ttnn_moe.errors import RequestError
from ttnn_moe.formats import mxfp4_boxes
from ttnn_moe.kv import formats
from ttnn_moe.kv.bucketed.cache import BucketedCache
from ttnn_moe.kv.cache import CacheSizes, FusedWrite, HeadNorms, KVCache, RowCache
from ttnn_moe.kv.step import PrefillStep, Step
from ttnn_moe.kv.uncached import Uncached
from ttnn_moe.sizes import power_of_2

from .config import Qwen3MoeConfig
from .weight_formats import FORMATS

IDS = "distinct"
"""What the router promises of its ids: topk names K different experts."""


def sizes_of(config: Qwen3MoeConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> CacheSizes:
    """What a cache has to know of a model."""
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    return CacheSizes(config.num_hidden_layers, *heads, dtype, torch.device(device))


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Weights come from a file: drawing random ones first would cost time and memory."""


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """As in Linear."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; fp32 inside, one rounding."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return decoder.rms_norm(x, self.weight, self.eps)

    def into(self, linear: nn.Linear, x: Tensor, first: int = 0) -> Tensor:
        """linear(self(x)), outputs from `first` on; one pass where that is faster."""
        weight: Tensor = linear.weight
        bias: Tensor | None = linear.bias
        if first:
            weight, bias = weight[first:], None if bias is None else bias[first:]
        return decoder.norm_linear(x, self.weight, self.eps, weight, bias)


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self, config: Qwen3MoeConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        # rows of q, then k, then v: one GEMM
        self.qkv = Linear(config.hidden_size, rows, bias=config.attention_bias)
        self.out = Linear(self.heads * self.head_dim, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, norm: RMSNorm, rope: tuple[Tensor, Tensor], cache: KVCache, step: Step) -> Tensor:
        """x [T, H] + attention(norm(x)); x may be overwritten."""
        q = self._write(x, norm, rope, cache, step, self.heads)
        attended = cache.attend(self.layer, q, step).flatten(1)
        return decoder.linear_add(attended, self.out.weight, self.out.bias, x)

    def keep(self, x: Tensor, norm: RMSNorm, rope: tuple[Tensor, Tensor], cache: KVCache, step: Step) -> None:
        """Only write keys and values."""
        self._write(x, norm, rope, cache, step, 0)

    def _write(
        self, x: Tensor, norm: RMSNorm, rope: tuple[Tensor, Tensor], cache: KVCache, step: Step, queries: int
    ) -> Tensor:
        """Write keys and values; the last `queries` query heads [T, queries, head_dim], normalised and rotated."""
        qkv = norm.into(self.qkv, x, (self.heads - queries) * self.head_dim)
        heads = qkv.view(x.shape[0], queries + 2 * self.kv_heads, self.head_dim)
        norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        if isinstance(cache, FusedWrite):
            q = cache.norm_rope_write(self.layer, heads, norms, rope, step)
            if q is not None:
                return q
        q, k, v = decoder.head_norm_rope(heads, self.kv_heads, norms, rope)
        cache.write(self.layer, k, v, step)
        return q


class DenseMLP(nn.Module):
    """SwiGLU without experts."""

    def __init__(self, config: Qwen3MoeConfig):
        super().__init__()
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, norm: RMSNorm, step: Step) -> Tensor:
        """x [T, H] + mlp(norm(x)); x may be overwritten."""
        gate, up = norm.into(self.gate_up, x).chunk(2, dim=-1)
        return decoder.linear_add(F.silu(gate) * up, self.down.weight, self.down.bias, x)


class MoE(nn.Module):
    """Router and experts. The only place that calls the operator.

    Args:
        held: experts that this process holds; default: all. first: number of the first of them.
    """

    def __init__(self, config: Qwen3MoeConfig, backend: str, held: int | None = None, first: int = 0):
        super().__init__()
        E, H, I = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.first = first
        self.K, self.norm_topk_prob, self.backend = config.num_experts_per_tok, config.norm_topk_prob, backend
        self.router = Linear(H, E, bias=False)
        self.format = FORMATS[config.weight_format]
        self._sizes = sizes = E if held is None else held, H, I
        self._names = tuple(tensors := self.format.empty(*sizes))
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self._experts: ttnn_moe.Experts | None = None
        self._experts_of: tuple[Tensor, ...] = ()  # in a tuple: a module takes a bare one for its parameter
        self._arranged = False  # the parameters hold mxfp4_boxes: see ttnn_moe.arrange
        self._prepared: dict[int, Prepared] = {}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The format's tensors by name: the parameters' memory, as files have it."""
        self._restore()
        return self._held()

    def _held(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).data for name in self._names}

    @property
    def experts(self) -> ttnn_moe.Experts:
        """The weights as the operator takes them: the same memory."""
        first = getattr(self, self._names[0])
        if self._experts is None or not self._experts_of or self._experts_of[0] is not first:
            self._experts_of = (first,)
            form = mxfp4_boxes.NAME if self._arranged else self.format.name
            self._experts = arranging.at_load(ttnn_moe.Experts(form, *self._sizes, self._held()))
            self._arranged = self._experts.format == mxfp4_boxes.NAME
            self._prepared = {}
        return self._experts

    def _restore(self) -> None:
        """Bring the parameters back to the format that files have. The experts are made again when they are asked for.

        Graphs that were captured before read other bytes then.
        """
        if self._arranged:
            arranging.restore(self.experts)
        self._arranged, self._experts = False, None

    def _apply(self, fn: Any, recurse: bool = True) -> MoE:
        self._restore()  # .to(), .cuda(), .bfloat16() put other memory behind the parameters
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        self._restore()
        super()._load_from_state_dict(*args, **options)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._arranged:
            restored = arranging.restored(self.experts)
            destination.update({prefix + name: tensor for name, tensor in restored.tensors.items()})

    def __getstate__(self) -> dict[str, Any]:
        # a copy's experts are made from the copy's parameters
        return {**self.__dict__, "_experts": None, "_prepared": {}}

    def prepared(self, T: int) -> Prepared:
        """The layer ready for calls of T tokens rounded up to a power of two; kept, since graphs hold its memory."""
        experts, bound = self.experts, power_of_2(T)
        if bound not in self._prepared:
            problem = ttnn_moe.Problem.of(bound, self.K, experts, self.router.weight.dtype)
            layer = self._prepared[bound] = ttnn_moe.prepare(problem, experts, backend=self.backend, ids=IDS)
            layer.compile(bound // 2 + 1, accumulate=True)
        return self._prepared[bound]

    def forward(self, x: Tensor, norm: RMSNorm, step: Step) -> Tensor:
        """x [T, H] + experts(norm(x)); x may be overwritten."""
        return self.add_experts(x, *self.route(x, norm), step.num_tokens)

    def route(self, x: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor, Tensor]:
        """ids and weights [T, K] of the experts of each token, and norm(x) [T, H]."""
        return decoder.norm_route(x, norm.weight, norm.eps, self.router.weight, self.K, self.norm_topk_prob)

    def add_experts(self, x: Tensor, ids: Tensor, weights: Tensor, hidden: Tensor, num_tokens: Tensor | None) -> Tensor:
        """x [T, H] + the experts of hidden [T, H]; x may be overwritten."""
        if decoder.uses_kernels(x):  # the sum over experts begins with x
            layer = self.prepared(x.shape[0])
            return layer(hidden, ids, weights, out=x, accumulate=True, num_tokens=num_tokens)
        routing = ttnn_moe.Routing.from_topk(ids, weights, self.router.out_features, num_tokens=num_tokens)
        return x + ttnn_moe.moe(hidden, routing, self.experts, backend=self.backend, ids=IDS)


@dataclass(frozen=True)
class Modules:
    """What makes the parts of a layer; `parallel` has parts that several processes share."""

    attention: Callable[[Qwen3MoeConfig, int], Attention] = Attention
    dense: Callable[[Qwen3MoeConfig], DenseMLP] = DenseMLP
    moe: Callable[[Qwen3MoeConfig, str], MoE] = MoE


MODULES = Modules()


class Layer(nn.Module):
    def __init__(self, config: Qwen3MoeConfig, layer: int, backend: str, modules: Modules = MODULES):
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = modules.attention(config, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: nn.Module = modules.moe(config, backend) if config.is_sparse(layer) else modules.dense(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: KVCache, step: Step) -> Tensor:
        x = self.attention(x, self.attention_norm, rope, cache, step)
        return self.mlp(x, self.mlp_norm, step)


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
        cache = formats.new_cache(kv, kv_bits, self.cache_sizes, rows, capacity, memory, page)
        if isinstance(cache, BucketedCache):
            cache.equalise(self._norms("k_norm"), self._norms("q_norm"))
        return cache

    def _norms(self, name: str) -> Tensor:
        """[layers, head_dim] fp32, how large each channel of keys or queries is: they are normalised.

        RoPE mixes channel i with channel i + head_dim / 2.
        """
        norms = [module for key, module in self.named_modules() if key.endswith(f".attention.{name}")]
        weights = torch.stack([norm.weight.float() for norm in norms if isinstance(norm, RMSNorm)])
        return weights.square().unflatten(1, (2, -1)).mean(1).sqrt().repeat(1, 2)

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
            RequestError: without a cache: sequences longer than the context, or ids outside the vocabulary.
        """
        return run(self._forward, ids, cache, step)

    def _forward(self, ids: Tensor, cache: KVCache | None, step: Step | None) -> Tensor:
        shape = ids.shape
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
                "ids have the wrong form", got=f"{tuple(ids.shape)} {ids.dtype}", expected="[B, S] int64"
            )
        B, S = ids.shape
        if S > self.config.max_position_embeddings:
            raise RequestError("sequences exceed the context", got=S, expected=self.config.max_position_embeddings)
        if ids.numel() and not torch.compiler.is_compiling():
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.config.vocab_size:
                raise RequestError(
                    "ids out of range", got=f"{low} .. {high}", expected=f"0 .. {self.config.vocab_size - 1}"
                )
        rows, positions = (torch.arange(n, device=ids.device) for n in (B, S))
        step = PrefillStep(rows.repeat_interleave(S), positions.repeat(B), S, logits_at=None, spans=())
        return Uncached(B, S), step
