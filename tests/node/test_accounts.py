"""Accounts of users: the range, the table, and changing to an account. With a node: tests/processes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from fray.errors import InvalidRequest
from fray.model.specs import EndReason, JobAccount
from fray.node.accounts import uid_range
from fray.node.accounts.leftovers import processes_of, remove_leftovers
from fray.node.accounts.switch import check_enterable, give, unreadable
from fray.node.accounts.table import AccountTable
from fray.node.accounts.uid_range import (
    UidRange,
    account_conflict,
    check_uids,
    holding,
    parse_uids,
    subordinate_conflict,
)
from fray.node.prepare import NotPrepared

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to other accounts")
UIDS = UidRange(310_000_000, 310_000_002)


# The range -----------------------------------------------------------------------------------------------------------


def test_a_range_is_two_numbers_of_no_account() -> None:
    assert parse_uids("200000-200999") == UidRange(200_000, 200_999)
    for text in ("", "7", "200999-200000", "a-b", "1-2-3"):
        with pytest.raises(InvalidRequest, match="expected FIRST-LAST, such as 200000-200999"):
            parse_uids(text)
    for text in ("0-10", "999-2000", "60000-70000", f"{2**31 - 1}-{2**31}"):
        with pytest.raises(InvalidRequest, match="are the system's; choose a range"):
            parse_uids(text)


def test_accounts_and_subordinate_ids_in_the_range_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passwd, subuid = tmp_path / "passwd", tmp_path / "subuid"
    passwd.write_text("root:x:0:0::/root:/bin/sh\nada:x:310000001:100::/home/ada:/bin/sh\n")
    subuid.write_text("ada:309999990:11\n")
    monkeypatch.setattr(uid_range, "ACCOUNT_FILES", (passwd,))
    monkeypatch.setattr(uid_range, "SUBORDINATE_FILES", (subuid, tmp_path / "none"))
    assert account_conflict(UIDS) == f"ada of {passwd} has 310000001"
    assert subordinate_conflict(UIDS) == f"ada of {subuid} has 309999990-310000000"
    assert account_conflict(UidRange(310_000_002, 310_000_003)) == ""
    assert subordinate_conflict(UidRange(310_000_001, 310_000_003)) == ""
    with pytest.raises(InvalidRequest, match="must run as root" if os.geteuid() else "ada of .* has 310000001; choose"):
        check_uids(UIDS)


def test_two_nodes_of_a_machine_have_different_ranges(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from fray.errors import InvalidRequest\n"
        "from fray.node.accounts.uid_range import holding, parse_uids\n"
        "try:\n    with holding(parse_uids(sys.argv[1]), Path(sys.argv[2])): print('held')\n"
        "except InvalidRequest as error: print(error)\n"
    )

    def other(uids: str) -> str:
        command = [sys.executable, "-c", script, uids, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with holding(UIDS, tmp_path):
        assert other("310000003-310000004") == "held"
        assert other("310000002-310000009") == (
            "--job-uids 310000002-310000009: another fray-node of this machine uses uids of this range; give each a "
            "range of its own"
        )
    assert other("310000002-310000009") == "held"


def test_a_closed_directory_above_that_of_the_node_is_named(tmp_path: Path) -> None:
    (tmp_path / "closed/state").mkdir(parents=True)
    (tmp_path / "closed").chmod(0o700)
    closed = next(place for place in reversed((tmp_path / "closed/state").parents) if not place.stat().st_mode & 1)
    with pytest.raises(InvalidRequest, match=f"cannot enter {closed}, above their own directories; use another"):
        check_enterable(tmp_path / "closed/state")


# Changing ------------------------------------------------------------------------------------------------------------


@needs_root
def test_a_directory_is_given_with_all_that_is_root_s_in_it_and_nothing_behind_links(tmp_path: Path) -> None:
    account = JobAccount(uid=UIDS.first, gid=UIDS.first, name="ada", directory="")
    (tmp_path / "root.txt").write_text("root's")
    job = tmp_path / "job"
    (job / "deep/er").mkdir(parents=True)
    (job / "deep/er/file").write_text("")
    (job / "link").symlink_to(tmp_path / "root.txt")
    os.mkfifo(job / "pipe")
    # What is the account's already may change at any moment, so root does not look into it again.
    (job / "given").mkdir()
    (job / "given/other").write_text("")
    os.chown(job / "given", UIDS.first, UIDS.first)
    give(job, account)
    found = {path.name: path.lstat().st_uid for path in job.rglob("*")}
    assert found == {
        **dict.fromkeys(("deep", "er", "file", "link", "pipe", "given"), UIDS.first),
        "other": 0,
    }
    assert (tmp_path / "root.txt").stat().st_uid == 0
    assert {stat.S_IMODE(place.stat().st_mode) for place in (job, job / "deep", job / "deep/er")} == {0o700}
    with pytest.raises(OSError, match="Not a directory"):
        give(job / "link", account)


@needs_root
def test_what_an_account_cannot_read_is_found_by_trying(tmp_path: Path) -> None:
    account = JobAccount(uid=UIDS.first, gid=UIDS.first, name="ada", directory="")
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    assert unreadable(account, ["/", "/etc/passwd"]) == ""
    assert unreadable(account, ["/", str(secret)]) == str(secret)


# The table -----------------------------------------------------------------------------------------------------------


def open_table(directory: Path) -> AccountTable:
    table = AccountTable(UIDS, directory)
    table.open()
    return table


@needs_root
async def test_a_user_keeps_its_account_and_an_unused_one_goes_to_another_user_without_what_was_left(
    tmp_path: Path,
) -> None:
    table = open_table(tmp_path)
    uids = [(await table.acquire(user)).uid for user in ("ada", "bob", "ada", "carl")]
    assert uids == [UIDS.first, UIDS.first + 1, UIDS.first, UIDS.last]
    with pytest.raises(NotPrepared) as full:
        await table.acquire("dora", "n")
    assert full.value.cause is EndReason.NO_ACCOUNT
    assert str(full.value) == (
        "node n has no account for user 'dora': of the 3 uids of --job-uids 310000000-310000002 all have attempts (of "
        "ada, bob, carl); give fray-node a larger range"
    )
    # After a restart each has its own again.
    for user in ("carl", "bob", "ada", "ada"):
        table.release(user)
    table = open_table(tmp_path)
    bobs = await table.acquire("bob")
    assert bobs.uid == UIDS.first + 1
    # The one that was not used for the longest time is ada's; of it nothing is left.
    left = [f"{table._account('ada').home}/kept", f"/dev/shm/fray-test-{os.getpid()}"]
    for path in left:
        os.mkdir(path)
        os.chown(path, UIDS.first, UIDS.first)
    doras = await table.acquire("dora")
    assert doras.uid == UIDS.first
    assert not list(filter(os.path.exists, left))
    assert stat.S_IMODE(os.stat(doras.home).st_mode) == 0o700
    assert (await table.acquire("ada")).uid == UIDS.last


@needs_root
async def test_an_account_with_a_process_is_not_given_away(tmp_path: Path) -> None:
    table = open_table(tmp_path)
    for user in ("ada", "bob", "carl"):
        await table.acquire(user)
        table.release(user)
    process = await trio.lowlevel.open_process(["sleep", "1000"], user=UIDS.first, group=UIDS.first, extra_groups=())
    try:
        assert processes_of(UIDS.first) == [process.pid]
        assert remove_leftovers(UIDS.first) == f"process {process.pid} runs under uid {UIDS.first}"
        assert (await table.acquire("dora")).uid == UIDS.first + 1
        assert (await table.acquire("ada")).uid == UIDS.first
    finally:
        process.kill()
        await process.wait()
