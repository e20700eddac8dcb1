"""Write the measured tables of README.md and of pages of docs/ from benchmarks/results: python benchmarks/tables.py.

A table stands between `<!-- NAME -->`, NAME being a key of TABLES, and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import kv_tables
import layer_tables
import model_tables
import qwen3_gpu_tables
import tenstorrent_tables
from table_text import ROOT

PAGES = (
    ROOT / "README.md",
    ROOT / "docs/benchmark.md",
    ROOT / "docs/emulator.md",
    ROOT / "docs/expert_parallel.md",
    ROOT / "docs/tenstorrent.md",
    ROOT / "docs/tenstorrent_kernels.md",
    ROOT / "docs/kv.md",
    ROOT / "docs/qwen3.md",
    ROOT / "docs/tensor_parallel.md",
    ROOT / "docs/vllm.md",
)

TABLES: dict[str, Callable[[], str]] = {
    "combine.json": model_tables.combine,
    "combine_h100x4.json": partial(model_tables.combine, "combine_h100x4.json"),
    "combine_nodes.json": model_tables.combine_nodes,
    "combine_nodes_h100x4.json": partial(model_tables.combine_nodes, "combine_nodes_h100x4.json"),
    "combine_pairs.json": model_tables.combine_pairs,
    "experts_shared.json": model_tables.experts_shared,
    "experts_shared_h100x4.json": partial(model_tables.experts_shared, "experts_shared_h100x4.json"),
    "cpu_layer.json": layer_tables.cpu_layer,
    "cpu_layer_avx2.json": partial(layer_tables.cpu_layer, "cpu_layer_avx2.json"),
    "kv_attention.json": kv_tables.attention,
    "kv_bitdecoding.json": kv_tables.bitdecoding,
    "kv_prompts.json": kv_tables.prompts,
    "kv_queries.json": kv_tables.queries,
    "kv_recall.json": kv_tables.recall,
    "kv_recall_keys.json": partial(kv_tables.recall, "kv_recall_keys.json"),
    "kv_recall_keys.json, less uniform": partial(kv_tables.recall_pairs, "kv_recall_keys.json"),
    "qwen3_engine.json": model_tables.qwen3_engine,
    "qwen3_engine_h100.json": partial(model_tables.qwen3_engine, "qwen3_engine_h100.json"),
    "qwen3_first_token.json": kv_tables.first_token,
    "qwen3_gpu.json": qwen3_gpu_tables.summary,
    "qwen3_gpu.json, with parts": qwen3_gpu_tables.whole,
    "qwen3_gpu_h100.json, with parts": partial(qwen3_gpu_tables.whole, "qwen3_gpu_h100.json"),
    "qwen3_gpu_h100_mxfp4.json, with parts": partial(qwen3_gpu_tables.whole, "qwen3_gpu_h100_mxfp4.json"),
    "qwen3_gpu_mxfp4.json": partial(qwen3_gpu_tables.whole, "qwen3_gpu_mxfp4.json"),
    "qwen3_kv.json": kv_tables.steps,
    "int4_24_layer.json": partial(layer_tables.format_layers, "int4_24"),
    "int4_24_sm80_h100.json": partial(layer_tables.format_layers, "int4_24", "int4_24_sm80_h100.json"),
    "mxfp4_layer.json": partial(layer_tables.format_layers, "mxfp4"),
    "mxfp4_peers.json": partial(layer_tables.format_layers, "mxfp4", "mxfp4_peers.json"),
    "moe_layer.json": layer_tables.moe_layer,
    "moe_layer.json, all of it": layer_tables.moe_layer_all,
    "peers_h200.json": layer_tables.peers_h200,
    "sm80_layer.json": layer_tables.sm80_layer,
    "qwen3_sm80.json": model_tables.qwen3_sm80,
    "qwen3_parallel.json": model_tables.qwen3_parallel,
    "qwen3_parallel_h100x4.json": partial(model_tables.qwen3_parallel, "qwen3_parallel_h100x4.json"),
    "tenstorrent_cost.json, banks": tenstorrent_tables.banks,
    "tenstorrent_cost.json, bytes": tenstorrent_tables.bytes,
    "tenstorrent_cost.json, choice": tenstorrent_tables.choice,
    "tenstorrent_cost.json, estimate": tenstorrent_tables.estimate,
    "tenstorrent_cost.json, layer": tenstorrent_tables.layer,
    "tenstorrent_host.json": tenstorrent_tables.host,
    "tenstorrent_quality.json": tenstorrent_tables.quality,
    "vllm_ranks.json": model_tables.vllm_ranks,
    "vllm_gpt_oss.json": partial(model_tables.vllm_serve, "vllm_gpt_oss.json"),
    "vllm_serve.json": model_tables.vllm_serve,
    "vllm_serve_h100.json": partial(model_tables.vllm_serve, "vllm_serve_h100.json"),
}


def updated(page: str) -> str:
    """A page with its tables as the results have them.

    Raises:
        ValueError: a table that the page names does not exist.
    """

    def filled(found: re.Match[str]) -> str:
        if found[1] not in TABLES:
            raise ValueError(f"no table {found[1]!r}, expected one of {list(TABLES)}")
        return f"<!-- {found[1]} -->\n{TABLES[found[1]]()}<!-- end -->"

    return re.sub(r"<!-- (?!end -->)([^\n]*?) -->\n.*?<!-- end -->", filled, page, flags=re.S)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(updated(path.read_text()))
