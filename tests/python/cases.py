"""What the ranks of the tests do; each function runs on every rank at once. Asserts here fail on the rank that sees it."""
import contextlib
import os
import pickle
import time
import warnings
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import sluice
import sluice.torch

# DDP fills its first bucket up to 1 MB whatever bucket_cap_mb says; the models here are smaller than that.
dist._DEFAULT_FIRST_BUCKET_BYTES = 1024

# Deadline of the consistent rounds whose result must be complete: the machine may be busy with other tests.
PATIENT = 20.0


@contextlib.contextmanager
def caught(category=sluice.torch.SluiceWarning):
    """The list of warnings of a category that came in the block."""
    found = []
    with warnings.catch_warnings(record=True) as all_of_them:
        warnings.simplefilter("always")
        yield found
    found.extend(str(entry.message) for entry in all_of_them if issubclass(entry.category, category))


class Integers(nn.Module):
    """A model whose gradients are known exactly: forward is the sum of parameter x constant, so each gradient is the
    constant. Integer values make every order of summation exact."""

    def __init__(self, shapes, dtype=torch.float32):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes)

    def forward(self, constants):
        return sum((weight * constant).sum() for weight, constant in zip(self.weights, constants))


def constants(shapes, rank, step, dtype=torch.float32, limit=8):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randint(-limit, limit, shape, generator=generator).to(dtype) for shape in shapes]


def mean_of_constants(shapes, world, step, dtype=torch.float32):
    parts = [constants(shapes, rank, step, dtype) for rank in range(world)]
    return [sum(part[i].double() for part in parts).div(world).to(dtype) for i in range(len(shapes))]


SHAPES = [(70, 30), (30,), (1000, 7), (5,), (64, 64)]


def integers(rank, world, job, op_class="exact", dtype="float32", bucket_mb=25.0, steps=4, view=False, max_bucket_bytes=None,
             deadline=PATIENT):
    """Bit-exact means over several steps: before and after DDP rebuilds its buckets."""
    dtype = getattr(torch, dtype)
    model = Integers(SHAPES, dtype)
    # Gloo of 1.13 cannot broadcast bfloat16, which DDP's constructor does once; the parameters are equal already.
    with mock.patch("torch.nn.parallel.distributed._sync_module_states") if dtype == torch.bfloat16 else \
            contextlib.nullcontext():
        ddp = DDP(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=view)
    with sluice.torch.State(job, op_class=op_class, max_bucket_bytes=max_bucket_bytes, deadline=deadline) as state:
        ddp.register_comm_hook(state, sluice.torch.hook)
        for step in range(steps):
            ddp.zero_grad()
            ddp(constants(SHAPES, rank, step, dtype)).backward()
            for weight, expected in zip(model.weights, mean_of_constants(SHAPES, world, step, dtype)):
                assert torch.equal(weight.grad, expected), f"step {step}, shape {tuple(weight.shape)}"
        report = state.report()
    return report


def mlp(seed=0, batch_norm=False):
    torch.manual_seed(seed)
    layers = [nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)]
    return nn.Sequential(*(layer for layer in layers if batch_norm or not isinstance(layer, nn.BatchNorm1d)))


def batch(rank, step, size=16):
    generator = torch.Generator().manual_seed(77 * step + rank)
    return torch.randn(size, 20, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def train(ddp, rank, steps, optimizer=None, offset=0):
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        inputs, labels = batch(rank, step + offset)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(inputs), labels).backward()
        optimizer.step()
    return optimizer


def like_gloo(rank, world, job, op_class="exact", **options):
    """The same training with DDP's own allreduce and with the hook; the largest relative difference of a parameter."""
    batch_norm = options.pop("batch_norm", False)
    own, hooked = (DDP(mlp(batch_norm=batch_norm), broadcast_buffers=False, **options) for _ in range(2))
    train(own, rank, 6)
    with sluice.torch.State(job, op_class=op_class, model=hooked, deadline=PATIENT) as state:
        hooked.register_comm_hook(state, sluice.torch.hook)
        train(hooked, rank, 6)
        distance, report = state.parameter_distance(hooked), state.report()
    worst = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(own.parameters(), hooked.parameters()))
    return {"worst": worst, "distance": distance, "uncounted": report["blocks_uncounted"], "skipped": report["blocks_skipped"],
            "incomplete": report["incomplete"]}


