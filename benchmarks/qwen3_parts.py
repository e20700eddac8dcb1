"""Which part of Qwen3-MoE a kernel of a trace belongs to, and the time of each part.

A layer's kernels come in one order; head_norm_rope, attention and the router's last kernel say where in it a kernel
stands. The last layer of a prefill has two of the first: qkv of the tokens whose logits are wanted comes before
attention. A kernel's time runs from the end of the kernel before to its own end. So the parts add up to the step, gaps
included, and kernels that overlap (programmatic dependent launch) count once.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

PARTS = ("norms", "qkv", "q/k norm, RoPE, cache", "attention", "out", "router", "top-k", "experts", "head", "rest")

_ATTENTION = re.compile(r"decode_attention|merge_attention|prefill_attention|flash|fmha|attention", re.I)
_PRODUCT = re.compile(r"few_linear|decode_linear|gemm|nvjet|cutlass|cublas|splitk|xmma|ampere_|sm90_|sm80_", re.I)
_NORM = re.compile(r"rms_norm")
_ROUTER_ENDS = re.compile(r"router_topk|norm_route")
_EXPERTS = re.compile(
    r"few_gate_up|few_down|routing_|gate_up|grouped_matmul|grouped_mlp|combine|silu_mul|mxfp4|int4_24|mx_quantise"
)


@dataclass(frozen=True)
class Kernel:
    """Something that ran on the device; times in microseconds."""

    name: str
    start: float
    end: float


def kernels_of(trace: dict[str, Any]) -> list[Kernel]:
    """Kernels and copies of a trace that torch.profiler wrote, in the order in which they began."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [
        Kernel(event["name"], event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event.get("cat") in kinds
    ]
    return sorted(found, key=lambda kernel: kernel.start)


def steps_of(kernels: Iterable[Kernel]) -> list[list[Kernel]]:
    """Split where tokens go to the host."""
    steps: list[list[Kernel]] = [[]]
    for kernel in kernels:
        steps[-1].append(kernel)
        if "DtoH" in kernel.name:
            steps.append([])
    return [step for step in steps if step]


def label(names: Sequence[str]) -> list[str]:
    """The part of each kernel of one forward pass, by name and place."""
    out: list[str] = []
    place, seen_out, last = "before", False, max((i for i, n in enumerate(names) if _ROUTER_ENDS.search(n)), default=-1)
    for i, name in enumerate(names):
        if "head_norm_rope" in name:
            place, seen_out = "keys", False
            out.append("q/k norm, RoPE, cache")
        elif "router_logits" in name:
            out.append("router")
        elif _ROUTER_ENDS.search(name):
            place = "last" if i == last else "before"
            out.append("top-k" if "router_topk" in name else "router")
        elif place in ("keys", "attention") and _ATTENTION.search(name):
            place, seen_out = "attention", False
            out.append("attention")
        elif _EXPERTS.search(name):
            out.append("experts")
        elif _NORM.search(name):
            seen_out = True
            out.append("norms")
        elif _PRODUCT.search(name):
            if place == "attention":
                out.append("router" if seen_out else "out")
                # without a norm between them: the first product is the one of attention
                seen_out = seen_out or "few_linear" in name or "decode_linear" in name
            else:
                out.append("head" if place == "last" else "qkv")
        else:
            out.append("rest")
    return out


def times(kernels: Sequence[Kernel]) -> dict[str, tuple[float, int]]:
    """Microseconds and number of kernels of each part of one forward pass."""
    total: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    before = kernels[0].start
    for kernel, part in zip(kernels, label([kernel.name for kernel in kernels]), strict=True):
        total[part] += max(0.0, kernel.end - before)
        count[part] += 1
        before = max(before, kernel.end)
    return {part: (total[part], count[part]) for part in PARTS if part in total}
