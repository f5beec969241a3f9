"""Output of the corpus example: progress bars, a report as text, and as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

try:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn
except ImportError:  # optional: plain lines otherwise
    Console = None  # type: ignore[assignment,misc]

PLAIN_EVERY_S = 2.0


class Screen:
    """Progress on stderr: live bars on a terminal, a line every two seconds elsewhere."""

    def __init__(self) -> None:
        self._bars: Progress | None = None
        self._bar: TaskID | None = None
        self._stage = self._key = ""
        self._total: int | None = None
        self._files = 0
        self._began = self._last_line_s = 0.0

    def __enter__(self) -> Screen:
        if Console is not None and sys.stderr.isatty():
            columns = (TextColumn("{task.description:>11}"), BarColumn(24), TextColumn("{task.percentage:>3.0f}%"))
            self._bars = Progress(
                *columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True), refresh_per_second=4
            )
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._end_stage()
            self._bars.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        if self._bars is not None:
            self._bars.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def stage(self, title: str, key: str = "", total: int | None = None, files: int = 0) -> None:
        """Start a stage, whose bar shows ``progress[key]`` of ``total``; without a total the bar only moves."""
        self._end_stage()
        self._stage, self._key, self._total, self._files = title, key, total, files
        self._began = self._last_line_s = time.monotonic()
        if self._bars is not None:
            self._bar = self._bars.add_task(title, total=total, note="")

    def _end_stage(self) -> None:
        if self._bars is not None and self._bar is not None and self._total is None:
            self._bars.update(self._bar, total=1, completed=1)

    def update(self, progress: Mapping[str, Any], workers: int) -> None:
        """Show the progress that the merger reports."""
        if self._total is not None:
            self.note(self._note(progress, workers), min(progress[self._key], self._total))

    def note(self, text: str, done: int | None = None) -> None:
        """Show a text beside the bar, and how much of the total is done."""
        now = time.monotonic()
        if self._bars is not None and self._bar is not None:
            self._bars.update(self._bar, completed=done, note=text)
        elif now - self._last_line_s >= PLAIN_EVERY_S:
            self._last_line_s = now
            percent = "" if done is None else f"{100 * done // max(1, self._total or 0):3d}%  "
            print(f"{self._stage:>11} {percent}{text}", file=sys.stderr, flush=True)

    def _note(self, progress: Mapping[str, Any], workers: int) -> str:
        busy = f"{len(progress['busy'])} tasks with {workers} workers"
        if self._key == "bytes":
            speed = progress["bytes"] / 1e6 / max(0.1, time.monotonic() - self._began)
            return f"{progress['files']:,} of {self._files:,} files · {speed:.1f} MB/s · {busy}"
        return f"{progress['bands']} of {self._total} bands · {progress['near_pairs']:,} pairs · {busy}"


def print_report(report: Mapping[str, Any], top: int = 5) -> None:
    """Print the report to stdout."""
    result, sample, seconds = report["result"], report["sample"], report["seconds"]
    counts = result["counts"]
    print()
    print(f"{counts['files']:,} files, {counts['bytes'] / 1e6:.1f} MB, {counts['lines']:,} lines, ", end="")
    print(f"{counts['tokens']:,} tokens, {counts['functions']:,} functions")
    for file, why in result["unreadable"]:
        print(f"  not valid Python: {file} ({why})")
    print("  names used most: " + ", ".join(f"{name} {count:,}" for name, count in result["names"][:10]))
    print(f"  {result['compared']:,} functions are long enough to compare")
    _print_family("exact copies", result["exact"], top)
    _print_family(f"near copies ({result['near_pairs']:,} pairs)", result["near"], top)
    print(
        f"\nsample: {sample['functions']} functions compared with every other one: {sample['pairs']} pairs, "
        f"{sample['missed']} missed and {sample['wrong']} wrong in the result"
    )
    print("seconds: " + ", ".join(f"{stage} {took:.1f}" for stage, took in seconds.items()), end="")
    print(f"; in all {sum(seconds.values()):.1f} with {report['workers']} workers")
    if report["killed"]:
        _print_killed(report["killed"])


def _print_family(title: str, groups: list[Mapping[str, Any]], top: int) -> None:
    print(f"\n{title}: {len(groups):,} groups, {sum(len(group['functions']) for group in groups):,} functions")
    for group in groups[:top]:
        first, *others = group["functions"]
        print(f"  {len(others) + 1:4d} x {group['tokens']:4d} tokens  {first}")
        for other in others[:2]:
            print(f"{'':20}{other}")
        if len(others) > 2:
            print(f"{'':20}… and {len(others) - 2} more")


def _print_killed(killed: Mapping[str, Any]) -> None:
    print(f"killed: {killed['worker']} (pid {killed['pid']}) by SIGKILL, busy with {killed['task']}")
    for task, worker in killed["done_again"].items():
        print(f"  {task} was done again by {worker}")
    if not killed["done_again"]:
        print("  its answer had already arrived: nothing was done again")


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8", errors="replace")


def differences(one: Any, other: Any, where: str = "result") -> list[str]:
    """Return a sentence about each place where two results differ."""
    return list(_differences(json.loads(json.dumps(one)), json.loads(json.dumps(other)), where))


def _differences(one: Any, other: Any, where: str) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            yield from _differences(one.get(key), other.get(key), f"{where}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            yield from _differences(mine, theirs, f"{where}[{number}]")
    elif isinstance(one, list) and isinstance(other, list):
        yield f"{where} has {len(one)} entries here and {len(other)} there"
    elif one != other:
        yield f"{where} is {one!r} here and {other!r} there"
