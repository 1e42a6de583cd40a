"""What the ranks of hook_test.py do to find out how far they are apart."""
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import cases
import sluice.torch


def distances(rank, world, job):
    """parameter_distance is the relative L2 distance to rank 0, the largest of all ranks."""
    model = nn.Linear(300, 40)
    nn.init.constant_(model.weight, 2.0)
    nn.init.constant_(model.bias, 2.0)
    with sluice.torch.State(job) as state:
        same = state.parameter_distance(model)
        with torch.no_grad():
            if rank == world - 1:
                model.weight.add_(0.02)
        apart = state.parameter_distance(model)
        drifts = [state.drift(model)]
        state.sync_parameters(model)
        again = state.parameter_distance(model)
        drifts.append(state.drift(model))
        with torch.no_grad():  # equal to every comparison but that of the bits
            model.bias[0] = -0.0 if rank else 0.0
        drifts.append(state.drift(model))
        return {"same": same, "apart": apart, "expected": 0.01 * (12000 / 12040) ** 0.5, "again": again, "drifts": drifts,
                "report": state.report()["drift"]}


def drift_gauge(rank, world, job):
    """drift_every samples in the hook, and sees a rank that went its own way until resync()."""
    ddp = DDP(cases.mlp())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    with sluice.torch.State(job, model=ddp, drift_every=2, deadline=cases.PATIENT) as state:
        ddp.register_comm_hook(state, sluice.torch.hook)
        cases.train(ddp, rank, 5, optimizer)
        calm = state.report()["drift"]
        if rank == 1:
            with torch.no_grad():
                for parameter in ddp.parameters():
                    parameter.mul_(1.01)
        cases.train(ddp, rank, 1, optimizer, 5)
        apart, distance = state.report()["drift"], state.parameter_distance(ddp)
        state.resync(ddp, optimizer, force=True)
        cases.train(ddp, rank, 2, optimizer, 6)
        return {"calm": calm, "apart": apart, "distance": distance, "after": state.report()["drift"]}
