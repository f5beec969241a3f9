"""Driver of providers: calls with timeouts, lists of machines, and that no cloud delays a decision."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
import trio.testing
from attrs import define, field

from fray.controller.provider_driver import CALL_S, CALLS_LIMIT, ProviderConfig, ProviderFactory, node_address
from fray.controller.providers.base import MachineRequest, Provider, ProviderError
from fray.controller.serve import RunningController, run_controller
from fray.controller.store import Store
from fray.errors import InvalidRequest
from fray.model.join_tokens import read_token
from fray.model.policy.machine_groups import (
    ErrorKind,
    GroupConfig,
    MachineState,
    SeenMachine,
)
from fray.model.policy.policy import Policy
from fray.net.transports.memory import MemoryNetwork
from fray.scheduler.effects import GroupScaled, PolicyChanged, SessionOpened
from fray.scheduler.state.unit_rows import UnitPhase
from tests.support.controller import ADDRESS, TOKEN


@define(eq=False)
class FakeCloud:
    """Machines that outlive controllers; a call takes as long as the test says."""

    machines: dict[str, SeenMachine] = field(factory=dict)
    takes_s: float = 0.0
    error: ProviderError | Exception | None = None
    asked: list[str] = field(factory=list)
    requests: list[MachineRequest] = field(factory=list)
    at_once: int = 0
    most_at_once: int = 0
    closed: int = 0

    def update_groups(self, groups: Sequence[GroupConfig]) -> None:
        pass

    async def _call(self, what: str) -> None:
        self.asked.append(what)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await trio.sleep(self.takes_s)
        finally:
            self.at_once -= 1
        if self.error is not None:
            raise self.error

    async def create(self, request: MachineRequest) -> None:
        self.requests.append(request)
        # it comes into being whatever the caller hears of it
        self.machines[request.name] = SeenMachine(request.name, request.group.name, request.zone, MachineState.CREATING)
        await self._call(f"create {request.name}")

    async def delete(self, name: str, zone: str, group: str) -> None:
        await self._call(f"delete {name}")
        self.machines.pop(name, None)

    async def list(self) -> Sequence[SeenMachine]:
        return list(self.machines.values())

    async def aclose(self) -> None:
        self.closed += 1


def policy(**more: object) -> Policy:
    usual: dict[str, object] = {"provider": "tpu", "min": 1, "max": 50, "boot_timeout_s": 3600}
    return Policy(groups=(GroupConfig(name="g", **(usual | more)),))  # type: ignore[arg-type]


@asynccontextmanager
async def controller(
    cloud: FakeCloud | Mapping[str, ProviderFactory], store: Store, policy: Policy
) -> AsyncIterator[RunningController]:
    makers = {"tpu": lambda setting: cloud} if isinstance(cloud, FakeCloud) else cloud
    async with trio.open_nursery() as nursery:
        clock = lambda: 1e9 + trio.current_time()  # noqa: E731
        run = partial(run_controller, clock=clock, rng=random.Random(1), policy=policy, provider_factories=makers)
        yield await nursery.start(run, store, MemoryNetwork(random.Random(2)), [ADDRESS], TOKEN)
        nursery.cancel_scope.cancel()


def phases(running: RunningController) -> dict[str, UnitPhase]:
    return {name: unit.phase for name, unit in running.state.fleet.units.items()}


async def test_what_is_wanted_is_asked_for_with_a_token_of_its_own(autojump_clock: trio.testing.MockClock) -> None:
    cloud = FakeCloud()
    async with controller(cloud, Store.memory(), policy()) as running:
        await trio.sleep(10)
        (request,) = cloud.requests
        assert phases(running) == {request.name: UnitPhase.SEEN}
        assert read_token(request.join.token)[0].unit == request.name
    assert cloud.closed == 1


async def test_a_token_is_worth_nothing_once_its_unit_is_given_back(autojump_clock: trio.testing.MockClock) -> None:
    """A token stays revoked for as long as it would have been valid, also when other units are given back meanwhile."""
    cloud, boot_s = FakeCloud(), 7200
    async with controller(cloud, Store.memory(), policy(boot_timeout_s=boot_s)) as running:
        await trio.sleep(10)
        key, _ = read_token(cloud.requests[0].join.token)
        assert running.join_tokens.key_of(key.key_id) is not None
        for most, seconds in ((0, 7000), (1, 7000), (0, 100)):
            running.loop.post(PolicyChanged(policy=policy(min=most, max=most, boot_timeout_s=boot_s)))
            await trio.sleep(seconds)
            assert running.join_tokens.key_of(key.key_id) is None
        assert running.loop.current_time() < key.expires_s


async def test_a_provider_that_hangs_delays_no_decision(autojump_clock: trio.testing.MockClock) -> None:
    cloud = FakeCloud(takes_s=1e9)
    async with controller(cloud, Store.memory(), policy()) as running:
        await trio.sleep(5)
        turns = running.loop.turns
        for number in range(20):
            running.loop.post(SessionOpened(session=f"s{number}", role="driver", namespace="ns"))  # type: ignore[arg-type]
            await trio.testing.wait_all_tasks_blocked()
            assert f"s{number}" in running.state.sessions
        assert running.loop.turns >= turns + 20
        (name,) = phases(running)
        await trio.sleep(CALL_S + 5)
        assert phases(running)[name] is UnitPhase.SEEN, "it has not answered, and was made all the same"
        cloud.machines.clear()
        await trio.sleep(60)
        assert phases(running)[name] is UnitPhase.GONE


async def test_no_more_than_so_many_calls_at_a_time(autojump_clock: trio.testing.MockClock) -> None:
    cloud = FakeCloud(takes_s=10)
    async with controller(cloud, Store.memory(), policy(min=50)) as running:
        await trio.sleep(60)
        assert cloud.most_at_once == CALLS_LIMIT
        assert len(cloud.requests) == 50
        assert set(phases(running).values()) == {UnitPhase.SEEN}


async def test_a_restart_in_the_middle_of_a_create_makes_no_second_one(autojump_clock: trio.testing.MockClock) -> None:
    cloud, store = FakeCloud(takes_s=50), Store.memory()
    async with controller(cloud, store, policy()):
        await trio.sleep(5)
        assert len(cloud.machines) == 1
    async with controller(cloud, store, policy()) as running:
        await trio.sleep(100)
        assert len(cloud.machines) == 1
        assert len({request.name for request in cloud.requests}) == 1
        assert phases(running) == dict.fromkeys(cloud.machines, UnitPhase.SEEN)


async def test_machines_of_a_lost_store_are_adopted_and_not_doubled(autojump_clock: trio.testing.MockClock) -> None:
    cloud = FakeCloud()
    async with controller(cloud, Store.memory(), policy(min=2)):
        await trio.sleep(10)
    async with controller(cloud, Store.memory(), policy(min=2, max=2)) as running:
        await trio.sleep(30)
        assert len(cloud.requests) == 2
        assert phases(running) == dict.fromkeys(cloud.machines, UnitPhase.SEEN)


async def test_what_is_not_wanted_any_more_is_deleted_although_it_is_being_made(
    autojump_clock: trio.testing.MockClock,
) -> None:
    cloud = FakeCloud(takes_s=60)
    async with controller(cloud, Store.memory(), policy()) as running:
        await trio.sleep(5)
        running.loop.post(PolicyChanged(policy=policy(min=0, max=0)))
        await trio.sleep(100)
        assert not cloud.machines
        assert [asked.split()[0] for asked in cloud.asked] == ["create", "delete"]
        await trio.sleep(100)
        assert set(phases(running).values()) == {UnitPhase.GONE}


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (ProviderError(ErrorKind.STOCKOUT, "none left"), "stockout"),
        (ValueError("a mistake"), "transient"),
    ],
)
async def test_errors_come_back_by_kind_and_mistakes_of_a_provider_end_nothing(
    error: Exception, what: str, autojump_clock: trio.testing.MockClock
) -> None:
    cloud = FakeCloud(error=error)
    async with controller(cloud, Store.memory(), policy()) as running:
        await trio.sleep(2)
        assert running.state.fleet.groups["g"].backoffs[""].kind == what
        cloud.error = None
        await trio.sleep(300)
        (living,) = [name for name, phase in phases(running).items() if phase is UnitPhase.SEEN]
        assert list(cloud.machines) == [living]


async def test_a_list_that_fails_is_visible_and_nothing_is_asked_for(autojump_clock: trio.testing.MockClock) -> None:
    class Mute(FakeCloud):
        async def list(self) -> Sequence[SeenMachine]:
            raise ProviderError(ErrorKind.PERMISSION, "who are you")

    cloud = Mute()
    async with controller(cloud, Store.memory(), policy()) as running:
        await trio.sleep(300)
        assert not cloud.requests
        assert running.state.fleet.provider_errors == {"tpu": "permission: who are you"}


async def test_a_group_of_a_new_kind_gets_its_provider_when_the_policy_changes(
    autojump_clock: trio.testing.MockClock,
) -> None:
    cloud = FakeCloud()
    async with controller(cloud, Store.memory(), Policy()) as running:
        running.loop.post(PolicyChanged(policy=policy()))
        await trio.sleep(30)
        assert len(cloud.machines) == 1
        running.loop.post(GroupScaled(session="s", ref=1, group="g", min=3))
        await trio.sleep(30)
        assert len(cloud.machines) == 3


async def test_a_provider_with_invalid_options_keeps_no_other_from_the_new_policy(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Strict(FakeCloud):
        def update_groups(self, groups: Sequence[GroupConfig]) -> None:
            raise InvalidRequest("no such option")

    def refuse(setting: ProviderConfig) -> Provider:
        raise InvalidRequest("not installed")

    names: list[str] = []

    class Last(FakeCloud):
        def update_groups(self, groups: Sequence[GroupConfig]) -> None:
            names.extend(group.name for group in groups)

    makers = {"process": lambda setting: Strict(), "command": refuse, "tpu": lambda setting: Last()}
    before = Policy(groups=tuple(GroupConfig(name=kind, provider=kind, max=1) for kind in ("process", "tpu")))
    async with controller(makers, Store.memory(), before) as running:
        after = Policy(groups=(*before.groups, GroupConfig(name="c", provider="command", max=1)))
        running.loop.post(PolicyChanged(policy=after))
        await trio.sleep(1)
    assert names == ["process", "tpu", "c"]
    rejected = {record.provider: record.reason for record in caplog.records if "rejected" in record.message}
    assert rejected == {"process": "no such option", "command": "not installed"}


@pytest.mark.parametrize(
    ("bound", "address"),
    [
        (("memory:controller", "unix:/run/f.sock"), "fray+unix:///run/f.sock"),
        (("tcp:127.0.0.1:7421",), "fray://127.0.0.1:7421"),
        (("memory:controller",), ""),
    ],
)
def test_nodes_get_the_first_address_they_can_dial(bound: Sequence[str], address: str) -> None:
    assert node_address(bound) == address


def test_a_controller_that_listens_everywhere_is_addressed_by_name() -> None:
    assert node_address(["tcp:0.0.0.0:7421"]) == f"fray://{__import__('socket').gethostname()}:7421"
