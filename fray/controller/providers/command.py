"""Provider of machines of any cloud, through commands of the operator: ``create``, ``delete`` and ``list``.

See docs/autoscaling.md.

A command is run without a shell unless it is written as one line, with ``FRAY_...`` in its environment. Exit code 0 is
success; any other is an error, whose kind is in `KINDS` and whose message is the end of stderr. A command that takes
longer than ``timeout_s``, or prints without end, is killed with its process group.

``list`` prints a JSON array on stdout. No output is an error and not an empty array: it is what a pipe prints whose
first command has failed, and an empty list would declare every machine dead. Listed machines are believed to be this
cluster's only if their names are of its making: a script that forgets the label lists the whole project, and what was
not requested is deleted.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import trio
from attrs import define, evolve, field, frozen

from fray.controller.providers.base import MachineRequest, ProviderError
from fray.errors import InvalidRequest
from fray.model.environment import check_variable
from fray.model.join_tokens import HOSTS_LIMIT
from fray.model.policy.machine_groups import (
    ZONE_LIMIT_CHARS,
    ErrorKind,
    GroupConfig,
    MachineState,
    SeenMachine,
)
from fray.model.resources import short_repr
from fray.scheduler.state.unit_rows import cluster_mark, group_of_unit_name

KINDS: Mapping[int, ErrorKind] = {
    64: ErrorKind.INVALID,  # EX_USAGE
    65: ErrorKind.INVALID,  # EX_DATAERR
    69: ErrorKind.STOCKOUT,  # EX_UNAVAILABLE
    73: ErrorKind.QUOTA,  # EX_CANTCREAT
    75: ErrorKind.TRANSIENT,  # EX_TEMPFAIL
    77: ErrorKind.PERMISSION,  # EX_NOPERM
    126: ErrorKind.PERMISSION,
    127: ErrorKind.INVALID,
}
"""Exit codes as in sysexits.h; any other one is TRANSIENT."""
TIMEOUT_S = 120.0
"""Default and upper limit of a command's time: no call of a provider has more (`fray.controller.provider_driver`)."""
LATE_OUTPUT_S = 1.0
"""Seconds for which output is read after a command has ended: processes it has started may hold the pipes for ever."""
REAP_S = 1.0
MESSAGE_LIMIT_CHARS = 500
OUTPUT_LIMIT_BYTES = 16 * 1024 * 1024
_VERBS = ("create", "delete", "list")

_log = logging.getLogger("fray.controller")


@frozen
class CommandConfig:
    """Parsed ``options`` of a group."""

    create: tuple[str, ...]
    delete: tuple[str, ...]
    list: tuple[str, ...]
    timeout_s: float = TIMEOUT_S
    env: dict[str, str] = field(factory=dict)


def read_options(group: GroupConfig) -> CommandConfig:
    """Parse the options of a group.

    Raises:
        InvalidRequest: a command is missing, or an option is unknown or of the wrong type.
    """
    where = f"[[group]] {group.name!r}"
    unknown = sorted(group.options.keys() - {*_VERBS, "timeout_s", "env"})
    if unknown:
        raise InvalidRequest(f"{where}: unknown option {unknown[0]!r}; there are create, delete, list, timeout_s, env")
    timeout_s = group.options.get("timeout_s", TIMEOUT_S)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= TIMEOUT_S:
        raise InvalidRequest(
            f"{where}: options.timeout_s={short_repr(timeout_s)} must be a number of seconds, more than 0 and at most "
            f"{TIMEOUT_S:g}"
        )
    env = group.options.get("env", {})
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise InvalidRequest(f"{where}: options.env={short_repr(env)} must be a table of strings")
    try:
        for name, value in env.items():
            check_variable(name, value)
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: options.env: {error}") from error
    words = {verb: _command_words(where, verb, group.options.get(verb)) for verb in _VERBS}
    return CommandConfig(**words, timeout_s=float(timeout_s), env=env)


def _command_words(where: str, verb: str, value: Any) -> tuple[str, ...]:
    # One string is a line for the shell, a list is run without one: no word of it can be read as syntax.
    words = ["/bin/sh", "-c", value] if isinstance(value, str) and value.strip() else value
    if isinstance(words, list) and words and all(isinstance(word, str) and "\0" not in word for word in words):
        return tuple(words)
    raise InvalidRequest(
        f'{where}: options.{verb}={short_repr(value)}: write a command, {verb} = ["/opt/lab/machines", "{verb}"]'
    )


