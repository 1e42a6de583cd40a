"""Views: which ranks take part in a job from now on, agreed in the rendezvous store (docs/protocol.md, section 2).

A view has a generation, from 0. Whoever finds that the present one cannot go on calls for the next generation; every rank
that lives says so there, and votes when it has come to the end of the step (or call) in which it was. From the votes a
rank makes a record, and the record that is written first, by compare-and-set, is the next view: all take it from the
store, nobody from what it heard.

Only calls of the store that do not wait are used, each with a time limit of ours: a store whose host is gone must not
hang those who live. `position` counts the collective calls of a rank (a backward pass is one), which all ranks make in
the same order.
"""
import json
import queue
import threading
import time

POLL_S = 0.05  # between two looks at the store of one who waits
WATCH_S = 0.5  # between two looks of one who does not; times 1 ms for each rank if that is more
GRACE_S = 5.0  # who has not said within this time that he lives is lost: ten looks
STAGGER_S, STAGGER_MAX_S = 0.25, 5.0  # rank by rank later they begin to write the record; one would do
ABSENT = "?"  # compare_set with this for both values reads without waiting: no value of ours is "?"


class StoreGone(Exception):
    """The rendezvous store does not answer."""


class Store:
    """Calls of a torch store under a prefix, each bounded by `patience` seconds. Any thread."""

    def __init__(self, store, prefix, patience=10.0):
        self._store, self._prefix, self._patience = store, prefix, patience
        self._queue = queue.SimpleQueue()
        self._why = None
        threading.Thread(target=self._run, name="sluice-store", daemon=True).start()

    def _run(self):
        while True:
            item = self._queue.get()
            if item is None:
                return
            function, answer = item
            try:
                answer.put((function(), None))
            except Exception as error:  # pylint: disable=broad-except
                answer.put((None, error))

    def _call(self, function):
        if self._why is not None:
            raise StoreGone(self._why)
        answer = queue.SimpleQueue()
        self._queue.put((function, answer))
        try:
            value, error = answer.get(timeout=self._patience)
        except queue.Empty:
            # Perhaps another call of this process holds it; it may still come back.
            raise StoreGone(f"it did not answer within {self._patience:g} s") from None
        if error is not None:
            self._why = str(error).split("\n", 1)[0] or type(error).__name__
            raise StoreGone(self._why)
        return value

    def _key(self, key):
        return f"{self._prefix}/{key}"

    def read(self, key):
        """The text under key, or None."""
        value = self._call(lambda: self._store.compare_set(self._key(key), ABSENT, ABSENT))
        text = value.decode() if isinstance(value, bytes) else value
        return None if text in (ABSENT, "") else text

    def write(self, key, text):
        self._call(lambda: self._store.set(self._key(key), text))

    def propose(self, key, text):
        """Writes text where nothing was written yet; returns what stands there, which may be another's."""
        value = self._call(lambda: self._store.compare_set(self._key(key), "", text))
        return value.decode() if isinstance(value, bytes) else value

    def add(self, key, amount):
        return int(self._call(lambda: self._store.add(self._key(key), amount)))

    def close(self):
        self._queue.put(None)


def choose(votes):
    """(target, root) from {rank: vote}: the furthest position, and of the ranks there whose state is whole the one without
    holes in its results, then with the highest finished op, then the lowest; root None when there is no such rank."""
    target = max(vote["position"] for vote in votes.values())
    good = [rank for rank, vote in votes.items() if vote["position"] == target and vote["clean"]]
    return target, min(good, key=lambda rank: (votes[rank]["holes"], -votes[rank]["ops"], rank), default=None)


