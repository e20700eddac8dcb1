"""Qwen3-30B-A3B's MoE layer on the CPU: the reference backend beside transformers' experts implementations.

    python benchmarks/cpu_layer.py --json benchmarks/results/cpu_layer.json

Every implementation's output is compared with an fp64 oracle on sampled tokens in the same run before it is timed.
A timed call begins with ids and weights: ours makes its Routing, and so sorts, in every call. Implementations take
turns within a round, and each round begins with another one; medians are reported. stderr tells of progress: without
instructions for bf16, a call of transformers takes 15 s at T = 4096.
peak_over_need is a ratio of bytes. Above: the process's high-water mark during the reference call, less what it held
before the weights were made. Below: weights, hidden, activations, expert outputs and output.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
import transformers
from command_line import Json, numbers, one_of, run_script, write
from torch import Tensor

from ttnn_moe import Experts, Routing, moe
from ttnn_moe.errors import RequestError
from ttnn_moe.selfcheck.bounds import POISON, worst_error
from ttnn_moe.selfcheck.oracle import oracle

E, K, H, I = 128, 8, 2048, 768
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def layer(dtype: torch.dtype) -> torch.nn.Module:
    """transformers' experts module with random weights; ours takes the same tensors."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(num_experts=E, num_experts_per_tok=K, hidden_size=H, moe_intermediate_size=I)
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    for name, shape in (("gate_up_proj", (E, 2 * I, H)), ("down_proj", (E, H, I))):
        weight = torch.empty(shape, dtype=dtype)
        for e in range(E):  # one expert at a time: no second full-size tensor
            weight[e] = torch.randn(shape[1:]) * 0.02
        setattr(experts, name, torch.nn.Parameter(weight, requires_grad=False))
    return experts


def sampled_error(out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> float:
    """Largest relative error of the last token and seven drawn ones against fp64; infinite if a value is not finite or
    was not written."""
    if not bool(out.isfinite().all()) or bool((out == POISON).any()) or bool((out == 0).all(1).any()):
        return float("inf")
    others = torch.randperm(len(x) - 1)[:7].sort().values
    tokens = torch.cat([others, torch.tensor([len(x) - 1])])
    return worst_error(out[tokens], oracle(x[tokens], ids[tokens], weights[tokens], experts))


def memory(field: str) -> int:
    """VmRSS or VmHWM of this process, bytes."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field))


def main(
    tokens: str = "1,8,32,128,512,1024,4096",
    dtype: str = "bf16,fp32",
    rounds: int = 5,
    threads: int = 2,
    json_file: Json = None,
) -> None:
    """Measure, print a line for each implementation, write JSON."""
    if threads < 1 or rounds < 1:
        raise RequestError("cannot measure this", got=f"rounds {rounds}, threads {threads}", expected="both from 1 on")
    wanted, dtypes = sorted(numbers(tokens), reverse=True), one_of(dtype, DTYPES, "dtype")
    torch.set_num_threads(threads)
    rows, began = [], time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {text}", file=sys.stderr, flush=True)

    for name in dtypes:
        say(f"{name}: making weights")
        torch.manual_seed(0)
        held = memory("VmRSS")
        experts = layer(DTYPES[name])
        ours = Experts.dense(experts.gate_up_proj, experts.down_proj)
        for T in wanted:
            x = torch.randn(T, H).to(DTYPES[name])
            weights, ids = torch.rand(T, E).softmax(-1).topk(K)
            weights = weights / weights.sum(-1, keepdim=True)
            calls = {"ttnn_moe reference": partial(own_call, x, ids, weights, ours)}
            for peer in ("eager", "batched_mm", "grouped_mm"):
                if peer == "batched_mm" and T > 8:
                    continue  # it copies the weights once per pair: ten times slower than the others and more
                calls[f"transformers {peer}"] = peer_call(experts, peer, x, ids, weights)
            need = sum(t.numel() * t.element_size() for t in (experts.gate_up_proj, experts.down_proj))
            need += x.element_size() * (2 * T * H + T * K * (H + I))
            times: dict[str, list[float]] = {call: [] for call in calls}
            errors, peak = {}, 0
            with torch.inference_mode():
                for call, run in calls.items():
                    say(f"{name} T={T}: checking {call}")
                    torch.full_like(x, POISON)  # freed at once: the output gets this memory, or zeros
                    Path("/proc/self/clear_refs").write_text("5")
                    out = run()
                    if call.startswith("ttnn_moe"):
                        peak = memory("VmHWM") - held
                    errors[call] = sampled_error(out, x, ids, weights, ours)
                    if errors[call] > (1e-2 if name == "bf16" else 1e-5):
                        raise SystemExit(f"{call} is wrong at T={T} {name}: relative error {errors[call]:.2e}")
                for i in range(rounds):
                    say(f"{name} T={T}: round {i + 1} of {rounds}")
                    for call in in_turn(list(calls), i):
                        run = calls[call]
                        start = time.perf_counter()
                        run()
                        times[call].append(time.perf_counter() - start)
            best_peer = min(statistics.median(t) for c, t in times.items() if c.startswith("transformers"))
            for call, seconds in times.items():
                median = statistics.median(seconds)
                row = {
                    "dtype": name,
                    "T": T,
                    "implementation": call,
                    "median_ms": median * 1e3,
                    "min_ms": min(seconds) * 1e3,
                    "max_ms": max(seconds) * 1e3,
                    "worst_error": errors[call],
                    "best_peer_over_this": best_peer / median,
                }
                if call.startswith("ttnn_moe"):
                    row["peak_over_need"] = peak / need
                rows.append(row)
                print({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        del experts, ours, calls, run, out  # before the next dtype's weights are made
    cpu = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "")
    machine = {
        "cpu": cpu.partition(": ")[2] or platform.processor(),
        "threads": threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "E": E,
        "K": K,
        "H": H,
        "I": I,
        "rounds": rounds,
    }
    if json_file:
        write(json_file, {"machine": machine, "rows": rows})


def own_call(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """One call as a model makes it: the Routing is new, for it keeps the sort of its first call."""
    return moe(x, Routing.from_topk(ids, weights, experts.E), experts, backend="reference")


def in_turn(names: list[str], i: int) -> list[str]:
    """The order of round i: each round begins with another name."""
    first = i % len(names)
    return names[first:] + names[:first]


def peer_call(experts: torch.nn.Module, peer: str, x: Tensor, ids: Tensor, weights: Tensor):  # type: ignore[no-untyped-def]
    """A call of transformers' experts module with one of its implementations."""

    def run() -> Tensor:
        experts.config._experts_implementation = peer
        return experts(x, ids, weights.to(x.dtype))

    return run


if __name__ == "__main__":
    run_script(main)
