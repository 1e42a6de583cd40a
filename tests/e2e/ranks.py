"""Ranks of a job: e2e_rank processes that take one command a line and answer with one JSON object a line."""
import json
import os
import queue
import signal
import subprocess
import threading
import time

from cluster import program


class RankFailed(AssertionError):
    """A command did not answer as a test wants it to."""


class Rank:
    """One client process. `reply` waits for the answer of the oldest command that has none yet."""

    def __init__(self, cluster, node, name=""):
        self.cluster, self.node, self.name = cluster, node, name
        self.log_path = os.path.join(cluster.folder, f"rank-{name or id(self)}-{os.urandom(2).hex()}.log")
        with open(self.log_path, "wb") as log:
            self.process = cluster.popen(node, [program("e2e_rank")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=log)
        self._answers = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    @property
    def pid(self):
        return self.process.pid

    def send(self, command):
        self.process.stdin.write((command + "\n").encode())
        self.process.stdin.flush()

    def reply(self, timeout_s=60.0):
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise RankFailed(f"rank {self.name} on node {self.node} gave no answer in {timeout_s} s") from None
        if line is None:
            self._answers.put(None)
            with open(self.log_path, encoding="utf-8", errors="replace") as log:
                raise RankFailed(f"rank {self.name} on node {self.node} is gone (status {self.process.wait(5)}): "
                                 + log.read()[-2000:])
        return json.loads(line)

    def do(self, command, timeout_s=60.0):
        """Sends a command, expects that it succeeds."""
        self.send(command)
        return self.expect_ok(command, timeout_s)

    def expect_ok(self, command, timeout_s=60.0):
        answer = self.reply(timeout_s)
        if not answer["ok"]:
            raise RankFailed(f"rank {self.name} on node {self.node}: {command}: {answer}")
        return answer

    def kill(self):
        self.process.kill()
        self.process.wait(10)

    def stop_signal(self):
        self.process.send_signal(signal.SIGSTOP)

    def continue_signal(self):
        self.process.send_signal(signal.SIGCONT)

    def quit(self):
        try:
            self.process.stdin.close()
            self.process.wait(10)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.kill()


class Job:
    """The ranks of one job; placement[r] is the node of rank r."""

    _number = 0

    def __init__(self, cluster, placement, name=None):
        Job._number += 1
        self.cluster, self.placement = cluster, placement
        self.name = name or f"job{Job._number}"
        self.rendezvous = cluster.new_folder(self.name)
        self.ranks = [Rank(cluster, node, f"{self.name}.{rank}") for rank, node in enumerate(placement)]

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        for rank in self.ranks:
            if rank.process.poll() is None:
                if kind is None:
                    rank.quit()
                else:
                    rank.kill()

    def join_command(self, rank, extra=""):
        daemon = self.cluster.daemons[self.placement[rank]]
        return (f"join socket={daemon.socket_path} job={self.name} rank={rank} world={len(self.placement)} "
                f"rendezvous={self.rendezvous} {extra}")

    def join(self, extra="", timeout_s=60.0):
        for rank, client in enumerate(self.ranks):
            client.send(self.join_command(rank, extra))
        return [client.expect_ok("join", timeout_s) for client in self.ranks]

    def all(self, command, timeout_s=60.0):
        """The same command on all ranks; all must succeed. Returns the answers in rank order."""
        for client in self.ranks:
            client.send(command)
        return [client.expect_ok(command, timeout_s) for client in self.ranks]

    def replies(self, timeout_s=60.0):
        return [client.reply(timeout_s) for client in self.ranks]


class Background:
    """Runs small exact all-reduces of a job over and over in a thread, and keeps what went wrong."""

    def __init__(self, job, command="allreduce count=20000 repeat=5"):
        self.job, self.command = job, command
        self.rounds, self.error = 0, None
        self.longest_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        try:
            while not self._stop.is_set():
                started = time.monotonic()
                self.job.all(f"{self.command} seed={self.rounds + 1}")
                self.longest_s = max(self.longest_s, time.monotonic() - started)
                self.rounds += 1
        except Exception as error:  # pylint: disable=broad-except
            self.error = error

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, kind, error, trace):
        self._stop.set()
        self._thread.join(120)
        if kind is None:
            assert self.error is None, f"the job beside: {self.error}"
            assert self.rounds > 0, "the job beside made no round"
