"""What the ranks of carry_test.py do. Gradients are small integers and there are two ranks, so all means are exact."""
import time
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import cases
import sluice.torch

BOUND = 0.06  # of a round; a rank that is late by LATE has no part in it
LATE = 0.2


class Scaler:
    """As much of a GradScaler as the State asks for."""
    scale = 1.0

    def get_scale(self):
        return self.scale

    def is_enabled(self):
        return True


def _steps(ddp, model, rank, world, scaler, first, last, found, expected, late):
    for step in range(first, last):
        scaler.scale = 2.0 ** (3 * (step // 5 % 4))  # another one every 5 steps, 1 among them
        if rank == 1 and late(step):
            time.sleep(LATE)
        ddp.zero_grad()
        (ddp(cases.constants(cases.SHAPES, rank, step)) * scaler.scale).backward()
        for total, weight in zip(found, model.weights):
            total += weight.grad.double() / scaler.scale
        for total, mean in zip(expected, cases.mean_of_constants(cases.SHAPES, world, step)):
            total += mean.double()


def conserved(rank, world, job, steps=20, bucket_mb=0.01, arena_bytes=None):
    """Over all steps and the flush at the end, the results add up to the means of all gradients, exactly, although one rank
    was late again and again, the loss scale changed, and DDP cut its buckets anew."""
    model, scaler = cases.Integers(cases.SHAPES), Scaler()
    ddp = DDP(model, bucket_cap_mb=bucket_mb)
    found, expected = ([torch.zeros(shape, dtype=torch.float64) for shape in cases.SHAPES] for _ in range(2))
    with sluice.torch.State(job, deadline=BOUND, grad_scaler=scaler, model=ddp, arena_bytes=arena_bytes) as state:
        ddp.register_comm_hook(state, sluice.torch.hook)
        _steps(ddp, model, rank, world, scaler, 0, steps, found, expected, lambda step: step % 3 == 0)
        report = state.report()
        flushed = state.flush()
        names = [name for name, _ in model.named_parameters()]
        carry = [flushed.get(name, torch.zeros(1)) for name in names]
        assert state.flush() == {}, "nobody owes it any more"
        for shape, total, late, wanted in zip(cases.SHAPES, found, carry, expected):
            wrong = total + late.double().expand(total.numel()).view(shape) - wanted
            assert report["incomplete"] or not bool(wrong.any()), (shape, wrong[wrong != 0][:5], int((wrong != 0).sum()), report)
    return {"uncounted": report["blocks_uncounted"], "carried": report["blocks_carried"], "incomplete": report["incomplete"],
            "discarded": report["blocks_discarded"], "carry_over": report["carry_over"],
            "flushed": {name: values.tolist() for name, values in flushed.items()}}


def resumed(rank, world, job, steps=6):
    """The carry of a checkpoint joins the first results of the run that loads it: nothing is lost in between."""
    found, expected = ([torch.zeros(shape, dtype=torch.float64) for shape in cases.SHAPES] for _ in range(2))
    incomplete, saved, kept = 0, None, []
    for run in range(2):
        model, scaler = cases.Integers(cases.SHAPES), Scaler()
        ddp = DDP(model, bucket_cap_mb=0.01)
        with sluice.torch.State(f"{job}-{run}", deadline=BOUND, grad_scaler=scaler, model=ddp) as state:
            ddp.register_comm_hook(state, sluice.torch.hook)
            if saved is not None:
                state.load_state_dict(saved)
            # The last step of each run leaves something behind.
            _steps(ddp, model, rank, world, scaler, run * steps, (run + 1) * steps, found, expected,
                   lambda step: step % steps in (1, steps - 1))
            incomplete += state.report()["incomplete"]
            saved = state.state_dict()
            kept.append(len(saved["carry"]))
    for shape, total, (name, _), wanted in zip(cases.SHAPES, found, model.named_parameters(), expected):
        late = saved["carry"].get(name, torch.zeros(1)).double().expand(total.numel()).view(shape)
        assert incomplete or torch.equal(total + late, wanted), shape
    return {"kept": kept, "incomplete": incomplete}


def resumed_exactly(rank, world, job):
    """Six steps, and three, a checkpoint, and three: the same bits."""
    torch.manual_seed(0)
    ends = []
    for cut in (False, True):
        model = cases.mlp()
        ddp = DDP(model)
        state = sluice.torch.State(f"{job}-{cut}", op_class="exact", model=ddp)
        ddp.register_comm_hook(state, sluice.torch.hook)
        optimizer = cases.train(ddp, rank, 3)
        if cut:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "sluice": state.state_dict()}
            state.close()
            model = cases.mlp(seed=1)
            ddp = DDP(model)
            model.load_state_dict(saved["model"])
            state = sluice.torch.State(f"{job}-again", op_class="exact", model=ddp)
            state.load_state_dict(saved["sluice"])
            ddp.register_comm_hook(state, sluice.torch.hook)
            optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
            optimizer.load_state_dict(saved["optimizer"])
        cases.train(ddp, rank, 3, optimizer, offset=3)
        state.close()
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*ends))


