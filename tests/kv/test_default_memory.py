"""How much a cache takes where nobody says, and what no machine has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ttnn_moe import accelerator
from ttnn_moe.errors import RequestError
from ttnn_moe.kv.cache import CacheSizes
from ttnn_moe.kv.paged import PagedCache
from ttnn_moe.kv.pages import MOST, default_memory

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("captures", [False, True])
def test_memory_that_torch_holds_unused_counts_as_free(captures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = {"free": 1000, "held": 500}

    def empty_cache() -> None:
        if captures:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        memory.update(free=memory["free"] + memory["held"], held=0)

    module = SimpleNamespace(empty_cache=empty_cache, mem_get_info=lambda device: (memory["free"], 9000))
    monkeypatch.setattr(accelerator, "module_of", lambda device: module)
    assert default_memory(GPU) == (800 if captures else 1200)
    assert default_memory(torch.device("cpu")) == 4 << 30


def test_memory_that_no_machine_has_is_refused_by_its_own_name() -> None:
    """It holds more pages than 32 bits count, and nobody named a number of pages."""
    sizes = CacheSizes(1, 1, 1, 64, torch.bfloat16, torch.device("cpu"))
    with pytest.raises(RequestError, match="no room for the keys and values.*give less memory, fewer rows"):
        PagedCache.within(sizes, 65_536, MOST, 2**60)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
def test_torch_gives_back_the_memory_of_a_tensor_that_is_gone() -> None:
    torch.zeros(2**28, dtype=torch.uint8, device=GPU)
    held = torch.cuda.memory_reserved(GPU)
    assert accelerator.free_memory(GPU) is not None
    assert torch.cuda.memory_reserved(GPU) <= held - 2**28
