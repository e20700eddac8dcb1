"""
The Tenstorrent program planner: plain C++, no device and no ttnn needed.
"""

from collections.abc import Sequence

class Chip:
    """One chip of a board that programs can be planned for."""

    @property
    def name(self) -> str:
        """Board that carries the chip: n150, n300, p150."""

    @property
    def arch(self) -> str:
        """tt-metal's name of the architecture: wormhole_b0, blackhole."""

    @property
    def chips_per_board(self) -> int:
        """Chips on one board."""

    @property
    def tensix_grid(self) -> tuple[int, int]:
        """Columns and rows of Tensix cores that are not harvested."""

    @property
    def compute_grid(self) -> tuple[int, int]:
        """Columns and rows left to programs beside the dispatch cores."""

    @property
    def l1_bytes(self) -> int:
        """L1 of one Tensix core, bytes."""

    @property
    def dram_bytes(self) -> int:
        """DRAM of one chip, bytes."""

    @property
    def dram_banks(self) -> int:
        """DRAM banks that tensors are interleaved over."""

    @property
    def dram_bytes_per_s(self) -> int:
        """DRAM bandwidth of one chip, bytes/s."""

    @property
    def clock_hz(self) -> int:
        """Highest AI clock, Hz."""

    def __repr__(self) -> str: ...

def chips() -> list[Chip]:
    """Every chip that programs can be planned for, in order of name."""

def find_chip(name: str) -> Chip:
    """The chip of that name. ValueError lists the known names."""

class Placeholder:
    """A value that is known only when a program is run."""

    @property
    def kind(self) -> str:
        """
        address, accessor (a TensorAccessor's compile-time arguments), scalar, noc_x or noc_y.
        """

    @property
    def name(self) -> str:
        """Name of the tensor or of the scalar."""

    @property
    def index(self) -> int:
        """Column or row of the grid."""

    def __repr__(self) -> str: ...

class ComputeConfig:
    """Settings of a compute kernel."""

    @property
    def math_fidelity(self) -> str:
        """LoFi, HiFi2, HiFi3, HiFi4."""

    @property
    def fp32_dest_acc(self) -> bool:
        """DST holds fp32."""

    @property
    def approx(self) -> bool:
        """Approximate SFPU functions."""

    @property
    def dst_full_sync(self) -> bool:
        """DST is not halved."""

    @property
    def unpack_to_dest_fp32(self) -> list[int]:
        """Circular buffers that are unpacked to DST as fp32."""

class Kernel:
    """One kernel on some cores."""

    @property
    def source(self) -> str:
        """Path below device_kernels/."""

    @property
    def role(self) -> str:
        """Which processor runs it: "reader", "writer" or "compute"."""

    @property
    def cores(self) -> list[tuple[int, int]]:
        """(x, y), logical."""

    @property
    def compile_args(self) -> list[int | Placeholder]:
        """Compile-time arguments, by position."""

    @property
    def named_compile_args(self) -> dict[str, int]:
        """Compile-time arguments, by name."""

    @property
    def defines(self) -> dict[str, str]:
        """Preprocessor definitions."""

    @property
    def common_args(self) -> list[int | Placeholder]:
        """Runtime arguments of all cores."""

    @property
    def args(self) -> dict[tuple[int, int], list[int | Placeholder]]:
        """Runtime arguments of each core."""

    @property
    def config(self) -> ComputeConfig:
        """Settings; of a compute kernel only."""

class CircularBuffer:
    """A circular buffer, at one L1 address on all its cores."""

    @property
    def index(self) -> int:
        """Its number in the kernels."""

    @property
    def total_size(self) -> int:
        """Bytes on each core."""

    @property
    def page_size(self) -> int:
        """Bytes of a page."""

    @property
    def format(self) -> str:
        """bfloat16, float32, bfloat8_b, bfloat4_b, uint32."""

    @property
    def cores(self) -> list[tuple[int, int]]:
        """(x, y), logical."""

class Semaphore:
    """A semaphore on some cores."""

    @property
    def id(self) -> int:
        """Its number in the kernels."""

    @property
    def initial(self) -> int:
        """Its value when the program starts."""

    @property
    def cores(self) -> list[tuple[int, int]]:
        """(x, y), logical."""

