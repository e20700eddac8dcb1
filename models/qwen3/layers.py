"""The parts of a layer of Qwen3-MoE: attention, dense MLP, router and experts. Tokens are rows: [T, H]."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ttnn_moe
from ttnn_moe import arranging, decoder
from ttnn_moe.backend import Prepared
from ttnn_moe.formats import int4_24, mxfp4_boxes
from ttnn_moe.kv.cache import FusedWrite, HeadNorms, KVCache
from ttnn_moe.kv.step import Step
from ttnn_moe.sizes import power_of_2

from .config import Qwen3MoeConfig
from .weight_formats import FORMATS

IDS = "distinct"
"""What the router promises of its ids: topk names K different experts."""


class Linear(nn.Linear):
    """torch's Linear, whose weights are not drawn."""

    def reset_parameters(self) -> None:
        """Weights come from a file: drawing random ones first would cost time and memory."""


class Embedding(nn.Embedding):
    """torch's Embedding, whose weights are not drawn."""

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


@dataclass
class Changes:
    """times: how often what was prepared for a model's experts was given up. Steps captured before are void."""

    times: int = 0


class MoE(nn.Module):
    """Router and experts. The only place that calls the operator.

    Args:
        held: experts that this process holds; default: all. first: number of the first of them.

    Attributes:
        changes: layers of one model share it.
        writes: how often parameters were written whose values decide which kernels run.
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
        self._borrowed = False  # they may be tensors of a caller's state dict, whose bytes stay
        self._prepared: dict[int, Prepared] = {}
        self.changes = Changes()
        self._watched: tuple[Tensor, ...] = ()
        self._writes = 0

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
            self._forget()
            self._experts_of = (first,)
            form = mxfp4_boxes.NAME if self._arranged else self.format.name
            experts = ttnn_moe.Experts(form, *self._sizes, self._held())
            if self._borrowed and arranging.gains(experts):
                for parameter in map(self.get_parameter, self._names):
                    parameter.data = parameter.data.clone()
                self._borrowed, experts = False, replace(experts, tensors=self._held())
            self._watch()
            self._experts = arranging.at_load(experts, self._mark)
        elif self.writes != self._writes:
            with self._new_values():
                self._forget()
        return self._experts

    @property
    def writes(self) -> int:
        return sum(tensor._version for tensor in self._watched)

    def _watch(self) -> None:
        """Notice what is written to the parameters from now on, where fp16 may then not hold their scales any more."""
        own = [self.get_parameter(name) for name in self._names] if self.format.name == int4_24.NAME else []
        self._watched = () if any(tensor.is_inference() for tensor in own) else tuple(own)
        self._writes = self.writes

    @contextmanager
    def _new_values(self) -> Iterator[None]:
        """The weights' values change inside. What was prepared stays where it reads the new ones."""
        before, prepared, times = self._experts, self._prepared, self.changes.times
        yield
        now = self.experts
        if before is None or not _in_place(before, now):
            return
        if before.fp16_scales and not now.fp16_scales:
            self._prepared = self._with_other_kernels(prepared)
        else:  # captured steps read these weights, and use this memory
            self._prepared, self.changes.times = prepared, times

    def _with_other_kernels(self, prepared: dict[int, Prepared]) -> dict[int, Prepared]:
        """What serves instead of these, whose kernels do not take the weights any more."""
        return {}

    def _restore(self) -> None:
        """Bring the parameters back to the format that files have. The experts are made again when they are asked for.

        Graphs that were captured before read other bytes then.
        """
        experts = self.experts if self._arranged else None
        self._forget()
        if experts is not None:
            arranging.restore(experts, self._mark)

    def _forget(self) -> None:
        """What was made of the weights."""
        self.changes.times += bool(self._prepared)
        self._experts, self._prepared = None, {}

    def _mark(self, arranged: bool) -> None:
        self._arranged = arranged

    def _apply(self, fn: Any, recurse: bool = True) -> MoE:
        self._restore()  # .to(), .cuda(), .bfloat16() put other memory behind the parameters
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *args: Any) -> None:
        with self._new_values():
            self._restore()
            self._borrowed = self._borrowed or metadata.get("assign_to_params_buffers", False)
            super()._load_from_state_dict(state, prefix, metadata, *args)

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


def _in_place(one: ttnn_moe.Experts, other: ttnn_moe.Experts) -> bool:
    """Whether what was prepared for one reads the weights of the other."""
    return one.format == other.format and all(
        one.tensors[name].data_ptr() == tensor.data_ptr() for name, tensor in other.tensors.items()
    )


@dataclass(frozen=True)
class Modules:
    """What makes the parts of a layer; `parallel` has parts that several processes share."""

    attention: Callable[[Qwen3MoeConfig, int], Attention] = Attention
    dense: Callable[[Qwen3MoeConfig], DenseMLP] = DenseMLP
    moe: Callable[[Qwen3MoeConfig, str], MoE] = MoE


MODULES = Modules()


class Layer(nn.Module):
    """A decoder layer: attention, then experts or a dense MLP, each added to the residual x [T, H]."""

    def __init__(self, config: Qwen3MoeConfig, layer: int, backend: str, modules: Modules = MODULES):
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = modules.attention(config, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: nn.Module = modules.moe(config, backend) if config.is_sparse(layer) else modules.dense(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: KVCache, step: Step) -> Tensor:
        x = self.attention(x, self.attention_norm, rope, cache, step)
        return self.mlp(x, self.mlp_norm, step)
