"""The shim's event loop: waits for everything that can happen to its job, ends it, and reports how it ended."""

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

from fray.model.specs import TERMINATION_LIMIT_S, AttemptSpec, EntryKind, Outcome
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
"""Seconds that the pipes are read at most after everything below has ended."""
SWEEP_S = 5.0
"""Seconds after which killed processes count as blocked in the kernel; this is reported, and killing is retried."""


class ShimLoop:
    """Event loop with one selector and one bounded handler per descriptor, so that a flood on one starves no other."""

    def __init__(
        self,
        attempt_spec: AttemptSpec,
        directory: Path,
        child: SpawnedProcess,
        lines: NodeSocket,
        node_pidfd: int,
        log_writer: LogWriter,
    ) -> None:
        spec = attempt_spec.spec
        self.spec, self.child, self.node, self.node_pidfd = spec, child, lines, node_pidfd
        self.directory = directory
        self.begun = time.monotonic()
        # A count since boot: only a rise while the attempt runs can explain a SIGKILL of this job.
        self.oom_kills = _oom_kills()
        self.termination = TerminationSchedule(spec.termination, can_cancel=spec.entry is not EntryKind.BINARY)
        self.record_reader, self.record_written_at, self.record_before_stop = OutcomeReader(self.directory), 0.0, False
        self.status: int | None = None
        self.forced_outcome: Outcome | None = None
        self.lingered = self.node_gone = False
        self.notice_until: float | None = None
        """Time at which the termination of a preempted attempt starts; it has been notified."""
        self.redact = Redactor(attempt_spec.secrets)
        # Secrets are removed where the output is read, so that they reach neither the disk nor the node nor the
        # controller.
        log_writer.hide, log_writer.seam = self.redact.hide, self.redact.seam
        self.output = OutputReader(log_writer, self.add_reader, self.remove_reader, self._report_lines)
        self.plugins: list[ShimPlugin] = [self.output]
        self.handlers: dict[str, Callable[[Any], None]] = {
            "stop": lambda _: self._stop(self.termination.begin),
            "notice": self._notice,
            "kill": lambda _: self._stop(self.termination.skip_to_kill),
            "say": self.output.say,
        }
        """Handlers of the node's messages."""
        self.selector = selectors.DefaultSelector()
        # A pidfd and not SIGCHLD: a subreaper gets that signal for every orphan it adopts.
        self.add_reader(child.pidfd, self._on_exit)
        self.add_reader(lines.socket.fileno(), self._on_control)
        self.add_reader(node_pidfd, self._on_node_gone)
        self.add_reader(child.outcome_fd, self._on_record)
        self.output.add(child.out_fd, "out")
        self.output.add(child.err_fd, "err")

    # For plugins

    def add(self, plugin: ShimPlugin) -> None:
        """Add a plug-in."""
        self.plugins.append(plugin)

    def add_reader(self, descriptor: int, handler: Callable[[], None]) -> None:
        """Call ``handler`` whenever the descriptor is readable; it reads once, a bounded amount."""
        self.selector.register(descriptor, selectors.EVENT_READ, handler)

    def remove_reader(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self.selector.unregister(descriptor)

    def log_line(self, text: str) -> None:
        """Write a line of Fray's own to the log."""
        self.output.say(text)

    def fail(self, outcome: Outcome, *, now: bool = False) -> None:
        """End the job with this outcome, by its termination policy or at once, unless its end has begun."""
        # The first cause counts: a stop that was requested before, or a result that the job has written, stays the
        # outcome.
        if self.termination.started_at is None and self.record_reader.header is None:
            self.forced_outcome = outcome
        self._stop(self.termination.skip_to_kill if now else self.termination.begin)

    # The loop

    def run(self) -> None:
        while self.status is None and not self.node_gone:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.node.unsent else 0)
            self.selector.modify(self.node.socket, wanted, self._on_control)
            self._handle_ready(self._timeout_s())
            self._call_plugins(lambda plugin: plugin.on_timer(time.monotonic()))
            self._advance_termination(time.monotonic())
        # Before the sweep: the last memory sample needs the processes alive, and a running stack capture must not be
        # counted as a process that the job left behind.
        self._call_plugins(lambda plugin: plugin.on_exit())
        # Before the pipes are read to their end: a surviving writer would keep them open.
        swept, left = end_descendants(limit_s=SWEEP_S)
        if self.node_gone:
            self._drain()
            self.output.finish_lines()  # the next node on this state directory reads them
            self._call_plugins(lambda plugin: plugin.on_node_lost())
        else:
            self._finish(swept, left)
        # The outcome has been reported although some processes are blocked in the kernel. The node withholds their
        # devices until this process ends, so it stays until they do.
        while left:
            left = end_descendants(limit_s=SWEEP_S, longest_nap_s=0.5)[1]

    def _handle_ready(self, timeout_s: float | None) -> bool:
        """Wait, and handle what is ready once; return False if nothing was."""
        ready = self.selector.select(timeout_s)
        for key, events in ready:
            if events & selectors.EVENT_WRITE:  # only of the node's socket
                self.node.flush()
            if events & selectors.EVENT_READ:
                key.data()
        return bool(ready)

    def _call_plugins(self, question: Callable[[ShimPlugin], object]) -> None:
        """Call each plug-in; one that fails is removed, since it must not cost the job."""
        for plugin in list(self.plugins):
            try:
                question(plugin)
            except Exception:  # noqa: BLE001 - printed on the node's stderr
                traceback.print_exc()
                self.plugins.remove(plugin)

    # Events

    def _on_exit(self) -> None:
        with contextlib.suppress(ChildProcessError):  # already waited for by the sweep: how it ended is not needed
            self.status = os.waitpid(self.child.pid, 0)[1]
        self.remove_reader(self.child.pidfd)

    def _on_node_gone(self) -> None:
        self.node_gone = True

    def _on_control(self) -> None:
        messages = self.node.receive()
        if messages is None:
            self.node_gone = True
            return
        for message in messages:
            for word, value in message.items():
                if word in self.handlers:
                    self.handlers[word](value)

    def _report_lines(self, lines: int) -> None:
        # A node that is stopped (SIGSTOP) leaves the socket full. This message is dropped then: the unread ones before
        # it make the node read the log to its end, later than now.
        if not self.node.unsent:
            self.node.post(log=lines)

    def _stop(self, begin: Callable[[float], None]) -> None:
        # Whether the result or the request came first decides the outcome. A preemption notice is such a request, too,
        # and has stored the answer already.
        if self.termination.started_at is None and self.notice_until is None:
            self.record_before_stop = self.record_reader.header is not None
        begin(time.monotonic())

    def _notice(self, notice_s: float) -> None:
        """Notify the job of its preemption; a program gets SIGTERM at once."""
        if self.termination.started_at is not None or self.notice_until is not None:
            return
        self.record_before_stop = self.record_reader.header is not None
        self.notice_until = time.monotonic() + notice_s
        if self.spec.entry is EntryKind.BINARY:
            # SIGTERM is all that a program can notice, so the notice is added to the time between SIGTERM and SIGKILL.
            # The policy refuses more than its limit.
            policy = self.termination.policy
            self.termination.policy = evolve(policy, term_s=min(policy.term_s + notice_s, TERMINATION_LIMIT_S))
            self.notice_until = time.monotonic()
        else:
            self._send_to_job(b"p")

    def _send_to_job(self, word: bytes) -> None:
        with contextlib.suppress(OSError):
            # The pipe is non-blocking (`spawn`): a job that never reads it must not stop the shim.
            os.write(self.child.control_fd, word)

    def _on_record(self) -> None:
        data = os.read(self.child.outcome_fd, READ_BYTES)
        if not data:
            self.remove_reader(self.child.outcome_fd)
            return
        self.record_reader.feed(data)
        self.record_written_at = time.monotonic()

    # Ending it

    def _timeout_s(self) -> float | None:
        own = self.termination.next_due_at(), self._linger_at(), self._notice_ends_at()
        times = [*own, *(plugin.next_due_at() for plugin in self.plugins)]
        known = [at for at in times if at is not None]
        return max(0.0, min(known) - time.monotonic()) if known else None

    def _linger_at(self) -> float | None:
        """Return when a job that has recorded its outcome and still runs is killed."""
        # A thread that is not a daemon, or an atexit hook, keeps an interpreter alive after the function has returned.
        waiting = self.record_reader.header is not None and not self.lingered
        return self.record_written_at + self.spec.termination.term_s if waiting else None

    def _notice_ends_at(self) -> float | None:
        return self.notice_until if self.termination.started_at is None else None

    def _advance_termination(self, now: float) -> None:
        over_at = self._notice_ends_at()
        if over_at is not None and now >= over_at:
            self._stop(self.termination.begin)
        step = self.termination.next_step(now)
        if step is TerminationStep.CANCEL:
            self._send_to_job(b"c")
        elif step is TerminationStep.TERM:
            self._signal(signal.SIGTERM)
        elif step is TerminationStep.KILL:
            self._signal(signal.SIGKILL)
        linger_at = self._linger_at()
        if linger_at is not None and now >= linger_at:
            # Not a step of the termination: the recorded result stays the outcome (`classify_exit`).
            self.lingered = True
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """Signal the main process; SIGTERM of a program goes to its process group."""
        # Reaped: its pid, and the process group of that number, may belong to other processes by now.
        if self.status is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            # A shell as main process would end without passing the signal on to the program that it runs.
            if number is signal.SIGTERM and self.spec.entry is EntryKind.BINARY:
                os.killpg(self.child.pid, number)
            else:
                signal.pidfd_send_signal(self.child.pidfd, number)

    def _finish(self, swept: int, left: int) -> None:
        self._drain()
        # In this order: log, outcome, message. The node reports the last line before the end; and if this process is
        # killed in between, the node still finds the outcome on disk.
        lines = self.output.finish_lines()
        outcome = evolve(self._outcome(), swept=swept)
        try:
            save(self.directory, outcome)
            extra = {}
        except OSError:  # the disk is full; the node receives it over the socket
            extra = {"outcome": to_json(outcome)}
        # Nothing is left to watch: this may wait for a node that is stopped.
        self.node.send_last(ended=lines, swept=swept, left=left, **extra)

    def _outcome(self) -> Outcome:
        # Each plug-in gets the outcome as those before it have left it.
        found = [classify_exit(self._exit_status())]
        self._call_plugins(lambda plugin: found.append(plugin.amend_outcome(found[-1])))
        shown = self.redact.text
        return evolve(found[-1], message=shown(found[-1].message), captured=shown(found[-1].captured))

    def _drain(self) -> None:
        """Read what is left in the pipes. Their writers are dead, unless a descriptor was passed to another process."""
        # Requests cannot change an end that has happened. A socket at the end of its stream would also be ready all the
        # time, and so is the descriptor of a node that has died.
        self.remove_reader(self.node.socket.fileno())
        self.remove_reader(self.node_pidfd)
        self.output.stop_throttling()
        deadline = time.monotonic() + DRAIN_S
        while self.output.is_open or self._record_open():
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._handle_ready(left_s):
                return

    def _record_open(self) -> bool:
        return self.child.outcome_fd in self.selector.get_map()

    def _exit_status(self) -> ExitStatus:
        code = os.waitstatus_to_exitcode(self.status or 0)
        return ExitStatus(
            entry=self.spec.entry,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            record=self.record_reader.close(),
            record_before_stop=self.record_before_stop,
            forced_outcome=self.forced_outcome,
            # A job that ends during the notice without a success has been stopped, although no step was taken yet.
            reached=self.termination.reached
            if self.notice_until is None
            else self.termination.reached or TerminationStep.CANCEL,
            out_of_memory=_oom_kills() > self.oom_kills,
            last_lines=self.output.last_stderr(),
            termination=self.spec.termination,
            duration_s=time.monotonic() - self.begun,
        )


def _oom_kills() -> int:
    """Return how often the kernel has OOM-killed in this control group, or else on this machine."""
    for path in (_own_memory_events(), "/proc/vmstat"):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            handlers = dict(line.split()[:2] for line in file)
            if "oom_kill" in handlers:
                return int(handlers["oom_kill"])
    return 0


def _own_memory_events() -> str:
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            if line.startswith("0::"):
                return f"/sys/fs/cgroup{line[3:].strip()}/memory.events"
    return "/proc/vmstat"
