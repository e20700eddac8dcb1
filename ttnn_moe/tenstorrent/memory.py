"""How much of each chip's DRAM a mixture-of-experts model takes, from its sizes alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..sizes import ceil_div
from .all_reduce import partial_dtype, summed_columns
from .emulator.formats import find_format
from .heads import HeadShare
from .programs import Form, LayerPrograms
from .weight_formats import ModelFormats

PAGE = 32
"""Tokens of a page of the KV cache: one tile's height."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder-only model with grouped-query attention and RoPE.

    Attributes:
        H, E, K, I: as in the operator's contract.
        V: tokens of the vocabulary. context: positions that the RoPE table holds.
        layers: in all. sparse_layers: those with experts. dense_I: intermediate size of the other layers.
        heads, kv_heads, head_dim: of the attention. attention_bias: whether qkv and out have biases.
    """

    H: int
    E: int
    K: int
    I: int
    V: int
    context: int
    layers: int
    sparse_layers: int
    dense_I: int
    heads: int
    kv_heads: int
    head_dim: int
    attention_bias: bool

    def share(self, D: int) -> HeadShare:
        """The heads of each of D chips. Raises ContractError if D chips cannot share them."""
        return HeadShare.of(self.heads, self.kv_heads, D)


@dataclass(frozen=True)
class Part:
    """One part of the model.

    Attributes:
        name: of the part. what: the tensors of the whole model, for people. per_chip: bytes on each chip.
        chips: how many share the part; 1: each holds a copy.
    """

    name: str
    what: str
    per_chip: int
    chips: int = 1


def tensor_bytes(form: Form) -> int:
    """Bytes of a tensor in DRAM; tiles are padded to 32 by 32 in the last two dimensions."""
    shape, dtype, layout = form
    kind, (*outer, last) = find_format(dtype), shape
    rows = outer.pop() if outer else 1
    size = ceil_div(rows, 32) * ceil_div(last, 32) * kind.tile_bytes if layout == "TILE" else rows * last * kind.item
    for n in outer:
        size *= n
    return size


def parts(model: ModelSizes, programs: LayerPrograms, batch: int, sequence: int, formats: ModelFormats) -> list[Part]:
    """Every part of the model for `batch` sequences of `sequence` tokens.

    The head is a matrix of its own even where it is tied: the embedding lies in rows, the head in tiles. Activations
    are the tensors of the widest moment of a layer, at the largest T of one call. What ttnn's own operators allocate,
    and what ttnn reserves, is not counted.

    Args:
        programs: of one layer, on the mesh.
        formats: of every matrix; layers without experts come first.

    Raises:
        ContractError: the chips cannot share the attention heads.
    """
    made = [*_weights(model, programs.device.D, formats), _cache(model, programs, batch, sequence, formats.of("kv"))]
    return [*made, _workspace(programs, batch, sequence), _activations(model, programs, batch, sequence)]


def _weights(model: ModelSizes, D: int, formats: ModelFormats) -> Iterable[Part]:
    H, I, E, V, layers, sparse = model.H, model.I, model.E, model.V, model.layers, model.sparse_layers
    first, own = layers - sparse, E // D

    def part(
        name: str,
        what: str,
        n: int,
        *shapes: tuple[int, ...],
        dtype: str = "bfloat16",
        layout: str = "TILE",
        chips: int = 1,
    ) -> Part:
        return Part(name, what, n * sum(tensor_bytes((shape, dtype, layout)) for shape in shapes), chips)

    def over(name: str, what: str, all_layers: range, *shapes: tuple[str, tuple[int, ...]], chips: int = 1) -> Part:
        """A part of matrices of these groups in each of these layers."""
        size = sum(tensor_bytes((shape, formats.of(group, i), "TILE")) for i in all_layers for group, shape in shapes)
        used = dict.fromkeys(formats.of(group, i) for group, _ in shapes for i in all_layers)
        return Part(name, f"{len(all_layers)} x {what} {', '.join(used)}", size, chips)

    experts = ("gate_up", (own, H, I)), ("gate_up", (own, H, I)), ("down", (own, I, H))
    yield over("experts", f"gate, up [{E}, {H}, {I}], down [{E}, {I}, {H}]", range(first, layers), *experts, chips=D)
    yield over("router", f"[{H}, {E}]", range(first, layers), ("router", (H, E)))
    if first:
        wide = model.dense_I
        matrices = (("dense", (H, wide)), ("dense", (H, wide)), ("dense", (wide, H)))
        yield over("dense layers", f"3 [{H}, {wide}]", range(first), *matrices)
    all_q, all_qkv = _widths(model, model.heads, model.kv_heads)
    what = f"qkv [{H}, {all_qkv}], out [{all_q}, {H}]"
    yield over("attention", what, range(layers), *_attention(model, D), chips=D)
    norms = layers * 2 * (H + model.head_dim) + H
    what = f"{layers} x 2 [{H}], 2 [{model.head_dim}]; 1 [{H}]; row-major"
    yield part("norms", what, 1, (1, norms), layout="ROW_MAJOR")
    rope = (model.context, model.head_dim)
    yield part("RoPE", f"2 x {list(rope)} row-major", 2, rope, layout="ROW_MAJOR")
    own_columns = summed_columns(H, D) // D
    yield part("embedding", f"[{V}, {H}] row-major", 1, (V, own_columns), layout="ROW_MAJOR", chips=D)
    what, each = f"[{H}, {V}] {formats.of('head')}", (H, ceil_div(V, D))
    yield part("head", what, 1, each, dtype=formats.of("head"), chips=D)


def _attention(model: ModelSizes, D: int) -> Iterable[tuple[str, tuple[int, int]]]:
    """The matrices of a chip's attention, with the group of each."""
    share, H = model.share(D), model.H
    columns = summed_columns(H, D)
    q, qkv = _widths(model, share.heads, share.kv_heads)
    yield from (("attention", (H, qkv)), ("attention", (q, columns)))
    if model.attention_bias:
        yield from (("bias", (1, qkv)), ("bias", (1, columns)))


