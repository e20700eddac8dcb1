"""ttnn-moe warmup and ttnn-moe cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ttnn_moe.cli import app
from ttnn_moe.cuda.jit import build
from ttnn_moe.cuda.jit.spec import Spec
from ttnn_moe.cuda.moe import warmup
from ttnn_moe.errors import ContractError

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TTNN_MOE_CACHE_DIR", str(tmp_path))


def _run(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output.replace("\n", " ")


def test_what_was_warmed_up_is_kept_and_removed(tmp_path: Path) -> None:
    assert "0 kernels, 0.0 of at most 512 MB" in _run("cache")
    few = ("warmup", "--tokens", "1,2", "--arch", "sm_90a")
    assert "6 kernels for sm_90a are ready, 6 of them compiled now" in _run(*few)
    assert "6 kernels for sm_90a are ready, 0 of them compiled now" in _run(*few)
    assert f"{tmp_path}" in _run("cache") and "6 kernels" in _run("cache")
    assert "removed 6 kernels" in _run("cache", "--clear")
    assert "0 kernels" in _run("cache")


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_120f"])
def test_the_kernels_of_other_gpus_are_warmed_up(arch: str) -> None:
    """Count and sort, the few-token forms, for two kinds of ids; what adds to out and what does not; a tile."""
    said = _run("warmup", "--tokens", "1,4096", "--arch", arch)
    assert f"13 kernels for {arch} are ready, 13 of them compiled now" in said


def test_the_kernels_of_a_weight_format_are_warmed_up_and_explained() -> None:
    """Of one token, gate/up and down; for two kinds of ids, and down that adds to out."""
    asked = ("--tokens", "1", "--format", "int4_24")
    assert "6 kernels for sm_90a are ready, 6 of them" in _run("warmup", *asked, "--arch", "sm_90a")
    assert "nothing runs it here" not in _run("why", *asked, "--device", "cpu")


@pytest.mark.parametrize(("arch", "form"), [("sm_90a", "dense"), ("sm_90a", "mxfp4"), ("sm_120f", "mxfp4")])
def test_every_call_is_warmed_up_where_no_tokens_are_named(
    arch: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[set[Spec]] = []
    monkeypatch.setattr(warmup, "warm_up", lambda specs: found.append(set(specs)) or 0)
    for asked in ([], ["--tokens", "1,10,32,50,100,300,512,1024,3000,4096,5000,16384"]):
        _run("warmup", "--arch", arch, "--format", form, *asked)
    every, some = found
    assert every > some


def test_tiles_of_mxfp4_are_warmed_up() -> None:
    """Quantise, sort for two kinds of ids, product, combine of two kinds: of a tile that a layer of gpt-oss takes."""
    sizes = ("--experts", "32", "--topk", "4", "--hidden", "2880", "--intermediate", "2880")
    asked = (*sizes, "--format", "mxfp4", "--activation", "clamped_swiglu", "--arch", "sm_120f", "--tiles")
    said = _run("warmup", *asked, "8")
    assert "6 kernels for sm_120f are ready, 6 of them compiled now in " in said
    assert "6 kernels for sm_120f are ready, 0 of them compiled now" in _run("warmup", *asked, "8x64")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "0"], "numbers like"),
        (["--dtype", "fp8"], "bf16.*fp16"),
        (["--arch", "sm_70"], "'sm_120f', 'sm_80'"),
        (["--arch", "sm_86", "--experts", "1024"], "99 KiB"),
        (["--hidden", "250"], "multiples of 64, not 250.*`ttnn-moe why`"),
        (["--format", "mxfp4", "--hidden", "80"], "H does not fit mxfp4 experts; got 80; .*to 96"),
        (["--topk", "129"], "K=129.*K <= E"),
        (["--format", "mxfp4", "--arch", "sm_120f", "--tiles", "128x256"], "needs 108576 bytes"),
        (["--format", "mxfp4", "--arch", "sm_120f", "--tiles", "8", "--activation", "gelu"], "clamped_swiglu"),
        (["--tiles", "8"], "no tiles to name; got --format dense.*: --format mxfp4 --arch sm_120f"),
        (["--tiles", "8", "--format", "mxfp4", "--arch", "sm_80"], "kernels for sm_80; .*--arch sm_120f"),
        (["--format", "int3"], "'dense', 'int4_24'"),
    ],
)
def test_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(ContractError, match=words):
        _run("warmup", *arguments)
