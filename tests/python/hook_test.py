"""sluice.torch with real daemons: two on loopback with sealing `auth`, and rank processes (cases.py has what they do)."""
import json
import os
import re

import pytest

pytest.importorskip("torch")
import nodes  # noqa: E402

pytestmark = pytest.mark.skipif(nodes.what_is_missing() is not None, reason=str(nodes.what_is_missing()))
ULP = 2.0 ** -23


@pytest.fixture(scope="module")
def daemons():
    with nodes.Daemons(2) as running:
        yield running
        assert running.alive(), "a daemon died:\n" + running.log(0) + running.log(1)


@pytest.fixture(scope="module")
def pool(daemons):
    made = nodes.Pool(daemons, [0, 1])
    yield made
    made.close()


# --- Gradients


@pytest.mark.parametrize("op_class", ["exact", "consistent"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_integer_gradients_are_exact(pool, op_class, dtype):
    for report in pool.run("integers", op_class=op_class, dtype=dtype):
        assert report["incomplete"] == 0 and report["blocks_uncounted"] == 0


@pytest.mark.parametrize("view", [False, True])
def test_integer_gradients_in_several_buckets(pool, view):
    # The first iteration has one bucket, whatever bucket_cap_mb says; DDP makes several for the second.
    for report in pool.run("integers", bucket_mb=0.01, view=view):
        assert report["ops"] >= 1 + 3 * 3


def test_a_bucket_larger_than_an_op_travels_in_parts(pool):
    for report in pool.run("integers", max_bucket_bytes=8192):
        assert report["ops"] > 2 * report["buckets"]


def test_a_deadline_of_its_own(pool):
    pool.run("integers", op_class="consistent", deadline=0.5)


@pytest.mark.parametrize("op_class", ["exact", "consistent"])
@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.001},
                                     {"batch_norm": True}, {"find_unused_parameters": True}],
                         ids=lambda options: next(iter(options), "plain"))
def test_trains_like_ddp_alone(pool, op_class, options):
    # Two ranks: a + b rounds alike in every order, so only the place of the division can differ.
    for result in pool.run("like_gloo", op_class=op_class, **options):
        assert result["distance"] == 0.0 and result["worst"] <= 32 * ULP, result


def test_unused_parameters(pool):
    pool.run("unused")


def test_no_op_under_no_sync(pool):
    pool.run("no_sync")


def test_buckets_are_rebuilt(pool):
    for result in pool.run("rebuilt"):
        seen = result["seen"]
        assert len(seen[0]) == 1 and len(seen[1]) > 1 and seen[1] == seen[2] == seen[3] == seen[4] and result["distance"] == 0.0
        assert any("weight" in name for name in result["tags"].values())


def test_tags_are_the_same_on_all_ranks(pool):
    first, second = pool.run("rebuilt")
    assert first["tags"] == second["tags"]


def test_sparse_gradients_are_densified_with_one_warning(pool):
    for result in pool.run("sparse"):
        assert len(result["warnings"]) == 1 and "sparse gradients are sent as dense" in result["warnings"][0]
        assert result["densified"] == 4


def test_uneven_inputs(pool):
    for result in pool.run("uneven"):
        assert result["ops"] >= 5 and result["distance"] == 0.0


def test_two_jobs_at_a_time(pool):
    assert pool.run("two_states") == [[0.0, 0.0], [0.0, 0.0]]


def test_what_fails_behind_a_result_is_raised(pool):
    for told in pool.run("broken_finish"):
        assert len(told) == 2, told
        assert "in the carry-over of the checkpoint" in told[0] and "behind the result" in told[1], told


def test_two_states_that_nobody_closes(pool):
    for took, errors in pool.run("two_recovering"):
        assert took < 10 and not errors, (took, errors)


def test_the_loss_scale_is_told(pool):
    for result in pool.run("scaled"):
        assert result["asked"] == 3 and result["told"] == [1024.0] and result["ops"] > 3


@pytest.mark.parametrize("op_class", ["exact", "consistent"])
def test_learns_as_well(pool, op_class):
    for result in pool.run("smoke", op_class=op_class):
        assert result["gloo"] > 0.9 and result["sluice"] >= result["gloo"] - 0.02
        assert result["distance"] == 0.0 or result["incomplete"] > 0


# --- What a State says and does


def test_report(pool):
    results = pool.run("reported")
    # What a node sends for an op before it has the result is its push for the other's shard at least; all pushes
    # together are every element once (which half a node pushes turns with the op, so no node need send half).
    assert sum(result["report"]["bytes_sent"] for result in results) > results[0]["report"]["bytes"]
    for rank, result in enumerate(results):
        report, recent = result["report"], result["recent"]
        assert (report["rank"], report["world_size"], report["nodes"], report["op_class"]) == (rank, 2, 2, "consistent")
        assert report["ops"] == report["buckets"] == sum(tag["ops"] for tag in report["tags"].values()) == len(recent) > 4
        gradients = sum(tag["elements"] * tag["ops"] for tag in report["tags"].values()) * 4
        assert report["bytes"] == gradients and report["bytes_sent"] > 0
        # (An op that the lane sees together with all packets of the others takes it no time.)
        assert 0 <= report["round_ms"]["p50"] <= report["round_ms"]["p99"] <= report["round_ms"]["max"] > 0
        assert report["blocks_received"] == report["blocks_expected"] > 0 and report["approximated_ratio"] == 0
        assert report["error"] is None and not report["needs_resync"]
        assert [op["op"] for op in recent] == sorted(op["op"] for op in recent)
        assert all(op["finished"] >= op["submitted"] and op["status"] == "OK" for op in recent)
        json.dumps(report)


