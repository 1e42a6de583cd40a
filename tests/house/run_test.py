"""Checks how tests/run.py counts: a missing executable, a crash and a time-out are failures and never skips."""
import contextlib
import io
import os
import sys
import tempfile
import time
import unittest
import xml.etree.ElementTree as ElementTree

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import run  # noqa: E402

GTEST_SKIP = """[ RUN      ] A.skip
a.cc:4: Skipped
needs root
[  SKIPPED ] A.skip (0 ms)"""


def alive(pid):
    """Whether a process runs; a zombie that its parent has not collected yet does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


class CountTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="sluice-run-")
        self.addCleanup(folder.cleanup)
        self.reports = folder.name
        self.suite = run.Suite("unit", 1)
        self.output = ""

    def count(self, case, pytest_report=None):
        """(passed, failed, skipped) after one <testcase> of CTest's report."""
        case = ElementTree.fromstring(case)
        if pytest_report:
            with open(os.path.join(self.reports, case.get("name") + ".xml"), "w", encoding="utf-8") as file:
                file.write(pytest_report)
        with contextlib.redirect_stdout(io.StringIO()) as text:
            run.Runner(options=None).count(self.suite, case, self.reports)
        self.output = text.getvalue()
        return self.suite.passed, self.suite.failed, self.suite.skipped

    def test_pass(self):
        self.assertEqual(self.count('<testcase name="a" status="run"/>'), (1, 0, 0))

    def test_failure_shows_the_output(self):
        case = '<testcase name="a" status="fail"><failure message=""/><system-out>it broke</system-out></testcase>'
        self.assertEqual(self.count(case), (0, 1, 0))
        self.assertIn("it broke", self.output)

    def test_skip_says_what_is_missing(self):
        case = (f'<testcase name="a" status="notrun"><skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/>'
                f"<system-out>{GTEST_SKIP}</system-out></testcase>")
        self.assertEqual(self.count(case), (0, 0, 1))
        self.assertIn("needs root", self.output)

    def test_skip_of_a_script_is_its_last_line(self):
        case = ('<testcase name="a" status="notrun"><skipped message="SKIP_RETURN_CODE=77"/>'
                "<system-out>looking\nskipped: no NIC\n</system-out></testcase>")
        self.assertEqual(self.count(case), (0, 0, 1))
        self.assertIn("no NIC", self.output)

    def test_missing_executable_is_a_failure(self):
        case = '<testcase name="a" status="notrun"><skipped message="Unable to find executable"/></testcase>'
        self.assertEqual(self.count(case), (0, 1, 0))

    def test_pytest_cases_count_one_by_one(self):
        report = ('<testsuites><testsuite><testcase name="x"/><testcase name="y"><failure/></testcase>'
                  '<testcase name="z"><skipped message="no GPU"/></testcase><testcase name="w"><error/></testcase>'
                  "</testsuite></testsuites>")
        self.assertEqual(self.count('<testcase name="p" status="fail"/>', report), (1, 2, 1))
        self.assertIn("no GPU", self.output)

    def test_pytest_that_fails_without_a_failing_case(self):
        report = '<testsuites><testsuite><testcase name="x"/></testsuite></testsuites>'
        self.assertEqual(self.count('<testcase name="p" status="fail"/>', report), (1, 1, 0))

    def test_pytest_that_left_no_report(self):
        self.assertEqual(self.count('<testcase name="p" status="fail"/>'), (0, 1, 0))

    def test_time_limit_ends_the_process_group(self):
        log = os.path.join(self.reports, "log")
        self.assertIsNone(run.run_logged(["sh", "-c", "echo $$; sleep 60 & echo $!; wait"], log, limit_s=0.5))
        pids = run.tail(log).split()
        self.assertEqual(len(pids), 2)
        deadline = time.monotonic() + 10
        while any(alive(pid) for pid in pids):
            self.assertLess(time.monotonic(), deadline, "still running 10 s after the time limit")
            time.sleep(0.01)


if __name__ == "__main__":
    unittest.main()
