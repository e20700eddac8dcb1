"""A checkpoint's files: compared with its config.json, and read into the model's own tensors a piece at a time."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from ttnn_moe.errors import CheckpointError, ContractError
from ttnn_moe.visible import shown

from .config import Qwen3MoeConfig
from .files import Fields, is_file, path_of, reading
from .layers import Attention, DenseMLP, Layer, MoE
from .model import Qwen3Moe
from .pieces import FILE_DTYPES, Header, Progress, bytes_of, copy, open_file, pieces, reading_file, region_of
from .shards import examined
from .split import WHOLE, Split

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"
EXPERTS = "mlp.experts."
CONVERT = "convert the weights: load the model in transformers, and save_pretrained() it to another directory"
_FUSED = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(gate_up_proj|down_proj)")
_FLOATS = ("F32", "BF16", "F16")


def slots(model: Qwen3Moe, fused: frozenset[str] = frozenset()) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by its Hugging Face name, as a view of the model's memory.

    Args:
        fused: prefixes "model.layers.N.mlp.experts." whose experts are stored fused (as transformers 5 holds
            them) rather than one by one.
    """
    out = top_slots(model)
    for i, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        out.update(layer_slots(layer, i, fused))
    return out


def top_slots(model: Qwen3Moe) -> dict[str, Tensor]:
    """As slots, of all but the layers."""
    out = {EMBED: model.embed.weight, "model.norm.weight": model.norm.weight}
    return out if model.head is None else {**out, HEAD: model.head.weight}


def layer_slots(layer: Layer, i: int, fused: frozenset[str] = frozenset()) -> dict[str, Tensor]:
    """As slots, of one layer."""
    name = f"model.layers.{i}."
    out = {
        name + "input_layernorm.weight": layer.attention_norm.weight,
        name + "post_attention_layernorm.weight": layer.mlp_norm.weight,
        **_attention_slots(layer.attention, name + "self_attn."),
    }
    mlp = layer.mlp
    if isinstance(mlp, MoE):
        out[name + "mlp.gate.weight"] = mlp.router.weight
        prefix = name + EXPERTS
        out.update(mlp.format.slots(mlp.tensors, prefix, prefix in fused, mlp.first))
    elif isinstance(mlp, DenseMLP):
        gate, up = mlp.gate_up.weight.chunk(2)
        out[name + "mlp.gate_proj.weight"], out[name + "mlp.up_proj.weight"] = gate, up
        out[name + "mlp.down_proj.weight"] = mlp.down.weight
    return out


def _attention_slots(attention: Attention, name: str) -> dict[str, Tensor]:
    sizes = [heads * attention.head_dim for heads in (attention.heads, attention.kv_heads, attention.kv_heads)]
    out: dict[str, Tensor] = {
        name + "q_norm.weight": attention.q_norm.weight,
        name + "k_norm.weight": attention.k_norm.weight,
    }
    for kind in ("weight", "bias") if attention.qkv.bias is not None else ("weight",):
        for letter, part in zip("qkv", getattr(attention.qkv, kind).split(sizes), strict=True):
            out[f"{name}{letter}_proj.{kind}"] = part
        out[f"{name}o_proj.{kind}"] = getattr(attention.out, kind)
    return out


