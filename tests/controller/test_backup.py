"""Backups: made while the controller runs, complete, private, and a cluster again when they are restored."""

from __future__ import annotations

import sqlite3
import tarfile
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fray.controller import store as store_module
from fray.controller.backup import back_up, restore
from fray.controller.restore import restore_state
from fray.controller.store import SCHEMA_VERSION, Store
from fray.errors import InvalidRequest, StoreError
from fray.model.messages.client import ListJobs
from fray.model.messages.session import VERSION
from fray.model.policy.priority import Band
from fray.model.resources import Demand
from fray.model.specs import JobState
from fray.net.codec import blob_id
from fray.scheduler.lifecycle import JobPhase
from fray.scheduler.state.rows import JobRow
from tests.support.controller import spec, stage


async def test_a_restored_backup_of_a_running_controller_is_the_same_cluster(
    tmp_path: Path, autojump_clock: Any
) -> None:
    live, file, other = tmp_path / "live", tmp_path / "backup.tar", tmp_path / "other"
    async with stage(Store(live)) as here:
        (live / "token").write_text("secret")
        driver, node = await here.client(), await here.node("n1")
        await driver.launch(spec("done", detached=True, namespace="ns"))
        await node.wait_desired("done-1:0:0")
        node.succeed("done-1:0:0", b"a result")
        await driver.job_ended("done-1")
        await driver.launch(
            spec("waits", payload=b"large", detached=True, namespace="ns", demand=Demand(cpu_milli=64_000)),
            payload=b"large",
        )
        back_up(live, file)
        assert file.stat().st_mode & 0o777 == 0o600
        assert not list(live.glob("backup-*"))
        cluster_id, epoch = here.controller.cluster_id, here.controller.epoch
        # It runs as before.
        await driver.launch(spec("later", detached=True, namespace="ns"))
        await here.crash()
    restore(file, other)
    assert (other / "token").read_text() == "secret"
    assert other.stat().st_mode & 0o777 == 0o700
    async with stage(Store(other)) as again:
        assert again.controller.cluster_id == cluster_id
        assert again.controller.epoch > epoch + 1_000_000  # nodes have seen epochs after that of the backup
        driver = await again.client()
        jobs = (await driver.ask(ListJobs(namespace="*"))).jobs
        assert {job.name: job.state for job in jobs} == {"done": JobState.SUCCEEDED, "waits": JobState.PENDING}
        waits = next(row for row in again.controller.state.jobs.values() if row.spec.name == "waits")
        assert waits.generation == 100_000  # earlier ones may have been used since the backup
        assert again.store.blob(jobs[0].value) == b"a result"
        again.store.close()


