"""State of the Tinker API and its store, without an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

pytest.importorskip("google.protobuf")

import fray
from fray import rl
from fray.tinker.api_store import TinkerCheckpoint, TinkerSampler, TinkerSession, TinkerStore
from fray.tinker.core.keys import ServiceUser
from fray.tinker.core.sample_ledger import ANSWER_S
from fray.tinker.tinker_api.base_engine import AdapterPlan
from fray.tinker.tinker_api.model_run import CREATE
from fray.tinker.tinker_api.tinker_runs import Expired, TinkerRuns
from fray.tinker.wire.tinker_json import Fields

ADA = ServiceUser("user_1", "ada", "", 0.0)


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
