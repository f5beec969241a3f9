"""Marin's Zephyr of today on the clients of Fray, with Fray in the place of marin-fray: the results of plain loops.

On threads, on processes of this machine, and on a controller and a node that are processes of their own.

Needs marin-zephyr and Python 3.12: `make test-marin`.
"""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zephyr.context", reason="needs marin-zephyr: make test-marin")

from v2_contract import wait_for_file
from zephyr.context import ZephyrContext
from zephyr.dataset import Dataset
from zephyr.runners import InlineRunner
from zephyr.stage_io import ZephyrWorkerError

from fray.current_client import current_client
from fray.local_backend import LocalClient
from fray.types import ResourceConfig
from fray.v2 import FrayClient
from tests.processes.lab import TOKEN, open_lab

TEXTS = [path.read_text() for path in sorted(Path(collections.__file__).parent.parent.joinpath("json").glob("*.py"))]
SMALL = ResourceConfig(cpu=1, ram="1g")


@pytest.fixture(scope="module", params=["local", "machine", "fray"])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Client on threads, on processes that end with this one, and on a running cluster."""
    if request.param == "local":
        with LocalClient() as threads:
            yield threads
    elif request.param == "machine":
        # Each process would import Zephyr: the tests without it are those of the script, and on a running cluster.
        with FrayClient("machine?nodes=1&cpu=4&preload=zephyr.worker,zephyr.context") as processes:
            yield processes
    else:
        with open_lab(tmp_path_factory.mktemp("lab"), "one") as lab, FrayClient(lab.spec, token=TOKEN) as cluster:
            cluster.cluster.wait_for_nodes(1)
            yield cluster


def context(client: Any, directory: Path, **options: Any) -> ZephyrContext:
    """Return a context of two workers that run shards in their own processes: Zephyr's default on clusters, a Python
    process for each shard, takes a second of each."""
    usual = {"max_workers": 2, "resources": SMALL, "chunk_storage_prefix": str(directory), "max_execution_retries": 0}
    return ZephyrContext(client=client, **(usual | {"stage_runner_factory": InlineRunner} | options))


def count_words(words: Any = None) -> Dataset[Any]:
    # Functions inside of a function: sent by value, as those of a user's script are.
    def split(text: str) -> Iterator[dict[str, Any]]:
        for word in text.split():
            yield {"word": word, "count": 1}

    def add_up(word: str, items: Iterator[dict[str, Any]]) -> dict[str, Any]:
        return {"word": word, "count": sum(item["count"] for item in items)}

    return Dataset.from_list(TEXTS).flat_map(words or split).group_by(key=lambda item: item["word"], reducer=add_up)


def counts(result: Any) -> dict[str, int]:
    return {row["word"]: row["count"] for row in result.results}


def expected() -> dict[str, int]:
    return dict(collections.Counter(word for text in TEXTS for word in text.split()))


def test_a_pipeline_with_a_shuffle_counts_words(client: Any, tmp_path: Path) -> None:
    assert counts(context(client, tmp_path).execute(count_words())) == expected()


def test_a_context_that_stays_open_runs_one_pipeline_after_another(
    client: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with context(client, tmp_path) as shared:
        squares = Dataset.from_list(list(range(20))).map(lambda n: {"n": n * n})
        for _ in range(2):
            assert sorted(row["n"] for row in shared.execute(squares).results) == [n * n for n in range(20)]
        assert counts(shared.execute(count_words())) == expected()
    assert "Traceback" not in capfd.readouterr().err


def test_an_error_of_the_users_code_is_raised_with_its_text(client: Any, tmp_path: Path) -> None:
    def refuse(n: int) -> int:
        if n == 3:
            raise KeyError("no three")
        return n

    with pytest.raises((ZephyrWorkerError, KeyError), match="no three"):
        context(client, tmp_path, max_shard_failures=1).execute(Dataset.from_list(list(range(5))).map(refuse))


# Faults --------------------------------------------------------------------------------------------------------------

on_clusters = pytest.mark.parametrize("client", ["machine", "fray"], indirect=True)


class Words:
    """Words of a text, by a function that kills a process in the midst of the first text: this one, or that of the
    coordinator, where the pipeline arrives first."""

    def __init__(self, directory: Path, kills: str) -> None:
        self.directory, self.kills = directory, kills

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.note("coordinator")

    def note(self, name: str) -> bool:
        """Write the id of this process to a file; return whether it is the first."""
        try:
            with (self.directory / name).open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return False
        return True

    def __call__(self, text: str) -> Iterator[dict[str, Any]]:
        for number, word in enumerate(text.split()):
            if number == 50 and self.note("worker"):
                os.kill(int((self.directory / self.kills).read_text()), signal.SIGKILL)
                if self.kills != "worker":  # it ends with its coordinator
                    time.sleep(60)
            yield {"word": word, "count": 1}


def assert_nothing_left(client: Any) -> None:
    """Wait until no job of the cluster is living: the members of a group end after the call that ends it."""
    give_up_at = time.monotonic() + 30
    while living := [job.name for job in client.cluster.list_jobs("*") if not job.state.finished]:
        assert time.monotonic() < give_up_at, living
        time.sleep(0.05)


@on_clusters
@pytest.mark.parametrize(("kills", "pools"), [("worker", 1), ("coordinator", 2)])
def test_a_process_that_is_killed_in_the_midst_of_a_shard_changes_no_result(
    client: Any, kills: str, pools: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # The only worker: nothing but its restart can do its shard. Zephyr replaces the pool of a dead coordinator.
    one = context(client, tmp_path, max_workers=1, max_execution_retries=pools - 1)
    assert counts(one.execute(count_words(Words(tmp_path, kills)))) == expected()
    assert (tmp_path / "worker").exists()
    assert_nothing_left(client)
    assert "Traceback" not in capfd.readouterr().err


@on_clusters
def test_a_context_that_ends_while_a_pipeline_runs_ends_the_pipeline(
    client: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def hold(number: int) -> int:
        (tmp_path / "began").touch()
        time.sleep(120)
        return number

    shared = context(client, tmp_path).start()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(shared.execute, Dataset.from_list([1, 2, 3]).map(hold))
        wait_for_file(tmp_path / "began")
        shared.shutdown()
        with pytest.raises((ZephyrWorkerError, RuntimeError), match=r"shutting down|ended"):
            running.result(30)
    assert_nothing_left(client)
    assert "Traceback" not in capfd.readouterr().err


# Which client --------------------------------------------------------------------------------------------------------

SCRIPT = """
from zephyr.context import ZephyrContext
from zephyr.dataset import Dataset

context = ZephyrContext(max_workers=2, chunk_storage_prefix={directory!r})
print(type(context.client).__name__)
print(sorted(row["n"] for row in context.execute(Dataset.from_list([1, 2, 3]).map(lambda n: {{"n": 2 * n}})).results))
"""


@pytest.mark.parametrize(("spec", "name"), [("", "LocalClient"), ("machine", "FrayClient")])
def test_a_script_that_names_no_client_runs_where_the_variable_says(spec: str, name: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(directory=str(tmp_path))],
        env={**os.environ, "FRAY_CLIENT_SPEC": spec},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert (ran.returncode, ran.stdout.splitlines()) == (0, [name, "[2, 4, 6]"]), ran.stderr
    assert "Traceback" not in ran.stderr


def test_without_a_client_and_a_cluster_zephyr_finds_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FRAY_CLIENT_SPEC", raising=False)
    assert isinstance(current_client(), LocalClient)
