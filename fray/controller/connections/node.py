"""Connection of one node: its reports become events, and its desired attempts are sent from the saved state.

Invariants: what is sent is read from the state at that moment, so a slow node gets the latest state and no intermediate
one. Each connection starts with the full set; attempts that the node does not hold yet follow with their payloads as
the channel has room.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf

import trio
from attrs import evolve

from fray.controller.connections.client_logs import LogFeed
from fray.controller.connections.hub import ConnectionHub
from fray.controller.connections.validation import check_host
from fray.controller.context import ControllerContext
from fray.controller.secret_store import SECRET_WAIT_S
from fray.errors import (
    ChannelClosed,
    ChannelFull,
    ConnectionFailed,
    FrayError,
    InvalidRequest,
    ProtocolMismatch,
    Refused,
)
from fray.model.ids import AttemptId, BlobId
from fray.model.log_records import LogChunk
from fray.model.messages.bundles import FetchBundle, FetchChunk, FetchValue, OfferValue, PutChunk
from fray.model.messages.node import (
    AttemptAnnotation,
    AttemptLog,
    AttemptMetricsReport,
    CaptureRequest,
    DesiredState,
    NodeDetails,
    NodeGoodbye,
    NodeHello,
    NodeLeaves,
    NodeMoved,
    ObservedState,
    Probe,
    ProbeResult,
    SignCertificate,
    SignedCertificate,
    StackCapture,
)
from fray.model.messages.tunnels import OpenTunnel
from fray.model.specs import BLOB_LIMIT_BYTES, DesiredAttempt, EndReason, ObservedAttempt, Outcome, Phase
from fray.net.channel.public import Channel
from fray.net.channel.requests import Requests
from fray.net.channel.session import SILENT_PERIODS
from fray.net.codec import Kind, TextRule, decode_checked
from fray.net.process_identity import ProcessWatch
from fray.net.transport import Bytes
from fray.net.tunnels.multiplexer import TunnelEndpoint, TunnelFlow, TunnelMultiplexer
from fray.scheduler.effects import AttemptAnnotated, NodeDied, NodeJoined, NodeLeaving, NodeReported, NodeSilent
from fray.scheduler.lifecycle import AttemptPhase

DESIRED_CHUNK_BYTES = 12 * 1024 * 1024
"""Approximate size of the payloads in one `DesiredState`; the rest follows when there is room."""
DESIRED_CHUNK_ATTEMPTS = 1_000
"""New attempts in one `DesiredState`."""

PROBE_S = 60.0
"""Seconds for the answer to a `Probe`."""
DIALED_AGAIN_S = 1.0
"""Seconds in which a node whose machine has ended its connection dials again if it lives.