def test_holes_warn_and_resync_repairs(pool):
    first, second = pool.run("holes")
    assert not first["needed"] and second["needed"] and not first["warnings"]
    assert 1 <= len(second["warnings"]) <= 2  # for the first and the second op with holes, then ever more seldom
    assert re.search(r"rank 1, op \d+, tag [0-9a-f]{16} \(.*\): 1 of \d+ blocks did not come in time.*owner node1 sent nothing",
                     second["warnings"][0])
    for result in (first, second):
        assert 0.3 < result["distance"] < 1 and result["done"] and result["after"] == 0.0
        assert result["resyncs"] == 1 and not result["still"]
    assert first["moments"] == second["moments"] and first["same"] == second["same"]
    assert first["buffers"] != second["buffers"]  # BatchNorm saw other data since; sync_buffers is for that
    assert second["incomplete"] >= 1 and second["ratio"] > 0 and first["incomplete"] == 0


def test_parameter_distance(pool):
    for result in pool.run("distances"):
        assert result["same"] == 0.0 and result["again"] == 0.0
        assert result["apart"] == pytest.approx(result["expected"], rel=1e-5)
        apart, again, signs = result["drifts"]
        assert apart == pytest.approx(result["expected"], rel=0.2) and again == 0.0 and 0.0 < signs < 1e-9
        assert result["report"] == {"last": signs, "max": apart, "samples": 3}


def test_drift_gauge(pool):
    for result in pool.run("drift_gauge"):
        assert result["calm"] == {"last": 0.0, "max": 0.0, "samples": 2}
        apart = result["apart"]
        # The step after it changes parameters, so the two are near each other, not equal.
        assert apart["samples"] == 3 and apart["last"] == pytest.approx(result["distance"], rel=0.25)
        assert result["after"] == {"last": 0.0, "max": apart["max"], "samples": 4}


def test_buffers(pool):
    for warned in pool.run("buffers"):
        assert not warned["off attach"] and not warned["off first call"]
        for how in ("default attach", "default first call"):
            assert len(warned[how]) == 1 and "broadcast_buffers=False" in warned[how][0]


def test_a_pickled_state_joins_again(pool):
    for result in pool.run("pickled"):
        assert len(result["warnings"]) == 1 and "joins again" in result["warnings"][0] and result["distance"] == 0.0


def test_forked_workers_do_no_harm(pool):
    for result in pool.run("workers"):
        assert result == {"child": 0, "distance": 0.0}


# --- Without torch's hook


def test_arrays(pool):
    waits = pool.run("arrays")
    assert waits[1] > 0.25  # rank 0 came 0.3 s late to the barrier


def test_a_left_job_says_so(pool):
    assert all("was left" in text for text in pool.run("left"))


# --- More ranks than nodes


@pytest.mark.parametrize("place", [[0, 0], [0, 0, 1, 1]], ids=["two ranks on one node", "two nodes with two ranks"])
def test_ranks_share_a_node(daemons, place):
    pool = nodes.Pool(daemons, place)
    try:
        for op_class in ("exact", "consistent"):
            pool.run("integers", op_class=op_class)
        for result in pool.run("rebuilt"):
            assert result["distance"] == 0.0
    finally:
        pool.close()


# --- What goes wrong


@pytest.mark.parametrize("dies, how", [(1, "kill"), (0, "kill"), (1, "abort"), (0, "raise")])
def test_a_lost_rank_is_named_and_nobody_hangs(daemons, dies, how):
    pool = nodes.Pool(daemons, [0, 1])
    try:
        answers = pool.run_raw("victim", timeout=50, dies=dies, how=how)
        seen = answers[1 - dies]["value"]
        assert re.search(rf"rank {dies}\b", seen["text"]), seen["text"]
        assert seen["status"] in ("PEER_LOST", "ABORTED") and seen["seconds"] < 25
        assert seen["again"]  # and it stays an error
    finally:
        pool.close()
    assert daemons.alive()


def test_a_lost_daemon_is_named_and_nobody_hangs():
    with nodes.Daemons(2) as own:
        pool = nodes.Pool(own, [0, 1])
        try:
            answers = pool.run_raw("victim", timeout=50, dies=1, how="daemon", daemon=own.processes[1].pid)
            first, second = (answer.get("value", answer) for answer in answers)
        finally:
            pool.close()
    assert second["status"] == "DAEMON_LOST" and second["seconds"] < 25, second
    assert first["status"] in ("PEER_LOST", "ABORTED") and re.search(r"rank 1\b", first["text"]), first
    assert first["seconds"] < 25


def test_a_mismatch_shows_both_sides_on_both_ranks(pool):
    for rank, seen in enumerate(pool.run("mismatch")):
        assert seen["type"] == "Mismatch" and seen["status"] == "MISMATCH" and seen["rank"] == rank
        assert "1000" in seen["text"] and "1024" in seen["text"], seen["text"]


@pytest.mark.parametrize("without", [0, 1])
def test_a_rank_without_a_daemon_is_named_on_all(pool, without):
    for text in pool.run("unreachable", without=without):
        assert f"rank {without}: " in text and "/nowhere/sluice.sock" in text and "1 of 2 ranks" in text


def test_settings_that_differ_are_named_on_all(pool):
    for text in pool.run("differing"):
        assert "op_class is 'consistent' on rank 0 and 'exact' on rank 1" in text


def test_hook_errors_come_out_of_backward(pool):
    assert all("was closed" in text for text in pool.run("hook_errors"))


def test_no_hook_test_was_left_out():
    """Every case of cases.py is run by a test here."""
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "cases.py"), encoding="utf-8") as file:
        cases = re.findall(r"^def (\w+)\(rank, world, job", file.read(), re.M)
    with open(os.path.join(here, "hook_test.py"), encoding="utf-8") as file:
        text = file.read()
    assert cases and not [case for case in cases if f'"{case}"' not in text]
