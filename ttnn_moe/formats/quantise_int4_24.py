"""int4_24 words from weights: which channel of every four is kept, its int4, and a bf16 scale for every 32 channels.

Without moments, the largest weight of every four is kept, and the scale has the least squared error among candidates.

With the second moments of the inputs, S = x^T x, the squared error of the output is minimised instead:
trace((W - Q) S (W - Q)^T). Four channels after four, a row keeps the channel and the int4 of least error, given that
all later channels may still change; then those take the changes that make up for the error. That is the optimal brain
surgeon (Hassibi and Stork, 1993) in the order of columns of GPTQ (Frantar and others, 2022), with a chunk of four
channels in place of one. In a layer, the down weights are first fitted to the activations of the quantised gate and up
weights.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..contract import check_kind
from ..errors import ContractError
from ..experts import Experts
from ..routing import Routing
from .dense import DTYPES
from .finite import check_finite, check_readable
from .int4_24 import GROUP, NAME, dequantise, pack

MAX_ELEMENTS = 1 << 24
"""Of weights worked on at a time."""
_SCALES = 1 << 12  # scales searched at a time: 4 MB for each of a few temporaries
DAMPING = 0.01
"""Of the mean of the diagonal of the moments, added to the diagonal."""
# a scale is the largest kept weight over one of these, of either sign: 8 exists on one side alone. Whole ones find
# the scale of weights that are int4_24 already; finer ones gain under 3% of the rounding error
DIVISORS = (1, 2, 3, 4, 5, *(d / 4 for d in range(24, 35)))


@torch.no_grad()
def quantise(weights: Tensor, moments: Tensor | None = None) -> Tensor:
    """Words [..., C/64, R, 2] int64 of weights [..., R, C], C channels of R rows.

    Args:
        weights: bf16, fp16 or fp32.
        moments: [C, C], or [..., C, C]: the sum of x^T x over inputs x [C]; default: as if inputs were white.
            With moments, the scratch is about 50 * C^2 bytes.

    Raises:
        ContractError: C is not a multiple of 64, shapes or dtypes do not fit, or a weight or moment is not finite.
    """
    check_readable(weights=weights, **({} if moments is None else {"moments": moments}))
    *lead, R, C = weights.shape if weights.dim() >= 2 else (0, 0)
    if weights.dim() < 2 or weights.dtype not in DTYPES or not C or C % 64:
        raise ContractError(
            "weights cannot be quantised to int4_24",
            got=f"{tuple(weights.shape)} {weights.dtype}",
            expected="[..., R, C] bf16, fp16 or fp32, C a multiple of 64",
        )
    if moments is not None and tuple(moments.shape) not in ((C, C), (*lead, C, C)):
        raise ContractError(
            "moments do not fit the weights", got=tuple(moments.shape), expected=f"[..., C, C] with C = {C}"
        )
    words = torch.empty(*lead, C // 64, R, 2, dtype=torch.int64, device=weights.device)
    if not words.numel():
        return words
    each, out = weights.reshape(-1, R, C), words.view(-1, C // 64, R, 2)
    check_finite(NAME, "weights", each)
    shared = moments is not None and moments.dim() == 2
    if moments is not None:
        moments = moments.reshape(-1, C, C)
        check_finite(NAME, "moments", moments)
    factors: tuple[Tensor, Tensor] | None = None
    rows = max(1, MAX_ELEMENTS // C)
    with torch.autocast(weights.device.type, enabled=False):
        for e, matrix in enumerate(each):
            if moments is not None and (e == 0 or not shared):
                factors = _factor(moments[e])
            for start in range(0, R, rows):
                part = matrix[start : start + rows].float()
                values, index, scales = _nearest(part) if factors is None else _compensated(part, *factors)
                out[e, :, start : start + rows] = pack(values.to(torch.int8), index, scales)
    return words


@torch.no_grad()
def rounded(weights: Tensor) -> Tensor:
    """What `dequantise(quantise(weights))` gives, [..., R, C] fp32, for training: no check, no word, no host sync."""
    values, index, scales = _nearest(weights.reshape(-1, weights.shape[-1]).float())
    kept = values.unflatten(-1, (-1, 8)) * scales.float()[..., None]
    chunks = torch.zeros(*index.shape, 4, dtype=torch.float32, device=weights.device)
    return chunks.scatter_(-1, index[..., None], kept.view(*index.shape, 1)).view(weights.shape)


@torch.no_grad()
def quantise_experts(experts: Experts, hidden: Tensor | None = None, routing: Routing | None = None) -> Experts:
    """A layer's dense experts in int4_24, their gate and up rows in the same order.

    Args:
        experts: dense, H and I multiples of 64.
        hidden: [T, H] the layer's inputs, to calibrate with; default: none.
        routing: of hidden, both or neither. Each expert is calibrated on its own tokens; one without a token, as
            without hidden. An expert should have more tokens than H and I.

    Raises:
        ContractError: as `quantise`; or experts of another format; or hidden and routing do not fit them, or one of
            the two is missing; or hidden so large that activations overflow fp32.
    """
    if (hidden is None) != (routing is None):
        given, missing = ("routing", "hidden") if hidden is None else ("hidden", "routing")
        raise ContractError(
            "calibration needs hidden and its routing",
            got=f"{given} without {missing}",
            expected="both, or neither",
            remedy=f"give {missing} too, or leave {given} out",
        )
    check_kind(experts, Experts)
    if experts.format != "dense":
        raise ContractError("only dense experts can be quantised", got=experts.format, expected="dense")
    gate_up, down = experts.tensors["gate_up"], experts.tensors["down"]
    check_readable(**experts.tensors)
    for name, tensor in experts.tensors.items():
        check_finite(NAME, name, tensor)
    if hidden is None or routing is None:
        return Experts.int4_24(quantise(gate_up), quantise(down), gate_up_order=experts.gate_up_order)
    check_kind(routing, Routing)
    check_readable(hidden=hidden, topk_ids=routing.topk_ids, gate_up=gate_up)
    if tuple(hidden.shape) != (routing.T, experts.H) or routing.E != experts.E:
        raise ContractError(
            "hidden and routing do not fit the experts",
            got=f"hidden {tuple(hidden.shape)}, routing of T={routing.T}, E={routing.E}",
            expected=f"[T, H] = {(routing.T, experts.H)}, E={experts.E}",
        )
    check_finite(NAME, "hidden", hidden[None, : routing.true_tokens()])
    starts, pairs = routing.sorted.expert_offsets.tolist(), routing.sorted.pairs
    w13, w2 = [], []
    with torch.autocast(hidden.device.type, enabled=False):
        for e in range(experts.E):
            x = hidden[pairs[starts[e] : starts[e + 1]].long() // routing.K].float()
            w13.append(quantise(gate_up[e], _moments(x)))
            want = _activations(x, gate_up[e].float(), experts.gate_up_order)
            act = _activations(x, dequantise(w13[e]), experts.gate_up_order)
            if not bool(want.isfinite().all() & act.isfinite().all()):
                raise ContractError(
                    f"hidden is too large: activations of expert {e} overflow fp32",
                    got=f"hidden up to {float(x.abs().max()):.3g}",
                    expected="hidden whose silu(gate) * up is finite",
                    remedy="give the inputs of this layer, as its model computes them",
                )
            w2.append(quantise(_refitted(down[e].float(), want, act), _moments(act)))
    return Experts.int4_24(torch.stack(w13), torch.stack(w2), gate_up_order=experts.gate_up_order)


def _activations(x: Tensor, gate_up: Tensor, order: str) -> Tensor:
    """silu(gate) * up [n, I] fp32 of tokens x [n, H]."""
    both = x @ gate_up.T
    gate, up = (both[:, 0::2], both[:, 1::2]) if order == "interleaved" else both.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _unit(values: Tensor) -> Tensor:
    """The power of two below the largest of values. Over it, squares do not overflow, and no bit changes."""
    largest = values.abs().max() if values.numel() else values.new_ones(())
    return torch.pow(2.0, (torch.frexp(largest)[1] - 1).to(values.dtype))


def _moments(x: Tensor) -> Tensor:
    """x^T x of x [n, C], times a number: that changes no word."""
    x = x / _unit(x)
    return x.T @ x


def _refitted(weights: Tensor, want: Tensor, act: Tensor) -> Tensor:
    """Weights [R, C] that make of act [n, C] what the given ones make of want: ridge regression towards the given."""
    unit = torch.maximum(_unit(act), _unit(want))
    act, want = act / unit, want / unit
    moments = (act.T @ act).double()
    mean = moments.diagonal().mean()
    if not bool(mean > 0):
        return weights
    moments.diagonal().add_(DAMPING * mean)
    missing = (act.T @ ((want - act) @ weights.T)).double()
    return weights + torch.linalg.solve(moments, missing).T.float()


def _nearest(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, index and scales of weights [R, C]: the largest of every four."""
    chunks = weights.unflatten(-1, (-1, 4))
    index = chunks.abs().argmax(-1)
    kept = chunks.gather(-1, index[..., None]).view(len(weights), -1, 8)
    scales = _scales(kept, torch.ones_like(kept))
    return _round(kept, scales).flatten(-2), index, scales


