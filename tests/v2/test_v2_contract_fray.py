"""Contract suite on `FrayClient` in this process: real controller and node, jobs on threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from v2_contract import *  # noqa: F403
from v2_contract import Capabilities

from fray.v2 import FrayClient


@pytest.fixture(scope="module")
def client() -> Iterator[FrayClient]:
    with FrayClient("local") as client:
        yield client


@pytest.fixture
def make_client() -> Callable[[], FrayClient]:
    return lambda: FrayClient("local")


@pytest.fixture
def capabilities() -> Capabilities:
    """Return the capabilities: jobs are threads of this process and share its variables and output."""
    return Capabilities(own_variables=False, logs_of_functions=False, runs_async=True)
