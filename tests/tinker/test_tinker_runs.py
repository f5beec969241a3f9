"""State of the Tinker API and its store, without an engine."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from starlette.exceptions import HTTPException
from starlette.requests import Request

pytest.importorskip("google.protobuf")

import fray
from fray import rl
from fray.tinker.api_store import TinkerCheckpoint, TinkerSampler, TinkerSession, TinkerStore
from fray.tinker.core.keys import ServiceUser
from fray.tinker.core.ledger import LedgerEntry
from fray.tinker.core.limits import UserLimits
from fray.tinker.core.sample_ledger import ANSWER_S
from fray.tinker.engine_runner import EnginePlan, JobCallbacks
from fray.tinker.job_runner import JobRunner
from fray.tinker.opentinker.answers import Unprocessable
from fray.tinker.opentinker.scheduler_routes import scheduler_routes
from fray.tinker.service_jobs import JobLimits, ServiceJobs
from fray.tinker.store import ServiceJob, ServiceStore
from fray.tinker.tinker_api.base_engine import AdapterPlan
from fray.tinker.tinker_api.model_run import CREATE
from fray.tinker.tinker_api.refusals import Expired, TooMany
from fray.tinker.tinker_api.routes import tinker_routes
from fray.tinker.tinker_api.tinker_runs import TinkerRuns
from fray.tinker.wire.messages import MESSAGES
from fray.tinker.wire.tinker_json import Fields
from fray.tinker.wire.tinker_proto import WireError

ADA = ServiceUser("user_1", "ada", "", 0.0)
LORA = {"rank": 4}


def test_a_write_that_fails_leaves_nothing_of_it_and_the_next_one_works(tmp_path: Path) -> None:
    store = TinkerStore(tmp_path)
    with pytest.raises(UnicodeEncodeError):
        store.put(TinkerSession("first", ADA.user_id, 0.0), TinkerSession("\ud800", ADA.user_id, 0.0))
    store.put(TinkerSession("second", ADA.user_id, 0.0))
    assert list(store.load(TinkerSession)) == ["second"]
    store.close()


async def test_a_model_that_is_asked_for_twice_at_once_is_one(tmp_path: Path) -> None:
    plan = AdapterPlan({"tiny": rl.TinyLlama(layers=1, width=16)}, tmp_path / "engines")
    async with fray.open_cluster("local", logs=False) as cluster, trio.open_nursery() as nursery:
        runs = TinkerRuns(TinkerStore(tmp_path), plan)
        await nursery.start(runs.run, cluster)
        session = await runs.create_session(ADA, Fields({}))
        wanted = {"session_id": session.id, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        futures = []

        async def create() -> None:
            futures.append(await runs.create_model(ADA, Fields(wanted), json.dumps(wanted).encode(), CREATE))

        async with trio.open_nursery() as callers:
            callers.start_soon(create)
            callers.start_soon(create)
        assert futures == [f"{session.id}:train:0:0"] * 2
        nursery.cancel_scope.cancel()


async def test_a_future_says_for_what_it_waits(tmp_path: Path) -> None:
    plan = AdapterPlan({"tiny": rl.TinyLlama()}, tmp_path / "engines", resources=fray.ResourceConfig(cpu=4))
    async with (
        fray.open_cluster("local", logs=False) as cluster,
        cluster.open_scope("other") as other,
        trio.open_nursery() as nursery,
    ):
        await other.create_actor(dict, resources=fray.ResourceConfig(cpu=4))
        runs = TinkerRuns(TinkerStore(tmp_path), plan)
        await nursery.start(runs.run, cluster)
        session = await runs.create_session(ADA, Fields({}))
        wanted = {"session_id": session.id, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        created = await runs.create_model(ADA, Fields(wanted), b"{}", CREATE)
        model = created.rpartition(":")[0]
        late = await runs.submit(ADA, "optim_step", model, 2, b"{}")
        found = [await runs.answer(ADA, future, 0.0) for future in (created, late)]
        assert found == [
            {
                "type": "try_again",
                "request_id": created,
                "queue_state": "paused_capacity",
                "queue_state_reason": "the engine of tiny is being started",
            },
            {
                "type": "try_again",
                "request_id": late,
                "queue_state": "active",
                "queue_state_reason": "request 2 waits for request 1, which has not come",
            },
        ]
        nursery.cancel_scope.cancel()


async def test_a_checkpoint_that_has_expired_is_removed_with_its_files(tmp_path: Path) -> None:
    plan = AdapterPlan({"tiny": rl.TinyLlama()}, tmp_path / "engines", session_s=0.01)
    store = TinkerStore(tmp_path)
    lora = {"rank": 4}
    for name, expires_at in (("old", 1.0), ("kept", None)):
        path = plan.directory_of("tiny") / "saved" / name
        path.mkdir(parents=True)
        store.put(
            TinkerCheckpoint(
                f"tinker://m/weights/{name}",
                ADA.user_id,
                "m",
                "tiny",
                lora,
                f"saved/{name}",
                1,
                0.0,
                expires_at=expires_at,
            )
        )
    async with fray.open_cluster("local", logs=False) as cluster, trio.open_nursery() as nursery:
        runs = TinkerRuns(store, plan)
        await nursery.start(runs.run, cluster)
        while (plan.directory_of("tiny") / "saved" / "old").exists():
            await trio.lowlevel.checkpoint()
        assert list(runs.checkpoints) == list(store.load(TinkerCheckpoint)) == ["tinker://m/weights/kept"]
        assert (plan.directory_of("tiny") / "saved" / "kept").exists()
        nursery.cancel_scope.cancel()
    store.close()


async def test_an_engine_that_can_never_run_fails_the_requests_that_wait_for_it(tmp_path: Path) -> None:
    plan = AdapterPlan({"tiny": rl.TinyLlama()}, tmp_path / "engines", resources=fray.ResourceConfig(cpu=10_000))
    async with fray.open_cluster("local", logs=False) as cluster, trio.open_nursery() as nursery:
        runs = TinkerRuns(TinkerStore(tmp_path), plan)
        await nursery.start(runs.run, cluster)
        session = await runs.create_session(ADA, Fields({}))
        wanted = {"session_id": session.id, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        created = await runs.create_model(ADA, Fields(wanted), b"{}", CREATE)
        answer = await runs.answer(ADA, created, 60.0)
        assert answer["category"] == "server"
        assert answer["error"].startswith("job 'tinker-engine-tiny' can never run here: it needs 10000 CPUs")
        nursery.cancel_scope.cancel()


@pytest.mark.torch
async def test_samples_without_a_session_are_forgotten_with_their_sampler(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    plan = AdapterPlan({"tiny": rl.TinyLlama(layers=1, width=16)}, tmp_path / "engines", threads=1)
    wanted = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 1}, "base_model": "tiny"}
    body = json.dumps(wanted).encode()
    store = TinkerStore(tmp_path)

    async def sampled(runs: TinkerRuns) -> str:
        request_id, _ = await runs.submit_sample(ADA, Fields(wanted), body)
        while (answer := await runs.answer(ADA, request_id, 5.0)).get("type") == "try_again":
            pass
        assert len(answer["samples"]) == 1
        return request_id

    async with fray.open_cluster("local", logs=False) as cluster:
        async with trio.open_nursery() as nursery:
            runs = TinkerRuns(store, plan)
            await nursery.start(runs.run, cluster)
            first, second = await sampled(runs), await sampled(runs)
            assert (first.rpartition(":")[0], first != second) == (second.rpartition(":")[0], True)
            nursery.cancel_scope.cancel()
        async with trio.open_nursery() as nursery:
            runs = TinkerRuns(store, plan)
            await nursery.start(runs.run, cluster)
            await runs.answer(ADA, first, 0.0)
            third = await sampled(runs)
            now = trio.current_time()
            await runs.forget_samples(now + ANSWER_S - 60)
            assert len(runs.samplers) == 2
            with pytest.raises(Expired, match="send it again"):
                await runs.answer(ADA, f"{third.rpartition(':')[0]}:7", 0.0)
            await runs.forget_samples(now + ANSWER_S)
            assert not runs.samplers
            assert not store.load(TinkerSampler)
            for owner in {first.rpartition(":")[0], third.rpartition(":")[0]}:
                assert not store.entries(owner)
            with pytest.raises(Expired, match="answers with samples are kept for 3600 s"):
                await runs.answer(ADA, first, 0.0)
            assert await sampled(runs) not in (first, second, third)
            # As on a full disk.
            store._db.execute("PRAGMA query_only = 1")
            await runs.forget_samples(trio.current_time() + ANSWER_S)
            store._db.execute("PRAGMA query_only = 0")
            assert not runs.samplers
            assert len(store.load(TinkerSampler)) == 1
            nursery.cancel_scope.cancel()
    store.close()


async def test_what_is_one_past_a_limit_of_the_tinker_api_is_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait(*_: object) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(TinkerRuns, "_sample", wait)
    limits = UserLimits(body_bytes=300, sessions=2, models=1, datums=2, sample_requests=2, samples=5)
    jobs = ServiceJobs(ServiceStore(tmp_path), EnginePlan({}, tmp_path), JobLimits(user=limits))
    plan = AdapterPlan({"tiny": rl.TinyLlama(layers=1, width=16)}, tmp_path / "engines")

    async def ask(path: str, content: bytes, **headers: str) -> tuple[int, str]:
        """Have a route answer a request."""
        parts = [content[:200], content[200:]]

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        routes = [*tinker_routes(jobs, runs), *scheduler_routes(jobs)]
        (route,) = [each for each in routes if each.path == path and "POST" in (each.methods or ())]
        head = [(b"content-type", kind.encode()) for kind in headers.values()]
        request = Request({"type": "http", "method": "POST", "path": path, "headers": head}, receive)
        try:
            answer = await route.endpoint(request)
        except HTTPException as error:
            return error.status_code, error.detail
        except Unprocessable:
            return 422, ""
        return answer.status_code, json.loads(answer.body).get("detail", "")

    def forward(count: int) -> bytes:
        message = MESSAGES["ForwardBackwardRequest"](model_id="none", seq_id=1, loss_fn="cross_entropy")
        for _ in range(count):
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = bytes(4)
            datum.loss_fn_inputs["target_tokens"].dtype = 2
            datum.loss_fn_inputs["target_tokens"].dense = bytes(8)
        found: bytes = message.SerializeToString()
        return found

    def sample(count: int) -> tuple[Fields, bytes]:
        wanted = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}, "base_model": "tiny"}
        return Fields({**wanted, "num_samples": count}), json.dumps(wanted).encode()

    async with fray.open_cluster("local", logs=False) as cluster, trio.open_nursery() as nursery:
        runs = TinkerRuns(TinkerStore(tmp_path), plan, limits=limits)
        await nursery.start(runs.run, cluster)
        for path in ("/api/v1/create_session", "/submit_job", "/api/v1/weights_info"):
            exact = b'{"config": 3}'.ljust(300)
            assert (await ask(path, exact))[0] != 413
            too_long = (413, "the body is too long; the limit body_bytes of this service is 300")
            assert await ask(path, exact + b" ") == too_long
        session = await runs.create_session(ADA, Fields({}))
        await runs.create_session(ADA, Fields({}))
        with pytest.raises(TooMany, match="not ended; the limit sessions of this service is 2"):
            await runs.create_session(ADA, Fields({}))
        for number in range(2):
            wanted = {
                "session_id": session.id,
                "model_seq_id": number,
                "base_model": "tiny",
                "lora_config": {"rank": 4},
            }
            with pytest.raises(TooMany, match="the limit models of") if number else contextlib.nullcontext():
                await runs.create_model(ADA, Fields(wanted), json.dumps(wanted).encode(), CREATE)
        kind = "application/x-protobuf"
        assert (await ask("/api/v1/forward_backward", forward(2), kind=kind))[0] == 404, "there is no such model"
        refused = (422, "data: 3 datums; the limit datums of this service is 2")
        assert await ask("/api/v1/forward_backward", forward(3), kind=kind) == refused
        with pytest.raises(WireError, match="num_samples: 6; the limit samples of this service is 5"):
            await runs.submit_sample(ADA, *sample(6))
        await runs.submit_sample(ADA, *sample(3))
        with pytest.raises(TooMany, match="3 samples of yours wait, and these are 3; the limit samples of this"):
            await runs.submit_sample(ADA, *sample(3))
        await runs.submit_sample(ADA, *sample(2))
        with pytest.raises(
            TooMany, match="2 requests for samples of yours wait, and these are 1; the limit sample_req"
        ):
            await runs.submit_sample(ADA, *sample(1))
        nursery.cancel_scope.cancel()


async def test_a_job_measures_its_steps_to_say_when_it_ends(autojump_clock: object) -> None:
    plan = EnginePlan({}, Path("/nowhere"))
    entry = LedgerEntry(1, "init_workers", "", answer={"http": 200, "body": {"result": {"total_steps": 10}}})
    job = ServiceJob("j", "s", "u", {}, 0, 0.0)
    runner = JobRunner(job, plan, cast("ServiceStore", None), [entry], cast("JobCallbacks", None))
    assert runner.seconds_left is None
    for step in range(1, 4):
        await trio.sleep(6)
        runner.note_step(step)
    await trio.sleep(2)
    assert runner.seconds_left == pytest.approx(7 * 6 - 2)
