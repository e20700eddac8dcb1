"""Formats of weights on a device, of a layer's experts and of a whole model, and how exactly products of them are made.

A block format keeps 16 values with one exponent: bfloat8_b has a sign and 7 bits of each, bfloat4_b a sign and 3.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ContractError
from ..visible import shown

FORMATS = ("bfloat16", "bfloat8_b", "bfloat4_b")
LAYOUTS = ("interleaved", "banked")
"""Of experts' weights over DRAM banks: in turn by runs of 8 KiB, or a part of every expert in each bank."""
FIDELITIES = ("LoFi", "HiFi2", "HiFi3", "HiFi4")
GROUPS = ("attention", "gate_up", "down", "dense", "router", "head", "embedding", "kv")
"""Groups of a model's matrices, and the KV cache. Experts are gate_up and down. All else is always bfloat16."""
KV_FORMATS = FORMATS[:2]
"""Of keys and values: 4 bits lose the tokens that a row attends to."""

MOST_LAYERS = 10_000

_ITEM = re.compile(r"(?:([a-z_]+)(?:@(\d{1,4})(?:-(\d{1,4}))?)?=)?(\w+)")


@dataclass(frozen=True)
class ComputeConfig:
    """How products with the experts' weights are made; ttnn's DeviceComputeKernelConfig has the same names.

    Attributes:
        math_fidelity: LoFi, HiFi2, HiFi3 or HiFi4. None: by the weights' format, HiFi4 for bfloat16, else HiFi3.
        fp32_dest_acc_en: sums are fp32. False: DST holds bf16, and each product that is added rounds.

    Raises:
        ContractError: an unknown fidelity.
    """

    math_fidelity: str | None = None
    fp32_dest_acc_en: bool = True

    def __post_init__(self) -> None:
        if self.math_fidelity not in (None, *FIDELITIES):
            raise ContractError(
                "unknown math fidelity", got=repr(self.math_fidelity), expected=f"one of {list(FIDELITIES)}, or None"
            )


@dataclass(frozen=True)
class ExpertFormats:
    """Formats of experts' weights, and how they lie: `parse` reads "bfloat4_b,bfloat8_b,layout=banked".

    Attributes:
        gate_up, down: their formats. layout: one of LAYOUTS; tiles that the banks cannot share evenly lie interleaved.
    """

    gate_up: str = "bfloat16"
    down: str = "bfloat16"
    layout: str = "interleaved"

    @classmethod
    def parse(cls, text: str) -> ExpertFormats:
        """One format for both, or gate_up's and down's with a comma between; then ",layout=banked".

        Raises:
            ContractError: no text, an unknown format or layout, or more than two formats.
        """
        _check_text(text)
        named, *rest = text.split(",layout=")
        if rest and (len(rest) > 1 or rest[0] not in LAYOUTS):
            raise ContractError("unknown layout of weights", got=repr(text), expected=f"one of {list(LAYOUTS)}")
        parts = named.split(",")
        if len(parts) > 2 or any(part not in FORMATS for part in parts):
            raise ContractError(
                "unknown weight format", got=repr(text), expected=f"one of {list(FORMATS)}, or two: gate_up's,down's"
            )
        return cls(parts[0], parts[-1], *rest)

    @property
    def banked(self) -> bool:
        """Whether weights lie by DRAM bank."""
        return self.layout == "banked"

    def __str__(self) -> str:
        forms = self.gate_up if self.gate_up == self.down else f"{self.gate_up},{self.down}"
        return f"{forms},layout={self.layout}" if self.banked else forms


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise ContractError("formats of weights are no text", got=shown(text), expected="such as 'bfloat8_b'")


@dataclass(frozen=True)
class Rule:
    """The format of a group in the layers first .. last."""

    group: str
    format: str
    first: int = 0
    last: int = MOST_LAYERS - 1


@dataclass(frozen=True)
class ModelFormats:
    """The format of every matrix of a model. The last rule that names a group and a layer holds, else bfloat16."""

    text: str = ""
    rules: Sequence[Rule] = ()
    layout: str = "interleaved"

    @classmethod
    def parse(cls, text: str, layers: int = MOST_LAYERS) -> ModelFormats:
        """Read items with commas between: first the experts' formats as ExpertFormats has them, then GROUP=FORMAT.

        GROUP is one of GROUPS, or experts: gate_up and down. GROUP@3=FORMAT and GROUP@0-5=FORMAT name layers. So
        "bfloat4_b,bfloat8_b,attention=bfloat8_b,gate_up@0-1=bfloat8_b" has a coarse gate_up in all layers but two.
        layout=banked holds for the experts of all layers.

        Args:
            layers: of the model.

        Raises:
            ContractError: no text; an unknown group, format or layout; layers in descending order, or that the model
                does not have; another embedding than bfloat16, which ttnn reads by rows; a KV cache of 4 bits, or of
                several formats.
        """
        _check_text(text)
        rules: list[Rule] = []
        alone: list[str] = []
        layout = LAYOUTS[0]
        for item in filter(None, text.split(",")):
            found = _ITEM.fullmatch(item)
            group, first, last, form = found.groups() if found else (None, None, None, "")
            if found and group is None and not rules:
                alone.append(form)
                continue
            if group == "layout":
                if first is not None or form not in LAYOUTS:
                    expected = " or ".join(f"layout={one}" for one in LAYOUTS)
                    raise ContractError("unknown layout of weights", got=repr(item), expected=expected)
                layout = form
                continue
            if group == "kv" and (form not in KV_FORMATS or first is not None):
                expected = " or ".join(f"kv={one}" for one in KV_FORMATS)
                raise ContractError("the KV cache has one format in all layers", got=repr(item), expected=expected)
            if form not in FORMATS or group not in (*GROUPS, "experts"):
                raise ContractError(
                    "unknown weight format",
                    got=repr(item),
                    expected=f"FORMAT, then GROUP=FORMAT, without spaces: a group of {[*GROUPS, 'experts']}, "
                    f"a format of {list(FORMATS)}",
                )
            if group == "embedding" and form != FORMATS[0]:
                raise ContractError("the embedding is read by rows", got=repr(item), expected="embedding=bfloat16")
            if group == "head" and first is not None:
                raise ContractError("the head is in no layer", got=repr(item), expected=f"head={form}")
            span = () if first is None else (int(first), int(last or first))
            if span and not span[0] <= span[1] < layers:
                expected = f"GROUP@FIRST-LAST, FIRST <= LAST <= {layers - 1}"
                raise ContractError("an item names no layers of the model", got=repr(item), expected=expected)
            rules += [Rule(name, form, *span) for name in (("gate_up", "down") if group == "experts" else (group,))]
        if alone:
            experts = ExpertFormats.parse(",".join(alone))
            rules[:0] = [Rule("gate_up", experts.gate_up), Rule("down", experts.down)]
        return cls(text, tuple(rules), layout)

    def of(self, group: str, layer: int = 0) -> str:
        """The format of a group in a layer; head, embedding and kv have none."""
        for rule in reversed(self.rules):
            if rule.group == group and rule.first <= layer <= rule.last:
                return rule.format
        return FORMATS[0]

    def experts(self, layer: int = 0) -> ExpertFormats:
        return ExpertFormats(self.of("gate_up", layer), self.of("down", layer), self.layout)

    def __str__(self) -> str:
        return self.text or FORMATS[0]