@define(eq=False)
class CommandProvider:
    """Provider of all groups of kind ``command``.

    Args:
        cluster_id: passed to each command as FRAY_CLUSTER; machines must be labelled with it. Names of machines contain
            its beginning.

    Raises:
        InvalidRequest: invalid options.
    """

    cluster_id: str
    groups: Sequence[GroupConfig]
    _commands: dict[str, CommandConfig] = field(factory=dict, init=False)
    _foreign: frozenset[str] = field(default=frozenset(), init=False)
    """Machines in the last list that are not this cluster's."""

    def __attrs_post_init__(self) -> None:
        self.update_groups(self.groups)

    def update_groups(self, groups: Sequence[GroupConfig]) -> None:
        """Apply a changed policy. Commands of groups that are gone are kept: their machines must be deleted.

        Raises:
            InvalidRequest: invalid options; nothing is changed.
        """
        # Read completely before anything is assigned: an invalid option changes nothing.
        self._commands |= {group.name: read_options(group) for group in groups if group.provider == "command"}
        self.groups = groups

    async def create(self, request: MachineRequest) -> None:
        commands = self._config_of(request.group.name)
        group, zone = request.group, request.zone
        variables = {
            "FRAY_MACHINE": request.name,
            "FRAY_GROUP": group.name,
            "FRAY_ZONE": zone,
            "FRAY_SPOT": "1" if request.spot else "",
            "FRAY_HOSTS": str(group.hosts),
            "FRAY_TPU": group.tpu,
            "FRAY_CONTROLLER": request.join.address,
            "FRAY_JOIN_TOKEN": request.join.token,
            "FRAY_NODE_CONFIG": _node_config(request),
        }
        await self._run(commands.create, commands, variables)

    async def delete(self, name: str, zone: str, group: str) -> None:
        commands = self._config_of(group)
        await self._run(commands.delete, commands, {"FRAY_MACHINE": name, "FRAY_GROUP": group, "FRAY_ZONE": zone})

    async def list(self) -> Sequence[SeenMachine]:
        """List all groups. Groups with the same list command share one call."""
        groups_by_command: dict[tuple[str, ...], tuple[CommandConfig, list[str]]] = {}
        for name, commands in self._commands.items():
            groups_by_command.setdefault(commands.list, (commands, []))[1].append(name)
        seen: dict[str, SeenMachine] = {}
        for words, (commands, groups) in groups_by_command.items():
            # One failed command fails the whole list: a partial one would declare the other groups' machines dead.
            text = await self._run(words, commands, {"FRAY_GROUP": groups[0] if len(groups) == 1 else ""})
            seen |= {machine.name: machine for machine in _parse_machines(text)}
        return tuple(self._own_machines(seen))

    def _own_machines(self, seen: Mapping[str, SeenMachine]) -> Iterator[SeenMachine]:
        """Yield this cluster's machines. The others are logged once."""
        # See the module: names decide which machines are ours, not what the script prints.
        mark = cluster_mark(self.cluster_id)
        own_units = {name: group for name in seen if (group := group_of_unit_name(name, mark))}
        foreign = frozenset(seen.keys() - own_units)
        if foreign - self._foreign:
            few = ", ".join(short_repr(name) for name in islice(sorted(foreign), 5))
            _log.warning(
                "ignoring machines that this cluster has not created",
                extra={"machines": len(foreign), "names": few, "label": self.cluster_id},
            )
        self._foreign = foreign
        for name, group in own_units.items():
            yield evolve(seen[name], group=group)

    async def aclose(self) -> None:
        pass

    def _config_of(self, group: str) -> CommandConfig:
        if group not in self._commands:
            raise ProviderError(
                ErrorKind.INVALID,
                f"no commands for group {group!r}: restore it in the policy with max = 0 until it is empty",
            )
        return self._commands[group]

    async def _run(self, words: tuple[str, ...], commands: CommandConfig, variables: Mapping[str, str]) -> str:
        """Run a command and return its stdout. Raises ProviderError."""
        env = {**os.environ, **commands.env, **variables, "FRAY_CLUSTER": self.cluster_id}
        # Scripts hand their environment on to machines and logs; a join token is all that a machine needs.
        env.pop("FRAY_TOKEN", None)
        try:
            process = await trio.lowlevel.open_process(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
                # A process group of its own, so that everything the command has started can be killed with it.
                start_new_session=True,
            )
        except OSError as error:
            raise ProviderError(ErrorKind.INVALID, f"cannot run {words[0]}: {error}") from error
        try:
            return await _finish(process, words, commands.timeout_s)
        finally:
            _kill_all(process)
            # Shielded, as it also runs after cancellation: without the wait, zombies would pile up. Bounded, since a
            # process in an uninterruptible wait does not die.
            with trio.move_on_after(REAP_S, shield=True):
                await process.wait()


