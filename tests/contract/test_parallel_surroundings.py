"""Expert parallelism under torch's other defaults and with TTNN_MOE_CHECK_IDS, in two processes over gloo."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ascend_stand_in
from torch_defaults import defaults
from ttnn_moe import Experts, Placement, Problem, registry
from ttnn_moe.errors import ContractError
from ttnn_moe.parallel import ExpertParallel
from ttnn_moe.parallel.exchanges.npu import turns
from ttnn_moe.parallel.hierarchical import Group, Nodes, Shape, Sizes
from ttnn_moe.parallel.hierarchical.shared_memory import SharedMemory, SharedMemoryTransport
from ttnn_moe.parallel.ranks.turns import Turns

T, E, K, H, I = 6, 8, 3, 64, 32
EXCHANGES = ("all_to_all", "all_gather", "dispatch_combine", "hierarchical")
DEFAULTS: list[torch.dtype | str] = [torch.float64, torch.bfloat16, "meta"]


def under(default: torch.dtype | str):
    return defaults(device=default) if isinstance(default, str) else defaults(default)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float32, device="cpu")


def layer_of(
    exchange: str, placement: Placement, ids: str = "any", group: dist.ProcessGroup | None = None
) -> Callable[..., Tensor]:
    experts = Experts.dense(drawn(1, E, 2 * I, H).bfloat16(), drawn(2, E, H, I).bfloat16()).for_device(placement)
    problem = Problem(T, E, K, H, I, torch.bfloat16, D=placement.D)
    backend = "ascend" if exchange == "dispatch_combine" else "reference"
    return ExpertParallel(problem, experts, placement, group, backend, exchange, ids=ids)


def process(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["HCCL_BUFFSIZE"] = "200"
    registry.register("ascend", ascend_stand_in.TARGET)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    placement = Placement.uniform(E, size, rank)
    call = drawn(10 + rank, T, H).bfloat16(), drawn(20 + rank, T, E).topk(K).indices, drawn(30 + rank, T, K).abs()
    results: dict[str, object] = {}
    for exchange in EXCHANGES:
        want = layer_of(exchange, placement)(*call)
        for default in DEFAULTS:
            with under(default):
                layer = layer_of(exchange, placement)
            # the operators that stand in for an NPU's know one default
            with under(default if exchange != "dispatch_combine" else torch.float32):
                got = layer(*call)
            results[f"{exchange}: {default}"] = got.dtype == want.dtype and torch.equal(got, want)
    group = dist.group.WORLD
    with defaults(device="meta"):
        taken = Turns(group, group, 30.0)
        results["turns"] = taken.take(rank), taken.most
    os.environ["TTNN_MOE_CHECK_IDS"] = "1"
    broken = call[1].clone()
    broken[3, 1] = broken[3, 0]
    bound = torch.tensor(3, dtype=torch.int32)
    for exchange in ("all_to_all", "all_gather", "hierarchical"):  # those of the reference backend
        with pytest.raises(ContractError, match="promised to be distinct, and are not at t=3, k=1"):
            # the refusal ends the calls of its group
            layer_of(exchange, placement, "distinct", dist.new_group())(call[0], broken, call[2])
        layer_of(exchange, placement, "distinct")(call[0], broken, call[2], num_tokens=bound)
        layer_of(exchange, placement)(call[0], broken, call[2])
    Path(folder, f"rank{rank}").write_text(repr(results))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads sometimes abort a process that ends by itself


def test_processes(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(process, (2, str(tmp_path)), nprocs=2, start_method="fork")
    for rank in range(2):
        found = eval(Path(tmp_path, f"rank{rank}").read_text())
        assert found.pop("turns") == (True, 1)
        assert len(found) == len(EXCHANGES) * len(DEFAULTS) and all(found.values()), found


def weighed(default: torch.dtype | str | None) -> list[Tensor]:
    """What combine makes on two ranks of pairs that it weighs, and of biases; the last token names no expert."""
    sizes = Sizes(Shape(Nodes(1, 2)), T, H, K, torch.float32, torch.float32)
    memory, placement = SharedMemory(sizes.layout), Placement.uniform(E, 2)
    memory.detach_name()

    def rank(r: int) -> Tensor:
        group = Group(SharedMemoryTransport(memory, r), sizes, placement, 20.0)
        ids = drawn(40 + r, T, E).topk(K).indices
        ids[-1] = -1
        sent = group.dispatch(drawn(50 + r, T, H), ids, drawn(60 + r, T, K))
        pairs = torch.stack([sent.rows * 1.37**k for k in range(K)], 1)
        return group.combine(pairs, sent.meta, sent.weights, drawn(70, T, H) * 1e-3, drawn(80, T, H))

    def call(r: int) -> Tensor:
        # the default device is one thread's own
        if default == "meta":
            with torch.device("meta"):
                return rank(r)
        return rank(r)

    with under(default) if isinstance(default, torch.dtype) else defaults(), ThreadPoolExecutor(2) as pool:
        return list(pool.map(call, range(2)))


@pytest.mark.parametrize("default", DEFAULTS, ids=str)
def test_a_group_sums_in_fp32(default: torch.dtype | str) -> None:
    for got, want in zip(weighed(default), weighed(None), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


def test_the_turns_of_npus() -> None:
    want = turns(5, 4, 2)
    with defaults(device="meta"):
        assert torch.equal(turns(5, 4, 2), want)
