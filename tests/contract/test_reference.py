"""The CPU backend beside the contract: memory, workspace, weights that are not read."""

from __future__ import annotations

import pytest
import torch

import ttnn_moe
from processes import run_python
from ttnn_moe import Experts, Problem, Routing, cpu_products
from ttnn_moe.cpu_products import WIDENED_ROWS
from ttnn_moe.reference import BLOCK_ROWS, _blocks
from ttnn_moe.reference_products import products_of

# one layer with Qwen3-30B-A3B's K and I, half of its H and eight experts; prints peak over need
MEMORY = """
import sys, torch
from pathlib import Path
from ttnn_moe import Experts, Routing, moe
T, E, K, H, I = 1024, 8, 8, 1024, 768
dtype = getattr(torch, sys.argv[1])

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

small = Experts.dense(torch.randn(2, 64, 64).to(dtype), torch.randn(2, 64, 32).to(dtype))
ids, weights = torch.randint(0, 2, (9, 2)), torch.rand(9, 2)
moe(torch.randn(9, 64).to(dtype), Routing.from_topk(ids, weights, 2), small)  # what torch loads once
held = memory("VmRSS")
gate_up, down = torch.empty(E, 2 * I, H, dtype=dtype), torch.empty(E, H, I, dtype=dtype)
for e in range(E):
    gate_up[e].normal_(0, 0.02)
    down[e].normal_(0, 0.02)
x = torch.empty(T, H, dtype=dtype).normal_()
routing = Routing.from_topk(torch.rand(T, E).topk(K).indices, torch.rand(T, K), E)
out = moe(x, routing, Experts.dense(gate_up, down))
tensors = (gate_up, down, x, out)
need = sum(t.nbytes for t in tensors) + T * K * (H + I) * x.element_size()
print((memory("VmHWM") - held) / need)
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_memory_is_at_most_twice_the_need(dtype: str) -> None:
    assert 0.5 < float(run_python("-c", MEMORY, dtype).stdout) <= 2.0


def test_blocks_cover_every_row_once() -> None:
    counts = [0, 3, BLOCK_ROWS, 0, 2 * BLOCK_ROWS + 5, 1, 1, 700, 0]
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    blocks = _blocks(starts)
    pieces = [piece for block in blocks for piece in block]
    assert [row for _, a, b in pieces for row in range(a, b)] == list(range(starts[-1]))
    assert all(starts[e] <= a < b <= starts[e + 1] for e, a, b in pieces)
    assert all(block[-1][2] - block[0][1] <= BLOCK_ROWS for block in blocks)
    cut = {e for e, a, b in pieces if (a, b) != (starts[e], starts[e + 1])}
    assert cut == {e for e, n in enumerate(counts) if n > BLOCK_ROWS}, "only an expert with more rows may be cut"


def test_prepared_calls_reuse_the_workspace() -> None:
    """A prepared call allocates its output and the routing's indices, and none of the large buffers."""
    T, E, K, H, I = 64, 8, 2, 256, 128
    experts = Experts.dense(torch.randn(E, 2 * I, H), torch.randn(E, H, I))
    layer = ttnn_moe.prepare(Problem.of(T, K, experts, torch.float32), experts, backend="reference")
    x, ids, weights = torch.randn(T, H), torch.randint(0, E, (T, K)), torch.rand(T, K)
    layer(x, ids, weights)
    with torch.profiler.profile(profile_memory=True) as profile:
        out = layer(x, ids, weights)
    taken = [event.self_cpu_memory_usage for event in profile.events() if event.self_cpu_memory_usage > 0]
    assert max(taken) == out.nbytes
    assert sum(taken) <= out.nbytes + 40 * 8 * (T * K + E)


