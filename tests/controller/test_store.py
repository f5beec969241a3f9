"""The store keeps what it said it keeps, refuses what it cannot trust, and leaves that as it is."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fray.controller import store as store_module
from fray.controller.store import BLOB_LIMIT_BYTES, SCHEMA_VERSION, Store
from fray.errors import MessageTooLarge, StoreError
from fray.model.messages.client import Event
from fray.model.specs import EndReason, Outcome
from fray.net.codec import blob_id, from_json


def outcome(message: str = "") -> Outcome:
    return Outcome(cause=EndReason.FAILURE, message=message)


def happened(job: str, what: str, time: float = 1.0) -> Event:
    return Event(time=time, job=job, what=what, text=f"{job} {what}")


@pytest.fixture(params=["disk", "memory"])
def reopened(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A way to lose the controller and open its store again."""
    if request.param == "memory":
        kept = Store.memory()
        yield lambda: kept
        return
    current: list[Store] = []

    def reopen() -> Store:
        for store in current:
            store.close()
        current[:] = [Store(tmp_path / "store")]
        return current[0]

    yield reopen
    for store in current:
        store.close()


def snapshot(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


def filled(directory: Path, rows: int = 2000) -> None:
    store = Store(directory)
    store.save([("job", f"j{n}", outcome("x" * 100)) for n in range(rows)], meta={"epoch": 3})
    store.close()


# Keeping


def test_a_new_store_is_empty(reopened: Any) -> None:
    loaded = reopened().load()
    assert loaded.rows == ()
    assert loaded.meta == {}


def test_what_was_saved_is_there_again_in_the_order_it_first_came(reopened: Any) -> None:
    store = reopened()
    store.save([("job", "b", outcome("one")), ("node", "a", outcome("two"))], meta={"epoch": 1, "now": 12.5})
    store.save([("job", "a", outcome("three")), ("job", "b", outcome("changed"))], meta={"now": 13.5})
    loaded = reopened().load()
    assert [(table, key) for table, key, _ in loaded.rows] == [("job", "b"), ("node", "a"), ("job", "a")]
    assert from_json(Outcome, loaded.rows[0][2]) == outcome("changed")
    assert loaded.meta == {"epoch": 1, "now": 13.5}


def test_deleted_rows_are_gone(reopened: Any) -> None:
    store = reopened()
    store.save([("job", "a", outcome()), ("job", "b", outcome())])
    store.save(deletes=[("job", "a"), ("job", "never-there")])
    assert [key for _, key, _ in reopened().load().rows] == ["b"]


def test_events_of_one_job_are_read_oldest_first(reopened: Any) -> None:
    store = reopened()
    store.save(events=[happened("a", "launched"), happened("b", "launched")])
    store.save(events=[happened("a", "ended")])
    assert reopened().events("a") == (happened("a", "launched"), happened("a", "ended"))
    assert reopened().events("a", limit=1) == (happened("a", "ended"),)


def test_an_event_takes_any_text(reopened: Any) -> None:
    store = reopened()
    store.save([("job", "a", outcome("half \udcff"))], events=[happened("a", "half \udcff")])
    assert reopened().events("a")[0].what == "half \\udcff"
    assert from_json(Outcome, reopened().load().rows[0][2]).message == "half \udcff"


def test_the_oldest_events_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "EVENTS_LIMIT", 1500)
    store = Store.memory()
    store.save(events=[happened("a", "x", float(n)) for n in range(3000)])
    kept = store.events("a", limit=10_000)
    assert [event.time for event in (kept[0], kept[-1])] == [1500.0, 2999.0]


