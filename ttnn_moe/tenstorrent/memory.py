"""How much of each chip's DRAM a mixture-of-experts model takes, from its sizes alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..sizes import ceil_div
from .all_reduce import partial_dtype
from .emulator.formats import find_format
from .programs import Form, LayerPrograms
from .weight_formats import ModelFormats

# Parts that the chips of a mesh share; every chip holds a copy of each of the others.
SHARED = frozenset({"experts", "head"})
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

    @property
    def q_width(self) -> int:
        """Columns of the query projection."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim


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


def parts(
    model: ModelSizes,
    programs: LayerPrograms,
    batch: int,
    sequence: int,
    shared: frozenset[str] = SHARED,
    formats: ModelFormats | None = None,
) -> list[Part]:
    """Every part of the model for `batch` sequences of `sequence` tokens.

    The head is a matrix of its own even where it is tied: the embedding lies in rows, the head in tiles. Activations
    are the tensors of the widest moment of a layer, at the largest T of one call. What ttnn's own operators allocate,
    and what ttnn reserves, is not counted.

    Args:
        programs: of one layer, on the mesh.
        shared: names of the parts that the chips share: the experts one by one, the cache by heads, other tensors by
            columns.
        formats: of every matrix; layers without experts come first. Default: bfloat16, and `programs`' for experts.
    """
    formats = ModelFormats.parse(programs.sizes.weight_format) if formats is None else formats
    made = [*_weights(model, programs, shared, formats), _cache(model, programs, batch, sequence, shared)]
    return [*made, _workspace(programs, batch, sequence), _activations(model, programs, batch, sequence)]


def _share(form: Form, dim: int, chips: int) -> Form:
    shape, dtype, layout = form
    return (*shape[:dim], ceil_div(shape[dim], chips), *shape[dim + 1 :]), dtype, layout


def _weights(
    model: ModelSizes, programs: LayerPrograms, shared: frozenset[str], formats: ModelFormats
) -> Iterable[Part]:
    H, I, E, V, layers, sparse = model.H, model.I, model.E, model.V, model.layers, model.sparse_layers
    q, qkv = model.q_width, model.q_width + 2 * model.kv_width
    first = layers - sparse

    def part(name: str, what: str, n: int, *shapes: tuple[int, ...], layout: str = "TILE", **more: str) -> Part:
        chips = programs.device.D if name in shared else 1
        forms = (
            _share((shape, more.get("dtype", "bfloat16"), layout), 0 if len(shape) == 3 else 1, chips)
            for shape in shapes
        )
        return Part(name, what, n * sum(map(tensor_bytes, forms)), chips)

    def over(name: str, what: str, all_layers: range, *shapes: tuple[str, tuple[int, ...]]) -> Part:
        """A part of matrices of these groups in each of these layers."""
        made = [part(name, "", 1, shape, dtype=formats.of(group, i)) for i in all_layers for group, shape in shapes]
        used = dict.fromkeys(formats.of(group, i) for group, _ in shapes for i in all_layers)
        whole = f"{len(all_layers)} x {what} {', '.join(used)}"
        return Part(name, whole, sum(one.per_chip for one in made), made[0].chips if made else 1)

    experts = ("gate_up", (E, H, I)), ("gate_up", (E, H, I)), ("down", (E, I, H))
    yield over("experts", f"gate, up [{E}, {H}, {I}], down [{E}, {I}, {H}]", range(first, layers), *experts)
    yield part("router", f"{sparse} x [{H}, {E}]", sparse, (H, E))
    if first:
        wide = model.dense_I
        matrices = (("dense", (H, wide)), ("dense", (H, wide)), ("dense", (wide, H)))
        yield over("dense layers", f"3 [{H}, {wide}]", range(first), *matrices)
    qkv_out = (("attention", (H, qkv)), ("attention", (q, H)))
    bias = (("bias", (1, qkv)), ("bias", (1, H))) if model.attention_bias else ()
    yield over("attention", f"qkv [{H}, {qkv}], out [{q}, {H}]", range(layers), *qkv_out, *bias)
    norms = layers * 2 * (H + model.head_dim) + H
    what = f"{layers} x 2 [{H}], 2 [{model.head_dim}]; 1 [{H}]; row-major"
    yield part("norms", what, 1, (1, norms), layout="ROW_MAJOR")
    rope = (model.context, model.head_dim)
    yield part("RoPE", f"2 x {list(rope)} row-major", 2, rope, layout="ROW_MAJOR")
    yield part("embedding", f"[{V}, {H}] row-major", 1, (V, H), layout="ROW_MAJOR")
    yield part("head", f"[{H}, {V}] {formats.of('head')}", 1, (H, V), dtype=formats.of("head"))


def _cache(model: ModelSizes, programs: LayerPrograms, batch: int, sequence: int, shared: frozenset[str]) -> Part:
    # page 0 takes the writes of padding tokens
    shape = (1 + batch * ceil_div(sequence, PAGE), model.kv_heads, PAGE, model.head_dim)
    chips = programs.device.D if "KV cache" in shared else 1
    each = tensor_bytes(_share((shape, "bfloat16", "TILE"), 1, chips))
    return Part("KV cache", f"{model.layers} x 2 {list(shape)}", 2 * model.layers * each, chips)


def _workspace(programs: LayerPrograms, batch: int, sequence: int) -> Part:
    """Buffers that all layers use: one set for decode, one for prefill."""
    T = min(batch * sequence, programs.max_T)
    bounds = sorted({programs.bound(min(batch, T)), programs.bound(T)})
    kept = sum(tensor_bytes(form) for bound in bounds for form in programs.buffers(bound).values())
    return Part("MoE workspace", f"routing and activations for T <= {', '.join(map(str, bounds))}", kept)


def _activations(model: ModelSizes, programs: LayerPrograms, batch: int, sequence: int) -> Part:
    T = min(batch * sequence, programs.max_T)
    H, D, q, kv = model.H, programs.device.D, model.q_width, model.kv_width

    def tiles(columns: int, dtype: str = "bfloat16", rows: int = T) -> int:
        return tensor_bytes(((rows, columns), dtype, "TILE"))

    # residual, normed, qkv, queries and keys with RoPE, attended
    attention = 2 * tiles(H) + tiles(q + 2 * kv) + tiles(q + kv) + tiles(q)
    # residual, normed in tiles and by rows, scores, top k, out
    experts = 3 * tiles(H) + T * H * 2 + tiles(model.E, "float32") + T * model.K * 8
    if D > 1:  # the device's part, its share of the sum of all parts, the sum
        kind = partial_dtype(programs.device)
        experts += tiles(H, kind) + tiles(H, kind) // D + tiles(H)
    logits = tiles(model.V, rows=batch)
    return Part("activations", f"the widest layer at T = {T}, logits of {batch}", max(attention, experts) + logits)