def test_prepared_and_plain_agree_bit_for_bit() -> None:
    T, E, K, H, I = 33, 8, 3, 64, 64
    experts = Experts.dense(torch.randn(E, 2 * I, H), torch.randn(E, H, I))
    x, ids, weights = torch.randn(T, H), torch.randint(-1, E, (T, K)), torch.rand(T, K)
    layer = ttnn_moe.prepare(Problem.of(2 * T, K, experts, torch.float32), experts)
    assert torch.equal(layer(x, ids, weights), ttnn_moe.moe(x, Routing.from_topk(ids, weights, E), experts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("order", ["halves", "interleaved"])
def test_a_cpu_without_products_of_two_bytes(order: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a product of many rows is one of fp32: the same roundings, all rows of an expert or some."""
    monkeypatch.setattr(cpu_products, "BLOCK_WEIGHTS", 1 << 12)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    E, H, I = 3, 96, 80
    experts = Experts.dense(*((torch.randn(E, *of) / 8).to(dtype) for of in ((2 * I, H), (H, I))), gate_up_order=order)
    fp32 = Experts.dense(*(tensor.float() for tensor in experts.tensors.values()), gate_up_order=order)
    products = products_of(experts, 40, dtype)
    assert products.gate_up_dtype == dtype
    for n, widened in ((WIDENED_ROWS - 1, False), (WIDENED_ROWS, True), (40, True)):
        for name, rows in (("gate_up", None), ("gate_up", slice(1, None, 2)), ("gate_up", slice(I)), ("down", None)):
            x = (torch.randn(n, I if name == "down" else H)).to(dtype)
            exact = x.float() @ fp32.tensors[name][2, slice(None) if rows is None else rows].T
            out = torch.full(exact.shape, torch.nan, dtype=dtype)
            with monkeypatch.context() as patch:
                if widened:
                    patch.setattr(torch, "mm", None)
                products.multiply(x, name, 2, out, rows)
            torch.testing.assert_close(out.float(), exact, rtol=2.0**-8, atol=1e-3)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [WIDENED_ROWS - 1, WIDENED_ROWS, 70])
def test_a_linear_layer_on_a_cpu_without_products_of_two_bytes(
    rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_products, "BLOCK_WEIGHTS", 1 << 10)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    x, weight = torch.randn(rows, 96).bfloat16(), (torch.randn(70, 96) / 8).bfloat16()
    add = torch.randn(70).bfloat16() if bias else None
    exact = x.float() @ weight.float().T + (0 if add is None else add.float())
    with monkeypatch.context() as patch:
        if rows >= WIDENED_ROWS:
            patch.setattr(torch.nn.functional, "linear", None)
        out = cpu_products.linear(x, weight, add)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), exact, rtol=2.0**-8, atol=1e-3)


def test_which_products_are_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    def widens(capability: str, rows: int = 12, dtype: torch.dtype = torch.bfloat16) -> bool:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        return cpu_products.widens(dtype, rows)

    assert widens("AVX2")
    for others in (widens("AVX512"), widens("AVX2", 11), widens("AVX2", dtype=torch.float32)):
        assert not others


BROKEN = {"twice": [2, 2], "none": [-1, 2], "beyond": [0, 5], "int64 beyond": [0, 2**40]}


@pytest.mark.parametrize("how", ["eager", "prepared"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_of_distinct_ids_is_found_where_asked_for(
    name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unasked, the backend does not rely on the promise: the numbers are right."""
    T, E, H, I = 4, 5, 16, 8
    hidden, weights = torch.randn(T, H), torch.rand(T, 2)
    experts = Experts.dense(torch.randn(E, 2 * I, H), torch.randn(E, H, I))
    ids = torch.tensor([[0, 1], [2, 3], BROKEN[name], [4, 4]])
    bound = torch.tensor(3, dtype=torch.int32)

    def call(promise: str, n: torch.Tensor | None = bound) -> torch.Tensor:
        if how == "prepared":
            layer = ttnn_moe.prepare(Problem.of(T, 2, experts, torch.float32), experts, ids=promise)
            return layer(hidden, ids, weights, num_tokens=n)
        return ttnn_moe.moe(hidden, Routing.from_topk(ids, weights, E, num_tokens=n), experts, ids=promise)

    assert torch.equal(call("distinct")[:3], call("any")[:3])
    monkeypatch.setenv("TTNN_MOE_CHECK_IDS", "1")
    with pytest.raises(ttnn_moe.ContractError, match=r"not at t=2, k=\d \(1 in all\).*without ids='distinct'"):
        call("distinct")
    with pytest.raises(ttnn_moe.ContractError, match=r"2 in all"):
        call("distinct", None)  # row 3 names an expert twice; past num_tokens it did not count
    call("any")
    ids[2:] = torch.tensor([4, 0])
    call("distinct", None)
