"""Carry-over in the hook: by parameter across buckets and checkpoints (without daemons), then with daemons that carry over."""
import ctypes

import pytest

torch = pytest.importorskip("torch")
import nodes  # noqa: E402
from sluice import Timeout  # noqa: E402
from sluice.torch._carry import Carry  # noqa: E402

# --- Without daemons


class Job:
    """Owes what it is told to."""
    carry_over = corrects = True

    def __init__(self):
        self.owes, self.asked, self.hold, self.lacks = {}, [], set(), {}

    def _take(self, tag, kind, dtype, count, address, timeout):
        self.asked.append(tag)
        if tag in self.hold:
            raise Timeout("open", "TIMEOUT")
        values = self.owes.pop(tag, None)
        if values is not None:
            assert len(values) == count
            (ctypes.c_float * count).from_address(address)[:] = values

    tag_retire = flush = _take

    def take_correction(self, tag, kind, dtype, count, address, timeout):
        values = self.lacks.pop(tag, None)
        if values is not None:
            (ctypes.c_float * count).from_address(address)[:] = values


def layout(carry, job, tag, names, sizes, parts=None):
    parts = parts or [(tag, 0, sum(sizes))]
    return carry.layout(job, tag, names, sizes, "f32", [t for t, _, _ in parts], [(4 * f, 4 * c) for _, f, c in parts], 1.0)


def test_what_old_buckets_owe_moves_with_the_parameters():
    carry, job = Carry(), Job()
    layout(carry, job, 1, ["a", "b"], [2, 3], [(11, 0, 4), (12, 4, 1)])  # in two parts; the cut is in b
    layout(carry, job, 2, ["c"], [2])
    assert job.asked == []
    job.owes = {11: [1, 2, 3, 4], 12: [5], 2: [6, 7]}
    assert layout(carry, job, 1, ["a", "b"], [2, 3]) is carry.layouts[1] and job.asked == []
    new = layout(carry, job, 3, ["b", "c"], [3, 2])
    assert sorted(job.asked) == [2, 11, 12] and list(carry.layouts) == [3]
    bucket = torch.zeros(5)
    carry.add_owed(new, bucket, 0.0)
    assert bucket.tolist() == [3, 4, 5, 6, 7]
    carry.add_owed(new, bucket, 0.0)
    assert bucket.tolist() == [3, 4, 5, 6, 7], "once"
    bucket = torch.zeros(2)
    carry.add_owed(layout(carry, job, 4, ["a"], [2]), bucket, 8.0)
    assert bucket.tolist() == [8, 16], "at the scale of the step it goes out with"


def test_what_was_flushed_joins_the_next_result_once():
    carry, job = Carry(), Job()
    one = layout(carry, job, 1, ["a", "b"], [2, 2])
    job.owes = {1: [0, 0, 3, 4]}
    assert {name: values.tolist() for name, values in carry.flush(job, 1.0, lambda total: None).items()} == {"b": [3, 4]}
    fresh = Carry()
    fresh.load(carry.pending())
    for which in (carry, fresh):
        result = torch.ones(4)
        which.add_due(one, result, 2.0)
        which.add_due(one, result, 2.0)
        assert result.tolist() == [1, 1, 7, 9] and which.pending() == {}


def test_a_full_arena_takes_back_what_waits():
    carry, job = Carry(), Job()
    one = layout(carry, job, 1, ["a"], [4], [(11, 0, 2), (12, 2, 2)])

    class Part:
        tag, count = 12, 2
    job.owes = {12: [5, 6]}
    job.hold = {12}
    assert carry.rescue(job, Part) is False, "a fate is open"
    job.hold = set()
    assert carry.rescue(job, Part) is True
    bucket = torch.zeros(4)
    carry.add_owed(one, bucket, 1.0)
    assert bucket.tolist() == [0, 0, 5, 6]


