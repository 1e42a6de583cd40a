"""sluice-bench as a person calls it."""
import json
import os
import subprocess

import pytest

from cluster import program

NODES = 2


def start(cluster, rank, *arguments, environment=None):
    return subprocess.Popen(
        cluster.prefix(rank) + [program("sluice-bench"), "allreduce", "--socket", cluster.daemons[rank].socket_path,
                                *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **(environment or {})})


def run_all(cluster, *arguments):
    meeting = cluster.new_folder("meet")
    ranks = [start(cluster, rank, "--rendezvous", meeting, *arguments,
                   environment={"RANK": str(rank), "WORLD_SIZE": str(NODES)}) for rank in range(NODES)]
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * NODES, outputs
    return outputs


@pytest.mark.parametrize("options", [(), ("--type", "bf16", "--redop", "mean"), ("--class", "consistent"),
                                     ("--inflight", "8")], ids=["plain", "bf16 mean", "consistent", "in flight"])
def test_a_sweep(two_nodes, tmp_path, options):
    path = str(tmp_path / "out.json")
    daemon = str(two_nodes.daemons[0].pid)
    outputs = run_all(two_nodes, "-b", "1K", "-e", "64K", "-f", "4", "-n", "10", "-w", "2", "-c", "--json", path,
                      "--daemon-pid", daemon, *options)
    assert outputs[1][0] == "", "only rank 0 prints"
    lines = [line.split() for line in outputs[0][0].split("\n") if line and not line.startswith("#")]
    assert [int(line[0]) for line in lines] == [1024, 4096, 16384, 65536]
    for line in lines:
        assert line[9] == "0", f"#wrong: {line}"
        assert all(float(value) > 0 for value in line[4:9] + line[10:11]), line
    assert "Out of bounds values : 0 OK" in outputs[0][0]
    with open(path, encoding="utf-8") as file:
        report = json.load(file)
    assert [row["bytes"] for row in report["rows"]] == [1024, 4096, 16384, 65536]
    for row in report["rows"]:
        assert row["wrong"] == 0 and row["min_ms"] <= row["p50_ms"] <= row["p99_ms"], row
        assert abs(row["busbw_gb_s"] / row["algbw_gb_s"] - 2 * (NODES - 1) / NODES) < 1e-6


def test_one_rank_alone(two_nodes):
    process = start(two_nodes, 0, "-b", "1M", "-e", "1M", "-n", "3", "-c")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and " 1048576 " in output


def test_a_missing_rank_is_named(two_nodes):
    process = start(two_nodes, 0, "--rendezvous", two_nodes.new_folder("meet"), "--rank", "0", "--world", "3",
                    "--timeout-ms", "500")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1 and "rank 1, 2" in error, error


def test_a_used_folder_is_refused(two_nodes):
    meeting = two_nodes.new_folder("meet")
    for word in ("missing", "earlier run"):
        process = start(two_nodes, 0, "--rendezvous", meeting, "--rank", "0", "--world", "2", "--timeout-ms", "300")
        _, error = process.communicate(timeout=60)
        assert process.returncode == 1 and word in error, error


@pytest.mark.parametrize("arguments", [("--rank", "2", "--world", "2"), ("-b", "many"), ("-b", "2K", "-e", "1K"),
                                       ("--type", "f12"), ("--type", "i32", "--redop", "mean"),
                                       ("--type", "u8", "--world", "100", "-c")], ids=" ".join)
def test_usage_errors_are_2(two_nodes, arguments):
    process = start(two_nodes, 0, *arguments)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2 and error, error
