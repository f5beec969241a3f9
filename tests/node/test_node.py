"""A node against a controller made of lists, over a network inside this loop, with attempts that are mere words."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from attrs import define, field

from fray.errors import FrayError, LaunchFailed, NodeNameInUse, Unauthorized
from fray.model.log_records import LogChunk
from fray.model.messages.client import ControllerHello
from fray.model.messages.node import (
    AttemptLog,
    DesiredState,
    NodeGoodbye,
    NodeHello,
    NodeLeaves,
    NodeMoved,
    ObservedState,
    Probe,
    ProbeResult,
)
from fray.model.resources import Capacity
from fray.model.specs import AttemptSpec, DesiredAttempt, EndReason, EntryKind, JobSpec, ObservedAttempt, Outcome, Phase
from fray.net.channel.public import Acceptor, Channel
from fray.net.codec import Kind, blob_id, decode_message, encode_message
from fray.net.transport import Bytes, PeerIdentity
from fray.net.transports.memory import MemoryNetwork
from fray.node.config import NodeConfig
from fray.node.launcher import Launcher
from fray.node.linux.process_wait import wait_process_end
from fray.node.logs.store import MemoryLogs
from fray.node.run import is_final, run_node
from fray.node.state_reports import REPORT_CHUNK_BYTES

PAYLOAD = b"pickle"
SPEC = JobSpec(job_id="j", name="j", namespace="n", entry=EntryKind.CALLABLE, payload=blob_id(PAYLOAD))
PROGRAM = JobSpec(job_id="p", name="p", namespace="n", entry=EntryKind.BINARY, argv=("true",))
CONFIG = NodeConfig(
    name="node-a",
    controller="memory:controller",
    token="secret",
    capacity=Capacity(cpu_milli=1000, memory_bytes=1, disk_bytes=1),
    state_dir="",
    lease_s=600,
)


@define
class FakeLauncher(Launcher):
    """Does what it is asked when the test says so."""

    calls: list[tuple[str, str]] = field(factory=list)
    attempt_specs: dict[str, AttemptSpec] = field(factory=dict)
    payloads: dict[str, bytes | None] = field(factory=dict)
    ends_on_stop: bool = True
    fails: bool = False
    on_observed: Any = None
    on_log: Any = None
    logs: MemoryLogs = field(factory=lambda: MemoryLogs(lambda: 1.0))

    def __attrs_pre_init__(self) -> None:
        super().__init__()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        if self.fails:
            raise LaunchFailed("no zygote")
        task_status.started()
        await trio.sleep_forever()

    def start(self, attempt_spec: AttemptSpec, payload: bytes | None) -> None:
        self.calls.append(("start", attempt_spec.attempt_id))
        self.attempt_specs[attempt_spec.attempt_id] = attempt_spec
        self.payloads[attempt_spec.attempt_id] = payload
        self.tell(attempt_spec.attempt_id, Phase.RUNNING)

    def stop(self, attempt_id: str, notice_s: float | None = None) -> None:
        self._end("stop", attempt_id)

    def kill(self, attempt_id: str) -> None:
        self._end("kill", attempt_id)

    def _end(self, what: str, attempt_id: str) -> None:
        self.calls.append((what, attempt_id))
        self.tell(attempt_id, Phase.STOPPING)
        if self.ends_on_stop:
            self.end(attempt_id, Outcome(cause=EndReason.STOPPED, message="by SIGTERM"))

    def forget(self, attempt_id: str) -> None:
        self.calls.append(("forget", attempt_id))

    def tell(self, attempt_id: str, phase: Phase) -> None:
        self.on_observed(ObservedAttempt(attempt_id=attempt_id, phase=phase, pid=7), None)

    def end(self, attempt_id: str, outcome: Outcome, value: bytes | None = None) -> None:
        self.on_observed(ObservedAttempt(attempt_id=attempt_id, phase=Phase.ENDED, outcome=outcome), value)


@define(eq=False)
class FakeController:
    """Keeps all it hears; says what the test says."""

    rng: random.Random
    epoch: int = 1
    revision: int = 0
    refusal: FrayError | None = None
    heard: list[Any] = field(factory=list)
    blobs: dict[str, bytes] = field(factory=dict)
    hellos: list[NodeHello] = field(factory=list)
    channels: list[Channel] = field(factory=list)
    moved: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def acceptor(self) -> Acceptor:
        return Acceptor(f"controller-{self.epoch}", self.on_greeting, keep_s=30.0, rng=self.rng)

    def on_greeting(self, claim: PeerIdentity, greeting: bytes) -> Any:
        if self.refusal is not None:
            raise self.refusal
        hello, _ = decode_message(greeting)
        self.hellos.append(hello)
        return encode_message(ControllerHello(cluster_id="c", epoch=self.epoch)), self.attach

    def attach(self, channel: Channel) -> FakeController:
        self.channels.append(channel)
        return self

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        message, blobs = decode_message(body)
        self.heard.append(message)
        self.blobs.update((blob_id(blob), bytes(blob)) for blob in blobs)
        self.moved.unpark_all()

    def on_batch(self) -> None: ...
    def on_reset(self, greeting: bytes) -> None: ...
    def on_suspended(self, why: str) -> None: ...
    def on_resumed(self) -> None: ...
    def on_end(self, error: FrayError) -> None:
        self.moved.unpark_all()

    def want(self, *desired: DesiredAttempt, full: bool = True, gone: tuple[str, ...] = (), **newest: int) -> None:
        self.revision = newest.get("revision", self.revision + 1)
        epoch = newest.get("epoch", self.epoch)
        wanted = DesiredState(epoch=epoch, revision=self.revision, full=full, desired=desired, removed=gone)
        self.channels[-1].notice(wanted, [PAYLOAD])

    def reports(self) -> list[ObservedState]:
        return [message for message in self.heard if isinstance(message, ObservedState)]

    def known(self) -> dict[str, ObservedAttempt]:
        """The observed set as the reports so far tell it."""
        known: dict[str, ObservedAttempt] = {}
        for report in self.reports():
            if report.full:
                known = {}
            known.update((one.attempt_id, one) for one in report.observed)
            for attempt_id in report.removed:
                known.pop(attempt_id, None)
        return known

    def phases(self) -> dict[str, str]:
        return {attempt_id: str(one.phase) for attempt_id, one in self.known().items()}

    def outcomes(self, *attempts: str) -> list[Outcome]:
        return [outcome for attempt in attempts if (outcome := self.known()[attempt].outcome) is not None]

    async def until(self, true: Callable[[], bool]) -> None:
        while not true():
            await self.moved.park()

    async def until_phases(self, **phases: str) -> None:
        await self.until(lambda: self.phases() == phases)


@define
class NodeHarness:
    """One node and its controller."""

    network: MemoryNetwork
    controller: FakeController
    launcher: FakeLauncher
    leave: trio.Event
    nursery: trio.Nursery
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    """Cancel scope of the listener: cancel it to stop the controller."""
    over: trio.Event = field(factory=trio.Event)
    error: FrayError | None = None

    async def serve(self) -> None:
        """A controller listens; a later one is a new life."""
        self.scope = trio.CancelScope()
        await self.nursery.start(self._listen)

    async def _listen(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        acceptor = self.controller.acceptor()
        with self.scope:
            await self.network.at("controller").listen(
                "memory:controller",
                {"cluster": "secret"}.get,
                acceptor.handle,
                task_status=task_status,  # type: ignore[arg-type]
            )

    async def be_node(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED, **config: Any) -> None:
        from attrs import evolve

        network, rng = self.network.at("node"), random.Random(2)
        node_config = evolve(CONFIG, **config)
        try:
            await run_node(node_config, network, self.launcher, rng=rng, leave=self.leave, task_status=task_status)
        except FrayError as error:
            self.error = error
        self.over.set()


@asynccontextmanager
async def open_harness(launcher: FakeLauncher | None = None, **config: Any) -> AsyncIterator[NodeHarness]:
    """Run a node that has joined."""
    async with trio.open_nursery() as nursery:
        rng = random.Random(1)
        harness = NodeHarness(
            MemoryNetwork(rng=rng), FakeController(rng), launcher or FakeLauncher(), trio.Event(), nursery
        )
        await harness.serve()
        await nursery.start(partial(harness.be_node, **config))
        await harness.controller.until(lambda: bool(harness.controller.reports()))
        yield harness
        nursery.cancel_scope.cancel()


def desired_attempt(attempt_id: str, spec: JobSpec = SPEC, **more: Any) -> DesiredAttempt:
    return DesiredAttempt(attempt_id=attempt_id, spec=spec, key="dial-key", **more)


# Joining -------------------------------------------------------------------------------------------------------------


async def test_a_node_introduces_itself_and_reports_that_it_holds_nothing(autojump_clock: Any) -> None:
    async with open_harness() as harness:
        hello = harness.controller.hellos[0]
        assert (hello.node, hello.capacity, hello.known_payloads) == ("node-a", CONFIG.capacity, ())
        assert harness.controller.reports() == [ObservedState(full=True)]


async def test_a_taken_name_ends_the_node_with_the_reason(autojump_clock: Any) -> None:
    async with trio.open_nursery() as nursery:
        rng = random.Random(1)
        harness = NodeHarness(MemoryNetwork(rng=rng), FakeController(rng), FakeLauncher(), trio.Event(), nursery)
        harness.controller.refusal = NodeNameInUse("node-a lives elsewhere")
        await harness.serve()
        await harness.be_node()
        assert isinstance(harness.error, NodeNameInUse)
        nursery.cancel_scope.cancel()


async def test_a_wrong_token_ends_the_node_with_the_reason(autojump_clock: Any) -> None:
    async with trio.open_nursery() as nursery:
        rng = random.Random(1)
        harness = NodeHarness(MemoryNetwork(rng=rng), FakeController(rng), FakeLauncher(), trio.Event(), nursery)
        await harness.serve()
        await harness.be_node(token="guess")
        assert isinstance(harness.error, Unauthorized)
        nursery.cancel_scope.cancel()


async def test_a_launcher_that_cannot_start_ends_the_node_with_the_reason(autojump_clock: Any) -> None:
    async with trio.open_nursery() as nursery:
        rng = random.Random(1)
        launcher = FakeLauncher(fails=True)
        harness = NodeHarness(MemoryNetwork(rng=rng), FakeController(rng), launcher, trio.Event(), nursery)
        await harness.be_node()
        assert isinstance(harness.error, LaunchFailed)


async def test_a_node_without_a_controller_dials_until_there_is_one(autojump_clock: Any) -> None:
    async with trio.open_nursery() as nursery:
        rng = random.Random(1)
        harness = NodeHarness(MemoryNetwork(rng=rng), FakeController(rng), FakeLauncher(), trio.Event(), nursery)
        nursery.start_soon(harness.be_node)
        await trio.sleep(3 * CONFIG.lease_s)
        await harness.serve()
        await harness.controller.until(lambda: bool(harness.controller.reports()))
        nursery.cancel_scope.cancel()


def test_only_a_refusal_of_the_very_first_kind_is_final() -> None:
    assert is_final(NodeNameInUse("x"), True)
    assert is_final(Unauthorized("x"), False)
    assert not is_final(Unauthorized("x"), True)


# Wanted and observed -------------------------------------------------------------------------------------------------


async def test_a_desired_attempt_is_started_with_its_spec_and_payload(autojump_clock: Any) -> None:
    async with open_harness(advertise="10.0.0.1", networked=True) as harness:
        harness.controller.want(desired_attempt("a", devices=("gpu-1",)))
        await harness.controller.until_phases(a="running")
        assert harness.launcher.payloads == {"a": PAYLOAD}
        assert harness.launcher.attempt_specs["a"] == AttemptSpec(
            attempt_id="a",
            spec=SPEC,
            controller="memory:controller",
            key="dial-key",
            node="node-a",
            advertise="10.0.0.1",
            networked=True,
            devices=("gpu-1",),
        )


@pytest.mark.parametrize("given", [False, True])
async def test_a_machine_with_a_new_address_says_so_unless_its_address_was_given(
    given: bool, autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = "10.0.0.1"
    monkeypatch.setattr("fray.node.membership.own_address", lambda seen_from: address)
    async with open_harness(advertise="10.0.0.1", finds_address=not given, networked=True) as harness:
        controller = harness.controller
        assert controller.hellos[0].host == "10.0.0.1"
        address = "10.0.0.2"
        harness.network.drop("node")
        controller.want(desired_attempt("a"))
        await controller.until_phases(a="running")
        attempt_spec = harness.launcher.attempt_specs["a"]
        assert attempt_spec.advertise == ("10.0.0.1" if given else "10.0.0.2")
        assert attempt_spec.finds_address == (not given)
        assert [one.host for one in controller.heard if isinstance(one, NodeMoved)] == ([] if given else ["10.0.0.2"])


async def test_the_end_is_reported_with_its_value_and_forgotten_when_it_is_no_longer_wanted(
    autojump_clock: Any,
) -> None:
    async with open_harness() as harness:
        harness.controller.want(desired_attempt("a"))
        await harness.controller.until_phases(a="running")
        harness.launcher.end("a", Outcome(cause=EndReason.SUCCEEDED, value=blob_id(b"42")), b"42")
        await harness.controller.until_phases(a="ended")
        assert harness.controller.blobs[blob_id(b"42")] == b"42"
        harness.controller.want(full=False, gone=("a",))
        await harness.controller.until_phases()
        assert harness.launcher.calls[-1] == ("forget", "a")


async def test_an_attempt_that_shall_stop_ends_with_the_cause_the_controller_gave(autojump_clock: Any) -> None:
    async with open_harness() as harness:
        harness.controller.want(desired_attempt("a"))
        await harness.controller.until_phases(a="running")
        harness.controller.want(desired_attempt("a", stop=True, stop_cause=EndReason.GANG), full=False)
        await harness.controller.until_phases(a="ended")
        assert harness.controller.known()["a"].outcome == Outcome(cause=EndReason.GANG, message="by SIGTERM")


async def test_an_attempt_stopped_before_it_came_here_is_reported_without_being_started(autojump_clock: Any) -> None:
    async with open_harness() as harness:
        harness.controller.want(desired_attempt("a", stop=True, stop_cause=EndReason.OWNER_ENDED))
        await harness.controller.until_phases(a="ended")
        assert harness.launcher.calls == []
        outcome = harness.controller.known()["a"].outcome
        assert outcome is not None
        assert outcome.cause is EndReason.OWNER_ENDED


async def test_an_attempt_missing_from_a_whole_set_is_killed_and_forgotten(autojump_clock: Any) -> None:
    async with open_harness() as harness:
        harness.controller.want(desired_attempt("a"), desired_attempt("b"))
        await harness.controller.until_phases(a="running", b="running")
        harness.controller.want(desired_attempt("b"))
        await harness.controller.until_phases(b="running")
        assert [call for call in harness.launcher.calls if call[1] == "a"] == [
            ("start", "a"),
            ("kill", "a"),
            ("forget", "a"),
        ]


async def test_an_older_set_changes_nothing(autojump_clock: Any) -> None:
    async with open_harness() as harness:
        harness.controller.want(desired_attempt("a"), epoch=2, revision=5)
        await harness.controller.until_phases(a="running")
        harness.controller.want(epoch=2, revision=4)
        harness.controller.want(epoch=1, revision=99)
        harness.controller.want(desired_attempt("b", PROGRAM), full=False, epoch=2, revision=6)
        await harness.controller.until_phases(a="running", b="running")
        assert ("kill", "a") not in harness.launcher.calls


async def test_a_program_needs_no_payload_and_a_large_one_is_left_to_the_launcher(autojump_clock: Any) -> None:
    from attrs import evolve

    async with open_harness() as harness:
        harness.controller.want(desired_attempt("p", PROGRAM), desired_attempt("a", evolve(SPEC, payload="0" * 64)))
        await harness.controller.until_phases(p="running", a="running")
        assert harness.launcher.payloads == {"p": None, "a": None}
        assert harness.launcher.attempt_specs["a"].spec.payload == "0" * 64


async def test_large_values_are_spread_over_several_reports(autojump_clock: Any) -> None:
    values = [bytes([number]) * (REPORT_CHUNK_BYTES * 2 // 3) for number in range(4)]
    async with open_harness() as harness:
        harness.controller.want(*(desired_attempt(f"a{number}") for number in range(4)))
        await harness.controller.until_phases(**{f"a{number}": "running" for number in range(4)})
        for number, value in enumerate(values):
            harness.launcher.end(f"a{number}", Outcome(cause=EndReason.SUCCEEDED, value=blob_id(value)), value)
        await harness.controller.until_phases(**{f"a{number}": "ended" for number in range(4)})
        assert {blob_id(value) for value in values} <= harness.controller.blobs.keys()
        assert max(len(report.observed) for report in harness.controller.reports()[-2:]) == 2


# Log lines -----------------------------------------------------------------------------------------------------------


async def test_lines_reach_the_controller_before_the_end_does(autojump_clock: Any) -> None:
    async with open_harness() as harness:
        harness.controller.want(desired_attempt("a"))
        await harness.controller.until_phases(a="running")
        harness.launcher.on_log("a", harness.launcher.logs.add("a", "out", b"last words\n"))
        harness.launcher.end("a", Outcome(cause=EndReason.SUCCEEDED))
        await harness.controller.until_phases(a="ended")
        kinds = [type(message) for message in harness.controller.heard]
        assert kinds.index(AttemptLog) < len(kinds) - 1
        assert harness.controller.heard[kinds.index(AttemptLog)] == AttemptLog(attempt_id="a", first=0, end=1)


async def test_lines_that_are_not_pushed_are_spoken_of_before_the_end(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_harness() as harness:
        harness.controller.want(desired_attempt("a"))
        await harness.controller.until_phases(a="running")
        with monkeypatch.context() as patch:
            patch.setattr("fray.node.logs.push.LIVE_LIMIT_BYTES", -1)
            harness.launcher.on_log("a", LogChunk(0, 7, b"too much"))
        harness.launcher.end("a", Outcome(cause=EndReason.SUCCEEDED))
        await harness.controller.until_phases(a="ended")
        logs = [message for message in harness.controller.heard if isinstance(message, AttemptLog)]
        assert logs[-1] == AttemptLog(attempt_id="a", first=7, end=7, ended=True)


# Losing the controller -----------------------------------------------------------------------------------------------


async def test_a_restarted_controller_gets_a_full_report_and_no_attempt_is_touched(autojump_clock: Any) -> None:
    async with open_harness() as harness:
        harness.controller.want(desired_attempt("a"))
        await harness.controller.until_phases(a="running")
        harness.scope.cancel()
        await trio.sleep(30)
        harness.launcher.end("a", Outcome(cause=EndReason.SUCCEEDED, value=blob_id(b"42")), b"42")
        harness.controller.heard.clear()
        harness.controller.blobs.clear()
        harness.controller.epoch, harness.controller.revision = 2, 0
        await harness.serve()
        await harness.controller.until_phases(a="ended")
        assert harness.controller.blobs == {blob_id(b"42"): b"42"}
        assert harness.controller.hellos[-1].known_payloads == ("a",)
        assert harness.controller.hellos[0].incarnation == harness.controller.hellos[-1].incarnation
        assert harness.launcher.calls == [("start", "a")]


async def test_a_node_alone_for_too_long_ends_its_attempts_before_the_lease_does(autojump_clock: Any) -> None:
    async with open_harness() as harness:
        harness.controller.want(desired_attempt("a"))
        await harness.controller.until_phases(a="running")
        harness.scope.cancel()
        await trio.sleep(CONFIG.patience_s - 1)
        assert harness.launcher.calls == [("start", "a")]
        await trio.sleep(CONFIG.lease_s - CONFIG.patience_s)
        assert harness.launcher.calls == [("start", "a"), ("kill", "a"), ("forget", "a")]


async def test_a_node_that_gave_up_comes_back_as_another_incarnation_that_holds_nothing(autojump_clock: Any) -> None:
    async with open_harness() as harness:
        harness.controller.want(desired_attempt("a"))
        await harness.controller.until_phases(a="running")
        harness.scope.cancel()
        await trio.sleep(CONFIG.lease_s)
        harness.controller.heard.clear()
        await harness.serve()
        await harness.controller.until(lambda: bool(harness.controller.reports()))
        first, last = harness.controller.hellos[0], harness.controller.hellos[-1]
        assert first.incarnation != last.incarnation
        assert last.known_payloads == ()
        assert harness.controller.reports() == [ObservedState(full=True)]


async def test_a_node_joins_again_only_after_its_attempts_have_ended(autojump_clock: Any) -> None:
    launcher = FakeLauncher(ends_on_stop=False)
    async with open_harness(launcher) as harness:
        harness.controller.want(desired_attempt("a"))
        await harness.controller.until_phases(a="running")
        harness.scope.cancel()
        await trio.sleep(CONFIG.lease_s)
        await harness.serve()
        await trio.sleep(CONFIG.lease_s)
        assert len(harness.controller.hellos) == 1
        launcher.end("a", Outcome(cause=EndReason.STOPPED))
        await harness.controller.until(lambda: len(harness.controller.hellos) == 2)


def test_patience_ends_well_before_the_lease() -> None:
    from attrs import evolve

    assert CONFIG.patience_s == 480
    assert evolve(CONFIG, lease_s=100).patience_s == 50


# How it is ---------------------------------------------------------------------------------------------------------


async def test_a_node_that_is_asked_looks_and_says_what_it_has_found(autojump_clock: Any) -> None:
    async with open_harness() as harness:
        harness.controller.channels[-1].send_nowait(Kind.REQUEST, 1, encode_message(Probe()))
        await trio.sleep(1)
        harness.launcher.end("_fray.probe-1:0:0", Outcome(cause=EndReason.KILLED, message="killed by signal 7"))
        await harness.controller.until(lambda: any(isinstance(one, ProbeResult) for one in harness.controller.heard))
        assert harness.controller.heard[-1] == ProbeResult(trouble="a process ended as killed: killed by signal 7")
        assert harness.controller.phases() == {}
        assert ("forget", "_fray.probe-1:0:0") in harness.launcher.calls


async def test_a_process_that_does_not_end_is_what_is_wrong(autojump_clock: Any) -> None:
    async with open_harness(FakeLauncher(ends_on_stop=False)) as harness:
        harness.controller.channels[-1].send_nowait(Kind.REQUEST, 1, encode_message(Probe()))
        await harness.controller.until(lambda: any(isinstance(one, ProbeResult) for one in harness.controller.heard))
        assert harness.controller.heard[-1] == ProbeResult(trouble="the test of a process timed out after 20 s")


# Leaving -------------------------------------------------------------------------------------------------------------


async def test_a_node_that_leaves_stops_reports_and_says_goodbye(autojump_clock: Any) -> None:
    async with open_harness() as harness:
        harness.controller.want(desired_attempt("a"))
        await harness.controller.until_phases(a="running")
        harness.leave.set()
        await harness.over.wait()
        assert ("stop", "a") in harness.launcher.calls
        outcome = harness.controller.known()["a"].outcome
        assert outcome is not None
        assert (outcome.cause, outcome.message) == (EndReason.PREEMPTED, "node node-a leaves the cluster; by SIGTERM")
        assert harness.controller.heard[-1] == NodeGoodbye(reason="node node-a leaves the cluster")
        assert harness.error is None


async def test_a_node_that_leaves_starts_nothing_more(autojump_clock: Any) -> None:
    launcher = FakeLauncher(ends_on_stop=False)
    async with open_harness(launcher) as harness:
        harness.controller.want(desired_attempt("a"))
        await harness.controller.until_phases(a="running")
        harness.leave.set()
        await harness.controller.until_phases(a="stopping")
        harness.controller.want(desired_attempt("b"), full=False)
        await trio.sleep(5)
        launcher.end("a", Outcome(cause=EndReason.STOPPED))
        await harness.over.wait()
        assert ("start", "b") not in launcher.calls


async def test_a_node_that_leaves_says_so_first_and_gives_what_it_runs_its_time(autojump_clock: Any) -> None:
    async with open_harness(drain_s=60.0) as harness:
        harness.controller.want(desired_attempt("a"), desired_attempt("b"))
        await harness.controller.until_phases(a="running", b="running")
        began = trio.current_time()
        harness.leave.set()
        await trio.sleep(10)
        assert NodeLeaves(finish_s=60.0, reason="it was shut down") in harness.controller.heard
        harness.launcher.end("a", Outcome(cause=EndReason.SUCCEEDED))
        await harness.over.wait()
        assert trio.current_time() - began == pytest.approx(60, abs=0.1)
        assert [outcome.cause for outcome in harness.controller.outcomes("a", "b")] == ["succeeded", "preempted"]


async def test_a_node_that_leaves_goes_as_soon_as_nothing_runs_there(autojump_clock: Any) -> None:
    async with open_harness(drain_s=60.0) as harness:
        began = trio.current_time()
        harness.leave.set()
        await harness.over.wait()
        assert trio.current_time() - began < 1


async def test_a_node_may_leave_while_there_is_no_controller(autojump_clock: Any) -> None:
    async with open_harness() as harness:
        harness.controller.want(desired_attempt("a"))
        await harness.controller.until_phases(a="running")
        harness.scope.cancel()
        harness.leave.set()
        await harness.over.wait()
        assert ("stop", "a") in harness.launcher.calls


async def test_a_node_that_leaves_while_it_reconnects_says_goodbye_to_the_new_controller(autojump_clock: Any) -> None:
    # Seed 31119 of the simulator: else the controller would take it for silent, until its lease expires.
    async with open_harness() as harness:
        harness.scope.cancel()
        await trio.sleep(0.1)
        harness.leave.set()
        await trio.sleep(0.1)
        harness.controller.epoch, harness.controller.revision = 2, 0
        await harness.serve()
        await harness.over.wait()
        assert harness.controller.heard[-1] == NodeGoodbye(reason="node node-a leaves the cluster")


async def test_a_node_may_leave_before_it_ever_joined(autojump_clock: Any) -> None:
    async with trio.open_nursery() as nursery:
        rng = random.Random(1)
        harness = NodeHarness(MemoryNetwork(rng=rng), FakeController(rng), FakeLauncher(), trio.Event(), nursery)
        nursery.start_soon(harness.be_node)
        await trio.sleep(10)
        harness.leave.set()
        await harness.over.wait()


async def test_a_node_ends_with_the_process_it_belongs_to() -> None:
    parent = await trio.lowlevel.open_process(["true"])
    async with trio.open_nursery() as nursery:
        rng = random.Random(1)
        harness = NodeHarness(MemoryNetwork(rng=rng), FakeController(rng), FakeLauncher(), trio.Event(), nursery)
        await harness.be_node(parent_pid=parent.pid)
        assert harness.over.is_set()
    await parent.wait()
    await wait_process_end(parent.pid)
