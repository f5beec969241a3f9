"""The keeper: one small process per attempt, between the zygote that forked it and the job it forks.

Law: the job and everything below it end before the keeper does. It is a subreaper, so nothing of the job escapes to
init while it lives; if it is killed, the job's main process dies by PDEATHSIG and the rest falls to the zygote, or to
the node. The node's end (its process descriptor, or the end of the control socket) ends the attempt at once.

Conversation with the node, JSON lines on one socket. Down: the start, then ``{"stop": 1}``, ``{"kill": 1}``,
``{"say": text}`` for the attempt's log, ``{"heard": 1}``, ``{"capture": py-spy}``. Up: ``{"keeper": pid}`` with its
pidfd, ``{"running": pid}`` with the pipes the job prints into, ``{"log": lines}`` now and then, ``{"said": what}``
(`fray.node.shim.progress_pipe`; at most one until it was heard), ``{"captured": 1}`` (`fray.node.shim.stack_capture`),
``{"ended": lines, "swept": count, "left": count}`` once the outcome is on disk (or with it, if it cannot be there).
"""

from __future__ import annotations

import gc
import os
import socket
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from fray.model.specs import Cause, Outcome, Ticket
from fray.net.codec import from_json
from fray.node.attempts.bootstrap import Body
from fray.node.attempts.outcome_file import save
from fray.node.linux.cgroups import Group
from fray.node.linux.process_tree import become_subreaper, end_descendants, set_title
from fray.node.logs.writer import Spool
from fray.node.prepare import Prepared
from fray.node.resources.allocation import Given
from fray.node.shim.cgroup_guard import Fence
from fray.node.shim.event_loop import Watch
from fray.node.shim.node_connection import Lines
from fray.node.shim.pid_namespace import settle
from fray.node.shim.progress_pipe import Ear, open_pipe
from fray.node.shim.resource_usage import Account
from fray.node.shim.spawn import Start, spawn
from fray.node.shim.stack_capture import Scribes, Whom
from fray.node.shim.usage_report import Meter


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
        why = f"the machine cannot start a process: {error}"
        save(directory, Outcome(cause=Cause.ENVIRONMENT, message=why, machine_fault=True))
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
        from fray.node.attempts.containers import Contained

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
