"""What is refused says why: other versions, garbage, a second daemon, a bad configuration."""
import os
import re
import socket
import struct
import subprocess
import time

import pytest

import control
from cluster import Cluster, program
from ranks import Job


@pytest.fixture(scope="module")
def daemon():
    with Cluster(1) as cluster:
        cluster.start()
        yield cluster.daemons[0]


def assert_still_serving(daemon):
    assert daemon.alive()
    with control.RawClient(daemon) as client:
        assert client.hello()["type"] == control.WELCOME


def test_welcome_names_an_endpoint(daemon):
    with control.RawClient(daemon) as client:
        welcome = client.hello()
        assert re.fullmatch(r"[0-9.]+:\d+ n0", welcome["text"]), welcome
        assert welcome["lanes"] >= 1 and welcome["payload"] >= 512
        assert welcome["join_nonce"] != bytes(16)


@pytest.mark.parametrize("version", [0, 1, 0xffffffff])
def test_another_abi_version(daemon, version):
    with control.RawClient(daemon) as client:
        with pytest.raises(control.Refused) as refused:
            client.hello(abi=version)
        assert str(version) in refused.value.text and str(control.ABI) in refused.value.text, refused.value.text
    assert_still_serving(daemon)


@pytest.mark.parametrize("job", [b"", b"a b", b"a/b", b"\xff\xfe"],
                         ids=["empty", "space", "slash", "not ascii"])
def test_a_job_name_that_is_none(daemon, job):
    with control.RawClient(daemon) as client:
        client.job = job
        with pytest.raises(control.Refused) as refused:
            client.hello()
        assert len(refused.value.text) > 10
    assert_still_serving(daemon)


@pytest.mark.parametrize("rank,world", [(1, 1), (0, 0), (5, 4), (0, 1 << 31)])
def test_ranks_that_cannot_be(daemon, rank, world):
    with control.RawClient(daemon) as client:
        with pytest.raises(control.Refused):
            client.hello(rank=rank, world=world)
    assert_still_serving(daemon)


