"""Conversion of a checkpoint, an expert at a time, into shards of one layer each."""

from __future__ import annotations

import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor

from ttnn_moe.accelerator import on_host
from ttnn_moe.arguments import integer
from ttnn_moe.contract import Experts, Routing
from ttnn_moe.errors import CheckpointError, ContractError, RequestError
from ttnn_moe.formats.stored import METHOD

from ..checkpoint import EMBED, EXPERTS, HEAD, Checkpoint
from ..files import Fields, is_file, path_of, read_bytes, reading, size
from ..pieces import Progress, bytes_of
from ..weight_formats import FORMATS, QUANTISED
from ..weights import check_computes, device_of
from .calibrate import Activations, Calibration, Routed, expert_output, memory_needed
from .output import CONFIG, Output, check_out

TOKENS = 131_072
"""Tokens of a calibration text that are read, unless another number is asked for."""
_READERS = 8  # files that are hashed at a time
COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "LICENSE",
)
"""Files that the result has from its source as they are."""


@dataclass(frozen=True)
class Report:
    """What a conversion did.

    Attributes:
        kept: shards that were there already, of `shards`. nbytes: of all weights.
        fewest: tokens of the expert that had fewest in calibration; None: no calibration, or not of every layer in
            this run, which kept the last shards.
    """

    shards: int
    kept: int
    nbytes: int
    fewest: int | None


