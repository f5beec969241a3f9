"""Answers without the names of what a client may not see: other users' jobs, reservations, and the users themselves.

Texts about a job name what stands in its way, since the one who asks may be able to do something about it. A client
that sees its own alone gets numbers and amounts in place of names: "held by 2 jobs of other users". The names are
replaced where a message leaves the controller, so that no reason that is added to the scheduler can forget it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from attrs import evolve

from fray.controller.connections.access import AccessScope
from fray.model.ids import JobId, split_attempt
from fray.model.messages import client as messages
from fray.model.messages.history import EventPage, NodeHistory, RecordedReservation, ReservationPage
from fray.model.messages.maintenance import Forecast
from fray.model.messages.usage import ClusterCounts, QueueInfo, TenantUsage, UsageInfo, UsageSample
from fray.model.specs import JobInfo
from fray.model.text import byte_size_text, plural
from fray.scheduler.reasons import cpus_text
from fray.scheduler.state.rows import JobRow
from fray.scheduler.state.state import State

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+=/-]*")
# Two characters that no name has stand for a hidden job and a hidden reservation, until lists of them are counted.
_MARKS = {"\x00": "job", "\x01": "reservation"}
_LISTS = {mark: re.compile(rf"{mark}(?:(?:, | and | or ){mark})*") for mark in _MARKS}


class HiddenNames:
    """Replaces names in the answers to one client.

    Args:
        scope: of the client.
    """

    def __init__(self, state: State, scope: AccessScope) -> None:
        self._state, self.scope = state, scope
        self.jobs: dict[JobId, None] = {}
        """Jobs whose names were replaced."""

    def text(self, text: str) -> str:
        """Return the text with numbers in place of what the client may not see."""
        if not text:
            return text
        hidden = _NAME.sub(self._mark, text)
        if hidden == text:
            return text
        for mark, pattern in _LISTS.items():
            hidden = pattern.sub(lambda found, mark=mark: _count_text(found.group(), mark), hidden)  # type: ignore[misc]
        return hidden

    def _mark(self, found: re.Match[str]) -> str:
        name = found.group()
        # A name may end with a full stop, but a sentence does more often.
        core = name if self._is_known(name) else name.rstrip(".")
        if core in self._state.reservations and not self.scope.has_reservation(core):
            return "\x01" + name[len(core) :]
        if core in self._state.job_groups and self._is_hidden_group(core):
            return "\x00" + name[len(core) :]
        if self.is_hidden_job(core):
            self.jobs[core] = None
            return "\x00" + name[len(core) :]
        return name

    def _is_known(self, name: str) -> bool:
        state = self._state
        return name in state.jobs or name in state.job_tombstones or name in state.reservations

    def _is_hidden_group(self, name: str) -> bool:
        members = self._state.group_members[name].jobs
        return not self.scope.has_namespace(self._state.job_groups[name].namespace) and all(
            map(self.is_hidden_job, members)
        )

    def is_hidden_job(self, name: str) -> bool:
        """Return whether a job is another user's that the client may not see."""
        row = self._state.jobs.get(name)
        if row is None:
            return name in self._state.job_tombstones and not self.scope.has_job_id(name)
        return row.spec.user != self.scope.user and not self.scope.has_job(row)

    def job(self, info: JobInfo) -> JobInfo:
        """Return the record of an own job without names of others' in its texts."""
        message = self.text(info.error_message) if info.error_message else info.error_message
        attempts = tuple(
            evolve(one, message=text) if (text := self.text(one.message)) != one.message else one
            for one in info.attempts
        )
        reason = self.text(info.reason)
        if (reason, message, attempts) == (info.reason, info.error_message, info.attempts):
            return info
        return evolve(info, reason=reason, error_message=message, attempts=attempts)

    def amounts_text(self) -> str:
        """Return what the jobs hold whose names were replaced, in one line; empty if they hold nothing."""
        held: Counter[str] = Counter()
        holders = 0
        for job_id in self.jobs:
            row = self._state.jobs.get(job_id)
            members = len(self._state.living_members(row)) if row is not None else 0
            if row is not None and members:
                holders += 1
                _add(held, self._state, row, members)
        parts = [cpus_text(held.pop("cpu", 0))]
        parts += [f"{byte_size_text(memory)} memory"] if (memory := held.pop("memory", 0)) else []
        parts += [f"{count} {device}" for device, count in held.items() if count]
        verb = "holds" if holders == 1 else "hold"
        return f"{plural(holders, 'job')} of other users {verb} {', '.join(parts)}" if holders else ""


def _add(held: Counter[str], state: State, row: JobRow, members: int) -> None:
    demand = state.demand(row)
    held["cpu"] += demand.cpu_milli * members
    held["memory"] += demand.memory_bytes * members
    if demand.device_kind and demand.device_count:
        held[demand.device_kind] += demand.device_count * members


def _count_text(found: str, mark: str) -> str:
    count, what = found.count(mark), _MARKS[mark]
    if count == 1:
        return f"a {what} of another user"
    return f"{'one of ' if ' or ' in found else ''}{count} {what}s of other users"


# Answers, by class ----------------------------------------------------------------------------------------------------


