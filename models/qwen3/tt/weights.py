"""The model's weights on a chip or mesh, moved there a layer at a time.

On a mesh the chips share the experts, the heads of attention, the embedding's columns, and the head's vocabulary; all
else is replicated.
ModelFormats names each matrix's format. Large tensors are kept on disk in the device's layout: see
ttnn_moe/tenstorrent/files.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ttnn_moe import tenstorrent
from ttnn_moe.errors import CheckpointError
from ttnn_moe.sizes import ceil_div
from ttnn_moe.tenstorrent import Device, DeviceExperts, files, tensors
from ttnn_moe.tenstorrent.all_reduce import summed_columns
from ttnn_moe.tenstorrent.weight_formats import ModelFormats

from ..config import Qwen3MoeConfig
from ..layers import DenseMLP, Layer, MoE
from .shares import AttentionCut
from .sizes import check_format, share_of

TILE = 32
LEAST_EXPERTS = 64
"""ttnn.topk gets rows of at least this many logits. Those of absent experts are NEVER."""
NEVER = -1e9
"""Logits of what is not there."""


@dataclass(frozen=True, eq=False)
class Linear:
    """weight [in, out] and bias [1, out] or None, in tiles."""

    weight: Any
    bias: Any = None


@dataclass(frozen=True, eq=False)
class Router:
    """A router and its experts.

    Attributes:
        linear: gives logits [T, max(E, LEAST_EXPERTS)]. experts: the chips of the mesh share them.
    """

    linear: Linear
    experts: DeviceExperts


@dataclass(frozen=True, eq=False)
class Dense:
    """SwiGLU without experts."""

    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer's weights as ttnn tensors."""

    attention_norm: Any
    qkv: Linear
    q_norm: Any
    k_norm: Any
    out: Linear
    mlp_norm: Any
    mlp: Router | Dense


