"""python on_device.py OUTPUT CASE...: runs cases of device_cases.py on the device or simulator that ttnn opens.

Writes {case: output} with torch.save; "l1_first" holds the first address that ttnn gives a buffer in L1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3])]

import torch  # noqa: E402
import ttnn  # noqa: E402
from device_cases import CASES, Case  # noqa: E402
from programs import KERNELS  # noqa: E402

from ttnn_moe.tenstorrent.emulator import Kernel  # noqa: E402


def ranges(cores: Any) -> Any:
    return ttnn.CoreRangeSet([ttnn.CoreRange(ttnn.CoreCoord(x, y), ttnn.CoreCoord(x, y)) for x, y in cores])


def config(kernel: Kernel) -> Any:
    if kernel.role == "reader":
        return ttnn.ReaderConfigDescriptor()
    if kernel.role == "writer":
        return ttnn.WriterConfigDescriptor()
    return ttnn.ComputeConfigDescriptor(
        math_fidelity=getattr(ttnn.MathFidelity, kernel.config.math_fidelity),
        fp32_dest_acc_en=kernel.config.fp32_dest_acc,
        dst_full_sync_en=kernel.config.dst_full_sync,
    )


def run(case: Case, device: Any) -> torch.Tensor:
    def place(values: torch.Tensor, dtype: str, tiled: bool) -> Any:
        layout = ttnn.TILE_LAYOUT if tiled else ttnn.ROW_MAJOR_LAYOUT
        return ttnn.from_torch(
            values, dtype=getattr(ttnn, dtype), layout=layout, device=device, memory_config=ttnn.DRAM_MEMORY_CONFIG
        )

    program = case.program()
    tensors = {name: place(*value) for name, value in case.inputs().items()}
    shape, dtype, tiled = case.out
    kind = torch.float32 if dtype == "float32" else torch.bfloat16
    tensors["out"] = place(torch.zeros(shape, dtype=kind), dtype, tiled)

    def numbers(args: Any) -> list[int]:
        out: list[int] = []
        for arg in args:
            if isinstance(arg, int):
                out.append(arg)
            elif arg.kind == "accessor":
                out.extend(ttnn.TensorAccessorArgs(tensors[arg.name]).get_compile_time_args())
            elif arg.kind == "address":
                out.append(tensors[arg.name].buffer_address())
            else:
                across = arg.kind == "noc_x"
                where = ttnn.CoreCoord(*((arg.index, 0) if across else (0, arg.index)))
                core = device.worker_core_from_logical_core(where)
                out.append(core.x if across else core.y)
        return out

    kernels = []
    for kernel in program.kernels:
        args = ttnn.RuntimeArgs()
        for (x, y), own in kernel.args.items():
            args[x][y] = numbers(own)
        kernels.append(
            ttnn.KernelDescriptor(
                kernel_source=str(KERNELS / kernel.source),
                core_ranges=ranges(kernel.cores),
                compile_time_args=numbers(kernel.compile_args),
                named_compile_time_args=list(kernel.named_compile_args.items()),
                defines=list(kernel.defines.items()),
                runtime_args=args,
                common_runtime_args=numbers(kernel.common_args),
                config=config(kernel),
            )
        )
    buffers = [
        ttnn.CBDescriptor(
            total_size=b.total_size,
            core_ranges=ranges(b.cores),
            format_descriptors=[
                ttnn.CBFormatDescriptor(
                    buffer_index=b.index, data_format=getattr(ttnn, b.format), page_size=b.page_size
                )
            ],
        )
        for b in program.buffers
    ]
    semaphores = [
        ttnn.SemaphoreDescriptor(id=s.id, core_ranges=ranges(s.cores), initial_value=s.initial)
        for s in program.semaphores
    ]
    descriptor = ttnn.ProgramDescriptor(kernels=kernels, semaphores=semaphores, cbs=buffers)
    ttnn.generic_op(list(tensors.values()), descriptor)
    return ttnn.to_torch(tensors["out"])


def main() -> None:
    device = ttnn.open_device(device_id=0)
    found: dict[str, Any] = {
        "arch": str(device.arch()),
        "grid": str(device.compute_with_storage_grid_size()),
        "noc": [(c.x, c.y) for c in (device.worker_core_from_logical_core(ttnn.CoreCoord(i, i)) for i in range(8))],
    }
    for name in sys.argv[2:]:
        found[name] = run(CASES[name], device)
        torch.save(found, sys.argv[1])  # an error of the simulator ends the process: keep what there is
        print(name, flush=True)
    ttnn.close_device(device)


if __name__ == "__main__":
    main()
