"""A replaced `fray-node` keeps accounts, pinned CPUs and environments of what runs, also for what starts later."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trio

import fray
from fray import EnvironmentConfig, ResourceConfig
from fray.testing.wheels import make_wheel, offline
from tests.processes.account_lab import AccountLab, needs_accounts, open_account_lab
from tests.processes.lab import TOKEN, Lab, open_lab
from tests.processes.process_trees import lives
from tests.upgrade.replacement_functions import Resident

pytestmark = [pytest.mark.full, pytest.mark.within(240)]
LIMIT_S = 100.0
SMALL = ResourceConfig.with_cpu(cpu=0.1, memory="64MB")
PINNED = ResourceConfig(cpu=1, memory="64MB", pin_cpus=True)
PACKAGES = EnvironmentConfig(pip_packages=["alpha"])


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package index, which all accounts may read."""
    directory = Path(tempfile.mkdtemp(prefix="fray-wheels-"))
    directory.chmod(0o755)
    make_wheel(directory / "wheels", "alpha", "1.0")
    for name, value in offline(directory / "wheels", directory / "uv").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FRAY_TOKEN", TOKEN)
    yield
    shutil.rmtree(directory)


@contextmanager
def open_site(with_accounts: bool, directory: Path) -> Iterator[Lab]:
    config = directory / "node.toml"
    config.write_text("cpu = 4\n")
    options = ("--config", str(config))
    with open_account_lab(*options) if with_accounts else open_lab(directory) as lab:
        if not with_accounts:
            lab.start_node("n", *options, "--cache-dir", str(directory / "cache"))
        yield lab


@asynccontextmanager
async def driver(lab: Lab, user: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[fray.Scope]:
    monkeypatch.setenv("FRAY_USER", user)
    async with fray.open_cluster(lab.spec, logs=False) as cluster:
        with trio.fail_after(LIMIT_S):
            await cluster.wait_for_nodes(1)
        async with cluster.open_scope("s") as scope:
            yield scope


async def replace(lab: Lab, times: int, attempts: int) -> None:
    """Replace the node by itself, and wait until the next program has what it had."""
    node, file = lab.running["n"], lab.directory / "n.log"
    node.send_signal(signal.SIGUSR2)
    with trio.fail_after(LIMIT_S):
        while file.read_text().count("runs in place of the program before") < times:
            assert node.poll() is None, file.read_text()
            assert "was not replaced" not in file.read_text(), file.read_text()
            await trio.sleep(0.05)
    assert f"before: {attempts} attempts continue" in file.read_text()


@pytest.mark.parametrize("with_accounts", [False, pytest.param(True, marks=needs_accounts)])
@pytest.mark.usefixtures("packages")
async def test_accounts_pinned_cpus_and_environments_stay(
    with_accounts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_site(with_accounts, tmp_path) as lab, trio.fail_after(LIMIT_S):
        async with driver(lab, "ada", monkeypatch) as hers:
            plain = await hers.create_actor(Resident, name="plain", resources=SMALL)
            pinned = await hers.create_actor(Resident, name="pinned", resources=PINNED)
            packaged = await hers.create_actor(Resident, name="packaged", resources=SMALL, environment=PACKAGES)
            residents = [plain, pinned, packaged]
            # What was started before is in the third program, too.
            for times in (1, 2):
                before = [await each.place() for each in residents]
                await replace(lab, times, len(residents))
                assert [await each.place() for each in residents] == before
                # Those that start afterwards.
                next_one = await hers.create_actor(
                    Resident, name=f"packaged-{times}", resources=SMALL, environment=PACKAGES
                )
                residents.append(next_one)
                found = await next_one.place()
                assert (found["uid"], found["prefix"]) == (before[2]["uid"], before[2]["prefix"])
            if isinstance(lab, AccountLab):
                assert {one["uid"] for one in before} == {lab.first}
                async with driver(lab, "bob", monkeypatch) as his:
                    other = await his.create_actor(Resident, name="other", resources=SMALL)
                    assert (await other.place())["uid"] == lab.first + 1
            mine = (await pinned.place())["cpus"]
            if len(os.sched_getaffinity(0)) > 1:
                beside = await hers.create_actor(Resident, name="beside", resources=PINNED)
                assert len(mine) == 1
                assert mine.isdisjoint((await beside.place())["cpus"])
            pids = [(await each.place())["pid"] for each in residents]
        with trio.fail_after(LIMIT_S):
            while any(map(lives, pids)):  # noqa: ASYNC110
                await trio.sleep(0.05)
