"""Environments made by uv, from wheels made here: each test says outcome, message and bound."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import uv
from attrs import define, evolve, field

import fray
from fray import Entrypoint, EnvironmentConfig, JobFailed, JobRequest
from fray.model.environment import EnvironmentSpec
from fray.model.specs import AttemptSpec, EndReason, EntryKind, JobSpec
from fray.node.config import EnvironmentLimits
from fray.node.environments.builder import StepKilled, UvRunner
from fray.node.environments.cache import Cache
from fray.node.environments.preparer import Environments
from fray.node.environments.recipe import Step
from fray.node.linux.process_tree import children
from fray.node.prepare import NotPrepared, PreparedEnvironment
from fray.testing.wheels import make_wheel, offline
from tests.processes.environment_functions import Uses, editions, which_alpha

LIMIT_S = 90.0
"""Seconds allowed for each wait, for a busy machine."""


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("wheels")
    make_wheel(directory, "alpha", "1.0")
    make_wheel(directory, "alpha", "2.0")
    make_wheel(directory, "beta", "1.0", requires=["alpha<2"])
    make_wheel(directory, "attrs", "1.0")
    make_wheel(directory, "large", "1.0", size_bytes=3_000_000)
    return offline(directory, tmp_path_factory.mktemp("uv"))


@define
class Waiter:
    """One attempt that waits for its environment."""

    environments: Environments
    name: str
    lines: list[str] = field(factory=list)
    heard: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def say(self, line: str) -> None:
        self.lines.append(line)
        self.heard.unpark_all()

    async def prepare(
        self, *packages: str, python: str = "", entry: EntryKind = EntryKind.CALLABLE
    ) -> PreparedEnvironment:
        spec = JobSpec(job_id=self.name, name=self.name, namespace="n", entry=entry)
        spec = evolve(spec, environment=EnvironmentSpec(pip_packages=packages, python=python))
        attempt_spec = AttemptSpec(
            attempt_id=f"{self.name}:0:0", spec=spec, controller="unix:/c", key="k", directory="/tmp"
        )
        with trio.fail_after(LIMIT_S):
            return await self.environments.prepare(attempt_spec, self.say)

    async def until_line(self, text: str) -> None:
        with trio.fail_after(LIMIT_S):
            while not any(text in line for line in self.lines):
                await self.heard.park()

    def release(self) -> None:
        self.environments.release(f"{self.name}:0:0")


@asynccontextmanager
async def open_environments(directory: Path, variables: dict[str, str], **limits: Any) -> AsyncIterator[Environments]:
    environ = {**os.environ, **variables}
    environments = Environments(directory, EnvironmentLimits(**limits), environ)
    async with trio.open_nursery() as nursery:
        await nursery.start(environments.run)
        yield environments
        nursery.cancel_scope.cancel()


async def run(command: list[str], **more: Any) -> str:
    done = await trio.run_process(command, capture_stdout=True, **more)
    return done.stdout.decode()


def left_of(environments: Environments) -> list[str]:
    return sorted(path.name for path in environments.directory.iterdir() if path.suffix != ".lock")


# Made ----------------------------------------------------------------------------------------------------------------


async def test_an_environment_is_built_once_and_all_waiters_see_every_line(
    tmp_path: Path, wheels: dict[str, str]
) -> None:
    async with open_environments(tmp_path / "envs", wheels) as environments:
        waiters = [Waiter(environments, f"w{number}") for number in range(20)]
        async with trio.open_nursery() as nursery:
            for waiter in waiters:
                nursery.start_soon(waiter.prepare, "beta")
        assert {tuple(waiter.lines) for waiter in waiters} == {tuple(waiters[0].lines)}
        assert sum("uv venv" in line for line in waiters[0].lines) == 1
        assert any("beta==1.0" in line for line in waiters[0].lines)

        warm = Waiter(environments, "later")
        prepared = await warm.prepare("beta")
        assert warm.lines == [], "there is nothing to say of what is there"
        code = "import alpha, beta, fray, trio; print(alpha.version, fray.__file__)"
        output = await run([prepared.interpreter, "-P", "-c", code], env=prepared.environ)
        assert output.split() == ["1.0", str(Path(prepared.interpreter).parents[2] / "fray/fray/__init__.py")]
        assert "FRAY_TOKEN" not in prepared.environ

        assert environments.directory.is_dir()
        cache = Cache(environments.directory)
        assert cache.evict(0, 1e9) == [], "it is in use"
        for waiter in (*waiters, warm):
            waiter.release()
        assert cache.evict(0, 1e9) == [Path(prepared.lock_path).stem]


async def test_waiters_for_a_build_do_not_wait_for_its_users(tmp_path: Path, wheels: dict[str, str]) -> None:
    """Else members of a gang on several nodes of one machine wait for one another, and for ever."""
    cache = Cache(tmp_path / "envs")
    async with open_environments(cache.root, wheels) as one, open_environments(cache.root, wheels) as other:
        await Waiter(one, "first").prepare("alpha")
        (key,) = [path.stem for path in cache.root.glob("*.lock")]
        used = cache.lock(key, exclusive=False)
        assert used is not None
        mark, away = cache.directory(key) / "ready.json", tmp_path / "away"
        mark.rename(away)  # as it is while it is being made
        late = Waiter(other, "late")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(late.prepare, "alpha")
            await late.until_line("waiting for process")
            away.rename(mark)
        assert any("was built by another node" in line for line in late.lines)
        used.close()


async def test_two_nodes_of_one_machine_make_it_once(tmp_path: Path, wheels: dict[str, str]) -> None:
    async with (
        open_environments(tmp_path / "envs", wheels) as one,
        open_environments(tmp_path / "envs", wheels) as two,
        trio.open_nursery() as nursery,
    ):
        first, second = Waiter(one, "first"), Waiter(two, "second")
        nursery.start_soon(first.prepare, "alpha")
        nursery.start_soon(second.prepare, "alpha")
    lines = first.lines + second.lines
    assert sum("+ alpha==2.0" in line for line in lines) == 1
    assert any("built by another node" in line for line in lines)


# Not made ------------------------------------------------------------------------------------------------------------


async def test_an_unresolvable_requirement_fails_with_the_resolvers_message(
    tmp_path: Path, wheels: dict[str, str]
) -> None:
    async with open_environments(tmp_path / "envs", wheels) as environments:
        waiter = Waiter(environments, "w")
        with pytest.raises(NotPrepared, match="Because all versions of beta depend on alpha<2") as caught:
            await waiter.prepare("beta", "alpha>1")
        assert caught.value.cause is EndReason.ENVIRONMENT
        assert any("No solution found" in line for line in waiter.lines), "and in the log while it happens"
        with pytest.raises(NotPrepared, match="Version bounds in it that are not the job's are Fray's"):
            await waiter.prepare("attrs<2")
        assert left_of(environments) == []


async def test_without_a_network_uv_says_so_and_the_job_ends(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        index = f"http://127.0.0.1:{unused.getsockname()[1]}/simple"
        variables = {"UV_INDEX_URL": index, "UV_HTTP_RETRIES": "0", "UV_CACHE_DIR": str(tmp_path / "uv")}
        async with open_environments(tmp_path / "envs", variables) as environments:
            with pytest.raises(NotPrepared, match=index):
                await Waiter(environments, "w").prepare("alpha")
            assert left_of(environments) == []


async def test_a_network_that_never_answers_is_waited_for_no_longer_than_the_limit(tmp_path: Path) -> None:
    with silent_index(tmp_path) as variables:
        async with open_environments(tmp_path / "envs", variables, build_s=1.0) as environments:
            with pytest.raises(NotPrepared, match="not ready after 1 s; last lines"):
                await Waiter(environments, "w").prepare("alpha")
            assert environments.pids == set()
            assert not list(environments.directory.glob("*/ready.json"))


@contextmanager
def silent_index(tmp_path: Path) -> Iterator[dict[str, str]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        index = f"http://127.0.0.1:{server.getsockname()[1]}/simple"
        yield {"UV_INDEX_URL": index, "UV_CACHE_DIR": str(tmp_path / "uv")}


async def test_a_full_disk_is_named_with_its_path_and_free_space(tmp_path: Path, wheels: dict[str, str]) -> None:
    variables = {**wheels, "UV_CACHE_DIR": str(tmp_path / "uv")}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with open_environments(tmp_path / "envs", variables) as environments:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
        try:
            with pytest.raises(NotPrepared, match=r"the disk is full: [\d,.]+ [MGT]B free at .*envs") as caught:
                await Waiter(environments, "w").prepare("large")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "--cache-dir" in str(caught.value)
        assert left_of(environments) == []
        await Waiter(environments, "again").prepare("large")


async def test_a_builder_that_is_killed_leaves_a_half_built_one_that_the_next_removes(
    tmp_path: Path, wheels: dict[str, str]
) -> None:
    async with open_environments(tmp_path / "envs", wheels) as environments, trio.open_nursery() as nursery:
        waiter = Waiter(environments, "w")
        nursery.start_soon(waiter.prepare, "alpha")
        await waiter.until_line("uv pip install")
        for pid in environments.pids:
            os.kill(pid, signal.SIGKILL)
    assert any("killed by signal 9" in line for line in waiter.lines)
    assert any("unfinished" in line for line in waiter.lines)
    assert any("+ alpha==2.0" in line for line in waiter.lines)


async def test_a_uv_that_is_killed_is_tried_again_and_no_verdict_on_the_packages(tmp_path: Path) -> None:
    with silent_index(tmp_path) as variables:
        async with open_environments(tmp_path / "envs", variables) as environments:
            waiter = Waiter(environments, "w")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(kill_uv_again_and_again, waiter)
                with pytest.raises(NotPrepared) as caught:
                    await waiter.prepare("alpha")
                nursery.cancel_scope.cancel()
            assert "its builder was killed 3 times" in str(caught.value)
            assert sum("uv pip install was killed" in line for line in waiter.lines) == 3
            assert left_of(environments) == []


def test_a_child_of_uv_that_is_killed_is_no_verdict_on_the_packages_either(tmp_path: Path) -> None:
    interpreter = tmp_path / "venv" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text("#!/bin/sh\nkill -9 $$\n")
    interpreter.chmod(0o755)
    step = Step(argv=("pip", "install", "--offline", "--python", str(interpreter), "alpha"))
    with pytest.raises(StepKilled, match="uv pip install"):
        UvRunner(tmp_path, None).call(step)


async def kill_uv_again_and_again(waiter: Waiter) -> None:
    tries = 0
    while True:
        tries += 1
        while sum("$ uv pip install" in line for line in waiter.lines) < tries:
            await waiter.heard.park()
        (builder,) = waiter.environments.pids
        while not (doomed := children(builder)):  # noqa: ASYNC110 - it has said what it will do
            await trio.sleep(0.005)
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)


async def test_a_stop_while_it_is_made_ends_its_processes_and_frees_its_lock(tmp_path: Path) -> None:
    with silent_index(tmp_path) as variables:
        async with open_environments(tmp_path / "envs", variables) as environments:
            waiter = Waiter(environments, "w")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(waiter.prepare, "alpha")
                await waiter.until_line("uv pip install")
                (builder,) = environments.pids
                nursery.cancel_scope.cancel()
            key = waiter.lines[0].split()[1].rstrip(":")
            with trio.fail_after(10):
                while environments.pids:  # noqa: ASYNC110 - no task waits for it any more, so there is no event
                    await trio.sleep(0.01)
            with pytest.raises(ProcessLookupError):
                os.kill(builder, 0)
            lock = Cache(environments.directory).lock(key, exclusive=True)
            assert lock is not None
            lock.close()


async def test_a_python_that_is_not_there_is_named_with_the_node_s(tmp_path: Path, wheels: dict[str, str]) -> None:
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    async with open_environments(tmp_path / "envs", wheels) as environments:
        with pytest.raises(
            NotPrepared, match=rf"submitted by Python 3\.99, this node runs Python {own}.*uv python install"
        ):
            await Waiter(environments, "w").prepare(python="3.99")
        assert await Waiter(environments, "same").prepare(python=own) == PreparedEnvironment()


# Used ----------------------------------------------------------------------------------------------------------------


async def test_jobs_actors_and_programs_have_the_packages_they_ask_for(
    tmp_path: Path, wheels: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in {**wheels, "XDG_CACHE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(key, value)
    packages = EnvironmentConfig(pip_packages=["beta"])
    with trio.fail_after(LIMIT_S):
        async with fray.open_cluster("machine?nodes=2&cpu=2") as cluster, cluster.open_scope("s") as scope:

            async def launch(name: str, entrypoint: Entrypoint, environment: EnvironmentConfig) -> Any:
                request = JobRequest(name=name, entrypoint=entrypoint, environment=environment)
                return await (await scope.launch(request, on_failure="absorb")).wait()

            version, prefix = await launch("call", Entrypoint.from_callable(which_alpha), packages)
            assert version == "1.0"
            assert prefix.startswith(str(tmp_path))
            actor = await scope.create_actor(Uses, environment=packages)
            assert await actor.alpha() == ("1.0", prefix)
            group = await scope.create_actor_group(Uses, count=2, light=True, environment=packages)
            assert await group[1].alpha() == ("1.0", prefix)
            async with fray.WorkerPool(cluster, num_workers=1, environment=packages) as pool:
                assert await pool.submit(which_alpha) == ("1.0", prefix)
            code = f"import beta, sys; assert sys.prefix == {prefix!r}"
            await launch("program", Entrypoint.from_binary("python", ["-c", code]), packages)
            cold = EnvironmentConfig(pip_packages=["beta"], env_vars={"PYTHONHASHSEED": "1"})
            assert await launch("cold", Entrypoint.from_callable(which_alpha), cold) == ("1.0", prefix)
            with pytest.raises(ModuleNotFoundError):
                await launch("without", Entrypoint.from_callable(which_alpha), EnvironmentConfig())
            with pytest.raises(JobFailed, match="No solution found") as caught:
                bad = EnvironmentConfig(pip_packages=["beta", "alpha>1"])
                await launch("bad", Entrypoint.from_callable(which_alpha), bad)
            assert caught.value.details["cause"] is EndReason.ENVIRONMENT
            info = next(info for info in await cluster.list_jobs() if info.name == "bad")
            assert len(info.attempts) == 1, "never retried"


async def test_a_lock_file_is_obeyed_and_code_is_edited_without_a_rebuild(
    tmp_path: Path, wheels: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    (project / "src/mine").mkdir(parents=True)
    extras = '[project.optional-dependencies]\nmore = ["beta"]\n[build-system]\nrequires = ["unknown-build-backend"]\n'
    head = '[project]\nname = "mine"\nversion = "0"\nrequires-python = ">=3.11"\ndependencies = ["alpha"]\n'
    (project / "pyproject.toml").write_text(head + extras)
    (project / "src/mine/__init__.py").write_text("edition = 1\n")
    for key, value in {**wheels, "XDG_CACHE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(key, value)
    await run(["git", "init", "-q", str(project)])
    await run([uv.find_uv_bin(), "lock", "-q"], cwd=project)
    environment = EnvironmentConfig(extras=["more"], workspace=str(project))
    with trio.fail_after(LIMIT_S):
        async with fray.open_cluster("machine?nodes=2&cpu=2") as cluster, cluster.open_scope("s") as scope:
            for edition in (1, 2):
                (project / "src/mine/__init__.py").write_text(f"edition = {edition}\n")
                entrypoint = Entrypoint.from_callable(editions)
                request = JobRequest(name=f"edition-{edition}", entrypoint=entrypoint, environment=environment)
                assert await (await scope.launch(request)).wait() == ("1.0", edition)
    ready = list((tmp_path / "fray/environments").glob("*/ready.json"))
    assert len(ready) == 1


async def test_a_local_cluster_says_that_it_cannot_install_anything() -> None:
    async with fray.open_cluster("local") as cluster, cluster.open_scope("s") as scope:
        request = JobRequest(
            name="j",
            entrypoint=Entrypoint.from_callable(which_alpha),
            environment=EnvironmentConfig(pip_packages=["alpha"]),
        )
        with pytest.raises(fray.InvalidRequest, match="open_cluster\\('machine'\\)"):
            await scope.launch(request)
        with pytest.raises(fray.InvalidRequest, match="pip_packages"):
            await scope.create_actor(Uses, environment=request.environment)
