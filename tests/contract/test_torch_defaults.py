"""torch's default dtype and default device change nothing: every tensor that a call makes has its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ttnn_moe
from operator_calls import CALLS, given
from torch_defaults import defaults
from ttnn_moe import Experts, Placement, Problem, Routing
from ttnn_moe.backend import Prepared
from ttnn_moe.formats import int4_24, mxfp4, quantise_int4_24, quantise_mxfp4

E, T, K, H, I = 8, 6, 3, 64, 64
DTYPES = [torch.bfloat16, torch.float16, torch.float64]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32)


def dense() -> Experts:
    return Experts.dense(drawn(E, 2 * I, H), drawn(E, H, I))


def quantised(fmt: str) -> Experts:
    module = {"int4_24": quantise_int4_24, "mxfp4": quantise_mxfp4}[fmt]
    return module.quantise_experts(dense())  # type: ignore[no-any-return]


def routed() -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(0, E, (T, K), generator=torch.Generator().manual_seed(1))
    return drawn(T, H), ids, drawn(T, K).abs()


def layer_of(experts: Experts, D: int) -> Prepared:
    return ttnn_moe.prepare(Problem.of(T, K, experts, torch.float32), experts, Placement.uniform(E, D))


def mesh(fmt: str) -> Callable[[], Tensor]:
    """The whole layer on D=4, with experts that were made under the usual defaults."""
    experts, x = (dense() if fmt == "dense" else quantised(fmt)), routed()
    return lambda: layer_of(experts, 4)(*x)


def calibrated() -> Callable[[], Tensor]:
    experts, (hidden, ids, weights) = dense(), routed()
    routing = Routing.from_topk(ids, weights, E)
    return lambda: words_of(quantise_int4_24.quantise_experts(experts, hidden, routing))


def words_of(experts: Experts) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in experts.tensors.values()])


def made() -> dict[str, Callable[[], Tensor]]:
    """Calls on tensors that are all made; each returns what it computes."""
    weights = drawn(E, 2 * I, H)
    words, pair = quantise_int4_24.quantise(weights), quantise_mxfp4.quantise(weights)
    arranged = ttnn_moe.arrange(quantised("mxfp4"))
    experts = dense()
    return {
        "mesh dense": mesh("dense"),
        "mesh int4_24": mesh("int4_24"),
        "mesh mxfp4": mesh("mxfp4"),
        "arranged": lambda: layer_of(arranged, 1)(*routed_once),
        "int4_24 quantise": lambda: words_of(quantise_int4_24.quantise_experts(experts)),
        "int4_24 calibrated": calibrated(),
        "int4_24 rounded": lambda: quantise_int4_24.rounded(weights),
        "int4_24 dequantise": lambda: int4_24.dequantise(words),
        "mxfp4 quantise": lambda: words_of(quantise_mxfp4.quantise_experts(experts)),
        "mxfp4 dequantise": lambda: mxfp4.dequantise(*pair),
        "mxfp4 dequantise fp64": lambda: mxfp4.dequantise(*pair, torch.float64),
    }


routed_once = routed()
MADE = made()
WANT = {name: call() for name, call in MADE.items()}


def check_same(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype and got.device == want.device
    assert torch.equal(got, want)


@dtypes
@pytest.mark.parametrize("name", MADE)
def test_the_default_dtype_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    with defaults(dtype):
        got = MADE[name]()
    check_same(got, WANT[name])


@pytest.mark.parametrize("name", MADE)
def test_the_default_device_changes_no_bit(name: str) -> None:
    quantise_int4_24._candidates.cache_clear()
    with defaults(device="meta"):
        got = MADE[name]()
    check_same(got, WANT[name])


@pytest.mark.parametrize("way", CALLS)
@pytest.mark.parametrize("default", [*DTYPES, "meta"], ids=str)
def test_every_way_into_the_operator(way: str, default: torch.dtype | str) -> None:
    call, rows = CALLS[way]
    want, x = call(given(rows)), given(rows)
    with defaults(device=default) if isinstance(default, str) else defaults(default):
        got = call(x)
    n = 3 if "bounded" in way or way == "up" else len(want)
    check_same(got[:n], want[:n])


@dtypes
def test_tables_that_are_kept_do_not_have_the_default_dtype(dtype: torch.dtype) -> None:
    """The first call of a process may be the one under another default."""
    quantise_int4_24._candidates.cache_clear()
    with defaults(dtype):
        quantise_int4_24.quantise(drawn(4, 64))
    check_same(quantise_int4_24.quantise(drawn(E, 2 * I, H)).flatten(), words_of_w13())


def words_of_w13() -> Tensor:
    quantise_int4_24._candidates.cache_clear()
    return quantise_int4_24.quantise(drawn(E, 2 * I, H)).flatten()


def test_a_layer_prepared_under_another_default_device_runs_outside_it() -> None:
    experts = dense()
    with defaults(device="meta"):
        layer = layer_of(experts, 4)
    check_same(layer(*routed_once), WANT["mesh dense"])
