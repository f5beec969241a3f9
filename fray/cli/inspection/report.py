"""``fray report``: what the cluster knows of a job, as one archive."""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import tarfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path

import trio

from fray import __version__
from fray.api.cluster import Cluster
from fray.cli.jobs import described
from fray.cli.output import clock, note, say_json
from fray.cli.target import find, spec_of
from fray.errors import FrayError, InvalidRequest
from fray.model.messages.history import AttemptRecord
from fray.model.specs import JobInfo, JobState
from fray.monitoring.json_form import plain

FORMAT = 1
"""Version of the archive: of the names of its files, and of what is in those that programs read."""


async def report(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray report``."""
    if options.lines < 0:
        raise InvalidRequest(f"--lines {options.lines} must be 0 (all) or more")
    info = await cluster.poll((await find(cluster, options.job, options)).job_id)
    top = info.job_id.replace("/", "-")
    output: Path = options.output or Path(f"{top}.tar.gz")
    files = await _Evidence(cluster, info, options).collect()
    try:
        await trio.to_thread.run_sync(_write, output, top, files)
    except OSError as error:
        raise InvalidRequest(f"{output}: {error.strerror}") from None
    if options.json:
        say_json({"file": str(output), "job_id": info.job_id, "contents": sorted(files)})
    else:
        note(f"wrote {', '.join(sorted(files))} to {output}")
    return 0


def _write(output: Path, top: str, files: Mapping[str, str]) -> None:
    """Write the archive, with all files in a directory of the name ``top``."""
    # Logs and names of a job are not for all users of this machine.
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in files.items():
            data = text.encode("utf-8", "replace")
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size, member.mtime, member.mode = len(data), int(time.time()), 0o600
            archive.addfile(member, io.BytesIO(data))


class _Evidence:
    """Collects the files of a report; what cannot be had is named in one of them."""

    def __init__(self, cluster: Cluster, info: JobInfo, options: argparse.Namespace) -> None:
        self._cluster, self._info, self._options = cluster, info, options
        self._records: list[AttemptRecord] = []

    async def collect(self) -> dict[str, str]:
        """Return the text of each file by its name."""
        parts: list[tuple[str, Callable[[], Awaitable[str]]]] = [
            ("events.txt", self._events),
            ("explain.txt", self._explain),
            ("request.json", self._request),
            ("attempts.json", self._attempts),
            ("machines.json", self._machines),
            ("log.txt", self._log),
        ]
        if self._info.state is JobState.RUNNING:
            parts.append(("stacks.txt", self._stacks))
        files = {
            "job.json": _json(self._info),
            "job.txt": _lines(described(self._info, time.time(), None)),
            "versions.json": _json(self._versions()),
        }
        missing = []
        for name, collect in parts:
            try:
                files[name] = await collect()
            except FrayError as error:
                missing.append(f"{name}: {error}")
        if missing:
            files["missing.txt"] = _lines(missing)
        return files

    def _versions(self) -> object:
        return {
            "format": FORMAT,
            "fray": __version__,
            "python": platform.python_version(),
            "system": platform.platform(),
            "cluster": spec_of(self._options).address,
            "written_at": time.time(),
        }

    async def _events(self) -> str:
        found = await self._cluster.events(self._info.job_id)
        return _lines(f"{clock(event.time)}  {event.what}  {event.text}" for event in found)

    async def _explain(self) -> str:
        return await self._cluster.explain(self._info.job_id) + "\n"

    async def _request(self) -> str:
        return _json(await self._cluster.requested(self._info.job_id))

    async def _attempts(self) -> str:
        self._records = await self._cluster.attempts(job=self._info.job_id)
        return _json(self._records)

    async def _machines(self) -> str:
        names = {attempt.node for attempt in self._info.attempts} | {record.node for record in self._records}
        living = [node for node in await self._cluster.nodes() if node.name in names]
        gone = [node for name in sorted(names) for node in await self._cluster.gone_nodes(node=name)]
        return _json({"nodes": living, "gone": gone})

    async def _log(self) -> str:
        async with self._cluster.logs(self._info.job_id, tail=self._options.lines or None) as reader:
            lines = [f"{clock(each.time)}  {each.attempt_id}  {each.stream}  {each.text}" async for each in reader]
        return _lines(lines)

    async def _stacks(self) -> str:
        found = await self._cluster.stacks(self._info.job_id)
        return _lines(f"== {attempt_id}\n{text}\n" for attempt_id, text in found.items())


def _json(value: object) -> str:
    return json.dumps(plain(value), indent=2) + "\n"


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
