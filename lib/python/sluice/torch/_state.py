"""State: one rank's membership in a job, as the state object of a DDP communication hook."""
import atexit
import os
import sys
import threading
import warnings
import weakref

import torch

from .. import _abi, _core
from .._errors import Error, Forked, InvalidArgument
from . import _drift, _rendezvous, _settings, _sync
from ._engine import Engine, Work
from ._names import Names, part_tag
from ._sparse import densify, sparsify
from ._stats import Stats

TYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64"}
LEAVE_S = 5.0  # how long close() waits for open ops
_states = weakref.WeakSet()


class SluiceWarning(UserWarning):
    """Something that training survives and that somebody should know."""


class State:
    """Joins `job` through the node's daemon; collective: every rank of the process group makes one, at the same place.

    job             name of the job; one State per job and rank
    process_group   the ranks that meet (None: the default group); used for the rendezvous, not for gradients
    deadline        bound of one round: "auto" (the daemon's), or seconds. With op_class="exact": when to give up
    op_class        "consistent": bounded, all ranks apply the same bytes. "exact": complete, or an error; bit-equal
    fallback        None: errors are raised. ("allreduce" comes with version 0.2)
    timeout         seconds for the join, and for an op that gives no sign, before Timeout is raised
    socket          the daemon's socket; None: $SLUICE_SOCKET, else /run/sluice/sluice.sock
    max_bucket_bytes   largest op; larger buckets travel in parts. None: 64 MiB, or what the model needs
    arena_bytes     shared memory for buckets in flight. None: what the model needs, or the library's default
    model           the model or its DDP: gives parameters their names and sizes the memory (or state.attach(ddp) later)
    grad_scaler     the GradScaler of an AMP training, so that the daemon knows the loss scale
    on_incomplete   "resync": a round with holes warns and sets needs_resync. "ignore": it is only counted
    drift_every     samples drift() by itself at the begin of every so many backward passes, for report(); 0: never.
                    Needs the model

    Threads: hook calls come from one thread (DDP's); report(), recent() and the attributes may be used by any.
    """

    def __init__(self, job, process_group=None, deadline="auto", op_class="consistent", fallback=None, timeout=120.0,
                 socket=None, max_bucket_bytes=None, arena_bytes=None, model=None, grad_scaler=None,
                 on_incomplete="resync", drift_every=0):
        self._settings = _settings.make(job, deadline, op_class, fallback, timeout, socket, max_bucket_bytes, arena_bytes,
                                        on_incomplete, model, drift_every)
        self._begin()
        if model is not None:
            self._learn(model)
        self.grad_scaler = grad_scaler
        self._connect(process_group)

    def _begin(self):
        """What a new and an unpickled State have alike: everything but a connection."""
        self._stats, self._names = Stats(), Names()
        self._engine = self._job = self._connection = self._stager = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._said = []  # warnings of the completion thread, until the training thread comes by
        self._looked_for_ddp = False
        self._step_begins, self._loss_scale = True, 0.0
        self._model, self._passes = None, 0
        self.needs_resync = False
        self.grad_scaler = None
        self.closed = False

    def _connect(self, process_group):
        settings = self._settings
        rank, world_size = _rendezvous.group_facts(process_group)
        connection = card = key = problem = None
        try:
            connection = _core.Connection(settings.socket, min(settings.timeout, 10.0))
            card = connection.card(settings.job, rank, world_size)
            key = _core.generate_key() if rank == 0 else None
        except (Error, ImportError) as error:
            problem = str(error)
            if world_size == 1:
                raise
        try:
            cards, key = _rendezvous.agree(settings.job, card, {**settings.shared(), "names": self._names.known}, key,
                                           problem, process_group, settings.timeout)
            self._job = connection.join(settings.job, rank, world_size, cards, key, arena_bytes=settings.arena_bytes,
                                        max_op_bytes=settings.max_op_bytes, deadline=settings.deadline,
                                        timeout=settings.timeout)
            # What a node sends before another one has attached the job to its lanes is dropped there. A bounded first op
            # would then go on without it; an exact one is repaired until all are there.
            self._job.barrier(settings.timeout)
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        self._connection = connection
        self._engine = Engine(self._job, settings.op_class, settings.deadline, settings.timeout, self._stats, self._seen)
        _states.add(self)

    # --- What it is

    @property
    def job(self):
        return self._settings.job

    @property
    def rank(self):
        return self._job.rank if self._job is not None else -1

    @property
    def world_size(self):
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
        engine = self._ready()
        self._speak()
        if not self._looked_for_ddp:
            self._look_for_ddp(parameters)
        if self._step_begins and self._settings.drift_every:
            self._sample_drift()
        if tensor.is_sparse:
            return self._reduce_sparse(engine, tensor, parameters, is_last)
        dtype = TYPES.get(tensor.dtype)
        if dtype is None:
            raise InvalidArgument(f"sluice: gradients of type {tensor.dtype} ({self._names.describe(parameters)}) cannot be "
                                  f"averaged; {', '.join(sorted(TYPES.values()))} can")
        tag = self._names.tag(parameters, tensor)
        return self._start(engine, tensor, tensor, tag, parameters, is_last, lambda: tensor)

    def _reduce_sparse(self, engine, tensor, parameters, is_last):
        if self._stats.counts["densified"] == 0:
            warnings.warn("sluice: sparse gradients are sent as dense tensors in this version "
                          f"({self._names.describe(parameters)}: {tuple(tensor.shape)}); their sparse exchange comes with a later "
                          "one. sparse=False saves the conversion", SluiceWarning, stacklevel=3)
        self._stats.add("densified")
        if tensor.dtype not in TYPES:
            raise InvalidArgument(f"sluice: sparse gradients of type {tensor.dtype} cannot be averaged")
        tag = self._names.tag(parameters, tensor)
        dense = densify(tensor)
        return self._start(engine, dense, dense, tag, parameters, is_last,
                           lambda: sparsify(dense, tensor.shape, tensor.sparse_dim()))

    def _start(self, engine, source, target, tag, parameters, is_last, value):
        """Sends flat tensor `source`; the mean ends up in `target`, and the future completes with value()."""
        nbytes = source.numel() * source.element_size()
        cuts = engine.parts_of(nbytes)
        tags = [part_tag(tag, index, len(cuts)) for index in range(len(cuts))]
        described = self._names.describe(parameters)
        dtype = TYPES[source.dtype]
        scale = self._scale(is_last)
        self._stats.add("buckets")
        if source.is_cuda:
            return self._start_cuda(engine, source, target, (dtype, tags, cuts, described, scale), value)
        host = source.detach()
        if not host.is_contiguous():
            host = host.contiguous()
        done = torch.futures.Future()

        def finish(work):
            if work.error is None and host.data_ptr() != target.data_ptr():
                target.copy_(host.view_as(target))
            done.set_result(None)

        work = Work(host.data_ptr(), nbytes, finish, keep=(host, target))
        engine.submit(work, source.numel(), dtype, tags, cuts, described, scale)
        return done.then(lambda _: _value_of(work, value))

    def _start_cuda(self, engine, source, target, what, value):
        from ._cuda import Stager
        if self._stager is None:
            self._stager = Stager(source.device, lambda submission, staging: submission(staging),
                                  lambda submission, error: submission(None, error))
        stager = self._stager
        done = torch.futures.Future(devices=[source.device])
        holder = Work(0, source.numel() * source.element_size(), None)
        dtype, tags, cuts, described, scale = what

        def submission(staging, error=None):
            def finish(work):
                if work.error is None:
                    stager.deliver(staging, target, done)
                else:
                    done.set_result(None)

            if error is not None:
                engine.error = engine.error or error
                holder.error = engine.error
                if not done.done():
                    done.set_result(None)
                return
            holder.host, holder.deliver, holder.keep = staging.data_ptr(), finish, (staging, target)
            engine.submit(holder, staging.numel(), dtype, tags, cuts, described, scale)

        stager.stage(source.detach().view(-1), submission)
        return done.then(lambda _: _value_of(holder, value))

    def _scale(self, is_last):
        """The loss scale; asked for once per backward, because a GPU's GradScaler synchronises for it."""
        if self._step_begins and self.grad_scaler is not None:
            self._loss_scale = float(self.grad_scaler.get_scale())
        self._step_begins = is_last
        return self._loss_scale

    def _ready(self):
        if self._pid != os.getpid():
            raise Forked(f"sluice: the State of job {self.job} belongs to the parent process; make one in the child")
        if self.closed:
            raise InvalidArgument(f"sluice: the State of job {self.job} was closed")
        if self._engine is None:
            self._connect(None)  # unpickled
        if self._engine.error is not None:
            raise self._engine.error
        return self._engine

    # --- What is seen on the way

    def _seen(self, part, report):
        """Completion thread: a result came in."""
        if report.status_code not in (_abi.INCOMPLETE, _abi.DIVERGED) or self._settings.on_incomplete == "ignore":
            return
        self.needs_resync = True
        count = self._stats.counts["incomplete"]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
            missing = report.blocks_expected - report.blocks_received
            self._said.append(
                f"sluice: job {self.job}, rank {self.rank}, op {report.op}, tag {part.tag:016x} ({part.parameters}): "
                f"{missing} of {report.blocks_expected} blocks did not come in time and are zero on this rank only "
                f"({count} such ops so far){'; ' + report.text if report.text else ''}. This rank's parameters now differ from "
                "the others': call state.resync(model, optimizer) on all ranks")

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
        _received, _skipped, _uncounted (own, not in the sum), _repaired; approximated_ratio (blocks of results that are
        missing here, and own blocks that are in no sum, of those expected); late_ops, late_nodes,
        worst_nodes {node: how often it came last}; waits; resyncs, needs_resync; densified; tags {tag: parameters,
        elements, type, ops, incomplete, round_ms}; drift {last, max, samples}: what drift() saw."""
        self._speak()
        facts = {"job": self.job, "rank": self.rank, "world_size": self.world_size,
                 "nodes": self._job.nodes if self._job is not None else 0, "op_class": self._settings.op_class,
                 "needs_resync": self.needs_resync, "error": str(self.error) if self.error else None}
        return {**facts, **self._stats.report()}

    def recent(self):
        """The last 512 ops: op, tag, bytes, status, submitted and finished (time.monotonic()), wait_ms, push_ms, total_ms,
        repaired, worst_node."""
        return self._stats.recent()

    # --- Collective calls beside the gradients

    def resync(self, model, optimizer=None, grad_scaler=None, force=False):
        """Collective. If any rank needs it (or force), copies parameters, buffers, the optimizer's state and the
        GradScaler's from the lowest rank that does not, exactly. Returns whether it did. When nobody needs it, it costs
        one small round: call it every some steps, on all ranks at the same step."""
        done = _sync.resync(self._ready(), self.needs_resync, self._stats.counts["incomplete"], model, optimizer,
                            grad_scaler if grad_scaler is not None else self.grad_scaler, force)
        if done:
            self.needs_resync = False
            self._stats.add("resyncs")
        self._speak()
        return done

    def sync_buffers(self, model, root=0):
        """Collective: the model's buffers (BatchNorm statistics ...) of rank `root` to all, exactly. Returns the bytes."""
        return _sync.broadcast(self._ready(), list(model.buffers()), root)

    def sync_parameters(self, model, root=0):
        """Collective: the model's parameters of rank `root` to all, exactly. Returns the bytes."""
        return _sync.broadcast(self._ready(), [p.data for p in model.parameters()], root)

    def parameter_distance(self, model):
        """Collective: the largest distance of a rank's parameters from rank 0's, relative to the norm of rank 0's; equal on
        all ranks. 0.0 means bit-equal up to the sign of zero. Sends the whole model once."""
        return _sync.parameter_distance(self._ready(), model)

    def drift(self, model):
        """Collective: an estimate of parameter_distance() from 8 kB a rank, about 4 % off; 0.0 if and only if all ranks'
        parameters are equal bit by bit. report()["drift"] keeps the last one and the largest. Reads all parameters once."""
        engine = self._ready()
        sketches = _sync.gather(engine, _drift.Sketch(model.parameters()).pack())
        value = _drift.distance([_drift.Sketch.unpack(sketch) for sketch in sketches])
        self._stats.drift(value)
        return value

    def _sample_drift(self):
        """At the begin of a backward pass, where the parameters are those after the last optimizer step on every rank."""
        self._passes += 1
        model = self._model() if self._model is not None else None
        if model is not None and self._passes % self._settings.drift_every == 0:
            self.drift(model)

    def barrier(self, timeout=None):
        """Collective: ends on no rank before every rank has called it."""
        self._ready().job.barrier(timeout)

    # --- The end

    def close(self, abort=False):
        """Leaves the job; any number of times. abort: ends it on all ranks, so that they need not wait for this one."""
        with self._lock:
            engine, job, connection, stager = self._engine, self._job, self._connection, self._stager
            already, self.closed = self.closed, True
        if already or engine is None or self._pid != os.getpid():
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


def _value_of(work, value):
    """What the future holds, or the exception that DDP raises out of backward(). Runs in Future.then(): an exception that
    is set on a future loses its text on its way through some versions of DDP, one raised here does not."""
    if work.error is not None:
        raise work.error
    return value()


@atexit.register
def _close_all():
    # A process that dies by an exception tells the other ranks, which else would wait for its next op.
    dying = getattr(sys, "last_type", None) is not None
    for state in list(_states):
        state.close(abort=dying)
