"""What a State does when its job failed: a new view of the job, or DDP's own allreduce, on all ranks at the same step.

Each collective call has a position (a backward pass is one call). When the job fails, ranks may stand at different
positions: one has the results of a step already, another has not. All go on from the furthest of them, the target. A rank
that stands before it runs through its calls up to there without exchange (its gradients are zero); at the target all ranks
enter the new view together and take parameters, buffers and optimizer state from one that was there. The gradients of the
target step are zero on all ranks: what some of them had already got of it is dropped on all.

So that no rank keeps a part of a step that the others drop, the results of a backward pass are handed to DDP together,
when the last of them is there. DDP waits for all of them anyway.
"""
import ctypes
import threading
import time

import torch
import torch.distributed as dist

from .. import _core
from .._errors import Error, InvalidArgument, Mismatch, PeerLost
from . import _rendezvous, _sync
from ._views import StoreGone

ATTEMPTS = 3  # to enter a view, for one failure; the daemons' restarts have their own bound, rejoin_timeout
RETRY_S = 0.1  # between two looks for a daemon that is being restarted


class Over(Exception):
    """The job ended in peace while this rank was about to leave it."""


class Step:
    """One backward pass whose buckets are handed to DDP together. The hook's thread takes and closes; results arrive on the
    completion thread. Whoever brings the last piece ends the step: if something failed, by `recover(error)`, which returns
    when this step counts for nothing on any rank, or raises what training shall fail with."""

    def __init__(self, recover, error=None):
        self._recover = recover
        self.error = error  # the first failure
        self._lock = threading.Lock()
        self._works, self._open, self._closed = [], set(), False

    def take(self, work):
        with self._lock:
            self._works.append((work, work.deliver))
            self._open.add(id(work))
        work.deliver = self.arrived

    def arrived(self, work):
        with self._lock:
            if id(work) not in self._open:
                return
            self._open.discard(id(work))
            self.error = self.error or work.error
            ends = self._closed and not self._open
        if ends:
            self._end()

    def close(self):
        with self._lock:
            self._closed = True
            ends = not self._open
        if ends:
            self._end()

    def _end(self):
        failure = None
        if self.error is not None:
            try:
                self._recover(self.error)
            except BaseException as error:  # pylint: disable=broad-except
                failure = error
        for work, finish in self._works:
            if failure is None and self.error is not None and work.host:
                ctypes.memset(work.host, 0, work.nbytes)
            work.error = failure
            work.void = self.error is not None
            finish(work)


