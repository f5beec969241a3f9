"""Configuration of all tests: which run by default, in which order and where, fixed or random examples, time limits.

``pytest`` alone runs the default suite: deterministic, without Ray, one process test per promise. ``pytest --all`` adds
the process tests, the tests against Ray and the long simulations, and draws the examples of Hypothesis at random.
``pytest --more`` runs of these what the default suite does not: it leaves out the tests that would be the same.
Scenarios of the network laboratory (tests/network/) run with ``--network``, a few of them with ``--all``.
"""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import settings

# GNU readline, which pytest imports, exports the size of a terminal, so that the workers of pytest-xdist inherit one.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)

TESTS = Path(__file__).parent
SHARED_CLUSTER = (
    "/v2/",
    "/processes/",
    "/examples/",
    "/test_job_contexts.py",
    "/test_blocking.py",
    "/test_executor.py",
    "/test_joblib.py",
)
"""Parts of the ids of files whose tests share a cluster or a service: a file runs in one worker of pytest-xdist."""
NEEDS_RAY = ("v2/test_v2_contract_ray.py", "v2/test_v2_ray_options.py")
NEEDS_EXTRAS = (
    "blocking/test_scikit_learn.py",
    *("examples/test_dataset.py", "processes/test_dataset_real.py"),
    *("examples/test_pipeline.py", "processes/test_pipeline_real.py"),
    "test_notebook.py",
    "test_reference.py",
)
"""Files that need the packages of constraints-test.txt or constraints-docs.txt, which ``make test-all`` installs."""
ASKS_FOR_PACKAGE = re.compile(r"(importorskip|find_spec)\((?![\"']torch[\"'])")
"""Found in files that skip where a package is missing, other than torch, whose tests `make test-rl` runs."""
TEST_LIMIT_S = 180
"""Seconds after which a test counts as hanging; ``@pytest.mark.within(seconds)`` sets another limit."""

for name in ("CLUSTER_SPEC", "TOKEN", "JOB_ID", "JOB_NAME", "NAMESPACE", "CLUSTER_ADDRESS", "ATTEMPT_ID"):
    os.environ.pop(f"FRAY_{name}", None)

# A login of the account that runs the tests is not theirs.
os.environ["XDG_CONFIG_HOME"] = os.path.join(tempfile.gettempdir(), "fray-tests-config")

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

pytest.register_assert_rewrite("v2_contract")  # imported by several files, so before any of them

settings.register_profile("fixed", deadline=None, max_examples=50, derandomize=True, print_blob=True, database=None)
settings.register_profile("random", deadline=None, print_blob=True)


@pytest.fixture(autouse=True)
def unchanged_log() -> Iterator[None]:
    """Restore the logger that ``main`` of a daemon, called in this process, sends to standard error alone."""
    logger = logging.getLogger("fray")
    # A library that configures logging, as `logging.config` does by default, disables the loggers that exist.
    logging.disable(logging.NOTSET)
    for name, each in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "fray" and isinstance(each, logging.Logger):
            each.disabled = False
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.fixture
def warm_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make the cluster of this process that has imported torch that of drivers (`tests.support.warm_cluster`)."""
    if request.node.get_closest_marker("own_cluster"):
        yield
        return
    from tests.support.warm_cluster import on_warm_cluster

    with on_warm_cluster():
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every test, with random examples")
    parser.addoption("--more", action="store_true", help="as --all, without tests that the default suite runs the same")
    parser.addoption("--network", action="store_true", help="run every scenario of the network laboratory, too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"within(seconds): limit of this test, in place of {TEST_LIMIT_S} s")
    config.addinivalue_line("markers", "timed: measures times, so it runs alone (make test-all runs these last)")
    config.addinivalue_line("markers", "full: runs only with --all")
    config.addinivalue_line("markers", "in_test_all: a scenario of tests/network/ that `make test-all` runs, too")
    config.addinivalue_line("markers", "promise(name): a process test that the default suite runs too")
    config.addinivalue_line("markers", "own_cluster: its cluster ends with its driver, so it is not `warm_cluster`")
    config.addinivalue_line("markers", "torch: needs torch, which only the environment of make test-rl has")
    config.addinivalue_line("markers", "first_hour: the page that a new user follows; run with every Python")
    if config.getoption("--more"):
        config.option.all = True
    every = config.getoption("--all")
    settings.load_profile("random" if every else "fixed")
    if hasattr(config, "workerinput"):
        config.option.hypothesis_seed = config.workerinput["hypothesis_seed"]
    elif every and config.getoption("hypothesis_seed") is None:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(2**32))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass the seed to a worker of pytest-xdist, which gets the options of the command line alone."""
    node.workerinput["hypothesis_seed"] = node.config.option.hypothesis_seed


def pytest_report_header(config: pytest.Config) -> str:
    if not config.getoption("--all"):
        return "suite: default, fixed examples"
    seed = config.getoption("hypothesis_seed")
    suite = "what the default one leaves out" if config.getoption("--more") else "all"
    return f"suite: {suite}, random examples; repeat them with --hypothesis-seed={seed}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files whose packages the default environment does not install."""
    return None if config.getoption("--all") or not _needs_more(collection_path) else True


def _needs_more(path: Path) -> bool:
    return TESTS in path.parents and path.relative_to(TESTS).as_posix() in NEEDS_RAY + NEEDS_EXTRAS


@cache
def _asks_for_packages(path: Path) -> bool:
    """Return whether a file skips tests where a package is missing, which may be one that `make test-all` installs."""
    return ASKS_FOR_PACKAGE.search(path.read_text(encoding="utf-8")) is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    every, more, network = (config.getoption(name) for name in ("--all", "--more", "--network"))
    kept, left = [], []
    for item in items:
        full = item.get_closest_marker("full") is not None
        process = "/processes/" in item.nodeid and item.get_closest_marker("promise") is None
        short = item.get_closest_marker("in_test_all") is not None
        if short or ("/network/" in item.nodeid and "lab" in getattr(item, "fixturenames", ())):
            wanted = network or (every and short)
        else:
            by_default = not (full or process or _needs_more(item.path))
            draws = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
            same = by_default and not draws and not _asks_for_packages(item.path)
            wanted = (every or by_default) and not (more and same)
        (kept if wanted else left).append(item)
    if left and kept:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file that shares a cluster in one worker: its cluster is started once.

    ``xdist_group`` does nothing with pytest 9: it writes a field that is not read.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.partition("::")[0] if any(part in nodeid for part in SHARED_CLUSTER) else nodeid

    return ByFile(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    marker = item.get_closest_marker("within")
    seconds = marker.args[0] if marker else TEST_LIMIT_S

    def hangs(*_: object) -> NoReturn:
        raise TimeoutError(f"{item.nodeid} hangs: not done within {seconds} s")

    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(seconds)
    try:
        return (yield)
    finally:
        signal.alarm(0)
