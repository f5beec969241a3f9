"""Membership of a node in a cluster: receives the desired attempts, reports the observed ones, reconciles the two.

Invariants: the held attempts change only by what the launcher reports and by forgetting attempts that are no longer
desired; the desired attempts change only by `DesiredState` messages that are not older than the last. Both sets are
complete, so a lost message needs no repair. A membership is one incarnation: when its channel ends, all its attempts
are ended before the next one begins.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

import trio
from attrs import evolve

from fray.errors import ChannelClosed, ChannelFull, FrayError, Unsupported
from fray.model.ids import AttemptId, BlobId
from fray.model.messages.client import ControllerHello
from fray.model.messages.node import (
    CLOCK_OFFSET,
    AttemptAnnotation,
    CaptureRequest,
    DesiredState,
    NodeDetails,
    NodeHello,
    NodeMoved,
    StackCapture,
    truncate_details,
)
from fray.model.monitoring.attempt_metrics import truncate_middle
from fray.model.monitoring.progress_protocol import AttemptReport
from fray.model.resources import Capacity
from fray.model.specs import AttemptSpec, DesiredAttempt, EndReason, ObservedAttempt, Outcome, Phase
from fray.net.channel.public import Channel
from fray.net.channel.requests import Requests
from fray.net.channel.session import STALE_S
from fray.net.codec import Kind, blob_id, decode_message, encode_message
from fray.net.own_address import own_address
from fray.net.transport import Bytes
from fray.node import secrets
from fray.node.certificate import NodeCertificate
from fray.node.config import NodeConfig
from fray.node.controller_requests import ControllerRequests
from fray.node.handover.state import NodeHandover
from fray.node.health.metrics_report import MetricsReporter
from fray.node.health.monitor import HealthMonitor
from fray.node.launcher import Launcher
from fray.node.logs.push import LogPusher
from fray.node.port_tunnels import PortTunnels
from fray.node.reconcile import Action, Decline, Forget, Kill, Start, Stop, decide
from fray.node.self_test import SelfTest
from fray.node.state_reports import PendingReports

CLOCK_NOTICED_S = 20.0
"""Difference of the clocks of node and controller from which on it is reported."""
REPORT_EVERY_S = 5.0
"""Seconds between checks whether the node's details have changed."""

log = logging.getLogger("fray.node")


