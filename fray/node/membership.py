"""A node as a member of a cluster: the wanted set comes down, the observed set goes up, `decide` is between them.

Law. What the node holds changes only by what the launcher tells and by forgetting what is not wanted; what it wants
only by `Wanted` messages no older than the last. Both sets are complete, so nothing that is lost needs a repair.
A membership is one incarnation: when its channel ends, all it holds is ended before the next one begins.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import trio
from attrs import evolve

from fray.errors import ChannelClosed, ChannelFull, FrayError
from fray.model.ids import AttemptId, BlobId
from fray.model.log_records import LogChunk
from fray.model.messages.client import ControllerHello
from fray.model.messages.node import (
    AttemptAnnotation,
    CaptureRequest,
    DesiredState,
    NodeDetails,
    NodeHello,
    StackCapture,
    short,
)
from fray.model.monitoring.attempt_metrics import cut
from fray.model.monitoring.progress_protocol import Said
from fray.model.resources import Capacity
from fray.model.specs import AttemptSpec, DesiredAttempt, EndReason, ObservedAttempt, Outcome, Phase
from fray.net.channel.public import Channel
from fray.net.channel.requests import Requests
from fray.net.channel.session import STALE_S
from fray.net.codec import Kind, blob_id, decode_message, encode_message
from fray.net.transport import Bytes
from fray.node import secrets
from fray.node.config import NodeConfig
from fray.node.controller_requests import ControllerRequests
from fray.node.health.metrics_report import MetricsReporter
from fray.node.health.monitor import HealthMonitor
from fray.node.launcher import Furnished, Launcher, Particular, Withholding
from fray.node.logs.push import LogPusher
from fray.node.port_tunnels import Forwards
from fray.node.reconcile import Action, Decline, Forget, Kill, Start, Stop, decide
from fray.node.self_test import SelfTest
from fray.node.state_reports import PendingReports

TELL_EVERY_S = 5.0
"""How often it looks whether there is news of itself for people."""

log = logging.getLogger("fray.node")


class ClusterMembership:
    """One incarnation of a node: handler of its channel, and hands of its launcher."""

    def __init__(self, config: NodeConfig, launcher: Launcher, incarnation: str) -> None:
        self.config, self.incarnation = config, incarnation
        self.wanted: dict[AttemptId, DesiredAttempt] = {}
        self.held: dict[AttemptId, ObservedAttempt] = {}
        self.channel: Channel | None = None
        self.leaving: str | None = None
        """Why nothing new is started any more."""
        self.vitals = MetricsReporter()
        self.wards = HealthMonitor(launcher, self, self.vitals)
        self._requests: Requests | None = None
        self._launcher = launcher
        self._condemned: dict[AttemptId, str] = {}
        self.probes = SelfTest(config, launcher)
        self.answers = ControllerRequests(launcher.logs, self.probes.probe)
        self._payloads: dict[BlobId, bytes] = {}
        self._cluster_vars: dict[str, str] = {}
        self._newest = (0, 0)
        self._reports = PendingReports(self.held)
        self.pushed = LogPusher()
        self._forgotten = trio.Event()
        """The controller knows nothing of what was told before."""
        self._wake = trio.Event()
        self._moving = trio.lowlevel.ParkingLot()
        self.forwards = Forwards(lambda: self.wanted, config.advertise)

    def __repr__(self) -> str:
        return f"<Member {self.config.name} ({self.incarnation}): {len(self.wanted)} wanted, {len(self.held)} held>"

    def greeting(self) -> bytes:
        config = self.config
        hello = NodeHello(
            node=config.name,
            incarnation=self.incarnation,
            boot_id=config.boot_id,
            capacity=self._capacity(),
            host=config.advertise,
            process=config.process,
            holds=tuple(self.held),
            secrets=secrets.names(config.secrets_dir),
            lease_s=config.lease_s,
            log_archive=config.logs.archive,
            busy=self._busy(),
        )
        return encode_message(hello)

    def _capacity(self) -> Capacity:
        """As configured, with what its launcher says of itself."""
        capacity = self.config.capacity
        if not isinstance(self._launcher, Furnished):
            return capacity
        return evolve(capacity, attributes={**self._launcher.attributes(), **capacity.attributes})

    def _busy(self) -> dict[str, str]:
        return self._launcher.busy if isinstance(self._launcher, Withholding) else {}

    @property
    def in_doubt(self) -> bool:
        """This machine was stopped for minutes: what it holds may live elsewhere by now, and nothing of it begins here
        before the controller is heard again."""
        return self.channel is not None and self.channel.in_doubt

    # The channel's handler

    def attach(self, channel: Channel) -> ClusterMembership:
        self.channel, self._requests = channel, Requests(channel)
        channel.stale_s = STALE_S
        self.forwards.attach(channel)
        return self

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        if self._requests is not None and self._requests.on_frame(kind, flags, target, ref, body):
            return
        if self.forwards.on_frame(kind, flags, target, ref, body):
            return
        if kind == Kind.REQUEST:
            self.answers.on_request(ref, body)
        elif kind == Kind.NOTICE:
            message, blobs = decode_message(body)
            if isinstance(message, DesiredState):
                self._on_wanted(message, blobs)
            elif isinstance(message, CaptureRequest):
                self._on_capture_asked(message)

    def on_batch(self) -> None:
        pass

    def on_reset(self, greeting: bytes) -> None:
        hello, _ = decode_message(greeting)
        epoch = hello.epoch if isinstance(hello, ControllerHello) else 0
        self._cluster_vars = hello.env_vars if isinstance(hello, ControllerHello) else {}
        log.info("joined the cluster", extra={"controller": self.config.controller, "epoch": epoch})
        self.forwards.on_lost("the controller was restarted")
        self._newest = max(self._newest, (epoch, 0))
        if self._requests is not None:
            self._requests.on_reset()
        self._reports.tell_all()
        self._wake.set()
        self._forgotten.set()
        self.vitals.tell_again()

    def on_suspended(self, why: str) -> None:
        log.warning("lost the controller, dialling again", extra={"why": why})

    def on_resumed(self) -> None:
        log.info("the controller is back", extra={"controller": self.config.controller})

    def on_end(self, error: FrayError) -> None:
        if self._requests is not None:
            self._requests.on_end(error)
        self.forwards.on_lost(f"the conversation with the controller has ended: {error}")
        self._wake.set()
        self._moving.unpark_all()

    # Down

    def _on_wanted(self, message: DesiredState, blobs: Sequence[Bytes]) -> None:
        if (message.epoch, message.revision) < self._newest:
            return
        self._newest = (message.epoch, message.revision)
        if message.full:
            self.wanted = {}
        for attempt_id in message.gone:
            self.wanted.pop(attempt_id, None)
        self.wanted.update((wish.attempt_id, wish) for wish in message.wishes)
        self._payloads = {blob_id(blob): bytes(blob) for blob in blobs}
        self._reconcile()
        self._payloads = {}

    def _reconcile(self) -> None:
        for action in decide(self.wanted, self.held):
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case Start(wish) if self.leaving is None:
                self._start(wish)
            case Decline(wish):
                self._settle(wish, Outcome(cause=wish.stop_cause, message="stopped before it started"))
            case Stop(attempt_id, notice_s):
                self._launcher.stop(attempt_id, notice_s)
            case Kill(attempt_id):
                self._launcher.kill(attempt_id)
            case Forget(attempt_id):
                self._forget(attempt_id)

    def _start(self, wish: DesiredAttempt) -> None:
        payload = self._payloads.get(wish.spec.payload) if wish.spec.payload is not None else None
        if wish.spec.payload is not None and payload is None:
            lost = f"node {self.config.name} has not been sent its payload"
            self._settle(wish, Outcome(cause=EndReason.MACHINE_LOST, message=lost))
            return
        known = self._secrets(wish)
        unknown = sorted(set(wish.spec.secrets.values()) - set(known))
        if unknown:
            text = f"node {self.config.name} does not know the secret {', '.join(unknown)}; its author did not bring it"
            self._settle(wish, Outcome(cause=EndReason.ENVIRONMENT, message=text))
            return
        self.held[wish.attempt_id] = ObservedAttempt(attempt_id=wish.attempt_id, phase=Phase.STARTING)
        self._launcher.start(self._ticket(wish, known), payload)

    def _secrets(self, wish: DesiredAttempt) -> dict[str, str]:
        """By name: as this node's operator says, else as the author does."""
        found = {name: secrets.read(self.config.secrets_dir, name) for name in wish.spec.secrets.values()}
        return {**wish.secrets, **{name: value for name, value in found.items() if value is not None}}

    def _ticket(self, wish: DesiredAttempt, known: dict[str, str]) -> AttemptSpec:
        return AttemptSpec(
            attempt_id=wish.attempt_id,
            spec=wish.spec,
            controller=self.config.controller,
            key=wish.key,
            node=self.config.name,
            advertise=self.config.advertise,
            networked=self.config.networked,
            devices=wish.devices,
            ports=wish.ports,
            peers=wish.peers,
            mates={role: roster.peers() for role, roster in wish.mates.items()},
            cluster_vars=self._cluster_vars,
            secrets=known,
        )

    def _settle(self, wish: DesiredAttempt, outcome: Outcome) -> None:
        """An attempt that ends without having been started."""
        self._observe(ObservedAttempt(attempt_id=wish.attempt_id, phase=Phase.ENDED, outcome=outcome))

    def _forget(self, attempt_id: AttemptId) -> None:
        self._launcher.forget(attempt_id)
        del self.held[attempt_id]
        self.pushed.forget(attempt_id)
        self._condemned.pop(attempt_id, None)
        self.vitals.forget(attempt_id)
        self._reports.forget(attempt_id)
        self._wake.set()

    # What the launcher tells

    def on_observed(self, observed: ObservedAttempt, value: bytes | None) -> None:
        """A phase has changed. Nothing is done about it here: the launcher may be in the middle of something."""
        if observed.attempt_id not in self.held:
            self.probes.on_observed(observed)
            return
        if value is not None:
            self._reports.keep(observed.attempt_id, value)
        self._watch_over(observed)
        self._observe(evolve(observed, outcome=self._with_stacks(observed.attempt_id, self._with_cause(observed))))

    def _with_cause(self, observed: ObservedAttempt) -> Outcome | None:
        """Launchers know that they stopped an attempt, not what for."""
        outcome, wish = observed.outcome, self.wanted.get(observed.attempt_id)
        if outcome is None or outcome.cause is not EndReason.STOPPED:
            return outcome
        if wish is not None and wish.stop:
            return evolve(outcome, cause=wish.stop_cause)
        if observed.attempt_id in self._condemned:
            return evolve(outcome, cause=EndReason.FAILURE, message=self._condemned[observed.attempt_id])
        if self.leaving is not None:
            return evolve(outcome, cause=EndReason.PREEMPTED, message=f"{self.leaving}; {outcome.message}")
        return outcome

    def on_busy(self) -> None:
        """Devices have become busy, or free."""
        self._wake.set()

    def _observe(self, observed: ObservedAttempt) -> None:
        self.held[observed.attempt_id] = observed
        if observed.phase is Phase.ENDED:
            self.forwards.end(observed.attempt_id)
        self._reports.move(observed.attempt_id)
        self._wake.set()
        self._moving.unpark_all()

    def on_log(self, attempt_id: AttemptId, chunk: LogChunk) -> None:
        """It has printed these lines, which are pushed to the controller if somebody follows."""
        if self._is_followed(attempt_id):
            self.pushed.push(self.channel, attempt_id, chunk)

    def _is_followed(self, attempt_id: AttemptId) -> bool:
        wish = self.wanted.get(attempt_id)
        return wish is not None and wish.followed

    async def tell_of_itself(self, channel: Channel) -> None:
        """What people want to know of this node: once it has joined, and whenever that is something else by now."""
        launcher, told = self._launcher, dict[str, str]()
        if not isinstance(launcher, Particular):
            return
        while channel.error is None:
            if self._forgotten.is_set():
                self._forgotten, told = trio.Event(), {}
            found = short(await launcher.particulars())
            if found != told and channel.connected:
                told = found
                self.tell(NodeDetails(told=told))
            with trio.move_on_after(TELL_EVERY_S):
                await self._forgotten.wait()

    # Watching over them

    def on_said(self, attempt_id: AttemptId, said: Said) -> None:
        """A process of the attempt has said something of itself."""
        if attempt_id in self.held:
            self.wards.said(attempt_id, said)

    def _watch_over(self, observed: ObservedAttempt) -> None:
        wish = self.wanted.get(observed.attempt_id)
        if observed.phase is Phase.RUNNING and wish is not None:
            self.wards.began(observed.attempt_id, wish.spec, health_port(wish))
        elif observed.phase is not Phase.STARTING:
            self.wards.ended(observed.attempt_id)

    def condemn(self, attempt_id: AttemptId, message: str) -> None:
        """End it as a failure, unless its end has begun."""
        one, wish = self.held.get(attempt_id), self.wanted.get(attempt_id)
        if one is not None and one.phase is Phase.RUNNING and wish is not None and not wish.stop:
            log.warning("%s: %s", attempt_id, message)
            self._condemned[attempt_id] = message
            self._launcher.stop(attempt_id)

    def note(self, attempt_id: AttemptId, what: str, text: str) -> None:
        """For the story of its job; what the controller cannot be told now, it is not told."""
        self.tell(AttemptAnnotation(attempt_id=attempt_id, what=what, text=text))

    def _with_stacks(self, attempt_id: AttemptId, outcome: Outcome | None) -> Outcome | None:
        if outcome is None or outcome.captured:
            return outcome
        return evolve(outcome, captured=self.vitals.captured(attempt_id))

    def _on_capture_asked(self, asked: CaptureRequest) -> None:
        def tell(attempt_id: AttemptId, text: str) -> None:
            self.tell(StackCapture(ref=asked.ref, attempt_id=attempt_id, text=cut(text, asked.limit_bytes)))

        known = [attempt_id for attempt_id in asked.attempts if attempt_id in self.held]
        for attempt_id in asked.attempts:
            if attempt_id not in known:
                tell(attempt_id, f"[fray] node {self.config.name} does not run it (any more)")
        self.wards.look_for(known, tell)

    def tell(self, message: object) -> None:
        """A notice to the controller, unless the conversation is over or full."""
        if self.channel is not None:
            try:
                self.channel.notice(message)
            except (ChannelClosed, ChannelFull):
                pass

    async def ask(self, message: object) -> tuple[Any, Sequence[Bytes]]:
        """A request to the controller; it waits while there is no connection, and ends with this membership.

        Raises:
            FrayError: what it answered, or why the conversation has ended.
        """
        if self._requests is None:
            raise ChannelClosed("this node is no member of a cluster yet", reason="closed")
        return await self._requests.request(message)

    # Up

    async def report(self, channel: Channel) -> None:
        """Decide and report whenever something has moved, until the channel has ended."""
        try:
            while channel.error is None:
                await self._wake.wait()
                self._wake = trio.Event()
                self._reconcile()
                while channel.error is None and self._reports.waiting(self._busy()):
                    await channel.wait_room()
                    self._send_report(channel)
        except ChannelClosed:
            pass

    def _send_report(self, channel: Channel) -> None:
        report, values, ended = self._reports.next(self._busy())
        for attempt_id in ended:
            self.pushed.push_over(channel, attempt_id, followed=self._is_followed(attempt_id))
        self.vitals.send(channel, ended)
        channel.notice(report, values)
        self._moving.unpark_all()

    # The end

    async def end_all(self, *, kill: bool) -> None:
        """End everything held, by the ladder or at once, and wait until it has ended."""
        for attempt_id in self._living():
            (self._launcher.kill if kill else self._launcher.stop)(attempt_id)
        await self.wait_idle()

    async def wait_idle(self) -> None:
        """Nothing that it holds lives."""
        while self._living():
            await self._moving.park()

    def _living(self) -> Iterable[AttemptId]:
        return [one.attempt_id for one in self.held.values() if one.phase is not Phase.ENDED]

    def forget_all(self) -> None:
        """Nobody will ask for what has ended here."""
        for attempt_id in list(self.held):
            self._forget(attempt_id)

    async def wait_reported(self) -> None:
        """All that has moved was sent (or its channel has ended)."""
        while self._reports.moved and self.channel is not None and self.channel.error is None:
            await self._moving.park()


def health_port(wish: DesiredAttempt) -> int:
    """Where the attempt's health is asked for; 0 if it has no such port."""
    check = wish.spec.health
    return wish.ports.get(check.port, 0) if check is not None and check.path is not None else 0