class Checkpoint:
    """Files of a checkpoint that match its config.json; of the weights, only headers have been read.

    Attributes:
        config: its configuration. dtype: of the weights in memory, as the config says, else the files.
        nbytes: of the weights in the files.
        headers: of each tensor in the files: its file, shape and dtype.
        fused: see `slots`.

    Raises:
        CheckpointError: as load_model.
    """

    def __init__(self, directory: str | Path):
        self.directory = path_of(directory)
        self.config = Qwen3MoeConfig.from_directory(self.directory)
        with reading(self.directory):
            self._found = _headers(self.directory)
        self.fused = frozenset(match[1] for match in map(_FUSED.fullmatch, self._found) if match)
        _check_count(self.config, self._found, self.fused, self.directory)
        with torch.device("meta"):
            shapes = Qwen3Moe(self.config)
        _check(self._found, shapes, self.fused, self.directory)
        self.dtype = self.config.dtype or FILE_DTYPES[self._found[EMBED]["dtype"]]
        self.nbytes = sum(map(bytes_of, self._found.values()))
        self.headers = dict(self._found)
        # a tied head in the files is compared with the embeddings, not read
        self._tied_head = self._found.pop(HEAD, None) if self.config.tie_word_embeddings else None

    def read(self, into: dict[str, Tensor], progress: Progress | None = None, split: Split = WHOLE) -> None:
        """Copy the files' tensors of these names, or of each the share that `split` says, into these tensors."""
        with torch.inference_mode():
            copy({name: h for name, h in self._found.items() if name in into}, into, progress, split)

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of the configuration, all headers and the sizes of files; it reads no weights."""
        said = [repr(self.config)]
        for name, header in sorted(self.headers.items()):
            said.append(f"{name} {header['file'].name} {header['shape']} {header['dtype']}")
        for path in sorted({header["file"] for header in self.headers.values()}):
            said.append(f"{path.name} {path.stat().st_size}")
        return hashlib.sha256("\n".join(said).encode()).hexdigest()

    @contextmanager
    def reader(self) -> Iterator[Callable[..., Tensor]]:
        """A function of a tensor's name and of its first and last row + 1, which reads those rows; files stay open."""
        opened: dict[Path, Any] = {}
        with ExitStack() as stack:

            def rows(name: str, start: int = 0, stop: int | None = None) -> Tensor:
                header = self.headers[name]
                path = header["file"]
                if path not in opened:
                    opened[path] = stack.enter_context(open_file(path))
                some = slice(start, header["shape"][0] if stop is None else stop)
                return region_of(opened[path], path, name, (some,))

            yield rows

    def check_values(self, model: Qwen3Moe, split: Split = WHOLE) -> None:
        """Raise CheckpointError for a file that differs from its checksum, or a layer with values of no conversion.

        Ranks share the files between them.
        """
        for path in sorted({header["file"] for header in self.headers.values()})[split.rank :: split.D]:
            if self.config.weight_format != "dense" and not examined(path)[1]:
                raise CheckpointError(
                    f"{path} is damaged",
                    got="tensors that differ from its checksum",
                    remedy="run the same command of ttnn-moe quantize again, or copy the file again",
                )
        for i, layer in enumerate(model.layers):
            mlp = layer.mlp
            if isinstance(mlp, MoE):
                try:
                    mlp.format.check_values(mlp.tensors)
                except ContractError as error:
                    what = f"layer {i} of {self.directory} is damaged: {error.what}"
                    raise CheckpointError(what, got=error.got, expected=error.expected, remedy=error.remedy) from None

    def check_tied_head(self, embed: Tensor) -> None:
        """Raise CheckpointError if the files hold a head that differs from the embeddings it is tied to."""
        if self._tied_head is not None:
            _check_tied_head(self.directory, self._tied_head, embed)


