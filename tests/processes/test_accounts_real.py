"""Accounts of users on one node: what each may not reach of the others, and what works as before."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import fray
from fray import ActorConfig, Entrypoint, EnvironmentConfig, JobRequest, ResourceConfig, Secret
from fray.errors import JobFailed
from fray.node.accounts.leftovers import uid_of
from fray.node.linux.process_tree import descendants
from fray.testing.wheels import make_wheel, offline
from tests.processes.account_functions import (
    MEGABYTE,
    Owner,
    in_workspace,
    privileges,
    reach,
    spill,
    wait_with_children,
)
from tests.processes.account_lab import FIRST_UID, AccountLab, needs_accounts, open_account_lab, prefix
from tests.processes.environment_functions import where, which_alpha
from tests.processes.lab import TOKEN
from tests.processes.process_trees import lives
from tests.runtime.test_workspace_files import git, write

pytestmark = needs_accounts
LIMIT_S = 90.0
SMALL = ResourceConfig.with_cpu(cpu=0.1, memory="256MB")
SECRET = "owner-secret-4711"


@pytest.fixture
def accounts(monkeypatch: pytest.MonkeyPatch) -> Iterator[AccountLab]:
    with open_account_lab() as lab:
        monkeypatch.setenv("FRAY_TOKEN", TOKEN)
        yield lab


@asynccontextmanager
async def driver(
    lab: AccountLab, user: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[fray.Cluster, fray.Scope]]:
    monkeypatch.setenv("FRAY_USER", user)
    async with fray.open_cluster(lab.spec, logs=False) as cluster:
        with trio.fail_after(LIMIT_S):
            await cluster.wait_for_nodes(1)
        async with cluster.open_scope("s") as scope:
            yield cluster, scope


def request_of(fn: Callable[..., Any], *args: Any, environment: EnvironmentConfig | None = None) -> JobRequest[Any]:
    environment = environment or EnvironmentConfig()
    return JobRequest(
        name="job", entrypoint=Entrypoint.from_callable(fn, args=args), resources=SMALL, environment=environment
    )


@pytest.mark.promise("P9")
async def test_a_user_reaches_nothing_of_another_one_and_all_of_its_own(
    accounts: AccountLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEPT", SECRET)
    # The second variable is read when an interpreter starts: its process is executed, and its environment in /proc.
    environment = EnvironmentConfig.create(env_vars={"KEPT": Secret("KEPT"), "PYTHONHASHSEED": "47"})
    lab = accounts
    with trio.fail_after(LIMIT_S):
        async with driver(lab, "ada", monkeypatch) as (_, hers), driver(lab, "bob", monkeypatch) as (_, his):
            owner = await hers.create_actor(Owner, name="owner", environment=environment)
            places = await owner.places()
            socket = next(iter((lab.state / "sockets").glob("*/calls.sock")))
            assert lab.first <= int(places["uid"]) < lab.first + 8
            # Both have the right account, and nothing of root's.
            for scope, user in ((hers, "ada"), (his, "bob")):
                found = await scope.run(privileges, resources=SMALL)
                uid = found.pop("uids")[0]
                assert found == {
                    "gids": (uid, uid, uid),
                    "groups": [],
                    "capabilities": {0},
                    "no new privileges": "1",
                    "umask": "0077",
                    "user": (user, user),
                    "can look at itself": True,
                    "stderr by name": True,
                }
                assert (uid == int(places["uid"])) is (user == "ada")
            paths = [
                places["attempt"],
                f"{places['attempt']}/mine.txt",
                places["home"],
                f"{places['home']}/kept.txt",
                places["memory"],
                f"{places['memory']}/nonce",
                places["temporary"],
                os.path.dirname(socket),
                str(lab.state),
                str(lab.state / "attempts"),
                str(lab.state / "accounts.json"),
                str(lab.state / "logs"),
                str(next((lab.state / "logs").glob("*/log.*"))),
                str(lab.state / "records"),
                str(lab.token_file),
                str(lab.directory / "store"),
            ]
            node, controller = lab.running["n"].pid, lab.running["controller"].pid
            pids = [int(places["pid"]), node, controller, *below(node)]
            assert await his.run(reach, paths, [str(socket)], pids, resources=SMALL) == {}
            # Her own: the same paths from another process of hers, calls through the socket and shared memory.
            own = [places["attempt"], places["home"], places["memory"], places["temporary"]]
            got = await hers.run(reach, own, [str(socket)], [int(places["pid"])], resources=SMALL)
            assert set(own) <= set(got)
            assert f"connect {socket}" in got
            assert SECRET in got[f"/proc/{places['pid']}/environ"]
            assert await hers.run(double_by_name, owner, resources=SMALL) == 4 * MEGABYTE
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"fray-{places['uid']}-")]


async def double_by_name(owner: fray.ActorHandle[Owner]) -> int:
    return len(await owner.double(bytes(2 * MEGABYTE)))


def below(pid: int) -> list[int]:
    """The node's own processes: zygote and shims; those of jobs are of their accounts."""
    return [each for each in descendants(pid) if uid_of(each) == 0]


