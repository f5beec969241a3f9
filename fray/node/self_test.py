"""Self-test of a machine: start a process as jobs are, write and read its disk, look for its devices.

Each step has a timeout of its own; the first that finds a problem reports it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path

import trio

from fray.model.ids import attempt_id
from fray.model.specs import (
    AttemptSpec,
    EndReason,
    EntryKind,
    JobSpec,
    ObservedAttempt,
    Outcome,
    Phase,
    TerminationPolicy,
)
from fray.node.config import NodeConfig
from fray.node.launcher import Launcher

PROCESS_S, DISK_S, DEVICES_S = 20.0, 10.0, 15.0
"""Timeouts of the three steps; their sum is less than the controller waits."""
WRITTEN = os.urandom(64 * 1024)
PROBE = "_fray.probe"
"""Name of its attempts."""
PROGRAM = ("true", "0", "0")
"""Command that does nothing successfully."""


class SelfTest:
    """Self-tests of one membership. Their attempts go through the launcher and are not reported."""

    def __init__(self, config: NodeConfig, launcher: Launcher) -> None:
        self._config, self._launcher = config, launcher
        self._count = 0
        self._waiting: dict[str, Callable[[Outcome], None]] = {}
        self._line = trio.Lock()

    def on_observed(self, observed: ObservedAttempt) -> bool:
        """Handle a report of the launcher; return False if it is not about a self-test."""
        on_outcome = self._waiting.get(observed.attempt_id)
        if on_outcome is not None and observed.phase is Phase.ENDED and observed.outcome is not None:
            on_outcome(observed.outcome)
        return on_outcome is not None

    async def probe(self) -> str:
        """Return what is wrong with this machine, in a line; empty: nothing was found."""
        steps: list[tuple[str, float, Callable[[], Awaitable[str]]]] = [
            ("a process", PROCESS_S, self._process),
            ("its disk", DISK_S, self._disk),
            ("its devices", DEVICES_S, self._devices),
        ]
        # One test at a time: another request waits for its own.
        async with self._line:
            for what, limit_s, step in steps:
                trouble = f"the test of {what} timed out after {limit_s:g} s"
                with trio.move_on_after(limit_s):
                    trouble = await step()
                if trouble:
                    return trouble
        return ""

    async def _process(self) -> str:
        """Start a process the way every job is: zygote, shim, directory, log."""
        self._count += 1
        id_ = attempt_id(f"{PROBE}-{self._count}", 0, 0)
        ended, outcomes = trio.Event(), list[Outcome]()

        def on_outcome(outcome: Outcome) -> None:
            outcomes.append(outcome)
            ended.set()

        self._waiting[id_] = on_outcome
        try:
            self._launcher.start(self._attempt_spec(id_), None)
            await ended.wait()
        finally:
            self._launcher.kill(id_)
            self._launcher.forget(id_)
            del self._waiting[id_]
        outcome = outcomes[0]
        # The machine is not to blame when all its accounts have attempts.
        fine = outcome.cause in (EndReason.SUCCEEDED, EndReason.NO_ACCOUNT)
        return "" if fine else f"a process ended as {outcome.cause.value}: {outcome.message}"

    def _attempt_spec(self, id_: str) -> AttemptSpec:
        spec = JobSpec(
            job_id=PROBE,
            name=PROBE,
            namespace="",
            entry=EntryKind.BINARY,
            argv=PROGRAM,
            termination=TerminationPolicy(term_s=0.0),
        )
        config = self._config
        return AttemptSpec(attempt_id=id_, spec=spec, controller=config.controller, key="", node=config.name)

    async def _disk(self) -> str:
        if not self._config.state_dir:
            return ""
        look = partial(disk_trouble, Path(self._config.state_dir))
        return await trio.to_thread.run_sync(look, abandon_on_cancel=True)

    async def _devices(self) -> str:
        if not self._config.detected_devices:
            return ""
        from fray.node.inventory import find_devices

        # Abandoned after its time: a driver that hangs is what this test is for.
        now = await trio.to_thread.run_sync(find_devices, abandon_on_cancel=True)
        return devices_trouble(self._config.detected_devices, now)


def disk_trouble(directory: Path) -> str:
    """Write and read a file there; return what was wrong. Blocks."""
    file = directory / f"probe.{os.getpid()}"
    try:
        with file.open("wb") as out:
            out.write(WRITTEN)
            out.flush()
            # The write has to reach the disk: in the page cache it would succeed on a broken one, too.
            os.fsync(out.fileno())
        same = file.read_bytes() == WRITTEN
    except OSError as error:
        return f"cannot write and read its state directory: {error}"
    finally:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
    return "" if same else "data read from its state directory differ from what was written"


def devices_trouble(known: Iterable[str], now: Iterable[str]) -> str:
    """Return which of the devices that were detected at the start are missing."""
    present = set(now)
    gone = [device for device in known if device not in present]
    return f"devices are missing: {', '.join(gone)}" if gone else ""
