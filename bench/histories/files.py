"""Files of a history: each process appends whole lines to one of its own, so that a kill loses at most the last."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import define

from bench.histories.records import Kind, Operation, Outcome

SUFFIX = ".history"


def append_line(file: Path, **words: Any) -> None:
    """Append a line to a file, whole or not at all."""
    descriptor = os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, json.dumps(words).encode() + b"\n")
    finally:
        os.close(descriptor)


@define
class Recorder:
    """Records operations of one client: one line at the begin of each, one at its end."""

    folder: Path
    process: str
    count: int = 0
    """Number of operations begun."""

    def begin(self, kind: Kind, key: str, value: Any = None, *, token: str = "") -> int:
        """Record a begin, and return the number of the operation. ``token``: of the call that it is, too."""
        self.count += 1
        self._append(number=self.count, kind=kind, key=key, value=value, token=token, begin=time.monotonic())
        return self.count

    def end(self, number: int, outcome: Outcome, value: Any = None, *, key: str = "") -> None:
        """Record an end, with the value and the key that are known only now."""
        self._append(number=number, outcome=outcome, value=value, key=key, end=time.monotonic())

    def _append(self, **words: Any) -> None:
        append_line(self.folder / f"{self.process}{SUFFIX}", client=self.process, **words)


def sign(folder: str, word: str, owner: str = "", **words: Any) -> None:
    """Record a sign of life of the attempt that this process is: ``begun``, ``alive``, ``effect`` or ``done``."""
    attempt, machine = os.environ["FRAY_ATTEMPT_ID"], os.environ.get("FRAY_NODE", "")
    whose = {"attempt": attempt, "machine": machine, "pid": os.getpid(), "owner": owner}
    append_line(file_of(folder, attempt), word=word, at=time.monotonic(), **whose, **words)


def file_of(folder: str, attempt: str) -> Path:
    """Return the file of the signs of life of all attempts of a job."""
    return Path(folder) / f"{job_of(attempt).replace('/', '_')}{SUFFIX}"


def job_of(attempt: str) -> str:
    """Return the job of an attempt, whose id is ``job:generation:member``."""
    return attempt.rsplit(":", 2)[0]


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file; the last one may have been cut off."""
    for line in file.read_bytes().split(b"\n"):
        try:
            yield json.loads(line)
        except ValueError:
            continue


def read_history(folder: Path) -> list[Operation]:
    """Return what all processes have recorded in a folder."""
    found: list[Operation] = []
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        lines = list(read_lines(file))
        found += _client_operations([line for line in lines if "client" in line])
        runs: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
        for line in (line for line in lines if "attempt" in line):
            runs[line["attempt"], line["machine"], line["pid"]].append(line)
        found += [operation for run in runs.values() for operation in _run(run)]
    return found


def _client_operations(lines: list[dict[str, Any]]) -> Iterator[Operation]:
    ends = {line["number"]: line for line in lines if "end" in line}
    for line in (line for line in lines if "begin" in line):
        end = ends.get(line["number"], {"end": None, "outcome": Outcome.UNKNOWN, "value": None, "key": ""})
        value = line["value"] if end["value"] is None else end["value"]
        times = {"begin": line["begin"], "end": end["end"], "outcome": Outcome(end["outcome"]), "value": value}
        yield Operation(line["client"], Kind(line["kind"]), end["key"] or line["key"], **times)
        if line["token"]:
            yield Operation(line["client"], Kind.CALL, line["token"], **times)


def _run(lines: list[dict[str, Any]]) -> Iterator[Operation]:
    """Yield the run of a process, and the effects of calls in it."""
    first, attempt = lines[0], lines[0]["attempt"]
    yield Operation(
        attempt,
        Kind.RUN,
        job_of(attempt),
        first["at"],
        lines[-1]["at"],
        Outcome.VALUE if lines[-1]["word"] == "done" else Outcome.UNKNOWN,
        first["pid"],
        owner=first["owner"],
        machine=first["machine"],
    )
    for line in (line for line in lines if line["word"] == "effect"):
        yield Operation(attempt, Kind.EFFECT, line["call"], line["at"], line["at"], Outcome.VALUE)
