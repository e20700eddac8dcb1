"""The planner's programs, without a device: they fit, and every tile of work has one owner."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

planner = pytest.importorskip("ttnn_moe._planner", reason="native planner: not built", exc_type=ModuleNotFoundError)

from ttnn_moe.sizes import ceil_div  # noqa: E402
from ttnn_moe.sources import kernel_path  # noqa: E402

# whole and harvested: Wormhole 8x8 and 8x7, Blackhole 13x10, 11x10 and 12x9
GRIDS = {(8, 8): 1499136, (8, 7): 1499136, (13, 10): 1572864, (11, 10): 1572864, (12, 9): 1572864}
QWEN3 = {"E": 128, "E_local": 16, "K": 8, "H": 2048, "I": 768}
TS = [1, 31, 32, 33, 128, 1000, 4096]


def machine(grid=(13, 10), **options):
    return planner.Machine(grid=grid, l1_bytes=GRIDS[grid], **options)


def programs(problem, on):
    yield "routing", planner.plan_routing(problem, on)
    yield "gate_up", planner.plan_gate_up(problem, on)
    yield "project", planner.plan_gate_up(problem, on, 1)
    yield "silu_mul", planner.plan_silu_mul(problem, on)
    yield "down", planner.plan_down(problem, on)


def pieces(program):
    """(column, begin, end) of each core, in the order of the line: from core to the core after."""
    kernel = program.kernels[0]
    args = {kernel.args[core][0]: kernel.args[core] for core in kernel.cores}
    assert list(args) == list(range(len(kernel.cores)))
    first = [core for core, own in args.items() if own[2] == core]
    assert len(first) == 1
    core, seen = first[0], 0
    while True:
        own, seen = args[core], seen + 1
        rest = own[4:]
        assert len(rest) == 3 * own[1]
        yield [tuple(rest[i : i + 3]) for i in range(0, len(rest), 3)]
        if own[3] == core:
            break
        assert args[own[3]][2] == core
        core = own[3]
    assert seen == len(args)


def test_what_has_no_program_is_refused():
    for weights in (0, 3):
        with pytest.raises(ValueError, match=f"1 or 2 weights, not {weights}"):
            planner.plan_gate_up(planner.Problem(T=32, **QWEN3), machine(), weights)


def check_program(program, on):
    columns, rows = on.grid
    assert program.l1_bytes <= on.usable_l1 <= on.l1_bytes - 128 * 1024
    indices = [buffer.index for buffer in program.buffers]
    assert len(set(indices)) == len(indices) and max(indices) < 32
    named = program.kernels[0].named_compile_args
    for buffer in program.buffers:
        # ends where a DRAM read may start, on every chip
        assert buffer.total_size % 64 == 0 and buffer.total_size % buffer.page_size == 0
        assert buffer.cores == program.kernels[0].cores
    assert {value for name, value in named.items() if name.startswith("cb_")} == set(indices)
    assert len(program.semaphores) <= 16
    for kernel in program.kernels:
        assert kernel_path("device_kernels", kernel.source).is_file()
        assert len(set(kernel.cores)) == len(kernel.cores) == len(kernel.args)
        assert all(0 <= x < columns and 0 <= y < rows for x, y in kernel.cores)
        # what tt-metal gives a kernel in all
        assert len(kernel.common_args) + max(len(args) for args in kernel.args.values()) <= 341


def check_split(program, columns, k_tiles, least_cores):
    shares = list(pieces(program))
    seen = sorted(piece for share in shares for piece in share)
    assert seen[0][:2] == (0, 0) and seen[-1][0] == columns - 1 and seen[-1][2] == k_tiles
    for a, b in pairwise(seen):  # without a gap and without an overlap
        assert b[:2] == ((a[0], a[2]) if a[2] < k_tiles else (a[0] + 1, 0))
    sizes = [sum(end - begin for _, begin, end in share) for share in shares]
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
    assert len(shares) >= least_cores
    for core, share in enumerate(shares):
        # a sum that is passed on must not wait for one that comes, unless they are one; partners are neighbours
        assert all(end == k_tiles for _, _, end in share[1:])
        assert all(begin == 0 for _, begin, _ in share[:-1])
        if share[0][2] < k_tiles:
            assert (share[0][0], share[0][2]) in [(column, begin) for column, begin, _ in shares[core + 1]]


@pytest.mark.parametrize("T", TS)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_qwen3_fits_every_grid(grid, T) -> None:
    problem, on = planner.Problem(T=T, **QWEN3), machine(grid)
    cores = grid[0] * grid[1]
    for name, program in programs(problem, on):
        check_program(program, on)
        if name in ("gate_up", "project"):
            check_split(program, 24, 64, cores)
        if name == "down":
            check_split(program, 64, 24, cores)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_core_reads_weights_at_one_token(grid) -> None:
    problem, on = planner.Problem(T=1, **QWEN3), machine(grid)
    for program in (planner.plan_gate_up(problem, on), planner.plan_down(problem, on)):
        sizes = [sum(end - begin for _, begin, end in share) for share in pieces(program)]
        assert len(sizes) == grid[0] * grid[1]
        assert max(sizes) * len(sizes) <= 1.2 * sum(sizes)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_half_the_grid_routes_4096_tokens(grid) -> None:
    named = planner.plan_routing(planner.Problem(T=4096, **QWEN3), machine(grid)).kernels[0].named_compile_args
    assert named["readers"] >= grid[0] * grid[1] / 2
    assert (named["readers"] - 1) * named["share"] < 4096 <= named["readers"] * named["share"]


WEIGHTS = [("bfloat16", 2048, "HiFi4"), ("bfloat8_b", 1088, "HiFi3"), ("bfloat4_b", 576, "HiFi3")]


@settings(max_examples=150, deadline=None)
@given(
    T=st.integers(1, 3000),
    local=st.integers(1, 24),
    D=st.sampled_from([1, 2, 8]),
    K=st.integers(1, 9),
    h=st.integers(1, 70),
    i=st.integers(1, 40),
    grid=st.sampled_from(sorted(GRIDS)),
    least=st.integers(1, 9),
    weights=st.sampled_from(["bfloat16", "bfloat8_b", "bfloat4_b"]),
    out=st.sampled_from(["bfloat16", "float32"]),
)
def test_any_sizes(T, local, D, K, h, i, grid, least, weights, out) -> None:
    problem = planner.Problem(
        T=T, E=local * D, E_local=local, K=K, H=32 * h, I=32 * i, weight_format=weights, out_format=out
    )
    on = machine(grid, min_tiles=least)
    try:
        made = dict(programs(problem, on))
    except ValueError as error:
        assert "does not fit a core's L1" in str(error)
        return
    for program in made.values():
        check_program(program, on)
    cores = grid[0] * grid[1]
    check_split(made["gate_up"], i, h, min(cores, max(i, h * i // least)))
    check_split(made["down"], h, i, min(cores, max(h, h * i // least)))
    for name in ("gate_up", "down"):
        _check_homes(made[name], problem)
    _check_silu_mul(made["silu_mul"], problem.max_blocks * i)


def _check_homes(program, problem) -> None:
    """Each chunk of each block of a window has a slot of its own, and a window holds at least one block."""
    named = program.kernels[0].named_compile_args
    assert named["chunk"] * named["chunks"] >= named["k_tiles"] > named["chunk"] * (named["chunks"] - 1)
    units = named["window"] * named["chunks"]
    assert 1 <= named["window"] and units <= named["slots"] * named["cores"]
    homes = {(unit % named["cores"], unit // named["cores"]) for unit in range(units)}
    assert len(homes) == units and all(slot < named["slots"] for _, slot in homes)
    size = next(b.total_size for b in program.buffers if b.index == named["cb_home"])
    assert size == 2 * named["slots"] * named["chunk"] * 2048


def _check_silu_mul(program, tiles) -> None:
    kernel = program.kernels[0]
    ranges = [tuple(kernel.args[core]) for core in kernel.cores]
    assert ranges[0][0] == 0 and ranges[-1][1] == tiles
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    assert max(end - begin for begin, end in ranges) - min(end - begin for begin, end in ranges) <= 1


@given(T=st.integers(1, 5000), local=st.integers(1, 32), K=st.integers(1, 16), data=st.data())
def test_no_routing_has_more_blocks(T, local, K, data) -> None:
    problem = planner.Problem(T=T, E=local, E_local=local, K=K, H=32, I=32)
    left, blocks = T * K, 0
    for _ in range(local):
        tokens = data.draw(st.integers(0, min(left, T)))
        left -= tokens
        blocks += ceil_div(tokens, 32)
    assert blocks <= problem.max_blocks
    assert problem.padded_tokens == ceil_div(T, 32) * 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"T": 0}, "T = 0 runs no program"),
        ({"H": 100}, "multiples of 32"),
        ({"I": 0}, "multiples of 32"),
        ({"E_local": 129}, "exceeds E = 128"),
        ({"weight_format": "int4"}, "not 'int4'"),
        ({"out_format": "float16"}, "not 'float16'"),
        ({"T": 1 << 20}, "does not fit a core's L1"),
        ({"H": 1 << 16, "I": 1 << 15}, "does not fit a core's L1"),
        ({"H": 32, "I": 32 * 130 * 110}, "gate_up/reader.cpp needs [0-9]+ runtime arguments of 341; .*smaller experts"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_refused(change, message) -> None:
    problem = planner.Problem(**{"T": 32, **QWEN3, **change})
    with pytest.raises(ValueError, match=message):
        for _ in programs(problem, machine()):
            pass


def test_a_plan_depends_on_sizes_only() -> None:
    """Addresses, the routing and T itself come in as runtime arguments: compile-time arguments are the plan's."""
    problem = planner.Problem(T=128, **QWEN3)
    for name, program in programs(problem, machine()):
        again = dict(programs(problem, machine()))[name]
        for a, b in zip(program.kernels, again.kernels, strict=True):
            assert a.named_compile_args == b.named_compile_args and a.args == b.args
            assert all(not isinstance(arg, int) and arg.kind == "accessor" for arg in a.compile_args)
            kinds = {arg.kind for arg in a.common_args if not isinstance(arg, int)}
            assert kinds <= {"address", "scalar", "noc_x", "noc_y"}


