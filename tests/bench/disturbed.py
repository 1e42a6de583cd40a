#!/usr/bin/env python3
"""Disturbed runs for scripts/bench --disturbed, which has the manual: Gloo and the classes of Sluice on the same four links of
1 Gbit/s, ten rounds in turn, beside bursts of TCP over two of the links.

disturbed.json has the settings, frozen: how the bursts are drawn at each of two tails. They were found once by
`disturbed.py --calibrate`, so that Gloo's own p99/p50 is 1.5 and 3.0, and are printed with every run.
"""
import argparse
import json
import os
import signal
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "e2e")]

import bench_results  # noqa: E402  pylint: disable=wrong-import-position
import cluster as clusters  # noqa: E402  pylint: disable=wrong-import-position

SETTINGS = os.path.join(HERE, "disturbed.json")
NODES, DISTURBED = 4, (2, 3)  # each of the two sends its bursts to the other, so both directions of both links are hit
PORT = 9601
CLASSES = ["exact", "consistent", "best_effort"]
TENS = 10
ANSWER_S = 120


def say(text=""):
    print(text, flush=True)


class Failure(Exception):
    """A run that cannot be counted; the text is for a person."""


def load_settings():
    with open(SETTINGS, encoding="utf-8") as file:
        return json.load(file)


def quantile(values, q):
    """The smallest value that at least the share q does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered), max(1, -(-len(ordered) * q // 1).__int__())) - 1]


def prefer(pids):
    """On a machine that has other work: that it waits for these. Real time, round robin; their later threads inherit it."""
    for pid in pids:
        os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(1))


class Speaker:
    """A process that answers a line with a line."""

    def __init__(self, cluster, node, command, name, **options):
        self.name, self.log = name, os.path.join(cluster.new_folder("log"), name)
        with open(self.log, "wb") as log:
            self.process = cluster.popen(node, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, **options)
        if cluster.prefer:
            prefer([self.process.pid])

    def tell(self, line):
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # hear() says why

    def hear(self):
        line = self.process.stdout.readline()
        if not line:
            with open(self.log, encoding="utf-8", errors="replace") as file:
                raise Failure(f"{self.name} ended: {file.read()[-1500:]}")
        return line.decode()

    def end(self):
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


class Background:
    """Bursts over two links, both ways. counts(): bytes and seconds of bursts since the last rest, of all senders."""

    def __init__(self, cluster, burst, seed):
        self.receivers, self.senders = [], []
        program = os.path.join(HERE, "background.py")
        for node in DISTURBED:
            self.receivers.append(Speaker(cluster, node, ["/usr/bin/python3", program, "receive", cluster.address(node),
                                                          str(PORT)], f"receiver{node}"))
        for receiver in self.receivers:
            receiver.hear()
        for index, node in enumerate(DISTURBED):
            to = DISTURBED[1 - index]
            self.senders.append(Speaker(
                cluster, node, ["/usr/bin/python3", program, "send", cluster.address(to), str(PORT), str(seed + index),
                                str(burst["flows"]), str(burst["on_ms"]), str(burst["off_ms"])], f"sender{node}"))
        for sender in self.senders:
            sender.hear()
        self.before = [{"acknowledged": 0, "burst_s": 0.0}] * len(self.senders)

    def _all(self, word):
        for sender in self.senders:
            sender.tell(word)
        return [json.loads(sender.hear()) for sender in self.senders]

    def go(self):
        self.before = self._all("go")

    def rest(self):
        after = self._all("rest")
        return {key: sum(now[key] - then[key] for now, then in zip(after, self.before)) for key in ("acknowledged", "burst_s")}

    def end(self):
        for sender in self.senders:
            sender.end()
        for receiver in self.receivers:
            receiver.process.kill()
            receiver.process.wait(10)


class Ranks:
    def __init__(self, cluster, settings, with_sluice=True):
        self.ranks = []
        for rank in range(NODES):
            options = {"bytes": settings["bytes"], "deadline": settings["deadline_ms"] / 1000, "job": "disturbed",
                       "socket": cluster.daemons[rank].socket_path if with_sluice else None}
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(NODES), "MASTER_ADDR": cluster.address(0),
                           "MASTER_PORT": "19475", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
                           "SLUICE_LIBRARY": os.path.join(clusters.build_dir(), "lib", "libsluice.so.0")}
            self.ranks.append(Speaker(cluster, rank, ["/usr/bin/python3", os.path.join(HERE, "disturbed_rank.py"),
                                                      json.dumps(options)], f"rank{rank}", env=environment))
        for rank in self.ranks:
            rank.hear()

    def run(self, system, rounds):
        """The milliseconds of each round, those of its slowest rank, and the ranks' sums."""
        for rank in self.ranks:
            rank.tell(json.dumps({"system": system, "rounds": rounds}))
        answers = [json.loads(rank.hear()) for rank in self.ranks]
        return [max(times) for times in zip(*(answer["ms"] for answer in answers))], answers

    def end(self):
        for rank in self.ranks:
            rank.end()


