"""Expert parallelism of transformers: each of two processes runs half of the experts through the operator."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest
import torch

import gpt_oss_models
from hf_models import FP32, batch, experts_of, hf, make, run_with, transformers
from ttnn_moe.selfcheck.bounds import token_errors

distributed = pytest.importorskip("transformers.distributed", reason="this transformers has no expert parallelism")


def rank_of_two(rank: int, folder: str) -> None:
    """One process: the shared model loaded with half of its experts; writes its logits and what its experts were."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    seen: set[int] = set()
    moe = hf.experts.api.moe

    def spy(hidden, routing, experts, **options):
        seen.add(experts.E)
        return moe(hidden, routing, experts, **options)

    hf.experts.api.moe = spy
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        distributed_config=distributed.DistributedConfig(tp_size=2, ep_size=2),
        experts_implementation="ttnn_moe",
        dtype=torch.float32,
    )
    with torch.no_grad():
        logits = model(**torch.load(f"{folder}/inputs.pt"), use_cache=False).logits
    torch.save((logits, seen, list(hf.served(model))), f"{folder}/rank{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads sometimes abort a process that ends by itself


@pytest.mark.skipif(
    "ep_size" not in inspect.signature(distributed.DistributedConfig).parameters,
    reason="this transformers does not name the size of an expert-parallel group",
)
@pytest.mark.parametrize("name", ["Qwen3Moe", "gpt-oss"])
def test_two_processes(name: str, tmp_path: Path) -> None:
    if name == "gpt-oss":
        load = transformers.AutoModelForCausalLM.from_pretrained
        config = transformers.Mxfp4Config(dequantize=True)
        gpt_oss_models.save(tmp_path)
        model = load(tmp_path, quantization_config=config, dtype=torch.bfloat16).float()
    else:
        model = make(name)
        model.save_pretrained(tmp_path)
    inputs = batch()
    torch.save(inputs, tmp_path / "inputs.pt")
    want = run_with(model, "eager", lambda m: m(**inputs, use_cache=False).logits)
    torch.multiprocessing.spawn(rank_of_two, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        got, seen, served = torch.load(tmp_path / f"rank{rank}.pt")
        assert token_errors(got.flatten(0, 1), want.flatten(0, 1)).max() < FP32
        # four of the eight experts; how the others' are marked differs between versions of transformers
        assert seen == {4} and served == list(experts_of(model))
