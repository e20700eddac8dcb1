"""The model's Triton kernels against the torch forms of ttnn_moe/decoder and ttnn_moe/kv, over random sizes.

Run by test_qwen3_kernels.py in a process of its own: with TRITON_INTERPRET=1 on the CPU, or on a GPU where one is.
The interpreter takes time for every program, so sizes are smaller there; and dtypes take turns, unless
TTNN_MOE_ALL_DRAWS is set.
"""

from __future__ import annotations

import os
import random

import pytest
import torch
from torch import Tensor

from cuda_gpus import runs_hopper_code
from ttnn_moe import decoder
from ttnn_moe.cuda.attention import head_norm_rope
from ttnn_moe.cuda.attention.memory import Memory
from ttnn_moe.cuda.linear import decode_linear, few_rows
from ttnn_moe.cuda.router import clustered, sliced
from ttnn_moe.kv import attention, torch_forms
from ttnn_moe.kv.cache import HeadNorms

GPU = torch.cuda.is_available()
HOPPER = runs_hopper_code()
DEVICE = "cuda" if GPU else "cpu"
# Triton's interpreter has no bf16 products
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if GPU else [torch.float32, torch.float16]
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def draws(seeds: int) -> pytest.MarkDecorator:
    """Seeds by dtypes; in the interpreter one dtype a seed, in turns."""
    every = GPU or bool(os.environ.get("TTNN_MOE_ALL_DRAWS"))
    pairs = [(s, d) for s in range(seeds) for i, d in enumerate(DTYPES) if every or (s + s // 2) % len(DTYPES) == i]
    return pytest.mark.parametrize(("seed", "dtype"), pairs, ids=str)


seeds = draws(12 if GPU else 8)


def draw(seed: int) -> random.Random:
    torch.manual_seed(seed)
    return random.Random(seed)


def tensor(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(DEVICE, dtype)


def normed_tokens(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Input of an RMSNorm: the first token of several is so small that eps = 1e-6 changes it; the second of more is
    zero."""
    x = tensor(*shape, dtype=dtype, scale=scale)
    x[:-1][:1] *= 1e-3 / scale
    x[1:-1][:1] = 0
    return x


def error(got: Tensor, want: Tensor) -> float:
    """Largest relative error of a row; of all rows as one where they are so short that terms may cancel."""
    got, want = got.double().flatten(1), want.double().flatten(1)
    if got.shape[1] < 8:
        got, want = got.flatten()[None], want.flatten()[None]
    worst = ((got - want).norm(dim=1) / (want.norm(dim=1) + 1e-30)).max().item()
    return worst if worst == worst else float("inf")


@seeds
def test_rms_norm(seed: int, dtype: torch.dtype) -> None:
    rng = draw(seed)
    T, H = rng.choice([1, 2, 17]), rng.choice([8, 64, 100, 2048])
    x, weight = normed_tokens(T, H, dtype=dtype, scale=3), tensor(H, dtype=dtype)
    assert decoder.uses_kernels(x)
    with decoder.plain():
        want = decoder.rms_norm(x.float(), weight.float(), 1e-6)
    assert error(decoder.rms_norm(x, weight, 1e-6), want) <= BOUND[dtype]


@seeds
def test_few_linear(seed: int, dtype: torch.dtype) -> None:
    rng = draw(seed)
    T, K, N = rng.randint(1, 4), rng.choice([8, 72, 512, 2048]), rng.choice([1, 5, 128, 2050 if GPU else 300])
    x, weight = normed_tokens(T, K, dtype=dtype), tensor(N, K, dtype=dtype, scale=K**-0.5)
    norm, residual = tensor(K, dtype=dtype), tensor(T, N, dtype=dtype)
    bias = tensor(N, dtype=dtype) if rng.random() < 0.5 else None
    x_, weight_, norm_, residual_ = (v.double().cpu() for v in (x, weight, norm, residual))
    bias_ = None if bias is None else bias.double().cpu()
    with decoder.plain():
        want, want_sum = (
            decoder.norm_linear(x_, norm_, 1e-6, weight_, bias_),
            decoder.linear_add(x_, weight_, bias_, residual_),
        )
        want_normed = decoder.rms_norm(x_, norm_, 1e-6)
    normed = torch.full_like(x, float("nan"))
    got = few_rows.launch(x, weight, bias, norm=norm, eps=1e-6, normed=normed)
    assert error(got.cpu(), want) <= BOUND[dtype] and error(normed.cpu(), want_normed) <= BOUND[dtype]
    assert torch.equal(got, few_rows.launch(x, weight, bias, norm=norm, eps=1e-6))
    loose = torch.empty(T, 2 * N, dtype=dtype, device=DEVICE)[:, :N]
    if 1 < T <= few_rows.MAX_ROWS:
        assert few_rows.why_not(x.device, x, weight, bias, loose) == "the residual is not contiguous"
    total = few_rows.launch(x, weight, bias, residual=residual)
    assert total.data_ptr() == residual.data_ptr()
    assert error(total.cpu(), want_sum) <= BOUND[dtype]


@pytest.mark.parametrize("T", [2, 8])
def test_operands_in_steps_are_read_right(T: int) -> None:
    """Kernels read contiguous memory, whatever the strides of an operand."""
    K, E = 64, 8
    x, turned = (tensor(*shape, dtype=torch.float32) for shape in ((T, K), (K, T)))
    weight, router = (tensor(N, K, dtype=torch.float32) for N in (K, E))
    norm, bias = (tensor(2 * K, dtype=torch.float32)[::2] for _ in range(2))
    calls = [
        lambda: decoder.rms_norm(x, norm, 1e-6),
        lambda: decoder.norm_linear(x, norm, 1e-6, weight),
        lambda: decoder.norm_linear(x, norm.contiguous(), 1e-6, weight, bias),
        lambda: decoder.norm_linear(turned.t(), norm.contiguous(), 1e-6, weight),
        lambda: decoder.norm_route(x, norm, 1e-6, router, 2, True)[2],
        lambda: decoder.norm_route(turned.t(), norm.contiguous(), 1e-6, router, 2, True)[2],
    ]
    for number, call in enumerate(calls):
        with decoder.plain():
            want = call()
        assert error(call(), want) <= 1e-5, number


@pytest.mark.parametrize("T", [2, 8])
def test_more_experts_a_token_than_there_are_is_an_error(T: int) -> None:
    x, norm, weight = (tensor(*shape, dtype=torch.float32) for shape in ((T, 64), (64,), (4, 64)))
    for call in (lambda: decoder.route(x[:, :4], 5, True), lambda: decoder.norm_route(x, norm, 1e-6, weight, 5, True)):
        with pytest.raises(RuntimeError, match="out of range"):
            call()


@pytest.mark.skipif(not HOPPER, reason="no GPU runs code of compute capability 9.0 here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(24))
def test_decode_linear(seed: int, dtype: torch.dtype) -> None:
    rng = draw(seed)
    T = rng.choice([rng.randint(1, 8), rng.randint(9, 32), rng.randint(33, decode_linear.MAX_ROWS)])
    N, K = rng.choice([(5120, 2048), (2048, 4096), (64, 128), (64 * rng.randint(1, 100), 128 * rng.randint(1, 40))])
    x, weight = tensor(T, K, dtype=dtype, scale=3), tensor(N, K, dtype=dtype, scale=K**-0.5)
    tokens = normed_tokens(T, K, dtype=dtype, scale=3)
    norm, residual = tensor(K, dtype=dtype), tensor(T, N, dtype=dtype)
    for other, serves in ((norm, True), (residual, True), (residual.float(), False)):
        assert (decode_linear.why_not(x.device, x, weight, None, other) is None) == serves
    with decoder.plain():
        want = decoder.norm_linear(tokens.double(), norm.double(), 1e-6, weight.double())
        want_sum = decoder.linear_add(x.double(), weight.double(), None, residual.double())
    got = decode_linear.launch(tokens, weight, norm=norm, eps=1e-6)
    assert error(got, want) <= BOUND[dtype]
    assert error(decoder.norm_linear(tokens, norm, 1e-6, weight), want) <= 2 * BOUND[dtype]
    total = residual.clone()
    assert decode_linear.launch(x, weight, residual=total) is total
    assert error(total, want_sum) <= BOUND[dtype]
    for _ in range(10):
        assert torch.equal(got, decode_linear.launch(tokens, weight, norm=norm, eps=1e-6))


@dtypes
@pytest.mark.parametrize("T", [1, 2, 3, 65])
def test_linear_layers_of_any_number_of_rows(T: int, dtype: torch.dtype) -> None:
    x, weight, residual = tensor(T, 72, dtype=dtype), tensor(24, 72, dtype=dtype, scale=0.1), tensor(T, 24, dtype=dtype)
    norm, bias = tensor(72, dtype=dtype), tensor(24, dtype=dtype)
    wide = [v.double().cpu() for v in (x, norm, weight, bias, residual)]
    with decoder.plain():
        want = decoder.norm_linear(*wide[:2], 1e-6, *wide[2:4])
        want_sum = decoder.linear_add(wide[0], *wide[2:])
    assert error(decoder.norm_linear(x, norm, 1e-6, weight, bias).cpu(), want) <= 2 * BOUND[dtype]
    assert error(decoder.linear_add(x, weight, bias, residual).cpu(), want_sum) <= BOUND[dtype]


@seeds
def test_the_router(seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its choice where logits are far apart, its weights everywhere."""
    if not GPU:
        monkeypatch.setattr(sliced, "MAX_TOKENS", 80)
    rng = draw(seed)
    few = [1, 2, 19, 40, 70, 70, 90]  # the last takes a GEMM
    T, H = rng.choice([1, 2, 19, 40, 90, 110, 130, 300, 520] if GPU else few), rng.choice([8, 100, 512, 2048])
    E = rng.choice([1, 5, 128, 300])
    K = rng.randint(1, min(E, 8))
    x, norm, weight = (
        normed_tokens(T, H, dtype=dtype, scale=2),
        tensor(H, dtype=dtype),
        tensor(E, H, dtype=dtype, scale=H**-0.5),
    )
    renormalise = rng.random() < 0.5
    ids, weights, normed = decoder.norm_route(x, norm, 1e-6, weight, K, renormalise)
    with decoder.plain():
        want_normed = decoder.rms_norm(x.double().cpu(), norm.double().cpu(), 1e-6)
    assert error(normed.cpu(), want_normed) <= BOUND[dtype]
    logits = want_normed @ weight.double().cpu().T
    mine = torch.softmax(logits, -1).gather(1, ids.long().cpu())
    mine = mine / mine.sum(-1, keepdim=True) if renormalise else mine
    slack = 8 * BOUND[dtype] * logits.abs().max()
    assert float((weights.cpu() / mine - 1).abs().max()) <= slack
    assert bool((weights[:, :-1] >= weights[:, 1:]).all())
    kept, best = logits.gather(1, ids.long().cpu()), logits.topk(K).values
    assert all(len(set(row)) == K for row in ids.tolist())
    assert bool((best - kept <= slack).all())
    if GPU:
        again = decoder.norm_route(x, norm, 1e-6, weight, K, renormalise)
        assert torch.equal(again[0], ids) and torch.equal(again[1], weights)


@pytest.mark.skipif(not HOPPER, reason="no GPU runs code of compute capability 9.0 here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_the_router_without_a_norm(seed: int, dtype: torch.dtype) -> None:
    """As vLLM's layers call it."""
    rng = draw(seed)
    (H, E), K = rng.choice([(2048, 128), (4096, 128), (2048, 256), (512, 128)]), rng.randint(1, 16)
    T = rng.choice([1, 8, rng.randint(1, clustered.MOST_SINGLE), rng.randint(1, clustered.MAX_TOKENS)])
    x, weight = tensor(T, H, dtype=dtype), tensor(E, H, dtype=dtype, scale=H**-0.5)
    if clustered.why_not(x.device, x, None, 0.0, weight, K, True) is not None:
        assert T > clustered.MOST_SINGLE
        return
    ids, weights, same = clustered.launch(x, None, 0.0, weight, K, True)
    logits = x.double() @ weight.double().T
    short = logits.topk(K).values - logits.gather(1, ids.long())
    assert same is x and float(short.abs().max()) < 1e-5
    want = logits.softmax(-1).gather(1, ids.long())
    assert float((weights - want / want.sum(1, keepdim=True)).abs().max()) < 1e-6
    for _ in range(10):
        again = clustered.launch(x, None, 0.0, weight, K, True)
        assert torch.equal(again[0], ids) and torch.equal(again[1], weights)


@seeds
def test_head_norm_rope_writes_its_place_and_nothing_else(
    seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = draw(seed)
    if not GPU:
        monkeypatch.setattr(head_norm_rope, "ROWS_ALONE", 64)
    kv, group, D = rng.choice([1, 2, 4]), rng.choice([0, 1, 3, 8]), rng.choice([16, 64, 128])
    T, capacity = rng.choice([1, 3, 9, 70]), 16
    heads, rows = kv * group, T + 2
    qkv = normed_tokens(T, heads + 2 * kv, D, dtype=dtype)
    norms = HeadNorms(tensor(D, dtype=dtype), tensor(D, dtype=dtype), 1e-6)
    angle = torch.rand(T, 1, D // 2) * 6
    rope = (angle.cos().to(DEVICE, dtype), angle.sin().to(DEVICE, dtype))
    where = torch.tensor(rng.sample(range(rows), T), device=DEVICE)
    positions = torch.randint(capacity, (T,)).to(DEVICE)
    count = rng.randint(0, T)
    bound = torch.tensor(count, dtype=torch.int32, device=DEVICE) if rng.random() < 0.7 else None
    count = T if bound is None else count
    keys = tensor(rows, kv, capacity, D, dtype=dtype)
    memory = Memory(keys, keys * 2, where, positions, bound)
    wide = Memory(keys.float(), keys.float() * 2, where[:count], positions[:count])
    wide_norms = HeadNorms(norms.q.float(), norms.k.float(), 1e-6)
    wide_rope = (rope[0][:count].float(), rope[1][:count].float())
    want, k, v = decoder.head_norm_rope(qkv[:count].float(), kv, wide_norms, wide_rope)
    torch_forms.keep(wide, k, v)
    got = attention.norm_rope_write(qkv, norms, rope, memory)
    assert got is not None and got.shape == (T, heads, D)
    if count:
        assert error(got[:count], want) <= BOUND[dtype]
    for have, expected in ((memory.keys, wide.keys), (memory.values, wide.values)):
        assert error(have.flatten(0, 2), expected.flatten(0, 2)) <= BOUND[dtype]
        touched = torch.zeros(rows, capacity, dtype=torch.bool, device=DEVICE)
        touched[where[:count], positions[:count]] = True
        same = (have == expected.to(dtype)).all(-1).all(1)
        assert bool(same[~touched].all()), "a key or value of another token changed"


@seeds
def test_route(seed: int, dtype: torch.dtype) -> None:
    rng = draw(seed)
    E = rng.choice([1, 5, 8, 128, 200, 600])
    T, K = rng.choice([1, 4, 33]), rng.randint(1, min(E, 12))
    # few distinct values: ties
    logits = torch.randint(-4, 5, (T, E)).to(DEVICE, dtype) if rng.random() < 0.5 else tensor(T, E, dtype=dtype)
    logits = torch.where(torch.rand(T, E, device=DEVICE) < 0.1, -logits * 0, logits)
    renormalise = rng.random() < 0.5
    ids, weights = decoder.route(logits, K, renormalise)
    order = torch.sort(logits.float(), dim=-1, descending=True, stable=True).indices[:, :K]
    assert ids.dtype == torch.int32 and torch.equal(ids.long(), order)
    want = torch.softmax(logits.float(), -1).gather(1, order)
    want = want / want.sum(-1, keepdim=True) if renormalise else want
    assert (weights - want).abs().max() <= 2e-6


def test_route_of_logits_that_are_not_numbers() -> None:
    logits = torch.randn(6, 12)
    logits[0] = float("nan")
    logits[1, 3] = float("nan")
    logits[2] = float("-inf")
    logits[3, 5] = float("inf")
    logits[4, :8] = float("-inf")
    ids, weights = decoder.route(logits.to(DEVICE), 8, True)
    assert bool(((ids >= 0) & (ids < 12)).all())
    assert all(len(set(row)) == 8 for row in ids.tolist())
    assert weights[:4].isnan().any(1).tolist() == [True] * 4
    assert not weights[4:].isnan().any()


def test_sizes_without_a_kernel_take_the_torch_form() -> None:
    x = torch.zeros(2, 6, 24, device=DEVICE)
    assert decoder.uses_kernels(x)
    assert "head_dim" in str(decoder.why_not_captured(x, 4, 1, 24)) and decoder.why_not_captured(x, 4, 1, 16) is None
    assert decoder.why_not_captured(x, 65, 1, 16) is not None
    norms = HeadNorms(torch.ones(24, device=DEVICE), torch.ones(24, device=DEVICE), 1e-6)
    rope = (torch.ones(2, 1, 12, device=DEVICE), torch.zeros(2, 1, 12, device=DEVICE))
    keys = torch.zeros(2, 1, 4, 24, device=DEVICE)
    rows = torch.arange(2, device=DEVICE)
    memory = Memory(keys, keys.clone(), rows, torch.zeros_like(rows))
    qkv = torch.randn(2, 6, 24, device=DEVICE)
    assert attention.norm_rope_write(qkv, norms, rope, memory) is None
    q, _, _ = decoder.head_norm_rope(qkv, 1, norms, rope)
    assert q.shape == (2, 4, 24)
    assert attention.decode_attention(q, memory, 4).shape == q.shape
