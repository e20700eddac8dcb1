"""Qwen3-MoE in vLLM with this package's decoder layers; weights, scheduler, KV blocks, graphs and samplers are vLLM's.

A layer runs norm and qkv; norms of heads, RoPE, the write of keys and values, and attention; the output projection and
its sum; norm, router, experts and their sum. On one GPU, all between two attentions is one operator. With tensor
parallelism, vLLM sums over ranks twice a layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models import qwen3_moe
from vllm.model_executor.models.utils import maybe_prefix
from vllm.sequence import IntermediateTensors
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ... import decoder
from ...cuda.linear import decode_linear
from ...kv.cache import HeadNorms
from . import attention, model_gate, operators, say
from .adapter import TtnnMoeMethod, held

OPS = getattr(torch.ops, operators.NAMESPACE)
ATTENTION = AttentionBackendEnum.CUSTOM


class Layer(qwen3_moe.Qwen3MoeDecoderLayer):
    """vLLM's layer, whose weights it uses."""

    def __init__(self, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config, prefix)
        config, own = vllm_config.model_config.hf_text_config, self.self_attn
        self.K, self.renormalise = config.num_experts_per_tok, config.norm_topk_prob
        self.eps = config.rms_norm_eps
        self.ranks = get_tensor_model_parallel_world_size()
        # one rank's part begins with the residual, so that the sum over ranks has it once
        self.first = get_tensor_model_parallel_rank() == 0
        self.paged = issubclass(own.attn.attn_backend, attention.Backend)
        if self.paged:
            own.attn.impl.q_norm, own.attn.impl.k_norm = own.q_norm, own.k_norm
        experts = getattr(self.mlp, "experts", None)
        if experts is not None:
            self.experts_name = _encode_layer_name(experts.layer_name)
            method = held(experts).quant_method
            if isinstance(method, TtnnMoeMethod) and model_gate.own_experts(self.mlp):
                method.adds = self.first

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, H], the residual stream; cos and sin [T, 1, head_dim / 2]."""
        own = self.self_attn
        qkv = OPS.norm_linear(x, self.input_layernorm.weight, self.eps, own.qkv_proj.weight, own.qkv_proj.bias)
        attended = self.attend(qkv, cos, sin)
        x = self._sum(OPS.linear_add(x, attended, own.o_proj.weight, self.first))
        if self.adds_itself:
            return self._sum(OPS.experts(x, *self.route(), self.experts_name))
        return x + self.mlp(self.post_attention_layernorm(x))

    def share(self, stream: Tensor, true_tokens: Tensor) -> None:
        """Let the experts add to this residual stream [most tokens, H], for true_tokens [] of each step."""
        experts = getattr(self.mlp, "experts", None)
        if experts is not None and isinstance(method := held(experts).quant_method, TtnnMoeMethod):
            method.stream, method.true_tokens = stream, true_tokens
        if self.paged:
            self.self_attn.attn.impl.true_tokens = true_tokens

    @property
    def adds_itself(self) -> bool:
        """Whether the experts are called from here."""
        experts = getattr(self.mlp, "experts", None)
        return experts is not None and getattr(held(experts).quant_method, "adds_itself", False)

    @property
    def joins(self) -> bool:
        """Whether one operator can be all that runs between this layer's attention and the next."""
        return self.adds_itself and self.ranks == 1 and self.self_attn.qkv_proj.bias is None

    def route(self) -> tuple[Any, ...]:
        """Arguments of the router, as operators take them."""
        norm = self.post_attention_layernorm.weight
        return norm, self.eps, self.mlp.gate.weight, self.K, self.renormalise

    def attend(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """qkv [T, (heads + 2 kv_heads) head_dim] -> [T, heads head_dim]."""
        own = self.self_attn
        heads = qkv.view(-1, own.num_heads + 2 * own.num_kv_heads, own.head_dim)
        return self._paged(heads, cos, sin) if self.paged else self._vllms(heads, cos, sin)

    def _sum(self, x: Tensor) -> Tensor:
        return x if self.ranks == 1 else tensor_model_parallel_all_reduce(x)

    def _paged(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        own = self.self_attn
        out = torch.empty(heads.shape[0], own.num_heads, own.head_dim, dtype=heads.dtype, device=heads.device)
        name = _encode_layer_name(own.attn.layer_name)
        torch.ops.vllm.unified_attention_with_output(heads, cos, sin, out, name)
        return out.flatten(1)

    def _vllms(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        own = self.self_attn
        norms = HeadNorms(own.q_norm.weight, own.k_norm.weight, self.eps)
        q, k, v = decoder.head_norm_rope(heads, own.num_kv_heads, norms, (cos, sin))
        return own.attn(q.flatten(1), k.flatten(1), v.flatten(1))


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0, "intermediate_tensors": 0, "inputs_embeds": 0})
class Model(qwen3_moe.Qwen3MoeModel):
    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix, decoder_layer_type=Layer)
        # two tables, since kernels read rows without gaps, and vLLM's compiler drops the copies that would close them
        for name, half in zip(
            ("cos", "sin"), self.layers[0].self_attn.rotary_emb.cos_sin_cache.chunk(2, -1), strict=True
        ):
            self.register_buffer(name, half.to(vllm_config.model_config.dtype).contiguous(), persistent=False)
        # the residual stream of a step, where no compiler sees that operators write over it
        shape = vllm_config.scheduler_config.max_num_batched_tokens, self.config.hidden_size
        self.register_buffer("stream", self.cos.new_empty(shape), persistent=False)
        # attention's builder writes it at each step; before the first one, all tokens count
        count = torch.full((), shape[0], dtype=torch.int32, device=self.cos.device)
        self.register_buffer("true_tokens", count, persistent=False)
        for layer in self.layers:
            layer.share(self.stream, self.true_tokens)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        x = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        if all(layer.joins for layer in self.layers):
            return self._joined(x, cos, sin)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def _joined(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first = self.layers[0]
        projections = [(layer.input_layernorm.weight, layer.self_attn.qkv_proj.weight) for layer in self.layers]
        norm, weight = projections[0]
        x = OPS.begin_stream(x, norm, first.eps, weight, first.experts_name)
        for layer, after in zip(self.layers, [*projections[1:], (self.norm.weight, None)], strict=True):
            attended = layer.attend(x, cos, sin)
            weights = layer.self_attn.o_proj.weight, *layer.route(), *after
            x = OPS.linear_experts(attended, *weights, layer.experts_name)
        return x


class Qwen3Moe(qwen3_moe.Qwen3MoeForCausalLM):
    """vLLM's model with these layers; vLLM's own layers where these do not serve."""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        reason = model_gate.why_not(vllm_config)
        if reason is not None:
            say.warning(f"Qwen3-MoE stays with vLLM, whose experts may be served: {reason}")
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            return
        nn.Module.__init__(self)
        config = vllm_config.model_config.hf_text_config
        self.config, self.quant_config = config, None
        if model_gate.own_attention(vllm_config):
            register_backend(ATTENTION, f"{attention.__name__}.{attention.Backend.__qualname__}")
            vllm_config.attention_config.backend = ATTENTION
        self.model = Model(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        first = self.model.layers[0]
        if first.paged:
            own = first.self_attn
            norms = HeadNorms(own.q_norm.weight.detach(), own.k_norm.weight.detach(), config.rms_norm_eps)
            attention.compile_prompts(own.num_heads, own.num_kv_heads, norms, vllm_config.model_config.max_model_len)
        decode_linear.compile_ahead(first.self_attn.qkv_proj.weight, norm=True)
        decode_linear.compile_ahead(first.self_attn.o_proj.weight, add=first.first)
        head = maybe_prefix(prefix, "lm_head")
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=head)
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors
        self.expert_weights: list[Any] = []
        self.moe_layers = [experts for layer in self.model.layers if (experts := getattr(layer.mlp, "experts", None))]
        self.num_moe_layers = len(self.moe_layers)
        say.info("runs Qwen3-MoE whole" + ("" if first.paged else ", but for attention"))
