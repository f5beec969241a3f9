"""Machines of any cloud, through the lab's own commands: ``create``, ``delete`` and ``list`` (see docs/autoscaling.md).

Law. A command is run by itself, without a shell unless it is written as one line, with `VARIABLES` in its environment.
Exit code 0 is success. Any other is an error, whose kind is in `KINDS` and whose message is the end of stderr. ``list``
prints a JSON array on stdout. A command that takes longer than ``timeout_s`` is killed with all it started.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import trio
from attrs import define, field, frozen

from fray.controller.providers.base import MachineRequest, ProviderError
from fray.errors import InvalidRequest
from fray.model.fleet import ErrorKind, GroupConfig, MachineState, SeenMachine

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
"""Exit codes as in sysexits.h; every other one is TRANSIENT."""
TIMEOUT_S = 120.0
MESSAGE_LIMIT_CHARS = 500
OUTPUT_LIMIT_BYTES = 16 * 1024 * 1024
_VERBS = ("create", "delete", "list")


@frozen
class Commands:
    """What a group's ``options`` come to."""

    create: tuple[str, ...]
    delete: tuple[str, ...]
    list: tuple[str, ...]
    timeout_s: float = TIMEOUT_S
    env: dict[str, str] = field(factory=dict)


def read_options(group: GroupConfig) -> Commands:
    """Raises InvalidRequest: a command is missing, or an option is unknown or of another type."""
    where = f"[[group]] {group.name!r}"
    unknown = sorted(group.options.keys() - {*_VERBS, "timeout_s", "env"})
    if unknown:
        raise InvalidRequest(f"{where}: unknown option {unknown[0]!r}; there are create, delete, list, timeout_s, env")
    timeout_s = group.options.get("timeout_s", TIMEOUT_S)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise InvalidRequest(f"{where}: options.timeout_s={timeout_s!r} must be a number of seconds, more than 0")
    env = group.options.get("env", {})
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise InvalidRequest(f"{where}: options.env={env!r} must be a table of texts")
    words = {verb: _words(where, verb, group.options.get(verb)) for verb in _VERBS}
    return Commands(**words, timeout_s=float(timeout_s), env=env)


def _words(where: str, verb: str, told: Any) -> tuple[str, ...]:
    if isinstance(told, str) and told.strip():
        return ("/bin/sh", "-c", told)
    if isinstance(told, list) and told and all(isinstance(word, str) for word in told):
        return tuple(told)
    raise InvalidRequest(f'{where}: options.{verb}={told!r}: write a command, {verb} = ["/opt/lab/machines", "{verb}"]')


