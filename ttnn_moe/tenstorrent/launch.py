"""From a plan to a running program: ttnn's descriptors, filled in with the tensors of one call.

Only common runtime arguments hold what changes between calls: addresses and numbers. So ttnn's program cache has one
entry a plan, for every routing and all buffers. The first launch makes a descriptor; the next ones patch it.

ttnn's own hash leaves runtime arguments out. The hash of a descriptor here covers the per-core arguments too: plans
that differ in nothing else are different programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..sources import kernel_path
from .runtime import RunsPlans, library

if TYPE_CHECKING:
    from .._planner import CircularBuffer, Kernel, Placeholder, Program

_ROLES = ("reader", "writer", "compute")
_BUFFERS = 64  # circular buffers of a core, in ttnn
_COMPILED = ("compile_time_args", "named_compile_time_args", "defines", "compiler_include_paths")
_NO_SEMAPHORE = 1 << 20  # ttnn has 16, and refuses to make a program with this one
_NAMES: dict[int, str] = {}  # the folder of a program's kernels, by its hash


def name_of(descriptor: Any) -> str | None:
    """The folder in device_kernels of the program that a launch runs; None: it is none of this package's.

    descriptor: a ttnn.ProgramDescriptor, of a first launch or a later one.
    """
    return _NAMES.get(descriptor.custom_program_hash)


class Launcher:
    """Runs one plan on one device or mesh.

    Attributes:
        program: the plan.
    """

    def __init__(self, program: Program, device: Any):
        self.program = program
        self._device = device
        self._emulated = device if isinstance(device, RunsPlans) else None
        self._grid: dict[tuple[str, int], int] = {}
        self._again: _Relaunch | None = None

    def __call__(self, tensors: Mapping[str, Any], scalars: Mapping[str, int]) -> None:
        """Run the program.

        Args:
            tensors: by their names in the plan, in the forms (shape, dtype, layout, memory) that the plan is for; the
                tensor that is written last comes last.
            scalars: the plan's numbers that a call sets.
        """
        if self._emulated is not None:
            self._emulated.launch(self.program, tensors, scalars)
            return
        ttnn = library()

        order = list(tensors.values())
        if self._again is not None:
            self._again.patch(tensors, scalars)
            try:
                ttnn.generic_op([order[0], order[-1]], self._again.descriptor)  # of the others it needs nothing
                return
            except RuntimeError:
                # ttnn has forgotten the program: it is made again, or fails again
                self._again = None
        descriptor = self.descriptor(tensors, scalars)
        ttnn.generic_op(order, descriptor)
        self._again = _Relaunch(self.program, descriptor)

    def descriptor(self, tensors: Mapping[str, Any], scalars: Mapping[str, int]) -> Any:
        """The plan as a ttnn.ProgramDescriptor for these tensors, with its hash."""
        made = self.without_hash(tensors, scalars)
        own = tuple((core, *args) for kernel in self.program.kernels for core, args in kernel.args.items())
        made.custom_program_hash = hash((library().compute_program_descriptor_hash(made), own)) % 2**64
        _NAMES[made.custom_program_hash] = self.program.kernels[0].source.partition("/")[0]
        return made

    def without_hash(self, tensors: Mapping[str, Any], scalars: Mapping[str, int]) -> Any:
        """As `descriptor`, without the program's hash."""
        ttnn = library()

        def value(arg: int | Placeholder) -> int:
            if isinstance(arg, int):
                return arg
            if arg.kind == "address":
                return tensors[arg.name].buffer_address()
            if arg.kind == "scalar":
                return scalars[arg.name]
            return self._noc(arg.kind, arg.index)

        return ttnn.ProgramDescriptor(
            kernels=[self._kernel(kernel, tensors, value) for kernel in self.program.kernels],
            semaphores=[
                ttnn.SemaphoreDescriptor(id=s.id, core_ranges=_ranges(s.cores), initial_value=s.initial)
                for s in self.program.semaphores
            ],
            cbs=[_buffer(buffer) for buffer in self.program.buffers],
        )

    def _kernel(self, kernel: Kernel, tensors: Mapping[str, Any], value: Any) -> Any:
        ttnn = library()

        compile_args: list[int] = []
        for arg in kernel.compile_args:
            if isinstance(arg, int):
                compile_args.append(arg)
            else:
                compile_args.extend(ttnn.TensorAccessorArgs(tensors[arg.name]).get_compile_time_args())
        args = ttnn.RuntimeArgs()
        for (x, y), own in kernel.args.items():
            args[x][y] = [value(arg) for arg in own]
        path = kernel_path("device_kernels", *kernel.source.split("/"))
        return ttnn.KernelDescriptor(
            kernel_source=str(path),
            core_ranges=_ranges(kernel.cores),
            compile_time_args=compile_args,
            named_compile_time_args=list(kernel.named_compile_args.items()),
            defines=list(kernel.defines.items()),
            runtime_args=args,
            common_runtime_args=[value(arg) for arg in kernel.common_args],
            config=_config(kernel),
            compiler_include_paths=[str(path.parents[1])],
        )

    def _noc(self, kind: str, index: int) -> int:
        """NoC coordinate of a column or row of the grid, the same on all devices of a mesh."""
        ttnn = library()

        if (kind, index) not in self._grid:
            across = kind == "noc_x"
            core = self._device.worker_core_from_logical_core(ttnn.CoreCoord(*((index, 0) if across else (0, index))))
            self._grid[kind, index] = core.x if across else core.y
        return self._grid[kind, index]


