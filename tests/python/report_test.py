"""The demo's report from recorded measurements: the figures, the page's data, and that the page stands alone."""
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "demo"))
import demo  # noqa: E402
import report  # noqa: E402


def recorded(run, step_ms):
    """What the four ranks of a run write, with round numbers: 20 steps, two buckets each."""
    ranks = []
    for rank in range(4):
        trace = [[number, 50 + number, 50.05 + number, 50.2 + number, 50.25 + number + (number == 13) * 0.5]
                 for number in range(8, 20)]
        measured = {"run": run, "rank": rank, "steps_ms": [900.0] + [step_ms + rank] * 18 + [step_ms * 3],
                    "local_ms": [100.0, 100.0 + rank], "losses": [1.0] * 20, "curve": [[10, 4.5, 0.7], [20, 9.0, 0.85]],
                    "seconds_to_target": 9.0, "bytes_sent": 1000 + rank, "distances": [0.0, 1e-9 * rank],
                    "gradient_bytes": 23_000_000, "trace": trace}
        if run != "gloo":
            measured["report"] = {"blocks_expected": 1000, "blocks_received": 990 if rank == 2 else 1000,
                                  "incomplete": 3 if rank == 2 else 0, "blocks_uncounted": 2, "round_ms": {"p50": 100.0, "p99": 150.0},
                                  "tags": {f"{bucket:016x}": {"parameters": f"layer{bucket} </script>"} for bucket in range(2)}}
            measured["ops"] = [{"op": 2 * number + bucket, "tag": f"{bucket:016x}", "bytes": 1 << 20, "status": "OK",
                                "submitted": 50.06 + number + 0.05 * bucket, "finished": 50.19 + number, "wait_ms": 10.0,
                                "push_ms": 40.0, "total_ms": 80.0, "repaired": 0, "worst_node": None,
                                "daemon": {"first_push": 12000, "push_sent": 55000, "closed": 60000} if bucket else None}
                               for number in range(8, 20) for bucket in range(2)]
        ranks.append(measured)
    return ranks


@pytest.fixture(scope="module")
def runs():
    measured = {name: recorded(name, step_ms) for name, step_ms in (("gloo", 400.0), ("exact", 350.0), ("consistent", 300.0))}
    pairs = {name: demo.summarize(name, ranks) for name, ranks in measured.items()}
    return measured, [entry for entry, _ in pairs.values()], {name: extra for name, (_, extra) in pairs.items()}


@pytest.fixture(scope="module")
def page(runs):
    measured, entries, extras = runs
    facts = {"nodes": 4, "link": "1gbit", "plan": demo.FULL, "quick": False, "when": "2025-01-01 12:00", "cpus": 2,
             "gradient_bytes": 23_000_000}
    return report.page(facts, entries, extras, measured)


def test_disturbed_runs_are_rows_of_their_own(runs):
    measured, entries, extras = runs
    slow = recorded("consistent", 500.0)
    for rank in slow:
        rank["run"] = "consistent disturbed"
    entry, extra = demo.summarize("consistent disturbed", slow)
    facts = {"nodes": 4, "link": "1gbit", "plan": demo.FULL, "quick": False, "when": "2025-01-01 12:00", "cpus": 2,
             "gradient_bytes": 23_000_000}
    page = report.page(facts, entries + [entry], {**extras, entry["name"]: extra}, {**measured, entry["name"]: slow})
    data = data_of(page)
    assert [run["name"] for run in data["runs"]] == ["gloo", "exact", "consistent", "consistent disturbed"]
    fall = data["waterfalls"][-1]
    # Of the run beside bursts the longest step is shown, which is the 14th in the recording.
    assert fall["run"] == "consistent disturbed" and not fall["median"] and fall["step"] == 14
    assert "consistent disturbed" in demo.table(entries + [entry], {**extras, entry["name"]: extra})


def data_of(page):
    return json.loads(re.search(r"^const data = (.*);$", page, re.M).group(1))


def test_summary_has_the_agreed_keys_and_figures(runs):
    _, entries, extras = runs
    for entry in entries:
        assert list(entry) == ["name", "step_ms_p50", "step_ms_p99", "seconds_to_target", "accuracy", "bytes_sent",
                               "approximated_ratio", "parameter_distance", "incomplete_ops"]
    gloo, _, consistent = entries
    assert gloo["step_ms_p50"] == 403.0 and gloo["step_ms_p99"] == 1200.0 and gloo["bytes_sent"] == 4006
    assert gloo["approximated_ratio"] == 0.0 and gloo["incomplete_ops"] == 0 and gloo["parameter_distance"] == pytest.approx(3e-9)
    assert consistent["approximated_ratio"] == 18 / 4000 and consistent["incomplete_ops"] == 3
    assert extras["gloo"]["communication_share"] == pytest.approx(1 - 103 / 403)
    json.dumps(entries)


def test_table_shows_every_run_and_the_share(runs):
    _, entries, extras = runs
    text = demo.table(entries, extras)
    assert [line.split()[0] for line in text.splitlines()[1:4]] == ["gloo", "exact", "consistent"]
    assert "communication share of the Gloo step: 74 %" in text


def test_waterfall_is_a_step_of_median_length(runs):
    fall = report.waterfall(runs[0]["consistent"])
    assert fall["step"] != 14 and len(fall["ranks"]) == 4  # step number 13 is the odd one
    first = fall["ranks"][0]
    assert first["begin"] == 0 and first["backward"] == pytest.approx(200) and len(first["ops"]) == 2
    op = first["ops"][0]
    assert (op["submitted"], op["start"], op["pushed"], op["finish"]) == pytest.approx((60, 70, 110, 140))
    op = first["ops"][1]  # where the daemon's own trace is there, it counts
    assert (op["start"], op["pushed"], op["closed"], op["finish"]) == pytest.approx((122, 165, 170, 190))
    assert first["ops"][0]["closed"] is None
    assert report.waterfall(runs[0]["gloo"]) is None


def test_page_stands_alone(page):
    assert not re.search(r"(src|href)\s*=|@import|url\(", page)
    links = set(re.findall(r"https?://[^\"'\s)]+", page))
    assert links == {"http://www.w3.org/2000/svg"}  # a namespace's name, not a place


def test_page_data(page):
    data = data_of(page)
    assert [run["name"] for run in data["runs"]] == ["gloo", "exact", "consistent"]
    assert all(sum(run["histogram"]) == 19 for run in data["runs"])  # all steps but the first
    assert [fall["run"] for fall in data["waterfalls"]] == ["consistent", "exact"]
    assert page.count("</script>") == 1  # texts in the data cannot end the script


def test_page_draws(page, tmp_path):
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("no chromium to draw the page with")
    path = tmp_path / "report.html"
    path.write_text(page, encoding="utf-8")
    dump = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile",
                           "--virtual-time-budget=3000", "--dump-dom", path.as_uri()],
                          capture_output=True, text=True, timeout=90).stdout
    drawn = re.search(r'<div id="accuracy">(.*?)</div>', dump, re.S).group(1)
    assert drawn.count("<polyline") == 3 and drawn.count("<circle") == 6
    falls = re.search(r'<div id="waterfall">(.*?)</div>', dump, re.S).group(1)
    assert falls.count("<rect") == 4 * (3 + 2 * 3)  # per rank: three parts of the step, two buckets of three phases
    assert dump.count("<td>") == 3 * 11
