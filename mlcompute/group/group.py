"""Group: the processes that train together, and which slices each of them runs."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from importlib.util import find_spec
from types import TracebackType
from typing import Any

import numpy as np

from mlcompute.errors import DataError, ProcessError
from mlcompute.group.exchange import Alone, Array, Exchange, Kind
from mlcompute.group.messages import MessageExchange
from mlcompute.group.slices import cut
from mlcompute.layers.arguments import number_of, real
from mlcompute.layers.read_only import ReadOnly

#: Into how many slices a batch is cut unless somebody says otherwise: as many processes can share the work.
SLICES = 8
#: Seconds to wait for the other processes.
TIMEOUT = 60.0
#: How mpirun (Open MPI, MPICH) and srun tell a process how many were started.
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_SLURM_SIZE = "SLURM_STEP_NUM_TASKS"


class Group:
    """Processes that train one graph together. Every process runs the same program.

    A graph that is compiled for a group is given the whole batch on every process. The batch is cut into `slices`,
    which do not depend on the number of processes; each process runs some of them, and gradients are added in one fixed
    order. So any number of processes arrives at the same bits, up to as many as there are slices.

    Make one with `Group.world()`; `Group.local(n)` gives n for threads of one process, for tests.

    rank, size  which of how many processes this is
    slices      into how many parts every batch is cut
    timeout     seconds to wait for the other processes before a ProcessError names the silent ones

    >>> import mlcompute as mlc
    >>> group = mlc.Group.world()
    >>> group.rank, group.size, group.slices
    (0, 1, 8)
    """

    def __init__(self, exchange: Exchange, *, slices: int = SLICES) -> None:
        self.exchange = exchange
        self._slices = number_of("Group", "slices", slices, 1)
        #: What carries gradients from GPU to GPU in the graph that was compiled last; empty where they use the engine.
        self.between_devices = ""

    # Making one -----------------------------------------------------------------------------------------------------

    @classmethod
    def world(cls, *, slices: int = SLICES, timeout: float = TIMEOUT) -> Group:
        """All processes that were started together, by mpirun, srun, torchrun or `mlcompute launch`; else this one.

        slices   into how many parts every batch is cut; more processes than that have nothing to compute
        timeout  seconds to wait for the other processes
        """
        seconds = _checked_timeout(timeout)
        exchange = _world(seconds)
        exchange.timeout = seconds
        return cls(exchange, slices=slices)

    @classmethod
    def local(cls, size: int, *, slices: int = SLICES, timeout: float = TIMEOUT) -> list[Group]:
        """Groups for `size` threads of this process, one each, which exchange like processes."""
        from mlcompute.group.local import Hub, LocalLink

        hub = Hub(number_of("Group.local", "size", size, 1))
        seconds = _checked_timeout(timeout)
        exchanges = [MessageExchange(LocalLink(hub, rank), seconds) for rank in range(hub.size)]
        return [cls(exchange, slices=slices) for exchange in exchanges]

    # What it is -----------------------------------------------------------------------------------------------------

    rank = ReadOnly[int]("Which process this is, from 0.", "exchange.rank")
    size = ReadOnly[int]("How many processes there are.", "exchange.size")

    slices = ReadOnly[int]("Into how many parts every batch is cut.")
    timeout = ReadOnly[float]("Seconds to wait for the other processes.", "exchange.timeout")

    @property
    def is_first(self) -> bool:
        """Is this the process that prints, logs and saves: rank 0?"""
        return self.exchange.rank == 0

    def slices_of(self, rank: int) -> tuple[int, int]:
        """(first, behind the last) of the slices a process runs."""
        return cut(self._slices, self.size)[rank]

    def rows(self, batch_size: int) -> slice:
        """Which samples of a batch this process runs.

        >>> import mlcompute as mlc
        >>> [group.rows(64) for group in mlc.Group.local(3)]
        [slice(0, 16, None), slice(16, 40, None), slice(40, 64, None)]
        """
        first, last = self.slices_of(self.rank)
        parts = cut(batch_size, self._slices)
        return slice(parts[first][0], parts[last - 1][1]) if last > first else slice(0, 0)

    def __repr__(self) -> str:
        gpus = f", between GPUs '{self.between_devices}'" if self.between_devices else ""
        return (
            f"Group(rank={self.rank}, size={self.size}, slices={self._slices}, engine='{self.exchange.engine}'{gpus})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # connections cannot be copied

    # What processes do together -------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Return when every process has called it."""
        self.exchange.barrier()

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """The array of one process, on all of them. Shapes and types must be the same everywhere."""
        values = np.ascontiguousarray(array)
        if self.rank != root:
            values = np.empty_like(values)
        self.exchange.broadcast(Kind.BROADCAST, values, root)
        return values

    def allgather(self, array: Array) -> list[Array]:
        """The arrays of all processes, by rank. Shapes and types must be the same everywhere."""
        mine = np.ascontiguousarray(array)
        received = [np.empty_like(mine) for _ in range(self.size)]
        received[self.rank][...] = mine
        self.exchange.allgather(Kind.GATHER, mine, received)
        return received

    def abort(self, message: str) -> None:
        """Make all other processes fail with this message."""
        self.exchange.abort(message)


