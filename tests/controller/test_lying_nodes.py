"""A machine with valid credentials that lies: it changes nothing of others, and the log says what it has tried."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio.testing
from attrs import define, evolve

from fray.errors import FrayError, InvalidRequest, NodeNameInUse, ProtocolMismatch, Unauthorized
from fray.model.log_records import record
from fray.model.messages.client import FollowLogs, GetEvents, Launch, ListJobs, ListNodes, LogLines, Terminate
from fray.model.messages.node import (
    AttemptAnnotation,
    AttemptLog,
    AttemptMetricsReport,
    NodeGoodbye,
    NodeMoved,
    ObservedState,
    StackCapture,
)
from fray.model.monitoring.attempt_metrics import AttemptMetrics
from fray.model.resources import Device
from fray.model.specs import EndReason, ObservedAttempt, Outcome, Phase
from fray.net.codec import blob_id
from fray.net.transport import Credential
from tests.controller.test_joining import asked, key_id, minted
from tests.support.controller import Client, Node, Peer, Stage, spec, stage

VICTIM = "work-1:0:0"


@define
class Scene:
    """An honest machine that runs a job, its driver, and a machine ``a-0`` with a key of its own."""

    place: Stage
    driver: Client
    honest: Node
    liar: Node
    key: Credential

    def say(self, message: object, *blobs: bytes) -> None:
        assert self.liar.channel is not None
        self.liar.channel.notice(message, blobs)

    async def refused(self, kind: type[FrayError], match: str, name: str = "a-0", **hello: Any) -> None:
        """Dial again as this node, with the liar's own key."""
        with pytest.raises(kind, match=match):
            await self.place.node(name, credential=self.key, attributes={"machine": "a"}, **hello)

    async def check_others(self) -> None:
        """The job of the honest machine is as it was, and ends with its own value."""
        await trio.testing.wait_all_tasks_blocked()
        (job,) = (await self.driver.ask(ListJobs())).jobs
        assert [(attempt.node, attempt.cause) for attempt in job.attempts] == [("n1", None)]
        assert not self.honest.desired[VICTIM].stop
        assert {node.name: node.alive for node in (await self.driver.ask(ListNodes())).nodes}["n1"]
        await self.driver.ask(FollowLogs(job="work-1", on=False))
        self.honest.succeed(VICTIM, b"the result")
        info, blobs = await self.driver.job_ended("work-1")
        assert (info.cause, blobs) == (EndReason.SUCCEEDED, [b"the result"])


@asynccontextmanager
async def open_scene() -> AsyncIterator[Scene]:
    async with stage() as place:
        driver, honest = await place.client(), await place.node("n1")
        await driver.launch(spec("work"))
        await honest.wait_desired(VICTIM)
        await driver.job("work-1", lambda info: info.state.value == "running")
        given = place.controller.join_tokens.redeem(
            key_id(minted(place)), asked("a-0"), "", place.controller.loop.current_time()
        )
        key = Credential(given.key_id, given.key)
        liar = await place.node("a-0", credential=key, attributes={"machine": "a"}, obedient=False)
        await trio.testing.wait_all_tasks_blocked()
        yield Scene(place, driver, honest, liar, key)


def ended(cause: EndReason, value: bytes = b"") -> ObservedAttempt:
    outcome = Outcome(cause=cause, value=blob_id(value) if value else None)
    return ObservedAttempt(attempt_id=VICTIM, phase=Phase.ENDED, outcome=outcome)


def lines() -> bytes:
    return record("out", 0, 1.0, b"a forged line\n")


LIES: dict[str, Callable[[Scene], None]] = {
    "it succeeded": lambda scene: scene.say(
        ObservedState(full=False, observed=(ended(EndReason.SUCCEEDED, b"forged"),)), b"forged"
    ),
    "it failed": lambda scene: scene.say(ObservedState(full=False, observed=(ended(EndReason.FAILURE),))),
    "it is stopping": lambda scene: scene.say(
        ObservedState(full=True, observed=(ObservedAttempt(attempt_id=VICTIM, phase=Phase.STOPPING),))
    ),
    "it is gone": lambda scene: scene.say(ObservedState(full=False, removed=(VICTIM,))),
    "it has printed": lambda scene: scene.say(AttemptLog(attempt_id=VICTIM, first=0, end=1, ended=True), lines()),
    "it is stalled": lambda scene: scene.say(AttemptAnnotation(attempt_id=VICTIM, what="stalled", text="forged")),
    "it takes a terabyte": lambda scene: scene.say(
        AttemptMetricsReport(metrics=(AttemptMetrics(attempt_id=VICTIM, memory_bytes=2**40, health="forged"),))
    ),
    "its stacks": lambda scene: scene.say(StackCapture(ref=1, attempt_id=VICTIM, text="forged")),
}