class Mover:
    """Moves torch tensors of a model of this config to the device, in the layouts of ttnn's operators.

    Args:
        formats: of the matrices. split: each chip holds a part of every expert, instead of whole experts.
    """

    def __init__(self, config: Qwen3MoeConfig, device: Device, formats: ModelFormats, split: bool = False):
        self.device, self.formats, self.split = device, formats, split
        self._folder = files.folder(device)
        self._attention = AttentionCut(config, share_of(config, device.D))

    def layer(self, layer: Layer, i: int) -> LayerWeights:
        """Layer i's weights on the device, in the formats of --weights."""
        attention, mlp = layer.attention, layer.mlp
        wide, form = self.formats.of("dense", i), self.formats.of("attention", i)
        moved: Router | Dense
        if isinstance(mlp, MoE):
            formats = str(self.formats.experts(i))
            experts = tenstorrent.load_experts(mlp.experts, self.device, split=self.split, weight_format=formats)
            moved = Router(self._router(mlp.router.weight, self.formats.of("router", i)), experts)
        else:
            assert isinstance(mlp, DenseMLP)
            gate, up = mlp.gate_up.weight.chunk(2)
            moved = Dense(*(self.linear(weight, form=wide) for weight in (gate, up, mlp.down.weight)))
        return LayerWeights(
            self.norm(layer.attention_norm.weight),
            self.qkv(attention.qkv.weight, attention.qkv.bias, form),
            self.norm(attention.q_norm.weight),
            self.norm(attention.k_norm.weight),
            self.out(attention.out.weight, attention.out.bias, form),
            self.norm(layer.mlp_norm.weight),
            moved,
        )

    def norm(self, weight: Tensor) -> Any:
        """weight [n], in rows of a tile's width, as ttnn.rms_norm expects."""
        return self._keep(weight.reshape(1, 1, -1, TILE), layout="ROW_MAJOR")

    def linear(self, weight: Tensor, bias: Tensor | None = None, form: str = "bfloat16") -> Linear:
        """weight [out, in] in this format and bias [out], as tiles."""
        return Linear(self._keep(weight, turned=True, form=form), None if bias is None else self._keep(bias[None]))

    def qkv(self, weight: Tensor, bias: Tensor | None, form: str = "bfloat16") -> Linear:
        """Attention's first projection: each chip gets the columns of its heads. Arguments as `linear`."""
        if self.device.D == 1:
            return self.linear(weight, bias, form)
        cut = self._attention.qkv
        return self._parts(cut(weight), None if bias is None else cut(bias), form)

    def out(self, weight: Tensor, bias: Tensor | None, form: str = "bfloat16") -> Linear:
        """Attention's last projection: each chip gets the rows of its heads. Arguments as `linear`."""
        if self.device.D == 1:
            return self.linear(weight, bias, form)
        cut = self._attention
        return self._parts(cut.out(weight), None if bias is None else cut.out_bias(bias), form)

    def _parts(self, weight: Tensor, bias: Tensor | None, form: str) -> Linear:
        """weight [D, out, in] and bias [D, out], a part for each chip."""
        kept = None if bias is None else self._keep(bias[:, None], cut=True)
        return Linear(self._keep(weight, turned=True, cut=True, form=form), kept)

    def table(self, weight: Tensor) -> Any:
        """weight [n, width], row-major."""
        return self._keep(weight, layout="ROW_MAJOR")

    def embedding(self, weight: Tensor) -> Any:
        """weight [V, H], row-major; each of D > 1 chips gets [1, 1, V, columns], 0 past H."""
        D, (V, H) = self.device.D, weight.shape
        if D == 1:
            return self.table(weight)
        wide = torch.nn.functional.pad(weight, (0, summed_columns(H, D) - H))
        return self._keep(wide.view(V, D, 1, -1).permute(1, 2, 0, 3), layout="ROW_MAJOR", cut=True)

    def head(self, weight: Tensor) -> Linear:
        """weight [V, H] -> [H, ceil(V / D)] on each of D devices; logits past V are NEVER."""
        D, V, form = self.device.D, weight.shape[0], self.formats.of("head")
        each = ceil_div(V, D)
        absent = each * D - V
        if not absent:
            return Linear(self._keep(weight.reshape(D, each, -1), turned=True, cut=True, form=form))
        bias = torch.cat((weight.new_zeros(V), weight.new_full((absent,), NEVER)))
        weight = torch.cat((weight, weight.new_zeros(absent, weight.shape[1])))
        return self._parts(weight.reshape(D, each, -1), bias.reshape(D, each), form)

    def _router(self, weight: Tensor, form: str) -> Linear:
        E, H = weight.shape
        if E >= LEAST_EXPERTS:
            return self.linear(weight, form=form)
        absent = LEAST_EXPERTS - E
        bias = torch.cat((weight.new_zeros(E), weight.new_full((absent,), NEVER)))
        return self.linear(torch.cat((weight, weight.new_zeros(absent, H))), bias, form)

    def _keep(
        self, values: Tensor, layout: str = "TILE", turned: bool = False, cut: bool = False, form: str = "bfloat16"
    ) -> Any:
        """The values on the device. turned: transposed. cut: each chip gets a part of the first dimension."""
        path = None
        if self._folder is not None and values.numel() * values.element_size() >= files.LEAST_CACHED_BYTES:
            key = files.digest([values], tuple(values.shape), layout, turned, cut, form, self.device.D)
            path = self._folder / f"{key}.tensorbin"
        move = tensors.shard if cut else tensors.replicate

        def make() -> Any:
            whole = values.transpose(-1, -2) if turned else values
            return move(whole, self.device, dtype=form, layout=layout, on_host=True)

        return files.kept(path, make, self.device)


def check_sizes(config: Qwen3MoeConfig) -> None:
    """Raise CheckpointError for sizes or formats that ttnn's operators, or ours, do not support."""
    check_format(config)
    head = config.head_dim
    sizes = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
    if config.num_experts:
        sizes["moe_intermediate_size"] = config.moe_intermediate_size
    problems = [f"{name}={size}" for name, size in sizes.items() if size % TILE]
    if head != TILE and head % (2 * TILE):
        problems.append(f"head_dim={head}")
    if problems:
        raise CheckpointError(
            "this model does not fit the device's tiles",
            got=", ".join(problems),
            expected="sizes that are multiples of 32, and a head_dim of 32 or a multiple of 64",
            remedy="another backend",
        )