def test_a_backup_is_complete_whatever_the_controller_writes_and_deletes_meanwhile(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", synchronous="OFF")
    stop, begun = threading.Event(), threading.Event()

    def work() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            blob = store.put_blob(f"payload {number}".encode())
            job = JobRow(
                spec=spec(f"j{number}", payload=f"payload {number}".encode()),
                order=number,
                owner="",
                band=Band.INTERACTIVE,
            )
            job.phase = JobPhase.QUEUED
            store.save([("job", f"j{number}-1", job)])
            if number > 20:
                store.save(deletes=[("job", f"j{number - 20}-1")])
                store.delete_blobs([blob_id(f"payload {number - 20}".encode())])
            assert blob
            begun.set()

    writer = threading.Thread(target=work)
    writer.start()
    try:
        assert begun.wait(60)
        for number in range(5):
            back_up(tmp_path / "store", tmp_path / f"{number}.tar")
    finally:
        stop.set()
        writer.join()
        store.close()
    for number in range(5):
        restore(tmp_path / f"{number}.tar", tmp_path / f"restored{number}")
        with closing(Store(tmp_path / f"restored{number}")) as restored:
            state = restore_state(restored, restored.load(), 0.0, None)
            assert state.jobs
            for job in state.jobs.values():
                assert restored.blob(job.spec.payload or "") is not None, job.job_id


def test_what_cannot_be_backed_up_or_restored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store in"):
        back_up(tmp_path / "none", tmp_path / "file.tar")
    Store(tmp_path / "store").close()
    back_up(tmp_path / "store", tmp_path / "file.tar")
    with pytest.raises(InvalidRequest, match=r"file\.tar exists: pass the name of a new file"):
        back_up(tmp_path / "store", tmp_path / "file.tar")
    with pytest.raises(InvalidRequest, match="is not empty"):
        restore(tmp_path / "file.tar", tmp_path / "store")
    (tmp_path / "noise").write_bytes(b"noise" * 1000)
    with pytest.raises(InvalidRequest, match="is not a backup of a store"):
        restore(tmp_path / "noise", tmp_path / "new")
    with tarfile.open(tmp_path / "other.tar", "w") as archive:
        archive.add(tmp_path / "noise", arcname="noise")
    with pytest.raises(InvalidRequest, match=r"it has no fray\.db"):
        restore(tmp_path / "other.tar", tmp_path / "new2")


# Versions of the store


def _rename_jobs(db: sqlite3.Connection) -> None:
    db.execute("UPDATE rows SET tbl = 'task' WHERE tbl = 'job'")


def _add_table(db: sqlite3.Connection) -> None:
    db.execute("CREATE TABLE more (key TEXT)")


def test_a_store_migrates_forward_in_one_transaction_and_a_copy_of_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Store(tmp_path)) as store:
        store.save([("job", "j", spec())], meta={"epoch": 7})
    old = SCHEMA_VERSION
    monkeypatch.setattr(store_module, "SCHEMA_VERSION", old + 2)

    def fail(db: sqlite3.Connection) -> None:
        _add_table(db)
        raise sqlite3.OperationalError("the disk is full")

    # A step fails: the steps before it are undone, and the store is as it was.
    monkeypatch.setattr(store_module, "MIGRATIONS", {old: _rename_jobs, old + 1: fail})
    with pytest.raises(StoreError, match="the disk is full"):
        Store(tmp_path)
    monkeypatch.setattr(store_module, "MIGRATIONS", {old: _rename_jobs, old + 1: _add_table})
    with closing(Store(tmp_path)) as store:
        assert [(table, key) for table, key, _ in store.load().rows] == [("task", "j")]
        assert store.load().meta == {"epoch": 7}
        store.save(meta={"release": "9.9"})
        assert store._db.execute("SELECT count(*) FROM more").fetchone() == (0,)
    copy = tmp_path / f"fray.db.schema-{old}"
    assert copy.stat().st_mode & 0o777 == 0o600
    # Back: the earlier version refuses the store with advice, and opens the copy.
    monkeypatch.setattr(store_module, "SCHEMA_VERSION", old)
    with pytest.raises(StoreError) as caught:
        Store(tmp_path)
    assert str(caught.value) == (
        f"store {tmp_path}/fray.db was written by a later version of Fray (fray 9.9, schema {old + 2}; this is fray "
        f"{VERSION}, schema {old}); nothing was changed. Start that version again, restore a backup from before the "
        f"upgrade (fray backup --restore; fray.db.schema-{old} beside it is the database of then), or pass another "
        "--store directory"
    )
    copy.rename(tmp_path / "fray.db")
    with closing(Store(tmp_path)) as store:
        assert [(table, key) for table, key, _ in store.load().rows] == [("job", "j")]


def test_a_backup_of_an_earlier_store_is_one_for_that_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator makes it by the command of the new release, and goes back to it with the old one."""
    with closing(Store(tmp_path / "store")) as store:
        store.save(meta={"epoch": 7})
    with monkeypatch.context() as later:
        later.setattr(store_module, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
        later.setattr(store_module, "MIGRATIONS", {SCHEMA_VERSION: _add_table})
        back_up(tmp_path / "store", tmp_path / "file.tar")
    with tarfile.open(tmp_path / "file.tar") as archive:
        assert sorted(name for name in archive.getnames() if "fray.db" in name) == ["./fray.db"]
        assert archive.getmember("./fray.db").mode & 0o777 == 0o600
    restore(tmp_path / "file.tar", tmp_path / "restored")
    with closing(Store(tmp_path / "restored")) as restored:
        assert restored.load().meta["epoch"] >= 7