@pytest.mark.parametrize(("weights", "tile", "fidelity"), WEIGHTS)
def test_weights_of_fewer_bits_take_less_room_and_fewer_phases(weights, tile, fidelity) -> None:
    for plan in (planner.plan_gate_up, planner.plan_down):
        wide, narrow = (plan(planner.Problem(T=32, **QWEN3, weight_format=w), machine()) for w in ("bfloat16", weights))
        index = wide.kernels[0].named_compile_args["cb_w"]
        before, after = (next(b for b in program.buffers if b.index == index) for program in (wide, narrow))
        assert after.format == weights
        assert after.total_size * 2048 == before.total_size * tile
        assert narrow.kernels[0].named_compile_args["weight_tile_bytes"] == after.page_size == tile
        assert narrow.kernels[-1].config.math_fidelity == planner.default_fidelity(weights) == fidelity


def test_fidelity_and_bf16_sums_are_arguments() -> None:
    problem = planner.Problem(T=32, **QWEN3, math_fidelity="HiFi3", fp32_dest=False)
    config = planner.plan_down(problem, machine()).kernels[-1].config
    assert (config.math_fidelity, config.fp32_dest_acc, config.unpack_to_dest_fp32) == ("HiFi3", False, [])
    with pytest.raises(ValueError, match="HiFi9"):
        planner.plan_down(planner.Problem(T=32, **QWEN3, math_fidelity="HiFi9"), machine())
    with pytest.raises(ValueError, match="bfloat2_b"):
        planner.default_fidelity("bfloat2_b")


