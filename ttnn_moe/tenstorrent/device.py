"""The device or mesh that this process runs on; if there is none, what is missing."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import registry
from ..arguments import is_size
from ..backend import Probe
from ..errors import BackendUnavailable, ContractError
from ..packages import install
from ..visible import shown
from .runtime import DEVICE, EMULATOR, PLANNER_REMEDY, RunsPlans, is_emulator, library, use, wanted

if TYPE_CHECKING:
    from .._planner import Chip, Machine

SIMULATOR = "TT_METAL_SIMULATOR"
CARDS = Path("/dev/tenstorrent")
ARCHITECTURES = ("blackhole", "wormhole_b0")
EMULATED_CHIP = "p150"  # of "emulator" alone
MOST_CHIPS = 32  # of a mesh that is planned or emulated: each emulated chip maps its DRAM
NAMES = "emulator or emulator:n150, or nothing for a card or a simulator"
CLOSE = "ttnn_moe.tenstorrent.close_device(), and load the weights again"


def unpacks_to_dest(arch: str, simulated: bool) -> bool:
    """Whether fp32 circular buffers are unpacked to DST unchanged, and ttnn reduces fp32 tensors.

    Cards do both. The simulator of Wormhole does neither: there fp32 passes through SrcA, which cuts it to TF32.
    """
    return not (simulated and arch == "wormhole_b0")


def l1_bytes_of(handle: Any, arch: str) -> int:
    """Bytes of L1 of a core, as the device says.

    ttnn 0.81.1 does not bind tt-metal's `l1_size_per_core`. For such a device the planner's table of chips holds.
    """
    from .. import _planner

    if hasattr(handle, "l1_size_per_core"):
        return handle.l1_size_per_core()
    return next(chip.l1_bytes for chip in _planner.chips() if chip.arch == arch)


def bank_cores_of(handle: Any, arch: str, grid: tuple[int, int]) -> list[tuple[int, int]]:
    """Of each DRAM bank, the core of the grid to its right, as the device says of NoC 0; empty: it does not say.

    Wormhole's banks stand left of columns 0 and 4. For a bank whose row has no cores, ttnn names one of another column.
    Here such a bank gets the row below the grid.
    """
    if not hasattr(handle, "get_optimal_dram_bank_to_logical_worker_assignment"):
        return []
    noc = 0 if isinstance(handle, RunsPlans) else library().NOC.NOC_0
    cores = handle.get_optimal_dram_bank_to_logical_worker_assignment(noc)
    step = 4 if arch == "wormhole_b0" else 1
    return [(min(c.x // step * step, grid[0] - 1), grid[1] if c.x % step else min(c.y, grid[1] - 1)) for c in cores]


@dataclass(eq=False)
class Device:
    """An open device, or a 1xD mesh of them.

    Attributes:
        handle: ttnn's device. D: devices in it. arch: "blackhole" or "wormhole_b0". machine: what plans may use.
        trace_bytes: DRAM of each chip for traces, as far as known.
        closed: set by close_device. What lies on a closed device is lost.
        turn: hold it while a call uses the buffers of its programs, which all calls of one size share.
    """

    handle: Any
    D: int
    arch: str
    machine: Machine
    opened_here: bool = False
    trace_bytes: int = 0
    closed: bool = False
    cache: dict[object, Any] = field(default_factory=dict)  # lives as long as the device: programs, buffers
    turn: AbstractContextManager[object] = field(default_factory=threading.RLock, repr=False)

    @classmethod
    def of(cls, handle: Any, opened_here: bool = False) -> Device:
        """Describe an open ttnn device or mesh."""
        from .. import _planner

        arch = str(handle.arch()).rsplit(".", 1)[-1].lower()
        if arch not in ARCHITECTURES:
            raise BackendUnavailable("the device is of an unknown architecture", got=arch, expected=list(ARCHITECTURES))
        grid = handle.compute_with_storage_grid_size()
        l1_bytes = l1_bytes_of(handle, arch)
        simulated = bool(os.environ.get(SIMULATOR)) and not isinstance(handle, RunsPlans)
        direct = unpacks_to_dest(arch, simulated)
        banks = handle.dram_grid_size().x
        near = bank_cores_of(handle, arch, (grid.x, grid.y))
        machine = _planner.Machine(
            grid=(grid.x, grid.y), l1_bytes=l1_bytes, unpack_to_dest=direct, dram_banks=banks, bank_cores=near
        )
        return cls(handle, handle.get_num_devices(), arch, machine, opened_here)

    @classmethod
    def to_plan_for(cls, chip: Chip, D: int) -> Device:
        """D chips of the planner's table, which need not be here. Programs can be planned for them, not run."""
        from .. import _planner

        machine = _planner.Machine(grid=chip.compute_grid, l1_bytes=chip.l1_bytes, dram_banks=chip.dram_banks)
        return cls(None, D, chip.arch, machine)

    @cached_property
    def emulated(self) -> bool:
        """Whether the emulator runs its programs."""
        return isinstance(self.handle, RunsPlans)

    @property
    def name(self) -> str:
        """What open_device calls it: "emulator:CHIP", or "" for a card or simulator through ttnn."""
        return f"{EMULATOR}:{self.handle.chip.name}" if self.emulated else ""

    def check_open(self) -> None:
        """Raise BackendUnavailable if the device was closed."""
        if self.closed:
            raise BackendUnavailable(
                "the device is closed, and its tensors are lost",
                got=str(self),
                expected="the device in use",
                remedy="ttnn_moe.tenstorrent.open_device(), then load_experts or prepare again",
            )

    def __str__(self) -> str:
        kind = "emulated " if self.emulated else "simulated " if os.environ.get(SIMULATOR) else ""
        return f"{kind}{self.arch} 1x{self.D}"