def _explanation(hidden: HiddenNames, message: messages.Text) -> messages.Text:
    text = hidden.text(message.text)
    amounts = hidden.amounts_text()
    return evolve(message, text=f"{text}\n{amounts}" if amounts else text)


def _events(hidden: HiddenNames, message: Any) -> Any:
    return evolve(message, events=tuple(evolve(one, text=hidden.text(one.text)) for one in message.events))


def _node_history(hidden: HiddenNames, message: NodeHistory) -> NodeHistory:
    return evolve(message, nodes=tuple(evolve(one, reason=hidden.text(one.reason)) for one in message.nodes))


def _reservation_page(hidden: HiddenNames, message: ReservationPage) -> ReservationPage:
    def shown(one: RecordedReservation) -> RecordedReservation:
        return evolve(one, reason=hidden.text(one.reason), ended_by=hidden.text(one.ended_by))

    return evolve(message, reservations=tuple(map(shown, message.reservations)))


def _jobs(hidden: HiddenNames, message: messages.Jobs) -> messages.Jobs:
    return evolve(message, jobs=tuple(map(hidden.job, message.jobs)))


def _groups(hidden: HiddenNames, message: messages.JobGroups) -> messages.JobGroups:
    return evolve(message, groups=tuple(evolve(one, reason=hidden.text(one.reason)) for one in message.groups))


def _nodes(hidden: HiddenNames, message: messages.Nodes) -> messages.Nodes:
    def granted(attempts: dict[str, str]) -> dict[str, str]:
        return {
            device: "a job of another user" if hidden.is_hidden_job(split_attempt(attempt)[0]) else attempt
            for device, attempt in attempts.items()
        }

    return evolve(message, nodes=tuple(evolve(one, granted=granted(one.granted)) for one in message.nodes))


def _forecast(hidden: HiddenNames, message: Forecast) -> Forecast:
    def visible(jobs: Iterable[JobId]) -> tuple[JobId, ...]:
        return tuple(job for job in jobs if not hidden.is_hidden_job(job))

    text = hidden.text(message.text)
    preempts, unblocked_by = visible(message.preempts), visible(message.unblocked_by)
    return evolve(message, text=text, preempts=preempts, unblocked_by=unblocked_by)


def _queue(hidden: HiddenNames, message: QueueInfo) -> QueueInfo:
    return evolve(message, entries=tuple(evolve(one, reason=hidden.text(one.reason)) for one in message.entries))


def _usage(hidden: HiddenNames, message: UsageInfo) -> UsageInfo:
    scope = hidden.scope
    others = [one for one in message.users if one.user != scope.user]
    users = tuple(one for one in message.users if one.user == scope.user)
    return evolve(
        message,
        users=(*users, _sum_of(others)) if others else users,
        namespaces=tuple(
            one for one in message.namespaces if one.user == scope.user or scope.has_namespace(one.namespace or "")
        ),
        samples=tuple(evolve(one, shares=_own_share(one, scope.user)) for one in message.samples),
    )


def _counts(hidden: HiddenNames, message: ClusterCounts) -> ClusterCounts:
    scope = hidden.scope

    def own(counts: dict[str, dict[str, int]], is_own: Callable[[str], bool]) -> dict[str, dict[str, int]]:
        others: Counter[str] = Counter()
        for name, numbers in counts.items():
            if not is_own(name):
                others.update(numbers)
        found = {name: numbers for name, numbers in counts.items() if is_own(name)}
        return found | ({"": dict(others)} if others else {})

    users = own(message.users, lambda user: user == scope.user)
    return evolve(message, users=users, namespaces=own(message.namespaces, scope.has_namespace))


def _sum_of(others: list[TenantUsage]) -> TenantUsage:
    """Return the use of several users as that of one, without their quotas."""
    used: Counter[str] = Counter()
    for one in others:
        used.update(one.used)
    weight, share, mean = (sum(getattr(one, name) for one in others) for name in ("weight", "share", "mean"))
    return TenantUsage(
        user=plural(len(others), "other user"),
        weight=weight,
        used=dict(used),
        share=share,
        mean=mean,
        score=(share + mean) / weight if weight else 0.0,
        waiting=sum(one.waiting for one in others),
    )


def _own_share(sample: UsageSample, user: str) -> dict[str, float]:
    rest = sum(share for name, share in sample.shares.items() if name != user)
    return {name: share for name, share in (*sample.shares.items(), ("", rest)) if name in (user, "") and share}


_BY_CLASS: dict[type, Callable[[HiddenNames, Any], Any]] = {
    messages.Text: _explanation,
    messages.Events: _events,
    EventPage: _events,
    NodeHistory: _node_history,
    ReservationPage: _reservation_page,
    messages.Jobs: _jobs,
    messages.JobChanged: lambda hidden, message: evolve(message, job=hidden.job(message.job)),
    messages.JobGroups: _groups,
    messages.Nodes: _nodes,
    Forecast: _forecast,
    QueueInfo: _queue,
    UsageInfo: _usage,
    ClusterCounts: _counts,
}


def hide_others(state: State, scope: AccessScope, message: Any) -> Any:
    """Return an answer as a client that sees its own alone may have it."""
    hide = _BY_CLASS.get(type(message))
    return message if hide is None else hide(HiddenNames(state, scope), message)
