"""The processes of one model."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import count

import torch
import torch.distributed as dist

from ... import __version__
from ...arguments import seconds
from ...errors import BackendUnavailable, ContractError, TtnnMoeError
from ...sizes import natural
from ...visible import said, shown
from ..compare import compare
from ..exchanges.exchange import calls_of
from ..exchanges.hierarchical import abandon
from ..hierarchical.transport import PeerStopped
from ..stopped import RankStopped, of_a_collective
from .faults import Faults
from .turns import Turns

COLLECTIVES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""Backend of torch.distributed for tensors of a device type; control messages are gloo's on every machine."""
_POLL = 0.01
_STARTS = count()
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Ranks:
    """This process among those that share a model. It starts torch.distributed, and `close` ends it.

    Args:
        store: that all ranks see. rank, size: of this process, and how many there are.
        device: of this rank's weights. timeout: seconds that a rank waits for the others in one call. A rank without a
            heartbeat for a quarter of it counts as stopped.

    Attributes:
        group: for tensors on the device. turns: see Turns.

    Raises:
        ContractError: torch.distributed is started already; or a rank has another version of ttnn_moe or of torch, or
            counts other ranks.
        RankStopped: a rank did not come within the timeout, or died.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: str = "cpu", timeout: float = 60.0):
        if dist.is_initialized():
            raise ContractError(
                "torch.distributed is started already, and ranks start it themselves",
                got=f"a process group of {dist.get_world_size()} processes",
                expected="none",
                remedy="leave init_process_group out; close ranks that were started before",
            )
        self.rank, self.size, self.device, self.timeout = rank, size, torch.device(device), timeout
        self._store, self._met, self._closed = store, 0, False
        self._faults = Faults(dist.PrefixStore("faults", store), rank, size, timeout)
        kind = self.device.type
        backend = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{COLLECTIVES[kind]}"
        inner = dist.PrefixStore("group", store)
        within = timedelta(seconds=timeout)
        try:
            self.compare({"ttnn_moe": __version__, "torch": torch.__version__, "ranks": str(size)})
            dist.init_process_group(backend, store=inner, rank=rank, world_size=size, timeout=within)
        except BaseException as error:
            stopped = self._faults.stopped() if of_a_collective(error) else None
            self._faults.end()  # the others would take this rank for one that lives
            if stopped is None:
                raise
            raise stopped from error
        self.group = dist.group.WORLD
        self.turns = Turns(self.group, self.group, timeout)
        self.turns.reported = self._faults.reported
        calls_of(self.group).report = partial(self._faults.report, rank)
        if backend.endswith("nccl"):
            self._faults.cut = self._abort

    def compare(self, facts: Mapping[str, str]) -> None:
        """All ranks compare these fields. Every rank calls it.

        Raises:
            ContractError: a rank differs: which one, in which field, what it has and what the others have.
            RankStopped: a rank did not come.
        """
        compare([json.loads(said) for said in self.meet(json.dumps(dict(facts)))])

    def meet(self, words: str = "", within: float | None = None) -> list[str]:
        """What every rank says here, in ascending rank. Every rank calls it.

        Args:
            within: seconds until all have come; None: the timeout of these ranks.

        Raises:
            RankStopped: a rank failed, died, or did not come in time.
        """
        self._met += 1
        within = self.timeout if within is None else within
        keys = [f"meeting{self._met}/{rank}" for rank in range(self.size)]
        try:
            self._store.set(keys[self.rank], words)
            until = time.monotonic() + within
            for rank, key in enumerate(keys):
                while not self._store.check([key]):
                    if (stopped := self._faults.stopped()) is not None:
                        raise stopped
                    if time.monotonic() > until:
                        raise self._faults.report(rank, f"it did not come to meeting {self._met} in {within:g} s")
                    time.sleep(_POLL)
            return [self._store.get(key).decode() for key in keys]
        except dist.DistError as error:
            raise self._faults.lost(str(error)) from error

    def stopped(self, peer: int, why: str) -> RankStopped:
        """The error of all ranks where this one finds that a rank stopped; another report may have come before."""
        return self._faults.report(peer, why)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What fails inside ends all ranks.

        An error of this rank passes, and the others raise RankStopped. Where a rank stopped, another one's error
        becomes the RankStopped that names it: a collective's, or one that unfinished results led to.
        """
        try:
            yield
        except RankStopped as error:
            stopped = self._faults.wait() if error.peer < 0 else None
            if error.peer == self.rank:
                self._faults.end()
                self._faults.report(self.rank, error.why)
            self._leave(failed=True)
            if stopped is None:
                raise
            raise stopped from error
        except PeerStopped as error:
            named = self._faults.report(-1 if error.report.live else error.report.peer, str(error))
            self._leave(failed=True)
            raise named from error
        except BaseException as error:
            if self._closed:  # all work has ended, and that a rank is silent or the store gone is no fault
                raise
            stopped = self._faults.wait() if of_a_collective(error) else self._stopped_before(error)
            if stopped is None:
                self._faults.end()  # its thread would find the report, and cut beside what follows
                self._faults.report(self.rank, said(error))
            self._leave(failed=True)
            if stopped is None:
                raise
            raise stopped from error

    def close(self) -> None:
        """The end of all ranks' work; every rank calls it."""
        self.meet("end")
        self._faults.end()  # the store goes with rank 0, and that is no fault any more
        if self.rank:
            self._store.set(f"left/{self.rank}", "")
        until = time.monotonic() + self._faults.silence
        # rank 0 may keep the store, so it leaves last
        left = [] if self.rank else [f"left/{rank}" for rank in range(1, self.size)]
        while left and not self._store.check(left) and time.monotonic() < until:
            time.sleep(_POLL)
        self._closed = True
        self._leave()

    def _stopped_before(self, error: BaseException) -> RankStopped | None:
        """The other rank that stopped before this one raised, if the error can come of that."""
        # errors of this package are about input, and every rank finds its own
        found = (
            self._faults.reported() if isinstance(error, Exception) and not isinstance(error, TtnnMoeError) else None
        )
        return None if found is None or found.peer == self.rank else found

    def _abort(self) -> None:
        """NCCL's kernels wait for ever: end them, so that the host goes on and raises."""
        if self.group is not None and dist.is_initialized():
            self.group.abort()

    def _leave(self, failed: bool = False) -> None:
        """Connections close, so that a collective of another rank ends now."""
        self._faults.end()  # its thread may cut, which must not meet what follows
        if dist.is_initialized():
            abandon(self.group)
            if failed:
                self._faults.cut_once()
            self.turns.settle()
            dist.destroy_process_group()