_current: Device | None = None
_CHANGING = threading.RLock()  # hold it to change which device is in use


def open_device(D: int = 1, device: str | None = None, trace_bytes: int | None = None) -> Device:
    """The device of this process, or a 1xD mesh. The first call opens it; it is closed at exit.

    Args:
        D: devices of the mesh.
        device: "emulator" (Blackhole p150), "emulator:n150" or "emulator:n300" (Wormhole), or "" for a card or
            simulator through ttnn; default: the open device, else what TTNN_MOE_TT_DEVICE says.
        trace_bytes: DRAM of each chip for traces; default: ttnn's. A device that is open keeps what it has: the
            result's `trace_bytes` says how much.

    Raises:
        BackendUnavailable: there is no such device, there are fewer than D, or a mesh of another D is open.
        ContractError: another device than the one asked for is open; `device` is no text; D is no number of devices.
    """
    if device is not None and not isinstance(device, str):
        raise ContractError("device is no name", got=f"device={shown(device)}", expected=NAMES, remedy="leave it out")
    if not is_size(D) or D < 1:
        raise ContractError("a mesh has no such size", got=f"D={shown(D)}", expected="D: an integer from 1 on")
    with _CHANGING:
        return _opened(int(D), device, trace_bytes)


def _opened(D: int, device: str | None, trace_bytes: int | None) -> Device:
    """open_device, of arguments that were checked. One thread opens at a time: others get its device."""
    if _current is not None:
        if _current.D != D:
            raise BackendUnavailable("another mesh is open", got=f"D={_current.D}", expected=f"D={D}", remedy=CLOSE)
        if device is not None and _full_name(device) != _current.name:
            raise ContractError(
                "another device is open", got=repr(_current.name), expected=repr(_full_name(device)), remedy=CLOSE
            )
        return _current
    device = wanted() if device is None else device
    found = probe(device)
    if not found.available:
        raise BackendUnavailable(found.reason, remedy=found.remedy)
    if is_emulator(device):
        from .emulator import library as emulated

        if D > MOST_CHIPS:
            raise ContractError("the emulated mesh is too large", got=f"D={D}", expected=f"D from 1 to {MOST_CHIPS}")
        use(emulated)
        return _keep(Device.of(emulated.open_mesh(D, _full_name(device).partition(":")[2])))
    ttnn = library()

    options = {} if trace_bytes is None else {"trace_region_size": trace_bytes}
    if D == 1:
        handle = ttnn.open_device(device_id=0, **options)
    else:
        here = ttnn.GetNumAvailableDevices()
        if here < D:
            raise BackendUnavailable(
                "there are too few devices for the mesh", got=here, expected=f"D={D}", remedy=f"a mesh of 1x{here}"
            )
        ttnn.set_fabric_config(ttnn.FabricConfig.FABRIC_1D)
        handle = ttnn.open_mesh_device(ttnn.MeshShape(1, D), **options)
    opened = Device.of(handle, opened_here=True)
    opened.trace_bytes = trace_bytes or 0
    return _keep(opened)


def _full_name(device: str) -> str:
    """The name with the chip that "emulator" alone stands for."""
    return f"{EMULATOR}:{EMULATED_CHIP}" if device.rstrip(":") == EMULATOR else device


def _keep(device: Device | None) -> Any:
    """Make it the device in use, or none. The registry then looks at this machine again."""
    global _current
    _current = device
    registry.look_again()
    return device


