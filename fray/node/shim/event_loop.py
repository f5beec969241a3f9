"""The keeper's loop: it waits for all that can happen to its job, ends it by its ladder, and says how it ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import evolve

from fray.model.specs import LADDER_LIMIT_S, AttemptSpec, EntryKind, Outcome
from fray.net.codec import to_json
from fray.node.job_process.outcome_file import OutcomeReader, save
from fray.node.linux.process_tree import end_descendants
from fray.node.logs.redact import Redactor
from fray.node.logs.writer import LogWriter
from fray.node.shim.exit_status import (
    ExitStatus,
    TerminationSchedule,
    TerminationStep,
    classify_exit,
)
from fray.node.shim.node_connection import READ_BYTES, NodeSocket
from fray.node.shim.output_reader import OutputReader
from fray.node.shim.plugin import ShimPlugin
from fray.node.shim.spawn import SpawnedProcess

DRAIN_S = 1.0
"""After everything below has ended, its pipes are read to their end, but no longer than this."""
SWEEP_S = 5.0
"""What has been killed and does not end within this time is held by the kernel: said so, and tried on."""


class ShimLoop:
    """The keeper's loop: one selector, one handler a descriptor, each bounded, so that a flood starves nobody."""

    def __init__(
        self, ticket: AttemptSpec, child: SpawnedProcess, lines: NodeSocket, node_pidfd: int, spool: LogWriter
    ) -> None:
        spec = ticket.spec
        self.spec, self.child, self.lines = spec, child, lines
        self.directory = Path(ticket.directory)
        self.begun = time.monotonic()
        self.oom_kills = _oom_kills()
        self.descent = TerminationSchedule(spec.ladder, hears_cancel=spec.entry is not EntryKind.BINARY)
        self.record, self.record_at, self.record_came_first = OutcomeReader(self.directory), 0.0, False
        self.status: int | None = None
        self.condemned: Outcome | None = None
        self.lingered = self.node_gone = False
        self.noticed: float | None = None
        """Its place is taken, and it has been told so: when its ladder begins."""
        self.redact = Redactor(ticket.secrets)
        spool.hide, spool.seam = self.redact.hide, self.redact.seam
        self.output = OutputReader(spool, self.watch, self.unwatch, lambda lines: self.lines.tell(log=lines))
        self.watchers: list[ShimPlugin] = [self.output]
        self.words: dict[str, Callable[[Any], None]] = {
            "stop": lambda _: self._stop(self.descent.begin),
            "notice": self._notice,
            "kill": lambda _: self._stop(self.descent.jump),
            "say": self.output.say,
        }
        """What the node may say, and who hears it."""
        self.selector = selectors.DefaultSelector()
        self.watch(child.pidfd, self._on_exit)
        self.watch(lines.socket.fileno(), self._on_control)
        self.watch(node_pidfd, self._on_node_gone)
        self.watch(child.outcome_fd, self._on_record)
        self.output.add(child.out_fd, "out")
        self.output.add(child.err_fd, "err")

    # For watchers

    def add(self, watcher: ShimPlugin) -> None:
        """Ask it with every turn of the loop, from now on."""
        self.watchers.append(watcher)

    def watch(self, descriptor: int, handler: Callable[[], None]) -> None:
        """Call ``handler`` whenever the descriptor can be read; it reads once, a bounded amount."""
        self.selector.register(descriptor, selectors.EVENT_READ, handler)

    def unwatch(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self.selector.unregister(descriptor)

    def remark(self, text: str) -> None:
        """A line of Fray's own in the log."""
        self.output.say(text)

    def condemn(self, outcome: Outcome, *, now: bool = False) -> None:
        """End the job, by its ladder or at once, and let this be its outcome, unless its end began before."""
        if self.descent.begun is None and self.record.header is None:
            self.condemned = outcome
        self._stop(self.descent.jump if now else self.descent.begin)

    # The loop

    def run(self) -> None:
        while self.status is None and not self.node_gone:
            self._turn(self._timeout_s())
            self._ask(lambda watcher: watcher.due(time.monotonic()))
            self._descend(time.monotonic())
        self._ask(lambda watcher: watcher.closing())
        swept, left = end_descendants(limit_s=SWEEP_S)
        if self.node_gone:
            self._drain()
            self.output.finish_lines()  # for the node's next life
            self._ask(lambda watcher: watcher.abandoned())
        else:
            self._finish(swept, left)
        while left:
            left = end_descendants(limit_s=SWEEP_S, longest_nap_s=0.5)[1]

    def _turn(self, timeout_s: float | None) -> bool:
        """Wait, and handle what is ready once; False if nothing was."""
        ready = self.selector.select(timeout_s)
        for key, _ in ready:
            key.data()
        return bool(ready)

    def _ask(self, question: Callable[[ShimPlugin], object]) -> None:
        """One that fails is asked no more: it is not worth the job."""
        for watcher in list(self.watchers):
            try:
                question(watcher)
            except Exception:  # noqa: BLE001 - said on the node's stderr
                traceback.print_exc()
                self.watchers.remove(watcher)

    # What happens

    def _on_exit(self) -> None:
        with contextlib.suppress(ChildProcessError):  # the sweep has waited for it: nobody asks how it ended
            self.status = os.waitpid(self.child.pid, 0)[1]
        self.unwatch(self.child.pidfd)

    def _on_node_gone(self) -> None:
        self.node_gone = True

    def _on_control(self) -> None:
        messages = self.lines.take()
        if messages is None:
            self.node_gone = True
            return
        for message in messages:
            for word, value in message.items():
                if word in self.words:
                    self.words[word](value)

    def _stop(self, begin: Callable[[float], None]) -> None:
        if self.descent.begun is None and self.noticed is None:
            self.record_came_first = self.record.header is not None
        begin(time.monotonic())

    def _notice(self, notice_s: float) -> None:
        """Tell it that its place is taken. Programs cannot be told but by SIGTERM, so they have it at once."""
        if self.descent.begun is not None or self.noticed is not None:
            return
        self.record_came_first = self.record.header is not None
        self.noticed = time.monotonic() + notice_s
        if self.spec.entry is EntryKind.BINARY:
            ladder = self.descent.ladder
            self.descent.ladder = evolve(ladder, term_s=min(ladder.term_s + notice_s, LADDER_LIMIT_S))
            self.noticed = time.monotonic()
        else:
            self._say_to_job(b"p")

    def _say_to_job(self, word: bytes) -> None:
        with contextlib.suppress(OSError):
            os.write(self.child.control_fd, word)

    def _on_record(self) -> None:
        data = os.read(self.child.outcome_fd, READ_BYTES)
        if not data:
            self.unwatch(self.child.outcome_fd)
            return
        self.record.feed(data)
        self.record_at = time.monotonic()

    # Ending it

    def _timeout_s(self) -> float | None:
        own = self.descent.next_at(), self._linger_at(), self._notice_over_at()
        times = [*own, *(watcher.next_at() for watcher in self.watchers)]
        known = [at for at in times if at is not None]
        return max(0.0, min(known) - time.monotonic()) if known else None

    def _linger_at(self) -> float | None:
        """When a job that has written its record and still runs is killed."""
        waiting = self.record.header is not None and not self.lingered
        return self.record_at + self.spec.ladder.term_s if waiting else None

    def _notice_over_at(self) -> float | None:
        return self.noticed if self.descent.begun is None else None

    def _descend(self, now: float) -> None:
        over_at = self._notice_over_at()
        if over_at is not None and now >= over_at:
            self._stop(self.descent.begin)
        rung = self.descent.due(now)
        if rung is TerminationStep.CANCEL:
            self._say_to_job(b"c")
        elif rung is TerminationStep.TERM:
            self._signal(signal.SIGTERM)
        elif rung is TerminationStep.KILL:
            self._signal(signal.SIGKILL)
        linger_at = self._linger_at()
        if linger_at is not None and now >= linger_at:
            self.lingered = True
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """To the main process; SIGTERM of a program to its whole group, as a shell would not pass it on."""
        if self.status is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number is signal.SIGTERM and self.spec.entry is EntryKind.BINARY:
                os.killpg(self.child.pid, number)
            else:
                signal.pidfd_send_signal(self.child.pidfd, number)

    def _finish(self, swept: int, left: int) -> None:
        self._drain()
        lines = self.output.finish_lines()
        outcome = evolve(self._outcome(), swept=swept)
        try:
            save(self.directory, outcome)
            told = {}
        except OSError:  # the disk is full; the node, if it lives, hears it all the same
            told = {"outcome": to_json(outcome)}
        self.lines.tell(ended=lines, swept=swept, left=left, **told)

    def _outcome(self) -> Outcome:
        found = [classify_exit(self._ending())]
        self._ask(lambda watcher: found.append(watcher.finish(found[-1])))
        shown = self.redact.text
        return evolve(found[-1], message=shown(found[-1].message), captured=shown(found[-1].captured))

    def _drain(self) -> None:
        """Read what is left in the pipes. Their writers are dead, unless a descriptor was passed to a stranger."""
        self.unwatch(self.lines.socket.fileno())
        self.output.hurry()
        deadline = time.monotonic() + DRAIN_S
        while self.output.is_open or self._record_open():
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._turn(left_s):
                return

    def _record_open(self) -> bool:
        return self.child.outcome_fd in self.selector.get_map()

    def _ending(self) -> ExitStatus:
        code = os.waitstatus_to_exitcode(self.status or 0)
        return ExitStatus(
            entry=self.spec.entry,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            record=self.record.close(),
            record_came_first=self.record_came_first,
            condemned=self.condemned,
            reached=self.descent.reached if self.noticed is None else self.descent.reached or TerminationStep.CANCEL,
            out_of_memory=_oom_kills() > self.oom_kills,
            last_lines=self.output.last_words(),
            ladder=self.spec.ladder,
            duration_s=time.monotonic() - self.begun,
        )


def _oom_kills() -> int:
    """How often the kernel has killed for lack of memory in this control group, or else on this machine."""
    for path in (_own_memory_events(), "/proc/vmstat"):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            words = dict(line.split()[:2] for line in file)
            if "oom_kill" in words:
                return int(words["oom_kill"])
    return 0


def _own_memory_events() -> str:
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            if line.startswith("0::"):
                return f"/sys/fs/cgroup{line[3:].strip()}/memory.events"
    return "/proc/vmstat"
