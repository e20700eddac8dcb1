"""Triton compiles an operator's kernels once for all numbers of tokens: else a server compiles while it serves."""

from __future__ import annotations

import importlib

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("name", ["router_logits", "router_topk", "head_norm_rope", "routing_sort"])
def test_the_number_of_tokens_is_not_part_of_a_kernel(name: str) -> None:
    kernel = getattr(importlib.import_module(f"ttnn_moe.gpu_kernels.triton.{name}"), name)
    sizes = [one for one in kernel.params if one.name in ("T", "P")]
    assert sizes and all(one.do_not_specialize for one in sizes)


@pytest.mark.parametrize("name", ["decode_attention", "head_norm_rope"])
def test_a_slice_of_the_rows_takes_the_same_kernel(name: str) -> None:
    """Rows and positions of a step's decode tokens may begin anywhere."""
    kernel = getattr(importlib.import_module(f"ttnn_moe.gpu_kernels.triton.{name}"), name)
    slices = [one for one in kernel.params if one.name in ("rows", "positions")]
    assert len(slices) == 2 and all(one.do_not_specialize_on_alignment for one in slices)
