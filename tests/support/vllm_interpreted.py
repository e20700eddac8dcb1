"""The cuda backend in vLLM's layers, its Triton kernels interpreted on the CPU (TRITON_INTERPRET=1): one process."""

from __future__ import annotations

import torch

import vllm_layers
from ttnn_moe.cuda.attention.memory import Memory
from ttnn_moe.kv.attention import decode_attention, norm_rope_write
from ttnn_moe.kv.cache import HeadNorms
from vllm_layers import E, K, applied, call, expected

FP32 = torch.float32

with vllm_layers.engine() as make:
    from ttnn_moe.integrations.vllm import register, served
    from ttnn_moe.integrations.vllm.adapter import dense

    register()
    one, other, given = make(FP32), make(FP32), call(1, FP32)
    w13, w2 = one.w13_weight.data, one.w2_weight.data
    wanted = expected(*given, w13, w2)
    torch.testing.assert_close(applied(one, *given), wanted)

    # layers share scratch, and one whose weights were replaced goes on with it
    space = one.quant_method._served._prepared._space
    assert other.quant_method._served._prepared._space is space
    prepared = other.quant_method._served._prepared
    other.w13_weight.data = w13.clone()
    other.quant_method._served(*given, (other.w13_weight, other.w2_weight), None)
    assert other.quant_method._served._prepared is not prepared
    assert other.quant_method._served._prepared._space is space

    total = torch.zeros_like(wanted)
    for here in torch.randperm(E).chunk(2):
        expert_map = torch.full((E,), -1, dtype=torch.int32)
        expert_map[here] = torch.arange(len(here), dtype=torch.int32)
        layer = served.ServedLayer(dense, E, K, 64, FP32)
        total += layer(*given, (w13[here], w2[here]), expert_map)
        # vLLM saves and restores its own map (sleep mode): kernels read that one
        assert layer._prepared._parts[0][1] is expert_map  # type: ignore[union-attr]
    torch.testing.assert_close(total, wanted)
# a decode step over vLLM's block table: rows are query_start_loc, int32, whose last is the number of tokens
keys, values = torch.zeros(2, 9, 2, 16, 64, dtype=torch.float16)
starts, positions = torch.tensor([0, 1, 2, 2], dtype=torch.int32), torch.tensor([0, 0, 250])
blocks = torch.tensor([[3, 1, 7], [2, 5, 4], [0, 0, 0]], dtype=torch.int32)
memory = Memory(keys, values, starts[:-1], positions, starts[-1], blocks)
qkv, ones, zeros = torch.randn(3, 8, 64).half(), torch.ones(64).half(), torch.zeros(3, 1, 32).half()
q = norm_rope_write(qkv, HeadNorms(ones, ones, 1e-6), (zeros + 1, zeros), memory)
assert q is not None and values[3, :, 0].equal(qkv[0, 6:]) and values[2, :, 0].equal(qkv[1, 6:])
assert not values[0].any(), "padding writes nothing"
attended = decode_attention(q, memory, memory.capacity)
torch.testing.assert_close(attended[:2], qkv[:2, 6:].repeat_interleave(2, 1))
assert not attended[2].any()
print("passed")