def unknown_scaler(rank, world, job):
    """AMP with carry-over needs a State that knows the scaler."""
    ddp = DDP(cases.mlp())
    scaler = torch.cuda.amp.GradScaler(enabled=False)
    said = []
    with mock.patch.object(scaler, "is_enabled", lambda: True), sluice.torch.State(job) as state:
        ddp.register_comm_hook(state, sluice.torch.hook)
        try:
            cases.train(ddp, rank, 1)
        except RuntimeError as error:
            said.append(str(error))
    return said


def carries(rank, world, job):
    with sluice.torch.State(job) as state:
        return {"carries": state.report()["carry_over"], "flushed": state.flush()}


def corrected(rank, world, job, steps=60):
    """Many rounds have holes, in which later ones bring what was missing: over all steps, what is owed and what still waits
    at the end, the sum of each rank's results is that of all gradients, exactly."""
    model, scaler = cases.Integers(cases.SHAPES), Scaler()
    ddp = DDP(model, bucket_cap_mb=0.01)
    found, expected = ([torch.zeros(shape, dtype=torch.float64) for shape in cases.SHAPES] for _ in range(2))
    with cases.caught() as said, sluice.torch.State(job, deadline=0.02, grad_scaler=scaler, model=ddp) as state:
        ddp.register_comm_hook(state, sluice.torch.hook)
        _steps(ddp, model, rank, world, scaler, 0, steps, found, expected, lambda step: False)
        flushed = state.flush()
        state._carry.take_corrections(state._job, 20.0)
        mine = dict(state._carry.mine)
        report = state.report()
    for shape, total, (name, _), wanted in zip(cases.SHAPES, found, model.named_parameters(), expected):
        for kept in (flushed, mine):
            if name in kept:
                total += kept[name].double().view(shape)
        assert report["needs_resync"] or torch.equal(total, wanted), (name, report)
    return {"incomplete": report["incomplete"], "corrected": report["corrected"], "blocks": report["blocks_corrected"],
            "waiting": sorted(mine), "discarded": report["blocks_discarded"], "needs_resync": report["needs_resync"], "said": said}


def correction_and_resync(rank, world, job, steps=12):
    """A rank whose correction still waits counts as one that lacks something; after resync nothing waits and all are equal."""
    torch.manual_seed(0)
    ddp = DDP(cases.mlp(), bucket_cap_mb=0.001)
    with cases.caught(), sluice.torch.State(job, deadline=0.02, model=ddp) as state:
        ddp.register_comm_hook(state, sluice.torch.hook)
        optimizer = cases.train(ddp, rank, steps)
        if rank == 0:
            state._carry.mine = {"somewhere": torch.ones(3)}
            state._corrected_until = -1
        done = state.resync(ddp, optimizer)
        return {"done": done, "mine": len(state._carry.mine), "distance": state.parameter_distance(ddp)}
