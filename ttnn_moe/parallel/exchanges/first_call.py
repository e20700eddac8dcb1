"""What "auto" makes: the fastest exchange, until its first call shows that it does not run here."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from ...contract import Experts, Routing
from ...errors import ContractError
from . import agreement
from .exchange import Mover, calls_of

# what an operator raises that this torch_npu, CANN or library does not run, or takes other arguments for
FAILURES = (RuntimeError, TypeError, ValueError)
OVER, NEXT, FINE = range(3)
"""What a process says of its first call: no exchange would help it; the next one may; it succeeded."""


class ExchangeWarning(UserWarning):
    """An exchange that "auto" took did not run here, and another one takes its place."""


class FirstCall:
    """A Mover: the first of several whose first call succeeds on every process.

    A failure on one process makes all of them take the next one, with one warning. What no exchange would help, such as
    a lack of memory, ends the call on all of them. From the second call on this adds no work. The first call waits for
    the device, so that it must not be captured in a graph.

    Args:
        makers: each makes an exchange, the preferred one first; the last is taken as it is.
        group: of the exchanges.
    """

    def __init__(self, makers: Sequence[Callable[[], Mover]], group: dist.ProcessGroup | None):
        self._makers, self._group = list(makers), group
        self._exchange, self._proven = self._makers.pop(0)(), not self._makers

    @property
    def name(self) -> str:
        """Of the exchange that is taken now."""
        return self._exchange.name

    def __call__(self, hidden: Tensor, routing: Routing, experts: Experts) -> Tensor:
        while not self._proven:
            out, failure, mine, calls = None, None, FINE, calls_of(self._group)
            calls.trying = True
            try:
                out = self._exchange(hidden, routing, experts)
            except Exception as error:  # every one: the other processes wait for what this one says
                failure = error
                mine = OVER if isinstance(error, ContractError) or not isinstance(error, FAILURES) else NEXT
            finally:
                calls.trying = False
            least = agreement.least(mine, hidden.device, self._group)
            calls.tells = False
            if least == OVER:
                raise agreement.stopped_by(failure, self._group)
            if least == FINE:
                assert out is not None
                self._proven, self._makers = True, []
                return out
            failed, self._exchange = self._exchange.name, self._makers.pop(0)()
            self._proven = not self._makers
            warnings.warn(
                f"exchange {failed} failed at its first call ({failure or 'on another process'}); "
                f"{self.name} takes its place",
                ExchangeWarning,
                stacklevel=2,
            )
        return self._exchange(hidden, routing, experts)
