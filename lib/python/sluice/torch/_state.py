"""State: one rank's membership in a job, as the state object of a DDP communication hook."""
import atexit
import hashlib
import os
import socket as sockets
import sys
import threading
import warnings
import weakref

import torch

from .. import _core
from .._errors import Error, Forked, InvalidArgument
from . import _recovery, _rendezvous, _settings, _sync, _views
from ._calls import Calls
from ._carry import Carry, Layout
from ._engine import Engine, Work
from ._names import Names, part_tag
from ._notices import Notices
from ._sparse import densify, sparsify
from ._stats import Stats

TYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64"}
LEAVE_S = 5.0  # how long close() waits for open ops
_states = weakref.WeakSet()


class SluiceWarning(UserWarning):
    """Something that training survives and that somebody should know."""


class State(Calls, Notices):
    """Joins `job` through the node's daemon; collective: every rank of the process group makes one, at the same place.

    job             name of the job; one State per job and rank
    process_group   the ranks that meet (None: the default group); used for the rendezvous, not for gradients
    deadline        bound of one round: "auto" (the daemon's), or seconds. With op_class="exact": when to give up
    op_class        "consistent": bounded, all ranks apply the same bytes. "exact": complete, or an error; bit-equal
    fallback        None: errors are raised. "allreduce": without a daemon at the start, or when the job cannot go on, all
                    ranks change to DDP's own allreduce at the same step
    timeout         seconds for the join, and for an op that gives no sign, before Timeout is raised
    socket          the daemon's socket; None: $SLUICE_SOCKET, else /run/sluice/sluice.sock
    max_bucket_bytes   largest op; larger buckets travel in parts. None: 64 MiB, or what the model needs
    arena_bytes     shared memory for buckets in flight. None: what the model needs, or the library's default
    model           the model or its DDP: gives parameters their names and sizes the memory (or state.attach(ddp) later)
    grad_scaler     the GradScaler of an AMP training, so that the daemon knows the loss scale
    on_incomplete   "resync": a round with holes warns and sets needs_resync. "ignore": it is only counted
    optimizer       with it (and model) a job survives the loss of a daemon: all ranks enter a new view and take
                    parameters and optimizer state from the one that is furthest
    on_peer_loss    when a rank is gone: "fail", or "continue" without it, on more than half of the nodes; needs optimizer
    rejoin_timeout  seconds to wait for a daemon that is being restarted, and for the new view
    drift_every     samples drift() by itself at the begin of every so many backward passes, for report(); 0: never.
                    Needs the model

    Threads: hook calls come from one thread (DDP's); report(), recent() and the attributes may be used by any.
    """

    def __init__(self, job, process_group=None, deadline="auto", op_class="consistent", fallback=None, timeout=120.0,
                 socket=None, max_bucket_bytes=None, arena_bytes=None, model=None, grad_scaler=None,
                 on_incomplete="resync", drift_every=0, optimizer=None, on_peer_loss="fail", rejoin_timeout=30.0):
        self._settings = _settings.make(job, deadline, op_class, fallback, timeout, socket, max_bucket_bytes, arena_bytes,
                                        on_incomplete, model, drift_every, on_peer_loss, rejoin_timeout)
        self._begin()
        if model is not None:
            self._learn(model)
        self.grad_scaler, self._optimizer = grad_scaler, optimizer
        if on_peer_loss == "continue" and (optimizer is None or model is None):
            raise InvalidArgument("sluice: on_peer_loss='continue' needs State(model=..., optimizer=...): ranks that were behind "
                                  "take their state from the others")
        self._connect(process_group)

    def _begin(self):
        """What a new and an unpickled State have alike: everything but a connection."""
        self._stats, self._names, self._carry = Stats(), Names(), Carry()
        self._engine = self._job = self._connection = self._stager = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._said = []  # warnings of the completion thread, until the training thread comes by
        self._looked_for_ddp = False
        self._step_begins, self._loss_scale = True, 0.0
        self._model, self._passes = None, 0
        self._optimizer = self._recovery = self._process_group = None
        self._exchange = self._why_fallback = None  # after the fallback: what takes the engine's place
        self.needs_resync = False
        self._long_waits = self._corrected_until = 0  # the latter: of counts["incomplete"]
        self.grad_scaler = None
        self.closed = False

    def _connect(self, process_group):
        settings = self._settings
        self._process_group = process_group
        rank, world_size = _rendezvous.group_facts(process_group)
        connection = card = key = problem = None
        try:
            connection = _core.Connection(settings.socket, min(settings.timeout, 10.0))
            card = connection.card(settings.job, rank, world_size)
            key = _core.generate_key() if rank == 0 else None
        except (Error, ImportError) as error:
            problem = str(error)
            if world_size == 1 and settings.fallback is None:
                raise
        try:
            recovers = self._optimizer is not None and self._model is not None
            shared = {**settings.shared(), "names": self._names.known, "model and optimizer given": recovers}
            cards, key = _rendezvous.agree(settings.job, card, shared, key, problem, process_group, settings.timeout)
            self._join(connection, cards, key, rank, world_size)
        except BaseException as error:
            if connection is not None:
                connection.close()
            if settings.fallback is None or getattr(error, "code", "") != "UNREACHABLE":
                raise
            # All ranks have these same words.
            self._fall_back(str(error), _sync.GroupExchange(process_group))
            if rank == 0:
                warnings.warn(f"sluice: job {self.job}: gradients go over DDP's own allreduce, on all ranks, because {error}",
                              SluiceWarning, stacklevel=3)
            return
        if world_size > 1 and (settings.fallback is not None or recovers):
            try:
                self._watch(key, rank, world_size)
            except _views.StoreGone as gone:
                self._drop()
                raise Error(f"sluice: job {settings.job}, rank {rank}: optimizer= and fallback= need the rendezvous store of "
                            f"init_process_group(init_method='env://' or 'tcp://...'), which is not there: {gone}") from None

    def _join(self, connection, cards, key, rank, world_size):
        settings = self._settings
        job = problem = None
        try:
            job = connection.join(settings.job, rank, world_size, cards, key, arena_bytes=settings.arena_bytes,
                                  max_op_bytes=settings.max_op_bytes, deadline=settings.deadline, timeout=settings.timeout)
            # What a node sends before another one has attached the job to its lanes is dropped there. A bounded first op
            # would then go on without it; an exact one is repaired until all are there.
            job.barrier(settings.timeout)
        except Error as error:
            if settings.fallback is None:
                _give_up(job)
                raise
            problem = str(error)
        if settings.fallback is not None:
            problem = _recovery.meet(self, self._process_group, problem)
            if problem:
                _give_up(job)
                raise Error(problem, "UNREACHABLE")
        self._connection = connection
        self._take_job(job)

    def _take_job(self, job):
        settings = self._settings
        self._job = job
        self._engine = Engine(job, settings.op_class, settings.deadline, settings.timeout, self._stats, self._seen)
        self._engine.on_fate = self._fate
        self._engine.rescue = lambda part: self._carry.rescue(job, part)
        if self._recovery is not None:
            self._recovery.views.placed(job.node, job.nodes)
        _states.add(self)

    def _watch(self, key, rank, world_size):
        """Makes ready for the loss of a daemon or a rank."""
        settings = self._settings
        run = hashlib.sha256(b"sluice run" + key).hexdigest()[:16]  # other Jobs of this name may use the same store
        store = _views.Store(_rendezvous.store(), f"sluice/{settings.job}/{run}")
        facts = {"pid": os.getpid(), "host": sockets.gethostname(), "node": self._job.node,
                 "name": self._job.node_name, "address": self._job.node_address}
        views = _views.Views(store, rank, range(world_size), facts, settings.on_peer_loss == "continue",
                             settings.fallback == "allreduce", self._end_view)
        views.placed(self._job.node, self._job.nodes)
        self._recovery = _recovery.Recovery(self, views, key, self._optimizer)

    def _drop(self):
        """Leaves a job that has failed, so that the other ranks learn of it at once."""
        engine, job, connection = self._engine, self._job, self._connection
        self._connection = None
        if connection is None:
            return
        try:
            job.abort()
        except Error:
            pass  # its daemon is gone
        if self._stager is not None:
            self._stager.stop()
            self._stager = None
        engine.error = engine.error or Error(f"sluice: job {self.job} ended")
        engine.stop()
        with self._lock:
            try:
                job.leave(0.0)
            except Error:
                pass
        connection.close()

    def _end_view(self):
        """Another rank found that the view cannot go on; so do not wait until this one finds it, too. Any thread."""
        with self._lock:
            try:
                if self._connection is not None:
                    self._job.abort()
            except Error:
                pass

    def _fall_back(self, why, exchange):
        """From now on gradients and all other calls go over the process group."""
        if self._connection is not None:
            self._connection.close()
        self._exchange, self._why_fallback = exchange, why
        self._connection = self._engine = None
        if self._recovery is not None:
            self._recovery.views.leave(False)

    # --- What it is

    @property
    def job(self):
        return self._settings.job

    @property
    def rank(self):
        if self._exchange is not None:
            return self._exchange.job.rank
        return self._job.rank if self._job is not None else -1

    @property
    def world_size(self):
        if self._exchange is not None:
            return self._exchange.job.world_size
        return self._job.world_size if self._job is not None else 0

    @property
    def error(self):
        """The first failure, with its type (a sluice.Error), or None."""
        return self._engine.error if self._engine is not None else None

    def attach(self, ddp):
        """Tells the State the model (or its DDP), for parameter names; before the first backward, on all ranks. Returns
        the State. Warns when DDP broadcasts buffers by itself in every step."""
        if self._names.used:
            raise InvalidArgument("sluice: attach() comes before the first backward(): the names of the buckets hang on it")
        self._learn(ddp)
        return self

    def _learn(self, model):
        self._names.learn(model)
        self._model = weakref.ref(model)
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            self._check_ddp(model)

    def _check_ddp(self, ddp):
        self._looked_for_ddp = True
        if ddp.broadcast_buffers and any(True for _ in ddp.buffers()):
            warnings.warn("sluice: DDP broadcasts this model's buffers (BatchNorm statistics and the like) before every forward, "
                          "over its own process group and as slowly as that is. Pass broadcast_buffers=False to "
                          "DistributedDataParallel and call state.sync_buffers(model) before evaluating and saving",
                          SluiceWarning, stacklevel=4)

    # --- The hook's work

    def reduce(self, tensor, parameters, is_last):
        """What the hook does with one bucket; returns the future that DDP waits for."""
        engine, step, begins = None, None, self._step_begins
        if self._recovery is None and self._exchange is None:
            engine = self._ready()  # an unpickled State gets its recovery here, too
        if self._exchange is None and self._recovery is not None:
            self._check_usable()
            step = self._recovery.bucket(begins)
            if step is None:  # the others have done this step
                self._step_begins = is_last
                self._passes += begins
                return _recovery.nothing(tensor)
            engine = self._engine
            step.error = step.error or engine.error
        self._speak()
        if not self._looked_for_ddp:
            self._look_for_ddp(parameters)
        if begins and self._settings.drift_every:
            self._sample_drift(step)
        if self._exchange is not None:
            self._check_usable()
            scale = self._scale(is_last)
            self._stats.add("buckets")
            if tensor.is_sparse or self._carry.empty():
                return _recovery.allreduce(tensor, self._process_group)
            layout = Layout([self._names.name(p) for p in parameters], [p.numel() for p in parameters], None, [])
            return _recovery.allreduce(tensor, self._process_group, self._carry, layout, scale)
        future = self._reduce(engine, step, tensor, parameters, is_last)
        if step is not None and is_last:
            step.close()
        return future

    def _reduce(self, engine, step, tensor, parameters, is_last):
        if tensor.is_sparse:
            return self._reduce_sparse(engine, step, tensor, parameters, is_last)
        dtype = TYPES.get(tensor.dtype)
        if dtype is None:
            raise InvalidArgument(f"sluice: gradients of type {tensor.dtype} ({self._names.describe(parameters)}) cannot be "
                                  f"averaged; {', '.join(sorted(TYPES.values()))} can")
        tag = self._names.tag(parameters, tensor)
        return self._start(engine, step, tensor, tensor, tag, parameters, is_last, lambda: tensor)

    def _reduce_sparse(self, engine, step, tensor, parameters, is_last):
        if self._stats.counts["densified"] == 0:
            warnings.warn("sluice: sparse gradients are sent as dense tensors in this version "
                          f"({self._names.describe(parameters)}: {tuple(tensor.shape)}); their sparse exchange comes with a later "
                          "one. sparse=False saves the conversion", SluiceWarning, stacklevel=3)
        self._stats.add("densified")
        if tensor.dtype not in TYPES:
            raise InvalidArgument(f"sluice: sparse gradients of type {tensor.dtype} cannot be averaged")
        tag = self._names.tag(parameters, tensor)
        dense = densify(tensor)
        return self._start(engine, step, dense, dense, tag, parameters, is_last,
                           lambda: sparsify(dense, tensor.shape, tensor.sparse_dim()))

    def _start(self, engine, step, source, target, tag, parameters, is_last, value):
        """Sends flat tensor `source`; the mean ends up in `target`, and the future completes with value()."""
        if source.device.type not in ("cpu", "cuda"):
            raise InvalidArgument(f"sluice: gradients on device {source.device} ({self._names.describe(parameters)}) cannot be "
                                  "exchanged; those on cpu and cuda can")
        nbytes = source.numel() * source.element_size()
        cuts = engine.parts_of(nbytes)
        tags = [part_tag(tag, index, len(cuts)) for index in range(len(cuts))]
        described = self._names.describe(parameters)
        dtype = TYPES[source.dtype]
        scale = self._scale(is_last)
        layout = self._layout(engine, step, source, tag, parameters, dtype, tags, cuts)
        self._stats.add("buckets")
        if source.is_cuda:
            self._carry.add_owed(layout, source.detach(), scale)
            return self._start_cuda(engine, step, source, target, (dtype, tags, cuts, described, scale), layout, value)
        host = source.detach()
        if not host.is_contiguous():
            host = host.contiguous()
        self._carry.add_owed(layout, host, scale)
        done = torch.futures.Future()

        def finish(work):
            try:
                if work.error is None and not work.void:
                    self._carry.add_due(layout, host, scale)
                if work.error is None and host.data_ptr() != target.data_ptr():
                    target.copy_(host.view_as(target))
            except BaseException as error:  # the training thread must not wait for ever; it raises this
                work.error = error
            done.set_result(None)

        work = Work(host.data_ptr(), nbytes, finish, keep=(host, target))
        future = done.then(lambda _: _value_of(work, value))
        _submit(engine, step, work, lambda: engine.submit(work, source.numel(), dtype, tags, cuts, described, scale))
        return future

    def _start_cuda(self, engine, step, source, target, what, layout, value):
        from ._cuda import Stager
        if self._stager is None:
            self._stager = Stager(source.device, lambda submission, staging: submission(staging),
                                  lambda submission, error: submission(None, error))
        stager = self._stager
        done = torch.futures.Future(devices=[source.device])
        dtype, tags, cuts, described, scale = what
        staged = []

        def finish(work):
            if work.error is not None:
                done.set_result(None)
                return
            try:
                if staged:
                    if not work.void:
                        self._carry.add_due(layout, staged[0], scale)
                    stager.deliver(staged[0], target, done)
                else:  # the step was dropped before this bucket was copied
                    target.zero_()
                    done.set_result(target)
            except BaseException as error:  # as above
                work.error = error
                done.set_result(None)

        holder = Work(0, source.numel() * source.element_size(), finish)

        def submission(staging, error=None):
            if error is not None:
                engine.error = engine.error or error
                holder.error = engine.error
                Engine.deliver(holder)
                return
            staged.append(staging)
            holder.host, holder.keep = staging.data_ptr(), (staging, target)
            engine.submit(holder, staging.numel(), dtype, tags, cuts, described, scale)

        future = done.then(lambda _: _value_of(holder, value))
        _submit(engine, step, holder, lambda: stager.stage(source.detach().view(-1), submission))
        return future

    def _layout(self, engine, step, source, tag, parameters, dtype, tags, cuts):
        """What is in a bucket, by parameter."""
        names, sizes = [self._names.name(p) for p in parameters], [p.numel() for p in parameters]
        if sum(sizes) != source.numel():  # a sparse gradient, with a flag for each row
            names, sizes = [f"{names[0]} (sparse)"], [source.numel()]
        job = engine.job
        if not self._carry.layouts and job.carry_over and self._settings.op_class == "consistent":
            self._check_scaler()
        try:
            return self._carry.layout(job, tag, names, sizes, dtype, tags, cuts, self._settings.timeout)
        except Error as error:
            if step is None:
                raise
            engine.error = step.error = step.error or error
            return Layout(names, sizes, dtype, [])

    def _scale(self, is_last):
        """The loss scale; asked for once per backward, because a GPU's GradScaler synchronises for it."""
        if self._step_begins and self.grad_scaler is not None and self.grad_scaler.is_enabled():
            self._loss_scale = float(self.grad_scaler.get_scale())
        self._step_begins = is_last
        return self._loss_scale

    def _check_usable(self):
        if self._pid != os.getpid():
            raise Forked(f"sluice: the State of job {self.job} belongs to the parent process; make one in the child")
        if self.closed:
            raise InvalidArgument(f"sluice: the State of job {self.job} was closed")

    def _collective(self, function, skipped):
        """function(engine) on all ranks, in a new view if the present one fails meanwhile. skipped: the value where the other
        ranks have done it before."""
        engine = self._ready() if self._recovery is None else None
        if self._recovery is None or self._exchange is not None:
            return function(engine if engine is not None else self._ready())
        self._check_usable()
        return self._recovery.call(function, skipped)

    def _ready(self):
        self._check_usable()
        if self._engine is None and self._exchange is None:
            self._connect(None)  # unpickled
        if self._exchange is not None:
            return self._exchange
        if self._engine.error is not None:
            raise self._engine.error
        return self._engine

    # --- What is seen on the way

    def _speak(self):
        while self._said:
            warnings.warn(self._said.pop(0), SluiceWarning, stacklevel=4)

    def _look_for_ddp(self, parameters):
        """Once: the DDP that this hook serves, to warn about its buffers. DDP does not tell its hook who it is, so it is
        looked for among the living objects; names are not taken from it (they must not depend on luck)."""
        import gc
        self._looked_for_ddp = True
        wanted = {id(parameter) for parameter in parameters}
        for found in gc.get_objects():
            if type(found) is torch.nn.parallel.DistributedDataParallel and any(id(p) in wanted for p in found.parameters()):
                self._check_ddp(found)
                return

    def report(self):
        """What happened since the start, as a dict: ops, buckets, bytes (of gradients) and bytes_sent (datagrams of this
        node); round_ms and wait_ms (p50, p99, max, over the last 4,096 ops); incomplete, corrected; blocks_expected,
        _received, _skipped, _uncounted (own, not in their op's sum), _repaired, _filled (best_effort), and of the own
        ones: _counted, _carried (they join a later op), _discarded; carry_over; approximated_ratio (blocks of results that are
        missing here, and own blocks that are in no sum, of those expected); late_ops, late_nodes,
        worst_nodes {node: how often it was waited for longest}, waited_ms {node: how long, together}, longest_wait {op, tag, ms,
        node, text}; waits; resyncs, needs_resync; rejoins (views that were entered),
        steps_lost (their gradients were dropped), carry_dropped (elements of load_state_dict() that a new view dropped), view, fallback (why, or None); densified; tags {tag: parameters,
        elements, type, ops, incomplete, round_ms}; drift {last, max, samples}: what drift() saw."""
        self._speak()
        facts = {"job": self.job, "rank": self.rank, "world_size": self.world_size,
                 "nodes": self._job.nodes if self._job is not None else 0, "op_class": self._settings.op_class,
                 "carry_over": self._carries(), "needs_resync": self.needs_resync, "error": str(self.error) if self.error else None,
                 "fallback": self._why_fallback,
                 "view": self._recovery.views.generation if self._recovery is not None else 0}
        counts = self._stats.report()
        lost = counts["blocks_uncounted"]
        return {**facts, **counts, "blocks_counted": counts["blocks_expected"] - lost,
                "blocks_carried": lost - counts["blocks_discarded"] if self._carries() else 0}

    def _carries(self):
        return self._job is not None and self._job.carry_over and self._settings.op_class == "consistent"

    def recent(self):
        """The last 512 ops: op, tag, bytes, status, submitted and finished (time.monotonic()), wait_ms, push_ms, total_ms,
        repaired, worst_node."""
        return self._stats.recent()

    # --- The end

    def close(self, abort=False):
        """Leaves the job; any number of times. abort: ends it on all ranks, so that they need not wait for this one."""
        if not self.closed and not abort and self._pid == os.getpid():
            self._part()
        with self._lock:
            engine, job, connection, stager = self._engine, self._job, self._connection, self._stager
            already, self.closed = self.closed, True
        if already or self._pid != os.getpid():
            return
        if self._recovery is not None:
            self._recovery.views.leave(abort or self.error is not None)
        if engine is None or connection is None:
            return
        self._speak()
        if engine.error is None and not abort:
            engine.drain(LEAVE_S)
        if abort:
            job.abort()
        if stager is not None:
            stager.stop()
        engine.stop()
        try:
            job.leave(LEAVE_S if engine.error is None and not abort else 0.0)
        except Error:
            pass  # the job is left all the same; what failed before was raised where it happened
        connection.close()

    def _part(self):
        """Leaving is collective where a job can enter new views: a rank that is behind may still need this one's state."""
        if self._recovery is None or self._exchange is not None or self._engine is None or self._engine.error is not None:
            return
        self._engine.drain(LEAVE_S)
        self._recovery.closing = True
        try:
            self._recovery.call(lambda engine: engine.job.barrier(self._settings.timeout), None)
        except _recovery.Over:
            pass
        except Error as error:
            self._said.append(f"sluice: job {self.job}, rank {self.rank}: leaving: {error}")

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.close(abort=kind is not None)

    def __getstate__(self):
        return {"settings": self._settings, "counts": dict(self._stats.counts)}

    def __setstate__(self, saved):
        self._settings = saved["settings"]
        self._begin()
        self._stats.counts.update(saved["counts"])
        warnings.warn(f"sluice: the State of job {self.job} was restored without its connection and process group; it joins again, "
                      "with the default group, at its first use: that is collective. Parameter names: call attach() again",
                      SluiceWarning, stacklevel=2)


def _give_up(job):
    """Leaves a job that did not come up; its memory and its place would else be held until the process ends."""
    if job is None:
        return
    for end in (job.abort, lambda: job.leave(0.0)):
        try:
            end()
        except Error:
            pass


def _submit(engine, step, work, submit):
    """Starts a bucket. Where a Step holds it, a failure is the step's, else it is raised."""
    if step is None:
        submit()
        return
    step.take(work)
    if step.error is None:
        try:
            submit()
            return
        except Error as error:
            engine.error = engine.error or error
    work.error = step.error or engine.error
    Engine.deliver(work)


def _value_of(work, value):
    """What the future holds, or the exception that DDP raises out of backward(). Runs in Future.then(): an exception that
    is set on a future loses its text on its way through some versions of DDP, one raised here does not."""
    if work.error is not None:
        raise work.error
    return value()


@atexit.register
def _close_all():
    # A process that dies by an exception tells the other ranks, which else would wait for its next op. (An interactive one
    # has survived its exceptions.)
    dying = getattr(sys, "last_type", None) is not None and not hasattr(sys, "ps1")
    # close() can be collective: in one order on all ranks.
    for state in sorted(_states, key=lambda state: state.job):
        state.close(abort=dying)
