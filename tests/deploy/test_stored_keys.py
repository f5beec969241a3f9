"""Keys of a person on disk: where they are, who may read them, and when they are used."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from fray.api.open import default_spec
from fray.deploy import login as logins
from fray.deploy import stored_keys
from fray.errors import InvalidRequest, Unauthorized
from tests.support.controller import ADDRESS, Stage, stage

SPEC = "fray://lab.example:7421"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("FRAY_CLUSTER_SPEC", raising=False)
    return tmp_path / "fray"


async def invitation(cluster: Stage, **more: Any) -> str:
    from fray.model.messages.client import Role
    from fray.model.messages.people import AddUser

    admin = await cluster.client(role=Role.TOOL, host="admin")
    return str((await admin.ask(AddUser(user="ada", role="user", **more))).text)


async def login(cluster: Stage, text: str) -> stored_keys.StoredKey:
    return await logins.login(SPEC, ADDRESS, text, cluster.network.at("laptop"), cluster.rng)


async def test_a_login_stores_a_key_that_opens_the_cluster(autojump_clock: Any, home: Path) -> None:
    async with stage() as cluster:
        assert stored_keys.find_key(ADDRESS) is None
        key = await login(cluster, await invitation(cluster))
        assert (key.user, key.role, key.spec) == ("ada", "user", SPEC)
        found = stored_keys.find_key(ADDRESS)
        assert found is not None
        client = await cluster.client(credential=found.credential)
        assert client.welcomes[0].user == "ada"
    assert default_spec() == SPEC
    assert [os.stat(path).st_mode & 0o777 for path in (home, home / "keys.json")] == [0o700, 0o600]
    assert "pending" not in json.loads((home / "keys.json").read_text())


async def test_a_login_that_failed_keeps_the_key_and_is_repeated_with_the_same_secret(
    autojump_clock: Any, home: Path
) -> None:
    async with stage() as cluster:
        await login(cluster, await invitation(cluster))
        first = stored_keys.find_key(ADDRESS)
        text = await invitation(cluster)
        await cluster.crash()
        with pytest.raises(Exception, match="controller"):
            await login(cluster, text)
        assert stored_keys.find_key(ADDRESS) == first
        (pending,) = json.loads((home / "keys.json").read_text())["pending"].values()
        await cluster.start()
        assert (await login(cluster, text)).secret == pending["secret"]


async def test_an_invitation_that_is_not_accepted_says_why(autojump_clock: Any) -> None:
    async with stage() as cluster:
        with pytest.raises(Unauthorized, match="has expired, was revoked, or is for another cluster"):
            await login(cluster, "fray-invite:abc:def")
        with pytest.raises(InvalidRequest, match="not an invitation"):
            await login(cluster, "hello")


async def test_a_key_that_has_expired_is_not_used(autojump_clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage() as cluster:
        await login(cluster, await invitation(cluster, key_life_s=3600.0))
    now = time.time()
    monkeypatch.setattr(stored_keys.time, "time", lambda: now + 3601)
    with pytest.raises(InvalidRequest, match=r"the key of ada for .* has expired: ask an admin"):
        stored_keys.find_key(ADDRESS)


async def test_a_file_that_others_can_read_is_not_used(autojump_clock: Any, home: Path) -> None:
    async with stage() as cluster:
        await login(cluster, await invitation(cluster))
    (home / "keys.json").chmod(0o644)
    with pytest.raises(InvalidRequest, match="is readable by other users: chmod 600 it"):
        stored_keys.find_key(ADDRESS)


async def test_programs_of_a_job_do_not_use_the_login_of_the_nodes_account(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage() as cluster:
        await login(cluster, await invitation(cluster))
    monkeypatch.setenv("FRAY_ATTEMPT_ID", "work-1:0:0")
    assert stored_keys.find_key(ADDRESS) is None
    assert default_spec() == "local"


def test_without_a_login_the_default_is_local() -> None:
    assert default_spec() == "local"
    assert stored_keys.find_key(ADDRESS) is None


def test_a_key_is_found_with_tls_and_without() -> None:
    assert len({stored_keys.place_of(each) for each in ("tcp:lab:7421", "tls:lab:7421#" + "ab" * 32)}) == 1
