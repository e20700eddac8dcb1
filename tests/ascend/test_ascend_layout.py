"""Expert weights as npu_grouped_matmul reads them: in place, or in the format FRACTAL_NZ."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import ascend_stand_in
from ttnn_moe import Experts, Problem, Routing
from ttnn_moe.ascend import kernels, path
from ttnn_moe.ascend.layout import weights_of


@pytest.fixture(scope="module")
def npu() -> Any:
    return ascend_stand_in.npu()


def _inputs(T: int, E: int, K: int, H: int, I: int):
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(T, H, generator=g).bfloat16()
    gate_up = torch.randn(E, 2 * I, H, generator=g).bfloat16()
    experts = Experts.dense(gate_up, torch.randn(E, H, I, generator=g).bfloat16())
    ids = torch.randint(-1, E, (T, K), generator=g, dtype=torch.int32)
    return hidden, Routing.from_topk(ids, torch.rand(T, K, generator=g), E), experts


def test_weights_are_laid_out_once() -> None:
    _, _, experts = _inputs(1, 4, 1, 16, 8)
    made = weights_of(experts)
    assert weights_of(experts) is made
    assert made.gate_up.data_ptr() == experts.tensors["gate_up"].data_ptr(), "the Hugging Face layout is used in place"
    mixed = experts.tensors["gate_up"].view(4, 2, 8, 16).transpose(1, 2).reshape(4, 16, 16)
    interleaved = Experts.dense(mixed, experts.tensors["down"], gate_up_order="interleaved")
    assert torch.equal(weights_of(interleaved).gate_up, made.gate_up)


@pytest.mark.parametrize("E", [1, 4])
@pytest.mark.parametrize("order", ["halves", "interleaved"])
def test_weights_in_fractal_nz(npu: Any, order: str, E: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, from a copy that is made once; the steps go on reading the weights in place."""
    hidden, routing, experts = _inputs(9, E, 2, 32, 16)
    experts = Experts.dense(*experts.tensors.values(), gate_up_order=order)
    n = int(routing.step_layout().row_start[-1])
    backend, outs = ascend_stand_in.OnCpu(), []
    for switch in ("", "0", "1"):
        monkeypatch.setenv("TTNN_MOE_ASCEND_NZ", switch)
        outs.append(backend.moe_new(hidden, routing, experts))
        outs.append(backend.gate_up(hidden, routing, experts, 1)[:n])
    assert all(torch.equal(outs[i], out) for i in (0, 1) for out in outs[i::2])
    cast = path.weights(npu, experts)
    assert path.weights(npu, experts) is cast and cast is not weights_of(experts)
    assert cast.gate_up.acl_format == cast.down.acl_format == 29 and cast.down.is_contiguous()  # type: ignore[attr-defined]
    assert npu.npu.config.allow_internal_format, "else the cast changes nothing"


@pytest.mark.parametrize("nz", ["0", "1"])
@pytest.mark.parametrize("order", ["halves", "interleaved"])
def test_weights_that_changed_in_place_are_laid_out_again(
    order: str, nz: str, npu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTNN_MOE_ASCEND_NZ", nz)
    hidden, routing, experts = _inputs(9, 4, 2, 32, 16)
    experts = Experts.dense(*experts.tensors.values(), gate_up_order=order)
    backend = ascend_stand_in.OnCpu()
    backend.moe_new(hidden, routing, experts)
    for name, change in (("gate_up", -2), ("down", 3)):
        experts.tensors[name].mul_(change)
        fresh = Experts.dense(*(x.clone() for x in experts.tensors.values()), gate_up_order=order)
        assert torch.equal(backend.moe_new(hidden, routing, experts), backend.moe_new(hidden, routing, fresh))
        made = path.weights(npu, experts)
        assert path.weights(npu, experts) is made


@pytest.mark.parametrize("order", ["halves", "interleaved"])
def test_other_memory_behind_the_weights_is_seen(order: str, npu: Any) -> None:
    """As `module.to(...)` and `parameter.data = x` put there."""
    hidden, routing, experts = _inputs(9, 4, 2, 32, 16)
    experts = Experts.dense(*experts.tensors.values(), gate_up_order=order)
    backend = ascend_stand_in.OnCpu()
    backend.moe_new(hidden, routing, experts)
    for tensor in experts.tensors.values():
        tensor.data = tensor.data * -2
    fresh = Experts.dense(*(x.clone() for x in experts.tensors.values()), gate_up_order=order)
    assert torch.equal(backend.moe_new(hidden, routing, experts), backend.moe_new(hidden, routing, fresh))


def test_inference_tensors_have_no_versions() -> None:
    with torch.inference_mode():
        experts = Experts.dense(torch.zeros(4, 16, 16).bfloat16(), torch.zeros(4, 16, 8).bfloat16())
    assert weights_of(experts) is weights_of(experts)


@pytest.mark.parametrize(
    "switch, sizes, words",
    [
        ("1", (24, 16), "multiples of 16, not H=24, I=16"),
        ("1", (16, 8), "not H=16, I=8"),
        ("1", (32, 32), None),
        ("1", (32, 32752), None),
        ("1", (32, 32768), "2I to be under 65536, not I=32768"),
    ],
)
def test_sizes_that_fractal_nz_cannot_hold(
    switch: str, sizes: tuple[int, int], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTNN_MOE_ASCEND_NZ", switch)
    reason = ascend_stand_in.OnCpu().why_not(Problem(4, 8, 2, *sizes))
    assert (reason is None) if words is None else (reason is not None and words in reason)


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("NZ", "yes", "TTNN_MOE_ASCEND_NZ is no switch; got 'yes'; expected 0 or 1"),
        ("KERNELS", "cube", "TTNN_MOE_ASCEND_KERNELS is not a path; got 'cube'; expected operators or triton"),
        ("KERNELS", "triton", "TTNN_MOE_ASCEND_KERNELS=triton needs Triton, and it does not load"),
    ],
)
def test_what_the_environment_asks_for_in_vain_is_a_reason(
    name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else `why` and `prepare` promise what the first call refuses."""
    monkeypatch.setenv(f"TTNN_MOE_ASCEND_{name}", value)
    monkeypatch.setitem(sys.modules, "triton", None)
    for module in ("combine", "gate_up"):
        monkeypatch.delitem(sys.modules, f"ttnn_moe.gpu_kernels.ascend.{module}", raising=False)
    kernels.load.cache_clear()
    reason = str(ascend_stand_in.OnCpu().why_not(Problem(4, 8, 2, 16, 16)))
    assert words in reason and f"unset TTNN_MOE_ASCEND_{name}" in reason
