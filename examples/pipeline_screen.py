"""Output of the pipeline example: progress bars, and the report."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

PLAIN_EVERY_S = 2.0


class Screen:
    """Progress on stderr: a live bar per stage on a terminal; elsewhere a line when a stage is done, or takes long."""

    def __init__(self) -> None:
        self._bars: Progress | None = None
        self._bar: dict[str, TaskID] = {}
        self._last_line_s = time.monotonic()
        self._lost = 0
        self._ended = ""

    def __enter__(self) -> Screen:
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description:>8}"), BarColumn(24), TextColumn("{task.percentage:>3.0f}%"))
            self._bars = Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True))
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        if self._bars is not None:
            self._bars.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def update(self, progress: Mapping[str, Any]) -> None:
        """Show the progress of the coordinator."""
        stage, done, shards = progress["stage"], progress["done"], progress["shards"]
        for lost in progress["lost"][self._lost :]:
            shards_lost = ", ".join(lost["shards"]) or "nothing"
            self.say(f"lost {lost['worker']} (pid {lost['pid']}); taken over by others: {shards_lost}")
        self._lost = len(progress["lost"])
        note = f"{done} of {shards} shards · {progress['busy']} under way · {progress['workers']} workers"
        note += f" · {progress['skipped']} were finished before" if progress["skipped"] else ""
        now = time.monotonic()
        if self._bars is not None:
            if stage not in self._bar:
                self._bar[stage] = self._bars.add_task(stage, total=shards, note="")
            self._bars.update(self._bar[stage], completed=done, note=note)
        elif (done == shards and self._ended != stage) or now - self._last_line_s >= PLAIN_EVERY_S:
            self._last_line_s, self._ended = now, stage if done == shards else self._ended
            print(f"{stage:>8} {100 * done // max(1, shards):3d}%  {note}", file=sys.stderr, flush=True)


class Board:
    """Actor in the driver's process that shows the coordinator's progress."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def show(self, progress: Mapping[str, Any]) -> None:
        self._screen.update(progress)


def print_report(report: Mapping[str, Any], top: int = 12, groups: int = 5) -> None:
    """Print the report to stdout."""
    result, run = report["result"], report["run"]
    print(f"\n{'package':20} {'documents':>10} {'words':>9} {'near copies':>11}")
    rows = sorted(result["table"], key=lambda row: (-row["docs"], row["package"]))
    for row in rows[:top]:
        print(f"{row['package']:20} {row['docs']:10,} {row['words']:9,} {row['copies']:11,}")
    total = {name: sum(row[name] for row in rows) for name in ("docs", "words", "copies")}
    print(f"{f'all {len(rows)}':20} {total['docs']:10,} {total['words']:9,} {total['copies']:11,}")
    print(f"\n{len(result['pairs']):,} pairs, {len(result['groups']):,} groups of near copies; the largest:")
    for members in sorted(result["groups"], key=lambda members: (-len(members), members))[:groups]:
        print(f"  {len(members):4d} x {members[0]}, {members[1]}{', …' if len(members) > 2 else ''}")
    print()
    for stage in run["stages"]:
        again = "".join(f", {stage[what]} {what}" for what in ("skipped", "retried") if stage[what])
        shards = f"{stage['shards']} shards{again}, {stage['seconds']:.1f} s"
        print(f"{stage['stage']:>8}: {stage['rows']:7,} rows, {shards}")
    for lost in run["lost"]:
        print(f"lost {lost['worker']} (pid {lost['pid']}) with {', '.join(lost['shards']) or 'nothing to do'}")
    if run["half_written"]:
        print(f"{run['half_written']} half-written shards of an earlier run were deleted")
    print(f"{report['seconds']:.1f} s with {report['workers']} workers; everything is in {report['output']}")
