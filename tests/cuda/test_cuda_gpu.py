"""What only a GPU shows: graphs, torch.compile, bit-equal repetition, real sizes, random draws."""

from __future__ import annotations

import random

import pytest
import torch

import ttnn_moe
from assertions import assert_close
from cuda_gpus import no_host_sync
from cuda_layers import assert_same_bits, random_experts, random_routing, replays
from ttnn_moe import Experts, Problem, Routing, registry
from ttnn_moe.cuda.arch import HOPPER, target_of
from ttnn_moe.cuda.jit import load
from ttnn_moe.cuda.moe.uses import Use
from ttnn_moe.selfcheck.bounds import poisoned
from ttnn_moe.selfcheck.oracle import oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not registry.probe("cuda").available, reason=f"cuda: {registry.probe('cuda').reason}"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]


def _want(hidden: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
    problem = Problem.of(routing.T, routing.K, experts, hidden.dtype)
    numerics = registry.choose(problem, "cuda").numerics(problem)
    there = Experts.dense(*(experts.tensors[name].cpu() for name in ("gate_up", "down")))
    return oracle(hidden.cpu(), routing.topk_ids.cpu(), routing.topk_weights.cpu(), there, numerics)


@pytest.mark.parametrize("T", [1, 2, 8, 9, 40, 130, 700])
def test_qwen3_sizes(T: int) -> None:
    experts, routing = random_experts(16, 2048, 768), random_routing(T, 16, 8)
    hidden = torch.randn(T, 2048, device="cuda").bfloat16()
    out = poisoned(T, 2048, dtype=torch.bfloat16, device="cuda")
    ttnn_moe.moe(hidden, routing, experts, out=out, backend="cuda")
    assert_close(out.cpu(), _want(hidden, routing, experts), torch.bfloat16, f"T={T}")


@pytest.mark.parametrize("seed", range(40))
def test_random_draws(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    E = rng.choice([1, 3, 8, 60])
    T, K = rng.choice([1, 5, 16, 77, 300, 1500]), rng.randint(1, min(E, 10))
    H, I = (rng.choice([8, 40, 64, 200, 512]) for _ in range(2))
    dtype = rng.choice([torch.bfloat16, torch.float16])
    experts, routing = random_experts(E, H, I, dtype), random_routing(T, E, K, rng.choice([0.0, 0.5]))
    hidden = torch.randn(T, H, device="cuda").to(dtype)
    out = poisoned(T, H, dtype=dtype, device="cuda")
    ttnn_moe.moe(hidden, routing, experts, out=out, backend="cuda")
    assert_close(out.cpu(), _want(hidden, routing, experts), dtype, f"T={T} E={E} K={K} H={H} I={I}")


@pytest.mark.parametrize("T", [1, 7, 64, 4096])
def test_twenty_repetitions_have_the_same_bits(T: int) -> None:
    assert_same_bits(T)


@pytest.mark.parametrize("T", [1, 100, 1000])
def test_a_graph_serves_every_routing(T: int) -> None:
    experts = random_experts(32, 256, 128)
    for hidden, routing, out in replays(experts, T, 8):
        assert_close(out.cpu(), _want(hidden, routing, experts), torch.bfloat16, "replayed")


def test_torch_compile_and_no_synchronisation() -> None:
    T, E, K, H, I = 100, 8, 2, 128, 64
    experts, routing = random_experts(E, H, I), random_routing(T, E, K)
    hidden = torch.randn(T, H, device="cuda").bfloat16()
    gate_up, down = experts.tensors["gate_up"], experts.tensors["down"]

    def block(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return ttnn_moe.moe(x * 2, Routing.from_topk(ids, weights, E), Experts.dense(gate_up, down)) + 1

    want = block(hidden, routing.topk_ids, routing.topk_weights)
    with no_host_sync():
        block(hidden, routing.topk_ids, routing.topk_weights)
    compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        got = compiled(hidden, routing.topk_ids, routing.topk_weights).clone()
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("carveout", [None, 0, 50])
def test_a_kernel_has_the_carveout_that_its_launch_asks_for(carveout: int | None) -> None:
    from cuda.bindings import driver

    use = Use.of(target_of().arch or HOPPER, "common/few_down", TOP_K=8)
    loaded = load.kernel(use.spec, torch.cuda.current_device(), 0, carveout)
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    status, value = driver.cuKernelGetAttribute(attribute, loaded.handle, torch.cuda.current_device())
    assert int(status) == 0 and value == (-1 if carveout is None else carveout)