class Recovery:
    """Of one State. Training thread and completion thread, one at a time."""

    def __init__(self, state, views, key, optimizer):
        self._state, self.views, self._key, self.optimizer = state, views, key, optimizer
        self.position = 0  # of the call that goes on or was made last
        self.plan = None  # a record that this rank has not come to yet
        self.closing = False  # State.close() goes on
        self.step = None
        self._clean = True  # parameters are not half overwritten
        self._lock = threading.RLock()

    def model(self):
        return self._state._model() if self._state._model is not None else None

    # --- Positions

    def begin(self):
        self.position += 1
        return self.position

    def bucket(self, begins):
        """The Step that the hook's bucket belongs to, or None when this step is run through without exchange."""
        if begins:
            position = self.begin()
            if self.plan is not None and position < self.plan["target"]:
                self._state._stats.add("steps_lost")
                self.step = None
            else:
                waits = Error("sluice: the ranks meet in a new view") if self.plan is not None else None
                self.step = Step(lambda error: self._lose_step(error, position), waits)
        return self.step

    def _lose_step(self, error, position):
        self.recover(error, position)
        self._state._stats.add("steps_lost")

    def call(self, function, skipped):
        """A collective call beside the gradients: function(engine), repeated in the new view when the old one failed in it;
        `skipped` is the value where the others have done it already."""
        position = self.begin()
        while True:
            if self.plan is not None:
                if position >= self.plan["target"]:
                    self.recover(None, position)
                else:
                    return skipped
            try:
                return function(self._state._ready())
            except Error as error:
                if self.final(error):
                    raise
                self.recover(error, position)

    @staticmethod
    def final(error):
        """Errors of the caller's own; a new view would not help."""
        return isinstance(error, (InvalidArgument, Mismatch))

    # --- The way

    def recover(self, error, position):
        """Returns when this rank may go on from `position`, whose call then counts for nothing (a step) or is made again.
        Raises when training must fail."""
        with self._lock:
            try:
                self._recover(error, position)
            except StoreGone as gone:
                first = error or self._state.error
                raise PeerLost(f"sluice: job {self._state.job}, rank {self.views.rank}: PEER_LOST: the rendezvous store is gone "
                               f"({gone}), so the ranks cannot agree on a new view; the process that hosts it (rank 0, or the "
                               f"launcher's agent) has died or cannot be reached. First sign: {first}",
                               self._state.job, self.views.rank) from None

    def _recover(self, error, position):
        attempts = 0
        while True:
            if self.plan is None:
                if self.final(error) and not self._state._settings.fallback:
                    raise error
                self.plan = self._agree(error, position, attempts)
            if position < self.plan["target"]:
                return
            plan, self.plan = self.plan, None
            try:
                self._enter(plan)
                return
            except (Error, TimeoutError, RuntimeError) as problem:
                if isinstance(problem, InvalidArgument):
                    raise  # the same words on all ranks, by the record
                error = problem
                attempts += 1
            self._warn(f"sluice: job {self._state.job}, rank {self.views.rank}: could not enter view "
                       f"{self.views.generation}: {error}")

    def _agree(self, error, position, attempts):
        state = self._state
        state._drop()
        self.views.call()
        unusable = None
        if attempts >= ATTEMPTS:
            unusable = f"{attempts} attempts failed, the last: {error}"
        elif self.final(error):
            unusable = str(error)
        elif self.optimizer is None or self.model() is None:
            unusable = f"{error} (State(model=..., optimizer=...) lets a job go on after that)"
        else:
            unusable = self._await_daemon()
        vote = {"position": position, "ops": state._stats.counts["ops"], "clean": self._clean, "holes": state.needs_resync,
                "unusable": unusable}
        record = self.views.agree(vote, state._settings.timeout)
        if record is None:
            raise Error(f"sluice: job {state.job}, rank {self.views.rank}: no new view within timeout={state._settings.timeout:g} "
                        f"s; ranks {self.views.silent()} live and did not come to it. First sign: {error}")
        if record["mode"] == "over":
            if self.closing:
                raise Over()
            raise PeerLost(f"sluice: job {state.job}, rank {self.views.rank}: PEER_LOST: ranks {record['lost']} have closed their "
                           "State, this one has not; all ranks must make the same calls", state.job, self.views.rank)
        if record["mode"] == "fail":
            raise self._failure(record, error)
        if self.views.rank not in record["members"]:
            raise PeerLost(f"sluice: job {state.job}, rank {self.views.rank}: the other ranks went on without this one, which did "
                           f"not answer in time (view {record['generation']})", state.job, self.views.rank)
        return record

    def _failure(self, record, error):
        state = self._state
        where = f"sluice: job {state.job}, rank {self.views.rank}"
        if not record["lost"]:
            return Error(f"{where}: the job cannot go on ({record['why']}). First sign: {error}", getattr(error, "code", "FAILED"))
        lost = ", ".join(self.views.describe(rank) for rank in record["lost"])
        return PeerLost(f"{where}: PEER_LOST: {lost} did not answer the call for a new view; {record['why']}. First sign: {error}",
                        state.job, self.views.rank)

    def _await_daemon(self):
        """A connection to this node's daemon, which may be on its way up. Returns None, or why there is none."""
        state = self._state
        end = time.monotonic() + state._settings.rejoin_timeout
        while True:
            try:
                state._connection = _core.Connection(state._settings.socket, 5.0)
                return None
            except Error as error:
                if time.monotonic() > end:
                    return f"its daemon did not come back within rejoin_timeout={state._settings.rejoin_timeout:g} s: {error}"
            time.sleep(RETRY_S)

    # --- Into the new view

    def _enter(self, plan):
        state, views = self._state, self.views
        before = len(views.members)
        views.members = plan["members"]
        state._stats.add("carry_dropped", state._carry.forget_due())
        if plan["mode"] == "allreduce":
            return self._fall_back(plan)
        settings = state._settings
        rank, world = views.members.index(views.rank), len(views.members)
        card = state._connection.card(settings.job, rank, world, generation=plan["generation"])
        # A rank that was behind runs through its steps before it comes here.
        cards = views.gather("card", card.hex(), settings.timeout)
        job = state._connection.join(settings.job, rank, world, [bytes.fromhex(card) for card in cards], self._key,
                                     arena_bytes=settings.arena_bytes, max_op_bytes=settings.max_op_bytes,
                                     deadline=settings.deadline, timeout=settings.rejoin_timeout,
                                     generation=plan["generation"])
        state._take_job(job)
        job.barrier(settings.rejoin_timeout)
        self._copy(state._engine, views.members.index(plan["root"]))
        state._stats.add("rejoins")
        lost = "" if world == before else f" without ranks {plan['lost']}: {world} ranks, means are over these"
        self._warn(f"sluice: job {settings.job}: all ranks entered view {plan['generation']}{lost}, with the parameters of rank "
                   f"{plan['root']}; the gradients of one step were dropped")
        return None

    def _copy(self, engine, root):
        """Parameters, buffers, optimizer and scaler of rank `root` of the view."""
        state = self._state
        mine = engine.job.rank == root
        self._clean = mine
        _sync.copy_all(engine, self.model(), self.optimizer, state.grad_scaler, root)
        self._clean = True
        state.needs_resync = False

    def _fall_back(self, plan):
        state, views = self._state, self.views
        exchange = _sync.GroupExchange(state._process_group)
        if self.model() is not None and self.optimizer is not None:
            self._copy(exchange, plan["root"])
        elif not plan["alike"]:
            raise InvalidArgument(f"sluice: job {state.job}: ranks stood at different steps when it failed ({plan['why']}); "
                                  "fallback='allreduce' then needs State(model=..., optimizer=...)")
        state._fall_back(plan["why"], exchange)
        if views.members and views.rank == views.members[0]:
            self._warn_fallback(plan["why"])

    def _warn_fallback(self, why):
        self._warn(f"sluice: job {self._state.job}: gradients go over DDP's own allreduce from now on, on all ranks, because {why}")

    def _warn(self, text):
        self._state._said.append(text)


