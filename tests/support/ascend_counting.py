"""What a call asks of an NPU: device operations, copies from the host, and operators that run on the AI CPU.

`meta` stands for the NPU and `cpu` for its host: an operator that gets a tensor of each copies one there. A value that
is read back raises, as meta tensors have none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ascend_stand_in
from ttnn_moe.ascend.backend import AscendBackend
from ttnn_moe.ascend.operators import FORMAT, MATMUL, ROUTE, SWIGLU, UNPERMUTE
from ttnn_moe.backend import Probe

_FLOATS = {torch.float32, torch.float16, torch.bfloat16}
_INTS = {torch.int8, torch.uint8, torch.int32}
_I64, _BOOL = {torch.int64}, {torch.bool}
_ALL = _FLOATS | _INTS | _I64 | _BOOL | {torch.int16}

# The dtypes that each operator takes on a 910B's AI core; with any other it runs on the AI CPU. From the lists for
# DAV_2201 / ASCEND910B of hicann/ops-math (c4193324) and hicann/ops-nn, each in the file that is named.
AI_CORE: dict[str, set[torch.dtype]] = {
    "add": _FLOATS | _INTS | _I64 | _BOOL,  # math/add/op_api/add.cpp
    "sub": _FLOATS | _INTS | _I64 | _BOOL,  # math/sub/op_api/sub.cpp
    "rsub": _FLOATS | _INTS | _I64 | _BOOL,  # the same
    "mul": _FLOATS | _INTS | _I64 | _BOOL,  # math/mul/op_api/mul.cpp
    "floor_divide": _FLOATS | _INTS,  # math/floor_div/op_api/floordiv.cpp
    "ge": _FLOATS | _INTS | _I64,  # math/greater_equal/op_api/greater_equal.cpp
    "gt": _FLOATS | _INTS | _I64,  # math/greater/op_api/greater.cpp
    "lt": _FLOATS | _INTS | _I64 | _BOOL,  # math/less/op_api/less.cpp
    "le": _FLOATS | _INTS | _I64,  # math/less_equal/op_api/less_equal.cpp
    "eq": _FLOATS | _INTS | _I64 | _BOOL,  # math/equal/op_api/equal.cpp
    "bitwise_or": _BOOL,  # math/bitwise_or/op_api/aclnn_bitwise_or_tensor.cpp: LogicalOr
    "bitwise_and": _BOOL,  # math/bitwise_and/op_api/aclnn_bitwise_and_tensor.cpp: LogicalAnd
    "clamp_min": _FLOATS | {torch.int32} | _I64,  # conversion/clip_by_value_v2/op_api/clip_by_value.cpp
    "clamp_max": _FLOATS | {torch.int32} | _I64,  # the same
    "masked_fill": _FLOATS | _BOOL | {torch.int8, torch.int32},  # conversion/masked_fill/op_api/masked_fill.cpp
    "where": _FLOATS | _INTS | _I64,  # math/select/op_api/select.cpp
    "cumsum": _FLOATS | {torch.int32},  # math/cumsum/op_api/cumsum.cpp
    "sum": _FLOATS | {torch.int32} | _I64,  # math/reduce_sum/op_api/reduce_sum_op.cpp
    "any": _BOOL,  # math/reduce_any/op_api/reduce_any.cpp
    "all": _BOOL,  # math/reduce_all/op_api/reduce_all.cpp
    "sort": _FLOATS,  # math/sort/op_api/sort.cpp
    "topk": _FLOATS,  # math/topk/op_api/topk.cpp
    "searchsorted": set(),  # math/search_sorted/op_api/searchsorted.cpp
    "bincount": set(),  # math/bincount/op_api/bincount.cpp
    "scatter": _FLOATS | _INTS,  # ops-nn: index/scatter_elements_v2/op_api/scatter_elements.cpp
    "gather": _FLOATS | _INTS | _I64 | {torch.int16},  # ops-nn: index/gather_elements/op_api/gather_elements.cpp
    "index_select": _ALL,  # ops-nn: index/gather_v2/op_api/gather_v2.cpp
    "arange": _FLOATS | {torch.int32} | _I64,  # math/range/op_api/arange.cpp
    "stack": _ALL,  # conversion/pack/op_api/pack.cpp
    "cat": _ALL,  # conversion/concat_d/op_api/concat_d.cpp
    "zeros": _ALL - {torch.int16},  # math/zero_op/op_api/zero_op.cpp
    "zero": _ALL - {torch.int16},  # the same
    "new_zeros": _ALL - {torch.int16},  # the same
    "zeros_like": _ALL - {torch.int16},  # the same
    "fill": _FLOATS | _I64 | _BOOL | {torch.int8, torch.int32},  # conversion/fill/op_api/fill.cpp
    "new_full": _FLOATS | _I64 | _BOOL | {torch.int8, torch.int32},  # the same
    "scalar_tensor": _FLOATS | _I64 | _BOOL | {torch.int8, torch.int32},  # the same
    "copy": _ALL,  # conversion/view_copy/op_api/view_copy.cpp
    "clone": _ALL,  # the same
    "to_copy": _ALL,  # math/cast/op_api/cast.cpp
}
# op-plugin takes a CPU tensor of no dimension as a number for these; where() and others copy it: op-plugin,
# op_plugin/ops/opapi/WhereKernelNpuOpApi.cpp, unify_tensors_to_npu
TAKES_NUMBERS = ("add", "sub", "mul")
# the dtype of these is that of the result
RESULT_DECIDES = ("cumsum", "sum", "where")
# they make no device operation
FREE = (
    "empty",
    "empty_strided",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "detach",
    "alias",
    "lift_fresh",
    "unsafe_view",
)


class Counting:
    """Within the block, by name and in order: operations, those on the AI CPU, and those that copied from the host."""

    def __init__(self) -> None:
        self.operations: list[str] = []
        self.ai_cpu: list[str] = []
        self.host_copies: list[str] = []
        self._modes = _Factories(self), _Operators(self)

    def __enter__(self) -> Counting:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Factories(TorchFunctionMode):
    """Tensors made of Python's values, which are copied from the host; on meta no operator shows them."""

    def __init__(self, counted: Counting):
        super().__init__()
        self._counted = counted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor) and made.is_meta:
            self._counted.host_copies.append(func.__name__)
        return made


