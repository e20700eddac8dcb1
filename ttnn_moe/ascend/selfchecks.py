"""Each of torch_npu's operators alone, against its page's formula in plain torch: for `ttnn-moe selfcheck`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..selfcheck.check import Check
from .run import grouped_matmul, routing_options

T, E, K, H, I = 37, 8, 3, 128, 64


def checks(npu: Any, device: str) -> Iterator[Check]:
    """Checks of npu_moe_init_routing_v2, npu_grouped_matmul, npu_swiglu and npu_moe_token_unpermute."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=g).bfloat16()
    # E is "no expert", and expert 2 has no token
    ids = torch.randint(0, E + 1, (T, K), generator=g, dtype=torch.int32)
    ids[ids == 2] = 3
    order = ids.flatten().sort(stable=True).indices
    counts = torch.bincount(ids.flatten(), minlength=E + 1)
    row_of_pair = order.argsort().int()
    routed: list[tuple[str, Tensor]] = [
        ("rows", hidden[order // K]),
        ("index", row_of_pair[:, None]),
        ("counts", counts[:, None]),
    ]

    def route(i: int) -> Tensor:
        options = routing_options(T, K, E)
        made = npu.npu_moe_init_routing_v2(hidden.to(device), ids.to(device), **options)[i]
        return made if made.dim() == 2 else made[:, None]

    for i, (what, want) in enumerate(routed):
        yield Check(f"npu_moe_init_routing_v2: {what}", lambda i=i: route(i), lambda want=want: want, 0.0)  # type: ignore[misc]

    held = counts[:-1]
    n, x = int(held.sum()), hidden[order // K]
    group = ids.flatten()[order][:n].long()
    for what, weight in (
        ("groups that end before the rows do", torch.randn(E, H, 2 * I, generator=g).bfloat16()),
        ("transposed weights", torch.randn(E, 2 * I, H, generator=g).bfloat16().transpose(1, 2)),
    ):
        # moved with its strides
        there = weight.transpose(1, 2).to(device).transpose(1, 2) if "transposed" in what else weight.to(device)
        yield Check(
            f"npu_grouped_matmul: {what}",
            lambda there=there: grouped_matmul(npu, x.to(device), there, held.to(device))[:n],  # type: ignore[misc]
            lambda weight=weight: torch.einsum("rh,rhn->rn", x[:n].float(), weight.float()[group]),  # type: ignore[misc]
            1e-2,
        )
    one = torch.randn(1, H, 2 * I, generator=g).bfloat16()
    yield Check(
        "npu_grouped_matmul: one group",
        lambda: grouped_matmul(npu, x.to(device), one.to(device), held.sum()[None].to(device))[:n],
        lambda: x[:n].float() @ one[0].float(),
        1e-2,
    )
    both = torch.randn(T * K, 2 * I, generator=g).bfloat16()
    yield Check(
        "npu_swiglu: the first half is the gate, rounded once",
        lambda: npu.npu_swiglu(both.to(device), dim=-1),
        lambda: torch.nn.functional.silu(both[:, :I].float()) * both[:, I:].float(),
        4e-3,
    )
    probs = torch.rand(T, K, generator=g)
    for dtype, bound in ((torch.bfloat16, 4e-3), (torch.float32, 1e-6)):
        rows = torch.randn(T * K, H, generator=g).to(dtype)
        yield Check(
            f"npu_moe_token_unpermute: {str(dtype).removeprefix('torch.')} rows, fp32 weights, summed in fp32",
            lambda rows=rows: npu.npu_moe_token_unpermute(  # type: ignore[misc]
                rows.to(device), row_of_pair.to(device), probs=probs.to(device)
            ),
            lambda rows=rows: (rows.float()[row_of_pair.long()].view(T, K, H) * probs[..., None]).sum(1),  # type: ignore[misc]
            bound,
        )
