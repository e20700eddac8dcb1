"""ttnn_moe.hf and ttnn_moe.integrations.transformers are one package under two names."""

from __future__ import annotations

import importlib

import pytest

from processes import run_python

pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)


def test_modules_are_the_same_objects() -> None:
    import ttnn_moe.hf
    import ttnn_moe.integrations.transformers as whole
    from ttnn_moe.hf.experts import served

    assert ttnn_moe.hf is whole and ttnn_moe.hf.served is served is whole.experts.served
    for name in ("experts", "gate", "plug", "kv", "kv_cache", "kv_layer", "kv_model", "mxfp4", "checkpoints"):
        assert importlib.import_module(f"ttnn_moe.hf.{name}") is getattr(whole, name)


# what each takes to import is there; a child of its own runs it
EACH = """
import os, sys, transformers.modeling_utils
for code in sys.argv[1:]:
    child = os.fork()
    if not child:
        exec(code)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, code
"""


def test_each_way_of_importing_works_first() -> None:
    run_python(
        "-c",
        EACH,
        "import ttnn_moe.hf; ttnn_moe.hf.register",
        "from ttnn_moe.hf import register, served, TransformersUnsuitable",
        "from ttnn_moe.hf.gate import why_not",
        "import ttnn_moe.integrations.transformers, ttnn_moe.hf.plug",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
