"""Training goes on: daemons and ranks are killed at random points of a training of four ranks on four daemons.

SLUICE_KILLS (default 3, 50 with scripts/test --full) points each; SLUICE_SEED chooses them and is printed.
"""
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("torch")
import nodes  # noqa: E402

pytestmark = pytest.mark.skipif(nodes.what_is_missing() is not None, reason=str(nodes.what_is_missing()))
KILLS = int(os.environ.get("SLUICE_KILLS", "3"))
SEED = int(os.environ.get("SLUICE_SEED", random.randrange(10**6)))
WORLD = 4
STEPS, PAUSE_S = 60, 0.01
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def daemons():
    with nodes.Daemons(WORLD, "exchange: {linger: 100ms}") as running:
        yield running
        assert running.alive(), "a daemon died:\n" + "".join(running.log(node) for node in range(WORLD))


@pytest.fixture(scope="module")
def pool(daemons):
    made = nodes.Pool(daemons, list(range(WORLD)))
    yield made
    made.close()


class When:
    """Does something `delay` seconds after all ranks have begun to train."""

    def __init__(self, folder, delay, action, world=WORLD):
        self.error, self._done = None, threading.Event()
        self._thread = threading.Thread(target=self._run, args=(folder, delay, action, world), daemon=True)
        self._thread.start()

    def _run(self, folder, delay, action, world):
        try:
            end = time.monotonic() + LIMIT_S
            while time.monotonic() < end and not all(os.path.exists(os.path.join(folder, f"ready{r}")) for r in range(world)):
                time.sleep(0.01)
            time.sleep(delay)
            action()
        except Exception as error:  # pylint: disable=broad-except
            self.error = error
        self._done.set()
        threading.Event().wait()  # a daemon that it started is killed when this thread ends (PR_SET_PDEATHSIG)

    def join(self):
        assert self._done.wait(LIMIT_S), "not done in time"
        assert self.error is None, self.error


def points(name):
    chosen = random.Random(f"{SEED} {name}")
    print(f"SLUICE_SEED={SEED}", flush=True)
    return [(turn, chosen.randrange(WORLD), chosen.uniform(0, STEPS * PAUSE_S)) for turn in range(KILLS)]


def assert_alike(results):
    assert len({result["digest"] for result in results}) == 1, results


@pytest.mark.parametrize("op_class", ["exact", "consistent"])
def test_a_daemon_is_killed_and_restarted(pool, daemons, tmp_path, op_class):
    lost = 0
    for turn, victim, delay in points("daemon " + op_class):
        folder = tmp_path / str(turn)
        folder.mkdir()

        def kill(victim=victim):
            daemons.kill(victim)
            daemons.restart(victim)

        when = When(folder, delay, kill)
        results = pool.run("survive", LIMIT_S, folder=str(folder), steps=STEPS, pause=PAUSE_S, op_class=op_class,
                           adam=turn % 2 == 1, batch_norm=turn % 3 == 2, due=3)
        when.join()
        try:
            assert_alike(results)
        except AssertionError:
            print(f"turn {turn}: daemon {victim} after {delay:.3f} s")
            raise
        rejoins = {result["report"]["rejoins"] for result in results}
        assert len(rejoins) == 1 and rejoins <= {0, 1}, results  # 0: the training was over before anybody noticed
        lost += sum(result["report"]["steps_lost"] for result in results)
        assert all(result["report"]["carry_dropped"] == 3 * result["report"]["rejoins"] for result in results), results
        for result in results:
            assert all("entered view" in text or " waited " in text for text in result["said"]), result["said"]
    print(f"{op_class}: {KILLS} kills of a daemon, {lost} steps lost by all ranks together")


def test_a_rank_is_killed_and_the_others_go_on(daemons, tmp_path):
    for turn, victim, delay in points("client continue"):
        victim = 1 + victim % (WORLD - 1)  # rank 0 hosts the store
        folder = tmp_path / str(turn)
        folder.mkdir()
        pool = nodes.Pool(daemons, list(range(WORLD)))
        try:
            ranks = pool.ranks()
            when = When(folder, delay, ranks[victim].process.kill)
            answers = pool.run_raw("survive", LIMIT_S, folder=str(folder), steps=STEPS, pause=PAUSE_S, on_peer_loss="continue",
                                   op_class="exact" if turn % 2 else "consistent")
            when.join()
        finally:
            pool.close()
        assert "error" in answers[victim]
        results = [answer.get("value") or pytest.fail(str(answer)) for rank, answer in enumerate(answers) if rank != victim]
        assert_alike(results)
        for result in results:
            assert result["ranks"] == WORLD - 1 and result["report"]["rejoins"] == 1, result
            assert any(f"without ranks [{victim}]: 3 ranks" in text for text in result["said"]), result["said"]


