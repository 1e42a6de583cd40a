"""One rank of a disturbed run: holds a Gloo group and one Sluice job at the same time, so that all systems share one
process, one set of links and one background. Started by disturbed.py, which writes one JSON object a line:
{"system": "gloo" | class, "rounds": N}; the answer is a line with the milliseconds of each round and the reports' sums."""
import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "lib", "python"))
from sluice import _core  # noqa: E402  pylint: disable=wrong-import-position

COUNTED = ("blocks_expected", "blocks_received", "blocks_uncounted", "blocks_repaired", "blocks_skipped")


class Rank:
    def __init__(self, options):
        self.options = options
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.count = options["bytes"] // 4
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        self.tensor = torch.zeros(self.count)
        self.job = None
        if options["socket"]:
            connection = _core.Connection(options["socket"], 10)
            mine = [connection.card(options["job"], self.rank, self.world), _core.generate_key() if self.rank == 0 else None]
            everyone = [None] * self.world
            dist.all_gather_object(everyone, mine)
            self.job = connection.join(options["job"], self.rank, self.world, [card for card, _ in everyone], everyone[0][1],
                                       arena_bytes=8 * options["bytes"] + (1 << 20), max_op_bytes=options["bytes"], timeout=30)
            self.contribution, self.result = self.job.alloc(options["bytes"]), self.job.alloc(options["bytes"])
            self.numbers = torch.frombuffer(self.contribution.view(), dtype=torch.float32)
            self.sums = torch.frombuffer(self.result.view(), dtype=torch.float32)
            self.numbers.fill_(self.rank + 1.0)
            self.job.barrier(30)

    def gloo(self):
        dist.all_reduce(self.tensor)  # of zeros: in place, the sums of anything else would grow without bound

    def sluice(self, op_class, counts):
        bound = None if op_class == "exact" else self.options["deadline"]
        # One tag per class: deadlines are learnt by size, carry-over by tag.
        op = self.job.submit_allreduce(self.contribution, self.result, self.count, "f32", "sum", op_class,
                                       tag=1 + len(op_class), deadline=bound)
        report = self.job.wait_result(op, 60)
        began = time.monotonic()
        counts["statuses"][report.status] = counts["statuses"].get(report.status, 0) + 1
        if not report.resolved:
            report = self.job.wait(op, 60)
        counts["fate_ms"] = max(counts["fate_ms"], (time.monotonic() - began) * 1000)
        for name in COUNTED:
            counts[name] += getattr(report, name)
        return began

    def check(self, op_class):
        """An exact sum that is wrong ends the run."""
        if op_class == "exact" and not bool((self.sums == self.world * (self.world + 1) / 2).all()):
            raise RuntimeError("a sum of class exact is wrong")

    def rounds(self, system, number):
        times, counts = [], {**dict.fromkeys(COUNTED, 0), "statuses": {}, "fate_ms": 0.0}
        for _ in range(number):
            began = time.monotonic()
            if system == "gloo":
                self.gloo()
                ended = time.monotonic()
            else:
                ended = self.sluice(system, counts)
            times.append((ended - began) * 1000)
        if system != "gloo":
            self.check(system)
        return {"ms": times, **counts}


def main():
    torch.set_num_threads(1)
    rank = Rank(json.loads(sys.argv[1]))
    print("ready", flush=True)
    for line in sys.stdin:
        said = json.loads(line)
        dist.barrier()
        print(json.dumps(rank.rounds(said["system"], said["rounds"])), flush=True)
    if rank.job is not None:
        rank.job.leave(5)


if __name__ == "__main__":
    main()
