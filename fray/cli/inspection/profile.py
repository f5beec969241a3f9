"""``fray profile``: samples the stacks of a job into a file of speedscope (https://www.speedscope.app).

As often as stacks can be captured; or with ``--native`` by one ``py-spy record`` on its machine.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import trio

from fray import __version__
from fray.api.cluster import Cluster
from fray.cli.live.exec import run_recorder
from fray.cli.output import note, say_json
from fray.cli.target import find_running
from fray.errors import InvalidRequest
from fray.model.specs import JobInfo
from fray.model.text import plural

Frame: TypeAlias = tuple[str, str, int]
"""Function, file and line."""
PAUSE_S = 0.02
"""Seconds between two captures, each of which stops the job for milliseconds."""
_PROCESS = re.compile(r"Process (\d+)")
_THREAD = re.compile(r"(?:Current thread|Thread) (\S+?):?(?: .*)?$")
_THREAD_NAME = re.compile(r'Thread \S+ \(.*\): "(.*)"$')
_TASK = re.compile(r"\s*task (.+)$")
_FRAMES = (
    re.compile(r'\s+File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$'),
    re.compile(r"\s+(?P<name>.+) \((?P<file>.+):(?P<line>\d+)\)$"),
)
"""Lines of frames, as faulthandler and as py-spy write them."""


async def profile(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray profile``."""
    if not 0 < options.seconds <= 3600:
        raise InvalidRequest(f"--seconds {options.seconds:g} must be above 0, and at most 3600")
    info = await find_running(cluster, options, "only running jobs have stacks")
    output: Path = options.output or Path(f"{info.name.replace('/', '-')}.speedscope.json")
    if options.native:
        return await _profile_native(info, output, options)
    samples: list[tuple[float, str, list[Frame]]] = []
    captures, problem = 0, ""
    begun = trio.current_time()
    # What was captured until Ctrl-C, or until the job has ended, is written.
    while (at_s := trio.current_time() - begun) < options.seconds:
        captures += 1
        for attempt_id, text in (await cluster.stacks(info.job_id)).items():
            found = list(stacks_in(text))
            problem = problem if found else text.strip()
            samples += [(at_s, f"{attempt_id} {thread}", frames) for thread, frames in found]
        await trio.sleep(PAUSE_S)
        if (await cluster.poll(info.job_id)).state.finished:
            break
    if not samples:
        raise InvalidRequest(
            f"no stacks of Python were captured: {problem.partition(chr(10))[0] or 'the job has ended'}"
        )
    lasted_s = trio.current_time() - begun
    await _write(output, json.dumps(speedscope(info.job_id, samples, lasted_s)))
    if options.json:
        say_json({"file": str(output), "captures": captures, "seconds": lasted_s})
    else:
        note(
            f"wrote {plural(captures, 'capture')} in {lasted_s:.0f} s to {output}: open it at https://www.speedscope.app"
        )
    return 0


async def _write(output: Path, text: str) -> None:
    try:
        await trio.Path(output).write_text(text)
    except OSError as error:
        raise InvalidRequest(f"{output}: {error.strerror}") from None


# By py-spy -----------------------------------------------------------------------------------------------------------


async def _profile_native(info: JobInfo, output: Path, options: argparse.Namespace) -> int:
    """Write what py-spy records of all processes of a job, until Ctrl-C at most."""
    code, recorded, said = await run_recorder(info.job_id, math.ceil(options.seconds))
    try:
        document = json.loads(recorded)
    except ValueError:
        document = {"profiles": []}
    samples = sum(len(each["samples"]) for each in document["profiles"])
    if not samples:
        raise InvalidRequest(f"py-spy has recorded nothing of {info.job_id}: {_refusal(code, said)}")
    document["name"] = info.job_id
    await _write(output, json.dumps(document))
    if options.json:
        say_json({"file": str(output), "samples": samples, "seconds": options.seconds})
    else:
        note(f"wrote {plural(samples, 'sample')} to {output}: open it at https://www.speedscope.app")
    return 0


def _refusal(code: int, said: str) -> str:
    """Return why py-spy has recorded nothing, and what to do."""
    if re.search("permission|not permitted", said, re.IGNORECASE):
        return (
            "the machine lets it read no other process (ptrace): run fray-node as root, or set "
            "kernel.yama.ptrace_scope=0 there; without --native, stacks are sampled without it"
        )
    return said.strip().rpartition("\n")[2] or f"exit code {code}"


# By captures ---------------------------------------------------------------------------------------------------------


def stacks_in(text: str) -> Iterator[tuple[str, list[Frame]]]:
    """Yield each thread and each task of Trio in captured stacks with its frames, the outermost first."""
    process, thread = "", ""
    frames: list[Frame] = []
    threads, _, tasks = text.partition("Trio tasks:\n")
    for line in threads.splitlines():
        if not line.startswith(" "):
            if frames:
                yield thread, frames[::-1]
            frames = []
            if found := _PROCESS.match(line):
                process, thread = found[1], ""
            elif found := _THREAD.match(line):
                name = _THREAD_NAME.match(line)
                thread = f"process {process} thread {name[1] if name else found[1]}"
        elif thread:
            frames += _frame_in(line)
    if frames:
        yield thread, frames[::-1]
    yield from _tasks_in(tasks)


def _tasks_in(text: str) -> Iterator[tuple[str, list[Frame]]]:
    """Yield the tasks: where each waits, or runs."""
    counts: Counter[str] = Counter()
    frames: list[Frame] = []
    task = ""
    for line in text.splitlines():
        if found := _TASK.match(line):
            if frames:
                yield task, frames
            counts[found[1]] += 1
            task, frames = f"task {found[1]}" + (f" #{counts[found[1]]}" if counts[found[1]] > 1 else ""), []
        else:
            frames = [*frames, *_frame_in(line)]
    if frames:
        yield task, frames


def _frame_in(line: str) -> list[Frame]:
    """Return the frame of a line; empty if it has none."""
    found = next(filter(None, (form.match(line) for form in _FRAMES)), None)
    return [] if found is None else [(found["name"], found["file"], int(found["line"]))]


def speedscope(name: str, samples: Iterable[tuple[float, str, list[Frame]]], lasted_s: float) -> dict[str, Any]:
    """Return a document of speedscope: one profile of wall-clock time for each thread.

    Args:
        samples: time in seconds from the beginning, thread, and frames of each.
    """
    numbers: dict[Frame, int] = {}
    threads: dict[str, list[tuple[float, list[int]]]] = defaultdict(list)
    for at_s, thread, frames in samples:
        threads[thread].append((at_s, [numbers.setdefault(frame, len(numbers)) for frame in frames]))
    profiles = []
    for thread, found in threads.items():
        # Each sample stands for the time until the next one.
        ends = [*(at_s for at_s, _ in found[1:]), lasted_s]
        profiles.append(
            {
                "type": "sampled",
                "name": thread,
                "unit": "seconds",
                "startValue": found[0][0],
                "endValue": lasted_s,
                "samples": [stack for _, stack in found],
                "weights": [max(0.0, end - at_s) for (at_s, _), end in zip(found, ends, strict=True)],
            }
        )
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": name,
        "exporter": f"fray {__version__}",
        "activeProfileIndex": 0,
        "shared": {"frames": [{"name": frame[0], "file": frame[1], "line": frame[2]} for frame in numbers]},
        "profiles": profiles,
    }
