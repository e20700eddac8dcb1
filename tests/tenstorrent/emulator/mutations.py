"""Mistakes of one line in the device kernels, and what finds each. Run it for docs/emulator.md's table.

test_mutations.py applies each to a copy of the kernels and runs the operator on emulated cores.
"""

from __future__ import annotations

from mutation import EQUIVALENT
from operator_mutations import OPERATORS, ROUTING
from product_mutations import PRODUCTS

MUTATIONS = [*ROUTING, *PRODUCTS, *OPERATORS]


def table() -> str:
    """The rows of docs/emulator.md."""
    rows = [
        f"| `{m.file}` | {m.mistake} | {f'equivalent: {m.reason}' if m.found == EQUIVALENT else m.found} |"
        for m in MUTATIONS
    ]
    return "\n".join(["| file | mistake | found by |", "|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())