Callers of a killed node are to know within 2 s. A living node dials about five times in one second, and needs four to
five round trips for the one that succeeds.
"""
FINISH_LIMIT_S = 7 * 86_400.0
"""Longest time that a leaving node may give to the attempts it runs."""

_log = logging.getLogger("fray.controller.connections.node")


def _with_value_size(observed: ObservedAttempt, sizes: Mapping[BlobId, int]) -> ObservedAttempt:
    """Add the size of its value, if that has come with the report."""
    outcome = observed.outcome
    if outcome is None or outcome.value is None or outcome.value not in sizes:
        return observed
    return evolve(observed, outcome=evolve(outcome, value_bytes=sizes[outcome.value]))


def _refuse_tunnel(flow: TunnelFlow, message: OpenTunnel, greeting: Bytes, window_bytes: int) -> TunnelEndpoint:
    raise Refused("nodes cannot open tunnels")


class NodeConnection:
    """Handler of one node's channel."""

    def __init__(
        self,
        context: ControllerContext,
        log_feed: LogFeed,
        hub: ConnectionHub,
        hello: NodeHello,
        channel: Channel,
        process_watch: ProcessWatch | None,
    ) -> None:
        self.hello = hello
        self.node = hello.node
        self.incarnation = hello.incarnation
        self.channel = channel
        self.process_watch = process_watch
        self.requests = Requests(channel)
        """Requests to the node. It may answer late or never, so each needs a timeout."""
        self.superseded = False
        """True after a later channel has taken over this node."""
        self._context = context
        self._log_feed = log_feed
        self._hub = hub
        # A node is suspect ``suspect_s`` after its last message, so its silence must be noticed before that.
        channel.heartbeat_s = min(channel.heartbeat_s, context.state.config.suspect_s / (SILENT_PERIODS + 1))
        self.tunnels = TunnelMultiplexer(channel, dialed=False, on_open=_refuse_tunnel)
        """Tunnels to ports of its jobs."""
        # A node that reconnects is not sent gigabytes of payloads that it has.
        self._held = set(hello.known_payloads)
        self._joined = False
        self._send_everything = False
        self._changed: dict[AttemptId, None] = {}
        self._awaiting_secrets: dict[AttemptId, float] = {}
        """Deadlines of attempts that wait for secrets that only their drivers know."""
        self._last_report: dict[AttemptId, ObservedAttempt] | None = None
        """Attempts that the node has reported on this channel; None before its full report."""
        self._unreported: dict[AttemptId, None] = {}
        """Attempts that the node was sent to start, and of which it has not said anything on this channel."""
        self._last_busy: dict[str, str] = {}
        """Devices that its last report calls busy."""
        self._lost = False
        self._is_dead = False
        self._ended_by_peer = trio.Event()
        self._wake = trio.Event()

    def __repr__(self) -> str:
        state = "connected" if self.channel.connected else "silent"
        return f"<NodeConnection {self.node} ({self.incarnation}) {state}: {len(self._changed)} attempts to send>"

    # The channel's handler

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        if kind == Kind.NOTICE:
            # Escaped and not refused: a report that is refused comes again, for ever.
            self._on_notice(*decode_checked(body, TextRule.ESCAPE))
        elif kind == Kind.REQUEST:
            self._on_request(ref, *decode_checked(body, TextRule.REFUSE))
        elif not self.requests.on_frame(kind, flags, target, ref, body):
            self.tunnels.on_frame(kind, flags, target, ref, body)

    def _on_notice(self, message: object, blobs: Sequence[Bytes]) -> None:
        if isinstance(message, ObservedState):
            self._on_report(message, blobs)
        elif isinstance(message, AttemptLog):
            self._on_log(message, blobs)
        elif isinstance(message, AttemptMetricsReport):
            own_metrics = [one for one in message.metrics if self._is_own(one.attempt_id, "measured")]
            self._context.attempt_metrics.record(own_metrics, self._context.inbox.current_time())
        elif isinstance(message, AttemptAnnotation):
            self._on_annotation(message)
        elif isinstance(message, NodeDetails):
            self._context.attempt_metrics.record_node_details(self.node, message.details)
        elif isinstance(message, StackCapture):
            if self._is_own(message.attempt_id, "captured the stacks of"):
                self._hub.stacks_captured(self.node, message)
        elif isinstance(message, NodeLeaves):
            self._on_leaving(message)
        elif isinstance(message, NodeMoved):
            self._on_moved(message)
        elif isinstance(message, NodeGoodbye):
            self.mark_dead(message.reason or "it left in order")

    def _on_request(self, ref: int, message: object, blobs: Sequence[Bytes]) -> None:
        try:
            if isinstance(message, SignCertificate):
                self._sign_certificate(ref, message)
                return
            if not isinstance(message, FetchBundle | FetchChunk | FetchValue | OfferValue | PutChunk):
                raise ProtocolMismatch(f"{type(message).__name__} is not a request of nodes")
            self._context.bundles.admit(message, blobs)
        except FrayError as error:
            self.refuse(ref, error)
        else:
            self._hub.start_soon(self._context.bundles.serve, self, ref, message, blobs)

    def _sign_certificate(self, ref: int, message: SignCertificate) -> None:
        authority = self._context.authority
        if authority is None:
            raise InvalidRequest("this controller issues no certificates: it has no TLS listener")
        # For the name that this node has proven with its key, whatever the request says.
        certificate, authorities = authority.sign(self.node, message.request)
        self.reply(ref, SignedCertificate(certificate=certificate, authorities=authorities))
        _log.info("issued a certificate for node %s", self.node, extra={"node": self.node})

    def reply(self, ref: int, message: object, blobs: Sequence[Bytes] = ()) -> None:
        self._send(lambda: self.channel.reply(ref, message, blobs))

    def refuse(self, ref: int, error: FrayError) -> None:
        self._send(lambda: self.channel.fail(ref, error))

    def on_batch(self) -> None:
        pass

    def on_reset(self, greeting: bytes) -> None:
        self.requests.on_reset()
        self._join()

    def on_suspended(self, why: str) -> None:
        if self.is_proven_dead():
            self.mark_dead("its process is gone")
        else:
            self._on_lost(why)
            if self.channel.ended_by_peer:
                self._ended_by_peer.set()

    async def watch_ends(self) -> None:
        """Report each time that the machine has ended the connection, unless its node dials again."""
        while self.channel.error is None:
            await self._ended_by_peer.wait()
            self._ended_by_peer = trio.Event()
            connections = self.channel.stats.connections
            await trio.sleep(DIALED_AGAIN_S)
            if self.channel.error is not None:
                # The silence of this channel is reported (`on_end`). By now the node may have another channel, whose
                # connection is fine: a report from here would make it suspect with no event that ends that.
                return
            is_back = not self._lost or self.channel.stats.connections != connections
            if not (is_back or self._is_dead or self.superseded):
                silent = NodeSilent(node=self.node, incarnation=self.incarnation, has_answered=True)
                self._context.inbox.post(silent)

    def on_resumed(self) -> None:
        self._rejoin()

    def _rejoin(self) -> None:
        self._join()
        # The channel has lost nothing, so the last report is still true, and the node will not repeat it: but the
        # scheduler, after the silence, waits for a full report before it places anything there. Reports that the node
        # has sent meanwhile come after this one: attempts given up in the silence may have begun, and hold devices.
        if self._last_report is not None:
            wanted = self._context.state.on_node.get(self.node, {})
            begun = [
                ObservedAttempt(attempt_id=attempt, phase=Phase.STARTING)
                for attempt in self._unreported
                if attempt not in wanted
            ]
            known = (*self._last_report.values(), *begun)
            self._post_report(ObservedState(full=True, observed=known, busy=self._last_busy))

    def on_end(self, error: FrayError) -> None:
        self.tunnels.on_lost(ConnectionFailed(f"node {self.node} has disconnected from the controller: {error}"))
        self.requests.on_end(error)
        self._hub.node_ended(self.node, self.channel)
        if self.process_watch is not None:
            self.process_watch.close()
        self._wake.set()
        self._ended_by_peer.set()
        self._on_lost(str(error))

    def _join(self) -> None:
        self._lost = False
        # See `ClientConnection._open_session`: only proven processes are recorded.
        process = self.hello.process if self.process_watch is not None else None
        self._context.inbox.post(NodeJoined(hello=evolve(self.hello, process=process)))

    def _on_lost(self, why: str) -> None:
        if not self._lost and not self._is_dead and not self.superseded:
            self._lost = True
            _log.warning("node %s is silent: %s", self.node, why, extra={"node": self.node})
            # Silence counts from the last message and not from when it was noticed, up to three heartbeats later.
            silent_s = max(0.0, trio.current_time() - self.channel.received_at)
            self._context.inbox.post(NodeSilent(node=self.node, incarnation=self.incarnation, silent_s=silent_s))

    def is_proven_dead(self) -> bool:
        """Return whether the node has said goodbye, or its process ran on this machine and has exited."""
        return self._is_dead or (self.process_watch is not None and self.process_watch.has_exited())

    def mark_dead(self, reason: str) -> None:
        """Report that everything the node held is gone for good."""
        if not self._is_dead and not self.superseded:
            self._is_dead = True
            self._context.inbox.post(NodeDied(node=self.node, incarnation=self.incarnation, reason=reason))

    # From the node

    def _on_report(self, report: ObservedState, blobs: Sequence[Bytes]) -> None:
        """Post a report. Values are in the store before; an attempt whose value is too large or missing has not
        succeeded."""
        # A value over the limit is left out and not refused: the report also says that other attempts have ended.
        small = [blob for blob in blobs if len(blob) <= BLOB_LIMIT_BYTES]
        # The scheduler applies what is said of attempts of this node, and holds back devices that others may use.
        self._note_foreign((*(one.attempt_id for one in report.observed), *report.removed), "reported")
        if self._is_known(report):
            self._remember_report(report)
            return
        with self._context.hold_blobs(small) as attached:
            stored = set(attached)
            report = evolve(report, observed=tuple(self._with_stored_value(one, stored) for one in report.observed))
            sizes = dict(zip(attached, map(len, small), strict=True))
            report = (
                evolve(report, observed=tuple(_with_value_size(one, sizes) for one in report.observed))
                if sizes
                else report
            )
            # With the values' names as they are in the store, so that the report can be posted again after a
            # resumption.
            self._remember_report(report)
            self._post_report(report, tuple(stored))

    def _is_known(self, report: ObservedState) -> bool:
        """Return whether the report says only that the node has forgotten attempts whose end the scheduler knows.

        That is the last report of each attempt, and the scheduler need not take a step for it.
        """
        state = self._context.state
        node = state.nodes.get(self.node)
        # A report that is still queued may be of the same attempts.
        if report.full or report.observed or node is None or not self._context.inbox.is_empty:
            return False
        ended = (state.attempts.get(attempt_id) for attempt_id in report.removed)
        return (
            node.busy == report.busy
            and node.stray_attempts == ()
            and all(attempt is None or not attempt.living for attempt in ended)
        )

    def _post_report(self, report: ObservedState, values: Sequence[BlobId] = ()) -> None:
        event = NodeReported(node=self.node, incarnation=self.incarnation, report=report)
        self._context.pin_blobs(event, values)
        self._context.inbox.post(event)

    def _remember_report(self, report: ObservedState) -> None:
        self._last_busy = report.busy
        if report.full:
            self._last_report = {}
        if self._last_report is not None:
            self._last_report |= {one.attempt_id: one for one in report.observed}
            for attempt_id in report.removed:
                self._last_report.pop(attempt_id, None)
        for attempt_id in (*(one.attempt_id for one in report.observed), *report.removed):
            self._unreported.pop(attempt_id, None)

    def _with_stored_value(self, observed: ObservedAttempt, stored: set[BlobId]) -> ObservedAttempt:
        outcome = observed.outcome
        if outcome is None or outcome.value is None or outcome.value in stored:
            return observed
        # Sent with an earlier report, or the value of another attempt with the same bytes.
        if self._context.has_blob(outcome.value):
            stored.add(outcome.value)
            return observed
        outcome = evolve(outcome, value=None)
        # A success without its value would answer `wait` with None.
        if outcome.cause is EndReason.SUCCEEDED:
            message = "its result did not reach the controller: it was lost on its node"
            outcome = evolve(outcome, cause=EndReason.FAILURE, message=message)
        return evolve(observed, outcome=outcome)

    def _on_log(self, message: AttemptLog, blobs: Sequence[Bytes]) -> None:
        # A node may write into the logs of its own attempts only; those of forgotten ones have no reader.
        if self._is_own(message.attempt_id, "sent log lines of"):
            attempt = self._context.state.attempts[message.attempt_id]
            # A copy: a view would keep the whole message in memory for as long as the cache has the lines.
            data = bytes(blobs[0]) if blobs else b""
            self._log_feed.add(attempt, LogChunk(message.first, message.end, data), closed=message.ended)

    def _on_moved(self, message: NodeMoved) -> None:
        self.hello = evolve(self.hello, host=check_host(self.node, message.host))
        self._rejoin()

    def _on_annotation(self, message: AttemptAnnotation) -> None:
        if not self._is_own(message.attempt_id, "annotated"):
            return
        self._context.inbox.post(
            AttemptAnnotated(
                node=self.node,
                incarnation=self.incarnation,
                attempt_id=message.attempt_id,
                kind=message.what,
                text=message.text,
            )
        )

    def _on_leaving(self, message: NodeLeaves) -> None:
        # From a peer, so it is bounded before the scheduler makes a timer of it.
        finish_s = min(max(0.0, message.finish_s), FINISH_LIMIT_S)
        self._context.inbox.post(
            NodeLeaving(node=self.node, incarnation=self.incarnation, finish_s=finish_s, reason=message.reason)
        )

    def _is_own(self, attempt_id: AttemptId, what: str) -> bool:
        """Return whether an attempt is known and runs on this node; log one that runs on another node."""
        self._note_foreign([attempt_id], what)
        attempt = self._context.state.attempts.get(attempt_id)
        return attempt is not None and attempt.node == self.node

    def _note_foreign(self, attempts: Iterable[AttemptId], what: str) -> None:
        """Log attempts of other nodes, of which no sound node speaks. Nothing changes by what it says of them."""
        known = self._context.state.attempts
        foreign = [each for each in attempts if each in known and known[each].node != self.node]
        if foreign:
            more = f" (and {len(foreign) - 1} more of other nodes)" if len(foreign) > 1 else ""
            which = f"{foreign[0]} of node {known[foreign[0]].node}{more}"
            self._hub.foreign_attempts.write(
                "node %s at %s has %s %s: ignored", self.node, self.channel.remote, what, which
            )

    # To the node

    def request_stacks(self, capture_request: CaptureRequest) -> bool:
        """Ask the node to capture stacks; return False if it is not connected."""
        if not self.channel.connected:
            return False
        self._send(lambda: self.channel.notice(capture_request))
        return True

    async def probe(self) -> str:
        """Have the node check its machine; return what is wrong, or an empty text."""
        try:
            reply, _ = await self.requests.request(Probe(), timeout_s=PROBE_S)
        except FrayError as error:
            return f"it could not be probed: {error}"
        return reply.trouble if isinstance(reply, ProbeResult) else f"it answered with {type(reply).__name__}"

    def on_joined(self) -> None:
        """Start to send: the scheduler has processed this connection."""
        # Not at the connection: the state then still has the desired attempts of the previous incarnation.
        self._joined = self._send_everything = True
        self._wake.set()

    def desired_changed(self, attempts: Sequence[AttemptId]) -> None:
        self._changed.update(dict.fromkeys(attempts))
        self._wake.set()

    async def run(self) -> None:
        """Send desired attempts whenever the channel has room, until it has ended."""
        try:
            while self.channel.error is None:
                # Also woken by the clock: an attempt whose secret never comes has to fail, with the reason.
                with trio.move_on_at(min(self._awaiting_secrets.values(), default=inf)):
                    await self._wake.wait()
                self._wake = trio.Event()
                self._give_up_waiting()
                while self.channel.error is None and self._joined and (self._send_everything or self._changed):
                    # Room first, then the state is read: what a slow node gets is what holds at that moment.
                    await self.channel.wait_room()
                    self._send(self._send_all if self._send_everything else self._send_delta)
        except ChannelClosed:
            pass  # `on_end` was called

    def _send(self, send: Callable[[], None]) -> None:
        try:
            send()
        except ChannelClosed:
            pass
        except ChannelFull as error:
            # Without an error to the node: it reconnects and gets the full set.
            _log.warning("node %s is too slow, disconnecting: %s", self.node, error, extra={"node": self.node})
            self.channel.end(error)

    def _send_all(self) -> None:
        """Send all attempts that the node shall hold and holds already; the others follow as deltas."""
        known = self._context.state.desired_attempts(self.node)
        desired_attempts = [desired for desired in known if not self._was_forgotten(desired)]
        # A node ends what a full set does not name. Attempts that it does not hold yet can therefore follow, with
        # payloads, and the full set is small enough to arrive in one message.
        later = {
            desired.attempt_id: None
            for desired in desired_attempts
            if self._payload_of(desired) is not None or self._lacks_secrets(desired)
        }
        held = [desired for desired in desired_attempts if desired.attempt_id not in later]
        self._send_everything, self._changed = False, later
        chunk, payloads = self._take_chunk()
        self._send_desired(True, [*held, *chunk], (), payloads)

    def _was_forgotten(self, desired: DesiredAttempt) -> bool:
        """Return whether the node has had the attempt and has forgotten it, which its report will say.

        After a backup was restored: it ended since then. Sent again, it would start a second time.
        """
        attempt = self._context.state.attempts[desired.attempt_id]
        was_seen = attempt.phase in (AttemptPhase.STARTING, AttemptPhase.RUNNING)
        return was_seen and not desired.stop and desired.attempt_id not in self._held

    def _send_delta(self) -> None:
        gone = tuple(attempt for attempt in self._changed if self._desired(attempt) is None)
        for attempt in gone:
            del self._changed[attempt]
            self._held.discard(attempt)
        chunk, payloads = self._take_chunk()
        self._send_desired(False, chunk, gone, payloads)

    def _desired(self, attempt_id: AttemptId) -> DesiredAttempt | None:
        attempt = self._context.state.attempts.get(attempt_id)
        if attempt is None or attempt.node != self.node or attempt.incarnation != self.incarnation:
            return None
        return self._context.state.desired_attempt(attempt_id)

    def _take_chunk(self) -> tuple[list[DesiredAttempt], dict[BlobId, bytes]]:
        """Take the next changed attempts with the payloads they need; at least one."""
        desired_attempts: list[DesiredAttempt] = []
        payloads: dict[BlobId, bytes] = {}
        size_bytes = 0
        for attempt_id in list(self._changed):
            # Checked before the next is taken, so that one payload that alone exceeds the size still goes out.
            if size_bytes >= DESIRED_CHUNK_BYTES or len(desired_attempts) >= DESIRED_CHUNK_ATTEMPTS:
                break
            desired = self._desired(attempt_id)
            del self._changed[attempt_id]
            if desired is None:
                self._awaiting_secrets.pop(attempt_id, None)
                continue
            if self._lacks_secrets(desired):
                self._awaiting_secrets.setdefault(attempt_id, trio.current_time() + SECRET_WAIT_S)
                continue
            self._awaiting_secrets.pop(attempt_id, None)
            blob = self._payload_of(desired)
            if blob is not None and blob not in payloads:
                data = self._context.store.blob(blob)
                if data is not None:
                    payloads[blob] = data
                    size_bytes += len(data)
                # Large ones are fetched by the node, part by part. Others are damaged, which was found by the hash when
                # it was read: without this report the job would wait for ever for a start that cannot come.
                elif not self._context.bundles.has(blob):
                    self._cannot_start(desired, "its payload is damaged in the controller's store")
                    continue
            desired_attempts.append(desired)
        return desired_attempts, payloads

    # Secrets

    def secrets_changed(self) -> None:
        """Try again to send the attempts that wait for secrets."""
        self._changed.update(dict.fromkeys(self._awaiting_secrets))
        self._wake.set()

    def _lacks_secrets(self, desired: DesiredAttempt) -> bool:
        """Return whether an attempt that is to start needs a secret that neither the controller nor the node knows."""
        # What is to end needs none, and what the node holds has received them.
        if desired.stop or not desired.spec.secrets or desired.attempt_id in self._held:
            return False
        return bool(self._context.secrets.missing(desired.spec, self.hello.secrets))

    def _give_up_waiting(self) -> None:
        now = trio.current_time()
        for attempt_id in [attempt_id for attempt_id, until in self._awaiting_secrets.items() if until <= now]:
            del self._awaiting_secrets[attempt_id]
            desired = self._desired(attempt_id)
            # A driver may have brought it in the same moment.
            if desired is not None and self._lacks_secrets(desired):
                names = ", ".join(self._context.secrets.missing(desired.spec, self.hello.secrets))
                self._cannot_start(
                    desired,
                    f"its secret {names} is no longer known: the controller was restarted, its driver has not "
                    f"reconnected within {SECRET_WAIT_S:g} s, and node {self.node} does not declare it",
                )

    def _cannot_start(self, desired: DesiredAttempt, why: str) -> None:
        """Report the attempt as ended: the node has not been sent it and never will be."""
        # Posted as a report of the node, so the scheduler has one way in which attempts end.
        outcome = Outcome(cause=EndReason.ENVIRONMENT, message=why)
        ended = ObservedAttempt(attempt_id=desired.attempt_id, phase=Phase.ENDED, outcome=outcome)
        self._post_report(ObservedState(full=False, observed=(ended,)))

    def _with_key(self, desired: DesiredAttempt) -> DesiredAttempt:
        """Add what no state contains: the attempt's key and, for its start, the secrets of its driver."""
        starts = desired.attempt_id not in self._held and not desired.stop
        secrets = self._context.secrets.values_for(desired.spec) if starts and desired.spec.secrets else {}
        return evolve(desired, key=self._context.attempt_key(desired.attempt_id), secrets=secrets)

    def _payload_of(self, desired: DesiredAttempt) -> BlobId | None:
        """Return the payload that must be attached."""
        # Sent once; a node that reconnects names those it holds in its hello.
        return None if desired.attempt_id in self._held or desired.stop else desired.spec.payload

    def _send_desired(
        self,
        full: bool,
        desired_attempts: Sequence[DesiredAttempt],
        gone: tuple[AttemptId, ...],
        payloads: dict[BlobId, bytes],
    ) -> None:
        with_keys = tuple(map(self._with_key, desired_attempts))
        wanted = DesiredState(
            epoch=self._context.epoch, revision=self._hub.next_revision(), full=full, desired=with_keys, removed=gone
        )
        # Marked as held only after this: if the channel is full, the node reconnects and is sent everything again.
        self.channel.notice(wanted, list(payloads.values()))
        starts = [desired.attempt_id for desired in desired_attempts if not desired.stop]
        self._unreported |= dict.fromkeys(attempt for attempt in starts if attempt not in self._held)
        self._held.update(starts)