def attach(handle: Any) -> Device:
    """Use a ttnn device or 1xD mesh that the caller opened, and closes after close_device().

    Args:
        handle: ttnn's, or an emulated mesh of `emulator.library.open_mesh`.

    Raises:
        ContractError: another device is in use, a mesh of another shape than 1xD, or no device of ttnn.
        BackendUnavailable: a chip of an architecture without programs.
    """
    if not hasattr(handle, "get_num_devices"):
        raise ContractError(
            "handle is no device",
            got=f"a {type(handle).__name__}",
            expected="a ttnn device or 1xD mesh, or an emulated mesh",
            remedy="attach(device.handle)" if isinstance(handle, Device) else "ttnn.open_device, or open_device()",
        )
    shape = tuple(getattr(handle, "shape", (1, handle.get_num_devices())))
    if len(shape) != 2 or shape[0] != 1:
        D = handle.get_num_devices()
        raise ContractError(
            "the mesh has a shape that is not supported",
            got="x".join(map(str, shape)),
            expected="1xD",
            remedy=f"mesh.reshape(ttnn.MeshShape(1, {D})), or ttnn.open_mesh_device(ttnn.MeshShape(1, {D}))",
        )
    with _CHANGING:
        if _current is not None and _current.handle is not handle:
            raise ContractError(
                "another device is in use",
                got=f"D={_current.D}",
                expected="none",
                remedy="ttnn_moe.tenstorrent.close_device() first",
            )
        if _current is not None:
            return _current
        device = Device.of(handle)
        if device.emulated:
            from .emulator import library as emulated

            use(emulated)
        return _keep(device)


def current() -> Device | None:
    """The device in use, if any."""
    return _current


@atexit.register
def close_device() -> None:
    """Forget the device, and close it if open_device opened it. Weights and buffers on it are lost."""
    with _CHANGING:
        if _current is None:
            return
        device = _current
        device.closed = True
        _keep(None)
        device.cache.clear()
        use(None)
        if device.opened_here:
            ttnn = library()

            if device.D == 1:
                ttnn.close_device(device.handle)
            else:
                ttnn.close_mesh_device(device.handle)
                ttnn.set_fabric_config(ttnn.FabricConfig.DISABLED)


def probe(device: str | None = None) -> Probe:
    """Whether this machine can build and run programs. It looks at files only, and opens nothing."""
    if device is None and _current is not None:
        return Probe(True, devices=(f"{_current.arch}, 1x{_current.D}",))
    name = wanted() if device is None else device
    if is_emulator(name):
        return _emulator_probe(_full_name(name).partition(":")[2])
    if name:  # a slip in the emulator's name must not open a card
        return Probe(False, f"no Tenstorrent device is named {shown(name)}", f"name {NAMES}, as device or in {DEVICE}")
    if importlib.util.find_spec("ttnn") is None:
        return Probe(False, "ttnn is not installed", f"{install('tenstorrent')} (Linux, Python 3.10 or 3.12)")
    if importlib.util.find_spec("ttnn_moe._planner") is None:
        return Probe(False, "the native planner is not built", PLANNER_REMEDY)
    simulator = os.environ.get(SIMULATOR)
    cards = sorted(CARDS.glob("*"))
    if simulator and not Path(simulator).exists():
        return Probe(False, f"{SIMULATOR} is {simulator}, and nothing is there", f"correct {SIMULATOR}, or unset it")
    if not simulator and not cards:
        return Probe(
            False,
            f"no Tenstorrent device is here ({CARDS} holds none)",
            f"use a machine with a card and its driver, or set {SIMULATOR} to a simulator's library",
        )
    compiler = _compiler()
    if compiler is not None and not compiler.exists():
        return Probe(False, f"the kernel compiler is missing: {compiler}", "python -m ttnn_moe.tenstorrent.sfpi")
    if simulator:
        return Probe(True, devices=(f"simulator {simulator}",))
    return Probe(True, devices=tuple(f"card {card.name}" for card in cards))


@functools.cache
def _to_plan_for(chip: str, D: int) -> Device | None:
    from .. import _planner

    return next((Device.to_plan_for(known, D) for known in _planner.chips() if known.name == chip), None)


def emulated_to_plan_for(D: int) -> Device | None:
    """A device that stands for the chips that TTNN_MOE_TT_DEVICE names, to plan for; None: it names no emulated ones.

    A card says what it is when it is opened.
    """
    name, _, chip = wanted().partition(":")
    if name != EMULATOR or importlib.util.find_spec("ttnn_moe._planner") is None:
        return None
    return _to_plan_for(chip or EMULATED_CHIP, D)


def _emulator_probe(chip: str) -> Probe:
    if importlib.util.find_spec("ttnn_moe._planner") is None:
        return Probe(False, "the native planner is not built", PLANNER_REMEDY)
    from .emulator.build import compiler, sources
    from .emulator.run import seed_of_environment

    if _to_plan_for(chip, 1) is None:
        return Probe(False, f"no such chip to emulate: {shown(chip)}", f"name {NAMES}, as device or in {DEVICE}")
    try:
        seed_of_environment()
        return Probe(True, devices=(f"{EMULATOR} ({compiler()}, {sources()})",))
    except (BackendUnavailable, ContractError) as error:
        return Probe(False, error.what, error.remedy or "")


def _compiler() -> Path | None:
    from . import sfpi  # here: sfpi is a command of its own, `python -m` warns of a module that is imported already

    root = sfpi.root()
    return None if root is None else sfpi.folder(root) / sfpi.COMPILER
