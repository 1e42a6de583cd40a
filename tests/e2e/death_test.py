"""Clients and daemons die; the others learn who it was, soon, and lose nothing."""
import os
import re
import time

import pytest

from cluster import Cluster
from ranks import Background, Job

SOON_S = 15.0  # peer_timeout is 2 s; the rest is for a machine that is busy with other things
KILLS = int(os.environ.get("SLUICE_KILLS", "20"))
LOST = {"PEER_LOST", "ABORTED"}


@pytest.fixture(scope="module")
def nodes():
    # Jobs that ended go away quickly, so that what stays behind is a leak.
    with Cluster(2, settings={"exchange": {"linger": "100ms"}}) as cluster:
        cluster.start()
        yield cluster


def census(cluster):
    return [(daemon.fds(), daemon.memfds()) for daemon in cluster.daemons]


def wait_for_census(cluster, before, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        now = census(cluster)
        if all(fds <= fds0 and memfds <= memfds0 for (fds, memfds), (fds0, memfds0) in zip(now, before)):
            return
        time.sleep(0.1)
    raise AssertionError(f"fds and memfds of the daemons grew from {before} to {census(cluster)}")


def names(text, rank):
    """Whether a text names a rank, alone or among the ranks of its node ("rank 1", "rank 0,1")."""
    return re.search(rf"\brank (\d+,)*{rank}\b", text) is not None


def assert_told(answer, rank):
    """An op ended because of this rank, and the words say so."""
    assert not answer["ok"], answer
    assert answer.get("status") in LOST, answer
    assert names(answer["text"], rank), f"the text does not name rank {rank}: {answer}"


def test_clients_killed_at_random_points(nodes, seeded):
    with Job(nodes, [0, 1], "beside") as beside:
        beside.join()
        beside.all("allreduce count=1000")
        before = census(nodes)
        with Background(beside):
            for turn in range(KILLS):
                with Job(nodes, [0, 0, 1] if turn % 3 == 0 else [0, 1], f"victim{turn}") as job:
                    job.join()
                    count = seeded.choice([100, 30_000, 400_000])
                    for rank in job.ranks:
                        rank.send(f"allreduce count={count} repeat=100000 inflight={seeded.choice([1, 4])}")
                    time.sleep(seeded.uniform(0, 0.12))
                    victim = seeded.randrange(len(job.ranks))
                    killed = time.monotonic()
                    job.ranks[victim].kill()
                    for number, rank in enumerate(job.ranks):
                        if number != victim:
                            assert_told(rank.reply(SOON_S), victim)
                            assert time.monotonic() - killed < SOON_S
        wait_for_census(nodes, before)
        assert all(daemon.alive() for daemon in nodes.daemons)


def test_a_client_killed_while_joining(nodes, seeded):
    with Job(nodes, [0, 1], "beside2") as beside:
        beside.join()
        before = census(nodes)
        with Background(beside):
            for turn in range(4):
                with Job(nodes, [0, 1], f"joining{turn}") as job:
                    job.ranks[0].send(job.join_command(0, "timeout_ms=3000"))
                    job.ranks[1].send(job.join_command(1, "timeout_ms=3000"))
                    time.sleep(seeded.uniform(0, 0.05))
                    job.ranks[1].kill()
                    answer = job.ranks[0].reply(SOON_S)
                    if answer["ok"]:  # the kill came late: the first op tells
                        job.ranks[0].send("allreduce count=1000 timeout_ms=20000")
                        answer = job.ranks[0].reply(SOON_S)
                    assert not answer["ok"]
                    assert "1" in answer["text"], f"nobody is named: {answer}"
        wait_for_census(nodes, before)


def test_a_client_that_leaves_without_a_word(nodes):
    """Closing the connection is as good as dying for those who wait."""
    with Job(nodes, [0, 1]) as job:
        job.join()
        job.ranks[0].send("allreduce count=1000 timeout_ms=20000")
        time.sleep(0.2)
        job.ranks[1].quit()
        answer = job.ranks[0].reply(SOON_S)
        assert_told(answer, 1)


def test_a_stopped_client_delays_and_does_not_kill(nodes):
    with Job(nodes, [0, 1]) as job:
        job.join()
        job.all("allreduce count=1000")
        job.ranks[1].stop_signal()
        try:
            job.ranks[0].send("allreduce count=50000")
            job.ranks[1].send("allreduce count=50000")
            with pytest.raises(AssertionError):
                job.ranks[0].reply(timeout_s=3.0)  # longer than peer_timeout: the daemon lives, so nobody is lost
        finally:
            job.ranks[1].continue_signal()
        for answer in job.replies():
            assert answer["ok"] and answer["wrong"] == 0, answer
        job.all("leave")


def test_abort_ends_the_ops_of_all_ranks(nodes):
    with Job(nodes, [0, 1]) as job:
        job.join()
        job.ranks[0].send("allreduce count=1000 timeout_ms=20000")
        time.sleep(0.2)
        assert job.ranks[1].do("abort")["ok"]
        answer = job.ranks[0].reply(SOON_S)
        assert answer.get("status") == "ABORTED", answer
        job.ranks[1].send("allreduce count=1000 timeout_ms=20000")
        assert not job.ranks[1].reply(SOON_S)["ok"]


def test_a_daemon_killed_and_started_again():
    with Cluster(3, settings={"exchange": {"linger": "100ms"}}) as cluster:
        cluster.start()
        with Job(cluster, [0, 2], "beside") as beside:
            beside.join()
            with Background(beside):
                for turn in range(2):
                    with Job(cluster, [0, 1, 2]) as job:
                        job.join()
                        for rank in job.ranks:
                            rank.send("allreduce count=200000 repeat=100000 inflight=2")
                        time.sleep(0.3)
                        cluster.daemons[1].kill()
                        answers = job.replies(SOON_S)
                        assert not any(answer["ok"] for answer in answers)
                        lost = answers[1]
                        assert lost.get("status") == "DAEMON_LOST" or lost.get("error") == "DAEMON_LOST", lost
                        for answer in (answers[0], answers[2]):
                            assert_told(answer, 1)
                    cluster.daemons[1].start()  # the same socket, which is stale
                    with Job(cluster, [0, 1, 2]) as job:
                        job.join()
                        for answer in job.all("allreduce count=100003 repeat=3"):
                            assert answer["wrong"] == 0, answer
                        job.all("leave")


def test_a_client_joins_again_after_its_daemon_was_restarted():
    with Cluster(2, settings={"exchange": {"linger": "100ms"}}) as cluster:
        cluster.start()
        with Job(cluster, [0, 1]) as job:
            job.join()
            job.all("allreduce count=1000")
            for daemon in cluster.daemons:
                daemon.kill()
            for rank in job.ranks:
                rank.send("allreduce count=1000 timeout_ms=20000")
            for answer in job.replies(SOON_S):
                assert not answer["ok"]
            for daemon in cluster.daemons:
                daemon.start()
            job.rendezvous = cluster.new_folder("again")
            job.join()
            for answer in job.all("allreduce count=5000"):
                assert answer["wrong"] == 0, answer


def test_a_new_view_ends_the_old_one_while_it_is_open():
    """The same job, a higher generation, other processes: the old ops end with VIEW_CHANGED, and the new view works, with
    its ops counted from 0 and with another number of ranks."""
    with Cluster(2, settings={"exchange": {"linger": "100ms"}}) as cluster:
        cluster.start()
        with Job(cluster, [0, 0, 1], "turning") as old, Job(cluster, [0, 1], "turning") as new:
            old.join()
            old.all("allreduce count=1000")
            for rank in old.ranks[:2]:
                rank.send("allreduce count=1000 timeout_ms=20000")
            time.sleep(0.2)
            new.join("generation=3")
            for rank in old.ranks[:2]:
                answer = rank.reply(SOON_S)
                assert not answer["ok"] and answer["status"] == "VIEW_CHANGED", answer
                # By its own daemon, or by the other one, which heard of it first.
                assert "generation 3" in answer["text"] or "node 1 (rank 2; n1 at " in answer["text"], answer
            for answer in new.all("allreduce count=5000 repeat=3"):
                assert answer["wrong"] == 0, answer
            # Whoever comes with an older generation is told so, and disturbs nobody.
            old.rendezvous = cluster.new_folder("late")
            old.ranks[0].send(old.join_command(0, "generation=2 timeout_ms=3000"))
            answer = old.ranks[0].reply(SOON_S)
            assert answer["error"] == "REFUSED" and "read the view again" in answer["text"], answer
            for answer in new.all("allreduce count=5000"):
                assert answer["wrong"] == 0, answer
            new.all("leave")


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_sigterm_stops_in_time_and_tells_the_clients(busy):
    with Cluster(2) as cluster:
        cluster.start()
        with Job(cluster, [0, 1]) as job:
            job.join()
            job.all("allreduce count=1000")
            if busy:
                for rank in job.ranks:
                    rank.send("allreduce count=100000 repeat=100000 inflight=2")
                time.sleep(0.2)
            started = time.monotonic()
            status = cluster.daemons[0].stop(grace_s=5.0)
            assert status == 0, f"sluiced ended with {status} after {time.monotonic() - started:.1f} s"
            assert not os.path.exists(cluster.daemons[0].socket_path), "the socket stayed behind"
            if not busy:
                for rank in job.ranks:
                    rank.send("allreduce count=1000 timeout_ms=20000")
            own, peer = job.replies(SOON_S)
            assert not own["ok"] and "DAEMON_LOST" in (own.get("status"), own.get("error")), own
            assert_told(peer, 0)


def test_one_rank_is_late_and_named():
    """Complaint number one of the field: which rank?"""
    with Cluster(2, settings={"exchange": {"rank_timeout": "1500ms", "op_timeout": "1500ms", "deadline": "1s"}}) as cluster:
        cluster.start()
        with Job(cluster, [0, 1]) as job:
            job.join()
            job.all("allreduce count=1000")
            job.ranks[0].send("allreduce count=1000 timeout_ms=20000")
            answer = job.ranks[0].reply(SOON_S)
            assert not answer["ok"]
            assert answer.get("status") in {"OP_TIMEOUT", "RANK_TIMEOUT", "ABORTED"}, answer
            assert names(answer["text"], 1), answer
