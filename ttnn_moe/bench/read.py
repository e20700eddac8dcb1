"""A Triton kernel that reads memory once, in order: what the byte floor is measured with. Import it where CUDA is.

| argument | shape | dtype | |
|---|---|---|---|
| data | [n], n a multiple of BLOCK | int32, 16-byte aligned | read once |
| sums | [programs] | int32 | written: each program's sum, wrapped to 32 bits |

8 programs a multiprocessor, 8 warps each, take blocks in turn; a thread has four 16-byte loads in flight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _sum(data, sums, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program, programs = tl.program_id(0), tl.num_programs(0)
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(program * BLOCK, n, programs * BLOCK):
        total += tl.load(data + start + offsets)
    tl.store(sums + program, tl.sum(total, 0))


def streaming_sum(data: Tensor) -> Tensor:
    """[programs] int32: sums of a contiguous int32 tensor of less than 2**31 elements, a multiple of BLOCK."""
    assert data.is_contiguous() and data.dtype == torch.int32 and data.numel() % BLOCK == 0
    programs = 1024
    if data.is_cuda:
        programs = 8 * torch.cuda.get_device_properties(data.device).multi_processor_count
    programs = min(programs, data.numel() // BLOCK)
    sums = torch.empty(programs, dtype=torch.int32, device=data.device)
    _sum[(programs,)](data, sums, data.numel(), BLOCK=BLOCK, num_warps=8)
    return sums