def _scales(kept: Tensor, weight: Tensor) -> Tensor:
    """[..., n] bf16: the candidate of least weighted squared error for 8 of kept [..., n, 8]; 0 where all are 0."""
    out = torch.empty(kept.shape[:-1], dtype=torch.bfloat16, device=kept.device)
    each = zip(kept.reshape(-1, 8).split(_SCALES), weight.reshape(-1, 8).split(_SCALES), strict=True)
    candidates = _candidates(kept.device)
    for part, (values, factors) in zip(out.view(-1).split(_SCALES), each, strict=True):
        most = values.abs().amax(-1, keepdim=True)
        scales = (most * candidates).to(torch.bfloat16)  # [n, candidates]
        size = most.clamp_min(torch.finfo(torch.float32).tiny)  # squares of values / size cannot overflow
        unit, relative = (values / size)[:, None], scales.float() / size
        rounded = _round(unit, relative) * relative[..., None]
        error = (factors[:, None] * (unit - rounded).square()).sum(-1)
        # a scale that overflows bf16 has the error NaN
        best = error.nan_to_num(torch.inf, posinf=torch.inf).argmin(-1, keepdim=True)
        part.copy_(scales.gather(-1, best)[:, 0])
    return out


@lru_cache
def _candidates(device: torch.device) -> Tensor:
    return torch.tensor([sign / d for d in DIVISORS for sign in (1, -1)], dtype=torch.float32, device=device)


