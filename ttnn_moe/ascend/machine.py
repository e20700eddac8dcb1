"""What one rank knows of its machine; the exchange by torch_npu's operators decides by what all ranks know."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import operators, versions

BUFFER, NETWORK = "HCCL_BUFFSIZE", "TTNN_MOE_ASCEND_NETWORK"
SWITCH = "switch"
VARIABLES = ("HCCL_", "ASCEND_RT_", "ASCEND_HOME", "TTNN_MOE_ASCEND_")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
DEVICES = Path("/dev")


@dataclass(frozen=True)
class Machine:
    """One rank's server and what is installed there.

    Attributes:
        cann, driver: versions; "" where nothing tells. lacks: operators of the exchange that torch_npu does not have.
        server: one text for all ranks of a server, in containers too. cards: NPUs that this process can see there.
        buffer, network: HCCL_BUFFSIZE and TTNN_MOE_ASCEND_NETWORK, as set.
    """

    cann: str = ""
    driver: str = ""
    lacks: tuple[str, ...] = ()
    server: str = ""
    cards: int = 8
    buffer: str = ""
    network: str = ""


def here(npu: Any) -> Machine:
    """This process's machine. npu: torch_npu."""
    return Machine(
        cann=versions.cann(npu),
        driver=versions.driver(npu),
        lacks=tuple(operators.missing(npu, operators.EXCHANGE)),
        server=_server(),
        cards=_cards(npu),
        buffer=os.environ.get(BUFFER, "").strip(),
        network=os.environ.get(NETWORK, "").strip(),
    )


def _server() -> str:
    """Containers of one server have names of their own, but one kernel: its boot id."""
    try:
        return BOOT_ID.read_text().strip() or socket.gethostname()
    except OSError:
        return socket.gethostname()


def _cards(npu: Any) -> int:
    """ASCEND_RT_VISIBLE_DEVICES hides cards from torch_npu, not from /dev; a container may hide them from both."""
    nodes = sum(path.name.removeprefix("davinci").isdigit() for path in DEVICES.glob("davinci*"))
    count = getattr(getattr(npu, "npu", None), "device_count", None)
    return max(nodes, count() if count is not None else 0)


def describe(one: Machine) -> list[str]:
    """Lines for people: versions, cards, and the variables that HCCL and the exchange read."""
    names = sorted(name for name in os.environ if name.startswith(VARIABLES))
    return [
        f"CANN {one.cann or 'unknown'}, driver {one.driver or 'unknown'}, {one.cards} NPUs on this server",
        "environment: " + (", ".join(f"{name}={os.environ[name]}" for name in names) or "no HCCL variable is set"),
    ]
