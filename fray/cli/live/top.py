"""``fray top``: what a cluster does, live, on the whole terminal; elsewhere once."""

from __future__ import annotations

import argparse
import shutil
import signal
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress

import trio
from attrs import define, field, frozen

from fray.api.cluster import Cluster
from fray.cli.formatting import Line, span, table
from fray.cli.jobs import why
from fray.cli.live.options import SORTS
from fray.cli.live.terminal import full_screen, is_terminal, read_keys
from fray.cli.nodes import node_table, state_of
from fray.cli.output import note, say, say_json, say_screen, width
from fray.cli.queue import totals
from fray.cli.target import namespace_of
from fray.errors import FrayError
from fray.model.job_text import last_machines
from fray.model.messages.client import NodeInfo
from fray.model.messages.usage import UsageInfo
from fray.model.specs import JobInfo
from fray.model.text import byte_size_text

LOOK_S = 2.0
"""Seconds between two looks at the cluster."""
DRAW_S = 1.0
"""Longest pause between two screens, so that ages and a new size of the terminal are shown."""
SILENT_S = 6.0
"""Age of the numbers from which it is shown."""
RATE_SAMPLES = 5
"""Looks over which the CPUs in use are averaged; nodes measure twice a second."""
JOBS_LIMIT = 1_000
"""Newest running jobs that are looked at."""
BAR = 20
HELP = "q quit, s sort, r reverse, / filter, m machines, arrows scroll"


@frozen(kw_only=True)
class RunningJob:
    """A job and what it uses now."""

    info: JobInfo
    cpus: float
    """CPUs in use; of a first look the mean since its start."""
    memory_bytes: int
    devices: int
    """Accelerators that it holds."""
    runs_s: float

    def sort_key(self, sort: str) -> tuple[float, str]:
        """Return the key by which a list has the largest first; ids in their order."""
        numbers = {"cpu": self.cpus, "memory": self.memory_bytes, "devices": self.devices, "time": self.runs_s}
        return -numbers.get(sort, 0.0), self.info.job_id


@frozen(kw_only=True)
class ClusterSnapshot:
    """State of a cluster at one look."""

    at: float
    """Seconds since the epoch."""
    usage: UsageInfo
    nodes: tuple[NodeInfo, ...]
    waiting: int
    jobs: tuple[RunningJob, ...]


@define
class Looker:
    """Looks at the cluster, and remembers CPU times, of which it makes rates."""

    cluster: Cluster
    namespace: str
    _past: deque[tuple[float, dict[str, float]]] = field(factory=lambda: deque(maxlen=RATE_SAMPLES))
    """Time and CPU seconds by job of the last looks."""

    async def look(self) -> ClusterSnapshot:
        usage, nodes = await self.cluster.usage(), await self.cluster.nodes()
        queue = await self.cluster.queue(limit=1)
        infos = await self.cluster.list_jobs(self.namespace, states=["running"], limit=JOBS_LIMIT)
        now = time.time()
        spent = {info.job_id: sum(run.cpu_s for run in info.members) for info in infos}
        jobs = running_jobs(infos, nodes, now, self._past[0] if self._past else None)
        self._past.append((now, spent))
        return ClusterSnapshot(at=now, usage=usage, nodes=tuple(nodes), waiting=queue.total, jobs=tuple(jobs))


def running_jobs(
    infos: Sequence[JobInfo], nodes: Sequence[NodeInfo], now: float, past: tuple[float, dict[str, float]] | None
) -> list[RunningJob]:
    """Return the jobs with what they use.

    Args:
        past: time and CPU seconds by job of an earlier look.
    """
    held = Counter(attempt for node in nodes for attempt in node.granted.values())
    found = []
    for info in infos:
        spent = sum(run.cpu_s for run in info.members)
        runs_s = max(0.0, now - (info.start_time or now))
        then, before = past if past is not None else (0.0, {})
        is_known = info.job_id in before and before[info.job_id] <= spent  # a restart begins at 0
        seconds, used = (now - then, spent - before[info.job_id]) if is_known else (runs_s, spent)
        found.append(
            RunningJob(
                info=info,
                cpus=used / seconds if seconds > 0 else 0.0,
                memory_bytes=sum(run.memory_bytes for run in info.members),
                devices=sum(held[run.attempt_id] for run in info.members),
                runs_s=runs_s,
            )
        )
    return found


