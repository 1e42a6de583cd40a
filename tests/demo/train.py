"""One rank of one run of the demo: DDP on Fashion-MNIST, its gradients over Gloo or over sluiced.

Started by demo.py, with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME and SLUICE_SOCKET in the environment.
Rank 0 prints one JSON object a line while it runs; every rank writes what it measured to --output at the end.
"""
import argparse
import json
import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "lib", "python"))
import data  # noqa: E402
from distance import parameter_distance  # noqa: E402

LOCAL_STEPS = 8  # without communication, to know its share
TRACED_STEPS = 24  # the last ones, of which the report shows one


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", choices=["gloo", "exact", "consistent", "best_effort"], required=True)
    parser.add_argument("--job", default="demo")
    parser.add_argument("--label", default="", help="of the lines of progress; default: the run")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--bucket-mb", type=float, default=4)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--eval-every", type=int, required=True)
    parser.add_argument("--target", type=float, required=True)
    parser.add_argument("--deadline", type=float, default=None, help="seconds of a consistent round; default: the daemon's")
    parser.add_argument("--interface", default="eth0", help="whose bytes this rank counts; empty: none")
    parser.add_argument("--output", required=True)
    return parser.parse_args()


def quantile(values, q):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


def say(**what):
    if dist.get_rank() == 0:
        print(json.dumps(what), flush=True)


def bytes_out(interface):
    if not interface:
        return 0
    with open(f"/sys/class/net/{interface}/statistics/tx_bytes", encoding="ascii") as file:
        return int(file.read())


def daemon_trace(job):
    """When each step of the last ops happened, by the daemon's own clock reading: op number -> microseconds since the submit.
    The last one where there are several lanes."""
    answer = subprocess.run([os.environ["SLUICECTL"], "trace", "--json", "--job", job], capture_output=True, text=True,
                            timeout=10, check=True).stdout
    steps = {}
    for entry in json.loads(answer)["trace"]:
        for op in entry["ops"]:
            if not op["submitted_us"]:
                continue
            since = {name[:-3]: op[name] - op["submitted_us"] for name in
                     ("admitted_us", "quorum_us", "first_push_us", "push_sent_us", "closed_us", "pull_sent_us", "result_us")
                     if op[name] >= op["submitted_us"]}
            before = steps.get(op["op_seq"], {})
            steps[op["op_seq"]] = {**before, **{name: max(us, before.get(name, 0)) for name, us in since.items()}}
    return steps


def accuracy(model, images, labels):
    """Of all ranks together; each looks at its part of the test set."""
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).sum().double().reshape(1)
    counts = torch.cat([right, torch.tensor([float(len(labels))], dtype=torch.float64)])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


class Trainer:
    def __init__(self, options):
        self.options = options
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        images, labels = data.load("train")
        generator = torch.Generator().manual_seed(1)
        # Every run sees the same images in the same order; a rank has every world_size-th.
        order = torch.randperm(len(images), generator=generator)[self.rank::self.world_size]
        self.images, self.labels = images[order], labels[order]
        images, labels = data.load("t10k")
        self.test = images[self.rank::self.world_size], labels[self.rank::self.world_size]
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(data.PIXELS, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(),
                                   nn.Linear(2048, 10))
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=options.bucket_mb, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), options.learning_rate, momentum=0.9)
        self.state = None
        if options.run != "gloo":
            import sluice.torch
            self.state = sluice.torch.State(options.job, op_class=options.run, model=self.ddp,
                                            deadline=options.deadline or "auto")
            self.ddp.register_comm_hook(self.state, sluice.torch.hook)
        self.steps_per_epoch = len(self.images) // options.batch
        self.trace = []

    def batch(self, step):
        first = step % self.steps_per_epoch * self.options.batch
        return self.images[first:first + self.options.batch], self.labels[first:first + self.options.batch]

    def step(self, number, measure=True):
        images, labels = self.batch(number)
        begin = time.monotonic()
        loss = nn.functional.cross_entropy(self.ddp(images), labels)
        forward = time.monotonic()
        loss.backward()
        backward = time.monotonic()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        end = time.monotonic()
        if measure:
            self.trace.append([number, begin, forward, backward, end])
        return float(loss.detach()), end - begin

    def local_steps(self):
        """Milliseconds of the steps when no gradient travels, on all ranks at the same time. Changes nothing: the learning
        rate is zero and the momentum is forgotten."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        times = []
        with self.ddp.no_sync():
            for number in range(LOCAL_STEPS):
                dist.barrier()
                times.append(self.step(number, measure=False)[1] * 1000)
        for group, rate in zip(self.optimizer.param_groups, rates):
            group["lr"] = rate
        self.optimizer.state.clear()
        return times[2:]  # the first ones warm the caches

    def train(self):
        options = self.options
        local = self.local_steps()
        dist.barrier()
        times, losses, curve, distances = [], [], [], []
        trained, sent = 0.0, 0
        to_target = None
        mark = bytes_out(options.interface)
        for number in range(options.steps):
            loss, seconds = self.step(number)
            trained += seconds
            times.append(seconds * 1000)
            losses.append(loss)
            last = number == options.steps - 1
            evaluate = last or (number + 1) % options.eval_every == 0
            epoch_ends = last or (number + 1) % self.steps_per_epoch == 0
            if evaluate or epoch_ends:
                sent += bytes_out(options.interface) - mark
                if evaluate:
                    reached = accuracy(self.model, *self.test)
                    curve.append([number + 1, trained, reached])
                    if to_target is None and reached >= options.target:
                        to_target = trained
                if epoch_ends:
                    distances.append(parameter_distance(self.model))
                mark = bytes_out(options.interface)
            if evaluate or (number + 1) % 5 == 0:
                rounds = self.state.report()["round_ms"] if self.state is not None else None
                say(type="progress", run=options.label or options.run, epoch=number // self.steps_per_epoch + 1, step=number + 1,
                    steps=options.steps, loss=sum(losses[-5:]) / len(losses[-5:]), step_ms=quantile(times[-20:], 0.5),
                    accuracy=curve[-1][2] if curve else None, rounds=rounds)
        result = {"run": options.label or options.run, "rank": self.rank, "steps_ms": times, "local_ms": local, "losses": losses, "curve": curve,
                  "seconds_to_target": to_target, "bytes_sent": sent, "distances": distances,
                  "gradient_bytes": sum(p.numel() * p.element_size() for p in self.model.parameters()),
                  "trace": self.trace[-TRACED_STEPS:]}
        if self.state is not None:
            result["report"] = self.state.report()
            first = result["trace"][0][1]
            steps = daemon_trace(options.job)
            result["ops"] = [{**op, "daemon": steps.get(op["op"])} for op in self.state.recent() if op["submitted"] >= first]
        return result


def main():
    options = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainer = Trainer(options)
    result = trainer.train()
    with open(options.output, "w", encoding="utf-8") as file:
        json.dump(result, file)
    dist.barrier()
    if trainer.state is not None:
        trainer.state.close()


if __name__ == "__main__":
    main()
