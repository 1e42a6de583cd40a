"""Results are exact: every element of every result is held against the integer oracle, on every rank."""
import pytest

from cluster import Cluster
from ranks import Job

FLOATS = ["f32", "f16", "bf16", "f64"]
TYPES = FLOATS + ["i32", "i64", "u8"]
SIZE = {"f32": 4, "f16": 2, "bf16": 2, "f64": 8, "i32": 4, "i64": 8, "u8": 1}
VERDICT_RESERVE = 64  # bytes of each payload (protocol, section 4)
CALM = "deadline_us=20000000"  # longer than anything that a busy machine does: all must be counted


def assert_right(answers, what, calm=True):
    """All ranks: no element wrong, and the same bytes everywhere."""
    assert len({answer["digest"] for answer in answers}) == 1, f"{what}: ranks hold different bytes: {answers}"
    for answer in answers:
        assert set(answer["statuses"]) <= {"OK"}, f"{what}: {answer}"
        if calm or (answer["uncounted"] == 0 and answer["skipped"] == 0):
            assert answer["wrong"] == 0, f"{what}: {answer}"
    if calm:
        assert all(a["uncounted"] == 0 and a["skipped"] == 0 for a in answers), f"{what}: {answers}"


def sweep(job, types):
    """All counts around the edges, every type, kind and class."""
    payload = job.join()[0]["payload"]
    seed = 0
    for kind_of_type in types:
        block = (payload - VERDICT_RESERVE) // SIZE[kind_of_type]
        for count in (0, 1, block - 1, block, block + 1, 7 * block + 3, 1_000_007):
            for kind in ("sum", "mean") if kind_of_type in FLOATS else ("sum",):
                for op_class in ("exact", "consistent"):
                    seed += 1
                    command = f"allreduce count={count} type={kind_of_type} kind={kind} class={op_class} seed={seed} {CALM}"
                    assert_right(job.all(command), command)


@pytest.mark.parametrize("types", [FLOATS[:2], FLOATS[2:], TYPES[4:]], ids="-".join)
def test_two_nodes(two_nodes, types):
    with Job(two_nodes, [0, 1]) as job:
        sweep(job, types)
        job.all("leave")


def test_four_nodes(four_nodes):
    with Job(four_nodes, [0, 1, 2, 3]) as job:
        sweep(job, ["f32", "bf16", "i64"])
        job.all("leave")


def test_the_oracle_sees_a_wrong_contribution(two_nodes):
    """Otherwise the tests here would prove nothing: rank 1 contributes what rank 0 should."""
    with Job(two_nodes, [0, 1]) as job:
        job.join()
        job.ranks[0].send("allreduce count=1000")
        job.ranks[1].send("allreduce count=1000 rank_as=0")
        for answer in job.replies():
            assert answer["ok"] and answer["wrong"] > 900, answer
        job.all("leave")


def test_the_first_call_counts_everybody(four_nodes):
    """No rank's join ends before all nodes can take its blocks. The call follows at once, without waiting for others."""
    for _ in range(8):
        with Job(four_nodes, [0, 1, 2, 3]) as job:
            for rank, client in enumerate(job.ranks):
                client.send(job.join_command(rank))
                client.send("allreduce count=400000 class=consistent")
            for client in job.ranks:
                client.expect_ok("join")
            assert_right(job.replies(), "the first call")
            job.all("leave")


def test_two_nodes_with_two_ranks_each(two_nodes):
    with Job(two_nodes, [0, 0, 1, 1]) as job:
        sweep(job, ["f32", "f16", "u8"])
        job.all("leave")


def test_ranks_that_alternate_between_nodes(two_nodes):
    with Job(two_nodes, [0, 1, 0, 1, 1]) as job:
        job.join()
        for op_class in ("exact", "consistent"):
            command = f"allreduce count=100003 class={op_class} repeat=5 {CALM}"
            assert_right(job.all(command), command)
        job.all("leave")


def test_one_rank_alone(two_nodes):
    with Job(two_nodes, [0]) as job:
        sweep(job, ["f32", "i32"])
        job.all("leave")


def test_three_nodes_of_four(four_nodes):
    with Job(four_nodes, [3, 0, 2]) as job:
        sweep(job, ["f32"])
        job.all("leave")


@pytest.mark.parametrize("op_class", ["exact", "consistent"])
def test_sixty_four_calls_in_flight(two_nodes, op_class):
    with Job(two_nodes, [0, 1]) as job:
        job.join()
        command = f"allreduce count=20011 class={op_class} repeat=300 inflight=64 tag=1 {CALM}"
        assert_right(job.all(command), command)
        job.all("leave")


def test_broadcast_all_gather_and_barrier(four_nodes):
    with Job(four_nodes, [0, 1, 2, 3, 3]) as job:
        job.join()
        for root in range(5):
            for size in (0, 1, 1407, 1_000_003):
                for answer in job.all(f"broadcast bytes={size} root={root} seed={root * 10 + 1}"):
                    assert answer["wrong"] == 0, (root, size, answer)
        for size in (0, 1, 128, 4099, 300_007):
            for answer in job.all(f"all_gather bytes={size} seed={size}"):
                assert answer["wrong"] == 0, (size, answer)
        job.all("barrier")
        job.all("leave")


def test_barrier_waits_for_the_last_rank(two_nodes):
    with Job(two_nodes, [0, 1]) as job:
        job.join()
        job.ranks[0].send("barrier timeout_ms=20000")
        with pytest.raises(AssertionError):
            job.ranks[0].reply(timeout_s=0.5)
        job.ranks[1].send("barrier timeout_ms=20000")
        for answer in job.replies():
            assert answer["ok"], answer


def test_two_jobs_at_once(two_nodes):
    with Job(two_nodes, [0, 1]) as one, Job(two_nodes, [1, 0]) as other:
        one.join()
        other.join()
        for rank in one.ranks + other.ranks:
            rank.send("allreduce count=200003 repeat=10 inflight=4")
        for job in (one, other):
            assert_right(job.replies(), job.name)


@pytest.mark.parametrize("permille", [10, 100])
def test_loss(needs_namespaces, permille):
    with Cluster(4, loss=permille) as cluster:
        cluster.start()
        with Job(cluster, [0, 1, 2, 3]) as job:
            job.join()
            repaired = 0
            for command in (f"allreduce count=1000007 class=exact repeat=3 inflight=2 {CALM}",
                            f"allreduce count=3001 class=exact repeat=60 inflight=8 {CALM}",
                            f"allreduce count=1000007 class=consistent repeat=3 tag=5 {CALM}"):
                answers = job.all(command)
                assert_right(answers, command)
                repaired += sum(answer["repaired"] for answer in answers)
            assert repaired > 0, "nothing was repaired: did the links lose anything?"
            job.all("leave")


def test_short_deadlines_under_loss_agree(needs_namespaces):
    """Bounded calls may count less than everything; whoever reports OK must hold the same bytes."""
    with Cluster(4, loss=100) as cluster:
        cluster.start()
        with Job(cluster, [0, 1, 2, 3]) as job:
            job.join()
            for turn in range(20):
                answers = job.all(f"allreduce count=60011 class=consistent deadline_us=30000 tag=9 seed={turn}")
                complete = [answer for answer in answers if answer["statuses"] == {"OK": 1}]
                assert len({answer["digest"] for answer in complete}) <= 1, answers
                for answer in answers:
                    assert set(answer["statuses"]) <= {"OK", "INCOMPLETE"}, answer
