"""Launches of packed attention whose DRAM bytes ncu counts: no key or value is unpacked to memory.

    ncu -k regex:"bucketed_attention|bucketed_prompt|bucketed_unpack" --metrics \\
        dram__bytes_read.sum,dram__bytes_write.sum,sm__warps_active.avg.pct_of_peak_sustained_active \\
        python benchmarks/kv_bytes.py

It prints, for each launch, the packed bytes of its keys and values, and what they would take in bf16. Divergence and
conflicts are smsp__sass_branch_targets{,_threads_divergent}.sum, smsp__thread_inst_executed_per_inst_executed.ratio and
l1tex__data_{bank_conflicts_pipe_lsu,pipe_lsu_wavefronts}_mem_shared.sum.

The piece of a prompt calls the kernel that leaves keys packed; then bucketed_unpack, with which an engine makes the row
of so long a piece bf16: from 256 queries on Hopper, 512 elsewhere.
"""

from __future__ import annotations

import torch
from command_line import run_script
from kv_attention import HEADS, KV_HEADS, PAGE, D, mixed, tiers_of
from need_gpu import need_gpu

from ttnn_moe.cuda.attention import bucketed, bucketed_prompt, bucketed_unpack
from ttnn_moe.kv.bucketed.storage import bytes_of_token

TOKENS, PIECE = 32768, 512


def main() -> None:
    """Launch each kernel once, and print its packed bytes."""
    need_gpu()
    counts = mixed(TOKENS)
    packed = sum(n * bytes_of_token(bits, KV_HEADS, D) for bits, n in counts.items())
    for rows in (1, 8):
        q, at = torch.randn(rows, 1, HEADS, D, device="cuda").bfloat16(), torch.arange(rows, device="cuda")
        bucketed.launch(q, tiers_of(rows, counts), at, rotate=True)
        print(f"decode, {rows} rows of {TOKENS}: packed {rows * packed:,}, bf16 {rows * TOKENS * KV_HEADS * D * 4:,}")
    tiers, at = tiers_of(1, counts), torch.arange(PIECE, device="cuda")
    q, scale = torch.randn(PIECE, HEADS, D, device="cuda").bfloat16(), torch.ones(D, device="cuda")
    k, v = torch.randn(2, PIECE, KV_HEADS, D, device="cuda").bfloat16()
    own = bucketed_prompt.Own.of([(0, PIECE)], KV_HEADS, PAGE, k.device)
    own.pack(k, v, scale)
    bucketed_prompt.launch(q, at, own, 0, PIECE, tiers, 0, scale)
    memory = torch.empty(bucketed_unpack.numbers_of(KV_HEADS, TOKENS + PIECE), device="cuda", dtype=torch.bfloat16)
    bucketed_unpack.unpack(bucketed_unpack.Room.of(memory, KV_HEADS, TOKENS, PIECE), k, v, tiers, 0, scale)
    torch.cuda.synchronize()
    print(f"prompt, {PIECE} after {TOKENS}: packed {packed:,}, queries and output {2 * q.nbytes:,}")
    print(f"unpack, the same row: packed {packed:,}, written {memory.nbytes:,}")


if __name__ == "__main__":
    run_script(main)