class Conversion:
    """One checkpoint, one format, one calibration: checked, and nothing written yet.

    Attributes:
        disk, memory: bytes that the result and the work need, about.

    Raises:
        CheckpointError, RequestError: as quantize_model.
    """

    def __init__(
        self,
        directory: Path,
        out: Path,
        format: str = "int4_24",
        calibrate: Path | None = None,
        tokens: int = TOKENS,
        device: torch.device | str | None = None,
    ):
        tokens = integer("tokens", tokens)
        check_out(out, directory)
        self.source = checkpoint = Checkpoint(directory)
        config = self.config = checkpoint.config
        if format not in QUANTISED:
            raise RequestError("unknown format", got=repr(format), expected=f"one of {list(QUANTISED)}")
        self.format = FORMATS[format]
        if calibrate is not None and not self.format.calibrates:
            able = [name for name in QUANTISED if FORMATS[name].calibrates]
            raise RequestError(
                f"{format} is not calibrated",
                got=f"the text {calibrate}",
                remedy=f"leave the text out, or give another format: {', '.join(able)}",
            )
        self.sizes = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self._check_sizes(directory)
        if config.tie_word_embeddings and HEAD in checkpoint.headers:
            with on_host(), checkpoint.reader() as read:
                checkpoint.check_tied_head(read(EMBED).to(checkpoint.dtype))
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = device_of(default if device is None else device, "reference")
        check_computes(self.device)
        self.copied = [path for name in COPIED if is_file(path := checkpoint.directory / name)]
        self.calibration = None
        if calibrate is not None:
            with on_host():
                self.calibration = Calibration.of_file(calibrate, checkpoint.directory, config, tokens)
        self.output = Output(out, self._made_by())
        self.contents = [self._contents(i) for i in range(config.num_hidden_layers + 1)]
        sizes = [sum(parts.values()) for parts in self.contents]
        self.disk = sum(sizes)
        _, H, I = self.sizes
        # a shard and its bytes; an expert in fp32, with the search for scales
        self.memory = 3 * max(sizes) + 3 * H * I * 64 + memory_needed(config, self.calibration)

    def _check_sizes(self, directory: Path) -> None:
        config = self.config
        if config.weight_format != "dense" or not any(map(config.is_sparse, range(config.num_hidden_layers))):
            quantised = config.weight_format != "dense"
            raise CheckpointError(
                f"{directory} has no experts to quantise",
                got=f"experts in {config.weight_format}" if quantised else "dense layers only",
                expected="bf16, fp16 or fp32 experts",
                remedy="give the checkpoint that it was quantised from" if quantised else "a model with experts",
            )
        reason = self.format.why_not(*self.sizes)
        if reason is not None:
            raise CheckpointError(
                f"{directory} does not fit {self.format.name}", got=reason, remedy="keep this model in its own format"
            )

    def _made_by(self) -> dict[str, Any]:
        return {
            "quant_method": METHOD,
            "format": self.format.name,
            "version": self.format.version,
            "model": fingerprint(self.source),
            "calibration": None if self.calibration is None else self.calibration.digest,
        }

    def _contents(self, i: int) -> dict[str, int]:
        """Bytes of each tensor of shard i: those of layer i; in the last shard, those of no layer."""
        L, headers = self.config.num_hidden_layers, self.source.headers
        if i == L:
            return {name: bytes_of(header) for name, header in headers.items() if not name.startswith("model.layers.")}
        prefix = f"model.layers.{i}."
        out = {
            name: bytes_of(header)
            for name, header in headers.items()
            if name.startswith(prefix) and not name.startswith(prefix + EXPERTS)
        }
        if self.config.is_sparse(i):
            with torch.device("meta"):
                tensors = self.format.slots(self.format.empty(*self.sizes), prefix + EXPERTS, False)
            out.update({name: tensor.nbytes for name, tensor in tensors.items()})
        return out

    def shard(self, i: int) -> str:
        """The file name of shard i."""
        return f"model-{i + 1:05d}-of-{len(self.contents):05d}.safetensors"

    def run(self, progress: Progress | None = None) -> Report:
        """Write what is missing. progress: called with experts and shards done, and in all."""
        L, output = self.config.num_hidden_layers, self.output
        steps = [1 + self.sizes[0] * (i < L and self.config.is_sparse(i)) for i in range(L + 1)]
        done = 0
        fewest: int | None = None

        def step(n: int = 1) -> None:
            nonlocal done
            done += n
            if progress is not None:
                progress(done, sum(steps))

        with output.opened(), on_host(), torch.autocast(self.device.type, enabled=False):
            self._check_room()
            output.begin()
            missing = [i for i in range(L + 1) if not output.has(self.shard(i))]
            sparse = [i for i in range(L) if self.config.is_sparse(i)]
            last = max((i for i in sparse if i in missing), default=-1)
            activations = None
            if self.calibration is not None and last >= 0:
                activations = Activations(self.source, self.calibration, self.device)
            for i in range(L + 1):
                routed = activations.attend(i) if activations is not None and i <= last else None
                before = done
                if i in missing:
                    tensors, experts = self._made(i, routed, step)
                    output.write_shard(self.shard(i), tensors)
                elif routed is not None:
                    experts = self._experts_in(i, output.tensors(self.shard(i)))
                if activations is not None and routed is not None:
                    if i < last:
                        activations.add(self._output(experts, routed))
                    fewest = min(map(len, routed.tokens) if fewest is None else [fewest, *map(len, routed.tokens)])
                step(steps[i] - (done - before))
            for path in self.copied:
                output.write_bytes(path.name, read_bytes(path))
            where = {name: self.shard(i) for i, parts in enumerate(self.contents) for name in parts}
            config = Fields.of_file(self.source.directory / CONFIG).values
            output.finish(config, where, self.disk)
        return Report(L + 1, L + 1 - len(missing), self.disk, fewest if sparse[-1:] == [last] else None)

    def _check_room(self) -> None:
        there = sum(path.stat().st_size for path in self.output.directory.iterdir() if path.is_file())
        free, needed = shutil.disk_usage(self.output.directory).free, self.disk - there
        if needed > free:
            raise RequestError(
                f"the disk of {self.output.directory} is too full",
                got=f"{size(free)} free",
                expected=size(needed),
                remedy=f"make room for {size(needed - free)} more, or give another --out",
            )

    def _made(self, i: int, routed: Routed | None, step: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The tensors of shard i by their names in files, and those of its experts by their names in Experts."""
        experts: dict[str, Tensor] = {}
        with self.source.reader() as read:
            out = {name: read(name) for name in self.contents[i] if name in self.source.headers}
        if i < self.config.num_hidden_layers and self.config.is_sparse(i):
            experts = self.format.empty(*self.sizes)
            for e in range(self.config.num_experts):
                with self.source.reader() as read:  # mapped pages of a file count as ours until it is closed
                    gate_up, down = self._dense(read, i, e)
                for name, tensor in self._quantised(i, e, gate_up, down, routed).items():
                    experts[name][e] = tensor[0]
                step()
            out.update(self.format.slots(experts, f"model.layers.{i}.{EXPERTS}", False))
        return out, experts

    def _dense(self, read: Any, i: int, e: int) -> tuple[Tensor, Tensor]:
        """gate_up [1, 2I, H] and down [1, H, I] of an expert, fp32, on the device."""
        prefix = f"model.layers.{i}.{EXPERTS}"
        if prefix in self.source.fused:
            gate_up, down = (read(prefix + name, e, e + 1)[0] for name in ("gate_up_proj", "down_proj"))
        else:
            gate, up, down = (read(f"{prefix}{e}.{name}_proj.weight") for name in ("gate", "up", "down"))
            gate_up = torch.cat((gate.float(), up.float()))
        return gate_up[None].float().to(self.device), down[None].float().to(self.device)

    def _quantised(self, i: int, e: int, gate_up: Tensor, down: Tensor, routed: Routed | None) -> dict[str, Tensor]:
        hidden, routing = None, None
        if routed is not None and (n := len(routed.tokens[e])):
            hidden = routed.hidden[routed.tokens[e]]
            ids = torch.zeros(n, 1, dtype=torch.int64, device=self.device)
            routing = Routing.from_topk(ids, torch.ones(n, 1, dtype=torch.float32, device=self.device), 1)
        try:
            made = self.format.quantise(Experts.dense(gate_up, down), hidden, routing)
        except ContractError as error:
            what = f"expert {e} of layer {i} of {self.source.directory} cannot be quantised: {error.what}"
            raise CheckpointError(what, got=error.got, expected=error.expected, remedy=error.remedy) from error
        return {name: tensor.cpu() for name, tensor in made.tensors.items()}

    def _experts_in(self, i: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those of a layer's experts among the tensors of a shard, by their names in Experts."""
        prefix = f"model.layers.{i}.{EXPERTS}"
        with torch.device("meta"):
            empty = self.format.empty(*self.sizes)
        names = {name: id(tensor) for name, tensor in self.format.slots(empty, prefix, False).items()}
        return {own: tensors[name] for own, tensor in empty.items() for name, key in names.items() if key == id(tensor)}

    def _output(self, experts: dict[str, Tensor], routed: Routed) -> Tensor:
        """[T, H] fp32: what the quantised experts make of their tokens; experts in ascending order."""
        _, H, I = self.sizes
        out = torch.zeros(len(routed.hidden), H, dtype=torch.float32, device=self.device)
        for e, (tokens, weights) in enumerate(zip(routed.tokens, routed.weights, strict=True)):
            one = {name: tensor[e : e + 1].to(self.device) for name, tensor in experts.items()}
            weights_of = Experts(self.format.name, 1, H, I, one).dequantize(0)
            out.index_add_(0, tokens, expert_output(routed.hidden[tokens], *weights_of) * weights[:, None])
        return out


def fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 of config.json and of every byte of the weight files, which are read once, several at a time."""
    said = json.dumps(Fields.of_file(checkpoint.directory / CONFIG).values, sort_keys=True)
    files = sorted({header["file"] for header in checkpoint.headers.values()})
    ended = Event()
    with ThreadPoolExecutor(_READERS) as pool:
        try:
            digests = list(pool.map(partial(_sha256, ended=ended), files))
        finally:
            ended.set()  # after Ctrl-C or an error the pool waits for its threads
    return hashlib.sha256("\n".join([said, *digests]).encode()).hexdigest()


def _sha256(path: Path, ended: Event) -> str:
    digest = hashlib.sha256()
    with reading(path), path.open("rb", buffering=0) as file:
        while not ended.is_set() and (piece := file.read(1 << 24)):
            digest.update(piece)
    return digest.hexdigest()


def quantize_model(
    directory: str | Path,
    out: str | Path,
    format: str = "int4_24",
    calibrate: str | Path | None = None,
    tokens: int = TOKENS,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Convert the experts of a Qwen3-MoE checkpoint; everything else stays as it is.

    It holds one shard (a layer in the new format, or the embeddings and the head) and one dense expert at a time, and
    with calibration the hidden states of its tokens. A second call with the same arguments finishes what a killed one
    began: whole shards are kept, if their checksums are right. The directory is a checkpoint only when it is complete.

    Args:
        directory: the checkpoint, in Hugging Face format. out: the directory to make.
        format: of the experts, one of weight_formats.QUANTISED.
        calibrate: a text file: each expert is fitted to its tokens, after the quantised layers before it.
        tokens: of that text, at most.
        device: that quantises; default "cuda" where there is one, else "cpu".
        progress: called with experts and shards done, and in all.

    Raises:
        CheckpointError: not a Qwen3-MoE checkpoint, or damaged; sizes that do not fit the format; values that are not
            finite, named by layer and expert.
        RequestError: an `out` that holds anything else, has too little room, or cannot be written; an empty text, or
            one for a format that is not calibrated; no number of tokens; no such device.
    """
    text = None if calibrate is None else path_of(calibrate, "calibrate is no path", "name a text file")
    made = path_of(out, "out is no path", "name the directory to make")
    return Conversion(path_of(directory), made, format, text, tokens, device).run(progress)
