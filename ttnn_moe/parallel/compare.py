"""What ranks compare before they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ..errors import ContractError


def compare(
    facts: Sequence[Mapping[str, str]], what: str = "the same model", options: str = "package, checkpoint and options"
) -> None:
    """Raise ContractError, the same on every rank, unless all ranks say the same.

    Args:
        facts: of each rank: a value for each field. Most ranks are right; of two values that equally many ranks have,
            that of the lowest rank is.
        what: ranks run together. options: the user makes equal.
    """
    wrong = []
    for field in dict.fromkeys(name for said in facts for name in said):
        values = [said.get(field, "nothing") for said in facts]
        (expected, _), *_ = Counter(values).most_common()
        for rank, value in enumerate(values):
            if value != expected:
                wrong.append(f"rank {rank}: {field}: got {value}, expected {expected} as rank {values.index(expected)}")
    if wrong:
        raise ContractError(
            f"the ranks do not run {what}",
            got=wrong[0],
            expected="the same on every rank",
            remedy=f"start every rank with the same {options}",
            details=wrong[1:],
        )
