#!/usr/bin/env python3
"""Measures Sluice against Gloo and Open MPI for scripts/bench, which has the manual.

All systems run one after another in every round, on the same links (A B C D, A B C D, ...), and a ratio is taken
within a round, so that a machine that becomes slower meanwhile slows both sides. Reported is the median of the rounds
with the smallest and the largest.
"""
import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "e2e"))

import cluster as clusters  # noqa: E402  pylint: disable=wrong-import-position
import bench_results  # noqa: E402  pylint: disable=wrong-import-position
import unprivileged  # noqa: E402  pylint: disable=wrong-import-position
from ranks import Job  # noqa: E402  pylint: disable=wrong-import-position

HERE = os.path.dirname(os.path.abspath(__file__))
NODES = 4
SIZES = {"64KiB": 64 << 10, "1MiB": 1 << 20, "25MiB": 25 << 20}
IDLE_S = 5.0
RUN_LIMIT_S = 120


def say(text=""):
    print(text, flush=True)


class Failure(Exception):
    """A run that cannot be counted."""


def run_ranks(cluster, command_of, what):
    """One process per node; returns when all have ended well. The result is rank 0's JSON file."""
    result = os.path.join(cluster.new_folder("result"), "rank0.json")
    logs = [os.path.join(os.path.dirname(result), f"{rank}.log") for rank in range(NODES)]
    processes = []
    for rank in range(NODES):
        with open(logs[rank], "wb") as log:
            processes.append(cluster.popen(rank, command_of(rank, result), stdout=log, stderr=subprocess.STDOUT))
    end = time.monotonic() + RUN_LIMIT_S
    statuses = []
    for process in processes:
        try:
            statuses.append(process.wait(max(0.1, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            statuses.append(None)
            break
    if statuses != [0] * NODES:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait(10)
        text = "\n".join(f"-- rank {rank}\n" + open(logs[rank], encoding="utf-8", errors="replace").read()[-1500:]
                         for rank in range(NODES))
        raise Failure(f"{what}: exit statuses {statuses} (None: not within {RUN_LIMIT_S} s)\n{text}")
    with open(result, encoding="utf-8") as file:
        return json.load(file)


def sweep_arguments(options):
    return ["--sizes", ",".join(str(size) for size in SIZES.values()), "-n", str(options.iterations), "-w", "3", "-c"]


def sluice(cluster, options, sealing="none", op_class="exact", extra=()):
    """A run over daemons that are started for it and stopped after it."""
    for daemon in cluster.daemons:
        daemon.write_config({"security": {"sealing": sealing, "insecure": sealing == "none"}})
    try:
        cluster.start()
        meeting = cluster.new_folder("meet")

        def command(rank, result):
            return [clusters.program("sluice-bench"), "allreduce", *sweep_arguments(options), "--class", op_class,
                    "--socket", cluster.daemons[rank].socket_path, "--rank", str(rank), "--world", str(NODES),
                    "--rendezvous", meeting, "--daemon-pid", str(cluster.daemons[rank].pid),
                    # A bound that a busy machine does not meet: what is measured is speed, not loss.
                    *(["--deadline-us", "20000000"] if op_class != "exact" else []),
                    *extra, "--json", result]

        return run_ranks(cluster, command, f"sluice {op_class} {sealing}")
    finally:
        cluster.stop(3)


def gloo(cluster, options):
    meeting = cluster.new_folder("meet")

    def command(rank, result):
        return [clusters.program("gloo_bench"), *sweep_arguments(options), "--rank", str(rank), "--world", str(NODES),
                "--rendezvous", meeting, "--interface", "eth0" if cluster.namespaced else "lo", "--json", result]

    return run_ranks(cluster, command, "gloo")


def mpi(cluster, options):
    """mpirun in the first namespace, with an agent that starts the others. Why each flag: no shared memory and no UCX
    (pml, btl), only the cluster's network (*_if_include), addresses as host names (orte_keep_fqdn_hostnames), no pinning
    (each "node" would pin its first rank to CPU 0), and yielding, because there are more ranks than CPUs."""
    folder = cluster.new_folder("mpi")
    names = [f"{cluster.name}-{node}" for node in range(NODES)]
    with open(os.path.join(folder, "map"), "w", encoding="utf-8") as file:
        file.writelines(f"{name} {address}\n" for name, address in zip(names, cluster.addresses))
    with open(os.path.join(folder, "hosts"), "w", encoding="utf-8") as file:
        file.writelines(f"{address} slots=1\n" for address in cluster.addresses)
    network = cluster.addresses[0].rsplit(".", 1)[0] + ".0/24"
    result = os.path.join(folder, "rank0.json")
    command = ["unshare", "-u", "bash", "-c", 'hostname "$0"; exec mpirun "$@"', names[0], "-np", str(NODES),
               "--hostfile", os.path.join(folder, "hosts"), "--map-by", "node", "--bind-to", "none", "--oversubscribe"]
    for key, value in {"plm_rsh_agent": os.path.join(HERE, "mpi_agent"), "orte_keep_fqdn_hostnames": "1",
                       "oob_tcp_if_include": network, "pml": "ob1", "btl": "tcp,self", "btl_tcp_if_include": network,
                       "mpi_yield_when_idle": "1"}.items():
        command += ["--mca", key, value]
    command += [clusters.program("mpi_bench"), *sweep_arguments(options), "--json", result]
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "TMPDIR": folder,
                   "SLUICE_MPI_MAP": os.path.join(folder, "map")}
    log = os.path.join(folder, "log")
    with open(log, "wb") as file:
        process = cluster.popen(0, command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        status = process.wait(RUN_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # mpirun ends its ranks
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
        status = None
    if status != 0:
        with open(log, encoding="utf-8", errors="replace") as file:
            raise Failure(f"mpi: exit status {status}\n{file.read()[-3000:]}")
    with open(result, encoding="utf-8") as file:
        return json.load(file)


def idle_share(cluster):
    """Share of a core that a daemon with a joined job uses while nobody calls; the mean over the nodes."""
    for daemon in cluster.daemons:
        daemon.write_config({})
    try:
        cluster.start()
        with Job(cluster, list(range(NODES))) as job:
            job.join()
            job.all("allreduce count=100000 repeat=3")
            time.sleep(1)
            before = [daemon.cpu_seconds() for daemon in cluster.daemons]
            started = time.monotonic()
            time.sleep(IDLE_S)
            seconds = time.monotonic() - started
            spent = sum(daemon.cpu_seconds() - cpu for daemon, cpu in zip(cluster.daemons, before))
            job.all("leave")
        return spent / NODES / seconds
    finally:
        cluster.stop(3)


class Table:
    """Time and CPU per system, size and round, and ratios within a round."""

    def __init__(self):
        self.time, self.cpu, self.results = {}, {}, {}

    def add(self, system, report):
        for name, size in SIZES.items():
            row = next(row for row in report["rows"] if row["bytes"] == size)
            if row["wrong"] != 0:
                raise Failure(f"{system}, {name}: {row['wrong']:.0f} elements were wrong")
            self.time.setdefault((system, name), []).append(row["time_ms"])
            self.cpu.setdefault((system, name), []).append(row["cpu_s_per_gb"])

    def absolute(self):
        for (system, name), values in self.time.items():
            self.results[f"allreduce_{name}_{system}_ms"] = round(statistics.median(values), 4)
        for (system, name), values in self.cpu.items():
            self.results[f"allreduce_{name}_{system}_cpu_s_per_gb"] = round(statistics.median(values), 4)

    def ratio(self, name, values, over, above, below):
        """One ratio: per round, then the median."""
        pairs = list(zip(values.get((over, above), []), values.get((below, above), [])))
        if not pairs:
            return
        ratios = sorted(a / b for a, b in pairs if b > 0)
        if ratios:
            self.results[name] = round(statistics.median(ratios), 4)
            self.results[name + "_min"], self.results[name + "_max"] = round(ratios[0], 4), round(ratios[-1], 4)

    def ratios(self):
        for size in SIZES:
            for peer in ("gloo", "mpi"):
                self.ratio(f"allreduce_{size}_time_vs_{peer}", self.time, "sluice_none", size, peer)
                self.ratio(f"allreduce_{size}_cpu_vs_{peer}", self.cpu, "sluice_none", size, peer)
            self.ratio(f"allreduce_{size}_consistent_time_vs_gloo", self.time, "sluice_none_consistent", size, "gloo")
        self.ratio("auth_time_vs_none", self.time, "sluice_auth", "25MiB", "sluice_none")
        self.ratio("auth_time_vs_none_mtu9000", self.time, "sluice_auth_mtu9000", "25MiB", "sluice_none_mtu9000")
        self.ratio("mtu9000_time_vs_gloo", self.time, "sluice_none_mtu9000", "25MiB", "gloo_mtu9000")
        self.ratio("mtu9000_cpu_vs_gloo", self.cpu, "sluice_none_mtu9000", "25MiB", "gloo_mtu9000")
        self.ratio("ordered_sum_time_ratio", self.time, "sluice_none", "25MiB", "sluice_none_consistent")

    def show(self):
        say(f"\n{'median (smallest .. largest) of the rounds':48} {'time ms':>30} {'CPU s/GB':>30}")
        for system, size in self.time:
            times, cpus = sorted(self.time[system, size]), sorted(self.cpu[system, size])
            say(f"{size:>8} {system:39} {statistics.median(times):10.3f} ({times[0]:8.3f} ..{times[-1]:8.3f})"
                f" {statistics.median(cpus):10.3f} ({cpus[0]:8.3f} ..{cpus[-1]:8.3f})")
        say(f"\n{'ratio':48} {'median':>8} {'smallest':>9} {'largest':>8}")
        for name, value in self.results.items():
            if name + "_min" in self.results:
                say(f"{name:48} {value:8.3f} {self.results[name + '_min']:9.3f} {self.results[name + '_max']:8.3f}")


def measure(options):
    table = Table()
    with clusters.Cluster(NODES, prefix="bench") as plain, clusters.Cluster(NODES, mtu=9000, prefix="bench") as jumbo:
        systems = [("sluice_none", lambda: sluice(plain, options)),
                   ("gloo", lambda: gloo(plain, options)),
                   ("sluice_none_consistent", lambda: sluice(plain, options, op_class="consistent")),
                   ("sluice_auth", lambda: sluice(plain, options, "auth")),
                   ("mpi", lambda: mpi(plain, options)),
                   ("sluice_none_mtu9000", lambda: sluice(jumbo, options)),
                   ("sluice_auth_mtu9000", lambda: sluice(jumbo, options, "auth")),
                   ("gloo_mtu9000", lambda: gloo(jumbo, options))]
        for needed, system in (("mpirun", "mpi"),):
            if not shutil.which(needed):
                say(f"left out: {system} ({needed} is missing; scripts/setup --bench installs it)")
                systems = [entry for entry in systems if not entry[0].startswith(system)]
        for peer in ("gloo", "mpi"):
            if not os.path.exists(os.path.join(clusters.build_dir(), "bin", peer + "_bench")):
                say(f"left out: {peer} (its program was not built; scripts/setup --bench installs its library)")
                systems = [entry for entry in systems if not entry[0].startswith(peer)]
        if options.only:
            systems = [entry for entry in systems if entry[0] in options.only.split(",")]
        for turn in range(options.rounds):
            for system, run in systems:
                started = time.monotonic()
                table.add(system, run())
                times = "  ".join(f"{name} {table.time[system, name][-1]:9.3f} ms" for name in SIZES)
                say(f"round {turn + 1}/{options.rounds} {system:24} {times}   ({time.monotonic() - started:.1f} s)")
        table.absolute()
        table.ratios()
        if not options.only:
            table.results["idle_daemon_cpu_share"] = round(idle_share(plain), 5)
    table.show()
    if "idle_daemon_cpu_share" in table.results:
        say(f"idle daemon with a joined job: {table.results['idle_daemon_cpu_share'] * 100:.2f} % of a core")
    return table.results


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--only")
    parser.add_argument("--unprivileged", action="store_true")
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    if not clusters.can_make_namespaces():
        say("scripts/bench needs network namespaces: run it as root")
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the with blocks clean up
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
    try:
        results = unprivileged.measure(run_ranks, say) if options.unprivileged else measure(options)
    except Failure as failure:
        say(f"bench: {failure}")
        return 1
    if options.unprivileged:
        say("\n" + "\n".join(f"{name:48} {value}" for name, value in results.items()))
    bench_results.write(options.output, results)
    say(f"\nwritten: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
