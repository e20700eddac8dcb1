"""Processes, a GPU each, over symmetric memory; rank 1 is killed while its launches are under way.

    python tests/support/rank_kills.py GPUS INTER DELAY

Each other process prints what its heap says, and the seconds that its launches took to end.
INTER: nodes, a divisor of GPUS. DELAY: seconds before the kill.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from ttnn_moe.contract import Placement
from ttnn_moe.cuda.combine.channel import Channel, Sizes
from ttnn_moe.cuda.combine.kernel import RingPlan
from ttnn_moe.parallel.exchanges.exchange import world_of

TIMEOUT, CALLS = 0.2, 400


def heap_of(plan: RingPlan) -> tuple[torch.Tensor, list[int]]:
    heap: torch.Tensor = symmetric.empty(
        plan.heap, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device())
    )
    heap.zero_()
    handle = symmetric.rendezvous(heap, world_of(None))
    torch.cuda.synchronize()
    dist.barrier()
    return heap, list(handle.buffer_ptrs)


def process(rank: int, gpus: int, inter: int, delay: float, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=gpus)
    T, H, K = 256, 2048, 4
    sizes = Sizes(inter, gpus // inter, H, T, torch.bfloat16, K, 8, True)
    channel = Channel(sizes, Placement.uniform(8, gpus, rank), rank, rank, heap_of, TIMEOUT)
    x, weights = torch.randn(T, H, device="cuda").bfloat16(), torch.rand(T, K, device="cuda")
    ids = torch.randint(8, (T, K), device="cuda", dtype=torch.int32)
    count, out = torch.tensor([T], dtype=torch.int32, device="cuda"), torch.empty_like(x)

    def call() -> None:
        channel.dispatch(x, ids, weights, count)
        channel.combine(out, count)

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    assert channel.stopped() is None
    dist.barrier()
    start = time.monotonic()
    if rank == 1:
        while time.monotonic() - start < delay:
            call()
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    while channel.stopped() is None and time.monotonic() - start < 20:
        call()
        torch.cuda.synchronize()
    # one write: lines of several processes do not mix
    sys.stdout.write(f"stopped {channel.stopped()} {time.monotonic() - start:.2f}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    gpus, inter, delay = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    port = 29600 + os.getpid() % 300
    context = torch.multiprocessing.get_context("spawn")
    started = [context.Process(target=process, args=(rank, gpus, inter, delay, port)) for rank in range(gpus)]
    for one in started:
        one.start()
    for one in started:
        one.join(60)
    for one in started:
        one.kill()
