"""Daemons on loopback, and processes that are ranks of a job, for the tests.

A Pool keeps its rank processes (worker.py) alive between cases, because importing torch takes longer than a case. A case
that fails or hangs costs the pool its processes; the next one gets new ones.
"""
import ctypes
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
_libc = ctypes.CDLL(None)
START_S = 20.0


def die_with_parent():
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def build_file(variable, *names):
    """A built file: from its variable, else under SLUICE_BUILD_DIR."""
    if os.environ.get(variable):
        return os.environ[variable]
    return os.path.join(os.environ.get("SLUICE_BUILD_DIR", os.path.join(ROOT, "build", "dev")), *names)


def sluiced():
    return build_file("SLUICED", "bin", "sluiced")


def library():
    return build_file("SLUICE_LIBRARY", "lib", "libsluice.so.0")


def what_is_missing():
    """None, or which built file the tests lack."""
    for path in (sluiced(), library()):
        if not os.path.exists(path):
            return f"{path} is not built (targets sluiced and sluice)"
    return None


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Daemons:
    """count sluiced processes on 127.0.0.1, each with a socket and port of its own. extra: more lines of YAML; transport:
    more of that section, in one line."""

    def __init__(self, count, extra="", transport=""):
        self._transport = f", {transport}" if transport else ""
        self._folder = tempfile.TemporaryDirectory(prefix="sluice-test-")
        self.processes = []
        self.sockets = []
        self.logs = []
        try:
            for node in range(count):
                self._start(node, extra)
            for node in range(count):
                self._await(node)
        except BaseException:
            self.close()
            raise

    def _start(self, node, extra):
        base = os.path.join(self._folder.name, f"node{node}")
        self.sockets.append(base + ".sock")
        self.logs.append(base + ".log")
        with open(base + ".yaml", "w", encoding="utf-8") as file:
            file.write(f"node: node{node}\ntransport: {{bind: 127.0.0.1, port: 0{self._transport}}}\nsocket: {{path: {base}.sock}}\n"
                       f"metrics: {{listen: off}}\n{extra}\n")
        self.processes.append(self._spawn(node))

    def _spawn(self, node):
        base = os.path.join(self._folder.name, f"node{node}")
        with open(base + ".log", "ab") as log:
            return subprocess.Popen([sluiced(), "--config", base + ".yaml"], stdin=subprocess.DEVNULL, stdout=log,
                                    stderr=subprocess.STDOUT, preexec_fn=die_with_parent)

    def kill(self, node):
        """kill -9."""
        self.processes[node].kill()
        self.processes[node].wait()

    def restart(self, node):
        """As its manager does after a kill(): the same socket, another port."""
        os.unlink(self.sockets[node])
        self.processes[node] = self._spawn(node)
        self._await(node)

    def _await(self, node):
        end = time.monotonic() + START_S
        while not os.path.exists(self.sockets[node]):
            if self.processes[node].poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"sluiced of node {node} did not come up:\n{self.log(node)}")
            time.sleep(0.02)

    def log(self, node):
        with open(self.logs[node], encoding="utf-8", errors="replace") as file:
            return file.read()[-4000:]

    def alive(self):
        return all(process.poll() is None for process in self.processes)

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Rank:
    """One worker process."""

    def __init__(self, rank, world, sockets, port, python=sys.executable):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
                       "SLUICE_SOCKET": sockets[rank], "SLUICE_LIBRARY": library(), "PYTHONDONTWRITEBYTECODE": "1"}
        self.process = subprocess.Popen([python, "-u", os.path.join(HERE, "worker.py")], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
                                        preexec_fn=die_with_parent)
        self.answers, self.noise = queue.Queue(), []
        self._threads = [threading.Thread(target=self._read_answers, daemon=True),
                         threading.Thread(target=self._read_noise, daemon=True)]
        for thread in self._threads:
            thread.start()

    def _read_answers(self):
        for line in self.process.stdout:
            try:
                self.answers.put(json.loads(line))
            except ValueError:
                self.noise.append(line.decode(errors="replace"))
        self.answers.put(None)

    def _read_noise(self):
        for line in self.process.stderr:
            self.noise.append(line.decode(errors="replace"))

    def ask(self, case, job, arguments):
        self.process.stdin.write(json.dumps({"case": case, "job": job, "arguments": arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, timeout):
        """{"value": ...} or {"error": traceback text}; None when the process ended; Timeout text when it did not come."""
        try:
            return self.answers.get(timeout=timeout)
        except queue.Empty:
            return {"error": f"no answer within {timeout:.0f} s", "hung": True}

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Pool:
    """world ranks; rank r uses the daemon nodes[r]."""

    def __init__(self, daemons, nodes):
        self._daemons, self._nodes = daemons, nodes
        self._ranks, self._count = [], 0

    def ranks(self):
        if not self._ranks:
            port = free_port()
            sockets = [self._daemons.sockets[node] for node in self._nodes]
            self._ranks = [Rank(r, len(self._nodes), sockets, port) for r in range(len(self._nodes))]
        return self._ranks

    def run(self, case, timeout=60.0, **arguments):
        """Runs a function of cases.py on all ranks; the list of what they returned. AssertionError with everything that was
        said when one failed or hung."""
        answers = self.run_raw(case, timeout, **arguments)
        bad = [f"--- rank {r}: {answer['error']}" for r, answer in enumerate(answers) if "error" in answer]
        if bad:
            logs = "\n".join(f"--- sluiced {node}:\n{self._daemons.log(node)}" for node in sorted(set(self._nodes)))
            raise AssertionError(f"case {case}{arguments}\n" + "\n".join(bad) + "\n" + logs)
        return [answer["value"] for answer in answers]

    def run_raw(self, case, timeout=60.0, **arguments):
        """As run, with {"error": text} for the ranks that failed."""
        self._count += 1
        job = f"{case}-{os.getpid()}-{self._count}"
        ranks = self.ranks()
        for rank in ranks:
            rank.ask(case, job, arguments)
        end = time.monotonic() + timeout
        answers = []
        for rank in ranks:
            answer = rank.answer(max(0.1, end - time.monotonic()))
            if answer is None:
                answer = {"error": f"the process ended with {rank.process.wait()}:\n{''.join(rank.noise[-30:])}"}
            answers.append(answer)
        if any("error" in answer for answer in answers):
            self.close()
        return answers

    def close(self):
        for rank in self._ranks:
            rank.kill()
        self._ranks = []
