"""Qwen3-MoE as Tenstorrent's vllm-tt-plugin calls a model: vLLM schedules requests and deals out pages.

Source of the calls: https://github.com/tenstorrent/vllm-tt-plugin, model_runner.py, async_decode.py, worker.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ttnn_moe import tenstorrent
from ttnn_moe.errors import RequestError
from ttnn_moe.sizes import ceil_div, power_of_2
from ttnn_moe.tenstorrent.experts import weight_format
from ttnn_moe.tenstorrent.memory import PAGE
from ttnn_moe.tenstorrent.plans import longest_sequence
from ttnn_moe.tenstorrent.runtime import library

from ..config import Qwen3MoeConfig
from .cache import PagedCache, check_rows
from .model import Qwen3MoeTT, load_onto
from .sizes import model_sizes

Logits = Tensor
"""[rows, 1, vocab_size] on the host."""


class Qwen3MoeForCausalLM:
    """The model of one 1xD mesh, for vLLM. vLLM's block is a page of the cache: `--block-size 32`.

    Attributes:
        model_capabilities: what the plugin asks for. Sampling is vLLM's own, on the host. A decode step is read before
            the next one starts.
    """

    model_capabilities: ClassVar[dict[str, bool]] = {
        "supports_prefix_caching": True,
        "supports_async_decode": False,
        "supports_sample_on_device": False,
    }

    def __init__(self, model: Qwen3MoeTT, rows: int, capacity: int):
        self.model, self.rows, self.capacity = model, rows, capacity

    @classmethod
    def initialize_vllm_model(
        cls,
        hf_config: Any,
        mesh_device: Any,
        max_batch_size: int,
        max_seq_len: int,
        n_layers: int | None = None,
        tt_data_parallel: int = 1,
        optimizations: str | None = None,
    ) -> Qwen3MoeForCausalLM:
        """Put the checkpoint on a mesh that vLLM opened.

        Args:
            hf_config: transformers' configuration; its name is a directory. mesh_device: ttnn 1xD mesh.
            max_batch_size: sequences at a time. max_seq_len: tokens of each.
            n_layers, tt_data_parallel, optimizations: None, 1 and None only; see docs/tenstorrent.md.

        Raises:
            RequestError: another option than served, more than 32 sequences, or a name that is no directory.
            Others: as load_model.
        """
        for name, got, served in (
            ("n_layers", n_layers, None),
            ("tt_data_parallel", tt_data_parallel, 1),
            ("optimizations", optimizations, None),
        ):
            if got != served:
                raise RequestError(
                    f"this model does not serve {name}",
                    got=got,
                    expected=served,
                    remedy="leave it out; TTNN_MOE_TT_WEIGHTS chooses formats of weights",
                )
        check_rows(max_batch_size)
        model = load_onto(tenstorrent.attach(mesh_device), directory_of(hf_config._name_or_path))
        return cls(model, max_batch_size, max_seq_len)

    @classmethod
    def get_max_tokens_all_users(
        cls,
        model_name: str,
        num_devices: int,
        tt_data_parallel: int = 1,
        max_model_len: int = 0,
        max_num_seqs: int = 1,
        **_: Any,
    ) -> int:
        """Tokens of keys and values that fit the chips beside the model, but no more than the requests can use.

        The plugin adds a block for each request (get_num_available_blocks_tt of its worker.py): its room is left out.

        Raises:
            RequestError: the model leaves no room for a page.
        """
        sizes = model_sizes(Qwen3MoeConfig.from_directory(directory_of(model_name)))
        arch = str(library().get_arch_name())
        room = longest_sequence(sizes, num_devices, arch, weight_format(), max_num_seqs) - PAGE
        if room <= 0:
            raise RequestError(
                "the chips have no room for keys and values beside the model",
                got=f"{num_devices} {arch}, {max_num_seqs} sequences",
                remedy="more chips, fewer sequences (--max-num-seqs), or TTNN_MOE_TT_WEIGHTS=bfloat8_b",
            )
        return min(room, max_model_len) * max_num_seqs

    def allocate_kv_cache(self, kv_cache_shape: Sequence[int], dtype: torch.dtype, num_layers: int) -> PagedCache:
        """Pages for vLLM's blocks. Block 0 is vLLM's null block and the cache's dummy page.

        Args:
            kv_cache_shape: (blocks, kv_heads, block size, head_dim); heads of a chip. dtype: ignored: kv=bfloat8_b in
                TTNN_MOE_TT_WEIGHTS makes it that, else it is bfloat16.

        Raises:
            RequestError: another block size than 32, other sizes than the model's, or no room on the chips.
        """
        blocks, kv_heads, block, head_dim = kv_cache_shape
        if block != PAGE:
            raise RequestError(
                "a block has the wrong size", got=block, expected=f"{PAGE}, a tile's height", remedy="--block-size 32"
            )
        own = self.model.cache_sizes
        got, expected = (num_layers, kv_heads, head_dim), (own.layers, own.kv_heads, own.head_dim)
        if got != expected:
            raise RequestError("vLLM's cache is of another model", got=got, expected=f"layers, heads, size {expected}")
        return self.model.cache_of_pages(self.rows, self.capacity, blocks - 1)

    def prefill_forward(
        self,
        tokens: Tensor,
        page_table: Tensor,
        kv_cache: PagedCache,
        prompt_lens: Sequence[int] | Tensor,
        start_pos: Sequence[int] | Tensor | None = None,
        enable_trace: bool = False,
        empty_slots: Sequence[int] | None = None,
        **_: Any,
    ) -> Logits:
        """Run prompts to their ends.

        Args:
            tokens: [B, most] int, padded. page_table: [B, any] int. prompt_lens: [B], tokens of each.
            start_pos: [B], tokens that stand in the cache, whole pages. enable_trace, empty_slots: not used.

        Returns:
            [B, 1, vocab_size]: of the last token of each prompt.
        """
        lengths = [int(n) for n in prompt_lens]
        starts = [0] * len(lengths) if start_pos is None else [int(n) for n in start_pos]
        words, chunks = [], []
        # a row of the cache is a place to plan with: vLLM owns the pages
        for row, (length, start) in enumerate(zip(lengths, starts, strict=True)):
            self._check_start(row, start, length)
            kv_cache.lend(row, page_table[row].tolist(), start, length)
            words.append(tokens[row, start:length].long())
            chunks.append((row, length - start))
        step = kv_cache.prefill(chunks, [end - 1 for end in accumulate(n for _, n in chunks)])
        return self.model(torch.cat(words), kv_cache, step)[:, None]

    @staticmethod
    def _check_start(row: int, start: int, length: int) -> None:
        if not 0 <= start < length or start % PAGE:
            raise RequestError(
                f"prompt {row} begins inside a page or behind its end",
                got=f"start_pos {start}, prompt_lens {length}",
                expected=f"a multiple of {PAGE} below prompt_lens",
                remedy="--block-size 32",
            )

    def decode_forward(
        self,
        tokens: Tensor,
        start_pos: Tensor,
        page_table: Tensor,
        kv_cache: PagedCache,
        enable_trace: bool = True,
        read_from_device: bool = True,
        **_: Any,
    ) -> Logits:
        """One token of each row.

        Args:
            tokens: [B, 1] int. start_pos: [B] int, its position; negative: an unused row. page_table: [B, any] int.
            enable_trace: replay the step where the device can; `trace_mode` of the plugin. read_from_device: not used.

        Returns:
            [B, 1, vocab_size]; unused rows: zeros.
        """
        used = (start_pos >= 0).nonzero().flatten().tolist()
        out = torch.zeros(len(start_pos), 1, self.model.config.vocab_size, dtype=self.model.dtype)
        if not used:
            return out
        positions = start_pos[used].tolist()
        self.model.trace(kv_cache, enable_trace)
        for row, position in zip(used, positions, strict=True):
            kv_cache.lend(row, page_table[row].tolist(), position, position + 1)
        step = kv_cache.decode(used, positions)
        out[used, 0] = self.model(tokens[used].flatten().long(), kv_cache, step)
        return out

    def read_decode_output(self, tt_out: Logits, async_read: bool = False) -> Any:
        """What decode_forward returned: it is on the host. async_read: with the events to wait for, none."""
        return (tt_out, []) if async_read else tt_out

    def process_decode_output_host(self, tt_out: Logits, is_tokens: bool = False) -> Logits:
        """What read_decode_output returned."""
        return tt_out

    def warmup_model_prefill(self, kv_cache: PagedCache, enable_trace: bool = False, **_: Any) -> None:
        """Compile the programs of prompts of every padded length; keys and values go to the dummy page."""
        if enable_trace:
            return
        n, most = PAGE, power_of_2(min(self.capacity, kv_cache.packer.longest))
        while n <= most:
            length = min(n, self.capacity)
            table = torch.zeros(1, ceil_div(length, PAGE), dtype=torch.int32)
            self.prefill_forward(torch.zeros(1, length, dtype=torch.int32), table, kv_cache, [length])
            n *= 2

    def warmup_model_decode(
        self, kv_cache: PagedCache, max_batch_size: int, enable_trace: bool = False, **_: Any
    ) -> None:
        """Compile, and where the device can capture, the step of every number of rows; as warmup_model_prefill."""
        B = 1
        while B <= power_of_2(max_batch_size):
            rows = min(B, max_batch_size)
            zeros = torch.zeros(rows, dtype=torch.int32)
            self.decode_forward(zeros[:, None], zeros, zeros[:, None], kv_cache, enable_trace)
            B *= 2


def directory_of(name: str) -> Path:
    """The checkpoint's folder. Raises RequestError for a name that is none."""
    directory = Path(name)
    if not directory.is_dir():
        raise RequestError(
            "the model is no directory",
            got=name,
            expected="a folder with config.json and *.safetensors",
            remedy="download it (`hf download NAME --local-dir DIR`), then `vllm serve DIR`",
        )
    return directory
