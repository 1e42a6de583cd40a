"""What the ranks of rejoin_test.py do. One State with an optimizer, training that says where it is by files, and a digest
of everything that must be equal in the end."""
import hashlib
import os
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import cases
import sluice.torch


def digest(model, optimizer):
    """Of parameters, buffers and the optimizer's tensors."""
    sha = hashlib.sha256()
    state = optimizer.state_dict()["state"]
    tensors = list(model.parameters()) + list(model.buffers())
    tensors += [value for key in sorted(state) for value in state[key].values() if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().numpy().tobytes())
    return sha.hexdigest()


def survive(rank, world, job, folder, steps=60, pause=0.01, name=None, adam=False, batch_norm=False, known=True, op_class="exact",
            deadline=20.0, resync=False, due=0, **options):
    torch.manual_seed(0)
    ddp = DDP(cases.mlp(batch_norm=batch_norm), broadcast_buffers=False, bucket_cap_mb=0.001)
    optimizer = torch.optim.Adam(ddp.parameters(), 1e-3) if adam else torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
    known = {"model": ddp, "optimizer": optimizer} if known else {}
    with cases.caught() as said:
        with sluice.torch.State(name or job, op_class=op_class, deadline=deadline, timeout=60.0, **known, **options) as state:
            ddp.register_comm_hook(state, sluice.torch.hook)
            if due:  # of a parameter that there is not: it waits, until a new view drops it
                state.load_state_dict({"carry": {"nobody": torch.ones(due)}})
            train_some(ddp, optimizer, rank, 3)  # past the point where DDP makes its buckets anew
            open(os.path.join(folder, f"ready{rank}"), "w").close()
            train_some(ddp, optimizer, rank, steps, pause)
            if resync:
                state.resync(ddp, optimizer)
            state.sync_buffers(ddp)  # BatchNorm's differ from rank to rank until here
            report, ranks = state.report(), state.world_size
            longest = max(state.recent(), key=lambda op: op["total_ms"], default=None)  # none after a fallback
        loss = float(nn.functional.cross_entropy(ddp(cases.batch(9, 9, 64)[0]), cases.batch(9, 9, 64)[1]))
    return {"digest": digest(ddp, optimizer), "report": report, "said": said, "ranks": ranks, "loss": loss, "longest": longest}


def train_some(ddp, optimizer, rank, steps, pause=0.0):
    for step in range(steps):
        inputs, labels = cases.batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(inputs), labels).backward()
        optimizer.step()
        time.sleep(pause)


def stopped(rank, world, job, folder, steps=40, op_class="consistent", resync=False):
    """As survive, and how long it took. The bound is short, so that a round does not wait; the next one does."""
    began = time.monotonic()
    result = survive(rank, world, job, folder, steps=steps, op_class=op_class, resync=resync,
                     deadline=0.3 if op_class == "consistent" else 20.0)
    return {**result, "seconds": time.monotonic() - began}


def fallen_back(rank, world, job):
    """DDP's own allreduce from the start: what a checkpoint had and what this rank owes go along, once, at the loss scale."""
    class Scaler:
        def is_enabled(self):
            return True

        def get_scale(self):
            return 8.0

    model = cases.Integers(cases.SHAPES)
    ddp = DDP(model, bucket_cap_mb=0.01)
    names = [name for name, _ in model.named_parameters()]
    with cases.caught(), sluice.torch.State(job, fallback="allreduce", model=ddp, grad_scaler=Scaler()) as state:
        assert state.report()["fallback"]
        ddp.register_comm_hook(state, sluice.torch.hook)
        first, last = model.weights[0].numel(), model.weights[-1].numel()
        state.load_state_dict({"carry": {names[0]: torch.arange(first).float()}})
        state._carry.owed = {names[-1]: torch.full((last,), 2.0 * rank)}
        for step in range(2):
            ddp.zero_grad()
            (ddp(cases.constants(cases.SHAPES, rank, step)) * 8.0).backward()
            found = [weight.grad / 8.0 for weight in model.weights]
            wanted = cases.mean_of_constants(cases.SHAPES, world, step)
            if step == 0:
                wanted[0] = wanted[0] + torch.arange(first).float().view(cases.SHAPES[0])
                wanted[-1] = wanted[-1] + 2.0 * sum(range(world)) / world
            for a, b in zip(found, wanted):
                assert torch.equal(a, b), (step, a, b)
        assert state.state_dict()["carry"] == {}
    return True