def test_a_rank_is_killed_and_the_others_are_told_who(daemons, tmp_path):
    for turn, victim, delay in points("client fail"):
        folder = tmp_path / str(turn)
        folder.mkdir()
        pool = nodes.Pool(daemons, list(range(WORLD)))
        try:
            ranks = pool.ranks()
            when = When(folder, delay, ranks[victim].process.kill)
            answers = pool.run_raw("survive", LIMIT_S, folder=str(folder), steps=STEPS, pause=PAUSE_S, name=f"again{turn}")
            when.join()
            for rank, answer in enumerate(answers):
                assert "error" in answer
                if rank != victim:
                    assert "PEER_LOST" in answer["error"] and f"rank {victim}" in answer["error"], answer["error"]
                    assert victim == 0 or f"node {victim}: node{victim} at 127.0.0.1:" in answer["error"], answer["error"]
                    assert answer["type"] == "RuntimeError" or "PeerLost" in answer["type"], answer
                    if victim == 0:
                        assert "the rendezvous store is gone" in answer["error"], answer["error"]
            # Other processes, the same job, the same daemons, at once.
            if turn == 0:
                assert_alike(pool.run("survive", LIMIT_S, folder=str(folder), steps=5, name=f"again{turn}"))
        finally:
            pool.close()


def test_a_rank_that_is_stopped_for_five_seconds(pool, tmp_path):
    victim = pool.ranks()[2].process
    when = When(tmp_path, 0.1, lambda: stop_for(victim, 5))
    results = pool.run("stopped", LIMIT_S, folder=str(tmp_path))
    when.join()
    assert_named(results, 4000)


def assert_named(results, least_ms):
    """All went on to the same end, and all but rank 2 say that they waited for node 2, and how long."""
    assert_alike(results)
    for result in results:
        assert result["seconds"] > 5 and result["report"]["rejoins"] == 0, result
    for rank, result in enumerate(results):
        if rank != 2:
            wait = result["report"]["longest_wait"]
            print(f"rank {rank}: {wait}; waited_ms {result['report']['waited_ms']}")
            assert wait["node"] == 2 and wait["ms"] > least_ms, result
            assert "node 2 (rank 2; node2 at 127.0.0.1:" in wait["text"], wait
            assert max(result["report"]["waited_ms"].items(), key=lambda entry: entry[1])[0] == "2", result
            assert any(wait["text"] in text for text in result["said"]), result["said"]


@pytest.mark.parametrize("op_class", ["exact", "consistent"])
def test_a_daemon_that_is_stopped_for_five_seconds(tmp_path, op_class):
    """With a peer_timeout that is longer than that nobody is lost; the training waits, and says for whom."""
    with nodes.Daemons(WORLD, "exchange: {linger: 100ms, peer_timeout: 20s}") as daemons:
        pool = nodes.Pool(daemons, list(range(WORLD)))
        try:
            pool.ranks()
            when = When(tmp_path, 0.1, lambda: stop_for(daemons.processes[2], 5))
            results = pool.run("stopped", LIMIT_S, folder=str(tmp_path), op_class=op_class,
                               resync=op_class == "consistent")  # its holes
            when.join()
        finally:
            pool.close()
    # Of a bounded round the first 1.5 s are its own patience with the holes.
    assert_named(results, 4000 if op_class == "exact" else 3000)


def test_a_daemon_that_is_stopped_longer_than_peer_timeout(pool, daemons, tmp_path):
    """The others give it up after 2 s and call for a new view, in which it takes part when it has woken up."""
    when = When(tmp_path, 0.1, lambda: stop_for(daemons.processes[2], 5))
    results = pool.run("survive", LIMIT_S, folder=str(tmp_path), steps=STEPS, pause=PAUSE_S)
    when.join()
    assert_alike(results)
    for result in results:
        print(result["report"]["rejoins"], result["report"]["steps_lost"], result["said"])
        assert result["report"]["rejoins"] >= 1 and result["report"]["fallback"] is None, result