def unused(rank, world, job):
    """find_unused_parameters: each rank leaves another branch out, and one branch is used by nobody."""
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

        def forward(self, x, which):
            return self.branches[which](x)

    def grads(ddp):
        for step in range(3):
            ddp.zero_grad()
            torch.manual_seed(10 * step + rank)
            ddp(torch.randn(4, 6), rank % 2).sum().backward()
        return [None if p.grad is None else p.grad.clone() for p in ddp.parameters()]

    expected = grads(DDP(Branches(), find_unused_parameters=True))
    ddp = DDP(Branches(), find_unused_parameters=True)
    with sluice.torch.State(job, op_class="exact") as state:
        ddp.register_comm_hook(state, sluice.torch.hook)
        got = grads(ddp)
    assert [g is None for g in got] == [e is None for e in expected]
    assert all(e is None or torch.allclose(g, e, rtol=1e-6) for g, e in zip(got, expected))


def no_sync(rank, world, job):
    """Accumulation: no op under no_sync, and the sum of all batches afterwards."""
    ddp = DDP(mlp())
    with sluice.torch.State(job, op_class="exact") as state:
        ddp.register_comm_hook(state, sluice.torch.hook)
        train(ddp, rank, 2)
        ops = state.report()["ops"]
        ddp.zero_grad()
        with ddp.no_sync():
            for step in range(2):
                nn.functional.cross_entropy(ddp(batch(rank, step)[0]), batch(rank, step)[1]).backward()
        assert state.report()["ops"] == ops
        own = [p.grad.clone() for p in ddp.parameters()]
        inputs, labels = batch(rank, 2)
        nn.functional.cross_entropy(ddp(inputs), labels).backward()
        assert state.report()["ops"] > ops
    reference = mlp()
    reference.load_state_dict(ddp.module.state_dict())
    for step in range(3):
        nn.functional.cross_entropy(reference(batch(rank, step)[0]), batch(rank, step)[1]).backward()
    for parameter, accumulated, got in zip(reference.parameters(), own, ddp.parameters()):
        mean = parameter.grad.clone()
        dist.all_reduce(mean)
        assert torch.allclose(got.grad, mean / world, rtol=1e-4, atol=1e-6)


def rebuilt(rank, world, job):
    """Several buckets; DDP builds them anew after the first iteration, in another order."""
    ddp = DDP(mlp(), bucket_cap_mb=0.001)
    seen = []
    with sluice.torch.State(job, op_class="exact", model=ddp) as state:
        ddp.register_comm_hook(state, sluice.torch.hook)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        for step in range(5):
            before = {tag: entry["ops"] for tag, entry in state.report()["tags"].items()}
            train(ddp, rank, 1, optimizer, step)
            after = state.report()["tags"]
            seen.append(sorted(tag for tag in after if after[tag]["ops"] > before.get(tag, 0)))
        distance = state.parameter_distance(ddp)
    return {"seen": seen, "distance": distance, "tags": {tag: entry["parameters"] for tag, entry in after.items()}}