# as ttnn names them for an n150 of ttsim and a p150; the rows below Wormhole's grid hold two banks
BANK_CORES = {
    (8, 8): [(0, 8), (0, 0), (0, 4), (0, 5), (4, 0), (4, 8), (4, 1), (4, 7), (4, 6), (4, 2), (4, 4), (4, 5)],
    (13, 10): [(0, 9), (0, 0), (0, 7), (0, 3), (7, 9), (7, 1), (7, 6), (7, 4)],
}


def banks_of(share, columns, k_tiles, banks):
    return {
        (column * k_tiles + k) * banks // (columns * k_tiles) for column, begin, end in share for k in range(begin, end)
    }


@pytest.mark.parametrize("grid", BANK_CORES, ids=str)
def test_weights_by_bank_are_read_by_cores_near_the_bank(grid) -> None:
    banks = len(BANK_CORES[grid])
    plain = machine(grid, dram_banks=banks)
    near = machine(grid, dram_banks=banks, bank_cores=BANK_CORES[grid])
    interleaved, banked = planner.Problem(T=32, **QWEN3), planner.Problem(T=32, **QWEN3, banked=True)
    for plan, columns, k_tiles in ((planner.plan_gate_up, 24, 64), (planner.plan_down, 64, 24)):
        before, after = plan(interleaved, near), plan(banked, near)
        check_program(after, near)
        check_split(after, columns, k_tiles, grid[0] * grid[1])
        assert before.kernels[0].args == plan(interleaved, plain).kernels[0].args
        assert list(pieces(before)) == list(pieces(after))  # in the same order, so sums have the same bits
        assert after.kernels[0].named_compile_args["weight_run"] == columns * k_tiles // banks
        away = []
        for program in (before, after):
            kernel, columns_away = program.kernels[0], []
            for x, y in kernel.cores:
                own = kernel.args[x, y]
                share = [tuple(own[i : i + 3]) for i in range(4, len(own), 3)]
                of = banks_of(share, columns, k_tiles, banks)
                assert len(of) <= 2
                columns_away += [(x - BANK_CORES[grid][bank][0]) % grid[0] for bank in of]
            away.append(sum(columns_away))
        assert away[1] < 0.75 * away[0]


