"""What others send is counted, named and harmless: forged datagrams, wrong descriptors, ranks that do not agree."""
import random
import struct
import time

import pytest

import control
import datagrams
from cluster import Cluster, can_make_namespaces
from ranks import Background, Job

COPIES = 20  # of each forged datagram


def drops(daemon):
    """Dropped datagrams by reason, over all lanes."""
    found = {}
    for name, value in daemon.metrics().items():
        if name.startswith("sluice_packets_dropped_total"):
            labels = dict(part.split("=", 1) for part in name[name.index("{") + 1:-1].split(","))
            reason = labels["reason"].strip('"')
            found[reason] = found.get(reason, 0) + value
    assert len(found) > 10, "no counters of dropped datagrams in /metrics"
    return found


@pytest.fixture(scope="module")
def wire():
    """Two nodes and a third namespace for the attacker; no GSO, so that single datagrams can be caught."""
    if not can_make_namespaces():
        pytest.skip("needs network namespaces (root)")
    with Cluster(3, need_namespaces=True, settings={"transport": {"gso": False, "gro": False}}) as cluster:
        for daemon in cluster.daemons[:2]:
            daemon.spawn()
        for daemon in cluster.daemons[:2]:
            daemon.wait_ready()
        yield cluster


def expect_drops(daemon, before, reasons, count, timeout_s=10.0):
    """Waits until at least `count` more datagrams were dropped for one of the reasons."""
    end = time.monotonic() + timeout_s
    while True:
        now = drops(daemon)
        more = {reason: value - before.get(reason, 0) for reason, value in now.items() if value > before.get(reason, 0)}
        if sum(more.get(reason, 0) for reason in reasons) >= count:
            return more
        if time.monotonic() > end:
            raise AssertionError(f"expected {count} drops for {reasons}, counted {more}")
        time.sleep(0.1)


