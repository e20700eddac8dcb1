"""What the runs on a Tenstorrent device share: making inputs, putting them on it, and checking what it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from assertions import assert_close
from routing_draws import padded_by_hand
from ttnn_moe import ContractError, Experts, Placement
from ttnn_moe.backend import Numerics
from ttnn_moe.selfcheck.bounds import POISON, token_errors
from ttnn_moe.selfcheck.oracle import oracle
from ttnn_moe.sizes import ceil_div
from ttnn_moe.tenstorrent import DeviceRouting, tensors
from ttnn_moe.tenstorrent import device as devices
from ttnn_moe.tenstorrent.device import Device
from ttnn_moe.tenstorrent.layer_sizes import Sizes
from ttnn_moe.tenstorrent.programs import LayerPrograms, Routed, programs_of
from ttnn_moe.tenstorrent.runtime import is_emulator, library, wanted
from ttnn_moe.tenstorrent.weights import TILE, in_bank_order, line_of_page

BF16 = torch.bfloat16
UNDEFINED = 2**30 + 12345  # no token, and no multiple of 2: its address lies in no tensor
NUMERICS = Numerics(activation=BF16, routing_weight=BF16)


RUNS: dict[str, Callable[[], None]] = {}  # on one device
MESH_RUNS: dict[str, Callable[[], None]] = {}  # on 1xD, see mesh_D


def run(function: Callable[[], None]) -> Callable[[], None]:
    RUNS[function.__name__] = function
    return function


def mesh_run(function: Callable[[], None]) -> Callable[[], None]:
    MESH_RUNS[function.__name__] = function
    return function


def mesh_D() -> int:
    """Devices of the mesh that mesh runs open: eight, or the four that there are."""
    return 8 if is_emulator(wanted()) else min(8, library().GetNumAvailableDevices())


@dataclass
class Layer:
    """One layer's inputs, and the partition that this device's experts are of."""

    T: int
    E: int
    K: int
    H: int
    I: int
    hidden: Tensor
    ids: Tensor
    weights: Tensor
    experts: Experts
    mapping: Tensor  # [E_local] int32

    @classmethod
    def make(cls, T: int, E: int, K: int, H: int, I: int, local: int | None = None, seed: int = 0) -> Layer:
        """Random; `local` experts of E live here, in no order."""
        g = torch.Generator().manual_seed(seed)
        gate_up = (torch.randn(E, 2 * I, H, generator=g) * H**-0.5).to(BF16)
        down = (torch.randn(E, H, I, generator=g) * I**-0.5).to(BF16)
        hidden = torch.randn(T, H, generator=g).to(BF16)
        ids = torch.rand(T, E, generator=g).topk(K).indices.int()
        weights = torch.rand(T, K, generator=g) + 0.05
        mapping = torch.randperm(E, generator=g)[: local or E].int()
        weights = weights / weights.sum(-1, keepdim=True)
        return cls(T, E, K, H, I, hidden, ids, weights, Experts.dense(gate_up, down), mapping)

    @property
    def local_ids(self) -> Tensor:
        """ids of this device's experts; -1 elsewhere."""
        return torch.where(torch.isin(self.ids, self.mapping), self.ids, -1)

    def sizes(self, weight_format: str = "bfloat16") -> Sizes:
        return Sizes(self.E, len(self.mapping), self.K, self.H, self.I, weight_format)

    def want(self, out: Tensor | None = None) -> Tensor:
        return oracle(self.hidden, self.local_ids, self.weights, self.experts, NUMERICS, out)


class OnDevice:
    """A layer's tensors on the device, outputs poisoned, and its operators."""

    def __init__(self, layer: Layer, device: Device, bound: int | None = None, weight_format: str = "bfloat16"):
        from ttnn_moe._planner import weight_run

        self.layer, self.device = layer, device
        self.programs: LayerPrograms = programs_of(device, layer.sizes(weight_format))
        here = layer.mapping.long()
        both, down = layer.experts.tensors["gate_up"][here], layer.experts.tensors["down"][here]
        banks, run = device.machine.dram_banks, weight_run(weight_format)
        self.hidden = tensors.replicate(layer.hidden, device)
        self.ids = tensors.replicate(layer.ids, device)
        self.weights = tensors.replicate(layer.weights, device)
        self.mapping = tensors.replicate(layer.mapping[None], device)
        self.gate, self.up, self.down = (
            tensors.shard(in_bank_order(w.transpose(1, 2), 1, banks, run), device, weight_format, "TILE")
            for w in (both[:, : layer.I], both[:, layer.I :], down)
        )

    def route(self) -> Routed:
        poison_buffers(self.programs)
        return self.programs.route(self.ids, self.weights, self.mapping, self.layer.T)

    def out(self, start: Tensor | None = None, dtype: torch.dtype = BF16):
        layer = self.layer
        filled = torch.full((layer.T, layer.H), POISON) if start is None else start
        return tensors.replicate(filled.to(dtype), self.device, "TILE")

    def back(self, tensor) -> Tensor:
        return tensors.to_torch(tensor, self.device)


