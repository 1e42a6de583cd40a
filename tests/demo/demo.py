"""Trains one model several times over the same links, with Gloo and with Sluice, and writes what came of it.

Started by scripts/demo, which has the manual.
"""
import argparse
import datetime
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

from cluster import ROOT, Cluster, Failure, interpreter, tail, why_no_namespaces
import report

NODES = 4
LINK = "1gbit"
RUN_LIMIT_S = 200
# steps: about 58 are one epoch at 256 images a rank. target: an accuracy that every run passes well before its end.
FULL = {"steps": 80, "batch": 256, "eval_every": 8, "target": 0.82, "disturbed_steps": 48}
QUICK = {"steps": 24, "batch": 256, "eval_every": 4, "target": 0.68, "disturbed_steps": 24}
RUNS = ["gloo", "exact", "consistent"]
DISTURBED_RUNS = ["gloo", "exact", "consistent", "best_effort"]
DISTURBED = " disturbed"  # after the name of a run beside bursts
TAIL = "3.0"  # of those in tests/bench/disturbed.json
DEADLINE_S = 0.6  # of a bounded round beside bursts: twice what all buckets of a step need on such a link


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--build", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--disturbed", action="store_true")
    return parser.parse_args()


def allows_best_effort(environment):
    """Whether this version's State takes the class."""
    code = ("from sluice.torch import _settings; "
            "_settings.make('x', 'auto', 'best_effort', None, 1.0, None, None, None, 'ignore', None)")
    return subprocess.run([interpreter(), "-c", code], capture_output=True, timeout=60, check=False,
                          env={**environment, "PYTHONPATH": os.path.join(ROOT, "lib", "python")}).returncode == 0


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


class Demo:
    def __init__(self, options, cluster, environment):
        self.options, self.cluster, self.environment = options, cluster, environment
        self.plan = QUICK if options.quick else FULL

    def run(self, label):
        """Trains once; returns what every rank measured. label: the class or gloo, and DISTURBED for a run beside bursts."""
        plan, cluster = self.plan, self.cluster
        name, disturbed = label.replace(DISTURBED, ""), label.endswith(DISTURBED)
        job = "demo-" + label.replace(" ", "-")
        outputs = [os.path.join(cluster.folder, f"{job}{rank}.json") for rank in range(NODES)]
        logs = [os.path.join(cluster.folder, f"{job}{rank}.log") for rank in range(NODES)]
        port = 19470 + DISTURBED_RUNS.index(name) + 10 * disturbed if cluster.namespaces else free_port()
        ranks = []
        lines = queue.Queue()
        for rank in range(NODES):
            counts = cluster.namespaces or rank == 0  # on loopback, one counter sees everybody's bytes
            command = [interpreter(), "-u", os.path.join(ROOT, "tests", "demo", "train.py"), "--run", name,
                       "--label", label, "--job", job, "--steps", str(plan["disturbed_steps" if disturbed else "steps"]), "--batch", str(plan["batch"]),
                       "--eval-every", str(plan["eval_every"]), "--target", str(plan["target"]),
                       "--interface", cluster.interface() if counts else "", "--output", outputs[rank]]
            if disturbed and name in ("consistent", "best_effort"):
                command += ["--deadline", str(DEADLINE_S)]
            environment = {**self.environment, "RANK": str(rank), "WORLD_SIZE": str(NODES), "OMP_NUM_THREADS": "1",
                           "MASTER_ADDR": cluster.addresses[0], "MASTER_PORT": str(port),
                           "GLOO_SOCKET_IFNAME": cluster.interface(), "SLUICE_SOCKET": cluster.socket(rank)}
            with open(logs[rank], "wb") as log:
                ranks.append(cluster.run(rank, command, env=environment, stderr=log,
                                         **({"stdout": -1} if rank == 0 else {"stdout": log})))
        reader = threading.Thread(target=self._read, args=(ranks[0].stdout, lines), daemon=True)
        reader.start()
        end = time.monotonic() + RUN_LIMIT_S
        try:
            while any(rank.poll() is None for rank in ranks):
                try:
                    self._progress(lines.get(timeout=0.2))
                except queue.Empty:
                    pass
                failed = [r for r, rank in enumerate(ranks) if rank.poll() not in (None, 0)]
                if failed or time.monotonic() > end:
                    raise Failure(self._why(name, ranks, logs, failed))
            reader.join(5)
            while not lines.empty():
                self._progress(lines.get())
            failed = [r for r, rank in enumerate(ranks) if rank.poll() != 0]
            if failed:
                raise Failure(self._why(name, ranks, logs, failed))
        finally:
            self._end_line()
            cluster.end(ranks, grace=2.0)
        results = []
        for path in outputs:
            with open(path, encoding="utf-8") as file:
                results.append(json.load(file))
        return results

    @staticmethod
    def _read(pipe, lines):
        for line in pipe:
            lines.put(line.decode(errors="replace").rstrip())

    def _why(self, name, ranks, logs, failed):
        # The others are given a moment to say what they saw: it often names the one that failed first.
        time.sleep(1.0)
        failed = failed or [r for r, rank in enumerate(ranks) if rank.poll() is None]
        text = [f"run '{name}': " + (f"rank {failed[0]} failed" if ranks[failed[0]].poll() is not None
                                     else f"no end after {RUN_LIMIT_S} s")]
        text += [f"sluiced of node {node} ended with status {daemon.poll()}"
                 for node, daemon in enumerate(self.cluster.daemons) if daemon.poll() is not None]
        for rank in failed:
            text.append(f"--- rank {rank}:\n{tail(logs[rank])}\n--- sluiced of node {rank}:\n"
                        f"{tail(self.cluster.log_file(rank), 8)}")
        return "\n".join(text)

    def _progress(self, line):
        try:
            said = json.loads(line)
        except ValueError:
            print(line, flush=True)
            return
        rounds = said["rounds"]
        text = (f"{said['run']:>21}  epoch {said['epoch']}  step {said['step']:3}/{said['steps']}  loss {said['loss']:.3f}  "
                f"accuracy {'-' if said['accuracy'] is None else format(said['accuracy'], '.3f')}  step {said['step_ms']:4.0f} ms"
                + (f"  round p50 {rounds['p50']:.0f} p99 {rounds['p99']:.0f} ms" if rounds else ""))
        if sys.stdout.isatty():
            print(f"\r\033[K{text}", end="", flush=True)
        else:
            print(text, flush=True)

    @staticmethod
    def _end_line():
        if sys.stdout.isatty():
            print(flush=True)


