"""Tokens that the kernel draws are those of the definition: its source on the host, or on a GPU."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from host_kernels import GXX, HostKernels, used, with_mistake
from ttnn_moe.cuda.sampling import draw_tokens as kernel
from ttnn_moe.decoder import Draw, draw_tokens
from ttnn_moe.draws import kept_probabilities

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = [pytest.mark.skipif(not GPU and GXX is None, reason="g++ is not installed"), *[pytest.mark.gpu] * GPU]
KEPT = [(0.7, 20, 0.8), (0.7, 20, 1.0), (1.0, 0, 0.95), (1.5, 0, 1.0), (0.01, 0, 1.0), (9.0, 300, 0.5)]
EDGES = [0.0, 0.25, 0.5, 0.999, math.nextafter(1, 0)]
ROUNDING = 2e-6


def drawn(logits: Tensor, draws: list[Draw], monkeypatch: pytest.MonkeyPatch, blocks: int | None = None) -> Tensor:
    tokens = logits.argmax(-1).to(DEVICE)
    with monkeypatch.context() as patch:
        if blocks is not None:
            patch.setattr(kernel, "blocks_of", lambda n: blocks)
        kernel._launch.cache_clear()
        kernel.launch(logits.to(DEVICE), tokens, draws)
    return tokens.cpu()


def check(logits: Tensor, draws: list[Draw], tokens: Tensor) -> None:
    """Each token is where its number says, up to rounding, in the definition's order."""
    for one in draws:
        row, token = logits[one.row, None], int(tokens[one.row])
        probabilities, order = (x[0] for x in kept_probabilities(row, *one.how))
        kept = probabilities.cumsum(0) / probabilities.sum()
        at = int((order == token).nonzero()) if token in order else pytest.fail(f"{one}: {token} is not kept by top-k")
        assert (float(kept[at - 1]) if at else 0.0) - ROUNDING <= one.uniform <= float(kept[at]) + ROUNDING, one
        if one.top_p < 1:
            before = float(probabilities[:at].sum())
            assert before <= one.top_p + ROUNDING, one


def several(R: int, seed: int = 0) -> list[Draw]:
    g = torch.Generator().manual_seed(seed)
    uniform = torch.rand(R, dtype=torch.float64, generator=g).tolist()
    return [Draw(i, EDGES[i] if i < len(EDGES) else u, *KEPT[i % len(KEPT)]) for i, u in enumerate(uniform)]


def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> HostKernels:
    if not GPU:
        monkeypatch.setattr(kernel, "THREADS", 256)  # a fiber each
    return used(HostKernels(tmp_path, **options), monkeypatch, kernel._launch)  # type: ignore[arg-type]


def edges(logits: Tensor, how: tuple[float, int, float], most: int) -> tuple[Tensor, list[Draw], Tensor]:
    """Rows alike, numbers shortly before and after the ends of its first tokens, and the tokens that they draw."""
    probabilities, order = (x[0] for x in kept_probabilities(logits[None], *how))
    kept = probabilities.cumsum(0) / probabilities.sum()
    wide = (probabilities / probabilities.sum() > 4 * ROUNDING)[1 : most + 1]
    ends, place = kept[:most][wide], torch.arange(most)[wide]
    numbers = torch.cat([ends - ROUNDING, ends + ROUNDING]).tolist()
    rows, want = logits.expand(len(numbers), -1).contiguous(), torch.cat([order[place], order[place + 1]])
    return rows, [Draw(i, u, *how) for i, u in enumerate(numbers)], want


