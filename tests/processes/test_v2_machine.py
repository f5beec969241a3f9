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

from fray.errors import LaunchFailed
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


class Modules:
    def __init__(self) -> None:
        self.at_start = set(sys.modules)

    def are_there_from_the_start(self, *names: str) -> bool:
        return self.at_start.issuperset(names)


def test_processes_start_with_the_modules_that_the_spec_preloads() -> None:
    for spec, there in (("machine?cpu=2&preload=wave,xmlrpc.client", True), ("machine?cpu=2", False)):
        with FrayClient(spec, logs=False) as client:
            modules = client.create_actor(Modules, name="modules")
            assert modules.are_there_from_the_start("wave", "xmlrpc.client") == there


def test_a_module_that_cannot_be_preloaded_is_the_error_of_the_cluster() -> None:
    with (
        pytest.raises(LaunchFailed, match=r"(?s)No module named 'no_such_module'.*while it imported.* no_such_module"),
        FrayClient("machine?preload=no_such_module", logs=False) as client,
    ):
        client.create_actor(Modules, name="modules").are_there_from_the_start()


def submit_through(client: FrayClient, path: Path) -> None:
    with client as same:
        same.submit(contract.request(contract.write, path)).wait(contract.LATE_S)