def summarize(name, ranks):
    """The entry of summary.json, and what the report needs besides."""
    steps = report.step_times(ranks)
    local = [max(times) for times in zip(*(rank["local_ms"] for rank in ranks))]
    first = ranks[0]
    reports = [rank["report"] for rank in ranks if "report" in rank]
    expected = sum(r["blocks_expected"] for r in reports)
    # Blocks of results that a rank did not get, and blocks of its own that are in no sum.
    approximated = expected + sum(r["blocks_uncounted"] - r["blocks_received"] for r in reports)
    p50 = report.quantile(steps, 0.5)
    entry = {
        "name": name,
        "step_ms_p50": round(p50, 2),
        "step_ms_p99": round(report.quantile(steps, 0.99), 2),
        "seconds_to_target": first["seconds_to_target"] and round(first["seconds_to_target"], 2),
        "accuracy": round(first["curve"][-1][2], 4),
        "bytes_sent": sum(rank["bytes_sent"] for rank in ranks),
        "approximated_ratio": approximated / expected if expected else 0.0,
        "parameter_distance": max(max(rank["distances"]) for rank in ranks),
        "incomplete_ops": sum(r["incomplete"] for r in reports),
    }
    extra = {"local_ms": report.quantile(local, 0.5), "communication_share": max(0.0, 1 - report.quantile(local, 0.5) / p50),
             "steps": steps, "curve": first["curve"], "round_ms": first["report"]["round_ms"] if reports else None}
    return entry, extra