@pytest.mark.parametrize("how", KEPT, ids=str)
def test_the_ends_of_tokens(how: tuple[float, int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host(tmp_path, monkeypatch)
    logits = 3 * torch.randn(64, generator=torch.Generator().manual_seed(2))
    rows, draws, want = edges(logits, how, 8)
    assert torch.equal(drawn(rows, draws, monkeypatch, 1), want)


@pytest.mark.parametrize(
    ("blocks", "dtype"), [(1, torch.bfloat16), (2, torch.float16), (4, torch.bfloat16), (8, torch.float32)], ids=str
)
def test_draws_are_those_of_the_definition(
    blocks: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated = host(tmp_path, monkeypatch)
    logits = (3 * torch.randn(8, 3000 if GPU else 1208, generator=torch.Generator().manual_seed(1))).to(dtype)
    draws = several(len(logits))
    tokens = drawn(logits, draws, monkeypatch, blocks)
    assert emulated.sound
    check(logits, draws, tokens)
    want = logits.argmax(-1)
    draw_tokens(logits, want, draws)
    assert torch.equal(tokens, want), "none of these numbers is at an edge"


SHAPES = {
    "all equal": lambda n: torch.zeros(n),
    "two values": lambda n: torch.arange(n).remainder(2) * 2.0,
    "one far above": lambda n: torch.cat([torch.tensor([30.0]), torch.linspace(0, 1e-3, n - 1)]),
    "most in a bin": lambda n: torch.cat([torch.randn(40) * 9, 1e-5 * torch.randn(n - 40)]),
    "masked": lambda n: torch.where(torch.arange(n).remainder(3) == 1, torch.randn(n), -torch.inf),
    "infinite": lambda n: torch.where(torch.arange(n).remainder(500) == 3, torch.inf, torch.randn(n)),
    "signs of zero": lambda n: torch.where(torch.arange(n).remainder(2) == 0, 0.0, -0.0),
    "large": lambda n: torch.randn(n) * 1e38,
    "small": lambda n: torch.randn(n) * 1e-38,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_odd_rows(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = host(tmp_path, monkeypatch)
    torch.manual_seed(5)
    logits = torch.stack([SHAPES[shape](1600) for _ in range(6)]).float()
    draws = several(len(logits), 3)
    for blocks in (1, 4):
        tokens = drawn(logits, draws, monkeypatch, blocks)
        assert emulated.sound
        check(logits, draws, tokens)


@pytest.mark.parametrize("seed", range(60 if GPU else 4))
def test_random_rows(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any size, dtype, spread and options, each row with its own."""
    emulated = host(tmp_path, monkeypatch)
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    V, R = 8 * rng.randint(1, rng.choice([4, 500, 32768] if GPU else [4, 200])), rng.randint(1, 12 if GPU else 3)
    dtype = rng.choice([torch.bfloat16, torch.float16, torch.float32])
    logits = torch.randn(R, V, generator=g) * 10 ** rng.uniform(-3, 2) + rng.choice([0, 0, 20, -300])
    logits = torch.where(torch.rand(R, V, generator=g) < rng.choice([0, 0, 0.5]), -torch.inf, logits).to(dtype)
    draws = [
        Draw(
            row,
            rng.random(),
            10 ** rng.uniform(-2, 2),
            rng.choice([0, 0, 1, rng.randint(1, 64), rng.randint(1, 2 * V)]),
            rng.choice([1.0, 1.0, rng.uniform(0.01, 1)]),
        )
        for row in range(R)
        if bool(logits[row].isfinite().any())
    ]
    tokens = drawn(logits, draws, monkeypatch, rng.choice([None, 1, 8]) if GPU else rng.choice([1, 2]))
    assert emulated.sound
    check(logits, draws, tokens)


def test_limits_and_rows_that_keep_their_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = host(tmp_path, monkeypatch)
    logits = torch.randn(10, 64).bfloat16()
    logits[7] = -torch.inf
    logits[8, 5] = torch.nan
    hows = [(1.0, 1, 1.0), (1.0, 0, 1e-9), (1e-300, 0, 1.0), (1e-6, 64, 1.0), (1e300, 0, 1.0), (1.0, 10**6, 1.0)]
    draws = [Draw(i, 0.7, *how) for i, how in enumerate([*hows, (1.0, 0, 1 - 1e-16)])]
    tokens = drawn(logits, [*draws, *(Draw(i, 0.5, 1.0) for i in (8, 7))], monkeypatch)
    assert emulated.sound and torch.equal(tokens[:4], logits[:4].argmax(-1))
    assert tokens[4] == logits[4].argsort(descending=True, stable=True)[int(0.7 * 64)], "all are equal at this heat"
    check(logits, draws, tokens)
    assert torch.equal(tokens[7:], logits[7:].argmax(-1))


def test_a_token_does_not_depend_on_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host(tmp_path, monkeypatch)
    logits = (2 * torch.randn(4, 1208)).bfloat16()
    draws = several(4)
    together = drawn(logits, draws, monkeypatch)
    for blocks, one in zip((1, 2, 8, 4), draws, strict=True):
        alone = drawn(logits[one.row :].contiguous(), [Draw(0, one.uniform, *one.how)], monkeypatch, blocks)
        assert alone[0] == together[one.row]


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("if (lane >= step) count +=", "if (lane > step) count +="),
        ("shared.list[i] < own", "shared.list[i] <= own"),
        ("target = static_cast<u64>(top_k) - 1;", "target = static_cast<u64>(top_k);"),
        ("- shared.deficits[bin];", ";"),
        ("lowest += static_cast<u64>(shared.bin) << shift;", ""),
        ("__float_as_uint(value + 0.0f)", "__float_as_uint(value)"),
        ("if (key < lowest || key > highest) return;\n        shared", "shared"),
    ],
)
@pytest.mark.skipif(GPU, reason="on the host alone")
def test_a_mistake_is_seen(line: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = host(tmp_path, monkeypatch, sources=with_mistake(tmp_path, "common/draw_tokens", line, instead))
    torch.manual_seed(5)
    shapes = ("all equal", "most in a bin", "signs of zero", "masked")
    logits = torch.stack([SHAPES[shape](1600) for shape in shapes * 2])
    draws = several(len(logits), 3)
    rows, at_ends, want = edges(3 * torch.randn(64), (1.0, 20, 1.0), 5)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(logits, draws, drawn(logits, draws, monkeypatch, 4))
        assert emulated.sound and torch.equal(drawn(rows, at_ends, monkeypatch, 1), want)


def test_what_it_refuses() -> None:
    logits, tokens = torch.empty(2, 64, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
    cuda = torch.device("cuda", 0)
    assert "multiple of 8" in str(kernel.why_not(cuda, logits[:, :60], tokens, []))
    assert "2^18" in str(kernel.why_not(cuda, logits.new_empty(2, 2**18 + 8), tokens, []))
    assert "contiguous" in str(kernel.why_not(cuda, logits.new_empty(64, 64).t(), tokens, []))
    assert "fp32" in str(kernel.why_not(cuda, logits.double(), tokens, []))


def test_the_kernel_writes_int64_tokens_alone() -> None:
    logits, tokens = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    reasons = [kernel.why_not(torch.device("cpu"), logits, given, ()) for given in (tokens, tokens.int())]
    assert reasons == ["the device is no GPU", "tokens are not int64"]