@define
class TopView:
    """Choices of the person at the keyboard."""

    sort: str = SORTS[0]
    is_reversed: bool = False
    text: str = ""
    """Only lines with this text."""
    is_typing: bool = False
    shows_machines: bool = False
    first: int = 0
    """Number of the first line of the table that is shown."""
    page: int = 10
    """Lines of the table that fit."""

    def press(self, key: str) -> bool:
        """Do what a key means; return False if it ends the command."""
        if self.is_typing:
            self._type(key)
            return True
        match key:
            case "q":
                return False
            case "s":
                self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
            case "r":
                self.is_reversed = not self.is_reversed
            case "m":
                self.shows_machines = not self.shows_machines
            case "/":
                self.is_typing = True
            case "escape":
                self.text = ""
            case "up" | "down" | "page up" | "page down":
                lines = self.page if key.startswith("page") else 1
                self.first = max(0, self.first + (lines if key.endswith("down") else -lines))
        return True

    def _type(self, key: str) -> None:
        self.first = 0
        if key in ("enter", "escape"):
            self.is_typing = False
            self.text = self.text if key == "enter" else ""
        elif key == "backspace":
            self.text = self.text[:-1]
        elif len(key) == 1 and key.isprintable():
            self.text += key


async def top(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray top``."""
    looker, view = Looker(cluster, namespace_of(options)), TopView(sort=options.sort)
    if options.json or not is_terminal():
        snapshot = await looker.look()
        if options.json:
            say_json(as_json(snapshot, view))
        else:
            say(lines_of(snapshot, view, snapshot.at, width(), None))
        if len(snapshot.jobs) == JOBS_LIMIT:
            note(f"only the newest {JOBS_LIMIT:,} running jobs are shown")
        return 0
    return await _LiveScreen(looker, view).run()


@define
class _LiveScreen:
    """The live screen: one task looks, one reads keys and draws."""

    looker: Looker
    view: TopView
    snapshot: ClusterSnapshot | None = None
    problem: str = ""
    code: int = 0

    async def run(self) -> int:
        with full_screen():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._look)
                nursery.start_soon(self._end_by_signal, nursery.cancel_scope)
                await self._read_and_draw()
                nursery.cancel_scope.cancel()
        return self.code

    async def _look(self) -> None:
        while True:
            try:
                self.snapshot, self.problem = await self.looker.look(), ""
            except FrayError as error:
                self.problem = str(error)
            self._draw()
            await trio.sleep(LOOK_S)

    async def _end_by_signal(self, scope: trio.CancelScope) -> None:
        # Without a handler it would end the process with the terminal as it is.
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGHUP) as signals:
            async for number in signals:
                self.code = 128 + number
                scope.cancel()

    async def _read_and_draw(self) -> None:
        while True:
            keys: list[str] | None = None
            with trio.move_on_after(DRAW_S):
                keys = await read_keys()
            if keys == [] or not all(map(self.view.press, keys or ())):
                return
            self._draw()

    def _draw(self) -> None:
        size = shutil.get_terminal_size()
        if self.snapshot is None:
            say_screen([self.problem or "asking the cluster …"])
            return
        lines = lines_of(self.snapshot, self.view, time.time(), size.columns, size.lines - 1)
        if self.problem:
            lines[0] = Line.of(((self.problem[: size.columns], "red"),))
        with suppress(BlockingIOError):  # a terminal that does not keep up gets the next screen
            say_screen(lines)


def lines_of(
    snapshot: ClusterSnapshot, view: TopView, now: float, max_width: int | None, max_lines: int | None
) -> list[str]:
    """Return the lines of a screen: the cluster, then jobs or machines.

    Args:
        max_lines: lines of the screen, which are filled; the view is scrolled so that it shows something. None: all.
    """
    lines = [*_heads(snapshot, now), *_bars(snapshot.usage), ""]
    if view.shows_machines:
        heads, *rows = node_table([node for node in snapshot.nodes if view.text in node.name], max_width)
    else:
        heads, *rows = job_table(chosen(snapshot.jobs, view), max_width)
    if max_lines is None:
        return [*lines, heads, *rows]
    view.page = max(1, max_lines - len(lines) - 2)
    view.first = min(view.first, max(0, len(rows) - view.page))
    shown = rows[view.first : view.first + view.page]
    filler = [""] * (view.page - len(shown))
    cut = [line if max_width is None else Line.of(_cut(line, max_width)) for line in lines]
    return [*cut, heads, *shown, *filler, _foot(view, len(rows))[:max_width]][: max(max_lines, 1)]


def chosen(jobs: Sequence[RunningJob], view: TopView) -> list[RunningJob]:
    """Return the jobs with the text of the view, in its order."""
    found = [
        job
        for job in jobs
        if any(view.text in text for text in (job.info.job_id, job.info.user, *last_machines(job.info)))
    ]
    return sorted(found, key=lambda job: job.sort_key(view.sort), reverse=view.is_reversed)


def job_table(jobs: Sequence[RunningJob], max_width: int | None) -> list[str]:
    """Return a line for each job."""
    heads = ["ID", "USER", "NODE", "CPUS", "MEMORY", "DEVICES", "TIME", "PROGRESS"]
    rows = [
        [
            job.info.job_id,
            job.info.user,
            ",".join(last_machines(job.info)),
            f"{job.cpus:.2f}",
            byte_size_text(job.memory_bytes),
            str(job.devices or ""),
            span(job.runs_s),
            why(job.info),
        ]
        for job in jobs
    ]
    return table(heads, rows, max_width, optional=("NODE", "USER", "PROGRESS", "DEVICES", "TIME"))


def _heads(snapshot: ClusterSnapshot, now: float) -> list[str]:
    states = Counter(map(state_of, snapshot.nodes))
    machines = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none"
    first = f"{len(snapshot.jobs)} running, {snapshot.waiting} waiting; machines: {machines}"
    age_s = now - snapshot.at
    return [f"no answer for {span(age_s)}: {first}" if age_s > SILENT_S else first]


def _bars(usage: UsageInfo) -> list[str]:
    lines: list[str] = []
    texts = totals(usage)[: len(usage.capacity)]  # those of resources come first, in this order
    room = max((len(name) for name, _ in texts), default=0)
    for (name, text), resource in zip(texts, usage.capacity, strict=True):
        capacity = usage.capacity[resource]
        part = min(1.0, usage.used.get(resource, 0.0) / capacity) if capacity else 0.0
        color = "red" if part > 0.95 else "green"
        filled = "#" * round(part * BAR)
        lines.append(Line.of(((f"{name:{room}}  [", ""), (filled, color), (f"{'':{BAR - len(filled)}}] {text}", ""))))
    return lines


def _foot(view: TopView, count: int) -> str:
    if view.is_typing:
        return f"/{view.text}_  (Enter keeps it, Escape removes it)"
    last = min(count, view.first + view.page)
    shown = f"{view.first + 1}-{last} of {count}" if count > view.page else f"{count} shown"
    order = f" by {view.sort}{' reversed' if view.is_reversed else ''}" if not view.shows_machines else ""
    text = f", with {view.text!r}" if view.text else ""
    return f"{shown}{order}{text}; {HELP}"


def _cut(line: str, room: int) -> list[tuple[str, str]]:
    """Return the parts of a line as far as they fit."""
    parts = []
    for text, color in line.parts if isinstance(line, Line) else ((line, ""),):
        parts.append((text[: max(0, room)], color))
        room -= len(text)
    return parts


def as_json(snapshot: ClusterSnapshot, view: TopView) -> object:
    """Return one look as JSON has it."""
    jobs = [
        {
            "job_id": job.info.job_id,
            "name": job.info.name,
            "namespace": job.info.namespace,
            "user": job.info.user,
            "nodes": list(last_machines(job.info)),
            "cpus": job.cpus,
            "memory_bytes": job.memory_bytes,
            "devices": job.devices,
            "runs_s": job.runs_s,
            "progress": job.info.progress,
        }
        for job in chosen(snapshot.jobs, view)
    ]
    return {
        "at": snapshot.at,
        "waiting": snapshot.waiting,
        "usage": snapshot.usage,
        "nodes": snapshot.nodes,
        "jobs": jobs,
    }
