"""What can go wrong, one class for each thing that a caller may want to treat differently."""


class Error(RuntimeError):
    """Base of all errors of this package. `code` is the C name without its prefix, such as "TIMEOUT"."""

    code = ""

    def __init__(self, text, code=None):
        super().__init__(text)
        if code is not None:
            self.code = code


class InvalidArgument(Error, ValueError):
    """An argument is wrong."""

    code = "INVALID"


class Unreachable(Error, ConnectionError):
    """No daemon answers at the socket."""

    code = "UNREACHABLE"


class Refused(Error):
    """The daemon refused; the text has its words."""

    code = "REFUSED"


class Timeout(Error, TimeoutError):
    """The call's own time-out passed. An op goes on and can be waited for again."""

    code = "TIMEOUT"


class DaemonLost(Error, ConnectionError):
    """The daemon went away."""

    code = "DAEMON_LOST"


class ArenaFull(Error, MemoryError):
    """The job's shared arena has no room for a buffer of this size."""

    code = "NO_MEMORY"


class Forked(Error):
    """The object was made by the parent process. Open a connection of your own in the child."""

    code = "FORKED"


class AbiMismatch(Error):
    """Library and daemon do not fit each other."""

    code = "ABI"


class TooManyOps(Error):
    """Too many ops are open: wait for one first."""

    code = "FULL"


class SystemFailure(Error, OSError):
    """A system call failed."""

    code = "SYSTEM"

    def __init__(self, text, code=None):
        Error.__init__(self, text, code)

    def __str__(self):  # OSError would print its errno pair
        return str(self.args[0])


class Failed(Error):
    """A call without a report (barrier) ended with an error status, which the text names."""

    code = "FAILED"


class OpError(Error):
    """A collective call failed. Attributes: job, rank, op (its number in the job), tag, status (such as "PEER_LOST"),
    and report, the op's Report."""

    status = ""

    def __init__(self, text, job="", rank=-1, report=None, status=None):
        super().__init__(text)
        self.job, self.rank, self.report = job, rank, report
        self.op = report.op if report is not None else -1
        self.tag = report.tag if report is not None else 0
        if status is not None:
            self.status = status
        self.code = self.status


class Mismatch(OpError):
    """Ranks called the op with different counts, types, kinds or tags; the text has both sides."""

    status = "MISMATCH"


class OpTimeout(OpError):
    """An exact op was not complete by its time-out; the text names who is missing."""

    status = "OP_TIMEOUT"


class PeerLost(OpError):
    """A node or one of its ranks is gone; the text names rank, node and address."""

    status = "PEER_LOST"


class RankTimeout(OpError):
    """A rank did not make this call in time; the text names it."""

    status = "RANK_TIMEOUT"


class ViewChanged(OpError):
    """The membership of the job changed while the op was open."""

    status = "VIEW_CHANGED"


class Aborted(OpError):
    """The job was aborted on some rank."""

    status = "ABORTED"


class DaemonLostInOp(OpError, DaemonLost):
    """The daemon went away while the op was open."""

    status = "DAEMON_LOST"


BY_CODE = {cls.code: cls for cls in (InvalidArgument, Unreachable, Refused, Timeout, DaemonLost, ArenaFull, Forked,
                                     AbiMismatch, TooManyOps, SystemFailure, Failed)}
BY_STATUS = {cls.status: cls for cls in (Mismatch, OpTimeout, PeerLost, RankTimeout, ViewChanged, Aborted,
                                         DaemonLostInOp)}
