"""One rank of tests/convergence: reads a cell a line, trains it, answers with what it measured; as long as the input lasts."""
import json
import os
import sys
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "demo"))
sys.path.insert(0, os.path.join(HERE, "..", "..", "lib", "python"))

import data  # noqa: E402  pylint: disable=wrong-import-position
import sluice.torch  # noqa: E402  pylint: disable=wrong-import-position
from distance import parameter_distance  # noqa: E402  pylint: disable=wrong-import-position

EVALUATIONS = 6


def accuracy(model, test):
    with torch.no_grad():
        return float((model(test[0]).argmax(1) == test[1]).double().mean())


def accuracies(model, test):
    """That of each rank's own model."""
    mine = torch.tensor([accuracy(model, test)], dtype=torch.float64)
    found = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [float(value) for value in found]


def train(cell, images, labels, test):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cell["seed"])
    model = nn.Sequential(nn.Linear(data.PIXELS, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(100 + cell["seed"]))[rank::world]
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.25, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9) if cell["optimizer"] == "sgd" else \
        torch.optim.Adam(ddp.parameters(), 0.001)
    bound = cell["deadline"] if cell["class"] != "exact" else "auto"
    curve = []
    with sluice.torch.State(cell["job"], op_class=cell["class"], model=ddp, deadline=bound, socket=cell["socket"],
                            on_incomplete="ignore", drift_every=40) as state:
        ddp.register_comm_hook(state, sluice.torch.hook)
        for step in range(cell["steps"]):
            chosen = order[torch.arange(step * cell["batch"], (step + 1) * cell["batch"]) % len(order)]
            loss = nn.functional.cross_entropy(ddp(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            if (step + 1) % (cell["steps"] // EVALUATIONS) == 0:
                curve.append([step + 1, accuracy(model, test)])
        result = {"curve": curve, "accuracies": accuracies(model, test), "distance": parameter_distance(model)}
        result["drift"] = state.drift(ddp)
        result["report"] = state.report()
        state.resync(ddp, optimizer, force=True)
        result["resynced"] = parameter_distance(model)
    result["accuracy"] = sum(result["accuracies"]) / world
    return result


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", sluice.torch.SluiceWarning)
    dist.init_process_group("gloo")
    (images, labels), test = data.load("train"), data.load("t10k")
    for line in sys.stdin:
        cell = json.loads(line)
        began = time.monotonic()
        result = train(cell, images, labels, test)
        print(json.dumps({**result, "seconds": time.monotonic() - began}), flush=True)


if __name__ == "__main__":
    main()
