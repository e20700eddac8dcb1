"""What one of D ranks holds of a model: sizes of its tensors, and where they lie in the checkpoint's.

| kind | a rank holds | whole on every rank |
|---|---|---|
| whole | everything | |
| experts | E/D consecutive experts of each layer | all other weights |
| tensor | of heads, of I and of the LM head's rows, one of D parts | embeddings, norms, routers |

Where D exceeds the number of key/value heads, D / number ranks hold the same one.
This module knows no torch.distributed: ranks of any machine use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ttnn_moe.errors import RequestError
from ttnn_moe.formats.stored import STORED

from .config import Qwen3MoeConfig

KINDS = ("whole", "experts", "tensor")
Region = tuple[slice, ...]
"""A slice, with start and stop, of each dimension."""
# tensors of experts whose rows are those of the gate, then those of the up projection
_HALVES = (
    "experts.gate_up_proj",
    *(f"experts.{name}" for fmt in STORED.values() for name, each in fmt.tensors.items() if each.rows is not None),
)
_N = TypeVar("_N", bound=int)


@dataclass(frozen=True)
class Split:
    """The share of rank `rank` of D.

    Raises:
        RequestError: an unknown kind, or rank outside 0 .. D-1.
    """

    kind: str = "whole"
    D: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS or not 0 <= self.rank < self.D or (self.kind == "whole" and self.D > 1):
            raise RequestError(
                "unknown split of a model",
                got=self,
                expected=f"one of {list(KINDS)}, and a rank below D",
                remedy="fix it",
            )

    @property
    def experts(self) -> int:
        """Ranks over which the experts of a layer are dealt out."""
        return self.D if self.kind == "experts" else 1

    def local(self, config: Qwen3MoeConfig) -> Qwen3MoeConfig:
        """The sizes of this rank's attention and experts; E and the vocabulary stay those of the model.

        Raises:
            RequestError: D does not divide a size, with the size. CheckpointError: the experts' format does not take
                the rank's I.
        """
        wrong = [f"{name} = {n}" for name, n in self._divided(config).items() if n % self.D]
        if self.kind == "tensor" and config.num_key_value_heads % self.D and self.D % config.num_key_value_heads:
            wrong.append(f"num_key_value_heads = {config.num_key_value_heads}")
        if wrong:
            heads = "; of key/value heads, a multiple or a divisor" if self.kind == "tensor" else ""
            raise RequestError(
                f"{self.D} ranks cannot share this model by {self.kind}",
                got=", ".join(wrong),
                expected=f"multiples of {self.D}{heads}",
                remedy="start another number of ranks",
            )
        if self.kind != "tensor":
            return config
        return replace(
            config,
            num_attention_heads=config.num_attention_heads // self.D,
            num_key_value_heads=max(1, config.num_key_value_heads // self.D),
            moe_intermediate_size=config.moe_intermediate_size // self.D,
            intermediate_size=config.intermediate_size // self.D,
        )

    def _divided(self, config: Qwen3MoeConfig) -> dict[str, int]:
        names: dict[str, tuple[str, ...]] = {
            "experts": ("num_experts",),
            "tensor": ("num_attention_heads", "moe_intermediate_size", "intermediate_size", "vocab_size"),
        }
        return {name: getattr(config, name) for name in names.get(self.kind, ())}

    def regions(self, name: str, whole: Sequence[int], local: Sequence[int]) -> list[tuple[Region, Region]]:
        """Where this rank's tensor lies in the checkpoint's, and the same part in the rank's own.

        Args:
            whole, local: shapes of both. They differ in one dimension at most, which is the one that is split.
        """
        everything = tuple(slice(0, n) for n in local)
        split = [d for d, (n, own) in enumerate(zip(whole, local, strict=True)) if n != own]
        if not split:
            return [(everything, everything)]
        (d,) = split
        parts = 2 if d > 0 and name.endswith(_HALVES) else 1
        n, own = whole[d] // parts, local[d] // parts
        # several ranks hold the same part where there are fewer parts than ranks
        first = self.rank // (own * self.D // n) * own
        out = []
        for part in range(parts):
            there, here = list(everything), list(everything)
            there[d] = slice(part * n + first, part * n + first + own)
            here[d] = slice(part * own, (part + 1) * own)
            out.append((tuple(there), tuple(here)))
        return out


WHOLE = Split()