class _Operators(TorchDispatchMode):
    def __init__(self, counted: Counting):
        super().__init__()
        self._counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [leaf for leaf in (*given, *tree_leaves(made)) if isinstance(leaf, Tensor) and leaf.is_meta]
        name = func.overloadpacket.__name__.strip("_")
        if not there or func.is_view or name in FREE:
            return made
        self._counted.operations.append(name)
        from_host = [tensor for tensor in given if not tensor.is_meta]
        if from_host and not (name in TAKES_NUMBERS and all(tensor.dim() == 0 for tensor in from_host)):
            self._counted.host_copies.append(name)
        if func.namespace == "npu":
            return made
        if name not in AI_CORE:
            raise NotImplementedError(f"{name}: say in AI_CORE what it runs on")
        kind = made.dtype if name in RESULT_DECIDES else (given or there)[0].dtype
        if kind not in AI_CORE[name]:
            self._counted.ai_cpu.append(f"{name} of {kind}")
        return made


class OnMeta(AscendBackend):
    """AscendBackend whose NPU is `meta`, and is here."""

    device = "meta"

    @classmethod
    def probe(cls) -> Probe:
        return Probe(True, devices=("meta, in place of an NPU",))

    def npu(self) -> Any:
        return npu()


def npu() -> Any:
    """The stand-in's operators, which know shapes too."""
    module = ascend_stand_in.npu()
    if not _SHAPES and not ascend_stand_in.real():
        library = torch.library.Library("npu", "IMPL", "Meta")
        for name, function in _SHAPE_FUNCTIONS.items():
            library.impl(name, function)
        _SHAPES.append(library)
    return module


_SHAPES: list[object] = []


def _route(x: Tensor, expert_idx: Tensor, *, active_expert_range: Any = (), **options: Any) -> tuple[Tensor, ...]:
    pairs, (start, end) = expert_idx.numel(), active_expert_range
    ints = {"dtype": torch.int32, "device": x.device}
    counts = torch.empty(end - start, dtype=torch.int64, device=x.device)
    return x.new_empty(pairs, x.shape[1]), torch.empty(pairs, **ints), counts, torch.empty(pairs, device=x.device)


_SHAPE_FUNCTIONS: dict[str, Any] = {
    ROUTE: _route,
    MATMUL: lambda x, weight, **options: [x[0].new_empty(len(x[0]), weight[0].shape[-1])],
    SWIGLU: lambda input, dim=-1: input.new_empty(*input.shape[:-1], input.shape[-1] // 2),
    UNPERMUTE: lambda tokens, indices, probs=None, **options: tokens.new_empty(len(probs), tokens.shape[1]),
    FORMAT: lambda input, acl_format, **options: torch.empty_like(input),
}
