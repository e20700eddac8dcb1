"""What a Qwen3-MoE model takes of each chip's DRAM: from sizes alone, without weights and without a device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .emulator.formats import find_format
from .mesh import partial_dtype
from .operators import Form, Operators

if TYPE_CHECKING:
    from models.qwen3.config import Qwen3MoeConfig

# Parts that the chips of a mesh share evenly; every chip holds a copy of each of the others.
SHARED = frozenset({"experts"})
WEIGHTS = ("experts", "router", "dense layers", "attention", "norms", "embedding", "head")


@dataclass(frozen=True)
class Part:
    """One part of the model.

    Attributes:
        name: of the part. what: the tensors, for people. nbytes: of the whole model. chips: that share it (1: a copy
            on each).
    """

    name: str
    what: str
    nbytes: int
    chips: int = 1

    @property
    def per_chip(self) -> int:
        return -(-self.nbytes // self.chips)


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
    config: Qwen3MoeConfig,
    operators: Operators,
    batch: int,
    sequence: int,
    shared: frozenset[str] = SHARED,
) -> list[Part]:
    """Every part of the model for `batch` sequences of `sequence` tokens, prefilled in one call where one takes them.

    Weights are bfloat16, the experts' as the operators have them; one matrix for the head even where it is tied to the
    embedding, which is looked up by rows and not held in tiles. Activations are the tensors of the widest moment of
    a layer; what ttnn's own operators allocate on the side, and what ttnn reserves, is not in them.

    Args:
        operators: of one layer, on the mesh.
        shared: names of the parts that the chips share evenly.
    """
    D = operators.device.D
    made = [*_weights(config, operators.sizes.weight_format), _cache(config, batch, sequence)]
    made += [_workspace(operators, batch, sequence), _activations(config, operators, batch, sequence)]
    return [Part(p.name, p.what, p.nbytes, D if p.name in shared else 1) for p in made]


def _weights(config: Qwen3MoeConfig, weight_format: str) -> Iterable[Part]:
    H, I, E = config.hidden_size, config.moe_intermediate_size, config.num_experts
    layers = config.num_hidden_layers
    sparse = sum(config.is_sparse(i) for i in range(layers))
    q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))

    def tiles(*shapes: tuple[int, ...], form: str = "bfloat16") -> int:
        return sum(tensor_bytes((shape, form, "TILE")) for shape in shapes)

    what = f"{sparse} x gate, up [{E}, {H}, {I}], down [{E}, {I}, {H}] {weight_format}"
    yield Part("experts", what, sparse * tiles((E, H, I), (E, H, I), (E, I, H), form=weight_format))
    yield Part("router", f"{sparse} x [{H}, {E}]", sparse * tiles((H, E)))
    if sparse < layers:
        n, wide = layers - sparse, config.intermediate_size
        yield Part("dense layers", f"{n} x 3 [{H}, {wide}]", n * tiles((H, wide), (H, wide), (wide, H)))
    attention = tiles((H, q + 2 * kv), (q, H))
    if config.attention_bias:
        attention += tiles((1, q + 2 * kv), (1, H))
    yield Part("attention", f"{layers} x qkv [{H}, {q + 2 * kv}], out [{q}, {H}]", layers * attention)
    norms = layers * 2 * (H + config.head_dim) + H
    yield Part("norms", f"{layers} x 2 [{H}], 2 [{config.head_dim}]; 1 [{H}]; row-major", norms * 2)
    V = config.vocab_size
    yield Part("embedding", f"[{V}, {H}] row-major", tensor_bytes(((V, H), "bfloat16", "ROW_MAJOR")))
    yield Part("head", f"[{H}, {V}]", tiles((H, V)))


def _cache(config: Qwen3MoeConfig, batch: int, sequence: int) -> Part:
    shape = (batch, config.num_key_value_heads, sequence, config.head_dim)
    each = tensor_bytes((shape, "bfloat16", "TILE"))
    return Part("KV cache", f"{config.num_hidden_layers} x 2 {list(shape)}", config.num_hidden_layers * 2 * each)


def _workspace(operators: Operators, batch: int, sequence: int) -> Part:
    """What the operators keep between calls: one set of buffers for decode, one for prefill, for all layers."""
    T = min(batch * sequence, operators.max_T)
    bounds = sorted({operators.bound(min(batch, T)), operators.bound(T)})
    kept = sum(tensor_bytes(form) for bound in bounds for form in operators.buffers(bound).values())
    return Part("MoE workspace", f"routing and activations for T <= {', '.join(map(str, bounds))}", kept)


def _activations(config: Qwen3MoeConfig, operators: Operators, batch: int, sequence: int) -> Part:
    T = min(batch * sequence, operators.max_T)
    H, K, D = config.hidden_size, config.num_experts_per_tok, operators.device.D
    q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))

    def tiles(columns: int, dtype: str = "bfloat16", rows: int = T) -> int:
        return tensor_bytes(((rows, columns), dtype, "TILE"))

    # residual, normed, qkv, queries and keys with RoPE, attended
    attention = 2 * tiles(H) + tiles(q + 2 * kv) + tiles(q + kv) + tiles(q)
    # residual, normed in tiles and by rows, scores, top k, out
    experts = 3 * tiles(H) + T * H * 2 + tiles(config.num_experts, "float32") + T * K * 8
    if D > 1:  # the device's part, what it sums of all parts, the sum
        kind = partial_dtype(operators.device)
        experts += tiles(H, kind) + tiles(H, kind) // D + tiles(H)
    logits = tiles(config.vocab_size, rows=batch)
    return Part("activations", f"the widest layer at T = {T}, logits of {batch}", max(attention, experts) + logits)
