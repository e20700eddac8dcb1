"""What a Qwen3-MoE model takes of each chip's DRAM: from sizes alone, without weights and without a device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .all_reduce import partial_dtype
from .emulator.formats import find_format
from .programs import Form, LayerPrograms

if TYPE_CHECKING:
    from ttnn_moe.models.qwen3.config import Qwen3MoeConfig

# Parts that the chips of a mesh share; every chip holds a copy of each of the others.
SHARED = frozenset({"experts", "head"})


@dataclass(frozen=True)
class Part:
    """One part of the model.

    Attributes:
        name: of the part. what: the tensors of the whole model, for people. per_chip: bytes on each chip. chips: that
            share it (1: a copy on each).
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
    size = -(-rows // 32) * -(-last // 32) * kind.tile_bytes if layout == "TILE" else rows * last * kind.item
    for n in outer:
        size *= n
    return size


def parts(
    config: Qwen3MoeConfig, programs: LayerPrograms, batch: int, sequence: int, shared: frozenset[str] = SHARED
) -> list[Part]:
    """Every part of the model for `batch` sequences of `sequence` tokens, prefilled in one call where one takes them.

    Weights are bfloat16, the experts' as the operators have them; one matrix for the head even where it is tied to the
    embedding, which is looked up by rows and not held in tiles. Activations are the tensors of the widest moment of
    a layer; what ttnn's own operators allocate on the side, and what ttnn reserves, is not in them.

    Args:
        programs: of one layer, on the mesh.
        shared: names of the parts that the chips share: the experts one by one, the cache by heads, other tensors by
            columns.
    """
    made = [*_weights(config, programs, shared), _cache(config, programs, batch, sequence, shared)]
    return [*made, _workspace(programs, batch, sequence), _activations(config, programs, batch, sequence)]


def _share(form: Form, dim: int, chips: int) -> Form:
    shape, dtype, layout = form
    return (*shape[:dim], -(-shape[dim] // chips), *shape[dim + 1 :]), dtype, layout


def _weights(config: Qwen3MoeConfig, programs: LayerPrograms, shared: frozenset[str]) -> Iterable[Part]:
    H, I, E, V = config.hidden_size, config.moe_intermediate_size, config.num_experts, config.vocab_size
    layers, weight_format = config.num_hidden_layers, programs.sizes.weight_format
    sparse = sum(config.is_sparse(i) for i in range(layers))
    q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))

    def part(
        name: str, what: str, n: int, *shapes: tuple[int, ...], dtype: str = "bfloat16", layout: str = "TILE"
    ) -> Part:
        chips = programs.device.D if name in shared else 1
        forms = (_share((shape, dtype, layout), 0 if len(shape) == 3 else 1, chips) for shape in shapes)
        return Part(name, what, n * sum(map(tensor_bytes, forms)), chips)

    what = f"{sparse} x gate, up [{E}, {H}, {I}], down [{E}, {I}, {H}] {weight_format}"
    yield part("experts", what, sparse, (E, H, I), (E, H, I), (E, I, H), dtype=weight_format)
    yield part("router", f"{sparse} x [{H}, {E}]", sparse, (H, E))
    if sparse < layers:
        n, wide = layers - sparse, config.intermediate_size
        yield part("dense layers", f"{n} x 3 [{H}, {wide}]", n, (H, wide), (H, wide), (wide, H))
    bias = ((1, q + 2 * kv), (1, H)) if config.attention_bias else ()
    what = f"{layers} x qkv [{H}, {q + 2 * kv}], out [{q}, {H}]"
    yield part("attention", what, layers, (H, q + 2 * kv), (q, H), *bias)
    norms = layers * 2 * (H + config.head_dim) + H
    what = f"{layers} x 2 [{H}], 2 [{config.head_dim}]; 1 [{H}]; row-major"
    yield part("norms", what, 1, (1, norms), layout="ROW_MAJOR")
    rope = (config.max_position_embeddings, config.head_dim)
    yield part("RoPE", f"2 x {list(rope)} row-major", 2, rope, layout="ROW_MAJOR")
    yield part("embedding", f"[{V}, {H}] row-major", 1, (V, H), layout="ROW_MAJOR")
    yield part("head", f"[{H}, {V}]", 1, (H, V))


def _cache(config: Qwen3MoeConfig, programs: LayerPrograms, batch: int, sequence: int, shared: frozenset[str]) -> Part:
    # in pages of a tile's height; one more takes what does not count
    shape = (1 + batch * -(-sequence // 32), config.num_key_value_heads, 32, config.head_dim)
    chips = programs.device.D if "KV cache" in shared else 1
    each = tensor_bytes(_share((shape, "bfloat16", "TILE"), 1, chips))
    tensors = 2 * config.num_hidden_layers
    return Part("KV cache", f"{config.num_hidden_layers} x 2 {list(shape)}", tensors * each, chips)


def _workspace(programs: LayerPrograms, batch: int, sequence: int) -> Part:
    """What the operators keep between calls: one set of buffers for decode, one for prefill, for all layers."""
    T = min(batch * sequence, programs.max_T)
    bounds = sorted({programs.bound(min(batch, T)), programs.bound(T)})
    kept = sum(tensor_bytes(form) for bound in bounds for form in programs.buffers(bound).values())
    return Part("MoE workspace", f"routing and activations for T <= {', '.join(map(str, bounds))}", kept)


def _activations(config: Qwen3MoeConfig, programs: LayerPrograms, batch: int, sequence: int) -> Part:
    T = min(batch * sequence, programs.max_T)
    H, K, D = config.hidden_size, config.num_experts_per_tok, programs.device.D
    q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))

    def tiles(columns: int, dtype: str = "bfloat16", rows: int = T) -> int:
        return tensor_bytes(((rows, columns), dtype, "TILE"))

    # residual, normed, qkv, queries and keys with RoPE, attended
    attention = 2 * tiles(H) + tiles(q + 2 * kv) + tiles(q + kv) + tiles(q)
    # residual, normed in tiles and by rows, scores, top k, out
    experts = 3 * tiles(H) + T * H * 2 + tiles(config.num_experts, "float32") + T * K * 8
    if D > 1:  # the device's part, what it sums of all parts, the sum
        kind = partial_dtype(programs.device)
        experts += tiles(H, kind) + tiles(H, kind) // D + tiles(H)
    logits = tiles(config.vocab_size, rows=batch)
    return Part("activations", f"the widest layer at T = {T}, logits of {batch}", max(attention, experts) + logits)
