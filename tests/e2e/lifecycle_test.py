"""The programs themselves: what sluiced tells the service manager, reload, stop, exit codes; what sluicectl prints."""
import json
import os
import re
import signal
import socket
import subprocess
import time

import pytest

from cluster import Cluster, program
from ranks import Job


class Manager:
    """systemd's side of sd_notify(3)."""

    def __init__(self, folder):
        self.path = os.path.join(folder, "notify.sock")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.path)
        self.socket.settimeout(0.05)
        self.seen = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def wait(self, part, timeout_s=10.0):
        """The next message with `part` in it."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            try:
                message = self.socket.recv(65536).decode()
            except socket.timeout:
                continue
            self.seen.append(message)
            if part in message:
                return message
        raise AssertionError(f"no '{part}' within {timeout_s} s; came: {self.seen}")


class Sluiced:
    """One daemon on loopback under a manager of ours."""

    def __init__(self, folder, config="", arguments=(), watchdog_us=0):
        self.folder = folder
        self.config_path = os.path.join(folder, "sluice.yaml")
        self.write(config)
        self.socket_path = os.path.join(folder, "s.sock")
        self.manager = Manager(folder)
        environment = dict(os.environ, NOTIFY_SOCKET=self.manager.path)
        if watchdog_us:
            environment["WATCHDOG_USEC"] = str(watchdog_us)
        self.log = open(os.path.join(folder, "log"), "wb")
        self.process = subprocess.Popen(
            [program("sluiced"), "--config", self.config_path, "--socket", self.socket_path, "--set", "transport.port=0",
             "--set", "transport.bind=127.0.0.1", "--set", "metrics.listen=off", *arguments],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env=environment)

    def write(self, config):
        with open(self.config_path, "w", encoding="utf-8") as file:
            file.write(config)

    def text(self):
        with open(os.path.join(self.folder, "log"), encoding="utf-8") as file:
            return file.read()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self.manager.socket.close()
        self.log.close()
        if kind is not None:
            print(self.text())


def ctl(*arguments, **environment):
    return subprocess.run([program("sluicectl"), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=20, env=dict(os.environ, **environment))


def test_ready_reload_and_stop_are_told(tmp_path):
    with Sluiced(str(tmp_path), "exchange:\n  deadline: 300ms\n") as daemon:
        ready = daemon.manager.wait("READY=1")
        assert re.search(r"STATUS=127\.0\.0\.1:\d+: 0 clients, 0 jobs running", ready), ready
        assert "sluiced " in daemon.text() and "sealing auth" in daemon.text() and "receive buffer" in daemon.text()

        daemon.write("exchange:\n  deadline: 400ms\nlanes: 2\nnode: other\n")
        daemon.process.send_signal(signal.SIGHUP)
        assert "MONOTONIC_USEC=" in daemon.manager.wait("RELOADING=1")
        daemon.manager.wait("READY=1")
        # Two lanes do not go with port 0: nothing of it was taken.
        assert "NOT reloaded" in daemon.text() and "--set: transport.port: " in daemon.text(), daemon.text()

        daemon.write("exchange:\n  deadline: 400ms\nnode: other\n")
        daemon.process.send_signal(signal.SIGHUP)
        daemon.manager.wait("RELOADING=1")
        daemon.manager.wait("READY=1")
        assert "changed exchange.deadline: 300ms -> 400ms" in daemon.text()
        assert "need a restart: node: " in daemon.text()
        keys = {key["name"]: key for key in json.loads(ctl("-s", daemon.socket_path, "config", "--json").stdout)["keys"]}
        assert keys["exchange.deadline"]["value"] == "400ms"
        assert keys["exchange.deadline"]["origin"] == f"{daemon.config_path}:2"
        assert keys["node"]["value"] != "other"

        daemon.write("exchange:\n  deadline: never\n")
        daemon.process.send_signal(signal.SIGHUP)
        assert "FAILED" in daemon.manager.wait("READY=1")

        started = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        daemon.manager.wait("STOPPING=1")
        assert daemon.process.wait(10) == 0
        assert time.monotonic() - started < 5
        assert not os.path.exists(daemon.socket_path)


def test_watchdog_is_fed_in_time(tmp_path):
    """That it is not fed when a loop stands still is shown by the unit test of Health."""
    with Sluiced(str(tmp_path), watchdog_us=1_000_000) as daemon:
        daemon.manager.wait("READY=1")
        for _ in range(4):
            daemon.manager.wait("WATCHDOG=1", 1.0)


def test_an_idle_daemon_uses_under_1_percent_of_a_core(tmp_path):
    with Sluiced(str(tmp_path)) as daemon:
        daemon.manager.wait("READY=1")
        with open(f"/proc/{daemon.process.pid}/stat", encoding="utf-8") as stat:
            before = sum(int(field) for field in stat.read().rsplit(") ", 1)[1].split()[11:13])
        time.sleep(5)
        with open(f"/proc/{daemon.process.pid}/stat", encoding="utf-8") as stat:
            used = sum(int(field) for field in stat.read().rsplit(") ", 1)[1].split()[11:13]) - before
        share = used / os.sysconf("SC_CLK_TCK") / 5
        print(f"idle: {share:.2%} of a core")
        assert share < 0.01


def run_sluiced(*arguments):
    return subprocess.run([program("sluiced"), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=20)


def test_print_config_reads_back(tmp_path):
    first = run_sluiced("--print-config", "--set", "lanes=2", "--set", "node=a b", "--set", "transport.bind=[eth7, auto]")
    assert first.returncode == 0, first.stderr
    assert re.search(r"^lanes: 2 +# --set$", first.stdout, re.M), first.stdout
    (tmp_path / "again.yaml").write_text(first.stdout)
    second = run_sluiced("--print-config", "--config", str(tmp_path / "again.yaml"))
    strip = lambda text: re.sub(r" +# .*", "", text)  # noqa: E731  pylint: disable=unnecessary-lambda-assignment
    assert strip(first.stdout) == strip(second.stdout)


@pytest.mark.parametrize("arguments,status", [
    (["--no-such-option"], 2), (["--set", "lanes"], 78), (["--set", "lnaes=2"], 78), (["--version"], 0), (["--help"], 0),
    (["--check-config", "--set", "transport.bind=nosuch0"], 78)])
def test_exit_codes_of_sluiced(arguments, status):
    result = run_sluiced(*arguments)
    assert result.returncode == status, result.stderr + result.stdout
    if status == 78:
        assert len(result.stderr) > 20
    if arguments == ["--version"]:
        assert re.fullmatch(r"sluiced \d+\.\d+\.\d+ \(protocol \d+, ABI \d+\)\n", result.stdout)


def test_sluicectl_without_a_daemon_names_the_socket_and_what_to_do(tmp_path):
    path = str(tmp_path / "none.sock")
    for arguments, environment in ((["-s", path, "status"], {}), (["status"], {"SLUICE_SOCKET": path})):
        result = ctl(*arguments, **environment)
        assert result.returncode == 3
        assert path in result.stderr and "systemctl status sluiced" in result.stderr, result.stderr
    assert ctl("no-such-command").returncode == 2
    assert ctl().returncode == 2


def test_sluicectl_shows_a_job():
    with Cluster(2) as cluster:
        cluster.start()
        path = cluster.daemons[0].socket_path
        with Job(cluster, [0, 1], name="shown") as job:
            job.join()
            job.all("allreduce count=20000 repeat=3")
            time.sleep(0.3)  # lanes publish every 100 ms
            status = json.loads(ctl("-s", path, "status", "--json").stdout)
            assert status["jobs"][0]["name"] == "shown" and status["jobs"][0]["ops"]["OK"] >= 3
            assert status["endpoint"] == f"{cluster.address(0)}:{cluster.port(0)}" and not status["health"]
            lines = ctl("-s", path, "jobs").stdout.split("\n")
            assert lines[0].split() == ["JOB", "PHASE", "NODES", "RANKS", "HERE", "OPEN", "OK", "NOT_OK", "SENT", "RECEIVED",
                                        "REPAIRED", "SKIPPED"]
            assert lines[1].split()[:5] == ["shown", "running", "2", "2", "0"]
            peers = ctl("-s", path, "peers", "--job", "shown").stdout
            assert f"{cluster.address(1)}:{cluster.port(1)}" in peers and "alive" in peers
            trace = json.loads(ctl("-s", path, "trace", "--last", "2", "--json").stdout)
            assert [op["status"] for op in trace["trace"][0]["ops"]] == ["OK", "OK"]
            chrome = json.loads(ctl("-s", path, "trace", "--chrome").stdout)
            assert {"op", "push"} <= {event["name"].split()[0] for event in chrome["traceEvents"]}
            assert "\033[" not in ctl("-s", path, "status").stdout
            missing = ctl("-s", path, "jobs", "--job", "none")
            assert missing.returncode == 1 and "none" in missing.stderr


def test_a_stopped_daemon_is_named_by_rank_and_node():
    """SIGSTOP of a daemon: its peers name node and rank, and say so in `sluicectl`, in 3 heartbeats and the time-out."""
    with Cluster(2, settings={"exchange": {"peer_timeout": "1s", "peer_interval": "50ms"}}) as cluster:
        cluster.start()
        with Job(cluster, [0, 1]) as job:
            job.join()
            os.kill(cluster.daemons[1].pid, signal.SIGSTOP)
            try:
                path = cluster.daemons[0].socket_path
                end = time.monotonic() + 5
                while True:
                    peers = json.loads(ctl("-s", path, "peers", "--json").stdout)["peers"]
                    if peers and peers[0]["state"] != "alive":
                        break
                    assert time.monotonic() < end, peers
                job.ranks[0].send("allreduce count=1000 timeout_ms=8000")
                answer = job.ranks[0].reply(15)
                assert not answer["ok"] and answer["status"] == "PEER_LOST", answer
                assert "node 1" in answer["text"] and "rank 1" in answer["text"], answer
                health = json.loads(ctl("-s", path, "status", "--json").stdout)["health"]
                assert any(cluster.address(1) in line or "node 1" in line for line in health), health
            finally:
                os.kill(cluster.daemons[1].pid, signal.SIGCONT)
