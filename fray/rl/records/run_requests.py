"""Requests to a run that is going, as files in its output directory: who can write there can ask from any machine.

A request is a file with a name of its own; the run removes it, and writes the answer beside it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio
from attrs import asdict, frozen

from fray.errors import InvalidRequest
from fray.rl.records.run_files import REQUESTS_DIRECTORY, read_status, write_file

ANSWER_PERIOD_S = 0.1
"""Seconds between two looks for an answer."""
ANSWER_S = 15.0
"""Seconds after which a run that has not answered is taken for lost."""


@frozen
class RunRequest:
    """Request for changes of a run that is running.

    Args:
        servers: number of inference servers; None: the run shall stop.
    """

    servers: int | None


async def ask_run(output: Path, request: RunRequest) -> str:
    """Ask a run that is going for a change; return what changes, in one line.

    Raises:
        InvalidRequest: the run has ended, refuses, or does not answer within `ANSWER_S`.
    """
    status = read_status(output)
    if status["state"] == "pending":
        text = f"its job {status['job']} waits for a machine: fray stop {status['job']} ends it"
        raise InvalidRequest(f"run {status['name']} is pending: {text}")
    if status["state"] != "running":
        raise InvalidRequest(f"run {status['name']} is {status['state']}: only one that is running can be changed")
    file = output / REQUESTS_DIRECTORY / f"{secrets.token_hex(8)}.json"
    answer = file.with_suffix(".answer")
    file.parent.mkdir(exist_ok=True)
    write_file(file, json.dumps(asdict(request)).encode())
    try:
        with trio.move_on_after(ANSWER_S):
            while not answer.is_file():  # noqa: ASYNC110 (written by a process that may be on another machine)
                await trio.sleep(ANSWER_PERIOD_S)
            found = json.loads(answer.read_text(encoding="utf-8"))
            if found["error"]:
                raise InvalidRequest(found["error"])
            return str(found["changed"])
        where = f"process {status['pid']} on {status['host']}"
        raise InvalidRequest(f"run {status['name']} has not answered for {ANSWER_S:g} s: its {where} may be lost")
    finally:
        # A request without an answer must not be followed later.
        file.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)


async def answer_requests(output: Path, follow: Callable[[RunRequest], Awaitable[str]]) -> None:
    """Follow the requests that there are, and answer them.

    Args:
        follow: does what is asked, and returns what changes; InvalidRequest is an answer, too.
    """
    for file in sorted((output / REQUESTS_DIRECTORY).glob("*.json")):
        try:
            request = RunRequest(**json.loads(file.read_text(encoding="utf-8")))
            file.unlink()
        except FileNotFoundError:
            continue  # its command has given up
        try:
            changed, error = await follow(request), ""
        except InvalidRequest as refusal:
            changed, error = "", str(refusal)
        write_file(file.with_suffix(".answer"), json.dumps({"changed": changed, "error": error}).encode())