class Program:
    """One operator's program for one device."""

    @property
    def kernels(self) -> list[Kernel]:
        """Kernels."""

    @property
    def buffers(self) -> list[CircularBuffer]:
        """Circular buffers, in the order in which they lie in L1."""

    @property
    def semaphores(self) -> list[Semaphore]:
        """Semaphores."""

    @property
    def l1_bytes(self) -> int:
        """Bytes of L1 that the buffers take on a core."""

class Problem:
    """Sizes to plan for; T is a bound."""

    def __init__(
        self,
        *,
        T: int,
        E: int,
        E_local: int,
        K: int,
        H: int,
        I: int,
        weight_format: str = "bfloat16",
        out_format: str = "bfloat16",
        math_fidelity: str = "",
        fp32_dest: bool = True,
        banked: bool = False,
    ) -> None: ...
    @property
    def T(self) -> int:
        """Most tokens of a call."""

    @property
    def E(self) -> int:
        """Experts of all devices."""

    @property
    def E_local(self) -> int:
        """Experts of this device."""

    @property
    def K(self) -> int:
        """Experts per token."""

    @property
    def H(self) -> int:
        """Hidden size."""

    @property
    def I(self) -> int:
        """Expert intermediate size."""

    @property
    def weight_format(self) -> str:
        """bfloat16, bfloat8_b or bfloat4_b."""

    @property
    def out_format(self) -> str:
        """bfloat16 or float32."""

    @property
    def math_fidelity(self) -> str:
        """LoFi, HiFi2, HiFi3, HiFi4; empty: the format's."""

    @property
    def fp32_dest(self) -> bool:
        """DST holds fp32; else bf16."""

    @property
    def banked(self) -> bool:
        """A DRAM bank holds one part of every expert's weights: weight_run."""

    @property
    def padded_tokens(self) -> int:
        """T rounded up to 32: columns of routed_tokens."""

    @property
    def max_blocks(self) -> int:
        """Most blocks of 32 rows that one device can have."""

class Machine:
    """What a program may use of a chip."""

    def __init__(
        self,
        *,
        grid: tuple[int, int],
        l1_bytes: int,
        unpack_to_dest: bool = True,
        min_tiles: int = 4,
        dram_banks: int = 8,
        bank_cores: Sequence[tuple[int, int]] = [],
    ) -> None: ...
    @property
    def grid(self) -> tuple[int, int]:
        """Columns and rows of cores."""

    @property
    def l1_bytes(self) -> int:
        """L1 of one core, bytes."""

    @property
    def unpack_to_dest(self) -> bool:
        """fp32 is unpacked to DST as it is; else cut to TF32."""

    @property
    def min_tiles(self) -> int:
        """Tiles of a product that are worth a core."""

    @property
    def dram_banks(self) -> int:
        """DRAM banks that tensors are interleaved over."""

    @property
    def bank_cores(self) -> list[tuple[int, int]]:
        """Of each bank, (x, y) of the core to its right; empty: not known."""

    @property
    def usable_l1(self) -> int:
        """What a core's circular buffers may take, bytes."""

def default_fidelity(weight_format: str) -> str:
    """
    The math fidelity of products with weights of a format. ValueError: an unknown format.
    """

def weight_run(weight_format: str, by_bank: bool = False, expert_tiles: int = 0, banks: int = 0) -> int:
    """
    Tiles of a weight matrix that lie side by side in a DRAM bank. ValueError: unknown format;
    by_bank without tiles or banks.

    by_bank: what each bank gets of an expert of expert_tiles, if the banks share it evenly.
    """

def plan_routing(problem: Problem, machine: Machine) -> Program:
    """
    topk ids and weights to num_routed_tokens, routed_tokens, routed_token_weights. ValueError: no such plan.
    """

def plan_gate_up(problem: Problem, machine: Machine, weights: int = 2) -> Program:
    """
    Gate, up and SiLU*mul in one pass (weights 2), or one projection (weights 1). ValueError: no such plan.
    """

def plan_silu_mul(problem: Problem, machine: Machine) -> Program:
    """silu(gate) * up over all rows. ValueError: no such plan."""

def plan_down(problem: Problem, machine: Machine) -> Program:
    """
    The down projection, weighted and summed per token. ValueError: no such plan.
    """