@define
class _CommandOutput:
    """Output of a command: all of stdout, the end of stderr."""

    out: bytearray = field(factory=bytearray)
    err: bytearray = field(factory=bytearray)
    is_endless: bool = False
    """True if it has printed more than the limit, on either."""


async def _finish(process: trio.Process, words: Sequence[str], timeout_s: float) -> str:
    output = _CommandOutput()
    with trio.move_on_after(timeout_s) as scope:
        await _listen(process, output)
    text = output.err.decode(errors="replace").strip()[-MESSAGE_LIMIT_CHARS:]
    # First, since reading was cancelled, and the exit code would say SIGKILL.
    if output.is_endless:
        raise ProviderError(ErrorKind.TRANSIENT, f"{words[0]} printed more than {OUTPUT_LIMIT_BYTES} bytes")
    if scope.cancelled_caught:
        raise ProviderError(
            ErrorKind.TRANSIENT, f"{words[0]} took longer than {timeout_s:g} s" + (f": {text}" if text else "")
        )
    code = process.returncode
    if code:
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        raise ProviderError(KINDS.get(code, ErrorKind.TRANSIENT), f"{words[0]}: {text or how}")
    try:
        return output.out.decode()
    except UnicodeDecodeError as error:
        raise ProviderError(ErrorKind.TRANSIENT, f"the output of {words[0]} is not valid UTF-8: {error}") from error


async def _listen(process: trio.Process, output: _CommandOutput) -> None:
    """Read until the command has ended and its output is read, or it has printed too much."""
    async with trio.open_nursery() as nursery:

        async def take(stream: trio.abc.ReceiveStream | None, into: bytearray, keep_bytes: int) -> None:
            assert stream is not None
            size = 0
            async with stream:
                async for chunk in stream:
                    size += len(chunk)
                    into += chunk
                    # The end is kept, where programs write their errors.
                    del into[:-keep_bytes]
                    if size > OUTPUT_LIMIT_BYTES:
                        output.is_endless = True
                        nursery.cancel_scope.cancel()

        nursery.start_soon(take, process.stdout, output.out, OUTPUT_LIMIT_BYTES + 1)
        nursery.start_soon(take, process.stderr, output.err, 4 * MESSAGE_LIMIT_CHARS)
        await process.wait()
        # A background process that the command leaves behind holds the pipes open for as long as it runs.
        nursery.cancel_scope.deadline = trio.current_time() + LATE_OUTPUT_S


def _kill_all(process: trio.Process) -> None:
    """Kill what is left in its process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _parse_machines(text: str) -> Iterator[SeenMachine]:
    """Parse the output of a list command.

    Raises:
        ProviderError: it is not an array of machines.
    """
    if not text.strip():
        raise ProviderError(
            ErrorKind.TRANSIENT,
            "`list` printed nothing; print [] if there are no machines",
        )
    try:
        machines = json.loads(text)
        if not isinstance(machines, list):
            raise TypeError("not an array")
        for one in machines:
            yield _parse_machine(one)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ProviderError(
            ErrorKind.TRANSIENT,
            f"`list` did not print a JSON array of machines like "
            f'{{"name": "…", "zone": "…", "state": "running"}}: {short_repr(error, 200)}',
        ) from error


def _parse_machine(one: Any) -> SeenMachine:
    """Parse one machine.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it is invalid.
    """
    name, zone, hosts = one["name"], one.get("zone") or "", one.get("hosts", 1)
    if not isinstance(name, str) or not isinstance(zone, str) or len(zone) > ZONE_LIMIT_CHARS:
        raise TypeError(f"name and zone must be short strings: {short_repr(one)}")
    if type(hosts) is not int or not 0 <= hosts <= HOSTS_LIMIT:
        raise ValueError(f"hosts={short_repr(hosts)} must be 0 to {HOSTS_LIMIT}")
    return SeenMachine(
        name=name,
        group="",  # the name determines it
        zone=zone,
        state=MachineState(str(one.get("state", "running")).lower()),
        hosts=hosts,
        message=str(one.get("message") or "")[:MESSAGE_LIMIT_CHARS],
    )


def _node_config(request: MachineRequest) -> str:
    """Return a file for ``fray-node --config``, without ``name`` and the attribute ``tpu_worker`` of slices."""
    attributes = request.group.node_attributes(request.zone, request.name)
    lines = [f"controller = {json.dumps(request.join.address)}", "[attributes]"]
    if request.group.hosts > 1:
        attributes.pop("tpu_worker", None)
    return (
        "\n".join([*lines, *(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in attributes.items())]) + "\n"
    )
