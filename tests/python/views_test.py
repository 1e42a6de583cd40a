"""How ranks agree on the next view, over a store in this process; no daemon, no torch.distributed."""
import threading
import time

import pytest

pytest.importorskip("torch")
from sluice.torch import _views  # noqa: E402


class Memory:
    """What of a torch store is used."""

    def __init__(self):
        self._lock, self._values = threading.Lock(), {}
        self.broken = False

    def _check(self):
        if self.broken:
            raise RuntimeError("Connection reset by peer")

    def compare_set(self, key, expected, desired):
        with self._lock:
            self._check()
            if key not in self._values:
                if expected != "":
                    return expected.encode()
                self._values[key] = desired
            elif self._values[key] == expected:
                self._values[key] = desired
            return self._values[key].encode()

    def set(self, key, value):
        with self._lock:
            self._check()
            self._values[key] = value

    def add(self, key, amount):
        with self._lock:
            self._check()
            self._values[key] = str(int(self._values.get(key, "0")) + amount)
            return int(self._values[key])


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(_views, "WATCH_S", 0.05)
    monkeypatch.setattr(_views, "GRACE_S", 0.6)
    monkeypatch.setattr(_views, "STAGGER_S", 0.0)


def vote(position, ops=0, clean=True, holes=False, unusable=None):
    return {"position": position, "ops": ops, "clean": clean, "holes": holes, "unusable": unusable}


def ranks(memory, count, nodes=None, goes_on=False, falls_back=False):
    made = []
    for rank in range(count):
        views = _views.Views(_views.Store(memory, "job", 2.0), rank, range(count), {"pid": 100 + rank, "host": "h", "node": rank},
                             goes_on, falls_back)
        views.placed((nodes or list(range(count)))[rank], len(set(nodes or range(count))))
        made.append(views)
    return made


def all_vote(voters, votes):
    """What each of them got."""
    got = [None] * len(voters)

    def run(index):
        got[index] = voters[index].agree(votes[index], 10.0)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(voters))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert all(record == got[0] for record in got), got
    return got[0]


def test_the_root_is_furthest_then_whole_then_highest_then_lowest():
    assert _views.choose({0: vote(4, 9), 1: vote(5, 3), 2: vote(5, 7), 3: vote(5, 7)}) == (5, 2)
    assert _views.choose({0: vote(5, 9, holes=True), 1: vote(5, 3)}) == (5, 1)
    assert _views.choose({0: vote(5, 9, clean=False), 1: vote(5, 3, holes=True)}) == (5, 1)
    assert _views.choose({0: vote(5, clean=False), 1: vote(4)}) == (5, None)


def test_all_ranks_get_one_record():
    voters = ranks(Memory(), 4)
    record = all_vote(voters, [vote(7, 10 + rank) for rank in range(4)])
    assert (record["mode"], record["members"], record["target"], record["root"]) == ("sluice", [0, 1, 2, 3], 7, 3)
    assert record["alike"] and [views.generation for views in voters] == [1] * 4
    assert all_vote(voters, [vote(8)] * 4)["generation"] == 2


def test_who_computes_is_waited_for_and_who_is_gone_is_not():
    memory = Memory()
    voters = ranks(memory, 3)
    began = time.monotonic()
    late = threading.Timer(1.5, lambda: voters[2].agree(vote(3), 10.0))  # longer than GRACE_S: its watcher answers
    late.start()
    record = all_vote(voters[:2], [vote(3)] * 2)
    late.join()
    assert record["mode"] == "sluice" and record["members"] == [0, 1, 2] and time.monotonic() - began >= 1.5


def test_without_a_rank():
    for goes_on, count, nodes, mode in [(False, 3, [0, 1, 2], "fail"), (True, 3, [0, 1, 2], "sluice"), (True, 2, [0, 1], "fail"),
                                        (True, 3, [0, 1, 1], "sluice")]:
        voters = ranks(Memory(), count, nodes, goes_on)
        voters[-1]._stopping.set()  # as by kill -9: no word, no watcher
        record = all_vote(voters[:-1], [vote(2)] * (count - 1))
        assert (record["mode"], record["lost"]) == (mode, [count - 1]), record
        assert "pid" in voters[0].describe(count - 1)
        if mode == "sluice":
            assert record["members"] == list(range(count - 1))


def test_who_left_in_peace_and_who_aborted():
    voters = ranks(Memory(), 3)
    voters[2].leave(aborted=False)
    assert all_vote(voters[:2], [vote(9)] * 2)["mode"] == "over"
    voters = ranks(Memory(), 3)
    voters[2].leave(aborted=True)
    began = time.monotonic()
    assert all_vote(voters[:2], [vote(9)] * 2)["mode"] == "fail"
    assert time.monotonic() - began < _views.GRACE_S


def test_fallback_is_for_all_or_nobody():
    for falls_back, mode in [(False, "fail"), (True, "allreduce")]:
        voters = ranks(Memory(), 3, falls_back=falls_back)
        record = all_vote(voters, [vote(4), vote(4, unusable="no daemon"), vote(3)])
        assert record["mode"] == mode and record["why"] == "rank 1: no daemon" and not record["alike"], record


def test_a_store_that_is_gone():
    memory = Memory()
    voters = ranks(memory, 2)
    memory.broken = True
    with pytest.raises(_views.StoreGone, match="Connection reset"):
        voters[0].agree(vote(1), 5.0)


def test_a_store_that_does_not_answer():
    memory = Memory()
    views = _views.Store(memory, "job", 0.2)
    with memory._lock:
        with pytest.raises(_views.StoreGone, match="did not answer"):
            views.read("x")
    assert views.read("x") is None