def test_weights_that_banks_cannot_share_evenly_stay_interleaved() -> None:
    sizes = {"T": 32, "E": 8, "E_local": 8, "K": 2, "H": 160, "I": 96}  # 15 tiles
    on = machine(dram_banks=8, bank_cores=BANK_CORES[13, 10])
    before, after = (planner.plan_gate_up(planner.Problem(**sizes, banked=banked), on) for banked in (False, True))
    for a, b in zip(before.kernels, after.kernels, strict=True):
        assert a.named_compile_args == b.named_compile_args and a.args == b.args
    assert planner.weight_run("bfloat16", True, 15, 8) == planner.weight_run("bfloat16") == 4
    with pytest.raises(ValueError, match="expert_tiles and banks"):
        planner.weight_run("bfloat16", True, 64)


def test_most_bytes_come_on_the_noc_that_reads_of_dram_load_least() -> None:
    for plan in (planner.plan_gate_up, planner.plan_down):
        roles = {
            kernel.source.rpartition("/")[2]: kernel.role
            for kernel in plan(planner.Problem(T=32, **QWEN3), machine()).kernels
        }
        assert roles == {"reader.cpp": "writer", "writer.cpp": "reader", "compute.cpp": "compute"}


def test_kernels_get_no_number_that_they_do_not_read() -> None:
    read = {path: path.read_text() for path in kernel_path("device_kernels").rglob("*.[ch]pp")}
    for _, program in programs(planner.Problem(T=32, **QWEN3), machine()):
        folder = program.kernels[0].source.partition("/")[0]
        text = "".join(text for path, text in read.items() if path.parent.name in (folder, "common"))
        for kernel in program.kernels:
            for name in kernel.named_compile_args:
                assert f'"{name}"' in text, f"{kernel.source}: {name}"
