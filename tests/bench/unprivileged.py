"""How much a user without privileges loses, for scripts/bench --unprivileged: daemons as an ordinary user, whose receive
buffers end at rmem_max of Debian's 212,992 bytes, against daemons of root, which may go beyond (SO_RCVBUFFORCE).

Four nodes, 25 MiB, class exact, in turn. setpriv takes the user and every capability from the daemon; the namespaces' own
limit is what the kernel gives them, and a machine whose rmem_max was raised is held to Debian's by receive_buffer.
"""
import os
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "e2e"))

import cluster as clusters  # noqa: E402  pylint: disable=wrong-import-position

NODES = 4
BYTES = 25 << 20
DEBIAN_RMEM_MAX = 212_992
NOBODY = 65534


class UnprivilegedDaemon(clusters.Daemon):
    """sluiced as nobody. What it makes lies in a folder of nobody's."""

    def spawn(self):
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                self.cluster.prefix(self.node) + ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups",
                                                  "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs",
                                                  clusters.program("sluiced"), "--config", self.config_path],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def socket_drops(cluster):
    """Datagrams that the nodes' kernels dropped because a receive buffer was full."""
    total = 0
    for node in range(NODES):
        text = subprocess.run(cluster.prefix(node) + ["cat", "/proc/net/snmp"], capture_output=True, text=True, check=True,
                              timeout=10).stdout
        names, values = [line.split()[1:] for line in text.splitlines() if line.startswith("Udp:")]
        total += int(dict(zip(names, values))["RcvbufErrors"])
    return total


def receive_buffers(cluster):
    """What the daemons say that they got."""
    return [line[line.index("receive buffer"):][:60] for daemon in cluster.daemons for line in daemon.log().split("\n")
            if "receive buffer" in line]


def one_run(cluster, run_ranks, iterations):
    """Milliseconds of a call, and the datagrams dropped meanwhile."""
    before = socket_drops(cluster)
    meeting = cluster.new_folder("meet")

    def command(rank, result):
        return [clusters.program("sluice-bench"), "allreduce", "--sizes", str(BYTES), "-n", str(iterations), "-w", "3", "-c",
                "--class", "exact", "--socket", cluster.daemons[rank].socket_path, "--rank", str(rank), "--world", str(NODES),
                "--rendezvous", meeting, "--json", result]

    row = run_ranks(cluster, command, "sluice exact, 25 MiB")["rows"][0]
    if row["wrong"]:
        raise RuntimeError(f"{row['wrong']:.0f} elements were wrong")
    return row["time_ms"], socket_drops(cluster) - before


def measure(run_ranks, say, rounds=5, iterations=10):
    """{"unprivileged_time_vs_root": ...}; run_ranks is that of bench.py."""
    results = {}
    with clusters.Cluster(NODES, prefix="rootrun", need_namespaces=True) as root, \
            clusters.Cluster(NODES, prefix="userrun", need_namespaces=True) as user:
        user.daemons = [UnprivilegedDaemon(user, node) for node in range(NODES)]
        for daemon in user.daemons:
            daemon.write_config({"transport": {"receive_buffer": DEBIAN_RMEM_MAX}})
        os.chmod(user.folder, 0o777)
        for daemon in user.daemons:
            os.chmod(daemon.config_path, 0o644)
            open(daemon.log_path, "ab").close()
        times, drops = {"root": [], "user": []}, {"root": 0, "user": 0}
        for turn in range(rounds):
            for name, cluster in (("root", root), ("user", user)):
                cluster.start()
                try:
                    milliseconds, dropped = one_run(cluster, run_ranks, iterations)
                finally:
                    cluster.stop(3)
                times[name].append(milliseconds)
                drops[name] += dropped
            say(f"unprivileged, round {turn + 1}/{rounds}: root {times['root'][-1]:.1f} ms, user {times['user'][-1]:.1f} ms, "
                f"drops {drops['root']} / {drops['user']}, load average {os.getloadavg()[0]:.1f}")
        for line in receive_buffers(user)[:1]:
            say(f"an unprivileged daemon's log: {line}")
    ratios = sorted(a / b for a, b in zip(times["user"], times["root"]))
    results["unprivileged_time_vs_root"] = round(statistics.median(ratios), 4)
    results["unprivileged_time_vs_root_min"], results["unprivileged_time_vs_root_max"] = round(ratios[0], 4), round(ratios[-1], 4)
    results["unprivileged_socket_drops"], results["root_socket_drops"] = drops["user"], drops["root"]
    results["unprivileged_25MiB_ms"], results["root_25MiB_ms"] = (round(statistics.median(times[who]), 2) for who in ("user", "root"))
    results["unprivileged_load_average"] = round(os.getloadavg()[0], 2)
    return results
