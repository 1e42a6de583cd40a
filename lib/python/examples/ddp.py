"""A DDP training over Sluice, small enough to see that two machines work together.

    torchrun --nnodes 2 --node_rank 0 --nproc_per_node 1 --master_addr 10.0.0.1 --master_port 29500 ddp.py

on the first machine, with --node_rank 1 on the second. Where there is no torchrun (Debian's python3-torch), it is
`python3 -m torch.distributed.run`. Without --gloo gradients travel by sluiced, with it by Gloo, for comparison.
"""
import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import sluice.torch

WIDTH = 1024
STEPS = 50


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="example")
    parser.add_argument("--op-class", default="consistent", choices=["consistent", "exact"])
    parser.add_argument("--gloo", action="store_true", help="DDP's own allreduce instead of Sluice")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    ddp = DDP(model, gradient_as_bucket_view=True)
    state = None
    if not options.gloo:
        state = sluice.torch.State(options.job, op_class=options.op_class, model=ddp)
        ddp.register_comm_hook(state, sluice.torch.hook)

    # Each rank sees its own inputs of one function that all learn.
    target = torch.randn(64, 1, generator=torch.Generator().manual_seed(1))
    inputs = torch.Generator().manual_seed(100 + rank)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
    begin = time.monotonic()
    for step in range(1, STEPS + 1):
        x = torch.randn(64, 64, generator=inputs)
        loss = nn.functional.mse_loss(ddp(x), torch.tanh(x @ target))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}  {1000 * (time.monotonic() - begin) / step:.1f} ms a step", flush=True)

    if state is not None:
        distance = state.parameter_distance(ddp)
        report = state.report()
        print(f"rank {rank} of {report['world_size']} over {report['nodes']} nodes: {report['ops']} rounds, "
              f"p50 {report['round_ms']['p50']:.1f} ms, p99 {report['round_ms']['p99']:.1f} ms, incomplete {report['incomplete']}, "
              f"distance {distance:.1e}", flush=True)
        state.close()


if __name__ == "__main__":
    main()
