"""The cuda backend in vLLM's layers, its Triton kernels interpreted on the CPU (TRITON_INTERPRET=1): one process."""

from __future__ import annotations

import torch

import vllm_layers
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
print("passed")
