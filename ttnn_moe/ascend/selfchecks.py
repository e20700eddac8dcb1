"""Each of torch_npu's operators alone, against its page's formula in plain torch: for `ttnn-moe selfcheck`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..selfcheck.check import Check, repeated
from .run import grouped_matmul, routing_options

T, E, K, H, I = 37, 8, 3, 128, 64
# tokens and sizes of Qwen3-30B-A3B's layer, for times: one token, a decode batch, a chunk of a prompt
QWEN3_TOKENS, QWEN3 = (1, 32, 512), (128, 8, 2048, 768)


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
        yield Check(f"npu_moe_init_routing_v2: {what}", partial(route, i), partial(_same, want), 0.0)

    held = counts[:-1]
    n, x = int(held.sum()), hidden[order // K]
    group = ids.flatten()[order][:n].long()

    def product(weight: Tensor, groups: Tensor) -> Tensor:
        return grouped_matmul(npu, x.to(device), weight, groups.to(device))[:n]

    def wanted(weight: Tensor) -> Tensor:
        return torch.einsum("rh,rhn->rn", x[:n].float(), weight.float()[group])

    for what, weight in (
        ("groups that end before the rows do", torch.randn(E, H, 2 * I, generator=g).bfloat16()),
        ("transposed weights", torch.randn(E, 2 * I, H, generator=g).bfloat16().transpose(1, 2)),
    ):
        # moved with its strides
        there = weight.transpose(1, 2).to(device).transpose(1, 2) if "transposed" in what else weight.to(device)
        yield Check(f"npu_grouped_matmul: {what}", partial(product, there, held), partial(wanted, weight), 1e-2)
    one = torch.randn(1, H, 2 * I, generator=g).bfloat16()
    yield Check(
        "npu_grouped_matmul: one group",
        lambda: product(one.to(device), held.sum()[None]),
        lambda: x[:n].float() @ one[0].float(),
        1e-2,
    )
    skewed = torch.zeros_like(held)
    skewed[-1] = n
    last = torch.randn(E, H, 2 * I, generator=g).bfloat16()
    yield Check(
        "npu_grouped_matmul: all rows in the last group",
        lambda: product(last.to(device), skewed),
        lambda: x[:n].float() @ last[-1].float(),
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

    def unpermute(rows: Tensor) -> Tensor:
        return npu.npu_moe_token_unpermute(rows.to(device), row_of_pair.to(device), probs=probs.to(device))  # type: ignore[no-any-return]

    def summed(rows: Tensor) -> Tensor:
        return (rows.float()[row_of_pair.long()].view(T, K, H) * probs[..., None]).sum(1)

    for dtype, bound in ((torch.bfloat16, 4e-3), (torch.float32, 1e-6)):
        rows = torch.randn(T * K, H, generator=g).to(dtype)
        name = f"npu_moe_token_unpermute: {str(dtype).removeprefix('torch.')} rows, fp32 weights, summed in fp32"
        yield Check(name, partial(unpermute, rows), partial(summed, rows), bound)

    def chain() -> Tensor:
        there, weight, options = hidden.to(device), last.to(device), routing_options(T, K, E)
        sorted_rows, index, found, _ = npu.npu_moe_init_routing_v2(there, ids.to(device), **options)
        act = npu.npu_swiglu(grouped_matmul(npu, sorted_rows, weight, found[:-1])[:n], dim=-1)
        return torch.cat([act.view(torch.uint8).flatten(), index.view(torch.uint8)])

    yield repeated("operators in a chain", chain)
    if device != "cpu":  # a CPU takes minutes
        for tokens in QWEN3_TOKENS:
            yield from _times(npu, device, tokens)


def _same(want: Tensor) -> Tensor:
    return want


def _times(npu: Any, device: str, tokens: int) -> Iterator[Check]:
    """Each operator of Qwen3-30B-A3B's layer on tensors of the device: what is of interest is its time."""
    experts, k, h, i = QWEN3
    g = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, h, generator=g).bfloat16()
    ids = torch.rand(tokens, experts, generator=g).topk(k).indices.int()
    order = ids.flatten().sort(stable=True).indices
    index, pairs = order.argsort().int(), tokens * k
    rows, probs = hidden[order // k], torch.rand(tokens, k, generator=g)
    # one expert's weights serve all, so that the host need not make gigabytes; the device reads each copy
    up, down = (torch.randn(n, inner, generator=g).bfloat16() for n, inner in ((2 * i, h), (h, i)))
    held = torch.bincount(ids.flatten(), minlength=experts)
    on = {name: tensor.to(device) for name, tensor in {"hidden": hidden, "ids": ids, "rows": rows}.items()}
    counts, at, weights = held.to(device), index.to(device), probs.to(device)
    act, out = (torch.randn(pairs, n, generator=g).bfloat16() for n in (i, h))
    both = torch.randn(pairs, 2 * i, generator=g).bfloat16()
    act_there, out_there, both_there = act.to(device), out.to(device), both.to(device)

    def copies(weight: Tensor) -> Tensor:
        return weight.to(device).expand(experts, *weight.shape).contiguous().transpose(1, 2)

    title = f"of Qwen3-30B-A3B's layer, T={tokens}"
    options = routing_options(tokens, k, experts, none=False)
    yield Check(
        f"npu_moe_init_routing_v2 {title}",
        lambda: npu.npu_moe_init_routing_v2(on["hidden"], on["ids"], **options)[0],
        lambda: rows,
        0.0,
    )
    for what, weight, x, there in (("gate and up", up, rows, on["rows"]), ("down", down, act, act_there)):
        made = copies(weight)
        yield Check(
            f"npu_grouped_matmul {title}, {what}",
            partial(grouped_matmul, npu, there, made, counts),
            partial(_product, x, weight),
            1e-2,
        )
        del made
    yield Check(
        f"npu_swiglu {title}",
        lambda: npu.npu_swiglu(both_there, dim=-1),
        lambda: torch.nn.functional.silu(both[:, :i].float()) * both[:, i:].float(),
        4e-3,
    )
    yield Check(
        f"npu_moe_token_unpermute {title}",
        lambda: npu.npu_moe_token_unpermute(out_there, at, probs=weights),
        lambda: (out.float()[index.long()].view(tokens, k, h) * probs[..., None]).sum(1),
        4e-3,
    )


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return x.float() @ weight.float().t()
