"""Collector of the effects of one step: without repetition, in one stated order.

Handlers mark *that* something has changed; its new value is read at the end of the step, so an effect never shows a
state that is half-way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import filterfalse

from fray.errors import FrayError
from fray.model.ids import ActorId, AttemptId, BlobId, JobId, NodeName, SessionId
from fray.model.messages.client import Event as LogEvent
from fray.model.messages.client import Jobs, Reservations
from fray.model.messages.history import AttemptRecord, NodeRecord, RecordedReservation
from fray.model.reservations import ReservationId, ReservationInfo
from fray.model.specs import JobInfo
from fray.scheduler.effects import (
    CloseSession,
    DeleteBlobs,
    DesiredAttemptsChanged,
    Effect,
    EventRecorded,
    FleetChanged,
    HistoryRecorded,
    JobInfoChanged,
    NamesChanged,
    ProbeWanted,
    Refusal,
    Reply,
    ReservationInfoChanged,
)
from fray.scheduler.state.rows import (
    ActorRegistration,
    AttemptRow,
    JobRow,
    Node,
)
from fray.scheduler.state.state import State
from fray.scheduler.state.tables import actor_key, registration_key

LARGE_GANG = 64
"""Members; watchers of a larger gang do not get an update for each change of a member."""
LARGE_GANG_UPDATES = 16
"""Approximate number of updates while all members of a large gang start, and again while they end."""


class EffectBuffer:
    """Effects of one step, in this order: events, history, desired attempts, probes, replies, refusals, jobs,
    reservations, names, late replies, sessions, blobs."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.ended_attempts: list[AttemptId] = []
        """Attempts that ended in this step, for `sessions.end_finished_sessions`."""
        self.supervised_changes: list[JobId] = []
        """Members of supervised groups that restart on their own account, or have ended, for
        `supervision.restart_siblings`."""
        self.group_changes: deque[tuple[JobId, bool]] = deque()
        """Members of job groups that run or restart, and (True) those that have ended, for
        `groups.apply_member_changes`."""
        self._events: list[Effect] = []
        self._history: list[Effect] = []
        # Dictionaries instead of sets: iteration in the order of insertion, so that the same events give the same
        # effects in the same order in every process. Sets of strings are ordered by a hash that differs between
        # processes.
        self._desired: dict[NodeName, dict[AttemptId, None]] = {}
        self._probes: list[Effect] = []
        self._launch_replies: list[tuple[SessionId, int, tuple[JobId, ...], tuple[str, ...]]] = []
        self._reservation_replies: list[tuple[SessionId, int, ReservationId]] = []
        self._replies: list[Effect] = []
        self._late_replies: list[Effect] = []
        self._jobs: dict[JobId, None] = {}
        self._reservations: dict[ReservationId, None] = {}
        self._names: dict[str, None] = {}
        self._closed_sessions: list[Effect] = []
        self._blobs: dict[BlobId, None] = {}
        self._has_orders = False

    def log_event(self, job_id: JobId, what: str, text: str = "") -> None:
        """Add a line to the event log; ``job_id`` is empty for events of machines and sessions."""
        self._events.append(EventRecorded(event=LogEvent(time=self.state.now, job=job_id, what=what, text=text)))

    def record(self, record: AttemptRecord | NodeRecord | RecordedReservation) -> None:
        """Add a row to the history."""
        self._history.append(HistoryRecorded(record=record))

    def desired_changed(self, attempt: AttemptRow) -> None:
        """Send the attempt's node its desired state at the end of the step."""
        self._desired.setdefault(attempt.node, {})[attempt.attempt_id] = None

    def request_probe(self, node: Node) -> None:
        """Ask a node to probe itself."""
        self._probes.append(ProbeWanted(node=node.name, incarnation=node.incarnation))

    def job_changed(self, job_id: JobId) -> None:
        self._jobs[job_id] = None
        self.state.touch("job", job_id)

    def member_changed(self, job: JobRow) -> None:
        """Mark the job of a member that has changed; watchers of a large gang get few of these updates."""
        job_id = job.job_id
        self.state.touch("job", job_id)
        # A record contains all members, so an update for each member costs the square of their number: for a gang of a
        # thousand, a thousand records of a thousand members.
        counts = self.state.generation_counts[job_id]
        # One of the two moves by one with each member that starts (`ran`) or ends (`living`).
        changes = counts.ran + counts.living
        if job.spec.members <= LARGE_GANG or not changes % (job.spec.members // LARGE_GANG_UPDATES):
            self._jobs[job_id] = None

    def reservation_changed(self, reservation_id: ReservationId) -> None:
        """Send the reservation's record to those who watch it."""
        self._reservations[reservation_id] = None

    def registration_changed(self, binding: ActorRegistration) -> None:
        """Mark a name whose actor was registered, changed or removed, or whose machine became silent or came back."""
        self._names[registration_key(binding)] = None
        # An actor is watched by its id as well as by its name.
        self.actor_changed(binding.endpoint.actor_id)

    def actor_changed(self, actor_id: ActorId) -> None:
        self._names[actor_key(actor_id)] = None

    def reply_launched(
        self, session: SessionId, ref: int, jobs: tuple[JobId, ...], warnings: tuple[str, ...] = ()
    ) -> None:
        # Rendered at the end of the step: the reply shows what the pass has made of the jobs, placed or waiting.
        self._launch_replies.append((session, ref, jobs, warnings))

    def reply_reservation(self, session: SessionId, ref: int, reservation_id: ReservationId) -> None:
        """Reply with the reservation as it is at the end of the step."""
        self._reservation_replies.append((session, ref, reservation_id))

    def reply(self, session: SessionId, ref: int, message: object, late: bool = False) -> None:
        """Reply to a request; ``late`` replies come after the changes of jobs and names they confirm."""
        (self._late_replies if late else self._replies).append(Reply(session=session, ref=ref, message=message))

    def refuse(self, session: SessionId, ref: int, error: FrayError) -> None:
        self._replies.append(Refusal(session=session, ref=ref, error=error))

    def orders_changed(self) -> None:
        """Mark that there are orders for providers."""
        self._has_orders = True

    def close_session(self, session: SessionId, reason: str) -> None:
        self._closed_sessions.append(CloseSession(session=session, reason=reason))

    def release_blob(self, blob: BlobId | None) -> None:
        """Drop one reference to a blob."""
        self.state.blob_refs.remove(blob)
        self.delete_if_unused(blob)

    def delete_if_unused(self, blob: BlobId | None) -> None:
        """Delete the blob at the end of the step unless a row refers to it then."""
        if blob is not None:
            self._blobs[blob] = None

    def effects(
        self, job_info: Callable[[JobId], JobInfo], reservation_info: Callable[[ReservationId], ReservationInfo]
    ) -> list[Effect]:
        """Return the effects in their order.

        Args:
            job_info: renders a job for the answer to its launch; without the reason why it waits, which
                `JobInfoChanged` brings.
            reservation_info: renders a reservation for the answer to its request.
        """
        # Decided last: a row added later in the step may refer to a blob that another row has released.
        gone = tuple(blob for blob in self._blobs if not self.state.is_blob_used(blob))
        jobs = self.state.jobs
        return [
            *self._events,
            *self._history,
            *(
                self._desired_effect(node, attempts)
                for node, attempts in self._desired.items()
                # A node that died in this step may have been dropped, after its attempts were marked.
                if node in self.state.nodes
            ),
            *self._probes,
            *(
                Reply(session=session, ref=ref, message=Jobs(jobs=tuple(map(job_info, jobs)), warnings=warnings))
                for session, ref, jobs, warnings in self._launch_replies
            ),
            *(
                Reply(session=session, ref=ref, message=Reservations(reservations=(reservation_info(name),)))
                for session, ref, name in self._reservation_replies
            ),
            *self._replies,
            # A job that changed and was forgotten in the same step has only a tombstone.
            *[JobInfoChanged(job_id=job_id) for job_id in self._jobs if job_id in jobs],
            *(ReservationInfoChanged(reservation_id=name) for name in self._reservations),
            *(NamesChanged(key=key) for key in self._names),
            # A client that waits for `Done` has received the final records and names when it comes.
            *self._late_replies,
            *self._closed_sessions,
            # One effect for any number of orders: the provider driver reads them from the rows.
            *([FleetChanged()] if self._has_orders else []),
            *([DeleteBlobs(blobs=gone)] if gone else []),
        ]

    def _desired_effect(self, node: NodeName, attempts: dict[AttemptId, None]) -> Effect:
        # Read here and not when it was marked: an attempt may be placed and end in one step.
        changed = tuple(filter(self.state.is_desired, attempts))
        # Nearly always none: they are looked for only then.
        gone = tuple(filterfalse(self.state.is_desired, attempts)) if len(changed) < len(attempts) else ()
        return DesiredAttemptsChanged(node=node, changed=changed, gone=gone)
