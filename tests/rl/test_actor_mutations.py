"""Bugs on purpose in the layer around the core of `fray.rl`, and what the simulation of whole runs finds of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from fray.api.actors.monitor import monitor
from fray.rl.controller import RunController
from fray.rl.coordinator import Coordinator
from fray.rl.inference.server import InferenceServer
from fray.rl.messages import ServerRoute
from fray.rl.processes import run_servers
from fray.rl.processes.run_servers import RunServers
from fray.rl.rollout.server_choice import ServerChoice
from tests.rl import actor_simulation
from tests.rl.actor_simulation import PlannedFault, draw_plan, run_seed

MUTATION_SEEDS = 40
"""Number of seeds within which a bug must be found."""
FIRST_SEEDS = {"lost_processes_get_tasks": 27, "leases_of_lost_processes_stay": 5}
"""First seeds of bugs that those before do not find; each takes 1.5 s."""


def a_new_coordinator_gets_no_routes(patch: pytest.MonkeyPatch) -> None:
    async def follow(self: RunController) -> None:
        async with monitor(self._coordinator) as events:
            async for _ in events:
                pass

    patch.setattr(RunController, "_follow_coordinator", follow)


def leases_of_lost_processes_stay(patch: pytest.MonkeyPatch) -> None:
    async def forget(self: Coordinator, worker: str) -> None:
        self._slowest.pop(worker, None)

    patch.setattr(Coordinator, "lose_worker", forget)


def servers_are_said_to_have_weights_that_were_not_sent(patch: pytest.MonkeyPatch) -> None:
    transfer = RunServers._transfer

    async def sometimes(self: RunServers, handle: Any, version: Any, weights: Any) -> None:
        if version.number % 2:
            await transfer(self, handle, version, weights)

    patch.setattr(RunServers, "_transfer", sometimes)


def a_finished_update_wakes_nothing(patch: pytest.MonkeyPatch) -> None:
    async def finish(self: Coordinator, line: int, number: int, without_effect: str = "") -> Any:
        self._check_line(line)
        weights = self._state.record.weights
        if weights.line.number < number:
            self._state.finish_update(without_effect)
            self._write()
        return weights.line.current, weights.is_due, weights.target

    patch.setattr(Coordinator, "finish_update", finish)


def requests_of_a_lost_server_fail(patch: pytest.MonkeyPatch) -> None:
    async def send(self: ServerChoice, request: Any) -> Any:
        while (route := self._table.choose()) is None:
            await self._changed.wait()
        return await self._call(route, request)

    patch.setattr(ServerChoice, "send", send)


def lost_processes_get_tasks(patch: pytest.MonkeyPatch) -> None:
    lose = Coordinator.lose_worker

    async def forget(self: Coordinator, worker: str) -> None:
        await lose(self, worker)
        self._lost_workers.clear()

    patch.setattr(Coordinator, "lose_worker", forget)


def servers_answer_before_they_have_weights(patch: pytest.MonkeyPatch) -> None:
    begin = InferenceServer.__init__
    patch.setattr(InferenceServer, "__init__", lambda self, make, **settings: begin(self, make))
    # Requests that reach one come from routes of the incarnation before.
    patch.setattr(run_servers, "ServerRoute", lambda *settings: ServerRoute(*settings[:-1]))


MUTATIONS = [
    lost_processes_get_tasks,
    servers_answer_before_they_have_weights,
    a_new_coordinator_gets_no_routes,
    leases_of_lost_processes_stay,
    servers_are_said_to_have_weights_that_were_not_sent,
    a_finished_update_wakes_nothing,
    requests_of_a_lost_server_fail,
]


@pytest.mark.full
@pytest.mark.within(600)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_bug_is_found(mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    # A run that hangs costs less, and none without a bug takes as long.
    monkeypatch.setattr(actor_simulation, "ENDED_WITHIN_S", 200.0)
    mutation(monkeypatch)
    # The first one has a single fault: those that follow in other seeds have the servers announced again.
    plan = evolve(draw_plan(random.Random(0)), faults=(PlannedFault(5.0, "kill Coordinator", 0.0, 0),))
    first = FIRST_SEEDS.get(mutation.__name__, 0)
    for seed in range(first, first + MUTATION_SEEDS):
        if run_seed(seed, plan=None if seed else plan).breaches:
            return
    pytest.fail(f"{mutation.__name__} is not found within {MUTATION_SEEDS} seeds")
