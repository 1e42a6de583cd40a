"""Connection, Job and Buffer: the C interface as Python objects. Knows neither numpy nor torch."""
import ctypes
import os
import sys

from . import _abi
from ._errors import BY_CODE, BY_STATUS, Error, Forked, InvalidArgument, OpError

DEFAULT_TIMEOUT_S = 30.0  # as the protocol's op_timeout and rank_timeout
MAX_MS = 2**31 - 1

# Element types of the buffer protocol's formats; native sizes, so 'l' and 'q' are both 8 bytes on 64-bit Linux.
FORMATS = {"f": "f32", "e": "f16", "d": "f64", "i": "i32", "l": "i64", "q": "i64", "B": "u8"}


def _milliseconds(seconds):
    if seconds is None:
        seconds = DEFAULT_TIMEOUT_S
    if seconds < 0:
        raise InvalidArgument(f"sluice: a time-out of {seconds} seconds is negative")
    return min(int(seconds * 1000 + 0.999), MAX_MS)


def _microseconds(deadline):
    if deadline is None:
        return 0
    micros = int(round(deadline * 1e6))
    if not 1 <= micros <= 0xFFFFFFFF:
        raise InvalidArgument(f"sluice: a deadline of {deadline} seconds is outside 1 us .. 4294 s")
    return micros


def _raise(library, code, doing):
    """Raises what a negative return of the C interface means, with the library's own line."""
    text = (library.sluice_last_error() or b"").decode(errors="replace")
    name = _abi.ERRORS.get(code, str(code))
    raise BY_CODE.get(name, Error)(f"sluice: {doing}: {text or name}", name)


class Report:
    """How an op went; the fields are those of sluice_report (sluice.h), times in milliseconds.

    status        "OK", "INCOMPLETE" ... ; ok is True for a result that equals the other ranks' bit for bit
    op, tag       the op's number in the job, and its tag
    result, resolved   which of the two events have happened
    blocks_expected, blocks_received, blocks_skipped, blocks_uncounted, blocks_repaired, blocks_filled (best_effort: by
                  rule), blocks_discarded (of carry-over), blocks_corrected (CORRECTED: holes of earlier results, added)
    total_ms, wait_ms, lag_ms, push_ms
    late_nodes    how many nodes were not counted in full; worst_node: the one that the op waited for longest, or None
    bytes_sent    datagram bytes of this node for this op, until its result was complete
    missing       [(first element, elements, owner)], at most 16; missing_total: how many there are
    text          one line for a person: what went wrong, or whom the op waited for 1 s or longer; else ""
    """

    __slots__ = ("status", "status_code", "op", "tag", "result", "resolved", "blocks_expected", "blocks_received",
                 "blocks_skipped", "blocks_uncounted", "blocks_repaired", "blocks_filled", "blocks_discarded", "blocks_corrected", "total_ms", "wait_ms", "lag_ms", "push_ms",
                 "late_nodes", "worst_node", "bytes_sent", "missing", "missing_total", "text")

    def __init__(self, raw):
        self.status_code = raw.status
        self.status = _abi.STATUSES.get(raw.status, str(raw.status))
        self.op, self.tag = raw.op_seq, raw.tag
        self.result = bool(raw.events & _abi.EVENT_RESULT)
        self.resolved = bool(raw.events & _abi.EVENT_RESOLVED)
        for name in ("blocks_expected", "blocks_received", "blocks_skipped", "blocks_uncounted", "blocks_repaired",
                     "blocks_filled", "blocks_discarded", "blocks_corrected", "late_nodes", "bytes_sent", "missing_total"):
            setattr(self, name, getattr(raw, name))
        for name in ("total", "wait", "lag", "push"):
            setattr(self, name + "_ms", getattr(raw, name + "_us") / 1000)
        self.worst_node = None if raw.worst_node == _abi.NO_NODE else raw.worst_node
        self.missing = [(r.first, r.count, r.owner) for r in raw.missing[:min(raw.missing_count, _abi.MAX_RANGES)]]
        self.text = raw.text.decode(errors="replace")

    @property
    def ok(self):
        return self.status_code == _abi.OK

    @property
    def failed(self):
        return self.status_code >= _abi.FIRST_ERROR_STATUS

    def __repr__(self):
        return f"<sluice.Report op {self.op} {self.status}, {self.total_ms:.3f} ms{': ' if self.text else ''}{self.text}>"


