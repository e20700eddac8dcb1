"""Programs of the emulator's tests, made of the kernels in kernels/. They also run on a device through ttnn."""

from __future__ import annotations

from pathlib import Path

from ttnn_moe.tenstorrent.emulator import CircularBuffer, ComputeConfig, Kernel, Placeholder, Program, Semaphore

KERNELS = Path(__file__).parent / "kernels"
TILE_BYTES = {"bfloat16": 2048, "float32": 4096, "bfloat8_b": 1088, "int32": 4096}
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


def moved(source: str, role: str, tensor: str, cores, args, **more) -> Kernel:
    """A data-movement kernel of one tensor."""
    return Kernel(
        source,
        role,
        cores,
        [Placeholder("accessor", tensor)],
        common_args=[Placeholder("address", tensor)],
        args=args,
        **more,
    )


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
    defines=None,
) -> Program:
    """out = f(a), tile by tile; the names of kernels can be those of broken ones."""
    args = shares(tiles, cores)
    return Program(
        [
            moved(reader, "reader", "a", cores, args),
            moved(writer, "writer", "out", cores, args),
            Kernel(
                compute,
                "compute",
                cores,
                args=args,
                defines={**({"SILU": "1"} if silu else {}), **(defines or {})},
                config=config or ComputeConfig(),
            ),
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
            Kernel(
                "matmul_reader.cpp",
                "reader",
                cores,
                [Placeholder("accessor", "a"), Placeholder("accessor", "b")],
                named,
                common_args=[Placeholder("address", "a"), Placeholder("address", "b")],
                args=args,
            ),
            moved("write_tiles.cpp", "writer", "out", cores, args),
            Kernel("matmul.cpp", "compute", cores, named_compile_args={"k_tiles": k}, args=args, config=config),
        ],
        [buffer(0, cores), buffer(2, cores, b_fmt), buffer(1, cores, out_fmt)],
    )


def tilize(blocks: int, block: int, cores, *, back: bool = False) -> Program:
    """Row-major a [blocks * 32, block * 32] to tiles in out, or the other way."""
    args = {core: [first * block, count * block] for core, (first, count) in shares(blocks, cores).items()}
    named = {"block": block, "row_bytes": block * 64}
    rows = moved(
        "rows.cpp",
        "writer" if back else "reader",
        "out" if back else "a",
        cores,
        args,
        named_compile_args=named,
        defines={"WRITE": "1"} if back else {},
    )
    tiles = (
        moved("read_tiles.cpp", "reader", "a", cores, args)
        if back
        else moved("write_tiles.cpp", "writer", "out", cores, args)
    )
    compute = Kernel(
        "tilize.cpp",
        "compute",
        cores,
        named_compile_args={"block": block},
        args=args,
        defines={"UNTILIZE": "1"} if back else {},
    )
    return Program([rows, tiles, compute], [buffer(0, cores, pages=2 * block), buffer(1, cores, pages=2 * block)])


def spread(pages: int, columns: int, rows: int, role: str = NOC_0, source: str = "spread.cpp") -> Program:
    """Core 0 sends every page of a to all cores; out holds a copy for each core."""
    cores = grid(columns, rows)
    corners = [
        Placeholder("noc_x", index=0),
        Placeholder("noc_y", index=0),
        Placeholder("noc_x", index=columns - 1),
        Placeholder("noc_y", index=rows - 1),
    ]
    if role == NOC_1:
        corners = corners[2:] + corners[:2]
    return Program(
        [
            Kernel(
                source,
                role,
                cores,
                [Placeholder("accessor", "a"), Placeholder("accessor", "out")],
                {"cores": len(cores)},
                common_args=[
                    Placeholder("address", "a"),
                    Placeholder("address", "out"),
                    *corners,
                    Placeholder("noc_x", index=0),
                    Placeholder("noc_y", index=0),
                ],
                args={core: [i, pages] for i, core in enumerate(cores)},
            )
        ],
        [buffer(0, cores, pages=1)],
        [Semaphore(0, 0, cores), Semaphore(1, 0, cores)],
    )


def pairs(tiles: int, cores, how: int, op: int, config: ComputeConfig | None = None) -> Program:
    """out = a OP b, tile by tile, b broadcast: how 0 not at all, 1 its column, 2 its row, 3 its first value."""
    args = shares(tiles, cores)
    return Program(
        [
            Kernel(
                "read_pairs.cpp",
                "reader",
                cores,
                [Placeholder("accessor", "a"), Placeholder("accessor", "b")],
                common_args=[Placeholder("address", "a"), Placeholder("address", "b")],
                args=args,
            ),
            moved("write_tiles.cpp", "writer", "out", cores, args),
            Kernel(
                "eltwise.cpp",
                "compute",
                cores,
                named_compile_args={"how": how, "op": op},
                args=args,
                config=config or ComputeConfig(),
            ),
        ],
        [buffer(0, cores), buffer(2, cores), buffer(1, cores)],
    )


def block(rt: int, k: int, ct: int, config: ComputeConfig, *, tiles: bool = False) -> Program:
    """out [rt, ct] = a [rt, k] b [k, ct] on one core, sizes in tiles."""
    cores = grid(1)
    return Program(
        [
            Kernel(
                "read_all.cpp",
                "reader",
                cores,
                [Placeholder("accessor", "a"), Placeholder("accessor", "b")],
                {"a_pages": rt * k, "b_pages": k * ct},
                common_args=[Placeholder("address", "a"), Placeholder("address", "b")],
            ),
            moved("write_tiles.cpp", "writer", "out", cores, {(0, 0): [0, rt * ct]}),
            Kernel(
                "matmul_block.cpp",
                "compute",
                cores,
                named_compile_args={"rt": rt, "ct": ct, "k_tiles": k},
                defines={"TILES": "1"} if tiles else {},
                config=config,
            ),
        ],
        [buffer(0, cores, pages=rt * k), buffer(2, cores, pages=k * ct), buffer(1, cores, pages=rt * ct)],
    )
