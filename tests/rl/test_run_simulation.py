"""Simulated runs with faults of every part, and what they find when the core has a bug."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fray.rl.core import server_states
from fray.rl.core.accounting import SampleCounts
from fray.rl.core.journal import SamplesAccepted, TaskFailed
from fray.rl.core.leases import LeaseTable
from fray.rl.core.run_record import RunRecord
from fray.rl.core.run_state import PutAnswer, RunState
from fray.rl.core.server_fleet import RequestRoute, RouteTable, ServerFleet
from fray.rl.core.server_states import ServerEvent, ServerState
from fray.rl.core.trajectory_store import TrajectoryStore
from fray.rl.core.versions import Gate, VersionLine, WeightSchedule
from tests.rl import run_simulation
from tests.rl.run_simulation import InvariantViolated, SimulatedRun

SEEDS = 40
MUTATION_SEEDS = 40
"""Seeds within which a bug must be found, all of them below `SEEDS`."""
MUTATION_CALM_STEPS = 20_000
"""Steps without faults in which the runs of these seeds end without a bug."""


def test_runs_with_faults_keep_every_promise() -> None:
    happened: Counter[str] = Counter()
    for seed in range(SEEDS):
        run = SimulatedRun(seed)
        happened += run.run()
        assert run.done < run.steps + MUTATION_CALM_STEPS, "a bug would be found in each run that takes as long"
    # Each kind of event, answers of the pool included.
    assert {"pool_dies", "trainer_dies", "put re-rollout", "put fail", "validated"} <= happened.keys(), happened


def test_runs_whose_groups_have_samples_of_several_rows_keep_every_promise() -> None:
    for seed in range(6):
        SimulatedRun(seed, is_keyed=True).run()


@pytest.mark.full
def test_runs_of_random_seeds_keep_every_promise(pytestconfig: pytest.Config) -> None:
    first = int(pytestconfig.getoption("hypothesis_seed")) % 1_000_000
    for seed in range(first, first + 4 * SEEDS):
        SimulatedRun(seed).run()


def late_results_count(patch: pytest.MonkeyPatch) -> None:
    closed: dict[str, Any] = {}
    close, get = LeaseTable.close, LeaseTable.get

    def remember(self: LeaseTable, number: str) -> None:
        if number in self._open:
            closed[number] = self._open[number]
            close(self, number)

    patch.setattr(LeaseTable, "close", remember)
    patch.setattr(LeaseTable, "get", lambda self, number: get(self, number) or closed.get(number))


def leases_outlive_their_state(patch: pytest.MonkeyPatch) -> None:
    make = LeaseTable.make

    def without_incarnation(self: LeaseTable, *args: Any) -> Any:
        self.incarnation = "0"
        return make(self, *args)

    patch.setattr(LeaseTable, "make", without_incarnation)


def groups_are_split(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TrajectoryStore, "_complete_if_full", split_group)


def split_group(self: TrajectoryStore, group: Any) -> Any:
    if group.slots < max(1, self.group_size - 1):
        return None
    del self._growing[group.key]
    self._complete.append(group)
    self._complete_slots += group.slots
    return group


def age_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightSchedule, "is_usable", lambda self, segments: self.line.age(segments) is not None)


def the_gate_stays_open(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightSchedule, "needs_sync", property(lambda self: False))


def a_resumed_trainer_keeps_its_incarnation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(VersionLine, "fork", lambda self, number: setattr(self, "number", number) or self.current)


def weights_are_not_sent_again(patch: pytest.MonkeyPatch) -> None:
    fork = WeightSchedule.fork

    def stay(self: WeightSchedule, number: int) -> Any:
        self.rollout = fork(self, number)
        self.gate = Gate.OPEN
        return self.rollout

    patch.setattr(WeightSchedule, "fork", stay)


def validation_is_not_pinned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightSchedule, "to_send", property(lambda self: self.line.current if self.is_due else None))


def validations_are_not_due(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightSchedule, "_wants_validation", property(lambda self: False))


def lost_validations_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    fork = WeightSchedule.fork

    def unpinned(self: WeightSchedule, number: int) -> Any:
        self.pinned = None
        return fork(self, number)

    patch.setattr(WeightSchedule, "fork", unpinned)


def validation_results_are_trained(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunState, "_put_validated", put_for_training)


def put_for_training(self: RunState, lease: Any, samples: Any) -> Any:
    self._validation_leases.close(lease.number)
    self._add(SamplesAccepted(tuple(samples), tuple((sample.task.group_id,) for sample in samples)))
    return PutAnswer.SUCCESS


def the_run_ends_before_the_last_validation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunState, "is_finished", property(lambda self: self.is_done))


def dead_servers_answer(patch: pytest.MonkeyPatch) -> None:
    edges = {**server_states.TRANSITIONS, (ServerState.DEAD, ServerEvent.ANSWERED): ServerState.HEALTHY}
    patch.setattr(server_states, "TRANSITIONS", edges)


def suspect_servers_get_requests(patch: pytest.MonkeyPatch) -> None:
    def accept(self: ServerFleet, server: Any, version: Any, is_published: bool) -> RequestRoute:
        return RequestRoute(server.name, version, accepts=server.state in (ServerState.HEALTHY, ServerState.SUSPECT))

    patch.setattr(ServerFleet, "_route", accept)


def old_incarnations_are_believed(patch: pytest.MonkeyPatch) -> None:
    observe = server_states.ServerRecord.observe
    patch.setattr(
        server_states.ServerRecord,
        "observe",
        lambda self, event, incarnation, version=None, *, now=0.0: observe(
            self, event, self.incarnation, version, now=now
        ),
    )


def tasks_of_lost_workers_stay(patch: pytest.MonkeyPatch) -> None:
    def forget(self: RunState, worker: str) -> None:
        for lease in self._leases.of_worker(worker):
            self._leases.close(lease.number)

    patch.setattr(RunState, "lose_worker", forget)


def dropped_samples_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TrajectoryStore, "miss", lambda self, group_id, samples: None)


def a_failure_is_not_journaled(patch: pytest.MonkeyPatch) -> None:
    write = SimulatedRun.write

    def lossy(self: SimulatedRun) -> None:
        self.state.entries[:] = [entry for entry in self.state.entries if not isinstance(entry, TaskFailed)]
        write(self)

    patch.setattr(SimulatedRun, "write", lossy)


def checkpoints_forget_open_leases(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunState, "snapshot", lambda self: self.record.copy())


def batches_are_released_twice(patch: pytest.MonkeyPatch) -> None:
    def release(self: RunRecord, step: Callable[[], object]) -> None:
        step()
        if self.weights.gate is Gate.OPEN:
            self.is_held = False

    patch.setattr(RunRecord, "_open_gate", release)


def trained_samples_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        SampleCounts, "open", property(lambda self: self.issued - self.validated - sum(self.dropped.values()))
    )


def attempts_are_unlimited(patch: pytest.MonkeyPatch) -> None:
    give_back = RunState._give_back

    def never_last(self: RunState, lease: Any, reason: str, cost: Any, is_last: bool) -> None:
        give_back(self, lease, reason, cost, False)

    patch.setattr(RunState, "_give_back", never_last)


def expired_leases_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaseTable, "expired", lambda self, now: [])


def expired_tasks_are_lost(patch: pytest.MonkeyPatch) -> None:
    def close(self: RunState, now: float) -> None:
        for lease in self._leases.expired(now):
            self._leases.close(lease.number)

    patch.setattr(RunState, "expire", close)


def a_resumed_trainer_trains_its_batch_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunRecord, "rewind", lambda self: self.weights.fork(self.weights.line.number))


def suspect_servers_hold_their_old_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ServerFleet, "end_transfer", lambda self, version, now: None)


def weights_of_a_lost_trainer_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ServerFleet, "aim", lambda self, version: setattr(self, "target", version))


def old_weights_make_a_server_healthy(patch: pytest.MonkeyPatch) -> None:
    def believe(self: ServerFleet, server: Any, incarnation: int, version: Any) -> None:
        server.observe(ServerEvent.LOADED, incarnation, version)

    patch.setattr(ServerFleet, "note_loaded", believe)


def a_silent_server_is_waited_for_without_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(server_states.ServerRecord, "_missed", lambda self, event, now: event)


def requests_go_to_the_first_server(patch: pytest.MonkeyPatch) -> None:
    def first(self: RouteTable[Any]) -> Any:
        return next((route for route in self.routes if route.accepts), None)

    patch.setattr(RouteTable, "choose", first)


def requests_of_silent_servers_stay_there(patch: pytest.MonkeyPatch) -> None:
    def keep(self: RouteTable[Any], routes: Any) -> list[Any]:
        self.routes = list(routes)
        return []

    patch.setattr(RouteTable, "replace", keep)


def retired_servers_are_not_replaced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ServerFleet, "replace", lambda self, name, now: None)


MUTATIONS = [
    attempts_are_unlimited,
    expired_leases_stay,
    expired_tasks_are_lost,
    a_resumed_trainer_trains_its_batch_again,
    suspect_servers_hold_their_old_weights,
    weights_of_a_lost_trainer_are_kept,
    old_weights_make_a_server_healthy,
    a_silent_server_is_waited_for_without_end,
    requests_go_to_the_first_server,
    requests_of_silent_servers_stay_there,
    retired_servers_are_not_replaced,
    late_results_count,
    leases_outlive_their_state,
    groups_are_split,
    age_is_ignored,
    the_gate_stays_open,
    a_resumed_trainer_keeps_its_incarnation,
    weights_are_not_sent_again,
    validation_is_not_pinned,
    validations_are_not_due,
    lost_validations_are_forgotten,
    validation_results_are_trained,
    the_run_ends_before_the_last_validation,
    dead_servers_answer,
    suspect_servers_get_requests,
    old_incarnations_are_believed,
    tasks_of_lost_workers_stay,
    dropped_samples_are_forgotten,
    a_failure_is_not_journaled,
    checkpoints_forget_open_leases,
    batches_are_released_twice,
    trained_samples_are_not_counted,
]


def test_the_table_of_bugs_in_the_docs_has_each_of_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rl-reliability.md").read_text()
    table = page.partition("| row | deliberate bugs |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([a-z_]+)`", table)) == {mutation.__name__ for mutation in MUTATIONS}
    assert f"{len(MUTATIONS)} in the core" in page
    assert f"servers left out ({len(server_states.TRANSITIONS)})" in page


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_bug_is_found(mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_simulation, "CALM_STEPS", MUTATION_CALM_STEPS)
    mutation(monkeypatch)
    for seed in range(MUTATION_SEEDS):
        try:
            SimulatedRun(seed).run()
        except (InvariantViolated, ValueError, KeyError, AssertionError):
            return
    pytest.fail(f"{mutation.__name__} is not found within {MUTATION_SEEDS} seeds")


@pytest.mark.parametrize("edge", server_states.TRANSITIONS, ids=lambda edge: f"{edge[0].value}, {edge[1].value}")
def test_a_missing_edge_of_the_server_states_is_found(
    edge: tuple[ServerState, ServerEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    edges = {other: after for other, after in server_states.TRANSITIONS.items() if other != edge}
    test_a_bug_is_found(lambda patch: patch.setattr(server_states, "TRANSITIONS", edges), monkeypatch)