def _files(directory: Path) -> list[Path]:
    """The files that hold the weights, chosen as transformers chooses: a single file, else what the index names."""
    single, index = directory / SINGLE, directory / INDEX
    if single.is_file():
        if index.is_file():
            logger.warning("{} holds {} and {}: the first is read, as transformers does", directory, SINGLE, INDEX)
        return [single]
    if not index.is_file():
        for path in (single, index):
            is_file(path)  # raises where something else is in its place
        there = sorted(path.name for path in directory.glob("*.safetensors"))
        pickled = sorted(path.name for path in directory.glob("pytorch_model*.bin"))
        only = f", only {', '.join(pickled[:3])}" if pickled else ""
        raise CheckpointError(
            f"{directory} is not a checkpoint: it has no weights",
            got=f"{', '.join(there[:3])}... without an index" if there else f"no *.safetensors{only}",
            expected=f"{SINGLE}, or {INDEX} and its shards",
            remedy=CONVERT if pickled and not there else "download or copy the missing files",
        )
    with reading(index):
        where = Fields.of_file(index).fields("weight_map").values
        if not where or not all(isinstance(name, str) for name in where.values()):
            raise CheckpointError(f"{index} has the wrong form", expected="an object weight_map of file names")
        names = sorted(set(where.values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise CheckpointError(
                f"{index} names files outside the checkpoint", got=outside, expected="names without a folder"
            )
        if absent := [name for name in names if not (directory / name).is_file()]:
            is_file(directory / absent[0])  # raises where something else is in its place
            raise CheckpointError(
                f"{directory} lacks files that {INDEX} names", got=f"no {', '.join(absent[:9])}", remedy="fetch them"
            )
    return [directory / name for name in names]


def _headers(directory: Path) -> dict[str, Header]:
    """Per tensor name: its file, shape and dtype, from the headers alone."""
    out: dict[str, Header] = {}
    for path in _files(directory):
        with reading_file(path), open_file(path) as file:
            for key in file.offset_keys():
                if key in out:  # transformers takes that of the last file
                    raise CheckpointError(
                        f"{directory} holds {key} in two files",
                        got=f"{out[key]['file'].name} and {path.name}",
                        expected="each tensor in one file",
                        remedy="fetch the checkpoint again, into an empty directory",
                    )
                view = file.get_slice(key)
                out[key] = {"file": path, "shape": tuple(view.get_shape()), "dtype": view.get_dtype()}
    return out


def _check_count(config: Qwen3MoeConfig, found: dict[str, Header], fused: frozenset[str], directory: Path) -> None:
    """Raise CheckpointError where config.json describes far more tensors than the files hold, before any loop."""
    described = 0
    for i in range(config.num_hidden_layers):
        one_by_one = config.is_sparse(i) and f"model.layers.{i}.{EXPERTS}" not in fused
        described += 8 + (3 * config.num_experts if one_by_one and config.weight_format == "dense" else 0)
    if described > 2 * len(found) + 100:
        raise CheckpointError(
            f"{directory} does not match its config.json",
            got=f"{len(found)} tensors in the files",
            expected=f"at least {described}: num_hidden_layers {config.num_hidden_layers}, "
            f"num_experts {config.num_experts}",
        )


def _check(found: dict[str, Header], shapes: Qwen3Moe, fused: frozenset[str], directory: Path) -> None:
    """Compare names, shapes and dtypes with the model."""
    wanted = slots(shapes, fused)
    problems = [f"missing {name} {list(wanted[name].shape)}" for name in wanted if name not in found]
    for name, header in found.items():
        expected = shapes.embed.weight if name == HEAD and shapes.head is None else wanted.get(name)
        if expected is None:
            problems.append(f"unexpected {name} {shown(list(header['shape']))}")
        elif tuple(expected.shape) != header["shape"]:
            problems.append(f"mis-shaped {name}: {shown(list(header['shape']))}, expected {list(expected.shape)}")
        elif header["dtype"] not in (able := _able(expected.dtype)):
            problems.append(f"wrong dtype of {name}: {header['dtype']}, expected one of {list(able)}")
    if problems:
        raise CheckpointError(
            f"{directory} does not match its config.json, {len(problems)} tensors differ", details=problems
        )


def _able(dtype: torch.dtype) -> tuple[str, ...]:
    """The dtypes of files that a tensor of this dtype is read from."""
    return _FLOATS if dtype.is_floating_point else tuple(n for n, known in FILE_DTYPES.items() if known == dtype)


def _check_tied_head(directory: Path, header: Header, embed: Tensor) -> None:
    for piece in pieces({HEAD: header}, {HEAD: embed}):
        with open_file(piece.file) as file:
            part = region_of(file, piece.file, HEAD, piece.there).to(embed.device, embed.dtype)
        if not torch.equal(part, embed[piece.here]):
            raise CheckpointError(
                f"{directory} holds a {HEAD} of its own, though its config ties it to {EMBED}",
                remedy="set tie_word_embeddings to false in config.json, or remove the tensor",
            )
