"""Operations that are worth checking, and what they need on the cluster: counters with names, and gangs.

Each is recorded in the folder of the history, which all processes must share.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import frozen

import fray
from bench.histories.files import Recorder, file_of, read_lines, sign
from bench.histories.records import Kind, Outcome
from fray.api.actors.handle import actor_id_of

SMALL = fray.ResourceConfig.with_cpu(cpu=0.1, memory="64MB")
BEAT_S = 0.2
"""Seconds between two signs of life."""
MEMBERS = 2
MEET_WITHIN_S = 60.0
INCREMENTS = 5
ANSWER_AFTER_S = 0.05
"""Seconds between an increment and its answer, in which a kill makes its outcome unknown."""
RETRIES = 1_000
BUSY_S = 0.3


class NamedCounter:
    """Counter whose value survives its process: its name leads to one actor at most, so that no increment is lost."""

    def __init__(self, folder: str, name: str, owner: str) -> None:
        self.folder, self.owner = folder, owner
        self.file = Path(folder) / f"{name}.value"
        sign(folder, "begun", owner)
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            sign(self.folder, "alive", self.owner)

    async def increment(self, token: str) -> int:
        """Count one, and return the new value."""
        sign(self.folder, "effect", self.owner, call=token)
        value = await self.read() + 1
        written = self.file.with_suffix(f".{os.getpid()}")
        written.write_text(str(value))
        written.replace(self.file)
        await trio.sleep(ANSWER_AFTER_S)
        return value

    async def read(self) -> int:
        """Return the value."""
        return int(self.file.read_text()) if self.file.exists() else 0


def gang_member(folder: str, owner: str, number: int, busy_s: float) -> int:
    """Wait until all members of this generation run, work for a while, and return the number.

    Raises:
        TimeoutError: not all came.
    """
    sign(folder, "begun", owner)
    attempt = os.environ["FRAY_ATTEMPT_ID"]
    give_up_at = time.monotonic() + MEET_WITHIN_S
    while len(begun_with(folder, attempt)) < int(os.environ["FRAY_WORLD_SIZE"]):
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"not all members came in the generation of {attempt} within {MEET_WITHIN_S:g} s")
        time.sleep(0.02)
    work(folder, owner, busy_s)
    return number


def begun_with(folder: str, attempt: str) -> set[str]:
    """Return the attempts of the same generation that have begun."""
    generation = attempt.rpartition(":")[0]
    begun = {line["attempt"] for line in read_lines(file_of(folder, attempt))}
    return {one for one in begun if one.rpartition(":")[0] == generation}


def work(folder: str, owner: str, busy_s: float) -> None:
    """Do nothing for so long, with signs of life, and record that it is done."""
    until = time.monotonic() + busy_s
    while (left_s := until - time.monotonic()) > 0.0:
        time.sleep(min(left_s, BEAT_S))
        sign(folder, "alive", owner)
    sign(folder, "done", owner)


@frozen
class Client:
    """Client that records what it does on a cluster. Errors of Fray are outcomes; others pass."""

    cluster: Any
    recorder: Recorder

    @property
    def folder(self) -> str:
        return str(self.recorder.folder)

    async def record(
        self, kind: Kind, key: str, act: Callable[[], Awaitable[Any]], *, token: str = "", begun: Any = None
    ) -> Any:
        """Do one operation, and record it; return its value, or None if it is not known.

        ``begun``: value that is known before.
        """
        number = self.recorder.begin(kind, key, begun, token=token)
        try:
            value = await act()
        except (fray.NameInUse, fray.NoSuchActor):
            value = ""
        except fray.FrayError as error:
            # Of these errors `ActorDied` alone, without its subclasses, says that the call had no effect.
            self.recorder.end(number, Outcome.ERROR if type(error) is fray.ActorDied else Outcome.UNKNOWN)
            return None
        self.recorder.end(number, Outcome.VALUE, value)
        return value

    async def compete(self, name: str) -> None:
        """Create the counter of this name, or find it; count with it, and give the name up if it was created here."""
        handles: list[Any] = []

        async def claim() -> str:
            about = (self.folder, name, self.recorder.process)
            config = fray.ActorConfig(max_restarts=-1)
            created = await scope.create_actor(
                NamedCounter, *about, name=name, resources=SMALL, actor_config=config, on_failure="absorb"
            )
            handles.append(created)
            return str(actor_id_of(created))

        async def find() -> str:
            handles.append(await self.cluster.get_actor(name))
            return str(actor_id_of(handles[-1]))

        async with self.cluster.open_scope(f"claim-of-{name}") as scope:
            mine = await self.record(Kind.CLAIM, name, claim)
            await self.record(Kind.LOOKUP, name, find)
            for _ in range(INCREMENTS if handles else 0):
                await self.record(Kind.READ, name, handles[-1].read.options(idempotent=True))
                token = f"{name} {self.recorder.process} {self.recorder.count}"
                await self.record(Kind.INCREMENT, name, partial(handles[-1].increment, token), token=token)
            if mine:
                # Not by leaving the scope, which waits for a controller that is away for a limited time.
                await self.record(Kind.RELEASE, name, partial(self.cluster.delete_actor, handles[0]), begun=mine)
                await self.record(Kind.LOOKUP, name, find)

    async def run_gang(self, name: str, number: int) -> None:
        """Run a gang of `MEMBERS`. Raises FrayError: it failed."""
        arguments = (self.folder, "", number, BUSY_S)
        request = fray.JobRequest(
            name=name,
            entrypoint=fray.Entrypoint.from_callable(gang_member, arguments),
            resources=SMALL,
            replicas=MEMBERS,
            max_retries_failure=RETRIES,
            max_retries_preemption=RETRIES,
        )
        launched = self.recorder.begin(Kind.LAUNCH, name)
        job = await self.cluster.launch(request)
        await job.wait()
        self.recorder.end(launched, Outcome.VALUE, MEMBERS, key=job.id)
