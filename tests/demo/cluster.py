"""The nodes of the demo: a network namespace each where that is allowed, else a port each on loopback; and their daemons.

Whatever is started here is ended by close(), in any state, and by the kernel if this process dies.
"""
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
NETNS_CLUSTER = os.path.join(ROOT, "scripts", "netns-cluster")
PREFIX = "sldemo"  # of the namespaces' names; then the process id
PR_SET_PDEATHSIG = 1
START_S, STOP_S = 20.0, 5.0
BACKGROUND_PORT = 9601
_libc = ctypes.CDLL(None)


def die_with_parent():
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Failure(Exception):
    """Something that the demo cannot go on after; the text is for a person."""


def why_no_namespaces():
    """None when this user can make network namespaces, else what is missing."""
    try:
        result = subprocess.run([NETNS_CLUSTER, "check"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if result.returncode == 0 else result.stderr.strip().replace("netns-cluster: ", "")


def remove_leftovers():
    """The namespaces of a demo that was killed so hard that it could not remove them."""
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20).stdout
    for name in set(re.findall(rf"^({PREFIX}\d+)-", spaces, re.M)):
        if not os.path.exists(f"/proc/{name[len(PREFIX):]}"):
            subprocess.run([NETNS_CLUSTER, "down", name], capture_output=True, timeout=60)


class Cluster:
    """count nodes with a sluiced each. `rate`: of each link, as tc writes it ("1gbit"); only with namespaces."""

    def __init__(self, count, binaries, rate="1gbit", namespaces=True, base_port=0, log=lambda line: None):
        self.count, self._binaries, self._rate, self.namespaces, self._log = count, binaries, rate, namespaces, log
        self._base_port = base_port
        self._name = f"{PREFIX}{os.getpid()}"
        self._processes = []
        self.daemons = []
        self._spaces = []
        self.folder = tempfile.mkdtemp(prefix="sluice-demo-")
        self.addresses = ["127.0.0.1"] * count

    # --- Nodes

    def start(self):
        if self.namespaces:
            remove_leftovers()
            made = subprocess.run([NETNS_CLUSTER, "up", "-r", self._rate, self._name, str(self.count)], capture_output=True,
                                  text=True, timeout=150)
            if made.returncode != 0:
                raise Failure(f"could not make the namespaces: {made.stderr.strip()}")
            pairs = [line.split() for line in made.stdout.splitlines()]
            self._spaces, self.addresses = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        self.daemons = [self._start_daemon(node) for node in range(self.count)]
        for node, daemon in enumerate(self.daemons):
            self._await_daemon(node, daemon)

    def socket(self, node):
        return os.path.join(self.folder, f"node{node}.sock")

    def log_file(self, node):
        return os.path.join(self.folder, f"sluiced{node}.log")

    def interface(self):
        return "eth0" if self.namespaces else "lo"

    def inside(self, node, command):
        return (["ip", "netns", "exec", self._spaces[node]] if self.namespaces else []) + command

    def _start_daemon(self, node):
        config = os.path.join(self.folder, f"node{node}.yaml")
        bind = "eth0" if self.namespaces else "127.0.0.1"
        with open(config, "w", encoding="utf-8") as file:
            file.write(f"node: node{node}\n"
                       f"transport: {{bind: {bind}, port: {9470 if self.namespaces else 0}}}\n"
                       f"socket: {{path: {self.socket(node)}}}\n"
                       "exchange: {carry_over: true}\n"
                       "metrics: {listen: off}\n")
        with open(self.log_file(node), "wb") as log:
            return self.run(node, [self._binaries["sluiced"], "--config", config], stdout=log, stderr=subprocess.STDOUT)

    def _await_daemon(self, node, daemon):
        end = time.monotonic() + START_S
        while not os.path.exists(self.socket(node)):
            if daemon.poll() is not None or time.monotonic() > end:
                what = "did not come up" if daemon.poll() is None else f"ended with status {daemon.returncode}"
                raise Failure(f"sluiced of node {node} {what}:\n{tail(self.log_file(node))}")
            time.sleep(0.05)

    # --- Processes

    def run(self, node, command, **options):
        """Starts a command on a node. It is killed at the latest when this process ends."""
        process = subprocess.Popen(self.inside(node, command), stdin=subprocess.DEVNULL, preexec_fn=die_with_parent,
                                   start_new_session=True, **options)
        self._processes.append(process)
        return process

    def disturb(self, settings, tail):
        """Bursts of TCP between the last two nodes, both ways, as scripts/bench --disturbed has them. Returns the processes."""
        program, burst = os.path.join(ROOT, "tests", "bench", "background.py"), settings["tails"][tail]
        pair = (self.count - 2, self.count - 1)
        started = []
        for index, node in enumerate(pair):
            with open(os.path.join(self.folder, f"background{node}.log"), "ab") as log:
                there, here = self.addresses[pair[1 - index]], self.addresses[node]
                for command in (["receive", here, str(BACKGROUND_PORT)],
                                ["send", there, str(BACKGROUND_PORT), str(settings["seed"] + index), str(burst["flows"]),
                                 str(burst["on_ms"]), str(burst["off_ms"]), "always"]):
                    started.append(self.run(node, [interpreter(), "-B", program] + command, stdout=log, stderr=log))
        return started

    def end(self, processes, grace=STOP_S):
        """Ends processes that run() started: asks, waits, kills."""
        for process in processes:
            if process.poll() is None:
                process.terminate()
        end = time.monotonic() + grace
        for process in processes:
            try:
                process.wait(max(0.05, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process in self._processes:
                self._processes.remove(process)

    def close(self):
        self.end(list(self._processes))
        if self._spaces or self.namespaces:
            subprocess.run([NETNS_CLUSTER, "down", self._name], capture_output=True, timeout=60)
        shutil.rmtree(self.folder, ignore_errors=True)


def tail(path, lines=25):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return "".join(file.readlines()[-lines:]).rstrip() or "(it wrote nothing)"
    except OSError as error:
        return f"({error})"


def interpreter():
    """Debian's torch belongs to /usr/bin/python3; another python3 may come first in PATH."""
    return "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
