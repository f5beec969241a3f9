"""The store of the service: what was written is there after it is opened again; keys are not."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
import trio
from attrs import evolve

from fray.errors import InvalidRequest
from fray.tinker.core.job_states import ServiceJobState
from fray.tinker.core.keys import ServiceUser, hash_of
from fray.tinker.core.ledger import Ledger, LedgerEntry
from fray.tinker.core.usage import DayUsage
from fray.tinker.service_usage import ServiceUsage
from fray.tinker.store import ServiceJob, ServiceStore, with_state


def test_what_was_written_is_there_when_it_is_opened_again(tmp_path: Path) -> None:
    store = ServiceStore(tmp_path)
    ada = ServiceUser("user_1", "ada", hash_of("otk_secret"), 1.0, True)
    assert store.add_user(ada)
    assert not store.add_user(evolve(ada, user_id="user_2")), "the name is taken"
    job = ServiceJob("j1", "s", "user_1", {"data": {"a": 1}}, 2, 5.0)
    store.put_job(job)
    job = with_state(evolve(job, gpu_ids=(0, 3)), ServiceJobState.RUNNING, 6.0)
    store.put_job(job)
    entry = LedgerEntry(1, "train_step", "d", "r1")
    store.add_request("j1", entry, b"body")
    store.add_request("j1", LedgerEntry(2, "validate", "e", has_effect=False), b"other")
    store.set_answer("j1", 1, {"status": "success"}, [0.5, 1.0])
    store.set_answer("j1", 1, {"status": "later"}, None)
    store.set_sent("j1", 1)
    store.add_checkpoint("j1", "/c", 3)
    store.close()

    store = ServiceStore(tmp_path)
    assert store.users() == [ada]
    assert store.jobs() == [job]
    assert store.checkpoints("j1") == [("/c", 3)]
    first, second = store.entries("j1")
    assert first == evolve(entry, answer={"status": "success"}, was_sent=True)
    assert (second.answer, second.has_effect) == (None, False)
    assert store.body_of("j1", 1).scores == (0.5, 1.0)
    assert Ledger(store.entries("j1")).next_seq() == 1
    store.forget_bodies("j1", 1)
    with pytest.raises(LookupError, match="request 1 of job j1 has no body any more"):
        store.body_of("j1", 1)
    assert store.body_of("j1", 2).body == b"other"
    assert store.entries("j1")[0].answer == {"status": "success"}
    store.set_key("user_1", "")
    assert store.users() == [evolve(ada, key_hash="")]
    store.close()
    assert b"otk_secret" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


async def test_use_by_day_survives_the_service_and_failures_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    monkeypatch.setattr(time, "time", lambda: 20_000 * 86_400 + 5.0)  # 2024-10-04
    store = ServiceStore(tmp_path)
    # The day before the first that is kept, and that one.
    last_forgotten, first_kept = DayUsage("2023-08-31", "ada", 1, 1.0), DayUsage("2023-09-01", "ada", 2, 1.0)
    store.add_usage([last_forgotten, first_kept], "")
    usage = ServiceUsage(store)
    usage.add("ada", 7, 0.5)
    usage.add("bob", 0, 2.0)
    usage.add("ada", 3, 0.0)
    ada, bob = DayUsage("2024-10-04", "ada", 10, 0.5), DayUsage("2024-10-04", "bob", 0, 2.0)
    assert await usage.by_day(1) == [ada, bob]
    assert await usage.by_day(1000) == [first_kept, ada, bob]
    store._db.execute("PRAGMA query_only = ON")
    usage.add("bob", 1, 0.0)
    assert await usage.by_day(1) == [ada, bob], "not on disk, and not forgotten"
    store._db.execute("PRAGMA query_only = OFF")
    with trio.move_on_after(5):
        await usage.run()
    store.close()

    store = ServiceStore(tmp_path)
    assert await ServiceUsage(store).by_day(1) == [ada, evolve(bob, tokens=1)]
    store.close()


def test_a_store_of_the_second_version_is_continued(tmp_path: Path) -> None:
    ServiceStore(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "service.sqlite")) as old:
        old.executescript("DROP TABLE usage; PRAGMA user_version = 2;")
    store = ServiceStore(tmp_path)
    assert (store.jobs(), store.usage_since("")) == ([], [])
    store.close()


def test_a_store_of_a_later_version_is_refused(tmp_path: Path) -> None:
    ServiceStore(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "service.sqlite")) as newer:
        newer.executescript("PRAGMA user_version = 4;")
    with pytest.raises(InvalidRequest, match="is of version 4 of the service's store; this one reads 3"):
        ServiceStore(tmp_path)


def test_one_service_at_a_time_uses_a_directory(tmp_path: Path) -> None:
    store = ServiceStore(tmp_path)
    with pytest.raises(InvalidRequest, match="another service uses"):
        ServiceStore(tmp_path)
    store.close()
    ServiceStore(tmp_path).close()


def test_the_end_of_a_job_frees_its_accelerators() -> None:
    job = evolve(ServiceJob("j", "s", "u", {}, 1, 0.0), gpu_ids=(1,), state=ServiceJobState.RUNNING, started_at=1.0)
    ended = with_state(job, ServiceJobState.FAILED, 9.0, "no room")
    assert (ended.gpu_ids, ended.completed_at, ended.started_at, ended.error) == ((), 9.0, 1.0, "no room")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change the account of a directory")
def test_a_directory_that_another_account_has_made_where_all_may_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "training"
    directory.mkdir()
    os.chown(directory, 12345, 12345)
    ServiceStore(directory).close()
    tmp_path.chmod(0o1777)
    with pytest.raises(InvalidRequest, match=r"training belongs to another account \(uid 12345; this process has 0\)"):
        ServiceStore(directory)
    os.chown(directory, 0, 0)
    ServiceStore(directory).close()
    assert (directory / "service.sqlite").stat().st_mode & 0o777 == 0o600