class ClusterMembership:
    """One incarnation of a node: handler of its channel to the controller, and caller of its launcher."""

    def __init__(
        self, config: NodeConfig, launcher: Launcher, incarnation: str, certificate: NodeCertificate | None = None
    ) -> None:
        self.config, self.incarnation, self.certificate = config, incarnation, certificate
        self.wanted: dict[AttemptId, DesiredAttempt] = {}
        self.held: dict[AttemptId, ObservedAttempt] = {}
        self.channel: Channel | None = None
        self.leaving: str | None = None
        """Reason for leaving the cluster; no attempt is started then."""
        self.is_replaced = False
        """True while another program is about to continue in this process; no attempt is started then."""
        self.patience_s = config.patience_s
        self._knows_desired = True
        self.metrics = MetricsReporter()
        self.health_monitor = HealthMonitor(launcher, self, self.metrics)
        self._requests: Requests | None = None
        self._launcher = launcher
        self._busy = launcher.busy
        self._failures: dict[AttemptId, str] = {}
        self.self_test = SelfTest(config, launcher)
        self.controller_requests = ControllerRequests(launcher.logs, self.self_test.probe)
        self._payloads: dict[BlobId, bytes] = {}
        self._cluster_vars: dict[str, str] = {}
        self._controller_clock: float | None = None
        """Time of the controller at the zero of Trio's clock; None: unknown."""
        self._latest_revision = (0, 0)
        self._reports = PendingReports(self.held)
        self.log_pusher = LogPusher()
        self._controller_reset = trio.Event()
        """Set when the channel was reset: the controller has no state of this node, so all of it is sent again."""
        self._wake = trio.Event()
        self._moving = trio.lowlevel.ParkingLot()
        self.advertise = config.advertise
        """Host or IP address under which other machines reach this one now."""
        self.tunnels = PortTunnels(lambda: self.wanted, lambda: self.advertise, launcher.start_command)

    def adopt(self, handover: NodeHandover) -> None:
        """Continue the membership of the program that ran in this process before; before it is dialed."""
        # What runs is not desired until the controller has said so, and ends only then.
        self._knows_desired = False
        self._failures = dict(handover.failures)
        # The lease counts from the last message to the program before.
        self.patience_s = max(0.0, self.patience_s - (time.monotonic() - handover.heard_at))
        for one in handover.launcher.attempts:
            attempt_id = one.attempt_spec.attempt_id
            self.held[attempt_id] = ObservedAttempt(attempt_id=attempt_id, phase=one.phase, pid=one.pid)
            self.log_pusher.adopt(attempt_id, one.log[0] if one.log is not None else 0)

    def reconcile_soon(self) -> None:
        """Compare desired and held attempts again, as after a change."""
        self._wake.set()

    @property
    def failures(self) -> dict[AttemptId, str]:
        """Attempts that are being stopped as failed, and why."""
        return dict(self._failures)

    def __repr__(self) -> str:
        wanted, held = len(self.wanted), len(self.held)
        return f"<ClusterMembership {self.config.name} ({self.incarnation}): {wanted} wanted, {held} held>"

    def greeting(self) -> bytes:
        config = self.config
        hello = NodeHello(
            node=config.name,
            incarnation=self.incarnation,
            boot_id=config.boot_id,
            state_id=config.state_id,
            capacity=self._capacity(),
            host=self.advertise,
            process=config.process,
            # Attempts that survived a restart of the controller: their payloads are not sent again.
            known_payloads=tuple(self.held),
            secrets=secrets.names(config.secrets_dir),
            lease_s=config.lease_s,
            log_archive=config.logs.archive,
            # Complete from the first message on, so that the scheduler assigns none of these devices.
            busy=self._busy,
        )
        return encode_message(hello)

    def _capacity(self) -> Capacity:
        """Return the configured capacity with the attributes of the launcher."""
        capacity = self.config.capacity
        # The operator's attributes override what the launcher has found.
        return evolve(capacity, attributes={**self._launcher.attributes(), **capacity.attributes})

    @property
    def in_doubt(self) -> bool:
        """Return whether this machine was suspended for minutes: its attempts may run elsewhere by now, so none starts
        before the controller is heard again."""
        return self.channel is not None and self.channel.in_doubt

    # The channel's handler

    def attach(self, channel: Channel) -> ClusterMembership:
        self.channel, self._requests = channel, Requests(channel)
        self.log_pusher.channel = channel
        # A node that was suspended must not execute the orders that waited in its socket: they may be obsolete for
        # minutes, and the attempts may run elsewhere.
        channel.stale_s = STALE_S
        self.tunnels.attach(channel)
        return self

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        if kind == Kind.NOTICE:
            message, blobs = decode_message(body)
            if isinstance(message, DesiredState):
                self._on_desired_state(message, blobs)
            elif isinstance(message, CaptureRequest):
                self._on_capture_request(message)
        elif kind == Kind.REQUEST:
            self.controller_requests.on_request(ref, body)
        elif self._requests is not None and self._requests.on_frame(kind, flags, target, ref, body):
            pass
        else:
            self.tunnels.on_frame(kind, flags, target, ref, body)

    def on_batch(self) -> None:
        pass

    def on_reset(self, greeting: bytes) -> None:
        hello, _ = decode_message(greeting)
        epoch = hello.epoch if isinstance(hello, ControllerHello) else 0
        # Measured against the monotonic clock from here on, so that a clock of the wall that is set later is noticed.
        now = hello.now if isinstance(hello, ControllerHello) else 0.0
        self._controller_clock = now - trio.current_time() if now else None
        self._cluster_vars = hello.env_vars if isinstance(hello, ControllerHello) else {}
        log.info(
            "node %s joined the cluster at %s",
            self.config.name,
            self.config.controller,
            extra={"node": self.config.name, "controller": self.config.controller, "epoch": epoch},
        )
        # The new controller process knows neither these tunnels nor their numbers.
        self.tunnels.on_lost("the controller was restarted")
        # Revisions start again with each epoch; a message of an earlier epoch is refused from here on.
        self._latest_revision = max(self._latest_revision, (epoch, 0))
        if self._requests is not None:
            # Sent again under the same ids: the controller may have accepted them, or not.
            self._requests.on_reset()
        self._find_address()
        self._reports.report_all()
        self._wake.set()
        self._moving.unpark_all()
        self._controller_reset.set()
        self.metrics.resend_all()

    def on_suspended(self, why: str) -> None:
        name = self.config.name
        log.warning("node %s: connection to the controller lost, reconnecting: %s", name, why, extra={"node": name})

    def on_resumed(self) -> None:
        log.info("node %s: connection to the controller restored", self.config.name, extra={"node": self.config.name})
        self._find_address()
        self._moving.unpark_all()

    def _find_address(self) -> None:
        """Advertise the address from which the controller sees this machine now, unless one was given."""
        found = own_address(self.channel.seen_from) if self.config.finds_address and self.channel is not None else ""
        if found and found != self.advertise:
            log.info("node %s: other machines reach it at %s now, not at %s", self.config.name, found, self.advertise)
            self.advertise = found
            self.notify(NodeMoved(host=found))

    def on_end(self, error: FrayError) -> None:
        if self._requests is not None:
            self._requests.on_end(error)
        self.tunnels.on_lost(f"the channel to the controller has ended: {error}")
        self._wake.set()
        self._moving.unpark_all()

    # Desired state

    def _on_desired_state(self, message: DesiredState, blobs: Sequence[Bytes]) -> None:
        # Equal ones are executed again, which is harmless: reconciliation is idempotent.
        if (message.epoch, message.revision) < self._latest_revision:
            return
        self._latest_revision = (message.epoch, message.revision)
        # The complete set comes once per connection, differences after it.
        if message.full:
            self.wanted = {}
        for attempt_id in message.removed:
            self.wanted.pop(attempt_id, None)
        self.wanted.update((desired.attempt_id, desired) for desired in message.desired)
        if not self._knows_desired and message.full:
            self._knows_desired = True
            for observed in self.held.values():
                self._update_monitor(observed)
        # Only while this message is handled: nothing else starts these attempts, and payloads have up to 8 MiB each.
        self._payloads = {blob_id(blob): bytes(blob) for blob in blobs}
        self._reconcile()
        self._payloads = {}

    def _reconcile(self) -> None:
        if self._knows_desired:
            for action in decide(self.wanted, self.held):
                self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            # A node that leaves starts nothing; the controller places the attempt elsewhere when it has read the
            # goodbye.
            case Start(desired) if self.leaving is None and not self.is_replaced:
                self._start(desired)
            case Decline(desired):
                self._end_unstarted(desired, Outcome(cause=desired.stop_cause, message="stopped before it started"))
            case Stop(attempt_id, notice_s):
                self._launcher.stop(attempt_id, notice_s)
            case Kill(attempt_id):
                self._launcher.kill(attempt_id)
            case Forget(attempt_id):
                self._forget(attempt_id)

    def _start(self, desired: DesiredAttempt) -> None:
        # A large payload does not come with the message: the launcher fetches it.
        payload = self._payloads.get(desired.spec.payload) if desired.spec.payload is not None else None
        known = self._secrets(desired)  # values of this node win: its operator knows the machine better than a driver
        unknown = sorted(set(desired.spec.secrets.values()) - set(known))
        if unknown:
            # A cause that is not retried: the operator or the author has to provide it first.
            text = f"secret {', '.join(unknown)} is neither on node {self.config.name} nor passed by the driver"
            self._end_unstarted(desired, Outcome(cause=EndReason.ENVIRONMENT, message=text))
            return
        # Before the start: the launcher may report an end within this call (a full disk), and reports of attempts that
        # are not held are ignored.
        self.held[desired.attempt_id] = ObservedAttempt(attempt_id=desired.attempt_id, phase=Phase.STARTING)
        self._launcher.start(self._make_attempt_spec(desired, known), payload)

    def _secrets(self, desired: DesiredAttempt) -> dict[str, str]:
        """Return the secrets by name: this node's values take precedence over the driver's."""
        found = {name: secrets.read(self.config.secrets_dir, name) for name in desired.spec.secrets.values()}
        return {**desired.secrets, **{name: value for name, value in found.items() if value is not None}}

    def _make_attempt_spec(self, desired: DesiredAttempt, known: dict[str, str]) -> AttemptSpec:
        return AttemptSpec(
            attempt_id=desired.attempt_id,
            spec=desired.spec,
            controller=self.certificate.address if self.certificate is not None else self.config.controller,
            key=desired.key,
            node=self.config.name,
            advertise=self.advertise,
            finds_address=self.config.finds_address,
            networked=self.config.networked,
            devices=desired.devices,
            ports=desired.ports,
            members=desired.members,
            group_members={role: roster.members() for role, roster in desired.group_members.items()},
            cluster_vars=self._cluster_vars,
            secrets=known,
        )

    def _end_unstarted(self, desired: DesiredAttempt, outcome: Outcome) -> None:
        """End an attempt that was not started."""
        self._observe(ObservedAttempt(attempt_id=desired.attempt_id, phase=Phase.ENDED, outcome=outcome))

    def _forget(self, attempt_id: AttemptId) -> None:
        self._launcher.forget(attempt_id)
        del self.held[attempt_id]
        self.log_pusher.forget(attempt_id)
        self._failures.pop(attempt_id, None)
        if attempt_id in self.metrics.latest:
            self.metrics.forget(attempt_id)
        self._reports.forget(attempt_id)
        self._wake.set()

    # Reports of the launcher

    def on_observed(self, observed: ObservedAttempt, value: bytes | None) -> None:
        """Record a changed phase. It never calls the launcher, which may be in the middle of a change."""
        if observed.attempt_id not in self.held:
            self.self_test.on_observed(observed)
            return
        # Stored before the end is marked as changed: both go out in one message.
        if value is not None:
            self._reports.add_value(observed.attempt_id, value)
        self._update_monitor(observed)
        self._observe(evolve(observed, outcome=self._with_stacks(observed.attempt_id, self._with_cause(observed))))

    def _with_cause(self, observed: ObservedAttempt) -> Outcome | None:
        """Return the outcome with the cause of a stop: launchers report that they stopped an attempt, not why."""
        outcome, desired = observed.outcome, self.wanted.get(observed.attempt_id)
        if outcome is None or outcome.cause is not EndReason.STOPPED:
            return outcome
        # The controller's reason first: only it knows a cancellation from a preemption or a time limit.
        if desired is not None and desired.stop:
            return evolve(outcome, cause=desired.stop_cause)
        if observed.attempt_id in self._failures:
            return evolve(outcome, cause=EndReason.FAILURE, message=self._failures[observed.attempt_id])
        if self.leaving is not None:
            return evolve(outcome, cause=EndReason.PREEMPTED, message=f"{self.leaving}; {outcome.message}")
        return outcome

    def on_busy(self) -> None:
        """Report to the controller that devices have become busy or free."""
        self._busy = self._launcher.busy
        self._wake.set()

    def _observe(self, observed: ObservedAttempt) -> None:
        self.held[observed.attempt_id] = observed
        if observed.phase is Phase.ENDED and observed.attempt_id in self.tunnels.open:
            has_succeeded = observed.outcome is not None and observed.outcome.cause is EndReason.SUCCEEDED
            # A job may send its last answer right before it succeeds. After any other end, clients should notice it at
            # once.
            self.tunnels.end(observed.attempt_id, linger=has_succeeded)
        self._reports.mark_changed(observed.attempt_id)
        self._wake.set()
        self._moving.unpark_all()

    async def report_details(self, channel: Channel) -> None:
        """Send the details of this node for users: once it has joined, and whenever they have changed."""
        sent: dict[str, str] = {}
        while channel.error is None:
            if self._controller_reset.is_set():
                self._controller_reset, sent = trio.Event(), {}
            details = await self._launcher.details()
            if details is None:
                return
            found = truncate_details(details | self._clock_details())
            # Without a connection they would wait in the channel, and be out of date when they arrive.
            if found != sent and channel.connected:
                sent = found
                self.notify(NodeDetails(details=found))
            # Polled: details come from many places, most of which change without an event.
            with trio.move_on_after(REPORT_EVERY_S):
                await self._controller_reset.wait()

    def _clock_details(self) -> dict[str, str]:
        # A controller of an earlier version does not send its time. Small offsets are left out: each change is sent.
        if self._controller_clock is None:
            return {}
        offset_s = time.time() - (self._controller_clock + trio.current_time())
        return {CLOCK_OFFSET: f"{offset_s:.0f} s"} if abs(offset_s) >= CLOCK_NOTICED_S else {}

    # Health

    def on_report(self, attempt_id: AttemptId, report: AttemptReport) -> None:
        """Pass on a report of a process of the attempt."""
        if attempt_id in self.held:
            self.health_monitor.on_report(attempt_id, report)

    def _update_monitor(self, observed: ObservedAttempt) -> None:
        desired = self.wanted.get(observed.attempt_id)
        if desired is not None and desired.spec.health is None and desired.spec.stall_s is None:
            return  # the monitor has nothing to watch
        if observed.phase is Phase.RUNNING and desired is not None:
            self.health_monitor.on_running(observed.attempt_id, desired.spec, health_port(desired))
        elif observed.phase is not Phase.STARTING:
            self.health_monitor.on_ending(observed.attempt_id)

    def fail_attempt(self, attempt_id: AttemptId, message: str) -> None:
        """Stop an attempt and record it as a failure, unless it is ending already."""
        observed, desired = self.held.get(attempt_id), self.wanted.get(attempt_id)
        # An end that has begun keeps its cause.
        if observed is not None and observed.phase is Phase.RUNNING and desired is not None and not desired.stop:
            log.warning("%s: %s", attempt_id, message)
            self._failures[attempt_id] = message
            self._launcher.stop(attempt_id)

    def annotate(self, attempt_id: AttemptId, what: str, text: str) -> None:
        """Add an event to the history of its job; it is dropped if it cannot be sent now."""
        self.notify(AttemptAnnotation(attempt_id=attempt_id, what=what, text=text))

    def _with_stacks(self, attempt_id: AttemptId, outcome: Outcome | None) -> Outcome | None:
        if outcome is None or outcome.captured or attempt_id not in self.metrics.latest:
            return outcome
        return evolve(outcome, captured=self.metrics.last_capture(attempt_id))

    def _on_capture_request(self, capture_request: CaptureRequest) -> None:
        def send(attempt_id: AttemptId, text: str) -> None:
            self.notify(
                StackCapture(
                    ref=capture_request.ref,
                    attempt_id=attempt_id,
                    text=truncate_middle(text, capture_request.limit_bytes),
                )
            )

        known = [attempt_id for attempt_id in capture_request.attempts if attempt_id in self.held]
        # The controller waits for an answer for each, so those that have ended are answered, too.
        for attempt_id in capture_request.attempts:
            if attempt_id not in known:
                send(attempt_id, f"[fray] not running on node {self.config.name} (any more)")
        self.health_monitor.capture_each(known, send)

    def notify(self, message: object) -> None:
        """Send a notice to the controller, unless the channel has ended or is full, or the
        controller runs an older release."""
        if self.channel is not None:
            try:
                self.channel.notice(message)
            except (ChannelClosed, ChannelFull):
                pass
            except Unsupported as error:
                log.debug("not sent to an older controller: %s", error)

    async def request(self, message: object, blobs: Sequence[Bytes] = (), /) -> tuple[Any, Sequence[Bytes]]:
        """Send a request to the controller. It waits while there is no connection, and ends with this membership.

        Raises:
            FrayError: the controller's error, or the reason why the channel has ended.
        """
        if self._requests is None:
            raise ChannelClosed("this node has not joined a cluster yet", reason="closed")
        return await self._requests.request(message, blobs)

    # Observed state

    async def report(self, channel: Channel) -> None:
        """Reconcile and report after every change, until the channel has ended."""
        try:
            while channel.error is None:
                await self._wake.wait()
                self._wake = trio.Event()
                # Reports change what is to be done: an attempt that has ended and is not desired any more is forgotten
                # here.
                self._reconcile()
                while channel.error is None and self._reports.has_report(self._busy):
                    # Back-pressure: reports wait here, where later changes are merged into them, and not in the
                    # channel.
                    await channel.wait_room()
                    self._send_report(channel)
        except ChannelClosed:
            pass

    def _send_report(self, channel: Channel) -> None:
        report, values, ended = self._reports.next(self._busy)
        # Before the report and on the same channel, which keeps the order: the end of the log and the last metrics
        # reach the controller first.
        for attempt_id in ended:
            self.log_pusher.push_end(channel, attempt_id)
        if self.metrics.latest:
            self.metrics.send(channel, ended)
        channel.notice(report, values)
        self._moving.unpark_all()

    # Leaving

    async def end_all(self, *, kill: bool) -> None:
        """End all attempts, by their termination policy or at once, and wait until they have ended."""
        for attempt_id in self._living():
            (self._launcher.kill if kill else self._launcher.stop)(attempt_id)
        await self.wait_idle()

    async def wait_idle(self) -> None:
        """Wait until all attempts have ended."""
        # The launcher reports an end only when no process is left.
        while self._living():
            await self._moving.park()

    def _living(self) -> Iterable[AttemptId]:
        return [attempt.attempt_id for attempt in self.held.values() if attempt.phase is not Phase.ENDED]

    def forget_all(self) -> None:
        """Forget all ended attempts: the controller will not request them from this incarnation."""
        for attempt_id in list(self.held):
            self._forget(attempt_id)

    async def wait_reported(self) -> None:
        """Wait until there is a connection and all changes were sent, or the channel has ended."""
        while self.channel is not None and self.channel.error is None:
            if self.channel.connected and not self._reports.has_changes:
                break
            await self._moving.park()


def health_port(desired: DesiredAttempt) -> int:
    """Return the port of the attempt's HTTP health check, 0 without one."""
    check = desired.spec.health
    return desired.ports.get(check.port, 0) if check is not None and check.path is not None else 0