def meet(state, process_group, problem):
    """Whether all ranks got as far as this; else the words of those who did not, the same on all ranks."""
    answers = _rendezvous.meet(state.job, {"problem": problem}, process_group, state._settings.timeout)
    return "; ".join(f"rank {rank}: {answer['problem']}" for rank, answer in enumerate(answers) if answer["problem"])


def allreduce(tensor, process_group, carry=None, layout=None, scale=0.0):
    """The mean of a bucket by the process group, as DDP's own allreduce hook makes it; a future of the tensor. What `carry`
    (a Carry, or None) has for the parameters of the bucket, a Layout, goes along: what this rank owes into its
    contribution, what is due to all into the result."""
    group = process_group if process_group is not None else dist.group.WORLD
    if carry is not None:
        carry.add_owed(layout, tensor, scale)
    tensor.div_(dist.get_world_size(group))

    def finish(done):
        mean = done.value()[0]
        if carry is not None:
            carry.add_due(layout, mean, scale)
        return mean
    return dist.all_reduce(tensor, group=group, async_op=True).get_future().then(finish)


def nothing(tensor):
    """A future of the bucket with zeros: what a step that is dropped gets."""
    done = torch.futures.Future(devices=[tensor.device]) if tensor.is_cuda else torch.futures.Future()
    if tensor.is_sparse:
        shape = (tensor.sparse_dim(), 0)
        tensor = torch.sparse_coo_tensor(torch.empty(shape, dtype=torch.int64, device=tensor.device),
                                         tensor._values()[:0], tensor.shape)._coalesced_(True)
    else:
        tensor.zero_()
    done.set_result(tensor)
    return done

