"""Formats of the experts of a checkpoint: the tensors of a layer, their names in files, and how they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ttnn_moe.contract import Experts, Routing
from ttnn_moe.errors import CheckpointError
from ttnn_moe.formats import int4_24, mxfp4, quantise_int4_24, quantise_mxfp4
from ttnn_moe.formats.stored import METHOD, STORED, known
from ttnn_moe.visible import shown

from .files import Fields

UNFINISHED = "quantize.unfinished.json"
"""A file of a directory whose conversion did not end."""


class WeightFormat(Protocol):
    """The experts of one layer, as a model holds them and as a checkpoint names them.

    Attributes:
        name: of the format in `ttnn_moe.formats`. version: of the tensors' names and layout in files.
        calibrates: whether `quantise` reads hidden.
    """

    name: str
    version: int
    calibrates: bool

    def why_not(self, E: int, H: int, I: int) -> str | None:
        """Why experts of these sizes cannot have the format; None: they can."""

    def empty(self, E: int, H: int, I: int) -> dict[str, Tensor]:
        """Uninitialised tensors by their names in `Experts`, in fp32 unless the format gives the dtype."""

    def slots(self, tensors: Mapping[str, Tensor], prefix: str, fused: bool, first: int = 0) -> dict[str, Tensor]:
        """The tensors under their names in a checkpoint, which begin with `prefix`; views.

        fused: dense experts are stored fused, as transformers 5 holds them, rather than one by one.
        first: number of the first expert of the tensors.
        """

    def fill(self, tensors: Mapping[str, Tensor], std: float, generator: torch.Generator) -> None:
        """Random weights of this standard deviation, in place; tensors of floats stay as they are."""

    def check_values(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ContractError for values that no conversion makes."""

    def quantise(self, experts: Experts, hidden: Tensor | None, routing: Routing | None) -> Experts:
        """Dense experts in the format; hidden [T, H] and its routing calibrate them, where `calibrates`."""


class Dense:
    """bf16, fp16 or fp32 matrices."""

    name, version, calibrates = "dense", 1, False

    def why_not(self, E: int, H: int, I: int) -> str | None:
        return None

    def empty(self, E: int, H: int, I: int) -> dict[str, Tensor]:
        return {"gate_up": torch.empty(E, 2 * I, H), "down": torch.empty(E, H, I)}

    def slots(self, tensors: Mapping[str, Tensor], prefix: str, fused: bool, first: int = 0) -> dict[str, Tensor]:
        if fused:
            return {prefix + "gate_up_proj": tensors["gate_up"], prefix + "down_proj": tensors["down"]}
        out = {}
        pairs = zip(tensors["gate_up"].unbind(), tensors["down"].unbind(), strict=True)
        for e, (gate_up, down) in enumerate(pairs, first):
            gate, up = gate_up.chunk(2)
            out[f"{prefix}{e}.gate_proj.weight"], out[f"{prefix}{e}.up_proj.weight"] = gate, up
            out[f"{prefix}{e}.down_proj.weight"] = down
        return out

    def fill(self, tensors: Mapping[str, Tensor], std: float, generator: torch.Generator) -> None:
        pass

    def check_values(self, tensors: Mapping[str, Tensor]) -> None:
        pass

    def quantise(self, experts: Experts, hidden: Tensor | None, routing: Routing | None) -> Experts:
        return experts


class _Quantised:
    """The tensors of a format of `ttnn_moe.formats.stored`."""

    def __init__(self, name: str):
        self._stored = STORED[name]
        self.name, self.version = name, self._stored.version

    def why_not(self, E: int, H: int, I: int) -> str | None:
        of = self._stored.multiple
        wrong = [f"{name} = {n}" for name, n in (("H", H), ("I", I)) if n % of]
        return f"{' and '.join(wrong)}: not a multiple of {of}" if wrong else None

    def empty(self, E: int, H: int, I: int) -> dict[str, Tensor]:
        return {each.name: torch.empty(each.shape(E, H, I), dtype=each.dtype) for each in self._stored.tensors.values()}

    def slots(self, tensors: Mapping[str, Tensor], prefix: str, fused: bool, first: int = 0) -> dict[str, Tensor]:
        return {prefix + name: tensors[each.name] for name, each in self._stored.tensors.items()}


class Int4_24(_Quantised):
    """Words w13 and w2 of `ttnn_moe.formats.int4_24`, one tensor each a layer."""

    calibrates = True

    def fill(self, tensors: Mapping[str, Tensor], std: float, generator: torch.Generator) -> None:
        # of four channels, one has a uniform int4, of variance 21.5: one scale gives the standard deviation
        scale = int(torch.tensor(std * (4 / 21.5) ** 0.5, dtype=torch.bfloat16).view(torch.int16))
        for words in tensors.values():
            words.random_(1 << 48, generator=generator).add_(scale << 48)

    def check_values(self, tensors: Mapping[str, Tensor]) -> None:
        int4_24.check_scales(**tensors)

    def quantise(self, experts: Experts, hidden: Tensor | None, routing: Routing | None) -> Experts:
        return quantise_int4_24.quantise_experts(experts, hidden, routing)


class Mxfp4(_Quantised):
    """Blocks and scales of `ttnn_moe.formats.mxfp4`, four tensors a layer."""

    calibrates = False

    def fill(self, tensors: Mapping[str, Tensor], std: float, generator: torch.Generator) -> None:
        # the variance of uniform codes is 8.5625: two scales in turn, by chance, give the standard deviation
        square = std**2 / 8.5625
        low = math.floor(math.log2(square) / 2)
        share = (square / 4.0**low - 1) / 3
        for name, tensor in tensors.items():
            if name.endswith("_blocks"):
                tensor.random_(256, generator=generator)
            else:
                tensor.bernoulli_(share, generator=generator).add_(127 + low)

    def check_values(self, tensors: Mapping[str, Tensor]) -> None:
        mxfp4.check_scales(**{name: tensor for name, tensor in tensors.items() if name.endswith("_scales")})

    def quantise(self, experts: Experts, hidden: Tensor | None, routing: Routing | None) -> Experts:
        return quantise_mxfp4.quantise_experts(experts)


FORMATS: dict[str, WeightFormat] = {fmt.name: fmt for fmt in (Dense(), Int4_24(int4_24.NAME), Mxfp4(mxfp4.NAME))}
QUANTISED = tuple(name for name in FORMATS if name != Dense.name)


def format_named(fields: Fields) -> str:
    """The format that the quantization_config of a config.json names; "dense" where there is none.

    Raises:
        CheckpointError: another method, an unknown format, or another version of it.
    """
    if not fields.values.get("quantization_config"):
        return Dense.name
    given = fields.fields("quantization_config")
    method: Any = given.values.get("quant_method", "unknown")
    if method != METHOD:
        raise CheckpointError(
            f"{fields.source} describes a quantised checkpoint",
            got=f"quantization_config with quant_method {shown(method)}",
            expected=f"bf16, fp16 or fp32 weights, or quant_method {METHOD!r}",
        )
    name, version = given.text("format"), given.integer("version")
    if name not in QUANTISED or version != FORMATS[name].version:
        raise CheckpointError(
            f"{fields.source} describes experts of an unknown format",
            got=f"format {shown(name)}, version {version}",
            expected=f"one of {known()}",
            remedy="quantise the original checkpoint again with this version of ttnn-moe, or use a newer one",
        )
    return name
