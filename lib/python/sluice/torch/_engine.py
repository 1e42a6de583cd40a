"""Buckets in flight: arena slots, submission in order, and the thread that completes them.

A bucket becomes one op, or several parts when it is larger than one op may be. Every part has two arena slots: the
contribution (copied in before the submission, free when the op is RESOLVED) and the result (copied out at RESULT, free
then). The training thread submits; one completion thread waits for the results in order, copies each back into the bucket
and completes its future. Copies and waits hold no GIL, so both overlap with the backward pass.

When the arena or the op window is full, the submitter waits for the oldest op. That cannot hang two ranks against each
other: ops have one order on all ranks, and the oldest open op was submitted here already.
"""
import collections
import ctypes
import threading
import time

from .. import _abi
from .._errors import ArenaFull, Error, Timeout, TooManyOps

SLICE_S = 0.25  # the completion thread looks this often whether it shall end
STUCK_S = 0.25  # without room for this long, with results all in: contributions that wait for a later op are taken back
POLL_S = 0.02  # how often fates are asked for while nothing else happens


class Work:
    """One bucket. `deliver(work)` is called on the completion thread when all parts are in or one failed."""

    __slots__ = ("deliver", "error", "host", "nbytes", "keep", "void")

    def __init__(self, host, nbytes, deliver, keep=None):
        self.host, self.nbytes = host, nbytes  # address of the bucket in host memory: read at submission, then written
        self.deliver, self.keep = deliver, keep  # keep: what must live until then
        self.error = None
        self.void = False  # the step was dropped: the result is zeros


class Part:
    __slots__ = ("work", "offset", "nbytes", "count", "dtype", "tag", "parameters", "last", "op", "contribution", "result",
                 "submitted")

    def __init__(self, work, offset, nbytes, count, dtype, tag, parameters, last):
        self.work, self.offset, self.nbytes, self.count, self.dtype = work, offset, nbytes, count, dtype
        self.tag, self.parameters, self.last = tag, parameters, last
        self.op = self.contribution = self.result = None
        self.submitted = 0.0


