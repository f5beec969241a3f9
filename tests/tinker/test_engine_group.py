"""Several engines of one base model: models are trained by one each, samples go to another when one is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import trio

pytest.importorskip("torch")
pytest.importorskip("google.protobuf")

import fray
from fray.tinker.adapter_runner import ENGINE_FILE
from fray.tinker.api_store import TinkerStore
from fray.tinker.tinker_api.base_engine import AdapterPlan
from fray.tinker.tinker_api.tinker_runs import TinkerRuns
from tests.tinker.runs_api import MODEL, RunsApi
from tests.tinker.services import warm_cluster

pytestmark = pytest.mark.torch


async def test_samples_of_a_killed_engine_are_made_by_another_at_once_with_the_same_tokens(tmp_path: Path) -> None:
    plan = AdapterPlan({"tiny": MODEL}, tmp_path / "engines", threads=1, engines=2)
    store = TinkerStore(tmp_path)
    async with warm_cluster() as cluster, trio.open_nursery() as nursery:
        api = RunsApi(TinkerRuns(store, plan))
        await nursery.start(api.runs.run, cluster)
        models = [await api.create(number) for number in range(2)]
        engines = api.runs.engines["tiny"]
        assert [engine.models for engine in engines] == [{each} for each in models], "each trains one"
        # Saved by one engine, and sampled by both.
        await api.forward(models[0], 1)
        await api.ask("optim_step", models[0], 2, adam_params={"learning_rate": 0.3})
        saved = (await api.ask("save_weights_for_sampler", models[0], 3, path="a"))["path"]
        sampler = await api.sampler(0, saved)
        for engine in engines:
            await engine.up()
        params = {"seed": 5, "max_tokens": 200, "stop": []}
        expected = (await api.result(await api.submit_sample(sampler, 0, **params)))["samples"]
        assert len({tuple(tokens) for tokens, _, _ in expected}) == 2

        # What is killed now does not come again: the other one has to answer.
        (plan.directory_of("tiny") / ENGINE_FILE).write_text("{}")
        first = engines[0]
        pids = {each.name: each.attempts[-1].pid for each in await cluster.list_jobs()}

        async def kill() -> None:
            while not first.under_way:
                await trio.lowlevel.checkpoint()
            os.kill(pids[f"tinker-engine-tiny{'-1' if first.number else ''}"], signal.SIGKILL)

        nursery.start_soon(kill)
        for future in [await api.submit_sample(sampler, seq, **params) for seq in range(1, 9)]:
            samples = (await api.result(future))["samples"]
            assert [tokens for tokens, _, _ in samples] == [tokens for tokens, _, _ in expected]
        assert [engine.starts for engine in engines] == [1, 1]
        assert not first.is_up
        nursery.cancel_scope.cancel()
    store.close()


async def test_a_client_gets_the_reason_for_which_the_model_of_an_engine_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    plan = AdapterPlan({"tiny": str(tmp_path / "empty")}, tmp_path / "engines", threads=1, engines=2)
    store = TinkerStore(tmp_path)
    async with fray.open_cluster("local", logs=False) as cluster, trio.open_nursery() as nursery:
        api = RunsApi(TinkerRuns(store, plan))
        await nursery.start(api.runs.run, cluster)
        answers = [await api.result(f"{await api.create(0)}:0")]
        answers.append(await api.result(await api.submit_sample(await api.sampler(0), 0)))
        for answer in answers:
            assert answer["category"] == "server"
            assert str(tmp_path / "empty") in answer["error"], answer
        nursery.cancel_scope.cancel()
    store.close()
