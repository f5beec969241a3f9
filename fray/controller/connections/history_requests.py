"""Requests of clients about the past: attempts, machines that are gone, and events of the whole cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fray.controller.connections.access import AccessScope, scope_for
from fray.controller.history.capacity import PERIOD_S, mean_capacity
from fray.controller.history.sums import DAY, ROWS_LIMIT, SumInput, recorded_namespaces
from fray.controller.history.sums import sum_attempts as sum_in_sql
from fray.errors import InvalidRequest
from fray.model.messages.client import Event
from fray.model.messages.history import (
    AttemptPage,
    AttemptRecord,
    AttemptSums,
    CapacityHistory,
    EventPage,
    FindEvents,
    GetAttempts,
    GetCapacity,
    GetNodeHistory,
    GetReservationHistory,
    NodeHistory,
    RecordedReservation,
    ReservationPage,
    SumAttempts,
)
from fray.model.monitoring.accounting import check_key
from fray.model.text import name_pattern
from fray.net.transport import Bytes
from fray.scheduler.explain.capacity import capacity_samples
from fray.scheduler.history import attempt_record, reservation_record

if TYPE_CHECKING:
    from fray.controller.connections.client import ClientConnection

LIVING = 250
"""Living attempts on one page, and those of one machine more."""
PERIOD_LIMIT_S = 10 * 365 * 86_400.0
_LIVING, _ENDED = "living ", "ended "
_OF_MACHINES = ("node", "devices", "quarantine", "probe", "machine", "group", "zone")
"""First words of the kinds of events about machines, which all clients may see. Others without a job name drivers."""


def get_attempts(client: ClientConnection, ref: int, message: GetAttempts, blobs: Sequence[Bytes]) -> Any:
    """Answer with a page of attempts.

    Raises:
        InvalidRequest: the cursor was not in an answer.
    """
    after = _row_after(message.cursor)
    page = _living(client, message) if after is None else _ended(client, message, after)
    scope = scope_for(client, GetAttempts)
    own = tuple(one for one in page.attempts if _is_own(scope, one))
    return AttemptPage(attempts=own, cursor=page.cursor), ()


def _row_after(cursor: str) -> int | None:
    """Return the row after which a page of what has ended begins; None for a page of what lives.

    Raises:
        InvalidRequest: the cursor was not in an answer.
    """
    if cursor.startswith(_ENDED) and cursor.removeprefix(_ENDED).isdecimal():
        return int(cursor.removeprefix(_ENDED))
    if cursor and not cursor.startswith(_LIVING):
        raise InvalidRequest(f"cursor={cursor!r}: send that of the page before")
    return None


def _living(client: ClientConnection, message: GetAttempts) -> AttemptPage:
    # By machine: an attempt stays on its own, so that none is left out between two pages.
    state, last = client.context.state, message.cursor.removeprefix(_LIVING)
    names = sorted(name for name in state.nodes if name > last)
    found: list[AttemptRecord] = []
    seen = 0
    for name in names:
        if seen >= LIVING:
            return AttemptPage(attempts=tuple(found), cursor=_LIVING + last)
        attempts = [attempt_record(state, state.attempts[attempt]) for attempt in state.on_node[name]]
        found += [one for one in attempts if _matches(message, one)]
        seen, last = seen + len(attempts), name
    return AttemptPage(attempts=tuple(found), cursor=f"{_ENDED}0")


def _ended(client: ClientConnection, message: GetAttempts, after: int) -> AttemptPage:
    equal = {
        column: value
        for column, value in (("user", message.user), ("namespace", message.namespace), ("node", message.node))
        if value
    }
    attempts, last = client.context.store.history.attempts(after, message.since, **equal)
    found = tuple(one for one in attempts if not message.job or message.job in (one.job_id, one.name))
    return AttemptPage(attempts=found, cursor=f"{_ENDED}{last}" if last else "")


def _matches(message: GetAttempts | SumAttempts, one: AttemptRecord) -> bool:
    return (
        message.user in ("", one.user)
        and message.namespace in ("", one.namespace)
        and message.node in ("", one.node)
        and message.job in ("", one.job_id, one.name)
    )


def _is_own(scope: AccessScope | None, one: AttemptRecord) -> bool:
    """Return whether the client may see it; None: all."""
    return scope is None or scope.has_attempt(one.job_id, one.user, one.namespace)


def sum_attempts(client: ClientConnection, ref: int, message: SumAttempts, blobs: Sequence[Bytes]) -> Any:
    """Answer with sums, later.

    Raises:
        InvalidRequest: an unknown key.
    """
    check_key(message.by, DAY)
    client.hub.start_soon(_sum_attempts, client, ref, message)


async def _sum_attempts(client: ClientConnection, ref: int, message: SumAttempts) -> None:
    store, state, scope = client.context.store, client.context.state, scope_for(client, SumAttempts)
    if scope is not None and not scope.is_person:
        client.reply(ref, AttemptSums(rows=(), is_complete=False))
        return
    spaces: list[str] = []
    if scope is not None:
        spaces = [space for space in await store.read_apart(recorded_namespaces) if scope.has_namespace(space)]
    # Living ones and the last row at the same moment: an attempt that ends meanwhile is in the sums once.
    living = (attempt_record(state, state.attempts[one]) for node in sorted(state.nodes) for one in state.on_node[node])
    chosen = [one for one in living if _matches(message, one) and _is_own(scope, one)]
    user = None if scope is None else scope.user
    first, last = store.history.sum_rows(message.since)
    given = SumInput(message, first, last, chosen, user, spaces)
    rows = await store.read_apart(lambda db: sum_in_sql(db, given))
    is_complete = len(rows) <= ROWS_LIMIT
    client.reply(ref, AttemptSums(rows=tuple(rows) if is_complete else (), is_complete=is_complete))


def get_node_history(client: ClientConnection, ref: int, message: GetNodeHistory, blobs: Sequence[Bytes]) -> Any:
    return NodeHistory(nodes=client.context.store.history.nodes(message.since, message.node)), ()


def get_capacity(client: ClientConnection, ref: int, message: GetCapacity, blobs: Sequence[Bytes]) -> Any:
    """Answer with means, later.

    Raises:
        InvalidRequest: a period that is shorter than the time between samples, or longer than ten years.
    """
    if not PERIOD_S <= message.period_s <= PERIOD_LIMIT_S:
        raise InvalidRequest(f"period_s={message.period_s:g} must be {PERIOD_S:g} to {PERIOD_LIMIT_S:g} seconds")
    client.hub.start_soon(_get_capacity, client, ref, message)


async def _get_capacity(client: ClientConnection, ref: int, message: GetCapacity) -> None:
    store, state = client.context.store, client.context.state
    current = capacity_samples(state, client.context.inbox.current_time())
    rows = store.capacity.rows_between(message.since, message.until)
    samples, next_at = await store.read_apart(lambda db: mean_capacity(db, rows, message.period_s))
    client.reply(ref, CapacityHistory(samples=tuple(samples), current=current, next_at=next_at))


def get_reservation_history(
    client: ClientConnection, ref: int, message: GetReservationHistory, blobs: Sequence[Bytes]
) -> Any:
    """Answer with a page of reservations.

    Raises:
        InvalidRequest: the cursor was not in an answer.
    """
    after, scope = _row_after(message.cursor), scope_for(client, GetReservationHistory)
    if after is None:
        page = _living_reservations(client, message.cursor.removeprefix(_LIVING))
    else:
        ended, last = client.context.store.history.reservations(after, message.since)
        page = ReservationPage(reservations=ended, cursor=f"{_ENDED}{last}" if last else "")
    if scope is None:
        return page, ()
    own = tuple(one for one in page.reservations if scope.has_recorded(one.user, one.namespace))
    return ReservationPage(reservations=own, cursor=page.cursor), ()


def _living_reservations(client: ClientConnection, last: str) -> ReservationPage:
    state = client.context.state
    names = sorted(name for name in state.reservation_pools if name > last)
    found: tuple[RecordedReservation, ...] = tuple(
        reservation_record(state.reservations[name]) for name in names[:LIVING]
    )
    cursor = _LIVING + names[LIVING - 1] if len(names) > LIVING else f"{_ENDED}0"
    return ReservationPage(reservations=found, cursor=cursor)


def find_events(client: ClientConnection, ref: int, message: FindEvents, blobs: Sequence[Bytes]) -> Any:
    events, cursor = client.context.store.all_events(message.cursor, message.since)
    scope = scope_for(client, FindEvents)
    if scope is not None:
        events = tuple(one for one in events if _is_visible(scope, one))
    return EventPage(events=tuple(_chosen(client, message, events)), cursor=cursor), ()


def _is_visible(scope: AccessScope, event: Event) -> bool:
    if not event.job:
        return event.what.partition(" ")[0] in _OF_MACHINES
    return scope.has_job_id(event.job) or scope.has_reservation(event.job)


def _chosen(client: ClientConnection, message: FindEvents, events: Sequence[Event]) -> Iterator[Event]:
    name = name_pattern(message.node)
    for one in events:
        is_of_user = not message.user or (one.job and _user_of(client, one.job) == message.user)
        if is_of_user and (not message.node or name.search(one.text)):
            yield one


def _user_of(client: ClientConnection, job: str) -> str:
    """Return the user of a job or reservation on record; empty if there is none."""
    state = client.context.state
    row, past, held = state.jobs.get(job), state.job_tombstones.get(job), state.reservations.get(job)
    if held is not None:
        return held.spec.user
    if row is not None or past is not None:
        return row.spec.user if row is not None else past.user if past is not None else ""
    ended = client.context.store.history.reservation(job)
    return ended.user if ended is not None else ""