def _round(values: Tensor, scales: Tensor) -> Tensor:
    """The int4 nearest to values [..., 8] / scales [...], as fp32; 0 where the scale is 0."""
    scales = scales.float()[..., None]
    return torch.where(scales == 0, 0, (values / scales).nan_to_num(0.0)).round().clamp(-8, 7)


def _factor(moments: Tensor) -> tuple[Tensor, Tensor] | None:
    """What the search needs of moments [C, C], damped; None where no input was seen.

    With S = M M^T and M upper triangular, the inverse of S[j:, j:] is U[j:, j:]^T U[j:, j:], U the inverse of M.

    Returns:
        metric [C/4, 4, 4]: the error's quadratic form of each chunk, when all later channels make up for it.
        update [C, C]: a chunk's error times its 4 rows is what later channels lose; 0 before the chunk.
    """
    C = len(moments)
    S = moments.double()
    S = S / _unit(S)
    mean = S.diagonal().mean()
    if bool(mean == 0):
        return None
    S = (S + S.T) / (2 * mean)
    S.diagonal().add_(DAMPING)
    lower, failed = torch.linalg.cholesky_ex(S.flip(0, 1))
    if bool(failed) or bool(mean < 0):
        raise ContractError(
            "moments are not those of any inputs",
            got="a matrix with an eigenvalue below zero",
            expected="a sum of x^T x",
            remedy="pass x.T @ x in fp32 of inputs x [n, C]",
        )
    M = lower.flip(0, 1)
    U = torch.linalg.solve_triangular(M, torch.eye(C, dtype=M.dtype, device=M.device), upper=True)
    corner = torch.stack([M[j : j + 4, j : j + 4] for j in range(0, C, 4)])
    update = (corner @ U.view(-1, 4, C)).view(C, C)
    return (corner @ corner.mT).float(), update.float()


def _compensated(weights: Tensor, metric: Tensor, update: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, index and scales of weights [R, C], given what `_factor` returns."""
    unit = _unit(weights)
    weights = weights / unit
    R, C = weights.shape
    values = torch.empty(R, C // 4, dtype=torch.float32, device=weights.device)
    index = torch.empty(R, C // 4, dtype=torch.int64, device=weights.device)
    scales = torch.empty(R, C // GROUP, dtype=torch.bfloat16, device=weights.device)
    for start in range(0, C, GROUP):
        group, first = slice(start, start + GROUP), start // 4
        A = metric[first : first + 8]
        gain, best = _unquantised(weights[:, group].view(R, 8, 4), A)
        picked = gain.argmax(-1, keepdim=True)
        weight = A.diagonal(dim1=-2, dim2=-1).expand(R, 8, 4).gather(-1, picked)[..., 0]
        scale = _scales(best.gather(-1, picked).view(R, 1, 8), weight.view(R, 1, 8))
        scales[:, start // GROUP] = scale[:, 0]
        left = torch.empty(R, GROUP, dtype=torch.float32, device=weights.device)
        for i in range(8):
            here = slice(start + 4 * i, start + 4 * i + 4)
            chunk = weights[:, here].clone()
            gain, best = _unquantised(chunk[:, None], A[i : i + 1])
            q = _round(best[:, 0], scale[:, 0])
            value = q * scale.float()
            loss = A[i].diagonal() * (value - best[:, 0]).square() - gain[:, 0]
            c = loss.argmin(-1, keepdim=True)
            index[:, first + i], values[:, first + i] = c[:, 0], q.gather(-1, c)[:, 0]
            error = chunk.scatter_add(-1, c, -value.gather(-1, c))
            left[:, 4 * i : 4 * i + 4] = error
            weights[:, here.stop : group.stop] -= error @ update[here, here.stop : group.stop]
        weights[:, group.stop :] -= left @ update[group, group.stop :]
    return values, index, (scales.float() * unit).to(torch.bfloat16)


def _unquantised(chunks: Tensor, metric: Tensor) -> tuple[Tensor, Tensor]:
    """What keeping one channel of chunks [R, n, 4] gains, and its best value, [R, n, 4] both; metric [n, 4, 4]."""
    slope = torch.einsum("rnc,ncd->rnd", chunks, metric)
    curve = metric.diagonal(dim1=-2, dim2=-1)
    return slope.square() / curve, slope / curve
