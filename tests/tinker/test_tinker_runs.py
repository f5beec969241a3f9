"""State of the Tinker API and its store, without an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

pytest.importorskip("google.protobuf")

import fray
from fray import rl
from fray.tinker.api_store import TinkerSession, TinkerStore
from fray.tinker.core.keys import ServiceUser
from fray.tinker.tinker_api.base_engine import AdapterPlan
from fray.tinker.tinker_api.model_run import CREATE
from fray.tinker.tinker_api.tinker_runs import TinkerRuns
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