class _Relaunch:
    """The descriptor of a launched program, for the launches that find this program in ttnn's cache.

    There ttnn reads the runtime arguments, and nothing else; but it copies the whole descriptor at every call. Per-core
    arguments never change. So this descriptor has the program's hash and the common arguments, and the rest is empty.
    It cannot make a program: where ttnn's cache lost it, one semaphore is refused.

    Attributes:
        descriptor: ttnn.ProgramDescriptor.
    """

    def __init__(self, program: Program, descriptor: Any):
        ttnn = library()

        self.descriptor = descriptor
        # by the name of a tensor or number: places in kernels' common arguments, and the value that is there
        self._places: dict[str, list[tuple[Any, int]]] = {}
        descriptor.cbs = []
        descriptor.semaphores = [
            ttnn.SemaphoreDescriptor(id=_NO_SEMAPHORE, core_ranges=descriptor.kernels[0].core_ranges, initial_value=0)
        ]
        for kernel, made in zip(program.kernels, descriptor.kernels, strict=True):
            made.clear_runtime_args()
            made.kernel_source, made.core_ranges, made.config = "", ttnn.CoreRangeSet([]), ttnn.ReaderConfigDescriptor()
            for name in _COMPILED:
                setattr(made, name, [])
            common = made.common_runtime_args
            for i, arg in enumerate(kernel.common_args):
                if not isinstance(arg, int) and arg.kind in ("address", "scalar"):
                    self._places.setdefault(arg.name, []).append((common, i))
        self._written: dict[str, int] = {}

    def patch(self, tensors: Mapping[str, Any], scalars: Mapping[str, int]) -> None:
        """Write the addresses and numbers of a call that are not those of the call before."""
        places, written = self._places, self._written
        for name, tensor in tensors.items():
            address = tensor.buffer_address()
            if written.get(name) != address:
                written[name] = address
                for common, i in places.get(name, ()):
                    common[i] = address
        for name, number in scalars.items():
            if written.get(name) != number:
                written[name] = number
                for common, i in places.get(name, ()):
                    common[i] = number


def _ranges(cores: Sequence[tuple[int, int]]) -> Any:
    """Cores as few rectangles: equal rows are joined."""
    ttnn = library()

    rows: dict[int, list[int]] = {}
    for x, y in cores:
        rows.setdefault(y, []).append(x)
    found: list[list[int]] = []  # x0, y0, x1, y1
    for y in sorted(rows):
        x0, x1 = min(rows[y]), max(rows[y])
        if found and found[-1][0] == x0 and found[-1][2] == x1 and found[-1][3] == y - 1:
            found[-1][3] = y
        else:
            found.append([x0, y, x1, y])
    return ttnn.CoreRangeSet(
        [ttnn.CoreRange(ttnn.CoreCoord(x0, y0), ttnn.CoreCoord(x1, y1)) for x0, y0, x1, y1 in found]
    )


def _buffer(buffer: CircularBuffer) -> Any:
    ttnn = library()

    return ttnn.CBDescriptor(
        total_size=buffer.total_size,
        core_ranges=_ranges(buffer.cores),
        format_descriptors=[
            ttnn.CBFormatDescriptor(
                buffer_index=buffer.index, data_format=getattr(ttnn, buffer.format), page_size=buffer.page_size
            )
        ],
    )


def _config(kernel: Kernel) -> Any:
    ttnn = library()

    assert kernel.role in _ROLES, kernel.role
    if kernel.role == "reader":
        return ttnn.ReaderConfigDescriptor()
    if kernel.role == "writer":
        return ttnn.WriterConfigDescriptor()
    config = ttnn.ComputeConfigDescriptor(
        math_fidelity=getattr(ttnn.MathFidelity, kernel.config.math_fidelity),
        math_approx_mode=kernel.config.approx,
        fp32_dest_acc_en=kernel.config.fp32_dest_acc,
        dst_full_sync_en=kernel.config.dst_full_sync,
    )
    if kernel.config.unpack_to_dest_fp32:
        direct = set(kernel.config.unpack_to_dest_fp32)
        modes = ttnn.UnpackToDestMode
        config.unpack_to_dest_mode = [modes.UnpackToDestFp32 if i in direct else modes.Default for i in range(_BUFFERS)]
    return config