def generate_key():
    """32 random bytes for the `key` of join: made on one rank and handed to the others by a rendezvous of your own."""
    library = _abi.load()
    key = (ctypes.c_ubyte * _abi.KEY_BYTES)()
    code = library.sluice_key_generate(key)
    if code:
        _raise(library, code, "making a key")
    return bytes(key)


class Connection:
    """A connection to this node's daemon. A context manager; closing it abandons jobs that were not left."""

    def __init__(self, socket=None, timeout=5.0):
        self._library = _abi.load()
        self._handle = _abi.Handle()
        self._pid = os.getpid()
        code = self._library.sluice_open(None if socket is None else os.fsencode(socket), _milliseconds(timeout),
                                         ctypes.byref(self._handle))
        if code:
            self._handle = None
            _raise(self._library, code, "connecting")

    def _check(self):
        if self._pid != os.getpid():
            raise Forked("sluice: this connection was opened by the parent process; open one in the child")
        if self._handle is None:
            raise InvalidArgument("sluice: the connection is closed")

    def card(self, job, rank, world_size, timeout=5.0, generation=0):
        """This rank's card for `job`, 192 bytes: what every other rank needs before all can join. Good for one join.
        generation: of the view, where ranks meet anew (after a lost daemon, for one): higher than any before. What is left
        of older views here ends with ViewChanged."""
        self._check()
        card = _abi.Card()
        code = self._library.sluice_card_renew(self._handle, job.encode(), rank, world_size, generation,
                                               _milliseconds(timeout), ctypes.byref(card))
        if code:
            _raise(self._library, code, f"job {job}, rank {rank}: asking for a card")
        return bytes(card.bytes)

    def join(self, job, rank, world_size, cards=None, key=None, local_ranks=0, arena_bytes=0, max_op_bytes=0,
             deadline=None, timeout=None, generation=0):
        """Joins `job` and waits until every node of it answers; returns a Job.

        cards: the cards of all ranks, in rank order, and key: 32 bytes that are equal on all ranks and secret. Without
        them the peers come from the daemon's configuration; a world of one rank needs neither. arena_bytes: shared
        memory for buffers (0: 4 x max_op_bytes); max_op_bytes: the largest tensor (0: 64 MiB); deadline: seconds,
        default bound of `consistent` ops (None: the daemon's setting); generation: that of the cards.
        """
        self._check()
        if cards is None and key is None and world_size == 1:
            cards, key = [self.card(job, rank, world_size)], generate_key()
        options = _abi.JoinOptions(size=ctypes.sizeof(_abi.JoinOptions), job=job.encode(), rank=rank,
                                   world_size=world_size, local_ranks=local_ranks, arena_bytes=arena_bytes,
                                   max_op_bytes=max_op_bytes, deadline_us=_microseconds(deadline),
                                   timeout_ms=_milliseconds(timeout), generation=generation)
        if cards is not None:
            if len(cards) != world_size or any(len(card) != _abi.CARD_BYTES for card in cards):
                raise InvalidArgument(f"sluice: job {job}, rank {rank}: {len(cards)} cards of "
                                      f"{sorted({len(card) for card in cards})} bytes; needed: {world_size} of "
                                      f"{_abi.CARD_BYTES}")
            if key is None or len(key) != _abi.KEY_BYTES:
                raise InvalidArgument(f"sluice: job {job}, rank {rank}: cards need a key of {_abi.KEY_BYTES} bytes")
            options.cards = (_abi.Card * world_size)(*(_abi.Card.from_buffer_copy(card) for card in cards))
            options.key = (ctypes.c_ubyte * _abi.KEY_BYTES).from_buffer_copy(key)
        handle = _abi.Handle()
        code = self._library.sluice_join(self._handle, ctypes.byref(options), ctypes.byref(handle))
        if code:
            _raise(self._library, code, f"job {job}, rank {rank} of {world_size}: joining")
        return Job(self, handle, job)

    def close(self):
        handle, self._handle = self._handle, None
        if handle is not None and self._pid == os.getpid():
            self._library.sluice_close(handle)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Buffer:
    """Memory of the job's arena that this process and the daemon share, 64-byte aligned. It is gone with the job:
    neither the object nor a view of it may be touched after leave()."""

    __slots__ = ("address", "nbytes", "_job")

    def __init__(self, job, address, nbytes):
        self._job, self.address, self.nbytes = job, address, nbytes

    def view(self):
        """The bytes, writable, as a memoryview (cast it, or give it to numpy.frombuffer or torch.frombuffer)."""
        return memoryview((ctypes.c_ubyte * self.nbytes).from_address(self.address)).cast("B")

    def free(self):
        job, self._job = self._job, None
        if job is not None:
            job._free(self.address)