def check_launched() -> None:
    """Raise BackendUnavailable unless torchrun, or another launcher with its variables, started this process."""
    absent = [name for name in _LAUNCHED if not os.environ.get(name)]
    if absent:
        raise BackendUnavailable(
            "this process is none of several ranks",
            got=f"no {', '.join(absent)} in the environment",
            expected="the variables that torchrun sets",
            remedy="torchrun --nproc-per-node N -m ttnn_moe ...",
        )


def start(device: str = "cpu", timeout: float = 60.0) -> Ranks:
    """The ranks that torchrun, or another launcher with its variables, started.

    A process may start ranks again once it has closed them; then every process does.

    Args:
        device: "cpu", "cuda" or "npu"; each process takes one of its own: see own_device.

    Raises:
        BackendUnavailable: no launcher started this process; the ranks cannot reach each other; or this rank has no
            device of its own. ContractError: another device, or a timeout that is none. Others: as Ranks.
    """
    check_launched()
    if not isinstance(device, str) or device not in COLLECTIVES:
        raise ContractError("no collectives for this device", got=shown(device), expected=f"one of {list(COLLECTIVES)}")
    timeout = seconds("timeout", timeout)
    if device != "cpu":
        device = own_device(device)
    try:
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout))))
    except (dist.DistError, ValueError) as error:
        variables = ", ".join(f"{name}={os.environ[name]}" for name in _LAUNCHED)
        raise BackendUnavailable(
            "the ranks do not reach each other",
            got=f"{variables}: {error}",
            expected="WORLD_SIZE processes, each of which reaches rank 0 there",
            remedy="start all ranks, or give another MASTER_PORT if this one is taken",
        ) from error
    # torchrun's store outlives Ranks, and with it what the ranks said
    return Ranks(dist.PrefixStore(f"start{next(_STARTS)}", store), rank, size, device, timeout)


def own_device(device: str) -> str:
    """The "cuda" or "npu" device that is this process's among those of its host; it becomes the current one.

    It is that of LOCAL_RANK. Without LOCAL_RANK it is the only device that the process sees, or that of a lone process.

    Raises:
        BackendUnavailable: LOCAL_RANK names none, or nothing says which.
    """
    library, given = getattr(torch, device), os.environ.get("LOCAL_RANK")
    devices = library.device_count()
    sole = devices == 1 or os.environ.get("WORLD_SIZE") == "1"
    local = natural(given) if given else 0 if sole else None
    if local is None or local >= devices:
        raise BackendUnavailable(
            f"this rank has no {device} device of its own",
            got=f"{f'LOCAL_RANK={given}' if given else 'no LOCAL_RANK'}, and {devices} devices",
            expected="a device for each process of this host, and its number in LOCAL_RANK",
            remedy="torchrun --nproc-per-node N, with N devices or fewer; under srun or mpirun let each process have "
            "LOCAL_RANK=$SLURM_LOCALID or $OMPI_COMM_WORLD_LOCAL_RANK",
        )
    library.set_device(local)
    return f"{device}:{local}"
