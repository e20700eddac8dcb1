"""The bundled checkpoint with int4_24 experts: what it can do, and the script that fine-tunes it."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer
from safetensors.torch import load_file

from model_ranks import by_ranks
from qwen3_checkpoints import prompts
from tiny_answers import check_every_task
from tiny_engines import collect
from ttnn_moe.errors import ContractError
from ttnn_moe.formats.int4_24 import dequantise
from ttnn_moe.formats.quantise_int4_24 import quantise, rounded
from ttnn_moe.models.qwen3 import TINY, TINY_INT4_24, Engine, Qwen3Moe, generate, load_model
from ttnn_moe.models.qwen3.layers import MoE
from ttnn_moe.models.qwen3.parallel import load_shared
from ttnn_moe.models.qwen3.runtime.captured import CapturedRunner
from ttnn_moe.models.qwen3.runtime.graphs import Again
from ttnn_moe.models.qwen3.runtime.scheduler import Chunk, Scheduler
from ttnn_moe.models.qwen3.tiny import finetune_int4_24, train, train_long
from ttnn_moe.models.qwen3.tiny.pairs import Pairs
from ttnn_moe.parallel.ranks import Ranks, RankStopped

LARGEST = 2_000_000
NEEDED = 0.9


@pytest.fixture(scope="module")
def model():
    return load_model(TINY_INT4_24, "reference", "cpu")


def test_the_folder_is_small_and_its_experts_have_two_bits_a_weight(model) -> None:
    assert sum(path.stat().st_size for path in TINY_INT4_24.iterdir()) <= LARGEST
    experts = [module.experts for module in model.modules() if isinstance(module, MoE)]
    assert [one.format for one in experts] == ["int4_24", "int4_24"]
    weights = sum(3 * one.E * one.H * one.I for one in experts)
    assert sum(tensor.nbytes for one in experts for tensor in one.tensors.values()) * 8 == 2 * weights
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (TINY_INT4_24 / name).read_bytes() == (TINY / name).read_bytes()


def test_every_task_is_answered(model) -> None:
    check_every_task(model, TINY_INT4_24, NEEDED)


def test_a_pass_computes_with_int4_24_weights_and_its_gradient_goes_through() -> None:
    weights = torch.randn(2, 8, 128, requires_grad=True)
    seen = finetune_int4_24.straight_through(weights)
    want = dequantise(quantise(weights.detach()))
    assert torch.equal(rounded(weights.detach()), want) and torch.equal(rounded(want), want)
    torch.testing.assert_close(seen, want, rtol=0, atol=1e-6)
    slope = torch.randn(2, 8, 128)
    (seen * slope).sum().backward()
    assert torch.equal(weights.grad, slope)


def test_fine_tuning_writes_the_experts_that_it_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    monkeypatch.setattr(finetune_int4_24, "CALIBRATION_ROWS", 1)
    trained: list[dict[str, torch.Tensor]] = []
    write = finetune_int4_24.write

    def seen(out: Path, network, tokenizer) -> None:
        trained.append({name: value.clone() for name, value in network.model.state_dict().items()})
        write(out, network, tokenizer)

    monkeypatch.setattr(finetune_int4_24, "write", seen)
    options = "--steps 1 --tokens 1280 --device cpu --workers 0 --examples 1 --log-every 1"
    result = CliRunner().invoke(finetune_int4_24.app, ["--out", str(tmp_path / "new"), *options.split()])
    assert result.exit_code == 0, result.output
    loss = re.search(r"step 1: loss ([\d.]+)", result.output)
    assert loss and float(loss[1]) < 1, "the start is not the bundled checkpoint"
    found = load_model(tmp_path / "new", "reference", "cpu", torch.float32).layers[3].mlp.experts
    for e in range(found.E):
        for name, weights in zip(("gate_up_proj", "down_proj"), found.dequantize(e), strict=True):
            want = trained[0][f"model.layers.3.mlp.experts.{name}"][e]
            assert torch.equal(weights, dequantise(quantise(want)))
    assert {path.name for path in (tmp_path / "new").iterdir()} == {path.name for path in TINY_INT4_24.iterdir()}
    attention = load_file(tmp_path / "new" / "model-00001-of-00006.safetensors")[
        "model.layers.0.self_attn.q_proj.weight"
    ]
    was = load_model(TINY, device="cpu").layers[0].attention.qkv.weight[: len(attention)]
    assert attention.dtype == torch.bfloat16 and not torch.equal(attention, was), "nothing else was trained"


@pytest.mark.parametrize("script", [train, train_long, finetune_int4_24], ids=lambda one: one.__name__.split(".")[-1])
def test_a_place_that_a_training_could_not_write_is_refused_before_it(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    def trains(*_: object) -> None:
        raise AssertionError("the training began")

    monkeypatch.setattr(script, "Network", trains)
    (tmp_path / "file").touch()
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "model.safetensors").touch()
    app = typer.Typer()
    app.command()(script.main)
    places = {"file": "a file; give", "file/in/it": "a file; give"}
    if script is finetune_int4_24:
        places["."] = "holds files; give"
    else:
        places["one"] = "holds model.safetensors, the weights of another model"
    for place, words in places.items():
        result = CliRunner().invoke(app, ["--out", str(tmp_path / place)])
        assert result.exit_code == 2 and words in " ".join(result.output.replace("│", " ").split()), result.output


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        *((script, "--device nowhere", "no 'nowhere' is here") for script in (train, train_long, finetune_int4_24)),
        (train, "--workers=-1", "--workers"),
        (train_long, "--seconds 0", "--seconds"),
        (train_long, "--phases nonsense", "'nonsense' is not five numbers"),
        (train_long, "--phases 0.2:128:3:2:256", "the last phase ends at 0.2, not at 1"),
        (train_long, "--phases 1:128:3:2:64", "a step of a row or more"),
        (train_long, "--phases 1:128:3:27:256", "families of 1 to 26"),
    ],
)
def test_options_that_would_end_a_training_are_refused_before_it(
    script: ModuleType, options: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    monkeypatch.delattr(script, "Network")
    app = typer.Typer()
    app.command()(script.main)
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "new"), *options.split()])
    assert result.exit_code == 2 and words in " ".join(result.output.replace("│", " ").split()), result.output


def test_the_phases_of_a_long_training() -> None:
    plan = train_long.plan_of(train_long.PHASES)
    assert len(plan) == 5 and plan[1] == (0.1, 128, 4, 4, 8192) and plan[-1][0] == 1
    for _, length, letters, family, tokens in plan:
        ids, _ = Pairs(letters, family).rows(tokens // length, length, torch.Generator().manual_seed(0))
        assert ids.shape == (tokens // length, length)


def loaded(mlp: MoE, words: torch.Tensor) -> None:
    mlp.load_state_dict({**mlp.state_dict(), "w2": words})


def copied(mlp: MoE, words: torch.Tensor) -> None:
    with torch.no_grad():
        mlp.w2.copy_(words)


CHANGES = pytest.mark.parametrize("change", [loaded, copied], ids=lambda change: change.__name__)


def large(mlp: MoE) -> torch.Tensor:
    """w2 with a scale of 64, which families that multiply in fp16 do not take."""
    words = mlp.w2.clone()
    words[0, 0, 0, 0] = words[0, 0, 0, 0] & (1 << 48) - 1 | 0x4280 << 48
    return words


def mixtures(network: Qwen3Moe) -> list[MoE]:
    return [module for module in network.modules() if isinstance(module, MoE)]


@CHANGES
def test_values_that_change_in_place_decide_anew_which_kernels_run(change) -> None:
    network = load_model(TINY_INT4_24, "reference", "cpu")
    mlp, was = mixtures(network)[0], network.changes()
    small, prepared = mlp.w2.clone(), mlp.prepared(2)
    assert mlp.experts.fp16_scales and prepared.problem.fp16_scales
    change(mlp, small)
    assert mlp.prepared(2) is prepared and network.changes() == was, "captured steps go on"
    change(mlp, large(mlp))
    assert network.changes() == was + 1
    assert not mlp.experts.fp16_scales and not mlp.prepared(2).problem.fp16_scales
    integers = mlp.prepared(2)
    change(mlp, small)
    assert mlp.prepared(2) is integers and network.changes() == was + 1, "these kernels take all scales"


@CHANGES
def test_captured_steps_do_not_run_with_scales_that_their_kernels_do_not_take(change) -> None:
    network, text = load_model(TINY_INT4_24, "reference", "cpu"), prompts([5], 500)[0]

    def new_engine() -> Engine:
        made = Engine(network, 2, 64)
        made.runner = CapturedRunner(network, made.cache, Chunk(24, 24), Again())
        made.scheduler = Scheduler(made.runner, made.cache, Chunk(24, 24))
        return made

    serving, mlp = new_engine(), mixtures(network)[1]
    mlp.prepared(2)  # as on a GPU
    for _ in range(2):
        serving.add(text, max_new_tokens=3, stop_ids=())
        assert len(collect(serving)) == 1
        change(mlp, mlp.w2.clone())
    words = large(mlp)
    serving.add(text, max_new_tokens=3, stop_ids=())
    serving.step()
    change(mlp, words)
    with pytest.raises(ContractError, match="captured steps do not fit .*make another engine"):
        collect(serving)
    again = new_engine()
    number = again.add(text, max_new_tokens=3, stop_ids=())
    assert collect(again)[number] == generate(network, [text], max_new_tokens=3, stop_ids=()).tokens[0]


def changed_on_one_rank(ranks: Ranks) -> list[object]:
    network = load_shared(TINY_INT4_24, ranks, "experts", exchange="all_to_all")
    generate(network, prompts([5], 500), max_new_tokens=3, stop_ids=())
    mlp = network.shared()[0]
    before = dict(mlp._prepared)
    if ranks.rank == 1:
        loaded(mlp, large(mlp))
    tokens = generate(network, prompts([5], 500), max_new_tokens=3, stop_ids=()).tokens
    network.leave()
    return [len(tokens), mlp._prepared == before, {layer._experts.fp16_scales for layer in before.values()}]


def test_ranks_keep_their_layers_where_one_of_them_needs_other_kernels(tmp_path: Path) -> None:
    """They meet to make a layer, so one rank alone may not."""
    assert by_ranks(changed_on_one_rank, 2, tmp_path) == [[1, True, {True}], [1, True, {False}]]


class NoRoom:
    """Kernels of an exchange, on a GPU without memory."""

    def renew(self, experts: object) -> None:
        raise MemoryError("no room")


def fails_to_change(ranks: Ranks) -> list[str]:
    """As changed_on_one_rank, but rank 1 has no memory for other kernels, and its caller goes on."""
    network, said = load_shared(TINY_INT4_24, ranks, "experts", exchange="all_to_all"), list[str]()
    generate(network, prompts([5], 500), max_new_tokens=3, stop_ids=())
    mlp = network.shared()[0]
    if ranks.rank == 1:
        for layer in mlp._prepared.values():
            layer.kernels = NoRoom()
        with pytest.raises(MemoryError):
            loaded(mlp, large(mlp))
        for layer in mlp._prepared.values():
            layer.kernels = None
    for _ in range(2):
        with pytest.raises(RankStopped) as stopped:
            generate(network, prompts([5], 500), max_new_tokens=3, stop_ids=())
        said.append(f"{stopped.value.peer} {stopped.value.why}")
    return said


def test_all_ranks_stop_where_one_has_no_memory_for_other_kernels(tmp_path: Path) -> None:
    """It would make a layer alone, and wait for the others there."""
    for said in by_ranks(fails_to_change, 2, tmp_path, timeout=12.0):
        assert said == ["1 MemoryError: no room"] * 2
