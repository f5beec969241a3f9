"""What one step wants done: gathered without repetition, handed out in one stated order.

Handlers say *that* something moved; what it has become is read at the end of the step, so an effect never shows a
half-way state.
"""

from __future__ import annotations

from collections import deque

from fray.errors import FrayError
from fray.model.ids import ActorId, AttemptId, BlobId, JobId, NodeName, SessionId
from fray.model.messages.client import Event as LogEvent
from fray.model.messages.client import Jobs, Reservations
from fray.model.reservations import ReservationId
from fray.scheduler.effects import (
    CloseSession,
    DeleteBlobs,
    DesiredAttemptsChanged,
    Effect,
    EventRecorded,
    FleetChanged,
    JobInfoChanged,
    NamesChanged,
    ProbeWanted,
    Refusal,
    Reply,
    ReservationInfoChanged,
)
from fray.scheduler.state.names import actor_key, binding_key
from fray.scheduler.state.rows import (
    ActorRegistration,
    AttemptRow,
    JobRow,
    Node,
)
from fray.scheduler.state.state import State

LARGE_GANG = 64
"""Members; of a larger one not every move of a member is told."""
TOLD_OF_GANG = 16
"""About so many times while all of its members start, and again while they end."""


class EffectBuffer:
    """Effects of one step. Order: log, wishes, probes, answers, refusals, jobs, reservations, names, late answers,
    sessions, blobs."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.ended_attempts: list[AttemptId] = []
        """For those who act after the handler (`sessions.settle`)."""
        self.setbacks: list[JobId] = []
        """Members of supervised groups that begin anew on their own account, or have ended (`supervision.settle`)."""
        self.members: deque[tuple[JobId, bool]] = deque()
        """Members of job groups that run or begin anew, and (True) those that have ended (`job_groups.settle`)."""
        self._log: list[Effect] = []
        self._wishes: dict[NodeName, dict[AttemptId, None]] = {}
        self._probes: list[Effect] = []
        self._launches: list[tuple[SessionId, int, tuple[JobId, ...]]] = []
        self._reserved: list[tuple[SessionId, int, ReservationId]] = []
        self._answers: list[Effect] = []
        self._late: list[Effect] = []
        self._jobs: dict[JobId, None] = {}
        self._reservations: dict[ReservationId, None] = {}
        self._names: dict[str, None] = {}
        self._over: list[Effect] = []
        self._blobs: dict[BlobId, None] = {}
        self._fleet = False

    def happened(self, job_id: JobId, what: str, text: str = "") -> None:
        """A line for the event log; ``job_id`` is empty for what concerns machines and sessions."""
        self._log.append(EventRecorded(event=LogEvent(time=self.state.now, job=job_id, what=what, text=text)))

    def wish(self, attempt: AttemptRow) -> None:
        """What is wanted of this attempt has changed."""
        self._wishes.setdefault(attempt.node, {})[attempt.attempt_id] = None

    def probe(self, node: Node) -> None:
        """It shall probe itself."""
        self._probes.append(ProbeWanted(node=node.name, incarnation=node.incarnation))

    def job(self, job_id: JobId) -> None:
        self._jobs[job_id] = None
        self.state.touch("job", job_id)

    def member(self, job: JobRow) -> None:
        """One of its members has moved. A record has all of them, so of a large gang it is told a few times on the way,
        and whenever the job itself moves: to tell a thousand members of a thousand moves is no use to anybody."""
        self.state.touch("job", job.job_id)
        tally = self.state.tally[job.job_id]
        if job.spec.members <= LARGE_GANG or not (tally.ran + tally.living) % (job.spec.members // TOLD_OF_GANG):
            self._jobs[job.job_id] = None

    def reservation(self, reservation_id: ReservationId) -> None:
        """What is told of it has changed."""
        self._reservations[reservation_id] = None

    def binding(self, binding: ActorRegistration) -> None:
        """It has come, changed, gone, or its machine has."""
        self._names[binding_key(binding)] = None
        self.actor(binding.endpoint.actor_id)

    def actor(self, actor_id: ActorId) -> None:
        self._names[actor_key(actor_id)] = None

    def launched(self, session: SessionId, ref: int, jobs: tuple[JobId, ...]) -> None:
        self._launches.append((session, ref, jobs))

    def reservation_asked(self, session: SessionId, ref: int, reservation_id: ReservationId) -> None:
        """Answer with what the step has made of it."""
        self._reserved.append((session, ref, reservation_id))

    def reply(self, session: SessionId, ref: int, message: object, late: bool = False) -> None:
        """``late`` answers come after the news of jobs and names they stand for."""
        (self._late if late else self._answers).append(Reply(session=session, ref=ref, message=message))

    def refuse(self, session: SessionId, ref: int, error: FrayError) -> None:
        self._answers.append(Refusal(session=session, ref=ref, error=error))

    def fleet(self) -> None:
        """There are orders for providers."""
        self._fleet = True

    def over(self, session: SessionId, reason: str) -> None:
        self._over.append(CloseSession(session=session, reason=reason))

    def release(self, blob: BlobId | None) -> None:
        """One row less refers to it."""
        self.state.release(blob)
        self.unused(blob)

    def unused(self, blob: BlobId | None) -> None:
        """Forget it unless some row refers to it when the step is over."""
        if blob is not None:
            self._blobs[blob] = None

    def effects(self) -> list[Effect]:
        gone = tuple(blob for blob in self._blobs if not self.state.refers(blob))
        return [
            *self._log,
            *(self._wishes_of(node, attempts) for node, attempts in self._wishes.items() if node in self.state.nodes),
            *self._probes,
            *(self._launch_reply(*launch) for launch in self._launches),
            *(self._reserved_reply(*asked) for asked in self._reserved),
            *self._answers,
            *(JobInfoChanged(job_id=job_id) for job_id in self._jobs if job_id in self.state.jobs),
            *(ReservationInfoChanged(reservation_id=name) for name in self._reservations),
            *(NamesChanged(key=key) for key in self._names),
            *self._late,
            *self._over,
            *([FleetChanged()] if self._fleet else []),
            *([DeleteBlobs(blobs=gone)] if gone else []),
        ]

    def _wishes_of(self, node: NodeName, attempts: dict[AttemptId, None]) -> Effect:
        wanted = {attempt: self.state.is_wanted(attempt) for attempt in attempts}
        changed = tuple(attempt for attempt, is_wanted in wanted.items() if is_wanted)
        gone = tuple(attempt for attempt, is_wanted in wanted.items() if not is_wanted)
        return DesiredAttemptsChanged(node=node, changed=changed, gone=gone)

    def _launch_reply(self, session: SessionId, ref: int, jobs: tuple[JobId, ...]) -> Effect:
        infos = tuple(self.state.job_info(job_id, explained=False) for job_id in jobs)  # `JobMoved` will tell why
        return Reply(session=session, ref=ref, message=Jobs(jobs=infos))

    def _reserved_reply(self, session: SessionId, ref: int, reservation_id: ReservationId) -> Effect:
        infos = (self.state.reservation_info(reservation_id),)
        return Reply(session=session, ref=ref, message=Reservations(reservations=infos))
