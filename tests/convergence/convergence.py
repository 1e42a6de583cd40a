#!/usr/bin/env python3
"""Trains one model under loss with each class of service, and writes what it cost; scripts/convergence has the manual.

Four ranks and a sluiced each on loopback; the daemons' own faulty port drops datagrams. A cell is (loss, class, optimizer,
seed). The ranks live as long as they can, since importing torch takes longer than a cell. Each finished cell is a line of
the results' file, and cells that are there are not run again.
"""
import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "e2e"))

import cluster as clusters  # noqa: E402  pylint: disable=wrong-import-position

RANKS = 4
LOSSES = [0.0, 0.01, 0.05, 0.10]
CLASSES = ["exact", "consistent", "best_effort"]
OPTIMIZERS = ["sgd", "adam"]
CELL_LIMIT_S = 240
ATTEMPTS = 2


def say(text):
    print(text, flush=True)


def key(cell):
    return (cell["loss"], cell["class"], cell["optimizer"], cell["seed"])


def done(path):
    """The cells of the results' file."""
    try:
        with open(path, encoding="utf-8") as file:
            return {key(cell): cell for cell in map(json.loads, file)}
    except FileNotFoundError:
        return {}


def grid(options):
    """Seeds outermost, so that a run that is stopped has every condition once before it has any twice."""
    return [{"seed": seed, "optimizer": optimizer, "class": op_class, "loss": loss, "steps": options.steps,
             "batch": options.batch, "deadline": options.deadline}
            for seed, optimizer, op_class, loss in itertools.product(range(options.seeds), OPTIMIZERS,
                                                                     options.classes.split(","), LOSSES)]


class Ranks:
    """The processes that train; a new set after one failed."""

    def __init__(self, cluster):
        self.cluster = cluster
        port = clusters._free_ports(1)[0]  # pylint: disable=protected-access
        self.logs = [os.path.join(cluster.new_folder("rank"), f"{rank}.log") for rank in range(RANKS)]
        self.processes = []
        for rank in range(RANKS):
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
                           "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
                           "PYTHONDONTWRITEBYTECODE": "1",
                           "SLUICE_LIBRARY": os.path.join(clusters.build_dir(), "lib", "libsluice.so.0")}
            with open(self.logs[rank], "wb") as log:
                self.processes.append(cluster.popen(
                    0, ["/usr/bin/python3", "-u", os.path.join(HERE, "train.py")], stdin=subprocess.PIPE, stderr=log,
                    stdout=subprocess.PIPE, env=environment))

    def run(self, cell):
        """What the ranks measured, or raises with what they said."""
        first = RANKS * LOSSES.index(cell["loss"])
        previous = signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(CELL_LIMIT_S)
        try:
            for rank, process in enumerate(self.processes):
                cell = {**cell, "socket": self.cluster.daemons[first + rank].socket_path}
                process.stdin.write(json.dumps(cell).encode() + b"\n")
                process.stdin.flush()
            lines = [process.stdout.readline() for process in self.processes]
        except (TimeoutError, BrokenPipeError) as error:
            raise RuntimeError(f"{type(error).__name__}: {error}\n{self.tail()}") from error
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, previous)
        if not all(lines):
            raise RuntimeError(self.tail())
        return [json.loads(line) for line in lines]

    def tail(self):
        text = []
        for rank, log in enumerate(self.logs):
            with open(log, encoding="utf-8", errors="replace") as file:
                text.append(f"-- rank {rank}: {file.read()[-900:]}")
        return "\n".join(text)

    def end(self):
        for process in self.processes:
            process.kill()
            process.wait(10)


def _too_long(*_):
    raise TimeoutError(f"no end within {CELL_LIMIT_S} s")


def summary(cell, ranks, seconds):
    reports = [rank["report"] for rank in ranks]
    total = {name: sum(report[name] for report in reports) for name in
             ("blocks_expected", "blocks_received", "blocks_skipped", "blocks_uncounted", "blocks_repaired", "incomplete",
              "ops")}
    expected = max(1, total["blocks_expected"])
    return {**{name: cell[name] for name in ("loss", "class", "optimizer", "seed", "steps", "batch", "deadline")},
            "accuracy": ranks[0]["accuracy"], "accuracies": ranks[0]["accuracies"], "curve": ranks[0]["curve"],
            "distance": ranks[0]["distance"], "drift": ranks[0]["drift"], "resynced": ranks[0]["resynced"],
            "uncounted": total["blocks_uncounted"] / expected,
            "missing": (total["blocks_expected"] - total["blocks_received"]) / expected,
            "repaired": total["blocks_repaired"] / expected, "incomplete": total["incomplete"], "ops": total["ops"],
            "round_ms": {q: max(report["round_ms"][q] for report in reports) for q in ("p50", "p99", "max")},
            "seconds": round(seconds, 1), "load_average": os.getloadavg()[0]}


def settings(node):
    """One set of daemons for each loss; without a fault the port is not wrapped at all."""
    loss = LOSSES[node // RANKS]
    exchange = {"join_timeout": "30s", **({"carry_over": True} if clusters.takes("exchange.carry_over=true") else {})}
    return {"exchange": exchange, **({"transport": {"faults": {"i_know": True, "loss": loss, "seed": node + 1}}} if loss else {})}


def run(options):
    path = os.path.join(options.output, "cells.jsonl")
    os.makedirs(options.output, exist_ok=True)
    cells = [cell for cell in grid(options) if key(cell) not in done(path)]
    say(f"convergence: {len(cells)} cells to run, {len(done(path))} are in {path}")
    os.environ["SLUICE_LOOPBACK"] = "1"
    with clusters.Cluster(RANKS * len(LOSSES), settings=settings, prefix="conv") as cluster:
        cluster.start()
        ranks = None
        for number, cell in enumerate(cells, 1):
            for attempt in range(1, ATTEMPTS + 1):
                ranks = ranks or Ranks(cluster)
                began = time.monotonic()
                name = f"{cell['loss'] * 100:.0f} % {cell['class']} {cell['optimizer']} seed {cell['seed']}"
                try:
                    row = summary(cell, ranks.run({**cell, "job": f"conv{os.getpid()}-{number}-{attempt}"}),
                                  time.monotonic() - began)
                except RuntimeError as error:
                    say(f"{name}: attempt {attempt} failed: {error}")
                    ranks.end()
                    ranks = None
                    continue
                with open(path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                say(f"[{number}/{len(cells)}] {name:34} accuracy {row['accuracy']:.4f}  distance {row['distance']:.1e}  "
                    f"missing {100 * row['missing']:.2f} %  uncounted {100 * row['uncounted']:.2f} %  {row['seconds']:.0f} s  "
                    f"load {row['load_average']:.0f}")
                break
            else:
                say(f"{name}: left out")
        if ranks:
            ranks.end()
    left = len([cell for cell in grid(options) if key(cell) not in done(path)])
    if left:
        say(f"convergence: {left} cells are missing; run it again")
    return 1 if left else 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--deadline", type=float, default=0.25, help="seconds of a bounded round")
    parser.add_argument("--classes", default=",".join(CLASSES))
    parser.add_argument("--tables-only", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the with blocks clean up
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
    status = 0 if options.tables_only else run(options)
    import tables
    tables.write(list(done(os.path.join(options.output, "cells.jsonl")).values()), options.output)
    return status


if __name__ == "__main__":
    sys.exit(main())