class Series:
    """What one system did at one tail."""

    def __init__(self):
        self.ms, self.background, self.counts, self.statuses, self.fate_ms = [], [], {}, {}, 0.0

    def add(self, ms, answers, background):
        self.ms += ms
        self.background.append(background)
        for answer in answers:
            for name, value in answer.items():
                if name.startswith("blocks_"):
                    self.counts[name] = self.counts.get(name, 0) + value
            for status, number in answer["statuses"].items():
                self.statuses[status] = self.statuses.get(status, 0) + number
            self.fate_ms = max(self.fate_ms, answer["fate_ms"])

    def p50(self):
        return quantile(self.ms, 0.5)

    def p99(self):
        return quantile(self.ms, 0.99)

    def goodput(self):
        """Bytes a second of the background while a burst was on."""
        seconds = sum(part["burst_s"] for part in self.background)
        return sum(part["acknowledged"] for part in self.background) / seconds if seconds else 0.0

    def approximated(self):
        """Share of blocks that a rank did not get, or whose contribution was carried or lost."""
        expected = self.counts.get("blocks_expected", 0)
        missing = expected - self.counts.get("blocks_received", 0) + self.counts.get("blocks_uncounted", 0)
        return missing / expected if expected else 0.0


def classes_allowed(ranks):
    """Those classes that this version's daemon takes; the others are named."""
    allowed = []
    for op_class in CLASSES:
        try:
            ranks.run(op_class, 3)
            allowed.append(op_class)
        except Failure as failure:
            if op_class == "exact":
                raise
            say(f"left out: {op_class} ({str(failure).strip().splitlines()[-1]})")
            break
    return allowed