@pytest.fixture
def readable() -> Iterator[Path]:
    """Directory that all accounts may read."""
    directory = Path(tempfile.mkdtemp(prefix="fray-accounts-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


DRIVER = """
import fray, trio
from tests.processes.account_functions import MEGABYTE, Owner
from tests.processes.process_trees import lives

async def main():
    async with fray.open_cluster(logs=False) as cluster, cluster.open_scope("s") as scope:
        owner = await scope.create_actor(Owner, name="owner")
        print((await owner.places())["uid"], len(await owner.double(bytes(MEGABYTE))))

trio.run(main)
"""


async def test_a_driver_of_another_account_of_the_machine_calls_through_the_controller(accounts: AccountLab) -> None:
    lab = accounts
    command = [*prefix(lab.directory / "aside-too"), *["setpriv", f"--reuid={FIRST_UID - 1}", "--clear-groups"]]
    environ = lab.environ(FRAY_USER="ada", HOME="/nonexistent", XDG_CONFIG_HOME="/nonexistent")
    with trio.fail_after(LIMIT_S):
        ran = await trio.run_process([*command, sys.executable, "-c", DRIVER], env=environ, capture_stdout=True)
    assert ran.stdout.decode().split() == [str(lab.first), str(2 * MEGABYTE)]


async def test_checkpoints_workspaces_packages_and_spilled_objects_are_of_the_account(
    readable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, wheels = readable / "project", readable / "wheels"
    project.mkdir()
    wheels.mkdir()
    git(project, "init", "-q")
    for name in ("one.txt", "below/two.txt"):
        write(project, name, name)
    make_wheel(wheels, "alpha", "1.0")
    for name, value in offline(wheels, readable / "uv").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FRAY_TOKEN", TOKEN)
    workspace, packages = EnvironmentConfig(workspace=str(project)), EnvironmentConfig(pip_packages=["alpha"])
    with open_account_lab() as lab, trio.fail_after(LIMIT_S):
        async with driver(lab, "ada", monkeypatch) as (_, scope):
            counter = await scope.create_actor(Owner, name="owner", actor_config=ActorConfig(max_restarts=1))
            await counter.save()
            with pytest.raises(fray.FrayError):
                await counter.end()
            assert await counter.count() == 1
            uid, files = await (await scope.launch(request_of(in_workspace, environment=workspace)))
            assert (uid, files) == (lab.first, ["below/two.txt", "made.txt", "one.txt"])
            version, prefix = await (await scope.launch(request_of(which_alpha, environment=packages)))
            environments = lab.state / "accounts" / str(lab.first) / "environments"
            assert (version, prefix.startswith(str(environments))) == ("1.0", True)
            assert {path.lstat().st_uid for path in environments.rglob("*")} == {lab.first}
            assert await scope.run(spill, resources=SMALL) == (lab.first, {0o600}, 0o700)
        # Another user builds its own.
        async with driver(lab, "bob", monkeypatch) as (_, scope):
            version, prefix = await (await scope.launch(request_of(which_alpha, environment=packages)))
            assert f"/accounts/{lab.first + 1}/" in prefix


async def started(job: fray.Job[None]) -> list[int]:
    """The pids that it prints."""
    await job.wait_running()
    with trio.fail_after(LIMIT_S):
        while not (found := [line.text async for line in job.logs() if line.text.startswith("pids")]):  # noqa: ASYNC110
            await trio.sleep(0.02)
    return [int(word) for word in found[0].split()[1:]]


async def test_jobs_are_stopped_captured_and_killed_under_their_accounts(
    accounts: AccountLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = accounts
    with trio.fail_after(LIMIT_S):
        async with driver(lab, "ada", monkeypatch) as (_, scope):
            request = request_of(wait_with_children, "pids")
            job = await scope.launch(request, on_failure="absorb")
            pids = await started(job)
            assert all(uid_of(pid) == lab.first for pid in pids)
            (text,) = (await job.stacks()).values()
            assert "wait_with_children" in text
            await job.terminate()
            await job.wait_ended()
            assert not any(map(lives, pids))
            # A node that is killed leaves nothing: the next one ends what is left under its uids.
            job = await scope.launch(request, on_failure="absorb")
            pids = await started(job)
            lab.kill("n", signal.SIGKILL)
            lab.start_node("n")
            assert await scope.run(os.getuid, resources=SMALL) == lab.first
            assert not any(map(lives, pids))
            await job.terminate()
            await job.wait_ended()


async def test_programs_run_under_their_account_in_a_pid_namespace_too(
    accounts: AccountLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = accounts
    script = f"id -u; echo text > /dev/stdout; cat {lab.token_file}; ls {lab.state}/logs; touch here && echo made"
    with trio.fail_after(LIMIT_S):
        async with driver(lab, "ada", monkeypatch) as (_, scope):
            program = Entrypoint.from_binary("sh", ["-c", f"cd $(dirname $FRAY_PROGRESS); {script}"])
            job = await scope.launch(JobRequest(name="program", entrypoint=program, resources=SMALL))
            await job
            lines = [(line.stream, line.text) async for line in job.logs()]
            assert [text for stream, text in lines if stream == "out"] == [str(lab.first), "text", "made"]
            refused = [text for stream, text in lines if stream == "err"]
            assert [text.rpartition(": ")[2] for text in refused] == ["Permission denied"] * 2, refused


async def test_an_account_goes_to_another_user_only_when_nothing_of_the_first_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FRAY_TOKEN", TOKEN)
    with open_account_lab(count=1) as lab, trio.fail_after(LIMIT_S):
        async with driver(lab, "bob", monkeypatch) as (cluster, his):
            async with driver(lab, "ada", monkeypatch) as (_, hers):
                owner = await hers.create_actor(Owner, name="owner")
                places = await owner.places()
                job = await his.launch(request_of(os.getuid))
                while "no_account" not in (job.info.reason or ""):  # noqa: ASYNC110 - no event says it
                    await trio.sleep(0.02)
                refusal = (
                    f"node n has no account for user 'bob': of the 1 uids of --job-uids {lab.uids} all have attempts "
                    "(of ada); give fray-node a larger range"
                )
                assert refusal in job.info.attempts[0].message
                assert refusal in await cluster.explain(job)
            assert await job == lab.first
            assert not list(
                filter(os.path.exists, (f"{places['home']}/kept.txt", places["temporary"], places["memory"]))
            )


async def test_a_container_runs_with_the_account_and_its_client_without_the_variables_of_the_job(
    readable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (readable / "bin").mkdir()
    (readable / "containers").mkdir()
    shutil.copy(Path(__file__).with_name("podman"), readable / "bin/podman")
    (readable / "bin/python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{readable}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("STANDIN", str(readable / "containers"))
    monkeypatch.setenv("FRAY_TOKEN", TOKEN)
    image = EnvironmentConfig(docker_image="there", env_vars={"GREETING": "hello", "LD_DEBUG": "statistics"})
    with open_account_lab() as lab, trio.fail_after(LIMIT_S):
        async with driver(lab, "ada", monkeypatch) as (_, scope):
            assert await (await scope.launch(request_of(where, environment=image))) == ("hello", True)
            words = (readable / "containers/command").read_text().splitlines()
            assert words[words.index("--user") + 1] == f"{lab.first}:{lab.first}"
            assert "--env" not in words
            mounted = [word.split(":")[1] for word in words if word.startswith("--volume=")]
            assert not [path for path in mounted if path in (str(lab.state), f"{lab.state}/attempts")]
            several = EnvironmentConfig(docker_image="there", env_vars={"GREETING": "good\nmorning"})
            with pytest.raises(JobFailed, match="variable 'GREETING' has several lines"):
                await (await scope.launch(request_of(where, environment=several), on_failure="absorb"))
