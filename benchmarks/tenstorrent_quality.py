"""What the weight formats of the Tenstorrent backend cost the bundled model: its five tasks, with quantised weights.

    PYTHONPATH=. python benchmarks/tenstorrent_quality.py --out benchmarks/results/tenstorrent_quality.json

The weights are quantised and dequantised as ttnn stores them (the emulator's conversion, which equals ttnn's bit for
bit), and torch runs the model in fp32 on a CPU: only the formats differ from row to row. Math fidelity is not in it.
The rows of EMULATED run the model on an emulated Blackhole chip, with its KV cache: our kernels as the chip computes
them, ttnn's operators in fp32 with bfloat16 results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from command_line import run_script, write
from torch import Tensor, nn

from ttnn_moe import tenstorrent
from ttnn_moe.models.qwen3 import TINY, Qwen3Moe, load_model, tt
from ttnn_moe.models.qwen3.layers import Layer, MoE
from ttnn_moe.models.qwen3.tiny.evaluate import answered, heldout, scores
from ttnn_moe.models.qwen3.tokenizer import Tokenizer
from ttnn_moe.models.qwen3.tt.cache import MAX_ROWS
from ttnn_moe.tenstorrent.emulator.formats import find_format, from_faces, pack_blocks, to_faces, unpack_blocks
from ttnn_moe.tenstorrent.weight_formats import ModelFormats

EIGHT = "attention=bfloat8_b,dense=bfloat8_b,head=bfloat8_b"
ROWS = {
    "bfloat16": "",
    "experts bfloat8_b": "bfloat8_b",
    "all bfloat8_b": f"bfloat8_b,{EIGHT}",
    "gate_up bfloat4_b, down bfloat8_b": "bfloat4_b,bfloat8_b",
    "the same, all else bfloat8_b": f"bfloat4_b,bfloat8_b,{EIGHT}",
    "experts bfloat4_b, all else bfloat8_b": f"bfloat4_b,{EIGHT}",
    "the same, the first sparse layer bfloat8_b": f"bfloat4_b,{EIGHT},experts@0-1=bfloat8_b",
    "experts bfloat4_b, all else and the router bfloat8_b": f"bfloat4_b,{EIGHT},router=bfloat8_b",
    "experts and head bfloat4_b, all else bfloat8_b": f"bfloat4_b,{EIGHT},head=bfloat4_b",
    "attention bfloat4_b, all else bfloat8_b": f"bfloat8_b,{EIGHT},attention=bfloat4_b",
    "all bfloat4_b": "bfloat4_b,attention=bfloat4_b,dense=bfloat4_b,head=bfloat4_b",
}

ALL_EIGHT = f"experts=bfloat8_b,{EIGHT},kv=bfloat8_b"
EMULATED = {
    "emulated: bfloat16": "bfloat16",
    "emulated: keys and values bfloat8_b": "bfloat16,kv=bfloat8_b",
    "emulated: all bfloat8_b, keys and values too": ALL_EIGHT,
    "emulated: the same, experts bfloat4_b": f"{ALL_EIGHT},experts=bfloat4_b",
}
SHARE = 10
"""Of this many examples, an emulated row answers one: the emulator is slow."""


def as_stored(weight: Tensor, form: str) -> Tensor:
    """weight [.., out, in] as tiles of [in, out] in this format keep it."""
    if form == "bfloat16":
        return weight
    outs = weight.shape[-2]
    weight = nn.functional.pad(weight.float(), (0, 0, 0, -outs % 32))  # the router's few experts fill no tile
    kind, turned = find_format(form), weight.transpose(-1, -2).contiguous()
    rows, columns = turned.numel() // turned.shape[-1], turned.shape[-1]
    assert rows % 32 == 0 and columns % 32 == 0
    kept = from_faces(
        unpack_blocks(pack_blocks(to_faces(turned.reshape(rows, columns).numpy()), kind), kind), rows, columns
    )
    back = torch.from_numpy(np.ascontiguousarray(kept)).reshape(turned.shape).transpose(-1, -2)
    return back[..., :outs, :].contiguous()


def quantised(formats: ModelFormats) -> Qwen3Moe:
    """The bundled model with weights of these formats, in fp32."""
    model = load_model(TINY, "reference", dtype=torch.float32)
    model.head = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False, device="meta")
    model.head.weight = nn.Parameter(as_stored(model.embed.weight, formats.of("head")), requires_grad=False)
    for i, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        named = [("attention", layer.attention.qkv.weight), ("attention", layer.attention.out.weight)]
        if isinstance(layer.mlp, MoE):
            named += [("gate_up", layer.mlp.gate_up), ("down", layer.mlp.down), ("router", layer.mlp.router.weight)]
        else:
            named += [("dense", layer.mlp.gate_up.weight), ("dense", layer.mlp.down.weight)]
        for group, parameter in named:
            parameter.data.copy_(as_stored(parameter.data, formats.of(group, i)))
    return model


def emulated(formats: str) -> Callable[[Tensor], Tensor]:
    """ids [B, S] -> logits [B, S, V] of the bundled model on an emulated chip; keys and values go through its cache."""
    tenstorrent.close_device()
    model = tt.load_model(TINY, device="emulator", weights=formats)

    def logits(ids: Tensor) -> Tensor:
        made = []
        for some in ids.split(MAX_ROWS):
            B, S = some.shape
            cache = model.new_cache(B, S)
            for row in range(B):
                cache.open(row, S)
            step = cache.prefill([(row, S) for row in range(B)], range(S - 1, B * S, S))
            for one in cache.packer.passes(some.flatten().tolist(), step):
                ids, positions = model._words(one.ids), model._words(one.positions)
                x = model._run(ids, positions, cache, cache.tables_of(one))
                found = model._fetcher.whole(model._logits(x, None), len(one.ids), ())
                made += [found[piece.first : piece.first + S].float() for piece in one.pieces]
        return torch.stack(made)

    return logits


def correlation(got: Tensor, want: Tensor) -> float:
    """The median over rows of logits."""
    a, b = (x - x.mean(-1, keepdim=True) for x in (got, want))
    return float((a * b).sum(-1).div(a.norm(dim=-1) * b.norm(dim=-1)).median())


def measure(rows: Sequence[str], examples: int, say: Callable[[str], object] = print) -> dict[str, Any]:
    """Of each row of ROWS and EMULATED: right answers by task, and the median correlation of logits with bfloat16's."""
    tokenizer = Tokenizer.from_directory(TINY).fast
    texts = [tokenizer.encode(example.prompt).ids for example in heldout(4)]
    longest = max(map(len, texts))
    ids = torch.tensor([text + [text[-1]] * (longest - len(text)) for text in texts])
    found: dict[str, Any] = {}
    want: Tensor | None = None
    for name in rows:
        model = emulated(EMULATED[name]) if name in EMULATED else quantised(ModelFormats.parse(ROWS[name]))
        with torch.no_grad():
            logits = model(ids)
        want = logits if want is None else want
        asked = heldout(examples // SHARE if name in EMULATED else examples)
        right = scores(asked, answered(model, tokenizer, asked, batch_tokens=2048 if name in EMULATED else 16384))
        found[name] = {
            "weights": {**ROWS, **EMULATED}[name],
            "examples": examples // SHARE if name in EMULATED else examples,
            "tasks": {task: score.right for task, score in right.items()},
            "correlation": correlation(logits, want),
        }
        say(f"{name}: {found[name]}")
    return {"examples": examples, "rows": found}


def main(
    out: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
    examples: Annotated[int, typer.Option(help="Held-out examples of each task.")] = 300,
) -> None:
    """Score every row of formats."""
    found = measure([*ROWS, *EMULATED], examples)
    if out is not None:
        write(out, found)


if __name__ == "__main__":
    run_script(main)
