"""The contract suite of `fray.v2` on `FrayClient` where every job is a process: embedded nodes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "v2"))
import v2_contract as contract
from v2_contract import *  # noqa: F403
from v2_contract import Capabilities

from fray.v2 import FrayClient


@pytest.fixture(scope="module")
def client() -> Iterator[FrayClient]:
    with FrayClient("machine?nodes=2&cpu=8") as client:
        yield client


@pytest.fixture
def make_client() -> Callable[[], FrayClient]:
    return lambda: FrayClient("machine?nodes=1&cpu=2")


@pytest.fixture
def capabilities() -> Capabilities:
    """None is missing."""
    return Capabilities(runs_async=True)


def test_a_client_goes_to_a_job_and_is_that_jobs_own_there(client: FrayClient, tmp_path: Path) -> None:
    job = client.submit(contract.request(submit_through, client, tmp_path / "done"))
    assert job.wait(timeout=contract.LATE_S) == "succeeded"
    assert (tmp_path / "done").read_text() == "done"


def submit_through(client: FrayClient, path: Path) -> None:
    with client as same:
        same.submit(contract.request(contract.write, path)).wait(contract.LATE_S)