def _checked_timeout(timeout: float) -> float:
    seconds = real("Group", "timeout", timeout)
    if seconds <= 0:
        raise DataError(f"Group: timeout is {seconds:g}", expected="seconds, more than 0")
    return seconds


# The processes that were started together -----------------------------------------------------------------------------

_found: Exchange | None = None
_finding = threading.Lock()


def _world(timeout: float) -> Exchange:
    """Found once: connections last as long as the process."""
    global _found
    with _finding:
        if _found is None:
            _found = _find(timeout)
            if isinstance(_found, MessageExchange):
                _end_with(_found)
    return _found


def _find(timeout: float) -> Exchange:
    from mlcompute.group.tcp import connect, slurm_variables

    expected, by_slurm = _size_from_environment(*_MPI_SIZES), _size_from_environment(_SLURM_SIZE)
    if "mpi4py.MPI" in sys.modules or expected > 1 or (by_slurm > 1 and find_spec("mpi4py") is not None):
        from mlcompute.group.mpi import MPILink, load_mpi

        mpi = load_mpi()
        world = mpi.COMM_WORLD
        if world.Get_size() == 1 and expected > 1:
            raise ProcessError(
                f"Group: {expected} processes were started, but each finds itself alone: what started them belongs to "
                f"another MPI than mpi4py, which uses {mpi.Get_library_version().splitlines()[0]}",
                fix="start with the mpirun of that MPI, with `mlcompute launch`, or with srun --mpi=pmix",
            )
        if world.Get_size() > 1:
            return MessageExchange(MPILink(mpi, world.Dup()), timeout)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return MessageExchange(connect(os.environ, timeout), timeout)
    if by_slurm > 1:  # srun without MPI
        return MessageExchange(connect(slurm_variables(os.environ), timeout), timeout)
    return Alone(timeout)


def _size_from_environment(*names: str) -> int:
    """How many processes the launcher says it has started, by one of these variables."""
    values = (os.environ.get(name, "") for name in names)
    return next((int(text) for text in values if text.isdigit()), 1)


def _end_with(exchange: MessageExchange) -> None:
    """However this process ends, the others are told: an uncaught error in its own words, and that it has left."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, ProcessError):  # it happened elsewhere: where it was noticed here is of no interest
            print(f"rank {exchange.rank}: {error}", file=sys.stderr)
        else:
            before(kind, error, trace)
        sys.stderr.flush()
        said = "".join(traceback.format_exception_only(kind, error)).strip()
        exchange.abort(f"rank {exchange.rank} failed: {said}")

    def leave() -> None:
        has_failed = exchange.failed is not None
        if not has_failed:
            exchange.leave()
            if not exchange.has_lost:
                return
        # MPI's own end would wait for processes that are gone or silent. Let the others read what was said, then go.
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(0.3)
        os._exit(int(has_failed))

    sys.excepthook = hook
    atexit.register(leave)
