#!/usr/bin/env python3
"""Builds and runs the test suites for scripts/test, which has the manual.

Every suite is a CTest label (tests/CMakeLists.txt). Results are read from CTest's JUnit report, and those of pytest
files from pytest's own, so that each case counts. Whatever goes wrong counts as a failure: a build that fails, a
report that is missing, a suite that runs into its time limit.
"""
import argparse
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHOWN_LINES = 150  # of the output of one failing test; the rest is in the log that is named

# Simulation seeds: under the sanitizers each costs several times as much; --full takes its time.
SEEDS_SANITIZED = "40"
SEEDS_FULL = "3000"
KILLS_FULL = "50"  # points at which the kill tests kill; each test has a smaller number of its own

SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1:check_initialization_order=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "second_deadlock_stack=1",
}


class Suite:
    """One line of the summary: a CTest label in the build of one preset."""

    def __init__(self, name, limit_s, preset="dev", label=None, targets=("all",), environment=None):
        self.name = name
        self.limit_s = limit_s  # for the tests of the suite together, after the build
        self.preset = preset
        self.label = label or f"^{name}$"
        self.targets = targets
        self.environment = environment or {}
        self.passed, self.failed, self.skipped = 0, 0, 0
        self.build_s, self.run_s = 0.0, 0.0


def all_suites():
    return [
        Suite("unit", 300),
        Suite("house", 180),
        Suite("conformance", 300),
        Suite("simulation", 600),
        Suite("e2e", 900),
        Suite("python", 900),
        Suite("bench", 900),
        Suite("fuzz", 600, preset="fuzz", targets=("tests_fuzz",)),
        # asan is also the build of the whole tree by the other compiler.
        Suite("asan", 900, preset="asan", label="^(unit|conformance|simulation)$",
              environment={"SLUICE_SEEDS": SEEDS_SANITIZED, **SANITIZER_OPTIONS}),
        Suite("tsan", 600, preset="tsan", label="^threads$", targets=("tests_threads",),
              environment={"SLUICE_SEEDS": SEEDS_SANITIZED, **SANITIZER_OPTIONS}),
    ]


DEFAULT = ["unit", "house", "conformance", "simulation", "e2e", "python", "fuzz", "asan", "tsan"]
QUICK = ["unit", "house", "conformance"]
GROUPS = {"sanitizers": ["asan", "tsan"]}


def say(text=""):
    print(text, flush=True)