class Job:
    """One rank's membership in a job. Collective calls must be made in the same order on every rank. A context
    manager: leaves at the end, or aborts the job on all ranks when the block ends with an exception."""

    def __init__(self, connection, handle, name):
        self._connection, self._handle, self.name = connection, handle, name
        self._library = connection._library
        self._pid = os.getpid()
        info = _abi.JobInfo(size=ctypes.sizeof(_abi.JobInfo))
        code = self._library.sluice_job_get_info(handle, ctypes.byref(info))
        if code:
            _raise(self._library, code, f"job {name}: asking for its facts")
        self.rank, self.world_size = info.rank, info.world_size
        self.node, self.nodes, self.lanes = info.node, info.nodes, info.lanes
        self.payload_bytes, self.arena_bytes, self.max_op_bytes = info.payload_bytes, info.arena_bytes, info.max_op_bytes
        self.node_name, self.node_address = (text.decode(errors="replace") for text in (info.node_name, info.node_address))
        self.corrects = bool(info.corrects)  # holes of a `consistent` result are added to a later one of the tag
        self.carry_over = bool(info.carry_over)  # what `consistent` does not count of a rank's is added to its later calls

    def _check(self):
        if self._pid != os.getpid():
            raise Forked(f"sluice: job {self.name} was joined by the parent process; join in the child")
        if self._handle is None:
            raise InvalidArgument(f"sluice: job {self.name} was left")

    def _where(self):
        return f"job {self.name}, rank {self.rank}"

    # --- Buffers

    def alloc(self, nbytes):
        """A Buffer of the arena. ArenaFull when there is no room; the text names the size that would do."""
        self._check()
        address = self._library.sluice_alloc(self._handle, nbytes)
        if not address:
            _raise(self._library, -6, f"{self._where()}: allocating {nbytes} bytes of the arena")
        return Buffer(self, address, nbytes)

    def _free(self, address):
        if self._handle is not None and self._pid == os.getpid():
            self._library.sluice_free(self._handle, address)

    # --- Calls that return at once: an op number, for wait()

    def submit_allreduce(self, contribution, result, count, dtype, kind="sum", op_class="exact", tag=0, deadline=None,
                         loss_scale=0.0):
        """result = sum or mean over the ranks of `count` elements of contribution. Both are Buffers, and the daemon's
        until wait() says so. dtype: f32 f16 bf16 f64 i32 i64 u8. deadline: seconds, None: the job's."""
        self._check()
        number = _abi.OpNumber()
        options = _abi.OpOptions(size=ctypes.sizeof(_abi.OpOptions), op_class=_abi.CLASSES[op_class], tag=tag,
                                 deadline_us=_microseconds(deadline), loss_scale=loss_scale)
        code = self._library.sluice_allreduce(self._handle, contribution.address, result.address, count,
                                              _abi.TYPES[dtype][0], _abi.KINDS[kind], ctypes.byref(options),
                                              ctypes.byref(number))
        if code:
            _raise(self._library, code, f"{self._where()}: allreduce of {count} {dtype}")
        return number.value

    def submit_broadcast(self, buffer, nbytes, root):
        """`nbytes` of `buffer` (a Buffer) from rank `root` to all, in place; exact."""
        self._check()
        number = _abi.OpNumber()
        code = self._library.sluice_broadcast(self._handle, buffer.address, nbytes, root, ctypes.byref(number))
        if code:
            _raise(self._library, code, f"{self._where()}: broadcast of {nbytes} bytes from rank {root}")
        return number.value

    def submit_all_gather(self, data, result, nbytes):
        """result (a Buffer of world_size x nbytes) = `data` (bytes) of every rank, in rank order; exact."""
        self._check()
        number = _abi.OpNumber()
        source = (ctypes.c_char * nbytes).from_buffer_copy(data) if nbytes else None
        code = self._library.sluice_all_gather(self._handle, source, result.address, nbytes, ctypes.byref(number))
        if code:
            _raise(self._library, code, f"{self._where()}: all_gather of {nbytes} bytes")
        return number.value

    def wait(self, op, timeout=None, check=True):
        """Waits until result and fate of the op are known; its buffers are then yours again. Returns the Report.
        Timeout when the time-out passed (the op goes on); check: an OpError when the op itself failed."""
        return self._wait(self._library.sluice_wait, op, timeout, check)

    def wait_result(self, op, timeout=None, check=True):
        """As wait(), but returns with the result. Unless report.resolved is set, call wait() later to get the
        contribution buffer back."""
        return self._wait(self._library.sluice_wait_result, op, timeout, check)

    def _wait(self, function, op, timeout, check):
        self._check()
        raw = _abi.Report(size=ctypes.sizeof(_abi.Report))
        code = function(self._handle, op, _milliseconds(timeout), ctypes.byref(raw))
        if code:
            _raise(self._library, code, f"{self._where()}: waiting for op {op}")
        report = Report(raw)
        if check and report.failed:
            raise self.failure(report)
        return report

    def failure(self, report, doing=""):
        """The OpError for the report of a failed op."""
        text = f"sluice: {self._where()}, op {report.op}{doing}: {report.status}: {report.text or 'no details'}"
        return BY_STATUS.get(report.status, OpError)(text, self.name, self.rank, report, report.status)

    # --- Calls that wait

    def allreduce(self, data, kind="sum", op_class="exact", tag=0, deadline=None, timeout=None, dtype=None):
        """Sum or mean of `data` over all ranks, written back into data, which is returned with the Report.

        data: anything writable with the buffer protocol, C-contiguous: a numpy array, array.array, bytearray,
        memoryview. dtype: only where the buffer's format does not say it (bf16 in 16-bit integers, for one).
        """
        view, dtype = _typed_view(data, dtype)
        with _Slots(self, view.nbytes, view.nbytes) as (contribution, result):
            contribution.view()[:view.nbytes] = view
            op = self.submit_allreduce(contribution, result, view.nbytes // _abi.TYPES[dtype][1], dtype, kind, op_class,
                                       tag, deadline)
            report = self.wait(op, timeout)
            view[:] = result.view()[:view.nbytes]
        return data, report

    def broadcast(self, data, root=0, timeout=None):
        """`data` of rank `root` to all ranks, in place. Returns data. data: as in allreduce, any type."""
        view = _byte_view(data)
        with _Slots(self, view.nbytes) as (buffer,):
            if self.rank == root:
                buffer.view()[:view.nbytes] = view
            self.wait(self.submit_broadcast(buffer, view.nbytes, root), timeout)
            if self.rank != root:
                view[:] = buffer.view()[:view.nbytes]
        return data

    def all_gather(self, data, timeout=None):
        """The `data` of every rank, equally long everywhere, as a list of world_size bytes objects; for numpy arrays
        a list of arrays of the same shape and type."""
        view = _byte_view(data, writable=False)
        with _Slots(self, view.nbytes * self.world_size) as (result,):
            self.wait(self.submit_all_gather(view, result, view.nbytes), timeout)
            whole = bytes(result.view()[:view.nbytes * self.world_size])
        parts = [whole[r * view.nbytes:(r + 1) * view.nbytes] for r in range(self.world_size)]
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(data, numpy.ndarray):
            return [numpy.frombuffer(part, data.dtype).reshape(data.shape).copy() for part in parts]
        return parts

    def barrier(self, timeout=None):
        """Ends on no rank before every rank has called it."""
        self._check()
        code = self._library.sluice_barrier(self._handle, _milliseconds(timeout))
        if code:
            _raise(self._library, code, f"{self._where()}: barrier")

    # --- Carry-over (sluice.h): `address` is memory for `count` f32 where dtype is f16 or bf16, else of dtype

    def flush(self, tag, kind, dtype, count, address, timeout=None):
        """Collective: what all ranks owe under the tag, without loss scale, summed or averaged, equal on all ranks. To be
        added to the next result of the tag on every rank."""
        self._owed(self._library.sluice_flush, "flushing", tag, kind, dtype, count, address, timeout)

    def tag_retire(self, tag, kind, dtype, count, address, timeout=None):
        """Local: what this rank owes under the tag, without loss scale. To be added to a later contribution."""
        self._owed(self._library.sluice_tag_retire, "retiring", tag, kind, dtype, count, address, timeout)

    def take_correction(self, tag, kind, dtype, count, address, timeout=None):
        """Local: what waits to be added to this rank's results under the tag, without loss scale."""
        self._owed(self._library.sluice_take_correction, "taking the correction of", tag, kind, dtype, count, address, timeout)

    def _owed(self, function, doing, tag, kind, dtype, count, address, timeout):
        self._check()
        code = function(self._handle, tag, _abi.KINDS[kind], _abi.TYPES[dtype][0], count, address, _milliseconds(timeout))
        if code:
            _raise(self._library, code, f"{self._where()}: {doing} tag {tag:016x}")

    # --- The end

    def leave(self, timeout=5.0):
        """Waits for open ops, then leaves. The job is left even if this raises."""
        handle, self._handle = self._handle, None
        if handle is not None and self._pid == os.getpid():
            code = self._library.sluice_leave(handle, _milliseconds(timeout))
            if code:
                _raise(self._library, code, f"{self._where()}: leaving")

    def abort(self):
        """Ends the job on all ranks: their open and later ops fail with Aborted. Any thread, any number of times."""
        if self._handle is not None and self._pid == os.getpid():
            self._library.sluice_abort(self._handle)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.leave()
            return
        self.abort()
        try:
            self.leave(1.0)
        except Error:
            pass  # the exception of the block says more


