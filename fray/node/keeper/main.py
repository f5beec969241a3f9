"""The keeper: one small process per attempt, between the zygote that forked it and the job it forks.

Law: the job and everything below it end before the keeper does. It is a subreaper, so nothing of the job escapes to
init while it lives; if it is killed, the job's main process dies by PDEATHSIG and the rest falls to the zygote, or to
the node. The node's end (its process descriptor, or the end of the control socket) ends the attempt at once.

Conversation with the node, JSON lines on one socket. Down: the start, then ``{"stop": 1}``, ``{"kill": 1}``,
``{"say": text}`` for the attempt's log, ``{"heard": 1}``, ``{"capture": py-spy}``. Up: ``{"keeper": pid}`` with its
pidfd, ``{"running": pid}`` with the pipes the job prints into, ``{"log": lines}`` now and then, ``{"said": what}``
(`fray.node.keeper.ear`; at most one until it was heard), ``{"captured": 1}`` (`fray.node.keeper.stacks`),
``{"ended": lines, "swept": count, "left": count}`` once the outcome is on disk.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from attrs import evolve

from fray.model.specs import Cause, EntryKind, Outcome, Ticket
from fray.net.codec import from_json
from fray.node.entry import Body
from fray.node.grants.cgroups import Group
from fray.node.grants.given import Given
from fray.node.keeper.accounting import Account
from fray.node.keeper.ear import Ear, open_pipe
from fray.node.keeper.limits import Fence
from fray.node.keeper.meter import Meter
from fray.node.keeper.namespace import settle
from fray.node.keeper.spawn import Child, Start, spawn
from fray.node.keeper.stacks import Scribes, Whom
from fray.node.keeper.verdict import Descent, Ending, Rung, judge
from fray.node.keeper.watcher import Watcher
from fray.node.logs.capture import Output, Spool
from fray.node.logs.redact import Redactor
from fray.node.preparing import Prepared
from fray.node.proctree import become_subreaper, end_descendants, set_title
from fray.node.record import Record, save

READ_BYTES = 64 * 1024
DRAIN_S = 1.0
"""After everything below has ended, its pipes are read to their end, but no longer than this."""
SWEEP_S = 5.0
"""What has been killed and does not end within this time is held by the kernel: said so, and tried on."""


def keep(control: socket.socket, node_pidfd: int) -> Body:
    """The whole life of a keeper, in a fresh fork of the zygote. Returns only in the process of the job."""
    become_subreaper()
    set_title("fray-keeper")
    outside = settle()
    lines = Lines(control)
    first = lines.wait_first()
    if first is None:
        os._exit(0)
    ticket = from_json(Ticket, first["ticket"])
    directory = Path(ticket.directory)
    lines.introduce(outside.pid)
    pipe = open_pipe(directory)
    try:
        child = spawn(_start(ticket, first))
    except OSError as error:
        child = None
        save(directory, Outcome(cause=Cause.ENVIRONMENT, message=f"the machine cannot start a process: {error}"))
        lines.tell(ended=0, swept=0, left=0)
    if isinstance(child, Body):
        control.detach()  # closed already; the object must not close the number again once it is something else
        return child
    if child is None:
        os._exit(0)
    lines.tell_with([child.out_fd, child.err_fd], running=outside.pid_of(child.pidfd, child.pid))
    watch = Watch(ticket, child, lines, node_pidfd, _spool(directory, first["log"]))
    ear, scribes = _attend(watch, pipe)
    _guard(watch, Given(**first["given"]), Meter(ear.measured), scribes)
    if first["prepared"]["image"]:
        from fray.node.containers import Contained

        watch.add(Contained(first["prepared"]["engine"], ticket))
    os._exit(_watch(watch))


def _attend(watch: Watch, pipe: int) -> tuple[Ear, Scribes]:
    """Listen to what the job says of itself, and look into it when asked to."""
    whom = Whom(watch.child.pid, watch.child.control_fd, watch.directory)
    scribes = Scribes(watch, whom, lambda: watch.lines.tell(captured=1))
    watch.words["capture"] = scribes.begin
    watch.add(scribes)
    ear = Ear(pipe, lambda news: watch.lines.tell(said=news), watch.remark)
    watch.words["heard"] = ear.heard
    if pipe >= 0:
        watch.watch(pipe, ear.hear)
        watch.add(ear)
    return ear, scribes


def _guard(watch: Watch, given: Given, meter: Meter, scribes: Scribes) -> None:
    """Keep account of what its tree takes, and hold it to what it was given."""
    end_it = partial(watch.condemn, now=True)
    watch.add(Account(given.limit_bytes, end_it, meter.looked, scribes.pids))
    if given.group:
        watch.add(Fence(Group(given.group, given.group_version), given.limit_bytes, end_it))


def _start(ticket: Ticket, first: dict[str, Any]) -> Start:
    prepared = Prepared(**first["prepared"])
    return Start(
        ticket=ticket,
        entry=first["entry"],
        offered=first["offered"],
        prepared=prepared,
        cpus=tuple(first["given"]["cpus"]),
    )


def _spool(directory: Path, log: dict[str, Any] | None) -> Spool:
    """Where its lines go; without a log (no room on the disk) they go with the attempt's own directory."""
    return Spool(Path(log["directory"]), lines=log["lines"], limit_bytes=log["limit"]) if log else Spool(directory)


