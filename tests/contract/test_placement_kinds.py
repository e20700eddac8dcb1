"""What is no mapping of experts is refused, as lists, as arrays and as tensors; integers of any kind are taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ttnn_moe import ContractError, Placement

NO_MAPPING, NO_PARTITION = "no mapping of experts; got", "not a partition of the experts; got"
ROWS: dict[str, tuple[list[list[Any]], str]] = {
    "fractions": ([[0.5, 1.7]], NO_MAPPING),
    "whole floats": ([[0.0, 1.0]], NO_MAPPING),
    "NaN": ([[float("nan"), 1.0]], NO_MAPPING),
    "bools": ([[False, True]], NO_MAPPING),
    "complex": ([[0j, 1 + 0j]], NO_MAPPING),
    "past int32": ([[0, 2**40]], NO_PARTITION),
    "wraps to 0": ([[2**32, 1]], NO_PARTITION),
    "wraps to 1": ([[0, 1 - 2**32]], NO_PARTITION),
    "twice": ([[0, 0]], NO_PARTITION),
}


@pytest.mark.parametrize("form", [list, np.array, torch.tensor])
@pytest.mark.parametrize("name", ROWS)
def test_every_form_of_rows_is_refused(name: str, form: Any) -> None:
    rows, match = ROWS[name]
    with pytest.raises(ContractError, match=match):
        Placement.from_mapping(form(rows))


OTHERS: dict[str, tuple[Any, str]] = {
    "meta": (torch.empty(2, 2, dtype=torch.int32, device="meta"), NO_MAPPING),
    "sparse": (torch.eye(2, dtype=torch.int32).to_sparse(), NO_MAPPING),
    "a vector": (torch.tensor([0, 1]), NO_MAPPING),
    "text": (["01"], NO_MAPPING),
    "a number": (3, NO_MAPPING),
    "no rows": ([], "different numbers of experts"),
    "rows of 2^64 - 1": (torch.tensor([[0, 2**64 - 1]], dtype=torch.uint64), NO_PARTITION),
}


@pytest.mark.parametrize("name", OTHERS)
def test_no_rows_of_integers(name: str) -> None:
    mapping, match = OTHERS[name]
    with pytest.raises(ContractError, match=match):
        Placement.from_mapping(mapping)


@pytest.mark.parametrize("value", [None, "x", 3, [[0, 1], [2, 3]], np.eye(2, dtype=np.int32)])
def test_a_placement_of_no_tensor(value: Any) -> None:
    with pytest.raises(
        ContractError, match=r"(?s)device_expert_mapping is no tensor.*to fix it: Placement.from_mapping"
    ):
        Placement(value)


def test_a_placement_of_another_layout() -> None:
    with pytest.raises(ContractError, match="device_expert_mapping has the wrong form"):
        Placement(torch.eye(2, dtype=torch.int32).to_sparse())


def test_more_experts_than_int32_numbers() -> None:
    with pytest.raises(ContractError, match="E is out of range; got 1099511627776; expected at most 2147483647"):
        Placement.uniform(2**40, 1)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint64])
def test_integers_of_any_kind_are_taken(dtype: torch.dtype) -> None:
    rows = torch.tensor([[3, 0], [1, 2]], dtype=dtype)
    for mapping in (rows, rows.numpy(), rows.tolist(), list(rows)):
        found = Placement.from_mapping(mapping, 1).device_expert_mapping
        assert found.dtype == torch.int32 and found.tolist() == rows.tolist()
