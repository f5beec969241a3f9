"""Common to all tests: no cluster of the caller's, the same examples in CI, processes one by one, no hanging."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
from hypothesis import settings

PROCESSES = ("/processes/", "/test_corpus.py")
"""In the ids of tests with real processes whose times matter."""
SHARED = ("/v2/", "/test_job_contexts.py", "/test_blocking.py")
"""In the ids of files whose tests share a cluster: Fray's, Ray's or Iris's."""
WITHIN_S = 180
"""A test that takes longer hangs; ``@pytest.mark.within(seconds)`` says otherwise."""

for name in ("CLUSTER_SPEC", "TOKEN", "JOB_ID", "JOB_NAME", "NAMESPACE", "CLUSTER_ADDRESS", "ATTEMPT_ID"):
    os.environ.pop(f"FRAY_{name}", None)

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"within(seconds): how long this test may take, in place of {WITHIN_S}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of real processes share one worker of pytest-xdist: they measure times, and do not fight for the cores, nor
    is the lab of a file made twice. ``xdist_group`` does nothing with pytest 9: it writes a field that is not read."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if any(part in nodeid for part in PROCESSES):
                return "processes"
            return nodeid.partition("::")[0] if any(part in nodeid for part in SHARED) else nodeid

    return Together(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    marker = item.get_closest_marker("within")
    seconds = marker.args[0] if marker else WITHIN_S

    def hangs(*_: object) -> NoReturn:
        raise TimeoutError(f"{item.nodeid} hangs: not done within {seconds} s")

    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(seconds)
    try:
        return (yield)
    finally:
        signal.alarm(0)