def test_a_save_that_fails_changes_nothing_and_says_so(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save([("job", "a", outcome("before"))])
    # Not a `StoreError`, which ends the controller: the value is bad, and not the store.
    with pytest.raises(sqlite3.IntegrityError, match="NOT NULL"):
        store.save([("job", "a", outcome("after")), ("job", None, outcome())], meta={"epoch": 9})  # type: ignore[list-item]
    loaded = store.load()
    assert [from_json(Outcome, text).message for _, _, text in loaded.rows] == ["before"]
    assert loaded.meta == {}
    store.close()


def test_a_closed_store_cannot_be_written(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.close()
    with pytest.raises(StoreError, match="cannot be written"):
        store.save(meta={"epoch": 1})


Key = st.tuples(st.sampled_from(["job", "node"]), st.sampled_from("abc"))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.dictionaries(Key, st.text(max_size=5), max_size=3), st.sets(Key, max_size=2)), max_size=8))
def test_a_store_is_as_good_as_a_dict(batches: list[tuple[dict[tuple[str, str], str], set[tuple[str, str]]]]) -> None:
    store = Store.memory()
    twin: dict[tuple[str, str], str] = {}
    for upserts, deletes in batches:
        store.save([(table, key, outcome(text)) for (table, key), text in upserts.items()], deletes)
        twin |= upserts
        twin = {key: text for key, text in twin.items() if key not in deletes}
    assert {(table, key): from_json(Outcome, text).message for table, key, text in store.load().rows} == twin


# Blobs


def test_a_blob_is_readable_at_once_and_on_disk_after_the_save(reopened: Any, tmp_path: Path) -> None:
    store = reopened()
    name = store.put_blob(b"payload")
    assert name == blob_id(b"payload")
    assert store.has_blob(name)
    assert store.blob(name) == b"payload"
    store.save(meta={"epoch": 1})
    if store.path is not None:
        assert (tmp_path / "store" / "blobs" / name).read_bytes() == b"payload"
    store = reopened()
    assert store.blob(name) == b"payload"
    assert store.blobs() == {name}


def test_a_forgotten_blob_is_gone_also_from_disk(reopened: Any) -> None:
    store = reopened()
    saved = store.put_blob(b"saved")
    store.save()
    waiting = store.put_blob(b"waiting")
    store.delete_blobs([saved, waiting, "never-there"])
    assert store.blob(saved) is None
    assert not store.has_blob(waiting)
    assert reopened().blobs() == set()


def test_a_blob_of_exactly_the_limit_is_kept_and_one_byte_more_is_refused() -> None:
    store = Store.memory()
    store.put_blob(bytes(BLOB_LIMIT_BYTES))
    with pytest.raises(MessageTooLarge) as caught:
        store.put_blob(bytes(BLOB_LIMIT_BYTES + 1))
    assert caught.value.details == {"size_bytes": BLOB_LIMIT_BYTES + 1, "limit_bytes": BLOB_LIMIT_BYTES}


def test_a_damaged_blob_counts_as_absent_until_it_is_stored_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    name = store.put_blob(b"payload")
    store.save()
    (tmp_path / "blobs" / name).write_bytes(b"pay")
    assert store.blob(name) is None
    assert not store.has_blob(name)
    store.put_blob(b"payload")
    store.save()
    assert (tmp_path / "blobs" / name).read_bytes() == b"payload"
    store.close()


def test_a_half_written_blob_is_swept_at_the_next_start(tmp_path: Path) -> None:
    Store(tmp_path).close()
    (tmp_path / "blobs" / "abc.new").write_bytes(b"ha")
    store = Store(tmp_path)
    assert store.blobs() == set()
    assert list((tmp_path / "blobs").iterdir()) == []
    store.close()


# The lock


def test_a_second_controller_is_refused_with_the_holder_of_the_store(tmp_path: Path) -> None:
    first = Store(tmp_path)
    with pytest.raises(StoreError, match=f"in use by another controller .process {os.getpid()} on "):
        Store(tmp_path)
    first.close()
    Store(tmp_path).close()


def _hold_and_die(path: str) -> None:
    Store(path).save([("job", "a", outcome())])
    os.kill(os.getpid(), 9)