class _Slots:
    """Arena buffers for the time of one call. They go back when the call ended, even by an error. After a time-out or a
    KeyboardInterrupt the op may still be the daemon's, so its buffers stay taken until leave()."""

    def __init__(self, job, *sizes):
        self._job, self._sizes, self._buffers = job, sizes, []

    def __enter__(self):
        try:
            for size in self._sizes:
                self._buffers.append(self._job.alloc(max(size, 1)))
        except Error:
            self._free()
            raise
        return self._buffers

    def __exit__(self, kind, error, _):
        if error is None or isinstance(error, Error) and error.code != "TIMEOUT":
            self._free()

    def _free(self):
        for buffer in self._buffers:
            buffer.free()


def _byte_view(data, writable=True):
    view = memoryview(data)
    if not view.c_contiguous:
        raise InvalidArgument("sluice: the array is not C-contiguous; pass numpy.ascontiguousarray(array)")
    if writable and view.readonly:
        raise InvalidArgument("sluice: the buffer is read-only, and the result is written into it")
    return view.cast("B") if view.nbytes else memoryview(bytearray(0))


def _typed_view(data, dtype):
    if dtype is None:
        code = memoryview(data).format.lstrip("@=<")
        dtype = FORMATS.get(code)
        if dtype is None:
            raise InvalidArgument(f"sluice: elements of format '{code}' cannot be reduced; one of {sorted(_abi.TYPES)} can, "
                                  "and dtype= names one that the buffer does not")
    view = _byte_view(data)
    if dtype not in _abi.TYPES or view.nbytes % _abi.TYPES[dtype][1]:
        raise InvalidArgument(f"sluice: {view.nbytes} bytes are no whole number of '{dtype}'")
    return view, dtype
