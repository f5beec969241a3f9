"""The store of the service: what was written is there after it is opened again; keys are not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from attrs import evolve

from fray.errors import InvalidRequest
from fray.tinker.core.job_states import ServiceJobState
from fray.tinker.core.keys import ServiceUser, hash_of
from fray.tinker.core.ledger import Ledger, LedgerEntry
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
