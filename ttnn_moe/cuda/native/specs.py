"""The kernels that a plan launches, as the JIT knows them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ...jit.spec import Spec
from .plan import Few, Plan, Sorted

ARCH = "sm_90a"


@dataclass(frozen=True)
class Types:
    """What a call's tensors are: fp16 (else bf16), int64 ids, an fp32 output, an output that is added to."""

    fp16: bool = False
    ids64: bool = False
    out32: bool = False
    add: bool = False


@dataclass(frozen=True)
class Use:
    """A kernel and the dynamic shared memory of its blocks, bytes."""

    spec: Spec
    shared_memory: int = 0


@lru_cache(maxsize=4096)
def uses_of(plan: Plan, E: int, K: int, types: Types) -> tuple[Use, ...]:
    """The launches of one call, in their order: few_gate_up, few_down; or sort, both products, combine."""
    out = {"FP16": types.fp16, "TOP_K": K, "OUT32": types.out32, "ADD": types.add}
    if isinstance(plan, Few):
        ids = {"FP16": types.fp16, "ID64": types.ids64}
        sizes = {"WARPS": plan.warps, "CHANNELS": plan.channels, "UNROLL": plan.unroll}
        return (
            Use(Spec.of("common/few_gate_up", ARCH, **ids, **sizes)),
            Use(Spec.of("common/few_down", ARCH, **(ids | out), COLUMNS=plan.columns, PREFETCH=plan.prefetch)),
        )
    assert isinstance(plan, Sorted)
    gemm = plan.gemm
    sizes = {
        "FP16": types.fp16, "MAX_N": gemm.max_n, "STAGES": gemm.stages, "WEIGHT_ROWS": gemm.weight_rows,
    }  # fmt: skip
    sort = Spec.of(
        "common/routing_sort", ARCH, ID64=types.ids64, CLUSTER=plan.sort_cluster, THREADS=plan.sort_threads
    )  # fmt: skip
    return (
        Use(sort, (plan.sort_threads // 32 + 2) * E * 4),
        Use(Spec.of("sm90/grouped_mlp", ARCH, **sizes), gemm.shared_memory),
        Use(Spec.of("common/combine", ARCH, **out)),
    )