class Engine:
    def __init__(self, job, op_class, deadline, timeout, stats, on_report):
        self.job, self.op_class, self.deadline, self.timeout = job, op_class, deadline, timeout
        self.stats = stats
        self._on_report = on_report  # called with (part, report) for each result, on the completion thread
        self.on_fate = lambda part, report: None  # the State's: called when the fate of an op came after its result
        self.rescue = lambda part: False  # the State's: takes back what waits in part's slot for a later op; True if it did
        self.error = None  # the first failure; everything after it fails with the same
        self._changed = threading.Condition()
        self._pending = collections.deque()  # parts whose result is open, oldest first
        self._unresolved = collections.deque()  # parts whose contribution is still the daemon's
        self._resolving = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"sluice-{job.name}", daemon=True)
        self._thread.start()

    # --- The submitter's side

    def parts_of(self, nbytes):
        """How a bucket of nbytes is cut: [(offset, bytes)]. Depends on nothing but the job, so it is equal on all ranks."""
        limit = self.job.max_op_bytes // 64 * 64
        if nbytes <= limit:
            return [(0, nbytes)]
        parts = -(-nbytes // limit)
        step = -(-nbytes // (parts * 64)) * 64  # whole elements of every type, 64-byte aligned, and at most `limit`
        return [(offset, min(step, nbytes - offset)) for offset in range(0, nbytes, step)]

    def submit(self, work, count, dtype, tags, cuts, parameters, loss_scale):
        """Copies the bucket into the arena and hands it to the daemon, part by part. Returns without waiting, unless the
        arena or the window is full."""
        element_bytes = _abi.TYPES[dtype][1]
        for (offset, nbytes), tag in zip(cuts, tags):
            part = Part(work, offset, nbytes, nbytes // element_bytes, dtype, tag, parameters,
                        offset + nbytes == work.nbytes)
            try:
                part.contribution = self.alloc(nbytes)
                part.result = self.alloc(nbytes)
                if nbytes:
                    ctypes.memmove(part.contribution.address, work.host + offset, nbytes)
                part.submitted = time.monotonic()
                part.op = self._until_room(lambda p=part: self.job.submit_allreduce(
                    p.contribution, p.result, p.count, dtype, "mean", self.op_class, p.tag, self.deadline, loss_scale),
                    TooManyOps)
            except Error as error:
                # What was submitted of this bucket waits for the rest on the other ranks: there is no way on from here.
                if offset > 0 or part.contribution is not None:
                    self.error = self.error or error
                for slot in (part.contribution, part.result):
                    if slot is not None:
                        slot.free()
                raise
            with self._changed:
                if self.error is not None:
                    raise self.error
                self._pending.append(part)
                self._changed.notify_all()

    def alloc(self, nbytes):
        """An arena buffer; waits for the oldest op when the arena is full. ArenaFull when waiting would not help."""
        return self._until_room(lambda: self.job.alloc(max(nbytes, 1)), ArenaFull)

    def _until_room(self, attempt, full):
        end = time.monotonic() + self.timeout
        while True:
            if self.error is not None:
                raise self.error
            try:
                return attempt()
            except full as error:
                self._poll_unresolved()
                with self._changed:
                    if not self._pending and not self._unresolved:
                        return attempt()  # what was open a moment ago has ended; if not even that helps, nothing will
                    if time.monotonic() > end:
                        if self._pending:
                            raise
                        raise type(error)(f"{error}; {len(self._unresolved)} contributions came too late and wait in their slots "
                                          "for a later op (at most exchange.max_lag of them): State(arena_bytes=...) must have "
                                          "room for them", error.code) from None
                    self._changed.wait(POLL_S)
                    # Only contributions that wait for a later op are left, and that op waits for room.
                    stuck = self._unresolved[0] if not self._pending and self._unresolved else None
                if stuck is not None and time.monotonic() > end - self.timeout + STUCK_S:
                    self.rescue(stuck)

    def drain(self, timeout):
        """Waits until no result is open; True if so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending or self.error is not None, timeout)

    def stop(self):
        """Ends the completion thread; afterwards nothing here touches the job any more."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # --- The completion thread

    def _run(self):
        while True:
            with self._changed:
                while not self._pending and not self._stopping and not self._unresolved:
                    self._changed.wait()
                if not self._pending and not self._stopping:
                    self._changed.wait(POLL_S)
                if self._stopping:
                    break
                part = self._pending[0] if self._pending else None
            if part is not None:
                self._complete(part)
            self._poll_unresolved()
        self._fail_rest(self.error or Error("sluice: the state was closed while the bucket was in flight"))

    def _complete(self, part):
        work = part.work
        try:
            report = self._result_of(part)
            if report is None:
                return  # stopping
            if report.failed:
                raise self.job.failure(report, f", tag {part.tag:016x} ({part.parameters})")
            if part.nbytes:
                ctypes.memmove(work.host + part.offset, part.result.address, part.nbytes)
            self.stats.op(part, report, time.monotonic())
            self._on_report(part, report)
        except BaseException as error:  # whatever it is, the training thread must not wait for ever
            self.error = self.error or error
            with self._changed:
                if self._pending and self._pending[0] is part:
                    self._pending.popleft()
                self._changed.notify_all()
            work.error = self.error
            self.deliver(work)
            self._fail_rest(self.error)
            return
        part.result.free()
        with self._changed:
            self._pending.popleft()
            if report.resolved:
                part.contribution.free()
            else:
                self._unresolved.append(part)
            self._changed.notify_all()
        if part.last:
            self.deliver(work)

    def _result_of(self, part):
        end = time.monotonic() + self.timeout
        while not self._stopping:
            try:
                return self.job.wait_result(part.op, SLICE_S, check=False)
            except Timeout:
                if time.monotonic() > end:
                    raise Timeout(f"sluice: job {self.job.name}, rank {self.job.rank}, op {part.op}, tag {part.tag:016x} "
                                  f"({part.parameters}): no result within timeout={self.timeout:g} s of the State; "
                                  "`sluicectl status` on this node says what the daemon waits for") from None
        return None

    def _poll_unresolved(self):
        """Takes back the contribution slots of ops whose fate became known; never waits."""
        with self._resolving:
            for _ in range(len(self._unresolved)):
                part = self._unresolved.popleft()
                try:
                    report = self.job.wait(part.op, 0, check=False)
                except Timeout:
                    self._unresolved.append(part)
                    continue
                except Error:
                    continue  # the job is gone, and its arena with it
                self.stats.resolved(report)
                self.on_fate(part, report)
                part.contribution.free()

    def _fail_rest(self, error):
        with self._changed:
            rest, self._pending = list(self._pending), collections.deque()
            self.error = self.error or error
            self._changed.notify_all()
        for work in dict.fromkeys(part.work for part in rest):
            work.error = error
            self.deliver(work)

    @staticmethod
    def deliver(work):
        deliver, work.deliver = work.deliver, None
        if deliver is not None:
            deliver(work)