def measure(cluster, settings, tail, systems, rounds):
    """Series by system."""
    burst = settings["tails"][tail]
    background = Background(cluster, burst, settings["seed"])
    ranks = Ranks(cluster, settings)
    series = {system: Series() for system in systems}
    try:
        for system in systems:
            ranks.run(system, settings["warm_up"])
        for turn in range(-(-rounds // TENS)):
            # Each system begins as often as any other.
            for system in systems[turn % len(systems):] + systems[:turn % len(systems)]:
                background.go()
                ms, answers = ranks.run(system, TENS)
                series[system].add(ms, answers, background.rest())
            if (turn + 1) % 10 == 0:
                say(f"  tail {tail}, {(turn + 1) * TENS} rounds: " + "  ".join(
                    f"{system} {one.p50():.0f}/{one.p99():.0f} ms" for system, one in series.items()) +
                    f"  (p50/p99; load average {os.getloadavg()[0]:.1f})")
    finally:
        background.end()
        ranks.end()
    return series


def results_of(tail, series):
    """The keys of results.json, flat."""
    short = "disturbed" + tail.replace(".", "")
    found = {}
    for system, one in series.items():
        found |= {f"{short}_{system}_p50_ms": round(one.p50(), 2), f"{short}_{system}_p99_ms": round(one.p99(), 2),
                  f"{short}_{system}_background_mbit_s": round(one.goodput() * 8e-6, 1), f"{short}_{system}_rounds": len(one.ms)}
        if system != "gloo":
            found[f"{short}_{system}_approximated_and_carried"] = round(one.approximated(), 6)
    gloo = series["gloo"]
    found[f"{short}_gloo_tail"] = round(gloo.p99() / gloo.p50(), 3)
    for system, one in series.items():
        if system != "gloo":
            found[f"{short}_p99_gloo_vs_{system}"] = round(gloo.p99() / one.p99(), 3)
            found[f"{short}_p50_gloo_vs_{system}"] = round(gloo.p50() / one.p50(), 3)
            found[f"{short}_background_goodput_{system}"] = round(one.goodput() / gloo.goodput(), 3) if gloo.goodput() else None
    if {"exact", "consistent"} <= set(series):
        found[f"{short}_p99_exact_vs_consistent"] = round(series["exact"].p99() / series["consistent"].p99(), 3)
    return found


def show(tail, series):
    say(f"\ntail {tail}:  {'system':14} {'p50':>9} {'p99':>9} {'p99/p50':>8} {'background':>14} {'approximated + carried':>23}  statuses")
    for system, one in series.items():
        say(f"            {system:14} {one.p50():6.1f} ms {one.p99():6.1f} ms {one.p99() / one.p50():8.2f} "
            f"{one.goodput() * 8e-6:8.0f} Mbit/s {100 * one.approximated():21.3f} %  {one.statuses or '-'}")


def daemon_settings(_node):
    return {"metrics": {"listen": "off"}, "exchange": {"carry_over": True} if carries_over() else {}}


def carries_over():
    """Whether what a bounded round does not count joins a later one; else it is lost."""
    return clusters.takes("exchange.carry_over=true")


class DisturbedCluster(clusters.Cluster):
    def __init__(self, options):
        super().__init__(NODES, prefix="dist", rate="1gbit", need_namespaces=True, settings=daemon_settings)
        self.prefer = options.prefer

    def start(self):
        super().start()
        if self.prefer:
            prefer(int(task) for daemon in self.daemons for task in os.listdir(f"/proc/{daemon.pid}/task"))


def run(options):
    settings = load_settings()
    say("disturbed: frozen settings, tests/bench/disturbed.json: " + json.dumps(settings))
    say(f"disturbed: an all-reduce of {settings['bytes']} bytes; bound of the bounded classes: {settings['deadline_ms']} ms a round, "
        f"given with each op; carry-over {'on' if carries_over() else 'not in this version'}; load average at the start {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    results = {"disturbed_load_average_at_start": round(os.getloadavg()[0], 2)}
    with DisturbedCluster(options) as cluster:
        cluster.start()
        probe = Ranks(cluster, settings)
        allowed = classes_allowed(probe)
        try:
            probe.end()
        except Failure:
            pass
        if len(allowed) < len(CLASSES):  # the refused op ended its job
            cluster.stop(3)
            cluster.start()
        for tail in settings["tails"]:
            series = measure(cluster, settings, tail, ["gloo"] + allowed, options.rounds)
            show(tail, series)
            results |= results_of(tail, series)
    results["disturbed_background_goodput"] = min(value for name, value in results.items()
                                                  if name.endswith("_background_goodput_consistent"))
    results["disturbed_load_average_at_end"] = round(os.getloadavg()[0], 2)
    return results


def calibrate(options):
    """Looks for the mean length of a burst at which Gloo's own p99/p50 is what a tail's name says."""
    settings = load_settings()
    with DisturbedCluster(options) as cluster:
        for tail, burst in settings["tails"].items():
            low, high = 0.0, 2.0 * burst["on_ms"]  # the first attempt: what the file says
            for _ in range(options.attempts):
                burst["on_ms"] = round((low + high) / 2, 1)
                background = Background(cluster, burst, settings["seed"])
                ranks = Ranks(cluster, settings, with_sluice=False)
                ranks.run("gloo", settings["warm_up"])
                gloo = Series()
                for _ in range(-(-options.rounds // TENS)):
                    background.go()
                    gloo.add(*ranks.run("gloo", TENS), background.rest())
                background.end()
                ranks.end()
                found = gloo.p99() / gloo.p50()
                say(f"tail {tail}: {burst} -> p50 {gloo.p50():.1f} ms, p99 {gloo.p99():.1f} ms, p99/p50 {found:.2f}, background "
                    f"{gloo.goodput() * 8e-6:.0f} Mbit/s, load average {os.getloadavg()[0]:.1f}")
                if abs(found / float(tail) - 1) < 0.05:
                    break
                low, high = (burst["on_ms"], high) if found < float(tail) else (low, burst["on_ms"])
    with open(SETTINGS, "w", encoding="utf-8") as file:
        json.dump(settings, file, indent=2)
        file.write("\n")
    say(f"written: {SETTINGS}")
    return 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=400, help="of each system at each tail")
    parser.add_argument("--output")
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--prefer", action="store_true", help="raise the priority of all that takes part")
    parser.add_argument("--attempts", type=int, default=7)
    options = parser.parse_args()
    if not clusters.can_make_namespaces():
        say("disturbed runs need network namespaces: run it as root")
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the with blocks clean up
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
    try:
        if options.calibrate:
            return calibrate(options)
        results = run(options)
    except Failure as failure:
        say(f"disturbed: {failure}")
        return 1
    say("\n" + "\n".join(f"{name:52} {value}" for name, value in results.items()
                         if "_vs_" in name or "approximated" in name or "background_goodput" in name or "tail" in name))
    if options.output:
        bench_results.write(options.output, results)
        say(f"\nwritten: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
