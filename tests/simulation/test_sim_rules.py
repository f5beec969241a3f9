"""Promises about jobs beside their outcome, in simulation: each violated rule is found."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from fray.controller.join_tokens import JoinTokens
from fray.errors import SessionEnded
from fray.model.messages.node import JoinGrant, JoinRequest
from fray.model.resources import Capacity
from fray.model.specs import AttemptSpec, DesiredAttempt, EndReason
from fray.node.logs.store import MemoryLogs
from fray.node.membership import ClusterMembership
from fray.node.port_tunnels import PortTunnels
from fray.scheduler import lifecycle
from fray.scheduler.jobs import groups, retries, submit, transitions
from fray.scheduler.lifecycle import Budget
from fray.scheduler.nodes import nodes
from fray.scheduler.pool import machine as fitting
from fray.testing.sim_cluster import DriverProcess
from tests.simulation.run import run_seed
from tests.simulation.scenario_plans import direct_plan

Patch = pytest.MonkeyPatch
KINDS = (
    *("forwarded port", "whole tree", "memory hog", "stumbling job", "background job", "device gang"),
    *("slice gang", "followed job", "job group"),
)


def broken(*acts: str, seeds: int = 1) -> str:
    """Return the breaches of a few scenarios without faults, each in a line."""
    results = [run_seed(seed, plan=direct_plan(acts, [], every_s=0.3)) for seed in range(1, 1 + seeds)]
    return "\n".join(str(breach) for scenario in results for breach in scenario.breaches)


def test_without_faults_no_promise_is_broken() -> None:
    assert not broken(*KINDS * 3)


def test_no_promise_is_broken_while_machines_and_controllers_crash_and_drivers_sleep() -> None:
    faults = [
        (1.0, "break connections", 0.0),
        (2.0, "crash at save", 1.0),
        (4.0, "kill machine", 5.0),
        (6.0, "stop driver", 100.0),
        (7.0, "crash controller", 2.0),
    ]
    assert run_seed(1, plan=direct_plan(KINDS * 4, faults, every_s=0.4)).breaches == ()


def misled(patch: Patch, **wrong: Any) -> None:
    """Make nodes pass other values to each attempt than they received."""

    def make_attempt_spec(self: ClusterMembership, desired: DesiredAttempt, known: dict[str, str]) -> AttemptSpec:
        return evolve(really(self, desired, known), **wrong)

    really = ClusterMembership._make_attempt_spec
    patch.setattr(ClusterMembership, "_make_attempt_spec", make_attempt_spec)


def test_one_port_for_two_is_found(monkeypatch: Patch) -> None:
    misled(monkeypatch, ports={"http": 20_000})
    assert "ports [20000] of" in broken(*["background job"] * 12)


def test_a_gang_without_the_addresses_of_its_peers_is_found(monkeypatch: Patch) -> None:
    misled(monkeypatch, members=())
    assert "got other peers" in broken("gang")


def test_a_stage_of_a_group_that_begins_too_early_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(transitions, "is_stage_open", lambda *arguments: True)
    text = broken(*["job group"] * 4)
    assert "before anything of an earlier one" in text or "have never run" in text


def test_a_group_that_never_ends_its_helpers_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(groups, "group_result", lambda *arguments: None)
    assert "by its rules, and its outcome is" in broken("job group")


def test_a_secret_that_is_lost_is_found(monkeypatch: Patch) -> None:
    misled(monkeypatch, secrets={})
    assert "began without its secret KEY" in broken(*["background job"] * 8)


def test_a_device_that_is_allocated_while_in_use_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(nodes, "_withhold", lambda *arguments: None)
    assert "while another process holds them" in broken(*["device gang"] * 30)


def test_slices_that_are_mixed_are_found(monkeypatch: Patch) -> None:
    def mixed(machine: Capacity) -> tuple[tuple[str, str, str], int]:
        name, worker = machine.attributes["slice"], int(machine.attributes["tpu_worker"])
        return ("", "", "alone" if (name, worker) == ("pod-0", 0) else "mixed"), worker

    monkeypatch.setattr(fitting, "slice_of", mixed)
    assert "slices are mixed, or shared" in broken(*["slice gang"] * 6)


def test_a_retry_for_memory_that_is_not_given_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setitem(lifecycle.BUDGETS, EndReason.OUT_OF_MEMORY, None)  # type: ignore[arg-type]
    assert "had 1 tries, not 2" in broken("memory hog")


def test_packages_that_are_tried_again_are_found(monkeypatch: Patch) -> None:
    monkeypatch.setitem(lifecycle.BUDGETS, EndReason.ENVIRONMENT, Budget.FAILURE)  # type: ignore[arg-type]
    assert "was tried again although it cannot be made" in broken(*["packaged job"] * 6)


def test_a_back_off_that_is_not_respected_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(retries, "restart_delay_s", lambda *arguments: 0.0)
    assert "its back-off is" in broken(*["stumbling job"] * 12)


def test_a_tree_of_which_only_the_root_is_ended_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(submit, "descendants", lambda *arguments: iter(()))
    assert "came too late" in broken(*["whole tree"] * 4)


def test_a_forward_to_another_port_is_found(monkeypatch: Patch) -> None:
    async def reach(self: PortTunnels, message: Any, port: int) -> Any:
        return await really(self, message, port - 1)

    really = PortTunnels._connect_to_port
    monkeypatch.setattr(PortTunnels, "_connect_to_port", reach)
    assert "led to" in broken(*["background job", "forwarded port"] * 12)


def test_a_line_that_is_lost_silently_is_found(monkeypatch: Patch) -> None:
    def add(self: MemoryLogs, attempt_id: str, stream: Any, data: bytes) -> Any:
        return really(self, attempt_id, stream, data.partition(b"\n")[2] if b" 2\n" in data else data)

    really = MemoryLogs.add
    monkeypatch.setattr(MemoryLogs, "add", add)
    assert "P10" in broken(*["followed job"] * 4)


def test_an_end_of_a_session_inside_an_exception_group_is_found(monkeypatch: Patch) -> None:
    async def run(self: DriverProcess, *arguments: Any, **named: Any) -> None:
        try:
            await really(self, *arguments, **named)
        except SessionEnded as error:
            raise ExceptionGroup("unhandled errors in a nursery", [error]) from None

    really = DriverProcess.run
    plan = direct_plan(["background job"] * 5, [(2.0, "stop driver", 100.0)])
    assert run_seed(1, plan=plan).breaches == ()
    assert run_seed(1, plan=plan).outcomes["SessionEnded"]
    monkeypatch.setattr(DriverProcess, "run", run)
    assert any("not as plain SessionEnded" in breach.text for breach in run_seed(1, plan=plan).breaches)


def test_a_join_token_is_used_once_also_when_saves_crash() -> None:
    faults = [(0.5 + index, "crash at save", 0.4) for index in range(4)] + [(6.0, "break connections", 0.0)]
    results = run_seed(1, plan=direct_plan(["machine let in"] * 20, faults, every_s=0.4))
    assert results.breaches == ()
    assert sum(" joined, " in line and "late refused" in line for line in results.lines) >= 10


def test_a_join_token_that_stays_unused_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(JoinTokens, "_save_unit", lambda self, unit, kept: None)
    assert "one join token has let in" in broken("machine let in")


def test_a_token_whose_use_is_not_saved_is_found(monkeypatch: Patch) -> None:
    """Only the controller process that redeemed it remembers it: the machine that comes after a crash joins."""
    really = JoinTokens.redeem

    def redeem(self: JoinTokens, key_id: str, asked: JoinRequest, remote: str, now: float) -> JoinGrant:
        if asked.node.endswith("late"):
            self._units.clear()
        return really(self, key_id, asked, remote, now)

    monkeypatch.setattr(JoinTokens, "redeem", redeem)
    assert "has let in a third machine" in broken("machine let in")