@pytest.mark.parametrize("lie", LIES)
async def test_what_a_machine_says_of_attempts_of_another_changes_nothing_and_is_logged_once(
    lie: str, autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_scene() as scene:
        await scene.driver.ask(FollowLogs(job="work-1"))
        LIES[lie](scene)
        await trio.testing.wait_all_tasks_blocked()
        found = [one.getMessage() for one in caplog.records if VICTIM in one.getMessage()]
        assert len(found) == 1
        assert found[0].startswith("node a-0 at memory:a-0 has ")
        assert found[0].endswith(f"{VICTIM} of node n1: ignored")
        events = (await scene.driver.ask(GetEvents(job="work-1"))).events
        assert "forged" not in repr(events)
        assert not [notice for notice, _ in scene.driver.notices if isinstance(notice, LogLines)]
        (job,) = (await scene.driver.ask(ListJobs())).jobs
        assert "forged" not in repr(job)
        await scene.check_others()


async def test_a_thousand_lies_are_ten_lines_of_the_log(autojump_clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with open_scene() as scene:
        for _ in range(1000):
            scene.say(ObservedState(full=False, removed=(VICTIM,)))
        await trio.testing.wait_all_tasks_blocked()
        assert len([one for one in caplog.records if VICTIM in one.getMessage()]) == 10
        await scene.check_others()


async def test_a_machine_has_only_its_own_name(autojump_clock: Any) -> None:
    async with open_scene() as scene:
        await scene.refused(Unauthorized, "is for node 'a-0' with the attribute machine=a, not for node 'n1'", "n1")
        holder = scene.honest.greeting()
        taking = {"incarnation": holder.incarnation, "state_id": holder.state_id, "boot_id": "another"}
        await scene.refused(Unauthorized, "not for node 'n1'", "n1", **taking)
        await scene.refused(NodeNameInUse, "node name 'a-0' is in use by the fray-node at memory:a-0")
        with pytest.raises(NodeNameInUse, match="node name 'n1' is in use"):
            await scene.place.node("n1")
        await scene.check_others()


@pytest.mark.parametrize(
    ("offer", "said"),
    [
        ({"cpu_milli": 10**9 * 1000}, r"offers 1,000,000,000,000 milli-CPUs, but one machine has at most 100,000,000"),
        ({"memory_bytes": 2**51}, "bytes of memory, but one machine has at most"),
        ({"disk_bytes": 2**59}, "bytes of disk, but one machine has at most"),
        ({"devices": (Device("gpu-0", "gpu", "h100"),) * 10_001}, "offers 10,001 devices"),
    ],
)
async def test_a_machine_offers_no_more_than_a_machine_can_have(
    offer: dict[str, Any], said: str, autojump_clock: Any
) -> None:
    async with open_scene() as scene:
        scene.liar.scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        hello = scene.liar.greeting()
        lying = Peer(lambda: evolve(hello, capacity=evolve(hello.capacity, **offer)))
        with pytest.raises(InvalidRequest, match=said):
            await scene.place.dial(lying, "a-0", scene.key)
        await scene.check_others()


@pytest.mark.parametrize("host", ["x" * 256, "10.0.0.1 10.0.0.2", "a\nb", "\x1b[2J"])
async def test_a_machine_has_an_address_that_can_be_one(host: str, autojump_clock: Any) -> None:
    async with open_scene() as scene:
        scene.say(NodeMoved(host=host))
        await scene.liar.until(lambda: scene.liar.ended)
        with pytest.raises(InvalidRequest, match="is not the address of a machine"):
            await scene.place.dial(Peer(lambda: evolve(scene.liar.greeting(), host=host)), "a-0", scene.key)
        await scene.check_others()


async def test_the_goodbye_of_a_machine_is_its_own(autojump_clock: Any) -> None:
    async with open_scene() as scene:
        scene.say(NodeGoodbye(reason="forged"))
        await scene.check_others()


@pytest.mark.parametrize("request_", [Launch(jobs=(spec("forged"),)), Terminate(jobs=("work-1",)), ListJobs()])
async def test_a_machine_requests_nothing_that_clients_do(request_: object, autojump_clock: Any) -> None:
    async with open_scene() as scene:
        with pytest.raises(ProtocolMismatch, match="is not a request of nodes"):
            await scene.liar.ask(request_)
        await scene.check_others()
