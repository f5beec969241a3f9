"""Verbs that show jobs, wait for them, and stop them."""

from __future__ import annotations

import argparse
import getpass
import socket
import time
from collections.abc import Callable, Mapping, Sequence

import trio

from fray.api.cluster import Cluster
from fray.cli.formatting import (
    CUT,
    GAP,
    fields,
    span,
    span_of,
    table,
    wrapped,
)
from fray.cli.output import (
    can_ask,
    clock,
    confirmed,
    note,
    say,
    say_json,
    width,
)
from fray.cli.target import find, find_all, find_running, listed, namespace_of
from fray.errors import DeadlineExceeded, InvalidRequest, NoSuchJob
from fray.model import job_text
from fray.model.ids import ANONYMOUS_PREFIX, JobId, split_attempt
from fray.model.reservations import ReservationInfo
from fray.model.specs import AttemptInfo, EndReason, JobInfo, JobState
from fray.model.text import byte_size_text, plural, signal_name


async def jobs(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray jobs``."""
    if options.limit < 0:
        raise InvalidRequest(f"--limit {options.limit} must be 0 (all) or more")
    namespace, now = namespace_of(options), time.time()
    states = [*options.state, *(["failed"] if options.failed else [])]
    fits = _filter_of(options, now)
    limit = 0 if fits else options.limit
    found = await cluster.list_jobs(namespace, prefix=options.prefix, states=states, limit=limit)
    if fits:
        found = [info for info in found if all(fit(info) for fit in fits)][-options.limit :]
    if options.json:
        say_json(found)
        return 0
    rows = [(depth, info) for depth, info in tree(found)] if options.tree else [(0, info) for info in found]
    say(job_table(rows, namespace == "*", now, width()))
    if options.limit and len(found) == options.limit:
        note(f"only the newest {options.limit} are shown; --limit 0 shows all")
    return 0


def _filter_of(options: argparse.Namespace, now: float) -> list[Callable[[JobInfo], bool]]:
    """Return the conditions of the options that the controller does not check. Raises InvalidRequest."""
    since_s, until_s = span_of(options.since, "--since"), span_of(options.until, "--until")
    if since_s is not None and until_s is not None and until_s >= since_s:
        raise InvalidRequest(f"--until {options.until} is not later than --since {options.since}: no job can fit")
    fits: list[Callable[[JobInfo], bool]] = []
    if options.group:
        fits.append(lambda info: is_in_group(info, options.group))
    if options.user is not None:
        fits.append(lambda info: info.user == options.user)
    if options.node is not None:
        fits.append(lambda info: any(attempt.node == options.node for attempt in info.attempts))
    if since_s is not None:
        fits.append(lambda info: info.end_time is None or info.end_time >= now - since_s)
    if until_s is not None:
        fits.append(lambda info: (info.launch_time or 0.0) < now - until_s)
    return fits


def tree(found: Sequence[JobInfo]) -> list[tuple[int, JobInfo]]:
    """Return each job with its depth, children after their parents. A job whose parent is not listed has depth 0."""
    ids = {info.job_id for info in found}
    below: dict[str, list[JobInfo]] = {}
    for info in found:
        below.setdefault(info.parent if info.parent in ids else "", []).append(info)
    ordered: list[tuple[int, JobInfo]] = []
    waiting = [(0, info) for info in reversed(below.get("", []))]
    while waiting:
        depth, info = waiting.pop()
        ordered.append((depth, info))
        waiting += [(depth + 1, child) for child in reversed(below.get(info.job_id, []))]
    return ordered


def job_table(
    rows: Sequence[tuple[int, JobInfo]],
    with_namespace: bool,
    now: float,
    max_width: int | None,
) -> list[str]:
    """Return one line per job."""
    grouped = any(info.job_group for _, info in rows)
    heads = [
        "NAME",
        "STATE",
        "TIME",
        "NODE",
        *(["GROUP"] if grouped else []),
        *(["NAMESPACE"] if with_namespace else []),
        "ID",
        "REASON",
    ]
    cells = []
    for depth, info in rows:
        indent = "  " * depth
        namespace = [namespace_text(info.namespace, max_width)] if with_namespace else []
        cells.append(
            [
                f"{indent}{info.name}",
                info.state.value,
                lasted(info, now),
                ",".join(job_text.last_machines(info)),
                *([membership(info)] if grouped else []),
                *namespace,
                # A terminal too narrow for names shows the tree by ids.
                info.job_id if max_width is None else f"{indent}{info.job_id}",
                why(info),
            ]
        )
    # The id begins with the name.
    return table(heads, cells, max_width, optional=("NAMESPACE", "GROUP", "NODE", "NAME", "TIME", "REASON"))


def namespace_text(namespace: str, max_width: int | None) -> str:
    """Return a namespace for a table; on a terminal that of a driver without a namespace is shortened: what runs there
    is chosen by ids.
    """
    is_short = max_width is None or not namespace.startswith(ANONYMOUS_PREFIX)
    return namespace if is_short else namespace[: len(ANONYMOUS_PREFIX) + 4] + CUT


def group_of(info: JobInfo) -> str:
    """Return the name of its job group."""
    return info.job_group.rpartition("-")[0]


def is_in_group(info: JobInfo, group: str) -> bool:
    """Return whether the job is of the job group of this name or id."""
    return group in (info.job_group, group_of(info))


def membership(info: JobInfo) -> str:
    """Return its job group and role: ``rl/trainer``."""
    return f"{group_of(info)}/{info.role}" if info.job_group else ""


def lasted(info: JobInfo, now: float) -> str:
    """Return how long it has waited, has run, or ran."""
    if info.state is JobState.PENDING:
        since = waits_since(info)
        return "" if since is None else span(now - since)
    if info.start_time is None:
        return ""
    return span((now if info.end_time is None else info.end_time) - info.start_time)


def waits_since(info: JobInfo) -> float | None:
    """Return when its last attempt ended, else when it was launched."""
    return max(
        (attempt.end_time for attempt in info.attempts if attempt.end_time is not None), default=info.launch_time
    )


def why(info: JobInfo) -> str:
    """Return the reason why it waits, its progress, or what ended it."""
    if info.state is JobState.PENDING:
        return info.reason
    if info.state is JobState.RUNNING:
        return ", ".join(part for part in (*health_problems(info), job_text.progress_text(info.progress)) if part)
    return info.error_message or ""


# One job -------------------------------------------------------------------------------------------------------------


async def show(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray show``."""
    info = await cluster.poll((await find(cluster, options.job, options)).job_id)
    if options.json:
        say_json(info)
    else:
        say(described(info, time.time(), width()))
    return 0


def _called(info: JobInfo) -> list[tuple[str, str]]:
    """Return the calls that an actor serves, and its callers."""
    calls = next((attempt.calls for attempt in info.members if attempt.calls is not None), None)
    if calls is None:
        return []
    of_actors = [f"{one.name}: {job_text.calls_text(one.metrics)}" for one in calls.actors]
    callers = [f"{one.incarnation} ({one.running} of {plural(one.calls, 'call')} under way)" for one in calls.callers]
    more = [f"{calls.more_callers} more"] if calls.more_callers else []
    return [("calls", "; ".join(of_actors)), ("called by", ", ".join([*callers, *more]))]


def owner_text(info: JobInfo) -> str:
    """Return the owner of a job as text."""
    # An attempt owns what its process launches, unless its job as a whole is to own it.
    if info.owner and info.owner == info.parent:
        return f"job {info.owner}, also while it restarts"
    return info.owner or "the cluster (detached)"


def described(info: JobInfo, now: float, max_width: int | None) -> list[str]:
    """Return all details of a job."""
    lines = fields(
        [
            ("job", info.job_id),
            ("name", info.name),
            ("namespace", info.namespace),
            ("group", membership(info)),
            ("state", state_now(info, now)),
            ("reason", info.reason if info.state is JobState.PENDING else info.error_message or ""),
            ("owner", owner_text(info)),
            ("parent", info.parent),
            ("user", info.user),
            ("ended by", info.ended_by),
            ("retries", ", ".join(f"{count} after {cause}" for cause, count in info.retries.items())),
            ("first to end", "" if info.first_member is None else f"member {info.first_member}"),
            ("launched", clock(info.launch_time)),
            ("started", clock(info.start_time)),
            ("ended", clock(info.end_time)),
            ("ran for", lasted(info, now) if info.state.finished else ""),
            ("progress", job_text.progress_text(info.progress)),
            *_called(info),
            ("ports", ", ".join(f"{name} {address}" for name, address in info.ports.items())),
            ("next", advice(info)),
        ],
        max_width,
    )
    if info.attempts:
        rows = [_attempt_row(attempt, now) for attempt in info.attempts]
        lines += [
            "",
            *table(
                *filled_columns(ATTEMPT_HEADS, rows),
                max_width,
                optional=("LEFT", "CPU", "MEMORY", "STARTED", "PID", "PROGRESS", "PEAK", "TIME"),
            ),
        ]
    for attempt in info.attempts:
        if attempt.captured:
            lines += ["", f"stacks of {attempt.attempt_id}:", *attempt.captured.splitlines()]
    return lines


def state_now(info: JobInfo, now: float) -> str:
    """Return state and duration: ``pending for 35s``, ``running for 2m05s, stalled``, ``failed (environment) 20s
    ago``.
    """
    state = job_text.state_text(info)
    if info.state.finished:
        return state if info.end_time is None else f"{state} {span(now - info.end_time)} ago"
    lasting = lasted(info, now)
    return ", ".join([f"{state} for {lasting}" if lasting else state, *health_problems(info)])


def health_problems(info: JobInfo) -> list[str]:
    """Return the problems of its living members, without duplicates."""
    return sorted({attempt.health for attempt in info.members} - {"", "well"})


def advice(info: JobInfo) -> str:
    """Return commands that help with the job in its present state."""
    job = info.job_id
    if info.state is JobState.PENDING:
        first = f"`fray logs {job}`" if info.attempts else f"`fray explain {job}` shows the reason for each machine"
        return f"{first}; `fray nodes`; `fray stop {job}`"
    if info.state is JobState.RUNNING:
        return f"`fray logs -f {job}`; `fray stacks {job}`; `fray stop {job}`"
    if info.cause is EndReason.ENVIRONMENT:
        return f"`fray logs {job}` has every step; it is not retried: fix the cause and launch it again"
    if info.state is JobState.FAILED:
        return f"`fray logs {job}`; `fray events {job}`"
    return ""


ATTEMPT_HEADS = (
    "ATTEMPT",
    "NODE",
    "PID",
    "STARTED",
    "TIME",
    "STATE",
    "MEMORY",
    "PEAK",
    "CPU",
    "LEFT",
    "PROGRESS",
    "REASON",
)
"""Columns of attempts. LEFT: number of processes that the attempt left behind and that were killed."""


def _attempt_row(attempt: AttemptInfo, now: float) -> list[str]:
    _, generation, member = split_attempt(attempt.attempt_id)
    began, end = attempt.start_time, now if attempt.end_time is None else attempt.end_time
    living = attempt.cause is None
    return [
        f"{generation}.{member}",
        attempt.node,
        str(attempt.pid or ""),
        clock(began),
        "" if began is None else span(end - began),
        (attempt.health or ("running" if began is not None else "starting")) if living else ended_as(attempt),
        byte_size_text(attempt.memory_bytes) if living and attempt.memory_bytes else "",
        byte_size_text(attempt.peak_memory_bytes) if attempt.peak_memory_bytes else "",
        span(attempt.cpu_s) if attempt.cpu_s else "",
        str(attempt.swept or ""),
        job_text.progress_text(attempt.progress),
        attempt.message,
    ]


def filled_columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Return the table without the columns that are empty in all rows."""
    filled = [column for column in range(len(heads)) if any(row[column] for row in rows)]
    return [heads[column] for column in filled], [[row[column] for column in filled] for row in rows]


def ended_as(attempt: AttemptInfo) -> str:
    """Return how it ended: ``killed (SIGKILL)``, ``failure 3``, ``succeeded``; empty while it lives."""
    if attempt.cause is None:
        return ""
    if attempt.signal is not None:
        return f"{attempt.cause.value} ({signal_name(attempt.signal)})"
    return f"{attempt.cause.value} {attempt.exit_code}" if attempt.exit_code else attempt.cause.value


async def explain(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray explain``."""
    try:
        info = await find(cluster, options.job, options)
        name, state = info.job_id, str(info.state)
    except NoSuchJob as unknown:
        reserved = await _reservation(cluster, options.job, unknown)
        name, state = reserved.reservation_id, str(reserved.state)
    text = await cluster.explain(name)
    if options.json:
        say_json({"job_id": name, "state": state, "text": text})
    else:
        say(
            part
            for line in text.splitlines()
            for part in wrapped(line, width(), len(line) - len(line.lstrip(" ")) + len(GAP))
        )
    return 0


async def find_id(cluster: Cluster, options: argparse.Namespace, name: str) -> str:
    """Return the id of the job or reservation of this name or id."""
    try:
        return (await find(cluster, name, options)).job_id
    except NoSuchJob as unknown:
        return (await _reservation(cluster, name, unknown)).reservation_id


async def _reservation(cluster: Cluster, name: str, unknown: NoSuchJob) -> ReservationInfo:
    """Return the reservation of this id; raise ``unknown`` if there is none."""
    for info in await cluster.list_reservations("*", ended=True):
        if info.reservation_id == name:
            return info
    raise unknown


async def stacks(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray stacks``."""
    info = await find_running(cluster, options, "only running jobs have stacks")
    return show_stacks(await cluster.stacks(info.job_id), options)


def show_stacks(found: Mapping[str, str], options: argparse.Namespace) -> int:
    """Print stacks by attempt."""
    if options.json:
        say_json(found)
        return 0
    for attempt_id, text in found.items():
        say([f"== {attempt_id}", text, ""])
    return 0


# Waiting and ending --------------------------------------------------------------------------------------------------


async def wait(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray wait``."""
    _check_choice(options, "that would wait for everything")
    ids = await find_all(cluster, options.jobs, options)
    if not ids:
        ids = [info.job_id for info in await _chosen_living(cluster, options)]
        if not ids:
            # Not a success: what was to be waited for may have failed already.
            raise NoSuchJob(_none(options), name=options.prefix or options.group)
    infos = await _ended(cluster, ids, options.timeout)
    if options.json:
        say_json(infos)
    else:
        say(f"{info.job_id}: {job_text.state_text(info)}{_end_reason(info)}" for info in infos)
    return next((code for info in infos if (code := exit_code(info))), 0)


def _end_reason(info: JobInfo) -> str:
    return f": {info.error_message}" if info.error_message else ""


def exit_code(info: JobInfo) -> int:
    """Return the exit code of a job as a shell has it: its own, 128 plus its signal, 0 for success, else 1."""
    if info.state is JobState.SUCCEEDED:
        return 0
    if info.signal is not None:
        return 128 + info.signal
    return info.exit_code or 1


async def _ended(cluster: Cluster, ids: Sequence[JobId], timeout_s: float | None) -> list[JobInfo]:
    with trio.move_on_after(float("inf") if timeout_s is None else timeout_s):
        return await cluster.wait(list(ids))
    left = [info for job_id in ids if not (info := await cluster.poll(job_id)).state.finished]
    names = ", ".join(info.job_id for info in left[:5])
    raise DeadlineExceeded(f"{len(left)} of {len(ids)} jobs have not ended after {timeout_s:g} s: {names}")


async def stop(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray stop``."""
    _check_choice(options, "that would stop everything")
    ids = await find_all(cluster, options.jobs, options)
    if not options.jobs and not options.yes and not await _may_stop(cluster, options):
        return 1
    requested = await cluster.terminate(
        ids,
        stop_reason(options.reason),
        prefix=options.prefix,
        namespace=namespace_of(options),
        tree=options.tree,
        group=options.group,
    )
    if not options.jobs and not requested:
        note(_none(options))
    ids = list(dict.fromkeys([*ids, *requested]))
    if options.no_wait:
        if options.json:
            say_json([{"job_id": job_id} for job_id in ids])
        return 0
    infos = await _ended(cluster, ids, options.timeout)
    if options.json:
        say_json(infos)
    else:
        say(f"{info.job_id}: {job_text.state_text(info)}" for info in infos)
    return 0


async def requeue(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray requeue``."""
    _check_choice(options, "that would requeue everything")
    if options.jobs:
        ids = await find_all(cluster, options.jobs, options)
    else:
        found = [info for info in await _chosen_living(cluster, options) if info.state is JobState.RUNNING]
        if not found:
            raise NoSuchJob(_none(options, "running"), name=options.prefix or options.group)
        if len(found) > 1 and not options.yes and can_ask():
            question = f"these {len(found)} jobs would end, and wait again:\n{listed(found)}\nRequeue them? [y/N]"
            if not await confirmed(question):
                return 1
        ids = [info.job_id for info in found]
    requester = requester_of("fray requeue")
    done = await cluster.requeue(ids, f"{requester}: {options.reason}" if options.reason else requester)
    if options.json:
        say_json(done)
    else:
        say(f"{job_id}: requeued" for job_id in done.jobs)
        for job_id, why_not in done.refused.items():
            note(f"{job_id} was not requeued: {why_not}")
    return 1 if done.refused else 0


def _check_choice(options: argparse.Namespace, danger: str) -> None:
    """Check that jobs are given in one way: by name, by prefix or by group. Raises InvalidRequest."""
    given = sum([bool(options.jobs), options.prefix is not None, options.group is not None])
    if not given:
        raise InvalidRequest("no jobs given: write their names or ids, or --prefix P, or --group G for a job group")
    if given > 1:
        raise InvalidRequest("names of jobs, --prefix and --group exclude each other: give one of them")
    if options.prefix == "" or options.group == "":
        raise InvalidRequest(f"--prefix and --group must not be empty: {danger}")


async def _chosen_living(cluster: Cluster, options: argparse.Namespace) -> list[JobInfo]:
    """Return the living jobs of ``--prefix`` or ``--group``."""
    found = await cluster.list_jobs(namespace_of(options), prefix=options.prefix or "", states=["pending", "running"])
    if options.group is not None:
        return [info for info in found if is_in_group(info, options.group)]
    # The list has jobs whose ids begin so as well.
    return [info for info in found if info.name.startswith(options.prefix)]


def _none(options: argparse.Namespace, state: str = "living") -> str:
    if options.prefix is not None:
        return f"no {state} job has the prefix {options.prefix!r}"
    return f"no {state} job group named {options.group!r}"


async def _may_stop(cluster: Cluster, options: argparse.Namespace) -> bool:
    """Ask on a terminal whether the several jobs of a prefix or group may be stopped; elsewhere return True."""
    if not can_ask():
        return True
    found = await _chosen_living(cluster, options)
    if len(found) <= 1:
        return True
    return await confirmed(
        f"these {len(found)} jobs, and all below them, would be stopped:\n{listed(found)}\nStop them? [y/N]"
    )


def stop_reason(reason: str) -> str:
    """Return the reason of a stop: ``fray stop by alice@laptop: wrong learning rate``."""
    requester = requester_of("fray stop")
    return f"{requester}: {reason}" if reason else requester


def requester_of(command: str, user: str = "") -> str:
    """Return who acts through a command. Without ``user`` it is the account of this process."""
    try:
        user = user or getpass.getuser()
    except (KeyError, OSError):  # no such user in this container
        user = "unknown"
    return f"`{command}` by {user}@{socket.gethostname()}"
