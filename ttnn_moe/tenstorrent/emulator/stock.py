"""ttnn's own operators that a model calls around ours, on emulated devices: torch computes them in fp32 on the host.

Names and meaning are ttnn's. Results are rounded to the first tensor's dtype. The chip's own rounding is not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor as Values

from ...sizes import ceil_div
from .dram import Tensor as Part
from .mesh import ROW_MAJOR_LAYOUT, TILE_LAYOUT, Mesh, Tensor, on_chips

MathFidelity = SimpleNamespace(HiFi4="HiFi4")
ShardStrategy = SimpleNamespace(HEIGHT="HEIGHT")
SDPAProgramConfig = SimpleNamespace  # of no effect: exp is torch's


def init_device_compute_kernel_config(arch: str, **options: object) -> None:
    """No settings: sums are always fp32."""


def CoreCoord(x: int, y: int) -> tuple[int, int]:
    return x, y


def CoreRange(first: tuple[int, int], last: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    return first, last


CoreRangeSet = frozenset


def num_cores_to_corerangeset_in_subcoregrids(start: object, cores: int, grid: object, row_wise: bool) -> int:
    return cores


@dataclass(frozen=True, eq=False)
class ShardedMemoryConfig:
    """The shape of a shard. No other settings: see Tensor.place."""

    shape: tuple[int, ...]


def create_sharded_memory_config(
    shape: Sequence[int],
    core_grid: object,
    strategy: object,
    orientation: object = None,
    use_height_and_width_as_shard_shape: bool = False,
) -> ShardedMemoryConfig:
    return ShardedMemoryConfig(tuple(shape))


def to_memory_config(tensor: Tensor, place: object) -> Tensor:
    assert tensor.mesh is not None
    moved = on_chips(tensor.mesh, tensor.read(), tensor.dtype, tensor.layout)
    moved.place = place
    return moved


def zeros(shape: Sequence[int], *, dtype: str, layout: str, device: Mesh, memory_config: object = None) -> Tensor:
    return on_chips(device, [torch.zeros(tuple(shape))] * device.D, dtype, layout)


def embedding(ids: Tensor, weight: Tensor, *, layout: str = ROW_MAJOR_LAYOUT) -> Tensor:
    """weight [n, width], or with dimensions of 1 before these."""
    found = [
        table.reshape(table.shape[-2:])[chosen.long()] for chosen, table in zip(ids.read(), weight.read(), strict=True)
    ]
    assert weight.mesh is not None
    return on_chips(weight.mesh, found, weight.dtype, layout)


def rms_norm(x: Tensor, *, epsilon: float, weight: Tensor, compute_kernel_config: object = None) -> Tensor:
    def norm(x: Values, weight: Values) -> Values:
        return F.rms_norm(x, (x.shape[-1],), weight.flatten(), epsilon)

    return _each(norm, x, weight)


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    dtype: str | None = None,
    compute_kernel_config: object = None,
) -> Tensor:
    if bias is None:
        return _each(torch.matmul, x, weight, dtype=dtype)
    return _each(lambda x, weight, bias: x @ weight + bias, x, weight, bias, dtype=dtype)


def add(a: Tensor, b: Tensor, *, dtype: str | None = None) -> Tensor:
    return _each(torch.add, a, b, dtype=dtype)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    return _each(torch.mul, a, b)


def silu(x: Tensor) -> Tensor:
    return _each(F.silu, x)


def softmax(x: Tensor, *, dim: int, numeric_stable: bool = True, compute_kernel_config: object = None) -> Tensor:
    return _each(lambda x: torch.softmax(x, dim), x)


def topk(x: Tensor, k: int, *, dim: int) -> tuple[Tensor, Tensor]:
    assert x.mesh is not None
    found = [torch.topk(values, k, dim) for values in x.read()]
    values = on_chips(x.mesh, [one.values for one in found], x.dtype, x.layout)
    # ttnn.topk has 32-bit indices beyond 65,536 columns; here beyond 32,768, as the host holds uint16 as int16
    kind = "uint16" if x.shape[-1] <= 1 << 15 else "uint32"
    return values, on_chips(x.mesh, [one.indices for one in found], kind, x.layout)


def argmax(x: Tensor, *, dim: int) -> Tensor:
    """The first of the largest."""
    assert x.mesh is not None
    return on_chips(x.mesh, [values.float().argmax(dim) for values in x.read()], "uint32", ROW_MAJOR_LAYOUT)


def max(x: Tensor, *, dim: int, keepdim: bool = False) -> Tensor:
    return _each(lambda x: x.amax(dim, keepdim), x)


def sum(x: Tensor, *, dim: int, compute_kernel_config: object = None) -> Tensor:
    return _each(lambda x: x.sum(dim), x)


def subtract(a: Tensor, b: Tensor) -> Tensor:
    return _each(torch.sub, a, b)


def exp(x: Tensor) -> Tensor:
    return _each(torch.exp, x)


def pad(x: Tensor, shape: Sequence[int], start: Sequence[int], value: float) -> Tensor:
    """The values from the start on, in a larger shape."""
    assert not any(start)

    def padded(x: Values) -> Values:
        room = [end - own for own, end in zip(x.shape, shape, strict=True)]
        return F.pad(x, [side for end in reversed(room) for side in (0, end)], value=value)

    return _each(padded, x)


def transpose(x: Tensor, first: int, second: int) -> Tensor:
    return _each(lambda x: x.transpose(first, second), x)


def concat(parts: Sequence[Tensor], *, dim: int) -> Tensor:
    return _each(lambda *parts: torch.cat(parts, dim), *parts)


def _nlp_create_qkv_heads(
    qkv: Tensor, *, num_heads: int, num_kv_heads: int, transpose_k_heads: bool
) -> tuple[Tensor, ...]:
    """[1, 1, T, ..] -> q, k and v [1, heads, T, head_dim]."""
    assert not transpose_k_heads

    def heads(first: int, n: int) -> Callable[[Values], Values]:
        return lambda qkv: (
            qkv[0, 0].unflatten(-1, (num_heads + 2 * num_kv_heads, -1))[:, first : first + n].transpose(0, 1)[None]
        )

    own = ((0, num_heads), (num_heads, num_kv_heads), (num_heads + num_kv_heads, num_kv_heads))
    return tuple(_each(heads(first, n), qkv) for first, n in own)


def _nlp_concat_heads(x: Tensor) -> Tensor:
    return _each(lambda x: x.transpose(1, 2).flatten(2)[None], x)


def _rotary_embedding_hf(
    x: Tensor, cos: Tensor, sin: Tensor, *, is_decode_mode: bool, compute_kernel_config: object = None
) -> Tensor:
    assert not is_decode_mode

    def rotate(x: Values, cos: Values, sin: Values) -> Values:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return _each(rotate, x, cos, sin)


def _paged_fill_cache(cache: Tensor, x: Tensor, pages: Tensor, *, batch_idx: int) -> None:
    """x [1, heads, T, head_dim] into the pages [1, T / page] of a cache [pages, heads, page, head_dim], as tiles."""
    if x.dtype != cache.dtype:
        raise RuntimeError(f"paged_fill_cache copies tiles: got {x.dtype} for a cache of {cache.dtype}")
    for part, values, table in zip(cache.parts, x.read(), pages.read(), strict=True):
        # of a page named twice (that of padding), the last
        last = {page: i for i, page in enumerate(table[batch_idx].tolist())}
        pieces = values[0].unflatten(1, (-1, part.shape[2])).transpose(0, 1)
        part.write(pieces[list(last.values())], list(last))


def _paged_update_cache(cache: Tensor, x: Tensor, *, update_idxs_tensor: Tensor, page_table: Tensor) -> None:
    """Token b of x [1, B, heads, head_dim] to its row's position, unless that is -1; x in bfloat16 or float32."""
    if x.dtype not in ("bfloat16", "float32"):
        raise RuntimeError(f"paged_update_cache converts by itself: got {x.dtype}")
    for part, values, where, table in zip(
        cache.parts, x.read(), update_idxs_tensor.read(), page_table.read(), strict=True
    ):
        size = part.shape[2]
        for b, position in enumerate(where.tolist()):
            if position >= 0:
                page = [int(table[b, position // size])]
                held = part.read(page)
                held[0, :, position % size] = values[0, b]
                part.write(held, page)


def _paged_fused_update_cache(keys: Tensor, k: Tensor, values: Tensor, v: Tensor, **where: Tensor) -> None:
    _paged_update_cache(keys, k, **where)
    _paged_update_cache(values, v, **where)


def _chunked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    start: int,
    *,
    compute_kernel_config: object = None,
    program_config: object = None,
) -> Tensor:
    """Causal: q [1, heads, T, head_dim] are the tokens from `start` on of what lies in the pages [1, n]."""

    def attend(q: Values, k: Part, v: Part, pages: Values) -> Values:
        T = q.shape[2]
        mask = torch.ones(T, start + T, dtype=torch.bool).tril(start)
        keys, values = (_gather(x, pages[0], start + T) for x in (k, v))
        return _attend(q, keys, values, mask)

    return _attended(attend, q, k, v, pages)


def _decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    page_table_tensor: Tensor,
    cur_pos_tensor: Tensor,
    compute_kernel_config: object = None,
    program_config: object = None,
) -> Tensor:
    """q [1, B, heads, head_dim], each of the B attending to its row's keys 0 .. position."""

    def attend(q: Values, k: Part, v: Part, table: Values, positions: Values) -> Values:
        out = torch.zeros_like(q)
        for b, position in enumerate(positions.tolist()):
            keys, values = (_gather(x, table[b], position + 1) for x in (k, v))
            out[:, b] = _attend(q[:, b, :, None], keys, values, None)[:, :, 0]
        return out

    return _attended(attend, q, k, v, page_table_tensor, cur_pos_tensor)


experimental = SimpleNamespace(
    nlp_create_qkv_heads=_nlp_create_qkv_heads,
    nlp_concat_heads=_nlp_concat_heads,
    rotary_embedding_hf=_rotary_embedding_hf,
    paged_fill_cache=_paged_fill_cache,
    paged_update_cache=_paged_update_cache,
    paged_fused_update_cache=_paged_fused_update_cache,
)
transformer = SimpleNamespace(
    chunked_scaled_dot_product_attention=_chunked_attention, paged_scaled_dot_product_attention_decode=_decode_attention
)


def _gather(cache: Part, pages: Values, n: int) -> Values:
    """The first n tokens of these pages, fp32: [1, heads, n, head_dim]. Nothing else of the cache is read."""
    held = cache.read(pages[: ceil_div(n, cache.shape[2])].tolist()).float()
    return held.transpose(0, 1).flatten(1, 2)[None, :, :n]


def _attend(q: Values, k: Values, v: Values, mask: Values | None) -> Values:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def _floats(tensor: Tensor) -> list[Values]:
    """Each chip's values; floating-point ones in fp32."""
    return [x.float() if x.dtype == torch.bfloat16 else x for x in tensor.read()]


def _each(function: Callable[..., Values], *tensors: Tensor, dtype: str | None = None) -> Tensor:
    """Apply the function on every chip, in fp32. The result has this dtype; default: that of the first tensor."""
    mesh = tensors[0].mesh
    assert mesh is not None
    made = [function(*values) for values in zip(*map(_floats, tensors), strict=True)]
    return on_chips(mesh, made, dtype or tensors[0].dtype, TILE_LAYOUT)


def _attended(function: Callable[..., Values], q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
    """As _each, for caches k and v, which the function reads itself."""
    assert q.mesh is not None
    values = zip(_floats(q), k.parts, v.parts, *(other.read() for other in others), strict=True)
    return on_chips(q.mesh, [function(*each) for each in values], q.dtype, TILE_LAYOUT)