class Views:
    """One rank's part in it. Ranks are those of the first view throughout."""

    def __init__(self, store, rank, members, facts, goes_on, falls_back, on_called=lambda: None):
        self._store, self.rank, self.members = store, rank, list(members)
        self.generation = 0
        self._goes_on, self._falls_back = goes_on, falls_back  # on_peer_loss="continue"; fallback="allreduce"
        self._on_called = on_called  # another rank has asked for the next view; thread of its own
        self._announced = 0
        self._nodes, self._node = 1, 0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        store.write(f"facts/{rank}", json.dumps(facts))
        interval = max(WATCH_S, 0.001 * len(self.members))
        self._thread = threading.Thread(target=self._watch, args=(interval,), name="sluice-views", daemon=True)
        self._thread.start()

    def placed(self, node, nodes):
        """Which of how many nodes this rank is on in the present view."""
        self._node, self._nodes = node, nodes

    def describe(self, rank):
        """'rank 3 (pid 4242 on host, node 2: gpu-3 at 10.0.0.3:9470)'"""
        facts = json.loads(self._store.read(f"facts/{rank}") or "{}")
        return (f"rank {rank} (pid {facts.get('pid', '?')} on {facts.get('host', '?')}, node {facts.get('node', '?')}: "
                f"{facts.get('name', '?')} at {facts.get('address', '?')})")

    # --- Being there

    def _watch(self, interval):
        while not self._stopping.wait(interval):
            try:
                generation = self.generation + 1
                if self._store.read(f"{generation}/call") is not None and self._announce():
                    self._on_called()
            except StoreGone:
                continue  # who needs it will say so

    def _announce(self):
        with self._lock:
            generation = self.generation + 1
            if self._announced >= generation:
                return False
            self._store.write(f"{generation}/here/{self.rank}", str(self._node))
            self._store.add(f"{generation}/here", 1)
            self._announced = generation
            return True

    def call(self):
        """Asks all ranks for the next view."""
        self._store.write(f"{self.generation + 1}/call", "1")
        self._announce()

    def called(self):
        """Whether somebody asks for a view after the present one."""
        return self._store.read(f"{self.generation + 1}/call") is not None

    def leave(self, aborted):
        """Tells that this rank will answer no more."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join()
        try:
            self._store.write(f"left/{self.rank}", "aborted" if aborted else "closed")
        except StoreGone:
            pass
        self._store.close()

    # --- The next view

    def agree(self, vote, timeout):
        """Votes, and returns the record of the next view, the same on all ranks: a dict with generation, members, lost,
        target, root, mode ("sluice", "allreduce", "fail" or "over") and why. vote: position, ops, clean (not half
        overwritten), holes (had incomplete results), unusable (why this rank cannot go on with sluice, or None). None when there is no record after `timeout` seconds."""
        self.call()
        generation = self.generation + 1
        self._store.write(f"{generation}/vote/{self.rank}", json.dumps(vote))
        begin = time.monotonic()
        stagger = min(STAGGER_S * self.members.index(self.rank), STAGGER_MAX_S)
        while time.monotonic() < begin + timeout:
            text = self._store.read(f"{generation}/view")
            if text is None and time.monotonic() >= begin + stagger:
                record = self._record(generation, time.monotonic() - begin)
                if record is not None:
                    text = self._store.propose(f"{generation}/view", json.dumps(record))
            if text is not None:
                self.generation = generation
                return json.loads(text)
            time.sleep(POLL_S)
        return None

    def silent(self):
        """The ranks that have not voted for the next view, for a message."""
        generation = self.generation + 1
        return [rank for rank in self.members if self._store.read(f"{generation}/vote/{rank}") is None]

    def _record(self, generation, waited):
        """The record as this rank would write it; None while it is too early."""
        here = self._store.add(f"{generation}/here", 0)
        gone = {}
        if here < len(self.members):
            nodes = {rank: self._store.read(f"{generation}/here/{rank}") for rank in self.members}
            gone = {rank: self._store.read(f"left/{rank}") for rank, node in nodes.items() if node is None}
            if any(how == "closed" for how in gone.values()):
                # It has left in peace, so all ranks have done all their calls (State.close is collective).
                return self._made(generation, mode="over", why="the job is over", lost=sorted(gone))
            if not all(gone.values()) and waited < GRACE_S:
                return None
        lost = sorted(gone)
        if lost:
            left = [rank for rank in self.members if rank not in gone]
            why = self._why_not_without(left, {nodes[rank] for rank in left})
            if why is not None:
                return self._made(generation, mode="fail", why=why, lost=lost)
        members = [rank for rank in self.members if rank not in gone]
        votes = {rank: self._store.read(f"{generation}/vote/{rank}") for rank in members}
        if not all(votes.values()):
            return None
        votes = {rank: json.loads(vote) for rank, vote in votes.items()}
        target, root = choose(votes)
        unusable = [f"rank {rank}: {vote['unusable']}" for rank, vote in votes.items() if vote["unusable"]]
        why = "; ".join(unusable)
        mode = "sluice"
        if root is None:
            mode, why = "fail", "the rank whose parameters were to be copied was lost while they were"
        elif unusable:
            mode = "allreduce" if self._falls_back and not lost else "fail"
        return self._made(generation, mode=mode, why=why, lost=lost, members=members, target=target, root=root,
                          alike=all(vote["position"] == target and not vote["holes"] for vote in votes.values()))

    def _why_not_without(self, left, nodes):
        if not self._goes_on:
            return "on_peer_loss='fail'"
        if 2 * len(nodes) <= self._nodes:
            return (f"on_peer_loss='continue' needs more than half of the nodes; {len(nodes)} of {self._nodes} are left, with "
                    f"{len(left)} ranks")
        return None

    def _made(self, generation, **entries):
        return {"generation": generation, "members": [], "target": 0, "root": None, "alike": False, **entries}

    def gather(self, name, text, timeout):
        """The texts that the members of the present view gave under this name, in rank order; TimeoutError names those that
        did not, and so does one who asks for the next view meanwhile."""
        self._store.write(f"{self.generation}/{name}/{self.rank}", text)
        end = time.monotonic() + timeout
        found = {}
        while True:
            for rank in self.members:
                if rank not in found:
                    value = self._store.read(f"{self.generation}/{name}/{rank}")
                    if value is None:
                        break
                    found[rank] = value
            if len(found) == len(self.members):
                return [found[rank] for rank in self.members]
            missing = [rank for rank in self.members if rank not in found]
            if self.called():
                raise TimeoutError("another rank could not enter the new view")
            if time.monotonic() > end:
                raise TimeoutError(f"ranks {missing} did not come to the new view within {timeout:g} s")
            time.sleep(POLL_S)
