"""The demo's report: one HTML page with everything in it, from what the runs measured.

Charts are drawn by the page's own script from the JSON in it; report_template.html has the page.
"""
import json
import os

TEMPLATE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "report_template.html")
MARK = "/*DATA*/null"
BINS = 36


def quantile(values, q):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


def step_times(ranks):
    """Milliseconds of each step of a run: those of its slowest rank, without the first step (buckets are built in it)."""
    return [max(times) for times in zip(*(rank["steps_ms"] for rank in ranks))][1:]


def histogram(values, low, high):
    counts = [0] * BINS
    for value in values:
        counts[min(BINS - 1, max(0, int((value - low) / (high - low) * BINS)))] += 1
    return counts


def waterfall(ranks, q=0.5):
    """One step of a run, as close to the q-quantile as there is one: what each rank computed and each bucket did, in
    milliseconds from the first rank's begin. None for a run without Sluice. The ranks' clocks are one clock here."""
    if any("ops" not in rank for rank in ranks):
        return None
    numbers = [entry[0] for entry in ranks[0]["trace"]][1:]
    lengths = {number: max(entry[4] - entry[1] for rank in ranks for entry in rank["trace"] if entry[0] == number)
               for number in numbers}
    if not lengths:
        return None
    middle = quantile(list(lengths.values()), q)
    chosen = min(numbers, key=lambda number: abs(lengths[number] - middle))
    steps = [next(entry for entry in rank["trace"] if entry[0] == chosen) for rank in ranks]
    zero = min(step[1] for step in steps)

    def ms(seconds):
        return round((seconds - zero) * 1000, 3)

    rows = []
    for rank, (_, begin, forward, backward, end) in zip(ranks, steps):
        tags = rank["report"]["tags"]
        ops = []
        for op in rank["ops"]:
            if not begin <= op["submitted"] <= end:
                continue
            submitted = ms(op["submitted"])
            daemon = op.get("daemon") or {}
            start = submitted + (daemon["first_push"] / 1000 if "first_push" in daemon else op["wait_ms"])
            finish = submitted + op["total_ms"]
            pushed = min(submitted + daemon["push_sent"] / 1000 if "push_sent" in daemon else start + op["push_ms"], finish)
            ops.append({"op": op["op"], "name": tags[op["tag"]]["parameters"] if op["tag"] in tags else op["tag"],
                        "bytes": op["bytes"], "status": op["status"], "repaired": op["repaired"],
                        "submitted": submitted, "start": round(start, 3), "pushed": round(pushed, 3),
                        "finish": round(finish, 3), "seen": ms(op["finished"]),
                        "closed": round(submitted + daemon["closed"] / 1000, 3) if "closed" in daemon else None})
        rows.append({"rank": rank["rank"], "begin": ms(begin), "forward": ms(forward), "backward": ms(backward), "end": ms(end),
                     "ops": ops})
    return {"run": ranks[0]["run"], "step": chosen + 1, "median": q == 0.5, "ranks": rows}


def page(facts, entries, extras, measured):
    """The HTML text. facts: of the whole demo; entries: those of summary.json; extras: name -> steps, curve, ...;
    measured: name -> what each rank wrote."""
    longest = max(quantile(extra["steps"], 0.995) for extra in extras.values())
    shortest = min(min(extra["steps"]) for extra in extras.values())
    low, high = shortest * 0.9, max(longest * 1.05, shortest * 0.9 + 1)
    runs = []
    for entry in entries:
        extra = extras[entry["name"]]
        runs.append({**entry, **{key: extra[key] for key in ("local_ms", "communication_share", "curve", "round_ms")},
                     "histogram": histogram(extra["steps"], low, high)})
    shown = [(name, q) for name, q in (("consistent", 0.5), ("exact", 0.5), ("consistent disturbed", 1.0)) if name in measured]
    falls = [fall for fall in (waterfall(measured[name], q) for name, q in shown) if fall]
    data = {"facts": facts, "runs": runs, "bins": [low, high], "waterfalls": falls}
    with open(TEMPLATE, encoding="utf-8") as file:
        template = file.read()
    if template.count(MARK) != 1:
        raise ValueError(f"{TEMPLATE}: needs {MARK} once")
    return template.replace(MARK, json.dumps(data).replace("</", "<\\/"))