def on_device(layer: Layer, device: Device) -> tuple[Any, DeviceRouting]:
    """Arguments of moe on ttnn tensors."""
    ids, weights = (tensors.replicate(x, device) for x in (layer.ids, layer.weights))
    return tensors.replicate(layer.hidden, device), DeviceRouting(ids, weights)


def back_from_bank_order(tensor, device: Device, form: str) -> list[Tensor]:
    """Each device's part of an expert weight, [E, K, N]: the inverse of in_bank_order."""
    from ttnn_moe._planner import weight_run

    out = []
    for laid in tensors.parts_to_torch(tensor, device):
        E, columns, K, _ = laid.shape
        pages = laid.reshape(-1, TILE, TILE)
        order = line_of_page(len(pages), device.machine.dram_banks, weight_run(form)).argsort()
        out.append(pages[order].reshape(E, columns, K, TILE).transpose(1, 2).reshape(E, K, -1))
    return out


def poison_buffers(programs: LayerPrograms) -> None:
    """What the operators' own buffers hold before a run: nothing of it may be used."""
    ttnn = library()
    for (name, _), buffer in programs._buffers.items():
        whole = name in ("num_routed_tokens", "routed_tokens")
        filled = torch.full(tuple(buffer.shape), UNDEFINED if whole else POISON)
        kind = torch.int32 if whole else BF16
        host = ttnn.from_torch(filled.to(kind), dtype=buffer.dtype, layout=buffer.layout)
        ttnn.copy_host_to_device_tensor(host, buffer)


def check_routing(run: OnDevice, routed: Routed) -> None:
    """num_routed_tokens, routed_tokens and routed_token_weights, exactly."""
    layer = run.layer
    counts, tokens, weights = (
        run.back(routed.tensors[name]) for name in ("num_routed_tokens", "routed_tokens", "routed_token_weights")
    )
    by_hand = padded_by_hand(layer.ids, layer.weights, layer.E)
    here = set(layer.mapping.tolist())
    for e, rows in enumerate(by_hand):
        n = len(rows) if e in here else 0
        assert int(counts[0, e]) == n, f"expert {e}: {int(counts[0, e])} tokens, wanted {n}"
        if n:
            assert tokens[e, :n].tolist() == [t for t, _ in rows], f"expert {e}: tokens"
            want = torch.tensor([w for _, w in rows], dtype=torch.float32).to(BF16)
            assert torch.equal(weights[e, :n], want), f"expert {e}: weights"


def rows_of(layer: Layer) -> list[tuple[int, int, Tensor]]:
    """(global expert, first row, its tokens) of this device's experts that have a token."""
    found, row = [], 0
    for e in layer.mapping.tolist():
        tokens = (layer.ids == e).any(1).nonzero()[:, 0]
        if len(tokens):
            found.append((e, row, tokens))
        row += ceil_div(len(tokens), 32) * 32
    return found


def check_rows(layer: Layer, got: dict[str, Tensor]) -> None:
    """Step tensors ("gate", "up", "activations"), row by row, against fp64."""
    for e, row, tokens in rows_of(layer):
        gate_up, _ = layer.experts.dequantize(e)
        both = layer.hidden[tokens].double() @ gate_up.double().T
        gate, up = both[:, : layer.I], both[:, layer.I :]
        want = {"gate": gate, "up": up, "activations": gate * torch.sigmoid(gate) * up}
        for name, rows in got.items():
            assert_close(rows[row : row + len(tokens)], want[name], BF16, f"{name} of expert {e}")


def check_out(out: Tensor, want: Tensor, what: str = "out") -> float:
    """Within the bound; the largest error of a token, said for the record."""
    assert_close(out, want, BF16, what)
    error = float(token_errors(out, want).max())
    print(f"{what}: error {error:.2e}")
    return error


def part_of(machine: Any, grid: tuple[int, int], min_tiles: int = 4) -> Any:
    """The machine with another grid of cores."""
    from ttnn_moe._planner import Machine

    return Machine(
        grid=grid,
        l1_bytes=machine.l1_bytes,
        unpack_to_dest=machine.unpack_to_dest,
        min_tiles=min_tiles,
        dram_banks=machine.dram_banks,
    )


def entries() -> int:
    """Programs in the device's cache."""
    device = devices.current()
    assert device is not None
    return device.handle.num_program_cache_entries()


def mesh_placement(E: int, D: int, seed: int = 0) -> Placement:
    """A partition that is not contiguous."""
    g = torch.Generator().manual_seed(seed)
    return Placement.from_mapping(torch.randperm(E, generator=g).reshape(D, E // D))


class refused:
    """A ContractError that says so."""

    def __init__(self, message: str, name: str):
        self.message, self.name = message, name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        assert isinstance(error, ContractError), f"{self.name}: {error!r} instead of a ContractError"
        assert self.message in str(error), f"{self.name}: {error}"
        return True