def test_the_lock_of_a_killed_holder_is_free_and_what_it_saved_is_there(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_hold_and_die, args=(str(tmp_path),))
    process.start()
    process.join(30)
    assert process.exitcode == -9
    store = Store(tmp_path)
    assert [key for _, key, _ in store.load().rows] == ["a"]
    store.close()


# Damage


def refused(directory: Path, match: str) -> None:
    """Opening raises StoreError, changes no file, and lets go of the lock."""
    before = snapshot(directory)
    for _ in range(2):
        with pytest.raises(StoreError, match=match):
            Store(directory)
    assert snapshot(directory) == before


@pytest.mark.parametrize("keep", [0, 1, 50, 100, 4096, 4097, 10_000, 0.5, 0.9])
def test_a_truncated_store_is_refused_and_left_alone(tmp_path: Path, keep: float) -> None:
    filled(tmp_path)
    file = tmp_path / "fray.db"
    size = file.stat().st_size
    os.truncate(file, int(size * keep) if isinstance(keep, float) else keep)
    refused(tmp_path, "damaged.*Nothing was changed.*--store")


def test_a_log_without_its_store_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "fray.db-wal").write_bytes(b"frames")
    refused(tmp_path, "damaged: the file is missing")


def test_garbage_is_refused_and_left_alone(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "fray.db").write_bytes(b"this is not a database at all\n" * 500)
    refused(tmp_path, "damaged.*not a database")


def test_garbage_in_the_middle_is_refused_and_left_alone(tmp_path: Path) -> None:
    filled(tmp_path)
    with open(tmp_path / "fray.db", "r+b") as file:
        file.seek(3 * 4096)
        file.write(os.urandom(8 * 4096))
    refused(tmp_path, "damaged")


def test_damage_under_a_log_that_was_not_folded_in_is_refused_and_both_left_alone(tmp_path: Path) -> None:
    live, copy = tmp_path / "live", tmp_path / "copy"
    filled(live)
    store = Store(live)
    store.save([("job", "late", outcome())])
    shutil.copytree(live, copy)  # as a power cut would leave it
    store.close()
    assert (copy / "fray.db-wal").stat().st_size > 0
    os.truncate(copy / "fray.db", 8192)
    (copy / "fray.db-shm").unlink()
    before = {name: data for name, data in snapshot(copy).items() if not name.endswith("-shm")}
    with pytest.raises(StoreError, match="damaged"):
        Store(copy)
    assert {name: data for name, data in snapshot(copy).items() if not name.endswith("-shm")} == before


def test_what_a_power_cut_leaves_is_opened_with_all_that_was_saved(tmp_path: Path) -> None:
    live, copy = tmp_path / "live", tmp_path / "copy"
    filled(live, rows=3)
    store = Store(live)
    store.save([("job", "late", outcome())])
    shutil.copytree(live, copy)
    store.close()
    store = Store(copy)
    assert [key for _, key, _ in store.load().rows] == ["j0", "j1", "j2", "late"]
    store.close()


@pytest.mark.parametrize("version", [1, SCHEMA_VERSION + 1])
def test_a_store_of_another_version_is_refused_and_left_alone(tmp_path: Path, version: int) -> None:
    filled(tmp_path, rows=1)
    db = sqlite3.connect(tmp_path / "fray.db")
    db.execute(f"PRAGMA user_version = {version}")
    db.execute("PRAGMA journal_mode = DELETE")
    db.close()
    which = "an earlier" if version < SCHEMA_VERSION else "a later"
    refused(tmp_path, rf"was written by {which} version of Fray \(schema {version}.*nothing was changed")


def test_a_database_of_another_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "fray.db")
    db.execute("CREATE TABLE bookmarks (url TEXT)")
    db.close()
    refused(tmp_path, "not a Fray store")


def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used"):
        Store(tmp_path / "file" / "store")


def test_other_users_may_not_read_the_store(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.put_blob(b"payload")
    store.save()
    modes = {path.name: path.stat().st_mode & 0o077 for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]}
    assert set(modes.values()) == {0}, modes
    store.close()
