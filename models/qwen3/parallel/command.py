"""The command `generate` of several ranks: torchrun --nproc-per-node N -m ttnn_moe generate --parallel experts."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from ttnn_moe.kv.formats import PAGED
from ttnn_moe.parallel.ranks import start

from ..runtime.generate import engine_for, generate
from ..runtime.requests import Options, Stats
from ..tokenizer import Tokenizer
from ..weights import device_of
from .experts import ExpertsQwen3
from .load import load_shared


@dataclass(frozen=True)
class Shared:
    """What all ranks made: the text of each prompt, and how fast. rank: of this process. size: ranks in all."""

    texts: list[str]
    stats: Stats
    rank: int
    size: int
    where: str


def generate_shared(
    directory: Path,
    kind: str,
    prompts: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    asked: Options,
    backend: str = "auto",
    device: str | None = None,
    dtype: str | None = None,
    exchange: str = "auto",
    kv: str = PAGED,
    kv_bits: float | None = None,
) -> Shared:
    """Continue the prompts on all ranks; every rank is started with the same arguments.

    With kind "experts", rank r takes prompts r, r + N, ... of N ranks. With "tensor", all ranks run all prompts.

    Raises:
        BackendUnavailable: torchrun did not start this process. ContractError: a rank differs.
        RankStopped: another rank failed or died. Others: as load_model and generate.
    """
    ranks = start(device_of(device, backend).type)
    with ranks.watched():
        words = json.dumps([[list(map(int, ids)) for ids in prompts], str(sorted(asked.items())), kv, kv_bits])
        ranks.compare({"prompts and options": sha256(words.encode()).hexdigest()})
        given = asked.get("seed")
        # without a seed, one draw for all ranks
        drawn = ranks.meet(str(given if isinstance(given, int) else secrets.randbelow(1 << 62)))[0]
        model = load_shared(directory, ranks, kind, backend, dtype, None, exchange)
        own = list(range(ranks.rank, len(prompts), ranks.size) if kind == "experts" else range(len(prompts)))
        texts, stats = [], Stats()
        if own:
            mine = [prompts[i] for i in own]
            engine = engine_for(model, mine, asked.get("max_new_tokens", 128), kv, kv_bits)
            options = asked.copy()
            options["seed"] = [int(drawn) + i for i in own]
            result = generate(model, mine, tokenizer=tokenizer, engine=engine, **options)
            texts, stats = result.texts, result.stats
        if isinstance(model, ExpertsQwen3):
            model.leave()
        every = ranks.meet(json.dumps([dict(zip(own, texts, strict=True)), asdict(stats)]))
        said, spent = zip(*map(json.loads, every), strict=True)
        where = model.where
        ranks.close()
    return Shared(
        [next(answers[str(i)] for answers in said if str(i) in answers) for i in range(len(prompts))],
        Stats.together([Stats(**one) for one in spent]) if kind == "experts" else stats,
        ranks.rank,
        ranks.size,
        where,
    )
