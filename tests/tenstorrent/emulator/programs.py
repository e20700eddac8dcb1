"""Programs of the emulator's tests, made of the kernels in kernels/. They also run on a device through ttnn."""

from __future__ import annotations

from pathlib import Path

from ttnn_moe.tenstorrent.emulator import CircularBuffer, ComputeConfig, Kernel, Placeholder, Program, Semaphore

KERNELS = Path(__file__).parent / "kernels"
TILE_BYTES = {"bfloat16": 2048, "float32": 4096, "bfloat8_b": 1088, "bfloat4_b": 576, "int32": 4096}
NOC_1, NOC_0 = "writer", "reader"


def grid(columns: int, rows: int = 1) -> list[tuple[int, int]]:
    return [(x, y) for y in range(rows) for x in range(columns)]


def shares(count: int, cores: list[tuple[int, int]]) -> dict[tuple[int, int], list[int]]:
    """[first, count] of each core, as even as can be."""
    each, more = divmod(count, len(cores))
    out, first = {}, 0
    for i, core in enumerate(cores):
        out[core] = [first, each + (i < more)]
        first += out[core][1]
    return out


def buffer(index: int, cores, fmt: str = "bfloat16", pages: int = 2, page: int | None = None) -> CircularBuffer:
    page = page or TILE_BYTES[fmt]
    return CircularBuffer(index, pages * page, page, fmt, cores)


def moved(source: str, role: str, tensors: str, cores, args=None, common=(), **more) -> Kernel:
    """A data-movement kernel of tensors, whose names are apart by a space; `common` follows their addresses."""
    names = tensors.split()
    accessors = [Placeholder("accessor", name) for name in names]
    addresses = [Placeholder("address", name) for name in names]
    return Kernel(source, role, cores, accessors, common_args=[*addresses, *common], args=args or {}, **more)


def corners(columns: int, rows: int = 1) -> list[Placeholder]:
    """NoC coordinates of the grid's first core and of its last."""
    places = (("noc_x", 0), ("noc_y", 0), ("noc_x", columns - 1), ("noc_y", rows - 1))
    return [Placeholder(axis, index=i) for axis, i in places]


def unary(
    tiles: int,
    cores,
    *,
    silu: bool = False,
    fmt="bfloat16",
    out_fmt="bfloat16",
    compute="unary.cpp",
    reader="read_tiles.cpp",
    writer="write_tiles.cpp",
    config: ComputeConfig | None = None,
    pages: int = 2,
) -> Program:
    """out = f(a), tile by tile; the kernels' names may be those of broken ones."""
    args, config, defines = shares(tiles, cores), config or ComputeConfig(), {"SILU": "1"} if silu else {}
    return Program(
        [
            moved(reader, "reader", "a", cores, args),
            moved(writer, "writer", "out", cores, args),
            Kernel(compute, "compute", cores, args=args, defines=defines, config=config),
        ],
        [buffer(0, cores, fmt, pages), buffer(1, cores, out_fmt, pages)],
    )


def matmul(
    m: int, k: int, n: int, cores, config: ComputeConfig, *, b_fmt: str = "bfloat16", out_fmt: str = "bfloat16"
) -> Program:
    """out [m, n] = a [m, k] b [k, n], sizes in tiles."""
    args = shares(m * n, cores)
    named = {"k_tiles": k, "n_tiles": n}
    return Program(
        [
            moved("matmul_reader.cpp", "reader", "a b", cores, args, named_compile_args=named),
            moved("write_tiles.cpp", "writer", "out", cores, args),
            Kernel("matmul.cpp", "compute", cores, named_compile_args={"k_tiles": k}, args=args, config=config),
        ],
        [buffer(0, cores), buffer(2, cores, b_fmt), buffer(1, cores, out_fmt)],
    )


def tilize(blocks: int, block: int, cores, *, back: bool = False) -> Program:
    """Row-major a [blocks * 32, block * 32] to tiles in out, or the other way."""
    args = {core: [first * block, count * block] for core, (first, count) in shares(blocks, cores).items()}
    named = {"block": block, "row_bytes": block * 64}
    if back:
        rows = moved("rows.cpp", "writer", "out", cores, args, named_compile_args=named, defines={"WRITE": "1"})
        tiles = moved("read_tiles.cpp", "reader", "a", cores, args)
    else:
        rows = moved("rows.cpp", "reader", "a", cores, args, named_compile_args=named)
        tiles = moved("write_tiles.cpp", "writer", "out", cores, args)
    defines = {"UNTILIZE": "1"} if back else {}
    compute = Kernel("tilize.cpp", "compute", cores, named_compile_args={"block": block}, args=args, defines=defines)
    return Program([rows, tiles, compute], [buffer(0, cores, pages=2 * block), buffer(1, cores, pages=2 * block)])


def spread(pages: int, columns: int, rows: int, role: str = NOC_0, source: str = "spread.cpp") -> Program:
    """Core 0 sends every page of a to all cores; out holds a copy for each core."""
    cores = grid(columns, rows)
    first, last = corners(columns, rows)[:2], corners(columns, rows)[2:]
    common = [*(last + first if role == NOC_1 else first + last), *first]
    args = {core: [i, pages] for i, core in enumerate(cores)}
    kernel = moved(source, role, "a out", cores, args, common, named_compile_args={"cores": len(cores)})
    return Program([kernel], [buffer(0, cores, pages=1)], [Semaphore(0, 0, cores), Semaphore(1, 0, cores)])


def pairs(tiles: int, cores, how: int, op: int) -> Program:
    """out = a OP b, tile by tile, b broadcast: how 0 not at all, 1 its column, 2 its row, 3 its first value."""
    args = shares(tiles, cores)
    return Program(
        [
            moved("read_pairs.cpp", "reader", "a b", cores, args),
            moved("write_tiles.cpp", "writer", "out", cores, args),
            Kernel("eltwise.cpp", "compute", cores, named_compile_args={"how": how, "op": op}, args=args),
        ],
        [buffer(0, cores), buffer(2, cores), buffer(1, cores)],
    )


def block(rt: int, k: int, ct: int, config: ComputeConfig, *, tiles: bool = False) -> Program:
    """out [rt, ct] = a [rt, k] b [k, ct] on one core, sizes in tiles."""
    cores, defines = grid(1), {"TILES": "1"} if tiles else {}
    sizes, pages = {"rt": rt, "ct": ct, "k_tiles": k}, {"a_pages": rt * k, "b_pages": k * ct}
    return Program(
        [
            moved("read_all.cpp", "reader", "a b", cores, named_compile_args=pages),
            moved("write_tiles.cpp", "writer", "out", cores, {(0, 0): [0, rt * ct]}),
            Kernel("matmul_block.cpp", "compute", cores, named_compile_args=sizes, defines=defines, config=config),
        ],
        [buffer(0, cores, pages=rt * k), buffer(2, cores, pages=k * ct), buffer(1, cores, pages=rt * ct)],
    )
