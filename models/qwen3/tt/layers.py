"""The network's layers on ttnn tensors. x is [1, 1, T, H] in tiles; T counts the tokens of a pass or of a decode step.

On a mesh every chip has its own heads, experts, columns of the embedding and part of the vocabulary; it does the rest
as the others do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ttnn_moe.tenstorrent import Device
from ttnn_moe.tenstorrent.all_reduce import all_gathered, all_reduce, partial_dtype
from ttnn_moe.tenstorrent.runtime import library

from ..config import Qwen3MoeConfig
from .attention import DecodeTables, Exact, PrefillTables
from .cache import PagedCache
from .moe import MoE, row_major
from .sizes import share_of
from .weights import Dense, LayerWeights, Linear, Router


@dataclass(frozen=True)
class Place:
    """Where the tokens of a pass or decode step stand.

    Attributes:
        cos, sin: of their positions, [1, 1, T, head_dim].
        cache: keeps their keys and values. tables: where in it.
    """

    cos: Any
    sin: Any
    cache: PagedCache
    tables: PrefillTables | DecodeTables


@dataclass(frozen=True)
class Logits:
    """Logits of R tokens over V, each chip's part of V.

    Attributes:
        parts: [1, 1, R, V / D] bfloat16. largest: the largest of each row, [1, 1, R]. at: the first such, uint32.
        values, places: of steps that draw, the largest of each row and chunk, and where in it: [1, 1, R * chunks, n].
        mass: of Tail.MASS, the sum of exp((logit - largest) / temperature), [1, 1, R].
    """

    parts: Any
    largest: Any
    at: Any
    values: Any = None
    places: Any = None
    mass: Any = None


class Network:
    """The layers of a model of these sizes on a device."""

    def __init__(self, config: Qwen3MoeConfig, device: Device):
        ttnn = library()

        self.config, self.device = config, device
        self.share = share_of(config, device.D)
        # sums are fp32 where the device unpacks fp32 to DST
        self.exact = ttnn.init_device_compute_kernel_config(
            device.handle.arch(),
            math_fidelity=ttnn.MathFidelity.HiFi4,
            math_approx_mode=False,
            fp32_dest_acc_en=device.machine.unpack_to_dest,
            packer_l1_acc=False,
        )
        self._attends = Exact.of(device, self.exact)
        self.moe = MoE(config, device, self.exact)

    def embed(self, ids: Any, embedding: Any) -> Any:
        """The embeddings of ids [1, T] uint32 -> [1, 1, T, H] on every chip; each has its columns of them."""
        found = self.rows(ids, embedding)
        return found if self.device.D == 1 else self._narrowed(all_gathered(found))

    def rows(self, ids: Any, table: Any) -> Any:
        """Rows of `table` [n, width] that ids [1, T] uint32 name -> [1, 1, T, width]."""
        ttnn = library()

        found = ttnn.embedding(ids, table, layout=ttnn.TILE_LAYOUT)
        return ttnn.reshape(found, (1, 1, int(ids.shape[-1]), int(table.shape[-1])))

    def norm(self, x: Any, weight: Any) -> Any:
        ttnn = library()

        return ttnn.rms_norm(x, epsilon=self.config.rms_norm_eps, weight=weight, compute_kernel_config=self.exact)

    def linear(self, x: Any, by: Linear, dtype: Any = None) -> Any:
        """x times the weight, in this dtype; default: that of x."""
        ttnn = library()

        return ttnn.linear(x, by.weight, bias=by.bias, dtype=dtype, compute_kernel_config=self.exact)

    def layer(self, x: Any, i: int, weights: LayerWeights, place: Place) -> Any:
        """Layer i of x, the residual stream [1, 1, T, H], replicated over the mesh -> the same form."""
        ttnn = library()

        x = ttnn.add(x, self.attention(self.norm(x, weights.attention_norm), i, weights, place))
        normed = self.norm(x, weights.mlp_norm)
        mlp = weights.mlp
        return ttnn.add(x, self.moe(normed, mlp) if isinstance(mlp, Router) else self.dense(normed, mlp))

    def attention(self, x: Any, i: int, weights: LayerWeights, place: Place) -> Any:
        """Attention of layer i to normed x, summed over the chips. The step's keys and values go to the cache first."""
        ttnn = library()

        q, k, v = ttnn.experimental.nlp_create_qkv_heads(
            self.linear(x, weights.qkv),
            num_heads=self.share.heads,
            num_kv_heads=self.share.kv_heads,
            transpose_k_heads=False,
        )
        q, k = (self._rotated(self.norm(one, norm), place) for one, norm in ((q, weights.q_norm), (k, weights.k_norm)))
        place.cache.write(i, k, v, place.tables)
        heads = place.cache.attend(i, q, place.tables, self._attends)
        return self.summed(ttnn.experimental.nlp_concat_heads(heads), weights.out)

    def _rotated(self, x: Any, place: Place) -> Any:
        """Queries or keys with RoPE."""
        ttnn = library()

        return ttnn.experimental.rotary_embedding_hf(
            x, place.cos, place.sin, is_decode_mode=False, compute_kernel_config=self.exact
        )

    def summed(self, x: Any, by: Linear) -> Any:
        """The sum over the chips of x times their part of a weight, rounded to bfloat16 once."""
        ttnn = library()

        if self.device.D == 1:
            return self.linear(x, by)
        partial = self.linear(x, by, getattr(ttnn, partial_dtype(self.device)))
        return self._narrowed(all_reduce(partial, ttnn.bfloat16))

    def _narrowed(self, whole: Any) -> Any:
        """The first H columns of whole [1, 1, T, any]."""
        ttnn = library()

        H = self.config.hidden_size
        return whole if int(whole.shape[3]) == H else ttnn.slice(whole, [0, 0, 0, 0], [1, 1, int(whole.shape[2]), H])

    def dense(self, x: Any, weights: Dense) -> Any:
        ttnn = library()

        return self.linear(
            ttnn.multiply(ttnn.silu(self.linear(x, weights.gate)), self.linear(x, weights.up)), weights.down
        )

    def logits(self, x: Any, ends: Any, norm: Any, head: Linear) -> Logits:
        """Logits of the rows of x that ends [1, R] uint32 names; None: of all."""
        ttnn = library()

        if ends is not None:
            x = self.rows(ends, row_major(x, (int(x.shape[2]), int(x.shape[3]))))
        made = self.linear(self.norm(x, norm), head)
        # row-major: argmax of tiles runs on one core
        at = ttnn.argmax(ttnn.to_layout(made, ttnn.ROW_MAJOR_LAYOUT), dim=-1)
        return Logits(made, ttnn.max(made, dim=-1), at)
