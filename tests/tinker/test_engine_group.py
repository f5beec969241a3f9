"""Several engines of one base model: for its models, for samples when one is killed, and as many as the load needs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

pytest.importorskip("torch")
pytest.importorskip("google.protobuf")

import fray
from fray.tinker.adapter_runner import ENGINE_FILE
from fray.tinker.api_store import TinkerStore
from fray.tinker.core.engine_scale import EngineRange
from fray.tinker.operations.shown_runs import shown_runs
from fray.tinker.tinker_api.base_engine import AdapterPlan, BaseEngine
from fray.tinker.tinker_api.tinker_runs import TinkerRuns
from tests.tinker.runs_api import MODEL, RunsApi
from tests.tinker.services import warm_cluster

pytestmark = pytest.mark.torch


async def test_samples_of_a_killed_engine_are_made_by_another_at_once_with_the_same_tokens(tmp_path: Path) -> None:
    plan = AdapterPlan({"tiny": MODEL}, tmp_path / "engines", threads=1, engines=EngineRange(2, 2))
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
    plan = AdapterPlan({"tiny": str(tmp_path / "empty")}, tmp_path / "engines", threads=1, engines=EngineRange(2, 2))
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


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 (there is no event for it)
        await trio.sleep(0.05)


class Trained:
    """Three models in a service of their own, and the losses of each."""

    def __init__(self, api: RunsApi) -> None:
        self.api = api
        self.losses: list[list[float]] = []
        self.models: list[str] = []

    async def create(self) -> None:
        self.models = [await self.api.create(number) for number in range(3)]
        self.losses = [[] for _ in self.models]

    async def train(self, number: int, is_done: Callable[[], bool]) -> None:
        """Train one, a step at a time, at least one."""
        model, losses = self.models[number], self.losses[number]
        while not losses or not is_done():
            seq = 2 * len(losses) + 1
            losses.append((await self.api.forward(model, seq, 100))["metrics"]["loss:sum"])
            await self.api.ask("optim_step", model, seq + 1, adam_params={"learning_rate": 0.01})

    async def train_all(self, is_done: Callable[[], bool]) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(self.train, number, is_done)


async def test_engines_come_and_go_with_the_load_take_models_over_and_change_no_result(tmp_path: Path) -> None:
    plan = AdapterPlan({"tiny": MODEL}, tmp_path / "a", threads=1, engines=EngineRange(1, 2, queue_s=1.0, idle_s=2.0))
    store = TinkerStore(tmp_path)
    async with warm_cluster() as cluster, trio.open_nursery() as nursery:
        trained = Trained(RunsApi(TinkerRuns(store, plan)))
        await nursery.start(trained.api.runs.run, cluster)
        await trained.create()
        (group,) = trained.api.runs.groups.values()
        first = group.engines[0]
        assert first.models == set(trained.models)

        await trained.train_all(lambda: len(group.engines) == 2 and all(each.models for each in group.engines))
        counts = [len(each) for each in trained.losses]
        second = next(each for each in group.engines if each is not first)
        with trio.fail_after(60):  # that it computes is known with its next facts
            await trained.train_all(lambda: min(map(len, trained.losses)) >= max(counts) + 3 and second.seconds > 0)

        await until(lambda: len(group.engines) == 1)
        (left,), (ended,) = group.engines, {first, second} - set(group.engines)
        assert left.models == set(trained.models)
        await until(lambda: ended.has_ended)
        names = [each.name for each in await cluster.list_jobs() if each.state.value == "running"]
        assert sum(name.startswith("tinker-engine-tiny") for name in names) == 1, "its process has ended"
        counts = [len(each) for each in trained.losses]
        await trained.train_all(lambda: min(map(len, trained.losses)) > max(counts))
        nursery.cancel_scope.cancel()
    store.close()

    (tmp_path / "alone").mkdir()
    store = TinkerStore(tmp_path / "alone")
    async with warm_cluster() as cluster, trio.open_nursery() as nursery:
        alone = Trained(RunsApi(TinkerRuns(store, AdapterPlan({"tiny": MODEL}, tmp_path / "b", threads=1))))
        await nursery.start(alone.api.runs.run, cluster)
        await alone.create()
        for number, losses in enumerate(trained.losses):
            await alone.train(number, lambda: len(alone.losses[number]) == len(losses))  # noqa: B023
        nursery.cancel_scope.cancel()
    store.close()
    assert trained.losses == alone.losses


async def test_an_engine_without_room_says_so_and_is_given_up_when_nothing_queues(tmp_path: Path) -> None:
    rules = EngineRange(1, 2, queue_s=1.0, idle_s=2.0)
    resources = fray.ResourceConfig(cpu=3)  # the node has 4
    store = TinkerStore(tmp_path)
    async with warm_cluster() as cluster, trio.open_nursery() as nursery:
        plan = AdapterPlan({"tiny": MODEL}, tmp_path / "a", threads=1, resources=resources, engines=rules)
        trained = Trained(RunsApi(TinkerRuns(store, plan)))
        runs = trained.api.runs
        await nursery.start(runs.run, cluster)
        await trained.create()
        (group,) = runs.groups.values()

        def shown() -> str:
            return str(shown_runs(runs, lambda user: True, str))

        await trained.train_all(lambda: "needs 3 CPUs" in shown())
        assert "needs 3 CPUs" in group.explanation()
        assert len(group.engines) == 2
        await until(lambda: len(group.engines) == 1)
        assert group.engines[0].models == set(trained.models)
        assert group.explanation() == ""
        nursery.cancel_scope.cancel()
    store.close()


async def test_a_request_says_that_users_who_were_served_less_come_first(tmp_path: Path) -> None:
    engine = BaseEngine("tiny", AdapterPlan({"tiny": MODEL}, tmp_path), 0, lambda: None)
    assert engine.queue_state("ada") == ("paused_capacity", "the engine of tiny is being started")
    engine._engine, engine.info = object(), {"behind": {"ada": 2}}
    assert engine.queue_state("ada") == ("paused_rate_limit", "2 users come first, who were served less than you")
    assert engine.queue_state("bob") == ("active", "")


async def test_engines_have_the_weights_of_users_as_they_are_now(tmp_path: Path) -> None:
    plan = AdapterPlan({"tiny": MODEL}, tmp_path / "engines", threads=1)
    store, weights = TinkerStore(tmp_path), {"user_ada": 2.0}
    async with fray.open_cluster("local", logs=False) as cluster, trio.open_nursery() as nursery:
        api = RunsApi(TinkerRuns(store, plan, weights=lambda: dict(weights)))
        await nursery.start(api.runs.run, cluster)
        await api.create(0)
        (group,) = api.runs.groups.values()
        (engine,) = group.engines
        for known in ({"user_ada": 2.0}, {"user_bob": 3.0}):
            weights.clear()
            weights |= known
            with trio.fail_after(60):
                while engine.info.get("weights") != known:  # noqa: ASYNC110 - an engine sends no notification
                    await trio.sleep(0.05)
        nursery.cancel_scope.cancel()
    store.close()