def stop_for(process, seconds):
    process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        process.send_signal(signal.SIGCONT)


# --- Fallback


def test_fallback_without_a_daemon_at_the_start(daemons, tmp_path):
    pool = nodes.Pool(daemons, [0, 1])
    try:
        pool.ranks()
        daemons.kill(1)
        try:
            results = pool.run("survive", LIMIT_S, folder=str(tmp_path), steps=5, fallback="allreduce")
        finally:
            daemons.restart(1)
    finally:
        pool.close()
    assert_alike(results)
    assert [len(result["said"]) for result in results] == [1, 0], results
    assert "DDP's own allreduce" in results[0]["said"][0] and "rank 1" in results[0]["said"][0], results[0]["said"]
    for result in results:
        assert "rank 1" in result["report"]["fallback"] and result["ranks"] == 2


def test_fallback_takes_along_what_is_owed(daemons):
    pool = nodes.Pool(daemons, [0, 1])
    try:
        pool.ranks()
        daemons.kill(1)
        try:
            assert pool.run("fallen_back") == [True, True]
        finally:
            daemons.restart(1)
    finally:
        pool.close()


@pytest.mark.parametrize("known", [True, False], ids=["optimizer", "plain"])
def test_fallback_when_a_daemon_stays_away(daemons, tmp_path, known):
    pool = nodes.Pool(daemons, [0, 1, 2])
    try:
        pool.ranks()
        when = When(tmp_path, 0.2, lambda: daemons.kill(1), 3)
        try:
            answers = pool.run_raw("survive", LIMIT_S, folder=str(tmp_path), steps=STEPS, pause=PAUSE_S, fallback="allreduce",
                                   rejoin_timeout=1.0, known=known)
        finally:
            when.join()
            daemons.restart(1)
    finally:
        pool.close()
    if not known and any("error" in answer for answer in answers):
        # One rank had a step already that another had not: there is no way to copy what, and all must know.
        assert all("different steps" in answer.get("error", "") for answer in answers), answers
        return
    results = [answer.get("value") or pytest.fail(str(answer)) for answer in answers]
    assert_alike(results)
    assert [len(result["said"]) for result in results] == [1, 0, 0], results
    for result in results:
        assert result["report"]["fallback"] and result["report"]["steps_lost"] >= 1, result


# --- torchrun

SCRIPT = """
import os, signal, sys, time
sys.path[:0] = [{here!r}, {lib!r}]
import torch, torch.distributed as dist
import rejoin_cases
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
os.environ["SLUICE_SOCKET"] = {sockets!r}[rank]
dist.init_process_group("gloo")
if attempt == 0 and rank == 1:
    import threading
    def die():
        while not os.path.exists({folder!r} + "/ready1"):
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=die, daemon=True).start()
result = rejoin_cases.survive(rank, 2, "elastic", {folder!r}, steps=50, pause=0.02)
os.write(1, ("DONE %d %d %s\\n" % (attempt, rank, result["digest"])).encode())  # whole: the ranks share the pipe
"""


def test_torchrun_restarts_the_job(daemons, tmp_path):
    script = tmp_path / "train.py"
    lib = os.path.join(nodes.ROOT, "lib", "python")
    script.write_text(SCRIPT.format(here=nodes.HERE, lib=lib, sockets=daemons.sockets[:2], folder=str(tmp_path)))
    environment = {**os.environ, "SLUICE_LIBRARY": nodes.library(), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
                   "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--max_restarts", "1", "--monitor_interval",
               # -r and -t: about a rank that is not there; torch 1.13 cannot read "none" under Python 3.11
               "0.2", "-r", "9:3", "-t", "9:3", "--master_port", str(nodes.free_port()), str(script)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    done = sorted(line.split()[1:] for line in ran.stdout.split("\n") if line.startswith("DONE"))
    assert ran.returncode == 0 and [entry[:2] for entry in done] == [["1", "0"], ["1", "1"]], ran.stdout + ran.stderr
    assert done[0][2] == done[1][2]
