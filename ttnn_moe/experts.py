"""Experts: one layer's expert weights, in any format, opaque to the front-end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .accelerator import NO_DEVICE
from .activations import ACTIVATIONS, SILU
from .arguments import is_size
from .errors import ContractError
from .formats import get_format, int4_24, mxfp4
from .memory import check_layout, check_tensors
from .placement import Placement, check_placement
from .visible import shown
from .watched import watcher

GATE_UP_ORDERS = ("halves", "interleaved")


@dataclass(frozen=True, eq=False, repr=False)
class Experts:
    """Weights of E experts that each compute act(x Wg, x Wu) Wd; with biases act(x Wg + bg, x Wu + bu) Wd + bd.

    Attributes:
        format: a name in ttnn_moe.formats.FORMATS.
        E, H, I: logical sizes.
        tensors: the format's named tensors (64-bit words are held as int64).
        gate_up_order: "halves" (gate rows, then up rows) or "interleaved" (gate and up rows alternate).
        activation: a name in ttnn_moe.activations.ACTIVATIONS.
        fp16_scales: int4_24: whether `int4_24.fit_fp16` holds. `Experts.int4_24` finds out; else False is slower.

    Raises:
        ContractError: unknown format, order of rows or activation, or tensors that break the format.
    """

    format: str
    E: int
    H: int
    I: int
    tensors: Mapping[str, Tensor]
    gate_up_order: str = "halves"
    activation: str = SILU
    fp16_scales: bool = False

    def __post_init__(self) -> None:
        sizes = self.E, self.H, self.I
        if {*map(type, sizes)} != {int} and not all(map(is_size, sizes)):
            got = ", ".join(f"{name}={shown(size)}" for name, size in zip("EHI", sizes, strict=True))
            raise ContractError("sizes are no integers", got=got, expected="E, H and I as int")
        if min(sizes) < 1:
            raise ContractError(
                "sizes must be positive", got=f"E={self.E}, H={self.H}, I={self.I}", expected="E, H, I >= 1"
            )
        for name, known in (("gate_up_order", GATE_UP_ORDERS), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in known:
                raise ContractError(f"unknown {name}", got=repr(getattr(self, name)), expected=f"one of {list(known)}")
        fmt = get_format(self.format)
        if not isinstance(self.tensors, Mapping):
            raise ContractError("tensors are no mapping", got=shown(self.tensors), expected="tensors by their names")
        for name, tensor in self.tensors.items():
            check_tensors(**{str(name): tensor})
        fmt.check(self)
        if torch.compiler.is_dynamo_compiling():  # the op checks when it runs
            return
        for name, tensor in self.tensors.items():
            if tensor.is_neg():
                raise ContractError(f"{name} is a negative view of other values", remedy=f"{name}.resolve_neg()")

    def __repr__(self) -> str:
        words = [self.format, f"E={self.E}, H={self.H}, I={self.I}"]
        words += [str(self.dtype).removeprefix("torch.")] * (self.dtype is not None)
        words += [self.gate_up_order] * (self.gate_up_order != GATE_UP_ORDERS[0])
        words += [self.activation] * (self.activation != SILU) + ["biases"] * self.biased
        return f"Experts({', '.join([*words, str(self.device)])})"

    @classmethod
    def dense(cls, gate_up: Tensor, down: Tensor, *, gate_up_order: str = "halves") -> Experts:
        """From gate_up [E, 2I, H] (gate rows first) and down [E, H, I], zero-copy; bf16, fp16 or fp32.

        gate_up_order="interleaved": rows alternate gate, up instead.

        Raises:
            ContractError: shapes, dtypes, devices or strides that do not fit.
        """
        check_tensors(gate_up=gate_up, down=down)
        if gate_up.dim() != 3 or down.dim() != 3:
            raise ContractError(
                "expert weights must have three dimensions",
                got=f"gate_up {tuple(gate_up.shape)}, down {tuple(down.shape)}",
                expected="gate_up [E, 2I, H], down [E, H, I]",
            )
        _check_not_transposed(gate_up, down)
        E, H, I = down.shape
        return cls("dense", E, H, I, {"gate_up": gate_up, "down": down}, gate_up_order=gate_up_order)

    @classmethod
    def int4_24(cls, w13: Tensor, w2: Tensor, *, gate_up_order: str = "halves") -> Experts:
        """From 2:4-sparse int4 words, w13 [E, H/64, 2I, 2] and w2 [E, I/64, H, 2] int64, zero-copy.

        gate_up_order: of the rows of w13. The module `ttnn_moe.formats.int4_24` says what a word holds;
        `quantise_experts` of the module `ttnn_moe.formats.quantise_int4_24` makes the words. All scales are read
        once, here.

        Raises:
            ContractError: shapes, dtypes, devices or strides that do not fit; a NaN or infinite scale, which it names.
        """
        for name, words in (("w13", w13), ("w2", w2)):
            int4_24.check_words(name, words)
            if words.dim() != 4:
                raise ContractError(
                    "expert weights must have four dimensions",
                    got=f"{name} {tuple(words.shape)}",
                    expected="w13 [E, H/64, 2I, 2], w2 [E, I/64, H, 2]",
                )
        E, H, I = w13.shape[0], 64 * w13.shape[1], 64 * w2.shape[1]
        experts = cls(int4_24.NAME, E, H, I, {"w13": w13, "w2": w2}, gate_up_order=gate_up_order)
        if watcher(()) is None:  # a tracer has no values
            int4_24.check_scales(w13=w13, w2=w2)
        return replace(experts, fp16_scales=int4_24.fit_fp16(w13, w2))

    @classmethod
    def mxfp4(
        cls,
        gate_up_blocks: Tensor,
        gate_up_scales: Tensor,
        down_blocks: Tensor,
        down_scales: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        *,
        activation: str = SILU,
        gate_up_order: str = "halves",
    ) -> Experts:
        """From e2m1 blocks [E, 2I, H/2] and [E, H, I/2] and ue8m0 scales [E, 2I, H/32] and [E, H, I/32], zero-copy.

        All are uint8. Contiguous blocks [E, R, C/32, 16], as gpt-oss stores them, are taken too.

        Args:
            gate_up_bias, down_bias: [E, 2I] and [E, H], both bf16 or both fp32; or neither.
            activation: "silu", or gpt-oss's "clamped_swiglu". `ttnn_moe.activations` defines both.
            gate_up_order: of the rows 2I, in weights, scales and bias. gpt-oss has "interleaved".

        The module `ttnn_moe.formats.mxfp4` says what a byte holds; `quantise_experts` of the module
        `ttnn_moe.formats.quantise_mxfp4` makes the bytes. All scales are read once, here.

        Raises:
            ContractError: shapes, dtypes, devices or strides that do not fit; a NaN scale, which it names.
        """
        blocks = {"gate_up_blocks": gate_up_blocks, "down_blocks": down_blocks}
        scales = {"gate_up_scales": gate_up_scales, "down_scales": down_scales}
        check_tensors(**blocks, **scales)
        for (name, tensor), (other, factors) in zip(blocks.items(), scales.items(), strict=True):
            if tensor.dim() == 4 and tensor.shape[-1] == 16:
                if not tensor.is_contiguous():
                    raise ContractError(
                        f"{name} is not contiguous",
                        got=f"{tuple(tensor.shape)} with strides {tensor.stride()}",
                        expected="[E, R, C/32, 16] contiguous",
                        remedy="lay the bytes out once, at load: .contiguous()",
                    )
                blocks[name] = tensor = tensor.flatten(2)
            mxfp4.check_pair(name, tensor, other, factors)
            if tensor.dim() != 3:
                raise ContractError(
                    "expert weights must have three dimensions",
                    got=f"{name} {tuple(tensor.shape)}",
                    expected="[E, R, C/2], or [E, R, C/32, 16] contiguous",
                )
        (E, _, half_H), half_I = blocks["gate_up_blocks"].shape, blocks["down_blocks"].shape[2]
        named = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
        biases = {name: bias for name, bias in named.items() if bias is not None}
        check_tensors(**biases)
        tensors = {**blocks, **scales, **biases}
        experts = cls(mxfp4.NAME, E, 2 * half_H, 2 * half_I, tensors, gate_up_order, activation)
        if watcher(()) is None:  # a tracer has no values
            mxfp4.check_scales(**scales)
        return experts

    @classmethod
    def from_projections(cls, gate: Tensor, up: Tensor, down: Tensor) -> Experts:
        """From one matrix a projection, gate and up [E, H, I] and down [E, I, H]: one copy into the dense layout.

        Each matrix is [inputs, outputs], as in x @ Wg: the transpose of what `dense` takes and nn.Linear holds.
        Stacked nn.Linear weights are given as `stacked.transpose(1, 2)`. Untransposed ones fit too, with H and I
        exchanged; then the first call refuses its hidden.

        Raises:
            ContractError: shapes, dtypes or devices that do not fit together; or as `dense`.
        """
        check_tensors(gate=gate, up=up, down=down)
        for part in (gate, up, down):
            check_layout(part)
        if gate.dim() != 3 or down.dim() != 3 or gate.shape != up.shape or down.mT.shape != gate.shape:
            raise ContractError(
                "projection weights do not fit together",
                got=f"gate {tuple(gate.shape)}, up {tuple(up.shape)}, down {tuple(down.shape)}",
                expected="gate and up [E, H, I], down [E, I, H]",
            )
        kinds = [f"{part.dtype} on {part.device}" for part in (gate, up, down)]
        if len({*kinds}) > 1:
            raise ContractError("gate, up and down differ", got=", ".join(kinds), expected="one dtype, one device")
        gate_up = torch.cat([gate.transpose(1, 2), up.transpose(1, 2)], dim=1)
        return cls.dense(gate_up, down.transpose(1, 2).contiguous())

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype hidden must have (dense: that of the weights); None where the format takes any."""
        return self.tensors["down"].dtype if self.format == "dense" else None

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def biased(self) -> bool:
        """Whether the experts have biases: tensors gate_up_bias [E, 2I], in gate_up_order, and down_bias [E, H]."""
        return "gate_up_bias" in self.tensors

    def biases(self, e: int) -> tuple[Tensor, Tensor] | None:
        """Logical biases of expert e, fp32: gate_up [2I] (gate first) and down [H]; None: it has none."""
        if not self.biased:
            return None
        gate_up, down = (self.tensors[name][e].float() for name in ("gate_up_bias", "down_bias"))
        if self.gate_up_order == "interleaved":
            gate_up = torch.cat([gate_up[0::2], gate_up[1::2]])
        return gate_up, down

    def dequantize(self, e: int) -> tuple[Tensor, Tensor]:
        """Logical weights of expert e: gate_up [2I, H] (gate rows first) and down [H, I].

        Dense weights keep their dtype; other formats give fp32.

        Raises:
            ContractError: no such expert.
        """
        if not is_size(e) or not 0 <= e < self.E:
            raise ContractError("no such expert", got=shown(e), expected=f"0 .. {self.E - 1}")
        return get_format(self.format).dequantize(self, e)

    def to(self, device: torch.device | str) -> Experts:
        """The same experts with their tensors on that device, in the same format; those already there are shared.

        Raises:
            ContractError: no device, or none here. Errors of torch's copy pass.
        """
        there = device_here(device)
        return replace(self, tensors={name: tensor.to(there) for name, tensor in self.tensors.items()})

    def for_device(self, placement: Placement, d: int | None = None) -> Experts:
        """The E/D experts of device d (default: placement.rank), in device_expert_mapping order.

        Contiguous runs of experts are views; any other partition is one copy, made here, at load.

        Raises:
            ContractError: no placement of these experts, or no such device.
        """
        check_placement(placement)
        if placement.E != self.E:
            raise ContractError("placement is for another number of experts", got=placement.E, expected=self.E)
        index = placement.device_expert_mapping[placement._device(d)].long()
        return replace(self, E=len(index), tensors=get_format(self.format).select(self, index))

    @property
    def sizes(self) -> list[int]:
        """[E, H, I]."""
        return [self.E, self.H, self.I]

    @property
    def spec(self) -> str:
        """All but sizes and tensors, and the tensors' names, for `from_spec`; torch.compile may keep sizes symbolic."""
        words = self.format, self.gate_up_order, self.activation, str(int(self.fp16_scales))
        return "|".join((*words, ",".join(self.tensors)))

    @classmethod
    def from_spec(cls, spec: str, sizes: Sequence[int], tensors: Sequence[Tensor]) -> Experts:
        """Inverse of `spec` and `sizes`; tensors in the order of the names in spec."""
        fmt, order, activation, fp16_scales, names = spec.split("|")
        named = dict(zip(names.split(","), tensors, strict=True))
        E, H, I = sizes
        return cls(fmt, E, H, I, named, order, activation, fp16_scales == "1")


