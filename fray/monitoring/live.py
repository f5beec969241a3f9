"""Live tables: what pages show, asked from the controller once for all of them, and sent as differences.

Invariants: the controller is asked only for tables that some page shows, whatever the number of pages; a page that
reads slowly is sent the latest state of each row, so what waits for it is bounded by the rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import trio
from attrs import define, field, frozen

from fray.api.cluster import Cluster
from fray.errors import ConnectionFailed, FrayError
from fray.monitoring.rows import Row

ROW_S = 0.005
"""Pause for each row of the last answer, in seconds: a row takes about 0.1 ms of the controller's time, so that a table
takes 2 % of it, however long it is."""
ASK_EVERY_S = 0.2
"""Least pause between two questions for one table, in seconds."""
ASK_LIMIT_S = 10.0
"""Longest such pause, in seconds."""
WAIT_S = 1.0
"""Seconds for which the controller holds back an answer without a change."""
CHANGES_EVERY_S = 0.1
"""Least pause between two questions for changes, in seconds: those of a burst come together."""
CHANGES_LIMIT_S = 0.2
"""Longest such pause, in seconds: pages are not to be further behind."""
ANSWER_WITHIN_S = 3.0
"""Seconds after which a controller that has not answered is shown as away."""


@frozen
class Changes:
    """Some rows of a table."""

    rows: Sequence[Row]
    gone: Sequence[str] = ()
    """Keys of rows to be removed."""
    is_whole: bool = False
    """All other rows are to be removed, too."""
    has_more: bool = False
    """There are further changes: they are asked for at once."""
    is_pushed: bool = False
    """The controller has held the answer back until there was a change: the next question follows soon."""


Ask: TypeAlias = Callable[[Cluster], Awaitable["Sequence[Row] | Changes | None"]]
"""Question for all rows of a table, or for those that have changed; None: there was nothing to ask."""
FindCluster: TypeAlias = Callable[[], Cluster | None]


@define(eq=False)
class Table:
    """One table: its rows as JSON by key, and the pages that show it."""

    name: str
    asks: Sequence[Ask]
    """Questions about it, each with a pace of its own."""
    every_s: float
    is_kept: bool = False
    """True if its rows stay while no page shows it."""
    rows: dict[str, str] = field(factory=dict)
    pages: dict[Page, None] = field(factory=dict)
    is_known: bool = False
    """False before the first answer: a page shows nothing, instead of an empty table."""
    error: str = ""
    """Reason why the controller refused the last question; empty if it did not."""
    into: Table | None = None
    """Table to which the answers belong, in place of this one."""
    asking: trio.CancelScope | None = None

    def take(self, changes: Changes) -> None:
        """Take an answer; mark the rows that differ for the pages."""
        is_changed, self.error = self.error != "", ""
        rows = {str(row[0]): json.dumps(row, separators=(",", ":")) for row in changes.rows}
        changed = [key for key, text in rows.items() if self.rows.get(key) != text]
        if changes.is_whole:
            gone = [key for key in self.rows if key not in rows]
            self.rows = rows
        else:
            self.rows.update(rows)
            gone = [key for key in changes.gone if self.rows.pop(key, None) is not None]
        self._mark([*changed, *gone], is_changed)

    def refuse(self, error: str) -> None:
        """Take the reason why there is no answer; the rows stay."""
        is_changed, self.error = self.error != error, error
        self._mark((), is_changed)

    def _mark(self, keys: Sequence[str], is_changed: bool) -> None:
        is_first, self.is_known = not self.is_known, True
        for page in self.pages:
            if keys or is_first or is_changed:
                page.mark(self.name, keys)


class Page:
    """One open page: which rows it has not been sent yet."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = {table.name: table for table in tables}
        self._waiting: dict[str, dict[str, None]] = {
            table.name: dict.fromkeys(table.rows) for table in tables if table.is_known
        }
        self._wake = trio.Event()

    def mark(self, table: str, keys: Iterable[str]) -> None:
        """Note that these rows of a table have changed."""
        self._waiting.setdefault(table, {}).update(dict.fromkeys(keys))
        self._wake.set()

    async def changes(self, within_s: float) -> list[str]:
        """Return what has changed as JSON objects, one for each table; empty if that is nothing for so long."""
        if not self._waiting:
            with trio.move_on_after(within_s):
                await self._wake.wait()
        self._wake = trio.Event()
        waiting, self._waiting = self._waiting, {}
        return [self._text(self._tables[name], keys) for name, keys in waiting.items()]

    def _text(self, table: Table, keys: Iterable[str]) -> str:
        present = [text for key in keys if (text := table.rows.get(key)) is not None]
        gone = [key for key in keys if key not in table.rows]
        error = f',"error":{json.dumps(table.error)}' if table.error else ""
        return f'{{"table":{json.dumps(table.name)},"rows":[{",".join(present)}],"gone":{json.dumps(gone)}{error}}}'