def test_forged_datagrams(wire, seeded):
    victim = wire.daemons[1]
    genuine = wire.address(0)
    with Job(wire, [0, 1]) as job, datagrams.Sender(wire, 2, 1) as attacker:
        job.join()
        with Background(job, "allreduce count=60000 repeat=10"):
            caught = datagrams.catch(wire, 1, {datagrams.PUSH, datagrams.PULL, datagrams.ANNOUNCE})
            push, _ = caught[datagrams.PUSH]

            def coming(datagram):
                """The same shard of an op that is about to come: in the window, none of its blocks seen yet."""
                newest = datagrams.op_of(datagrams.catch(wire, 1, {datagrams.PUSH})[datagrams.PUSH][0])
                step = (newest - datagrams.op_of(datagram) + 40) // 2 * 2
                return datagrams.changed(datagram, datagrams.OP_AT,
                                         struct.pack("<I", datagrams.op_of(datagram) + step))

            forgeries = [
                ("cut to nothing", lambda: b"", {"length"}),
                ("cut to one byte", lambda: push[:1], {"length"}),
                ("cut inside the header", lambda: push[:47], {"length"}),
                ("cut by a quarter", lambda: coming(push)[:len(push) * 3 // 4], {"size", "tag"}),
                ("longer than it says", lambda: coming(push) + b"x" * 40, {"size", "tag"}),
                ("other magic", lambda: datagrams.changed(push, datagrams.MAGIC_AT, b"\x54"), {"magic"}),
                ("other version", lambda: datagrams.changed(push, datagrams.VERSION_AT, b"\x09"), {"version"}),
                ("no such type", lambda: datagrams.changed(push, datagrams.TYPE_AT, b"\xee"), {"type"}),
                ("other job", lambda: datagrams.changed(push, datagrams.JOB_AT, b"\1\2\3\4"), {"job"}),
                ("foreign epoch", lambda: datagrams.changed(push, datagrams.EPOCH_AT, b"\1\2\3\4"), {"epoch"}),
                ("no such sender", lambda: datagrams.changed(push, datagrams.SENDER_AT, b"\x40\x01"),
                 {"sender", "source"}),
                ("far future", lambda: datagrams.changed(push, datagrams.OP_AT, struct.pack("<I", 0x7ffffff0)),
                 {"too_early", "not_mine"}),
                ("flipped in the payload", lambda: datagrams.flipped(coming(push), (48 + 100) * 8 + 3), {"tag"}),
                ("flipped in the tag", lambda: datagrams.flipped(coming(push), len(push) * 8 - 5), {"tag"}),
                ("right as it was", lambda: coming(push), {"tag"}),  # the header is under the tag as well
                ("replayed", lambda: push, {"retired", "duplicate", "late"}),
                ("replayed pull", lambda: caught[datagrams.PULL][0],
                 {"retired", "duplicate", "not_submitted", "late"}),
                ("replayed announce", lambda: caught[datagrams.ANNOUNCE][0], {"retired", "replay"}),
                ("forged abort", lambda: datagrams.changed(
                    datagrams.changed(push, datagrams.TYPE_AT, bytes([datagrams.ABORT])), datagrams.COUNTER_AT,
                    struct.pack("<Q", 1 << 30)), {"tag", "size", "length"}),
            ]
            for name, make, reasons in forgeries:
                before = drops(victim)
                forged = make()
                for _ in range(COPIES):
                    attacker.send(forged, genuine)
                more = expect_drops(victim, before, reasons, COPIES)
                assert more, name
            # A stranger's address, with a datagram that is right in all its parts.
            before = drops(victim)
            for _ in range(COPIES):
                attacker.send(push, wire.address(2))
            expect_drops(victim, before, {"source"}, COPIES)
            # And noise: random bytes, and bits flipped at random in genuine datagrams.
            before = sum(drops(victim).values())
            for _ in range(300):
                noise = bytes(seeded.getrandbits(8) for _ in range(seeded.randrange(200)))
                attacker.send(noise, genuine)
                source = seeded.choice([push, caught[datagrams.PULL][0], caught[datagrams.ANNOUNCE][0]])
                attacker.send(datagrams.flipped(source, seeded.randrange(len(source) * 8)), genuine)
            end = time.monotonic() + 10
            while sum(drops(victim).values()) - before < 590:
                assert time.monotonic() < end, f"noise was not counted: {sum(drops(victim).values()) - before} of 600"
                time.sleep(0.1)
        job.all("leave")
    assert wire.daemons[0].alive() and victim.alive()


SIZES = None


@pytest.fixture(scope="module")
def sizes():
    return control.layout()


BIG = 1 << 63
BAD_DESCRIPTORS = {
    "no such request": dict(request=99),
    "op out of order": dict(op_seq=5),
    "count beyond the arena": dict(count=1 << 30),
    "count that overflows": dict(count=(1 << 62) + 1),
    "contribution beyond the arena": dict(contribution=1 << 40),
    "contribution that overflows": dict(contribution=(1 << 64) - 64),
    "result beyond the arena": dict(result=(1 << 20) - 32, count=64),
    "result off its alignment": dict(result=4097),
    "contribution off its alignment": dict(contribution=1),
    "overlapping buffers": dict(contribution=0, result=0),
    "no such element type": dict(element=77),
    "wire type of another size": dict(wire=3),
    "no such kind": dict(kind=9),
    "no such class": dict(op_class=3),
    "mean of integers": dict(kind=1, element=4),
    "best_effort of integers": dict(op_class=2, element=4),
    "no loss scale": dict(loss_scale=0.0),
    "loss scale that is no number": dict(loss_scale=float("nan")),
    "carry-over beyond the arena": dict(request=2, element=1, result=(1 << 20) - 4096, count=1500, deadline_us=1),
}


@pytest.fixture(scope="module")
def beside(two_nodes):
    """A job on the same daemons that must not notice anything."""
    with Job(two_nodes, [0, 1], "beside") as job:
        job.join()
        yield job


def assert_let_go(client, sizes, what):
    """The daemon closes this client, with a reason in its page."""
    end = time.monotonic() + 10
    while client.gone(sizes)[0] == 0:
        assert time.monotonic() < end, f"{what}: the daemon kept the client"
        time.sleep(0.02)
    status, text = client.gone(sizes)
    assert status >= 16 and len(text) > 10, f"{what}: {status} {text!r}"
    with pytest.raises((control.Refused, AssertionError, TimeoutError, OSError)):
        while client.receive(5.0) is not None:
            pass
        raise AssertionError("closed")
    return text


@pytest.mark.parametrize("name", BAD_DESCRIPTORS)
def test_bad_descriptor(two_nodes, beside, sizes, name):
    """It is refused with a reason, either as the outcome of the op or by letting the client go; others go on."""
    daemon = two_nodes.daemons[0]
    with control.RawClient(daemon, "bad") as client:
        client.hello()
        client.join()
        client.map(sizes)
        client.submit_raw(sizes, 0, control.descriptor(**BAD_DESCRIPTORS[name]))
        end = time.monotonic() + 10
        while client.gone(sizes)[0] == 0 and client.completions(sizes) == 0:
            assert time.monotonic() < end, "the daemon said nothing"
            time.sleep(0.02)
        if client.gone(sizes)[0] == 0:
            completion = client.completion(sizes, 0)
            assert completion["status"] >= 16, completion
        else:
            assert_let_go(client, sizes, name)
    for answer in beside.all("allreduce count=5000 repeat=2"):
        assert answer["wrong"] == 0
    assert daemon.alive()


def test_a_good_descriptor_by_hand_works(two_nodes, sizes):
    """Otherwise the tests above would prove nothing."""
    with control.RawClient(two_nodes.daemons[0], "good") as client:
        client.hello()
        client.join()
        client.map(sizes)
        values = [float(i) for i in range(16)]
        client.arena[0:64] = struct.pack("<16f", *values)
        client.submit_raw(sizes, 0, control.descriptor())
        end = time.monotonic() + 10
        while client.completions(sizes) == 0:
            assert time.monotonic() < end and client.gone(sizes)[0] == 0, client.gone(sizes)
            time.sleep(0.01)
        completion = client.completion(sizes, 0)
        assert completion["status"] == 0 and completion["cookie"] == 7, completion
        assert struct.unpack("<16f", client.arena[4096:4160]) == tuple(values)


@pytest.mark.parametrize("tail", [257, 1 << 40, (1 << 64) - 1], ids=["one too many", "far", "backwards"])
def test_submit_tail_out_of_range(two_nodes, beside, sizes, tail):
    with control.RawClient(two_nodes.daemons[0], "tail") as client:
        client.hello()
        client.join()
        client.map(sizes)
        client.set_tail(sizes, tail)
        text = assert_let_go(client, sizes, f"tail {tail}")
        assert text
    for answer in beside.all("allreduce count=5000"):
        assert answer["wrong"] == 0


def test_ring_full_of_noise(two_nodes, beside, sizes, seeded):
    for turn in range(10):
        with control.RawClient(two_nodes.daemons[turn % 2], f"noise{turn}") as client:
            client.hello()
            client.join()
            client.map(sizes)
            noise = random.Random(seeded.getrandbits(32)).randbytes(sizes["submit_size"] - sizes["submit_ring"])
            client.submit[sizes["submit_ring"]:sizes["submit_size"]] = noise
            client.set_tail(sizes, seeded.randrange(1, 256))
            assert_let_go(client, sizes, "noise")
    for answer in beside.all("allreduce count=5000"):
        assert answer["wrong"] == 0


def test_contribution_that_changes_under_way(two_nodes, beside, sizes):
    """Spoils the numbers of the one who does it, at most."""
    with control.RawClient(two_nodes.daemons[0], "moving") as client:
        client.hello()
        client.join(arena=8 << 20, max_op=4 << 20)
        client.map(sizes)
        for op in range(20):
            client.submit_raw(sizes, op, control.descriptor(op_seq=op, count=1 << 20, result=4 << 20))
            client.arena[0:4 << 20] = bytes([op]) * (4 << 20)
            end = time.monotonic() + 10
            while client.completions(sizes) <= op:
                assert time.monotonic() < end
                time.sleep(0.001)
    for answer in beside.all("allreduce count=5000"):
        assert answer["wrong"] == 0


@pytest.mark.parametrize("other", ["count=1001", "count=1000 type=i32", "count=1000 kind=mean", "count=1000 tag=77"],
                         ids=["count", "type", "kind", "tag"])
def test_ranks_that_do_not_agree(two_nodes, other):
    """MISMATCH on both, with what both sides asked for."""
    with Job(two_nodes, [0, 1]) as job:
        job.join()
        job.all("allreduce count=1000")
        job.ranks[0].send("allreduce count=1000 timeout_ms=20000")
        job.ranks[1].send(f"allreduce {other} timeout_ms=20000")
        mine, theirs = job.replies(20)
        for answer in (mine, theirs):
            assert answer.get("status") == "MISMATCH", answer
        wanted = {"count": ["1000", "1001"], "type": ["f32", "i32"], "kind": ["sum", "mean"], "tag": ["77", "4d"]}
        key = "count" if other == "count=1001" else other.split()[1].split("=")[0]
        for answer in (mine, theirs):
            if key == "tag":
                assert any(word in answer["text"].lower() for word in wanted[key]), answer
            else:
                assert all(word in answer["text"] for word in wanted[key]), f"both sides belong in it: {answer}"


def test_local_ranks_that_do_not_agree(two_nodes):
    with Job(two_nodes, [0, 0]) as job:
        job.join()
        job.ranks[0].send("allreduce count=1000 timeout_ms=20000")
        job.ranks[1].send("allreduce count=1001 timeout_ms=20000")
        for answer in job.replies(20):
            assert answer.get("status") == "MISMATCH", answer
            assert "1000" in answer["text"] and "1001" in answer["text"], answer