def sparse(rank, world, job):
    """A sparse embedding beside dense layers: one warning, the same gradient as a dense one, exactly the touched rows."""
    class Bag(nn.Module):
        def __init__(self, is_sparse):
            super().__init__()
            torch.manual_seed(0)
            self.bag = nn.EmbeddingBag(50, 4, sparse=is_sparse, mode="sum")
            self.out = nn.Linear(4, 2)

        def forward(self, x):
            return self.out(self.bag(x, torch.arange(6) * (len(x) // 6)))

    def words(step):
        # Rank 1 has no row at all in step 2.
        generator = torch.Generator().manual_seed(5 * step + rank)
        return torch.randint(0, 50, (0 if rank == 1 and step == 2 else 18,), generator=generator)

    dense = DDP(Bag(False))
    ddp = DDP(Bag(True))
    with caught() as warned:
        with sluice.torch.State(job, op_class="exact") as state:
            ddp.register_comm_hook(state, sluice.torch.hook)
            for step in range(4):
                touched = torch.zeros(50)
                for net in (dense, ddp):
                    net.zero_grad(set_to_none=True)
                    net(words(step)).sum().backward()
                touched[words(step)] = 1
                dist.all_reduce(touched)
                grad = ddp.module.bag.weight.grad
                assert grad.is_sparse and torch.allclose(grad.to_dense(), dense.module.bag.weight.grad, rtol=1e-6)
                assert torch.equal(grad.coalesce().indices()[0], touched.nonzero().view(-1))
            report = state.report()
    return {"warnings": warned, "densified": report["densified"]}


def uneven(rank, world, job):
    """join(): a rank that has run out of inputs takes part with zeros."""
    ddp = DDP(mlp())
    with sluice.torch.State(job, op_class="exact") as state:
        ddp.register_comm_hook(state, sluice.torch.hook)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        with ddp.join():
            train(ddp, rank, 3 + 2 * rank, optimizer)
        return {"ops": state.report()["ops"], "distance": state.parameter_distance(ddp)}


def reported(rank, world, job):
    ddp = DDP(mlp(), bucket_cap_mb=0.001)
    with sluice.torch.State(job, model=ddp, deadline=PATIENT) as state:
        ddp.register_comm_hook(state, sluice.torch.hook)
        train(ddp, rank, 4)
        return {"report": state.report(), "recent": state.recent()}


def holes(rank, world, job):
    """An INCOMPLETE round on rank 1 (as the daemon would report it): a warning, needs_resync, and resync() that copies
    parameters, buffers and Adam's state from rank 0."""
    ddp = DDP(mlp(batch_norm=True), broadcast_buffers=False)
    optimizer = torch.optim.Adam(ddp.parameters(), 0.01)
    with caught() as warned:
        with sluice.torch.State(job, op_class="consistent", model=ddp, deadline=PATIENT) as state:
            ddp.register_comm_hook(state, sluice.torch.hook)
            assert state.resync(ddp, optimizer) is False  # nobody needs it
            train(ddp, rank, 2, optimizer)
            job_wait = state._engine.job.wait_result

            def with_holes(op, timeout, check):
                report = job_wait(op, timeout, check)
                report.status_code, report.status, report.blocks_received = 2, "INCOMPLETE", report.blocks_expected - 1
                report.text = "owner node1 sent nothing"
                return report

            if rank == 1:
                state._engine.job.wait_result = with_holes
            train(ddp, rank, 1, optimizer, 2)
            if rank == 1:
                state._engine.job.wait_result = job_wait
                with torch.no_grad():  # what holes would have done
                    for parameter in ddp.parameters():
                        parameter.mul_(1.5)
                    optimizer.state[next(iter(ddp.parameters()))]["exp_avg"].add_(1)
            needed, distance = state.needs_resync, state.parameter_distance(ddp)
            done = state.resync(ddp, optimizer)
            train(ddp, rank, 2, optimizer, 3)
            after = state.parameter_distance(ddp)
            report = state.report()
            moments = torch.cat([optimizer.state[p]["exp_avg"].view(-1) for p in ddp.parameters()])
            buffers = torch.cat([b.double().view(-1) for b in ddp.buffers()])
            state.sync_buffers(ddp)
            same = torch.cat([b.double().view(-1) for b in ddp.buffers()])
    return {"warnings": warned, "needed": needed, "distance": distance, "done": done, "after": after,
            "incomplete": report["incomplete"], "ratio": report["approximated_ratio"], "resyncs": report["resyncs"],
            "still": report["needs_resync"], "moments": moments.tolist(), "buffers": buffers.tolist(), "same": same.tolist()}


def buffers(rank, world, job):
    """DDP with broadcast_buffers warns; sync_buffers copies rank 0's, integers too."""
    out = {}
    for name, options in (("default", {}), ("off", {"broadcast_buffers": False})):
        model = mlp(batch_norm=True)
        ddp = DDP(model, **options)
        for how in ("attach", "first call"):
            with caught() as warned:
                with sluice.torch.State(f"{job}-{name}-{how[:5]}") as state:
                    if how == "attach":
                        state.attach(ddp)
                    else:
                        ddp.register_comm_hook(state, sluice.torch.hook)
                        train(ddp, rank, 2)
            out[f"{name} {how}"] = warned
    model[1].num_batches_tracked.fill_(100 + rank)
    model[1].running_mean.fill_(float(rank))
    with sluice.torch.State(job) as state:
        sent = state.sync_buffers(ddp)
    assert int(model[1].num_batches_tracked) == 100 and float(model[1].running_mean.sum()) == 0.0
    assert sent == 32 * 4 * 2 + 8
    return out


def pickled(rank, world, job):
    """A State in a checkpoint: restored without a connection, it joins again at its first use."""
    ddp = DDP(mlp())
    state = sluice.torch.State(job, op_class="exact", model=ddp)
    ddp.register_comm_hook(state, sluice.torch.hook)
    train(ddp, rank, 2)
    ops = state.report()["ops"]
    saved = pickle.dumps(state)
    state.close()
    with caught() as warned:
        restored = pickle.loads(saved)
    assert restored.report()["ops"] == ops and restored.rank == -1
    other = DDP(mlp())
    other.register_comm_hook(restored, sluice.torch.hook)
    train(other, rank, 2)
    assert restored.report()["ops"] == 2 * ops and restored.rank == rank
    distance = restored.parameter_distance(other)
    restored.close()
    return {"warnings": warned, "distance": distance}


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((20,), float(index)), index % 4


def workers(rank, world, job):
    """Forked DataLoader workers come and go while the State lives; a child that uses it gets a clean error."""
    ddp = DDP(mlp())
    with sluice.torch.State(job, op_class="exact") as state:
        ddp.register_comm_hook(state, sluice.torch.hook)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
        for _ in range(2):
            for inputs, labels in torch.utils.data.DataLoader(Numbers(), batch_size=8, num_workers=2):
                optimizer.zero_grad()
                nn.functional.cross_entropy(ddp(inputs), labels).backward()
                optimizer.step()
        child = os.fork()
        if child == 0:
            code = 3
            try:
                state.parameter_distance(ddp)
            except sluice.Forked:
                try:
                    state._job.barrier(1.0)
                except sluice.Forked:
                    state.close()  # harms nothing
                    code = 0
            finally:
                os._exit(code)
        status = os.waitpid(child, 0)[1]
        train(ddp, rank, 1, optimizer)
        return {"child": os.waitstatus_to_exitcode(status), "distance": state.parameter_distance(ddp)}


def two_states(rank, world, job):
    """Two jobs at a time (two models, as in a GAN), their backward passes interleaved."""
    nets = [DDP(mlp(seed)) for seed in (1, 2)]
    with sluice.torch.State(job + "-a", op_class="exact") as a, sluice.torch.State(
            job + "-b", op_class="consistent", deadline=PATIENT) as b:
        for net, state in zip(nets, (a, b)):
            net.register_comm_hook(state, sluice.torch.hook)
        for step in range(3):
            for net in nets:
                train(net, rank, 1, offset=step)
        return [a.parameter_distance(nets[0]), b.parameter_distance(nets[1])]


def broken_finish(rank, world, job):
    """What goes wrong behind a result comes out of backward(); the first comes before anything was sent."""
    def add_due(layout, tensor, scale):
        raise ValueError("behind the result")

    told = []
    for attempt in ("the carry of another model", "an error of ours"):
        ddp = DDP(mlp())  # a DDP is of no use after an error
        with sluice.torch.State(f"{job}-{len(told)}", op_class="exact", model=ddp) as state:
            ddp.register_comm_hook(state, sluice.torch.hook)
            if attempt == "an error of ours":
                state._carry.add_due = add_due
            else:
                state.load_state_dict({"carry": {next(iter(ddp.module.state_dict())): torch.ones(3)}})
            try:
                train(ddp, rank, 1)
            except Exception as error:  # pylint: disable=broad-except
                told.append(str(error))
    return told


def two_recovering(rank, world, job):
    """Two States that nobody closes: the exit of the process does, in one order on all ranks."""
    nets = [DDP(mlp(seed)) for seed in (1, 2)]
    states = [sluice.torch.State(job + suffix, model=net, optimizer=torch.optim.SGD(net.parameters(), 0.1), timeout=20.0)
              for net, suffix in zip(nets, ("-b", "-a"))]
    for net, state in zip(nets, states):
        net.register_comm_hook(state, sluice.torch.hook)
        train(net, rank, 1)
    order = list(reversed(states)) if rank == 1 else states  # a set of weak references has any
    began = time.monotonic()
    with mock.patch.object(sluice.torch._state, "_states", order):
        sluice.torch._state._close_all()
    return [time.monotonic() - began, [said for state in states for said in state._said]]


def scaled(rank, world, job):
    """The loss scale of a GradScaler is asked for once per backward and told with each op."""
    class Scaler:
        asked = 0

        def get_scale(self):
            Scaler.asked += 1
            return 1024.0

        def is_enabled(self):
            return True

    ddp = DDP(mlp(), bucket_cap_mb=0.001)
    with sluice.torch.State(job, grad_scaler=Scaler()) as state:
        told = []
        submit = state._engine.job.submit_allreduce
        state._engine.job.submit_allreduce = lambda *a: told.append(a[-1]) or submit(*a)
        ddp.register_comm_hook(state, sluice.torch.hook)
        train(ddp, rank, 3)
    return {"asked": Scaler.asked, "told": sorted(set(told)), "ops": len(told)}


def smoke(rank, world, job, op_class):
    """Ten classes of noisy 8x8 patterns, as digits are: learns them as well as with DDP's own allreduce."""
    generator = torch.Generator().manual_seed(4)
    patterns = torch.rand(10, 64, generator=generator)
    labels = torch.randint(0, 10, (1600,), generator=generator)
    images = patterns[labels] + 0.5 * torch.randn(1600, 64, generator=generator)
    test = slice(1200, 1600)
    accuracies, steps = [], 0
    for hooked in (False, True):
        torch.manual_seed(1)
        ddp = DDP(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
        state = sluice.torch.State(job, op_class=op_class, model=ddp, deadline=PATIENT) if hooked else None
        if hooked:
            ddp.register_comm_hook(state, sluice.torch.hook)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
        for epoch in range(3):
            order = torch.randperm(1200, generator=torch.Generator().manual_seed(epoch))[rank::world]
            for first in range(0, len(order) - 31, 32):
                chosen = order[first:first + 32]
                optimizer.zero_grad()
                nn.functional.cross_entropy(ddp(images[chosen]), labels[chosen]).backward()
                optimizer.step()
        with torch.no_grad():
            accuracies.append(float((ddp(images[test]).argmax(1) == labels[test]).float().mean()))
    with state:
        return {"gloo": accuracies[0], "sluice": accuracies[1], "distance": state.parameter_distance(ddp),
                "incomplete": state.report()["incomplete"]}


# --- The package without torch's hook


def exchange_of(world):
    def exchange(data):
        everyone = [None] * world
        dist.all_gather_object(everyone, data)
        return everyone
    return exchange


def arrays(rank, world, job):
    """numpy arrays and plain buffers through allreduce, broadcast, all_gather, barrier."""
    with sluice.open() as connection, sluice.join(connection, job, rank, world, exchange_of(world)) as member:
        assert (member.rank, member.world_size) == (rank, world) and member.max_op_bytes == 64 << 20
        for dtype in ("f4", "f8", "i4", "i8", "u1", "f2"):
            array = (numpy.arange(1000) % 50 + rank).astype(dtype)
            out, report = member.allreduce(array)
            assert out is array and report.ok and report.resolved
            assert (array == (numpy.arange(1000) % 50 * world + sum(range(world))).astype(dtype)).all(), dtype
        values = numpy.full((3, 5), float(rank), "f4")
        member.allreduce(values, kind="mean", op_class="consistent", tag=5)
        assert (values == sum(range(world)) / world).all()
        halves = bytearray(numpy.full(10, 0x3F80 + rank % 2, "u2").tobytes())  # bf16: 1.0 and 1.0078125
        member.allreduce(halves, dtype="bf16", kind="mean")
        plain = memoryview(bytearray(range(100))) if rank == world - 1 else memoryview(bytearray(100))
        assert bytes(member.broadcast(plain, root=world - 1)) == bytes(range(100))
        gathered = member.all_gather(numpy.array([rank, rank * rank]))
        assert [part.tolist() for part in gathered] == [[r, r * r] for r in range(world)]
        assert member.all_gather(b"r%d" % rank) == [b"r%d" % r for r in range(world)]
        empty, report = member.allreduce(numpy.zeros(0, "f4"))
        assert report.ok
        began = time.monotonic()
        if rank == 0:
            time.sleep(0.3)
        member.barrier()
        waited = time.monotonic() - began
        for wrong in (numpy.zeros((4, 4))[:, 1], numpy.array(["x"]), bytes(8)):
            try:
                member.allreduce(wrong)
                raise AssertionError(f"{wrong!r} was taken")
            except sluice.InvalidArgument as error:
                assert str(error).startswith("sluice: ")
    return waited


def left(rank, world, job):
    """What is left cannot be used, and says so."""
    with sluice.open() as connection:
        member = sluice.join(connection, job, rank, world, exchange_of(world))
        member.barrier()
        member.leave()
        try:
            member.allreduce(numpy.zeros(4, "f4"))
        except sluice.InvalidArgument as error:
            return str(error)


# --- What goes wrong


def mismatch(rank, world, job):
    with sluice.open() as connection:
        member = sluice.join(connection, job, rank, world, exchange_of(world))
        try:
            member.allreduce(numpy.zeros(1000 + 24 * rank, "f4"), tag=9)
            return {}
        except sluice.Error as error:
            return {"type": type(error).__name__, "text": str(error), "status": getattr(error, "status", None),
                    "rank": getattr(error, "rank", None)}
        finally:
            with contextlib.suppress(sluice.Error):
                member.leave(1.0)


class Dies(Exception):
    """Ends the rank's process as an unhandled exception in a training script does."""


def victim(rank, world, job, dies, how, daemon=0):
    """Trains; after some steps rank `dies` goes, in one way or another, or its daemon does. The others say what they saw,
    and when."""
    ddp = DDP(mlp())
    state = sluice.torch.State(job, op_class="exact")
    ddp.register_comm_hook(state, sluice.torch.hook)
    train(ddp, rank, 3)
    dist.barrier()
    if rank == dies:
        if how == "kill":
            os.kill(os.getpid(), 9)
        if how == "raise":
            raise Dies("a bug in the script")
        if how == "abort":
            state.close(abort=True)
            return {}
        os.kill(daemon, 9)
    began = time.monotonic()
    try:
        train(ddp, rank, 50)
        return {}
    except RuntimeError as error:
        try:
            train(ddp, rank, 1)
            again = ""
        except Exception as second:
            again = str(second)
        return {"text": str(error), "seconds": time.monotonic() - began, "type": type(state.error).__name__,
                "status": getattr(state.error, "status", None), "again": again}
    finally:
        state.close()


def unreachable(rank, world, job, without):
    """Rank `without` has no daemon: all ranks hear of it, at once."""
    try:
        sluice.torch.State(job, socket="/nowhere/sluice.sock" if rank == without else None)
    except sluice.Error as error:
        return str(error)


def differing(rank, world, job):
    try:
        sluice.torch.State(job, op_class="exact" if rank else "consistent")
    except sluice.Error as error:
        return str(error)


def hook_errors(rank, world, job):
    """Errors of the hook itself come out of backward() with their text."""
    ddp = DDP(mlp())
    state = sluice.torch.State(job)
    ddp.register_comm_hook(state, sluice.torch.hook)
    state.close()
    try:
        train(ddp, rank, 1)
    except RuntimeError as error:
        return str(error)