def run_logged(command, log, limit_s, environment=None):
    """Runs a command with its output in a file. Returns its exit status, or None if it ran into its time limit."""
    with open(log, "wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                                   env={**os.environ, **(environment or {})}, start_new_session=True)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Also what a test left behind: its group is of our own making.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def tail(path, count=SHOWN_LINES):
    with open(path, encoding="utf-8", errors="replace") as file:
        return "".join(file.readlines()[-count:]).rstrip()


def show(title, text):
    text = text.strip().split("\n")
    say(f"---- {title}")
    if len(text) > SHOWN_LINES:
        say(f"     (the last {SHOWN_LINES} of {len(text)} lines)")
    for line in text[-SHOWN_LINES:]:
        say(f"  | {line}")


class Runner:
    def __init__(self, options):
        self.options = options
        self.built = {}  # (preset, targets) -> did it build

    def folder(self, preset):
        return os.path.join(ROOT, "build", preset)

    def log(self, preset, name):
        os.makedirs(os.path.join(self.folder(preset), "logs"), exist_ok=True)
        return os.path.join(self.folder(preset), "logs", name + ".log")

    def build(self, suite):
        """Configures and builds what the suite needs, once. Returns whether that worked."""
        key = (suite.preset, suite.targets)
        if key in self.built:
            return self.built[key]
        started = time.monotonic()
        log = self.log(suite.preset, "build")
        steps = [["cmake", "--preset", suite.preset],
                 ["cmake", "--build", self.folder(suite.preset), "-j", str(self.options.jobs), "--target", *suite.targets]]
        ok = True
        for step in steps:
            status = run_logged(step, log, limit_s=2400)
            if status != 0:
                show(f"build ({suite.preset}) {'timed out' if status is None else 'failed'}: {' '.join(step)}", tail(log))
                ok = False
                break
        suite.build_s = time.monotonic() - started
        say(f"build {suite.preset:17} {'' if ok else 'FAILED':32} {suite.build_s:7.1f} s")
        self.built[key] = ok
        return ok

    def run(self, suite):
        if not self.build(suite):
            suite.failed = 1
        else:
            started = time.monotonic()
            self.run_tests(suite)
            suite.run_s = time.monotonic() - started
        say(f"{suite.name:23} {suite.passed:6} passed {suite.failed:4} failed {suite.skipped:4} skipped {suite.run_s:7.1f} s")

    def run_tests(self, suite):
        folder, log = self.folder(suite.preset), self.log(suite.preset, suite.name)
        report = os.path.join(folder, "logs", suite.name + ".xml")
        pytest_reports = os.path.join(folder, "pytest")
        if os.path.exists(report):
            os.remove(report)
        if os.path.isdir(pytest_reports):
            for name in os.listdir(pytest_reports):
                os.remove(os.path.join(pytest_reports, name))
        command = ["ctest", "--test-dir", folder, "-L", suite.label, "--no-tests=ignore", "--output-on-failure",
                   "-j", str(self.options.jobs), "--timeout", "300", "--output-junit", report,
                   "--test-output-size-passed", "65536", "--test-output-size-failed", "1048576"]
        environment = dict(suite.environment)
        if self.options.full:
            environment.setdefault("SLUICE_SEEDS", SEEDS_FULL)
            environment.setdefault("SLUICE_KILLS", KILLS_FULL)
        else:
            command += ["-LE", "^full$"]
        status = run_logged(command, log, suite.limit_s * (6 if self.options.full else 1), environment)
        try:
            cases = list(ElementTree.parse(report).getroot().iter("testcase"))
        except (OSError, ElementTree.ParseError) as error:
            suite.failed += 1
            why = "ran into its time limit" if status is None else f"left no report ({error})"
            show(f"suite {suite.name} {why}; its log {log} ends with", tail(log, 60))
            return
        for case in cases:
            self.count(suite, case, pytest_reports)
        # CTest also fails for reasons that are in no test case, such as tests that could not be loaded.
        if status != 0 and suite.failed == 0:
            suite.failed += 1
            show(f"ctest of suite {suite.name} exits with {status}; its log {log} ends with", tail(log, 60))

    def count(self, suite, case, pytest_reports):
        name, state, output = case.get("name"), case.get("status"), case.findtext("system-out") or ""
        inner = os.path.join(pytest_reports, name + ".xml")
        before = suite.failed
        if os.path.exists(inner):
            for test in ElementTree.parse(inner).getroot().iter("testcase"):
                title = f"{name}: {test.get('name')}"
                if test.find("failure") is not None or test.find("error") is not None:
                    suite.failed += 1
                elif test.find("skipped") is not None:
                    suite.skipped += 1
                    say(f"skipped  {title}: {test.find('skipped').get('message')}")
                else:
                    suite.passed += 1
            if state == "fail" and suite.failed == before:  # no case failed, but pytest did
                suite.failed += 1
        elif state == "run":
            suite.passed += 1
        elif case.find("skipped") is not None and case.find("skipped").get("message", "").startswith("SKIP_"):
            suite.skipped += 1
            say(f"skipped  {name}: {skip_reason(output, case.find('skipped').get('message'))}")
        else:  # failed, timed out, or, a "skipped" for CTest, without its executable
            suite.failed += 1
        if suite.failed > before:
            reasons = [case.find(kind).get("message") or "" for kind in ("failure", "skipped") if case.find(kind) is not None]
            show(f"FAILED   {suite.name}: {name} {' '.join(reasons)}", output)
            say(f"     again: ctest --test-dir build/{suite.preset} -R '^{name}$' --output-on-failure")


def skip_reason(output, fallback):
    """What a GoogleTest printed after its GTEST_SKIP, on one line, or another test as its last line."""
    text = output.split("\n")
    for index, line in enumerate(text):
        if line.rstrip().endswith(": Skipped"):
            reason = []
            for following in text[index + 1:]:
                if following.startswith("[") or not following.strip():
                    break
                reason.append(following.strip())
            return " ".join(reason) or "no reason given"
    return next((line.strip() for line in reversed(text) if line.strip()), fallback or "no reason given")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--suite", action="append", default=[])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the `finally` that ends what runs

    suites = {suite.name: suite for suite in all_suites()}
    names = QUICK if options.quick else list(suites) if options.full else DEFAULT
    if options.suite:
        names = [inner for name in options.suite for inner in GROUPS.get(name, [name])]
    for name in names:
        if name not in suites:
            print(f"test: no suite '{name}'; there are: {', '.join([*suites, *GROUPS])}", file=sys.stderr)
            return 2

    started = time.monotonic()
    runner = Runner(options)
    for name in names:
        runner.run(suites[name])
    say()
    passed, failed, skipped = (sum(getattr(suites[n], field) for n in names) for field in ("passed", "failed", "skipped"))
    say(f"{skipped} skipped; {time.monotonic() - started:.0f} s in all")
    say(f"{passed} passed, {failed} failed")
    return 0 if failed == 0 and passed > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