def _widths(model: ModelSizes, heads: int, kv_heads: int) -> tuple[int, int]:
    """Columns of so many query heads, and of them with keys and values."""
    return heads * model.head_dim, (heads + 2 * kv_heads) * model.head_dim


def _cache(model: ModelSizes, programs: LayerPrograms, batch: int, sequence: int, form: str) -> Part:
    # page 0 takes the writes of padding tokens
    pages, D = 1 + batch * ceil_div(sequence, PAGE), programs.device.D
    each = tensor_bytes(((pages, model.share(D).kv_heads, PAGE, model.head_dim), form, "TILE"))
    what = f"{model.layers} x 2 {[pages, model.kv_heads, PAGE, model.head_dim]} {form}"
    return Part("KV cache", what, 2 * model.layers * each, D)


def _workspace(programs: LayerPrograms, batch: int, sequence: int) -> Part:
    """Buffers that all layers use: one set for decode, one for prefill."""
    T = min(batch * sequence, programs.max_T)
    bounds = sorted({programs.bound(min(batch, T)), programs.bound(T)})
    kept = sum(tensor_bytes(form) for bound in bounds for form in programs.buffers(bound).values())
    return Part("MoE workspace", f"routing and activations for T <= {', '.join(map(str, bounds))}", kept)


def _activations(model: ModelSizes, programs: LayerPrograms, batch: int, sequence: int) -> Part:
    T = min(batch * sequence, programs.max_T)
    H, D = model.H, programs.device.D
    share = model.share(D)
    q, qkv = _widths(model, share.heads, share.kv_heads)

    def tiles(columns: int, dtype: str = "bfloat16", rows: int = T) -> int:
        return tensor_bytes(((rows, columns), dtype, "TILE"))

    # residual, normed, qkv, queries and keys with RoPE, attended
    attention = 2 * tiles(H) + tiles(qkv) + tiles(q + (qkv - q) // 2) + tiles(q)
    # residual, normed in tiles and by rows, scores, top k, out
    experts = 3 * tiles(H) + T * H * 2 + tiles(model.E, "float32") + T * model.K * 8
    if D > 1:  # the device's part, its share of the sum of all parts, the sum
        kind, columns = partial_dtype(programs.device), summed_columns(H, D)
        attention = max(
            attention, tiles(H) + tiles(q) + tiles(columns, kind) + tiles(columns // D, kind) + tiles(columns)
        )
        experts += tiles(H, kind) + tiles(H, kind) // D + tiles(H)
    logits = tiles(ceil_div(model.V, D), rows=batch)
    return Part("activations", f"the widest layer at T = {T}, logits of {batch}", max(attention, experts) + logits)
