"""What the end-to-end tests share. Each file has one cluster for all its cases, unless a case needs its own."""
import os
import random
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import cluster as clusters  # noqa: E402  pylint: disable=wrong-import-position


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    """Logs of the daemons go into the report of a case that failed while its cluster is up."""
    report = (yield).get_result()
    if report.failed:
        for value in item.funcargs.values():
            if isinstance(value, clusters.Cluster):
                for daemon in value.daemons:
                    report.sections.append((f"log of node {daemon.node}", daemon.log_tail()))


@pytest.fixture(scope="session")
def seeded():
    """Where something is random: SLUICE_E2E_SEED repeats a run."""
    seed = int(os.environ.get("SLUICE_E2E_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"SLUICE_E2E_SEED={seed}")
    return random.Random(seed)


@pytest.fixture
def needs_namespaces():
    if not clusters.can_make_namespaces():
        pytest.skip("needs network namespaces (root)")


@pytest.fixture(scope="module")
def two_nodes():
    with clusters.Cluster(2) as cluster:
        cluster.start()
        yield cluster


@pytest.fixture(scope="module")
def four_nodes():
    with clusters.Cluster(4) as cluster:
        cluster.start()
        yield cluster
