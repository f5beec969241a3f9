"""A person's way from an invitation to a job, with the real daemons and the real command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.lab import Lab, open_lab

DRIVER = """
import fray, trio

async def main():
    async with fray.open_cluster(namespace="adas") as cluster, cluster.open_scope("s") as scope:
        small = fray.ResourceConfig.with_cpu(cpu=0.1, memory="50MB")
        program = fray.Entrypoint.from_binary("true", [])
        job = await scope.launch(fray.JobRequest(name="who", entrypoint=program, resources=small))
        await job
        print(job.info.user)
        try:
            await cluster.cordon("alpha")
        except fray.FrayError as error:
            print(error)

trio.run(main)
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("lab"), "alpha") as lab:
        yield lab


def run(environ: dict[str, str], *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], env=environ, input=stdin, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.promise("P9")
def test_an_invitation_a_login_a_job_and_the_audit_log(lab: Lab, tmp_path: Path) -> None:
    admin = lab.environ()
    invitation = run(admin, "-m", "fray.cli", "user", "add", "ada", "--role", "user")
    assert invitation.returncode == 0, invitation.stderr
    assert invitation.stdout.startswith("fray-invite:")
    ada = {key: value for key, value in admin.items() if key not in ("FRAY_TOKEN", "FRAY_CLUSTER_SPEC")}
    ada["XDG_CONFIG_HOME"] = str(tmp_path)
    login = run(ada, "-m", "fray.cli", "login", lab.spec, stdin=invitation.stdout)
    assert login.returncode == 0, login.stderr
    assert login.stdout.startswith(f"logged in to {lab.spec} as ada (user) until ")
    assert (tmp_path / "fray" / "keys.json").stat().st_mode & 0o777 == 0o600
    checked = run(ada, "-m", "fray.cli", "doctor").stdout
    assert "ok       identity     ada (user), by the key of a login that is valid for 30 days\n" in checked
    assert "ok       nodes        1 in service\n" in checked
    driver = run({**ada, "FRAY_USER": "root"}, "-c", DRIVER)
    assert driver.returncode == 0, driver.stderr
    assert driver.stdout.splitlines() == [
        "ada",
        "user 'ada' may not send CordonNodes: see the table of roles in docs/security.md",
    ]
    assert "may not send ReadAudit" in run(ada, "-m", "fray.cli", "audit").stderr
    records = json.loads(run(admin, "-m", "fray.cli", "audit", "--json", "--since", "10m").stdout)
    found = [(one["user"], one["action"], one["outcome"].partition(":")[0]) for one in records]
    assert ("ada", "CordonNodes", "refused") in found
    assert ("ada", "Launch", "done") in found
    # A user has a row of its own alone, without what only operators know; an admin has both.
    query = ("-m", "fray.cli", "sql", "select user, role, jobs from users where user <> ''", "--json")
    assert json.loads(run(ada, *query).stdout) == [{"user": "ada", "role": None, "jobs": 1}]
    assert {"user": "ada", "role": "user", "jobs": 1} in json.loads(run(admin, *query).stdout)
    # A copy of the file, as on another machine, has the same key until it is revoked.
    other = {**ada, "XDG_CONFIG_HOME": str(tmp_path / "other")}
    shutil.copytree(tmp_path / "fray", tmp_path / "other" / "fray")
    left = run(other, "-m", "fray.cli", "logout")
    assert left.returncode == 0, left.stderr
    assert left.stdout.startswith(
        f"logged out from {lab.spec}: the key of ada is removed from this machine; it is valid"
    )
    assert run(other, "-m", "fray.cli", "jobs").returncode == 2
    assert "nothing to log out from" in run(other, "-m", "fray.cli", "logout", lab.spec).stderr
    (key,) = json.loads(run(ada, "-m", "fray.cli", "key", "list", "--json").stdout)
    assert run(admin, "-m", "fray.cli", "key", "revoke", key["key_id"]).returncode == 0
    jobs = run(ada, "-m", "fray.cli", "jobs")
    assert jobs.returncode == 1
    assert "does not accept the key" in jobs.stderr


NAMED = """
import fray, trio

async def main():
    async with fray.open_cluster() as cluster, cluster.open_scope("s") as scope:
        small = fray.ResourceConfig.with_cpu(cpu=0.1, memory="50MB")
        job = await scope.launch(
            fray.JobRequest(name="who", entrypoint=fray.Entrypoint.from_binary("true", []), resources=small)
        )
        await job
        print(ascii(job.info.user))

trio.run(main)
"""


@pytest.mark.parametrize("variable", ["FRAY_USER", "USER"])
def test_a_login_name_in_latin_1_is_that_of_the_jobs(lab: Lab, variable: str) -> None:
    environ = {name: value for name, value in lab.environ().items() if name not in ("FRAY_USER", "USER")}
    driver = run({**environ, variable: os.fsdecode(b"j\xf6rg")}, "-c", NAMED)
    assert driver.returncode == 0, driver.stderr
    assert driver.stdout == "'j\\xf6rg'\n"


def test_a_logout_revokes_the_key_if_asked_to(lab: Lab, tmp_path: Path) -> None:
    admin = lab.environ()
    invitation = run(admin, "-m", "fray.cli", "user", "add", "eve", "--role", "user").stdout
    # The token of the environment belongs to none of the users: the stored one is used.
    eve = {**admin, "XDG_CONFIG_HOME": str(tmp_path)}
    assert run(eve, "-m", "fray.cli", "login", lab.spec, stdin=invitation).returncode == 0
    left = run(eve, "-m", "fray.cli", "logout", "--revoke")
    assert left.returncode == 0, left.stderr
    assert left.stdout == (f"logged out from {lab.spec}: the key of eve is removed from this machine; it is revoked\n")
    assert json.loads(run(admin, "-m", "fray.cli", "key", "list", "--user", "eve", "--json").stdout) == []
    assert json.loads((tmp_path / "fray" / "keys.json").read_text()) == {"clusters": {}}


def test_without_a_login_the_command_says_what_to_do(lab: Lab, tmp_path: Path) -> None:
    environ = {key: value for key, value in lab.environ(XDG_CONFIG_HOME=str(tmp_path)).items() if key != "FRAY_TOKEN"}
    said = run(environ, "-m", "fray.cli", "jobs")
    assert said.returncode == 2
    assert (
        "authentication required: `fray login` with an invitation, set FRAY_TOKEN, or use --token-file" in said.stderr
    )