@define(eq=False)
class CommandProvider:
    """Provider of all groups of kind ``command``.

    Args:
        cluster_id: given to each command as FRAY_CLUSTER: machines must be labelled with it.

    Raises:
        InvalidRequest: options that cannot be.
    """

    cluster_id: str
    groups: Sequence[GroupConfig]
    _commands: dict[str, Commands] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.regroup(self.groups)

    def regroup(self, groups: Sequence[GroupConfig]) -> None:
        """Commands of groups that are gone are kept: their machines must be given back.

        Raises:
            InvalidRequest: options that cannot be; nothing is changed.
        """
        self._commands |= {group.name: read_options(group) for group in groups if group.provider == "command"}
        self.groups = groups

    async def create(self, request: MachineRequest) -> None:
        commands = self._of(request.group.name)
        group, zone = request.group, request.zone
        told = {
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
        await self._run(commands.create, commands, told)

    async def delete(self, name: str, zone: str, group: str) -> None:
        commands = self._of(group)
        await self._run(commands.delete, commands, {"FRAY_MACHINE": name, "FRAY_GROUP": group, "FRAY_ZONE": zone})

    async def list(self) -> Sequence[SeenMachine]:
        """Groups that have one list command are asked by one call."""
        found: dict[str, SeenMachine] = {}
        asked: dict[tuple[str, ...], tuple[Commands, list[str]]] = {}
        for name, commands in self._commands.items():
            asked.setdefault(commands.list, (commands, []))[1].append(name)
        for words, (commands, groups) in asked.items():
            text = await self._run(words, commands, {"FRAY_GROUP": groups[0] if len(groups) == 1 else ""})
            found |= {seen.name: seen for seen in _read(text, groups[0])}
        return tuple(found.values())

    async def aclose(self) -> None:
        pass

    def _of(self, group: str) -> Commands:
        if group not in self._commands:
            raise ProviderError(
                ErrorKind.INVALID,
                f"no command is known for group {group!r}: put it back into the policy with max = 0 until it is empty",
            )
        return self._commands[group]

    async def _run(self, words: tuple[str, ...], commands: Commands, told: Mapping[str, str]) -> str:
        """Its stdout. Raises ProviderError."""
        env = {**os.environ, **commands.env, **told, "FRAY_CLUSTER": self.cluster_id}
        env.pop("FRAY_TOKEN", None)
        try:
            process = await trio.lowlevel.open_process(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
                start_new_session=True,
            )
        except OSError as error:
            raise ProviderError(ErrorKind.INVALID, f"{words[0]} cannot be run: {error}") from error
        try:
            return await _finish(process, words, commands.timeout_s)
        finally:
            _kill_all(process)


async def _finish(process: trio.Process, words: Sequence[str], timeout_s: float) -> str:
    out, err = bytearray(), bytearray()
    with trio.move_on_after(timeout_s) as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_take, process.stdout, out)
            nursery.start_soon(_take, process.stderr, err)
            await process.wait()
    said = err.decode(errors="replace").strip()[-MESSAGE_LIMIT_CHARS:]
    if scope.cancelled_caught:
        raise ProviderError(
            ErrorKind.TRANSIENT, f"{words[0]} took longer than {timeout_s:g} s" + (f": {said}" if said else "")
        )
    code = process.returncode
    if code:
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        raise ProviderError(KINDS.get(code, ErrorKind.TRANSIENT), f"{words[0]}: {said or how}")
    if len(out) > OUTPUT_LIMIT_BYTES:
        raise ProviderError(ErrorKind.TRANSIENT, f"{words[0]} prints more than {OUTPUT_LIMIT_BYTES} bytes")
    return out.decode(errors="replace")


async def _take(stream: trio.abc.ReceiveStream | None, into: bytearray) -> None:
    """All of it; what is over the limit is read and dropped."""
    assert stream is not None
    async for chunk in stream:
        if len(into) <= OUTPUT_LIMIT_BYTES:
            into += chunk


def _kill_all(process: trio.Process) -> None:
    """Whatever is left of it and below it, in its process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _read(text: str, group: str) -> Iterator[SeenMachine]:
    """Raises ProviderError: it is no array of machines."""
    try:
        told = json.loads(text or "[]")
        if not isinstance(told, list):
            raise TypeError("it is no array")
        for one in told:
            yield SeenMachine(
                name=str(one["name"]),
                group=str(one.get("group") or group),
                zone=str(one.get("zone") or ""),
                state=MachineState(str(one.get("state", "running")).lower()),
                hosts=int(one.get("hosts", 1)),
                message=str(one.get("message") or ""),
            )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ProviderError(
            ErrorKind.TRANSIENT,
            f"what list prints is no JSON array of machines like "
            f'{{"name": "…", "group": "…", "zone": "…", "state": "running"}}: {error!r}',
        ) from error


def _node_config(request: MachineRequest) -> str:
    """For ``fray-node --config``, but for ``name`` and the attribute ``tpu_worker`` of slices."""
    attributes = request.group.node_attributes(request.zone, request.name)
    lines = [f"controller = {json.dumps(request.join.address)}", "[attributes]"]
    if request.group.hosts > 1:
        attributes.pop("tpu_worker", None)
    return (
        "\n".join([*lines, *(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in attributes.items())]) + "\n"
    )
