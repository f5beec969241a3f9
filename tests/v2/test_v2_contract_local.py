"""Contract suite on `LocalClient`."""

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
    """Return the capabilities: nothing can be killed, all state is shared, and job names need not be unique."""
    return Capabilities(
        adopts_names=False, kills_jobs=False, logs_of_functions=False, own_variables=False, retries=False
    )