def test_what_results_lack_stays_with_this_rank():
    carry, job = Carry(), Job()
    layout(carry, job, 1, ["a", "b"], [2, 2])
    job.lacks = {1: [1, 2, 3, 4]}
    bucket, result = torch.zeros(3), torch.zeros(3)
    new = layout(carry, job, 2, ["b", "c"], [2, 1])  # the buckets are cut anew: b moves, a waits for its own
    carry.add_owed(new, bucket, 1.0)
    carry.add_due(new, result, 2.0)
    assert bucket.tolist() == [0, 0, 0] and result.tolist() == [6, 8, 0] and list(carry.mine) == ["a"]
    assert carry.pending() == {}, "no checkpoint has it: it is of one rank"
    job.lacks = {2: [5, 6, 7]}
    carry.take_corrections(job, 1.0)
    assert sorted(carry.mine) == ["a", "b", "c"] and carry.mine["a"].tolist() == [1, 2]
    carry.forget_corrections()
    carry.take_corrections(job, 1.0)
    assert carry.mine == {}, "once"
    job.lacks = {2: [5, 6, 7]}
    carry.take_corrections(job, 1.0)
    assert carry.forget_due() == 0 and carry.mine == {}, "a new view copies the parameters"


# --- With daemons

missing = nodes.what_is_missing()
needs_daemons = pytest.mark.skipif(missing is not None, reason=str(missing))


@pytest.fixture(scope="module")
def pool():
    with nodes.Daemons(2, "exchange: {carry_over: true}") as running:
        made = nodes.Pool(running, [0, 1])
        yield made
        made.close()
        assert running.alive(), "a daemon died:\n" + running.log(0) + running.log(1)


def run_complete(pool, case):
    """What the ranks say of a run without an incomplete round: sums can be compared only then (the case leaves it to us). Rounds
    have 60 ms, so a busy machine gets five tries."""
    for _ in range(5):
        results = pool.run(case)
        if not any(result["incomplete"] for result in results):
            return results
    raise AssertionError(f"{case}: five runs, and rounds of 60 ms were incomplete in each: {results}")


@needs_daemons
def test_nothing_is_lost_when_the_loss_scale_changes(pool):
    results = run_complete(pool, "conserved")
    assert results[1]["uncounted"] > 0, "rank 1 was late: the test shows nothing"
    assert results[1]["carried"] == results[1]["uncounted"] and results[1]["discarded"] == 0 and results[1]["carry_over"]
    assert results[0]["flushed"] == results[1]["flushed"]


@needs_daemons
def test_a_checkpoint_keeps_what_is_owed(pool):
    results = run_complete(pool, "resumed")
    assert results[0]["kept"] == results[1]["kept"] and results[0]["kept"][0] > 0


@needs_daemons
def test_a_checkpoint_continues_bit_equal(pool):
    assert pool.run("resumed_exactly") == [True, True]


@needs_daemons
def test_an_unknown_scaler_is_refused(pool):
    for said in pool.run("unknown_scaler"):
        assert len(said) == 1 and "State(grad_scaler=scaler)" in said[0]


@needs_daemons
def test_best_effort(pool):
    for report in pool.run("integers", op_class="best_effort"):
        assert report["op_class"] == "best_effort" and report["blocks_filled"] == 0 and not report["carry_over"]


@needs_daemons
def test_without_carry_over_nothing_is_flushed():
    with nodes.Daemons(2) as running:
        made = nodes.Pool(running, [0, 1])
        assert made.run("carries") == [{"carries": False, "flushed": {}}] * 2
        made.close()


@needs_daemons
def test_holes_come_with_later_results():
    with nodes.Daemons(4, "exchange: {carry_over: true, on_incomplete: correct, pull_patience: 0, carry_max_ops: 1000}",
                       transport="faults: {i_know: true, loss: 0.25}") as running:
        made = nodes.Pool(running, [0, 1, 2, 3])
        results = made.run("corrected", 100.0)
        print([{name: value for name, value in result.items() if name != "said"} for result in results])
        assert sum(result["incomplete"] for result in results) > 0, "no round had a hole: the test shows nothing"
        assert sum(result["corrected"] for result in results) > 0 and not any(result["needs_resync"] for result in results)
        assert any("added to a later result here" in text for result in results for text in result["said"])
        results = made.run("correction_and_resync", 100.0)
        assert all(result["done"] and result["mine"] == 0 and result["distance"] == 0 for result in results), results
        made.close()