def device_here(device: torch.device | str) -> torch.device:
    """The device of that name. Raises ContractError unless tensors can be made on it."""
    try:
        there = torch.device(device)
        torch.empty(0, device=there)
    except NO_DEVICE as error:
        raise ContractError(
            "no device",
            got=f"{shown(device)}: {str(error).partition(chr(10))[0]}",
            expected="a torch device that is here, as 'cpu'",
            remedy="ttnn-moe doctor lists the devices of this machine",
        ) from None
    return there


def _check_not_transposed(gate_up: Tensor, down: Tensor) -> None:
    """Raise ContractError if dense weights, of three dimensions each, would fit with rows and columns exchanged."""

    def fit(gate_up: Tensor, down: Tensor) -> bool:
        E, H, I = down.shape
        return gate_up.shape == (E, 2 * I, H)

    if fit(gate_up, down):
        return
    turned_gate_up, turned_down = gate_up.transpose(1, 2), down.transpose(1, 2)
    if fit(turned_gate_up, turned_down):  # first, for square matrices: most checkpoints turn both or neither
        names = ["gate_up", "down"]
    elif fit(gate_up, turned_down):
        names = ["down"]
    elif fit(turned_gate_up, down):
        names = ["gate_up"]
    else:
        return
    raise ContractError(
        "expert weights look transposed",
        got=f"gate_up {tuple(gate_up.shape)}, down {tuple(down.shape)}",
        expected="gate_up [E, 2I, H], down [E, H, I]",
        remedy=" and ".join(f"{name}.transpose(1, 2).contiguous()" for name in names) + ", once, at load",
    )
