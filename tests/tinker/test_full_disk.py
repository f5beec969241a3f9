"""A full disk refuses saves with words, and harms nothing else."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from starlette.requests import Request

import fray
from fray.rl.model_spec import ModelSpec
from fray.tinker.adapter_runner import AdapterRunner
from fray.tinker.api_store import TinkerStore
from fray.tinker.engine_runner import EnginePlan
from fray.tinker.opentinker.answers import refuse_store
from fray.tinker.saving import SaveFailed, saving
from fray.tinker.service_jobs import JobLimits, ServiceJobs
from fray.tinker.store import ServiceStore, SqliteStore, StoreFailed
from fray.tinker.tinker_api.base_engine import AdapterPlan
from fray.tinker.tinker_api.tinker_runs import TinkerRuns
from fray.tinker.wire.tinker_json import Fields

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from fray.rl.tensors.adapter_trainer import AdapterTrainer  # noqa: E402
from fray.rl.tensors.policy_trainer import PolicyTrainer  # noqa: E402
from tests.tinker.runs_api import ADA, LARGE, MODEL, RunsApi  # noqa: E402
from tests.tinker.test_training_runner import Job, batch_of, encode_data_proto, same  # noqa: E402


@contextmanager
def full(store: SqliteStore) -> Iterator[None]:
    """Have SQLite find no room for another page; what fits into those that it has is written."""
    store._db.execute("VACUUM")
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    yield
    store._db.execute("PRAGMA max_page_count = 1000000")


def fail_to_write(patch: pytest.MonkeyPatch, owner: type) -> Callable[[], None]:
    """Have a trainer write a part of its files and then fail as safetensors does; return what ends that."""
    from safetensors import SafetensorError

    save = owner.save  # type: ignore[attr-defined]

    def failing(trainer: Any, *arguments: Any, **options: Any) -> None:
        save(trainer, *arguments, **options)
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    patch.setattr(owner, "save", failing)
    return lambda: patch.setattr(owner, "save", save)


def test_what_fails_while_it_is_saved_is_one_error_with_what_is_free_and_leaves_no_files(tmp_path: Path) -> None:
    text = r"it was not saved: RuntimeError: file write failed; [\d.]+ MB are free at"
    with pytest.raises(SaveFailed, match=text), saving("it", tmp_path / "new"):
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "part").write_text("1")
        raise RuntimeError("file write failed")
    assert not list(tmp_path.iterdir())


def test_a_job_trains_on_without_snapshots_and_takes_one_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, other = Job(tmp_path / "a", {}), Job(tmp_path / "b", {})
    expected = other.steps("407", "011", "005")
    has_room = fail_to_write(monkeypatch, PolicyTrainer)
    # Snapshots take no time, so that one is always due.
    job.runner._clock = lambda: 0.0
    found = job.steps("407", "011")
    batch = json.dumps({"batch_data": encode_data_proto(batch_of(["407"]))}).encode()
    answer = job.runner.execute(6, "validate", batch)
    assert answer.snapshot == 0
    assert answer.snapshot_error.startswith("the snapshot of request 5 was not saved: SafetensorError: I/O error: No")
    refused = job.runner.execute(7, "save_checkpoint", b"{}")
    assert refused.is_failure
    assert refused.body["error"].startswith("save_checkpoint: the checkpoint of step 2 was not saved: SafetensorError")
    assert not [*(tmp_path / "a").rglob("*.safetensors")], "what was written is removed: answers need room, too"
    has_room()
    found += job.steps("005")
    same(found, expected)
    assert job.lose_engine() == 5, "as the request was to be executed"
    assert job.ask("save_checkpoint")["result"]["global_steps"] == 3
    job.close()
    other.close()


async def test_a_request_that_cannot_be_written_is_refused_and_received_again(tmp_path: Path) -> None:
    store = TinkerStore(tmp_path)
    plan = AdapterPlan({"tiny": MODEL}, tmp_path / "engines", threads=1)
    async with fray.open_cluster("local", logs=False) as cluster, trio.open_nursery() as nursery:
        api = RunsApi(TinkerRuns(store, plan))
        await nursery.start(api.runs.run, cluster)
        model_id = await api.create(0)
        await api.forward(model_id, 1)
        with full(store):
            with pytest.raises(StoreFailed, match=r"the service cannot use its store tinker\.sqlite: database or disk"):
                await api.forward(model_id, 2, 100)
            with pytest.raises(StoreFailed):
                await api.create(1)
            wanted = {"base_model": "tiny", "sampling_params": {"max_tokens": 1}, **LARGE}
            wanted["prompt"] = {"chunks": [{"tokens": [1, 2]}]}
            with pytest.raises(StoreFailed):
                await api.runs.submit_sample(ADA, Fields(wanted), json.dumps(wanted).encode())
        assert "outputs" in await api.forward(model_id, 2, 100)
        assert "outputs" in await api.forward(await api.create(1), 1)
        request_id, _ = await api.runs.submit_sample(ADA, Fields(wanted), json.dumps(wanted).encode())
        assert len((await api.result(request_id))["samples"]) == 1
        nursery.cancel_scope.cancel()
    answer = await refuse_store(Request({"type": "http"}), StoreFailed("full"))
    assert (answer.status_code, json.loads(bytes(answer.body))) == (503, {"detail": "full"})


async def test_an_answer_that_cannot_be_written_waits_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fray.tinker.store.STORE_RETRY_S", 0.02)
    store = TinkerStore(tmp_path)
    plan = AdapterPlan({"tiny": MODEL}, tmp_path / "engines", threads=1)
    async with fray.open_cluster("local", logs=False) as cluster, trio.open_nursery() as nursery:
        api = RunsApi(TinkerRuns(store, plan))
        await nursery.start(api.runs.run, cluster)
        model_id = await api.create(0)
        await api.forward(model_id, 1)
        found: list[dict[str, Any]] = []
        tries, has_failed, has_room = itertools.count(), trio.Event(), threading.Event()
        set_answer = store.set_answer

        async def forward() -> None:
            found.append(await api.forward(model_id, 2))

        def answer_on_a_full_disk(*arguments: Any) -> None:
            if next(tries):
                trio.from_thread.run_sync(has_failed.set)
            store._db.execute(f"PRAGMA query_only = {int(not has_room.is_set())}")
            try:
                set_answer(*arguments)
            finally:
                store._db.execute("PRAGMA query_only = 0")

        store.set_answer = answer_on_a_full_disk  # type: ignore[method-assign]
        async with trio.open_nursery() as callers:
            callers.start_soon(forward)
            await has_failed.wait()
            text = "the service cannot use its store tinker.sqlite: attempt to write a readonly database"
            waiting = await api.runs.answer(ADA, f"{model_id}:2", 0.0)
            assert (waiting["queue_state"], waiting["queue_state_reason"]) == ("paused_capacity", text)
            run = api.runs.run_of(model_id)
            assert run is not None
            assert text in run.activity()
            has_room.set()
        assert "outputs" in found[0]
        assert not store.trouble
        nursery.cancel_scope.cancel()


async def test_a_save_that_fails_is_refused_with_words_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = AdapterPlan({"tiny": MODEL}, tmp_path / "engines", threads=1)
    async with fray.open_cluster("local", logs=False) as cluster, trio.open_nursery() as nursery:
        api = RunsApi(TinkerRuns(TinkerStore(tmp_path), plan))
        await nursery.start(api.runs.run, cluster)
        model_id = await api.create(0)
        has_room = fail_to_write(monkeypatch, AdapterTrainer)
        assert "outputs" in await api.forward(model_id, 1)
        assert "metrics" in await api.ask("optim_step", model_id, 2), "its snapshot failed"
        refused = await api.ask("save_weights", model_id, 3, path="a")
        name = model_id.replace(":", ".")
        assert refused["error"].startswith(f"{name}/weights/a was not saved: SafetensorError: I/O error: No space left")
        run = api.runs.run_of(model_id)
        assert run is not None
        assert "; the snapshot of request 1 was not saved: SafetensorError" in run.activity()
        assert not await trio.to_thread.run_sync(lambda: [*tmp_path.rglob("*.safetensors")])
        has_room()
        saved = f"tinker://{model_id}/weights/a"
        assert (await api.ask("save_weights", model_id, 4, path="a"))["path"] == saved
        assert "with overwrite=True it is replaced" in (await api.ask("save_weights", model_id, 5, path="a"))["error"]
        assert (await api.ask("save_weights", model_id, 6, path="a", overwrite=True))["path"] == saved
        nursery.cancel_scope.cancel()


async def test_an_unexpected_error_fails_one_request_or_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = AdapterPlan({"tiny": MODEL}, tmp_path / "engines", threads=1)
    async with fray.open_cluster("local", logs=False) as cluster, trio.open_nursery() as nursery:
        api = RunsApi(TinkerRuns(TinkerStore(tmp_path), plan))
        await nursery.start(api.runs.run, cluster)
        first, second = await api.create(0), await api.create(1)
        with monkeypatch.context() as patch:
            patch.setattr(AdapterTrainer, "step", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
            assert (await api.ask("optim_step", first, 1))["error"] == "RuntimeError: out of memory"
        assert "outputs" in await api.forward(first, 2)
        with monkeypatch.context() as patch:
            patch.setattr(AdapterRunner, "work", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
            assert "RuntimeError: broken" in (await api.ask("optim_step", first, 3))["error"]
        assert "outputs" in await api.forward(second, 1)
        nursery.cancel_scope.cancel()


async def test_a_job_that_cannot_be_written_is_refused_and_changes_of_others_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: dict[str, ModelSpec] = {"tiny": MODEL}
    store = ServiceStore(tmp_path)
    jobs = ServiceJobs(store, EnginePlan(models, tmp_path / "jobs", 1), JobLimits(client_grace_s=0.04))
    async with fray.open_cluster("local", logs=False) as cluster, trio.open_nursery() as nursery:
        await nursery.start(jobs.run, cluster)
        job = await jobs.submit(ADA, {}, 0)
        runner = jobs.runners[job.job_id]
        seq = await runner.receive("set_config", b"{}", "a")  # type: ignore[union-attr]
        with full(store):
            with pytest.raises(StoreFailed):
                await jobs.submit(ADA, LARGE, 0)
            with pytest.raises(StoreFailed):
                await runner.receive("set_config", json.dumps(LARGE).encode(), "b")  # type: ignore[union-attr]
            assert len(jobs.jobs) == 1
        again = await runner.receive("set_config", json.dumps(LARGE).encode(), "b")  # type: ignore[union-attr]
        assert again == seq + 1
        store._db.execute("PRAGMA query_only = 1")
        ended = await jobs.end(job, jobs.jobs[job.job_id].state.CANCELLED)
        assert ended.state.is_final
        assert not store.jobs()[0].state.is_final
        store._db.execute("PRAGMA query_only = 0")
        with trio.fail_after(30):
            while not store.jobs()[0].state.is_final:  # noqa: ASYNC110  # a thread writes it
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    store.close()
