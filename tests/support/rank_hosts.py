"""Combine of ranks on the host: the kernel's own source, a block of fibers for each rank, all at the same time.

Loads and stores happen in the order in which fibers run. So what a fence is for is not seen here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from host_kernels import HostKernels, with_mistakes
from rank_gpus import GpuRanks
from ttnn_moe.cuda.combine import kernel
from ttnn_moe.cuda.combine.rank_combine import Plan
from ttnn_moe.cuda.jit import load

NAME = "combine/rank_combine"

# by the instruction: what stands for it
ATOMS = {
    "ld.acquire.sys.global.u32": "look(); word = *from;",
    "ld.relaxed.sys.global.u32": "look(); word = *from;",
    "ld.relaxed.sys.global.u64": "look(); word = *from;",
    "st.relaxed.sys.global.u64": "*to = word;",
    "st.relaxed.sys.global.u32": "*to = word;",
    "st.release.sys.global.u32": "*to = word;",
    "fence.acq_rel.sys": "",
    "mov.u64": "now = now_on_host();",
    "ld.global.L1::no_allocate.v4.u32": "v = *static_cast<const uint4*>(from);",
}
BEFORE = """
#include <chrono>
#include <map>
#include "common/element.cuh"

namespace {  // each library has its own
u64 now_on_host() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
void look() {
    ++emulator::events;  // time goes on: the kernel's waits end by the clock
    emulator::pause();
}
template <class T> T& of_this_block() {
    static std::map<int, T> made;
    return made[emulator::block()];
}
}
inline void __threadfence_block() {}
inline void __nanosleep(u32) { look(); }
inline u32 atomicSub(u32* to, u32 value) { return std::exchange(*to, *to - value); }
inline u32 atomicCAS_system(u32* to, u32 compare, u32 value) {
    const u32 was = *to;
    if (was == compare) *to = value;
    return was;
}
"""


def host_ranks(where: Path, monkeypatch: pytest.MonkeyPatch, *mistakes: tuple[str, str]) -> HostKernels:
    """What runs RankCombine's launches, with lines of its source changed. All ranks are of one launch."""
    source = with_mistakes(where, NAME, mistakes, without=("combine/bulk.cuh", "combine/network.cuh"))[NAME]
    text = re.sub(r'asm volatile\("([^ ;]+).*?\);', lambda found: ATOMS[found[1]], source.read_text(), flags=re.DOTALL)
    text = re.sub(r"__shared__ (\w+) (\w+);", r"\1& \2 = of_this_block<\1>();", text)
    source.write_text(BEFORE + text)
    host = HostKernels(where, sources={NAME: source})
    host.use(monkeypatch)
    host.resident = 32
    monkeypatch.setattr(load, "kernel", lambda spec, device, shared_memory: spec)
    monkeypatch.setattr(kernel, "_config", lambda plan, ranks: (plan.sms, ranks, 1, plan.threads, 1, plan.sms * ranks))

    def launch(self: kernel.RankKernel) -> None:
        host.sound &= bool(host.library(self._kernel).run(self._arguments, *self._config, 0, 0))

    monkeypatch.setattr(kernel.RankKernel, "launch", launch)
    return host


class HostRanks(GpuRanks):
    """GpuRanks without a GPU."""

    device = "cpu"

    def __init__(self, plan: Plan, tokens: Sequence[int], timeout: float = 20.0, first: int = 0):
        super().__init__(plan, tokens, timeout=timeout, first=first)

    def synchronize(self) -> None:
        """The launch has ended."""
