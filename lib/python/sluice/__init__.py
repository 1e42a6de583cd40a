"""Sluice: gradient exchange between nodes, through the node's daemon sluiced.

    import sluice
    with sluice.open() as connection, sluice.join(connection, "job", rank, world_size, exchange) as job:
        job.allreduce(array, kind="mean")       # numpy array or any writable buffer, in place
        job.broadcast(array, root=0)
        job.barrier()

PyTorch: see sluice.torch (State and hook). This package itself needs neither torch nor numpy; it needs libsluice, from
$SLUICE_LIBRARY, from its own folder (the wheel) or from the system.

Errors are subclasses of sluice.Error, and name job, rank, op and cause. Every call that can wait has a time-out in
seconds. A child process must not use what its parent opened: it gets sluice.Forked, and the parent is not harmed.
"""
from ._core import Buffer, Connection, Job, Report, generate_key
from ._errors import (AbiMismatch, Aborted, ArenaFull, DaemonLost, Error, Failed, Forked, InvalidArgument, Mismatch, OpError,
                      OpTimeout, PeerLost, RankTimeout, Refused, SystemFailure, Timeout, TooManyOps, Unreachable,
                      ViewChanged)
from ._version import __version__

__all__ = ["AbiMismatch", "Aborted", "ArenaFull", "Buffer", "Connection", "DaemonLost", "Error", "Failed", "Forked",
           "InvalidArgument", "Job", "Mismatch", "OpError", "OpTimeout", "PeerLost", "RankTimeout", "Refused",
           "Report", "SystemFailure", "Timeout", "TooManyOps", "Unreachable", "ViewChanged", "__version__", "generate_key", "join",
           "library_version", "open"]


def open(socket=None, timeout=5.0):
    """Connects to the daemon at `socket` (None: $SLUICE_SOCKET, else /run/sluice/sluice.sock); returns a Connection."""
    return Connection(socket, timeout)


def join(connection, job, rank, world_size, exchange=None, **options):
    """Joins `job` with a rendezvous of the caller's: `exchange(bytes)` must return the list of what every rank gave, in
    rank order (such as an all-gather over a store or MPI). Without it, the peers are those of the daemon's
    configuration. The key is made by rank 0 and travels by `exchange` too, so that is as secret as the exchange is.
    options: those of Connection.join. Returns a Job."""
    if exchange is None:
        return connection.join(job, rank, world_size, **options)
    own = connection.card(job, rank, world_size) + (generate_key() if rank == 0 else bytes(32))
    parts = exchange(own)
    return connection.join(job, rank, world_size, [part[:-32] for part in parts], parts[0][-32:], **options)


def library_version():
    """The version of the libsluice that was found, such as "0.1.0"."""
    from . import _abi
    return _abi.load().sluice_version().decode()