class LiveTables:
    """Tables of one cluster.

    Args:
        cluster: returns the connection; None while there is none.
        describe: returns the row of the table ``status``, given for how many seconds the controller has not answered.
    """

    def __init__(self, cluster: FindCluster, describe: Callable[[float], Row]) -> None:
        self._cluster, self._describe = cluster, describe
        self._status = Table("status", [self._ask_status], math.inf)
        self._tables: dict[str, Table] = {"status": self._status}
        self._nursery: trio.Nursery | None = None
        self._asked: dict[Ask, float] = {}
        """Time at which each question that has not been answered was sent."""
        self._away_since: float | None = None

    def add(self, name: str, *asks: Ask, every_s: float = ASK_EVERY_S, is_kept: bool = False, into: str = "") -> None:
        """Add a table, about which ``asks`` ask every ``every_s`` seconds while a page shows it.

        Args:
            is_kept: its rows stay while no page shows it.
            into: name of the table whose rows the answers are: this one has none, and pages name it to have those
                asked for.
        """
        self._tables[name] = Table(name, asks, every_s, is_kept, into=self._tables[into] if into else None)

    def __contains__(self, name: str) -> bool:
        return name in self._tables

    async def ask_once(self, name: str) -> Sequence[Row]:
        """Return the rows of a table, asked now.

        Raises:
            ConnectionFailed: there is no connection.
            FrayError: the controller refuses.
        """
        cluster = self._cluster()
        if cluster is None:
            raise ConnectionFailed("the controller does not answer")
        answer = await _changes(self._tables[name].asks[0], cluster)
        return answer.rows if answer is not None else ()

    @contextmanager
    def open_page(self, names: Iterable[str], own: Table | None = None) -> Iterator[Page]:
        """Open a page that shows these tables (each named once), the status, and a table of its own.

        Raises:
            KeyError: there is no such table.
        """
        shown = [self._tables[name] for name in names if name != self._status.name]
        tables = [self._status, *shown, *([own] if own is not None else [])]
        page = Page(tables)
        for table in tables:
            table.pages[page] = None
            if table is not self._status and table.asking is None:
                assert self._nursery is not None
                table.asking = trio.CancelScope()
                self._nursery.start_soon(self._keep_asking, table, table.asking)
        try:
            yield page
        finally:
            for table in tables:
                del table.pages[page]
                if not table.pages and table.asking is not None:
                    table.asking.cancel()
                    table.asking = None
                    if not table.is_kept:
                        # What it had is old when the next page comes.
                        table.rows, table.is_known = {}, False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Ask for what pages show, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            while True:
                self._status.take(Changes([self._status_row()], is_whole=True))
                await trio.sleep(ASK_EVERY_S if self._status.pages else 1.0)

    async def _ask_status(self, cluster: Cluster) -> Sequence[Row]:
        return [self._status_row()]

    def _status_row(self) -> Row:
        now = trio.current_time()
        oldest = min(self._asked.values(), default=now)
        if self._cluster() is None:
            self._away_since = now if self._away_since is None else self._away_since
        elif now - oldest > ANSWER_WITHIN_S:
            self._away_since = oldest
        else:
            self._away_since = None
        return self._describe(0.0 if self._away_since is None else math.floor(now - self._away_since))

    async def _keep_asking(self, table: Table, scope: trio.CancelScope) -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                for ask in table.asks:
                    nursery.start_soon(self._repeat, table, ask)

    async def _repeat(self, table: Table, ask: Ask) -> None:
        while True:
            answer = await self._ask(table, ask)
            if answer is not None and answer.has_more:
                continue
            pause_s = ROW_S * len(answer.rows) if answer is not None else 0.0
            if answer is not None and answer.is_pushed:
                await trio.sleep(min(max(pause_s, CHANGES_EVERY_S), CHANGES_LIMIT_S))
            else:
                await trio.sleep(max(table.every_s, min(pause_s, ASK_LIMIT_S)))

    async def _ask(self, table: Table, ask: Ask) -> Changes | None:
        """Ask once; return the answer."""
        cluster = self._cluster()
        if cluster is None:
            return None
        self._asked[ask] = trio.current_time()
        try:
            answer = await _changes(ask, cluster)
            if answer is not None:
                (table.into or table).take(answer)
            return answer
        except FrayError as error:
            table.refuse(str(error))
            return None
        finally:
            del self._asked[ask]


async def _changes(ask: Ask, cluster: Cluster) -> Changes | None:
    """Return the answer to a question; a list of rows is all of them."""
    answer = await ask(cluster)
    return answer if answer is None or isinstance(answer, Changes) else Changes(answer, is_whole=True)
