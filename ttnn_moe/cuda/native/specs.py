"""The kernels that a plan launches, as the JIT knows them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..jit.spec import Spec
from .plan import Few, Gemm, Plan, Sorted, sort_memory


@dataclass(frozen=True)
class Types:
    """What a call's tensors are: fp16 (else bf16), int64 ids, an fp32 output, an output that is added to."""

    fp16: bool = False
    ids64: bool = False
    out32: bool = False
    add: bool = False


@dataclass(frozen=True)
class Use:
    """A kernel, bytes of dynamic shared memory a block, and whether it may start before its predecessor has ended."""

    spec: Spec
    shared_memory: int = 0
    overlap: bool = True


@lru_cache(maxsize=4096)
def uses_of(plan: Plan, E: int, K: int, types: Types) -> tuple[Use, ...]:
    """The launches of one call, in their order: few_gate_up, few_down; or sort, products (one or two), combine."""
    out = {"FP16": types.fp16, "TOP_K": K, "OUT32": types.out32, "ADD": types.add}

    def use(name: str, shared_memory: int = 0, **defines: object) -> Use:
        return Use(Spec.of(name, plan.arch.name, **defines), shared_memory, plan.arch.overlaps)

    if isinstance(plan, Few):
        ids = {"FP16": types.fp16, "ID64": types.ids64}
        return (
            use("common/few_gate_up", **ids, WARPS=plan.warps, CHANNELS=plan.channels, UNROLL=plan.unroll),
            use("common/few_down", **(ids | out), COLUMNS=plan.columns, PREFETCH=plan.prefetch),
        )
    assert isinstance(plan, Sorted)
    gemm, threads = plan.gemm, plan.sort_threads
    sizes = {"FP16": types.fp16, **gemm.defines}
    if isinstance(gemm, Gemm):
        products = [use("sm90/grouped_mlp", gemm.shared_memory, **sizes)]
    else:
        products = [use("sm80/grouped_gemm", gemm.shared_memory, GATE_UP=first, **sizes) for first in (True, False)]
    sort = {"ID64": types.ids64, "CLUSTER": plan.sort_cluster, "THREADS": threads}
    return (
        use("common/routing_sort", sort_memory(threads, E), **sort),
        *products,
        use("common/combine", **out, DISCARD=isinstance(gemm, Gemm) and gemm.read_once),
    )