def table(entries, extras):
    lines = [f"{'run':<22}{'step p50':>10}{'p99':>9}{'to target':>11}{'accuracy':>10}{'sent':>10}{'approx.':>9}{'distance':>10}"
             f"{'incomplete':>12}"]
    for entry in entries:
        target = "-" if entry["seconds_to_target"] is None else f"{entry['seconds_to_target']:.1f} s"
        lines.append(f"{entry['name']:<22}{entry['step_ms_p50']:>7.0f} ms{entry['step_ms_p99']:>6.0f} ms{target:>11}"
                     f"{entry['accuracy']:>10.4f}{entry['bytes_sent'] / 1e9:>7.2f} GB{100 * entry['approximated_ratio']:>8.2f}%"
                     f"{entry['parameter_distance']:>10.1e}{entry['incomplete_ops']:>12}")
    if "gloo" in extras:
        gloo = extras["gloo"]
        lines.append(f"communication share of the Gloo step: {100 * gloo['communication_share']:.0f} % (step p50 "
                     f"{next(e['step_ms_p50'] for e in entries if e['name'] == 'gloo'):.0f} ms, without communication "
                     f"{gloo['local_ms']:.0f} ms)")
    return "\n".join(lines)


def main():
    options = arguments()
    endings = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in endings:
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    os.makedirs(options.output, exist_ok=True)
    missing = "asked for by --loopback" if options.loopback else why_no_namespaces()
    if missing:
        print(f"demo: no network namespaces ({missing}); the {NODES} nodes share the loopback interface, one port each, without "
              "a limit of their links", flush=True)
    binaries = {name: os.path.join(options.build, "bin", name) for name in ("sluiced", "sluicectl")}
    library = os.path.join(options.build, "lib", "libsluice.so.0")
    environment = {**os.environ, "SLUICE_LIBRARY": library, "SLUICECTL": binaries["sluicectl"], "PYTHONDONTWRITEBYTECODE": "1"}
    began = time.monotonic()
    cluster = Cluster(NODES, binaries, LINK, namespaces=not missing)
    entries, extras, measured = [], {}, {}
    try:
        cluster.start()
        demo = Demo(options, cluster, environment)
        plan = demo.plan
        print(f"demo: {NODES} nodes" + (f", links of {LINK}" if not missing else "") + f"; MLP 784-2048-2048-10, {plan['steps']} "
              f"steps of {plan['batch']} images a rank", flush=True)
        names, bursts = options.runs.split(","), None
        if options.disturbed and missing:
            print("demo: no disturbed runs: they need links of their own", flush=True)
        elif options.disturbed:
            with open(os.path.join(ROOT, "tests", "bench", "disturbed.json"), encoding="utf-8") as file:
                bursts = json.load(file)
            names += [name + DISTURBED for name in DISTURBED_RUNS
                      if name != "best_effort" or allows_best_effort(environment)]
        for name in names:
            if name.endswith(DISTURBED) and not any(entry["name"].endswith(DISTURBED) for entry in entries):
                print(f"demo: from here on beside bursts of TCP over two of the four links, drawn by {bursts['tails'][TAIL]}; rounds of "
                      f"consistent and best_effort are bounded by {DEADLINE_S * 1000:.0f} ms", flush=True)
                cluster.disturb(bursts, TAIL)
            measured[name] = demo.run(name)
            entry, extras[name] = summarize(name, measured[name])
            entries.append(entry)
    except Failure as failure:
        print(f"demo: {failure}", file=sys.stderr, flush=True)
        return 1
    finally:
        for number in endings:  # nothing may stop this
            signal.signal(number, signal.SIG_IGN)
        cluster.close()
    summary = os.path.join(options.output, "summary.json")
    with open(summary, "w", encoding="utf-8") as file:
        json.dump({"runs": entries}, file, indent=2)
        file.write("\n")
    facts = {"nodes": NODES, "link": None if missing else LINK, "plan": plan, "quick": options.quick,
             "when": datetime.datetime.now().strftime("%Y-%m-%d %H:%M"), "cpus": os.cpu_count(),
             "gradient_bytes": next(iter(measured.values()))[0]["gradient_bytes"]}
    with open(os.path.join(options.output, "measured.json"), "w", encoding="utf-8") as file:
        json.dump({"facts": facts, "runs": measured}, file)
    page = os.path.join(options.output, "report.html")
    with open(page, "w", encoding="utf-8") as file:
        file.write(report.page(facts, entries, extras, measured))
    print("\n" + table(entries, extras))
    print(f"wrote {summary} and {page} ({time.monotonic() - began:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
