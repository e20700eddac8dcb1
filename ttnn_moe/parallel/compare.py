"""What ranks compare before they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ..errors import ContractError


def compare(
    facts: Sequence[Mapping[str, str] | None],
    what: str = "the same model",
    options: str = "package, checkpoint and options",
) -> None:
    """Raise ContractError, the same on every rank, unless all ranks say the same.

    Args:
        facts: of each rank: a value for each field; None: it has said nothing. Most ranks are right; of two values
            that equally many ranks have, that of the lowest rank is.
        what: ranks run together. options: the user makes equal.
    """
    wrong = []
    known = {rank: said for rank, said in enumerate(facts) if said is not None}
    for field in dict.fromkeys(name for said in known.values() for name in said):
        values = {rank: said.get(field, "nothing") for rank, said in known.items()}
        (expected, _), *_ = Counter(values.values()).most_common()
        right = next(rank for rank, value in values.items() if value == expected)
        for rank, value in values.items():
            if value != expected:
                wrong.append(f"rank {rank}: {field}: got {value}, expected {expected} as rank {right}")
    if wrong:
        raise ContractError(
            f"the ranks do not run {what}",
            got=wrong[0],
            expected="the same on every rank",
            remedy=f"start every rank with the same {options}",
            details=wrong[1:],
        )
