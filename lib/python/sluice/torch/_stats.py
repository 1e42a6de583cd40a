"""What state.report() says: counts since the start, and quantiles over the last rounds."""
import collections
import threading

from .. import _abi

KEPT_ROUNDS = 4096  # over which quantiles are taken
KEPT_RECENT = 512  # ops that recent() lists
KEPT_ROUNDS_PER_TAG = 256


def quantile(values, q):
    """The value at rank q (0..1) of the sorted values, 0 when there is none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


class _Tag:
    def __init__(self, parameters, count, dtype):
        self.parameters, self.count, self.dtype = parameters, count, dtype
        self.ops = self.incomplete = 0
        self.rounds = collections.deque(maxlen=KEPT_ROUNDS_PER_TAG)


COUNTERS = ("ops", "buckets", "bytes", "bytes_sent", "incomplete", "corrected", "blocks_expected", "blocks_received",
            "blocks_skipped", "blocks_uncounted", "blocks_repaired", "blocks_filled", "blocks_discarded", "blocks_corrected", "late_ops", "late_nodes", "waits", "resyncs",
            "densified", "rejoins", "steps_lost", "carry_dropped")


class Stats:
    """Written by the completion thread and the training thread, read by anyone."""

    def __init__(self):
        self._lock = threading.Lock()
        self.counts = dict.fromkeys(COUNTERS, 0)
        self._worst = collections.Counter()
        self._waited_ms = collections.Counter()
        self._longest = None  # (part, report) of the op that waited longest for a node
        self._rounds = collections.deque(maxlen=KEPT_ROUNDS)
        self._waits = collections.deque(maxlen=KEPT_ROUNDS)
        self._recent = collections.deque(maxlen=KEPT_RECENT)
        self._tags = {}
        self._drift = {"last": None, "max": 0.0, "samples": 0}

    def drift(self, value):
        """A sample of the ranks' distance."""
        with self._lock:
            self._drift = {"last": value, "max": max(self._drift["max"], value), "samples": self._drift["samples"] + 1}

    def add(self, name, amount=1):
        with self._lock:
            self.counts[name] += amount

    def op(self, part, report, finished):
        """One op with its result. `finished`: time.monotonic() when the result was seen here."""
        with self._lock:
            counts = self.counts
            counts["ops"] += 1
            counts["bytes"] += part.nbytes
            for name in ("bytes_sent", "blocks_expected", "blocks_received", "blocks_skipped", "blocks_repaired",
                         "blocks_filled", "blocks_corrected", "late_nodes"):
                counts[name] += getattr(report, name)
            counts["late_ops"] += report.late_nodes > 0
            counts["waits"] += report.wait_ms > 0
            counts["corrected"] += report.status == "CORRECTED"
            if report.worst_node is not None:
                self._worst[report.worst_node] += 1
                self._waited_ms[report.worst_node] += report.wait_ms
                if report.wait_ms > (self._longest[1].wait_ms if self._longest else 0.0):
                    self._longest = part, report
            self._rounds.append(report.total_ms)
            self._waits.append(report.wait_ms)
            self._recent.append((part, report, finished))
            tag = self._tags.get(part.tag)
            if tag is None:
                tag = self._tags[part.tag] = _Tag(part.parameters, part.count, part.dtype)
            tag.ops += 1
            tag.rounds.append(report.total_ms)
            if report.status_code in (_abi.INCOMPLETE, _abi.DIVERGED):
                counts["incomplete"] += 1
                tag.incomplete += 1
            if report.resolved:
                self._fate(report)

    def resolved(self, report):
        """The fate of an op whose result came earlier."""
        with self._lock:
            self._fate(report)

    def _fate(self, report):
        self.counts["blocks_uncounted"] += report.blocks_uncounted
        self.counts["blocks_discarded"] += report.blocks_discarded

    def report(self):
        with self._lock:
            rounds, waits = list(self._rounds), list(self._waits)
            counts = dict(self.counts)
            expected, received = counts["blocks_expected"], counts["blocks_received"]
            missing = expected - received + counts["blocks_uncounted"]
            return {
                **counts,
                "round_ms": {"p50": quantile(rounds, 0.5), "p99": quantile(rounds, 0.99),
                             "max": max(rounds, default=0.0), "rounds": len(rounds)},
                "wait_ms": {"p50": quantile(waits, 0.5), "p99": quantile(waits, 0.99), "max": max(waits, default=0.0)},
                "approximated_ratio": missing / expected if expected else 0.0,
                "worst_nodes": dict(self._worst),
                "waited_ms": dict(self._waited_ms),
                "longest_wait": self._longest_wait(),
                "drift": dict(self._drift),
                "tags": {f"{tag:016x}": {"parameters": t.parameters, "elements": t.count, "type": t.dtype, "ops": t.ops,
                                         "incomplete": t.incomplete,
                                         "round_ms": {"p50": quantile(t.rounds, 0.5), "p99": quantile(t.rounds, 0.99)}}
                         for tag, t in self._tags.items()},
            }

    def _longest_wait(self):
        if self._longest is None:
            return None
        part, report = self._longest
        return {"op": report.op, "tag": f"{part.tag:016x}", "ms": report.wait_ms, "node": report.worst_node, "text": report.text}

    def recent(self):
        """The last ops, oldest first, as dicts; times in seconds of time.monotonic()."""
        with self._lock:
            recent = list(self._recent)
        return [{"op": report.op, "tag": f"{part.tag:016x}", "bytes": part.nbytes, "status": report.status,
                 "submitted": part.submitted, "finished": finished, "wait_ms": report.wait_ms, "push_ms": report.push_ms,
                 "total_ms": report.total_ms, "repaired": report.blocks_repaired, "worst_node": report.worst_node}
                for part, report, finished in recent]
