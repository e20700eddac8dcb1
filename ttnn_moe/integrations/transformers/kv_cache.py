"""The cache of transformers' form that the attention "ttnn_moe_kv" reads and fills."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ...accelerator import on_host
from ...errors import ContractError, RequestError
from ...kv.bucketed.cache import BucketedCache as Rows
from ...kv.step import Step
from .kv_layer import BucketedLayer
from .kv_model import OTHERWISE, equalisers, shortest_window, sizes_of


@dataclass
class Waiting:
    """Keys and values that a layer's update() returned and no attention has got yet."""

    layer: int
    key: Tensor
    value: Tensor


class BucketedCache(Cache):
    """Keys and values of a model of transformers, in tiers of 2 to 16 bits: see docs/kv.md.

    Args:
        model: whose attention is "ttnn_moe_kv". rows: sequences of a batch, at most.
        capacity: tokens of each, prompt and new ones. bits: average bits of a number in a full row.

    Raises:
        ContractError: no model, or one with another attention; layers that are no attention; a window or chunk shorter
            than a row; head_dim is no multiple of 32.
        RequestError: a budget that no mix of tiers reaches; the machine has less memory.
    """

    @torch.inference_mode(False)  # a cache made in inference mode also serves calls that record gradients
    def __init__(self, model: PreTrainedModel, rows: int = 1, capacity: int = 4096, bits: float = 4.0):
        sizes = sizes_of(model)
        with on_host():
            self.rows = Rows.within(sizes, rows, capacity, 1 << 62, bits=bits)
        check_window(shortest_window(model), self.rows.capacity)
        if (channels := equalisers(model, sizes)) is not None:
            self.rows.equalise(*channels)
        self.opened = False
        self.step: Step | None = None
        self.start()
        super().__init__(layers=[BucketedLayer(self, i) for i in range(sizes.layers)])

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for layer in self.layers:
            cast("BucketedLayer", layer).belong(self)

    @property
    def capacity(self) -> int:
        """Tokens of a row."""
        return self.rows.capacity

    def start(self) -> None:
        """Forget every token."""
        with on_host():
            for row in range(self.rows.rows):
                if self.opened:
                    self.rows.close(row)
                self.rows.open(row, self.rows.capacity)
        self.opened, self.lengths, self.batch = True, [0] * self.rows.rows, 0
        self.shown: Tensor | None = None  # the mask of the newest pass [B, tokens]
        self.waiting: Waiting | None = None
        self.done = self.rows.sizes.layers  # layers that hold the newest pass; 0: it broke off in the first one

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See BucketedLayer.update."""
        if not 0 <= layer_idx < len(self.layers):
            self.refuse_sizes(f"layer {layer_idx}", f"{len(self.layers)} layers")
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]

    def expect(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep in mind what the attention has to get next.

        Raises:
            ContractError: keys and values of other sizes; keys of the layer before that no attention got; a pass before
                that broke off.
        """
        if self.waiting is not None:
            raise ContractError(
                "keys of a BucketedCache did not reach the attention",
                got=f"those of layer {self.waiting.layer}: the model changes keys after past_key_values.update(), or "
                "the pass broke off",
                expected="keys and values as update() returned them",
                remedy=f"after a pass that broke off, cache.reset(); for such a model, {OTHERWISE}",
            )
        now = 0 if self.done == len(self.layers) else self.done
        if layer != now or not self.done:
            raise ContractError(
                "the layers of a BucketedCache do not hold the same tokens",
                got=f"layer {layer} after {self.done} of {len(self.layers)} layers: the last pass broke off, or the "
                "cache was made for another model",
                expected=f"layer {now}" if self.done else "no pass after that one",
                remedy="cache.reset() and pass all tokens again; or BucketedCache(model, ...) of this model",
            )
        sizes, found = self.rows.sizes, []
        for x in (key, value):
            found.append(f"{x.shape[1]} key/value heads of {x.shape[-1]} on {x.device}" if x.dim() == 4 else x.shape)
        wanted = f"{sizes.kv_heads} key/value heads of {sizes.head_dim} on {sizes.device}"
        if found != [wanted, wanted]:
            self.refuse_sizes(f"keys with {found[0]}, values with {found[1]}", wanted)
        self.waiting = Waiting(layer, key, value)

    @torch.compiler.disable  # else each pass compiles anew: torch.compile takes an id for a constant
    def take(self, layer: int, key: Tensor, value: Tensor) -> None:
        """The attention got these.

        Raises:
            ContractError: they are not what update() returned.
        """
        waiting, self.waiting = self.waiting, None
        if waiting is None or (waiting.layer, id(waiting.key), id(waiting.value)) != (layer, id(key), id(value)):
            raise ContractError(
                "the attention got other keys or values than the BucketedCache",
                got=f"layer {layer}: "
                + ("one update(), several calls" if waiting is None else "changed ones after past_key_values.update()"),
                expected="one call of the attention with the keys and values that update() returned",
                remedy=OTHERWISE,
            )

    @torch.compiler.disable
    def plan(self, B: int, n: int, mask: Tensor | None, positions: Tensor | None = None) -> None:
        """Before the first layer of a pass: which of B x n new tokens are there, and the step that they make.

        Raises:
            ContractError: another batch than before; a mask that hides cached tokens; positions that are no plain run.
            RequestError: a row would grow past the capacity.
        """
        if self.rows.rows < B:
            raise ContractError(
                "the batch has more rows than the cache",
                got=B,
                expected=f"at most {self.rows.rows}",
                remedy=f"BucketedCache(model, rows={B}, ...); beams are not served",
            )
        if self.layers[0].seen and self.batch != B:
            self.layers[0].keep_rows(f"a batch of {B} rows after passes of {self.batch}")
        with on_host():
            # transformers drops a mask of ones
            whole = (torch.ones(B, self.layers[0].seen + n) if mask is None else mask).bool().cpu()
            self._check(B, n, whole)
            if mask is None and positions is not None and positions.dim() == 2 and (positions.diff() != 1).any():
                raise ContractError(
                    "a bucketed cache serves whole sequences",
                    got="position_ids that are no plain run, as of packed sequences",
                    expected="positions that rise by 1",
                    remedy="give each sequence a row of the batch, padded, with an attention_mask",
                )
            before, self.done = self.done, 0  # until the first layer holds the tokens
            try:
                self._step(whole[:, whole.shape[1] - n :])
            except RequestError:  # refused, and nothing was done
                self.done = before
                raise
        self.batch, self.shown = B, whole

    def _check(self, B: int, n: int, mask: Tensor) -> None:
        past = mask[:, : max(mask.shape[1] - n, 0)]
        known = torch.zeros(B, 0, dtype=torch.bool) if self.shown is None else self.shown
        if len(mask) != B or mask.shape[1] < n or not torch.equal(past, known):
            counts = past.sum(1).tolist()
            others = ", others than before" * (counts == self.lengths[:B])
            raise ContractError(
                "the attention_mask does not fit the tokens of a BucketedCache",
                got=f"a mask {list(mask.shape)} with {counts} cached tokens{others}",
                expected=f"[{B}, cached + new tokens] with {self.lengths[:B]} cached tokens",
                remedy="keep the columns of earlier passes as they were; cache.reset() forgets every token",
            )

    def _step(self, there: Tensor) -> None:
        (B, n), counts = there.shape, there.sum(1).tolist()
        if all(count == 1 for count in counts) and n == 1 and all(self.lengths[:B]):
            self.step = self.rows.decode(range(B), self.lengths[:B])
        else:
            for row in range(B):
                self.rows.lengths[row] = self.lengths[row]
            total = sum(counts)
            self.step = self.rows.prefill([(row, count) for row, count in enumerate(counts) if count], range(total))
        self.there = there.flatten().nonzero().flatten().to(self.rows.sizes.device)
        for row, count in enumerate(counts):
            self.lengths[row] += count

    def written(self, layer: int, n: int) -> None:
        """This layer holds the n new tokens."""
        self.layers[layer].seen += n
        self.done = layer + 1

    @staticmethod
    def refuse_sizes(got: str, expected: str) -> NoReturn:
        """Raise ContractError: the model is another than the cache's."""
        raise ContractError(
            "the BucketedCache was made for a model of other sizes, or the model keeps no plain keys and values",
            got=got,
            expected=expected,
            remedy=f"BucketedCache(model, ...) of the model that runs; else {OTHERWISE}",
        )


def check_window(window: int | None, capacity: int) -> None:
    """Raises ContractError where a layer attends to fewer tokens than a row holds."""
    if window is not None and window < capacity:
        raise ContractError(
            "a bucketed cache serves plain causal attention",
            got=f"a sliding window of {window} tokens in rows of {capacity}",
            expected="windows and chunks as long as a row",
            remedy=f"make the cache with a smaller capacity; or {OTHERWISE}",
        )
