"""What tests of the engine share: the cache formats."""

from __future__ import annotations

import pytest

from ttnn_moe.kv.bucketed import allocation


@pytest.fixture(params=["paged", "bucketed"])
def kv(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A cache format. The high tier of the bucketed one is small, so that tokens move."""
    monkeypatch.setattr(allocation, "HIGH", ((4, 60),))
    return request.param
