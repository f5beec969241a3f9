"""The contract suite on `LocalClient`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from v2_contract import *  # noqa: F403
from v2_contract import Capabilities

from fray.v2 import LocalClient


@pytest.fixture
def client() -> Iterator[LocalClient]:
    with LocalClient() as client:
        yield client


@pytest.fixture
def make_client() -> Callable[[], LocalClient]:
    return LocalClient


@pytest.fixture
def capabilities() -> Capabilities:
    """Nothing can be killed here, everything is this process's own, and names of jobs are but names."""
    return Capabilities(
        adopts_names=False, kills_jobs=False, logs_of_functions=False, own_variables=False, retries=False
    )