def _watch(watch: Watch) -> int:
    gc.enable()
    try:
        watch.run()
        return 0
    except BaseException:  # noqa: BLE001 - said on the node's stderr; the exit code makes the zygote sweep
        traceback.print_exc()
        end_descendants()
        return 1


class Lines:
    """The keeper's end of the control socket."""

    def __init__(self, control: socket.socket) -> None:
        self.socket = control
        self.buffer = b""

    def wait_first(self) -> dict[str, Any] | None:
        """The start, however long it is; None if the node is gone."""
        while True:
            found = self.take()
            if found is None or found:
                return found[0] if found else None

    def take(self) -> list[dict[str, Any]] | None:
        """One read, and the messages that are whole now; None at the end of the stream."""
        try:
            data = self.socket.recv(READ_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            return None
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def introduce(self, pid: int) -> None:
        """The keeper's pid as the node sees it, with a descriptor of it: the number alone might be another process's
        when it is read."""
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(os.getpid())
            socket.send_fds(self.socket, [json.dumps({"keeper": pid}).encode() + b"\n"], [pidfd])
            os.close(pidfd)

    def tell_with(self, descriptors: list[int], **message: int) -> None:
        """Say something, and hand descriptors over."""
        with contextlib.suppress(OSError):
            socket.send_fds(self.socket, [json.dumps(message).encode() + b"\n"], descriptors)

    def tell(self, **message: Any) -> None:
        """Say something to the node; if it is gone the loop will notice by itself."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")


class Watch:
    """The keeper's loop: one selector, one handler a descriptor, each bounded, so that a flood starves nobody."""

    def __init__(self, ticket: Ticket, child: Child, lines: Lines, node_pidfd: int, spool: Spool) -> None:
        spec = ticket.spec
        self.spec, self.child, self.lines = spec, child, lines
        self.directory = Path(ticket.directory)
        self.begun = time.monotonic()
        self.oom_kills = _oom_kills()
        self.descent = Descent(spec.ladder, hears_cancel=spec.entry is not EntryKind.BINARY)
        self.record, self.record_at, self.record_came_first = Record(self.directory), 0.0, False
        self.status: int | None = None
        self.condemned: Outcome | None = None
        self.lingered = self.node_gone = False
        self.redact = Redactor(ticket.secrets)
        spool.hide = self.redact.hide
        self.output = Output(spool, self.watch, self.unwatch, lambda lines: self.lines.tell(log=lines))
        self.watchers: list[Watcher] = [self.output]
        self.words: dict[str, Callable[[Any], None]] = {
            "stop": lambda _: self._stop(self.descent.begin),
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

    def add(self, watcher: Watcher) -> None:
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

    def _ask(self, question: Callable[[Watcher], object]) -> None:
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
        if self.descent.begun is None:
            self.record_came_first = self.record.header is not None
        begin(time.monotonic())

    def _on_record(self) -> None:
        data = os.read(self.child.outcome_fd, READ_BYTES)
        if not data:
            self.unwatch(self.child.outcome_fd)
            return
        self.record.feed(data)
        self.record_at = time.monotonic()

    # Ending it

    def _timeout_s(self) -> float | None:
        times = [self.descent.next_at(), self._linger_at(), *(watcher.next_at() for watcher in self.watchers)]
        known = [at for at in times if at is not None]
        return max(0.0, min(known) - time.monotonic()) if known else None

    def _linger_at(self) -> float | None:
        """When a job that has written its record and still runs is killed."""
        waiting = self.record.header is not None and not self.lingered
        return self.record_at + self.spec.ladder.term_s if waiting else None

    def _descend(self, now: float) -> None:
        rung = self.descent.due(now)
        if rung is Rung.CANCEL:
            with contextlib.suppress(OSError):
                os.write(self.child.control_fd, b"c")
        elif rung is Rung.TERM:
            self._signal(signal.SIGTERM)
        elif rung is Rung.KILL:
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
        save(self.directory, evolve(self._outcome(), swept=swept))
        self.lines.tell(ended=lines, swept=swept, left=left)

    def _outcome(self) -> Outcome:
        found = [judge(self._ending())]
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

    def _ending(self) -> Ending:
        code = os.waitstatus_to_exitcode(self.status or 0)
        return Ending(
            entry=self.spec.entry,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            record=self.record.close(),
            record_came_first=self.record_came_first,
            condemned=self.condemned,
            reached=self.descent.reached,
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