GARBAGE = {
    "64 bytes": os.urandom(64),
    "one byte": b"x",
    "255 bytes": bytes(255),
    "zeros": bytes(256),
    "ones": b"\xff" * 256,
    "no such message": control.message(type=99, job=b"j"),
    "an answer of the daemon": control.message(type=control.WELCOME, job=b"j", world_size=1),
    "JOIN before HELLO": control.message(type=control.JOIN, job=b"j", world_size=1),
    "LEAVE before HELLO": control.message(type=control.LEAVE, job=b"j"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_on_the_control_socket(daemon, name):
    """The connection ends, with or without a word; the daemon goes on."""
    with control.RawClient(daemon) as client:
        client.send(GARBAGE[name])
        try:
            answer = client.receive(10)
        except control.Refused as refused:
            answer = None
            assert len(refused.text) > 5
        assert answer is None or answer["type"] in (control.BYE, control.REFUSE), answer
    assert_still_serving(daemon)


def test_random_messages(daemon, seeded):
    before = daemon.fds()
    for _ in range(200):
        with control.RawClient(daemon) as client:
            try:
                if seeded.random() < 0.5:
                    client.hello()
                for _ in range(seeded.randrange(1, 4)):
                    data = bytearray(control.message(type=seeded.randrange(20), job=b"fuzz", world_size=1))
                    for _ in range(seeded.randrange(12)):
                        data[seeded.randrange(256)] = seeded.randrange(256)
                    fds = [0] * seeded.randrange(4)
                    client.send(bytes(data), fds)
            except (OSError, control.Refused):
                pass
    end = time.monotonic() + 10
    while daemon.fds() > before:
        assert time.monotonic() < end, f"fds grew from {before} to {daemon.fds()}"
        time.sleep(0.05)
    assert_still_serving(daemon)


def test_descriptors_that_nobody_asked_for(daemon):
    """Sent along with HELLO: they are closed, not kept."""
    before = daemon.fds()
    for _ in range(20):
        with control.RawClient(daemon) as client:
            client.send(control.message(type=control.HELLO, job=b"fds", world_size=1), [0, 1, 2, 0, 1, 2])
            try:
                client.receive(10)
            except control.Refused:
                pass
    end = time.monotonic() + 10
    while daemon.fds() > before:
        assert time.monotonic() < end, f"fds grew from {before} to {daemon.fds()}"
        time.sleep(0.05)


@pytest.mark.parametrize("case", ["short", "nodes", "nonce", "ranks", "self", "unsealed"])
def test_a_view_that_is_none(daemon, case):
    with control.RawClient(daemon, "view") as client:
        client.hello()
        blob = client.view()
        if case == "short":
            blob = blob[:20]
        elif case == "nodes":
            blob = b"\0\0\0\0\xff\xff\xff\x7f" + blob[8:]
        elif case == "nonce":
            blob = client.view([(b"\1" * 16, client.welcome["text"].encode())])
        elif case == "ranks":
            blob = client.view(ranks=3)
        elif case == "self":
            blob = client.view([(b"\2" * 16, b"203.0.113.9:1")])
        with pytest.raises(control.Refused) as refused:
            client.join(blob, sealed=case != "unsealed")
        assert len(refused.value.text) > 10
    assert_still_serving(daemon)


def test_an_arena_beyond_the_limit(daemon):
    with control.RawClient(daemon, "arena") as client:
        client.hello()
        with pytest.raises(control.Refused) as refused:
            client.join(arena=1 << 50)
        assert "memory.arena_max" in refused.value.text, refused.value.text


def test_connections_that_say_nothing_do_not_hold_up_others(daemon):
    idle = [daemon.connect() for _ in range(20)]
    try:
        started = time.monotonic()
        assert_still_serving(daemon)
        assert time.monotonic() - started < 5
    finally:
        for connection in idle:
            connection.close()


def test_too_many_connections_are_refused_with_the_setting():
    with Cluster(1, settings={"memory": {"clients_max": 4}}) as cluster:
        cluster.start()
        time.sleep(0.5)  # the connection that looked whether it listens is gone
        held = [control.RawClient(cluster.daemons[0], f"j{i}") for i in range(4)]
        try:
            for client in held:
                client.hello()
            with control.RawClient(cluster.daemons[0]) as client:
                with pytest.raises(control.Refused) as refused:
                    if client.hello() is None:
                        raise AssertionError("closed without a word")
                assert "memory.clients_max" in refused.value.text, refused.value.text
        finally:
            for client in held:
                client.close()


@pytest.mark.parametrize("payload", [0, 1, 64, 65, 128, 191, 1409, 65535])
def test_a_view_whose_payload_is_none(daemon, payload):
    with control.RawClient(daemon) as client:
        client.hello()
        client.welcome["payload"] = payload
        with pytest.raises(control.Refused) as refused:
            client.join()
        assert "payload" in refused.value.text, refused.value.text
    assert_still_serving(daemon)


def test_a_view_of_both_families(daemon):
    """No socket reaches both; found at once, not by a handshake that hears nothing."""
    with control.RawClient(daemon) as client:
        client.hello(world=2)
        endpoint, name = client.welcome["text"].encode().split(b" ", 1)
        nodes = [(client.welcome["join_nonce"], endpoint, name), (b"x" * 16, b"[fd00::7]:9470", b"n1")]
        blob = client.view(nodes, ranks=2)[:-8] + struct.pack("<2I", 0, 1)
        with pytest.raises(control.Refused) as refused:
            client.join(blob, world_size=2)
        assert "fd00::7" in refused.value.text and "IPv6" in refused.value.text, refused.value.text
    assert_still_serving(daemon)


def test_no_memory_for_the_pool_of_a_job():
    with open("/proc/sys/vm/overcommit_memory", encoding="ascii") as file:
        if file.read().strip() == "1":
            pytest.skip("vm.overcommit_memory is 1: the kernel promises any amount")
    with Cluster(1, settings={"memory": {"job_pool": "1TiB"}}) as cluster:
        cluster.start()
        with control.RawClient(cluster.daemons[0]) as client:
            client.hello()
            with pytest.raises(control.Refused) as refused:
                client.join()
            assert "memory.job_pool" in refused.value.text, refused.value.text
        assert_still_serving(cluster.daemons[0])


def test_sluicectl_says_why_it_was_refused():
    with Cluster(1, settings={"memory": {"clients_max": 1}}) as cluster:
        cluster.start()
        time.sleep(0.5)
        with control.RawClient(cluster.daemons[0]) as held:
            held.hello()
            answer = subprocess.run([program("sluicectl"), "--socket", cluster.daemons[0].socket_path, "status"],
                                    capture_output=True, text=True, timeout=20, check=False)
            assert answer.returncode != 0 and "memory.clients_max" in answer.stderr, answer.stderr


OTHER_USER = """
import os, sys
sys.path.insert(0, sys.argv[1])
os.setgid(65534)
os.setuid(65534)
import control
class Daemon:
    def connect(self):
        s = control.socket.socket(control.socket.AF_UNIX, control.socket.SOCK_SEQPACKET)
        s.connect(sys.argv[2])
        return s
for fields in ({}, {"node": 0xffffffff}):
    try:
        control.RawClient(Daemon(), "mine").hello(**fields)
        print("served")
    except control.Refused as refused:
        print(refused)
print(control.RawClient(Daemon(), "other").hello()["type"] == control.WELCOME)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_a_job_is_its_users():
    with Cluster(1) as cluster:
        cluster.start()
        daemon = cluster.daemons[0]
        os.chmod(daemon.socket_path, 0o666)
        os.chmod(os.path.dirname(daemon.socket_path), 0o755)
        with control.RawClient(daemon, "mine") as client:
            client.hello()
            other = subprocess.run(["/usr/bin/python3", "-c", OTHER_USER, os.path.dirname(__file__), daemon.socket_path],
                                   capture_output=True, text=True, timeout=20, check=False)
            lines = other.stdout.splitlines()
            assert len(lines) == 3 and lines[2] == "True", (lines, other.stderr)
            for line in lines[:2]:
                assert "belongs to user 0" in line and "65534" in line, line
            assert client.join()["type"] == control.JOINED, "it was left alone"


def test_join_names_the_rank_that_never_came():
    with Cluster(2) as cluster:
        cluster.start()
        with Job(cluster, [0, 1]) as job:
            job.ranks[0].send(job.join_command(0, "timeout_ms=1500"))
            answer = job.ranks[0].reply(15)
            assert not answer["ok"] and "1" in answer["text"], answer


def test_join_names_the_node_that_does_not_answer():
    with Cluster(2) as cluster:
        cluster.start()
        with Job(cluster, [0, 1]) as job:
            # Both cards are on the table, then node 1 goes away.
            job.ranks[1].send(job.join_command(1, "timeout_ms=3000"))
            end = time.monotonic() + 10
            while not os.path.exists(os.path.join(job.rendezvous, "card.1")):
                assert time.monotonic() < end
                time.sleep(0.01)
            cluster.daemons[1].kill()
            job.ranks[0].send(job.join_command(0, "timeout_ms=3000"))
            answer = job.ranks[0].reply(20)
            assert not answer["ok"], answer
            assert cluster.address(1) in answer["text"] or "rank 1" in answer["text"], answer


def run_sluiced(*arguments, prefix=(), timeout_s=20):
    return subprocess.run([*prefix, program("sluiced"), *arguments], stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=timeout_s)


def test_a_second_daemon_on_the_same_socket(daemon):
    inode = os.stat(daemon.socket_path).st_ino
    second = run_sluiced("--config", daemon.config_path, prefix=daemon.cluster.prefix(0))
    assert second.returncode not in (0, None)
    assert daemon.socket_path in second.stderr + second.stdout
    assert os.stat(daemon.socket_path).st_ino == inode, "the live daemon's socket was replaced"
    assert_still_serving(daemon)


def test_a_stale_socket_is_replaced():
    with Cluster(1) as cluster:
        stale = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stale.bind(cluster.daemons[0].socket_path)
        stale.close()  # the file stays behind, as after kill -9
        cluster.start()
        assert_still_serving(cluster.daemons[0])


def test_a_port_that_is_taken_is_named(daemon):
    with open(daemon.config_path, encoding="utf-8") as file:
        text = file.read().replace(daemon.socket_path, daemon.socket_path + "2")
    other = daemon.config_path + "2"
    with open(other, "w", encoding="utf-8") as file:
        file.write(text)
    second = run_sluiced("--config", other, prefix=daemon.cluster.prefix(0))
    assert second.returncode not in (0, None)
    address = f"{daemon.cluster.address(0)}:{daemon.cluster.port(0)}"
    assert address in second.stderr + second.stdout, second.stderr
    assert_still_serving(daemon)


BAD_CONFIGS = {
    "unknown key": ("transport:\n  bind: [10.0.0.1]\n  prot: 9470\n", 3, 3, "prot"),
    "unknown section": ("log:\n  level: info\nsoket:\n  path: /x\n", 3, 1, "soket"),
    "not a number": ("lanes: many\n", 1, 8, "many"),
    "out of range": ("transport:\n  port: 70000\n", 2, 9, "70000"),
    "not a choice": ("security:\n  sealing: rot13\n", 2, 12, "rot13"),
    "not YAML": ("transport: [\n", None, None, ""),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_check_config_says_where(tmp_path, name):
    text, line, column, word = BAD_CONFIGS[name]
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    result = run_sluiced("--config", str(path), "--check-config")
    said = result.stderr + result.stdout
    assert result.returncode == 78, said
    assert re.search(re.escape(str(path)) + r":\d+:\d+: ", said), said
    if line is not None:
        assert f"{path}:{line}:{column}: " in said, said
    assert word in said


def test_check_config_passes_a_good_file(daemon):
    result = run_sluiced("--config", daemon.config_path, "--check-config", prefix=daemon.cluster.prefix(0))
    assert result.returncode == 0, result.stderr


def test_a_config_file_that_is_not_there(tmp_path):
    result = run_sluiced("--config", str(tmp_path / "none.yaml"), "--check-config")
    assert result.returncode == 78 and "none.yaml" in result.stderr + result.stdout


def test_sealing_none_needs_insecure_on_an_address_that_others_reach(needs_namespaces):
    with Cluster(1, settings={"security": {"sealing": "none"}}) as cluster:
        cluster.daemons[0].spawn()
        assert cluster.daemons[0].process.wait(20) == 78
        assert "insecure" in cluster.daemons[0].log()
        cluster.daemons[0].process = None
