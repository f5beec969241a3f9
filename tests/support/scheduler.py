"""The scheduler under test: a `Cluster` owns a state and a clock, applies events and checks invariants after each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from attrs import evolve

from fray.model.job_groups import JobGroupConfig, JobGroupInfo, JobGroupSpec, JobRole
from fray.model.messages.client import ActorEndpoint, Launch, Names, Register, Role
from fray.model.messages.node import NodeHello, ObservedState
from fray.model.reservations import ReservationInfo, ReservationSpec
from fray.model.resources import Capacity, Demand, Device, PortRange
from fray.model.specs import EndReason, EntryKind, JobInfo, JobSpec, JobState, ObservedAttempt, Outcome, Phase
from fray.net.codec import from_json, to_json
from fray.scheduler.backfill.starvation import nodes_to_hold, starving_heads
from fray.scheduler.effects import (
    CheckpointTaken,
    ControllerStarted,
    CordonRequested,
    Effect,
    Event,
    LaunchRequested,
    NameRegistered,
    NameUnregistered,
    NodeDied,
    NodeJoined,
    NodeLeaving,
    NodeProbed,
    NodeReported,
    NodeSilent,
    Refusal,
    Reply,
    ReservationReleased,
    ReservationRenewed,
    ReservationRequested,
    SessionClosed,
    SessionLost,
    SessionOpened,
    TerminateRequested,
    Tick,
    UncordonRequested,
)
from fray.scheduler.queue.applicant import Applicant
from fray.scheduler.queue.order import in_order
from fray.scheduler.queue.quotas import quota_reason
from fray.scheduler.reservations.view import reservation_info
from fray.scheduler.state.rows import TABLES, SchedulerConfig
from fray.scheduler.state.state import State
from fray.scheduler.state.what_if_pool import HypotheticalPool
from fray.scheduler.step import step
from fray.scheduler.views import group_info, job_info, names_under
from fray.testing.invariants.check import CommittedOutcomes, check

GB = 1024**3


def capacity(
    cpu: float = 4, memory: int = 64 * GB, gpu: str = "", tpu: str = "", ports: int = 0, **attributes: str
) -> Capacity:
    """``ports``: so many from 20000.

    ``gpu="h100*4,a100*2"``: devices gpu-0 to gpu-5."""
    devices = []
    for kind, text in (("gpu", gpu), ("tpu", tpu)):
        variants = [variant for part in text.split(",") if part for variant in _times(part)]
        devices += [Device(f"{kind}-{index}", kind, variant) for index, variant in enumerate(variants)]
    return Capacity(round(cpu * 1000), memory, 100 * GB, tuple(devices), attributes, PortRange(20_000, ports))


def _times(part: str) -> list[str]:
    variant, _, count = part.partition("*")
    return [variant] * int(count or 1)


def demand(cpu: float = 1, memory: int = 0, gpu: int = 0, variant: str = "auto", **more: Any) -> Demand:
    kind = "gpu" if gpu else None
    cpu_milli = round(cpu * 1000)
    return Demand(cpu_milli, memory, device_kind=kind, device_variant=variant, device_count=gpu, **more)


def job(name: str, need: Demand | None = None, **more: Any) -> JobSpec:
    """A job whose id is its name unless ``job_id`` is given."""
    more = {"job_id": name, "namespace": "ns", "entry": EntryKind.CALLABLE, "max_retries_preemption": 0} | more
    return JobSpec(name=name, demand=need or demand(), **more)


def member(name: str, role: str = "", stage: int = 0, auxiliary: bool = False, **more: Any) -> JobSpec:
    """A job of a group; ``need`` is its demand."""
    need = more.pop("need", None)
    return job(name, need, role=JobRole(role or name, stage, auxiliary), **more)


def ended(cause: EndReason = EndReason.SUCCEEDED, message: str = "", **more: Any) -> Outcome:
    return Outcome(cause=cause, message=message, **more)


class Cluster:
    """A state with its clock. Every `tell` checks the invariants."""

    def __init__(self, rules: SchedulerConfig | None = None, **restarted: Any) -> None:
        self.rules = rules or SchedulerConfig()
        self.now = 0.0
        self.state = State(self.now, self.rules)
        self.store: dict[tuple[str, str], str] = {}
        self.refs = 0
        self.epoch = 0
        self.incarnations: dict[str, str] = {}
        self.decided = CommittedOutcomes()
        self.restarted: dict[str, Any] = {}
        """Arguments with which a scenario's controller is started again."""
        self.tell(self._restarted(**restarted))

    def tell(self, event: Event, now: float | None = None) -> list[Effect]:
        """Step, save as the controller does, check."""
        self.now = self.now if now is None else now
        living = [job_id for job_id, row in self.state.jobs.items() if not row.ended]
        effects = step(self.state, event, self.now)
        self.save()
        self.check_ends(living)
        broken = [*check(self.state), *self.decided.check(self.state), *self.overlooked()]
        assert not broken, f"{broken} after {event}"
        return effects

    def check_ends(self, living_before: list[str]) -> None:
        """A job ends when all its attempts have, but for those on silent machines."""
        for job_id in living_before:
            row = self.state.jobs.get(job_id)
            if row is not None and row.ended:
                assert all(map(self.state.is_suspect, self.state.living_members(row))), job_id

    def overlooked(self) -> Iterator[str]:
        """Held jobs whose time has expired, and waiting jobs that could start, found by trying every job."""
        for at, _, job_id in self.state.backoffs:
            if at <= self.state.now:
                yield f"{job_id} should have been woken at {at}"
        if self.state.queue.is_unfinished:
            return  # the next step comes to the others
        held: dict[str, dict[str, None]] = {}
        starved = [applicant.id for applicant in starving_heads(self.state)]
        for applicant in in_order(self.state.queue):
            if quota_reason(self.state.queue, applicant):
                continue
            mine = held.setdefault(applicant.shape.reservation, {})
            if self._fits_beside(applicant, mine):
                yield f"{applicant.id} waits and could start"
            plan = self.state.start_plans.get(applicant.id)
            if plan is not None and plan.at is not None:
                mine.update(dict.fromkeys(plan.shares))
            elif applicant.id in starved:
                mine.update(dict.fromkeys(nodes_to_hold(self.state, applicant)))

    def _fits_beside(self, applicant: Applicant, held: dict[str, None]) -> bool:
        """Return whether it could start on machines without any reservation for others."""
        shape = applicant.shape
        claims = [
            claim
            for claim in self.state.claims.values()
            if claim.applicant != applicant.id and claim.reservation == shape.reservation
        ]
        claimed = {share.node: None for claim in claims for share in claim.shares}
        nothing = shape.request.is_weightless and not any(demand.ports for demand in shape.request.demands)
        exempt = shape.is_child or shape.request.is_weightless
        closed = () if nothing else claimed if exempt else claimed | held
        with HypotheticalPool(self.state, shape.reservation) as trial:
            return trial.fits(shape.request, closed)

    def save(self) -> None:
        upserts, deletes = self.state.take_dirty()
        self.store.update({(table, key): to_json(row) for table, key, row in upserts})
        for key in deletes:
            self.store.pop(key, None)

    def unsaved(self) -> Iterator[str]:
        """Rows that differ from what was saved of them: the controller reads its rows again after a defect, and must
        forget nothing that was decided."""
        rows = {(table, key): row for table, rows in self.state.tables().items() for key, row in rows.items()}
        del rows["meta", "meta"]  # its counters move without a decision
        for at in {*rows, *self.store} - {("meta", "meta")}:
            live = json.loads(to_json(rows[at])) if at in rows else {}
            stored = json.loads(self.store.get(at, "{}"))
            # An account of nothing, and a back-off that has just ended, which ends again.
            if at[0] != "usage" and live | {"held_until": None} != stored | {"held_until": None}:
                yield f"{at} is {live} and was saved as {stored}"

    def restart(self, **restarted: Any) -> list[Effect]:
        """The controller dies and starts again on what was saved."""
        assert list(self.unsaved()) == []
        rows = [(table, key, from_json(TABLES[table], text)) for (table, key), text in sorted(self.store.items())]
        self.state = State.restore(rows, self.now, self.rules)
        assert check(self.state) == []
        return self.tell(self._restarted(**restarted))

    def _restarted(self, **restarted: Any) -> ControllerStarted:
        self.epoch += 1
        return ControllerStarted(epoch=self.epoch, **restarted)

    def ref(self) -> int:
        self.refs += 1
        return self.refs

    # Time

    def tick(self, at: float | None = None) -> list[Effect]:
        """Every deadline up to ``at`` (default: the next one), each at its time."""
        effects: list[Effect] = []
        deadline = self.state.next_deadline()
        until = at if at is not None else deadline
        assert until is not None, "nothing is timed"
        while deadline is not None and deadline <= until:
            effects += self.tell(Tick(), deadline)
            deadline = self.state.next_deadline()
            if at is None:
                break
        self.now = max(self.now, until)
        return effects

    # Sessions

    def driver(self, session: str = "d", namespace: str = "ns", grace_s: float = 30.0) -> list[Effect]:
        return self.tell(SessionOpened(session=session, role=Role.DRIVER, namespace=namespace, grace_s=grace_s))

    def process(self, attempt_id: str, session: str | None = None) -> list[Effect]:
        """The attempt's process connects."""
        name = session or f"s-{attempt_id}"
        return self.tell(SessionOpened(session=name, role=Role.JOB, namespace="ns", attempt_id=attempt_id))

    def lose(self, session: str = "d") -> list[Effect]:
        return self.tell(SessionLost(session=session))

    def close(self, session: str = "d", ref: int | None = None) -> list[Effect]:
        return self.tell(SessionClosed(session=session, reason="driver left", ref=ref))

    # Requests

    def launch(self, *specs: JobSpec, session: str = "d") -> tuple[JobInfo, ...]:
        """Launch, and raise the refusal if it is refused."""
        effects = self.ask_launch(*specs, session=session)
        for effect in effects:
            if isinstance(effect, Refusal):
                raise effect.error
        return next(effect.message.jobs for effect in effects if isinstance(effect, Reply))  # type: ignore[attr-defined]

    def ask_launch(self, *specs: JobSpec, session: str = "d") -> list[Effect]:
        return self.tell(LaunchRequested(session=session, ref=self.ref(), launch=Launch(jobs=specs)))

    def ask_group(self, name: str, *specs: JobSpec, session: str = "d", **config: Any) -> list[Effect]:
        """Launch jobs as a group, whose id is its name."""
        group = JobGroupSpec(group_id=name, config=JobGroupConfig(name=name, **config))
        launch = Launch(jobs=tuple(evolve(spec, job_group=name) for spec in specs), group=group)
        return self.tell(LaunchRequested(session=session, ref=self.ref(), launch=launch))

    def launch_group(self, name: str, *specs: JobSpec, session: str = "d", **config: Any) -> list[Effect]:
        """The same, and raise the refusal if it is refused."""
        effects = self.ask_group(name, *specs, session=session, **config)
        for effect in effects:
            if isinstance(effect, Refusal):
                raise effect.error
        return effects

    def group(self, name: str) -> JobGroupInfo:
        return group_info(self.state, self.state.job_groups[name])

    def terminate(self, *jobs: str, session: str = "d") -> list[Effect]:
        return self.tell(TerminateRequested(session=session, ref=self.ref(), jobs=jobs, reason="terminated on request"))

    def reserve(self, name: str = "r", need: Demand | None = None, session: str = "d", **more: Any) -> ReservationInfo:
        """Create, and raise the refusal if it is refused. Its id is its name."""
        effects = self.ask_reservation(name, need, session, **more)
        for effect in effects:
            if isinstance(effect, Refusal):
                raise effect.error
        return reservation_info(self.state, name)

    def ask_reservation(self, name: str, need: Demand | None = None, session: str = "d", **more: Any) -> list[Effect]:
        more = {"min_units": 1, "max_units": max(1, more.get("min_units", 1)), "namespace": "ns"} | more
        spec = ReservationSpec(reservation_id=name, name=name, demand=need or demand(), **more)
        return self.tell(ReservationRequested(session=session, ref=self.ref(), spec=spec))

    def renew(self, name: str = "r", ttl_s: float | None = None, session: str = "d") -> list[Effect]:
        return self.tell(ReservationRenewed(session=session, ref=self.ref(), reservation_id=name, ttl_s=ttl_s))

    def release(self, name: str = "r", session: str = "d") -> list[Effect]:
        return self.tell(ReservationReleased(session=session, ref=self.ref(), reservation_id=name))

    def registration(self, name: str, actor_id: str, session: str, exclusive: bool = False) -> NameRegistered:
        endpoint = ActorEndpoint(actor_id=actor_id, name=name, job_id="", namespace="", addresses=("unix:/x",))
        return NameRegistered(
            session=session, ref=self.ref(), register=Register(endpoint=endpoint, exclusive=exclusive)
        )

    def register(self, name: str, actor_id: str, session: str, exclusive: bool = False) -> list[Effect]:
        """Register, and raise the refusal if it is refused."""
        effects = self.tell(self.registration(name, actor_id, session, exclusive))
        for effect in effects:
            if isinstance(effect, Refusal):
                raise effect.error
        return effects

    def unregister(self, actor_id: str, session: str) -> list[Effect]:
        return self.tell(NameUnregistered(session=session, ref=self.ref(), actor_id=actor_id))

    def checkpoint(self, session: str, number: int, blob: str) -> list[Effect]:
        return self.tell(CheckpointTaken(session=session, ref=self.ref(), number=number, blob=blob))

    # Nodes

    def node(self, name: str = "n1", incarnation: str = "i1", holds: tuple[str, ...] = (), **what: Any) -> list[Effect]:
        self.incarnations[name] = incarnation
        known = self.state.nodes.get(name)
        size = known.capacity if known and not what else capacity(**what)
        hello = NodeHello(
            node=name, incarnation=incarnation, boot_id="b", capacity=size, known_payloads=holds, host=f"host-{name}"
        )
        return self.tell(NodeJoined(hello=hello))

    def silence(self, name: str = "n1") -> list[Effect]:
        return self.tell(NodeSilent(node=name, incarnation=self.incarnations[name]))

    def die(self, name: str = "n1") -> list[Effect]:
        return self.tell(NodeDied(node=name, incarnation=self.incarnations[name], reason="machine deleted"))

    def see(self, attempt_id: str, seen: Phase | Outcome, node: str | None = None, **report: Any) -> list[Effect]:
        """The attempt's node reports it."""
        known = self.state.attempts.get(attempt_id)
        where = node or (known.node if known else "n1")
        return self.report(where, [(attempt_id, seen)], **report)

    def report(
        self,
        node: str,
        seen: Iterable[tuple[str, Phase | Outcome]],
        full: bool = False,
        gone: tuple[str, ...] = (),
        incarnation: str = "",
        busy: dict[str, str] | None = None,
    ) -> list[Effect]:
        observed = tuple(
            ObservedAttempt(attempt_id=attempt_id, phase=Phase.ENDED, outcome=what)
            if isinstance(what, Outcome)
            else ObservedAttempt(attempt_id=attempt_id, phase=what)
            for attempt_id, what in seen
        )
        report = ObservedState(full=full, observed=observed, removed=gone, busy=busy or {})
        of = incarnation or self.incarnations[node]
        return self.tell(NodeReported(node=node, incarnation=of, report=report))

    def see_all_end(self, job_id: str) -> None:
        """Every member of it succeeds."""
        for attempt in self.state.living_members(self.state.jobs[job_id]):
            self.see(attempt.attempt_id, ended())

    def run(self, *attempts: str) -> None:
        for attempt_id in attempts:
            self.see(attempt_id, Phase.RUNNING)

    def cordon(self, *nodes: str, session: str = "d", **how: Any) -> list[Effect]:
        """``drain=True``, ``finish_s=S``, ``reason=``."""
        return self.tell(CordonRequested(session=session, ref=self.ref(), nodes=nodes, **how))

    def drain(self, *nodes: str, finish_s: float = 0.0, reason: str = "") -> list[Effect]:
        return self.cordon(*nodes, drain=True, finish_s=finish_s, reason=reason)

    def uncordon(self, *nodes: str, session: str = "d") -> list[Effect]:
        return self.tell(UncordonRequested(session=session, ref=self.ref(), nodes=nodes))

    def leave(self, node: str = "n1", finish_s: float = 0.0) -> list[Effect]:
        """Send the node's notice that it will end."""
        incarnation = self.incarnations[node]
        return self.tell(NodeLeaving(node=node, incarnation=incarnation, finish_s=finish_s, reason="it was shut down"))

    def probed(self, node: str = "n1", trouble: str = "") -> list[Effect]:
        """Send the result of a self-test."""
        return self.tell(NodeProbed(node=node, incarnation=self.incarnations[node], problem=trouble))

    # Looking

    def info(self, job_id: str) -> JobInfo:
        return job_info(self.state, job_id)

    def states(self, *job_ids: str) -> list[JobState]:
        return [self.info(job_id).state for job_id in job_ids]

    def names(self, key: str) -> Names:
        return names_under(self.state, key)

    def actors(self, key: str) -> list[str]:
        return [endpoint.actor_id for endpoint in self.names(key).endpoints]

    def desired(self, node: str = "n1") -> dict[str, bool]:
        """Attempts wanted of a node, and whether they shall stop."""
        return {desired.attempt_id: desired.stop for desired in self.state.desired_attempts(node)}


def placed(scheduler: Cluster) -> list[str]:
    """Jobs of the attempts that live, in their order."""
    return [attempt.job_id for attempt in scheduler.state.attempts.values() if attempt.living]
